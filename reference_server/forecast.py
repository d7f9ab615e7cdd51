"""When a request would get its first token, and how full the KV pool would get. Pure.

Both are closed forms over the requests in the engine, in whole steps, with no step played through. Remaining lengths
come from the length table, step times from the cost model.
"""

from collections import Counter
from collections.abc import Iterable
from copy import copy
from functools import cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from reference_server.cost_model import CostModel, StepShape
from reference_server.policies import Reservation, View
from reference_server.remaining import Lengths, LengthTable
from reference_server.request import Request, State
from reference_server.work import attended_pairs

_NOTHING = StepShape(0, 0, 0)
_EVERY = 32
MAX_WAIT_NS = 10**18  # thirty years: a record holds no more than 64 bits


@cache
def _levels(n: int) -> tuple[float, ...]:
    """1/(n + 1) … n/(n + 1), far from their neighbours: in the order of van der Corput's sequence, 1/2, 1/4, 3/4, …

    At these levels n like answers are expected to end one after the other (the mean of the k-th of n uniform draws).
    """
    mixed = [sum((number >> bit & 1) / (2 << bit) for bit in range(n.bit_length())) for number in range(1, n + 1)]
    ranks = {value: rank for rank, value in enumerate(sorted(mixed), 1)}
    return tuple(ranks[value] / (n + 1) for value in mixed)


_LATER = _levels(255)  # of those who wait


class Forecast(NamedTuple):
    """`starts_after`: whole steps until there is a slot and KV for it, 0 if now. `lack`: what it waits for, '' if
    nothing. `steps`: until the one that makes its first token has ended. `work`: of all these steps together.
    """

    starts_after: int
    lack: str
    steps: int
    work: StepShape

    def wait_ns(self, model: CostModel) -> int:
        # The model is linear: what every step pays, and once the price of all that is in them.
        wait_ns = (self.steps - 1) * model.step_ns(_NOTHING) + model.step_ns(self.work)
        return min(max(1, wait_ns), MAX_WAIT_NS)


class _Steps:
    """The steps to come, as far as somebody's first token needs them. All numbers are steps from now."""

    def __init__(self, view: View, reservation: Reservation, lengths: Lengths, budget: int | None) -> None:
        self._pool = view.pool
        self._reservation = reservation
        self._lengths = lengths
        self._budget = budget
        self._free_slots = view.limits.slots
        self._free_blocks = view.pool.free
        self._ends: list[tuple[int, int, int]] = []  # heap of (step, slots, blocks that it gives back)
        self._decodes: list[tuple[int, int, int]] = []  # (after this step, until this step, tokens at the start)
        self._now = 0
        self._entered = -1
        self._first_token = 0
        self._run = 0  # prompt tokens that fit into the steps up to where the last prompt ends
        self._tokens = self._pairs = self._kv_read = 0  # of prompts
        prefills = []
        for level, request in zip(_levels(len(view.running)), view.running, strict=True):
            promised = view.pool.promised(request.key)
            blocks = self._with_growth(request, promised)
            self._free_blocks -= blocks - promised
            in_batch = request.state is not State.PAUSED
            self._free_slots -= in_batch
            if request.state is State.PREFILL:
                prefills.append((request, blocks, level))
                continue
            more = self._more(request, level)
            self._ends.append((more, int(in_batch), blocks))
            if in_batch:
                self._decodes.append((0, more, request.tokens))
        heapify(self._ends)
        for request, blocks, level in prefills:
            self._prefill(request, blocks, level)

    def copy(self) -> "_Steps":
        other = copy(self)
        other._ends, other._decodes = self._ends[:], self._decodes[:]
        return other

    def _with_growth(self, request: Request, promised: int) -> int:
        """Who may outgrow its promise has one block more kept for it."""
        return promised + (promised < self._pool.blocks_for(request.total_tokens))

    def _more(self, request: Request, level: float) -> int:
        """How many tokens more it makes. The levels of those who run differ: of n like answers the first ends long
        before the mean of one, and a plan that gave each its mean would wait for all of them at once."""
        return max(self._lengths.quantile(request, level), 1)

    def enter(self, request: Request) -> tuple[int, str]:
        """It waits for room, then runs. The step after which it starts, and what it lacked."""
        promised = self._pool.blocks_for(self._reservation.promised_tokens(request))
        blocks = self._with_growth(request, promised)
        lack = "no_slot" if self._free_slots < 1 else "no_kv" if blocks > self._free_blocks else ""
        while (self._free_slots < 1 or blocks > self._free_blocks) and self._ends:
            step, slots, freed = heappop(self._ends)
            self._now = max(self._now, step)
            self._free_slots += slots
            self._free_blocks += freed
        self._free_slots -= 1
        self._free_blocks -= blocks
        starts_after = self._now
        self._entered += 1
        self._prefill(request, blocks, _LATER[self._entered % len(_LATER)])
        return starts_after, lack

    def _prefill(self, request: Request, blocks: int, level: float) -> None:
        first, rest, budget = request.computed, request.tokens - request.computed, self._budget
        if budget is None:
            self._first_token = self._now + 1
            self._kv_read += first + rest
        else:
            begin = max(self._run, self._now * budget)
            self._run = begin + rest
            self._first_token = -(-self._run // budget)
            taken = begin % budget  # of the first step, by prompts before it
            full = self._first_token - begin // budget - 1
            # Each chunk reads all positions up to its end: budget - taken, 2 budget - taken, …, and at last the rest.
            self._kv_read += full * (first - taken) + budget * full * (full + 1) // 2 + first + rest
        self._tokens += rest
        self._pairs += attended_pairs(first, rest)
        until = self._first_token + self._more(request, level) - 1
        heappush(self._ends, (until, 1, blocks))
        self._decodes.append((self._first_token, until, request.tokens + 1))

    def until_first_token(self) -> tuple[int, StepShape]:
        """Of the last that entered: steps, and the work in them."""
        steps, tokens, kv_read = self._first_token, 0, self._kv_read
        for after, until, length in self._decodes:
            count = min(until, steps) - after
            if count > 0:
                tokens += count
                kv_read += count * length + count * (count - 1) // 2
        return steps, StepShape(self._tokens, tokens, kv_read, self._pairs)


class Forecasts:
    """First come, first served from here on: running prompts in their order, then `ahead`, then the request itself.

    Prompts share `budget` tokens a step (None: each is run whole at once) and decodes run beside them. Who arrives
    later is taken to wait behind. A reused prefix is not foreseen, and who pauses is taken to go on at once, without a
    slot. Takes O(n log n) time for n requests running and ahead.

    Many may arrive between two steps. What stands before them is the same but for themselves, so the steps are kept as
    they were after every `_EVERY` of those ahead, and taken up from there for as long as the view is of one moment.
    """

    def __init__(self, reservation: Reservation, lengths: Lengths) -> None:
        self._reservation = reservation
        self._lengths = lengths
        self._moment: tuple[int | None, int | None, LengthTable] | None = None
        self._ahead: list[Request] = []  # whom the marks are of
        self._marks: list[_Steps] = []

    def of(self, request: Request, view: View, ahead: list[Request], budget: int | None) -> Forecast:
        moment = view.moment, budget, self._lengths.table
        if view.moment is None or moment != self._moment:
            self._moment, self._ahead = moment, []
            self._marks = [_Steps(view, self._reservation, self._lengths, budget)]
        steps = self._after(ahead)
        starts_after, lack = steps.enter(request)
        return Forecast(starts_after, lack, *steps.until_first_token())

    def _after(self, ahead: list[Request]) -> _Steps:
        known = min(len(self._ahead), len(ahead))
        same = next((i for i in range(known) if self._ahead[i] is not ahead[i]), known)
        if same < known:
            self._ahead = []
            del self._marks[same // _EVERY + 1 :]
        mark = min(same // _EVERY, len(self._marks) - 1)
        steps = self._marks[mark].copy()
        for number, other in enumerate(ahead[mark * _EVERY :], mark * _EVERY + 1):
            steps.enter(other)
            if number % _EVERY == 0:
                self._marks.append(steps.copy())
        if len(ahead) > len(self._ahead):
            self._ahead = ahead
        return steps


def peak_blocks(holdings: Iterable[tuple[int, int]], block_tokens: int, at_least: int = 0) -> int:
    """The most KV blocks that are held at once, when each (tokens, more) grows by a token a step and is gone after
    `more` of them; `at_least` where it is less, which saves work.

    The most is held just before somebody ends (Gong et al. 2025, Past-Future Scheduler, doi:10.1145/3676641.3716011),
    so only these moments are looked at. A prompt counts whole from now on.
    """
    peak, tokens_held = at_least, 0
    rests: Counter[int] = Counter()
    # Those before it in this order are still there when one ends.
    for count, (tokens, more) in enumerate(sorted(holdings, key=lambda holding: -holding[1]), 1):
        tokens_held += tokens
        rests[tokens % block_tokens] += 1
        held = tokens_held + count * more
        if (held + count * (block_tokens - 1)) // block_tokens > peak:  # as if each last block held one token
            unused = sum(number * (-(rest + more) % block_tokens) for rest, number in rests.items())
            peak = max(peak, (held + unused) // block_tokens)
    return peak
