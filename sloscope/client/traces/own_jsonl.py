"""Our own format: `{"at_s": 0.5, "prompt_tokens": 128, "output_tokens": 64}`, and `class`, `tenant`, `max_tokens`."""

from __future__ import annotations

from collections.abc import Iterator

from sloscope.client.traces.text import TraceRow, TraceText, keys_of

FIELDS = ("at_s", "prompt_tokens", "output_tokens", "class", "tenant", "max_tokens")
LOOKS_LIKE = "JSON objects with at_s"


def recognises(head: str) -> bool:
    return "at_s" in keys_of(head)


def read(text: TraceText) -> Iterator[TraceRow]:
    for line, row in text.objects():
        for name in row:
            if name not in FIELDS:
                raise text.refuse(line, name, row[name], f"only {', '.join(FIELDS)}")
        for name in ("class", "tenant"):
            if not isinstance(row.get(name, ""), str):
                raise text.refuse(line, name, row[name], "text")
        at = row.get("at_s")
        if isinstance(at, str):
            raise text.refuse(line, "at_s", at, "seconds as a JSON number")
        yield TraceRow(
            text.seconds_ns(line, "at_s", at),
            text.tokens(line, "prompt_tokens", row.get("prompt_tokens")),
            text.tokens(line, "output_tokens", row.get("output_tokens")),
            line,
            row.get("class", ""),
            row.get("tenant", ""),
            text.tokens(line, "max_tokens", row["max_tokens"]) if "max_tokens" in row else None,
        )
