import subprocess
import sys
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.admission import DeadlineAdmission
from reference_server.cost_model import CostModel, OnlineFit, StepShape
from reference_server.ledger import Ledger
from reference_server.orders import Fcfs
from reference_server.policies import Full, Optimistic
from reference_server.prefill_budget import Static
from reference_server.remaining import Curve, Lengths, LengthTable
from reference_server.request import ENDED, TRANSITIONS, InvariantError, Request, State
from reference_server.scheduler import Policies, StepPlan
from reference_server.step_types import StepResult
from sloscope import records
from sloscope.exposition import MetricStore
from tests.reference_server.scheduler_world import World
from tests.reference_server.test_work import CONFIG
from tests.reference_server.tiny_runner import EOS


def budget(tokens: int | None) -> Policies:
    return Policies(budget=Static(tokens))


def test_the_states_are_those_of_the_journal() -> None:
    assert tuple(State) == records.STATES


def test_only_the_transitions_of_the_table_are_possible() -> None:
    for before, after in product([None, *State], State):
        request = Request("r", [1], 1, state=before)
        if after in TRANSITIONS[before]:
            request.move(after)
            assert request.state is after
        else:
            with pytest.raises(InvariantError, match="not legal"):
                request.move(after)


def test_illegal_moves_and_promises_that_cannot_be_kept_are_found_without_asserts() -> None:
    script = """
from reference_server.kv_blocks import BlockPool
from reference_server.request import InvariantError, Request, State
request, pool = Request("r", [1], 1), BlockPool(2, 4)
pool.open("held", [1], 4)
for attempt in (
    lambda: request.move(State.DECODE), lambda: pool.open("held", [1], 2), lambda: pool.open("long", [1], 9),
    lambda: pool.open("none", [1, 2], 2),
):
    try:
        attempt()
    except InvariantError:
        print(request.state, pool.free)
"""
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None 1"] * 4


def test_a_request_passes_waiting_prefill_decode_and_finishes_with_its_last_token() -> None:
    world = World()
    request = world.submit("a", prompt=3, max_tokens=3)
    tokens = [emitted for _ in range(3) for emitted in world.step()]
    assert [to for _, to in world.history] == [State.WAITING, State.PREFILL, State.DECODE, State.FINISHED]
    # The prompt holds positions 0-2, so the tokens come from positions 3, 4, 5.
    assert [(t.token_id, t.finish) for t in tokens] == [(103, ""), (104, ""), (105, "length")]
    assert request.finish_reason == "length" and not world.scheduler.has_work
    assert world.scheduler.pool.free == 32


def test_a_one_token_answer_finishes_out_of_prefill() -> None:
    world = World()
    world.submit("a", max_tokens=1)
    assert [t.finish for t in world.step()] == ["length"]
    assert [to for _, to in world.history] == [State.WAITING, State.PREFILL, State.FINISHED]


def test_the_end_token_stops_an_answer_and_is_no_output() -> None:
    world = World()
    world.runner.eos_at = {5}
    world.submit("a", prompt=3, max_tokens=10)
    tokens = [emitted for _ in range(3) for emitted in world.step()]
    assert [(t.visible, t.finish) for t in tokens] == [(True, ""), (True, ""), (False, "stop")]


@pytest.mark.parametrize(
    ("stop_after", "max_tokens", "tokens", "reason"),
    [(2, 9, 2, "stop"), (9, 2, 2, "length"), (4, 4, 4, "stop"), (1, 9, 1, "stop")],
)
def test_a_natural_stop_is_told_apart_from_the_cap_and_counts_first(
    stop_after: int, max_tokens: int, tokens: int, reason: str
) -> None:
    world = World()
    request = world.submit("a", max_tokens=max_tokens, stop_after=stop_after)
    world.run_out()
    assert (len(request.output), request.finish_reason) == (tokens, reason)


def test_the_batch_is_decided_anew_at_every_boundary() -> None:
    world = World(slots=2)
    for key, tokens in (("a", 2), ("b", 4), ("c", 2)):
        world.submit(key, max_tokens=tokens)
    batches = []
    while world.scheduler.has_work:
        batches.append([t.request.key for t in world.step()])
    # c takes a's place at the boundary after a's second token; its prefill stands behind b's decode.
    assert batches == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"]]


def test_nobody_overtakes_a_request_that_waits_for_kv() -> None:
    world = World(slots=3, blocks=8)
    world.submit("big", prompt=8, max_tokens=16)  # 24 tokens, 6 blocks of 4
    world.submit("next", prompt=8, max_tokens=8)  # 4 blocks, 2 are free
    world.submit("small", prompt=2, max_tokens=2)  # 1 block would fit
    world.step()
    assert world.scheduler.count_by_state() == {State.DECODE: 1, State.WAITING: 2}
    verdicts = [(d.request.key, *d.judgement[:2]) for d in world.scheduler.take_decisions()]
    assert verdicts == [("big", "admit", "fits"), ("next", "queue", "no_kv"), ("small", "queue", "behind")]
    world.run_out()
    assert world.ended.index("big") == 0


def test_who_waits_behind_a_head_without_room_is_refused_at_the_boundary_after_its_deadline() -> None:
    too_short = Lengths(LengthTable(pooled=Curve([4], [0.0])))  # by it what runs ends in time for all
    admission = DeadlineAdmission(OnlineFit(CostModel(1, 0, 0, 0)), too_short, Full(), Static(None))
    world = World(slots=4, blocks=8, policies=Policies(admission=admission))
    world.submit("runs", prompt=4, max_tokens=24)  # 7 blocks of 8
    world.step()
    world.submit("head", prompt=4, max_tokens=12)  # 4 blocks, and no deadline
    due = Request("due", [1], 1, arrived_ns=1, ttft_limit_ns=9)
    assert world.scheduler.submit(due, world.now_ns) is None
    while world.now_ns < 10:
        world.step()
    assert due.state is State.WAITING
    world.step()
    assert (due.state, due.finish_reason) == (State.REJECTED, "deadline_passed")
    assert world.scheduler.count_by_state() == {State.DECODE: 1, State.WAITING: 1}


def test_resident_reserved_and_free_are_three_numbers() -> None:
    world = World(blocks=32)
    world.submit("a", prompt=6, max_tokens=10)  # 16 tokens: 4 blocks promised
    world.step()  # 6 tokens of the prompt: 2 blocks hold something
    pool = world.scheduler.pool
    assert (pool.resident, pool.reserved, pool.free) == (2, 2, 28)


def test_what_can_never_fit_is_refused_at_arrival_with_the_numbers() -> None:
    world = World(context=100, blocks=8, block_tokens=4)
    refusal = world.scheduler.submit(Request("a", [1] * 20, 20), 0)
    assert refusal is not None and not refusal.retry
    # 20 + 20 = 40 tokens, 10 blocks of 4.
    assert refusal.message == (
        "prompt 20 + max_tokens 20 = 40 tokens need 10 KV blocks; accepted: at most 8, which is the whole pool"
    )
    refusal = world.scheduler.submit(Request("b", [1] * 90, 20), 0)
    assert refusal is not None and refusal.message == "prompt 90 + max_tokens 20 = 110 tokens; accepted: at most 100"
    world.settle()
    assert [to for _, to in world.history] == [State.REJECTED, State.REJECTED]
    assert not world.scheduler.has_work


def test_a_full_queue_refuses_and_may_be_asked_again() -> None:
    world = World(slots=1, max_waiting=2)
    for key in "abc":
        world.submit(key)
        world.step()
    refusal = world.scheduler.submit(Request("d", [1], 1), 0)
    assert refusal is not None and (refusal.reason, refusal.retry) == ("queue_full", True)
    world.run_out()
    assert world.scheduler.submit(Request("e", [1], 1), 0) is None


def test_a_long_prompt_is_run_in_pieces_within_the_budget() -> None:
    world = World(slots=2, policies=budget(4))
    world.submit("a", prompt=10, max_tokens=1)
    world.submit("b", prompt=3, max_tokens=1)
    sizes = []
    while world.scheduler.has_work:
        plan = world.scheduler.plan(0)
        sizes.append(
            [(request.key, len(item.token_ids)) for request, item in zip(plan.requests, plan.items, strict=True)]
        )
        world.run(plan)
        world.settle()
    # 4 + 4 + 2 of a, whose last piece leaves 2 for b, which needs one more step.
    assert sizes == [[("a", 4)], [("a", 4)], [("a", 2), ("b", 2)], [("b", 1)]]


@pytest.mark.parametrize("steps", range(9))
def test_cancelled_in_any_state_a_request_gives_back_everything_once(steps: int) -> None:
    """0: waiting; 1, 2: between prefill pieces; from 3 on: first token, decode; the last: one token before the end."""
    world = World(slots=1, policies=budget(2))
    world.submit("a", prompt=6, max_tokens=7)  # 3 steps of prefill, the third gives the first of 7 tokens
    world.submit("behind", max_tokens=1)
    for _ in range(steps):
        world.step()
    request = world.cancel("a")
    assert request is not None and request.state is State.CANCELLED
    assert world.scheduler.pool.free == 32 and not request.blocks
    assert world.cancel("a") is None, "a second cancel finds nothing"
    world.run_out()
    assert world.ended == ["a", "behind"]


def test_a_cancel_after_the_last_token_changes_nothing() -> None:
    world = World()
    request = world.submit("a", max_tokens=1)
    world.step()
    assert world.cancel("a") is None and request.state is State.FINISHED


def test_an_answer_ended_by_its_text_finishes_and_is_not_cancelled() -> None:
    world = World()
    world.submit("a", max_tokens=9)
    world.step()
    assert world.scheduler.finish("a", "stop") is not None
    world.settle()
    assert world.history[-1] == ("a", State.FINISHED) and world.scheduler.pool.free == 32


@st.composite
def _lives(draw: st.DrawFn) -> list[tuple[int, int, int, int | None]]:
    """(arrival step, prompt, max_tokens, steps from arrival to a cancel) of each request."""
    one = st.tuples(
        st.integers(0, 30), st.integers(1, 20), st.integers(1, 20), st.one_of(st.none(), st.integers(0, 25))
    )
    return draw(st.lists(one, min_size=1, max_size=25))


@settings(max_examples=150, deadline=None)
@given(
    lives=_lives(),
    slots=st.integers(1, 4),
    blocks=st.integers(10, 24),
    prefill_tokens=st.one_of(st.none(), st.integers(1, 9)),
    eos_at=st.sets(st.integers(2, 40), max_size=6),
)
def test_whatever_comes_blocks_balance_and_every_request_ends_once(
    lives: list[tuple[int, int, int, int | None]],
    slots: int,
    blocks: int,
    prefill_tokens: int | None,
    eos_at: set[int],
) -> None:
    world = World(slots=slots, context=64, blocks=blocks, block_tokens=4, policies=budget(prefill_tokens))
    world.runner.eos_at = eos_at
    requests: dict[str, Request] = {}
    step = 0
    # 25 requests of at most 20 prefill pieces and 20 tokens, one after the other, need at most 1000 steps.
    while step <= 60 or world.scheduler.has_work:
        for i, (arrival, prompt, max_tokens, cancel_after) in enumerate(lives):
            if arrival == step:
                requests[str(i)] = world.submit(str(i), prompt, max_tokens)
            if cancel_after is not None and arrival + cancel_after == step:
                world.cancel(str(i))
        world.step()
        step += 1
        assert step <= 1100, "someone starves"
    assert sorted(world.ended) == sorted(requests)
    assert world.scheduler.pool.free == blocks
    for i, (_, prompt, max_tokens, _) in enumerate(lives):
        request = requests[str(i)]
        assert request.state in ENDED
        if request.state is State.REJECTED:
            assert -(-(prompt + max_tokens) // 4) > blocks
        if request.state is State.FINISHED:
            by_end_token = request.output[-1] == EOS
            assert request.finish_reason == ("stop" if by_end_token else "length")
            assert by_end_token or len(request.output) == max_tokens


@settings(max_examples=80, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=20), slots=st.integers(1, 4)
)
def test_requests_are_admitted_in_the_order_of_their_arrival(lives: list[tuple[int, int]], slots: int) -> None:
    world = World(slots=slots, blocks=12)
    for i, (prompt, max_tokens) in enumerate(lives):
        world.submit(str(i), prompt, max_tokens)
    world.run_out()
    admitted = [int(key) for key, to in world.history if to is State.PREFILL]
    assert admitted == list(range(len(lives)))


# --- optimistic admission and preemption


def optimistic(blocks: int, slots: int = 2, prefix_reuse: bool = False) -> World:
    return World(slots, blocks=blocks, prefix_reuse=prefix_reuse, policies=Policies(reservation=Optimistic()))


def test_what_came_last_is_preempted_when_the_pool_is_full_and_runs_again_to_the_same_answer() -> None:
    # Each comes to hold 4 + 11 tokens: 4 blocks of 4. There are 6, so not both.
    world = optimistic(blocks=6)
    a, b = world.submit("a", prompt=4, max_tokens=12), world.submit("b", prompt=4, max_tokens=12)
    world.run_out()
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert a.output == b.output == list(range(104, 116))
    again = [State.WAITING, State.PREFILL, State.DECODE, State.PREEMPTED, State.PREFILL, State.DECODE, State.FINISHED]
    assert world.states("b") == again


def test_the_boundary_that_preempts_admits_nobody_and_says_who_was_preempted() -> None:
    world = optimistic(blocks=6)
    world.submit("a", prompt=4, max_tokens=12)
    world.submit("b", prompt=4, max_tokens=12)
    world.submit("c", prompt=1, max_tokens=1)
    plan = StepPlan()
    while not plan.preempted:
        world.now_ns += 1
        plan = world.scheduler.plan(world.now_ns)
        world.settle()
        world.run(plan)
    assert [r.key for r in plan.preempted] == ["b"] and [r.key for r in plan.requests] == ["a"]


def test_a_preempted_request_goes_before_who_came_after_it() -> None:
    world = optimistic(blocks=6)
    world.submit("a", prompt=4, max_tokens=12)
    world.submit("b", prompt=4, max_tokens=12)
    world.submit("c", prompt=4, max_tokens=2)
    world.run_out()
    admitted = [key for key, to in world.history if to is State.PREFILL]
    assert admitted == ["a", "b", "b", "c"]


@pytest.mark.parametrize("later_lane", [1, 2])
def test_who_was_preempted_before_takes_no_kv_from_who_came_first_in_the_first_lane_that_runs(later_lane: int) -> None:
    world = optimistic(blocks=6)
    first = world.submit("first", prompt=4, max_tokens=12, lane=1)
    world.step()
    later = world.submit("later", prompt=4, max_tokens=12, lane=later_lane)
    later.preemptions = 1
    world.run_out()
    assert (first.preemptions, later.preemptions) == (0, 2)


def test_a_lower_lane_gives_way_to_who_came_later_and_does_so_once() -> None:
    # Each comes to hold 15 tokens, 4 blocks of 6.
    world = optimistic(blocks=6)
    batch = world.submit("batch", prompt=4, max_tokens=12, lane=1)
    world.step()
    urgent = world.submit("urgent", prompt=4, max_tokens=12)
    world.run_out()
    assert (batch.preemptions, urgent.preemptions) == (1, 0)

    world = optimistic(blocks=6)
    batch = world.submit("batch", prompt=4, max_tokens=12, lane=1)
    batch.preemptions = 1  # once before
    world.step()
    urgent = world.submit("urgent", prompt=4, max_tokens=12)
    world.run_out()
    assert (batch.preemptions, urgent.preemptions) == (1, 1)


def test_what_is_computed_again_is_not_charged_again() -> None:
    served: list[tuple[str, int, int]] = []

    class Ledger(Fcfs):
        def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
            served.append((request.key, prompt_tokens, output_tokens))

    world = World(blocks=6, policies=Policies(order=Ledger(), reservation=Optimistic()))
    world.submit("a", prompt=4, max_tokens=12)
    b = world.submit("b", prompt=4, max_tokens=12)
    world.run_out()
    assert b.preemptions == 1
    for key in ("a", "b"):
        assert sum(prompt for name, prompt, _ in served if name == key) == 4
        assert sum(output for name, _, output in served if name == key) == 12


# --- prefix reuse


def test_a_second_prompt_with_the_same_beginning_runs_only_the_rest() -> None:
    world = World(prefix_reuse=True)
    world.submit("a", tokens=[5] * 8 + [6], max_tokens=2)
    world.step()
    b = world.submit("b", tokens=[5] * 8 + [7, 8], max_tokens=2)
    plan = world.scheduler.plan(1)
    assert [(r.key, len(i.token_ids)) for r, i in zip(plan.requests, plan.items, strict=True)] == [("a", 1), ("b", 2)]
    assert (b.reused, plan.reused, plan.fresh) == (8, 8, [0, 2])
    world.run(plan)
    world.settle()
    world.run_out()
    assert b.output == [110, 111]


def test_an_answer_is_a_beginning_too() -> None:
    world = World(prefix_reuse=True)
    a = world.submit("a", tokens=[5] * 4, max_tokens=5)
    world.run_out()
    # The turn after it: prompt, answer and a new question. 4 + 4 tokens of it have their KV: the newest never has.
    b = world.submit("b", tokens=[5] * 4 + a.output + [9], max_tokens=1)
    world.run_out()
    assert b.reused == 8


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    world = optimistic(blocks=6, prefix_reuse=True)
    a = world.submit("a", tokens=[1, 2, 3, 4], max_tokens=12)
    b = world.submit("b", tokens=[5, 6, 7, 8], max_tokens=12)
    world.run_out()
    assert b.preemptions == 1 and b.output == a.output == list(range(104, 116))


@pytest.mark.parametrize(("prefix_reuse", "again"), [(False, 13), (True, 1)])
def test_each_prompt_token_is_counted_once_whatever_a_preemption_makes_run_again(
    prefix_reuse: bool, again: int
) -> None:
    world = optimistic(blocks=6, prefix_reuse=prefix_reuse)
    store = MetricStore("server")
    ledger = Ledger(world.scheduler, store, None, CONFIG)
    a = world.submit("a", tokens=[1, 2, 3, 4], max_tokens=12)
    b = world.submit("b", tokens=[1, 2, 3, 4], max_tokens=12)
    while world.scheduler.has_work:
        plan = world.scheduler.plan(0)
        ledger.step(1, plan, StepShape(0, 0, 0), world.run(plan), 0, StepResult([], 0, 1), None)
        world.settle()
    assert (a.preemptions, b.preemptions) == (0, 1)
    counted = {
        line.split()[0].removeprefix("sloscope_engine_"): float(line.split()[1])
        for line in store.render().decode().splitlines()
        if "tokens_total" in line and line[0] != "#"
    }
    # Both start at once, so neither finds a beginning of the other's. With 4 + 9 tokens each needs a fourth block, and
    # there are 6: b runs 13 tokens again, of which 12 lie in full blocks that it finds where they are reused.
    assert counted["prompt_tokens_total"] == 8 and counted["output_tokens_total"] == 24
    assert counted["prefix_reused_tokens_total"] == 0
    assert counted["recomputed_tokens_total"] == again


# --- readers


def flowing(window: int, patience_ns: int | None = None, **world: Any) -> World:
    return World(max_undelivered=window, slow_reader_ns=patience_ns, **world)


def test_a_reader_that_is_behind_pauses_its_own_sequence_and_keeps_its_kv() -> None:
    world = flowing(window=3)
    slow = world.submit("slow", max_tokens=9, streaming=True)
    world.submit("other", max_tokens=9)
    batches = [[t.request.key for t in world.step()] for _ in range(5)]
    assert batches == [["slow", "other"]] * 3 + [["other"]] * 2
    assert slow.state is State.PAUSED and slow.undelivered == 3
    assert world.scheduler.paused_blocks() == 2  # 3 of the prompt and 2 tokens: 5 in blocks of 4
    world.scheduler.delivered("slow", 1, world.now_ns)
    world.step()
    assert slow.state is State.PAUSED, "it goes on when half of the window is free"
    world.scheduler.delivered("slow", 2, world.now_ns)
    assert "slow" in [t.request.key for t in world.step()]


def test_an_answer_that_does_not_stream_has_no_reader_to_wait_for() -> None:
    world = flowing(window=2)
    request = world.submit("a", max_tokens=9, streaming=False)
    world.run_out()
    assert len(request.output) == 9


def test_a_paused_sequence_leaves_its_slot_to_others() -> None:
    world = flowing(window=1, slots=1)
    world.submit("slow", max_tokens=4, streaming=True)
    other = world.submit("other", max_tokens=3)
    world.step()
    for _ in range(3):
        world.step()
    assert other.state is State.FINISHED


def test_blocks_that_paused_sequences_share_are_counted_once() -> None:
    world = World(prefix_reuse=True, max_undelivered=1)
    # 17 tokens are 5 blocks of 4. The second takes 4 full ones over from the first, and has one of its own.
    for key in "ab":
        world.submit(key, prompt=17, max_tokens=4, streaming=True)
        world.step()
    world.step()
    assert world.scheduler.count_by_state() == {State.PAUSED: 2}
    assert world.scheduler.paused_blocks() == world.scheduler.pool.resident == 6


def test_who_caught_up_goes_on_before_newcomers_are_admitted_but_never_beyond_the_slots() -> None:
    world = flowing(window=1, slots=1)
    slow = world.submit("slow", max_tokens=3, streaming=True)
    world.step()
    other = world.submit("other", max_tokens=2)
    late = world.submit("late", max_tokens=1)
    world.step()  # slow pauses, other runs
    world.scheduler.delivered("slow", 1, world.now_ns)
    world.step()
    assert slow.state is State.PAUSED and other.state is State.FINISHED
    world.step()
    assert len(slow.output) == 2 and late.state is State.WAITING


def test_a_reader_that_takes_nothing_for_too_long_is_cut_off() -> None:
    world = flowing(window=1, patience_ns=10)
    slow = world.submit("slow", max_tokens=9, streaming=True)
    world.step()
    world.step()
    assert slow.state is State.PAUSED and slow.paused_ns == 2
    while world.now_ns < 11:
        world.step()
    assert slow.state is State.PAUSED
    world.step()
    assert (slow.state, slow.finish_reason) == (State.CANCELLED, "slow_reader")
    assert world.scheduler.pool.free == 32


def test_a_reader_that_takes_a_little_is_not_cut_off() -> None:
    world = flowing(window=4, patience_ns=5)
    slow = world.submit("slow", max_tokens=9, streaming=True)
    while slow.state is not State.PAUSED:
        world.step()
    world.step()
    world.step()
    world.scheduler.delivered("slow", 1, world.now_ns)  # 3 of 4 left: it stays paused
    for _ in range(4):
        world.step()
    assert slow.state is State.PAUSED
    world.step()
    assert slow.state is State.CANCELLED


def test_paused_kv_is_the_first_to_be_taken_back_and_waits_for_its_reader() -> None:
    world = World(blocks=6, policies=Policies(reservation=Optimistic()), max_undelivered=2)
    slow = world.submit("slow", prompt=4, max_tokens=12, streaming=True)
    other = world.submit("other", prompt=4, max_tokens=16)
    while slow.state is not State.PREEMPTED:
        world.step()
    while other.state is not State.FINISHED:
        world.step()
    for _ in range(3):
        world.step()
    assert slow.state is State.PREEMPTED, "its reader is behind: it would pause at once"
    for taken in range(2, 13):
        world.scheduler.delivered("slow", min(taken, len(slow.output)), world.now_ns)
        world.step()
        world.step()
    assert slow.state is State.FINISHED and slow.output == list(range(104, 116))
