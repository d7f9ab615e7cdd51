"""How the histories are run: the same ones each time, and counted."""

import os
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings

from reference_server.request import TRANSITIONS, State
from tests.simulation.histories import DRAWN, World, history_of

# Of eight orders. CI lives through 10,000; a thousand find most mistakes while one works.
HISTORIES_EACH = int(os.environ.get("SLOSCOPE_HISTORIES", "1000")) // 8
# None is excepted: the histories of each order make every move that the table allows, the rarest some
# 15 times in 1250. In a few hundred it comes once or not at all.
ENOUGH_FOR_EVERY_MOVE = 1000
LEGAL = {(before, after) for before, allowed in TRANSITIONS.items() for after in allowed}


def check_histories(
    order: str, record: Callable[[str, object], None], histories: int = HISTORIES_EACH, shrink: bool = True
) -> Counter[str]:
    """Every promise after every step of random histories, and, of many, every legal move. How much ran in them."""
    seen: Counter[str] = Counter()
    moves: set[tuple[State | None, State]] = set()

    @settings(
        max_examples=histories,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, *[Phase.shrink] * shrink],
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
            moves.update(zip([None, *path], path, strict=False))

    live()
    assert moves <= LEGAL
    if histories >= ENOUGH_FOR_EVERY_MOVE:
        assert moves == LEGAL, f"never seen: {sorted(f'{before} to {after}' for before, after in LEGAL - moves)}"
    record("histories", seen["histories"])
    record("steps", seen["steps"])
    return seen
