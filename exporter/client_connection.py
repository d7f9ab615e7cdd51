"""The listening side: one connection of a client, its requests one after the other."""

from __future__ import annotations

import asyncio
import re
import select
from typing import TYPE_CHECKING, cast

from exporter import http1
from exporter.exchange import Exchange
from exporter.framing import MessageError
from exporter.sockets import is_ready, reset_on_close, unsent_bytes

if TYPE_CHECKING:
    from exporter.data_plane import DataPlane

_MAX_PIPELINED = 64 << 10  # bytes that may wait while a response is on its way
_LINGER_S = 2.0
_BLANK_LINES = re.compile(rb"(?:\r\n)+")
HEAD_TIMEOUT_NS = 30_000_000_000
IDLE_TIMEOUT_NS = 75_000_000_000
_IDLES_AFTER_NS = 1_000_000_000


class ClientConnection(asyncio.Protocol):
    """Requests that come before the response to an earlier one is out wait for it."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.exchange: Exchange | None = None
        self.must_close = False  # after this response
        self.is_held = False  # the client does not read
        self.since_ns = plane.clock.monotonic_ns()  # idle, with an incomplete head or body, or closing
        self._buffer = b""
        self._searched = 0  # bytes of the buffer in which no head ends
        self._arrived_ns = 0  # of the first byte in the buffer
        self._read_ns = 0  # of the last bytes in the buffer
        self._reading = True
        self._discarding = False

    @property
    def closes_next(self) -> bool:
        return self.must_close or self._plane.draining

    @property
    def is_in_head(self) -> bool:
        return bool(self._buffer)

    def idles(self, now: int) -> bool:
        """Nothing is under way for a second: who was let in or answered just now may be about to ask."""
        is_used = self._buffer or self.exchange or self.is_held or self._discarding or self.transport.is_closing()
        return not is_used and now - self.since_ns >= _IDLES_AFTER_NS

    def is_quiet(self) -> bool:
        """The kernel holds nothing either: no request that is not read yet, no part of an answer that is not taken."""
        return not is_ready(self.transport, select.POLLIN) and not unsent_bytes(self.transport)

    @property
    def is_closing(self) -> bool:
        """What is still to be sent goes out first."""
        return self.transport.is_closing()

    @property
    def owes_body(self) -> bool:
        """The rest of a request is waited for, and would be read."""
        return self._reading and self.exchange is not None and not self.exchange.request_complete

    # --- callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        # No buffer of ours: uvloop then writes to the socket within `write`, and what the socket does not take
        # pauses the upstream at once.
        self.transport.set_write_buffer_limits(high=0)
        self._plane.admit(self)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        now = self._plane.clock.monotonic_ns()
        exchange = self.exchange
        if exchange is not None and not exchange.request_complete:
            self.since_ns = now
            data = self._feed_body(exchange, data, now)
            if not data:
                return
        if not self._buffer:
            self._arrived_ns = self.since_ns = now
        self._buffer += data
        self._read_ns = now
        if self.exchange is None:
            self._next_request()
        elif len(self._buffer) > _MAX_PIPELINED:
            self.pause_reading()

    def eof_received(self) -> None:
        self._gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._plane.clients.discard(self)
        self._plane.leaving.pop(self, None)
        self._gone()

    def pause_writing(self) -> None:
        self.is_held = True
        if self.exchange is not None:
            self.exchange.download_paused()

    def resume_writing(self) -> None:
        self.is_held = False
        if self.exchange is not None:
            self.exchange.download_resumed()

    def look_for_end(self) -> None:
        """Notices a client that left while it is not read from: its end would not be seen until somebody reads."""
        if self._reading or self.transport.is_closing():
            return
        if is_ready(self.transport, select.POLLRDHUP):
            self._gone()
            self.transport.abort()

    # --- requests

    def _next_request(self) -> None:
        while self.exchange is None and self._buffer and not self._discarding:
            # Some clients end a body with a line too many.
            if blank := _BLANK_LINES.match(self._buffer):
                self._buffer, self._searched = self._buffer[blank.end() :], 0
                continue
            end = http1.find_head_end(self._buffer, self._searched)
            if not end:
                if http1.is_broken(self._buffer, self._searched):
                    self.refuse(400, "request head: line ends other than CRLF", [])
                elif len(self._buffer) > http1.MAX_HEAD_BYTES:
                    self.refuse(431, "request head: longer than 64 KiB", [])
                self._searched = len(self._buffer)
                return
            head_bytes, rest = self._buffer[:end], self._buffer[end:]
            self._buffer, self._searched = b"", 0
            try:
                if end > http1.MAX_HEAD_BYTES:
                    raise MessageError(431, "request head: longer than 64 KiB")
                head = http1.parse_request_head(head_bytes)
            except MessageError as error:
                self.refuse(error.status, str(error), [])
                return
            self._start(head, rest)

    def _start(self, head: http1.RequestHead, rest: bytes) -> None:
        self.must_close = not head.keep_alive
        exchange = Exchange(self._plane, self, head, self._arrived_ns)
        if not exchange.over:
            self.exchange = exchange
        if rest and not head.body.complete:
            rest = self._feed_body(exchange, rest, self._read_ns)
        # Of what waited for an earlier response, the last read is the latest that it can have come.
        self._buffer, self._arrived_ns = rest, self._read_ns

    def _feed_body(self, exchange: Exchange, data: bytes, now: int) -> bytes:
        """What is left of the data after the body."""
        try:
            return data[exchange.request_data(data, now) :]
        except MessageError as error:
            exchange.refuse(error)
            return b""

    def exchange_over(self) -> None:
        """The response is out."""
        exchange, self.exchange = self.exchange, None
        self.since_ns = self._plane.clock.monotonic_ns()
        if self.closes_next:
            if exchange is not None and not exchange.request_complete:
                self._linger()
            else:
                self.transport.close()
            return
        self.resume_reading()
        if self._buffer:
            self._plane.loop.call_soon(self._next_request)

    # --- ends

    def refuse(self, status: int, text: str, extra: http1.Headers, with_body: bool = True) -> None:
        """Answers with an error and ends the connection."""
        self.exchange = None
        self.transport.write(http1.encode_error(status, text, extra, with_body))
        self._linger()

    def _linger(self) -> None:
        """Closes without losing the answer: to close while bytes come in would be a RST that overtakes it."""
        self._discarding = True
        self._buffer = b""
        self.resume_reading()
        if not self.transport.is_closing():
            self.transport.write_eof()
            self._plane.loop.call_later(_LINGER_S, self.transport.abort)

    def close(self) -> None:
        self.exchange = None
        self._discarding = True
        if not self.transport.is_closing():
            self.since_ns = self._plane.clock.monotonic_ns()
            self.transport.close()

    def abort(self) -> None:
        self.exchange = None
        self._discarding = True
        self.transport.abort()

    def reset(self) -> None:
        try:
            reset_on_close(self.transport)
        finally:
            self.abort()

    def _gone(self) -> None:
        self._discarding = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_gone()

    # --- back-pressure on the request

    def pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.since_ns = self._plane.clock.monotonic_ns()
            self.transport.resume_reading()
