"""Who is next when tenants share: virtual token counters and deficit round robin. Pure.

Service is counted in one declared unit, as it is given, and divided by the tenant's weight. What both orders promise,
and why the promise holds, is derived in docs/decisions/014-fairness-bound.md; `service_gap_bound` is that promise as a
number.

Source of the counters: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024. Source of the rounds:
Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, SIGCOMM 1995, here with an account that is
overdrawn, because the length of an answer is not known when it is admitted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from reference_server.ranking import Line, Rank, Ranking
from reference_server.request import Request
from sloscope.errors import ConfigError

QUANTUM = 1024.0  # service units
MAX_IDLE = 10_000  # tenants remembered that neither wait nor run
# Of units and weights. Sums beyond what a float holds compare with nothing: no tenant would ever be next.
LEAST, MOST = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class ServiceUnit:
    """What one token of each kind counts. The engine's metric, the orders and the queries use the same one."""

    prompt: float = 1.0
    output: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.prompt <= MOST:
            raise ConfigError(f"--unit-prompt: {self.prompt:g}; accepted: 0 to {MOST:g}")
        if not 0 < self.output <= MOST:
            raise ConfigError(f"--unit-output: {self.output:g}; accepted: above 0, at most {MOST:g}")

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        return self.prompt * prompt_tokens + self.output * output_tokens


def service_gap_bound(
    unit: ServiceUnit,
    *,
    max_prompt: int,
    max_output: int,
    pool_tokens: int,
    sequences: int,
    whole: bool = True,
    least_weight: float = 1,
    quantum: float = 0,
) -> float:
    """How far apart the normalised service of two tenants can drift while both are backlogged.

    `sequences`: the most requests that hold KV at once (the slots; with flow control also the paused ones).
    `whole`: prompt and max_tokens are promised at admission. `quantum`: of deficit round robin, 0 for counters.
    """
    under_way = sequences * unit.of(max_prompt, max_output)
    if whole:
        under_way = min(under_way, max(unit.prompt, unit.output) * pool_tokens)
    return 2 * (under_way / least_weight + quantum)


def checked_weight(tenant: str, weight: float) -> float:
    if not LEAST <= weight <= MOST:
        raise ConfigError(f"--tenant-weights: {tenant}: {weight:g}; accepted: {LEAST:g} to {MOST:g}")
    return float(weight)


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    weight: float
    counter: float = 0  # service received / weight, lifted when it comes back
    turn: int = 0  # when it last joined or had a request admitted
    prompt_turn: int = 0  # when a prompt of its last had the token budget
    line: Line = field(default_factory=Line)
    pending: dict[str, int] = field(default_factory=dict)  # per running request: prompt tokens not yet served
    pending_tokens: int = 0  # their sum


class TenantOrder(ABC):
    """The tenant of the least rank is next, with its own requests in order of arrival.

    A tenant's level is its counter and the prompts that it has under way: admission counts a prompt at once, service
    is charged as it is given, and a cancelled prompt is not charged. A tenant that begins to wait is lifted to the
    level of who is next (or of who left last): time without work banks no credit. A tenant that neither waits nor runs
    is forgotten when it would be lifted anyway. Beyond `max_idle` the lowest is forgotten and its counter becomes the
    least with which an unknown tenant starts: being forgotten earns nothing.
    """

    quantum: float = 0  # what a tenant may be served beyond its turn, service units for each unit of its weight

    def __init__(
        self, unit: ServiceUnit | None = None, weights: Mapping[str, float] | None = None, max_idle: int = MAX_IDLE
    ) -> None:
        self.unit = unit or ServiceUnit()
        self._weights = {tenant: checked_weight(tenant, weight) for tenant, weight in (weights or {}).items()}
        self._max_idle = max_idle
        self._tenants: dict[str, _Tenant] = {}
        self._backlog = Ranking()  # tenants that wait; the rank kept is the present one or an earlier, lower one
        self._idle = Ranking()  # tenants that neither wait nor run, by counter
        self._left_last: _Tenant | None = None
        self._floor = 0.0  # counter with which an unknown tenant starts at least
        self._waiting = 0
        self._events = 0  # orders turns

    @abstractmethod
    def _rank(self, level: float, turn: int) -> Rank:
        """The tenant of the lowest rank is next."""

    # --- who waits

    def add(self, request: Request, now_ns: int) -> None:
        tenant = self._tenants.get(request.tenant) or self._meet(request.tenant)
        self._stop_running(tenant, request.key)
        self._idle.discard(tenant.name)
        if not len(tenant.line):
            self._lift(tenant)
            tenant.turn = self._next_event()
        tenant.line.add(request, self._next_event())
        self._waiting += 1
        self._backlog.set(tenant.name, self._rank(self._level(tenant), tenant.turn))
        self._forget()

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.line.remove(request)
        self._waiting -= 1
        if not len(tenant.line):
            self._backlog.discard(tenant.name)
            self._left_last = tenant
            self._forget()
            self._rest(tenant)

    def peek(self, now_ns: int) -> Request | None:
        tenant = self._first()
        return None if tenant is None else tenant.line.first()

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """As if one after the other were admitted now."""
        heap = []
        for name in self._backlog:
            tenant = self._tenants[name]
            requests = list(tenant.line)[::-1]
            heap.append((self._rank(self._level(tenant), tenant.turn), name, tenant.pending_tokens, requests))
        heapify(heap)
        turn = self._events
        while heap:
            _, name, pending_tokens, requests = heappop(heap)
            request = requests.pop()
            yield request
            if requests:
                turn += 1
                pending_tokens += _unserved_prompt(request)
                rank = self._rank(self._level(self._tenants[name], pending_tokens), turn)
                heappush(heap, (rank, name, pending_tokens, requests))

    # --- who runs

    def sort_prefills(self, prefills: list[Request]) -> list[Request]:
        """The tenant whose prompts had the budget longest ago first: nobody's long prompts hold up another's."""
        return sorted(prefills, key=lambda request: self._tenants[request.tenant].prompt_turn)

    def admitted(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        self._idle.discard(tenant.name)
        tenant.turn = self._next_event()
        if not tenant.pending_tokens:
            tenant.prompt_turn = self._next_event()
        tenant.pending[request.key] = _unserved_prompt(request)
        tenant.pending_tokens += tenant.pending[request.key]
        if len(tenant.line):
            self._backlog.set(tenant.name, self._rank(self._level(tenant), tenant.turn))

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        tenant = self._tenants[request.tenant]
        tenant.counter += self.unit.of(prompt_tokens, output_tokens) / tenant.weight
        if prompt_tokens:
            tenant.prompt_turn = self._next_event()
        before = tenant.pending[request.key]
        if before:
            after = 0 if output_tokens else max(0, before - prompt_tokens)
            tenant.pending[request.key] = after
            tenant.pending_tokens -= before - after
            self._relax(tenant)

    def ended(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and self._stop_running(tenant, request.key):
            self._relax(tenant)
            self._rest(tenant)
            self._forget()

    # --- accounts

    @property
    def least_weight(self) -> float:
        return min([1.0, *self._weights.values()])

    def counter(self, tenant: str) -> float | None:
        """Service received by its weight, lifts included; None when it is not remembered."""
        return self._tenants[tenant].counter if tenant in self._tenants else None

    def level(self, tenant: str) -> float | None:
        """The counter and the prompts under way."""
        return self._level(self._tenants[tenant]) if tenant in self._tenants else None

    def _level(self, tenant: _Tenant, pending_tokens: int | None = None) -> float:
        pending = tenant.pending_tokens if pending_tokens is None else pending_tokens
        return tenant.counter + self.unit.prompt * pending / tenant.weight

    def _first(self) -> _Tenant | None:
        """Levels rise while tenants are served; the kept rank of whoever comes up is brought up to date here."""
        while (name := self._backlog.first()) is not None:
            tenant = self._tenants[name]
            rank = self._rank(self._level(tenant), tenant.turn)
            if rank == self._backlog.rank(name):
                return tenant
            self._backlog.set(name, rank)
        return None

    def _meet(self, name: str) -> _Tenant:
        tenant = _Tenant(name, self._weights.get(name, 1.0), self._floor)
        self._tenants[name] = tenant
        return tenant

    def _lift(self, tenant: _Tenant) -> None:
        reference = self._first() or self._left_last
        if reference is not None:
            tenant.counter += max(0.0, self._level(reference) - self._level(tenant))

    def _stop_running(self, tenant: _Tenant, key: str) -> bool:
        pending = tenant.pending.pop(key, None)
        tenant.pending_tokens -= pending or 0
        return pending is not None

    def _relax(self, tenant: _Tenant) -> None:
        """Its level may have fallen: the kept rank must not be above the present one."""
        if len(tenant.line):
            self._backlog.set(tenant.name, self._rank(self._level(tenant), tenant.turn))

    def _rest(self, tenant: _Tenant) -> None:
        if not len(tenant.line) and not tenant.pending:
            self._idle.set(tenant.name, (tenant.counter,))

    def _forget(self) -> None:
        reference = self._first() or self._left_last
        while (name := self._idle.first()) is not None:
            counter = self._tenants[name].counter
            lifted_anyway = reference is not None and counter <= self._level(reference)
            if not lifted_anyway and len(self._idle) <= self._max_idle:
                break
            if not lifted_anyway:
                self._floor = max(self._floor, counter)
            self._idle.discard(name)
            del self._tenants[name]

    def _next_event(self) -> int:
        self._events += 1
        return self._events

    def check_integrity(self) -> None:
        tenants = self._tenants.values()
        assert self._waiting == sum(len(tenant.line) for tenant in tenants)
        assert set(self._backlog) == {tenant.name for tenant in tenants if len(tenant.line)}
        assert set(self._idle) == {tenant.name for tenant in tenants if not len(tenant.line) and not tenant.pending}
        assert len(self._idle) <= self._max_idle + 1, "one more between its last request's leaving and what follows"
        for tenant in tenants:
            assert 0 <= tenant.counter < math.inf
            assert tenant.pending_tokens == sum(tenant.pending.values())
            assert min(tenant.pending.values(), default=0) >= 0
            tenant.line.check_integrity()
            if len(tenant.line):
                rank = self._rank(self._level(tenant), tenant.turn)
                assert self._backlog.rank(tenant.name) <= rank, f"tenant {tenant.name} would come up too late"
        self._backlog.check_integrity()
        self._idle.check_integrity()


def _unserved_prompt(request: Request) -> int:
    return max(0, len(request.prompt) - max(request.charged, request.reused))


class VirtualTokenCounter(TenantOrder):
    """The tenant with the lowest level is next; of equal ones, who had its turn longest ago."""

    def _rank(self, level: float, turn: int) -> Rank:
        return (level, turn)


class DeficitRoundRobin(TenantOrder):
    """Each round every waiting tenant may spend `quantum` service units for each unit of its weight.

    Round r is spent when the level reaches (r + 1) * quantum. Within a round the tenants take turns, one request each.
    Who overdraws sits out the rounds that it owes; who stops waiting loses what is left of its quantum.
    """

    def __init__(
        self,
        quantum: float = QUANTUM,
        unit: ServiceUnit | None = None,
        weights: Mapping[str, float] | None = None,
        max_idle: int = MAX_IDLE,
    ) -> None:
        if not 0 < quantum < math.inf:
            raise ConfigError(f"--quantum: {quantum:g} service units; accepted: above 0")
        super().__init__(unit, weights, max_idle)
        self.quantum = quantum

    def _rank(self, level: float, turn: int) -> Rank:
        return (level // self.quantum, turn)
