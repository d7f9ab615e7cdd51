"""The definitions, worked by hand on small stamps (ms for reading, ns inside)."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloscope import definitions as d
from sloscope.contract import Limits

MS = 1_000_000
EXERCISE = Limits(ttft_ns=300 * MS, itl_max_ns=30 * MS)


def receipts(*ms: int) -> list[int]:
    return [value * MS for value in ms]


def summary(*ms: int, tokens: int | None = None, types: list[int] | None = None) -> d.Summary:
    stamps = receipts(*ms)
    kinds = types or [d.CONTENT] * len(stamps)
    return d.summarise(0, stamps, [0] * len(stamps), kinds, total_tokens=len(stamps) if tokens is None else tokens)


def test_ttft_is_send_to_first_receipt_and_gaps_plus_ttft_is_the_whole() -> None:
    row = summary(300, 310, 345)
    assert row.ttft_ns == 300 * MS
    gaps = d.event_gaps_ns(receipts(300, 310, 345), [0, 0, 0])
    assert gaps == [10 * MS, 35 * MS]  # n receipts, n − 1 gaps
    assert row.ttft_ns + sum(gaps) == row.e2e_ns == 345 * MS


def test_no_output_has_no_ttft_and_never_zero() -> None:
    row = summary()
    assert row.ttft_ns is None and row.itl_max_ns is None and row.e2e_ns is None and row.events == 0


def test_a_completed_answer_without_receipts_was_received_when_it_ended_and_has_no_ttft() -> None:
    row = d.summarise(5 * MS, [], [], [], total_tokens=9, completed_ns=305 * MS)
    assert row == d.Summary(tokens=9, e2e_ns=300 * MS)  # 305 − 5
    streamed = d.summarise(5 * MS, receipts(105, 205), [0, 0], [0, 0], completed_ns=305 * MS)
    assert streamed.e2e_ns == 200 * MS, "with receipts the last one counts, not the end of the stream"


def test_one_receipt_has_no_largest_gap() -> None:
    assert summary(120).itl_max_ns is None


def test_the_largest_gap_is_of_the_worst_choice_and_never_across_choices() -> None:
    # choice 0: 100, 150 (gap 50); choice 1: 110, 200 (gap 90); interleaved gaps would be 10, 40, 50
    stamps = receipts(100, 110, 150, 200)
    row = d.summarise(0, stamps, [0, 1, 0, 1], [0] * 4, n_choices=2)
    assert row.itl_max_ns == 90 * MS
    assert row.ttft_ns == 100 * MS and row.ttft_worst_ns == 110 * MS


def test_a_choice_that_never_got_output_has_no_worst_ttft() -> None:
    row = d.summarise(0, receipts(100), [0], [0], n_choices=2)
    assert row.ttft_ns == 100 * MS and row.ttft_worst_ns is None


def test_reasoning_counts_for_ttft_and_not_for_visible_ttft() -> None:
    row = summary(100, 500, types=[d.REASONING, d.CONTENT])
    assert row.ttft_ns == 100 * MS and row.ttft_visible_ns == 500 * MS
    only = summary(100, 500, types=[d.REASONING, d.REASONING])
    assert only.ttft_ns == 100 * MS and only.ttft_visible_ns is None


def test_k_tokens_in_one_event_are_k_minus_one_zero_gaps_and_one_event_gap() -> None:
    # events of 1, 3 and 1 tokens at 0, 40, 60: gaps 40, 0, 0, 20; 5 tokens, 4 gaps
    gaps = d.token_gaps_ns(receipts(0, 40, 60), [0, 0, 0], [1, 3, 1])
    assert sorted(gaps) == sorted([40 * MS, 0, 0, 20 * MS])


def test_tpot_is_undefined_below_two_tokens() -> None:
    assert d.tpot_s(0, 1) is None and d.tpot_s(None, 5) is None
    assert d.tpot_s(100 * MS, 5) == pytest.approx(0.025)  # 100 ms / 4


def test_tpot_of_several_choices_is_the_worst_one_that_is_known() -> None:
    # choice 0: 2 tokens over 10 ms (10 a token); choice 1: 3 tokens over 90 ms (45 a token)
    stamps, choice = receipts(100, 110, 110, 200), [0, 0, 1, 1]
    row = d.summarise(0, stamps, choice, [0] * 4, 2, total_tokens=5, event_tokens=[1, 1, 1, 2])
    assert (row.span_ns, row.span_tokens) == (90 * MS, 3)
    assert d.summarise(0, stamps, choice, [0] * 4, 2, total_tokens=9, event_tokens=[1, 1, 1, 2]).span_tokens is None


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40).map(sorted), st.data())
def test_summary_identities_hold_on_random_receipts(stamps: list[int], data: st.DataObject) -> None:
    choice = data.draw(st.lists(st.integers(0, 2), min_size=len(stamps), max_size=len(stamps)))
    row = d.summarise(0, stamps, choice, [0] * len(stamps), n_choices=3)
    gaps = d.event_gaps_ns(stamps, choice)
    assert row.itl_max_ns == (max(gaps) if gaps else None)
    assert len(gaps) == len(stamps) - len(set(choice))
    assert row.ttft_ns == stamps[0] and row.e2e_ns == stamps[-1]
    assert (row.ttft_worst_ns is None) == (len(set(choice)) < 3)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (d.StreamEnd(200, finishes={0: "stop"}, done=True, events=3), ("completed", "")),
        (d.StreamEnd(200, finishes={0: "stop"}, events=3), ("completed", "")),  # no [DONE], a finish_reason
        (d.StreamEnd(200, done=True, events=3), ("completed", "")),  # [DONE] without a finish_reason
        (d.StreamEnd(200, events=3), ("failed", "truncated")),
        (d.StreamEnd(200, events=0), ("failed", "empty_stream")),
        (d.StreamEnd(200, finishes={0: "stop"}, done=True), ("failed", "empty_stream")),
        (d.StreamEnd(200, finishes={0: "stop"}, done=True, min_tokens=0), ("completed", "")),
        (d.StreamEnd(200, finishes={0: "tool_calls"}, done=True, tokens=17), ("completed", "")),
        (d.StreamEnd(200, error="server_error", events=3), ("failed", "in_band_error")),
        (d.StreamEnd(200, error="server_error", events=3, finishes={0: "stop"}), ("failed", "in_band_error")),
        (d.StreamEnd(200, finishes={0: "abort"}, done=True, events=3), ("failed", "in_band_error")),
        (d.StreamEnd(429), ("failed", "rejected")),
        (d.StreamEnd(503), ("failed", "rejected")),
        (d.StreamEnd(500), ("failed", "http_error")),
        (d.StreamEnd(307), ("failed", "http_error")),  # a redirect that nobody followed
        (d.StreamEnd(504), ("failed", "timeout")),
        (d.StreamEnd(transport="connect_error"), ("failed", "connect_error")),
        (d.StreamEnd(200, transport="reset", events=2), ("failed", "upstream_reset")),
        (d.StreamEnd(200, transport="timeout", events=2), ("failed", "timeout")),
        (d.StreamEnd(200, malformed=True, events=2), ("failed", "bad_stream")),
        (d.StreamEnd(200, events=5, left="voluntary"), ("cancelled", "voluntary")),
        (d.StreamEnd(200, events=5, left="disconnect", finishes={0: "stop"}), ("completed", "")),
        (d.StreamEnd(200, events=5, n_choices=2, finishes={0: "stop"}), ("failed", "truncated")),
        (d.StreamEnd(left="client_timeout"), ("cancelled", "client_timeout")),
    ],
)
def test_every_end_has_exactly_one_outcome(end: d.StreamEnd, expected: tuple[str, str]) -> None:
    assert d.classify_end(end) == expected


def test_a_limit_is_met_at_exactly_its_value_and_missed_one_nanosecond_above() -> None:
    at = summary(300, 330)
    assert d.judge("completed", at, EXERCISE).qualified
    late = d.summarise(0, [300 * MS + 1, 330 * MS], [0, 0], [0, 0], total_tokens=2)
    assert d.judge("completed", late, EXERCISE).misses == ("ttft",)


def test_tpot_is_compared_without_rounding() -> None:
    # 100 ms over 3 gaps is 33.33… ms: above 33_333_333 ns, below 33_333_334
    row = summary(0, 100, tokens=4)
    assert not d.judge("completed", row, Limits(tpot_ns=33_333_333)).qualified
    assert d.judge("completed", row, Limits(tpot_ns=33_333_334)).qualified


def test_a_missing_ttft_is_a_miss_and_a_missing_gap_is_vacuously_met() -> None:
    assert d.judge("completed", summary(), EXERCISE).misses == ("ttft", "min_tokens")
    one = d.judge("completed", summary(120), EXERCISE)
    assert one.qualified and one.vacuous
    late = d.judge("completed", summary(301), EXERCISE)
    assert late == (False, ("ttft",), True), "met without a measurement, whatever else was missed"
    assert not d.judge("cancelled", summary(120), EXERCISE).vacuous
    assert not d.judge("completed", summary(301), Limits(ttft_ns=300 * MS)).vacuous, "no gap was promised"


def test_a_request_that_did_not_stream_is_judged_by_e2e_alone_where_the_class_allows() -> None:
    limits = Limits(ttft_ns=1, e2e_ns=500 * MS)
    row = d.Summary(events=1, tokens=9, e2e_ns=400 * MS)
    assert d.judge("completed", row, limits, streamed=False, streaming="optional").qualified
    assert d.judge("completed", row, limits, streamed=False, streaming="required").misses == ("ttft",)


def test_a_cancelled_request_and_one_of_an_unknown_class_never_qualify() -> None:
    good = summary(100, 110)
    assert d.judge("cancelled", good, EXERCISE).misses == ("outcome",)
    assert d.judge(None, good, EXERCISE).misses == ("outcome",)
    assert d.judge("completed", good, EXERCISE, class_known=False).misses == ("class",)


def test_too_few_tokens_miss_min_tokens() -> None:
    assert d.judge("completed", summary(1, 2), Limits(min_tokens=3)).misses == ("min_tokens",)


def test_minimum_samples_for_rank_bounds() -> None:
    assert [d.min_n_two_sided(q) for q in (0.99, 0.95, 0.90)] == [368, 72, 36]
    assert [d.min_n_upper(q) for q in (0.99, 0.95, 0.90)] == [299, 59, 29]


@given(st.integers(1, 999), st.integers(1, 10_000))
def test_nearest_rank_is_the_smallest_rank_that_covers_q(permille: int, n: int) -> None:
    rank = d.nearest_rank(permille, n)
    q = Fraction(permille, 1000)
    assert Fraction(rank, n) >= q and (rank == 1 or Fraction(rank - 1, n) < q)


def test_wilson_interval_against_a_published_example() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, 81 of 263: 0.2553 to 0.3662
    low, high = d.wilson(81, 263)
    assert low == pytest.approx(0.2553, abs=5e-5) and high == pytest.approx(0.3662, abs=5e-5)
    assert d.wilson(0, 0) == (None, None)
    assert d.wilson(0, 10)[0] == 0.0 and d.wilson(10, 10)[1] == pytest.approx(1.0)


def test_binomial_cdf_sums_to_one() -> None:
    assert d.binomial_cdf(3, 10, 0.5) == pytest.approx((1 + 10 + 45 + 120) / 1024)
    assert math.isclose(d.binomial_cdf(10, 10, 0.3), 1.0)


def test_ratio_of_nothing_is_undefined() -> None:
    assert d.ratio(0, 0) is None and d.ratio(0, 5) == 0.0


def test_finish_reasons_are_folded_to_the_five_of_the_contract() -> None:
    seen = {
        d.normalise_finish(r)
        for r in ("stop", "eos_token", "length", "tool_calls", "function_call", "content_filter", "x")
    }
    assert seen == {"stop", "length", "tool_calls", "content_filter", "other"}
