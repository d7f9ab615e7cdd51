"""Open-loop replay: every request leaves at its scheduled time, whatever became of those before it.

t0 is set once. A request that is late is sent at once and its lag recorded; the schedule never moves, and nothing
waits for a slot. So a server that stalls meets the arrivals it would meet in life, and TTFT counted from the
scheduled arrival keeps the wait that a closed loop would hide.

A retry is a request of its own, due when the server's Retry-After is over. It takes its place among the scheduled ones
and moves none of them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import orjson

from sloscope.client.h1 import OWN_LIMIT, Call, Connection, Origin, Pool, fetch, make_room, why
from sloscope.client.inbox import NEVER_NS, Inbox
from sloscope.client.loop_lag import LagProbe
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipt_writer import BEGIN_PATIENCE_S
from sloscope.client.receipts import ReceiptPoster
from sloscope.client.recorder import RequestRecorder
from sloscope.client.schedule import Planned, PromptText, Schedule
from sloscope.contract import Contract
from sloscope.definitions import judge
from sloscope.errors import ConfigError
from sloscope.ids import new_request_id
from sloscope.units import NS_PER_S

_START_IN_NS = 50_000_000
_TICK_S = 0.005
_PROGRESS_TICKS = 100
# A batch costs some 10 µs: 2,000 streams that began together would hold the loop for 20 ms if written at once.
_BATCHES_PER_TICK = 16
_LONG_ENOUGH_NS = NS_PER_S  # to tell processor time by, which is counted in hundredths of a second
_SEND_BURST_NS = 2_000_000  # many sends due at once give way to receipts after this long
# What the kernel reads ahead for a slow reader, bytes: some ten events. It doubles it for its own book-keeping.
_SLOW_READER_BUFFER = 4096
_BEGIN_PATIENCE_NS = round(BEGIN_PATIENCE_S * NS_PER_S)
APIS = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask and how. `owned_by` is what GET /v1/models says of the first model.

    `ignore_eos` False: the server refuses that field, so that forced lengths are caps alone.
    """

    origins: tuple[Origin, ...]
    model: str
    owned_by: str
    api: str = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Conduct:
    """What the consumers do beside reading. Durations in ns."""

    retries: int = 0  # of a request that was refused (429, 503) or found no connection
    retry_wait_ns: int = NS_PER_S // 2  # where the server names no time; doubled with each further retry
    timeout_ns: int | None = None  # from the send: then the consumer leaves
    read_pause_ns: int = NS_PER_S // 2  # how long a slow reader holds off after each read


def _stamps() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Tally:
    """What a run came to. Latencies in ns; warm-up rows stand only in `sent`, `warmup` and what was measured of sends.

    A retry is a request more in `sent` and `offered`.
    """

    scheduled: int = 0
    sent: int = 0
    warmup: int = 0
    offered: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    qualified: int = 0
    vacuous: int = 0
    output_tokens: int = 0
    first_send_offset_ns: int | None = None
    dispatch_lag_ns: array[int] = field(default_factory=_stamps)  # from the scheduled arrival to `send_ns`
    # From there until the bytes are handed to the transport: the write of the begin, which holds `send_ns`.
    begin_wait_ns: array[int] = field(default_factory=_stamps)
    ttft_ns: array[int] = field(default_factory=_stamps)  # completed requests
    ttft_intended_ns: array[int] = field(default_factory=_stamps)
    wall_ns: int = 0
    cpu_share: float | None = None  # of one core until the last send, by the busiest process; None: too short to tell
    processes: int = 1
    processes_lost: int = 0  # ended without a word, and their counts with them
    interrupted: bool = False
    retries: int = 0
    retries_completed: int = 0
    retries_not_sent: int = 0  # due after the run's end
    slow_readers: int = 0
    own_limit: int = 0  # requests that this process had no descriptor or port for
    late_begins: int = 0  # requests that left before their begin was on disk
    records_lost: int = 0
    receipts_failed: int = 0
    receipts_error: str = ""

    @property
    def ended(self) -> int:
        return self.outcomes.total()

    @property
    def unfinished(self) -> int:
        """Offered requests that were open when the run ended."""
        return self.outcomes["unfinished"]

    def add(self, other: Tally) -> None:
        """The counts of another part of the same schedule. Quantiles are of all values, never of quantiles."""
        for name in (
            "scheduled", "sent", "warmup", "offered", "qualified", "vacuous", "output_tokens", "retries",
            "retries_completed", "retries_not_sent", "slow_readers", "own_limit", "late_begins", "records_lost",
            "receipts_failed",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes.update(other.outcomes)
        self.reasons.update(other.reasons)
        self.dispatch_lag_ns += other.dispatch_lag_ns
        self.begin_wait_ns += other.begin_wait_ns
        self.ttft_ns += other.ttft_ns
        self.ttft_intended_ns += other.ttft_intended_ns
        offsets = [ns for ns in (self.first_send_offset_ns, other.first_send_offset_ns) if ns is not None]
        self.first_send_offset_ns = min(offsets, default=None)
        self.wall_ns = max(self.wall_ns, other.wall_ns)
        shares = [share for share in (self.cpu_share, other.cpu_share) if share is not None]
        self.cpu_share = max(shares, default=None)
        self.interrupted = self.interrupted or other.interrupted
        self.receipts_error = self.receipts_error or other.receipts_error


async def probe(
    origins: Sequence[Origin], model: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
) -> Target:
    """Asks each origin for its models. Raises ConfigError for one that cannot be reached or that names no model."""
    found, owner, status = "", "", 200
    for origin in origins:
        pool = Pool(origin, tls)
        try:
            reply = await fetch(pool, "GET", "/models", dict(headers))
        except (OSError, TimeoutError) as error:
            raise ConfigError(f"--url: {origin} cannot be reached: {why(error)}") from None
        finally:
            await pool.close()
        status = max(status, reply.status)
        name, by = _first_model(reply.body) if reply.status == 200 else ("", "")
        found, owner = found or name, owner or by
    if not (model or found):
        said = f"answered {status}" if status != 200 else "names no model"
        raise ConfigError(f"--model: {origins[0]}/models {said}; accepted: a model name")
    return Target(tuple(origins), model or found, owner, headers=headers)


def _first_model(body: bytes) -> tuple[str, str]:
    try:
        first = orjson.loads(body)["data"][0]
        return str(first["id"]), str(first.get("owned_by", ""))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", ""


class _Retry(NamedTuple):
    """Ordered by when it is due; the id breaks ties, so that nothing behind it is compared."""

    due_ns: int
    retry_of: str
    planned: Planned
    number: int  # from 1


class Replay:
    """One run of a schedule, or of a part of it. `run` may be called once; `interrupt` ends it early and keeps what is
    recorded.

    `drain_ns`: how long after the last arrival of the whole schedule open requests are followed.
    """

    def __init__(
        self,
        schedule: Schedule,
        contract: Contract,
        target: Target,
        events: Path | None,
        *,
        drain_ns: int,
        seed: int = 0,
        conduct: Conduct | None = None,
        receipts: Origin | None = None,
        receipts_token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tally = Tally(scheduled=len(schedule.requests))
        self.conduct = conduct or Conduct()
        self._schedule = schedule
        self._contract = contract
        self._target = target
        self._drain_ns = drain_ns
        self._text = PromptText(seed, schedule.block_tokens)
        self._lag = LagProbe()
        self._log = ReceiptLog(events, on_end=self._on_end, lag_since=self._lag.since)
        self._inbox = Inbox()
        self._inbox.on_due = self.send_due
        self._pools = [Pool(origin, tls, self._inbox) for origin in target.origins]
        self._heads = [_head(origin, target) for origin in target.origins]
        self._contract_hash = contract.hash
        self._records = events is not None
        self._open: dict[str, _Sent] = {}
        self._position = 0
        self._retries: list[_Retry] = []
        self._over = asyncio.Event()
        self._t0_ns = 0
        self._cpu_ns = 0
        self._closes_ns = NEVER_NS
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._poster = ReceiptPoster(receipts, tls, receipts_token) if receipts is not None else None

    @property
    def open(self) -> int:
        return len(self._open)

    def interrupt(self) -> None:
        self.tally.interrupted = True
        self._over.set()

    async def run(self, t0_ns: int | None = None, progress: Callable[[Replay], None] | None = None) -> Tally:
        """`t0_ns`: when the first request of the whole schedule is due; default: at once."""
        loop = asyncio.get_running_loop()
        make_room(len(self._schedule.requests))
        # What open requests consist of lives too long to be garbage, and to walk it takes tens of milliseconds. What is
        # over is freed by its last reference: nothing here is made in cycles.
        collects = gc.isenabled()
        gc.collect()
        gc.disable()
        if self._records:
            self._log.start_thread(ticks=False)  # no send waits for a disk for longer than 5 ms
        tasks = [loop.create_task(self._tick(progress))]
        self._lag.start()
        if self._poster is not None:
            self._poster.start()
        try:
            self._t0_ns = t0_ns if t0_ns is not None else time.monotonic_ns() + _START_IN_NS
            self._closes_ns = self._t0_ns + self._schedule.span_ns + self._drain_ns
            self._cpu_ns = _cpu_ns()
            self.send_due()
            await self._over.wait()
        finally:
            self._lag.stop()
            for timer in (self._timer, self._closing):
                if timer is not None:
                    timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._inbox.catch_up()
            self.tally.wall_ns = time.monotonic_ns() - self._t0_ns
            closed_ns = time.monotonic_ns()
            for sent in list(self._open.values()):
                sent.stop_timers(closed_ns)
                sent.recorder.close_window(closed_ns)
                sent.call.abort()
            self.tally.retries_not_sent += len(self._retries)
            if self._poster is not None:
                await self._poster.close()
                self.tally.receipts_failed = self._poster.failed
                self.tally.receipts_error = self._poster.last_error
            for pool in self._pools:
                await pool.close()
            self._log.close()
            self.tally.records_lost = self._log.lost
            if collects:
                gc.enable()
        return self.tally

    def send_due(self) -> None:
        """Sends all that is due and arms a timer for the next; never early, and late ones at once."""
        if self._over.is_set():
            return
        requests, retries, loop = self._schedule.requests, self._retries, asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic_ns()
        give_way_ns = now + _SEND_BURST_NS
        while self._position < len(requests) or retries:
            fresh = requests[self._position] if self._position < len(requests) else None
            due_ns = self._t0_ns + fresh.offset_ns if fresh is not None else NEVER_NS
            is_retry = bool(retries) and retries[0].due_ns < due_ns
            self._inbox.due_ns = retries[0].due_ns if is_retry else due_ns
            if self._inbox.due_ns > now:
                # Timers of libuv are whole milliseconds and round to the nearest: up, or the request leaves early.
                self._timer = loop.call_later(-(-(self._inbox.due_ns - now) // 1_000_000) / 1000, self.send_due)
                break
            if now >= give_way_ns:
                self._timer = loop.call_later(0, self.send_due)
                return
            if is_retry:
                retry = heappop(retries)
                self._send(retry.planned, retry.due_ns, retry)
            else:
                assert fresh is not None
                self._position += 1
                self._send(fresh, due_ns)
            now = time.monotonic_ns()
        else:
            self._inbox.due_ns = NEVER_NS
        if self._position == len(requests) and self._closing is None:
            self._closing = loop.call_later(max(0, self._closes_ns - now) / NS_PER_S, self._over.set)
            if now - self._t0_ns >= _LONG_ENOUGH_NS:
                self.tally.cpu_share = (_cpu_ns() - self._cpu_ns) / (now - self._t0_ns)
            self._end_when_idle()

    def _send(self, planned: Planned, intended_ns: int, retry: _Retry | None = None) -> None:
        number = retry.number if retry is not None else 0
        # A retry asks the next server.
        index = (planned.index + number) % len(self._pools)
        target = self._target
        request_id = new_request_id()
        labels: dict[str, str | bool] = {}
        if planned.warmup:
            labels["warmup"] = True
        if planned.stop_after is None:
            labels["length_forced"] = True
        if planned.slow_reader:
            labels["slow_reader"] = True
        body = _body(target, planned, self._text)
        # The default class goes unsaid, since a server may know it by another name.
        is_default = planned.class_name == self._contract.default_class
        request = b"%sx-sloscope-request-id: %s\r\n%s%s%s%scontent-length: %d\r\n\r\n%s" % (
            self._heads[index],
            request_id.encode(),
            b"" if is_default else b"x-slo-class: %s\r\n" % planned.class_name.encode(),
            b"x-slo-tenant: %s\r\n" % planned.tenant.encode() if planned.tenant else b"",
            b"x-sloscope-stop-after: %d\r\n" % planned.stop_after if planned.stop_after is not None else b"",
            b"x-sloscope-retry-of: %s\r\n" % retry.retry_of.encode() if retry is not None else b"",
            len(body),
            body,
        )
        send_ns = time.monotonic_ns()
        recorder = self._log.open(
            request_id,
            send_ns,
            streaming=True,
            intended_ns=intended_ns,
            resolved=self._schedule.classes[planned.class_name],
            model=target.model,
            tenant=planned.tenant or None,
            contract_hash=self._contract_hash,
            prompt_tokens=planned.prompt_tokens,
            max_tokens=planned.max_tokens,
            stop_after=planned.stop_after,
            path=f"/v1{APIS[target.api]}",
            retry_of=retry.retry_of if retry is not None else None,
            labels=labels or None,
        )
        sent = _Sent(self, recorder, planned, number)
        self._open[request_id] = sent
        leaves_ns = time.monotonic_ns()
        tally = self.tally
        tally.sent += 1
        tally.retries += number > 0
        tally.slow_readers += planned.slow_reader
        # Behind a begin that is late nobody waits, and its own is not on disk either.
        tally.late_begins += leaves_ns - send_ns >= _BEGIN_PATIENCE_NS or self._log.is_behind
        tally.dispatch_lag_ns.append(send_ns - intended_ns)
        tally.begin_wait_ns.append(leaves_ns - send_ns)
        if tally.first_send_offset_ns is None:
            tally.first_send_offset_ns = send_ns - self._t0_ns
        if planned.warmup:
            tally.warmup += 1
        else:
            tally.offered += 1
        sent.call = self._pools[index].send(request, sent, _SLOW_READER_BUFFER if planned.slow_reader else 0)

    def _retry(self, sent: _Sent) -> None:
        """Makes a refused request due again, unless it has had its retries or the run is over by then."""
        recorder, conduct = sent.recorder, self.conduct
        assert recorder.ended is not None and recorder.end_ns is not None
        refused = recorder.ended.reason in ("rejected", "connect_error") and recorder.error != OWN_LIMIT
        if not refused or sent.number >= conduct.retries:
            return
        wait_ns = sent.retry_after_ns
        if wait_ns is None:
            wait_ns = conduct.retry_wait_ns << sent.number
        due_ns = recorder.end_ns + wait_ns
        if self._over.is_set() or due_ns > self._closes_ns:
            self.tally.retries_not_sent += 1
            return
        heappush(self._retries, _Retry(due_ns, recorder.request_id, sent.planned, sent.number + 1))
        if due_ns < self._inbox.due_ns:
            self._inbox.due_ns = due_ns
            # Not from here: this is the end of a request, in the middle of what the connection has to do about it.
            asyncio.get_running_loop().call_soon(self.send_due)

    def _on_end(self, recorder: RequestRecorder) -> None:
        assert recorder.ended is not None
        sent = self._open.pop(recorder.request_id)
        if self._poster is not None:
            self._poster.add(recorder, self._log)  # warm-up too, whose label the control plane knows
        if not sent.planned.warmup:
            self._count(recorder, sent)
        self._retry(sent)
        self._end_when_idle()

    def _count(self, recorder: RequestRecorder, sent: _Sent) -> None:
        assert recorder.ended is not None
        tally, (outcome, reason) = self.tally, recorder.ended
        tally.own_limit += recorder.error == OWN_LIMIT
        tally.outcomes[outcome] += 1
        if reason:
            tally.reasons[f"{outcome}({reason})"] += 1
        tally.output_tokens += recorder.output_tokens or 0
        summary = recorder.summary()
        tally.retries_completed += sent.number > 0 and outcome == "completed"
        row = self._contract.classes[sent.planned.class_name]
        verdict = judge(outcome, summary, row.limits, streamed=recorder.streaming is not False, streaming=row.streaming)
        tally.qualified += verdict.qualified
        tally.vacuous += verdict.vacuous
        if outcome == "completed" and summary.ttft_ns is not None and summary.first_ns is not None:
            assert recorder.intended_ns is not None
            tally.ttft_ns.append(summary.ttft_ns)
            tally.ttft_intended_ns.append(summary.first_ns - recorder.intended_ns)

    def _end_when_idle(self) -> None:
        if self._position == len(self._schedule.requests) and not self._open and not self._retries:
            self._over.set()

    async def _tick(self, progress: Callable[[Replay], None] | None) -> None:
        turn = 0
        while True:
            await asyncio.sleep(_TICK_S)
            self._log.tick(time.monotonic_ns(), max(_BATCHES_PER_TICK, self._log.waiting // 64))
            turn += 1
            if progress is not None and turn % _PROGRESS_TICKS == 0:
                progress(self)


class _Sent:
    """A request on its way, as h1 sees it."""

    __slots__ = (
        "_held_since_ns",
        "_replay",
        "_resume",
        "_timeout",
        "call",
        "number",
        "planned",
        "recorder",
        "retry_after_ns",
    )

    def __init__(self, replay: Replay, recorder: RequestRecorder, planned: Planned, number: int) -> None:
        self._replay = replay
        self.recorder = recorder
        self.planned = planned
        self.number = number  # of the retry; 0: it is none
        self.retry_after_ns: int | None = None
        self.call: Call = Call()
        self._held_since_ns = 0
        self._resume: asyncio.TimerHandle | None = None
        self._timeout: asyncio.TimerHandle | None = None
        if planned.slow_reader:
            recorder.consumer_hold_ns = 0
        if replay.conduct.timeout_ns is not None:
            self._timeout = _after(replay.conduct.timeout_ns, self._time_out)

    def responded(self, t_ns: int, status: int, headers: dict[str, str]) -> None:
        if status in (429, 503):
            self.retry_after_ns = retry_after_ns(headers.get("retry-after", ""), headers.get("date", ""))
        self.recorder.response(status, headers)

    def received(self, t_ns: int, data: bytes) -> None:
        recorder = self.recorder
        recorder.receive(t_ns, data)
        stop_at = self.planned.cancel_after
        if stop_at is not None and len(recorder.t_ns) >= stop_at:
            self._leave("voluntary")
        elif self.planned.slow_reader and recorder.t_ns and not self._held_since_ns:
            # From the first output on: how soon that came is the service's doing.
            self._hold()

    def ended(self, t_ns: int, transport: str, error: str | None) -> None:
        # A reset gives no reason: a server that loses its patience with a slow reader looks like one that breaks.
        self._end(t_ns, "", transport, error)

    def _time_out(self) -> None:
        if self.call.connection is not None:
            self.call.connection.catch_up()  # what was received in time counts
        if self.recorder.ended is None:
            self._leave("client_timeout")

    def _leave(self, reason: str) -> None:
        self.call.abort()
        self._end(time.monotonic_ns(), reason)

    def _end(self, t_ns: int, left: str, transport: str = "eof", error: str | None = None) -> None:
        self.stop_timers(time.monotonic_ns())
        self.recorder.end(t_ns, left=left, transport=transport, error=error)

    def _hold(self) -> None:
        connection = self.call.connection
        if connection is not None and connection.hold():
            self._held_since_ns = time.monotonic_ns()
            self._resume = _after(self._replay.conduct.read_pause_ns, self._go_on, connection)

    def _go_on(self, connection: Connection) -> None:
        self._count_hold(time.monotonic_ns())
        connection.go_on()

    def stop_timers(self, now_ns: int) -> None:
        """The request is over, in the middle of a hold perhaps."""
        for timer in (self._timeout, self._resume):
            if timer is not None:
                timer.cancel()
        self._count_hold(now_ns)

    def _count_hold(self, now_ns: int) -> None:
        if self._held_since_ns:
            assert self.recorder.consumer_hold_ns is not None
            self.recorder.consumer_hold_ns += now_ns - self._held_since_ns
            self._held_since_ns = 0


def _after(delay_ns: int, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
    """Not before the delay is over: timers of libuv are whole milliseconds, counted from the turn of the loop."""
    return asyncio.get_running_loop().call_later(delay_ns / NS_PER_S + 0.001, call, *arguments)


def retry_after_ns(text: str, date: str = "") -> int | None:
    """How long a Retry-After asks to wait: seconds, or a date, which is the server's own and so counts from the `Date`
    of the same answer. None for what is neither; a date that is over is now.
    """
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return int(text) * NS_PER_S
    try:
        wait = parsedate_to_datetime(text) - parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):  # no dates, or one with a zone and one without, or no number
        return None
    return max(0, int(wait.total_seconds())) * NS_PER_S


def _cpu_ns() -> int:
    """Processor time of this process, user and system."""
    used = os.times()
    return int((used.user + used.system) * NS_PER_S)


def _head(origin: Origin, target: Target) -> bytes:
    lines = [
        f"POST {origin.path}{APIS[target.api]} HTTP/1.1",
        f"host: {origin.netloc}",
        "content-type: application/json",
        "accept: text/event-stream",
        "user-agent: sloscope-replay",
        *(f"{name}: {value}" for name, value in target.headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


def _body(target: Target, planned: Planned, text: PromptText) -> bytes:
    prompt = text.prompt(planned)
    if target.api == "chat":
        asked = b'"messages":[{"role":"user","content":"%s"}]' % prompt
    else:
        asked = b'"prompt":"%s"' % prompt
    return b'{"model":%s,%s,"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}%s}' % (
        orjson.dumps(target.model),
        asked,
        planned.max_tokens,
        b',"ignore_eos":true' if planned.stop_after is None and target.ignore_eos else b"",
    )
