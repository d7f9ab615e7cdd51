"""The engine's loop: drain the inbox, plan, run, apply, hand the tokens over, journal.

Everything that comes from outside acts at an iteration boundary, aborts too. Tokens are handed to the front end before
anything is written to disk.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from reference_server.faults import parse_fault
from reference_server.link import EngineLink, Message
from reference_server.model_config import ModelConfig
from reference_server.request import ENDED, Request, State
from reference_server.scheduler import Emitted, Scheduler, StepPlan
from reference_server.step_types import SamplingParams, StepItem, StepResult
from reference_server.work import step_work
from sloscope import records
from sloscope.clock import Clock
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.units import NS_PER_S, format_ns

DRAIN_EVERY_NS = NS_PER_S
IDLE_WAIT_S = 1.0
# What a tenant is charged: an output token costs about two prompt tokens of time in a mixed batch.
PROMPT_UNIT, OUTPUT_UNIT = 1, 2
LIVE_STATES = tuple(state for state in State if state not in ENDED)
ADMISSIONS = (
    ("admit", "fits"),
    ("queue", "no_slot"),
    ("queue", "no_kv"),
    ("refuse", "context"),
    ("refuse", "kv_never_fits"),
    ("refuse", "queue_full"),
)


class StepRunner(Protocol):
    def step(self, batch: Sequence[StepItem]) -> StepResult: ...
    def free(self, slot: int) -> None: ...


class Engine:
    """`run` ends with LinkClosedError when the front end is gone."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        link: EngineLink,
        metrics: MetricStore,
        journal: JournalWriter | None,
        clock: Clock,
        config: ModelConfig,
        dtype_bytes: int = 4,
    ) -> None:
        self._runner = runner
        self.scheduler = scheduler
        self._link = link
        self._metrics = metrics
        self._journal = journal
        self._clock = clock
        self._config = config
        self._dtype_bytes = dtype_bytes
        self._step_id = 0
        self._stall_next_ns = 0
        self._drained_ns = 0
        self._init_metrics()

    def run(self) -> None:
        while True:
            self.turn(0 if self.scheduler.has_work else IDLE_WAIT_S)

    def turn(self, wait_s: float = 0) -> None:
        """One boundary, and the iteration after it if there is work."""
        self._drain_inbox(self._link.receive(wait_s))
        if self.scheduler.has_work:
            self._iterate()
        if self._journal is not None:
            self._journal.flush()
        if self._clock.monotonic_ns() - self._drained_ns >= DRAIN_EVERY_NS:
            self._send_metrics()

    # --- the inbox

    def _drain_inbox(self, messages: Sequence[Message]) -> None:
        accepted = []
        for message in messages:
            match message["op"]:
                case "new":
                    if self._submit(message):
                        accepted.append(message["key"])
                case "abort":
                    self._abort(message["key"], message["reason"])
                case "finish":
                    self.scheduler.finish(message["key"], "stop")
                    self._settle(self._clock.monotonic_ns())
                case "stall":
                    self._stall_next_ns += message["ns"]
                case "drain":
                    self._send_metrics()
                case op:
                    raise AssertionError(f"unknown message {op}")
        if accepted:
            self._link.send({"op": "accepted", "keys": accepted})

    def _submit(self, message: Message) -> bool:
        fault = message["fault"]
        request = Request(
            key=message["key"],
            prompt=message["prompt"],
            max_tokens=message["max_tokens"],
            stop_after=message["stop_after"],
            sampling=SamplingParams(
                message["temperature"], message["top_p"], message["seed"], mask_eos=message["mask_eos"]
            ),
            tenant=message["tenant"],
            arrived_ns=message["arrived_ns"],
            fault=parse_fault(fault) if fault else None,
            queued_ns=self._clock.monotonic_ns(),
        )
        refusal = self.scheduler.submit(request)
        self._settle(request.queued_ns)
        if refusal is not None:
            self._link.send({"op": "refused", "key": request.key, **refusal._asdict()})
        return refusal is None

    def _abort(self, key: str, reason: str) -> None:
        """The request and its KV are gone when this returns. One that has ended already leaves no record here."""
        seen_ns = self._clock.monotonic_ns()
        if self.scheduler.cancel(key, reason) is None:
            return
        self._settle(seen_ns)
        freed_ns = self._clock.monotonic_ns()
        self._metrics.observe("sloscope_engine_cancel_cleanup_seconds", freed_ns - seen_ns)
        self._append("late", request_id=key, attempt=0, observer="engine", abort_seen_ns=seen_ns, kv_freed_ns=freed_ns)

    # --- one iteration

    def _iterate(self) -> None:
        start_ns = self._clock.monotonic_ns()
        plan = self.scheduler.plan()
        self._settle(start_ns)
        if not plan.items:
            return
        self._step_id += 1
        fault = self._delay(plan)
        result = self._runner.step(plan.items)
        emitted = self.scheduler.apply(plan, result.token_ids)
        self._hand_over(emitted, result.end_ns)
        self._settle(result.end_ns)
        self._fail_on_request(emitted)
        self._record_step(plan, emitted, start_ns, result, fault)

    def _delay(self, plan: StepPlan) -> str | None:
        """Faults that fall into this step: time passes here, for the whole batch."""
        delay_ns, names = self._stall_next_ns, []
        if delay_ns:
            names.append(f"stall={format_ns(delay_ns)}")
            self._stall_next_ns = 0
        for request, item in zip(plan.requests, plan.items, strict=True):
            if request.fault is not None and item.sample:
                more_ns, name = request.fault.delay_ns(len(request.output) + 1)
                delay_ns += more_ns
                names += [name] if name else []
        if delay_ns:
            time.sleep(delay_ns / 1e9)
        return ",".join(names)[:1024] or None

    def _hand_over(self, emitted: Sequence[Emitted], computed_ns: int) -> None:
        """All tokens of the step in one frame. The first token brings the stamps of its request along."""
        rows: list[list[Any]] = []
        for request, token_id, finish, visible in emitted:
            row: list[Any] = [request.key, token_id, finish, visible]
            if len(request.output) == 1:
                row += [request.queued_ns, request.started_ns]
            rows.append(row)
        if rows:
            message: Message = {"op": "tokens", "step": self._step_id, "computed_ns": computed_ns, "rows": rows}
            message["handed_ns"] = self._clock.monotonic_ns()
            self._link.send(message)

    def _fail_on_request(self, emitted: Sequence[Emitted]) -> None:
        for request, _, finish, _ in emitted:
            if request.fault is not None and not finish and len(request.output) == request.fault.error_after:
                text = f"fault asked for: error after {len(request.output)} tokens"
                self._link.send({"op": "error", "key": request.key, "message": text})
                self.scheduler.cancel(request.key, "fault")
                self._settle(self._clock.monotonic_ns())

    # --- records and metrics

    def _settle(self, at_ns: int) -> None:
        """Free the slots of who ended, and record every transition and decision since the last call."""
        for request, before, after, reason in self.scheduler.take_transitions():
            if after in ENDED and request.slot >= 0:
                self._runner.free(request.slot)
            elif after is State.PREFILL and before is State.WAITING:
                request.started_ns = at_ns
                self._metrics.observe("sloscope_engine_queue_seconds", at_ns - request.queued_ns)
            elif after is State.PREEMPTED:
                self._metrics.inc("sloscope_engine_preemptions_total")
            self._append(
                "state",
                request_id=request.key,
                attempt=0,
                at_ns=at_ns,
                from_state=before,
                to_state=after,
                reason=reason,
            )
        for request, verdict, reason in self.scheduler.take_decisions():
            self._metrics.inc("sloscope_engine_admissions_total", 1, (verdict, reason))
            self._append("decision", request_id=request.key, attempt=0, at_ns=at_ns, verdict=verdict, reason=reason)

    def _record_step(
        self, plan: StepPlan, emitted: Sequence[Emitted], start_ns: int, result: StepResult, fault: str | None
    ) -> None:
        work = step_work(self._config, plan.items, self._dtype_bytes)
        pool = self.scheduler.pool
        self._append(
            "step",
            step_id=self._step_id,
            start_ns=start_ns,
            end_ns=result.end_ns,
            device_ns=result.end_ns - result.start_ns if result.device_ns is None else result.device_ns,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decodes,
            prefill_ids=[request.key for request in plan.prefill],
            decode_ids=[request.key for request in plan.decode],
            kv_blocks_resident=pool.resident,
            kv_blocks_reserved=pool.reserved,
            kv_blocks_free=pool.free,
            modelled_flops=work.flops,
            modelled_bytes=work.bytes,
            fault=fault,
        )
        metrics = self._metrics
        metrics.observe("sloscope_engine_step_seconds", result.end_ns - start_ns)
        if plan.decodes == len(plan.items):
            metrics.observe("sloscope_engine_decode_step_seconds", result.end_ns - start_ns)
        metrics.inc("sloscope_engine_modelled_flops_total", work.flops)
        metrics.inc("sloscope_engine_modelled_bytes_total", work.bytes)
        metrics.inc("sloscope_engine_prompt_tokens_total", plan.prefill_tokens)
        metrics.inc("sloscope_engine_output_tokens_total", len(emitted))
        self._charge(plan)
        intervals = []
        for request, *_ in emitted:
            if len(request.output) == 1:
                metrics.observe("sloscope_engine_prefill_seconds", result.end_ns - request.started_ns)
                metrics.observe("sloscope_engine_ttft_seconds", result.end_ns - request.arrived_ns)
            else:
                intervals.append(result.end_ns - request.last_token_ns)
            request.last_token_ns = result.end_ns
        metrics.observe_many("sloscope_engine_token_interval_seconds", intervals)

    def _charge(self, plan: StepPlan) -> None:
        for i, (request, item) in enumerate(zip(plan.requests, plan.items, strict=True)):
            prompt = len(item.token_ids) if i >= plan.decodes else 0
            units = PROMPT_UNIT * prompt + OUTPUT_UNIT * item.sample
            label = (self._metrics.bounded("tenant", request.tenant),)
            self._metrics.inc("sloscope_engine_service_units_total", units, label)

    def _append(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.append(records.make(kind, **fields))

    def _init_metrics(self) -> None:
        """Every child from the start, so that a first increment is not lost to rate()."""
        for state in LIVE_STATES:
            self._metrics.init("sloscope_engine_requests", (state,))
        for kind in ("resident", "reserved", "free"):
            self._metrics.init("sloscope_engine_kv_blocks", (kind,))
        for decision in ADMISSIONS:
            self._metrics.init("sloscope_engine_admissions_total", decision)
        self._metrics.init("sloscope_engine_service_units_total", (self._metrics.bounded("tenant", ""),))

    def _send_metrics(self) -> None:
        now_ns = self._clock.monotonic_ns()
        metrics, pool = self._metrics, self.scheduler.pool
        counts = self.scheduler.count_by_state()
        for state in LIVE_STATES:
            metrics.set("sloscope_engine_requests", counts[state], (state,))
        oldest = self.scheduler.oldest_waiting()
        age_ns = now_ns - oldest.queued_ns if oldest is not None else 0
        metrics.set("sloscope_engine_oldest_waiting_seconds", age_ns / 1e9)
        for kind, blocks in (("resident", pool.resident), ("reserved", pool.reserved), ("free", pool.free)):
            metrics.set("sloscope_engine_kv_blocks", blocks, (kind,))
        self._link.send({"op": "metrics", "payload": metrics.drain().decode()})
        self._drained_ns = now_ns
