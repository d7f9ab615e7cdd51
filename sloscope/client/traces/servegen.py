"""ServeGen client chunks, CSV without a header, a row for each window: start (s), rate (req/s), cv, family of the gaps
(Gamma or Weibull), its shape, its scale.

No request stands in such a file: arrivals are drawn, window by window, from the named family with the row's shape and
the mean 1 / rate. (The row's own scale is a fit, and gives another rate.) A gap that reaches over the end of its window
goes on at the next one's rate. Lengths stand in another file of ServeGen; here they are drawn from a description.

Source: github.com/alibaba/ServeGen, data/*/*/chunk-*-trace.csv (NSDI'26).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise
from math import gamma
from typing import NamedTuple

from sloscope.client.traces.synthetic import Lengths
from sloscope.client.traces.text import MAX_ROWS, TraceRow, TraceText
from sloscope.units import NS_PER_S

FAMILIES = ("Gamma", "Weibull")
LOOKS_LIKE = "start,rate,cv,Gamma|Weibull,shape,scale without a header"
_CELLS = 6
_WINDOW_S = 600.0  # of a file with one row
_SHAPES = (0.01, 1000.0)


class Window(NamedTuple):
    line: int
    start_s: float
    end_s: float
    rate: float
    family: str
    shape: float


def recognises(head: str) -> bool:
    """Six cells, of which the first two are numbers where others have names."""
    cells = head.split(",")
    return len(cells) == _CELLS and all(re.fullmatch(r"\s*[-+.0-9eE]+\s*", cell) for cell in cells[:2])


def read(text: TraceText, seed: int, lengths: Lengths) -> Iterator[TraceRow]:
    pairs = lengths.pairs(seed)
    for count, (window, at_s) in enumerate(arrivals(windows(text), random.Random(f"{seed}:arrivals"))):
        if count == MAX_ROWS:
            raise text.refuse(window.line, "rate", f"{window.rate:g}", f"windows of {MAX_ROWS} requests; see --limit")
        prompt, output = next(pairs)
        yield TraceRow(round(at_s * NS_PER_S), prompt, output, window.line)


def windows(text: TraceText) -> list[Window]:
    """In the order of time. Each lasts until the next, the last one as long as the shortest."""
    found = [_window(text, line, row) for line, row in enumerate(text.lines, start=1) if row.strip()]
    for before, after in pairwise(found):
        if after.start_s <= before.start_s:
            raise text.refuse(after.line, "start", f"{after.start_s:g}", f"above {before.start_s:g}, the row before")
    starts = [window.start_s for window in found]
    last_s = min((after - before for before, after in pairwise(starts)), default=_WINDOW_S)
    ends = [*starts[1:], starts[-1] + last_s] if starts else []
    return [window._replace(end_s=end_s) for window, end_s in zip(found, ends, strict=True)]


def _window(text: TraceText, line: int, row: str) -> Window:
    cells = [cell.strip() for cell in row.split(",")]
    if len(cells) != _CELLS:
        raise text.refuse(line, "row", row, f"{_CELLS} cells: {LOOKS_LIKE}")
    start, rate, _, family, shape, _ = cells
    start_s = text.seconds_ns(line, "start", start) / NS_PER_S
    per_s = float(text.number(line, "rate", rate, "requests per second, 0 or more"))
    if per_s == 0:
        return Window(line, start_s, start_s, 0.0, "", 1.0)
    if family not in FAMILIES:
        raise text.refuse(line, "family", family, " or ".join(FAMILIES))
    accepted = f"a number from {_SHAPES[0]:g} to {_SHAPES[1]:g}"
    factor = float(text.number(line, "shape", shape, accepted))
    if not _SHAPES[0] <= factor <= _SHAPES[1]:
        raise text.refuse(line, "shape", shape, accepted)
    return Window(line, start_s, start_s, per_s, family, factor)


def arrivals(windows: list[Window], draw: random.Random) -> Iterator[tuple[Window, float]]:
    """(window, seconds). A gap is drawn with mean 1 and passes at the rate of the window that it is in."""
    owed = 0.0  # of the gap that is under way, in mean gaps
    for window in windows:
        at_s = window.start_s
        while window.rate > 0:
            owed = owed or _gap(draw, window)
            if at_s + owed / window.rate >= window.end_s:
                owed -= (window.end_s - at_s) * window.rate
                break
            at_s += owed / window.rate
            owed = 0.0
            yield window, at_s


def _gap(draw: random.Random, window: Window) -> float:
    if window.family == "Gamma":
        return draw.gammavariate(window.shape, 1 / window.shape)
    return draw.weibullvariate(1 / gamma(1 + 1 / window.shape), window.shape)
