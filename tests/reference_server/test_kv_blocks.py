import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.kv_blocks import BlockPool


def test_resident_reserved_and_free_sum_to_the_pool_at_every_moment() -> None:
    pool = BlockPool(10, block_tokens=4)
    pool.open("a", range(9), 20)  # 5 blocks promised, none taken
    assert (pool.resident, pool.reserved, pool.free) == (0, 5, 5)
    assert pool.extend("a", 9)  # 3 blocks of 4
    assert (pool.resident, pool.reserved, pool.free) == (3, 2, 5)
    assert pool.release("a") == 5
    assert (pool.resident, pool.reserved, pool.free) == (0, 0, 10)


def test_a_table_grows_beyond_its_promise_only_into_free_blocks() -> None:
    pool = BlockPool(4, block_tokens=4)
    pool.open("a", range(4), 8)  # 2 blocks
    pool.open("b", range(3), 4)  # 1 block
    assert pool.extend("b", 8)  # the last free one
    assert not pool.extend("b", 9), "a's promise is not given away"
    assert (pool.held("b"), pool.promised("b"), pool.free) == (2, 2, 0)
    assert pool.extend("a", 8), "a promise is kept"
    pool.check_integrity()


def test_the_lowest_free_blocks_are_taken_first() -> None:
    pool = BlockPool(6, block_tokens=1)
    a, _ = pool.open("a", [1], 2)
    b, _ = pool.open("b", [1], 2)
    assert pool.extend("a", 2) and pool.extend("b", 2)
    assert (a, b) == ([0, 1], [2, 3])
    pool.release("a")
    c, _ = pool.open("c", [1, 1], 3)
    assert pool.extend("c", 3) and c == [0, 1, 4]


def test_how_much_is_lacking_counts_blocks_that_are_shared_already() -> None:
    pool = BlockPool(4, block_tokens=2, prefix_reuse=True)
    assert pool.lacking(range(4), 6) == -1  # 3 of 4
    pool.open("a", range(4), 6)
    assert pool.extend("a", 5)
    pool.register("a", range(5), 5)
    # 3 blocks, of which (0 1) and (2 3) are a's; one is free.
    assert pool.lacking(range(5), 6) == 0
    blocks, tokens = pool.open("b", range(5), 6)
    assert (blocks, tokens, pool.resident, pool.reserved, pool.free) == ([0, 1], 4, 3, 1, 0)


def test_a_promise_that_does_not_fit_and_a_second_table_are_our_bugs() -> None:
    pool = BlockPool(2, block_tokens=4)
    pool.open("a", range(4), 5)
    with pytest.raises(AssertionError, match="holds blocks already"):
        pool.open("a", [1], 2)
    with pytest.raises(AssertionError, match="1 blocks of 0 free"):
        pool.open("b", [1], 2)


def test_what_was_released_is_not_released_twice() -> None:
    pool = BlockPool(2)
    pool.open("a", [1], 2)
    pool.release("a")
    with pytest.raises(KeyError):
        pool.release("a")


def _run(pool: BlockPool, key: str, tokens: list[int]) -> int:
    """Open, compute and register everything; the tokens that were reused."""
    _, reused = pool.open(key, tokens, len(tokens) + 1)
    assert pool.extend(key, len(tokens))
    if pool.has_new_full_block(key, len(tokens)):
        pool.register(key, tokens, len(tokens))
    return reused


def test_whole_blocks_of_an_equal_beginning_are_reused_and_the_last_token_is_always_run() -> None:
    pool = BlockPool(16, block_tokens=4, prefix_reuse=True)
    assert _run(pool, "a", list(range(12))) == 0
    assert _run(pool, "same", list(range(12))) == 8  # the third block is full, but token 11 must be run
    assert _run(pool, "longer", [*range(12), 99]) == 12
    assert _run(pool, "differs", [0, 1, 2, 3, 4, 5, 77, 7, 8]) == 4
    assert _run(pool, "shifted", [1, 2, 3, 4, 5, 6, 7, 8]) == 0


def test_equal_blocks_behind_different_beginnings_are_not_the_same() -> None:
    pool = BlockPool(16, block_tokens=2, prefix_reuse=True)
    _run(pool, "a", [1, 2, 5, 6, 9])
    assert _run(pool, "b", [3, 4, 5, 6, 9]) == 0


def test_a_shared_block_lives_until_its_last_holder_leaves_and_is_then_still_reused() -> None:
    pool = BlockPool(8, block_tokens=4, prefix_reuse=True)
    _run(pool, "a", list(range(5)))
    _run(pool, "b", list(range(5)))
    assert pool.resident == 3  # (0 1 2 3) once, and a half block each
    assert pool.release("a") == 1
    assert pool.release("b") == 2 and (pool.free, pool.cached) == (8, 1)
    assert _run(pool, "c", list(range(5))) == 4 and pool.cached == 0


def test_cached_blocks_are_taken_last_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    pool = BlockPool(4, block_tokens=2, prefix_reuse=True)
    _run(pool, "old", [1, 2, 3, 4])
    pool.release("old")
    _run(pool, "new", [5, 6])
    pool.release("new")
    assert pool.cached == 3 and pool.free == 4
    _run(pool, "other", [7, 8, 9])  # the empty block and the end of old
    assert _run(pool, "again", [1, 2, 0]) == 2, "the beginning of old is still there"
    pool.check_integrity()


def test_without_reuse_nothing_is_kept() -> None:
    pool = BlockPool(8, block_tokens=2)
    _run(pool, "a", [1, 2, 3, 4])
    pool.release("a")
    assert (pool.cached, _run(pool, "b", [1, 2, 3, 4])) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 9)),
        max_size=60,
    ),
    reuse=st.booleans(),
)
def test_after_any_sequence_of_operations_blocks_balance(
    operations: list[tuple[int, list[int], int]], reuse: bool
) -> None:
    """Keys open with what comes; a key that is open grows, and is released when it cannot or has grown enough."""
    pool = BlockPool(12, block_tokens=3, prefix_reuse=reuse)
    tokens: dict[int, list[int]] = {}
    for key, prompt, more in operations:
        name = str(key)
        if key not in tokens:
            if pool.lacking(prompt, len(prompt) + 1) <= 0:
                table, reused = pool.open(name, prompt, len(prompt) + 1)
                assert reused < len(prompt) and reused == 3 * len(table)
                tokens[key] = list(prompt)
        else:
            grown = [*tokens[key], *[key] * more]
            if pool.extend(name, len(grown)):
                tokens[key] = grown
                if pool.has_new_full_block(name, len(grown)):
                    pool.register(name, grown, len(grown))
            else:
                pool.release(name)
                del tokens[key]
        pool.check_integrity()
    for key in tokens:
        pool.release(str(key))
        pool.check_integrity()
    assert pool.free == 12
