"""What a client that never reads does to those who do: `--max-undelivered` off and on.

Some clients read long answers as they come, and their largest gap is what they saw themselves. Every second round has
one more client, which asks for a longer answer and never reads a byte: the others begin when it is as far behind as the
window allows. With a window its sequence pauses there. Without one (0) it is computed to its end. In both it is cut off
when it has taken nothing for `--slow-reader-after`, without a window by the front end once all is computed.

Gaps are medians over the rounds of the largest gap of any reader. Of the client that never reads: `computed` tokens and
the `kv_blocks` that they fill, each a median; `kv_held_s`, the mean time for which it held KV; `undelivered` tokens, at
most, as seen at /metrics; and how it ended. `python -m benchmarks.slow_reader`.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.kept import options_of, save
from benchmarks.served import Row, positive, questions, rounded, run, served, served_options, stays
from reference_server.kv_blocks import BLOCK_TOKENS
from sloscope.client import ReceiptTransport
from sloscope.contract import Contract, parse
from sloscope.ids import new_request_id
from sloscope.output import print_rows

READER, NON_READER = "reader", "non_reader"
# Limits are not what is asked about; classes tell the two apart.
CONTRACT = f"""
version = 1
default_class = "{READER}"
[classes.{READER}]
e2e = "600s"
[classes.{NON_READER}]
e2e = "600s"
"""
RECEIVE_BUFFER = 2048  # bytes: small, so that the kernel hides few tokens
PATIENCE_S = 60
UNDELIVERED = "sloscope_engine_undelivered_tokens"
ALONE, BESIDE = "alone", "beside"


class NonReader:
    """One streaming request on a socket that nothing is read from."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self.request_id = new_request_id()
        body = json.dumps({"model": model, "prompt": "the river", "max_tokens": max_tokens, "stream": True})
        headers = {
            "host": "x",
            "content-length": str(len(body)),
            "x-sloscope-request-id": self.request_id,
            "x-slo-class": NON_READER,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self._socket.connect((host, int(port)))
        self._socket.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{body}".encode())

    def close(self) -> None:
        self._socket.close()


class Server:
    """One to which the readers come, and every second time the one that never reads."""

    def __init__(self, asked: argparse.Namespace, url: str, client: httpx.Client) -> None:
        self.silent: list[str] = []  # ids of those that never read
        self.undelivered = 0  # tokens, the most seen
        self._asked = asked
        self._url = url
        self._client = client

    def run_round(self, number: int) -> None:
        self._read_all(f"{ALONE}-{number}")
        silent = NonReader(self._url, self._asked.model, self._asked.silent_tokens)
        self.silent.append(silent.request_id)
        wait_until(lambda: self._behind() >= self._asked.window, "the client that never reads is not behind")
        self._read_all(f"{BESIDE}-{number}")
        wait_until(lambda: self._behind() == 0, "the client that never reads is not cut off")
        silent.close()

    def _read_all(self, name: str) -> None:
        with ThreadPoolExecutor(self._asked.readers) as pool:
            list(pool.map(self._read, [name] * self._asked.readers))

    def _read(self, name: str) -> None:
        asked = {"model": self._asked.model, "prompt": "the tree", "max_tokens": self._asked.tokens, "stream": True}
        headers = {"x-slo-class": READER, "x-request-id": name}
        self._client.post(f"{self._url}/v1/completions", json=asked, headers=headers).raise_for_status()

    def _behind(self) -> int:
        lines = self._client.get(f"{self._url}/metrics").text.splitlines()
        tokens = round(float(next(line.rpartition(" ")[2] for line in lines if line.startswith(UNDELIVERED))))
        self.undelivered = max(self.undelivered, tokens)
        return tokens


def wait_until(what: Callable[[], bool], else_say: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until_s, else_say
        time.sleep(0.05)


def run_servers(asked: argparse.Namespace, folder: Path, contract: Contract) -> dict[int, Server]:
    """By window. They take turns, so that a slow minute of the machine hits both."""
    promised = folder / "contract.toml"
    promised.write_text(CONTRACT, encoding="utf-8")
    with ExitStack() as stack:
        servers = {}
        for window in (0, asked.window):
            flow = ("--max-undelivered", str(window), "--slow-reader-after", asked.slow_reader_after)
            options = ("--contract", str(promised), *flow)
            url = stack.enter_context(served(asked, folder / f"{window}", *options))
            transport = ReceiptTransport(folder / f"{window}", contract)
            servers[window] = Server(asked, url, stack.enter_context(httpx.Client(transport=transport, timeout=60)))
        for number in range(asked.rounds):
            for server in servers.values():
                server.run_round(number)
    return servers


def row_of(window: int, events: Path, contract: Contract, server: Server) -> Row:
    with questions(events, contract, "client") as session:
        gaps = largest_gaps(session.run("requests").rows)
    with questions(events, contract, "engine") as session:
        ends = [row for row in session.run("requests").rows if row["request_id"] in server.silent]
        listed = ", ".join(f"'{request_id}'" for request_id in server.silent)
        steps = session.sql(
            "select request_id, count(*) as steps from step_requests "
            f"where role = 'decode' and request_id in ({listed}) group by request_id"
        ).rows
        (prompt,) = session.sql(
            f"select max(prompt_tokens) as tokens from requests where request_id in ({listed})"
        ).rows
        held = [stays(session, state, NON_READER) for state in ("PREFILL", "DECODE", "PAUSED")]
    # The first token comes from the prompt; the last one's KV is never written.
    decoded = statistics.median(row["steps"] for row in steps)
    kv_held_s = sum(row["total_s"] for row in held if row is not None) / len(server.silent)
    return {
        "max_undelivered": str(window) if window else "0 (off)",
        "gap_alone_ms": gaps[ALONE],
        "gap_beside_ms": gaps[BESIDE],
        "computed": round(decoded) + 1,
        "kv_blocks": -(-(prompt["tokens"] + round(decoded)) // BLOCK_TOKENS),
        "kv_held_s": round(kv_held_s, 2),
        "undelivered": server.undelivered,
        "ended": ", ".join(sorted({f"{row['outcome']}({row['reason']})" for row in ends})),
    }


def largest_gaps(requests: Sequence[Row]) -> dict[str, float | None]:
    """Milliseconds. Rows of `requests`, named by their round: of each round the largest, and of those the median."""
    worst: dict[str, dict[str, float]] = {ALONE: {}, BESIDE: {}}
    for row in requests:
        kind, _, number = (row["external_id"] or "").partition("-")
        if kind in worst and row["itl_max_s"] is not None:
            worst[kind][number] = max(worst[kind].get(number, 0.0), row["itl_max_s"])
    return {
        kind: rounded(statistics.median(found.values()) * 1e3 if found else None, 1) for kind, found in worst.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = served_options(__doc__)
    parser.add_argument("--readers", type=int, default=8, help="clients that read (default: 8)")
    parser.add_argument("--tokens", type=int, default=100, help="of their answers (default: 100)")
    parser.add_argument("--silent-tokens", type=int, default=1500, help="asked for and never read (default: 1500)")
    parser.add_argument("--window", type=int, default=256, help="--max-undelivered of the second server (default: 256)")
    parser.add_argument("--slow-reader-after", default="1s", help="of both servers (default: 1s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, in turns (default: 5)")
    asked = parser.parse_args(arguments)
    positive(parser, asked, "readers", "tokens", "silent_tokens", "window", "rounds")
    contract = parse(CONTRACT)
    with tempfile.TemporaryDirectory(prefix="sloscope-reader-") as name:
        folder = Path(name)
        servers = run_servers(asked, folder, contract)
        rows = [row_of(window, folder / f"{window}", contract, server) for window, server in servers.items()]
    title = f"{asked.readers} readers of {asked.tokens} tokens, without and beside one that never reads"
    print_rows(rows, asked.format, title=f"{title}; medians of {asked.rounds} rounds")
    save(asked.save, "slow_reader", {"real": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
