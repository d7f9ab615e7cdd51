"""What the benchmarks that run the real server make of its answers, and of what they are asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import kv_reservation, remaining_length, slow_reader
from benchmarks.admission import calibration
from benchmarks.load import earlier_curve
from benchmarks.served import PATIENT, weighed, write_trace
from benchmarks.slow_reader import largest_gaps
from reference_server.remaining import LengthTable
from sloscope.client import traces


def test_a_written_trace_is_the_drawn_one_with_one_cap_for_all_and_classes_in_turn(tmp_path: Path) -> None:
    drawn = "synthetic:poisson?rate=50&n=40&prompt_p50=64&output_p50=16"
    path = tmp_path / "trace.jsonl"
    write_trace(path, drawn, 7, 320, ("urgent", "patient"))
    rows = traces.load(str(path)).rows
    assert [row.class_name for row in rows] == ["urgent", "patient"] * 20
    assert [row._replace(class_name="", max_tokens=None) for row in rows] == traces.load(drawn, seed=7).rows
    assert {row.max_tokens for row in rows} == {320}


def test_an_earlier_trace_leaves_the_curve_of_its_answers() -> None:
    # All 25 answers have 16 tokens, and the tightest cap is their median: nobody is cut, and nobody is longer.
    curve = earlier_curve("synthetic:constant?rate=50&n=25&output_p50=16&output_sigma=0", PATIENT, seed=1)
    table = LengthTable.parse(curve)
    assert table.quantile("any", 0, 320, 0.9) == 16
    assert table.remaining("any", 0, 320).unresolved == 0


def test_requests_at_once_are_weighed_by_the_time_of_their_steps() -> None:
    # 4·10 + 2·85 + 8·5 = 250 over 100 ns; of the sorted time 85 ns have 2, and the 95th of 100 is the last with 4.
    assert weighed([(4, 10), (2, 85), (8, 5)]) == (2.5, 4)
    assert weighed([]) == (None, None)


def test_the_largest_gap_of_a_round_is_that_of_its_worst_reader() -> None:
    seen = {"alone-0": (0.010, 0.030), "alone-1": (0.020, None), "alone-2": (0.050, 0.040), "beside-0": (0.005, 0.007)}
    rows = [{"external_id": name, "itl_max_s": gap_s} for name, gaps in seen.items() for gap_s in gaps]
    rows.append({"external_id": None, "itl_max_s": 9.0})  # the one that never reads has no name
    # Of 30, 20 and 50 ms.
    assert largest_gaps(rows) == {"alone": 30.0, "beside": 7.0}
    assert largest_gaps([]) == {"alone": None, "beside": None}


def test_calibration_is_of_what_was_said_at_arrival() -> None:
    names = ("error_p10_s", "error_p50_s", "error_p90_s")
    deciles = [("queue", (-1.0, 0.5, 2.0)), ("queue", (-3.0, 1.5, None)), ("admit", (9.0, 9.0, 9.0))]
    rows = [{"verdict": verdict, **dict(zip(names, errors, strict=True))} for verdict, errors in deciles]
    # Medians of -1 and -3, of 0.5 and 1.5, and of 2 alone.
    assert calibration(rows) == {"error_p10_s": -2.0, "error_p50_s": 1.0, "error_p90_s": 2.0}
    assert calibration([]) == dict.fromkeys(names)


@pytest.mark.parametrize(
    ("main", "option", "value"),
    [
        (kv_reservation.main, "--kv-blocks", "0"),
        (remaining_length.main, "--rate", "-2"),
        (slow_reader.main, "--rounds", "0"),
    ],
)
def test_what_is_not_above_0_is_refused_in_one_line(
    main: Callable[[list[str]], int], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([option, value])
    assert left.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.endswith(f"error: {option}: {value} is not accepted; accepted: above 0")
