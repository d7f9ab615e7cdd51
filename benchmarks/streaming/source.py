"""An upstream that streams completions at a steady rate and stamps every event when it hands it to its socket.

The stamp is the event's text, 20 digits, so that it passes any proxy; source and sink share a host and its monotonic
clock. Each stream keeps to its own grid: event i is due at first + i / rate, and a late one does not move the next.
An answer has --events of them, or as many as the smaller `max_tokens` of its request.
With `--log FILE` the stamps of every stream are also written there when it ends, one JSON line with the
request's own id and the answer's: what a client is held to that reports its own figures only.

`python -m benchmarks.streaming.source --events 500 --rate 50`; one line on stderr says the address.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO, cast

import httptools
import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"bench"}]}'
_NAMES = (b"x-request-id", b"x-sloscope-request-id")
STAMP_DIGITS = 20


class Form(NamedTuple):
    """How an endpoint says it."""

    answer: str  # the id, of its number
    event: str  # of the id, a piece and the finish reason
    role: str | None
    piece: str  # @: the stamp
    empty: str


CHAT = Form(
    "chatcmpl-%d",
    'data: {"id":"%s","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n',
    '{"role":"assistant","content":""}',
    '{"content":" @"}',
    "{}",
)
TEXT = Form(
    "cmpl-%d",
    'data: {"id":"%s","object":"text_completion","created":1700000000,"model":"bench",'
    '"choices":[{"index":0,"text":%s,"logprobs":null,"finish_reason":%s}]}\n\n',
    None,
    '" @"',
    '""',
)


class Shape:
    """What every answer looks like."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.events: int = asked.events
        self.gap_s: float = 1 / asked.rate
        self.ttft_s: float = asked.ttft_ms / 1e3
        self.pause_s: float = asked.pause_ms / 1e3  # one longer gap in the middle
        self.answered = 0
        self.log: TextIO | None = asked.log.open("w") if asked.log is not None else None


def framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class Stream(asyncio.Protocol):
    """One connection; a request is answered when it is whole."""

    def __init__(self, shape: Shape, loop: asyncio.AbstractEventLoop) -> None:
        self._shape, self._loop = shape, loop
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # --- the parser's side

    def on_message_begin(self) -> None:
        self._path, self._body, self._name = b"", b"", ""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _NAMES:
            self._name = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._arrived_ns = time.monotonic_ns()
        assert self._transport is not None
        if not self._path.endswith(b"/completions"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_MODELS)
            self._transport.write(head + _MODELS)
            return
        self._shape.answered += 1
        self._form = form = CHAT if self._path.endswith(b"/chat/completions") else TEXT
        self._answer = form.answer % self._shape.answered
        role = framed((form.event % (self._answer, form.role, "null")).encode()) if form.role is not None else b""
        self._transport.write(_HEAD + role)
        before, after = (form.event % (self._answer, form.piece, "null")).encode().split(b"@")
        size = len(before) + STAMP_DIGITS + len(after)
        self._before, self._after = b"%x\r\n%b" % (size, before), after + b"\r\n"
        asked: int = json.loads(self._body).get("max_tokens") or self._shape.events
        self._events = self._left = min(asked, self._shape.events)
        self._sent_ns: list[int] = []
        self._due = self._loop.time() + self._shape.ttft_s
        self._timer = self._loop.call_at(self._due, self._emit)

    # --- events

    def _emit(self) -> None:
        if self._transport is None:
            return
        now_ns = time.monotonic_ns()
        self._transport.write(b"%b%0*d%b" % (self._before, STAMP_DIGITS, now_ns, self._after))
        self._sent_ns.append(now_ns)
        self._left -= 1
        if not self._left:
            self._end()
            return
        self._due += self._shape.gap_s
        if self._shape.pause_s and self._left == self._events // 2:
            self._due += self._shape.pause_s
        self._timer = self._loop.call_at(self._due, self._emit)

    def _end(self) -> None:
        assert self._transport is not None
        finish = (self._form.event % (self._answer, self._form.empty, '"stop"')).encode()
        usage = json.dumps({"prompt_tokens": 8, "completion_tokens": self._events, "total_tokens": 8})
        last = f'data: {{"id":"x","object":"chat.completion.chunk","model":"bench","choices":[],"usage":{usage}}}\n\n'
        end = framed(finish) + framed(last.encode()) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._transport.write(end)
        if self._shape.log is not None:
            names = {"id": self._name, "response": self._answer}
            told = {**names, "arrived_ns": self._arrived_ns, "sent_ns": self._sent_ns}
            self._shape.log.write(json.dumps(told) + "\n")
            self._shape.log.flush()


async def serve(asked: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    shape = Shape(asked)
    server = await loop.create_server(lambda: Stream(shape, loop), "127.0.0.1", asked.port, backlog=4096)
    print(f"source on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    gc.freeze()
    gc.disable()  # a collection would be someone's late event
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="(default: 0, any)")
    parser.add_argument("--events", type=int, default=500, help="output events of an answer (default: 500)")
    parser.add_argument("--rate", type=float, default=50, help="events per second of a stream (default: 50)")
    parser.add_argument("--ttft-ms", type=float, default=50, help="request to first event (default: 50)")
    parser.add_argument("--pause-ms", type=float, default=0, help="longer gap in the middle by this (default: 0)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="stamps of every finished answer, JSON lines")
    try:
        uvloop.run(serve(parser.parse_args()))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
