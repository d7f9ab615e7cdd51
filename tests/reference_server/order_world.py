"""The scheduler under an order, for the orders' tests."""

from collections import Counter
from collections.abc import Mapping

from benchmarks.books import Books
from reference_server.fairness import ServiceUnit
from reference_server.kv_blocks import BlockPool
from reference_server.policies import Full, Optimistic, QueueOrder
from reference_server.prefill_budget import Static
from reference_server.request import Request, State
from reference_server.scheduler import Limits, Policies, Scheduler

STEP_NS = 1_000_000
BLOCK_TOKENS = 4


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
