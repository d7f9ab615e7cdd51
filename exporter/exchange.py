"""One request and its response on their way through the sidecar.

The order for every piece of a response: stamped where the socket was read, stamped again and forwarded, and only then
understood. What the observation does can delay nothing but the next read, and what it raises stops here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exporter import http1
from exporter.framing import Body, Chunked, MessageError, Sized, UntilClose
from exporter.http1 import RequestHead, ResponseHead
from exporter.observation import Observation
from exporter.settings import is_observed
from exporter.upstream import Pool, UpstreamConnection

if TYPE_CHECKING:
    from exporter.client_connection import ClientConnection
    from exporter.data_plane import DataPlane

_UPLOAD_BUFFER = 256 << 10  # bytes of a body that is not looked at, while the upstream is not connected yet
ID_HEADER = b"x-sloscope-request-id"


class Exchange:
    """Lives from a complete request head to the end of the response, or until a side is gone."""

    def __init__(self, plane: DataPlane, client: ClientConnection, head: RequestHead, arrived_ns: int) -> None:
        self._plane = plane
        self._client = client
        self._head = head
        self.over = False
        self._observation: Observation | None = None
        self._id_header: http1.Headers = []
        if head.method == b"POST" and is_observed(head.path):
            self._watch(arrived_ns)
        else:
            plane.store.inc("sloscope_sidecar_passthrough_total")

        # The request on its way up. `_raw` is what was not sent, or what could be sent once more.
        limit = plane.settings.inspect_limit
        declared = head.body.left if isinstance(head.body, Sized) else 0
        self._gathering = self._observation is not None and declared <= limit
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._payload: list[bytes] = []
        self._begin_written = self._observation is None
        self._dispatched = False
        self._sent = False

        self._pool: Pool | None = None
        self._tried: list[Pool] = []
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_again = False

        # The response on its way down.
        self._response_head = b""
        self._response: ResponseHead | None = None
        self._body: Body | None = None
        self._dechunk = False
        self._held_since_ns = 0

        if head.expects_continue and not head.body.complete:
            client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.body.complete:
            self._request_complete(arrived_ns)
        elif not self._gathering:
            self._dispatch(None, None)

    # --- observing

    def _watch(self, arrived_ns: int) -> None:
        try:
            path = self._head.path.decode("latin-1")
            self._observation = Observation(self._plane.watch, self._head.lowered(), path, arrived_ns)
            self._id_header = [(ID_HEADER, self._observation.request_id.encode())]
        except Exception as error:
            self._plane.observer_failed(error)

    def _observe(self, method: Callable[..., None], *arguments: Any) -> None:
        """The one boundary: what the observer raises is counted, and the stream goes on."""
        try:
            method(*arguments)
        except Exception as error:
            self._plane.observer_failed(error)

    def _end_observation(self, transport: str, left: str = "") -> None:
        if self._observation is not None:
            if self._held_since_ns:
                self.download_resumed()
            complete = self._body is not None and self._body.complete
            now = self._plane.clock.monotonic_ns()
            self._observe(self._observation.ended, transport, left, complete, now)

    # --- the request: from the client to the upstream

    @property
    def request_complete(self) -> bool:
        return self._head.body.complete

    def request_data(self, data: bytes, now: int) -> int:
        """Takes body bytes from the client; how many of them were the body's. Raises MessageError."""
        payload, used = self._head.body.feed(data)
        raw = data if used == len(data) else data[:used]
        if self._gathering:
            self._raw.append(raw)
            self._payload.append(payload)
            self._raw_bytes += used
            if self._raw_bytes > self._plane.settings.inspect_limit and not self._head.body.complete:
                # Too large to look at: from here on it streams.
                self._gathering = False
                self._payload = []
                self._dispatch(None, None)
        elif self._sent and self._upstream is not None:
            self._upstream.transport.write(raw)
        else:
            self._raw.append(raw)
            self._raw_bytes += used
            if self._raw_bytes > _UPLOAD_BUFFER:
                self._client.pause_reading()
        if self._head.body.complete:
            self._client.resume_reading()
            self._request_complete(now)
        return used

    def _request_complete(self, now: int) -> None:
        if not self._dispatched:
            body = b"".join(self._payload)
            self._payload = []
            self._dispatch(body if self._gathering else None, now)

    def _dispatch(self, body: bytes | None, body_complete_ns: int | None) -> None:
        """Begins the record and looks for a connection, both at once; the request is sent when both are there."""
        self._dispatched = True
        self._pool = self._plane.upstreams.choose()
        assert self._pool is not None
        self._pool.count(1)
        if self._observation is not None:
            try:
                url = self._pool.upstream.url
                self._observation.begin(body, body_complete_ns, url, self._on_begin_written)
            except Exception as error:
                self._plane.observer_failed(error)
                self._begin_written = True
        self._acquire(fresh=False)

    def _on_begin_written(self) -> None:
        self._begin_written = True
        self._send_if_ready()

    def _acquire(self, fresh: bool) -> None:
        assert self._pool is not None
        connection = None if fresh else self._pool.take_idle()
        if connection is not None:
            self._connected(connection)
        else:
            self._connecting = self._plane.loop.create_task(self._connect(self._pool))

    async def _connect(self, pool: Pool) -> None:
        try:
            connection = await pool.connect()
        except (OSError, ValueError):  # ValueError: a host name that no resolver takes
            self._connecting = None
            self._connect_failed(pool)
            return
        self._connecting = None
        if self.over:
            pool.give_back(connection)
        else:
            self._connected(connection)

    def _connect_failed(self, pool: Pool) -> None:
        if self.over:
            return
        self._tried.append(pool)
        other = self._plane.upstreams.choose(self._tried)
        if other is None:
            self._fail(502, "no upstream could be reached", "connect_error")
            return
        pool.count(-1)
        self._pool = other
        other.count(1)
        self._acquire(fresh=False)

    def _connected(self, connection: UpstreamConnection) -> None:
        connection.exchange = self
        self._upstream = connection
        self._send_if_ready()

    def _send_if_ready(self) -> None:
        if self._upstream is None or not self._begin_written or self._sent or self.over:
            return
        upstream = self._upstream.pool.upstream
        head = http1.encode_request(self._head, upstream.prefix, upstream.authority, self._id_header)
        self._sent = True
        self._upstream.transport.write(b"".join((head, *self._raw)))
        if not self._head.body.complete:
            self._raw = []  # a body that is streamed is not kept to be sent once more
            self._client.resume_reading()

    def upload_paused(self) -> None:
        if not self._head.body.complete:
            self._client.pause_reading()

    def upload_resumed(self) -> None:
        self._client.resume_reading()

    # --- the response: from the upstream to the client

    def upstream_data(self, data: bytes, now: int) -> None:
        if self._body is None:
            self._response_head_data(data, now)
        elif not self._body.complete:
            self._response_body_data(data, now, b"")

    def _response_head_data(self, data: bytes, now: int) -> None:
        searched = len(self._response_head)
        self._response_head += data
        while self._body is None:
            end = http1.find_head_end(self._response_head, searched)
            if not end:
                if len(self._response_head) > http1.MAX_HEAD_BYTES:
                    self._fail(502, "the upstream's response head is too large", "reset")
                return
            head, self._response_head = self._response_head[:end], self._response_head[end:]
            searched = 0
            try:
                response = http1.parse_response_head(head, self._head.method)
            except MessageError as error:
                self._fail(502, f"the upstream answered rubbish: {error}", "reset")
                return
            if response.status == 101:
                self._fail(502, "the upstream switched protocols", "reset")
                return
            if response.status < 200:
                if self._head.version == "1.1":
                    self._client.transport.write(http1.encode_response(response, [], chunked=False, close=False))
                continue
            self._start_response(response, now)

    def _start_response(self, response: ResponseHead, now: int) -> None:
        self._response, self._body = response, response.body
        self._raw = []
        is_chunked = isinstance(response.body, Chunked)
        # HTTP/1.0 has no chunks: its client gets the payload until the connection ends.
        self._dechunk = is_chunked and self._head.version == "1.0"
        endless = self._dechunk or isinstance(response.body, UntilClose)
        self._client.must_close |= endless or not self._head.keep_alive or not self.request_complete
        head = http1.encode_response(
            response, self._id_header, is_chunked and not self._dechunk, self._client.closes_next
        )
        if self._observation is not None:
            self._observe(
                self._observation.response_started,
                response.status,
                response.get(b"content-type"),
                response.get(b"content-encoding"),
            )
        rest, self._response_head = self._response_head, b""
        if self._client.is_held:
            self.download_paused()
        self._response_body_data(rest, now, head)

    def _response_body_data(self, data: bytes, now: int, head: bytes) -> None:
        body = self._body
        assert body is not None
        try:
            payload, used = body.feed(data)
        except MessageError:
            if head:
                self._client.transport.write(head)
            self._break_off("eof")
            return
        out = payload if self._dechunk else data if used == len(data) else data[:used]
        # Before the write: on another core the client can have the bytes before the call returns.
        forwarded_ns = self._plane.clock.monotonic_ns()
        self._client.transport.write(head + out if head else out)
        if self._observation is not None and payload:
            added_ns = self._plane.clock.monotonic_ns() - now
            self._observe(self._observation.received, payload, now, forwarded_ns, added_ns)
        if body.complete and not self.over:
            self._response_complete(clean=used == len(data))

    def _response_complete(self, clean: bool) -> None:
        assert self._response is not None
        keep = clean and self._response.keep_alive and self.request_complete
        self._end_observation("eof")
        self._close(keep_upstream=keep)
        self._client.exchange_over()

    def download_paused(self) -> None:
        """The client does not read: neither do we."""
        if self._upstream is not None and self._body is not None and not self._held_since_ns:
            self._held_since_ns = self._plane.clock.monotonic_ns()
            self._upstream.pause_reading()

    def download_resumed(self) -> None:
        if self._held_since_ns:
            held = self._plane.clock.monotonic_ns() - self._held_since_ns
            self._held_since_ns = 0
            if self._observation is not None:
                self._observation.consumer_hold_ns += held
            if self._upstream is not None:
                self._upstream.resume_reading()

    # --- ends

    def upstream_ended(self, error: Exception | None) -> None:
        """The upstream's end of the connection is closed; `error` when it was not closed in order."""
        if self.over:
            return
        if self._body is not None:
            if error is None and self._body.end_of_stream():
                self._response_complete(clean=False)
            else:
                self._break_off("eof" if error is None else "reset")
            return
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        upstream.exchange = None
        upstream.transport.abort()
        is_whole = self._head.body.complete and not self._response_head
        never_sent = not self._sent
        if (upstream.used or never_sent) and is_whole and not self._sent_again:
            # An idle connection that the upstream had closed: it never saw the request.
            self._sent_again = True
            self._sent = False
            self._acquire(fresh=True)
            return
        self._fail(502, "the upstream closed the connection without an answer", "reset")

    def client_gone(self) -> None:
        """The client left. The upstream learns it in this very turn of the loop."""
        if not self.over:
            self._close(keep_upstream=False)
            self._end_observation("eof", left="disconnect")

    def refuse(self, error: MessageError) -> None:
        """The client's own body broke the protocol."""
        self._fail(error.status, str(error), "eof", left="disconnect")

    def cut(self) -> None:
        """The sidecar stops before the request ended: its own deadline, as seen from here."""
        if not self.over:
            self._end_observation("timeout")
            self._close(keep_upstream=False)
            self._client.abort()

    def _fail(self, status: int, text: str, transport: str, left: str = "") -> None:
        self._end_observation(transport, left)
        has_answer = self._response is not None
        self._close(keep_upstream=False)
        if has_answer:
            self._client.abort()
        else:
            self._client.refuse(status, text, self._id_header, with_body=self._head.method != b"HEAD")

    def _break_off(self, transport: str) -> None:
        """The response stops short. Its client must be able to see that."""
        endless = self._dechunk or isinstance(self._body, UntilClose)
        self._end_observation(transport)
        self._close(keep_upstream=False)
        if endless:
            # A close would look like the end of the body.
            self._client.reset()
        else:
            # What came so far goes out; the missing rest is seen by the framing.
            self._client.close()

    def _close(self, keep_upstream: bool) -> None:
        self.over = True
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.exchange = None
            if keep_upstream:
                upstream.pool.give_back(upstream)
            else:
                upstream.transport.abort()
        if self._pool is not None:
            self._pool.count(-1)
            self._pool = None


def reset_on_close(transport: asyncio.Transport) -> None:
    """Makes closing send a RST, as a plain close would read as a proper end."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
