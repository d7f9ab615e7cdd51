import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.kv_blocks import BlockPool


def test_a_promise_takes_whole_blocks() -> None:
    pool = BlockPool(10, block_tokens=16)
    pool.promise("a", 33)  # 33 / 16 = 2.06: 3 blocks
    assert (pool.resident, pool.reserved, pool.free) == (0, 3, 7)
    pool.hold("a", 16)
    assert (pool.resident, pool.reserved, pool.free) == (1, 2, 7)
    pool.hold("a", 17)
    assert (pool.resident, pool.reserved, pool.free) == (2, 1, 7)
    assert pool.release("a") == 3
    assert (pool.resident, pool.reserved, pool.free) == (0, 0, 10)


def test_a_promise_that_does_not_fit_is_never_made() -> None:
    pool = BlockPool(2, block_tokens=4)
    assert pool.fits(8) and not pool.fits(9)
    with pytest.raises(AssertionError):
        pool.promise("a", 9)
    pool.check_integrity()
    assert pool.free == 2


def test_nobody_holds_more_than_was_promised() -> None:
    pool = BlockPool(4, block_tokens=4)
    pool.promise("a", 8)
    with pytest.raises(AssertionError, match="3 of 2 promised"):
        pool.hold("a", 9)


def test_blocks_are_released_once() -> None:
    pool = BlockPool(4)
    pool.promise("a", 1)
    pool.release("a")
    with pytest.raises(KeyError):
        pool.release("a")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_the_three_numbers_always_sum_to_the_pool(actions: list[tuple[int, int]]) -> None:
    pool = BlockPool(20, block_tokens=4)
    promised: dict[str, int] = {}
    for who, tokens in actions:
        key = str(who)
        if key in promised:
            pool.hold(key, promised[key])
            pool.check_integrity()
            pool.release(key)
            del promised[key]
        elif pool.fits(tokens):
            pool.promise(key, tokens)
            promised[key] = tokens
        pool.check_integrity()
        assert pool.holders() == set(promised)
        assert pool.free == 20 - sum(-(-tokens // 4) for tokens in promised.values())
