from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.kv_blocks import BlockPool
from reference_server.request import ENDED, TRANSITIONS, Request, State
from reference_server.scheduler import Emitted, Limits, Scheduler
from sloscope import records
from tests.reference_server.tiny_runner import EOS, TinyRunner


class World:
    """A scheduler and a runner, stepped together, with every invariant checked after each step."""

    def __init__(
        self, slots: int = 2, context: int = 64, blocks: int = 32, block_tokens: int = 4, **limits: int | None
    ) -> None:
        self.runner = TinyRunner(slots, context)
        self.scheduler = Scheduler(
            Limits(slots, context, **limits),  # type: ignore[arg-type]
            BlockPool(blocks, block_tokens),
            [EOS],
        )
        self.ended: list[str] = []
        self.history: list[tuple[str, State]] = []

    def settle(self) -> None:
        for request, _, to, _ in self.scheduler.take_transitions():
            self.history.append((request.key, to))
            if to in ENDED:
                self.ended.append(request.key)
                if request.slot >= 0:
                    self.runner.free(request.slot)
        self.scheduler.check_integrity()
        for request in self.scheduler.alive():
            if request.slot >= 0:
                assert self.runner.held[request.slot] == request.computed

    def submit(self, key: str, prompt: int = 3, max_tokens: int = 4, stop_after: int | None = None) -> Request:
        request = Request(key, list(range(10, 10 + prompt)), max_tokens, stop_after)
        self.scheduler.submit(request)
        self.settle()
        return request

    def step(self) -> list[Emitted]:
        plan = self.scheduler.plan()
        self.settle()
        emitted = self.scheduler.apply(plan, self.runner.step(plan.items).token_ids) if plan.items else []
        self.settle()
        return emitted

    def cancel(self, key: str) -> Request | None:
        request = self.scheduler.cancel(key, "disconnect")
        self.settle()
        return request

    def run_out(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests that never end")


def test_the_states_are_those_of_the_journal() -> None:
    assert tuple(State) == records.STATES


def test_only_the_transitions_of_the_table_are_possible() -> None:
    for before, after in product([None, *State], State):
        request = Request("r", [1], 1, state=before)
        if after in TRANSITIONS[before]:
            request.move(after)
            assert request.state is after
        else:
            with pytest.raises(AssertionError, match="not legal"):
                request.move(after)


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
    verdicts = [(d.request.key, d.verdict, d.reason) for d in world.scheduler.take_decisions()]
    assert verdicts == [("big", "admit", "fits"), ("next", "queue", "no_kv"), ("small", "queue", "no_kv")]
    world.run_out()
    assert world.ended.index("big") == 0


def test_resident_reserved_and_free_are_three_numbers() -> None:
    world = World(blocks=32)
    world.submit("a", prompt=6, max_tokens=10)  # 16 tokens: 4 blocks promised
    world.step()  # 6 tokens of the prompt: 2 blocks hold something
    pool = world.scheduler.pool
    assert (pool.resident, pool.reserved, pool.free) == (2, 2, 28)


def test_what_can_never_fit_is_refused_at_arrival_with_the_numbers() -> None:
    world = World(context=100, blocks=8, block_tokens=4)
    refusal = world.scheduler.submit(Request("a", [1] * 20, 20))
    assert refusal is not None and not refusal.retry
    # 20 + 20 = 40 tokens, 10 blocks of 4.
    assert refusal.message == (
        "prompt 20 + max_tokens 20 = 40 tokens need 10 KV blocks; accepted: at most 8, which is the whole pool"
    )
    refusal = world.scheduler.submit(Request("b", [1] * 90, 20))
    assert refusal is not None and refusal.message == "prompt 90 + max_tokens 20 = 110 tokens; accepted: at most 100"
    world.settle()
    assert [to for _, to in world.history] == [State.REJECTED, State.REJECTED]
    assert not world.scheduler.has_work


def test_a_full_queue_refuses_and_may_be_asked_again() -> None:
    world = World(slots=1, max_waiting=2)
    for key in "abc":
        world.submit(key)
        world.step()
    refusal = world.scheduler.submit(Request("d", [1], 1))
    assert refusal is not None and (refusal.reason, refusal.retry) == ("queue_full", True)
    world.run_out()
    assert world.scheduler.submit(Request("e", [1], 1)) is None


def test_a_long_prompt_is_run_in_pieces_within_the_budget() -> None:
    world = World(slots=2, prefill_tokens=4)
    world.submit("a", prompt=10, max_tokens=1)
    world.submit("b", prompt=3, max_tokens=1)
    sizes = []
    while world.scheduler.has_work:
        plan = world.scheduler.plan()
        sizes.append(
            [(request.key, len(item.token_ids)) for request, item in zip(plan.requests, plan.items, strict=True)]
        )
        world.scheduler.apply(plan, world.runner.step(plan.items).token_ids)
        world.settle()
    # 4 + 4 + 2 of a, whose last piece leaves 2 for b, which needs one more step.
    assert sizes == [[("a", 4)], [("a", 4)], [("a", 2), ("b", 2)], [("b", 1)]]


@pytest.mark.parametrize("steps", range(9))
def test_cancelled_in_any_state_a_request_gives_back_everything_once(steps: int) -> None:
    """0: waiting; 1, 2: between prefill pieces; from 3 on: first token, decode; the last: one token before the end."""
    world = World(slots=1, prefill_tokens=2)
    world.submit("a", prompt=6, max_tokens=7)  # 3 steps of prefill, the third gives the first of 7 tokens
    world.submit("behind", max_tokens=1)
    for _ in range(steps):
        world.step()
    request = world.cancel("a")
    assert request is not None and request.state is State.CANCELLED
    assert world.scheduler.pool.free == 32 and world.runner.held == [0]
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
    world = World(slots=slots, context=64, blocks=blocks, block_tokens=4, prefill_tokens=prefill_tokens)
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
    assert world.scheduler.pool.free == blocks and world.runner.held == [0] * slots
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
