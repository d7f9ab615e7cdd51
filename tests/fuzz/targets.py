"""What must hold for any bytes at all. Each target takes one input and raises where it does not hold.

The first bytes of an input say where the rest is cut: however a stream is cut, it says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson

from exporter import http1
from exporter.ask_usage import UsageFilter
from exporter.framing import Chunked, MessageError
from sloscope.sse import StreamDecoder, StreamEvent
from tests.field_data import field_folder

_CUTS = 4
_SMALL = 200  # bytes: an event above is oversized


def pieces(data: bytes) -> tuple[bytes, list[bytes]]:
    """The stream, and the same in pieces. Every byte of the prefix is the size of one, 255 stands for what is left."""
    sizes, stream = data[:_CUTS], data[_CUTS:]
    cut: list[bytes] = []
    at = 0
    for size in sizes:
        end = len(stream) if size == 255 else at + size
        cut.append(stream[at:end])
        at = end
    # The rest byte by byte, as far as that is quick.
    cut += [stream[n : n + 1] for n in range(at, min(len(stream), at + 64))] + [stream[at + 64 :]]
    return stream, cut


def decoded(reads: list[bytes], limit: int) -> tuple[list[StreamEvent], int, bool]:
    decoder = StreamDecoder(orjson.loads, max_event_bytes=limit)
    events: list[StreamEvent] = []
    for read in reads:
        events += decoder.feed(read)
        assert len(decoder._tail) + decoder._data_bytes <= 2 * limit + len(read), "keeps more than an event"
    return events + decoder.finish(), decoder.oversized, decoder.torn


def sse(data: bytes) -> None:
    """The stream decoder: any cut gives the same events, and nothing makes it raise or keep much."""
    stream, cut = pieces(data)
    for limit in (_SMALL, 8 << 20):
        assert decoded([stream], limit) == decoded(cut, limit)


def usage_filter(data: bytes) -> None:
    """What a client that did not ask for usage gets: the same under any cut, and every other event."""
    stream, cut = pieces(data)

    def filtered(reads: list[bytes]) -> bytes:
        keeper = UsageFilter()
        return b"".join(keeper.feed(read) for read in reads) + keeper.finish()

    out = filtered([stream])
    assert out == filtered(cut)
    wanted = [event for event in decoded([stream], 8 << 20)[0] if not event.raw_usage_only]
    assert [event for event in decoded([out], 8 << 20)[0] if not event.raw_usage_only] == wanted


def chunked(data: bytes) -> None:
    """The chunked coding: any cut gives the same payload and the same end, or the same refusal."""
    stream, cut = pieces(data)

    def read(reads: list[bytes]) -> tuple[bytes, int, bool] | None:
        body = Chunked()
        payload, used = b"", 0
        try:
            for each in reads:
                got, taken = body.feed(each)
                payload, used = payload + got, used + taken
                assert taken == len(each) or body.complete
        except MessageError:
            return None
        return payload, used, body.complete

    assert read([stream]) == read(cut)


def request_head(data: bytes) -> None:
    """A request head is refused, or goes up as one that is read the same way."""
    try:
        head = http1.parse_request_head(data[: http1.find_head_end(data)])
    except MessageError as error:
        _check_status(error.status, range(400, 600))
        return
    sent = http1.encode_request(head, b"", b"upstream", [(b"x-sloscope-request-id", b"1")])
    assert sent.endswith(b"\r\n\r\n") and sent.count(b"\r\n\r\n") == 1, "a head in a head"
    again = http1.parse_request_head(sent)
    assert (again.method, again.target, type(again.body)) == (head.method, head.target, type(head.body))
    assert getattr(again.body, "left", None) == getattr(head.body, "left", None)
    _check_lines(sent)


def response_head(data: bytes) -> None:
    """A response head is refused with 502, or goes down as one that is read the same way."""
    method, raw = (b"HEAD" if data[:1] == b"H" else b"POST"), data[1:]
    try:
        head = http1.parse_response_head(raw[: http1.find_head_end(raw)], method)
    except MessageError as error:
        _check_status(error.status, range(502, 503))
        return
    sent = http1.encode_response(head, [], isinstance(head.body, Chunked), close=False)
    assert sent.endswith(b"\r\n\r\n") and sent.count(b"\r\n\r\n") == 1, "a head in a head"
    again = http1.parse_response_head(sent, method)
    assert (again.status, type(again.body)) == (head.status, type(head.body))
    assert getattr(again.body, "left", None) == getattr(head.body, "left", None)
    _check_lines(sent)


def _check_status(status: int, accepted: range) -> None:
    assert status in accepted


def _check_lines(head: bytes) -> None:
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert not any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines)
    assert all(b":" in line for line in lines[1:])


_REQUESTS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n",
    b"POST http://x/v1/completions?a=b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\n",
)
_RESPONSES = (
    b"PHTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HHTTP/1.0 204 \r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n",
    b"PHTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n",
    b"PHTTP/1.1 429 Too Many\r\nretry-after: 1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n",
)
_BODIES = (b"5\r\nhello\r\n0\r\n\r\n", b"1;a=b\r\nx\r\nA\r\n0123456789\r\n0\r\nX-T: y\r\n\r\nrest", b"00\r\n\r\n")
_STREAMS = (
    b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n',
    b'\xef\xbb\xbfdata: {"choices":[],"usage":{"completion_tokens":2}}\r\n\r\n: ping\r\revent: error\n\n',
    b'error: {"code": 7}\r\rdata:{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}\n\r',
)

_CUT_SEEDS = (b"\xff\0\0\0", b"\1\2\3\4", b"\x20\x10\7\xff")


def seeds(target: str) -> Iterator[bytes]:
    """Where the search begins: what is usual, and beginnings and ends of streams recorded from real servers."""
    match target:
        case "request_head":
            yield from _REQUESTS
        case "response_head":
            yield from _RESPONSES
        case "chunked":
            yield from (cut + body for cut in _CUT_SEEDS for body in _BODIES)
        case _:
            folder = field_folder()
            recorded = [path.read_bytes() for path in sorted((folder / "sse").glob("*.sse"))] if folder else []
            streams = [*_STREAMS, *(stream[:2048] for stream in recorded), *(stream[-1024:] for stream in recorded)]
            yield from (cut + stream for cut in _CUT_SEEDS for stream in streams)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (sse, usage_filter, chunked, request_head, response_head)
}
