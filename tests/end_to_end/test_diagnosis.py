"""What was injected against what is diagnosed: fifty seeded answers of each kind, through a real nginx."""

from pathlib import Path

import pytest

from benchmarks.diagnosis_confusion import EXPECTED, ON_TIME, run
from sloscope.output import print_rows
from tests.end_to_end.support import need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
RUNS = 50
# A busy machine can stop a process for a tenth of a second, which then is late for a reason of its own.
STRAY = 2


def test_buffers_and_stalls_are_told_apart(tmp_path: Path) -> None:
    need("nginx")
    table = run(RUNS, tmp_path)
    print_rows(table)
    assert [row["injected"] for row in table] == list(EXPECTED)
    for row in table:
        assert row["runs"] == RUNS
        assert row["right"] >= RUNS - STRAY, row
        if row["expected"] == "buffered_delivery":
            assert row["seen_to_burst"] >= RUNS - STRAY, "the hop did not buffer, so nothing was tested"
            assert row.get("decoder_stall", 0) == 0, row
        else:
            assert row["seen_to_burst"] == 0, row
            assert row.get("buffered_delivery", 0) == 0, row
        if row["expected"] == ON_TIME:
            assert row.get("decoder_stall", 0) <= STRAY, row
