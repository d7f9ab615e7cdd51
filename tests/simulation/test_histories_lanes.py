"""Lanes of orders by arrival and by deadline. Files run beside each other, so the histories are in four."""

from collections.abc import Callable

import pytest

from tests.simulation.run import HISTORIES_EACH, check_histories


@pytest.mark.timeout(300)  # ten seconds where nothing else runs
@pytest.mark.parametrize("order", ["lanes of fcfs", "lanes of edf"])
def test_every_promise_is_kept_after_every_step(order: str, record_property: Callable[[str, object], None]) -> None:
    seen = check_histories(order, record_property)
    assert seen["histories"] >= HISTORIES_EACH
