"""The driver itself: stamps worked by hand. A step takes 10 ns and 1 ns for each prompt token, unless said."""

import pytest

from reference_server.cost_model import CostModel
from reference_server.kv_blocks import BlockPool
from reference_server.policies import Optimistic
from reference_server.request import Request, State
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.simulation import NEVER, Arrival, Observer, Reader, Result, Simulation, qualified
from sloscope.contract import Limits as Contracted

COST = CostModel(base_ns=10, prefill_token_ns=1, decode_token_ns=0, kv_read_token_ns=0)


def request(key: str, at_ns: int = 0, prompt: int = 4, tokens: int = 3, **more: object) -> Request:
    return Request(key, list(range(prompt)), tokens, arrived_ns=at_ns, **more)  # type: ignore[arg-type]


def scheduler(slots: int = 2, blocks: int = 32, policies: Policies | None = None, **limits: int) -> Scheduler:
    return Scheduler(Limits(slots, 64, **limits), BlockPool(blocks, 4), [], policies)


def by_key(results: list[Result]) -> dict[str, Result]:
    return {result.request.key: result for result in results}


def test_steps_take_what_the_model_says_and_arrivals_wait_for_the_boundary() -> None:
    results = by_key(Simulation(scheduler(), COST, [Arrival(request("a")), Arrival(request("b", 20))]).run())
    # a: prefill 0-14, decode 14-24; b came at 20, so it is in from 24: a decode and 4 prompt tokens, 24-38.
    # a's third token comes at 38, where it ends. b goes on alone: 38-48, 48-58.
    a, b = results["a"], results["b"]
    assert (a.first_token_ns, a.last_token_ns, a.largest_gap_ns, a.ended_ns) == (14, 38, 14, 38)
    assert (b.first_token_ns, b.last_token_ns, b.largest_gap_ns, b.ended_ns) == (38, 58, 10, 58)
    assert (b.request.queued_ns, b.request.started_ns) == (24, 24)


def test_the_clock_jumps_over_time_in_which_nobody_is_here() -> None:
    simulation = Simulation(scheduler(), COST, [Arrival(request("a", 1_000_000, tokens=1))])
    (only,) = simulation.run()
    assert (only.first_token_ns, simulation.steps) == (1_000_014, 1)


def test_who_leaves_is_dropped_at_the_next_boundary() -> None:
    (only,) = Simulation(scheduler(), COST, [Arrival(request("a"), leaves_ns=15)]).run()
    # The step 14-24 was under way at 15.
    assert (only.tokens, only.ended_ns, only.ended) == (2, 24, ("cancelled", "disconnect"))


def test_a_slow_reader_takes_one_token_after_the_other_and_pauses_its_sequence() -> None:
    moves: list[tuple[State, int]] = []

    class Watch(Observer):
        def moved(self, transition: object, now_ns: int) -> None:
            moves.append((transition.to_state, now_ns))  # type: ignore[attr-defined]

    reader = Reader(30)
    simulation = Simulation(
        scheduler(max_undelivered=2), COST, [Arrival(request("a", tokens=4), reader)], observers=[Watch()]
    )
    simulation.run()
    # Tokens at 14 and 24: two are undelivered, paused at 24. The first is taken at 44, one is left, which is half of
    # two: on from 44, third token at 54. Two behind again, until the second is taken at 74; the fourth comes at 84.
    assert moves == [
        (State.WAITING, 0),
        (State.PREFILL, 0),
        (State.DECODE, 14),
        (State.PAUSED, 24),
        (State.DECODE, 44),
        (State.PAUSED, 54),
        (State.DECODE, 74),
        (State.FINISHED, 84),
    ]


def test_a_reader_that_never_reads_is_cut_off_after_its_time_and_moves_nobody_else() -> None:
    arrivals = [Arrival(request("stuck", tokens=30), NEVER), Arrival(request("other", tokens=30))]
    results = by_key(Simulation(scheduler(max_undelivered=1, slow_reader_ns=100), COST, arrivals).run())
    # Both prompts in one step, 0-18. Paused at 18, cut off at the first boundary from 118 on; steps end at 28, 38, …
    assert (results["stuck"].ended_ns, results["stuck"].ended) == (118, ("cancelled", "slow_reader"))
    assert results["other"].largest_gap_ns == 10 and results["other"].ended_ns == 18 + 29 * 10


def test_when_all_wait_for_readers_time_passes_until_patience_ends() -> None:
    (only,) = Simulation(
        scheduler(max_undelivered=1, slow_reader_ns=100), COST, [Arrival(request("a", tokens=9), NEVER)]
    ).run()
    assert only.ended_ns == 114


def test_what_nothing_will_ever_move_is_said_instead_of_waited_for() -> None:
    simulation = Simulation(scheduler(max_undelivered=1), COST, [Arrival(request("a", tokens=9), NEVER)])
    with pytest.raises(AssertionError, match="nothing will ever move"):
        simulation.run()


def test_noise_is_seeded_and_keeps_the_mean() -> None:
    def ends(seed: int) -> list[int | None]:
        arrivals = [Arrival(request(str(i), 0, prompt=1, tokens=50)) for i in range(40)]
        return [result.ended_ns for result in Simulation(scheduler(), COST, arrivals, noise=0.3, seed=seed).run()]

    assert ends(1) == ends(1) != ends(2)
    # Twenty pairs, one after the other, of 50 steps: 1000 steps of 10 ns and two prompt tokens each pair. The standard
    # error of the mean is 0.3 / sqrt(1000), 1 %.
    last = ends(1)[-1]
    assert last is not None and abs(last / (1000 * 10 + 40) - 1) < 0.04


def test_it_stops_where_it_is_told_and_says_who_had_not_ended() -> None:
    results = by_key(
        Simulation(scheduler(), COST, [Arrival(request("a")), Arrival(request("late", 500))]).run(until_ns=20)
    )
    assert list(results) == ["a"]
    assert results["a"].ended is None and results["a"].tokens == 2


def test_qualified_is_judged_by_the_definitions() -> None:
    # Refused: one waits already (max_waiting). Cancelled: it leaves. a: TTFT 14, gaps 10, end 34.
    arrivals = [
        Arrival(request("a")),
        Arrival(request("b"), leaves_ns=20),
        Arrival(request("c")),
        Arrival(request("d")),
    ]
    results = by_key(Simulation(scheduler(slots=1, max_waiting=2), COST, arrivals).run())
    limits = Contracted(ttft_ns=14, itl_max_ns=10)
    assert qualified(results["a"], limits).qualified
    assert qualified(results["a"], Contracted(ttft_ns=13)).misses == ("ttft",)
    assert qualified(results["a"], Contracted(itl_max_ns=9)).misses == ("itl_max",)
    assert qualified(results["b"], limits).misses == ("outcome", "ttft")
    # a and b wait at the first boundary, so c and d find the queue full.
    assert results["c"].ended == ("failed", "rejected") and results["c"].reason == "queue_full"
    assert not qualified(results["d"], limits).qualified


def test_preemptions_are_counted_and_leave_the_answer_whole() -> None:
    policies = Policies(reservation=Optimistic())
    arrivals = [Arrival(request("a", prompt=8, tokens=24)), Arrival(request("b", prompt=8, tokens=24))]
    # 32 tokens each, 8 blocks; 12 are there.
    results = by_key(Simulation(scheduler(blocks=12, policies=policies), COST, arrivals).run())
    assert [results[key].tokens for key in "ab"] == [24, 24]
    assert results["a"].request.preemptions == 0 and results["b"].request.preemptions >= 1
    # The token at position p is 100 + p, whoever was preempted.
    assert results["b"].request.output == [100 + position for position in range(8, 32)]
