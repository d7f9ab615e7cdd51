"""An upstream that streams completions at a steady rate and stamps every event when it hands it to its socket.

The stamp is the event's text, 20 digits, so that it passes any proxy; source and sink share a host and its monotonic
clock. Each stream keeps to its own grid: event i is due at first + i / rate, and a late one does not move the next.
An answer has --events of them, or as many as the smaller `max_tokens` of its request.
What is due at once goes out in slices, with a look at the sockets between two of them: a request that arrives in the
middle of a burst is stamped when it comes, and does not wait for the burst's end.
With `--log FILE` the stamps of every finished answer are written there when the source is ended by SIGTERM or Ctrl-C,
one JSON line each with the request's own id and the answer's: what a client is held to that reports its own figures
only. Not before, since a file may hold up who writes to it for tens of milliseconds.

`python -m benchmarks.streaming.source --events 500 --rate 50`; one line on stderr says the address.
"""

import argparse
import asyncio
import gc
import itertools
import json
import signal
import sys
import time
from array import array
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, cast

import httptools
import uvloop

from sloscope.client.h1 import make_room

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000,"owned_by":"bench"}]}'
_NAMES = (b"x-request-id", b"x-sloscope-request-id")
STAMP_DIGITS = 20
_SOCKETS = 8192  # that are open at once
_SLICE_NS = 200_000  # an arrival is stamped late by this at most, and by what one event takes to be written


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
        self.gap_ns = round(1e9 / asked.rate)
        self.ttft_ns = round(asked.ttft_ms * 1e6)
        self.pause_ns = round(asked.pause_ms * 1e6)  # one longer gap in the middle
        self.answered = 0
        self.is_logged = asked.log is not None
        self.finished: list[Answer] = []


class Answer(NamedTuple):
    """A finished one, as logged."""

    id: str
    response: str
    arrived_ns: int
    sent_ns: "array[int]"

    def line(self) -> str:
        return json.dumps({**self._asdict(), "sent_ns": list(self.sent_ns)}) + "\n"


class Pace:
    """Has every stream emit when it is due, the earliest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[int, int, Stream]] = []
        self._number = itertools.count()  # breaks ties
        self._wakes_ns = 0  # when the earliest timer fires, 0: none is set

    def add(self, due_ns: int, stream: "Stream") -> None:
        heappush(self._due, (due_ns, next(self._number), stream))
        self._wait(time.monotonic_ns())

    def _wait(self, now_ns: int) -> None:
        due_ns = self._due[0][0]
        if self._wakes_ns and self._wakes_ns <= due_ns:
            return
        self._wakes_ns = max(due_ns, now_ns)
        # Timers are whole milliseconds and round to the nearest: up, or the event leaves early.
        self._loop.call_later(max(0, -(-(due_ns - now_ns) // 1_000_000)) / 1000, self._emit, self._wakes_ns)

    def _emit(self, woken_ns: int) -> None:
        if woken_ns != self._wakes_ns:
            return  # an earlier timer has been set since
        self._wakes_ns = 0
        now_ns = time.monotonic_ns()
        until_ns = now_ns + _SLICE_NS
        while self._due and self._due[0][0] <= now_ns < until_ns:
            due_ns, _, stream = heappop(self._due)
            next_ns = stream.emit(due_ns)
            if next_ns is not None:
                heappush(self._due, (next_ns, next(self._number), stream))
            now_ns = time.monotonic_ns()
        if self._due:
            self._wait(now_ns)


def framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class Stream(asyncio.Protocol):
    """One connection; a request is answered when it is whole."""

    def __init__(self, shape: Shape, pace: Pace) -> None:
        self._shape, self._pace = shape, pace
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._read_ns = time.monotonic_ns()
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
        self._arrived_ns = self._read_ns
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
        self._sent_ns = array("q")
        self._pace.add(self._arrived_ns + self._shape.ttft_ns, self)

    # --- events

    def emit(self, due_ns: int) -> int | None:
        """Sends the event that was due then; when the next one is due, None: there is none."""
        if self._transport is None:
            return None
        self._left -= 1
        after = self._after if self._left else self._after + self._end()
        now_ns = time.monotonic_ns()
        self._transport.write(b"%b%0*d%b" % (self._before, STAMP_DIGITS, now_ns, after))
        self._sent_ns.append(now_ns)
        if not self._left:
            if self._shape.is_logged:
                self._shape.finished.append(Answer(self._name, self._answer, self._arrived_ns, self._sent_ns))
            return None
        pause_ns = self._shape.pause_ns if self._left == self._events // 2 else 0
        return due_ns + self._shape.gap_ns + pause_ns

    def _end(self) -> bytes:
        finish = (self._form.event % (self._answer, self._form.empty, '"stop"')).encode()
        usage = json.dumps({"prompt_tokens": 8, "completion_tokens": self._events, "total_tokens": 8})
        last = f'data: {{"id":"x","object":"chat.completion.chunk","model":"bench","choices":[],"usage":{usage}}}\n\n'
        return framed(finish) + framed(last.encode()) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def serve(asked: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    shape, pace, over = Shape(asked), Pace(loop), asyncio.Event()
    log = asked.log.open("w") if asked.log is not None else None
    loop.add_signal_handler(signal.SIGTERM, over.set)
    make_room(_SOCKETS)
    server = await loop.create_server(lambda: Stream(shape, pace), "127.0.0.1", asked.port, backlog=4096)
    print(f"source on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    gc.freeze()
    gc.disable()  # a collection would be someone's late event
    try:
        await over.wait()
    finally:
        if log is not None:
            with log:
                log.writelines(answer.line() for answer in shape.finished)


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
