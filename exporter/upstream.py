"""Connections to the upstreams: kept alive, chosen by least outstanding requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

from exporter.settings import Upstream
from sloscope.clock import Clock
from sloscope.exposition import MetricStore
from sloscope.units import NS_PER_S

if TYPE_CHECKING:
    from exporter.exchange import Exchange

CONNECT_TIMEOUT_S = 5.0
# Below the five seconds after which uvicorn, under most of these servers, closes an idle connection.
IDLE_NS = 4 * NS_PER_S
_MAX_IDLE = 256


class UpstreamConnection(asyncio.Protocol):
    """One connection to an upstream. At most one exchange at a time uses it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.used = False  # served an exchange before, so that the upstream may have closed it meanwhile
        self.idle_since_ns = 0
        self._reading = True
        self._monotonic_ns = pool.clock.monotonic_ns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        # No buffer of ours: what the socket does not take pauses the sender at once.
        self.transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        now = self._monotonic_ns()  # the receipt: before anything is parsed
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()  # nobody asked
        else:
            exchange.upstream_data(data, now)

    def eof_received(self) -> None:
        if self.exchange is not None:
            self.exchange.upstream_ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.forget(self)
        if self.exchange is not None:
            self.exchange.upstream_ended(exc)

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.upload_paused()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.upload_resumed()

    def pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()


class Pool:
    """The connections of one upstream."""

    def __init__(self, upstream: Upstream, tls: ssl.SSLContext | None, store: MetricStore, clock: Clock) -> None:
        self.upstream = upstream
        self.clock = clock
        self.outstanding = 0
        self.up = True
        self._tls = tls
        self._store = store
        self._idle: list[UpstreamConnection] = []
        self._labels = (upstream.url,)
        store.set("sloscope_upstream_up", 1, self._labels)
        store.set("sloscope_upstream_inflight_requests", 0, self._labels)

    def take_idle(self) -> UpstreamConnection | None:
        """The connection used last, since it is the least likely to be closed on the other side."""
        while self._idle:
            connection = self._idle.pop()
            fresh = self.clock.monotonic_ns() - connection.idle_since_ns < IDLE_NS
            if fresh and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (TimeoutError after five seconds)."""
        loop = asyncio.get_running_loop()
        upstream = self.upstream
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self),
                    upstream.host,
                    upstream.port,
                    ssl=self._tls,
                    server_hostname=upstream.host if self._tls else None,
                )
        except OSError:
            self._set_up(False)
            raise
        self._set_up(True)
        return connection

    def _set_up(self, up: bool) -> None:
        self.up = up
        self._store.set("sloscope_upstream_up", 1 if up else 0, self._labels)

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.exchange = None
        connection.used = True
        connection.resume_reading()
        if connection.transport.is_closing():
            return
        connection.idle_since_ns = self.clock.monotonic_ns()
        self._idle.append(connection)
        if len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).transport.close()

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close_stale(self, now: int) -> None:
        # The oldest come first.
        while self._idle and now - self._idle[0].idle_since_ns >= IDLE_NS:
            self._idle.pop(0).transport.close()

    def count(self, change: int) -> None:
        self.outstanding += change
        self._store.set("sloscope_upstream_inflight_requests", self.outstanding, self._labels)


class Upstreams:
    def __init__(self, pools: Sequence[Pool]) -> None:
        assert pools
        self.pools = list(pools)

    def choose(self, tried: Collection[Pool] = ()) -> Pool | None:
        """The pool with the least outstanding requests, those that could be reached first; None: all were tried."""
        left = [pool for pool in self.pools if pool not in tried]
        if not left:
            return None
        chosen = min(left, key=lambda pool: (not pool.up, pool.outstanding))
        # Equals take turns.
        self.pools.remove(chosen)
        self.pools.append(chosen)
        return chosen

    def close_stale(self, now: int) -> None:
        for pool in self.pools:
            pool.close_stale(now)
