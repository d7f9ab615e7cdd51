"""How long a scrape of many series takes, and whether an event waits for it.

The sidecar gets one request of each of many tenants, so that its exposition grows; then streams run through it, and in
every second half of a period it is scraped without a pause. Delays are from the source's write to the sink's read: of
events sent while a scrape was under way, and of those sent while none was. No process has a core for itself.

`python -m benchmarks.scrape_speed`.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kept import options_of, save
from benchmarks.streaming import proxies
from sloscope.definitions import nearest_rank
from sloscope.output import FORMATS, print_rows

PHASE_S = 2.0


def ask_as(url: str, tenant: str) -> None:
    body = json.dumps({"model": "bench", "messages": [], "stream": True, "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "x-slo-tenant": tenant}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def scrape(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return bytes(answer.read())


def scraped_while(url: str, seconds: float) -> list[tuple[int, int]]:
    """Start and end of every scrape: none in the first half of a phase, one after the other in the second."""
    spans = []
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        if elapsed % PHASE_S < PHASE_S / 2:
            time.sleep(0.01)
            continue
        start_ns = time.monotonic_ns()
        scrape(url)
        spans.append((start_ns, time.monotonic_ns()))
    return spans


def quantiles_us(values: Sequence[int]) -> dict[str, float | None]:
    ordered = sorted(values)
    ranks = {"p50_us": 500, "p99_us": 990, "p999_us": 999}
    row = {name: ordered[nearest_rank(q, len(ordered)) - 1] / 1e3 if ordered else None for name, q in ranks.items()}
    return {**row, "max_us": ordered[-1] / 1e3 if ordered else None}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=45, help="(default: 45)")
    parser.add_argument("--streams", type=int, default=50, help="(default: 50)")
    parser.add_argument("--rate", type=float, default=50, help="events per second of a stream (default: 50)")
    parser.add_argument("--seconds", type=float, default=20, help="(default: 20)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    events = round((asked.seconds + 2) * asked.rate)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        url = stack.enter_context(proxies.source(events, asked.rate))
        side = stack.enter_context(proxies.sidecar(url, folder))
        for number in range(asked.tenants):
            ask_as(side.url, f"tenant-{number}")
        out = folder / "received"
        options = ["--streams", str(asked.streams), "--seconds", str(events / asked.rate + 6)]
        sink = subprocess.Popen([sys.executable, "-m", "benchmarks.streaming.sink", side.url, str(out), *options])
        time.sleep(2)
        spans = scraped_while(side.control, asked.seconds - 1)
        series = sum(not line.startswith(b"#") for line in scrape(side.control).splitlines())
        assert sink.wait() == 0, "the sink failed"
        delays = [(int(sent), int(got) - int(sent)) for _, sent, got in map(str.split, out.read_text().splitlines())]
    starts = [start for start, _ in spans]
    inside: list[int] = []
    outside: list[int] = []
    for sent, delay in delays:
        if not spans[0][0] <= sent < spans[-1][1]:
            continue
        at = bisect_right(starts, sent) - 1
        (inside if sent < spans[at][1] else outside).append(delay)
    took_ms = sorted((end - start) / 1e6 for start, end in spans)
    rows = [
        {"events": "while no scrape ran", "n": len(outside), **quantiles_us(outside)},
        {"events": "during a scrape", "n": len(inside), **quantiles_us(inside)},
    ]
    scrapes = {
        "series": series,
        "scrapes": len(spans),
        "p50_ms": round(statistics.median(took_ms), 1),
        "p99_ms": round(took_ms[nearest_rank(990, len(took_ms)) - 1], 1),
    }
    print_rows([scrapes], asked.format, title="scrapes")
    print_rows(rows, asked.format, title=f"{asked.streams} streams of {asked.rate:g} events/s: delay of an event")
    save(asked.save, "scrape_speed", {"scrapes": scrapes, "rows": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
