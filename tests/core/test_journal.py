"""What is on disk after writes, floods, torn tails, kills and steps of the clock."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloscope import records
from sloscope.clock import Anchor, FakeClock
from sloscope.errors import JournalError
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter, Manifest, Tail, is_live, journal_files, read_journal
from tests.waiting import until

SECOND = 1_000_000_000


def begin(**more: object) -> records.Record:
    return records.make("begin", request_id=new_request_id(), observer="client", clock_id="c", send_ns=1, **more)


def read(path: Path) -> tuple[list[records.Record], Tail]:
    tail = Tail(path)
    return list(read_journal(tail)), tail


def test_the_first_record_is_a_clock_and_a_written_record_is_on_disk_at_once(tmp_path: Path) -> None:
    clock = FakeClock(mono_ns=5, wall_ns=7)
    writer = JournalWriter(tmp_path, "client", clock)
    record = begin()
    assert writer.write(record)
    rows, tail = read(writer.path)
    assert rows[0] == records.make("clock", mono_ns=5, wall_ns=7, clock_id=clock.clock_id)
    assert rows[1] == record and tail.bad_lines == 0
    assert writer.path.parent == tmp_path / "journal" / "client"


def test_appended_records_wait_for_a_flush(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "client", FakeClock())
    writer.append(begin())
    assert len(read(writer.path)[0]) == 1
    assert writer.flush() and len(read(writer.path)[0]) == 2


def test_a_new_anchor_comes_every_ten_seconds_and_after_a_step_of_the_wall(tmp_path: Path) -> None:
    clock = FakeClock()
    writer = JournalWriter(tmp_path, "client", clock)
    clock.advance(9 * SECOND)
    writer.write(begin())
    clock.advance(1 * SECOND)
    writer.write(begin())
    clock.step_wall(-SECOND)
    writer.write(begin())
    kinds = [row["kind"] for row in read(writer.path)[0]]
    assert kinds == ["clock", "begin", "clock", "begin", "clock", "begin"]


def test_an_idle_writer_that_is_asked_sets_an_anchor_after_a_step_only(tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=SECOND)
    with JournalWriter(tmp_path, "client", clock) as journal:
        clock.advance(3600 * SECOND)
        journal.watch_wall()
        assert [row["mono_ns"] for row in read(journal.path)[0]] == [0], "an idle hour is no step"
        clock.step_wall(60 * SECOND)
        journal.watch_wall()
        journal.watch_wall()
        assert [(row["mono_ns"], row["wall_ns"]) for row in read(journal.path)[0]] == [
            (0, SECOND),
            (3600 * SECOND, 3661 * SECOND),
        ]


def test_an_anchor_places_a_stamp_on_the_wall() -> None:
    assert Anchor(mono_ns=100, wall_ns=1_000).wall_at(130) == 1_030


def test_a_full_file_is_rotated_and_nothing_is_lost(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "client", FakeClock(), max_bytes=600)
    written = [begin() for _ in range(20)]
    for record in written:
        assert writer.write(record)
    files = journal_files(tmp_path)
    assert len(files) > 1
    rows = [row for path in sorted(files, key=lambda p: int(p.stem.rsplit("-", 1)[1])) for row in read(path)[0]]
    assert [row for row in rows if row["kind"] == "begin"] == written


def test_a_torn_tail_is_not_consumed_and_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps(begin()).encode() + b"\n"
    path.write_bytes(line + line[:20])
    tail = Tail(path)
    assert len(list(read_journal(tail))) == 1 and tail.torn and tail.offset == len(line)
    path.write_bytes(line + line)
    assert len(list(read_journal(tail))) == 1 and not tail.torn


def test_bad_lines_are_skipped_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = json.dumps(begin())
    lines = [
        good,
        "{rubbish",
        '{"v":9,"kind":"begin"}',
        '{"v":1,"kind":"poem"}',
        json.dumps({**begin(), "prompt": "hi"}),
        good,
    ]
    path.write_text("\n".join(lines) + "\n")
    rows, tail = read(path)
    assert len(rows) == 2 and tail.bad_lines == 4
    assert "not JSON" in tail.problems[0] and "v: 9" in tail.problems[1]
    assert "poem" in tail.problems[2] and "begin.prompt: no such field" in tail.problems[3]


def test_a_full_disk_loses_records_with_a_count_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path, "client", FakeClock())
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not writer.write(begin())
    assert writer.lost == 1 and writer.last_error == "No space left on device"
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    writer.append(begin())
    assert not writer.write(begin())
    monkeypatch.setattr(os, "write", real)
    last = begin()
    assert writer.write(last)
    rows, tail = read(writer.path)
    assert rows[-1] == last, "a line after a torn one stands on a line of its own"
    # The clock, one lost, an anchor and two in the short write, an anchor and one after: 1 + 1 + 3 + 2.
    assert writer.written + writer.lost == 7
    assert tail.bad_lines <= 1


def test_the_lock_tells_a_live_writer_from_a_dead_one(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from sloscope.journal import JournalWriter; "
        "from sloscope.clock import SystemClock\n"
        "w = JournalWriter(Path(sys.argv[1]), 'sidecar', SystemClock()); print(w.path, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        path = Path(child.stdout.readline().strip())
        assert is_live(path)
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        until(lambda: not is_live(path))
    assert not is_live(tmp_path / "never.jsonl")


def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="events directory"):
        JournalWriter(tmp_path / "file", "client", FakeClock())


def test_a_manifest_is_replaced_whole_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path).generation == 0
    Manifest(3, {"journal/client/a.jsonl": 10}, {"requests": ["tables/x.parquet"]}).save(tmp_path)
    assert Manifest.load(tmp_path).journals == {"journal/client/a.jsonl": 10}
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    (tmp_path / "manifest.json").write_text('{"v": 1')
    with pytest.raises(JournalError, match="damaged"):
        Manifest.load(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["v", "kind", "request_id", "t_ns", "choice", "outcome", "labels"]), JSON))
def test_no_json_object_breaks_the_check(record: dict[str, object]) -> None:
    with contextlib.suppress(records.RecordError):
        assert records.check(record) is record


def test_a_reason_must_go_with_its_outcome() -> None:
    end = records.make("end", request_id=new_request_id(), outcome="completed", reason="voluntary", end_ns=1)
    with pytest.raises(records.RecordError, match=r"end.reason: 'voluntary' does not go with completed"):
        records.check(end)


def test_arrays_of_one_record_have_one_length() -> None:
    chunk = records.make("chunks", request_id=new_request_id(), ordinal0=0, t_ns=[1, 2], choice=[0], type=[0, 0])
    with pytest.raises(records.RecordError, match=r"chunks.choice: 1 values for 2 events"):
        records.check(chunk)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"v":1,"generation":"x","journals":{},"tables":{},"state":{}}',
     b'{"v":1,"generation":1,"journals":{"a":"b"},"tables":{},"state":{}}',
     b'{"v":1,"generation":1,"journals":{},"tables":{"requests":[3]},"state":{}}',
     b'{"v":1,"generation":1,"journals":{},"tables":{},"state":5}'],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line_that_names_the_file(tmp_path: Path, text: bytes) -> None:
    Manifest.path(tmp_path).write_bytes(text)
    with pytest.raises(JournalError, match=r"manifest '.*manifest.json': damaged") as caught:
        Manifest.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_no_journal(tmp_path: Path) -> None:
    folder = tmp_path / "journal" / "client"
    (folder / "folder.jsonl").mkdir(parents=True)
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "nowhere.jsonl").symlink_to("missing")
    (folder / "file.jsonl").touch()
    assert [path.name for path in journal_files(tmp_path)] == ["file.jsonl"]


def test_after_a_loss_the_next_write_brings_the_anchor_that_may_have_been_in_it(tmp_path: Path) -> None:
    clock = FakeClock()
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # every write fails, as on a full disk
        earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = JournalWriter(tmp_path, "client", clock)
        assert not writer.write(begin())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        signal.signal(signal.SIGXFSZ, earlier)
    assert writer.write(begin())
    rows, _ = read(writer.path)
    assert [row["kind"] for row in rows] == ["clock", "begin"], "a stamp without an anchor has no place on the wall"
    writer.close()


def test_a_directory_deleted_under_a_writer_is_noticed_counted_and_made_anew(tmp_path: Path) -> None:
    events = tmp_path / "events"
    writer = JournalWriter(events, "client", FakeClock())
    assert writer.write(begin()) and writer.write(begin())
    shutil.rmtree(events)
    last = begin()
    assert writer.write(last)
    rows, _ = read(writer.path)
    assert [row["kind"] for row in rows] == ["clock", "begin"] and rows[1] == last
    assert writer.lost == 3, "the clock and two records went with their file"
    writer.close()
