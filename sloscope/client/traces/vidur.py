"""Vidur's processed traces, CSV: `arrived_at` (seconds), `num_prefill_tokens`, `num_decode_tokens`.

Files of lengths alone have no `arrived_at`; their arrivals have to be synthesised.

Source: github.com/microsoft/vidur, data/processed_traces.
"""

from __future__ import annotations

from collections.abc import Iterator

from sloscope.client.traces.text import TraceRow, TraceText, columns_of

WHEN, PROMPT, OUTPUT = "arrived_at", "num_prefill_tokens", "num_decode_tokens"
LOOKS_LIKE = f"{WHEN},{PROMPT},{OUTPUT}"


def recognises(head: str) -> bool:
    return PROMPT in columns_of(head)


def read(text: TraceText) -> Iterator[TraceRow]:
    for line, row in text.table((PROMPT, OUTPUT)):
        text.timed = WHEN in row
        yield TraceRow(
            text.seconds_ns(line, WHEN, row[WHEN]) if text.timed else 0,
            text.tokens(line, PROMPT, row[PROMPT]),
            text.tokens(line, OUTPUT, row[OUTPUT]),
            line,
        )
