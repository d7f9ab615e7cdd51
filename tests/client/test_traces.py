"""Trace files and descriptions in, rows out; every refusal names file, line, field, value and what is accepted."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloscope.client import traces
from sloscope.client.traces import Arrivals, Lengths, servegen
from sloscope.client.traces.arrivals import KINDS
from sloscope.client.traces.text import TraceText
from sloscope.errors import TraceError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
    "2023-11-16 18:17:04.0319601,110,27\r\n"
)
MOONCAKE = (
    '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 27, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 3]}\n'
    '{"timestamp": 1030, "input_length": 512, "output_length": 7, "hash_ids": [9]}\n'
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,API log\n"
    "118.5,GPT-4,417,276,693,Conversation log\n"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n0.052,3180,8\n"
LENGTHS_ALONE = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
)
# Ten minutes of half a request a second, ten minutes of nothing, ten of two.
SERVEGEN = "600,0.5,2,Gamma,0.25,8.0\n1200,0,,,,\n1800,2.0,1.5,Weibull,0.7,0.3\n"


def write(tmp_path: Path, text: str, name: str = "trace") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return str(path)


def test_azure_keeps_the_seventh_digit_of_a_second(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, AZURE))
    # 04.0319600 − 03.9799600 = 0.0520000 s; the third row is 100 ns later.
    assert [row.offset_ns for row in trace.rows] == [0, 52_000_000, 52_000_100]
    assert [(row.prompt_tokens, row.output_tokens, row.line) for row in trace.rows] == [
        (4808, 10, 2),
        (3180, 8, 3),
        (110, 27, 4),
    ]
    assert trace.format == "azure" and trace.reordered == 0


def test_azure_crosses_midnight_and_knows_more_columns(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens,NumImages\n2024-02-28 23:59:59.5,7,1,0\n2024-02-29 00:00:00.25,8,2,1\n"
    )
    assert [row.offset_ns for row in traces.load(write(tmp_path, text)).rows] == [0, 750_000_000]


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    text = "".join(
        f'{{"at_s": {at}, "prompt_tokens": 1, "output_tokens": {n}}}\n' for at, n in [(2, 1), (1, 2), (3, 3)]
    )
    trace = traces.load(write(tmp_path, text))
    assert trace.reordered == 1
    assert [(row.offset_ns, row.output_tokens) for row in trace.rows] == [(0, 2), (10**9, 1), (2 * 10**9, 3)]


def test_jsonl_takes_class_tenant_and_cap_and_exact_decimals(tmp_path: Path) -> None:
    text = (
        '\ufeff{"at_s": 0.1, "prompt_tokens": 3, "output_tokens": 4}\n\n'
        '{"at_s": 0.3, "prompt_tokens": 3, "output_tokens": 4, "class": "bulk", "tenant": "t1", "max_tokens": 9}\n'
    )
    first, second = traces.load(write(tmp_path, text)).rows
    assert (first.class_name, first.tenant, first.max_tokens) == ("", "", None)
    assert second == traces.TraceRow(200_000_000, 3, 4, 3, "bulk", "t1", 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AZURE.replace("3180", "-5"), "line 3: ContextTokens: '-5' is not accepted; accepted: a whole number"),
        (AZURE.replace(",27", ",0"), "line 4: GeneratedTokens: '0'"),
        (AZURE.replace(",27", ""), "line 4: row"),
        (AZURE.replace("18:17:04.0319601", "18:61:04"), "line 4: TIMESTAMP: '2023-11-16 18:61:04'"),
        (
            "TIMESTAMP,Context\n",
            "line 1: header: 'TIMESTAMP,Context' is not accepted; accepted: a column ContextTokens",
        ),
        ("a;b;c\n", "line 1: header 'a;b;c' is not known"),
        ("", "line 1: header '' is not known"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no rows"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 1: at_s: '-1'"),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 1: at_s: 'nan'"),
        ('{"at_s": 1, "prompt_tokens": 1.5, "output_tokens": 1}', "line 1: prompt_tokens: '1.5'"),
        ('{"at_s": 1, "prompt_tokens": true, "output_tokens": 1}', "line 1: prompt_tokens: 'True'"),
        ('{"at_s": 1, "prompt_tokens": 1}', "line 1: output_tokens: 'None'"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1, "prompt": "x"}', "line 1: prompt: 'x'"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}\n[1]', "line 2: row: '[1]'"),
        ('{"at_s": 1,', "line 1: row"),
        ('{"at_s": "1", "prompt_tokens": 1, "output_tokens": 1}', "line 1: at_s: '1'"),
        (MOONCAKE.replace("1100", "0"), "line 2: input_length: '0' is not accepted; accepted: a whole number"),
        (MOONCAKE.replace("27, ", '"27", '), "line 1: timestamp: '27'"),
        (MOONCAKE.replace("[7, 8, 3]", "[7]"), "line 2: hash_ids: '1 ids' is not accepted; accepted: 3: one for each"),
        (MOONCAKE.replace("[7, 8, 3]", "[7, -8, 3]"), "line 2: hash_ids: '[7, -8, 3]'"),
        (BURSTGPT.replace(",18,", ",-1,"), "line 2: Response tokens: '-1'"),
        (BURSTGPT.replace("5,ChatGPT", "inf,ChatGPT"), "line 2: Timestamp: 'inf'"),
        (BURSTGPT.replace("Response tokens", "Response"), "line 1: header"),
        (BURSTGPT.splitlines()[0] + "\n5,GPT-4,472,0,472,API log\n", "has no rows; 1 rows are failed requests"),
        (VIDUR.replace("0.052", "soon"), "line 3: arrived_at: 'soon' is not accepted; accepted: seconds"),
        (VIDUR.replace("3180,8", "3180,8.5"), "line 3: num_decode_tokens: '8.5'"),
        (VIDUR.replace("num_decode", "num_all"), "line 1: header"),
        (LENGTHS_ALONE, "line 1: arrived_at: is missing; accepted: that column, or --arrivals with --rate"),
        (SERVEGEN.replace("Gamma", "Pareto"), "line 1: family: 'Pareto' is not accepted; accepted: Gamma or Weibull"),
        (SERVEGEN.replace("0.25", "x"), "line 1: shape: 'x' is not accepted; accepted: a number from 0.01"),
        (SERVEGEN.replace("1200", "600"), "line 2: start: '600' is not accepted; accepted: above 600, the row before"),
        (SERVEGEN.replace("0.5,2,", "-1,2,"), "line 1: rate: '-1'"),
        (SERVEGEN + "1800,1,1,Gamma\n", "line 4: row"),
    ],
)
def test_a_bad_trace_is_one_line_with_place_value_and_what_is_accepted(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.load(write(tmp_path, text))
    assert said in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        traces.load(str(tmp_path / "none.csv"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        traces.load(str(tmp_path / "binary"))


def test_a_forced_format_overrides_the_header(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: row"):
        traces.load(write(tmp_path, AZURE), format="jsonl")
    with pytest.raises(TraceError, match="accepted: azure, burstgpt, jsonl, mooncake, servegen, vidur, synthetic"):
        traces.load(write(tmp_path, AZURE), format="burst")


def test_a_limit_reads_no_further_than_its_rows(tmp_path: Path) -> None:
    broken = AZURE + "rubbish\r\n"
    assert len(traces.load(write(tmp_path, broken), limit=3).rows) == 3
    with pytest.raises(TraceError, match="line 5"):
        traces.load(write(tmp_path, broken), limit=4)


def test_synthetic_rows_are_the_same_for_the_same_seed_and_differ_otherwise() -> None:
    source = "synthetic:poisson?rate=10&n=50"
    assert traces.load(source, seed=1) == traces.load(source, seed=1)
    assert traces.load(source, seed=1).rows != traces.load(source, seed=2).rows
    assert traces.load(source, seed=1, limit=20).rows == traces.load(source, seed=1).rows[:20]


def test_synthetic_arrivals_and_lengths_have_the_asked_rate_and_medians() -> None:
    rows = traces.load("synthetic:poisson?rate=50&n=4000&prompt_p50=200&output_p50=80&output_sigma=0.5", seed=3).rows
    # 3,999 gaps of 20 ms are 79.98 s; their sum spreads by 20 ms·√3999 = 1.26 s, four times that is 5.1.
    assert abs(rows[-1].offset_ns / 1e9 - 79.98) < 5.1
    # The median of 4,000 draws spreads by 1.2533·σ/√4000 of its logarithm: 1.6 % and 1.0 %; four times that.
    assert abs(sorted(row.prompt_tokens for row in rows)[2000] - 200) <= 200 * 0.065
    assert abs(sorted(row.output_tokens for row in rows)[2000] - 80) <= 80 * 0.045


def test_constant_arrivals_are_evenly_spaced_and_sigma_zero_gives_one_length() -> None:
    rows = traces.load("synthetic:constant?rate=4&n=3&prompt_sigma=0&output_sigma=0&prompt_p50=9&output_p50=5").rows
    assert [row.offset_ns for row in rows] == [0, 250_000_000, 500_000_000]
    assert {(row.prompt_tokens, row.output_tokens) for row in rows} == {(9, 5)}


@pytest.mark.parametrize(
    "source",
    [
        "synthetic:weekly?n=3",
        "synthetic:poisson?speed=3",
        "synthetic:poisson?cv=3",
        "synthetic:gamma?cv=0",
        "synthetic:burst?burst_size=1.5",
        "synthetic:burst?burst_on=1.5",
        "synthetic:poisson?rate=0",
        "synthetic:poisson?rate=nan",
        "synthetic:poisson?rate=-1",
        "synthetic:poisson?n=2.5",
        "synthetic:poisson?n=fast",
        "synthetic:poisson?output_p50=",
    ],
)
def test_a_bad_description_is_refused(source: str) -> None:
    with pytest.raises(TraceError, match="accepted: "):
        traces.load(source)


def test_many_mooncake_requests_stand_on_one_millisecond_and_keep_their_blocks(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, MOONCAKE))
    assert trace.format == "mooncake"
    assert [row.offset_ns for row in trace.rows] == [0, 0, 1_003_000_000]  # 1030 − 27 = 1003 ms
    assert [(row.prompt_tokens, row.output_tokens, row.blocks) for row in trace.rows] == [
        (600, 5, (7, 8)),
        (1100, 6, (7, 8, 3)),
        (512, 7, (9,)),
    ]


def test_a_mooncake_block_that_is_not_full_may_be_unnamed(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, MOONCAKE.replace("[7, 8, 3]", "[7, 8]")))
    assert trace.rows[1].blocks == (7, 8)


def test_a_burstgpt_row_without_response_tokens_is_a_failure_left_out_and_counted(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, BURSTGPT))
    assert (trace.format, trace.left_out) == ("burstgpt", 1)
    # 118.5 − 5 = 113.5 s; the failure stood on line 3.
    assert [(row.offset_ns, row.prompt_tokens, row.output_tokens, row.line) for row in trace.rows] == [
        (0, 472, 18, 2),
        (113_500_000_000, 417, 276, 4),
    ]


def test_newer_burstgpt_files_have_more_columns(tmp_path: Path) -> None:
    text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    trace = traces.load(write(tmp_path, text + "9,,3.5,GPT-4,7,8,15,API log\n"))
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(7, 8)]


def test_vidur_seconds_become_nanoseconds(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, VIDUR))
    assert trace.format == "vidur"
    assert [(row.offset_ns, row.prompt_tokens, row.output_tokens) for row in trace.rows] == [
        (0, 4808, 10),
        (52_000_000, 3180, 8),
    ]


def test_lengths_without_arrivals_take_synthetic_ones(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, LENGTHS_ALONE), arrivals=Arrivals("constant", 4.0))
    assert (trace.format, trace.arrivals) == ("vidur", "constant at 4 req/s")
    assert [(row.offset_ns, row.prompt_tokens, row.output_tokens) for row in trace.rows] == [
        (0, 3772, 54),
        (250_000_000, 2015, 156),
    ]


def test_servegen_windows_hold_the_arrivals_of_their_own_rate(tmp_path: Path) -> None:
    counts = [[0, 0, 0] for _ in range(40)]
    for seed, found in enumerate(counts):
        trace = traces.load(write(tmp_path, SERVEGEN), seed=seed, lengths=Lengths(prompt_p50=9, prompt_sigma=0))
        assert trace.format == "servegen" and {row.prompt_tokens for row in trace.rows} == {9}
        for row in trace.rows:
            found[row.line - 1] += 1
    first, silent, last = (sum(column) for column in zip(*counts, strict=True))
    # 40 seeds · 600 s · 0.5 = 12,000 and · 2 = 48,000 arrivals; a renewal count spreads by cv·√n: Gamma of shape ¼ has
    # cv 2, so 219; Weibull of shape 0.7 has cv 1.46, so 320. Four times that.
    assert abs(first - 12_000) <= 4 * 219 and silent == 0 and abs(last - 48_000) <= 4 * 320


def test_servegen_arrivals_rise_and_stay_inside_their_windows(tmp_path: Path) -> None:
    text = TraceText("s", SERVEGEN.splitlines())
    stamps = list(servegen.arrivals(servegen.windows(text), random.Random(3)))
    assert [at for _, at in stamps] == sorted(at for _, at in stamps)
    assert all(window.start_s <= at < window.end_s for window, at in stamps)
    assert {window.end_s for window, _ in stamps} == {1200.0, 2400.0}  # the last lasts as long as the shortest


@pytest.mark.parametrize("text", [AZURE, BURSTGPT, MOONCAKE, VIDUR, SERVEGEN])
def test_blank_lines_and_line_ends_of_any_kind_change_nothing(tmp_path: Path, text: str) -> None:
    plain = traces.load(write(tmp_path, text.replace("\r\n", "\n")))
    crlf = traces.load(write(tmp_path, "\ufeff" + text.replace("\r\n", "\n").replace("\n", "\r\n") + "\r\n"))
    assert plain.rows == crlf.rows


def test_given_lengths_are_refused_where_the_trace_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"--synthetic-lengths: trace .* has lengths; accepted: with servegen"):
        traces.load(write(tmp_path, VIDUR), lengths=Lengths())


def test_a_huge_sigma_gives_long_prompts_and_no_overflow() -> None:
    rows = traces.load("synthetic:poisson?n=200&prompt_sigma=500").rows
    assert all(1 <= row.prompt_tokens <= 10_000_000 for row in rows)


def test_bursts_come_in_the_first_part_of_each_period() -> None:
    # 4 a burst at 2 req/s is a period of 2 s; the first half of it holds them, 250 ms apart.
    stamps = islice(Arrivals("burst", 2.0, burst_size=4, burst_on=0.5).offsets_ns(seed=1), 9)
    assert [ns / 1e9 for ns in stamps] == [0, 0.25, 0.5, 0.75, 2, 2.25, 2.5, 2.75, 4]


def test_a_burst_may_be_one_instant() -> None:
    rows = traces.load("synthetic:burst?rate=10&n=6&burst_size=3&burst_on=0").rows
    assert [row.offset_ns for row in rows] == [0, 0, 0, 300_000_000, 300_000_000, 300_000_000]


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0), ("constant", 0.0)])
def test_gaps_have_the_asked_mean_and_variation(kind: str, cv: float) -> None:
    stamps = list(islice(Arrivals(kind, 20.0, cv=cv).offsets_ns(seed=4), 20_001))
    gaps = [(after - before) / 1e9 for before, after in pairwise(stamps)]
    # The mean of 20,000 gaps of 50 ms spreads by 50 ms · cv / √20000; four times that, and a nanosecond of rounding.
    assert abs(mean(gaps) - 0.05) <= 4 * 0.05 * cv / 20_000**0.5 + 1e-9
    # The spread of an estimated cv is below cv · √((kurtosis − 1) / 4n): 6 % for a gamma of cv 3 (kurtosis 57).
    assert abs(pstdev(gaps) / 0.05 - cv) <= 4 * cv * (58 / 80_000) ** 0.5 + 1e-6


@given(
    kind=st.sampled_from(KINDS),
    rate=st.floats(0.01, 1e4),
    cv=st.floats(0.1, 5),
    size=st.integers(1, 50),
    on=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    n=st.integers(1, 200),
)
@settings(max_examples=200, deadline=None)
def test_arrivals_start_at_zero_never_fall_and_repeat(
    kind: str, rate: float, cv: float, size: int, on: float, seed: int, n: int
) -> None:
    asked = Arrivals(kind, rate, cv=cv, burst_size=size, burst_on=on)
    stamps = list(islice(asked.offsets_ns(seed), n))
    assert stamps[0] == 0 and stamps == sorted(stamps)
    assert stamps == list(islice(asked.offsets_ns(seed), n))
    if kind == "constant":
        assert abs(stamps[-1] - (n - 1) * 1e9 / rate) <= 1 + n * 1e-6
    if kind == "burst":
        # n arrivals began n // size whole periods, and the last lies in the on part of its own.
        period_ns = size * 1e9 / rate
        assert stamps[-1] <= ((n - 1) // size + on) * period_ns + 1


@given(
    pairs=st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 999)), min_size=1, max_size=60),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_new_arrivals_keep_every_pair_and_their_order(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]], kind: str, seed: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    trace = traces.load(str(path), seed=seed, arrivals=Arrivals(kind, 7.0))
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == pairs
    assert trace == traces.load(str(path), seed=seed, arrivals=Arrivals(kind, 7.0))
