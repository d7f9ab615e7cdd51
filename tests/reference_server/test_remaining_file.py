import json
import os
from pathlib import Path

import pytest

from reference_server.remaining import Lengths
from reference_server.remaining_file import LengthFile
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S


def text_for(tokens: int) -> str:
    return json.dumps([{"cohort": "chat", "tokens": tokens, "at_risk": 1, "events": 1, "censored": 0, "survival": 0.0}])


def replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def length(file: LengthFile) -> int:
    return file.lengths.table.quantile("chat", 0, 1000, 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(text_for(10), encoding="utf-8")
    return path


def test_a_file_put_in_its_place_is_read_within_a_second(path: Path) -> None:
    file = LengthFile(path, Lengths())
    assert length(file) == 10
    assert not file.refresh(0)  # the same file
    replace(path, text_for(30))
    written_at_ns = path.stat().st_mtime_ns
    assert not file.refresh(NS_PER_S - 1) and length(file) == 10  # looked less than a second ago
    assert file.refresh(NS_PER_S) and length(file) == 30
    assert not file.refresh(2 * NS_PER_S) and file.problem is None
    replace(path, "[")
    assert file.refresh(3 * NS_PER_S) and file.written_at_ns == written_at_ns  # that of the table in use


def test_a_damaged_file_is_refused_and_the_last_good_table_stays(path: Path) -> None:
    file = LengthFile(path, Lengths())
    replace(path, text_for(30)[:-5])
    assert file.refresh(0) and length(file) == 10
    assert file.problem is not None
    assert file.problem.startswith(f"{path}: is not JSON") and file.problem.endswith("the last good table stays in use")
    assert not file.refresh(NS_PER_S) and file.problem is not None  # it is said once
    replace(path, text_for(30))
    assert file.refresh(2 * NS_PER_S) and length(file) == 30 and file.problem is None


def test_a_file_of_other_bytes_is_refused(path: Path) -> None:
    file = LengthFile(path, Lengths())
    path.write_bytes(b"\xff\xfe")
    assert (
        file.refresh(0)
        and file.problem == f"{path}: is not UTF-8; accepted: a length table; the last good table stays in use"
    )


def test_a_file_that_vanished_is_missed_and_read_again_when_it_is_back(path: Path) -> None:
    file = LengthFile(path, Lengths())
    aside = path.with_suffix(".aside")
    path.rename(aside)
    assert file.refresh(0) and length(file) == 10
    assert file.problem == f"{path}: cannot be read (No such file or directory); the last good table stays in use"
    assert not file.refresh(NS_PER_S)
    aside.rename(path)  # the very same file
    assert file.refresh(2 * NS_PER_S) and file.problem is None and length(file) == 10


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    file = LengthFile(path, Lengths())
    path.unlink()
    os.mkfifo(path)  # nobody writes to it
    assert file.refresh(0) and length(file) == 10
    assert file.problem == f"{path}: is no file; accepted: a length table; the last good table stays in use"
    with pytest.raises(ConfigError, match="is no file; accepted: a length table"):
        LengthFile(path, Lengths())


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[1]"])
def test_nothing_starts_with_a_bad_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "lengths.json"
    if content is not None:
        path.write_bytes(content)
    lengths = Lengths()
    before = lengths.table
    with pytest.raises(ConfigError, match=r"lengths\.json: .*; accepted: ") as raised:
        LengthFile(path, lengths)
    assert "\n" not in str(raised.value) and lengths.table is before
