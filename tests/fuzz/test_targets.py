"""The fuzz targets hold for what the search begins with, and for what one change makes of it."""

import random

import pytest

from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_for_its_seeds_and_their_neighbours(name: str) -> None:
    rng = random.Random(name)
    found = list(seeds(name))
    assert len(found) >= 4
    for seed in found:
        TARGETS[name](seed)
        at = rng.randrange(len(seed))
        TARGETS[name](seed[:at] + rng.randbytes(1) + seed[at + 1 :])
        TARGETS[name](seed[:at] + seed[rng.randrange(len(seed)) :])
