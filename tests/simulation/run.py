"""How the histories are run: the same ones each time, and counted."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from hypothesis import HealthCheck, Phase, given, settings

from tests.simulation.histories import DRAWN, World, history_of

# Eight orders: 10,000 histories in all.
HISTORIES_EACH = 1250


def check_histories(order: str, record: Callable[[str, object], None], histories: int = HISTORIES_EACH) -> Counter[str]:
    """Every promise after every step of random histories; what happened in them."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=histories,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        report_multiple_bugs=False,
    )
    @given(DRAWN)
    def live(drawn: bytes) -> None:
        world = World(history_of(drawn, order))
        world.run()
        seen["histories"] += 1
        seen["steps"] += world.simulation.steps
        for path in world.paths.values():
            seen.update(f"{before} to {after}" for before, after in pairwise(path))

    live()
    record("histories", seen["histories"])
    record("steps", seen["steps"])
    return seen
