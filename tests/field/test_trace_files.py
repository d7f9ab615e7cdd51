"""Recorded traces of real services through the loaders."""

from __future__ import annotations

from pathlib import Path

from sloscope import contract as contracts
from sloscope.client import schedule, traces


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
