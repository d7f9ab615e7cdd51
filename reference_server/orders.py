"""Who is next in the queue: the orders that can be chosen. Pure.

Every order puts a preempted request before newcomers of its rank: it was let in before them, and its reader waits in
the middle of an answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from reference_server.fairness import QUANTUM, DeficitRoundRobin, ServiceUnit, VirtualTokenCounter
from reference_server.policies import QueueOrder
from reference_server.ranking import Line
from reference_server.request import Request
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S

LONGEST_WAIT_NS = 60 * NS_PER_S


class Fcfs:
    """In order of arrival; nobody is overtaken."""

    def __init__(self) -> None:
        self._line = Line()
        self._added = 0

    def _rank(self, request: Request) -> int:
        return 0

    def add(self, request: Request, now_ns: int) -> None:
        self._added += 1
        self._line.add(request, self._rank(request), self._added)

    def remove(self, request: Request) -> None:
        self._line.remove(request)

    def peek(self, now_ns: int) -> Request | None:
        return self._line.first()

    def sort_prefills(self, prefills: list[Request]) -> list[Request]:
        return sorted(prefills, key=self._rank)

    def admitted(self, request: Request) -> None:
        pass

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def check_integrity(self) -> None:
        self._line.check_integrity()


class EarliestDeadline(Fcfs):
    """The first token that is due first.

    Without a deadline, or with one later than that, a request is due `longest_wait_ns` after its arrival: nobody who
    arrives after that overtakes it. A deadline already missed still counts; refusing hopeless work is admission's part.
    """

    def __init__(self, longest_wait_ns: int = LONGEST_WAIT_NS) -> None:
        if longest_wait_ns <= 0:
            raise ConfigError(f"--longest-wait: {longest_wait_ns} ns; accepted: above 0")
        super().__init__()
        self.longest_wait_ns = longest_wait_ns

    def _rank(self, request: Request) -> int:
        latest_ns = request.arrived_ns + self.longest_wait_ns
        return latest_ns if request.deadline_ns is None else min(latest_ns, request.deadline_ns)


@dataclass(slots=True, eq=False)
class _Lane:
    order: QueueOrder
    passed_since_ns: int = 0  # since when it waits and nobody of it was admitted


class Lanes:
    """Strict priority by `request.lane`, 0 first, each lane with an order of its own.

    A lane that waits and had nobody admitted for longer than `starvation_ns` goes first, once; the one that was passed
    over longest before the others. So while others are admitted, a lower lane gets one admission in each
    `starvation_ns`, at most (lanes - 1) admissions late, and takes no more admissions than that from the lanes above.
    While its next lacks KV they wait with it, like everybody behind a head: at most until what runs then has ended,
    since nobody is admitted meanwhile. Passing it by would let small requests keep a large one out for ever. A running
    prompt lets prompts of higher lanes have the token budget for at most `starvation_ns` after it was admitted.

    Tenants share within a lane: what one receives in a lane does not count in another.
    """

    def __init__(self, make_order: Callable[[], QueueOrder], starvation_ns: int) -> None:
        if starvation_ns <= 0:
            raise ConfigError(f"--lane-wait: {starvation_ns} ns; accepted: above 0")
        self._make_order = make_order
        self.starvation_ns = starvation_ns
        self._lanes: dict[int, _Lane] = {}
        self._now_ns = 0  # the latest that was passed in

    def add(self, request: Request, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = _Lane(self._make_order())
            self._lanes = dict(sorted(self._lanes.items()))
        if not len(lane.order):
            lane.passed_since_ns = self._now_ns
        lane.order.add(request, now_ns)

    def remove(self, request: Request) -> None:
        self._lanes[request.lane].order.remove(request)

    def peek(self, now_ns: int) -> Request | None:
        self._now_ns = max(self._now_ns, now_ns)
        waiting = [lane for lane in self._lanes.values() if len(lane.order)]
        if not waiting:
            return None
        longest = min(waiting, key=lambda lane: lane.passed_since_ns)  # of equal ones the higher lane
        starved = self._now_ns - longest.passed_since_ns > self.starvation_ns
        return (longest if starved else waiting[0]).order.peek(now_ns)

    def sort_prefills(self, prefills: list[Request]) -> list[Request]:
        late = [r for r in prefills if self._now_ns - r.started_ns > self.starvation_ns]
        rest = [r for r in prefills if self._now_ns - r.started_ns <= self.starvation_ns]
        result = sorted(late, key=lambda r: r.started_ns)
        for number, lane in self._lanes.items():
            result += lane.order.sort_prefills([r for r in rest if r.lane == number])
        return result

    def admitted(self, request: Request) -> None:
        lane = self._lanes[request.lane]
        lane.passed_since_ns = self._now_ns
        lane.order.admitted(request)

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self._lanes[request.lane].order.served(request, prompt_tokens, output_tokens)

    def ended(self, request: Request) -> None:
        if request.lane in self._lanes:
            self._lanes[request.lane].order.ended(request)

    def __len__(self) -> int:
        return sum(len(lane.order) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Request]:
        """As if one after the other were admitted now."""
        lanes = [(lane, list(lane.order)) for lane in self._lanes.values() if len(lane.order)]
        starved = [each for each in lanes if self._now_ns - each[0].passed_since_ns > self.starvation_ns]
        for _, requests in sorted(starved, key=lambda each: each[0].passed_since_ns):
            yield requests.pop(0)
        for _, requests in lanes:
            yield from requests

    def check_integrity(self) -> None:
        assert list(self._lanes) == sorted(self._lanes)
        for number, lane in self._lanes.items():
            lane.order.check_integrity()
            assert all(request.lane == number for request in lane.order)
            assert lane.passed_since_ns <= self._now_ns


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """What a command line can say about orders; each order takes what it needs. Quantum in service units."""

    unit: ServiceUnit = field(default_factory=ServiceUnit)
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 if it is not here
    quantum: float = QUANTUM
    longest_wait_ns: int = LONGEST_WAIT_NS
    starvation_ns: int | None = None  # None: no lanes


ORDERS: dict[str, Callable[[OrderOptions], QueueOrder]] = {
    "fcfs": lambda options: Fcfs(),
    "edf": lambda options: EarliestDeadline(options.longest_wait_ns),
    "vtc": lambda options: VirtualTokenCounter(options.unit, options.weights),
    "drr": lambda options: DeficitRoundRobin(options.quantum, options.unit, options.weights),
}


def make_order(name: str, options: OrderOptions | None = None) -> QueueOrder:
    """The order of that name; with a starvation bound, one per priority lane."""
    options = options or OrderOptions()
    if name not in ORDERS:
        raise ConfigError(f"--order: {name!r}; accepted: {', '.join(ORDERS)}")
    make = ORDERS[name]
    if options.starvation_ns is None:
        return make(options)
    return Lanes(lambda: make(options), options.starvation_ns)
