"""Recovery after a recorder's death, with real files and real locks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sloscope import records, recovery
from sloscope.clock import FakeClock
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter, Tail, journal_files, read_journal, writer_of
from sloscope.recovery import dead_writers, recover


def begin(request_id: str, arrived_ns: int) -> records.Record:
    return records.make("begin", request_id=request_id, observer="sidecar", clock_id="fake:0:0", arrived_ns=arrived_ns)


def chunks(request_id: str, t_ns: list[int], forwarded_ns: list[int]) -> records.Record:
    return records.make(
        "chunks",
        request_id=request_id,
        ordinal0=0,
        t_ns=t_ns,
        choice=[0] * len(t_ns),
        type=[0] * len(t_ns),
        forwarded_ns=forwarded_ns,
    )


def end(request_id: str) -> records.Record:
    return records.make("end", request_id=request_id, outcome="completed", end_ns=99)


def all_records(events: Path) -> list[records.Record]:
    return [record for path in journal_files(events) for record in read_journal(Tail(path))]


def ends(events: Path) -> dict[str, records.Record]:
    found = [record for record in all_records(events) if record["kind"] == "end"]
    assert len({record["request_id"] for record in found}) == len(found), "a request ended twice"
    return {record["request_id"]: record for record in found}


def test_an_open_request_of_a_dead_writer_ends_as_recorder_lost_at_its_last_stamp(tmp_path: Path) -> None:
    ended, early, late = new_request_id(), new_request_id(), new_request_id()
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        for record in (begin(ended, 10), end(ended), begin(early, 20), begin(late, 30)):
            writer.write(record)
        writer.write(chunks(late, [40, 50], [41, 57]))
    assert recover(tmp_path, "sidecar") == 2
    found = ends(tmp_path)
    assert found[ended]["outcome"] == "completed"
    assert (found[early]["reason"], found[early]["end_ns"]) == ("recorder_lost", 20)
    assert (found[late]["reason"], found[late]["end_ns"]) == ("recorder_lost", 57)


def test_a_second_recovery_ends_nothing_more(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
    assert [recover(tmp_path, "sidecar") for _ in range(3)] == [1, 0, 0]
    assert len(ends(tmp_path)) == 1


def test_recovery_without_its_memory_of_settled_files_still_ends_nothing_twice(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
    assert recover(tmp_path, "sidecar") == 1
    (tmp_path / "journal/sidecar/.recovered.json").write_text("{ rubbish")
    assert recover(tmp_path, "sidecar") == 0
    assert len(ends(tmp_path)) == 1


def test_a_live_writer_keeps_its_open_requests_also_after_it_rotated(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "sidecar", FakeClock(1), max_bytes=200)
    writer.write(begin(new_request_id(), 10))
    writer.write(begin(new_request_id(), 20))  # goes to a second file; the first one's lock is free
    assert len(journal_files(tmp_path)) == 2
    assert recover(tmp_path, "sidecar") == 0
    writer.close()
    assert recover(tmp_path, "sidecar") == 2


def test_an_end_in_a_later_file_of_the_same_writer_counts(tmp_path: Path) -> None:
    request_id = new_request_id()
    with JournalWriter(tmp_path, "sidecar", FakeClock(1), max_bytes=200) as writer:
        writer.write(begin(request_id, 10))
        writer.write(end(request_id))
    assert len(journal_files(tmp_path)) == 2
    assert recover(tmp_path, "sidecar") == 0


def test_the_recovered_end_stands_under_the_clock_anchor_of_the_writer_that_died(tmp_path: Path) -> None:
    clock = FakeClock(mono_ns=5, wall_ns=777, clock_id="fake:earlier-boot:0")
    with JournalWriter(tmp_path, "sidecar", clock) as writer:
        writer.write(begin(new_request_id(), 10))
    known = set(journal_files(tmp_path))
    recover(tmp_path, "sidecar")
    (recovered,) = set(journal_files(tmp_path)) - known
    *_, anchor, last = list(read_journal(Tail(recovered)))
    assert last["kind"] == "end"
    assert (anchor["kind"], anchor["mono_ns"], anchor["wall_ns"]) == ("clock", 5, 777)


def test_other_observers_and_a_missing_directory_are_left_alone(tmp_path: Path) -> None:
    assert recover(tmp_path / "nowhere", "sidecar") == 0
    with JournalWriter(tmp_path, "engine", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
    assert recover(tmp_path, "sidecar") == 0


def test_a_torn_last_line_of_a_killed_writer_is_skipped(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
        path = writer.path
    with path.open("ab") as file:
        file.write(json.dumps(begin(new_request_id(), 11)).encode()[:40])
    assert recover(tmp_path, "sidecar") == 1


def test_a_file_that_is_empty_yet_is_looked_at_again(tmp_path: Path) -> None:
    """Its writer may be between the creation of the file and the lock."""
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
        path = writer.path
    text = path.read_bytes()
    path.write_bytes(b"")
    assert recover(tmp_path, "sidecar") == 0
    path.write_bytes(text)
    assert recover(tmp_path, "sidecar") == 1


def test_a_writer_between_the_creation_of_its_file_and_its_lock_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it begins while a recovery goes on is neither ended as lost nor left out of the next one."""
    with JournalWriter(tmp_path, "sidecar", FakeClock(1)) as writer:
        writer.write(begin(new_request_id(), 10))
    with JournalWriter(tmp_path, "sidecar", FakeClock(2)) as other:
        other.write(begin(new_request_id(), 20))
        begun = other.path.read_bytes()
        other.path.write_bytes(b"")
    assert dead_writers(tmp_path / "journal" / "sidecar") == {writer_of(writer.path)}
    look = recovery.dead_writers

    def go_on_after(*arguments: Any) -> set[str]:
        dead = look(*arguments)
        other.path.write_bytes(begun)
        return dead

    monkeypatch.setattr(recovery, "dead_writers", go_on_after)
    assert recover(tmp_path, "sidecar") == 1
    monkeypatch.undo()
    assert recover(tmp_path, "sidecar") == 1
    assert set(ends(tmp_path)) == {
        record["request_id"] for record in all_records(tmp_path) if record["kind"] == "begin"
    }


def test_the_anchor_is_the_last_also_of_more_than_ten_files(tmp_path: Path) -> None:
    clock = FakeClock(mono_ns=0, wall_ns=1000)
    with JournalWriter(tmp_path, "sidecar", clock, max_bytes=1) as writer:
        for number in range(12):  # a file each, and file 10 stands before file 2 by name
            clock.advance(100)
            writer.write(begin(new_request_id(), number))
    known = set(journal_files(tmp_path))
    assert len(known) == 13 and recover(tmp_path, "sidecar") == 12
    (recovered,) = set(journal_files(tmp_path)) - known
    anchors = [record["mono_ns"] for record in read_journal(Tail(recovered)) if record["kind"] == "clock"]
    assert anchors[1:] == [1200], "after the recovering process's own"


@pytest.mark.e2e
def test_a_writer_killed_with_sigkill_is_recovered_only_after_its_death(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from sloscope import records\n"
        "from sloscope.clock import SystemClock\n"
        "from sloscope.ids import new_request_id\n"
        "from sloscope.journal import JournalWriter\n"
        "writer = JournalWriter(Path(sys.argv[1]), 'sidecar', SystemClock())\n"
        "begin = dict(request_id=new_request_id(), observer='sidecar', clock_id='c', arrived_ns=1)\n"
        "writer.write(records.make('begin', **begin))\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        assert recover(tmp_path, "sidecar") == 0
        os.kill(process.pid, signal.SIGKILL)
    assert recover(tmp_path, "sidecar") == 1
