"""Connections to the upstreams: kept alive, and chosen by the least work that is outstanding there."""

from __future__ import annotations

import asyncio
import errno
import select
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from exporter.descriptors import MOST_IDLE
from exporter.settings import Upstream
from exporter.sockets import is_ready
from sloscope.clock import Clock
from sloscope.exposition import MetricStore
from sloscope.units import NS_PER_S

if TYPE_CHECKING:
    from exporter.attempt import Attempt

CONNECT_TIMEOUT_S = 5.0
# Below the five seconds after which uvicorn, under most of these servers, closes an idle connection.
IDLE_NS = 4 * NS_PER_S
_ONE_LOOK_S = 0.001  # a timer this far away runs after the sockets were looked at once more
_FIRST_REST_NS = NS_PER_S // 4  # for which an upstream is left alone after a connect that failed, or bad answers
_LONGEST_REST_NS = 16 * NS_PER_S
_BAD_IN_A_ROW = 3  # answers: one alone can be the request's own fault
_BYTES_PER_TOKEN = 4  # of a request body, text and JSON around it: about what English takes
_UNTOLD_OUTPUT = 256  # tokens, where a request names no maximum
_MOST_TOKENS = 1 << 24  # what one request may count for, whatever it says


@dataclass(slots=True)
class Work:
    """What a request still asks of its upstream, in tokens: an estimate, good enough to compare upstreams by.

    The prompt counts until the first output event, each output event counts for one token. Known is the length of a
    prompt of token ids only; any other is the body's bytes / 4.
    """

    prompt: int
    output: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


def estimate(asked: Mapping[str, Any] | None, body_bytes: int) -> Work:
    """`asked`: the request body as understood, empty where it was not; None: no output is asked for."""
    prompt = min(body_bytes // _BYTES_PER_TOKEN, _MOST_TOKENS)
    if asked is None:
        return Work(prompt)
    ids = asked.get("prompt")
    if isinstance(ids, list) and ids and type(ids[0]) is int:
        prompt = len(ids)
    most = _count(asked.get("max_completion_tokens")) or _count(asked.get("max_tokens")) or _UNTOLD_OUTPUT
    return Work(prompt, min(most * (_count(asked.get("n")) or 1), _MOST_TOKENS))


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


class UpstreamConnection(asyncio.Protocol):
    """One connection to an upstream. At most one attempt at a time uses it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.attempt: Attempt | None = None
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self.used = False  # served a request before, so that the upstream may have closed it meanwhile
        self.idle_since_ns = 0
        self._reading = True
        self.paused_for: set[str] = set()
        self._unsent: list[bytes] = []  # of a request body
        self._monotonic_ns = pool.clock.monotonic_ns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        # No buffer of ours: what the socket does not take pauses the sender at once.
        self.transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        now = self._monotonic_ns()  # the receipt: before anything is parsed
        attempt = self.attempt
        if attempt is None:
            self.transport.abort()  # nobody asked
        else:
            attempt.receive(data, now)

    def receive_by(self, receive: Callable[[bytes], None] | None) -> None:
        """What takes reads in place of `data_received`, which saves each of them a call; None: nothing."""
        if receive is not None:
            vars(self)["data_received"] = receive
        elif vars(self).pop("data_received", None) is None:
            return
        self.transport.set_protocol(self)  # which has uvloop look for `data_received` anew

    def eof_received(self) -> None:
        if self.attempt is not None:
            self.attempt.upstream_ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.forget(self)
        if self.attempt is not None:
            self.attempt.upstream_ended(exc)

    def pause_writing(self) -> None:
        if self.attempt is not None:
            self.attempt.exchange.upload_paused()

    def resume_writing(self) -> None:
        if self.attempt is not None:
            self.attempt.exchange.upload_resumed()

    def upload(self, data: bytes) -> None:
        """The next bytes of a request that was begun.

        A server may answer before it has read them, with a 413 for one, and close. To write to that connection would
        be an error, and what was answered be lost with it: so what is there to read is read first.
        """
        if not self._unsent:
            if not (self._reading and is_ready(self.transport, select.POLLIN)):
                self.transport.write(data)
                return
            assert self.attempt is not None
            self.attempt.exchange.upload_paused()
            asyncio.get_running_loop().call_later(_ONE_LOOK_S, self._upload_rest, self.attempt)
        self._unsent.append(data)

    @property
    def owes(self) -> bool:
        """Part of a request body, which was answered meanwhile."""
        return bool(self._unsent)

    def _upload_rest(self, attempt: Attempt) -> None:
        unsent, self._unsent = self._unsent, []
        if self.attempt is attempt:
            attempt.exchange.upload_resumed()
            self.transport.write(b"".join(unsent))  # which may pause it again

    def pause_reading(self, reason: str) -> None:
        """Until it is resumed for every reason that it was paused for."""
        self.paused_for.add(reason)
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self, reason: str) -> None:
        self.paused_for.discard(reason)
        if not self.paused_for and not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()


class Pool:
    """One upstream: its connections, what is outstanding there, and how connects and answers went lately."""

    def __init__(
        self,
        upstream: Upstream,
        tls: ssl.SSLContext | None,
        store: MetricStore,
        clock: Clock,
        most_idle: int = MOST_IDLE,
    ) -> None:
        self.upstream = upstream
        self.clock = clock
        self.requests = 0
        self.tokens = 0
        self.up = True  # by the last connect
        self.rests_until_ns = 0  # while it rests: when one request may try it again
        self._failures = 0  # connects that failed in a row
        self._bad = 0  # answers that failed in a row; those that were under way when its rest began count once
        self._is_chosen = False  # for a trial, of which the work is not begun yet
        self._trial: Work | None = None  # of the request that finds out whether its rest may end
        self._tls = tls
        self._store = store
        self._most_idle = most_idle
        self._idle: list[UpstreamConnection] = []
        self._labels = (upstream.url,)
        for result in ("ok", "failed"):
            store.init("sloscope_upstream_answers_total", (*self._labels, result))
        self.publish()

    # --- outstanding work

    def begin(self, work: Work) -> None:
        if self._is_chosen:
            self._is_chosen, self._trial = False, work
        self.requests += 1
        self.tokens += work.tokens

    def progress(self, work: Work, events: int) -> None:
        """So many further output events of this work have come."""
        came = min(events, work.output)
        self.tokens -= work.prompt + came
        work.prompt = 0
        work.output -= came

    def end(self, work: Work) -> None:
        if work is self._trial:
            # It is over and has told nothing: its client left, the other one was faster, or nobody observes it.
            self._trial = None
            self.rests_until_ns = self.clock.monotonic_ns()
        self.requests -= 1
        self.tokens -= work.tokens
        assert self.requests >= 0 and self.tokens >= 0, "work ended twice"

    def publish(self) -> None:
        self._store.set("sloscope_upstream_up", 1 if self.up else 0, self._labels)
        self._store.set("sloscope_upstream_resting", 1 if self.rests else 0, self._labels)
        self._store.set("sloscope_upstream_inflight_requests", self.requests, self._labels)
        self._store.set("sloscope_upstream_outstanding_tokens", self.tokens, self._labels)

    # --- health

    @property
    def rests(self) -> bool:
        """It is left alone as long as another one may be tried."""
        return not self.up or self._bad >= _BAD_IN_A_ROW

    def may_be_tried(self, now: int) -> bool:
        return not self.rests or now >= self.rests_until_ns

    def chosen(self, now: int) -> None:
        if self.rests:
            # One request finds out. Until it knows, the others stay away.
            self._is_chosen = True
            self.rests_until_ns = now + int(CONNECT_TIMEOUT_S * NS_PER_S)

    def answered(self, work: Work, ok: bool) -> None:
        """How the answer to a request with this work went. Not ok: its status was 5xx, or it broke off before a first
        output event. Who fails at once has the least outstanding work, and would be chosen again and again.
        """
        is_trial = work is self._trial
        if is_trial:
            self._trial = None
        self._store.inc("sloscope_upstream_answers_total", labels=(*self._labels, "ok" if ok else "failed"))
        if ok:
            self._bad = 0
        elif is_trial or not self.rests:
            self._bad += 1
            if self._bad >= _BAD_IN_A_ROW:
                self._rest(self._bad - _BAD_IN_A_ROW)

    def _rest(self, earlier: int) -> None:
        """Each of `earlier` rests in a row has doubled the next one."""
        rest_ns = min(_FIRST_REST_NS << min(earlier, 10), _LONGEST_REST_NS)
        self.rests_until_ns = self.clock.monotonic_ns() + rest_ns

    # --- connections

    def take_idle(self) -> UpstreamConnection | None:
        """The connection used last, since it is the least likely to be closed on the other side. None while the
        upstream is not up: whether it can be reached only a new connection tells.
        """
        while self.up and self._idle:
            connection = self._idle.pop()
            fresh = self.clock.monotonic_ns() - connection.idle_since_ns < IDLE_NS
            if fresh and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (TimeoutError after five seconds), ValueError for a host name that no
        resolver takes.
        """
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
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # our want, which says nothing of the upstream
            self.up = False
            self._trial = None  # it has told
            self._rest(self._failures)
            self._failures += 1
            raise
        self.up = True
        self._failures = 0
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.attempt = None
        connection.receive_by(None)
        connection.used = True
        for reason in list(connection.paused_for):
            connection.resume_reading(reason)
        if connection.owes:
            connection.transport.abort()  # the next request would be taken for the rest of this one's body
        if connection.transport.is_closing():
            return
        connection.idle_since_ns = self.clock.monotonic_ns()
        self._idle.append(connection)
        if len(self._idle) > self._most_idle:
            self._idle.pop(0).transport.close()

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close_stale(self, now: int) -> None:
        # The oldest come first.
        while self._idle and now - self._idle[0].idle_since_ns >= IDLE_NS:
            self._idle.pop(0).transport.close()


class Upstreams:
    def __init__(self, pools: Sequence[Pool], clock: Clock, by_tokens: bool = True) -> None:
        assert pools
        self.pools = list(pools)
        self._clock = clock
        self._by_tokens = by_tokens

    def choose(self, excluded: Collection[Pool] = ()) -> Pool | None:
        """The pool with the least outstanding work, of those that may be tried first; where all rest, the one that has
        rested the longest of its time. None: all are excluded.
        """
        left = [pool for pool in self.pools if pool not in excluded]
        now = self._clock.monotonic_ns()
        open_now = [pool for pool in left if pool.may_be_tried(now)]
        if open_now:
            return self._take(min(open_now, key=self._load), now)
        return self._take(min(left, key=lambda pool: pool.rests_until_ns), now) if left else None

    def choose_up(self, excluded: Collection[Pool]) -> Pool | None:
        """As `choose`, of those only that do not rest."""
        left = [pool for pool in self.pools if not pool.rests and pool not in excluded]
        return self._take(min(left, key=self._load), self._clock.monotonic_ns()) if left else None

    def _load(self, pool: Pool) -> tuple[int, int]:
        return (pool.tokens if self._by_tokens else 0, pool.requests)

    def _take(self, pool: Pool, now: int) -> Pool:
        # Equals take turns: `min` finds the first of them.
        self.pools.remove(pool)
        self.pools.append(pool)
        pool.chosen(now)
        return pool

    def publish(self) -> None:
        for pool in self.pools:
            pool.publish()

    def close_stale(self, now: int) -> None:
        for pool in self.pools:
            pool.close_stale(now)
