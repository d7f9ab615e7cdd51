"""The scheduler under an order, for the orders' tests, and the books that an order is held to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from reference_server.fairness import ServiceUnit
from reference_server.kv_blocks import BlockPool
from reference_server.policies import Full, Optimistic, QueueOrder
from reference_server.prefill_budget import Static
from reference_server.request import Request, State
from reference_server.scheduler import Limits, Policies, Scheduler

STEP_NS = 1_000_000
BLOCK_TOKENS = 4


@dataclass
class Books:
    """Service per tenant, and how far two tenants ever drifted apart, by weight, while both were backlogged."""

    unit: ServiceUnit
    weights: Mapping[str, float]
    service: dict[str, float] = field(default_factory=dict)
    worst_gap: float = 0
    _spells: dict[tuple[str, ...], tuple[float, float]] = field(default_factory=dict)  # least and largest difference

    def note_service(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self.service[tenant] = self.service.get(tenant, 0) + self.unit.of(prompt_tokens, output_tokens)

    def note_backlog(self, backlogged: set[str]) -> None:
        """After whatever may have changed the backlog or the service."""
        spells = {}
        for pair in combinations(sorted(backlogged), 2):
            a, b = (self.service.get(tenant, 0) / self.weights.get(tenant, 1) for tenant in pair)
            low, high = self._spells.get(pair, (a - b, a - b))
            low, high = min(low, a - b), max(high, a - b)
            spells[pair] = low, high
            self.worst_gap = max(self.worst_gap, high - low)
        self._spells = spells


class World:
    """One iteration per `step`, STEP_NS apart."""

    def __init__(
        self,
        order: QueueOrder,
        unit: ServiceUnit,
        weights: Mapping[str, float] | None = None,
        slots: int = 4,
        pool_tokens: int = 64,
        budget: int = 8,
        whole: bool = True,
        prefix_reuse: bool = False,
    ) -> None:
        self.order = order
        self.books = Books(unit, weights or {})
        pool = BlockPool(pool_tokens // BLOCK_TOKENS, BLOCK_TOKENS, prefix_reuse)
        policies = Policies(order=order, reservation=Full() if whole else Optimistic(), budget=Static(budget))
        self.scheduler = Scheduler(Limits(slots, max_context=pool_tokens, max_waiting=10_000), pool, (), policies)
        self.admissions: list[Request] = []
        self.preemptions = 0
        self.now_ns = 0

    def submit(self, request: Request) -> None:
        request.arrived_ns = self.now_ns
        assert self.scheduler.submit(request, self.now_ns) is None
        self._settle()

    def cancel(self, request: Request) -> None:
        self.scheduler.cancel(request.key, "disconnect")
        self._settle()

    def step(self) -> None:
        plan = self.scheduler.plan(self.now_ns)
        self._settle()
        emitted = self.scheduler.apply(plan, [7 if item.sample else None for item in plan.items], self.now_ns)
        for request, fresh in zip(plan.requests, plan.fresh, strict=True):
            self.books.note_service(request.tenant, fresh, 0)
        for request, *_ in emitted:
            self.books.note_service(request.tenant, 0, 1)
        self._settle()
        self.scheduler.check_integrity()
        self.now_ns += STEP_NS

    def waiting(self) -> Counter[str]:
        return Counter(request.tenant for request in self.order)

    def _settle(self) -> None:
        for request, before, to, _ in self.scheduler.take_transitions():
            if to is State.PREFILL and before is State.WAITING:
                self.admissions.append(request)
            self.preemptions += to is State.PREEMPTED
        self.scheduler.take_decisions()
        self.books.note_backlog(set(self.waiting()))
