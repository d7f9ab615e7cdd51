"""What a scrape says, read from its text, and a thread that keeps scraping while requests come and go."""

import re
import subprocess
import threading
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Self

from tests.end_to_end.support import need

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REQUEST = ("class", "model", "tenant")
POINTS = ("client", "sidecar")
SCRAPE_EVERY_S = 0.1

Labels = tuple[tuple[str, str], ...]


class Scrape:
    """Counters and gauges of one exposition."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._series: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for line in text.splitlines():
            if line.startswith("#") or "_bucket{" in line:
                continue
            match = _SAMPLE.fullmatch(line)
            assert match is not None, f"not a sample: {line!r}"
            self._series[match[1]].append((dict(_LABEL.findall(match[2] or "")), float(match[3])))

    def sums(self, name: str, *by: str, **where: str) -> Counter[tuple[str, ...]]:
        """Sum per value of the labels `by`, of the series whose labels contain `where`."""
        found: Counter[tuple[str, ...]] = Counter()
        for labels, value in self._series[name]:
            if where.items() <= labels.items():
                found[tuple(labels[label] for label in by)] += whole(value)
        return found

    def total(self, name: str, **where: str) -> int:
        return self.sums(name, **where)[()]

    def check_identity(self) -> dict[str, int]:
        """offered = Σ ended + in flight, per class, model and tenant; how many were in flight at each point."""
        assert "NaN" not in self.text
        open_now = {}
        for point in POINTS:
            offered, ended, inflight = (
                self.sums(f"sloscope_{point}_{name}", *_REQUEST)
                for name in ("requests_offered_total", "requests_total", "inflight_requests")
            )
            assert offered, f"no series of {point}"
            for labels in {*offered, *ended, *inflight}:
                assert offered[labels] == ended[labels] + inflight[labels], (point, labels)
                assert inflight[labels] >= 0, (point, labels)
            open_now[point] = inflight.total()
        return open_now


def whole(value: float) -> int:
    """Requests and tokens are counted in whole numbers; anything else is a defect."""
    assert value == int(value), value
    return int(value)


def scrape(url: str) -> Scrape:
    """Any status but 200 is an HTTPError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        return Scrape(answer.read().decode())


def promtool_check(text: str) -> None:
    done = subprocess.run(
        [need("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr


class Scraper(threading.Thread):
    """Scrapes ten times a second and holds every scrape to the identity. Leaving the block raises what it found.

    `may_fail`: a scrape that gets no answer is counted and no fault, since the control plane may be what was killed.
    """

    def __init__(self, url: str, may_fail: bool = False) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._may_fail = may_fail
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self.scrapes = 0
        self.failed = 0
        self.with_open: Mapping[str, int] = Counter()  # point → scrapes in which requests were in flight

    def run(self) -> None:
        with_open: Counter[str] = Counter()
        self.with_open = with_open
        try:
            while not self._over.wait(SCRAPE_EVERY_S):
                try:
                    found = scrape(self._url)
                except (OSError, HTTPException):
                    if not self._may_fail:
                        raise
                    self.failed += 1
                    continue
                open_now = found.check_identity()
                self.scrapes += 1
                with_open.update(point for point, count in open_now.items() if count)
        except BaseException as problem:
            self._problem = problem

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(10)
        if self._problem is not None:
            raise self._problem
