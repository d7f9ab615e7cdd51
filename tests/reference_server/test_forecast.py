from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.cost_model import MAX_COST_NS, CostModel, StepShape, shape_of
from reference_server.forecast import MAX_WAIT_NS, Forecast, Forecasts, _Steps, peak_blocks
from reference_server.kv_blocks import BlockPool
from reference_server.policies import Full, Optimistic, View
from reference_server.prefill_budget import Static
from reference_server.remaining import Curve, Lengths, LengthTable
from reference_server.request import Request, State
from reference_server.scheduler import Limits, Policies, Scheduler

# Step: 1000 ns, 10 ns a prompt token, 100 ns a decode, 1 ns a position read, 2 ns a pair
MODEL = CostModel(1000, 10, 100, 1, 2)
ALL_OF_20 = Lengths(LengthTable(pooled=Curve([20], [0.0])))  # every answer has 20 tokens


def asked(key: str, prompt: int, max_tokens: int = 50) -> Request:
    return Request(key, [1] * prompt, max_tokens, request_class="chat")


def running(
    pool: BlockPool, key: str, prompt: int, output: int = 0, computed: int | None = None, max_tokens: int = 50
) -> Request:
    """A decode, or with `computed` a prompt that was run so far; all that it may come to need is promised."""
    request = asked(key, prompt, max_tokens)
    request.output = [2] * output
    request.computed = request.tokens - 1 if computed is None else computed
    request.state = State.DECODE if output else State.PREFILL
    pool.open(key, request.sequence(), request.total_tokens)
    return request


def foretell(
    request: Request, pool: BlockPool, active: Sequence[Request] = (), ahead: Sequence[Request] = (), slots: int = 8,
    budget: int | None = 16, lengths: Lengths = ALL_OF_20,
) -> Forecast:  # fmt: skip
    return Forecasts(Full(), lengths).of(request, View(active, (), pool, Limits(slots, 4096)), list(ahead), budget)


def test_an_idle_engine_runs_a_prompt_in_chunks_and_gives_its_token_in_the_last() -> None:
    seen = foretell(asked("r", 40), BlockPool(100))
    # chunks of 16, 16 and 8; they read 16, 32 and 40 positions, and 40 · 41 / 2 pairs
    assert seen == Forecast(0, "", 3, StepShape(40, 0, 88, 820))
    assert seen.wait_ns(MODEL) == 3 * 1000 + 400 + 88 + 2 * 820
    # whole in one step it reads each position once
    assert foretell(asked("r", 40), BlockPool(100), budget=None) == Forecast(0, "", 1, StepShape(40, 0, 40, 820))


def test_a_running_answer_takes_its_share_of_every_step_until_it_ends() -> None:
    pool = BlockPool(100)
    decode = running(pool, "d", prompt=10, output=18)  # 28 tokens, 2 more to come
    seen = foretell(asked("r", 40), pool, [decode])
    # It reads 28 and 29 positions in the first two steps and is gone in the third.
    assert seen == Forecast(0, "", 3, StepShape(40, 2, 88 + 57, 820))
    assert seen.wait_ns(MODEL) == 3 * 1000 + 400 + 2 * 100 + 145 + 1640


def test_prompts_before_it_share_the_budget_and_then_decode_beside_it() -> None:
    pool = BlockPool(100)
    first = running(pool, "p", prompt=30, computed=10)  # 20 to run
    seen = foretell(asked("r", 12), pool, [first], [asked("q", 4)])
    # 20 + 4 + 12 = 36 tokens are 3 steps of 16: p 16, then p 4, q 4, r 8, then r 4. In the third p decodes, reading 31
    # positions, and q, reading 5. The chunks read 26, then 30, 4 and 8, then 12.
    # pairs: p 11 + … + 30 = 410, q 10, r 78
    assert seen == Forecast(0, "", 3, StepShape(36, 2, 26 + 30 + 4 + 8 + 12 + 31 + 5, 498))


def test_without_a_slot_it_waits_until_the_first_answer_ends() -> None:
    pool = BlockPool(100)
    long, short = running(pool, "a", prompt=10, output=2), running(pool, "b", prompt=10, output=15)
    seen = foretell(asked("r", 16), pool, [long, short], slots=2)
    # b has 5 more to come, then 1 step of prompt; a decodes in all 6 (12 … 17), b in 5 (25 … 29)
    assert seen == Forecast(5, "no_slot", 6, StepShape(16, 11, 16 + 87 + 135, 136))


def test_without_kv_it_waits_until_enough_is_given_back() -> None:
    pool = BlockPool(10, 16)
    a, b = running(pool, "a", prompt=14, output=2), running(pool, "b", prompt=14, output=15)  # 64 tokens: 4 blocks each
    assert foretell(asked("r", 14), pool, [a, b]).starts_after == 5  # 2 blocks are free and b gives back 4
    assert foretell(asked("r", 14), pool, [a, b]).lack == "no_kv"
    assert foretell(asked("r", 90), pool, [a, b]).starts_after == 18  # 9 blocks: both must end
    small = Request("r", [1] * 14, 18)  # 32 tokens fit into the two
    assert foretell(small, pool, [a, b]).starts_after == 0


EVEN = Lengths(LengthTable(pooled=Curve(range(1, 101), [1 - t / 100 for t in range(1, 101)])))  # 1 to 100 alike


def test_of_like_answers_the_first_ends_long_before_the_mean_of_one() -> None:
    pool = BlockPool(100)
    active = [running(pool, key, prompt=4, output=1, max_tokens=200) for key in "abc"]
    # Each has 1 to 99 more. At the levels 1/2, 1/4 and 3/4 these are 50, 25 and 75, so one of three is over at 25.
    assert foretell(asked("r", 4), pool, active, slots=3, lengths=EVEN).starts_after == 25
    # Who takes that place has 50 of its 100, so the second of the three is the next to end.
    assert foretell(asked("r", 4), pool, active, [asked("q", 4)], slots=3, lengths=EVEN).starts_after == 50


def test_a_block_is_kept_for_who_may_outgrow_its_promise() -> None:
    pool = BlockPool(3, 4)
    growing = asked("a", 6)
    growing.state, growing.output, growing.computed = State.DECODE, [2], 6
    pool.open("a", growing.sequence(), 8)  # 2 of 3 blocks, and it may come to 56 tokens
    view = View([growing], (), pool, Limits(8, 64))
    assert Forecasts(Optimistic(), ALL_OF_20).of(Request("r", [1], 3), view, [], 16).lack == "no_kv"


@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    blocks=st.integers(8, 40),
    budget=st.integers(1, 40),
    answer=st.integers(1, 12),
)
def test_where_lengths_and_costs_are_known_the_first_token_comes_to_the_nanosecond_as_predicted(
    prompts: list[tuple[int, int]], slots: int, blocks: int, budget: int, answer: int
) -> None:
    """The real scheduler on a virtual clock; the last to arrive is foretold."""
    pool = BlockPool(blocks, 10)
    lengths = Lengths(LengthTable(pooled=Curve([answer], [0.0])))
    scheduler = Scheduler(Limits(slots, 4096), pool, policies=Policies(budget=Static(budget)))
    now_ns, requests = 0, []
    for number, (prompt, steps_before) in enumerate(prompts):
        for _ in range(steps_before):
            now_ns = step(scheduler, now_ns)
        requests.append(Request(str(number), [1] * prompt, max_tokens=15, stop_after=answer))
        waiting = [request for request in requests[:-1] if request.state is State.WAITING]
        view = View(scheduler.running(), (), pool, scheduler.limits)
        seen = Forecasts(Full(), lengths).of(requests[-1], view, list(waiting), budget)
        assert scheduler.submit(requests[-1], now_ns) is None
    predicted_ns = now_ns + seen.wait_ns(MODEL)
    while not requests[-1].output:
        now_ns = step(scheduler, now_ns)
    assert now_ns == predicted_ns


def step(scheduler: Scheduler, now_ns: int) -> int:
    plan = scheduler.plan(now_ns)
    if not plan.items:
        return now_ns
    now_ns += MODEL.step_ns(shape_of(plan.items, plan.decodes))
    scheduler.apply(plan, [7 if item.sample else None for item in plan.items], now_ns)
    return now_ns


@given(
    before=st.lists(st.integers(1, 80), max_size=8),
    extra=st.integers(1, 80),
    ages=st.lists(st.integers(1, 60), max_size=6),
    slots=st.integers(1, 6),
    budget=st.one_of(st.none(), st.integers(1, 64)),
)
def test_more_work_ahead_never_brings_a_first_token_forward(
    before: list[int], extra: int, ages: list[int], slots: int, budget: int | None
) -> None:
    pool = BlockPool(100, 16)
    active = [running(pool, f"a{i}", prompt=5, output=min(age, 49)) for i, age in enumerate(ages)][:slots]
    ahead = [asked(f"w{i}", prompt) for i, prompt in enumerate(before)]
    less = foretell(asked("r", 30), pool, active, ahead, slots, budget, EVEN)
    more = foretell(asked("r", 30), pool, active, [*ahead, asked("x", extra)], slots, budget, EVEN)
    assert more.steps >= less.steps and more.starts_after >= less.starts_after
    assert more.wait_ns(MODEL) > less.wait_ns(MODEL)
    assert foretell(asked("r", 30 + extra), pool, active, ahead, slots, budget, EVEN).wait_ns(MODEL) > less.wait_ns(
        MODEL
    )


def test_the_most_kv_is_held_just_before_somebody_ends() -> None:
    # One of 10 tokens makes 5 more, one of 30 makes 2. After 2 steps 12 and 32 tokens are 3 and 8 blocks of 4; after 5
    # steps 15 tokens are 4.
    assert peak_blocks([(10, 5), (30, 2)], 4) == 11
    assert peak_blocks([], 4) == 0


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=12), st.integers(1, 20))
def test_the_peak_is_the_largest_of_all_steps(holdings: list[tuple[int, int]], block_tokens: int) -> None:
    def held(step: int) -> int:
        return sum(-(-(tokens + step) // block_tokens) for tokens, more in holdings if more >= step)

    peak = max((held(step) for step in range(41)), default=0)
    assert peak_blocks(holdings, block_tokens) == peak
    assert peak_blocks(holdings, block_tokens, at_least=30) == max(peak, 30)


@given(
    moves=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["arrive", "arrive", "jump", "leave"])), max_size=12),
    budget=st.sampled_from([None, 16]),
)
def test_what_is_kept_between_arrivals_of_one_moment_never_changes_a_forecast(
    moves: list[tuple[int, str]], budget: int | None
) -> None:
    pool = BlockPool(400)
    view = View([running(pool, "d", 10, output=5)], (), pool, Limits(3, 4096), moment=7)
    queue = [asked(f"w{i}", 1 + i * 7 % 40, 1 + i % 30) for i in range(100)]
    kept = Forecasts(Full(), ALL_OF_20)
    for number, (at, act) in enumerate(moves):
        if act == "leave":
            del queue[at % len(queue)]
            continue
        new = asked(f"n{number}", 1 + at)
        queue.insert(at % len(queue) if act == "jump" else len(queue), new)
        ahead = queue[: queue.index(new)]
        afresh = Forecasts(Full(), ALL_OF_20).of(new, view._replace(moment=None), ahead, budget)
        assert kept.of(new, view, ahead, budget) == afresh


def test_only_the_first_arrival_of_a_moment_pays_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    enter = _Steps.enter
    monkeypatch.setattr(_Steps, "enter", lambda steps, request: entered.append(request) or enter(steps, request))
    pool, kept = BlockPool(400), Forecasts(Full(), ALL_OF_20)
    queue = [asked(f"w{i}", 4) for i in range(1000)]
    costs = []
    for moment in (1, 1, 1, 2):
        entered.clear()
        queue.append(asked("new", 4))
        kept.of(queue[-1], View((), (), pool, Limits(8, 4096), moment), queue[:-1], 16)
        costs.append(len(entered))
    # Kept are the steps after 992 of them, a multiple of 32.
    assert costs == [1001, 1001 - 992 + 1, 1002 - 992 + 1, 1004]


def test_a_wait_fits_a_record_whatever_the_model_says() -> None:
    forever = CostModel(MAX_COST_NS, MAX_COST_NS, MAX_COST_NS, MAX_COST_NS, MAX_COST_NS)
    pool = BlockPool(1000, 16)
    # 1000 prompt tokens attend 500,500 pairs, at 1e15 ns each.
    plan = foretell(asked("new", 1000), pool)
    assert plan.wait_ns(forever) == MAX_WAIT_NS
    assert plan.wait_ns(CostModel(0, 0, 0, 0, 0)) == 1
