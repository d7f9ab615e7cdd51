"""The data plane process: `python -m exporter.data_plane`, started by the supervisor.

Settings come as the first line of stdin, with the numbers of the inherited sockets; the end of stdin means that the
supervisor is gone. One event loop; the journal has a thread; nobody else is here, so that nobody delays a stream.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import orjson
import uvloop

from exporter import descriptors
from exporter.backlog import Backlog
from exporter.client_connection import HEAD_TIMEOUT_NS, IDLE_TIMEOUT_NS, ClientConnection
from exporter.exchange import Gathering
from exporter.framing import MessageError
from exporter.hedging import Hedges, init_series, parse_hedge_after
from exporter.observation import PROBLEMS, Observation, Watch
from exporter.settings import Settings, parse_upstream, tls_context
from exporter.upstream import Pool, Upstreams
from sloscope.clock import Clock, SystemClock
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.recorder import Recorder, encode
from sloscope.units import NS_PER_S

TICK_NS = 50_000_000
TURN_NS = 200_000  # of the loop's time that a snapshot takes before the sockets are looked at
_NOTED_A_PIECE = 100
_SWITCH_INTERVAL_S = 0.0005  # the journal's thread must not keep the loop waiting for the interpreter


class DataPlane:
    """Listener, upstreams, observer and journal of one process."""

    def __init__(self, settings: Settings, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.clock = clock
        self.loop = loop
        self.instance = f"{os.getpid()}-{clock.monotonic_ns()}"
        contract = settings.load_contract()
        self.store = MetricStore("sidecar", contract, settings.max_label_values)
        self.recorder = Recorder(lambda: JournalWriter(Path(settings.events), "sidecar", clock, encode), clock, loop)
        self.watch = Watch(settings, contract, self.store, self.recorder, clock)
        self.watch.backlog = Backlog(loop.call_soon, self.observer_failed)
        upstreams = [parse_upstream(url) for url in settings.upstreams]
        tls = tls_context(settings.ca_file) if any(upstream.tls for upstream in upstreams) else None
        self.room = descriptors.room(len(upstreams), bool(settings.hedge_after))
        pools = [Pool(each, tls if each.tls else None, self.store, clock, self.room.idle) for each in upstreams]
        self.upstreams = Upstreams(pools, clock, by_tokens=settings.balance == "tokens")
        init_series(self.store)
        self.store.init("sloscope_sidecar_clients_refused_total")
        self.store.init("sloscope_sidecar_clients_displaced_total")
        self.hedges: Hedges | None = None
        if settings.hedge_after:
            self.hedges = Hedges(parse_hedge_after(settings.hedge_after), settings.hedge_max_share, self.store)
        self.gathering = Gathering()
        self.clients: set[ClientConnection] = set()
        self._may_go: list[ClientConnection] | None = None  # who idle, the longest come last; None: not looked for yet
        self.leaving: dict[ClientConnection, None] = {}  # who were refused, the first to come first
        self.metrics_connections: set[MetricsConnection] = set()
        self.draining = False
        self._errors_named: set[str] = set()
        self._due: list[Observation] = []  # whose batches are to be written
        self._tick_due_ns = 0
        self._second_due_ns = 0
        self._counted: dict[str, int] = {}
        self._server: asyncio.Server | None = None
        self._metrics_server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, metrics: socket.socket) -> None:
        self._server = await self.loop.create_server(lambda: ClientConnection(self), sock=listener, backlog=4096)
        self._metrics_server = await self.loop.create_unix_server(lambda: MetricsConnection(self), sock=metrics)
        self._tick_due_ns = self.clock.monotonic_ns() + TICK_NS
        self._tick()

    def _tick(self) -> None:
        now = self.clock.monotonic_ns()
        self.watch.lag.note(now, max(0, now - self._tick_due_ns))
        try:
            if len(self.upstreams.pools) > 1:
                self._note_progress()
            if not self._due:
                self._due = self.watch.due(now)
                self._flush_next()
            if now >= self._second_due_ns:
                self._second_due_ns = now + NS_PER_S
                self._sweep(now)
        except Exception as error:
            self.observer_failed(error)
        self._tick_due_ns = self.clock.monotonic_ns() + TICK_NS
        self.loop.call_later(TICK_NS / 1e9, self._tick)

    def _flush_next(self) -> None:
        """Writes one batch in a turn of the loop: streams that began together are all due at once."""
        if not self._due:
            return
        try:
            self._due.pop().flush()
        except Exception as error:
            self.observer_failed(error)
        self.loop.call_soon(self._flush_next)

    def _note_progress(self) -> None:
        """Twenty times a second, which is enough to choose by and costs an event nothing."""
        for client in self.clients:
            if client.exchange is not None:
                client.exchange.note_progress()

    def _sweep(self, now: int) -> None:
        """Once a second: connections that nobody uses, and clients that left unseen."""
        self.upstreams.close_stale(now)
        for client in list(self.clients):
            if client.exchange is None:
                patience = HEAD_TIMEOUT_NS if client.is_in_head else IDLE_TIMEOUT_NS
                is_over = now - client.since_ns > patience
                if is_over and client.is_closing:
                    client.abort()  # it does not read the rest of its answer
                elif self.draining or is_over:
                    client.close()
            elif client.owes_body and now - client.since_ns > IDLE_TIMEOUT_NS:
                client.exchange.refuse(MessageError(408, "request body: the rest of it does not come"))
            else:
                client.look_for_end()
        self._may_go = None

    def observer_failed(self, error: Exception) -> None:
        """Counts what the observer raised. The kind and the place are printed once each; no message, which could
        quote a body.
        """
        self.store.inc(PROBLEMS, 1, ("observer_error",))
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "?"
        name = f"{type(error).__name__} at {place}"
        if name not in self._errors_named and len(self._errors_named) < 20:
            self._errors_named.add(name)
            sys.stderr.write(f"sidecar: observer error (counted, the stream goes on): {name}\n")

    def snapshot(self, full: bool) -> Iterator[bytes]:
        """Everything that this process counts, at one moment, in pieces that take little time each; some are empty."""
        for number, client in enumerate(list(self.clients)):
            if client.exchange is not None:
                client.exchange.note_progress()
            if number % _NOTED_A_PIECE == _NOTED_A_PIECE - 1:
                yield b""
        yield from self.store.drain_in_pieces(full, lambda: self._publish(full))

    def _publish(self, full: bool) -> None:
        """What is counted elsewhere than in the store."""
        recorder, labels = self.recorder, ("sidecar",)
        for name, total in (
            ("sloscope_journal_records_total", recorder.written),
            ("sloscope_journal_dropped_total", recorder.lost),
            ("sloscope_journal_bytes_total", recorder.bytes_written),
        ):
            if total != self.store.get(name, labels) or full:
                self.store.set(name, total, labels)
        self.store.set("sloscope_journal_late_begins_total", recorder.late_begins)
        self.store.set("sloscope_journal_lag_seconds", recorder.lag_ns / 1e9, labels)
        self.upstreams.publish()

    async def drain(self) -> None:
        """No new requests; those under way may end, for as long as `--drain` says."""
        self.draining = True
        assert self._server is not None and self._metrics_server is not None
        self._server.close()
        deadline = self.clock.monotonic_ns() + self.settings.drain_ns
        while self._busy() and self.clock.monotonic_ns() < deadline:
            await asyncio.sleep(0.02)
        for client in list(self.clients):
            if client.exchange is not None:
                client.exchange.cut()
            client.close()
        for observation in list(self.watch.active.values()):
            try:
                observation.ended("timeout", "", False, self.clock.monotonic_ns())
            except Exception as error:
                self.observer_failed(error)
        await asyncio.sleep(0)
        self._metrics_server.close()
        for connection in list(self.metrics_connections):
            connection.close()
        self.recorder.close()

    def admit(self, client: ClientConnection) -> None:
        """Where no place is left, in that of the one that has idled the longest."""
        if len(self.clients) >= self.room.clients and not self._make_place():
            self._refuse(client)
        else:
            self.clients.add(client)

    def _make_place(self) -> bool:
        now = self.clock.monotonic_ns()
        if self._may_go is None:  # once between two sweeps, for all who come meanwhile
            idle = (client for client in self.clients if client.idles(now))
            self._may_go = sorted(idle, key=lambda client: client.since_ns, reverse=True)
        while self._may_go:
            client = self._may_go.pop()
            if client.idles(now) and client.is_quiet():
                client.close()
                self.clients.discard(client)
                self.store.inc("sloscope_sidecar_clients_displaced_total")
                return True
        return False

    def _refuse(self, client: ClientConnection) -> None:
        """For want of files: accepted, and there would be none left for its upstream."""
        self.store.inc("sloscope_sidecar_clients_refused_total")
        self.leaving[client] = None
        client.refuse(503, "no file is left for one more client (ulimit -n)", [(b"retry-after", b"1")])
        if len(self.leaving) > descriptors.MOST_LEAVING:
            next(iter(self.leaving)).abort()

    def _busy(self) -> bool:
        for client in list(self.clients):
            if client.exchange is None and not client.is_in_head:
                client.close()
        return any(client.exchange is not None or client.is_closing for client in self.clients)


class MetricsConnection(asyncio.Protocol):
    """The control plane asks `full` or `changes`, a line; the answer is `INSTANCE FULL`, a line, and the payload of the
    store in pieces, each after a line with its length; a length of 0 ends it.

    The streams have the loop between two pieces: many series take milliseconds, and no event waits for all of them.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._line = b""
        self._asked: deque[bool] = deque()
        self._pieces: Iterator[bytes] | None = None  # of the answer that is under way

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._plane.metrics_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._plane.metrics_connections.discard(self)
        self._asked.clear()
        self._pieces = None

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._line += data
        while b"\n" in self._line:
            line, _, self._line = self._line.partition(b"\n")
            self._asked.append(line != b"changes")
        if len(self._line) > 64:
            self._transport.abort()
        elif self._pieces is None:
            self._begin()

    def _begin(self) -> None:
        if self._asked:
            full = self._asked.popleft()
            self._transport.write(b"%b %d\n" % (self._plane.instance.encode(), full))
            self._pieces = self._plane.snapshot(full)
            self._go_on()

    def _go_on(self) -> None:
        if self._pieces is None:
            return
        until_ns = self._plane.clock.monotonic_ns() + TURN_NS
        written: list[bytes] = []
        try:
            for piece in self._pieces:
                if piece:
                    written += (b"%d\n" % len(piece), piece)
                if self._plane.clock.monotonic_ns() >= until_ns:
                    self._plane.loop.call_soon(self._go_on)
                    break
            else:
                written.append(b"0\n")
                self._pieces = None
        except Exception as error:
            self._plane.observer_failed(error)
            self._transport.abort()  # half an answer: the next one is asked for anew
            return
        self._transport.write(b"".join(written))
        if self._pieces is None:
            self._begin()


async def _end_of_stdin(stdin: asyncio.StreamReader) -> None:
    while await stdin.read(4096):
        pass


async def run(settings: Settings, listen_fd: int, metrics_fd: int) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    orphaned = loop.create_task(_end_of_stdin(stdin))
    orphaned.add_done_callback(lambda _: stop.set())
    plane = DataPlane(settings, SystemClock(), loop)
    await plane.start(socket.socket(fileno=listen_fd), socket.socket(fileno=metrics_fd))
    # What is here now stays: a collection that looks through all of it would be some stream's late event.
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await stop.wait()
    await plane.drain()
    orphaned.cancel()


def main() -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # the rest belongs to the loop
        first = stdin.readline()
    body = orjson.loads(first)
    settings = Settings.from_json(body["settings"])
    uvloop.run(run(settings, body["listen_fd"], body["metrics_fd"]))


if __name__ == "__main__":
    main()
