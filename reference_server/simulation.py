"""The scheduler under a virtual clock: arrivals, clients that leave, readers, and steps that take what a model says.

The scheduler, the block pool and every policy are the ones that serve; only the forward pass and the wires are left
out. What comes from outside acts at the next iteration boundary, as in the engine. Two runs with the same arguments are
equal to the last nanosecond. Pure.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from random import Random
from typing import NamedTuple, Protocol

from reference_server.cost_model import CostModel, shape_of
from reference_server.request import ENDED, Request, State
from reference_server.scheduler import Decision, Emitted, Scheduler, StepPlan, Transition
from reference_server.step_types import StepItem
from sloscope.contract import Limits as Contracted
from sloscope.definitions import Ended, StreamEnd, Summary, Verdict, classify_end, judge


@dataclass(frozen=True, slots=True)
class Reader:
    """How a client takes its tokens: one after the other, each `token_ns` after the later of its making and the one
    before. None: never."""

    token_ns: int | None = 0


AT_ONCE = Reader()
NEVER = Reader(None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """`request.arrived_ns` is when. The client goes away at `leaves_ns`, whatever it got by then."""

    request: Request
    reader: Reader = AT_ONCE
    leaves_ns: int | None = None


@dataclass(slots=True)
class Result:
    """What became of one request; stamps of the virtual clock. Tokens are received when their step ends."""

    request: Request
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    largest_gap_ns: int | None = None
    ended_ns: int | None = None  # None: it had not ended when the simulation stopped
    reason: str = ""  # of its end, as the scheduler names it
    predicted_first_token_ns: int | None = None  # by admission, at the first decision that says one

    @property
    def tokens(self) -> int:
        return len(self.request.output)

    @property
    def ended(self) -> Ended | None:
        """Outcome and reason as a client would record them; None: unfinished."""
        if self.ended_ns is None:
            return None
        match self.request.state:
            case State.REJECTED:
                seen = StreamEnd(http_status=429)
            case State.CANCELLED:
                seen = StreamEnd(http_status=200, left=self.reason, events=self.tokens)
            case _:
                seen = StreamEnd(http_status=200, finishes={0: self.reason}, events=self.tokens)
        return classify_end(seen)

    def summary(self) -> Summary:
        first, last, sent = self.first_token_ns, self.last_token_ns, self.request.arrived_ns
        if first is None or last is None:
            return Summary(tokens=0)
        return Summary(
            events=self.tokens,
            tokens=self.tokens,
            first_ns=first,
            last_ns=last,
            ttft_ns=first - sent,
            ttft_visible_ns=first - sent,
            ttft_worst_ns=first - sent,
            ttft_visible_worst_ns=first - sent,
            itl_max_ns=self.largest_gap_ns,
            span_ns=last - first,
            span_tokens=self.tokens,
            e2e_ns=last - sent,
        )


def qualified(result: Result, limits: Contracted) -> Verdict:
    ended = result.ended
    return judge(ended and ended.outcome, result.summary(), limits)


class Observer:
    """Sees everything that happens, as it happens. It may call `arrive`, `leave` and `complete`."""

    def moved(self, transition: Transition, now_ns: int) -> None: ...

    def decided(self, decision: Decision, now_ns: int) -> None: ...

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        """At every boundary; nothing runs when `plan.items` is empty."""

    def stepped(self, plan: StepPlan, emitted: Sequence[Emitted], start_ns: int, end_ns: int) -> None: ...


class TokenSource(Protocol):
    def __call__(self, items: Sequence[StepItem]) -> Sequence[int | None]:
        """The next token of each item that samples, None for the others."""


def tokens_by_position(items: Sequence[StepItem]) -> list[int | None]:
    """100 + the position that the token will take."""
    return [100 + item.position0 + len(item.token_ids) if item.sample else None for item in items]


class _Kind(IntEnum):
    ARRIVES, TAKES, COMPLETES, LEAVES = range(4)


class _Event(NamedTuple):
    at_ns: int
    number: int  # of two at one time, who was announced first
    kind: _Kind
    key: str
    reason: str = ""


@dataclass(slots=True)
class _Slow:
    """A reader that does not take its tokens at once."""

    token_ns: int | None
    taken: int = 0
    free_ns: int = 0  # when it has taken all that it began to take


class Simulation:
    """`noise`: standard deviation of the logarithm of step time / modelled time; the mean stays the model's."""

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        arrivals: Iterable[Arrival],
        observers: Sequence[Observer] = (),
        noise: float = 0.0,
        seed: int = 0,
        sample: TokenSource = tokens_by_position,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.observers = observers
        self.noise = noise
        self.now_ns = 0
        self.steps = 0
        self.results: dict[str, Result] = {}
        self._sample = sample
        self._random = Random(seed)
        self._events: list[_Event] = []
        self._numbers = 0
        self._arriving: dict[str, Arrival] = {}
        self._slow: dict[str, _Slow] = {}
        for arrival in arrivals:
            self.arrive(arrival)

    def arrive(self, arrival: Arrival) -> None:
        key = arrival.request.key
        assert key not in self._arriving and key not in self.results, f"request {key} arrives twice"
        self._arriving[key] = arrival
        self._push(arrival.request.arrived_ns, _Kind.ARRIVES, key)
        if arrival.leaves_ns is not None:
            self.leave(key, arrival.leaves_ns)

    def leave(self, key: str, at_ns: int, reason: str = "disconnect") -> None:
        """The client goes away then."""
        self._push(at_ns, _Kind.LEAVES, key, reason)

    def complete(self, key: str, at_ns: int) -> None:
        """The answer is found complete then, in its text."""
        self._push(at_ns, _Kind.COMPLETES, key)

    def run(self, until_ns: int | None = None) -> list[Result]:
        """All results in order of arrival. It stops when nothing is left to happen, or before what comes later than
        `until_ns`."""
        while (until_ns is None or self.now_ns <= until_ns) and self.step():
            pass
        return list(self.results.values())

    def step(self) -> bool:
        """One boundary, and the iteration after it or the jump to what happens next. False: nothing is left."""
        self._take_events()
        if not self.scheduler.has_work:
            if not self._events:
                return False
            self.now_ns = self._events[0].at_ns
        elif not self._iterate() and self.scheduler.has_work:
            self.now_ns = self._next_ns()
        return True

    # --- one boundary

    def _take_events(self) -> None:
        events, scheduler = self._events, self.scheduler
        while events and events[0].at_ns <= self.now_ns:
            event = heapq.heappop(events)
            match event.kind:
                case _Kind.ARRIVES:
                    self._arrive(self._arriving.pop(event.key))
                case _Kind.TAKES:
                    slow = self._slow.get(event.key)
                    if slow is not None:
                        slow.taken += 1
                        scheduler.delivered(event.key, slow.taken, self.now_ns)
                case _Kind.COMPLETES:
                    request = scheduler.get(event.key)
                    if request is not None and request.output:  # only text can be found complete
                        scheduler.finish(event.key, "stop")
                case _Kind.LEAVES:
                    scheduler.cancel(event.key, event.reason)
        self._settle()

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        self.results[request.key] = Result(request)
        if arrival.reader.token_ns != 0:
            self._slow[request.key] = _Slow(arrival.reader.token_ns)
        self.scheduler.submit(request, self.now_ns)

    def _iterate(self) -> bool:
        start_ns = self.now_ns
        plan = self.scheduler.plan(start_ns)
        self._settle()
        for observer in self.observers:
            observer.planned(plan, start_ns)
        if not plan.items:
            return False
        duration_ns = self._duration_ns(plan)
        self.now_ns = end_ns = start_ns + duration_ns
        emitted = self.scheduler.apply(plan, self._sample(plan.items), end_ns)
        self.steps += 1
        for token in emitted:
            self._receive(token.request, end_ns)
        self._settle()
        self.scheduler.policies.admission.observe_step(plan, duration_ns)
        for observer in self.observers:
            observer.stepped(plan, emitted, start_ns, end_ns)
        return True

    def _duration_ns(self, plan: StepPlan) -> int:
        step_ns = self.cost.step_ns(shape_of(plan.items, plan.decodes))
        if self.noise:
            step_ns = round(step_ns * self._random.lognormvariate(-self.noise * self.noise / 2, self.noise))
        return max(1, step_ns)

    def _receive(self, request: Request, now_ns: int) -> None:
        result = self.results[request.key]
        if result.last_token_ns is None:
            result.first_token_ns = now_ns
        else:
            gap_ns = now_ns - result.last_token_ns
            if result.largest_gap_ns is None or gap_ns > result.largest_gap_ns:
                result.largest_gap_ns = gap_ns
        result.last_token_ns = now_ns
        slow = self._slow.get(request.key)
        if slow is None:
            self.scheduler.delivered(request.key, len(request.output), now_ns)
        elif slow.token_ns is not None:
            slow.free_ns = max(slow.free_ns, now_ns) + slow.token_ns
            self._push(slow.free_ns, _Kind.TAKES, request.key)

    def _next_ns(self) -> int:
        """When something can change though nothing runs."""
        patience_ns = self.scheduler.limits.slow_reader_ns
        times = []
        if patience_ns is not None:
            held = [request for request in self.scheduler.alive() if request.paused_ns is not None]
            times = [max(request.paused_ns or 0, request.taken_ns) + patience_ns for request in held]
            assert all(time > self.now_ns for time in times), "a reader beyond its time was not cut off"
        if self._events:
            times.append(self._events[0].at_ns)
        assert times, "requests that nothing will ever move"
        return min(times)

    def _settle(self) -> None:
        for decision in self.scheduler.take_decisions():
            first = self.results[decision.request.key]
            if first.predicted_first_token_ns is None:
                first.predicted_first_token_ns = decision.judgement.predicted_first_token_ns
            for observer in self.observers:
                observer.decided(decision, self.now_ns)
        for transition in self.scheduler.take_transitions():
            request, _, to, reason = transition
            if to in ENDED:
                result = self.results[request.key]
                result.ended_ns, result.reason = self.now_ns, reason
                self._slow.pop(request.key, None)
            for observer in self.observers:
                observer.moved(transition, self.now_ns)

    def _push(self, at_ns: int, kind: _Kind, key: str, reason: str = "") -> None:
        self._numbers += 1
        heapq.heappush(self._events, _Event(at_ns, self._numbers, kind, key, reason))
