"""Where the sidecar's own microseconds go: the path of an event through its code, without sockets.

--streams responses are under way in a data plane whose connections write nowhere: what is left is the sidecar's code.
The steps follow each other in every round, as in service; figures are medians of the rounds, nanoseconds per event:

- forward: one read to its write, stamped three times and noted
- understand: what is noted becomes receipts. `alike`: events that differ in their text only, as nearly all servers send
  them; `changing`: each differs elsewhere, too, so that each is parsed
- batch: the receipts since the last batch, encoded for the journal's thread, counted in sloscope_sidecar_added_seconds

A loop over one step finds the processor's caches warm. In service two system calls lie between two events, and the same
code costs several times as much: `python -m benchmarks.sidecar_speed` has the whole cost, user and system time apart.

`python -m benchmarks.event_cost`
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.kept import options_of, save
from exporter.client_connection import ClientConnection
from exporter.data_plane import DataPlane
from exporter.settings import Settings
from exporter.upstream import UpstreamConnection
from sloscope.clock import SystemClock
from sloscope.output import FORMATS, print_rows

EVENTS_A_ROUND = 40  # of a stream: fewer than make it understand on its own
_BODY = b'{"model":"bench","messages":[{"role":"user","content":"the river"}],"stream":true}'
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b"
) % (len(_BODY), _BODY)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":%d,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" %020d"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Nowhere:
    """A transport that takes everything."""

    def write(self, data: bytes) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def set_protocol(self, protocol: object) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


def framed(changing: bool, number: int) -> bytes:
    event = _EVENT % (1_700_000_000 + (number if changing else 0), number)
    return b"%x\r\n%b\r\n" % (len(event), event)


async def opened(plane: DataPlane, streams: int) -> list[UpstreamConnection]:
    """The upstreams' ends of so many responses that have begun."""
    (pool,) = plane.upstreams.pools
    found = []
    for _ in range(streams):
        client, upstream = ClientConnection(plane), UpstreamConnection(pool)
        nowhere = cast(asyncio.Transport, Nowhere())
        upstream.connection_made(nowhere)
        pool.give_back(upstream)
        client.connection_made(nowhere)
        client.data_received(_REQUEST)
        found.append(upstream)
    while not all(upstream.attempt is not None and upstream.attempt.sent for upstream in found):
        await asyncio.sleep(0.01)
    for upstream in found:
        upstream.data_received(_HEAD)
    return found


def per_event_ns(work: Callable[[], object], events: int) -> float:
    began_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began_ns) / events


async def measure(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    settings = Settings(
        upstreams=("http://127.0.0.1:1",),
        contract="ttft:300 itl_max:30",
        contract_is_shorthand=True,
        events=str(folder),
        role="sidecar",
        tenant_header="x-slo-tenant",
        inspect_limit=1 << 20,
        drain_ns=0,
        max_label_values=50,
        ca_file="",
        socket_path="",
        sql_every_ns=0,
    )
    plane = DataPlane(settings, SystemClock(), asyncio.get_running_loop())
    upstreams = await opened(plane, asked.streams)
    observations = list(plane.watch.active.values())
    assert len(observations) == asked.streams
    events = asked.streams * EVENTS_A_ROUND
    gc.collect()
    gc.freeze()
    rows = []
    for kind in ("alike", "changing"):
        costs: dict[str, list[float]] = {"forward": [], "understand": [], "batch": []}
        number = 0
        for _ in range(asked.rounds):
            reads = [framed(kind == "changing", number + each) for each in range(EVENTS_A_ROUND)]
            number += EVENTS_A_ROUND

            def forward(reads: list[bytes] = reads) -> None:
                for read in reads:
                    for upstream in upstreams:
                        upstream.data_received(read)

            def understand() -> None:
                for each in observations:
                    each.understand()

            def batch() -> None:
                for each in observations:
                    each.flush()

            for name, work in (("forward", forward), ("understand", understand), ("batch", batch)):
                costs[name].append(per_event_ns(work, events))
            assert all(not each.reads for each in observations)
            await asyncio.sleep(0)
        rows.append({"events": kind, **{f"{name}_ns": round(statistics.median(each)) for name, each in costs.items()}})
    assert sum(each.events for each in observations) == 2 * asked.rounds * events
    plane.recorder.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100, help="(default: 100)")
    parser.add_argument("--rounds", type=int, default=25, help="(default: 25)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        rows = uvloop.run(measure(asked, Path(name)))
    print_rows(rows, asked.format, title=f"ns per event, {asked.streams} streams, medians of {asked.rounds} rounds")
    save(asked.save, "event_cost", {"rows": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
