import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import pytest
from hypothesis import Phase, event, find, given, settings
from hypothesis import strategies as st

from reference_server.fairness import (
    DeficitRoundRobin,
    ServiceUnit,
    TenantOrder,
    VirtualTokenCounter,
    service_gap_bound,
)
from reference_server.orders import Fcfs
from reference_server.policies import QueueOrder
from reference_server.request import Request, State
from sloscope.errors import ConfigError
from tests.reference_server.order_world import STEP_NS, World

UNIT = ServiceUnit()
MAX_PROMPT, MAX_OUTPUT, POOL, SLOTS, QUANTUM = 16, 12, 48, 3, 10
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Offer(NamedTuple):
    after_steps: int  # iterations since the offer before
    tenant: str
    prompt: int
    max_tokens: int
    stop_after: int
    cancel_after: int | None  # iterations


offers = st.builds(
    Offer,
    after_steps=st.sampled_from([0, 0, 0, 1, 5, 40]),
    tenant=st.sampled_from("abc"),
    prompt=st.integers(1, MAX_PROMPT),
    max_tokens=st.integers(1, MAX_OUTPUT),
    stop_after=st.integers(1, MAX_OUTPUT),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
)


# Single offers, and bursts of equal ones that keep a tenant backlogged.
bursts = st.builds(
    lambda offer, times: [offer._replace(after_steps=offer.after_steps * (i == 0)) for i in range(times)],
    offers,
    st.sampled_from([1, 1, 1, 10, 40]),
)
histories = st.lists(bursts, max_size=12).map(lambda all_: list(chain.from_iterable(all_)))


def run(
    order: QueueOrder,
    history: Iterable[Offer],
    weights: Mapping[str, float],
    whole: bool = True,
    prefix_reuse: bool = False,
) -> World:
    world = World(order, UNIT, weights, SLOTS, POOL, budget=6, whole=whole, prefix_reuse=prefix_reuse)
    cancels: list[tuple[int, Request]] = []

    def advance() -> None:
        for due_ns, request in cancels:
            if due_ns == world.now_ns:
                world.cancel(request)
        world.step()

    for i, offer in enumerate(history):
        for _ in range(offer.after_steps):
            advance()
        request = make(f"r{i}", offer.tenant, offer.prompt, offer.max_tokens, stop_after=offer.stop_after)
        world.submit(request)
        if offer.cancel_after is not None:
            cancels.append((world.now_ns + offer.cancel_after * STEP_NS, request))
    while world.scheduler.has_work:
        advance()
    return world


def test_service_is_shared_by_weight_within_the_bound():
    # a has weight 1, b 2, both flood: of all service b gets two thirds but for the bound.
    weights = {"a": 1.0, "b": 2.0}
    order = VirtualTokenCounter(UNIT, weights)
    world = World(order, UNIT, weights, slots=SLOTS, pool_tokens=POOL)
    for i in range(400):
        world.submit(make(f"r{i}", "ab"[i % 2]))
    for _ in range(300):
        world.step()
    assert world.waiting()["a"] and world.waiting()["b"], "both are still backlogged"
    service, gap = world.books.service, bound(weights)
    total = sum(service.values())
    # a + b = total, and by weight neither is further behind the other than the gap: a >= b / 2 - gap, b / 2 >= a - gap.
    assert service["a"] >= (total - 2 * gap) / 3 > 0
    assert service["b"] >= (2 * total - 2 * gap) / 3 > 0
    assert service["b"] / service["a"] == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("make_order", [VirtualTokenCounter, lambda: DeficitRoundRobin(QUANTUM)], ids=["vtc", "drr"])
@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(offers, min_size=20, max_size=60), arrivals=st.lists(st.integers(0, 30), min_size=1, max_size=4)
)
def test_a_flood_overtakes_a_polite_tenant_at_most_once_per_other_tenant(
    make_order: Callable[[], TenantOrder], history: list[Offer], arrivals: list[int]
):
    order = make_order()
    world = World(order, UNIT, slots=SLOTS, pool_tokens=POOL)
    for i, offer in enumerate(history):
        world.submit(make(f"r{i}", offer.tenant, offer.prompt, offer.max_tokens))
    for i, steps in enumerate(arrivals):
        for _ in range(steps):
            world.step()
        before = len(world.admissions)
        others = sum(1 for tenant, count in world.waiting().items() if count and tenant != "polite")
        first = world.order.peek(world.now_ns)
        polite = make(f"p{i}", "polite", 1, 1)
        world.submit(polite)
        if world.waiting()["polite"] > 1:
            continue  # earlier ones of its own are before it
        if first is not None and order.level("polite") != order.level(first.tenant):
            continue  # it was not lifted: it had more service of late than who is next
        while polite not in world.admissions:
            world.step()
        assert world.admissions.index(polite) - before <= others


def test_a_first_come_first_served_flood_overtakes_a_polite_tenant_many_times():
    world = World(Fcfs(), UNIT, slots=SLOTS, pool_tokens=POOL)
    for i in range(50):
        world.submit(make(f"r{i}", "flood"))
    polite = make("p", "polite", 1, 1)
    world.submit(polite)
    while polite not in world.admissions:
        world.step()
    assert world.admissions.index(polite) == 50


def make(key: str, tenant: str, prompt: int = 4, max_tokens: int = 4, **fields: int) -> Request:
    return Request(key, [1] * prompt, max_tokens, tenant=tenant, **fields)  # type: ignore[arg-type]


def bound(weights: Mapping[str, float], quantum: float = 0, whole: bool = True) -> float:
    return service_gap_bound(
        UNIT,
        max_prompt=MAX_PROMPT,
        max_output=MAX_OUTPUT,
        pool_tokens=POOL,
        sequences=SLOTS,
        whole=whole,
        least_weight=min(weights.values(), default=1),
        quantum=quantum,
    )


def test_the_declared_bound_is_two_pools_of_the_dearest_token():
    # 2 * max(1, 2) * 48; three slots of 16 + 2 * 12 = 40 each could use more: 120.
    assert bound({}) == 2 * 96
    # One slot cannot use the pool: 2 * 40.
    assert service_gap_bound(UNIT, max_prompt=16, max_output=12, pool_tokens=48, sequences=1) == 80
    # Half the weight doubles what service counts; a quantum on either side.
    assert bound({"c": 0.5}, quantum=10) == 2 * (96 / 0.5 + 10)
    # Promised as it grows, what runs is bounded by its own lengths alone: 2 * 3 * 40.
    assert service_gap_bound(UNIT, max_prompt=16, max_output=12, pool_tokens=48, sequences=3, whole=False) == 240


@pytest.mark.parametrize("weights", [{}, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize(
    ("make_order", "quantum"),
    [
        (lambda weights: VirtualTokenCounter(UNIT, weights), 0),
        (lambda weights: DeficitRoundRobin(QUANTUM, UNIT, weights), QUANTUM),
        (lambda weights: VirtualTokenCounter(UNIT, weights, max_idle=1), 0),
    ],
    ids=["vtc", "drr", "vtc_forgets"],
)
@settings(max_examples=50, deadline=None)
@given(history=histories, whole=st.booleans(), prefix_reuse=st.booleans())
def test_two_backlogged_tenants_never_drift_apart_beyond_the_bound(
    make_order: Callable[[dict[str, float]], QueueOrder],
    quantum: float,
    weights: dict[str, float],
    history: list[Offer],
    whole: bool,
    prefix_reuse: bool,
):
    world = run(make_order(weights), history, weights, whole, prefix_reuse)
    event(f"preempted: {world.preemptions > 0}")
    assert world.books.worst_gap <= bound(weights, quantum, whole) + 1e-6


class NoLift(VirtualTokenCounter):
    def _lift(self, tenant: object) -> None:
        pass


def test_the_same_search_finds_a_violation_by_first_come_first_served():
    def unfair(history: list[Offer]) -> bool:
        return run(Fcfs(), history, {}).books.worst_gap > bound({})

    search = settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate], derandomize=True)
    assert find(histories, unfair, settings=search)


def test_without_the_lift_time_without_work_is_banked_credit():
    # For 40 iterations a is served alone, most of its 40 requests of 4 + 2 * 4 units. Then b comes, and without the
    # lift it alone is served until it has had as much.
    alone = [Offer(0, "a", 4, 4, 4, None)] * 40
    both = [Offer(0, tenant, 4, 4, 4, None) for tenant in "ab"] * 60
    history = [*alone, both[1]._replace(after_steps=40), *both[1:]]
    assert run(NoLift(UNIT), history, {}).books.worst_gap > bound({}) == 192
    assert run(VirtualTokenCounter(UNIT), history, {}).books.worst_gap <= bound({})


def wait(order: QueueOrder, request: Request) -> Request:
    request.move(State.WAITING)
    order.add(request, 0)
    return request


def admit(order: QueueOrder) -> Request:
    request = order.peek(0)
    assert request is not None
    order.remove(request)
    request.move(State.PREFILL)
    order.admitted(request)
    return request


def serve(order: QueueOrder, request: Request, prompt_tokens: int, output_tokens: int) -> None:
    request.charged += prompt_tokens
    order.served(request, prompt_tokens, output_tokens)


def keys(requests: Iterable[Request]) -> list[str]:
    return [request.key for request in requests]


def test_counters_by_hand():
    order = VirtualTokenCounter()
    for key in ("a1", "b1", "a2", "b2"):
        wait(order, make(key, key[0], prompt=3 if key[0] == "a" else 5))
    a1, b1 = admit(order), admit(order)  # a stands at 3, b at 5: their prompts are under way
    assert keys((a1, b1)) == ["a1", "b1"] and keys(order) == ["a2", "b2"]
    serve(order, a1, 3, 1)  # 3 + 2 * 1 = 5
    assert order.counter("a") == 5 and order.level("a") == 5
    assert order.counter("b") == 0 and order.level("b") == 5
    assert keys(order) == ["a2", "b2"]  # equal, and a had its turn longer ago
    serve(order, a1, 0, 1)  # 7
    assert keys(order) == ["b2", "a2"]


def test_a_cancelled_prompt_is_charged_as_far_as_it_was_run():
    order = VirtualTokenCounter()
    wait(order, make("a1", "a", prompt=10)), wait(order, make("a2", "a")), wait(order, make("b1", "b"))
    a1 = admit(order)
    serve(order, a1, 4, 0)
    assert (order.counter("a"), order.level("a")) == (4, 10)
    order.ended(a1)
    assert (order.counter("a"), order.level("a")) == (4, 4)
    order.check_integrity()


def test_what_was_charged_or_reused_is_not_under_way_again():
    order = VirtualTokenCounter()
    wait(order, make("a1", "a", prompt=10)), wait(order, make("a2", "a", prompt=10, reused=8))
    a1 = admit(order)
    serve(order, a1, 6, 0)
    a1.move(State.PREEMPTED)
    order.add(a1, 0)
    assert order.level("a") == 6
    assert admit(order) is a1 and order.level("a") == 6 + 4
    admit(order)
    assert order.level("a") == 6 + 4 + 2


def test_who_comes_back_has_banked_nothing():
    order = VirtualTokenCounter()
    wait(order, make("a1", "a", prompt=10)), wait(order, make("a2", "a")), wait(order, make("b1", "b", prompt=1))
    serve(order, admit(order), 10, 0)
    serve(order, admit(order), 1, 0)  # b1: b stands at 1 and waits no longer
    wait(order, make("b2", "b"))
    assert order.counter("b") == 10, "lifted to a, the only one that waits"
    wait(order, make("c1", "c"))
    assert order.counter("c") == 10
    order.check_integrity()


def test_into_an_empty_queue_one_comes_back_at_the_level_of_who_left_last():
    order = VirtualTokenCounter()
    wait(order, make("a1", "a", prompt=10))
    a1 = admit(order)
    serve(order, a1, 10, 1)  # 12
    wait(order, make("b1", "b"))
    assert order.counter("b") == 12


def test_a_quantum_is_spent_and_an_overdraft_sits_out():
    order = DeficitRoundRobin(quantum=10)
    wait(order, make("a1", "a", prompt=25))
    for key in ("a2", "b1", "b2", "b3"):
        wait(order, make(key, key[0], prompt=8))
    # a1 overdraws rounds 0 and 1 (25). b has two in round 0 (0 and 8), its third in round 1 (16), a2 is for round 2.
    assert keys(order) == ["a1", "b1", "b2", "b3", "a2"]
    assert [admit(order).key for _ in range(5)] == ["a1", "b1", "b2", "b3", "a2"]


def test_within_a_round_tenants_take_turns():
    order = DeficitRoundRobin(quantum=100)
    for key in ("a1", "a2", "a3", "b1", "c1"):
        wait(order, make(key, key[0]))
    assert keys(order) == ["a1", "b1", "c1", "a2", "a3"]


def test_prompts_of_different_tenants_take_turns_with_the_budget():
    order = VirtualTokenCounter()
    for key in ("a1", "a2", "b1"):
        wait(order, make(key, key[0], prompt=100))
    running = [admit(order), admit(order), admit(order)]
    assert keys(running) == ["a1", "b1", "a2"]
    serve(order, running[0], 8, 0)
    assert keys(order.sort_prefills(running)) == ["b1", "a1", "a2"]
    serve(order, running[1], 8, 0)
    assert keys(order.sort_prefills(running)) == ["a1", "a2", "b1"]


def test_who_would_be_lifted_anyway_is_forgotten():
    order = VirtualTokenCounter()
    wait(order, make("a1", "a", prompt=10)), wait(order, make("b1", "b")), wait(order, make("b2", "b", prompt=10))
    a1, b1 = admit(order), admit(order)
    serve(order, b1, 4, 4)  # b stands at 12
    serve(order, a1, 10, 0)
    order.ended(a1)
    assert order.counter("a") is None, "10 is below 12, where it would start again"
    wait(order, make("a2", "a"))
    assert order.counter("a") == 12


def test_being_forgotten_for_want_of_room_earns_nothing():
    order = VirtualTokenCounter(max_idle=2)
    wait(order, make("held", "held"))
    for i in range(1, 101):  # tenant i is served i units and goes; "held" waits all the time at 0
        request = make(f"r{i}", f"t{i}", prompt=1)
        wait(order, request)
        order.remove(request)
        order.admitted(request)
        serve(order, request, i, 0)
        order.ended(request)
        order.check_integrity()
    assert order.counter("t99") is not None and order.counter("t100") is not None and order.counter("t98") is None
    wait(order, make("again", "t98"))
    assert order.counter("t98") >= 98
    assert keys(order) == ["held", "again"]


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ((-1, 2), "--unit-prompt: -1; accepted: 0 to 1e+09"),
        ((1, 0), "--unit-output: 0; accepted: above 0"),
        ((float("nan"), 1), "--unit-prompt: nan; accepted: 0 to 1e+09"),
        ((1, float("inf")), "--unit-output: inf; accepted: above 0"),
    ],
)
def test_a_service_unit_that_cannot_be_is_refused(unit: tuple[float, float], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServiceUnit(*unit)
