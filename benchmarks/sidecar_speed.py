"""What the sidecar adds to every event, and what an event costs it, beside nginx, haproxy and other proxies.

A source streams through one proxy at a time to a sink; both stamp every event on one clock, so the delay is from the
source's write to the read that completed the event at the sink. Events of the measured seconds count, after the streams
have opened. Sides take turns in every round; figures are medians of the rounds, ratios medians of the ratios to nginx
within a round. CPU and memory are of all processes of a side (of the sidecar: supervisor, data plane and control plane,
which is scraped every --scrape-every; as `unscraped` it is not), CPU per event that reached the sink, `user` without
the kernel's part; `largest`: memory of the largest process, the sidecar's data plane. `recorded`: receipts in the
sidecar's journal for each event that the sink received. `lost`: events that had not come when the sink gave up, 5 s
after the last was due: a side that cannot keep up has some still in hand. `bare` writes on what it reads and looks at
nothing: the least that a proxy on this event loop costs. On a machine with two cores or more the proxy has one for
itself.

`python -m benchmarks.sidecar_speed --streams 100`; `--litellm-python PATH` adds the LiteLLM proxy of that installation.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kept import options_of, save
from benchmarks.streaming import proxies
from benchmarks.streaming.sink import KEY
from sloscope.definitions import nearest_rank
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.output import FORMATS, message, print_rows

Row = dict[str, Any]
Start = Callable[[str, Path], AbstractContextManager[proxies.Side]]
OPENING_S, SETTLING_S, AFTER_S = 1.0, 1.0, 5.0
REFERENCE = "nginx"
SIDECAR_PROCESSES = 3


def descendants(pid: int) -> list[int]:
    """`pid` and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


class Cpu(NamedTuple):
    """Seconds."""

    user: float
    system: float


def cpu(pids: Sequence[int]) -> Cpu:
    user = system = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, system = user + int(fields[11]), system + int(fields[12])
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return Cpu(user / ticks_per_s, system / ticks_per_s)


def resident_mib(pids: Sequence[int]) -> list[float]:
    """Proportional set size of each process: pages that processes share count once."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found.append(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024)
    return found


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Children that are started within run there."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Scraper(threading.Thread):
    """Prometheus, as far as the sidecar is concerned."""

    def __init__(self, url: str, every_s: float) -> None:
        super().__init__(daemon=True)
        self._url, self._every_s, self._over = url, every_s, threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url, timeout=5) as answer:
                answer.read()

    def stop(self) -> None:
        self._over.set()
        self.join()


def measure(start: Start, asked: argparse.Namespace, cores: tuple[int | None, int | None]) -> Row:
    """One side, once."""
    lead_s = OPENING_S + SETTLING_S
    events = round((lead_s + asked.seconds + AFTER_S / 2) * asked.rate)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        with on_core(cores[0]):
            url = stack.enter_context(proxies.source(events, asked.rate))
        with on_core(cores[1]):
            side = stack.enter_context(start(url, folder))
        asking = urllib.request.Request(f"{side.url}/v1/models", headers={"authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(asking, timeout=30) as answer:
            answer.read()
        pids = descendants(side.pid) if side.pid else []
        assert not side.control or len(pids) == SIDECAR_PROCESSES
        if side.control and side.is_scraped and asked.scrape_every:
            scraper = Scraper(f"{side.control}/metrics", asked.scrape_every)
            scraper.start()
            stack.callback(scraper.stop)
        out = folder / "received"
        patience_s = events / asked.rate + OPENING_S + AFTER_S
        options = ["--streams", str(asked.streams), "--seconds", str(patience_s)]
        with on_core(cores[0]):
            sink = subprocess.Popen([sys.executable, "-m", "benchmarks.streaming.sink", side.url, str(out), *options])
        began_ns = time.monotonic_ns() + round(lead_s * 1e9)
        time.sleep(lead_s)
        before = cpu(pids)
        time.sleep(asked.seconds)
        after, ended_ns = cpu(pids), time.monotonic_ns()
        memory_mib = resident_mib(pids)
        assert sink.wait() == 0, "the sink failed"
        rows = [line.split() for line in out.read_text().splitlines()]
        stack.close()  # what the sidecar still has to write is written
        recorded = receipts(proxies.events_of(folder)) if side.control else None
    delays_us = sorted((int(got) - int(sent)) / 1e3 for _, sent, got in rows if began_ns <= int(sent) < ended_ns)
    arrived = sum(began_ns <= int(got) < ended_ns for _, _, got in rows)
    assert delays_us, f"{side.name}: nothing came"
    return {
        "side": side.name,
        "version": side.version or None,
        "events_per_s": arrived / asked.seconds,
        "lost": asked.streams * events - len(rows),
        "delay_p50_us": delays_us[nearest_rank(500, len(delays_us)) - 1],
        "delay_p99_us": delays_us[nearest_rank(990, len(delays_us)) - 1],
        "cpu_us_per_event": (sum(after) - sum(before)) / arrived * 1e6 if pids else None,
        "user_us_per_event": (after.user - before.user) / arrived * 1e6 if pids else None,
        "memory_mib": sum(memory_mib) if pids else None,
        "largest_mib": max(memory_mib) if pids else None,
        "recorded": recorded / len(rows) if recorded is not None else None,
    }


def receipts(events: Path) -> int:
    """Of the journal of a sidecar that has ended."""
    return sum(
        len(record["t_ns"])
        for path in journal_files(events)
        if path.parent.name == "sidecar"
        for record in read_journal(Tail(path))
        if record["kind"] == "chunks"
    )


def summary(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """Medians by side, and against nginx where it ran."""
    rows = []
    for column, first in enumerate(rounds[0]):
        of_side = [measured[column] for measured in rounds]
        row: Row = {"side": first["side"], "version": first["version"]}
        for name in (
            "events_per_s",
            "lost",
            "delay_p50_us",
            "delay_p99_us",
            "cpu_us_per_event",
            "user_us_per_event",
            "memory_mib",
            "largest_mib",
            "recorded",
        ):
            values = [measured[name] for measured in of_side if measured[name] is not None]
            row[name] = round(statistics.median(values), 3 if name == "recorded" else 1) if values else None
        for name, ratio in (("delay_p99_us", "p99_x_nginx"), ("cpu_us_per_event", "cpu_x_nginx")):
            pairs = [(measured[column], r) for measured in rounds for r in measured if r["side"] == REFERENCE]
            ratios = [mine[name] / nginx[name] for mine, nginx in pairs if mine[name] and nginx[name]]
            row[ratio] = round(statistics.median(ratios), 2) if ratios else None
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100, help="(default: 100)")
    parser.add_argument("--rate", type=float, default=50, help="events per second of a stream (default: 50)")
    parser.add_argument("--seconds", type=float, default=10, help="measured, of each side and round (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--scrape-every", type=float, default=1, help="seconds; 0: never (default: 1)")
    parser.add_argument("--sides", nargs="+", default=["direct", "nginx", "haproxy", "sidecar", "starlette"])
    parser.add_argument("--litellm-python", type=Path, help="interpreter of an installation with litellm[proxy]")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    known: dict[str, Start] = {
        "direct": proxies.direct,
        "nginx": proxies.nginx,
        "haproxy": proxies.haproxy,
        "sidecar": proxies.sidecar,
        "unscraped": proxies.unscraped,
        "bare": proxies.bare,
        "starlette": proxies.starlette,
    }
    if asked.litellm_python is not None:
        try:
            known["litellm"] = proxies.litellm(asked.litellm_python.absolute())
        except argparse.ArgumentTypeError as problem:
            parser.error(f"--litellm-python: {problem}")
        asked.sides.append("litellm")
    sides: dict[str, Start] = {}
    for name in asked.sides:
        if name not in known:
            parser.error(f"--sides: {name!r} is not accepted; accepted: {', '.join(known)}")
        if why := proxies.missing(name):
            message(f"{why}: left out")
        else:
            sides[name] = known[name]
    allowed = sorted(os.sched_getaffinity(0))
    cores: tuple[int | None, int | None] = (allowed[0], allowed[1]) if len(allowed) > 1 else (None, None)
    rounds = []
    for number in range(asked.rounds):
        rounds.append([measure(start, asked, cores) for start in sides.values()])
        message(f"round {number + 1} of {asked.rounds}")
    rows = summary(rounds)
    title = f"{asked.streams} streams of {asked.rate:g} events/s, {asked.seconds:g} s, medians of {asked.rounds} rounds"
    print_rows(rows, asked.format, title=title)
    save(asked.save, "sidecar_speed", {"rows": rows, "rounds": rounds}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
