"""The front end's state: requests alive, the link to the engine process, the journal, the metrics. No HTTP here.

It runs on one asyncio loop. What the engine says wakes the one request that it concerns.
"""

import asyncio
import contextlib
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from reference_server.link import FrameBuffer, Message, encode
from reference_server.tokenizer import Tokenizer, TokenizerSpec
from sloscope import records
from sloscope.clock import Clock
from sloscope.contract import Contract, Limits, RequestClass
from sloscope.errors import ModelFileError
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.recorder import Recorder

# Without a contract nothing is promised, and no class is unknown.
NO_PROMISES = Contract(classes={"default": RequestClass("default", Limits())}, default_class="default")
# Parsing holds up every stream, some 150 ms for a megabyte of token ids. So a body is at most what a full context can
# need: a token's text, escaped, and the rest of the request.
BODY_BYTES_PER_TOKEN = 32
LEAST_BODY_BYTES = 256 << 10
DEFAULT_MAX_TOKENS = 256
FLUSH_EVERY_S = 1.0
PROBE_EVERY_S = 0.02
SCRAPE_WAIT_S = 0.1
REMEMBERED_IDS = 100_000


class Token(NamedTuple):
    token_id: int
    finish: str  # stop or length at the last one
    visible: bool  # False: the end token, which is no output
    step_id: int
    computed_ns: int
    handed_ns: int


class Refused(NamedTuple):
    """The engine does not take the request. `retry`: asking again after `retry_after_s` can help."""

    reason: str
    message: str
    retry: bool
    retry_after_s: int


@dataclass(slots=True)
class Emissions:
    """Stamps of output events that are not in the journal yet."""

    ordinal0: int = 0
    cum_tokens: list[int] = field(default_factory=list)
    computed_ns: list[int] = field(default_factory=list)
    handed_ns: list[int] = field(default_factory=list)
    written_ns: list[int] = field(default_factory=list)
    step_id: list[int] = field(default_factory=list)

    def add(self, cum_tokens: int, token: Token) -> None:
        self.cum_tokens.append(cum_tokens)
        self.computed_ns.append(token.computed_ns)
        self.handed_ns.append(token.handed_ns)
        self.step_id.append(token.step_id)

    def stamp(self, written_ns: int) -> None:
        """The events added since the last stamp were written now."""
        self.written_ns.extend([written_ns] * (len(self.computed_ns) - len(self.written_ns)))

    def take(self, request_id: str) -> records.Record | None:
        """A record of what was written; the rest stays."""
        n = len(self.written_ns)
        if n == 0:
            return None
        record = records.make(
            "emit",
            request_id=request_id,
            attempt=0,
            ordinal0=self.ordinal0,
            choice=[0] * n,
            cum_tokens=self.cum_tokens[:n],
            computed_ns=self.computed_ns[:n],
            handed_ns=self.handed_ns[:n],
            written_ns=self.written_ns[:n],
            step_id=self.step_id[:n],
        )
        self.ordinal0 += n
        for stamps in (self.cum_tokens, self.computed_ns, self.handed_ns, self.written_ns, self.step_id):
            del stamps[:n]
        return record


@dataclass(slots=True, eq=False)
class Live:
    """A request between the engine and its socket. `news` wakes the one task that answers it."""

    key: str
    cut: Callable[[], None]  # closes the consumer's connection at once
    mailbox: deque[Token] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    streaming: bool = True
    accepted: bool = False
    ended: bool = False  # at the engine
    refused: Refused | None = None
    error: str | None = None
    left: str = ""  # the consumer ended it: disconnect, slow_reader
    abort_sent: bool = False  # the engine was told to drop it
    queued_ns: int | None = None
    started_ns: int | None = None
    received: int = 0  # tokens from the engine
    delivered: int = 0  # of those, taken by the socket, or without text of their own to wait for
    blocked_ns: int | None = None  # since when the socket does not take what was written
    loop_lag_max_ns: int = 0
    emissions: Emissions = field(default_factory=Emissions)

    @property
    def undelivered(self) -> int:
        """Nobody waits for the tokens of a consumer that has left: they are dropped."""
        return 0 if self.left else self.received - self.delivered


class FrontEnd:
    def __init__(
        self,
        clock: Clock,
        contract: Contract | None = None,
        open_journal: Callable[[], JournalWriter] | None = None,
        *,
        slow_reader_ns: int | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        allow_faults: bool = False,
    ) -> None:
        self.clock = clock
        self.contract = contract or NO_PROMISES
        self.contract_hash = contract.hash if contract is not None else None
        self.has_contract = contract is not None
        self._open_journal = open_journal
        self.journal: Recorder | None = None  # from `connect` to `close_journal`
        self.metrics = MetricStore("server", contract)
        self.slow_reader_ns = slow_reader_ns
        self.default_max_tokens = default_max_tokens
        self.allow_faults = allow_faults
        self.stopping = False
        self.live: dict[str, Live] = {}
        self._open: set[str] = set()  # requests begun and not ended, refused ones too, which never come alive
        self._seen: OrderedDict[str, None] = OrderedDict()  # the latest ids
        self._in_use: set[str] = set()  # ids of requests that have not ended, however long ago they came
        self._scrapes: list[asyncio.Event] = []
        self._taken: dict[str, int] = {}  # tokens that readers took, not yet told to the engine
        self.metrics.init("sloscope_tenant_overflow_total", ("engine",))
        for outcome in records.OUTCOMES:
            self.metrics.init("sloscope_engine_requests_ended_total", (outcome,))
        for name in self.contract.classes:
            self.metrics.init("sloscope_engine_oldest_waiting_seconds", (name,))

    # --- the engine process

    async def connect(self, sock: socket.socket) -> None:
        """Waits for the engine's first word. Its `failed` is raised by the caller, from `engine.failure`."""
        loop = asyncio.get_running_loop()
        if self._open_journal is not None:
            self.journal = Recorder(self._open_journal, self.clock, loop)
        sock.setblocking(False)
        _, self.engine = await loop.create_unix_connection(lambda: EngineConnection(self._on_message), sock=sock)

    def on_ready(self, message: Message) -> None:
        spec = message["tokenizer"]
        self.tokenizer = Tokenizer(
            TokenizerSpec(
                tokens=tuple(spec["tokens"]),
                merges=tuple(spec["merges"]),
                control_ids=frozenset(spec["control_ids"]),
                pre=spec["pre"],
                bos_id=spec["bos_id"],
                eos_ids=tuple(spec["eos_ids"]),
                add_bos=spec["add_bos"],
                chat_template=spec["chat_template"],
            )
        )
        # The first use of the template and of the merges takes tens of milliseconds: not in someone's TTFT.
        with contextlib.suppress(ModelFileError):
            self.tokenizer.encode(self.tokenizer.render_chat([{"role": "user", "content": "warm up"}]))
        self.model: str = message["model"]
        self.metrics.set("sloscope_engine_info", 1, (self.model,))
        self.mask_eos: bool = message["mask_eos"]
        self.max_context: int = message["max_context"]
        self.max_body_bytes = max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * self.max_context)
        self.kv_tokens: int = message["kv_tokens"]
        self.created = self.clock.wall_ns() // 1_000_000_000

    @property
    def healthy(self) -> bool:
        return not self.stopping and not self.engine.lost.is_set()

    def _on_message(self, message: Message) -> None:
        match message["op"]:
            case "tokens":
                self._on_tokens(message)
            case "accepted":
                for key in message["keys"]:
                    if live := self.live.get(key):
                        live.accepted = True
                        live.news.set()
            case "refused":
                if live := self.live.get(message["key"]):
                    live.refused = Refused(
                        message["reason"], message["message"], message["retry"], message["retry_after_s"]
                    )
                    live.ended = True
                    live.news.set()
            case "error":
                if live := self.live.get(message["key"]):
                    live.error = message["message"]
                    live.ended = True
                    live.news.set()
            case "cut":
                if live := self.live.get(message["key"]):
                    live.ended = True
                    self.cut(live, message["reason"])
            case "metrics":
                self.metrics.absorb(message["payload"].encode())
                for scrape in self._scrapes:
                    scrape.set()
                self._scrapes.clear()
            case op:
                raise AssertionError(f"unknown message {op}")

    def _on_tokens(self, message: Message) -> None:
        step_id, computed_ns, handed_ns = message["step"], message["computed_ns"], message["handed_ns"]
        for key, token_id, finish, visible, *stamps in message["rows"]:
            live = self.live.get(key)
            if live is None or live.left:
                continue  # aborted meanwhile
            if stamps:
                live.queued_ns, live.started_ns = stamps
            live.mailbox.append(Token(token_id, finish, visible, step_id, computed_ns, handed_ns))
            live.received += 1
            live.ended = live.ended or bool(finish)
            live.news.set()

    # --- requests

    def believe(self, request_id: str) -> bool:
        """Whether this id was never seen before; from now on it was, and at least until its request has ended."""
        if request_id in self._seen or request_id in self._in_use:
            return False
        self._seen[request_id] = None
        self._in_use.add(request_id)
        if len(self._seen) > REMEMBERED_IDS:
            self._seen.popitem(last=False)
        return True

    def submit(self, live: Live, **asked: Any) -> None:
        self.live[live.key] = live
        # The engine folds tenants by the same rule.
        if self.metrics.bounded("tenant", asked["tenant"]) != asked["tenant"]:
            self.metrics.inc("sloscope_tenant_overflow_total", 1, ("engine",))
        self._send({"op": "new", "key": live.key, "streaming": live.streaming, **asked})

    def delivered(self, live: Live, tokens: int) -> None:
        """Its reader has taken this many tokens by now. The engine hears of all readers once a turn of the loop."""
        if tokens == live.delivered:
            return
        live.delivered = tokens
        # An answer that is sent as a whole waits for its end, not for its reader.
        if live.streaming and not live.ended:
            if not self._taken:
                asyncio.get_running_loop().call_soon(self._tell_delivered)
            self._taken[live.key] = tokens

    def _tell_delivered(self) -> None:
        self._send({"op": "delivered", "rows": list(self._taken.items())})
        self._taken.clear()

    def cut(self, live: Live, reason: str) -> None:
        """We end it: the consumer's connection is closed at once."""
        self.leave(live, reason)
        live.cut()

    def leave(self, live: Live, reason: str) -> None:
        """The consumer is gone or given up: the engine drops the request at its next boundary."""
        if live.left:
            return
        live.left = reason
        live.news.set()
        if live.key in self.live and not live.ended:
            self._abort(live, reason)

    def finish(self, live: Live) -> None:
        """The answer ended in its text, which only the front end sees."""
        self._send({"op": "finish", "key": live.key})
        live.ended = True

    def stall(self, ns: int, decoding: bool = False) -> None:
        """The next step takes that much more; with `decoding`, the next that decodes."""
        self._send({"op": "stall", "ns": ns, "decoding": decoding})

    def close(self, live: Live) -> None:
        """The request has its end. The engine is told if it does not know: whatever happened, it runs no further."""
        if self.live.pop(live.key, None) is not None and not live.ended:
            self._abort(live, "front_end")
        self.flush_emissions(live)

    def fail_all(self, message: str) -> None:
        for live in list(self.live.values()):
            live.error = live.error or message
            live.news.set()
            if not live.ended:
                self._abort(live, "shutdown")

    def _abort(self, live: Live, reason: str) -> None:
        live.abort_sent = live.ended = True
        self._send({"op": "abort", "key": live.key, "reason": reason})

    def _send(self, message: Message) -> None:
        if not self.engine.lost.is_set():
            self.engine.send(message)

    # --- journal and metrics

    async def begin(self, record: records.Record) -> None:
        """One write before the request goes on, or 5 ms: a slow disk holds up no stream. A record that cannot be
        written is counted, and the request goes on."""
        self.metrics.inc("sloscope_engine_requests_offered_total")
        self._open.add(record["request_id"])
        if self.journal is not None:
            on_disk = asyncio.Event()
            self.journal.begin(record, on_disk.set)
            await on_disk.wait()

    def refuse(self, request_id: str, reason: str) -> None:
        """A decision of admission that is made before the engine hears of the request. Counted as the engine's are."""
        self.metrics.inc("sloscope_engine_admissions_total", 1, ("refuse", reason))
        at_ns = self.clock.monotonic_ns()
        self.record("decision", request_id=request_id, attempt=0, at_ns=at_ns, verdict="refuse", reason=reason)

    def ended(self, request_id: str, outcome: str) -> None:
        self._open.remove(request_id)
        self._in_use.discard(request_id)
        self.metrics.inc("sloscope_engine_requests_ended_total", 1, (outcome,))

    def record(self, kind: str, **fields: Any) -> None:
        self._append(records.make(kind, **fields))

    def flush_emissions(self, live: Live) -> None:
        record = live.emissions.take(live.key)
        if record is not None:
            self._append(record)

    def _append(self, record: records.Record) -> None:
        if self.journal is not None:
            self.journal.put(record)

    def close_journal(self) -> None:
        """What is waiting is written; nothing may come after."""
        if self.journal is not None:
            self.journal.close()

    async def tend_journal(self) -> None:
        """No emission stays unwritten for more than about a second."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            for live in list(self.live.values()):
                self.flush_emissions(live)

    async def probe_loop(self) -> None:
        """How late this loop runs what is due, for every request that was alive then."""
        while True:
            due_ns = self.clock.monotonic_ns() + round(PROBE_EVERY_S * 1e9)
            await asyncio.sleep(PROBE_EVERY_S)
            now_ns = self.clock.monotonic_ns()
            for live in self.live.values():
                live.loop_lag_max_ns = max(live.loop_lag_max_ns, now_ns - due_ns)
            self._cut_slow_readers(now_ns)

    def _cut_slow_readers(self, now_ns: int) -> None:
        """The engine cuts those that it waits for. These have ended there, and their last tokens lie here."""
        if self.slow_reader_ns is None:
            return
        for live in list(self.live.values()):
            if live.ended and live.blocked_ns is not None and now_ns - live.blocked_ns >= self.slow_reader_ns:
                self.cut(live, "slow_reader")

    async def scrape(self) -> bytes:
        """The exposition, with the engine's numbers as fresh as its current iteration allows."""
        if not self.engine.lost.is_set():
            answered = asyncio.Event()
            self._scrapes.append(answered)
            self._send({"op": "drain"})
            try:
                await asyncio.wait_for(answered.wait(), SCRAPE_WAIT_S)
            except TimeoutError:
                pass  # a long step: the numbers of the last second are good enough
        undelivered = sum(live.undelivered for live in self.live.values())
        self.metrics.set("sloscope_engine_undelivered_tokens", undelivered)
        self.metrics.set("sloscope_engine_inflight_requests", len(self._open))
        if self.journal is not None:
            written = {
                "records": self.journal.written,
                "dropped": self.journal.lost,
                "bytes": self.journal.bytes_written,
            }
            for what, count in written.items():  # the engine process adds those of its own journal
                self.metrics.set(f"sloscope_journal_{what}_total", count, ("engine",))
            self.metrics.set("sloscope_journal_late_begins_total", self.journal.late_begins)
            # The engine process writes at every boundary; what waits, waits here.
            self.metrics.set("sloscope_journal_lag_seconds", self.journal.lag_ns / 1e9, ("engine",))
        # One turn of the loop holds all that is said; to make text of it takes many times longer.
        return await asyncio.get_running_loop().run_in_executor(None, self.metrics.snapshot().render)


class EngineConnection(asyncio.Protocol):
    """The front end's end of the socket. `ready` holds the engine's first word, `lost` is set when it is gone."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self.ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if message["op"] in ("ready", "failed"):
                self.ready.set_result(message)
            else:
                self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def send(self, message: Message) -> None:
        assert self._transport is not None
        self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
