"""The schedule is fixed and pure: the same rows, plan and seed give the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloscope import contract as contracts
from sloscope.client.schedule import Plan, PromptText, Schedule, arrival_cv, build, peak_rate, summary
from sloscope.client.traces import Arrivals, TraceRow, load
from sloscope.errors import ConfigError, ContractError

CONTRACT = contracts.from_shorthand("ttft:300 itl_max:30")
S = 1_000_000_000
ROWS = [TraceRow(0, 100, 10, 1), TraceRow(1 * S, 200, 20, 2), TraceRow(4 * S, 300, 31, 3)]


def offsets(plan: Plan) -> list[int]:
    return [row.offset_ns for row in build(ROWS, CONTRACT, plan).requests]


def test_without_scaling_the_trace_is_the_schedule() -> None:
    assert offsets(Plan()) == [0, 1 * S, 4 * S]


def test_a_rate_is_the_mean_over_the_gaps() -> None:
    # 3 requests have 2 gaps over 4 s: 0.5 req/s. At 2 req/s every offset shrinks to a quarter.
    fixed = build(ROWS, CONTRACT, Plan(rate=2.0))
    assert [row.offset_ns for row in fixed.requests] == [0, S // 4, 1 * S]
    assert fixed.mean_rate == 2.0


def test_the_mean_rate_of_bursts_has_the_pause_behind_the_last_one() -> None:
    # 10 in the first 100 ms of every second: 20 arrivals, of which the next is due at 2 s.
    loaded = load("synthetic:burst?rate=10&n=20")
    plain = build(loaded.rows, CONTRACT, Plan(until_ns=loaded.until_ns))
    assert (loaded.until_ns, plain.span_ns) == (2 * S, 1_090_000_000)
    assert (plain.mean_rate, peak_rate([each.offset_ns for each in plain.requests])) == (10.0, 10)
    # At 5 req/s everything takes twice as long.
    slow = build(loaded.rows, CONTRACT, Plan(until_ns=loaded.until_ns, rate=5.0))
    assert (slow.mean_rate, slow.span_ns) == (5.0, 2_180_000_000)
    # One burst at one instant has a rate, too.
    instant = load("synthetic:burst?rate=10&n=10&burst_on=0")
    assert build(instant.rows, CONTRACT, Plan(until_ns=instant.until_ns)).mean_rate == 10.0
    # What a limit cuts off is followed by nobody knows what: 9 gaps in 90 ms.
    assert build(loaded.rows, CONTRACT, Plan(until_ns=loaded.until_ns, limit=10)).mean_rate == pytest.approx(100.0)


def test_a_dry_run_of_bursts_drawn_for_a_rate_prints_that_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 2}\n' * 20)
    loaded = load(str(trace), arrivals=Arrivals("burst", 10.0))
    assert summary(build(loaded.rows, CONTRACT, Plan(until_ns=loaded.until_ns)))["mean_rate_rps"] == 10.0
    assert load("synthetic:poisson?rate=10&n=20").until_ns is None


def test_a_limit_counts_before_the_rate() -> None:
    # The first two rows alone: 1 gap over 1 s; at 4 req/s the gap is 250 ms.
    assert offsets(Plan(rate=4.0, limit=2)) == [0, S // 4]


def test_a_speedup_divides_every_gap() -> None:
    assert offsets(Plan(speedup=2.5)) == [0, 400_000_000, 1_600_000_000]  # 1/2.5, 4/2.5 s


def test_prompts_can_be_scaled_apart_and_pairs_stay_together() -> None:
    plain = build(ROWS, CONTRACT, Plan(scale_lengths=0.5)).requests
    short = build(ROWS, CONTRACT, Plan(scale_lengths=0.5, scale_prompts=0.1)).requests
    assert [r.stop_after for r in short] == [r.stop_after for r in plain]
    assert [r.prompt_tokens for r in short] == [max(1, round(row.prompt_tokens / 10)) for row in ROWS]


def test_lengths_scale_together_and_never_below_one_token() -> None:
    fixed = build(ROWS, CONTRACT, Plan(scale_lengths=0.05))
    # 100, 200, 300 → 5, 10, 15; 10, 20, 31 → 0.5, 1, 1.55, half up: 1, 1, 2
    assert [(row.prompt_tokens, row.output_tokens) for row in fixed.requests] == [(5, 1), (10, 1), (15, 2)]


def test_natural_lengths_stop_by_themselves_under_caps_drawn_apart() -> None:
    rows = load("synthetic:poisson?n=4000&output_p50=100&output_sigma=1", seed=5).rows
    fixed = build(rows, CONTRACT, Plan(seed=5))
    assert all(row.stop_after == row.output_tokens for row in fixed.requests)
    capped = sum(row.capped for row in fixed.requests)
    # 0.05·0.5 + 0.15·0.1 + 0.3·0.01 = 0.043 of 4,000 is 172; √(4000·0.043·0.957) = 12.8, four times that is 51.
    assert abs(capped - 172) <= 51
    caps = {row.max_tokens for row in fixed.requests}
    lengths = sorted(row.output_tokens for row in fixed.requests)
    # Ranks ceil(0.5·4000), ceil(0.9·4000), ceil(0.99·4000), and twice the longest.
    assert caps == {lengths[1999], lengths[3599], lengths[3959], 2 * lengths[-1]}


def test_a_cap_of_the_trace_is_kept() -> None:
    fixed = build([ROWS[0]._replace(max_tokens=6)], CONTRACT, Plan())
    assert (fixed.requests[0].max_tokens, fixed.requests[0].stop_after, fixed.requests[0].capped) == (6, 10, True)


def test_forced_lengths_have_no_natural_stop_and_their_cap_is_the_length() -> None:
    fixed = build(ROWS, CONTRACT, Plan(natural=False))
    assert [(row.max_tokens, row.stop_after) for row in fixed.requests] == [(10, None), (20, None), (31, None)]


def test_asking_for_one_thing_leaves_the_draws_of_the_others_alone() -> None:
    rows = load("synthetic:poisson?n=300", seed=1).rows
    bare = build(rows, CONTRACT, Plan(seed=9)).requests
    asked = Plan(seed=9, tenants=("a", "b"), cancel_rate=0.5, slow_readers=0.5, warmup="5")
    rich = build(rows, CONTRACT, asked).requests
    assert [row.max_tokens for row in bare] == [row.max_tokens for row in rich]
    assert [row.text_seed for row in bare] == [row.text_seed for row in rich]
    assert [replace(row, tenant="", cancel_after=None, slow_reader=False, warmup=False) for row in rich] == list(bare)


def test_the_schedule_is_the_same_for_the_same_seed() -> None:
    rows = load("synthetic:poisson?n=300", seed=1).rows
    plan = Plan(seed=4, tenants=("a", "b", "c"), cancel_rate=0.3)
    assert build(rows, CONTRACT, plan) == build(rows, CONTRACT, plan)
    assert build(rows, CONTRACT, plan) != build(rows, CONTRACT, replace(plan, seed=5))


def test_warmup_is_a_number_of_rows_or_a_time() -> None:
    assert [row.warmup for row in build(ROWS, CONTRACT, Plan(warmup="2")).requests] == [True, True, False]
    assert [row.warmup for row in build(ROWS, CONTRACT, Plan(warmup="1s")).requests] == [True, False, False]
    assert [row.warmup for row in build(ROWS, CONTRACT, Plan(warmup="0")).requests] == [False, False, False]


def test_a_cancelled_answer_stops_after_an_event_that_it_has() -> None:
    rows = load("synthetic:poisson?n=400", seed=1).rows
    fixed = build(rows, CONTRACT, Plan(cancel_rate=1.0))
    for row in fixed.requests:
        assert row.output_tokens == 1 if row.cancel_after is None else 1 <= row.cancel_after < row.output_tokens
    share = build(rows, CONTRACT, Plan(cancel_rate=0.25)).requests
    # 100 of 400; √(400·0.25·0.75) = 8.7, four times that is 35.
    assert abs(sum(row.cancel_after is not None for row in share) - 100) <= 35


def test_an_unknown_class_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(
        ContractError, match="class: 'bulk' \\(trace line 2\\) is not in the contract; accepted: default"
    ):
        build([ROWS[0], ROWS[1]._replace(class_name="bulk")], CONTRACT, Plan())
    with pytest.raises(ContractError, match="'gold'"):
        build(ROWS, CONTRACT, Plan(class_name="gold"))


def test_a_tenant_that_would_end_a_header_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        build(ROWS, CONTRACT, Plan(tenants=("a\r\nx: y",)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(rate=2.0, speedup=2.0),
        Plan(rate=0.0),
        Plan(speedup=-1.0),
        Plan(rate=float("nan")),
        Plan(scale_lengths=0.0),
        Plan(scale_prompts=-1.0),
        Plan(limit=0),
        Plan(cancel_rate=1.5),
        Plan(slow_readers=-0.1),
        Plan(warmup="soon"),
        Plan(warmup="-1"),
    ],
)
def test_options_out_of_range_are_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="accepted: "):
        build(ROWS, CONTRACT, plan)


def test_a_rate_for_arrivals_at_one_instant_is_refused() -> None:
    with pytest.raises(ConfigError, match="one instant"):
        build([ROWS[0], ROWS[0]], CONTRACT, Plan(rate=5.0))


def test_the_tightest_first_token_limit_of_the_classes_that_occur_counts() -> None:
    contract = contracts.parse(
        'version = 1\ndefault_class = "a"\n[classes.a]\nttft = "500ms"\n[classes.b]\nttft = "200ms"\n'
        '[classes.c]\nttft = "1ms"\n'
    )
    rows = [ROWS[0], ROWS[1]._replace(class_name="b")]
    assert build(rows, contract, Plan()).ttft_limit_ns == 200_000_000
    assert build(ROWS, contracts.from_shorthand("e2e:1000"), Plan()).ttft_limit_ns is None


def test_a_prompt_has_as_many_words_as_tokens_were_asked_for() -> None:
    text = PromptText(seed=1)
    for tokens in (1, 7, 65_536, 200_001):
        prompt = text.cut(tokens, text_seed=65_500)
        assert prompt.startswith(b" ") and prompt.count(b" ") == tokens
        assert prompt.decode().replace(" ", "").isalpha()
    assert text.cut(50, 7) == PromptText(seed=1).cut(50, 7) != text.cut(50, 8)


def test_a_dry_run_prints_counts_by_nearest_rank() -> None:
    row = summary(build(ROWS, CONTRACT, Plan(warmup="1")))
    assert (row["requests"], row["span_s"], row["mean_rate_rps"], row["warmup"]) == (3, 4.0, 0.5, 1)
    assert (row["prompt_tokens_p50"], row["prompt_tokens_p90"], row["output_tokens_max"]) == (200, 300, 31)
    assert (row["prompt_tokens_sum"], row["output_tokens_p99"], row["classes"]) == (600, 31, "default=3")
    assert (row["tenants"], row["shared_prefix_share"], row["slow_readers"]) == (None, None, 0)


def test_a_share_of_the_readers_is_slow() -> None:
    rows = load("synthetic:poisson?n=400", seed=1).rows
    assert not any(row.slow_reader for row in build(rows, CONTRACT, Plan()).requests)
    share = build(rows, CONTRACT, Plan(slow_readers=0.25)).requests
    # 100 of 400; √(400·0.25·0.75) = 8.7, four times that is 35.
    assert abs(sum(row.slow_reader for row in share) - 100) <= 35


def test_the_busiest_second_may_begin_anywhere() -> None:
    assert peak_rate([0, 900_000_000, 1_100_000_000, 1_800_000_000, 3 * S]) == 3  # from 0.9 s on
    assert peak_rate([0, S]) == 1  # a second is half open
    assert peak_rate([0, 0, 0]) == 3


def test_the_arrival_cv_is_that_of_the_gaps() -> None:
    # Gaps of 1 and 3 s: mean 2, standard deviation 1.
    assert arrival_cv([0, S, 4 * S]) == 0.5
    assert arrival_cv([0, S, 2 * S]) == 0.0
    assert arrival_cv([0, S]) is None and arrival_cv([0, 0, 0]) is None


# --- parts ------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), parts=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_schedule_are_the_schedule(n: int, parts: int, seed: int) -> None:
    plan = Plan(seed=seed, tenants=("a", "b"), cancel_rate=0.3, slow_readers=0.3, rate=9.0 if n > 1 else None)
    whole = build(load(f"synthetic:poisson?n={n}", seed=seed).rows, CONTRACT, plan)
    split = [whole.part(number, parts) for number in range(parts)]
    merged = sorted((row for part in split for row in part.requests), key=lambda row: row.index)
    assert tuple(merged) == whole.requests
    assert [row.index % parts for part in split for row in part.requests] == [
        number for number, part in enumerate(split) for _ in part.requests
    ]
    # Every part ends when the whole does.
    assert {part.span_ns for part in split} == {whole.span_ns}


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(1, 9999), st.integers(1, 999)), min_size=1, max_size=40
    ),
    rate=st.none() | st.floats(0.1, 1000),
    scale=st.floats(0.01, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_a_schedule_keeps_order_pairs_and_the_asked_rate(
    rows: list[tuple[int, int, int]], rate: float | None, scale: float, seed: int
) -> None:
    rows = sorted(rows)
    trace = [TraceRow(at - rows[0][0], a, b, line) for line, (at, a, b) in enumerate(rows, start=1)]
    if trace[-1].offset_ns < 1000:  # arrivals of one instant have no rate, and nanoseconds bound how exact one can be
        rate = None
    plan = Plan(rate=rate, scale_lengths=scale, seed=seed)
    fixed = build(trace, CONTRACT, plan)
    assert fixed == build(trace, CONTRACT, plan)
    assert all(before.offset_ns <= after.offset_ns for before, after in pairwise(fixed.requests))
    factor = Fraction(str(scale))
    for row, planned in zip(trace, fixed.requests, strict=True):
        for asked, got in ((row.prompt_tokens, planned.prompt_tokens), (row.output_tokens, planned.output_tokens)):
            assert got == max(1, int(asked * factor + Fraction(1, 2)))
    if rate is not None and fixed.mean_rate is not None:
        # Offsets are cut to whole nanoseconds.
        assert abs(fixed.span_ns - (len(rows) - 1) * S / rate) <= 1


# --- shared prefixes --------------------------------------------------------------------------------------------


def chains(*blocks: tuple[int, ...], tail: int = 0, plan: Plan | None = None) -> Schedule:
    """Requests a second apart whose prompts are these blocks, and `tail` tokens that no block names."""
    rows = [TraceRow(n * S, len(ids) * 512 + tail, 4, n + 1, blocks=ids) for n, ids in enumerate(blocks)]
    return build(rows, CONTRACT, plan or Plan())


@cache
def text_of(block_tokens: Fraction) -> PromptText:
    return PromptText(3, block_tokens)


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of what both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def words_shared(fixed: Schedule, a: int, b: int) -> int:
    text = text_of(fixed.block_tokens)
    first, second = (text.prompt(fixed.requests[n]).decode().split(" ")[1:] for n in (a, b))
    return common(first, second)


def test_prompts_share_exactly_the_chain_of_blocks_that_both_begin_with() -> None:
    fixed = chains((7, 8, 9), (7, 8, 10, 11), (8, 7))
    # Two blocks of 512; ids 9 and 10 differ in the first word of the third.
    assert words_shared(fixed, 0, 1) == 1024
    assert words_shared(fixed, 0, 2) == 0
    text = PromptText(3)
    assert [text.prompt(row).count(b" ") for row in fixed.requests] == [1536, 2048, 1024]


def test_the_same_chain_is_the_same_text_and_what_no_block_names_is_each_ones_own() -> None:
    fixed = chains((1, 2), (1, 2), tail=100)
    text = PromptText(3)
    first, second = (text.prompt(row) for row in fixed.requests)
    assert 1024 <= words_shared(fixed, 0, 1) < 1030 and first != second  # own texts share a word by chance


def test_scaled_prompts_keep_the_share_of_their_prefix() -> None:
    plain, eighth = chains((1, 2, 3), (1, 2, 4)), chains((1, 2, 3), (1, 2, 4), plan=Plan(scale_lengths=0.125))
    assert [row.prompt_tokens for row in eighth.requests] == [192, 192]  # 1536 / 8
    assert words_shared(eighth, 0, 1) == 128  # 1024 / 8
    # 1,024 of the second prompt's tokens are the first's: 1024 / 3072.
    assert summary(plain)["shared_prefix_share"] == summary(eighth)["shared_prefix_share"] == 1024 / 3072


def test_a_block_that_is_not_full_is_shared_as_far_as_it_goes() -> None:
    rows = [TraceRow(0, 600, 4, 1, blocks=(1, 2)), TraceRow(S, 700, 4, 2, blocks=(1, 2))]
    fixed = build(rows, CONTRACT, Plan())
    assert words_shared(fixed, 0, 1) == 600
    assert summary(fixed)["shared_prefix_share"] == 600 / 1300


@given(
    prompts=st.lists(st.lists(st.integers(0, 10**9), min_size=1, max_size=5), min_size=2, max_size=6),
    scale=st.sampled_from([0.05, 0.125, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_two_prompts_share_their_common_chain_up_to_a_few_words(
    prompts: list[list[int]], scale: float, seed: int
) -> None:
    fixed = chains(*(tuple(ids) for ids in prompts), plan=Plan(scale_lengths=scale, seed=seed))
    for a, b in pairwise(range(len(prompts))):
        # Where ids differ, so does one of the four words that spell them.
        least = int(common(prompts[a], prompts[b]) * fixed.block_tokens)
        most = min(fixed.requests[a].prompt_tokens, fixed.requests[b].prompt_tokens, least + 3)
        assert min(least, most) <= words_shared(fixed, a, b) <= most
