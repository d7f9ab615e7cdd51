"""One try of a request at one upstream: a connection, the request sent once, the response as far as its head says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from exporter import http1
from exporter.framing import Body, MessageError
from exporter.http1 import ResponseHead
from exporter.upstream import Pool, UpstreamConnection, Work

if TYPE_CHECKING:
    from exporter.exchange import Exchange
    from sloscope.stream_record import StreamRecord


class Held(NamedTuple):
    """Bytes of one read of a body that wait for the decision between two attempts."""

    raw: bytes
    payload: bytes


class Attempt:
    """Its exchange has one, and a second one where it is hedged. What comes up to the client is the exchange's say."""

    def __init__(self, exchange: Exchange, number: int, pool: Pool, work: Work) -> None:
        self.exchange = exchange
        self.number = number
        self.pool = pool
        self.work = work
        self.connection: UpstreamConnection | None = None
        self.begin_written = False
        self.sent = False
        self.over = False
        self.response: ResponseHead | None = None
        self.body: Body | None = None
        self.events = 0  # output events that the work was lessened by
        self._is_judged = False  # its pool knows how it answered
        self._head = b""
        self._connecting: asyncio.Task[None] | None = None
        self._sent_again = False
        # Until the decision: what came, and what it says.
        self.held: list[Held] = []
        self.held_bytes = 0
        self.is_clean = True  # nothing came after the body
        self.failing = False  # answers with a failure, which is kept in case that nobody does better
        self.stream: StreamRecord | None = None
        pool.begin(work)

    # --- to the upstream

    def acquire(self, fresh: bool = False) -> None:
        connection = None if fresh else self.pool.take_idle()
        if connection is not None:
            self._connected(connection)
        else:
            self._connecting = self.exchange.plane.loop.create_task(self._connect(self.pool))

    async def _connect(self, pool: Pool) -> None:
        try:
            connection = await pool.connect()
        except (OSError, ValueError):
            self._connecting = None
            self._connect_failed()
            return
        self._connecting = None
        if self.over:
            pool.give_back(connection)
        else:
            self._connected(connection)

    def _connect_failed(self) -> None:
        if self.over:
            return
        other = self.exchange.next_upstream(self.pool)
        if other is None:
            self.exchange.attempt_failed(self, "no upstream could be reached", "connect_error")
            return
        self.pool.end(self.work)
        self.pool = other
        other.begin(self.work)
        self.exchange.attempt_moved(self)
        self.acquire()

    def _connected(self, connection: UpstreamConnection) -> None:
        connection.attempt = self
        self.connection = connection
        self.send_if_ready()

    def on_begin_written(self) -> None:
        self.begin_written = True
        self.send_if_ready()

    def send_if_ready(self) -> None:
        """The request leaves once its record is begun and a connection is there."""
        if self.connection is None or not self.begin_written or self.sent or self.over:
            return
        self.sent = True
        self.connection.transport.write(self.exchange.request_for(self.pool.upstream))
        self.exchange.request_sent()

    def close(self, keep_connection: bool = False) -> None:
        """Idempotent. A connection that is not kept is closed in this very turn of the loop."""
        if self.over:
            return
        self.over = True
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.attempt = None
            if keep_connection:
                connection.pool.give_back(connection)
            else:
                connection.transport.abort()
        self.pool.end(self.work)

    # --- from the upstream

    def receive(self, data: bytes, now: int) -> None:
        """What the socket brought, with its stamp."""
        body = self.body
        if body is None:
            self._head_received(data, now)
        elif not body.complete:
            self.exchange.body_received(self, data, now)

    def _head_received(self, data: bytes, now: int) -> None:
        searched = len(self._head)
        self._head += data
        method = self.exchange.method
        while self.body is None:
            end = http1.find_head_end(self._head, searched)
            if not end:
                if len(self._head) > http1.MAX_HEAD_BYTES:
                    self.exchange.attempt_failed(self, "the upstream's response head is too large", "reset")
                elif http1.is_no_answer(self._head, searched):
                    self.exchange.attempt_failed(self, "the upstream answered no HTTP/1.1", "reset")
                return
            head, self._head = self._head[:end], self._head[end:]
            searched = 0
            try:
                response = http1.parse_response_head(head, method)
            except MessageError as error:
                self.exchange.attempt_failed(self, f"the upstream answered rubbish: {error}", "reset")
                return
            if response.status == 101:
                self.exchange.attempt_failed(self, "the upstream switched protocols", "reset")
                return
            if response.status < 200:
                self.exchange.informed(self, response)
                continue
            self.response, self.body = response, response.body
            if response.status >= 300:
                self.answered(response.status < 500)
            rest, self._head = self._head, b""
            self.exchange.response_started(self, rest, now)

    def progressed(self, events: int) -> None:
        """So many output events came in all."""
        if events > self.events and not self.over:
            self.pool.progress(self.work, events - self.events)
            self.events = events

    def answered(self, ok: bool) -> None:
        """Known for good: the first word counts. Of requests that nobody observes the pool hears nothing."""
        if self.exchange.is_observed and not self._is_judged:
            self._is_judged = True
            self.pool.answered(self.work, ok)

    def upstream_ended(self, error: Exception | None) -> None:
        """The upstream's end of the connection is closed; `error` when it was not closed in order."""
        if self.over:
            return
        if self.body is not None:
            if error is None and self.body.end_of_stream():
                self.exchange.body_ended(self)
            else:
                self.exchange.attempt_broke_off(self, "eof" if error is None else "reset")
            return
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.attempt = None
        connection.transport.abort()
        is_kept = self.exchange.is_kept and self.exchange.request_complete
        if (connection.used or not self.sent) and is_kept and not self._head and not self._sent_again:
            # An idle connection that the upstream had closed: it never saw the request.
            self._sent_again = True
            self.sent = False
            self.acquire(fresh=True)
            return
        self.exchange.attempt_failed(self, "the upstream closed the connection without an answer", "reset")
