"""Open-loop replay: every request leaves at its scheduled time, whatever became of those before it.

t0 is set once. A request that is late is sent at once and its lag recorded; the schedule never moves, and nothing
waits for a slot. So a server that stalls meets the arrivals it would meet in life, and TTFT counted from the
scheduled arrival keeps the wait that a closed loop would hide.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from sloscope.client.h1 import OWN_LIMIT, Call, Origin, Pool, fetch
from sloscope.client.loop_lag import LagProbe
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipts import ReceiptPoster
from sloscope.client.recorder import RequestRecorder
from sloscope.client.schedule import Planned, PromptText, Schedule
from sloscope.contract import Contract
from sloscope.definitions import judge
from sloscope.errors import ConfigError
from sloscope.ids import new_request_id
from sloscope.units import NS_PER_S

_TICK_S = 0.02
_PROGRESS_TICKS = 25
# A batch costs some 5 µs: 2,000 streams that began together would hold the loop for 10 ms if written at once.
_BATCHES_PER_TICK = 64
_NEVER_NS = 1 << 63
_SEND_BURST_NS = 2_000_000  # many sends due at once give way to receipts after this long
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


@dataclass(slots=True)
class Tally:
    """What a run came to. Latencies in ns; warm-up rows stand only in `sent`, `warmup` and `dispatch_lag_ns`."""

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
    dispatch_lag_ns: array[int] = field(default_factory=lambda: array("q"))
    ttft_ns: array[int] = field(default_factory=lambda: array("q"))  # completed requests
    ttft_intended_ns: array[int] = field(default_factory=lambda: array("q"))
    wall_ns: int = 0
    interrupted: bool = False
    own_limit: int = 0  # requests that this process had no descriptor or port for
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


async def probe(
    origins: Sequence[Origin], model: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
) -> Target:
    """Asks each origin for its models. Raises ConfigError for one that cannot be reached or that names no model."""
    found, owner = "", ""
    for origin in origins:
        pool = Pool(origin, tls)
        try:
            reply = await fetch(pool, "GET", "/models", dict(headers))
        except (OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"--url: {origin} cannot be reached: {why}") from None
        finally:
            await pool.close()
        name, by = _first_model(reply.body) if reply.status == 200 else ("", "")
        found, owner = found or name, owner or by
    if not (model or found):
        raise ConfigError(f"--model: {origins[0]}/models names no model; accepted: a model name")
    return Target(tuple(origins), model or found, owner, headers=headers)


def _first_model(body: bytes) -> tuple[str, str]:
    try:
        first = orjson.loads(body)["data"][0]
        return str(first["id"]), str(first.get("owned_by", ""))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", ""


class Replay:
    """One run. `run` may be called once; `interrupt` ends it early and keeps what is recorded."""

    def __init__(
        self,
        schedule: Schedule,
        contract: Contract,
        target: Target,
        events: Path | None,
        *,
        drain_ns: int,
        seed: int = 0,
        receipts: Origin | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tally = Tally(scheduled=len(schedule.requests))
        self._schedule = schedule
        self._contract = contract
        self._target = target
        self._drain_ns = drain_ns
        self._text = PromptText(seed)
        self._lag = LagProbe()
        self._log = ReceiptLog(events, on_end=self._on_end, lag_since=self._lag.since)
        self._pools = [Pool(origin, tls) for origin in target.origins]
        self._heads = [_head(origin, target) for origin in target.origins]
        self._contract_hash = contract.hash
        self._open: dict[str, _Sent] = {}
        self._position = 0
        self._over = asyncio.Event()
        self._t0_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self.next_due_ns = _NEVER_NS
        self._poster = ReceiptPoster(receipts, target, self._log.clock.clock_id, tls) if receipts is not None else None

    @property
    def open(self) -> int:
        return len(self._open)

    def interrupt(self) -> None:
        self.tally.interrupted = True
        self._over.set()

    async def run(self, start_in_s: float = 0.05, progress: Callable[[Replay], None] | None = None) -> Tally:
        loop = asyncio.get_running_loop()
        # What stands now lives as long as the run: the collector need not walk it while requests are timed.
        gc.collect()
        gc.freeze()
        thresholds = gc.get_threshold()
        gc.set_threshold(50_000, 20, 100)
        tasks = [loop.create_task(self._tick(progress))]
        self._lag.start()
        if self._poster is not None:
            tasks.append(loop.create_task(self._poster.run()))
        try:
            self._t0_ns = time.monotonic_ns() + int(start_in_s * NS_PER_S)
            self.send_due()
            await self._over.wait()
        finally:
            self._lag.stop()
            if self._timer is not None:
                self._timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.tally.wall_ns = time.monotonic_ns() - self._t0_ns
            closed_ns = time.monotonic_ns()
            for sent in list(self._open.values()):
                sent.recorder.close_window(closed_ns)
                sent.call.abort()
            if self._poster is not None:
                self.tally.receipts_failed = await self._poster.close()
                self.tally.receipts_error = self._poster.last_error
            for pool in self._pools:
                await pool.close()
            self._log.close()
            self.tally.records_lost = self._log.lost
            gc.set_threshold(*thresholds)
            gc.unfreeze()
        return self.tally

    def send_due(self) -> None:
        """Sends all that is due and arms a timer for the next; never early, and late ones at once."""
        if self._over.is_set():
            return
        requests, t0_ns, loop = self._schedule.requests, self._t0_ns, asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic_ns()
        give_way_ns = now + _SEND_BURST_NS
        while self._position < len(requests):
            planned = requests[self._position]
            self.next_due_ns = t0_ns + planned.offset_ns
            if self.next_due_ns > now:
                # Timers of libuv are whole milliseconds and round to the nearest: up, or the request leaves early.
                self._timer = loop.call_later(-(-(self.next_due_ns - now) // 1_000_000) / 1000, self.send_due)
                return
            if now >= give_way_ns:
                self._timer = loop.call_later(0, self.send_due)
                return
            self._send(planned)
            self._position += 1
            now = time.monotonic_ns()
        self.next_due_ns = _NEVER_NS
        self._timer = loop.call_later(self._drain_ns / NS_PER_S, self._over.set)
        self._end_when_idle()

    def _send(self, planned: Planned) -> None:
        intended_ns = self._t0_ns + planned.offset_ns
        index = self._position % len(self._pools)
        target = self._target
        request_id = new_request_id()
        labels: dict[str, str | bool] = {}
        if planned.warmup:
            labels["warmup"] = True
        if planned.stop_after is None:
            labels["length_forced"] = True
        body = _body(target, planned, self._text)
        # The default class goes unsaid, since a server may know it by another name.
        is_default = planned.class_name == self._contract.default_class
        request = b"%sx-sloscope-request-id: %s\r\n%s%s%scontent-length: %d\r\n\r\n%s" % (
            self._heads[index],
            request_id.encode(),
            b"" if is_default else b"x-slo-class: %s\r\n" % planned.class_name.encode(),
            b"x-slo-tenant: %s\r\n" % planned.tenant.encode() if planned.tenant else b"",
            b"x-sloscope-stop-after: %d\r\n" % planned.stop_after if planned.stop_after is not None else b"",
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
            labels=labels or None,
        )
        sent = _Sent(self, recorder, planned)
        self._open[request_id] = sent
        tally = self.tally
        tally.sent += 1
        tally.dispatch_lag_ns.append(send_ns - intended_ns)
        if tally.first_send_offset_ns is None:
            tally.first_send_offset_ns = send_ns - self._t0_ns
        if planned.warmup:
            tally.warmup += 1
        else:
            tally.offered += 1
        sent.call = self._pools[index].send(request, sent)

    def _on_end(self, recorder: RequestRecorder) -> None:
        assert recorder.ended is not None
        sent = self._open.pop(recorder.request_id)
        if not sent.planned.warmup:
            # Warm-up is excluded by rule, from the counters of a control plane too.
            if self._poster is not None:
                self._poster.add(recorder, sent.planned)
            self._count(recorder, sent.planned)
        self._end_when_idle()

    def _count(self, recorder: RequestRecorder, planned: Planned) -> None:
        assert recorder.ended is not None
        tally, (outcome, reason) = self.tally, recorder.ended
        tally.own_limit += recorder.error == OWN_LIMIT
        tally.outcomes[outcome] += 1
        if reason:
            tally.reasons[f"{outcome}({reason})"] += 1
        tally.output_tokens += recorder.output_tokens or 0
        summary = recorder.summary()
        row = self._contract.classes[planned.class_name]
        verdict = judge(outcome, summary, row.limits, streamed=recorder.streaming is not False, streaming=row.streaming)
        tally.qualified += verdict.qualified
        tally.vacuous += verdict.vacuous
        if outcome == "completed" and summary.ttft_ns is not None and summary.first_ns is not None:
            assert recorder.intended_ns is not None
            tally.ttft_ns.append(summary.ttft_ns)
            tally.ttft_intended_ns.append(summary.first_ns - recorder.intended_ns)

    def _end_when_idle(self) -> None:
        if self._position == len(self._schedule.requests) and not self._open:
            self._over.set()

    async def _tick(self, progress: Callable[[Replay], None] | None) -> None:
        turn = 0
        while True:
            await asyncio.sleep(_TICK_S)
            self._log.tick(time.monotonic_ns(), max(_BATCHES_PER_TICK, self._log.waiting // 16))
            turn += 1
            if progress is not None and turn % _PROGRESS_TICKS == 0:
                progress(self)


class _Sent:
    """A request on its way, as h1 sees it."""

    __slots__ = ("_replay", "call", "planned", "recorder")

    def __init__(self, replay: Replay, recorder: RequestRecorder, planned: Planned) -> None:
        self._replay = replay
        self.recorder = recorder
        self.planned = planned
        self.call: Call = Call()

    def responded(self, t_ns: int, status: int, headers: dict[str, str]) -> None:
        self.recorder.response(status, headers)

    def received(self, t_ns: int, data: bytes) -> None:
        if t_ns >= self._replay.next_due_ns:
            # A loop with a thousand sockets to read gets to its timers late; a send does not wait for that.
            self._replay.send_due()
        recorder = self.recorder
        recorder.receive(t_ns, data)
        stop_at = self.planned.cancel_after
        if stop_at is not None and len(recorder.t_ns) >= stop_at:
            self.call.abort()
            recorder.end(time.monotonic_ns(), left="voluntary")

    def ended(self, t_ns: int, transport: str, error: str | None) -> None:
        self.recorder.end(t_ns, transport=transport, error=error)


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
    prompt = text.cut(planned.prompt_tokens, planned.text_seed)
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
