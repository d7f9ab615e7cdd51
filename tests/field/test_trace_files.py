"""Recorded traces of real services through the loaders."""

from __future__ import annotations

from pathlib import Path

import pytest

from sloscope import contract as contracts
from sloscope.client import schedule, traces
from sloscope.errors import TraceError


def test_the_azure_code_trace_is_read_to_its_last_line(field_data: Path) -> None:
    path = field_data / "traces" / "azure_llm_2023_code.csv"
    trace = traces.load(str(path))
    # The file: a header and 8,819 rows, the last without a line end. First 18:17:03.9799600, last 19:14:19.9280160.
    assert (trace.format, len(trace.rows), trace.reordered) == ("azure", 8819, 0)
    assert trace.rows[0] == traces.TraceRow(0, 4808, 10, 2)
    # 57 min 15.9480560 s = 3,435.948056 s
    assert trace.rows[-1] == traces.TraceRow(3_435_948_056_000, 549, 173, 8820)


def test_the_azure_trace_scales_to_a_rate_with_its_pairs_kept(field_data: Path) -> None:
    trace = traces.load(str(field_data / "traces" / "azure_llm_2023_code.csv"), limit=2000)
    fixed = schedule.build(trace.rows, contracts.from_shorthand("ttft:300"), schedule.Plan(rate=50.0))
    assert fixed.mean_rate is not None and abs(fixed.mean_rate - 50.0) < 1e-6
    assert [(row.prompt_tokens, row.output_tokens) for row in fixed.requests] == [
        (row.prompt_tokens, row.output_tokens) for row in trace.rows
    ]


def test_the_mooncake_trace_is_milliseconds_and_blocks_of_512(field_data: Path) -> None:
    trace = traces.load(str(field_data / "traces" / "mooncake_synthetic_trace.jsonl"))
    assert (trace.format, len(trace.rows), trace.reordered, trace.left_out) == ("mooncake", 3993, 0, 0)
    # Last line: "timestamp": 1022025, which is 17 minutes.
    assert trace.rows[-1].offset_ns == 1_022_025_000_000
    # First line: 40,160 tokens, ids 0 to 78, and 78 · 512 = 39,936 < 40,160 ≤ 79 · 512. Line two has the same stamp.
    assert trace.rows[0] == traces.TraceRow(0, 40_160, 6, 1, blocks=tuple(range(79)))
    assert trace.rows[1].offset_ns == 0
    assert all(len(row.blocks) == -(-row.prompt_tokens // 512) for row in trace.rows)


def test_vidurs_form_of_the_azure_trace_is_the_azure_trace(field_data: Path) -> None:
    azure = traces.load(str(field_data / "traces" / "azure_llm_2023_code.csv"))
    vidur = traces.load(str(field_data / "traces" / "vidur_splitwise_code.csv"))
    assert (vidur.format, len(vidur.rows)) == ("vidur", 8819)
    # Vidur's writer kept six digits of a second.
    assert all(abs(a.offset_ns - v.offset_ns) <= 1000 for a, v in zip(azure.rows, vidur.rows, strict=True))
    assert [row[1:4] for row in azure.rows] == [row[1:4] for row in vidur.rows]


def test_a_trace_of_lengths_alone_is_given_arrivals(field_data: Path) -> None:
    path = str(field_data / "traces" / "vidur_arxiv_summarization_stats.csv")
    with pytest.raises(TraceError, match="arrived_at: is missing"):
        traces.load(path)
    trace = traces.load(path, seed=2, arrivals=traces.Arrivals("gamma", 10.0, cv=2.0))
    assert len(trace.rows) == 28_257 and trace.rows[0][1:4] == (3772, 54, 2)
    # 28,256 gaps of 0.1 s; their sum spreads by 0.1 · 2 · √28256 = 33.6 s, four times that is 134.
    assert abs(trace.rows[-1].offset_ns / 1e9 - 2825.6) <= 134


def test_servegen_windows_of_two_weeks_are_filled_at_their_rates(field_data: Path) -> None:
    path = str(field_data / "traces" / "servegen_language_m-large_chunk-89-trace.csv")
    trace = traces.load(path, seed=1, limit=60_000)
    assert (trace.format, len(trace.rows)) == ("servegen", 60_000)
    # Rows of the file until the last arrival: Σ rate · 600 s over whole windows is what should have come.
    lines = (field_data / "traces" / "servegen_language_m-large_chunk-89-trace.csv").read_text().splitlines()
    whole = trace.rows[-1].line - 1
    came = sum(row.line <= whole for row in trace.rows)
    due = sum(float(line.split(",")[1]) * 600 for line in lines[:whole])
    # cv of the busy windows is up to 4: 4 · √60000 is 980, four times that 3,920.
    assert abs(came - due) <= 3_920 and due > 50_000


@pytest.mark.parametrize("name", ["llmservingsim_example_trace.jsonl", "inference_perf_otel_simple_chain.json"])
def test_a_trace_of_another_tool_is_one_line_that_says_what_is_read(field_data: Path, name: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.load(str(field_data / "traces" / name))
    assert "line 1: " in str(caught.value) and "accepted: " in str(caught.value) and "\n" not in str(caught.value)
