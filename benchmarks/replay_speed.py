"""How true the figures of a load generator are, against the stamps of the server that it loads.

A source answers every request with a first token, then events at a steady rate and one longer gap in the middle, and
stamps what it did. The client says what it saw; per request the error is the client's figure minus the source's. Lag is
of the arrivals at the source behind the grid of the asked rate, from the arrival that was earliest against it, so it is
measured in the same way whoever sends; `own_lag` is what sloscope says of its sends. `source_late` is how far behind
its own grid the source sent the worst event of each request: where that is long, the machine was busy. Sides take
turns; medians of the rounds.

`accuracy`: 50 requests/s of 4 s and 50 events/s, so 200 streams are open. `capacity`: 500 requests/s of 4 s and 10
events/s, so 2,000 are open; sloscope alone, unless `--peers-at-capacity`. `sloscope replay` has one core, the source
another, both before all other work of the machine; peers have all cores, where they go before others by niceness. They
run from installations of their own, named by their interpreters:
`--aiperf-python PATH --guidellm-python PATH --inference-perf-python PATH`.

`python -m benchmarks.replay_speed`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept import options_of, save
from benchmarks.sidecar_speed import on_core
from benchmarks.streaming import proxies
from benchmarks.streaming.clients import MS, WORDS, Client, Load, Run, Seen, aiperf, guidellm, inference_perf
from sloscope.definitions import nearest_rank
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.output import FORMATS, message, print_rows

Row = dict[str, Any]


ACCURACY = Load("accuracy", 50, 200, 50, 60)
CAPACITY = Load("capacity", 500, 40, 10, 0)
PEERS = {"aiperf": aiperf, "guidellm": guidellm, "inference-perf": inference_perf}


SAID = "said.json"  # what sloscope printed


class Truth(NamedTuple):
    arrived_ns: int
    ttft_ns: int
    gap_ns: int
    late_ns: float  # behind the source's own grid, its worst event


def sloscope(core: int | None) -> Client:
    def run(url: str, load: Load, requests: int, folder: Path) -> list[Seen]:
        trace = f"synthetic:constant?rate={load.rate}&n={requests}&prompt_p50=8&output_p50={load.events}&output_sigma=0"
        command = [
            sys.executable, "-m", "sloscope", "replay", trace, "--url", url, "--events", str(folder / "events"),
            "--goodput", "ttft:300", "--drain", "30s", "--lengths", "capped", "--format", "json",
        ]  # fmt: skip
        with first_on(core):
            done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr[-500:]
        (folder / SAID).write_text(done.stdout)
        sent: dict[str, int] = {}
        stamps: dict[str, list[int]] = {}
        for path in journal_files(folder / "events"):
            for record in read_journal(Tail(path)):
                if record["kind"] == "begin":
                    sent[record["request_id"]] = record["send_ns"]
                elif record["kind"] == "chunks":
                    stamps.setdefault(record["request_id"], []).extend(record["t_ns"])
        return [Seen(key, times[0] - sent[key], largest(times)) for key, times in stamps.items()]

    return Client(f"sloscope {version('sloscope')}", run)


def largest(stamps: Sequence[int]) -> int | None:
    return max((after - before for before, after in pairwise(stamps)), default=None)


def late(row: Row, load: Load) -> float:
    """Of the source's stamps of one answer; ns."""
    due_ns = row["arrived_ns"] + load.ttft_ms * MS
    worst, events = 0.0, len(row["sent_ns"])
    for number, sent_ns in enumerate(row["sent_ns"]):
        pause_ns = load.pause_ms * MS if events - number <= events // 2 else 0
        worst = max(worst, sent_ns - due_ns - pause_ns - number * 1e9 / load.events_per_s)
    return worst


def measure(client: Run, load: Load, seconds: float, core: int | None) -> Row:
    requests = load.requests(seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "stamps.jsonl"
        options = ["--log", str(log), "--ttft-ms", str(load.ttft_ms), "--pause-ms", str(load.pause_ms)]
        with ExitStack() as stack:
            with first_on(core):
                url = stack.enter_context(proxies.source(load.events, load.events_per_s, *options))
            seen = client(url, load, requests, folder)
        said = json.loads((folder / SAID).read_text()) if (folder / SAID).exists() else None
        truth: dict[str, Truth] = {}
        for line in log.read_text().splitlines():
            row = json.loads(line)
            sent = row["sent_ns"]
            told = Truth(row["arrived_ns"], sent[0] - row["arrived_ns"], largest(sent) or 0, late(row, load))
            truth[row["id"]] = truth[row["response"]] = told
    arrived = sorted({id(told): told.arrived_ns for told in truth.values()}.values())
    behind = [stamp - round(number * 1e9 / load.rate) for number, stamp in enumerate(arrived)]
    joined = [(each, truth[each.key]) for each in seen if each.key in truth]
    assert joined, "no request of the client is known to the source"
    return {
        "offered": requests,
        "answered": len(arrived),
        "ttft_p99_ms": p99(each.ttft_ns for each, _ in joined),
        "true_ttft_p99_ms": p99(told.ttft_ns for _, told in joined),
        "ttft_error_p99_ms": p99(abs(e.ttft_ns - told.ttft_ns) for e, told in joined if e.ttft_ns is not None),
        "gap_p99_ms": p99(each.gap_ns for each, _ in joined),
        "true_gap_p99_ms": p99(told.gap_ns for _, told in joined),
        "gap_error_p99_ms": p99(abs(e.gap_ns - told.gap_ns) for e, told in joined if e.gap_ns is not None),
        "arrival_lag_p99_ms": p99(stamp - min(behind) for stamp in behind),
        "own_lag_p99_ms": said[0]["dispatch_lag_p99_s"] * 1e3 if said is not None else None,
        "source_late_p99_ms": p99(told.late_ns for _, told in joined),
    }


@contextmanager
def first_on(core: int | None) -> Iterator[None]:
    """Children that are started within run there, and whatever else wants that core waits.

    Niceness does not do that: a fair scheduler lets who has the core keep it for milliseconds.
    """
    with on_core(core):
        if core is None:
            yield
            return
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            message("no right to real-time priority: other work on this machine is measured too")
        try:
            yield
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def go_before_others() -> None:
    """Source and clients alike: what else runs on the machine is not what is measured."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    except PermissionError:
        message("niceness stays as it is: without the right to lower it, other work on this machine is measured too")


def p99(values_ns: Iterator[float | None] | Any) -> float | None:
    ordered = sorted(value for value in values_ns if value is not None)
    return ordered[nearest_rank(990, len(ordered)) - 1] / MS if ordered else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=["accuracy", "capacity"], choices=["accuracy", "capacity"])
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals (default: 15)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    for name in PEERS:
        parser.add_argument(f"--{name}-python", type=Path, metavar="PATH", help=f"interpreter with {name} installed")
    parser.add_argument("--tokenizer", default=WORDS, help=f"of the peers, cached (default: {WORDS}, made here)")
    parser.add_argument("--peers-at-capacity", action="store_true", help="load them with 2,000 streams too")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    go_before_others()
    cores = sorted(os.sched_getaffinity(0))
    own: tuple[int | None, int | None] = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    peers: dict[str, Client] = {}
    for name, peer in PEERS.items():
        if (python := getattr(asked, f"{name.replace('-', '_')}_python")) is not None:
            try:
                peers[name] = peer(python.absolute(), asked.tokenizer)
            except argparse.ArgumentTypeError as problem:
                parser.error(f"--{name}-python: {problem}")
    rows = []
    for load in (ACCURACY, CAPACITY):
        if load.name not in asked.loads:
            continue
        sides = {"sloscope": sloscope(own[1])}
        if load is ACCURACY or asked.peers_at_capacity:
            sides |= peers
        found: dict[str, list[Row]] = {name: [] for name in sides}
        for number in range(asked.rounds):
            for name, client in sides.items():
                found[name].append(measure(client.run, load, asked.seconds, own[0]))
            message(f"{load.name}: round {number + 1} of {asked.rounds}")
        for name, measured in found.items():
            row: Row = {"load": load.name, "side": name, "version": sides[name].version}
            for column in measured[0]:
                values = [each[column] for each in measured if each[column] is not None]
                row[column] = round(statistics.median(values), 2) if values else None
            rows.append(row)
    print_rows(rows, asked.format, title=f"{asked.seconds:g} s of arrivals, medians of {asked.rounds} rounds")
    save(asked.save, "replay_speed", {"rows": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
