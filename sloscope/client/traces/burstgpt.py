"""BurstGPT, CSV: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`; newer files have more columns.

`Timestamp` is seconds from 0:00:00 of the first day. 0 response tokens mark a failure of the service that was traced:
how long its answer would have been is not known, so the row gives no request. It is counted.

Source: github.com/HPMLL/BurstGPT, README.
"""

from __future__ import annotations

from collections.abc import Iterator

from sloscope.client.traces.text import TraceRow, TraceText, columns_of

WHEN, PROMPT, OUTPUT = COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
LOOKS_LIKE = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def recognises(head: str) -> bool:
    return {WHEN, PROMPT} <= columns_of(head)


def read(text: TraceText) -> Iterator[TraceRow]:
    for line, row in text.table(COLUMNS):
        at_ns = text.seconds_ns(line, WHEN, row[WHEN])
        output = text.tokens(line, OUTPUT, row[OUTPUT], least=0)
        prompt = text.tokens(line, PROMPT, row[PROMPT], least=int(output > 0))
        if output == 0:
            text.left_out += 1
            continue
        yield TraceRow(at_ns, prompt, output, line)
