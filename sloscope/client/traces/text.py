"""What every trace format needs: the row that it becomes, and the lines of a file with how to refuse one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from sloscope.errors import TraceError
from sloscope.units import NS_PER_S

MAX_TOKENS = 10_000_000
MAX_ROWS = 10_000_000
MAX_SECONDS = 10**9
BLOCK_TOKENS = 512  # of a prompt block in Mooncake's traces


class TraceRow(NamedTuple):
    """One arrival. `offset_ns` counts from the first arrival of the trace; `line` is where it stands in the file.

    `blocks` names the prompt's blocks of BLOCK_TOKENS tokens, the last of which may be shorter: the same id is the same
    text.
    """

    offset_ns: int
    prompt_tokens: int
    output_tokens: int
    line: int
    class_name: str = ""
    tenant: str = ""
    max_tokens: int | None = None
    blocks: tuple[int, ...] = ()


class TraceText:
    """The lines of one trace file. What a reader found beside its rows stands here too."""

    def __init__(self, source: str, lines: Sequence[str]) -> None:
        self.source = source
        self.lines = lines
        self.timed = True  # rows say when they arrive
        self.left_out = 0  # rows that were read and give no request

    def refuse(self, line: int, field: str, value: object, accepted: str) -> TraceError:
        return TraceError(
            f"trace {self.source!r}, line {line}: {field}: {str(value)[:60]!r} is not accepted; accepted: {accepted}"
        )

    def table(self, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
        """(line, cell by column) of a CSV file whose header has at least these columns."""
        head = next((number for number, line in enumerate(self.lines) if line.strip()), 0)
        header = self.lines[head] if self.lines else ""
        columns = [name.strip() for name in header.split(",")]
        for name in required:
            if name not in columns:
                raise self.refuse(head + 1, "header", header, f"a column {name}")
        for number, line in enumerate(self.lines[head + 1 :], start=head + 2):
            if not line.strip():
                continue
            cells = line.split(",")
            if len(cells) != len(columns):
                raise self.refuse(number, "row", line, f"{len(columns)} cells")
            yield number, dict(zip(columns, cells, strict=True))

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line, object) of a file with one JSON object a line.

        Fractions come as Decimal: 0.1 stays a tenth, so that an arrival lands on its own nanosecond.
        """
        for number, line in enumerate(self.lines, start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line, parse_float=Decimal)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise self.refuse(number, "row", line, "one JSON object a line")
            yield number, row

    def tokens(self, line: int, field: str, value: object, least: int = 1) -> int:
        """A whole number of tokens from text or JSON."""
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
            raise self.refuse(line, field, value, f"a whole number of tokens from {least} to {MAX_TOKENS}")
        return value

    def number(self, line: int, field: str, value: object, accepted: str) -> Decimal:
        """From text or JSON; 0 or more."""
        found: object = value
        if isinstance(value, str):
            try:
                found = Decimal(value.strip())
            except InvalidOperation:
                found = None
        elif isinstance(value, int) and not isinstance(value, bool):
            found = Decimal(value)
        if not isinstance(found, Decimal) or not found.is_finite() or not 0 <= found < MAX_SECONDS * 1000:
            raise self.refuse(line, field, value, accepted)
        return found

    def seconds_ns(self, line: int, field: str, value: object) -> int:
        accepted = f"seconds, 0 or more and below {MAX_SECONDS}"
        seconds = self.number(line, field, value, accepted)
        if seconds >= MAX_SECONDS:
            raise self.refuse(line, field, value, accepted)
        return int(seconds * NS_PER_S)


def columns_of(head: str) -> set[str]:
    return {name.strip() for name in head.split(",")}


def keys_of(head: str) -> set[str]:
    """The keys of a JSON object; none for a line that is not one."""
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return set()
    return set(found) if isinstance(found, dict) else set()
