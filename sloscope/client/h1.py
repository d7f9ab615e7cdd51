"""HTTP/1.1 for a load generator: asyncio protocols and httptools, a stamp per socket read, no limit on connections.

httpx spends more on an event than a server spends on making it; under load its receipts are late and the lateness
looks like the server's. Here the stamp is taken at the top of `data_received`, and parsing waits until all sockets that
are readable have been read (`inbox`). A request never waits for a slot: when no connection is idle a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import ssl
import time
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

from sloscope.client.inbox import Inbox
from sloscope.errors import ConfigError

# Servers close idle connections after some seconds (uvicorn: 5). One that has idled longer than this is not trusted
# with a request, since a POST that meets the close cannot be sent twice.
IDLE_LIMIT_NS = 3_000_000_000
# Out of file descriptors or local ports: the server never heard of the request.
OWN_LIMIT = "own_limit"
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL})
_OTHER_DESCRIPTORS = 64  # of files, pipes and the loop
_MOST_DESCRIPTORS = 1 << 16  # a table of 512 KiB


def make_room(sockets: int) -> None:
    """Grows this process's table of descriptors for so many sockets, as far as its limit allows.

    Linux doubles a table that is full and, where threads share it, waits until no core reads the old one any more: 7 to
    9 ms were seen, in which the loop neither sends nor reads, at 256, 512, 1024 and 2048 open sockets.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(sockets + _OTHER_DESCRIPTORS, _MOST_DESCRIPTORS)
    last = (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)) - 1
    with contextlib.suppress(OSError), open(os.devnull, "rb") as nothing:  # without room it goes on as before
        os.close(fcntl.fcntl(nothing.fileno(), fcntl.F_DUPFD_CLOEXEC, last))


class Exchange(Protocol):
    """Who asked, and is told. Stamps are those of the socket read. After `ended` nothing more comes."""

    def responded(self, t_ns: int, status: int, headers: dict[str, str]) -> None: ...
    def received(self, t_ns: int, data: bytes) -> None: ...
    def ended(self, t_ns: int, transport: str, error: str | None) -> None:
        """`transport`: eof (the message is whole), reset, connect_error."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str  # prefix, without a slash at its end

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"


def parse_url(text: str, field: str = "--url") -> Origin:
    """`http://host:port`, with or without a path. A bare `host:port` or `port` means http."""
    accepted = "accepted: http://HOST:PORT or https://HOST:PORT/PATH"
    whole = text if "://" in text else f"http://{'127.0.0.1:' if text.isdigit() else ''}{text}"
    try:
        parts = urlsplit(whole)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:  # UnicodeError, which idna raises, among them
        parts, port, host = urlsplit(""), None, ""
    if "@" in parts.netloc or (not host and "@" in text):
        # A message may end up in a log, so it does not repeat them.
        raise ConfigError(f"{field}: must not carry credentials; {accepted}")
    is_word = parts.path.isascii() and not any(c.isspace() for c in text)
    is_origin = parts.scheme in ("http", "https") and host and port != 0 and not (parts.query or parts.fragment)
    if not (is_word and is_origin):
        raise ConfigError(f"{field}: {text!r} is not accepted; {accepted}")
    return Origin(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.path.rstrip("/"))


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    __slots__ = (
        "_error",
        "_exchange",
        "_framed",
        "_headers",
        "_inbox",
        "_parser",
        "_pool",
        "_single",
        "_t_ns",
        "_transport",
        "_unread",
        "idle_ns",
    )

    def __init__(self, pool: Pool, single: bool = False) -> None:
        self._pool = pool
        self._inbox = pool.inbox
        self._single = single  # for one exchange, whose reader may hold off: each read is understood before the next
        self._parser: httptools.HttpResponseParser | None = None
        self._error: Exception | None = None  # what the connection was lost by
        self._unread = 0  # reads that wait in the inbox
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._headers: dict[str, str] = {}
        self._framed: bool | None = None  # the body's end is known by length or chunks; None before the head is whole
        self._t_ns = 0
        self.idle_ns = 0

    def send(self, request: bytes, exchange: Exchange) -> None:
        assert self._transport is not None and self._exchange is None
        self._exchange = exchange
        self._framed = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def abort(self) -> None:
        """Closes now; the exchange hears nothing more."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def quiet(self) -> bool:
        """Nothing was read that is not understood: what comes after a request is its answer."""
        return not self._unread

    def catch_up(self) -> None:
        """Understands what was read so far."""
        if self._unread:
            self._inbox.catch_up(self)

    def hold(self) -> bool:
        """Reads nothing more until `go_on`: what comes fills the kernel's buffer, then the server's. False: closed."""
        if not self.usable:
            return False
        assert self._transport is not None
        self._transport.pause_reading()
        return True

    def go_on(self) -> None:
        if self.usable:
            assert self._transport is not None
            self._transport.resume_reading()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        t_ns = time.monotonic_ns()
        self._unread += 1
        if self._single:
            self.understand(t_ns, data)
        else:
            self._inbox.put(self, t_ns, data)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        self._error = error
        self._unread += 1
        self._inbox.put(self, time.monotonic_ns(), None)

    # the inbox's side

    def understand(self, t_ns: int, data: bytes | None) -> None:
        self._t_ns = t_ns
        self._unread -= 1
        if data is None:
            self._lost()
            return
        if self._exchange is None:
            # Bytes that nobody asked for: the connection cannot be trusted with the next request.
            self.abort()
            return
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self.abort()
            raise  # not the server's fault but ours
        except httptools.HttpParserError as error:
            self._finish("reset", type(error).__name__)
            self.abort()

    def _lost(self) -> None:
        self._parser = None  # they hold each other
        if self._exchange is not None:
            error = self._error
            whole = error is None and self._framed is False  # what neither length nor chunks end, the close ends
            self._finish("eof" if whole else "reset", None if whole else type(error or EOFError()).__name__)

    # httptools' side

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200 or self._exchange is None:  # 100 Continue and its kind
            return
        self._framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._exchange.responded(self._t_ns, status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.received(self._t_ns, data)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() < 200 or self._exchange is None:
            return
        keep = self._parser.should_keep_alive() and not self._single
        self._finish("eof", None)
        if not keep and self._transport is not None:
            self._transport.close()
        elif self.usable:
            self._pool.give_back(self, self._t_ns)

    def _finish(self, transport: str, error: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.ended(self._t_ns, transport, error)


class Call:
    """A request on its way; `abort` closes its connection at once, whatever it is doing."""

    __slots__ = ("_connecting", "connection")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None

    def abort(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self.connection is not None:
            self.connection.abort()


class Pool:
    """Connections to one origin. Idle ones are used again, last in first out; there is no upper limit."""

    def __init__(self, origin: Origin, tls: ssl.SSLContext | None = None, inbox: Inbox | None = None) -> None:
        """`inbox`: of the loop, where several pools share one."""
        self.origin = origin
        self.inbox = inbox or Inbox()
        self._tls = (tls or ssl.create_default_context()) if origin.scheme == "https" else None
        self._idle: dict[Connection, None] = {}
        self._all: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.opened = 0

    def send(self, request: bytes, exchange: Exchange, receive_buffer: int = 0) -> Call:
        """`receive_buffer`: bytes that the kernel may read ahead, on a connection of its own; 0: as it likes."""
        call = Call()
        now = time.monotonic_ns()
        while self._idle and not receive_buffer:
            connection, _ = self._idle.popitem()
            if connection.usable and connection.quiet and now - connection.idle_ns <= IDLE_LIMIT_NS:
                call.connection = connection
                connection.send(request, exchange)
                return call
            connection.abort()
        task = asyncio.get_running_loop().create_task(self._connect_and_send(request, exchange, call, receive_buffer))
        call._connecting = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    async def connect(self, receive_buffer: int = 0) -> Connection:
        """Raises OSError (ssl.SSLError among them)."""
        loop = asyncio.get_running_loop()
        name = self.origin.host if self._tls is not None else None
        if receive_buffer:
            sock = await self._narrow_socket(receive_buffer)
            _, connection = await loop.create_connection(
                lambda: Connection(self, single=True), sock=sock, ssl=self._tls, server_hostname=name
            )
        else:
            _, connection = await loop.create_connection(
                lambda: Connection(self), self.origin.host, self.origin.port, ssl=self._tls, server_hostname=name
            )
        self.opened += 1
        self._all.add(connection)
        return connection

    async def _narrow_socket(self, receive_buffer: int) -> socket.socket:
        """Connected. The buffer is set before, since the window that a peer may fill is agreed on then."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.origin.host, self.origin.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _connect_and_send(self, request: bytes, exchange: Exchange, call: Call, receive_buffer: int) -> None:
        try:
            connection = await self.connect(receive_buffer)
        except OSError as error:
            call._connecting = None
            name = OWN_LIMIT if error.errno in _OWN_LIMITS else type(error).__name__
            exchange.ended(time.monotonic_ns(), "connect_error", name)
            return
        call._connecting = None
        call.connection = connection
        if connection.usable:
            connection.send(request, exchange)
        else:
            exchange.ended(time.monotonic_ns(), "reset", "closed after connect")

    def give_back(self, connection: Connection, now_ns: int) -> None:
        connection.idle_ns = now_ns
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
        # An aborted transport tells its protocol in the next turns of the loop.
        while self._all or self._tasks:
            await asyncio.sleep(0.001)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


# What Python calls the errors that a wrong address meets.
_WORDS = {
    "gaierror": "its host name is not known",
    "ConnectionRefusedError": "nobody listens there",
    "TimeoutError": "no answer in time",
    "OSError": "none of its addresses can be connected to",  # such as no route, or several that failed
    "SSLCertVerificationError": "its certificate is not trusted",
}


def why(error: Exception) -> str:
    """In words, of an error that `fetch` raises."""
    said = str(error) or type(error).__name__
    return _WORDS.get(said, said)


class _Collect:
    """An exchange that waits for the whole reply."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._head: tuple[int, dict[str, str]] | None = None
        self._body = bytearray()

    def responded(self, t_ns: int, status: int, headers: dict[str, str]) -> None:
        self._head = (status, headers)

    def received(self, t_ns: int, data: bytes) -> None:
        self._body += data

    def ended(self, t_ns: int, transport: str, error: str | None) -> None:
        if self.done.done():
            return
        if transport == "eof" and self._head is not None:
            self.done.set_result(Reply(*self._head, bytes(self._body)))
        else:
            self.done.set_exception(ConnectionError(error or transport))


def request_bytes(
    method: str, origin: Origin, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
) -> bytes:
    lines = [f"{method} {origin.path}{path} HTTP/1.1", f"host: {origin.netloc}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


async def fetch(
    pool: Pool,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    timeout_s: float = 10.0,
) -> Reply:
    """One whole request. Raises ConnectionError or TimeoutError."""
    exchange = _Collect()
    call = pool.send(request_bytes(method, pool.origin, path, headers, body), exchange)
    try:
        return await asyncio.wait_for(exchange.done, timeout_s)
    except TimeoutError:
        call.abort()
        raise
