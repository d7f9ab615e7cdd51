"""The `sloscope_sql_` series: over which requests, and what becomes of them when there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.questions import Questions, published
from sloscope.clock import FakeClock
from sloscope.contract import from_shorthand
from sloscope.journal import JournalWriter
from tests.queries.journal_factory import MS, SECOND, new_id, write_request

HOUR = 3600 * SECOND
START = 1_700_000_000 * SECOND  # wall time of the stamp 0


def record(events: Path, ttft_ms_at: dict[int, int]) -> Questions:
    """One completed request at each second, of this TTFT, with a gap of a tenth of it."""
    with JournalWriter(events, "client", FakeClock(mono_ns=0, wall_ns=START)) as writer:
        for number, (second, ttft_ms) in enumerate(ttft_ms_at.items()):
            first = second * SECOND + ttft_ms * MS
            write_request(writer, "client", new_id(number), second * SECOND, [first, first + ttft_ms // 10 * MS])
    return Questions(events, from_shorthand("ttft:300 itl_max:30"))


def results(questions: Questions, window_ns: int, now_ns: int) -> dict[str, float]:
    """By name; of the holds their sum."""
    found: dict[str, float] = {}
    for row in published(questions, window_ns, now_ns):
        found[row.name] = found.get(row.name, 0) + row.value
    return found


def test_they_are_over_a_window_that_ends_now_or_over_everything(tmp_path: Path) -> None:
    # Two in the first minute, of which one is late in TTFT and gap (400, 40 ms); two after 2 h, of which none is.
    questions = record(tmp_path, {0: 200, 30: 400, 7200: 200, 7230: 200})
    now = START + 7300 * SECOND
    recent = results(questions, HOUR, now)
    assert (recent["sloscope_sql_attainment_ratio"], recent["sloscope_sql_goodput_rps"]) == (1, 2 / 3600)
    assert recent["sloscope_sql_holds"] == 0
    whole = results(questions, 0, now)
    # From the first arrival to the last in whole seconds: 7231 s.
    assert (whole["sloscope_sql_attainment_ratio"], whole["sloscope_sql_goodput_rps"]) == (3 / 4, 3 / 7231)
    assert whole["sloscope_sql_holds"] == 1
    assert recent["sloscope_sql_computed_at_seconds"] == 2 * now / 1e9  # of two questions


def test_a_directory_that_is_younger_than_the_window_has_a_rate_of_its_own_time(tmp_path: Path) -> None:
    questions = record(tmp_path, {0: 200, 30: 200, 59: 200})
    assert results(questions, HOUR, START + 60 * SECOND)["sloscope_sql_goodput_rps"] == pytest.approx(3 / 60)


def test_an_hour_without_requests_has_no_attainment_and_a_rate_of_nought(tmp_path: Path) -> None:
    found = results(record(tmp_path, {0: 200}), HOUR, START + 2 * HOUR)
    assert "sloscope_sql_attainment_ratio" not in found and found["sloscope_sql_goodput_rps"] == 0


@pytest.mark.parametrize("now_ns", [START - SECOND, START + HOUR])
def test_nothing_recorded_and_nothing_but_what_is_to_come_are_no_failure(tmp_path: Path, now_ns: int) -> None:
    (tmp_path / "events").mkdir()
    empty = results(Questions(tmp_path / "events", from_shorthand("ttft:300")), HOUR, now_ns)
    assert empty.keys() == {"sloscope_sql_holds", "sloscope_sql_computed_at_seconds"}
    found = results(record(tmp_path / "events", {0: 200}), HOUR, now_ns)
    # A clock that was set back has recorded what is yet to come.
    assert found.get("sloscope_sql_attainment_ratio") == (1 if now_ns > START else None)
