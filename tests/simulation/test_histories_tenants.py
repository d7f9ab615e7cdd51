"""Orders that share between tenants. Files run beside each other, so the histories are in four."""

from collections.abc import Callable

import pytest

from reference_server.fairness import ServiceUnit, VirtualTokenCounter
from reference_server.orders import Fcfs
from reference_server.policies import QueueOrder
from tests.simulation.policies import ORDERS, WEIGHTS, OrderCase, TenantsShare
from tests.simulation.run import HISTORIES_EACH, check_histories


@pytest.mark.timeout(300)  # ten seconds where nothing else runs
@pytest.mark.parametrize("order", ["vtc", "drr"])
def test_every_promise_is_kept_after_every_step(order: str, record_property: Callable[[str, object], None]) -> None:
    seen = check_histories(order, record_property)
    assert seen["histories"] >= HISTORIES_EACH


def _free_output() -> QueueOrder:
    return VirtualTokenCounter(ServiceUnit(1, 1e-9), WEIGHTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", [Fcfs, _free_output])
def test_the_same_draw_finds_orders_that_do_not_share(
    make: Callable[[], QueueOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORDERS, "vtc", OrderCase(make, TenantsShare))
    with pytest.raises(AssertionError, match="service gap"):
        check_histories("vtc", lambda name, count: None, histories=1000, shrink=False)  # one in a hundred shows it
