"""Who runs in the next iteration. Pure: no torch, no clock, no socket, so that a simulator runs the same code.

Between two iterations the engine tells what happened (`submit`, `cancel`, `finish`, `delivered`), then asks for a
`plan`, runs it, and hands the tokens to `apply`. The batch is decided anew every time. Everything that changed is kept
as `Transition`s and `Decision`s until taken, for the journal.

What may be exchanged stands in `policies`: the order of the queue, admission, how much KV is promised, how long a
prefill chunk may be. What may not is kept here: legal states, slots, KV that balances, one end for every request, and
progress. Requests are ranked by their first admission; the pool takes KV back from the last of them, so the first
always gets on. A request gives way to higher lanes once; preempted before, it holds its rank against them, too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil
from typing import NamedTuple

from reference_server.kv_blocks import BlockPool
from reference_server.orders import Fcfs
from reference_server.policies import (
    Admission,
    AdmitAll,
    Full,
    Judgement,
    PrefillBudget,
    QueueOrder,
    Reservation,
    View,
)
from reference_server.prefill_budget import Static
from reference_server.ranking import Ranking
from reference_server.request import ENDED, InvariantError, Request, State
from reference_server.step_types import StepItem
from sloscope.units import NS_PER_S

MAX_WAITING = 1024
_IN_BATCH = (State.PREFILL, State.DECODE)


class Transition(NamedTuple):
    request: Request
    from_state: State | None
    to_state: State
    reason: str


class Decision(NamedTuple):
    request: Request
    judgement: Judgement


class Refusal(NamedTuple):
    """Why a request was not accepted. `retry`: whether asking again later can help."""

    reason: str
    message: str
    retry: bool
    retry_after_s: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """`slots`: requests in one batch; a paused one needs none. `max_undelivered`: output tokens that the reader of a
    stream may be behind before its sequence pauses; None: it never does. `slow_reader_ns`: how long a paused reader may
    take nothing before it is cut off; None: for ever."""

    slots: int
    max_context: int
    max_waiting: int = MAX_WAITING
    max_undelivered: int | None = None
    slow_reader_ns: int | None = None


@dataclass(slots=True)
class Policies:
    order: QueueOrder = field(default_factory=Fcfs)
    admission: Admission = field(default_factory=AdmitAll)
    reservation: Reservation = field(default_factory=Full)
    budget: PrefillBudget = field(default_factory=lambda: Static(None))


@dataclass(slots=True)
class StepPlan:
    """The batch of one iteration: `items[i]` runs `requests[i]`. Decodes first.

    `fresh[i]`: prompt tokens of the item that were never run before, which is what service is counted in.
    `token_budget`: tokens of prefills that this iteration was allowed. `reused`: prompt tokens whose KV was found at
    this boundary. A position of a prompt is in `fresh` or `reused` once, whatever a preemption makes run again.
    """

    requests: list[Request] = field(default_factory=list)
    items: list[StepItem] = field(default_factory=list)
    decodes: int = 0
    fresh: list[int] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    token_budget: int | None = None
    reused: int = 0

    @property
    def decode(self) -> list[Request]:
        return self.requests[: self.decodes]

    @property
    def prefill(self) -> list[Request]:
        return self.requests[self.decodes :]

    @property
    def prefill_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items[self.decodes :])

    @property
    def recomputed_tokens(self) -> int:
        """Of prefills after a preemption: what is no prompt token that runs for the first time."""
        return self.prefill_tokens - sum(self.fresh)

    def begin(self, decodes: list[Request]) -> None:
        """One token each."""
        self.requests = decodes
        self.items = [StepItem(r.blocks, r.output[-1:], r.computed, True, r.sampling) for r in decodes]
        self.fresh = [0] * len(decodes)
        self.decodes = len(decodes)

    def add(self, request: Request, token_ids: Sequence[int], sample: bool, fresh: int) -> None:
        self.requests.append(request)
        self.items.append(StepItem(request.blocks, token_ids, request.computed, sample, request.sampling))
        self.fresh.append(fresh)


class Emitted(NamedTuple):
    """A token of a request; `finish` is stop or length at its last. `visible` is False for the end token."""

    request: Request
    token_id: int
    finish: str
    visible: bool


class Scheduler:
    def __init__(
        self, limits: Limits, pool: BlockPool, eos_ids: Sequence[int] = (), policies: Policies | None = None
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.policies = policies or Policies()
        self._order = self.policies.order
        self._eos = frozenset(eos_ids)
        self._requests: dict[str, Request] = {}  # alive, by key
        self._running: list[Request] = []  # PREFILL, DECODE, PAUSED by rank
        self._newcomers: list[Request] = []  # since the last admission
        self._due = Ranking()  # WAITING by deadline, where admission may refuse who waits; each is judged once at it
        self._parked: dict[str, Request] = {}  # PREEMPTED, and its reader is behind: it would pause at once
        self._ranks = 0
        self._moment = 0  # counts up with whatever changes who runs, and with what KV
        self._transitions: list[Transition] = []
        self._decisions: list[Decision] = []

    # --- between iterations

    def submit(self, request: Request, now_ns: int) -> Refusal | None:
        """Takes the request in, or says why not."""
        if request.key in self._requests:
            raise InvariantError(f"request {request.key} is here already")
        request.queued_ns = now_ns
        refusal = self._never(request) or self._not_now(request, now_ns)
        if refusal is not None:
            self._move(request, State.REJECTED, refusal.reason)
            return refusal
        self._requests[request.key] = request
        self._newcomers.append(request)
        if request.deadline_ns is not None and self.policies.admission.late_refusals:
            self._due.set(request.key, (request.deadline_ns,))
        self._move(request, State.WAITING, "arrived")
        return None

    def _never(self, request: Request) -> Refusal | None:
        """What no waiting can mend."""
        tokens = request.total_tokens
        asked = f"prompt {len(request.prompt)} + max_tokens {request.max_tokens} = {tokens} tokens"
        need = self.pool.blocks_for(tokens)
        if tokens > self.limits.max_context:
            refusal = Refusal("context", f"{asked}; accepted: at most {self.limits.max_context}", retry=False)
        elif need > self.pool.blocks:
            text = f"{asked} need {need} KV blocks; accepted: at most {self.pool.blocks}, which is the whole pool"
            refusal = Refusal("kv_never_fits", text, retry=False)
        else:
            return None
        self._decide(request, Judgement("refuse", refusal.reason))
        return refusal

    def _not_now(self, request: Request, now_ns: int) -> Refusal | None:
        """It stands in the queue when this returns None."""
        waiting = len(self._order)
        if waiting >= self.limits.max_waiting:
            self._decide(request, Judgement("refuse", "queue_full"))
            text = f"{waiting} requests wait; accepted: at most {self.limits.max_waiting}"
            head = self._order.peek(now_ns) or request
            leaves_in_ns = self.policies.admission.leaves_queue_in_ns(head, self._view(()), now_ns)
            retry_after_s = 1 if leaves_in_ns is None else ceil(leaves_in_ns / NS_PER_S)
            return Refusal("queue_full", text, retry=True, retry_after_s=retry_after_s)
        self._order.add(request, now_ns)
        ahead = takewhile(lambda other: other is not request, self._order)
        judgement = self.policies.admission.judge(request, self._view(ahead), now_ns)
        if judgement.verdict == "refuse":
            self._order.remove(request)
            self._order.ended(request)
            self._decide(request, judgement)
            return refusal_of(judgement.reason, judgement.retry_after_s)
        if judgement.predicted_first_token_ns is not None:
            # A prediction is kept from the moment when it could still be acted on.
            request.queue_noted = True
            if judgement.verdict == "admit":  # nothing keeps it but the running iteration
                judgement = judgement._replace(verdict="queue", reason="arrived")
            self._decide(request, judgement)
        return None

    def cancel(self, key: str, reason: str) -> Request | None:
        """Drops the request in whatever state it is; None when it has ended already."""
        return self._end(key, State.CANCELLED, reason)

    def finish(self, key: str, reason: str) -> Request | None:
        """Ends an answer whose end was found outside, in its text; None when it has ended already."""
        return self._end(key, State.FINISHED, reason)

    def delivered(self, key: str, tokens: int, now_ns: int) -> None:
        """The reader of this stream has taken so many output tokens by now."""
        request = self._requests.get(key)
        if request is None:
            return
        assert tokens <= len(request.output), f"request {key}: {tokens} taken of {len(request.output)} made"
        if tokens > request.delivered:
            request.delivered = tokens
            request.taken_ns = now_ns

    def get(self, key: str) -> Request | None:
        return self._requests.get(key)

    # --- one iteration

    def plan(self, now_ns: int) -> StepPlan:
        plan = StepPlan()
        self._follow_readers(now_ns)
        self._refuse_overdue(now_ns)
        self._find_room_for_decodes(plan, now_ns)
        self._moment += 1
        if not plan.preempted:  # what was just taken back is not given away at once
            self._admit(plan, now_ns)
            self._newcomers.clear()
        plan.begin([request for request in self._running if request.state is State.DECODE])
        self._fill_prefills(plan, now_ns)
        self._moment += 1
        return plan

    def _follow_readers(self, now_ns: int) -> None:
        """Who is behind by the window pauses; who has caught up to half of it goes on; who takes nothing is cut off."""
        window, patience_ns = self.limits.max_undelivered, self.limits.slow_reader_ns
        if window is None:
            return
        # Slots that become free by pauses go to those who have caught up before they go to newcomers.
        for request in self._running:
            if request.state is State.DECODE and request.undelivered >= window and request.streaming:
                request.paused_ns = now_ns
                self._move(request, State.PAUSED, "flow_control")
        held = [request for request in self._running if request.paused_ns is not None]
        active = self._active() if held else 0
        for request in [*held, *self._parked.values()]:
            assert request.paused_ns is not None
            if request.undelivered <= window // 2:
                if request.state is State.PREEMPTED:
                    request.paused_ns = None
                    del self._parked[request.key]
                    self._order.add(request, now_ns)
                elif active < self.limits.slots:
                    request.paused_ns = None
                    self._move(request, State.DECODE, "caught_up")
                    active += 1
            elif patience_ns is not None and now_ns - max(request.paused_ns, request.taken_ns) >= patience_ns:
                self._end(request.key, State.CANCELLED, "slow_reader")

    def _refuse_overdue(self, now_ns: int) -> None:
        """Wherever they stand, and whether there is room or not: who waits behind the head is told as soon as it is."""
        while (key := self._due.first()) is not None and self._due.rank(key)[0] < now_ns:
            self._due.discard(key)
            self._judged(self._requests[key], now_ns)

    def _find_room_for_decodes(self, plan: StepPlan, now_ns: int) -> None:
        size = self.pool.block_tokens
        for request in [r for r in self._running if r.computed >= len(r.blocks) * size]:
            while request.state is State.DECODE and not self.pool.extend(request.key, request.computed + 1):
                first_lane = min(each.lane for each in self._running)
                victim = max(self._running, key=lambda each: _gives_way(each, first_lane))
                self._preempt(victim, now_ns)
                plan.preempted.append(victim)

    def _preempt(self, request: Request, now_ns: int) -> None:
        self._running.remove(request)
        self.pool.release(request.key)
        request.blocks = []
        request.computed = 0
        request.preemptions += 1
        paused = request.state is State.PAUSED
        self._move(request, State.PREEMPTED, "no_kv")
        if paused:
            self._parked[request.key] = request
        else:
            self._order.add(request, now_ns)

    def _admit(self, plan: StepPlan, now_ns: int) -> None:
        active = self._active()
        while (request := self._order.peek(now_ns)) is not None:
            # Judging may cost as much as a small step: who could not start anyway is not judged.
            lack = "no_slot" if active >= self.limits.slots else self._lacks_kv(request)
            if lack:
                self._note_waiting(request, lack)
                return
            judgement = self._judged(request, now_ns)
            if judgement is None:
                continue
            if judgement.verdict == "queue":
                self._note_waiting(request, judgement.reason)
                return
            self._start(request, judgement, plan, now_ns)
            active += 1

    def _judged(self, request: Request, now_ns: int) -> Judgement | None:
        """What admission says of it now; None when that was a refusal, and the request has ended."""
        if request.state is State.PREEMPTED:
            return Judgement("admit", "again")  # it was let in before
        judgement = self.policies.admission.judge(request, self._view(()), now_ns)
        if judgement.verdict != "refuse":
            return judgement
        self._decide(request, judgement)
        request.retry_after_s = judgement.retry_after_s
        self._end(request.key, State.REJECTED, judgement.reason)
        return None

    def _lacks_kv(self, request: Request) -> str:
        """Beside what is promised, a block for each runner that may outgrow its promise: else it would be preempted
        for the newcomer, or the newcomer for it."""
        pool = self.pool
        growing = sum(pool.promised(r.key) < pool.blocks_for(r.total_tokens) for r in self._running)
        promised = self.policies.reservation.promised_tokens(request)
        return "no_kv" if pool.lacking(request.sequence(), promised) + growing > 0 else ""

    def _start(self, request: Request, judgement: Judgement, plan: StepPlan, now_ns: int) -> None:
        promised = self.policies.reservation.promised_tokens(request)
        again = request.state is State.PREEMPTED
        self._order.remove(request)
        request.blocks, request.reused = self.pool.open(request.key, request.sequence(), promised)
        request.computed = request.reused
        # A preempted request finds its own answer, and what it had of its prompt, too: that is nobody's prefix.
        plan.reused += max(0, min(request.reused, len(request.prompt)) - request.charged)
        request.charged = max(request.charged, request.reused)
        if not again:
            self._due.discard(request.key)
            self._ranks += 1
            request.rank = self._ranks
            request.started_ns = now_ns
            self._decide(request, judgement)
        self._order.admitted(request)
        at = sum(1 for other in self._running if other.rank < request.rank)
        self._running.insert(at, request)
        self._move(request, State.PREFILL, "recompute" if again else "admitted")

    def _note_waiting(self, head: Request, reason: str) -> None:
        """One decision for each who begins to wait: why the next in order does, and that the others are behind it."""
        for request in self._newcomers:
            if request.state is State.WAITING and not request.queue_noted:
                request.queue_noted = True
                self._decide(request, Judgement("queue", reason if request is head else "behind"))

    def _fill_prefills(self, plan: StepPlan, now_ns: int) -> None:
        prefills = self._order.sort_prefills([r for r in self._running if r.state is State.PREFILL])
        if not prefills:
            return
        budget = plan.token_budget = self.policies.budget.tokens(plan.decode, prefills, now_ns)
        for request in prefills:
            rest = request.tokens - request.computed
            piece = rest if budget is None else min(rest, budget)
            if piece == 0:
                break  # the budget is spent on others
            end = request.computed + piece
            if not self.pool.extend(request.key, end):
                raise InvariantError(f"request {request.key}: its prompt was promised room")
            fresh = max(0, min(end, len(request.prompt)) - max(request.charged, request.computed))
            request.charged = max(request.charged, end)
            plan.add(request, request.sequence()[request.computed : end], piece == rest, fresh)
            budget = None if budget is None else budget - piece

    def apply(self, plan: StepPlan, token_ids: Sequence[int | None], now_ns: int) -> list[Emitted]:
        """What the iteration made, in the order of the batch. Requests that ended have given back their KV."""
        emitted = []
        self._moment += 1
        reuse = self.pool.prefix_reuse
        for request, item, fresh, token_id in zip(plan.requests, plan.items, plan.fresh, token_ids, strict=True):
            request.computed += len(item.token_ids)
            assert (token_id is not None) == item.sample, f"request {request.key}: a token that was not asked for"
            if reuse and self.pool.has_new_full_block(request.key, request.computed):
                self.pool.register(request.key, request.sequence(), request.computed)
            if fresh or token_id is not None:
                self._order.served(request, fresh, int(token_id is not None))
            if token_id is None:
                continue
            request.output.append(token_id)
            request.last_token_ns = now_ns
            finish = self._finish_reason(request, token_id)
            emitted.append(Emitted(request, token_id, finish, token_id not in self._eos))
            if finish:
                self._end(request.key, State.FINISHED, finish)
            elif request.state is State.PREFILL:
                self._move(request, State.DECODE, "first_token" if len(request.output) == 1 else "recomputed")
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

    def running(self) -> Sequence[Request]:
        return self._running

    def count_by_state(self) -> Counter[State]:
        return Counter(request.state for request in self._requests.values() if request.state is not None)

    def waiting_since(self) -> dict[str, int]:
        """Class → arrival of the request of that class that has waited longest for its first step."""
        since: dict[str, int] = {}
        for request in self._order:
            if request.state is State.WAITING:
                since[request.request_class] = min(
                    since.get(request.request_class, request.queued_ns), request.queued_ns
                )
        return since

    def paused_blocks(self) -> int:
        """KV blocks that wait for readers; shared ones are counted once."""
        return len({block for r in self._running if r.state is State.PAUSED for block in r.blocks})

    # --- inside

    def _view(self, ahead: Iterable[Request]) -> View:
        return View(self._running, ahead, self.pool, self.limits, self._moment)

    def _active(self) -> int:
        return sum(request.state in _IN_BATCH for request in self._running)

    def _decide(self, request: Request, judgement: Judgement) -> None:
        self._decisions.append(Decision(request, judgement))

    def _move(self, request: Request, to: State, reason: str) -> None:
        before = request.state
        request.move(to)
        self._moment += before is not None and to is not State.REJECTED
        self._transitions.append(Transition(request, before, to, reason))

    def _end(self, key: str, to: State, reason: str) -> Request | None:
        request = self._requests.pop(key, None)
        if request is None:
            return None
        self._due.discard(key)
        if request.state in (State.WAITING, State.PREEMPTED):
            if self._parked.pop(key, None) is None:
                self._order.remove(request)
        else:
            self._running.remove(request)
            self.pool.release(key)
            request.blocks = []
        self._order.ended(request)
        request.finish_reason = reason
        self._move(request, to, reason)
        return request

    def check_integrity(self) -> None:
        """Every invariant between the parts; tests call it after each step."""
        self.pool.check_integrity()
        self._order.check_integrity()
        self._due.check_integrity()
        assert all(self._requests[key].state is State.WAITING for key in self._due)
        waiting, running, parked = list(self._order), self._running, list(self._parked.values())
        everybody = [*waiting, *running, *parked]
        assert len(everybody) == len(set(everybody)), "a request is listed twice"
        assert len(waiting) == len(self._order)
        assert set(everybody) == set(self._requests.values())
        assert all(self._requests[request.key] is request for request in everybody)
        assert all(request.state in (State.WAITING, State.PREEMPTED) for request in waiting)
        assert all(request.state is State.PREEMPTED and request.paused_ns is not None for request in parked)
        assert all(request.state in (State.PREFILL, State.DECODE, State.PAUSED) for request in running)
        assert [request.rank for request in running] == sorted({request.rank for request in running})
        assert self._active() <= self.limits.slots, "more in the batch than slots"
        assert not any(request.state in ENDED for request in self._requests.values())
        assert self.pool.holders() == {request.key for request in running}, "KV is held by who does not run"
        for request in [*waiting, *parked]:
            assert not request.blocks and not request.computed
        for request in running:
            self._check_running(request)

    def _check_running(self, request: Request) -> None:
        assert len(request.blocks) == self.pool.held(request.key) >= self.pool.blocks_for(request.computed)
        assert (request.state is State.PAUSED) == (request.paused_ns is not None)
        if request.state is not State.PREFILL:
            assert request.computed == request.tokens - 1, f"request {request.key}: {request.computed} computed"
        assert request.reused <= request.computed < request.tokens <= request.total_tokens
        assert request.delivered <= len(request.output)
        window = self.limits.max_undelivered
        if window is not None and request.streaming:
            assert request.undelivered <= window, f"request {request.key}: {request.undelivered} undelivered"


def _gives_way(request: Request, first_lane: int) -> tuple[bool, int, int]:
    """Whose KV is taken back first: who pauses uses its KV least; then the lower lane, then who came last. Who was
    preempted before stands with the first lane that runs: its lane costs it no second time.
    """
    return request.state is State.PAUSED, first_lane if request.preemptions else request.lane, request.rank


def refusal_of(reason: str, retry_after_s: int) -> Refusal:
    """What the consumer is told of a refusal by admission, at once or later."""
    text = f"admission refused ({reason}); accepted: again in {retry_after_s} s"
    return Refusal(reason, text, retry=True, retry_after_s=retry_after_s)
