"""What a receipt costs until it stands in the histograms that are scraped, beside `labels().observe()` per token.

Ours: from the stamps of a request that ended to all its receipt families (gaps of events and of tokens, first
token, largest gap, time per token, end to end, outcome, verdict), then what a scrape adds: binning, the hand-over to
the other process, the exposition. Theirs: one `labels(class, model, tenant).observe(gap)` of prometheus-client for each
token, into one histogram with the same edges, and its exposition; `bound` is the same without the look-up of the child.
Both sides see the same gaps, and are scraped after as many of them. They take turns; medians of the runs.

`python -m benchmarks.receipt_cost`.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.kept import options_of, save
from exporter.families import ReceiptFamilies
from sloscope import catalogue, contract
from sloscope.definitions import Ended, summarise
from sloscope.exposition import MetricStore
from sloscope.output import FORMATS, print_rows

MS = 1_000_000
CONTRACT = contract.from_shorthand("ttft:300 itl_max:100")
LABELS = ("default", "model", "tenant")


def answers(requests: int, events: int, seed: int) -> list[list[int]]:
    """Stamps of every request: a first token and gaps around 20 ms."""
    drawn = random.Random(seed)
    return [
        list(accumulate(drawn.randrange(10 * MS, 30 * MS) for _ in range(events)))
        for _ in range(requests)
    ]  # fmt: skip


def ours(requests: Sequence[list[int]], scrape_every: int) -> None:
    store, other = MetricStore("sidecar", CONTRACT), MetricStore("sidecar", CONTRACT)
    families = ReceiptFamilies(store, "sidecar", CONTRACT)
    resolved = contract.resolve(CONTRACT, {})
    since = 0
    for stamps in requests:
        events = len(stamps)
        labels = families.begun(*LABELS)
        choice, kinds, tokens = [0] * events, [0] * events, [1] * events
        summary = summarise(0, stamps, choice, kinds, 1, events, tokens, completed_ns=stamps[-1])
        families.ended(labels, Ended("completed", ""), summary, resolved, True, stamps, choice, tokens)
        since += events
        if since >= scrape_every:
            other.absorb(store.drain())
            other.render()
            since = 0


def theirs(requests: Sequence[list[int]], scrape_every: int, bound: bool) -> None:
    edges = [edge / 1e9 for edge in catalogue.edges_ns(catalogue.receipt("sidecar", "itl_seconds"), CONTRACT)]
    registry = CollectorRegistry()
    gaps = Histogram("gap_seconds", "gap", ("class", "model", "tenant"), buckets=edges, registry=registry)
    child = gaps.labels(*LABELS)
    since = 0
    for stamps in requests:
        if bound:
            for before, after in pairwise(stamps):
                child.observe((after - before) / 1e9)
        else:
            for before, after in pairwise(stamps):
                gaps.labels(*LABELS).observe((after - before) / 1e9)
        since += len(stamps)
        if since >= scrape_every:
            generate_latest(registry)
            since = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--events", type=int, default=200, help="of each (default: 200)")
    parser.add_argument("--scrape-every", type=int, default=50_000, help="receipts (default: 50000)")
    parser.add_argument("--runs", type=int, default=5, help="of each side (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    requests = answers(asked.requests, asked.events, asked.seed)
    receipts = asked.requests * asked.events
    sides: dict[str, Callable[[], None]] = {
        "sloscope": lambda: ours(requests, asked.scrape_every),
        "observe": lambda: theirs(requests, asked.scrape_every, bound=False),
        "observe_bound": lambda: theirs(requests, asked.scrape_every, bound=True),
    }
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(asked.runs):
        for name, run in sides.items():
            began = time.process_time()
            run()
            took[name].append((time.process_time() - began) / receipts * 1e9)
    rows = [
        {
            "side": name,
            "ns_per_receipt": round(statistics.median(values)),
            "x_observe": round(statistics.median(a / b for a, b in zip(values, took["observe"], strict=True)), 3),
        }
        for name, values in took.items()
    ]
    print_rows(rows, asked.format, title=f"{receipts} receipts, a scrape every {asked.scrape_every}")
    save(asked.save, "receipt_cost", {"rows": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
