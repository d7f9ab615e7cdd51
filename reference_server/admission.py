"""Admission by deadline: who cannot get its first token in time is told at once, and takes no room from others. Pure.

`AdmitAll`, which refuses nobody, stands in `policies`.
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from reference_server.cost_model import OnlineFit
from reference_server.forecast import Forecast, Forecasts, peak_blocks
from reference_server.policies import Judgement, PrefillBudget, Reasons, Reservation, View
from reference_server.remaining import KV_LEVEL, Lengths
from reference_server.request import Request, State
from sloscope.units import NS_PER_S

if TYPE_CHECKING:
    from reference_server.scheduler import StepPlan

DOUBT = 0.25
PROBE_NS = NS_PER_S
RECENT = 128  # predictions that came true or not
FEW = 16  # of them, below which nothing is concluded
_UNTRIED = 0.8  # until then
_MOST_PENDING = 4096


class Trust:
    """What a prediction is worth: realised / predicted wait of the latest requests, and a low quantile of it.

    A wait is expected to be at least `factor` times the predicted one, except in a share `doubt` of the cases. It stays
    between a half and two, so that neither a stall nor a lull can switch admission off or on by itself.
    """

    def __init__(self, doubt: float) -> None:
        self._doubt = doubt
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, ratio: float) -> None:
        if len(self._recent) == RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(ratio)
        insort(self._sorted, ratio)

    @property
    def factor(self) -> float:
        if len(self._sorted) < FEW:
            return _UNTRIED
        low = self._sorted[ceil(self._doubt * len(self._sorted)) - 1]
        return min(max(low, 0.5), 2.0)


class _Said(NamedTuple):
    at_ns: int
    wait_ns: int


class DeadlineAdmission:
    """Admit, queue or refuse by the predicted first token and by the room for KV; two verdicts, both always given.

    Time. `forecast` says when the first token would come. Refused is who would most likely be late: by a prediction
    that is shortened by how wrong the latest were (`Trust`; predictions at arrival and at admission apart, since the
    first foresee a queue and the others a prompt). `doubt` is the chance to be in time below which it is not worth a
    try. Who has no deadline, or has run already, is never refused. An empty engine lets in one a second that should be
    refused: a cost model that is too slow learns by steps alone, and would else keep out the work that corrects it.

    Room. Safe is who fits with its KV to come beside the KV to come of running work, each as long as all but a share
    1 - `kv_level` of such answers. Who is not waits. That a reservation can be promised now is the scheduler's
    question; it is foreseen here as part of the wait.

    Without a cost model yet nothing is predicted and nobody is refused.
    """

    name = "deadline"

    reasons: Reasons = (
        ("admit", "fits"),
        ("queue", "arrived"),
        ("queue", "kv_unsafe"),
        ("refuse", "deadline"),
        ("refuse", "deadline_passed"),
    )

    def __init__(
        self,
        costs: OnlineFit,
        lengths: Lengths,
        reservation: Reservation,
        budget: PrefillBudget,
        doubt: float = DOUBT,
        kv_level: float = KV_LEVEL,
        late_refusals: bool = True,
    ) -> None:
        assert 0 < doubt < 1 and 0 < kv_level < 1
        self.late_refusals = late_refusals
        self.kv_level = kv_level
        self._costs = costs
        self._lengths = lengths
        self._forecasts = Forecasts(reservation, lengths)
        self._budget = budget
        self._deep_budget: tuple[int | None, int | None] = None, None  # moment, tokens
        self._at_arrival = Trust(doubt)
        self._at_admission = Trust(doubt)
        self._said_at_arrival: dict[str, _Said] = {}
        self._said_at_admission: dict[str, _Said] = {}
        self._probe: tuple[int, str] | None = None  # when, key

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement:
        ahead = list(view.ahead)
        plan = self._forecasts.of(request, view, ahead, self._budget_now(request, view, ahead, now_ns))
        safe = self._is_safe(request, view)
        judgement = self._by_room(plan, bool(ahead), safe)
        model = self._costs.model
        if model is None:
            return judgement
        said = _Said(now_ns, plan.wait_ns(model))
        judgement = self._by_time(request, judgement, said, idle=not view.running and not ahead)
        if judgement.verdict != "refuse" and request.state is None:
            _remember(self._said_at_arrival, request.key, said)
        elif judgement.verdict == "admit":
            _remember(self._said_at_admission, request.key, said)
        return judgement

    def leaves_queue_in_ns(self, head: Request, view: View, now_ns: int) -> int | None:
        """Up to its first token, so its own prompt too long: who comes back too early is refused again."""
        model = self._costs.model
        if model is None:
            return None
        return self._forecasts.of(head, view, [], self._budget_now(head, view, [], now_ns)).wait_ns(model)

    def _budget_now(self, request: Request, view: View, ahead: list[Request], now_ns: int) -> int | None:
        """What a step may run of the first prompts; behind as many as there are slots, that is one number a moment."""
        is_deep = len(ahead) >= view.limits.slots
        if is_deep and view.moment is not None and view.moment == self._deep_budget[0]:
            return self._deep_budget[1]
        decodes = [other for other in view.running if other.state is State.DECODE]
        prefills = [other for other in view.running if other.state is State.PREFILL]
        first = [*prefills, *ahead, request][: len(prefills) + view.limits.slots]
        budget = self._budget.tokens(decodes, first, now_ns)
        if is_deep:
            self._deep_budget = view.moment, budget
        return budget

    def _is_safe(self, request: Request, view: View) -> bool:
        pool, level, quantile = view.pool, self.kv_level, self._lengths.quantile
        everybody = [*view.running, request]
        if sum(pool.blocks_for(other.total_tokens) for other in everybody) <= pool.blocks:
            return True  # however long they get
        holdings = [(other.tokens, quantile(other, level)) for other in everybody]
        return peak_blocks(holdings, pool.block_tokens, at_least=pool.blocks) == pool.blocks

    def _by_room(self, plan: Forecast, is_behind: bool, safe: bool) -> Judgement:
        lack = "behind" if is_behind else plan.lack or ("" if safe else "kv_unsafe")
        return Judgement("queue" if lack else "admit", lack or "fits", resource_safe=safe, plan=plan)

    def _by_time(self, request: Request, judgement: Judgement, said: _Said, idle: bool) -> Judgement:
        predicted_ns = said.at_ns + said.wait_ns
        judgement = judgement._replace(predicted_first_token_ns=predicted_ns, feasible=True)
        deadline_ns = request.deadline_ns
        if deadline_ns is None:
            return judgement
        slack_ns = deadline_ns - predicted_ns
        judgement = judgement._replace(slack_ns=slack_ns, feasible=slack_ns >= 0)
        if request.state is not None and (request.state is not State.WAITING or not self.late_refusals):
            return judgement
        trust = self._at_arrival if request.state is None else self._at_admission
        late_ns = said.at_ns + int(said.wait_ns * trust.factor) - deadline_ns
        if said.at_ns > deadline_ns:
            reason = "deadline_passed"
        elif late_ns > 0 and not self._may_probe(request, said.at_ns, idle):
            reason = "deadline"
        else:
            return judgement
        # Work ahead drains by itself: that much later the same request would be in time.
        return judgement._replace(verdict="refuse", reason=reason, retry_after_s=max(1, ceil(late_ns / NS_PER_S)))

    def _may_probe(self, request: Request, now_ns: int, idle: bool) -> bool:
        if self._probe is not None and self._probe[1] == request.key:
            return True
        if not idle or (self._probe is not None and now_ns - self._probe[0] < PROBE_NS):
            return False
        self._probe = (now_ns, request.key)
        return True

    def observe_step(self, plan: "StepPlan", duration_ns: int) -> None:
        """After `Scheduler.apply`, which stamps the tokens. The cost model is fed by who owns it."""
        for request in plan.prefill:
            if len(request.output) != 1:
                continue
            for said, trust in (
                (self._said_at_arrival.pop(request.key, None), self._at_arrival),
                (self._said_at_admission.pop(request.key, None), self._at_admission),
            ):
                if said is not None:
                    trust.add((request.last_token_ns - said.at_ns) / said.wait_ns)


def _remember(said: dict[str, _Said], key: str, what: _Said) -> None:
    """Who is cancelled never comes back for it: the oldest is forgotten."""
    if len(said) >= _MOST_PENDING:
        del said[next(iter(said))]
    said[key] = what
