"""Tenants that share for long: drift that only builds up over many requests. One token of KV is one service unit or
two, so the bound of decision 014 with a promise of everything is 2 * 2 * the pool's tokens."""

from collections.abc import Callable

import pytest

from reference_server.policies import QueueOrder
from reference_server.request import Request
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.simulation import Arrival, Simulation
from tests.simulation.histories import AccountedPool
from tests.simulation.policies import COST, ORDERS, Claim, TenantsShare, Watched

SLOTS, POOL_TOKENS, BLOCK_TOKENS = 3, 96, 4


def flood(tenant: str, requests: int, prompt: int, output: int, from_ns: int = 0) -> list[Arrival]:
    return [
        Arrival(Request(f"{tenant}{i}", [1] * prompt, output, tenant=tenant, arrived_ns=from_ns + i))
        for i in range(requests)
    ]


def run(make_order: Callable[[], QueueOrder], claim: Claim, arrivals: list[Arrival]) -> None:
    pool = AccountedPool(POOL_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS, prefix_reuse=False)
    scheduler = Scheduler(Limits(SLOTS, 64), pool, (), Policies(Watched(make_order(), claim)))
    results = Simulation(scheduler, COST, sorted(arrivals, key=lambda arrival: arrival.request.arrived_ns)).run()
    claim.ended(SLOTS, [result.request for result in results], POOL_TOKENS, True)


# Each pair of requests drifts by (20 + 2 * 12) - (4 + 2 * 4) = 32 units: 100 pairs by 3200, and the bound is below 300.
UNEQUAL = [("large", 100, 20, 12), ("small", 100, 4, 4)]


@pytest.mark.parametrize("order", ["vtc", "drr"])
def test_unequal_floods_stay_within_the_bound(order: str) -> None:
    run(ORDERS[order].make, ORDERS[order].claim(), [each for tenant in UNEQUAL for each in flood(*tenant)])


def test_first_come_first_served_breaks_the_bound() -> None:
    with pytest.raises(AssertionError, match="service gap"):
        run(ORDERS["fcfs"].make, TenantsShare(), [each for tenant in UNEQUAL for each in flood(*tenant)])


@pytest.mark.parametrize("order", ["vtc", "drr"])
def test_who_comes_late_has_banked_nothing(order: str) -> None:
    # 60 requests of 44 units are 2640 units that the late one did not get; it may not catch up on them.
    early = flood("early", 120, 20, 12)
    late = flood("late", 120, 20, 12, from_ns=5000)
    run(ORDERS[order].make, ORDERS[order].claim(), early + late)
