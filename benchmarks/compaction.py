"""Compaction against a plain decode of the same files: receipts a second, and bytes a receipt by table.

The directory is made up: every request is recorded by client, sidecar and engine on one clock, in batches as the
recorders write them. The floor is `orjson.loads` of every line. Both sides take turns in one run, and the medians
count. `python -m benchmarks.compaction --requests 5000 --events 100 --runs 3`; with `--before DIR` (`git archive` of
another commit, unpacked) that version takes turns, too.

Every gap is near 20 ms, as at the 50 tokens a second of which the goals speak, so that each receipt of client and
sidecar ends a late gap: the largest `late_gaps` there can be. Jitter is drawn evenly and anew for each stamp, which no
encoding foresees.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from benchmarks.kept import options_of, save
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter, journal_files
from sloscope.output import print_rows
from sloscope.records import make

MS = 1_000_000
WALL_NS = 1_700_000_000_000_000_000
BATCH = 25  # events in a record: half a second at 50 a second
ARRIVALS_EVERY_NS = 5 * MS


def write_journals(events: Path, requests: int, per_request: int, seed: int) -> int:
    """Arrivals every 5 ms, a step every 20 ms with a few hundred µs of jitter. Returns the receipts written."""
    drawn = random.Random(seed)
    clocks = {observer: FakeClock(wall_ns=WALL_NS, clock_id="bench:0:0") for observer in records.OBSERVERS}
    writers = {o: JournalWriter(events, o, clocks[o], encode=orjson.dumps) for o in records.OBSERVERS}
    lines: list[tuple[int, str, records.Record]] = []  # stamp, observer, record
    for number in range(requests):
        request_id = new_request_id(WALL_NS + number * ARRIVALS_EVERY_NS, drawn.randbytes(10))
        lines += _request(request_id, number * ARRIVALS_EVERY_NS, per_request, drawn)
    lines.sort(key=lambda line: line[:2])
    for stamp, observer, record in lines:
        clocks[observer].mono = stamp
        writers[observer].append(record)
        if writers[observer].buffered >= 100:
            writers[observer].flush()
    for writer in writers.values():
        writer.close()
    return requests * per_request * len(writers)


def _request(
    request_id: str, start_ns: int, per_request: int, drawn: random.Random
) -> list[tuple[int, str, records.Record]]:
    computed = [start_ns + 80 * MS + n * 20 * MS + drawn.randrange(400_000) for n in range(per_request)]
    handed = [stamp + 20_000 + drawn.randrange(30_000) for stamp in computed]
    written = [stamp + 60_000 + drawn.randrange(90_000) for stamp in handed]
    upstream = [stamp + 50_000 + drawn.randrange(100_000) for stamp in written]
    forwarded = [stamp + 15_000 + drawn.randrange(20_000) for stamp in upstream]
    received = [stamp + 50_000 + drawn.randrange(100_000) for stamp in forwarded]
    lines = []
    for observer, last in (("client", received[-1]), ("sidecar", upstream[-1]), ("engine", written[-1])):
        start = {"send_ns" if observer == "client" else "arrived_ns": start_ns}
        about = {"class_": "interactive", "model": "m", "streaming": True, "n_choices": 1, "max_tokens": 512}
        begin = make("begin", request_id=request_id, observer=observer, clock_id="bench:0:0", **start, **about)
        lines.append((start_ns, observer, begin))
        said = {"outcome": "completed", "reason": "", "finish_reason": ["stop"], "http_status": 200}
        tokens = {"output_tokens": per_request, "token_source": "usage", "prompt_tokens": 64}
        lines.append((last + MS, observer, make("end", request_id=request_id, end_ns=last + MS, **said, **tokens)))
    for first in range(0, per_request, BATCH):
        part = slice(first, first + BATCH)
        size = len(computed[part])
        same = {"request_id": request_id, "ordinal0": first, "choice": [0] * size}
        kinds = {"type": [0] * size}
        lines.append((received[part][-1], "client", make("chunks", **same, **kinds, t_ns=received[part])))
        both = {"t_ns": upstream[part], "forwarded_ns": forwarded[part]}
        lines.append((forwarded[part][-1], "sidecar", make("chunks", **same, **kinds, **both)))
        made = {"computed_ns": computed[part], "handed_ns": handed[part], "written_ns": written[part]}
        counted = {"cum_tokens": list(range(first + 1, first + 1 + size))}
        lines.append((written[part][-1], "engine", make("emit", **same, **made, **counted)))
    return lines


def plain_decode(events: Path) -> None:
    for path in journal_files(events):
        with open(path, "rb") as file:
            for line in file:
                orjson.loads(line)


# In a process of its own, so that either version can be timed: wall and CPU seconds of all threads, bytes by table.
_ONE_PASS = """
import json, shutil, sys, time
from pathlib import Path
from queries.compaction import compact
events = Path(sys.argv[1])
shutil.rmtree(events / "tables", ignore_errors=True)
(events / "manifest.json").unlink(missing_ok=True)
began, cpu = time.perf_counter(), time.process_time()
compact(events)
taken = time.perf_counter() - began, time.process_time() - cpu
tables = [path for path in (events / "tables").iterdir() if path.is_dir()]
print(json.dumps([taken, {t.name: sum(p.stat().st_size for p in t.rglob("*.parquet")) for t in sorted(tables)}]))
"""


def compact_once(checkout: Path, events: Path) -> tuple[tuple[float, float], dict[str, int]]:
    command = [sys.executable, "-c", _ONE_PASS, str(events)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    (wall, cpu), sizes = json.loads(done.stdout)
    return (wall, cpu), sizes


def timed(work: Callable[[Path], object], events: Path) -> tuple[float, float]:
    """Wall seconds and CPU seconds, of all threads."""
    began, cpu = time.perf_counter(), time.process_time()
    work(events)
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="(default: 5000)")
    parser.add_argument("--events", type=int, default=100, help="output events of each request (default: 100)")
    parser.add_argument("--runs", type=int, default=3, help="(default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="another checkout, whose compaction takes turns with this one's"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args()
    versions = {"compaction": Path.cwd()} | ({"compaction before": asked.before} if asked.before else {})
    folder = Path(tempfile.mkdtemp(prefix="sloscope-compaction-"))
    try:
        receipts = write_journals(folder, asked.requests, asked.events, asked.seed)
        journal = sum(path.stat().st_size for path in journal_files(folder))
        floor = "plain decode (floor)"
        taken: dict[str, list[tuple[float, float]]] = {floor: []} | {version: [] for version in versions}
        bytes_of: dict[str, dict[str, int]] = {}
        for _ in range(asked.runs):
            taken[floor].append(timed(plain_decode, folder))
            for version, checkout in versions.items():
                took, bytes_of[version] = compact_once(checkout, folder)
                taken[version].append(took)
        rows: list[dict[str, object]] = []
        for what, times in taken.items():
            wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
            each = {"receipts_per_s": round(receipts / wall), "receipts_per_cpu_s": round(receipts / cpu)}
            rows.append({"what": what, "wall_s": round(wall, 3), "cpu_s": round(cpu, 3), **each})
        print_rows(rows, title=f"medians of {asked.runs} runs, {receipts} receipts")
        sizes = [_size("journal", "-", journal, receipts)]
        for version, tables in bytes_of.items():
            whole = tables | {"all tables": sum(tables.values())}
            sizes += [_size(version, table, size, receipts) for table, size in whole.items()]
        print_rows(sizes)
        save(asked.save, "compaction", {"rows": rows, "sizes": sizes}, receipts=receipts, **options_of(asked))
    finally:
        shutil.rmtree(folder)


def _size(version: str, table: str, size: int, receipts: int) -> dict[str, object]:
    return {"what": version, "table": table, "bytes": size, "bytes_per_receipt": round(size / receipts, 2)}


if __name__ == "__main__":
    main()
