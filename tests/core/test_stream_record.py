"""Bounds and odd answers; that the observers agree is tests/core/test_one_stream_three_observers.py."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from sloscope.stream_record import MAX_CHOICES, StreamRecord

SSE = "text/event-stream"


def event(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


TEXT = event({"index": 0, "delta": {"content": "x"}})
STOP = event({"index": 0, "delta": {}, "finish_reason": "stop"})
DONE = b"data: [DONE]\n\n"


def record(content_type: str = SSE, coding: str = "", max_body_bytes: int = 1 << 20) -> StreamRecord:
    made = StreamRecord(json.loads, max_body_bytes, streaming=True)
    made.response(200, content_type, coding)
    return made


def end(made: StreamRecord, body_complete: bool = True) -> tuple[str, str]:
    made.finish(body_complete)
    return made.classify("eof", "", min_tokens=1)


def test_a_read_that_expands_without_bound_is_given_up_and_takes_no_memory() -> None:
    made = record(coding="gzip")
    made.receive(1, gzip.compress(b":" * (9 << 20)))  # 9 MiB of comment, the bound is 8
    assert made.problems == {"bad_compression"}
    made.receive(2, gzip.compress(TEXT))
    assert len(made.t_ns) == 0
    assert end(made) == ("completed", "") and made.output_tokens is None  # HTTP alone said so


def test_a_whole_body_above_its_bound_is_not_read_and_its_tokens_are_unknown() -> None:
    body = json.dumps({"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1}}).encode()
    made = record("application/json", max_body_bytes=len(body) - 1)
    made.receive(1, body)
    assert end(made) == ("completed", "")
    assert (made.output_tokens, made.problems) == (None, {"response_above_inspect_limit"})
    fits = record("application/json", max_body_bytes=len(body))
    fits.receive(1, body)
    assert end(fits) == ("completed", "") and fits.output_tokens == 1


def test_what_follows_the_end_of_a_gzip_body_is_not_read() -> None:
    made = record(coding="gzip")
    made.receive(1, gzip.compress(TEXT + STOP + DONE))
    made.receive(2, b"trailing rubbish")
    assert end(made) == ("completed", "") and made.problems == set()


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_every_member_of_a_gzip_body_is_read_however_it_is_cut(size: int) -> None:
    """RFC 1952, 2.2: a gzip file is a series of members."""
    body = b"".join(map(gzip.compress, (TEXT, b"", TEXT[:9], TEXT[9:] + STOP, DONE)))
    made = record(coding="gzip")
    for number, start in enumerate(range(0, len(body), size)):
        made.receive(number, body[start : start + size])
        made.receive(number, b"")
    assert end(made) == ("completed", "") and made.problems == set()
    assert len(made.t_ns) == 2


def test_what_follows_rubbish_after_a_member_is_not_read() -> None:
    for rubbish in (b"\x1f\x8c", b"x", b"\0\0"):
        made = record(coding="gzip")
        for number, piece in enumerate((gzip.compress(TEXT + STOP + DONE), rubbish, gzip.compress(TEXT))):
            made.receive(number, piece)
        assert end(made) == ("completed", "") and made.problems == set()
        assert len(made.t_ns) == 1


def test_a_later_member_that_is_spoilt_is_a_bad_stream_as_the_first_would_be() -> None:
    made = record(coding="gzip")
    made.receive(1, gzip.compress(TEXT) + b"\x1f\x8b rubbish")
    assert end(made) == ("failed", "bad_stream") and made.problems == {"bad_compression"}


def test_a_deflate_body_is_one_stream_whatever_follows_it() -> None:
    made = record(coding="deflate")
    made.receive(1, zlib.compress(TEXT + STOP + DONE) + gzip.compress(TEXT))
    assert end(made) == ("completed", "") and len(made.t_ns) == 1


def test_the_members_of_one_read_expand_together_up_to_the_bound_and_are_not_without_number() -> None:
    halves = record(coding="gzip")
    halves.receive(1, gzip.compress(b":" * (4 << 20)) * 2)  # 8 MiB, the bound
    assert halves.problems == set()
    halves.receive(2, gzip.compress(b":" * (4 << 20)) * 2 + gzip.compress(b":"))
    assert halves.problems == {"bad_compression"}
    empty = record(coding="gzip")
    empty.receive(1, gzip.compress(b"") * 1000)
    assert empty.problems == set()
    empty.receive(2, gzip.compress(b"") * 1001)
    assert empty.problems == {"bad_compression"}


def test_a_large_choice_index_makes_no_room_for_the_choices_below() -> None:
    made = record()
    made.receive(1, TEXT + event({"index": 2**31 - 1, "delta": {}, "finish_reason": "stop"}))
    assert end(made) == ("completed", "")
    assert len(made.finish_reasons) == MAX_CHOICES


def test_a_finish_reason_is_kept_to_sixty_four_characters() -> None:
    made = record()
    made.receive(1, TEXT + event({"index": 0, "delta": {}, "finish_reason": "r" * 65}))
    assert end(made) == ("completed", "") and made.finish_reasons == ["r" * 64]


def test_a_tool_call_without_arguments_is_an_answer_when_the_usage_counts_its_tokens() -> None:
    call = event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}})
    last = event({"index": 0, "delta": {}, "finish_reason": "tool_calls"}, usage={"completion_tokens": 3})
    made = record()
    made.receive(1, call + last + DONE)
    assert end(made) == ("completed", "")
    assert (made.output_tokens, made.token_source, len(made.t_ns)) == (3, "usage", 0)


def test_a_usage_on_an_empty_delta_counts_once_done_says_that_it_was_the_last() -> None:
    """As a router streams a tool call: no finish reason, the usage beside an empty content, then [DONE]."""
    call = event({"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}})
    last = event({"index": 0, "delta": {"content": ""}}, usage={"prompt_tokens": 57, "completion_tokens": 17})
    made = record()
    made.receive(1, call + last + DONE)
    assert end(made) == ("completed", "")
    assert (made.output_tokens, made.token_source, made.prompt_tokens) == (17, "usage", 57)
    cut = record()
    cut.receive(1, call + last)
    assert end(cut, body_complete=False) == ("failed", "truncated")
    assert (cut.output_tokens, cut.token_source) == (1, "assumed_one")  # more may have followed


def test_the_tokens_of_an_event_stand_when_its_receipt_does() -> None:
    """A thread that writes batches may look between any two appends: the type comes last."""
    made = record()
    lengths: list[tuple[int, ...]] = []

    class Watched(list[Any]):
        def append(self, value: Any) -> None:
            super().append(value)
            lengths.append((len(made.t_ns), len(made.choice), len(made.tokens), len(self)))

    made.type = Watched()  # type: ignore[assignment]
    made.receive(1, event({"index": 0, "delta": {"content": "x"}}, usage={"completion_tokens": 2}))
    assert lengths == [(1, 1, 1, 1)] and made.tokens == [2]


def test_the_end_after_done_is_not_before_a_receipt_that_follows_it() -> None:
    made = record()
    made.receive(10, TEXT + DONE)
    made.receive(20, TEXT)
    assert end(made) == ("completed", "") and made.end_ns(900) == 20
