import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.fairness import ServiceUnit
from reference_server.orders import ORDERS, EarliestDeadline, Fcfs, Lanes, OrderOptions, make_order
from reference_server.policies import QueueOrder
from reference_server.ranking import Ranking
from reference_server.request import Request, State
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S
from tests.reference_server.order_world import World

MS = 1_000_000


def make(key: str, tenant: str = "", lane: int = 0, prompt: int = 4, max_tokens: int = 4, **fields: int) -> Request:
    return Request(key, [1] * prompt, max_tokens, tenant=tenant, lane=lane, **fields)  # type: ignore[arg-type]


def wait(order: QueueOrder, request: Request, now_ns: int = 0) -> Request:
    request.arrived_ns = now_ns
    request.move(State.WAITING)
    order.add(request, now_ns)
    return request


def admit(order: QueueOrder, now_ns: int = 0) -> Request:
    request = order.peek(now_ns)
    assert request is not None
    order.remove(request)
    request.move(State.PREFILL)
    request.started_ns = now_ns
    order.admitted(request)
    return request


def preempt(order: QueueOrder, request: Request, now_ns: int = 0) -> None:
    request.move(State.PREEMPTED)
    order.add(request, now_ns)


def keys(requests: object) -> list[str]:
    return [request.key for request in requests]  # type: ignore[attr-defined]


every_order = pytest.mark.parametrize(("name", "lanes"), [(name, lanes) for name in ORDERS for lanes in (False, True)])


def new_order(name: str, lanes: bool) -> QueueOrder:
    return make_order(
        name, OrderOptions(weights={"b": 2.5}, quantum=10, longest_wait_ns=9, starvation_ns=5 if lanes else None)
    )


@every_order
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_each_request_is_next_once_or_taken_out_once(name: str, lanes: bool, data: st.DataObject):
    order = new_order(name, lanes)
    waiting: dict[str, Request] = {}
    running: list[Request] = []
    now_ns = 0
    for i in range(data.draw(st.integers(1, 40))):
        now_ns += data.draw(st.sampled_from([0, 0, 1, 7]))
        act = data.draw(st.sampled_from(["add", "add", "add", "admit", "admit", "serve", "preempt", "cancel", "end"]))
        if act == "add":
            request = make(f"r{i}", data.draw(st.sampled_from("abc")), data.draw(st.integers(0, 2)), 1 + i % 5)
            request.ttft_limit_ns = data.draw(st.sampled_from([None, 3, 30]))
            waiting[request.key] = wait(order, request, now_ns)
        elif act == "admit" and waiting:
            request = admit(order, now_ns)
            running.append(waiting.pop(request.key))  # a second time would raise
        elif act == "serve" and running:
            request = data.draw(st.sampled_from(running))
            piece = min(2, len(request.prompt) - request.charged)
            request.charged += piece
            order.served(request, piece, int(not piece))
        elif act == "preempt" and running:
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            preempt(order, request, now_ns)
            waiting[request.key] = request
        elif act == "cancel" and waiting:
            request = waiting.pop(data.draw(st.sampled_from(sorted(waiting))))
            order.remove(request)
            order.ended(request)
        elif act == "end" and running:
            order.ended(running.pop())
        order.check_integrity()
        first = order.peek(now_ns)
        assert order.peek(now_ns) is first
        assert keys(order)[:1] == ([first.key] if first else [])
        assert len(order) == len(waiting) and set(keys(order)) == set(waiting)
        assert sorted(keys(order.sort_prefills(running))) == sorted(keys(running))
    foretold = keys(order)
    assert [admit(order, now_ns).key for _ in waiting] == foretold
    assert order.peek(now_ns) is None and not len(order)
    order.check_integrity()


@every_order
def test_a_preempted_request_goes_before_newcomers_of_its_tenant_and_lane(name: str, lanes: bool):
    order = new_order(name, lanes)
    older, old = (wait(order, make(key), now_ns) for key, now_ns in (("older", 0), ("old", 1)))
    admit(order, 1), admit(order, 1)
    wait(order, make("new"), 2)
    preempt(order, old, 2)  # the youngest is preempted first
    preempt(order, older, 2)
    assert keys(order) == ["older", "old", "new"]


def test_first_come_first_served_keeps_the_order_of_arrival():
    order = Fcfs()
    requests = [wait(order, make(key)) for key in "abcd"]
    order.remove(requests[1])
    assert keys(order) == ["a", "c", "d"]
    assert order.sort_prefills([requests[3], requests[0]]) == [requests[3], requests[0]]


def test_the_earliest_deadline_goes_first():
    order = EarliestDeadline(longest_wait_ns=50)
    wait(order, make("none"), 0)  # due at 50
    wait(order, make("late", ttft_limit_ns=40), 5)  # 45
    wait(order, make("soon", ttft_limit_ns=10), 6)  # 16
    wait(order, make("far", ttft_limit_ns=9_000), 7)  # 57: no later than its longest wait
    assert keys(order) == ["soon", "late", "none", "far"]
    wait(order, make("after", ttft_limit_ns=1), 51)  # 52: arrived after "none" was due and does not overtake it
    assert keys(order) == ["soon", "late", "none", "after", "far"]


def test_of_running_prompts_the_earliest_deadline_gets_the_budget():
    order = EarliestDeadline(longest_wait_ns=50)
    wait(order, make("late", ttft_limit_ns=40)), wait(order, make("soon", ttft_limit_ns=10))
    prompts = [admit(order), admit(order)]
    assert keys(order.sort_prefills(prompts[::-1])) == ["soon", "late"]


def test_the_higher_lane_goes_first_until_a_lower_one_starves_and_then_once():
    order = Lanes(Fcfs, starvation_ns=100)
    for key in ("low1", "low2"):
        wait(order, make(key, lane=2), 0)
    for i in range(4):
        wait(order, make(f"high{i}", lane=0), 0)
    assert admit(order, 90).key == "high0"
    assert admit(order, 100).key == "high1"  # not longer than 100
    assert keys(order) == ["high2", "high3", "low1", "low2"]
    assert admit(order, 101).key == "low1"
    assert admit(order, 102).key == "high2"  # high waited for 100 - 102 only, and low has had its turn at 101
    assert admit(order, 201).key == "high3"
    assert admit(order, 202).key == "low2"


def test_a_starved_head_that_lacks_kv_holds_higher_lanes_until_what_runs_has_ended_and_no_longer():
    world = World(Lanes(Fcfs, starvation_ns=10 * MS), ServiceUnit())  # 16 blocks of 4 tokens; a step takes 1 ms
    runs, head = make("runs", prompt=4, max_tokens=36), make("head", lane=1, prompt=4, max_tokens=28)
    urgent = [make(f"urgent{i}", prompt=4, max_tokens=4) for i in range(3)]
    world.submit(runs)  # 10 blocks, which it gives back in its 36th step, the one from 35 to 36 ms
    world.step()
    world.submit(head)  # 8 blocks, and 6 are free
    for request, at_ns in zip(urgent, (5 * MS, 12 * MS, 30 * MS), strict=True):
        while world.now_ns < at_ns:
            world.step()
        world.submit(request)  # 2 blocks
    while world.waiting():
        world.step()
    assert world.admissions == [runs, urgent[0], head, urgent[1], urgent[2]]
    assert [request.started_ns // MS for request in world.admissions] == [0, 5, 36, 36, 36]


def test_the_lane_passed_over_longest_goes_before_other_starving_lanes():
    order = Lanes(Fcfs, starvation_ns=100)
    wait(order, make("lowest", lane=3), 0)
    wait(order, make("lower", lane=1), 10)
    wait(order, make("high", lane=0), 150)
    order.peek(200)
    assert keys(order) == ["lowest", "lower", "high"]


@settings(max_examples=50, deadline=None)
@given(
    history=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 12), st.integers(1, 6)), max_size=80
    )
)
def test_no_lane_waits_longer_than_the_bound_while_others_are_admitted(history: list[tuple[int, int, int, int]]):
    starvation_ns = 20 * MS
    world = World(Lanes(Fcfs, starvation_ns), ServiceUnit())
    waiting: list[int] = []  # lanes of those who wait
    since: dict[int, int] = {}  # per lane: since when it waits and nobody of it was admitted
    passed: dict[int, int] = {}  # admissions of others since it starves

    def step() -> None:
        done = len(world.admissions)
        now_ns = world.now_ns
        world.step()
        for request in world.admissions[done:]:
            waiting.remove(request.lane)
            for lane in set(waiting) - {request.lane}:
                if now_ns - since[lane] > starvation_ns:
                    passed[lane] = passed.get(lane, 0) + 1
                    assert passed[lane] <= 2, "three lanes: two others at most"
            since[request.lane] = now_ns
            passed[request.lane] = 0

    for i, (steps, lane, prompt, max_tokens) in enumerate(history):
        for _ in range(steps):
            step()
        if lane not in waiting:
            since[lane], passed[lane] = world.now_ns, 0
        waiting.append(lane)
        world.submit(make(f"r{i}", lane=lane, prompt=prompt, max_tokens=max_tokens))
    while waiting:
        step()


def test_a_running_prompt_of_a_low_lane_gets_the_budget_after_the_starvation_bound():
    order = Lanes(Fcfs, starvation_ns=100)
    wait(order, make("low", lane=1), 0)
    low = admit(order, 0)
    wait(order, make("high", lane=0), 50)
    high = admit(order, 50)
    assert keys(order.sort_prefills([low, high])) == ["high", "low"]
    order.peek(101)
    assert keys(order.sort_prefills([low, high])) == ["low", "high"]


def test_a_ranking_stays_within_twice_what_it_ranks():
    ranking = Ranking()
    for i in range(10_000):
        ranking.set(f"n{i}", (i,))
        ranking.set("same", (-i,))
        if i >= 10:
            ranking.discard(f"n{i - 10}")
        ranking.check_integrity()
    assert len(ranking) == 11 and ranking.first() == "same"


def test_an_order_is_chosen_by_name():
    assert list(ORDERS) == ["fcfs", "edf", "vtc", "drr"]
    assert isinstance(make_order("edf"), EarliestDeadline)
    assert isinstance(make_order("vtc", OrderOptions(starvation_ns=NS_PER_S)), Lanes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lifo", {}, "--order: 'lifo'; accepted: fcfs, edf, vtc, drr"),
        ("edf", {"longest_wait_ns": 0}, "--longest-wait: 0 ns; accepted: above 0"),
        ("drr", {"quantum": 0}, "--quantum: 0 service units; accepted: above 0"),
        ("vtc", {"weights": {"a": -1}}, "--tenant-weights: a: -1; accepted: 1e-09 to 1e+09"),
        ("vtc", {"weights": {"a": float("nan")}}, "--tenant-weights: a: nan; accepted: 1e-09 to 1e+09"),
        ("fcfs", {"starvation_ns": -5}, "--lane-wait: -5 ns; accepted: above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(name: str, options: dict[str, object], message: str):
    with pytest.raises(ConfigError) as error:
        make_order(name, OrderOptions(**options))  # type: ignore[arg-type]
    assert str(error.value) == message
