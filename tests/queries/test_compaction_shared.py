"""A pass that a forked child shares writes what a pass alone writes, whatever becomes of the child."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from queries import ahead, compaction, decode
from queries.compaction import compact
from queries.forked import child
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.journal import JournalWriter, Manifest
from tests.queries.journal_factory import MS, SECOND, new_id, write_request
from tests.queries.test_compaction import WALL, select

REQUESTS = 60
QUESTIONS = (
    "select * exclude (arrival_date) from {requests} order by request_id",
    "select * exclude (arrival_date) from {chunks} order by request_id",
    "select * exclude (arrival_date) from {late_gaps} order by request_id, observer, choice, ordinal",
)


def write_journals(events: Path) -> None:
    for observer in records.OBSERVERS:
        clock = FakeClock(wall_ns=WALL)
        with JournalWriter(events, observer, clock) as writer:
            for number in range(REQUESTS):
                now = clock.mono
                write_request(writer, observer, new_id(number), now, [now + 10 * MS, now + 30 * MS])
                clock.advance(SECOND)
    damaged = next((events / "journal" / "client").glob("*.jsonl"))
    lines = damaged.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 3] = b"{not JSON\n"
    lines[len(lines) // 2] = b'{"v":1,"kind":"chunks"}\n'
    damaged.write_bytes(b"".join(lines) + b'{"v":1,"torn')


def passed(events: Path) -> tuple[Any, ...]:
    report = compact(events)
    counts = (report.requests_written, report.receipts, report.bad_lines, report.torn, report.journal_bytes)
    return counts, report.problems, [select(events, question) for question in QUESTIONS]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a pass by itself makes of the journals; the directory is as before, and the next pass is shared."""
    write_journals(tmp_path)
    journals = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    monkeypatch.setattr(decode, "BLOCK", 2048)
    found = passed(tmp_path)
    assert found[0][2:4] == (2, 1)
    Manifest.path(tmp_path).unlink()
    assert {path: path.read_bytes() for path in journals} == journals
    monkeypatch.setattr(compaction, "SHARED_BYTES", 0)
    monkeypatch.setattr(compaction, "SHARED_EVENTS", 0)
    monkeypatch.setattr(compaction, "second_core", lambda: True)
    return found


def test_a_shared_pass_writes_what_a_pass_alone_writes(tmp_path: Path, alone: tuple[Any, ...]) -> None:
    assert passed(tmp_path) == alone
    assert len(Manifest.load(tmp_path).tables["requests"]) == 2, "a part of each process"


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("answers", [0, 2])
def test_what_a_killed_child_did_not_decode_the_pass_decodes(
    tmp_path: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    def serve(pipe: Connection) -> None:
        for _ in range(answers):
            pipe.send_bytes(ahead.packed(decode.decoded(decode.whole_lines(*pipe.recv(), ahead.BLOCKS))))
        killed()

    monkeypatch.setattr(ahead, "_answer_all", serve)
    assert passed(tmp_path) == alone


@pytest.mark.parametrize("where", ["before", "after"])
def test_what_a_killed_child_did_not_write_the_pass_writes(
    tmp_path: Path, alone: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    in_child = compaction._Pass._write_in_child

    def die(self: Any, settled: list[Any], names: int, pipe: Connection) -> None:
        if where == "after":
            in_child(self, settled, names, FullPipe())  # type: ignore[arg-type]
        killed()

    monkeypatch.setattr(compaction._Pass, "_write_in_child", die)
    assert passed(tmp_path) == alone
    compact(tmp_path)
    shown = {Path(name).name for name in Manifest.load(tmp_path).tables["requests"]}
    assert {path.name for path in (tmp_path / "tables" / "requests").rglob("*.parquet")} == shown, "no leftovers"


class FullPipe:
    def send(self, _: object) -> None: ...


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_child_is_gone_when_the_pass_is_stopped(error: type[BaseException]) -> None:
    pids = []

    def hang(pipe: Connection) -> None:
        pipe.send(os.getpid())
        signal.pause()

    def stopped() -> None:
        with child(hang) as pipe:
            pids.append(pipe.recv())
            os.kill(pids[0], signal.SIGINT)  # as a terminal sends it to both: the pass decides
            raise error

    with pytest.raises(error):
        stopped()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_child_that_ends_ends_its_pipe() -> None:
    with child(lambda _: None) as pipe, pytest.raises(EOFError):
        pipe.recv()
