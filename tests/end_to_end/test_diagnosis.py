"""What was injected against what is diagnosed: fifty seeded answers of each kind, through a real nginx."""

import json
from pathlib import Path

import pytest

from benchmarks.diagnosis_confusion import EXPECTED, ON_TIME, run
from sloscope.demo.processes import ask
from sloscope.output import print_rows
from tests.end_to_end.support import need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
RUNS = 50
# A busy machine can stop a process for a tenth of a second, which then is late for a reason of its own. One kind is
# never taken for another for all that.
STRAY = 10


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


BEFORE_ITS_SENDER = """
select
    count(*) filter (where receipt < forwarded) as client_before_sidecar,
    count(*) filter (where upstream < written) as sidecar_before_server,
    count(*) as events
from (
    select
        unnest(client_t_ns) as receipt,
        unnest(sidecar_forwarded_ns) as forwarded,
        unnest(sidecar_t_ns) as upstream,
        unnest(engine_written_ns) as written
    from chunks
    where len(client_t_ns) = len(sidecar_t_ns) and len(client_t_ns) = len(engine_written_ns)
)
"""


def test_nothing_is_received_before_it_was_sent(tmp_path: Path) -> None:
    run(1, tmp_path)
    (row,) = json.loads(ask("sql", BEFORE_ITS_SENDER, "--events", str(tmp_path / "events"), "--format", "json"))
    print(row)
    assert row["events"] > 100
    assert row["client_before_sidecar"] == row["sidecar_before_server"] == 0
