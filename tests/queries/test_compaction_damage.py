"""Torn tails, rubbish, kills, second processes, steps of the wall clock: nothing lost, nothing twice."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import queries.parts
from queries import compaction
from queries.compaction import compact
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter, Manifest
from sloscope.recovery import directory_lock
from tests.queries.journal_factory import MS, SECOND, new_id, write_request
from tests.queries.test_compaction import WALL, one, select


def test_bad_lines_are_counted_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        path = client.path
        write_request(client, "client", new_id(1), 0, [10 * MS])
    with open(path, "ab") as file:
        file.write(b'not json\n{"v":1,"kind":"dream"}\n{"v":99,"kind":"clock"}\n')
        file.write(f'{{"v":1,"kind":"chunks","request_id":"{new_id(1)}","ordinal0":1,'.encode())
        file.write(b'"t_ns":[1.5],"choice":[0],"type":[0]}\n')
        file.write(b'{"v":1,"kind":"end","request')
    report = compact(tmp_path)
    assert (report.bad_lines, report.torn, report.requests_written) == (4, 1, 1)
    words = ("not JSON", "kind: 'dream' is unknown", "v: 99 is not readable", "chunks.t_ns: expected ints", "torn line")
    for word, problem in zip(words, report.problems, strict=True):
        assert word in problem and path.name in problem
    again = compact(tmp_path)
    assert (again.bad_lines, again.torn) == (0, 0), "each is reported once"


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    client = JournalWriter(tmp_path, "client", FakeClock())
    write_request(client, "client", new_id(1), 0, [10 * MS], ended=False)
    end = f'{{"v":1,"kind":"end","request_id":"{new_id(1)}","outcome":"completed","end_ns":12}}\n'.encode()
    with open(client.path, "ab", buffering=0) as file:
        file.write(end[:20])
        report = compact(tmp_path)
        assert (report.torn, report.requests_open) == (0, 1)
        file.write(end[20:])
    assert compact(tmp_path).requests_written == 1
    client.close()


def test_the_same_request_begun_by_two_recorders_of_one_observer_counts_once_and_the_first_stands(
    tmp_path: Path,
) -> None:
    for number, start in ((1, 5 * MS), (2, 4 * MS)):
        with JournalWriter(tmp_path, "client", FakeClock(mono_ns=number)) as client:
            write_request(client, "client", new_id(1), start, [10 * MS])
    report = compact(tmp_path)
    assert report.repeated == 1
    assert one(tmp_path, "client_start_ns, client_events, client_ttft_ns") == (4 * MS, 1, 6 * MS)


def test_a_batch_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS, 20 * MS], ended=False)
        batch = {"ordinal0": 1, "t_ns": [21 * MS, 30 * MS], "choice": [0, 0], "type": [0, 0]}
        client.write(records.make("chunks", request_id=new_id(1), **batch))
        client.write(records.make("end", request_id=new_id(1), outcome="completed", end_ns=31 * MS))
    assert compact(tmp_path).repeated == 1
    assert one(tmp_path, "client_t_ns", "chunks") == ([10 * MS, 20 * MS, 30 * MS],)


def test_records_of_an_observer_in_the_journal_of_another_are_refused(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        write_request(sidecar, "client", new_id(1), 0, [10 * MS], ended=False)
    report = compact(tmp_path)
    assert report.bad_lines == 1 and "begin.observer: 'client'" in report.problems[0]
    assert report.orphans == 1, "what is left of it has no begin"


def test_a_step_of_the_wall_clock_places_each_arrival_by_the_anchor_before_it(tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=WALL)
    with JournalWriter(tmp_path, "client", clock) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
        clock.advance(SECOND)
        clock.step_wall(3600 * SECOND)
        write_request(client, "client", new_id(2), SECOND, [SECOND + 10 * MS])
        # Stamped before the step, written after it.
        write_request(client, "client", new_id(3), SECOND - MS, [SECOND + 10 * MS])
    compact(tmp_path)
    rows = select(tmp_path, "select request_id, arrival_at_ns, client_ttft_ns from {requests} order by 1")
    assert rows == [
        (new_id(1), WALL, 10 * MS),
        (new_id(2), WALL + 3601 * SECOND, 10 * MS),
        (new_id(3), WALL + SECOND - MS, 11 * MS),
    ]


def test_a_step_of_the_wall_clock_within_a_request_moves_neither_its_end_nor_its_outcome(tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=WALL)
    with JournalWriter(tmp_path, "client", clock) as client:
        write_request(client, "client", new_id(1), 0, [SECOND], ended=False)
        clock.advance(2 * SECOND)
        clock.step_wall(-3600 * SECOND)
        client.write(records.make("end", request_id=new_id(1), outcome="completed", end_ns=2 * SECOND))
    compact(tmp_path)
    # On the monotonic clock it took 2 s, whatever the wall said at its end.
    assert select(tmp_path, "select client_end_at_ns - arrival_at_ns from {requests}") == [(2 * SECOND,)]


def test_requests_of_two_days_stand_in_two_partitions(tmp_path: Path) -> None:
    day = 86_400 * SECOND
    clock = FakeClock(wall_ns=WALL)
    with JournalWriter(tmp_path, "client", clock) as client:
        for number in range(2):
            write_request(client, "client", new_id(number), clock.mono, [clock.mono + MS])
            clock.advance(day)
    compact(tmp_path)
    folders = sorted({Path(name).parent.name for name in Manifest.load(tmp_path).tables["requests"]})
    assert folders == ["arrival_date=2023-11-14", "arrival_date=2023-11-15"]
    rows = select(tmp_path, "select cast(arrival_date as varchar) from {requests} order by 1")
    assert rows == [("2023-11-14",), ("2023-11-15",)]


def test_a_second_compaction_waits_and_then_says_why_it_gives_up(tmp_path: Path) -> None:
    with directory_lock(tmp_path), pytest.raises(JournalError, match="another compaction has been running"):  # noqa: SIM117
        with directory_lock(tmp_path, wait_s=0.1):
            pass
    threads = [threading.Thread(target=compact, args=(tmp_path,)) for _ in range(3)]
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        for number in range(20):
            write_request(client, "client", new_id(number), 0, [10 * MS])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert select(tmp_path, "select count(*), count(distinct request_id) from {requests}") == [(20, 20)]


def test_a_pass_that_fails_anywhere_leaves_the_old_state_readable_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(number: int) -> None:
        with JournalWriter(tmp_path, "client", FakeClock(mono_ns=number)) as client:
            write_request(client, "client", new_id(number), 0, [10 * MS])
            write_request(client, "client", new_id(100 + number), 0, [10 * MS], begin={"retry_of": new_id(number)})

    write(0)
    compact(tmp_path)
    write(1)
    # The open part of a late observer, so that a final file is made again too.
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        write_request(sidecar, "sidecar", new_id(0), 0, [9 * MS])
    real = queries.parts.write_parquet
    for allowed in range(8):  # four files of the new rows, four of the part that is made again
        left = [allowed]

        def fails(path: Path, table: str, rows: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                path.with_name(f".{path.name}.tmp").write_bytes(b"half")
                raise JournalError("disk full")
            real(path, table, rows)  # type: ignore[arg-type]

        monkeypatch.setattr(queries.parts, "write_parquet", fails)
        with pytest.raises(JournalError):
            compact(tmp_path)
        assert select(tmp_path, "select count(*) from {requests}") == [(2,)]
    monkeypatch.setattr(queries.parts, "write_parquet", real)
    compact(tmp_path)
    assert select(tmp_path, "select count(*), count(sidecar_ttft_ns) from {requests}") == [(4, 1)]
    write(2)
    compact(tmp_path)
    write(3)
    compact(tmp_path)
    named = {name for names in Manifest.load(tmp_path).tables.values() for name in names}
    before = set(Manifest.load(tmp_path).state["previous"])
    on_disk = {str(p.relative_to(tmp_path)) for p in (tmp_path / "tables").rglob("*") if p.is_file()}
    assert {name for name in on_disk if "/sources/" not in name} == named | {n for n in before if "/sources/" not in n}


def test_kill_minus_nine_in_the_middle_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "import queries.parts\n"
        "real = queries.parts.write_parquet\n"
        "left = [int(sys.argv[2])]\n"
        "def dies(*args):\n"
        "    real(*args)\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "queries.parts.write_parquet = dies\n"
        "from queries.compaction import compact\n"
        "compact(Path(sys.argv[1]))\n"
    )
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
        write_request(client, "client", new_id(2), 0, [10 * MS], ended=False)
    for step in (1, 3):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path), str(step)], check=False)
        assert done.returncode == -signal.SIGKILL
    report = compact(tmp_path)
    # The first pass wrote the end of request 2 before it died; it is not written again.
    assert report.recovered == 0
    rows = select(tmp_path, "select request_id, client_outcome from {requests} order by 1")
    assert rows == [(new_id(1), "completed"), (new_id(2), "unfinished")]


def test_a_reader_that_holds_the_manifest_before_can_still_read_its_files(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock(wall_ns=WALL)) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS], ended=False)
        compact(tmp_path)
        held = Manifest.load(tmp_path)
        client.write(records.make("end", request_id=new_id(1), outcome="completed", end_ns=20 * MS))
        compact(tmp_path)
    assert all((tmp_path / name).exists() for names in held.tables.values() for name in names)
    assert set(held.tables["requests"]).isdisjoint(Manifest.load(tmp_path).tables["requests"])


def test_what_is_held_in_memory_is_written_in_parts_and_still_stands_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "HELD_EVENTS", 50)
    monkeypatch.setattr("queries.intake.BLOCK", 2048)
    clocks = {observer: FakeClock(wall_ns=WALL) for observer in records.OBSERVERS}
    writers = {observer: JournalWriter(tmp_path, observer, clocks[observer]) for observer in records.OBSERVERS}
    for number in range(120):
        for observer in records.OBSERVERS:
            now = clocks[observer].mono
            write_request(writers[observer], observer, new_id(number), now, [now + 10 * MS, now + 30 * MS])
            clocks[observer].advance(SECOND)
    for writer in writers.values():
        writer.close()
    report = compact(tmp_path)
    assert report.receipts == 120 * 3 * 2
    assert len(Manifest.load(tmp_path).tables["requests"]) > 3, "it was written in parts"
    rows = select(
        tmp_path,
        "select count(*), count(distinct request_id), count(client_ttft_ns), count(sidecar_ttft_ns),"
        " count(engine_ttft_ns) from {requests}",
    )
    assert rows == [(120,) * 5]


def test_many_small_passes_leave_few_files(tmp_path: Path) -> None:
    clock = FakeClock()
    with JournalWriter(tmp_path, "engine", clock) as engine:
        for number in range(40):
            write_request(engine, "engine", new_id(number), 0, [10 * MS])
            engine.write(records.make("step", step_id=number, start_ns=number * MS, end_ns=number * MS + 1))
            compact(tmp_path)
    manifest = Manifest.load(tmp_path)
    assert all(len(names) < 20 for names in manifest.tables.values())
    assert select(tmp_path, "select count(*), count(distinct request_id) from {requests}") == [(40, 40)]
    # 40 steps of one process; the first has none before it, the others end 1 ns after a start and follow 1 ms apart.
    rows = select(
        tmp_path, "select count(*), count(gap_before_ns), min(gap_before_ns), max(gap_before_ns) from {steps}"
    )
    assert rows == [(40, 39, MS - 1, MS - 1)]
    assert os.listdir(tmp_path / "tables")


def test_files_that_no_pass_wrote_are_left_alone(tmp_path: Path) -> None:
    """The directory may be somebody's own, with a `tables` folder in it."""
    foreign = ["notes.md", "mine/data.parquet", "requests/arrival_date=2026-01-01/sales.parquet", "g00000001-1.parquet"]
    for name in foreign:
        path = tmp_path / "tables" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    killed = ["chunks/arrival_date=2026-01-01/.g00000001-2.parquet.tmp", "pending-g00000007.jsonl"]
    for name in killed:
        path = tmp_path / "tables" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half a file")
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
    compact(tmp_path)
    assert compact(tmp_path).generation == 1
    for name in foreign:
        assert (tmp_path / "tables" / name).read_text() == "precious"
    assert not any((tmp_path / "tables" / name).exists() for name in killed)


def test_a_stamp_that_no_column_places_costs_its_own_line_and_nobody_elses_tables(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
        # 2^63 - 1 fits its own column; on the wall, 1.7e18 ns later, it does not.
        write_request(client, "client", new_id(2), 2**63 - 1, [])
        client.write(records.make("clock", mono_ns=2**63 - 1, wall_ns=-(2**63), clock_id="fake:0:0"))
        write_request(client, "client", new_id(3), 20 * MS, [30 * MS])
    report = compact(tmp_path)
    assert report.bad_lines >= 2 and any("no column" in problem for problem in report.problems)
    assert select(tmp_path, "select request_id, client_ttft_ns from {requests} order by 1") == [
        (new_id(1), 10 * MS),
        (new_id(3), 10 * MS),
    ]


def test_a_limit_that_no_column_holds_costs_its_own_request_and_nobody_elses(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS], begin={"own_limits": {"ttft_ns": 2**63}})
        write_request(client, "client", new_id(2), 0, [10 * MS])
    report = compact(tmp_path)
    assert report.bad_lines == 1 and "begin.own_limits" in report.problems[0]
    assert select(tmp_path, "select request_id from {requests}") == [(new_id(2),)]
