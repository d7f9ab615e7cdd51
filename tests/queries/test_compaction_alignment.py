"""Receipts beside emissions: which event was which, and the gaps that are worth judging."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from queries.compaction import compact
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.journal import JournalWriter
from tests.queries.journal_factory import MS, new_id, write_request
from tests.queries.test_compaction import one, select

CANCELLED = {"outcome": "cancelled", "reason": "disconnect"}


def both_sides(events: Path, received: dict[str, Any], emitted: dict[str, Any], number: int = 1) -> None:
    """One request at the client and the engine, both starting at 0; `stamps` in ms."""
    sides = (("client", received), ("engine", emitted))
    for observer, given in sides:
        with JournalWriter(events, observer, FakeClock(mono_ns=number)) as writer:
            stamps = [ms * MS for ms in given["stamps"]]
            rest = {name: value for name, value in given.items() if name != "stamps"}
            write_request(writer, observer, new_id(number), 0, stamps, **rest)


def alignment_of(events: Path) -> str:
    compact(events)
    (alignment,) = one(events, "client_alignment")
    assert isinstance(alignment, str)
    return alignment


def test_the_same_number_of_events_in_each_choice_aligns_by_ordinal(tmp_path: Path) -> None:
    both_sides(
        tmp_path,
        {"stamps": [11, 12, 21, 33], "choice": [1, 0, 0, 1]},
        {"stamps": [10, 10, 20, 30], "choice": [0, 1, 0, 1]},
    )
    assert alignment_of(tmp_path) == "ordinal"
    # choice 0: 12 ← 10, 21 ← 20; choice 1: 11 ← 10, 33 ← 30. Gaps: 9 (no row; the engine's 10 is not above 10), 22.
    rows = select(
        tmp_path,
        "select choice, ordinal, kind, gap_ns // 1000000, emit_gap_ns // 1000000, hold_ns // 1000000,"
        " prev_hold_ns // 1000000 from {late_gaps} order by choice, ordinal",
    )
    assert rows == [
        (0, 1, "first_output", None, None, 2, None),
        (1, 1, "first_output", None, None, 1, None),
        (1, 2, "gap", 22, 20, 3, 1),
    ]


def test_a_stream_that_was_cut_is_a_prefix_of_the_emissions(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [11, 21], "end": CANCELLED}, {"stamps": [10, 20, 30]})
    assert alignment_of(tmp_path) == "ordinal"


def test_a_completed_stream_with_fewer_events_than_were_emitted_is_not_taken_for_a_prefix(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [11, 31]}, {"stamps": [10, 20, 30]})
    assert alignment_of(tmp_path) == "none"


@pytest.mark.parametrize(
    ("tokens", "stamps"),
    [([2, 1], [21, 31]), (None, [11, 19])],
    ids=["its tokens say otherwise", "the second would have been received before it was made"],
)
def test_a_cut_stream_that_contradicts_a_prefix_is_not_aligned(
    tmp_path: Path, tokens: list[int] | None, stamps: list[int]
) -> None:
    both_sides(tmp_path, {"stamps": stamps, "tokens": tokens, "end": CANCELLED}, {"stamps": [10, 20, 30, 40]})
    assert alignment_of(tmp_path) == "none"


def test_rechunked_receipts_align_by_tokens_to_the_emission_that_made_their_last_token(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [21, 42], "tokens": [2, 2]}, {"stamps": [10, 20, 30, 41]})
    assert alignment_of(tmp_path) == "tokens"
    # Event 1 ends with token 2 (made at 20), event 2 with token 4 (made at 41).
    rows = select(tmp_path, "select at_ns, emit_at_ns, emit_gap_ns, hold_ns from {late_gaps} order by ordinal")
    assert rows == [(21 * MS, 20 * MS, None, MS), (42 * MS, 41 * MS, 21 * MS, MS)]


def test_rechunked_receipts_whose_tokens_do_not_sum_to_the_engines_are_not_aligned(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [21, 42], "tokens": [2, 1]}, {"stamps": [10, 20, 30, 41]})
    assert alignment_of(tmp_path) == "none"
    rows = select(
        tmp_path, "select gap_ns, emit_at_ns, hold_ns, emit_together, same_clock from {late_gaps} order by 2,1"
    )
    assert rows == [(21 * MS, None, None, None, True), (None, None, None, None, True)]


def test_a_burst_after_a_hold_counts_what_came_together_and_what_was_made_together(tmp_path: Path) -> None:
    both_sides(
        tmp_path,
        {"stamps": [11, 60, 61, 62, 63]},  # 60, 61, 62 lie within 2 ms from 60 on
        {"stamps": [10, 20, 21, 40, 50]},  # of those, made at 20, 21 and 40: two within 2 ms
    )
    compact(tmp_path)
    rows = select(tmp_path, "select together, emit_together, hold_ns // 1000000 from {late_gaps} where ordinal = 2")
    assert rows == [(3, 2, 40)]


def test_an_engine_gap_that_the_receipts_hide_is_a_row_of_its_own(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [40, 41, 42]}, {"stamps": [10, 15, 39]})
    compact(tmp_path)
    rows = select(tmp_path, "select ordinal, gap_ns, emit_gap_ns from {late_gaps} order by 1")
    assert rows == [(1, None, None), (3, 1 * MS, 24 * MS)]


def test_stamps_of_two_clocks_are_aligned_but_never_subtracted(tmp_path: Path) -> None:
    both_sides(tmp_path, {"stamps": [5, 25], "clock_id": "fake:1:0"}, {"stamps": [1010, 1030]})
    compact(tmp_path)
    rows = select(
        tmp_path, "select hold_ns, prev_hold_ns, gap_ns, emit_gap_ns, same_clock from {late_gaps} order by ordinal"
    )
    assert rows == [(None, None, None, None, False), (None, None, 20 * MS, 20 * MS, False)]


def test_an_observer_that_lost_events_in_the_middle_is_not_aligned_and_the_loss_is_counted(tmp_path: Path) -> None:
    key = {"request_id": new_id(1)}
    both_sides(tmp_path, {"stamps": [11], "ended": False}, {"stamps": [10, 20]})
    with JournalWriter(tmp_path, "client", FakeClock(mono_ns=9)) as writer:
        writer.write(records.make("chunks", **key, ordinal0=3, t_ns=[22 * MS], choice=[0], type=[0]))
        writer.write(records.make("end", **key, outcome="completed", end_ns=23 * MS))
    report = compact(tmp_path)
    assert report.lost_events == 2  # positions 1 and 2
    assert one(tmp_path, "client_alignment, client_events") == ("none", 2)


def test_without_an_engine_there_is_no_alignment_to_speak_of(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as writer:
        write_request(writer, "sidecar", new_id(1), 0, [5 * MS, 30 * MS])
    compact(tmp_path)
    assert one(tmp_path, "client_alignment, sidecar_alignment") == (None, None)
    rows = select(tmp_path, "select observer, gap_ns, alignment, same_clock from {late_gaps} order by ordinal")
    assert rows == [("sidecar", None, None, None), ("sidecar", 25 * MS, None, None)]


def test_late_gaps_that_follow_each_other_share_stored_rows_and_come_back_one_by_one(tmp_path: Path) -> None:
    # Gaps 20, 21, 22, 23, 24, then 5 (in time on both sides: no row), then 30.
    received = [11, 31, 52, 74, 97, 121, 126, 156]
    both_sides(tmp_path, {"stamps": received}, {"stamps": [10, 29, 50, 72, 95, 119, 124, 150]})
    compact(tmp_path)
    rows = select(
        tmp_path,
        "select ordinal, kind, prev_ns // 1000000, at_ns // 1000000, gap_ns // 1000000, emit_prev_ns // 1000000,"
        " emit_at_ns // 1000000, emit_gap_ns // 1000000, hold_ns // 1000000, prev_hold_ns // 1000000, together"
        " from {late_gaps} order by ordinal",
    )
    assert rows == [
        (1, "first_output", None, 11, None, None, 10, None, 1, None, 1),
        (2, "gap", 11, 31, 20, 10, 29, 19, 2, 1, 1),
        (3, "gap", 31, 52, 21, 29, 50, 21, 2, 2, 1),
        (4, "gap", 52, 74, 22, 50, 72, 22, 2, 2, 1),
        (5, "gap", 74, 97, 23, 72, 95, 23, 2, 2, 1),
        (6, "gap", 97, 121, 24, 95, 119, 24, 2, 2, 1),
        (8, "gap", 126, 156, 30, 124, 150, 26, 6, 2, 1),
    ]
    # 1 to 4, 5 and 6, 8.
    (stored,) = (tmp_path / "tables" / "late_gaps").rglob("*.parquet")
    assert pq.read_table(stored)["ordinal_0"].to_pylist() == [1, 5, 8]


def test_stamps_too_far_apart_to_be_subtracted_are_not_stored_as_sums(tmp_path: Path) -> None:
    far = 2**62 + 1  # from far to -far is -2^63 - 2, which 64 bits take for 2^63 - 2: a late gap
    with JournalWriter(tmp_path, "client", FakeClock()) as writer:
        write_request(writer, "client", new_id(1), 0, [far, -far], end_ns=9)
    compact(tmp_path)
    assert select(tmp_path, "select at_ns from {late_gaps} order by ordinal") == [(far,), (-far,)]
