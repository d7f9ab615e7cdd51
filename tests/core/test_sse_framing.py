"""How the decoder cuts bytes into events: line ends, reads, the end of a stream, its bounds; on any bytes at all."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sloscope.sse import Output, StreamDecoder, StreamEvent


def decode(*reads: bytes, **options: Any) -> list[StreamEvent]:
    """Events of a stream that ends after these reads."""
    decoder = StreamDecoder(**options)
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.finish()


HELLO = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
HELLO_EVENT = StreamEvent(outputs=(Output(0, "content"),), recognised=True)
DONE_EVENT = StreamEvent(done=True, recognised=True)


class TestFraming:
    @pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
    def test_any_line_end_ends_a_line(self, line_end: bytes) -> None:
        stream = (HELLO + b": ping\n\n" + HELLO + b"data: [DONE]\n\n").replace(b"\n", line_end)
        assert decode(stream) == [HELLO_EVENT, HELLO_EVENT, DONE_EVENT]

    def test_line_ends_may_be_mixed(self) -> None:
        """CRLF then LF, CR then LF-less data, LF then CR: three blank lines, three events."""
        line = HELLO.rstrip()
        stream = line + b"\r\n\n" + line + b"\r\r" + line + b"\n\r"
        assert decode(stream) == [HELLO_EVENT] * 3

    def test_a_read_that_looks_like_one_event_may_hold_two(self) -> None:
        line = HELLO.rstrip()
        assert decode(HELLO, line + b"\r\r" + line + b"\n\n") == [HELLO_EVENT] * 3

    def test_the_type_of_an_event_may_come_in_an_earlier_read(self) -> None:
        assert decode(HELLO, b"event: error\n", b'data: {"code": 7}\n\n')[1:] == [StreamEvent(error="7")]

    def test_cr_and_lf_in_two_reads_are_one_line_end(self) -> None:
        line = HELLO.rstrip()
        assert decode(b"event: x\r", b"\n" + line + b"\r", b"\n\r", b"\n") == [HELLO_EVENT]

    def test_a_cr_dispatches_without_waiting_for_its_lf(self) -> None:
        decoder = StreamDecoder()
        assert decoder.feed(HELLO.rstrip() + b"\r\n\r") == [HELLO_EVENT]
        assert decoder.feed(b"\n") == []

    def test_other_separators_of_text_are_no_line_ends(self) -> None:
        for separator in ("\v", "\f", "\x1c", "\x85", "\u2028"):
            assert decode(HELLO.replace(b"hi", separator.encode()))[0].malformed == (separator < " ")

    def test_one_space_after_the_colon_is_optional(self) -> None:
        assert decode(HELLO.replace(b"data: ", b"data:")) == [HELLO_EVENT]
        assert decode(b"data:[DONE]\n\n", b"data:  [DONE] \n\n") == [DONE_EVENT, DONE_EVENT]

    def test_data_lines_are_joined_by_a_newline(self) -> None:
        two = b'data: {"choices":\ndata:[{"index":0,"delta":{"content":"hi"}}]}\n\n'
        assert decode(two) == [HELLO_EVENT]
        assert decode(b'data: {"choices": [{"delta": {"content": "h\ndata: i"}}]}\n\n')[0].malformed

    def test_comments_and_other_fields_are_ignored(self) -> None:
        assert decode(b": ping\nid: 5\nretry: 100\nevent: message\nfoo: bar\nbaz\n" + HELLO) == [HELLO_EVENT]
        assert decode(b": ping\n\nid: 5\n\nevent: ping\n\n\n\n") == []

    @pytest.mark.parametrize(
        "heartbeat", [b"data\n\n", b"data:\n\n", b"data: \n\n", b"data:  \ndata: " + b" " * 20 + b"\n\n"]
    )
    def test_blank_data_is_no_event(self, heartbeat: bytes) -> None:
        assert decode(heartbeat + HELLO) == [HELLO_EVENT]

    def test_a_bom_counts_at_the_start_only(self) -> None:
        bom = b"\xef\xbb\xbf"
        assert decode(bom + HELLO) == decode(bom[:1], bom[1:2], bom[2:] + HELLO) == [HELLO_EVENT]
        assert decode(HELLO, bom + HELLO) == [HELLO_EVENT]
        assert decode(bom + bom + HELLO) == []

    def test_a_character_split_across_reads_is_whole(self) -> None:
        stream = HELLO.replace(b"hi", "é👋".encode())
        for cut in range(len(stream)):
            assert decode(stream[:cut], stream[cut:], loads=orjson.loads) == [HELLO_EVENT]

    def test_events_come_with_the_read_that_completes_them(self) -> None:
        decoder = StreamDecoder()
        assert decoder.feed(HELLO + HELLO + HELLO[:20]) == [HELLO_EVENT, HELLO_EVENT]
        assert decoder.feed(HELLO[20:-1]) == []
        assert decoder.feed(b"\n") == [HELLO_EVENT]
        assert decoder.feed(b"") == []


class TestEndOfStream:
    @pytest.mark.parametrize(
        ("ending", "events", "torn"),
        [
            (b"", [], False),
            (b"data: [DONE]", [DONE_EVENT], False),
            (b"data: [DONE]\n", [DONE_EVENT], False),
            (b"data: [DONE]\r", [DONE_EVENT], False),
            (b"data: [DON", [], True),
            (HELLO[:-2], [HELLO_EVENT], False),
            (HELLO[:-1], [HELLO_EVENT], False),
            (HELLO[:-3], [], True),
            (b'data: {"choices": [1]}', [StreamEvent(malformed=True, recognised=True)], False),
            (b"data: 5", [], True),
            (b"data: ", [], True),
            (b"dat", [], True),
            (b"event: ping\n", [], True),
            (b": ping", [], False),
            (b": ping\n", [], False),
            (b"event: err", [], True),
            (b"event: error\n", [StreamEvent(error="error event", recognised=True)], True),
            (b'event: error\ndata: {"co', [StreamEvent(error="error event", recognised=True)], True),
            (b'event: error\ndata: {"code": 7}', [StreamEvent(error="7")], False),
            (b'error: {"code": 7}', [StreamEvent(error="7")], False),
        ],
    )
    def test_only_a_whole_event_survives_the_end(self, ending: bytes, events: list[StreamEvent], torn: bool) -> None:
        decoder = StreamDecoder()
        assert decoder.feed(HELLO + ending) == [HELLO_EVENT]
        assert not decoder.torn
        assert decoder.finish() == events
        assert decoder.torn == torn
        assert decoder.finish() == []

    def test_half_a_bom_is_torn(self) -> None:
        decoder = StreamDecoder()
        assert decoder.feed(b"\xef\xbb") + decoder.finish() == [] and decoder.torn


class TestOversized:
    """HELLO is 56 bytes of line, 50 of data."""

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_an_oversized_event_is_counted_and_the_next_one_is_read(self, size: int) -> None:
        big = HELLO.replace(b"hi", b"h" * 1000)
        several_lines = b"data: 12345678\n" * 10 + b"\n"
        stream = HELLO + big + HELLO + several_lines + HELLO + b"x" * 200 + b"\ndata: 1\n\n" + HELLO
        decoder = StreamDecoder(max_event_bytes=56)
        events = [e for i in range(0, len(stream), size) for e in decoder.feed(stream[i : i + size])]
        assert events == [HELLO_EVENT] * 4 and decoder.oversized == 3
        assert decoder.finish() == [] and not decoder.torn

    def test_the_bound_is_inclusive(self) -> None:
        for bound, oversized in ((56, 0), (55, 1)):
            for reads in ([HELLO, HELLO], [HELLO[:30], HELLO[30:] + HELLO]):
                decoder = StreamDecoder(max_event_bytes=bound)
                events = [event for read in reads for event in decoder.feed(read)]
                assert decoder.oversized == 2 * oversized and len(events) == 2 - 2 * oversized

    def test_the_newline_between_data_lines_counts(self) -> None:
        """2 lines of 5 bytes and the newline that joins them: 5 + 1 + 5 = 11."""
        for bound, oversized in ((11, 0), (10, 1)):
            decoder = StreamDecoder(max_event_bytes=bound)
            decoder.feed(b"data:12345\ndata:67890\n\n")
            assert decoder.oversized == oversized

    def test_a_read_may_end_inside_and_at_the_end_of_an_oversized_line(self) -> None:
        """The line end that follows is not a blank line: the event goes on, and is still the skipped one."""
        decoder = StreamDecoder(max_event_bytes=56)
        reads = [b"data: " + b"1" * 60, b"\ndata: 2\n\n", HELLO]
        assert [event for read in reads for event in decoder.feed(read)] == [HELLO_EVENT]

    def test_a_comment_has_no_size(self) -> None:
        decoder = StreamDecoder(max_event_bytes=56)
        stream = b":" + b"p" * 1000 + b"\n" + HELLO
        assert decoder.feed(stream) == [e for i in range(len(stream)) for e in decoder.feed(stream[i : i + 1])]
        assert decoder.oversized == 0

    def test_an_oversized_event_cut_by_the_end_is_torn(self) -> None:
        decoder = StreamDecoder(max_event_bytes=10)
        assert decoder.feed(b"data: 0123456789") == [] and decoder.finish() == []
        assert decoder.oversized == 1 and decoder.torn

    @pytest.mark.parametrize("block", [b"x" * 65_536, b"data: 12345678\n" * 4096, b":" + b"p" * 65_535])
    def test_memory_is_bounded_by_the_event_size(self, block: bytes) -> None:
        decoder = StreamDecoder(max_event_bytes=100_000)
        tracemalloc.start()
        try:
            for _ in range(100):
                decoder.feed(block)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # 6.5 MB were fed. A bytearray may hold an eighth more than its content.
        assert kept < 200_000


def whatwg_messages(stream: bytes) -> list[str]:
    """Data of the events that the standard dispatches, read off its text, one character at a time."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    messages, data, line, i = [], "", "", 0
    while i < len(text):
        if text[i] not in "\r\n":
            line += text[i]
            i += 1
            continue
        i += 2 if text[i : i + 2] == "\r\n" else 1
        if line == "":
            if data != "":
                messages.append(data.removesuffix("\n"))
            data = ""
        elif ":" in line:
            field, value = line.split(":", 1)
            if field == "data":
                data += value.removeprefix(" ") + "\n"
        elif line == "data":
            data += "\n"
        line = ""
    return messages


FIELDS = [b"data: ", b"data:", b"data", b"event: x", b":", b" ", b"id: 1", HELLO]
LINE_ENDS = [b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n"]
VALUES = [b"\xef\xbb\xbf", b"{}", b"[DONE]", b"[1", b"\xc3", b"\xa9", b"ab", b"0123456789abcdef"]
PIECES = st.sampled_from([*FIELDS, *LINE_ENDS, *VALUES])
STREAMS = st.one_of(st.lists(PIECES, max_size=30).map(b"".join), st.binary(max_size=80))


@st.composite
def reads(draw: st.DrawFn) -> list[bytes]:
    stream = draw(STREAMS)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(reads())
@example([b"data: 1\r", b"\ndata: 2\r\n\r", b"\n"])
@example([b"data: [DO", b"NE]\n\ndata: 1\n\n"])
def test_any_reads_give_the_messages_of_the_standard(pieces: list[bytes]) -> None:
    seen: list[str] = []

    def loads(data: bytes) -> dict[str, Any]:
        seen.append(data.decode("utf-8", "replace").strip())
        return {}

    decoder = StreamDecoder(loads)
    found = [event for piece in pieces for event in decoder.feed(piece)]
    words = [(message.encode().strip(), message.strip()) for message in whatwg_messages(b"".join(pieces))]
    # The decoder skips what bytes call blank, and what ends a stream is no JSON.
    assert seen == [message for word, message in words if word not in (b"", b"[DONE]")]
    assert sum(event.done for event in found) == [word for word, _ in words].count(b"[DONE]")


TOKENS = [b"event: error\n", b'"error":', b'"choices":[', b'"delta":{', b'"content":', b'"usage":', b"1e999", b"NaN"]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(PIECES, st.sampled_from(TOKENS), st.binary(max_size=5)), max_size=30),
    st.sampled_from([json.loads, orjson.loads]),
    st.sampled_from([20, 8 << 20]),
)
def test_no_bytes_raise_and_no_cut_matters(pieces: list[bytes], loads: Any, bound: int) -> None:
    stream = b"".join(pieces)
    seen = []
    for cut_up in ([stream], pieces, [stream[i : i + 1] for i in range(len(stream))]):
        decoder = StreamDecoder(loads, max_event_bytes=bound)
        events = [event for read in cut_up for event in decoder.feed(read)] + decoder.finish()
        seen.append((events, decoder.oversized, decoder.torn))
    assert seen[0] == seen[1] == seen[2]


def test_one_byte_reads_cost_in_proportion_to_the_bytes() -> None:
    def seconds(size: int) -> float:
        stream = b"data: " + b"x" * size + b"\n\n"
        best = float("inf")
        for _ in range(3):
            decoder = StreamDecoder()
            begin = time.process_time()
            for i in range(len(stream)):
                decoder.feed(stream[i : i + 1])
            best = min(best, time.process_time() - begin)
        return best

    # 16 times the bytes: 16 times the seconds if linear, 256 if each read copied what is kept.
    assert seconds(160_000) < 48 * seconds(10_000)
