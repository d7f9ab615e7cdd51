"""The lab fixture through SQL and through the pure definitions; the expected numbers are those of sloscope.lab."""

import json
import shlex
from itertools import pairwise

import pytest

from queries.lab import WINDOW, write_journal
from queries.runner import Session
from sloscope.contract import preset
from sloscope.definitions import judge, summarise
from sloscope.lab import REQUESTS, WINDOW_S
from tests.command import sloscope, sloscope_process


def relaxed_exercise(gap_ms=None):
    contract = preset("exercise")
    return contract.relaxed("itl_max", gap_ms * 1_000_000) if gap_ms else contract


def test_the_fixture_has_the_first_token_gap_and_tokens_of_its_table():
    for request in REQUESTS:
        stamps = request.receipts_ns
        gaps = [b - a for a, b in pairwise(stamps)]
        assert len(stamps) == request.tokens
        assert max(gaps) == request.largest_gap_ms * 1_000_000
        assert stamps[0] - request.send_ns == request.ttft_ms * 1_000_000
        assert request.end_ns < WINDOW_S * 1_000_000_000


@pytest.mark.parametrize(
    ("gap_ms", "names", "qualified_tokens"),
    [(None, "ABC", 40 + 60 + 25), (80, "ABCE", 40 + 60 + 25 + 48)],
)
def test_sql_and_definitions_qualify_the_same_requests(tmp_path, gap_ms, names, qualified_tokens):
    contract = relaxed_exercise(gap_ms)
    limits = contract.classes["interactive"].limits
    by_definition = [
        request.name
        for request in REQUESTS
        if judge(
            request.outcome,
            summarise(
                request.send_ns,
                request.receipts_ns,
                [0] * request.tokens,
                [0] * request.tokens,
                total_tokens=request.tokens,
            ),
            limits,
        ).qualified
    ]
    assert "".join(by_definition) == names
    write_journal(tmp_path)
    with Session(tmp_path, contract, window=WINDOW) as session:
        rows = session.run("requests").rows
        summary = session.run("goodput").rows[0]
    assert "".join(row["external_id"] for row in rows if row["qualified"]) == names
    assert summary["offered"] == 8 and summary["qualified"] == len(names)
    assert summary["attainment"] == len(names) / 8
    assert summary["goodput_rps"] == pytest.approx(len(names) / 20, rel=1e-12)
    assert summary["token_goodput"] == qualified_tokens / 20  # 6.25, and 8.65 with the looser gap
    assert summary["observed_tokens_per_s"] == 14.25  # 285/20: what was received does not depend on the contract
    assert (summary["completed"], summary["failed"], summary["cancelled"]) == (6, 1, 1)


def test_the_command_prints_one_row_with_the_agreed_columns():
    done = sloscope_process("lab", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {
            "offered": 8,
            "qualified": 3,
            "attainment": 0.375,
            "goodput_rps": 0.15,
            "token_goodput": 6.25,
            "observed_tokens_per_s": 14.25,
            "ttft_p99_s": None,
            "ttft_p99_reason": "n=8 < 299",
        }
    ]
    assert "contract exercise (" in done.stderr and "rule drain 10m" in done.stderr


def test_a_relaxed_run_names_its_base_and_what_was_changed():
    done = sloscope("lab", "--relax", "itl_max=80ms", "--format", "json")
    row = json.loads(done.stdout)[0]
    assert (row["qualified"], row["token_goodput"], row["observed_tokens_per_s"]) == (4, 8.65, 14.25)
    assert f"exercise with itl_max 30ms -> 80ms (base {preset('exercise').hash[:12]})" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("itl_max", "--relax: 'itl_max' is not accepted"),
        ("gap=80ms", "limit: 'gap' is unknown; accepted: ttft"),
        ("itl_max=80", "--relax itl_max: '80' is not a duration"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_in_one_line(change, says):
    done = sloscope("lab", "--relax", change)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1


def test_kept_records_can_be_queried_with_the_contract_saved_beside_them(tmp_path):
    events = tmp_path / "the lab"
    kept = sloscope("lab", "--events", str(events))
    assert kept.returncode == 0
    again = sloscope("lab", "--events", str(events))
    assert again.returncode == 2 and "is not empty; accepted: a new or empty directory" in again.stderr
    # The command that the lab printed, as a reader would copy it: without its window the rates would be of 15 s.
    program, *command = shlex.split(kept.stderr.splitlines()[-1].partition("ask them with: ")[2])
    assert program == "sloscope"
    done = sloscope(*command, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["goodput_rps"] == 0.15
