"""Workload traces: when requests arrive and how long they are. Files in, rows out; a module for each format.

A row keeps its prompt and output length together: drawn apart they would make pairs that nobody sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from sloscope.client.traces import azure, burstgpt, mooncake, own_jsonl, servegen, synthetic, vidur
from sloscope.client.traces.arrivals import Arrivals
from sloscope.client.traces.synthetic import Lengths
from sloscope.client.traces.text import BLOCK_TOKENS, TraceRow, TraceText
from sloscope.errors import TraceError

__all__ = ["BLOCK_TOKENS", "FORMATS", "Arrivals", "Lengths", "Trace", "TraceRow", "load"]


class Format(NamedTuple):
    looks_like: str
    recognises: Callable[[str], bool]  # the first line that is not blank
    read: Callable[[TraceText, int, Lengths], Iterator[TraceRow]]


def _plain(read: Callable[[TraceText], Iterator[TraceRow]]) -> Callable[[TraceText, int, Lengths], Iterator[TraceRow]]:
    """A format that says everything itself needs neither seed nor lengths."""
    return lambda text, seed, lengths: read(text)


_FILES = {
    "azure": Format(azure.LOOKS_LIKE, azure.recognises, _plain(azure.read)),
    "burstgpt": Format(burstgpt.LOOKS_LIKE, burstgpt.recognises, _plain(burstgpt.read)),
    "jsonl": Format(own_jsonl.LOOKS_LIKE, own_jsonl.recognises, _plain(own_jsonl.read)),
    "mooncake": Format(mooncake.LOOKS_LIKE, mooncake.recognises, _plain(mooncake.read)),
    "servegen": Format(servegen.LOOKS_LIKE, servegen.recognises, servegen.read),
    "vidur": Format(vidur.LOOKS_LIKE, vidur.recognises, _plain(vidur.read)),
}
FORMATS = (*_FILES, "synthetic")
AS_RECORDED = "as recorded"


class Trace(NamedTuple):
    rows: list[TraceRow]
    format: str
    source: str
    reordered: int  # rows that stood after a later arrival and were sorted
    left_out: int = 0  # rows of failed requests, whose length nobody knows
    arrivals: str = AS_RECORDED  # or how they were made
    lengths: str = AS_RECORDED
    until_ns: int | None = None  # when the arrival after the last row would be due; None: nobody knows


def load(
    source: str,
    format: str = "",
    seed: int = 0,
    limit: int | None = None,
    arrivals: Arrivals | None = None,
    lengths: Lengths | None = None,
) -> Trace:
    """The first `limit` rows of a trace file or of a `synthetic:…` description; the format is told by the first line.

    `arrivals` take the place of those of the trace. `lengths` are for formats without any. Raises TraceError with file,
    line, field, value and what is accepted.
    """
    if format and format not in FORMATS:
        raise TraceError(f"--format-trace: {format!r} is not accepted; accepted: {', '.join(FORMATS)}")
    if source.startswith(synthetic.SCHEME) or format == "synthetic":
        rows, made = synthetic.described(source, seed, limit)
        trace = Trace(rows, "synthetic", source, 0, 0, str(made), "drawn", made.until_ns(len(rows)))
    else:
        trace = _load_file(source, format, seed, limit, lengths, timed=arrivals is None)
    return trace if arrivals is None else _arriving(trace, arrivals, seed)


def _load_file(source: str, format: str, seed: int, limit: int | None, lengths: Lengths | None, timed: bool) -> Trace:
    lines = _lines(source)
    name = format or _detect(source, lines)
    if lengths is not None and name != "servegen":
        raise TraceError(f"--synthetic-lengths: trace {source!r} has lengths; accepted: with servegen windows only")
    lengths = lengths or Lengths()
    text = TraceText(source, lines)
    rows = list(islice(_FILES[name].read(text, seed, lengths), limit))
    if not rows:
        left_out = f"; {text.left_out} rows are failed requests" if text.left_out else ""
        raise TraceError(f"trace {source!r}: has no rows{left_out}; accepted: at least one arrival")
    if timed and not text.timed:
        raise TraceError(
            f"trace {source!r}, line 1: {vidur.WHEN}: is missing; accepted: that column, or --arrivals with --rate"
        )
    reordered = sum(late.offset_ns < early.offset_ns for early, late in pairwise(rows))
    rows.sort(key=lambda row: row.offset_ns)
    first = rows[0].offset_ns
    rows = [row._replace(offset_ns=row.offset_ns - first) for row in rows]
    if name == "servegen":
        return Trace(rows, name, source, reordered, 0, "drawn in the trace's windows", f"drawn: {lengths}")
    return Trace(rows, name, source, reordered, text.left_out)


def _arriving(trace: Trace, arrivals: Arrivals, seed: int) -> Trace:
    """The same requests in the same order at other times."""
    stamps = arrivals.offsets_ns(seed)
    rows = [row._replace(offset_ns=next(stamps)) for row in trace.rows]
    return trace._replace(rows=rows, arrivals=str(arrivals), until_ns=arrivals.until_ns(len(rows)))


def _lines(source: str) -> list[str]:
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"trace {source!r}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"trace {source!r}: is not UTF-8 text") from None
    # splitlines would also cut at the separators that Unicode adds.
    return re.split(r"\r\n|\r|\n", text)


def _detect(source: str, lines: list[str]) -> str:
    number, head = next(((n, line) for n, line in enumerate(lines, start=1) if line.strip()), (1, ""))
    for name, format in _FILES.items():
        if format.recognises(head):
            return name
    if head.lstrip().startswith("{"):
        # Its fields are told one by one.
        return "jsonl"
    accepted = "; ".join(f"{format.looks_like} ({name})" for name, format in _FILES.items())
    raise TraceError(
        f"trace {source!r}, line {number}: header {head[:60]!r} is not known; accepted: {accepted}; "
        f"or {synthetic.LOOKS_LIKE}"
    )
