"""Random histories of the real scheduler under a virtual clock, with every promise checked after every step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import strategies as st

from reference_server.fairness import TenantOrder
from reference_server.kv_blocks import BlockPool
from reference_server.policies import Full
from reference_server.request import ENDED, TRANSITIONS, Request, State
from reference_server.scheduler import Decision, Emitted, Limits, Scheduler, StepPlan, Transition
from reference_server.simulation import AT_ONCE, NEVER, Arrival, Observer, Reader, Simulation
from reference_server.step_types import StepItem
from tests.reference_server.tiny_runner import EOS
from tests.simulation.policies import ADMISSIONS, BUDGETS, COST, ORDERS, RESERVATIONS, Watched, make_policies

CONTEXT = 48
READERS = (AT_ONCE, AT_ONCE, Reader(5), Reader(60), NEVER)
TENANTS = ("a", "b", "heavy")
SLOTS = (1, 2, 4, 6, 8)
PROMISES = (*RESERVATIONS, "optimistic")  # the one under which most is preempted, twice
FATES = (
    "none",
    "none",
    "none",
    "leaves at time",
    "leaves on transition",
    "leaves on token",
    "complete on token",
    "complete out of the batch",
)
BY_TEXT = FATES[-2:]


class Life(NamedTuple):
    """One request of a history."""

    gap_ns: int  # after the arrival before it
    prompt: int
    shared: int  # tokens of the prompt that others of its family have too
    family: int
    max_tokens: int
    stop_after: int  # 0: it runs to max_tokens
    tenant: str
    lane: int
    streaming: bool
    reader: Reader
    ttft_limit_ns: int  # 0: none
    fate: str
    fate_number: int
    text_lag_ns: int  # how long after its token an answer is found complete in its text

    @classmethod
    def of(cls, drawn: bytes) -> "Life":
        gap, prompt, shared, family, most, stop, tenant, lane, streaming, reader, limit, fate, number, lag = drawn
        prompt = 1 + prompt % 14
        return cls(
            gap_ns=(0, 0, 0, 5, 20, 120)[gap % 6],
            prompt=prompt,
            shared=min(4 * (shared % 4), prompt),
            family=family % 2,
            max_tokens=1 + most % 20,
            stop_after=max(0, stop % 30 - 15),
            tenant=TENANTS[tenant % 3],
            lane=lane % 3,
            streaming=streaming % 5 < 4,
            reader=READERS[reader % len(READERS)],
            ttft_limit_ns=(0, 0, 30, 80, 300)[limit % 5],
            fate=FATES[fate % len(FATES)],
            fate_number=number % 15,
            text_lag_ns=(0, 10, 40, 120)[lag % 4],
        )


@dataclass(frozen=True, slots=True)
class History:
    lives: Sequence[Life]
    order: str
    reservation: str
    budget: str
    admission: str
    prefix_reuse: bool
    slots: int
    blocks: int
    block_tokens: int
    max_waiting: int
    window: int | None
    patience_ns: int | None
    eos_at: int  # position at which the end token comes
    noise: float


LIVES = 8
_CONFIG = 13
DRAWN = st.binary(min_size=_CONFIG + LIVES * len(Life._fields), max_size=_CONFIG + LIVES * len(Life._fields))


def history_of(drawn: bytes, order: str) -> History:
    """A byte for each choice: Hypothesis draws, and shrinks, one string, which costs less than a hundred draws.

    In one of twelve histories two lives that follow each other come 10 to 40 times each, at once: what only builds up
    over many requests, as unfairness does, stays below every bound in a few.
    """
    size = len(Life._fields)
    (lives, reservation, budget, admission, reuse, slots, pool, waiting, window, eos, noise, burst, copies) = drawn[
        :_CONFIG
    ]
    block_tokens = (4, 1, 2)[pool % 3]
    starts = range(_CONFIG, _CONFIG + (1 + lives % LIVES) * size, size)
    drawn_lives = [Life.of(drawn[start : start + size]) for start in starts]
    if bursts := burst % 12 == 11:
        first = burst // 12 % len(drawn_lives)
        drawn_lives[first : first + 2] = [
            copy
            for life in drawn_lives[first : first + 2]
            for copy in (life, *[life._replace(gap_ns=0)] * (9 + copies % 31))
        ]
    return History(
        lives=drawn_lives,
        order=order,
        reservation=PROMISES[reservation % len(PROMISES)],
        budget=_pick(BUDGETS, budget),
        # Half of them let everybody in: what is refused tries nothing else.
        admission=_pick(ADMISSIONS, admission // 2) if admission % 2 else "all",
        prefix_reuse=bool(reuse % 2),
        slots=SLOTS[slots % len(SLOTS)],
        blocks=(24, 28, 32, 48)[pool // 3 % 4] // block_tokens,
        block_tokens=block_tokens,
        max_waiting=2 if waiting % 8 == 7 else 100 if bursts else 20,
        window=(None, None, 1, 2, 4)[window % 5],
        patience_ns=100 if window // 5 % 2 else None,
        eos_at=(0, 0, 9, 21)[eos % 4],
        noise=(0.0, 0.5)[noise % 2],
    )


def _pick(policies: Mapping[str, object], number: int) -> str:
    return tuple(policies)[number % len(policies)]


class AccountedPool(BlockPool):
    """Counts how often each holder was given room and gave it back."""

    def __init__(self, blocks: int, block_tokens: int, prefix_reuse: bool) -> None:
        super().__init__(blocks, block_tokens, prefix_reuse)
        self.opened: Counter[str] = Counter()
        self.released: Counter[str] = Counter()

    def open(self, key: str, tokens: Sequence[int], promised_tokens: int) -> tuple[list[int], int]:
        self.opened[key] += 1
        return super().open(key, tokens, promised_tokens)

    def release(self, key: str) -> int:
        self.released[key] += 1
        assert self.released[key] <= self.opened[key], f"{key} gives back what it does not hold"
        return super().release(key)


class ContextRunner:
    """What a place of a block holds depends on the token and on all before it, read through the table, as KV does:
    equal tokens after different beginnings differ. The token at position p is 100 + p, or the end token at `eos_at`."""

    def __init__(self, blocks: int, block_tokens: int, eos_at: int) -> None:
        self._cells = [[0] * block_tokens for _ in range(blocks)]
        self._size = block_tokens
        self._eos_at = eos_at

    def step(self, batch: Sequence[StepItem]) -> list[int | None]:
        written: set[tuple[int, int]] = set()
        for item in batch:
            context = self._read(item.blocks, item.position0 - 1) if item.position0 else 0
            for position, token in enumerate(item.token_ids, item.position0):
                block, at = item.blocks[position // self._size], position % self._size
                assert (block, at) not in written, "two sequences write to one place"
                written.add((block, at))
                context = self._cells[block][at] = hash((context, token))
        for item in batch:
            for position in range(item.position0):
                place = item.blocks[position // self._size], position % self._size
                assert place not in written, "a sequence writes where another one reads"
        return [self._token(item) if item.sample else None for item in batch]

    def _token(self, item: StepItem) -> int:
        position = item.position0 + len(item.token_ids)
        assert position <= CONTEXT
        return EOS if position == self._eos_at else 100 + position

    def _read(self, blocks: Sequence[int], position: int) -> int:
        return self._cells[blocks[position // self._size]][position % self._size]

    def holds(self, blocks: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the table reads back exactly these tokens."""
        context = 0
        for position, token in enumerate(tokens):
            context = hash((context, token))
            if self._read(blocks, position) != context:
                return False
        return True


class World(Observer):
    """Runs one history and checks it."""

    def __init__(self, history: History) -> None:
        self.history = history
        case = ORDERS[history.order]
        self.claim = case.claim()
        self.order = Watched(case.make(), self.claim)
        self.pool = AccountedPool(history.blocks, history.block_tokens, history.prefix_reuse)
        limits = Limits(history.slots, CONTEXT, history.max_waiting, history.window, history.patience_ns)
        policies = make_policies(self.order, history.reservation, history.budget, history.admission)
        self.scheduler = Scheduler(limits, self.pool, [EOS], policies)
        self.runner = ContextRunner(history.blocks, history.block_tokens, history.eos_at)
        self.lives: dict[str, Life] = {}
        self.paths: dict[str, list[State]] = {}
        self.admit_decisions: Counter[str] = Counter()
        self.fresh: Counter[str] = Counter()
        self.preempting_boundaries = 0
        self.most_running = 0
        self.started = 0  # at this boundary
        self.preemptions: Counter[str] = Counter()
        arrivals = list(self._arrivals())
        self.simulation = Simulation(
            self.scheduler, COST, arrivals, [self], history.noise, seed=len(arrivals), sample=self.runner.step
        )

    def _arrivals(self) -> list[Arrival]:
        at_ns, arrivals = 0, []
        for number, life in enumerate(self.history.lives):
            at_ns += life.gap_ns
            own = range(1000 * (number + 1), 1000 * (number + 1) + life.prompt - life.shared)
            # Both families repeat one block; one has another beginning.
            shared = [20 + i if life.family and i < 4 else 10 + i % 4 for i in range(life.shared)]
            request = Request(
                str(number),
                [*shared, *own],
                life.max_tokens,
                life.stop_after or None,
                tenant=life.tenant,
                arrived_ns=at_ns,
                lane=life.lane,
                streaming=life.streaming,
                ttft_limit_ns=life.ttft_limit_ns or None,
                itl_max_limit_ns=40 if number % 2 else None,
            )
            leaves_ns = at_ns + 20 * life.fate_number if life.fate == "leaves at time" else None
            if life.reader is NEVER and leaves_ns is None and self.history.patience_ns is None:
                leaves_ns = at_ns + 2000  # nobody else would end it
            arrivals.append(Arrival(request, life.reader, leaves_ns))
            self.lives[request.key] = life
        return arrivals

    def run(self) -> None:
        results = self.simulation.run()
        requests = [result.request for result in results]
        assert len(results) == len(self.lives)
        for result in results:
            request, path = result.request, self.paths[result.request.key]
            assert result.ended_ns is not None and request.state in ENDED, f"{request.key} never ended"
            assert sum(state in ENDED for state in path) == 1, f"{request.key} ended more than once"
            self._check_service(request, path)
        assert not self.scheduler.has_work and not self.scheduler.alive() and not self.order.waiting
        pool = self.pool
        assert (pool.resident, pool.reserved, pool.free) == (0, 0, pool.blocks), "KV is not at baseline"
        assert pool.opened == pool.released
        # Every step runs a token at least. A request runs its tokens once, and again after each preemption.
        work = sum((1 + request.preemptions) * request.total_tokens for request in requests)
        assert self.simulation.steps <= work, "steps without progress"
        # Only a decode lacks room, at most once for each token: with every admission it gets room for one more.
        assert self.preempting_boundaries <= sum(request.max_tokens for request in requests)
        if isinstance(self.order.inner, TenantOrder):
            for tenant in TENANTS:
                counter = self.order.inner.counter(tenant)
                assert counter is None or counter == self.order.inner.level(tenant), "a prompt under way that has ended"
        whole = isinstance(self.scheduler.policies.reservation, Full)
        self.claim.ended(self.most_running, requests, pool.blocks * pool.block_tokens, whole)

    def _check_service(self, request: Request, path: Sequence[State]) -> None:
        prompt, output = self.order.service.get(request.key, (0, 0))
        assert output == len(request.output), f"{request.key}: an output token is charged twice or not at all"
        assert prompt == self.fresh[request.key] <= len(request.prompt), f"{request.key}: prompt charged twice"
        if request.output and not self.history.prefix_reuse:
            assert prompt == len(request.prompt), f"{request.key}: prompt not charged"
        assert path.count(State.PREEMPTED) == request.preemptions == self.preemptions[request.key]
        assert path.count(State.PREFILL) == self.order.admissions[request.key] == self.pool.opened[request.key]
        assert self.admit_decisions[request.key] == (State.PREFILL in path)
        # Refused at once by what no policy decides, it never met the order; else it left it exactly once.
        assert self.order.ends[request.key] == (path != [State.REJECTED] or request.key in self.order.left)
        if request.state is State.FINISHED:
            self._check_finish(request)

    def _check_finish(self, request: Request) -> None:
        ends = {request.max_tokens, request.stop_after or request.max_tokens}
        if self.history.eos_at >= len(request.prompt):
            ends.add(self.history.eos_at - len(request.prompt) + 1)
        # Its text may end an answer before its tokens do; then it stopped.
        early = len(request.output) < min(ends)
        assert len(request.output) <= min(ends) and (not early or self.lives[request.key].fate in BY_TEXT)
        stopped = early or len(request.output) == request.stop_after or request.output[-1] == EOS
        assert request.finish_reason == ("stop" if stopped else "length")

    # --- what happens

    def moved(self, transition: Transition, now_ns: int) -> None:
        request, before, after, reason = transition
        path = self.paths.setdefault(request.key, [])
        assert before == (path[-1] if path else None), f"{request.key}: from {before} after {path}"
        assert after in TRANSITIONS[before]
        path.append(after)
        self.started += after is State.PREFILL
        if reason == "slow_reader":
            patience_ns = self.history.patience_ns
            assert patience_ns is not None and now_ns - request.taken_ns >= patience_ns
        life = self.lives[request.key]
        if life.fate == "leaves on transition" and len(path) == 1 + life.fate_number % 7:
            self.simulation.leave(request.key, now_ns)
        elif life.fate == "complete out of the batch" and after in (State.PAUSED, State.PREEMPTED):
            self.simulation.complete(request.key, now_ns + life.text_lag_ns)

    def decided(self, decision: Decision, now_ns: int) -> None:
        self.admit_decisions[decision.request.key] += decision.judgement.verdict == "admit"

    def planned(self, plan: StepPlan, now_ns: int) -> None:
        self._check_requests()
        self._check_content()
        if not plan.items:
            self.scheduler.check_integrity()
        self._check_plan(plan, now_ns)
        if self.history.admission == "deadline":
            for request in self.scheduler.alive():
                late = request.state is State.WAITING and (request.deadline_ns or now_ns) < now_ns
                assert not late, f"{request.key} waits though its deadline has passed"
        # Running before the boundary preempted are those who run now and those whom it took out.
        self.most_running = max(self.most_running, len(self.scheduler.running()) + len(plan.preempted))
        self.preempting_boundaries += bool(plan.preempted)
        assert not (plan.preempted and self.started), "what was just taken back is given away at once"
        self.started = 0
        for number, request in enumerate(plan.preempted):
            # Who pauses uses its KV least. Else a lower lane gives way, if it never did, and then the last to come: who
            # was preempted, or is in the first lane that runs, loses its KV only to who came before it, so the first
            # gets on.
            if self.paths[request.key][-2] is not State.PAUSED:
                others = self.scheduler.running()
                assert all(other.state is not State.PAUSED for other in others)
                first_lane = min(each.lane for each in (*others, *plan.preempted[number:]))
                own = first_lane if self.preemptions[request.key] else request.lane
                for other in others:
                    lane = first_lane if self.preemptions[other.key] else other.lane
                    assert lane < own or (lane == own and other.rank < request.rank), "the wrong one is preempted"
            self.preemptions[request.key] += 1
        for request, fresh in zip(plan.requests, plan.fresh, strict=True):
            self.fresh[request.key] += fresh

    def stepped(self, plan: StepPlan, emitted: Sequence[Emitted], start_ns: int, end_ns: int) -> None:
        self.scheduler.check_integrity()
        self._check_requests()
        for request, _, _, _ in emitted:
            life = self.lives[request.key]
            if life.fate_number == len(request.output) - 1:
                if life.fate == "leaves on token":
                    self.simulation.leave(request.key, end_ns)
                elif life.fate == "complete on token":
                    self.simulation.complete(request.key, end_ns + life.text_lag_ns)

    # --- what must hold

    def _check_requests(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        assert pool.resident + pool.reserved + pool.free == pool.blocks
        assert min(pool.resident, pool.reserved, pool.free) >= 0
        assert scheduler.count_by_state()[State.WAITING] <= self.history.max_waiting, "the queue is longer than allowed"
        for request in scheduler.alive():
            assert request.state is self.paths[request.key][-1] and request.state not in ENDED
            window = self.history.window
            assert window is None or not request.streaming or request.undelivered <= window
            assert self.history.prefix_reuse or not request.reused

    def _check_content(self) -> None:
        for request in self.scheduler.running():
            own = request.sequence()[: request.computed]
            assert self.runner.holds(request.blocks, own), f"{request.key} reads what is not its own"

    def _check_plan(self, plan: StepPlan, now_ns: int) -> None:
        running = self.scheduler.running()
        decodes = [request for request in running if request.state is State.DECODE]
        prefills = [request for request in running if request.state is State.PREFILL]
        assert plan.decode == decodes, "a decode is left out"
        assert len(set(plan.requests)) == len(plan.requests) <= self.history.slots
        assert set(plan.prefill) <= set(prefills)
        assert plan.token_budget is None or plan.prefill_tokens <= plan.token_budget, "the budget is exceeded"
        assert bool(plan.prefill) == bool(prefills), "no prompt gets on"
        if plan.token_budget is None or plan.prefill_tokens < plan.token_budget:
            assert len(plan.prefill) == len(prefills), "budget is left, and somebody could use it"
        for request, item, fresh in zip(plan.requests, plan.items, plan.fresh, strict=True):
            assert item.position0 == request.computed and 0 <= fresh <= len(item.token_ids)
            assert item.sample == (request.computed + len(item.token_ids) == request.tokens)
        self.claim.planned(plan, prefills, now_ns)
        if not plan.items and not running:
            assert not self.order.waiting, "all is free, and nobody is let in"
        if not plan.preempted:  # slots that preemptions free are given out at the next boundary
            self._check_readers(now_ns, free_slots=len(decodes) + len(prefills) < self.history.slots)

    def _check_readers(self, now_ns: int, free_slots: bool) -> None:
        window, patience_ns = self.history.window, self.history.patience_ns
        for request in self.scheduler.alive():
            if window is None or request.paused_ns is None:
                continue
            if request.undelivered <= window // 2:
                assert request.state is State.PAUSED and not free_slots, f"{request.key} is held though it was read"
            elif patience_ns is not None:
                idle_ns = now_ns - max(request.paused_ns, request.taken_ns)
                assert idle_ns < patience_ns, f"{request.key} is held beyond its reader's time"
