"""The engine's loop: drain the inbox, plan, run, apply, hand the tokens over, journal.

Everything that comes from outside acts at an iteration boundary, aborts too. Tokens are handed to the front end before
anything is written to disk.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from reference_server.cost_model import OnlineFit, shape_of
from reference_server.faults import parse_fault
from reference_server.ledger import Ledger
from reference_server.link import EngineLink, Message
from reference_server.remaining_file import LengthFile
from reference_server.request import Request, State
from reference_server.scheduler import Emitted, Refusal, Scheduler, StepPlan, refusal_of
from reference_server.step_types import SamplingParams, StepItem, StepResult
from sloscope.clock import Clock
from sloscope.journal import JournalWriter
from sloscope.output import message as say
from sloscope.units import NS_PER_S, format_ns

DRAIN_EVERY_NS = NS_PER_S
IDLE_WAIT_S = 1.0
HELD_WAIT_S = 0.01  # all who are here wait, for readers or for room


class StepRunner(Protocol):
    def step(self, batch: Sequence[StepItem]) -> StepResult: ...


class Engine:
    """`run` ends with LinkClosedError when the front end is gone."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        link: EngineLink,
        ledger: Ledger,
        journal: JournalWriter | None,
        clock: Clock,
        cost: OnlineFit | None = None,
        lengths: LengthFile | None = None,
        lanes: Sequence[str] = (),
    ) -> None:
        self._runner = runner
        self.scheduler = scheduler
        self._link = link
        self._ledger = ledger
        self._journal = journal
        self._clock = clock
        self._cost = cost or OnlineFit()
        self._lengths = lengths
        self._lanes = {name: lane for lane, name in enumerate(lanes)}
        self._late_refusals = scheduler.policies.admission.late_refusals
        self._step_id = 0
        self._stall_next_ns = 0
        self._stall_decode_ns = 0
        self._drained_ns = 0
        self._ran = False

    def run(self) -> None:
        while True:
            if not self.scheduler.has_work:
                self.turn(IDLE_WAIT_S)
            else:
                self.turn(0 if self._ran else HELD_WAIT_S)

    def turn(self, wait_s: float = 0) -> None:
        """One boundary, and the iteration after it if there is work."""
        self._drain_inbox(self._link.receive(wait_s))
        self._ran = self.scheduler.has_work and self._iterate()
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
                    if self._submit(message) and not self._late_refusals:
                        accepted.append(message["key"])
                case "abort":
                    self._abort(message["key"], message["reason"])
                case "finish":
                    self.scheduler.finish(message["key"], "stop")
                    self._settle(self._clock.monotonic_ns())
                case "delivered":
                    now_ns = self._clock.monotonic_ns()
                    for key, tokens in message["rows"]:
                        self.scheduler.delivered(key, tokens, now_ns)
                case "stall":
                    if message["decoding"]:
                        self._stall_decode_ns += message["ns"]
                    else:
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
            request_class=message["request_class"],
            # A class that no lane names comes after all that are named.
            lane=self._lanes.get(message["request_class"], len(self._lanes)),
            streaming=message["streaming"],
            ttft_limit_ns=message["ttft_limit_ns"],
            itl_max_limit_ns=message["itl_max_limit_ns"],
        )
        now_ns = self._clock.monotonic_ns()
        refusal = self.scheduler.submit(request, now_ns)
        self._settle(now_ns)
        if refusal is not None:
            self._refuse(request.key, refusal)
        return refusal is None

    def _refuse(self, key: str, refusal: Refusal) -> None:
        self._link.send({"op": "refused", "key": key, **refusal._asdict()})

    def _abort(self, key: str, reason: str) -> None:
        """The request and its KV are gone when this returns. One that has ended already leaves no record here.

        KV that is free is a claim about the pool, so the pool is asked: who still holds some gets no stamp.
        """
        seen_ns = self._clock.monotonic_ns()
        pool = self.scheduler.pool
        held = key in pool.holders()
        if self.scheduler.cancel(key, reason) is None:
            return
        freed_ns = self._clock.monotonic_ns() if held and key not in pool.holders() else None
        self._settle(seen_ns)
        self._ledger.cleaned_up(key, seen_ns, freed_ns)

    # --- one iteration

    def _iterate(self) -> bool:
        """Whether something ran."""
        start_ns = self._clock.monotonic_ns()
        plan = self.scheduler.plan(start_ns)
        self._settle(start_ns)
        if not plan.items:
            return False
        self._step_id += 1
        fault = self._delay(plan)
        result = self._runner.step(plan.items)
        before_ns = [
            request.last_token_ns for request, item in zip(plan.requests, plan.items, strict=True) if item.sample
        ]
        emitted = self.scheduler.apply(plan, result.token_ids, result.end_ns)
        self._hand_over(emitted, result.end_ns)
        self._settle(result.end_ns)
        self._fail_on_request(emitted)
        shape = shape_of(plan.items, plan.decodes)
        self._ledger.step(self._step_id, plan, shape, emitted, start_ns, result, fault)
        self._ledger.tokens(emitted, before_ns, result.end_ns)
        if fault is None and not result.captured:  # neither says anything of what the next such step takes
            self._cost.observe(shape, result.end_ns - start_ns)
            self.scheduler.policies.admission.observe_step(plan, result.end_ns - start_ns)
        return True

    def _delay(self, plan: StepPlan) -> str | None:
        """Faults that fall into this step: time passes here, for the whole batch."""
        delay_ns, self._stall_next_ns = self._stall_next_ns, 0
        if plan.decodes:
            delay_ns, self._stall_decode_ns = delay_ns + self._stall_decode_ns, 0
        names = [f"stall={format_ns(delay_ns)}"] if delay_ns else []
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
            frame: Message = {"op": "tokens", "step": self._step_id, "computed_ns": computed_ns, "rows": rows}
            frame["handed_ns"] = self._clock.monotonic_ns()
            self._link.send(frame)

    def _fail_on_request(self, emitted: Sequence[Emitted]) -> None:
        for request, _, finish, _ in emitted:
            if request.fault is not None and not finish and len(request.output) == request.fault.error_after:
                text = f"fault asked for: error after {len(request.output)} tokens"
                self._link.send({"op": "error", "key": request.key, "message": text})
                self.scheduler.cancel(request.key, "fault")
                self._settle(self._clock.monotonic_ns())

    # --- records and metrics

    def _settle(self, at_ns: int) -> None:
        """Records what changed since the last call, and tells the front end what it cannot know."""
        for request, before, after, reason in self._ledger.settle(at_ns):
            if after is State.CANCELLED and reason == "slow_reader":
                self._link.send({"op": "cut", "key": request.key, "reason": reason})
            elif before is State.WAITING and after is State.REJECTED:
                self._refuse(request.key, refusal_of(reason, request.retry_after_s))
            elif before is State.WAITING and after is State.PREFILL and self._late_refusals:
                self._link.send({"op": "accepted", "keys": [request.key]})

    def _send_metrics(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._lengths is not None and self._lengths.refresh(now_ns) and self._lengths.problem:
            say(f"warning: {self._lengths.problem}")
        self._ledger.gauges(now_ns, self._cost.error(), self._lengths_age_ns())
        self._link.send({"op": "metrics", "payload": self._ledger.metrics.drain().decode()})
        self._drained_ns = now_ns

    def _lengths_age_ns(self) -> int | None:
        return None if self._lengths is None else self._clock.wall_ns() - self._lengths.written_at_ns
