"""Empty options, and directories that are somebody else's or damaged, as a person meets them: one line and exit 2."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from queries.runner import _ctrl_c_reaches
from tests.queries.test_cli import error, events, rows  # noqa: F401 - a fixture
from tests.waiting import until


@pytest.mark.parametrize(
    ("option", "says"),
    [("--goodput", "goodput: '' promises nothing"), ("--window", "--window: '' is not"), ("--relax", "--relax: '' is")],
)
def test_an_empty_option_is_refused_and_not_taken_for_none(events, option, says):  # noqa: F811
    assert error("query", "goodput", "--events", str(events), option, "").startswith(says)


def test_only_the_columns_that_are_named_are_printed_and_in_that_order(events):  # noqa: F811
    (row,) = rows("query", "goodput", "--events", str(events), "--columns", "qualified, offered")
    assert list(row.items()) == [("qualified", 3), ("offered", 8)]


@pytest.mark.parametrize("name", ["offered,nowhere", "nowhere", "offered,,qualified"])
def test_a_column_that_the_question_does_not_give_is_named(events, name):  # noqa: F811
    says = error("query", "goodput", "--events", str(events), "--columns", name)
    assert says.startswith(
        f"--columns: {name.split(',')[-1 if 'nowhere' in name else 1]!r} is not accepted; accepted: "
    )


def test_an_empty_change_of_the_lab_is_refused():
    assert error("lab", "--relax", "").startswith("--relax: '' is not accepted; accepted: LIMIT=VALUE")


def test_a_contract_is_not_written_over_a_directory(tmp_path):
    assert error("contract", "init", str(tmp_path), "--force").endswith("is a directory; accepted: a file name")


def test_a_name_that_no_file_system_takes_is_one_line():
    assert error("query", "goodput", "--goodput", "ttft:3", "--events", "x" * 300).endswith("File name too long")


@pytest.mark.parametrize("damage", ["deleted", "garbage", "half"])
def test_a_damaged_table_is_named_and_made_anew_from_the_journal_as_the_line_says(events, tmp_path, damage):  # noqa: F811
    copy = tmp_path / "copy"
    shutil.copytree(events, copy)
    (table,) = (copy / "tables" / "requests").rglob("*.parquet")
    whole = table.read_bytes()
    if damage == "deleted":
        table.unlink()
    else:
        table.write_bytes(b"garbage" * 100 if damage == "garbage" else whole[: len(whole) // 2])
    says = error("query", "goodput", "--events", str(copy))
    assert table.name in says and "without it and `tables` both are made anew from the journal" in says
    (copy / "manifest.json").unlink()
    shutil.rmtree(copy / "tables")
    assert rows("query", "goodput", "--events", str(copy))[0]["qualified"] == 3


def test_a_directory_without_records_gets_no_files_and_a_question_no_answer(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    says = error("query", "goodput", "--events", str(tmp_path), "--goodput", "ttft:300")
    assert "holds no records" in says and says.endswith("accepted: a directory that a recorder was given with --events")
    assert error("compact", "--events", str(tmp_path)) == says
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    # A recorder that has seen no request yet is another matter: nothing offered is an answer.
    (tmp_path / "journal" / "client").mkdir(parents=True)
    assert rows("query", "goodput", "--events", str(tmp_path), "--goodput", "ttft:300")[0]["offered"] == 0


def test_ctrl_c_ends_a_long_query_without_a_word(events):  # noqa: F811
    # Who starts the tests in the background has SIGINT ignored, and children inherit that.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from sloscope.cli import main; main()"
    endless = "select sum(a.range % (b.range + 7)) from range(100000000000) as a, range(100000) as b"
    asking = subprocess.Popen(
        [sys.executable, "-c", code, "sql", endless, "--events", str(events)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 100
    ticks = os.sysconf("SC_CLK_TCK")
    # Under way once it has burnt more processor time than starting takes.
    while sum(map(int, Path(f"/proc/{asking.pid}/stat").read_text().split()[13:15])) < 3 * ticks:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(10):  # a person presses it again, too
        asking.send_signal(signal.SIGINT)
        try:
            said = asking.communicate(timeout=2)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        asking.kill()
        said = asking.communicate()
    assert (asking.returncode, said) == (130, (b"", b"")), "not even a progress bar"


def test_ctrl_c_that_meets_no_statement_is_not_the_last_try():
    class Connection:
        tries = 0

        def interrupt(self) -> None:
            self.tries += 1

    connection = Connection()
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        with _ctrl_c_reaches(connection):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGINT)
            until(lambda: connection.tries >= 3)
        tries = connection.tries
        time.sleep(0.2)
        assert connection.tries == tries, "it goes on after the statement"
    finally:
        signal.signal(signal.SIGINT, before)
