"""Workload traces: when requests arrive and how long they are. Files in, rows out.

| format | what it is |
|---|---|
| `azure` | CSV of the Azure LLM traces: `TIMESTAMP,ContextTokens,GeneratedTokens` |
| `jsonl` | our own: `{"at_s": 0.5, "prompt_tokens": 128, "output_tokens": 64}`, and `class`, `tenant`, `max_tokens` |
| `synthetic` | `synthetic:poisson?rate=5&n=200&prompt_p50=128&prompt_sigma=0.8&output_p50=64&output_sigma=0.7` |

A row keeps its prompt and output length together: drawn apart they would make pairs that nobody sent.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import islice, pairwise
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from sloscope.errors import TraceError
from sloscope.units import NS_PER_S

FORMATS = ("azure", "jsonl", "synthetic")
_MAX_TOKENS = 10_000_000
_MAX_SYNTHETIC_ROWS = 10_000_000


class TraceRow(NamedTuple):
    """One arrival. `offset_ns` counts from the first arrival of the trace; `line` is where it stands in the file."""

    offset_ns: int
    prompt_tokens: int
    output_tokens: int
    line: int
    class_name: str = ""
    tenant: str = ""
    max_tokens: int | None = None


class Trace(NamedTuple):
    rows: list[TraceRow]
    format: str
    source: str
    reordered: int  # rows that stood after a later arrival and were sorted


def load(source: str, format: str = "", seed: int = 0, limit: int | None = None) -> Trace:
    """The first `limit` rows of a trace file or of a `synthetic:…` description; the format is told by the header.

    Raises TraceError with file, line, field, value and what is accepted.
    """
    if format and format not in FORMATS:
        raise TraceError(f"--format-trace: {format!r} is not accepted; accepted: {', '.join(FORMATS)}")
    if source.startswith("synthetic:") or format == "synthetic":
        return Trace(_synthetic(source, seed, limit), "synthetic", source, 0)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"trace {source!r}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"trace {source!r}: is not UTF-8 text") from None
    # splitlines would also cut at the separators that Unicode adds.
    lines = re.split(r"\r\n|\r|\n", text)
    name = format or _detect(source, lines)
    rows = list(islice(_READERS[name](source, lines), limit))
    if not rows:
        raise TraceError(f"trace {source!r}: has no rows; accepted: at least one arrival")
    reordered = sum(late.offset_ns < early.offset_ns for early, late in pairwise(rows))
    rows.sort(key=lambda row: row.offset_ns)
    first = rows[0].offset_ns
    return Trace([row._replace(offset_ns=row.offset_ns - first) for row in rows], name, source, reordered)


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _detect(source: str, lines: list[str]) -> str:
    head = next((line for line in lines if line.strip()), "")
    if head.startswith(_AZURE_COLUMNS[0] + ","):
        return "azure"
    if head.lstrip().startswith("{"):
        return "jsonl"
    raise TraceError(
        f"trace {source!r}, line 1: header {head[:60]!r} is not known; accepted: "
        f"{','.join(_AZURE_COLUMNS)} (azure), JSON objects with at_s (jsonl), or synthetic:…"
    )


def _fail(source: str, line: int, field: str, value: object, accepted: str) -> TraceError:
    return TraceError(
        f"trace {source!r}, line {line}: {field}: {str(value)[:60]!r} is not accepted; accepted: {accepted}"
    )


def _tokens(source: str, line: int, field: str, value: object) -> int:
    """A whole number of tokens from text or JSON."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_TOKENS:
        raise _fail(source, line, field, value, f"a whole number of tokens from 1 to {_MAX_TOKENS}")
    return value


# --- Azure ----------------------------------------------------------------------------------------------------

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|\+00:00)?")


def _azure(source: str, lines: list[str]) -> Iterator[TraceRow]:
    columns = [name.strip() for name in lines[0].split(",")] if lines else []
    for name in _AZURE_COLUMNS:
        if name not in columns:
            raise _fail(source, 1, "header", lines[0] if lines else "", f"a column {name}")
    when, prompt, output = (columns.index(name) for name in _AZURE_COLUMNS)
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(columns):
            raise _fail(source, number, "row", line, f"{len(columns)} cells")
        yield TraceRow(
            _azure_ns(source, number, cells[when]),
            _tokens(source, number, _AZURE_COLUMNS[1], cells[prompt]),
            _tokens(source, number, _AZURE_COLUMNS[2], cells[output]),
            number,
        )


def _azure_ns(source: str, line: int, text: str) -> int:
    """Seven digits of a second and no zone, which datetime cannot keep; taken as UTC, only differences matter."""
    match = _AZURE_TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError(text)
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        raise _fail(source, line, "TIMESTAMP", text, "a time such as 2023-11-16 18:17:03.9799600") from None
    return int(moment.timestamp()) * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


# --- our own --------------------------------------------------------------------------------------------------

_JSONL_FIELDS = ("at_s", "prompt_tokens", "output_tokens", "class", "tenant", "max_tokens")


def _jsonl(source: str, lines: list[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # Decimal keeps 0.1 a tenth, so that an arrival lands on its own nanosecond.
            row: Any = json.loads(line, parse_float=Decimal)
        except ValueError:
            raise _fail(source, number, "row", line, "one JSON object a line") from None
        if not isinstance(row, dict):
            raise _fail(source, number, "row", line, "one JSON object a line")
        for name in row:
            if name not in _JSONL_FIELDS:
                raise _fail(source, number, name, row[name], f"only {', '.join(_JSONL_FIELDS)}")
        at = row.get("at_s")
        if isinstance(at, bool) or not isinstance(at, (int, Decimal)) or not 0 <= at < 10**9:
            raise _fail(source, number, "at_s", at, "seconds, 0 or more")
        for name in ("class", "tenant"):
            if not isinstance(row.get(name, ""), str):
                raise _fail(source, number, name, row[name], "text")
        yield TraceRow(
            int(at * NS_PER_S),
            _tokens(source, number, "prompt_tokens", row.get("prompt_tokens")),
            _tokens(source, number, "output_tokens", row.get("output_tokens")),
            number,
            row.get("class", ""),
            row.get("tenant", ""),
            _tokens(source, number, "max_tokens", row["max_tokens"]) if "max_tokens" in row else None,
        )


_READERS: dict[str, Callable[[str, list[str]], Iterator[TraceRow]]] = {"azure": _azure, "jsonl": _jsonl}


# --- synthetic ------------------------------------------------------------------------------------------------

_SYNTHETIC_DEFAULTS = {
    "rate": 5.0,  # requests per second
    "n": 200.0,
    "prompt_p50": 128.0,  # tokens; lengths are lognormal: median, and standard deviation of the logarithm
    "prompt_sigma": 0.8,
    "output_p50": 64.0,
    "output_sigma": 0.7,
}
_ARRIVALS = ("poisson", "constant")
_SYNTHETIC_HELP = (
    "synthetic:poisson or synthetic:constant, then "
    + "?" + "&".join(f"{name}={value:g}" for name, value in _SYNTHETIC_DEFAULTS.items())
)  # fmt: skip


def _synthetic(source: str, seed: int, limit: int | None) -> list[TraceRow]:
    """Poisson arrivals (exponential gaps) or a constant gap, with lognormal lengths. The same seed, the same rows."""
    kind, _, query = source.removeprefix("synthetic:").partition("?")
    if kind not in _ARRIVALS:
        raise TraceError(f"trace {source!r}: arrivals {kind!r} are not accepted; accepted: {_SYNTHETIC_HELP}")
    values = dict(_SYNTHETIC_DEFAULTS)
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in values:
            raise TraceError(f"trace {source!r}: {name!r} is not accepted; accepted: {', '.join(values)}")
        values[name] = _positive(source, name, text)
    count = int(values["n"])
    if count != values["n"] or not 1 <= count <= _MAX_SYNTHETIC_ROWS:
        raise TraceError(f"trace {source!r}: n: {values['n']:g} is not accepted; accepted: 1 to {_MAX_SYNTHETIC_ROWS}")
    # A generator for each, so that changing one parameter leaves the other draws as they were.
    gaps, prompts, outputs = (random.Random(f"{seed}:{name}") for name in ("arrivals", "prompts", "outputs"))
    rows: list[TraceRow] = []
    at_s = 0.0
    for index in range(min(count, limit) if limit is not None else count):
        if index:
            at_s += gaps.expovariate(values["rate"]) if kind == "poisson" else 1 / values["rate"]
        rows.append(
            TraceRow(
                round(at_s * NS_PER_S),
                _lognormal(prompts, values["prompt_p50"], values["prompt_sigma"]),
                _lognormal(outputs, values["output_p50"], values["output_sigma"]),
                index + 1,
            )
        )
    return rows


def _positive(source: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    low_enough = value < 1e9
    if not low_enough or value < 0 or (value == 0 and not name.endswith("_sigma")):
        raise TraceError(f"trace {source!r}: {name}: {text[:40]!r} is not accepted; accepted: a number above 0")
    return value


def _lognormal(generator: random.Random, median: float, sigma: float) -> int:
    # The exponent is bounded, so that a huge sigma gives a long prompt and not an overflow.
    exponent = min(log(median) + sigma * generator.gauss(0.0, 1.0), log(_MAX_TOKENS))
    return min(max(1, round(exp(exponent))), _MAX_TOKENS)
