"""Who runs in the next iteration. Pure: no torch, no clock, no socket, so that a simulator runs the same code.

Between two iterations the engine tells what happened (`submit`, `cancel`, `finish`), then asks for a `plan`, runs it,
and hands the tokens to `apply`. The batch is decided anew every time. Everything that changed is kept as `Transition`s
and `Decision`s until taken, for the journal.

First come, first served: the oldest waiting request is next, and nobody overtakes it, so nobody starves. A request is
admitted when a slot is free and the pool can promise all the KV it may come to need (prompt + max_tokens).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from reference_server.kv_blocks import BlockPool
from reference_server.request import ENDED, Request, State
from reference_server.step_types import StepItem


class Transition(NamedTuple):
    request: Request
    from_state: State | None
    to_state: State
    reason: str


class Decision(NamedTuple):
    request: Request
    verdict: str  # admit, queue, refuse
    reason: str


class Refusal(NamedTuple):
    """Why a request was not accepted. `retry`: whether asking again later can help."""

    reason: str
    message: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """`prefill_tokens`: prompt tokens run in one iteration; a longer prompt is run in pieces. None: whole prompts."""

    slots: int
    max_context: int
    max_waiting: int = 1024
    prefill_tokens: int | None = None


@dataclass(slots=True)
class StepPlan:
    """The batch of one iteration: `items[i]` runs `requests[i]`. Decodes first."""

    requests: list[Request] = field(default_factory=list)
    items: list[StepItem] = field(default_factory=list)
    decodes: int = 0

    @property
    def decode(self) -> list[Request]:
        return self.requests[: self.decodes]

    @property
    def prefill(self) -> list[Request]:
        return self.requests[self.decodes :]

    @property
    def prefill_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items[self.decodes :])

    def add(self, request: Request, token_ids: Sequence[int], sample: bool) -> None:
        self.requests.append(request)
        self.items.append(StepItem(request.slot, token_ids, request.computed, sample, request.sampling))


class Emitted(NamedTuple):
    """A token of a request; `finish` is stop or length at its last. `visible` is False for the end token."""

    request: Request
    token_id: int
    finish: str
    visible: bool


class Scheduler:
    def __init__(self, limits: Limits, pool: BlockPool, eos_ids: Sequence[int] = ()) -> None:
        self.limits = limits
        self.pool = pool
        self._eos = frozenset(eos_ids)
        self._requests: dict[str, Request] = {}  # alive, by key
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._free_slots = list(range(limits.slots - 1, -1, -1))  # the lowest is taken first: neighbours batch better
        self._transitions: list[Transition] = []
        self._decisions: list[Decision] = []

    # --- between iterations

    def submit(self, request: Request) -> Refusal | None:
        """Takes the request in, or says why not."""
        assert request.key not in self._requests, f"request {request.key} is here already"
        refusal = self._refusal(request)
        if refusal is not None:
            self._move(request, State.REJECTED, refusal.reason)
            self._decisions.append(Decision(request, "refuse", refusal.reason))
            return refusal
        self._requests[request.key] = request
        self._waiting.append(request)
        self._move(request, State.WAITING, "arrived")
        return None

    def _refusal(self, request: Request) -> Refusal | None:
        tokens = request.total_tokens
        asked = f"prompt {len(request.prompt)} + max_tokens {request.max_tokens} = {tokens} tokens"
        if tokens > self.limits.max_context:
            return Refusal("context", f"{asked}; accepted: at most {self.limits.max_context}", retry=False)
        need = self.pool.blocks_for(tokens)
        if need > self.pool.blocks:
            text = f"{asked} need {need} KV blocks; accepted: at most {self.pool.blocks}, which is the whole pool"
            return Refusal("kv_never_fits", text, retry=False)
        if len(self._waiting) >= self.limits.max_waiting:
            text = f"{len(self._waiting)} requests wait; accepted: at most {self.limits.max_waiting}"
            return Refusal("queue_full", text, retry=True)
        return None

    def cancel(self, key: str, reason: str) -> Request | None:
        """Drops the request in whatever state it is; None when it has ended already."""
        return self._end(key, State.CANCELLED, reason)

    def finish(self, key: str, reason: str) -> Request | None:
        """Ends an answer whose end was found outside, in its text; None when it has ended already."""
        return self._end(key, State.FINISHED, reason)

    def get(self, key: str) -> Request | None:
        return self._requests.get(key)

    # --- one iteration

    def plan(self) -> StepPlan:
        self._admit()
        plan = StepPlan()
        for request in self._running:
            if request.state is State.DECODE:
                plan.add(request, request.output[-1:], sample=True)
        plan.decodes = len(plan.items)
        budget = self.limits.prefill_tokens
        for request in self._running:
            if request.state is not State.PREFILL:
                continue
            rest = len(request.prompt) - request.computed
            piece = rest if budget is None else min(rest, budget)
            if piece == 0:
                break  # the budget is spent on older prompts
            plan.add(request, request.prompt[request.computed : request.computed + piece], sample=piece == rest)
            budget = None if budget is None else budget - piece
        return plan

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not self._free_slots or not self.pool.fits(request.total_tokens):
                break
            self._waiting.popleft()
            self.pool.promise(request.key, request.total_tokens)
            request.slot = self._free_slots.pop()
            self._running.append(request)
            self._move(request, State.PREFILL, "admitted")
            self._decisions.append(Decision(request, "admit", "fits"))
        # Who waits for the first time stands at the end of the queue.
        new = list(takewhile(lambda request: not request.queue_noted, reversed(self._waiting)))
        for request in reversed(new):
            request.queue_noted = True
            self._decisions.append(Decision(request, "queue", "no_kv" if self._free_slots else "no_slot"))

    def apply(self, plan: StepPlan, token_ids: Sequence[int | None]) -> list[Emitted]:
        """What the iteration made, in the order of the batch. Requests that ended have given back slot and KV."""
        emitted = []
        for request, item, token_id in zip(plan.requests, plan.items, token_ids, strict=True):
            request.computed += len(item.token_ids)
            self.pool.hold(request.key, request.computed)
            if token_id is None:
                continue
            assert item.sample, f"request {request.key}: a token that was not asked for"
            request.output.append(token_id)
            finish = self._finish_reason(request, token_id)
            emitted.append(Emitted(request, token_id, finish, token_id not in self._eos))
            if finish:
                self._end(request.key, State.FINISHED, finish)
            elif request.state is State.PREFILL:
                self._move(request, State.DECODE, "first_token")
        return emitted

    def _finish_reason(self, request: Request, token_id: int) -> str:
        """A natural end counts before the cap when both fall on one token."""
        if token_id in self._eos or len(request.output) == request.stop_after:
            return "stop"
        return "length" if len(request.output) == request.max_tokens else ""

    # --- what the engine journals and exposes

    def take_transitions(self) -> list[Transition]:
        taken, self._transitions = self._transitions, []
        return taken

    def take_decisions(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def alive(self) -> list[Request]:
        return list(self._requests.values())

    def count_by_state(self) -> Counter[State]:
        return Counter(request.state for request in self._requests.values() if request.state is not None)

    def oldest_waiting(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    # --- inside

    def _move(self, request: Request, to: State, reason: str) -> None:
        before = request.state
        request.move(to)
        self._transitions.append(Transition(request, before, to, reason))

    def _end(self, key: str, to: State, reason: str) -> Request | None:
        request = self._requests.pop(key, None)
        if request is None:
            return None
        if request.state is State.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self.pool.release(key)
            self._free_slots.append(request.slot)
            self._free_slots.sort(reverse=True)
        request.finish_reason = reason
        self._move(request, to, reason)
        return request

    def check_integrity(self) -> None:
        """Every invariant between the parts; tests call it after each step."""
        self.pool.check_integrity()
        waiting, running = set(self._waiting), set(self._running)
        assert len(waiting) == len(self._waiting) and len(running) == len(self._running), "a request is listed twice"
        assert not waiting & running and waiting | running == set(self._requests.values())
        assert all(self._requests[request.key] is request for request in waiting | running)
        assert all(request.state is State.WAITING for request in waiting)
        assert all(request.state in (State.PREFILL, State.DECODE, State.PAUSED) for request in running)
        assert not any(request.state in ENDED for request in self._requests.values())
        slots = [request.slot for request in running] + self._free_slots
        assert sorted(slots) == list(range(self.limits.slots)), "a slot is lost or given out twice"
        assert self.pool.holders() == {request.key for request in running}, "KV is held by who does not run"
        for request in running:
            held = len(request.prompt) + len(request.output) - 1 if request.output else request.computed
            assert request.computed == held, f"request {request.key}: {request.computed} computed, {held} expected"
            assert request.total_tokens >= request.computed
