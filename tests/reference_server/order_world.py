"""An engine for the orders' tests: admits by `peek` under a token pool, runs prompts in pieces, decodes the rest.

It also keeps the books that the orders are held to: service per tenant, and how far two tenants drift apart while both
are backlogged.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations

from reference_server.fairness import ServiceUnit
from reference_server.policies import QueueOrder
from reference_server.request import Request, State

STEP_NS = 1_000_000


@dataclass
class Ledger:
    """Normalised service, and the largest drift between two tenants over an interval in which both were backlogged."""

    unit: ServiceUnit
    weights: dict[str, float]
    service: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    worst_gap: float = 0
    _spells: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # least and largest difference

    def note_waiting(self, tenant: str, change: int) -> None:
        self.waiting[tenant] += change
        if not self.waiting[tenant]:
            self._spells = {pair: spell for pair, spell in self._spells.items() if tenant not in pair}
        self.sample()

    def note_service(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self.service[tenant] += self.unit.of(prompt_tokens, output_tokens)  # type: ignore[assignment]

    def sample(self) -> None:
        for pair in combinations(sorted(tenant for tenant, count in self.waiting.items() if count), 2):
            a, b = (self.service[tenant] / self.weights.get(tenant, 1) for tenant in pair)
            low, high = self._spells.get(pair, (a - b, a - b))
            self._spells[pair] = (min(low, a - b), max(high, a - b))
            self.worst_gap = max(self.worst_gap, high - low, a - b - low, high - (a - b))


class World:
    """One iteration per `step`, STEP_NS apart; the largest prompt piece of an iteration is `budget` tokens."""

    def __init__(
        self,
        order: QueueOrder,
        unit: ServiceUnit,
        weights: dict[str, float] | None = None,
        slots: int = 4,
        pool_tokens: int = 64,
        budget: int = 8,
    ) -> None:
        self.order = order
        self.ledger = Ledger(unit, weights or {})
        self.slots, self.free_tokens, self.budget = slots, pool_tokens, budget
        self.running: list[Request] = []
        self.admissions: list[Request] = []
        self.now_ns = 0

    def submit(self, request: Request) -> None:
        request.arrived_ns = request.queued_ns = self.now_ns
        request.move(State.WAITING)
        self.order.add(request, self.now_ns)
        self.ledger.note_waiting(request.tenant, +1)

    def cancel(self, request: Request) -> None:
        if request.state is State.WAITING:
            self.order.remove(request)
            self.ledger.note_waiting(request.tenant, -1)
            request.move(State.CANCELLED)
            self.order.ended(request)
        elif request in self.running:
            self._end(request, State.CANCELLED)

    def _end(self, request: Request, state: State) -> None:
        self.running.remove(request)
        self.free_tokens += request.total_tokens
        request.move(state)
        self.order.ended(request)

    def step(self) -> None:
        while (request := self.order.peek(self.now_ns)) and len(self.running) < self.slots:
            if request.total_tokens > self.free_tokens:
                break
            self._admit(request)
        budget = self.budget
        for request in self.order.sort_prefills([r for r in self.running if r.state is State.PREFILL]):
            piece = min(budget, len(request.prompt) - request.computed)
            budget -= piece
            self._run(request, piece)
        for request in [r for r in self.running if r.state is State.DECODE and r.last_token_ns < self.now_ns]:
            self._run(request, 0)
        self.ledger.sample()
        self.check()
        self.now_ns += STEP_NS

    def _admit(self, request: Request) -> None:
        self.order.remove(request)
        self.ledger.note_waiting(request.tenant, -1)
        self.free_tokens -= request.total_tokens
        self.running.append(request)
        request.move(State.PREFILL)
        request.started_ns = self.now_ns
        self.admissions.append(request)
        self.order.admitted(request)

    def _run(self, request: Request, piece: int) -> None:
        request.computed += piece
        request.charged += piece
        emits = request.computed == len(request.prompt)
        if piece or emits:
            self.ledger.note_service(request.tenant, piece, int(emits))
            self.order.served(request, piece, int(emits))
        if emits:
            request.output.append(7)
            request.last_token_ns = self.now_ns
            if request.state is State.PREFILL:
                request.move(State.DECODE)
            if len(request.output) >= min(request.max_tokens, request.stop_after or request.max_tokens):
                self._end(request, State.FINISHED)

    def check(self) -> None:
        self.order.check_integrity()
