"""Heads and body framings, without sockets."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter import http1
from exporter.framing import SHORT_CHUNKS, Chunked, MessageError, NoBody, Sized, UntilClose
from exporter.observation import MAX_READS, Observation
from exporter.relay import relay

RAW = b"5\r\nhello\r\n10;name=value\r\n0123456789abcdef\r\n0\r\nx-trailer: t\r\n\r\n"
PAYLOAD = b"hello0123456789abcdef"


@given(st.lists(st.integers(0, len(RAW)), max_size=6))
def test_a_chunked_body_cut_anywhere_has_the_same_payload_and_end(cuts: list[int]) -> None:
    places = sorted({0, *cuts, len(RAW)})
    body, payload = Chunked(), b""
    for start, stop in pairwise(places):
        got, used = body.feed(RAW[start:stop])
        payload += got
        assert used == stop - start
    assert payload == PAYLOAD and body.complete


def test_bytes_after_the_end_of_a_chunked_body_are_not_its_own() -> None:
    assert Chunked().feed(RAW + b"HTTP/1.1 200 OK") == (PAYLOAD, len(RAW))


@pytest.mark.parametrize(
    "raw",
    [
        b"g\r\n",  # no digit
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5\nhello\r\n",  # a bare LF ends a line for some and not for others
        b"5\r\nhelloX\r\n",  # more data than the size says
        b"5 5\r\n",
        b"\r\n",
        b"f" * 16 + b"\r\n",  # above what an integer of 60 bits holds
        b"1;" + b"e" * 5000,
    ],
)
def test_a_malformed_chunk_is_refused(raw: bytes) -> None:
    with pytest.raises(MessageError):
        Chunked().feed(raw)


@pytest.mark.parametrize(
    ("before", "good", "bad", "payload"),
    [
        (b"", b"5\r\nhello\r\n", b"zz\r\n", b"hello"),
        (b"", b"5\r\nhello\r\n", b"3\r\nabcX\r\n", b"hello"),  # that chunk goes on where its size says that it ends
        (b"", b"5\r\nhello\r\n", b"0\r\nno trailer\r\n\r\n", b"hello"),
        (b"", b"5\r\nhello\r\n", b"1;" + b"e" * 5000, b"hello"),
        (b"", b"", b"zz\r\n", b""),
        (b"5\r\nhe", b"llo\r\n", b"zz\r\n", b"llo"),
        (b"5\r\nhe", b"", b"lloX\r\n", b""),
        (b"5\r\nhello\r", b"\n1\r\na\r\n", b"2\r\nbbb", b"a"),
        (b"0\r\na: b\r\n", b"", b"c\r\n\r\n", b""),
        (b"5\r\nhello\r\n1", b"", b"g\r\n", b""),
    ],
)
def test_the_whole_chunks_before_a_malformed_one_are_told_with_it(
    before: bytes, good: bytes, bad: bytes, payload: bytes
) -> None:
    body = Chunked()
    body.feed(before)
    with pytest.raises(MessageError) as error:
        body.feed(good + bad)
    assert (error.value.payload, error.value.used) == (payload, len(good))


def test_a_sized_body_takes_no_more_than_its_length() -> None:
    body = Sized(5)
    assert body.feed(b"abc") == (b"abc", 3) and not body.complete
    assert body.feed(b"deNEXT") == (b"de", 2) and body.complete


def head(*lines: str) -> bytes:
    return "\r\n".join(("POST /v1/x HTTP/1.1", *lines)).encode("latin-1") + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("host: a", "content-length: 5", "transfer-encoding: chunked"), 400),
        (head("host: a", "content-length: 5", "content-length: 5"), 400),
        (head("host: a", "content-length: 5", "content-length: 6"), 400),
        (head("host: a", "content-length: 5, 5"), 400),
        (head("host: a", "content-length: +5"), 400),
        (head("host: a", "content-length: 0x5"), 400),
        (head("host: a", "content-length:"), 400),
        (head("host: a", "transfer-encoding: gzip, chunked"), 501),
        (head("host: a", "transfer-encoding: chunked", "transfer-encoding: chunked"), 400),
        (head("host: a", "transfer-encoding : chunked"), 400),
        (head("host: a", "x: y\n\nGET /admin HTTP/1.1"), 400),
        (head("host: a", "x: y\r z"), 400),
        (head("host: a", " folded"), 400),
        (head("host: a", "x: \0"), 400),
        (head("host: a", "host: b"), 400),
        (head(), 400),
        (head("host: a", "expect: miracles"), 417),
        (head("host: a", "connection: upgrade", "upgrade: websocket"), 501),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", 501),
        (b"BREW /pot HTTP/1.1\r\nhost: a\r\n\r\n", 501),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"GET /" + b"a" * (17 << 10) + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
        (head("host: a", *(f"x{n}: y" for n in range(200))), 431),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    ],
)
def test_a_request_that_two_readers_could_understand_differently_is_refused(raw: bytes, status: int) -> None:
    with pytest.raises(MessageError) as caught:
        http1.parse_request_head(raw)
    assert caught.value.status == status


def test_a_request_goes_up_without_what_concerned_the_first_hop_only() -> None:
    raw = head(
        "Host: front", "Connection: keep-alive, X-Hop", "X-Hop: 1", "Keep-Alive: 5", "TE: trailers", "Upgrade: h2c",
        "HTTP2-Settings: x", "Expect: 100-continue", "Authorization: Bearer k", "X-Sloscope-Request-Id: OLD",
        "content-length: 3",
    )  # fmt: skip
    parsed = http1.parse_request_head(raw)
    sent = http1.encode_request(parsed, b"/base", b"back:1", [(b"x-sloscope-request-id", b"NEW")])
    assert sent == (
        b"POST /base/v1/x HTTP/1.1\r\nhost: back:1\r\nAuthorization: Bearer k\r\ncontent-length: 3\r\n"
        b"x-sloscope-request-id: NEW\r\n\r\n"
    )


def test_naming_the_length_in_connection_does_not_remove_it() -> None:
    parsed = http1.parse_request_head(head("host: a", "connection: content-length", "content-length: 3"))
    assert b"content-length: 3" in http1.encode_request(parsed, b"", b"b", [])


def test_an_absolute_target_is_forwarded_as_a_path() -> None:
    for target, path in ((b"http://a/b?c=d", b"/b?c=d"), (b"http://a", b"/")):
        assert http1.parse_request_head(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % target).target == path


def response(status: int, *lines: str, method: bytes = b"GET") -> http1.ResponseHead:
    raw = "\r\n".join((f"HTTP/1.1 {status} OK", *lines)).encode() + b"\r\n\r\n"
    return http1.parse_response_head(raw, method)


def test_the_framing_of_a_response_follows_method_status_and_headers() -> None:
    assert isinstance(response(200, "content-length: 5", method=b"HEAD").body, NoBody)
    assert isinstance(response(204).body, NoBody)
    assert isinstance(response(304, "content-length: 5").body, NoBody)
    assert isinstance(response(200, "content-length: 5").body, Sized)
    assert isinstance(response(200, "transfer-encoding: chunked").body, Chunked)
    until_close = response(200)
    assert isinstance(until_close.body, UntilClose) and not until_close.keep_alive


@pytest.mark.parametrize(
    "lines", [("content-length: 5", "content-length: 6"), ("content-length: x",), ("transfer-encoding: gzip",)]
)
def test_a_response_whose_length_is_unclear_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(MessageError):
        response(200, *lines)


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.binary(min_size=1, max_size=20).map(lambda data: b"%x\r\n%b\r\n" % (len(data), data)),
        st.binary(min_size=1, max_size=20).map(lambda data: b"%X \r\n%b\r\n" % (len(data), data)),
        st.sampled_from(
            [b"0\r\n", b"\r\n", b"0\r\n\r\n", b"5;ext=1\r\nhello\r\n", b"+5\r\nhello\r\n", b"0_5\r\nhello\r\n"]
        ),
    ),
    max_size=8,
)


class Sent:
    """What a relay hands on, and what it leaves to the general way, which reads strictly."""

    def __init__(self, body: Chunked) -> None:
        self.reads: list[tuple[Any, ...]] = []
        self.written: list[bytes] = []
        self.left: list[tuple[bytes, int]] = []
        self._body = body
        observation = cast(Observation, self)  # of which it uses `reads`
        self.receive = relay(body, self.written.append, observation, time.monotonic_ns, self._otherwise)

    def _otherwise(self, data: bytes, received_ns: int) -> None:
        self.left.append(self._body.feed(data))


@settings(max_examples=500)
@given(PIECES)
@example([b"5\r\nhello\r\n"] * 2 + [b"5\r\nhell", b"5\r\nhello\r\n"])
@example([b"1001\r\n" + b"x" * 0x1001 + b"\r\n"] * 2)
@example([b"5\r\nhello\r\n", b"5\r\nhelloxx", b"5\r\nhello\r\n"])
def test_what_takes_the_short_way_is_one_chunk_to_the_strict_reader(pieces: list[bytes]) -> None:
    plain, quick = Chunked(padded=True), Chunked(padded=True)
    sent = Sent(quick)
    for data in pieces * 2:  # sizes that were met before are what the short way is for
        sent.written.clear()
        sent.left.clear()
        try:
            expected = plain.feed(data)
        except MessageError:
            with pytest.raises(MessageError):
                sent.receive(data)
            return
        before_ns = time.monotonic_ns()
        sent.receive(data)
        if sent.written:
            assert sent.written == [data] and not sent.left and not plain.complete
            noted, start, stop, received_ns, forwarded_ns, done_ns = sent.reads[-1]
            assert expected == (noted[start:stop], len(data))
            assert before_ns <= received_ns <= forwarded_ns <= done_ns <= time.monotonic_ns()
        else:
            assert sent.left == [expected]
        if plain.complete:
            return


def test_a_short_chunk_takes_the_short_way_from_the_second_of_its_size_on() -> None:
    sent = Sent(Chunked(padded=True))
    for text in (b"hello", b"world", b"x" * 4000, b"y" * 4000):
        raw = b"%x\r\n%b\r\n" % (len(text), text)
        sent.receive(raw)
        sent.receive(raw)
    assert len(sent.written) >= 6
    assert {noted[start:stop] for noted, start, stop, *_ in sent.reads} == {
        b"hello",
        b"world",
        b"x" * 4000,
        b"y" * 4000,
    }


def test_reads_of_a_fast_stream_are_understood_before_they_are_many() -> None:
    sent = Sent(Chunked(padded=True))
    raw = b"5\r\nhello\r\n"
    for _ in range(MAX_READS + 10):
        sent.receive(raw)
    assert len(sent.reads) == MAX_READS and len(sent.left) >= 10, "the general way understands them"


def test_no_request_and_no_extension_decides_which_sizes_are_known() -> None:
    SHORT_CHUNKS.clear()
    request = Chunked()
    for size in range(1, 200):
        request.feed(b"%x\r\n%b\r\n" % (size, b"x" * size))
    assert not SHORT_CHUNKS
    response = Chunked(padded=True)
    for size in range(1, 5000):
        response.feed(b"%04x\r\n%b\r\n" % (size, b"x" * size))
    for size in range(1, 5000):
        response.feed(b"%05x\r\n%b\r\n" % (size, b"x" * size))
    assert 0 < len(SHORT_CHUNKS) <= 4096
    assert all(int(line, 16) + 2 == left for line, left in SHORT_CHUNKS.items())
