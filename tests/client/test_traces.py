"""Trace files and descriptions in, rows out; every refusal names file, line, field, value and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sloscope.client import traces
from sloscope.errors import TraceError

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
    "2023-11-16 18:17:04.0319601,110,27\r\n"
)


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
    with pytest.raises(TraceError, match="accepted: azure, jsonl, synthetic"):
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
        "synthetic:gamma?n=3",
        "synthetic:poisson?speed=3",
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


def test_a_huge_sigma_gives_long_prompts_and_no_overflow() -> None:
    rows = traces.load("synthetic:poisson?n=200&prompt_sigma=500").rows
    assert all(1 <= row.prompt_tokens <= 10_000_000 for row in rows)
