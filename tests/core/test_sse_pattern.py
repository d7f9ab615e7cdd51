"""Reads that are known by their pattern say what they would say if they were parsed."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sloscope.sse import StreamDecoder, StreamEvent
from sloscope.sse_pattern import Read
from sloscope.stream_record import StreamRecord

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def read_of(delta: Any, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({**HEAD, "choices": [choice], **more}).encode() + b"\n\n"


class Counting:
    """A JSON parser that counts its calls."""

    calls = 0

    def __call__(self, data: bytes) -> Any:
        self.calls += 1
        return orjson.loads(data)


def parsed(read: bytes) -> list[StreamEvent]:
    """By a decoder that has seen nothing before."""
    return StreamDecoder(orjson.loads).feed(read)


@pytest.mark.parametrize(
    "read",
    [
        lambda text: read_of({"content": text}),
        lambda text: read_of({"role": "assistant", "content": text, "tool_calls": None}),
        lambda text: read_of({"content": None, "reasoning_content": text}),
        lambda text: read_of({"reasoning": text}),
        lambda text: b"data: " + json.dumps({"choices": [{"text": text}]}, separators=(",", ":")).encode() + b"\n\n",
    ],
)
def test_a_stream_of_like_events_is_parsed_a_few_times_only(read: Any) -> None:
    loads = Counting()
    decoder = StreamDecoder(loads)
    for number in range(100):
        assert decoder.feed(read(f'{number} "\\ \n é \U0001f600')) == parsed(read("x"))
    # The first event, and the two that try its pattern.
    assert loads.calls <= 4


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_events_whose_logprobs_differ_say_each_what_it_says_alone(kind: str) -> None:
    def read(text: str, number: int) -> bytes:
        token = {"token": text, "logprob": -number / 7, "bytes": list(text.encode())}
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if kind == "chat":
            choice |= {"delta": {"content": text}, "logprobs": {"content": [{**token, "top_logprobs": [token]}]}}
        else:
            tops = {"tokens": [text], "token_logprobs": [-number / 7], "top_logprobs": [{text: -number / 7}]}
            choice |= {"text": text, "logprobs": {**tops, "text_offset": [number]}}
        return b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n"

    decoder = StreamDecoder(orjson.loads)
    outputs = 0
    # Some have logprobs and no text, as a token that is no whole character has.
    for number, text in enumerate(["a", "b", "", "content", '"', "", "a", "text", *"abcdefgh" * 5]):
        said = decoder.feed(read(text, number))
        assert said == parsed(read(text, number))
        outputs += len(said[0].outputs)
    assert outputs == 46


def test_a_stream_whose_events_are_never_alike_is_not_tried_for_ever() -> None:
    loads = Counting()
    decoder = StreamDecoder(loads)
    for number in range(100):
        decoder.feed(read_of({"content": "x"}, created=number))
    assert loads.calls <= 100 + 2 * 16


def test_events_that_change_once_a_second_are_learned_again() -> None:
    loads = Counting()
    decoder = StreamDecoder(loads)
    for number in range(5000):
        decoder.feed(read_of({"content": "x"}, created=number // 50))
    assert loads.calls <= 100 * 4


@pytest.mark.parametrize(
    "other",
    [
        b'"}}]}',  # ends the text early
        b'\\"',  # a quote in the text, and nothing that ends it
        b"\\x",  # no escape of JSON
        b"\\ud83",
        b"a\nb",
        b"a\rb",
        b"a\x00b",
        b"",
        b'x","refusal":"y',
        b'"',
    ],
)
def test_what_is_no_text_does_not_fit(other: bytes) -> None:
    before, _, after = read_of({"content": "@"}).partition(b"@")
    decoder = StreamDecoder(orjson.loads)
    decoder.feed(read_of({"content": "x"}))
    assert decoder.feed(before + other + after) == parsed(before + other + after)


def test_text_that_is_no_utf_8_is_output_as_ever() -> None:
    before, _, after = read_of({"content": "@"}).partition(b"@")
    decoder = StreamDecoder(orjson.loads)
    decoder.feed(read_of({"content": "x"}))
    for text in (b"\xff", b"\xf0\x9f", b"\\ud83d", b"\\udc00\\ud83d"):
        assert decoder.feed(before + text + after) == parsed(before + text + after) != []


def test_a_key_named_content_elsewhere_is_not_taken_for_the_text() -> None:
    decoder = StreamDecoder(orjson.loads)
    for text in ("a", ""):
        for note in ("", "b"):
            read = b'data: {"note":{"content":"%b"},"choices":[{"delta":{"content":"%b"}}]}\n\n'
            read %= (note.encode(), text.encode())
            assert decoder.feed(read) == parsed(read)


def test_an_event_beyond_the_bound_is_skipped_though_its_pattern_is_known() -> None:
    decoder = StreamDecoder(orjson.loads, max_event_bytes=300)
    assert decoder.feed(read_of({"content": "x"}))
    assert decoder.feed(read_of({"content": "x" * 300})) == [] and decoder.oversized == 1
    assert decoder.feed(read_of({"content": "x"}))


TEXT = st.one_of(st.text(max_size=6), st.sampled_from(["", '"', "\\", "\n", '"}', "\ud83d"]))
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "content": st.one_of(TEXT, st.none(), st.just([{"type": "text", "text": "t"}])),
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "refusal": TEXT,
        "tool_calls": st.just([{"function": {"arguments": '{"content":"x"}'}}]),
    },
)
READ = st.builds(
    lambda delta, choice, more: (
        b"data: %b\n\n"
        % json.dumps({"choices": [{"delta": delta, **choice}], **more}, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    ),
    DELTA,
    st.fixed_dictionaries(
        {}, optional={"index": st.integers(0, 2), "finish_reason": st.sampled_from(["stop", None]), "text": TEXT}
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "usage": st.sampled_from([None, {"completion_tokens": 3}]),
            "error": st.sampled_from([None, {"code": 5, "content": "x"}]),
            "note": st.fixed_dictionaries({"content": TEXT}),
        },
    ),
)


@settings(max_examples=400)
@given(st.lists(READ, max_size=4), st.lists(st.integers(0, 3), max_size=12), st.binary(max_size=4))
@example([read_of({"content": "a"}), read_of({"content": ""})], [0, 0, 1, 0], b"")
def test_no_read_says_anything_else_because_of_those_before(
    reads: list[bytes], order: list[int], rubbish: bytes
) -> None:
    decoder = StreamDecoder(orjson.loads)
    for number in order:
        if number < len(reads):
            read = reads[number]
            assert decoder.feed(read) == parsed(read)
            spoilt = read.replace(b'": "', b'": "' + rubbish, 1)
            if spoilt.count(b"\n") == 2 and b"\r" not in spoilt:
                assert decoder.feed(spoilt) == parsed(spoilt)


def stream_record() -> StreamRecord:
    record = StreamRecord(orjson.loads, 1 << 20, streaming=True)
    record.response(200, "text/event-stream", "")
    return record


def said(record: StreamRecord) -> tuple[Any, ...]:
    return (
        record.t_ns, record.choice, record.type, record.tokens, record.body_bytes, record.last_ns, record.problems,
        record.ended(),
    )  # fmt: skip


PADDING = st.tuples(st.binary(max_size=3), st.binary(max_size=2))


@settings(max_examples=400)
@given(
    st.lists(READ, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), PADDING), max_size=8),
    st.integers(1, 7),
)
@example([read_of({"content": "a"}), read_of({"content": ""})], [(0, 5, (b"", b"")), (1, 1, (b"", b""))], 7)
@example([read_of({"content": "a"}), read_of({"content": "\n"})], [(0, 5, (b"1", b"2")), (1, 5, (b"", b""))], 7)
def test_reads_taken_together_say_what_they_say_one_by_one(
    kinds: list[bytes], order: list[tuple[int, int, tuple[bytes, bytes]]], at_once: int
) -> None:
    """Each stands between other bytes of the read that brought it, as the payload of a chunk does."""
    stamped: list[Read] = []
    for number, times, (before, after) in order:
        payload = kinds[number % len(kinds)]
        for _ in range(times):
            stop = len(before) + len(payload)
            stamped.append((before + payload + after, len(before), stop, 1000 + len(stamped), 0, 0))
    alone, together = stream_record(), stream_record()
    for data, start, stop, t_ns, _, _ in stamped:
        alone.receive(t_ns, data[start:stop])
    done = 0
    while done < len(stamped):
        block = stamped[done : done + at_once]
        count = together.receive_alike(block)
        assert count <= len(block)
        if not count:
            data, start, stop, t_ns, _, _ = block[0]
            together.receive(t_ns, data[start:stop])
        done += count or 1
    assert said(together) == said(alone)


@pytest.mark.parametrize("text", ["", "x", '"', "\\", "\n", "é", "x" * 4000])
def test_of_many_reads_those_before_the_first_unlike_one_are_taken(text: str) -> None:
    record, usual = stream_record(), read_of({"content": "x"})
    other = read_of({"content": text}, created=2 if text == "x" else 1)
    record.receive(1, usual)
    record.receive(1, usual)  # the first after which a pattern is looked for
    reads = [(read, 0, len(read), 2, 0, 0) for read in [*[usual] * 5, other, usual]]
    assert record.receive_alike(reads) == (5 if text in ("", "x") else 7)


def test_nothing_is_taken_together_of_what_does_not_stream_or_is_compressed() -> None:
    read = read_of({"content": "x"})
    for kind, coding in (("application/json", ""), ("text/event-stream", "gzip"), ("text/event-stream", "br")):
        record = StreamRecord(orjson.loads, 1 << 20, streaming=True)
        record.response(200, kind, coding)
        assert record.receive_alike([(read, 0, len(read), 1, 0, 0)]) == 0 and record.body_bytes == 0
