"""Every policy that can be drawn in a history, and what is claimed of each order. A new policy is one line here."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.books import Books
from reference_server.admission import DeadlineAdmission
from reference_server.cost_model import CostModel, OnlineFit
from reference_server.fairness import DeficitRoundRobin, ServiceUnit, VirtualTokenCounter, service_gap_bound
from reference_server.forecast import Forecasts
from reference_server.orders import EarliestDeadline, Fcfs, Lanes
from reference_server.policies import Admission, AdmitAll, Full, Judgement, Optimistic, PrefillBudget, Reservation, View
from reference_server.policies import QueueOrder as Order
from reference_server.prefill_budget import DecodeSlack, Static
from reference_server.remaining import EstimatedReservation, Lengths, LengthTable
from reference_server.request import Request, State
from reference_server.scheduler import Policies, StepPlan

# Nanoseconds, so that a step of a small batch takes 10 to 40.
COST = CostModel(base_ns=10, prefill_token_ns=1, decode_token_ns=1, kv_read_token_ns=0.1)
UNIT = ServiceUnit(1, 2)
WEIGHTS = {"heavy": 2.0}
QUANTUM = 16
LONGEST_WAIT_NS = 400
STARVATION_NS = 150
LENGTHS = LengthTable.parse(
    json.dumps(
        [
            {"cohort": "all", "tokens": tokens, "at_risk": at_risk, "events": 1, "censored": 0, "survival": survival}
            for tokens, at_risk, survival in ((1, 4, 0.75), (3, 3, 0.5), (4, 2, 0.25), (8, 1, 0.0))
        ]
    )
)


@dataclass(frozen=True, slots=True)
class Waiting:
    request: Request
    again: bool
    number: int  # order of joining the queue


class Claim:
    """What an order promises, checked from outside: at each admission, and at each plan's choice of prompts."""

    def joined(self, entry: Waiting, now_ns: int) -> None: ...

    def left(self, entry: Waiting) -> None: ...

    def admitted(self, entry: Waiting, others: Sequence[Waiting], now_ns: int) -> None: ...

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None: ...

    def planned(self, plan: StepPlan, prefills: Sequence[Request], now_ns: int) -> None: ...

    def ended(self, sequences: int, requests: Sequence[Request], pool_tokens: int, whole: bool) -> None:
        """`sequences`: the most requests that ever held KV at once."""


class NobodyOvertakes(Claim):
    """First come, first served, but that who was preempted comes before who is new. So a request waits for no more
    than those that came before it."""

    def due(self, entry: Waiting) -> tuple[int, ...]:
        return (0, entry.request.arrived_ns) if entry.again else (1, entry.number)

    def admitted(self, entry: Waiting, others: Sequence[Waiting], now_ns: int) -> None:
        for other in others:
            assert self.due(entry) <= self.due(other), f"{entry.request.key} overtook {other.request.key}"

    def planned(self, plan: StepPlan, prefills: Sequence[Request], now_ns: int) -> None:
        assert plan.prefill == list(prefills[: len(plan.prefill)]), "a prompt overtook one that was admitted before it"


class EarliestDueFirst(NobodyOvertakes):
    """A request is overtaken only by who is due before it, and by nobody who arrives LONGEST_WAIT_NS after it."""

    def due(self, entry: Waiting) -> tuple[int, ...]:
        return (0, entry.request.arrived_ns) if entry.again else (1, self._due_ns(entry.request), entry.number)

    def admitted(self, entry: Waiting, others: Sequence[Waiting], now_ns: int) -> None:
        super().admitted(entry, others, now_ns)
        for other in others:
            if not entry.again:
                assert entry.request.arrived_ns <= other.request.arrived_ns + LONGEST_WAIT_NS

    def planned(self, plan: StepPlan, prefills: Sequence[Request], now_ns: int) -> None:
        super().planned(plan, sorted(prefills, key=self._due_ns), now_ns)

    def _due_ns(self, request: Request) -> int:
        latest_ns = request.arrived_ns + LONGEST_WAIT_NS
        return (
            latest_ns if request.ttft_limit_ns is None else min(latest_ns, request.arrived_ns + request.ttft_limit_ns)
        )


class TenantsShare(Claim):
    """Within a tenant nobody overtakes. Two tenants that wait drift apart by no more than the published bound, so a
    tenant that waits is served as the others are."""

    def __init__(self, quantum: float = 0) -> None:
        self._quantum = quantum
        self._books = Books(UNIT, WEIGHTS)
        self._waiting: Counter[str] = Counter()
        self._within: NobodyOvertakes = NobodyOvertakes()

    def joined(self, entry: Waiting, now_ns: int) -> None:
        self._waiting[entry.request.tenant] += 1
        self._note()

    def left(self, entry: Waiting) -> None:
        self._waiting[entry.request.tenant] -= 1
        self._note()

    def admitted(self, entry: Waiting, others: Sequence[Waiting], now_ns: int) -> None:
        self._within.admitted(entry, [o for o in others if o.request.tenant == entry.request.tenant], now_ns)

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self._books.note_service(request.tenant, prompt_tokens, output_tokens)
        self._note()

    def _note(self) -> None:
        self._books.note_backlog({tenant for tenant, count in self._waiting.items() if count})

    def ended(self, sequences: int, requests: Sequence[Request], pool_tokens: int, whole: bool) -> None:
        bound = service_gap_bound(
            UNIT,
            max_prompt=max((len(request.prompt) for request in requests), default=0),
            max_output=max((request.max_tokens for request in requests), default=0),
            pool_tokens=pool_tokens,
            sequences=sequences,
            whole=whole,
            quantum=self._quantum,
        )
        assert self._books.worst_gap <= bound + 1e-6, f"service gap {self._books.worst_gap}, bound {bound}"


class LanesYield(Claim):
    """Within a lane its order's claim. Across: once a lane was passed over for STARVATION_NS, at most as many
    admissions as there are other lanes come before its next. Prompts get the budget by lane, but that one which was
    admitted STARVATION_NS ago goes before all."""

    def __init__(self, within: Callable[[], Claim]) -> None:
        self._within = within
        self._lanes: dict[int, Claim] = {}
        self._waiting: Counter[int] = Counter()
        self._since_ns: dict[int, int] = {}
        self._late: Counter[int] = Counter()

    def _lane(self, request: Request) -> Claim:
        return self._lanes.setdefault(request.lane, self._within())

    def joined(self, entry: Waiting, now_ns: int) -> None:
        lane = entry.request.lane
        if not self._waiting[lane]:
            self._since_ns[lane], self._late[lane] = now_ns, 0
        self._waiting[lane] += 1
        self._lane(entry.request).joined(entry, now_ns)

    def left(self, entry: Waiting) -> None:
        self._waiting[entry.request.lane] -= 1
        self._lane(entry.request).left(entry)

    def admitted(self, entry: Waiting, others: Sequence[Waiting], now_ns: int) -> None:
        lane = entry.request.lane
        self._lane(entry.request).admitted(entry, [o for o in others if o.request.lane == lane], now_ns)
        present = {lane} | {other for other, count in self._waiting.items() if count}
        starved = {each for each in present if now_ns - self._since_ns[each] > STARVATION_NS}
        assert starved or lane == min(present), f"lane {lane} went first though nobody starved"
        for other in starved - {lane}:
            self._late[other] += 1
            assert self._late[other] <= len(self._waiting) - 1, f"lane {other} starves"
        self._since_ns[lane], self._late[lane] = now_ns, 0

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self._lane(request).served(request, prompt_tokens, output_tokens)

    def planned(self, plan: StepPlan, prefills: Sequence[Request], now_ns: int) -> None:
        if plan.preempted or not prefills:  # nobody was asked for the next, so the order does not know the time
            return
        late = [request for request in prefills if now_ns - request.started_ns > STARVATION_NS]
        if late:
            assert plan.prefill[0].started_ns == min(request.started_ns for request in late), "a prompt starves"
        rest = [request for request in prefills if request not in late]
        run = [request for request in plan.prefill if request not in late]
        lanes = sorted(request.lane for request in rest)
        assert [request.lane for request in run] == lanes[: len(run)], "a prompt went before those of a higher lane"
        for number in set(lanes):
            own = [request for request in rest if request.lane == number]
            self._lane(own[0]).planned(StepPlan([r for r in run if r.lane == number]), own, now_ns)

    def ended(self, sequences: int, requests: Sequence[Request], pool_tokens: int, whole: bool) -> None:
        for number, claim in self._lanes.items():
            claim.ended(sequences, [request for request in requests if request.lane == number], pool_tokens, whole)


@dataclass(frozen=True, slots=True)
class OrderCase:
    make: Callable[[], Order]
    claim: Callable[[], Claim]


class Moody(AdmitAll):
    """No policy for service: it says anything, to see that the scheduler keeps its promises under any policy."""

    late_refusals = True

    def __init__(self) -> None:
        self._asked = 0

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement:
        self._asked += 1
        mood = self._asked * 7 % 11
        if mood == 3:
            return Judgement("refuse", "mood", retry_after_s=2)
        busy = any(other.state is not State.PAUSED for other in view.running)
        return Judgement("queue", "mood") if mood > 6 and busy else Judgement("admit", "mood")

    def observe_step(self, plan: StepPlan, duration_ns: int) -> None: ...


class Foretelling(DeadlineAdmission):
    """What it keeps between two arrivals of one moment never changes what it says."""

    def __init__(self, reservation: Reservation, budget: PrefillBudget, late_refusals: bool = True) -> None:
        super().__init__(OnlineFit(COST), Lengths(LENGTHS), reservation, budget, late_refusals=late_refusals)
        self.reservation = reservation

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement:
        ahead = list(view.ahead)
        judgement = super().judge(request, view._replace(ahead=ahead), now_ns)
        budget = self._budget_now(request, view, ahead, now_ns)
        afresh = Forecasts(self.reservation, Lengths(LENGTHS)).of(request, view._replace(moment=None), ahead, budget)
        assert judgement.plan == afresh, "forecast from what was kept of another moment"
        return judgement


def _lanes(inner: Callable[[], Order]) -> Callable[[], Order]:
    return lambda: Lanes(inner, STARVATION_NS)


def _edf() -> Order:
    return EarliestDeadline(LONGEST_WAIT_NS)


def _vtc() -> Order:
    return VirtualTokenCounter(UNIT, WEIGHTS)


def _drr() -> Order:
    return DeficitRoundRobin(QUANTUM, UNIT, WEIGHTS)


def _share_by_rounds() -> Claim:
    return TenantsShare(QUANTUM)


ORDERS: dict[str, OrderCase] = {
    "fcfs": OrderCase(Fcfs, NobodyOvertakes),
    "edf": OrderCase(_edf, EarliestDueFirst),
    "vtc": OrderCase(_vtc, TenantsShare),
    "drr": OrderCase(_drr, _share_by_rounds),
    "lanes of fcfs": OrderCase(_lanes(Fcfs), lambda: LanesYield(NobodyOvertakes)),
    "lanes of edf": OrderCase(_lanes(_edf), lambda: LanesYield(EarliestDueFirst)),
    "lanes of vtc": OrderCase(_lanes(_vtc), lambda: LanesYield(TenantsShare)),
    "lanes of drr": OrderCase(_lanes(_drr), lambda: LanesYield(_share_by_rounds)),
}
RESERVATIONS: dict[str, Callable[[], Reservation]] = {
    "full": Full,
    "optimistic": Optimistic,
    "estimated": lambda: EstimatedReservation(Lengths(LENGTHS), 0.5),
}
BUDGETS: dict[str, Callable[[], PrefillBudget]] = {
    "whole": lambda: Static(None),
    "1": lambda: Static(1),
    "5": lambda: Static(5),
    "slack": lambda: DecodeSlack(lambda: COST, minimum=1, maximum=16, default_gap_ns=25),
}
ADMISSIONS: dict[str, Callable[[Reservation, PrefillBudget], Admission]] = {
    "all": lambda reservation, budget: AdmitAll(),
    "deadline": Foretelling,
    "at arrival": lambda reservation, budget: Foretelling(reservation, budget, late_refusals=False),
    "moody": lambda reservation, budget: Moody(),
}


def make_policies(order: Order, reservation: str, budget: str, admission: str) -> Policies:
    reserve, tokens = RESERVATIONS[reservation](), BUDGETS[budget]()
    return Policies(order, ADMISSIONS[admission](reserve, tokens), reserve, tokens)


@dataclass
class Watched:
    """An order that holds another one to the protocol, and tells its claim what happens."""

    inner: Order
    claim: Claim
    now_ns: int = 0
    waiting: dict[str, Waiting] = field(default_factory=dict)
    left: dict[str, Waiting] = field(default_factory=dict)  # removed: admitted or gone
    admissions: Counter[str] = field(default_factory=Counter)
    service: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    _numbers: int = 0

    def add(self, request: Request, now_ns: int) -> None:
        assert request.key not in self.waiting, "it waits already"
        self.now_ns = now_ns
        self._numbers += 1
        entry = self.waiting[request.key] = Waiting(request, request.state is State.PREEMPTED, self._numbers)
        self.inner.add(request, now_ns)
        self.claim.joined(entry, now_ns)

    def remove(self, request: Request) -> None:
        entry = self.left[request.key] = self.waiting.pop(request.key)
        self.inner.remove(request)
        self.claim.left(entry)

    def peek(self, now_ns: int) -> Request | None:
        self.now_ns = now_ns
        first = self.inner.peek(now_ns)
        assert (first is None) == (not self.waiting)
        assert first is None or first.key in self.waiting
        assert self.inner.peek(now_ns) is first, "next is somebody else though nothing changed"
        return first

    def sort_prefills(self, prefills: list[Request]) -> list[Request]:
        result = self.inner.sort_prefills(list(prefills))
        assert sorted(r.key for r in result) == sorted(r.key for r in prefills)
        return result

    def admitted(self, request: Request) -> None:
        self.admissions[request.key] += 1
        self.inner.admitted(request)
        self.claim.admitted(self.left[request.key], list(self.waiting.values()), self.now_ns)

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        prompt, output = self.service.get(request.key, (0, 0))
        self.service[request.key] = prompt + prompt_tokens, output + output_tokens
        self.inner.served(request, prompt_tokens, output_tokens)
        self.claim.served(request, prompt_tokens, output_tokens)

    def ended(self, request: Request) -> None:
        self.ends[request.key] += 1
        self.inner.ended(request)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterable[Request]:
        return iter(self.inner)

    def check_integrity(self) -> None:
        assert {request.key for request in self.inner} == set(self.waiting)
        self.inner.check_integrity()
