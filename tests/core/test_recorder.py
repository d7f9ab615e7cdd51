"""Records on their way to the thread that writes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sloscope import records
from sloscope.clock import SystemClock
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter, Tail, journal_files, read_journal
from sloscope.recorder import Recorder, encode

ID = new_request_id()


def recorder(events: Path) -> Recorder:
    clock = SystemClock()
    return Recorder(lambda: JournalWriter(events, "sidecar", clock, encode), clock, asyncio.get_running_loop())


def record(number: int) -> records.Record:
    return records.make(
        "chunks", request_id=ID, ordinal0=number, t_ns=[1], choice=[0], type=[0], tokens=None, forwarded_ns=[2]
    )


def written(events: Path) -> list[int]:
    return [
        each["ordinal0"]
        for path in journal_files(events)
        for each in read_journal(Tail(path))
        if each["kind"] == "chunks"
    ]


def test_a_record_that_waits_for_others_stays_in_order_with_them(tmp_path: Path) -> None:
    async def test() -> None:
        journal = recorder(tmp_path)
        for number in range(20):
            if number % 3:
                journal.put_later(record(number))
            else:
                journal.put(record(number))
        journal.close()

    asyncio.run(test())
    assert written(tmp_path) == list(range(20))


def test_a_record_that_nothing_follows_is_written_without_being_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        journal = recorder(tmp_path)
        journal.put_later(record(1))
        for _ in range(3000):
            if written(tmp_path) == [1]:
                break
            await asyncio.sleep(0.02)
        assert written(tmp_path) == [1]
        journal.close()

    asyncio.run(test())


def test_all_that_waits_is_written_when_it_closes(tmp_path: Path) -> None:
    async def test() -> None:
        journal = recorder(tmp_path)
        for number in range(3):
            journal.put_later(record(number))
        journal.close()

    asyncio.run(test())
    assert written(tmp_path) == [0, 1, 2]
