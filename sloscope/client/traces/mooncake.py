"""Mooncake traces, JSON lines: `timestamp` (milliseconds), `input_length`, `output_length` (tokens), `hash_ids`.

Each id names a block of 512 prompt tokens together with all blocks before it, so two prompts share exactly the chain of
ids that both begin with. The last block of a prompt may be shorter. Many requests stand on one timestamp.

Source: github.com/kvcache-ai/Mooncake, FAST25-release (FAST'25 paper, appendix).
"""

from __future__ import annotations

from collections.abc import Iterator

from sloscope.client.traces.text import BLOCK_TOKENS, MAX_SECONDS, TraceRow, TraceText, keys_of

LOOKS_LIKE = "JSON objects with timestamp, input_length, output_length, hash_ids"


def recognises(head: str) -> bool:
    return keys_of(head) >= {"timestamp", "input_length"}


def read(text: TraceText) -> Iterator[TraceRow]:
    for line, row in text.objects():
        at = row.get("timestamp")
        accepted = f"milliseconds, 0 or more and below {MAX_SECONDS * 1000}"
        if isinstance(at, str):
            raise text.refuse(line, "timestamp", at, accepted)
        prompt = text.tokens(line, "input_length", row.get("input_length"))
        yield TraceRow(
            int(text.number(line, "timestamp", at, accepted) * 1_000_000),
            prompt,
            text.tokens(line, "output_length", row.get("output_length")),
            line,
            blocks=_blocks(text, line, row.get("hash_ids"), prompt),
        )


def _blocks(text: TraceText, line: int, ids: object, prompt: int) -> tuple[int, ...]:
    """Some writers name a last block that is not full, some do not; absent ids share nothing."""
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise text.refuse(line, "hash_ids", ids, "a list of whole numbers, 0 or more")
    full, ceiling = prompt // BLOCK_TOKENS, -(-prompt // BLOCK_TOKENS)
    if len(ids) not in (full, ceiling):
        raise text.refuse(
            line,
            "hash_ids",
            f"{len(ids)} ids",
            f"{ceiling}: one for each {BLOCK_TOKENS} tokens of input_length {prompt}",
        )
    return tuple(ids)
