"""The formulas in SQL against the pure definitions, and against published tables."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from queries.runner import Session
from sloscope.contract import preset
from sloscope.definitions import binomial_cdf, min_n_two_sided, min_n_upper, wilson
from tests.queries.cases import session_over

SECOND = 1_000_000_000


@contextmanager
def with_ttfts_up_to(n: int) -> Iterator[Session]:
    """A session over n completed requests with the TTFTs 1, 2, … n ns."""
    with session_over({}, preset("exercise"), window=(0, SECOND)) as session:
        session._connection.execute(
            "insert into requests (request_id, arrival_at_ns, client_observed, client_outcome, client_end_at_ns, "
            "client_ttft_ns) select i, 0, true, 'completed', 0, i from range(1, ?) as t(i)",
            [n + 1],
        )
        yield session


def quantiles(n: int) -> dict[str, dict[str, Any]]:
    with with_ttfts_up_to(n) as session:
        return {row["quantile"]: row for row in session.run("quantiles").rows if row["series"] == "completed"}


def ranks_by_definition(n: int, q: float) -> tuple[int | None, int | None]:
    low = high = None

    def below(rank: int) -> float:
        """P(fewer than `rank` of n are at most the quantile): it only grows with the rank."""
        return binomial_cdf(rank - 1, n, q)

    ranks = range(1, n + 1)
    if n >= min_n_two_sided(q):
        low = ranks[bisect_right(ranks, 0.025, key=below) - 1]
    if n >= min_n_upper(q):
        wanted = 0.975 if n >= min_n_two_sided(q) else 0.95
        high = ranks[bisect_left(ranks, wanted, key=below)]
    return low, high


@pytest.mark.parametrize("n", [4, 5, 6, 28, 29, 35, 36, 40, 58, 59, 71, 72, 120, 298, 299, 367, 368, 500])
def test_rank_bounds_are_those_of_the_exact_binomial_distribution(n):
    found = quantiles(n)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        row = found[name]
        assert (row["low_rank"], row["high_rank"]) == ranks_by_definition(n, q), (n, name)
        bounds = "two_sided" if n >= min_n_two_sided(q) else "upper_only" if n >= min_n_upper(q) else "none"
        assert row["bounds"] == bounds
        # the value at rank r is r ns here
        assert row["low_s"] == (None if row["low_rank"] is None else row["low_rank"] / 1e9)
        assert (row["value_s"] is None) == (bounds == "none")


@pytest.mark.parametrize(
    ("n", "ranks"),
    # 95 % intervals of a median by order statistics, as tabulated for the sign test (for example Conover, table A3;
    # Gibbons and Chakraborti, table G): n = 10 (2, 9), 15 (4, 12), 20 (6, 15), 25 (8, 18).
    [(10, (2, 9)), (15, (4, 12)), (20, (6, 15)), (25, (8, 18))],
)
def test_bounds_of_a_median_are_the_published_ones(n, ranks):
    row = quantiles(n)["p50"]
    assert (row["low_rank"], row["high_rank"]) == ranks


def test_the_smallest_sample_for_each_bound_is_the_published_one():
    assert [min_n_two_sided(q) for q in (0.9, 0.95, 0.99)] == [36, 72, 368]
    assert [min_n_upper(q) for q in (0.9, 0.95, 0.99)] == [29, 59, 299]
    assert (min_n_two_sided(0.5), min_n_upper(0.5)) == (6, 5)


def test_bounds_of_a_large_sample_stay_those_of_the_exact_distribution():
    n = 20_000
    with with_ttfts_up_to(n) as session:
        found = {row["quantile"]: row for row in session.run("quantiles").rows if row["series"] == "completed"}
        p99 = session.run("goodput").rows[0]["ttft_p99_s"]
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        # walked upwards from the definition of the bounds, with exact integers scaled once
        low, high = _exact_ranks(n, round(q * 100))
        assert (found[name]["low_rank"], found[name]["high_rank"]) == (low, high)
    assert found["p99"]["value_rank"] == 19_800
    assert p99 == found["p99"]["value_s"] == 19_800 / 1e9


def test_the_p99_of_ttft_is_of_the_first_receipt_of_any_choice():
    with with_ttfts_up_to(299) as session:
        session._connection.execute("update requests set n_choices = 2, client_ttft_worst_ns = 1000000000")
        row = session.run("goodput").rows[0]
    # n = 299: rank ceil(0.99 * 299) = ceil(296.01) = 297, and the request with that rank waited 297 ns
    assert (row["ttft_p99_s"], row["ttft_p99_reason"]) == (297 / 1e9, None)


def _exact_ranks(n: int, percent: int) -> tuple[int, int]:
    """Ranks from P(B <= k) in exact rational arithmetic: terms are integers over 100^n."""
    whole = 100**n
    term = (100 - percent) ** n  # P(B = 0) · 100^n
    total = term
    low, high = None, None
    k = 0
    while high is None:
        if total * 1000 <= 25 * whole:
            low = k + 1
        if total * 1000 >= 975 * whole:
            high = k + 1
        k += 1
        term = term * (n - k + 1) * percent // (k * (100 - percent))
        total += term
    assert low is not None
    return low, high


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 8), (3, 8), (8, 8), (1, 1000), (999_999, 1_000_000)])
def test_wilson_in_sql_is_wilson_in_the_definitions(k, n):
    with session_over({}, preset("exercise"), window=(0, 1)) as session:
        row = session.sql(
            f"select wilson_low({k}::bigint, {n}::bigint) l, wilson_high({k}::bigint, {n}::bigint) h"
        ).rows[0]
    low, high = wilson(k, n)
    assert row["l"] == pytest.approx(low, abs=1e-14) and row["h"] == pytest.approx(high, abs=1e-14)


def test_wilson_of_the_published_example():
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I: 81/263 is 0.2553 to 0.3662, 15/148 0.0624 to 0.1605.
    with session_over({}, preset("exercise"), window=(0, 1)) as session:
        row = session.sql(
            "select wilson_low(81, 263) a, wilson_high(81, 263) b, wilson_low(15, 148) c, wilson_high(15, 148) d"
        ).rows[0]
    assert [round(value, 4) for value in row.values()] == [0.2553, 0.3662, 0.0624, 0.1605]


def test_a_ratio_over_nothing_is_null_never_nan():
    with session_over({}, preset("exercise"), window=(0, 1)) as session:
        row = session.sql("select ratio(0, 0) a, wilson_low(0, 0) b, wilson_high(0, 0) c, ratio(0, 3) d").rows[0]
    assert row == {"a": None, "b": None, "c": None, "d": 0.0}
