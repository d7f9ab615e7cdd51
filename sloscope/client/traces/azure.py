"""Azure LLM inference traces, 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`; later ones have more columns.

Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from sloscope.client.traces.text import TraceRow, TraceText, columns_of
from sloscope.units import NS_PER_S

WHEN, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LOOKS_LIKE = ",".join(COLUMNS)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|\+00:00)?")


def recognises(head: str) -> bool:
    return WHEN in columns_of(head)


def read(text: TraceText) -> Iterator[TraceRow]:
    for line, row in text.table(COLUMNS):
        yield TraceRow(
            _ns(text, line, row[WHEN]),
            text.tokens(line, PROMPT, row[PROMPT]),
            text.tokens(line, OUTPUT, row[OUTPUT]),
            line,
        )


def _ns(text: TraceText, line: int, cell: str) -> int:
    """Seven digits of a second and no zone, which datetime cannot keep; taken as UTC, only differences matter."""
    match = _TIME.fullmatch(cell.strip())
    try:
        if match is None:
            raise ValueError(cell)
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        raise text.refuse(line, WHEN, cell, "a time such as 2023-11-16 18:17:03.9799600") from None
    return int(moment.timestamp()) * NS_PER_S + int((match[2] or "0").ljust(9, "0"))
