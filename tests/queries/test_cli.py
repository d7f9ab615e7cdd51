"""The query commands as a person uses them: rows on stdout, rules on stderr, one line when something is wrong."""

import json
import shutil

import pytest

from tests.command import sloscope


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    directory = tmp_path_factory.mktemp("events") / "lab"
    assert sloscope("lab", "--events", str(directory)).returncode == 0
    return directory


WINDOW = ("--window", "2026-01-01T00:00:00Z..2026-01-01T00:00:20Z")


def rows(*arguments):
    done = sloscope(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def error(*arguments):
    done = sloscope(*arguments)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_the_list_names_every_question_with_what_it_asks():
    listed = {row["name"]: row["question"] for row in rows("query", "--list")}
    assert listed["quantiles"] == "What are the quantiles of one latency, and within which bounds are they known?"


def test_a_question_describes_its_params_and_outputs():
    done = sloscope("query", "goodput_over_time", "--describe", "--format", "json")
    assert "--param bucket_s (bigint, seconds, 1 or more, default 10)" in done.stderr
    assert {"output": "offered", "type": "bigint"}.items() <= json.loads(done.stdout)[3].items()


def test_rows_are_on_stdout_and_the_rules_on_stderr(events):
    done = sloscope("query", "goodput", "--events", str(events), *WINDOW, "--format", "csv")
    assert done.stdout.splitlines()[0].startswith("offered,qualified,completed")
    assert done.stdout.splitlines()[1].startswith("8,3,6,1,1,0,0")
    assert "rule drain 10m" in done.stderr and "contract.toml" in done.stderr


def test_params_and_limits_of_the_command_line_reach_the_question(events):
    buckets = rows("query", "goodput_over_time", "--events", str(events), *WINDOW, "--param", "bucket_s=5")
    assert [row["offered"] for row in buckets] == [3, 2, 3, 0]  # sends at 0 2 4, 6 8, 10 12 14
    assert rows("query", "goodput", "--events", str(events), *WINDOW, "--goodput", "ttft:1000")[0]["qualified"] == 6
    assert rows("query", "goodput", "--events", str(events), *WINDOW, "--relax", "itl_max=80ms")[0]["qualified"] == 4
    assert rows("query", "goodput", "--events", str(events), *WINDOW, "--observer", "sidecar")[0]["unobserved"] == 8


def test_who_recorded_nothing_is_told_who_did(events):
    hint = "no request has a record by the sidecar, so all are unobserved; try --observer "
    for observer, said in (("sidecar", True), ("client", False)):
        done = sloscope("query", "goodput", "--events", str(events), *WINDOW, "--observer", observer)
        assert (f"{hint}client, who" in done.stderr) is said and done.returncode == 0


def test_wrong_use_is_one_line_that_says_what_is_accepted(events, tmp_path):
    at = ("--events", str(events))
    assert error("query", "nope", *at).startswith("question: 'nope' is unknown; accepted: ")
    assert error("query", *at) == "NAME: no question is given; accepted: one of those that --list prints"
    assert error("query", "goodput") == "--events: is missing; accepted: an events directory"
    assert error("query", "goodput", *at, "--param", "x") == "--param: 'x' is not accepted; accepted: NAME=VALUE"
    assert error("query", "goodput", *at, "--param", "x=1").startswith("goodput: param 'x' is unknown; accepted: none")
    assert error("query", "goodput", *at, "--window", "soon").startswith("--window: 'soon' is not a window")
    assert error("query", "goodput", *at, "--format", "xml").startswith("--format: 'xml' is not accepted")
    assert error("query", "goodput", *at, "--observer", "proxy").startswith("observer: 'proxy' is not accepted")
    assert error("query", "goodput", "--events", str(tmp_path / "no")).endswith("is not a directory")
    assert error("sql", "drop view cohort", *at).startswith("sql: 'drop view cohort' is not accepted")


def test_no_contract_is_made_up_when_none_is_there(tmp_path):
    (tmp_path / "journal").mkdir()
    says = error("query", "goodput", "--events", str(tmp_path))
    assert "contract.toml' does not exist; accepted: --contract FILE" in says


def test_own_sql_sees_the_verdicts(events):
    found = rows("sql", "select count(*) as n from cohort where qualified", "--events", str(events))
    assert found == [{"n": 3}]


def test_own_sql_needs_no_contract_for_raw_tables_and_says_which_one_judges(events, tmp_path):
    shutil.copytree(events / "journal", tmp_path / "journal")
    raw = sloscope("sql", "select count(*) as n from requests", "--events", str(tmp_path), "--format", "json")
    assert raw.returncode == 0 and json.loads(raw.stdout) == [{"n": 8}], raw.stderr
    said = [line for line in raw.stderr.splitlines() if line.startswith("contract: none")]
    assert said == [
        "contract: none with the events and none given, so the verdicts are those of the preset exercise; "
        "--contract FILE or --goodput TEXT gives others"
    ]
    done = sloscope(
        "sql", "select 1 as x from cohort where qualified", "--events", str(tmp_path), "--goodput", "ttft:1"
    )
    assert done.returncode == 0 and "contract: none" not in done.stderr
    kept = sloscope("sql", "select 1 as x", "--events", str(events))
    assert "contract: none" not in kept.stderr
    assert error("query", "goodput", "--events", str(tmp_path)).startswith("contract: ")


def test_own_sql_says_when_rows_were_left_out(events):
    done = sloscope("sql", "select 1 as x from cohort", "--events", str(events), "--max-rows", "2", "--format", "json")
    assert json.loads(done.stdout) == [{"x": 1}, {"x": 1}] and "only the first 2 rows are shown" in done.stderr


def test_two_recordings_compare_row_by_row(events):
    lines = {row["column"]: row for row in rows("compare", str(events), str(events))}
    assert lines["qualified"] == {"row": 1, "column": "qualified", "a": 3, "b": 3, "difference": 0}
    assert lines["ttft_p99_s"]["difference"] is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("--relax", "itl_max=80ms"), "contract_hash"),
        (("--observer", "engine"), "observer"),
        (("--goodput", "ttft:300 itl_max:30"), "contract_hash"),
    ],
)
def test_results_under_different_rules_are_not_compared(events, tmp_path, change, field):
    kept = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, extra in zip(kept, ((), change), strict=True):
        assert sloscope("query", "goodput", "--events", str(events), "--save", path, *extra).returncode == 0
    says = error("compare", *kept)
    assert says.startswith(f"{field}: ") and says.endswith("accepted: results made under the same rules")


def test_two_directories_with_different_contracts_are_not_compared(events, tmp_path):
    other = tmp_path / "other"
    assert sloscope("lab", "--events", str(other)).returncode == 0
    assert sloscope("contract", "init", str(other / "contract.toml"), "--preset", "voice", "--force").returncode == 0
    assert error("compare", str(events), str(other)).startswith("contract_hash: ")


def test_a_window_rule_or_quantile_method_that_differs_is_named(events, tmp_path):
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    assert sloscope("query", "goodput", "--events", str(events), "--save", str(path)).returncode == 0
    for field, value in (("window_rule", "unfinished 0s after the end"), ("quantile_method", "linear")):
        saved = json.loads(path.read_text())
        saved["meta"][field] = value
        other.write_text(json.dumps(saved))
        assert error("compare", str(path), str(other)).startswith(f"{field}: ")


def test_a_result_that_cannot_be_kept_is_one_line_and_no_rows(events, tmp_path):
    path = str(tmp_path / "none" / "x.json")
    says = error("query", "goodput", "--events", str(events), "--save", path)
    assert says == f"--save: {path!r} cannot be written: No such file or directory"


def test_a_file_that_is_no_saved_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert error("compare", str(path), str(path)).endswith("accepted: a file written by query --save")


def test_compaction_reports_what_it_did(tmp_path):
    (tmp_path / "journal").mkdir()
    assert rows("compact", "--events", str(tmp_path))[0]["requests_written"] == 0


def test_a_contract_is_written_checked_and_printed(tmp_path):
    path = str(tmp_path / "slo.toml")
    assert sloscope("contract", "init", path, "--preset", "voice").returncode == 0
    assert "exists; accepted: a new name, or --force" in error("contract", "init", path)
    assert sloscope("contract", "init", path, "--force").returncode == 0
    checked = sloscope("contract", "check", path, "--format", "json")
    assert json.loads(checked.stdout)[0]["ttft"] == "300ms" and "hash 09fdad4e5562" in checked.stderr
    sheet = rows("contract", "sheet", path)
    assert sheet[0]["obligation"] == "waiting prompt → first token" and "interactive 300ms" in sheet[0]["limit"]
    assert error("contract", "init", path, "--preset", "nope").startswith("preset: 'nope' is unknown")


def test_a_sheet_prints_measured_lengths_beside_the_declared_ones(events, tmp_path):
    path = tmp_path / "slo.toml"
    path.write_text(
        "version = 1\n[classes.interactive]\nttft = '300ms'\n"
        "[workload]\noutput_tokens = { p50 = 128, p90 = 512, p99 = 2048 }\n"
    )
    found = rows("contract", "sheet", str(path), "--events", str(events), "--lengths")
    # completed answers: 25 30 40 48 50 60 tokens; ranks ceil(3.0) = 3 and ceil(5.4) = 6
    assert {"length": "output_tokens", "declared_p50": 128, "measured_p50": 40, "measured_p90": 60,
            "requests": 6}.items() <= found[1].items()  # fmt: skip
    assert found[0] | {"length": "prompt_tokens"} == found[0] and found[0]["requests"] == 0
