"""Closing what a dead recorder left open: an offered request must end, and the one word for this end is
unfinished(recorder_lost).

`recover` does it alone, for a sidecar that starts again. Compaction, which has read the journals anyway, finds the
open requests itself and shares the rest: one at a time (`directory_lock`), whose recorder is dead (`dead_writers`),
and the record (`write_ends`).
"""

import fcntl
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sloscope import records
from sloscope.clock import SystemClock
from sloscope.errors import JournalError, UnwritableError
from sloscope.journal import JournalWriter, Tail, is_live, order_of, read_journal, write_atomically, writer_of

Key = tuple[str, int]  # request_id, attempt
LOCK_WAIT_S = 10.0
_LOCK = "compact.lock"  # one for the whole events directory, since compaction ends lost requests, too
_SETTLED = ".recovered.json"  # files of dead writers in which nothing is open: never read again
_STAMPS = ("intended_ns", "send_ns", "arrived_ns", "body_complete_ns", "at_ns")
_STAMP_LISTS = ("t_ns", "forwarded_ns", "computed_ns", "handed_ns", "written_ns")


class Lost(NamedTuple):
    """A request that its recorder will never end."""

    writer: str
    request_id: str
    attempt: int
    end_ns: int  # the last stamp that was seen of it, of the dead writer's clock


def recover(events: Path, observer: str, decode: Callable[[bytes], Any] = json.loads) -> int:
    """Ends every request of this observer that was begun by a dead writer and has no end; how many it ended.

    Idempotent, and safe beside live writers and beside another recovery: the directory's lock makes the second wait.
    The `end` carries the last stamp that was seen of the request, under the clock anchor of the writer that died.
    Raises JournalError when the ends cannot be written: nothing is counted as ended then. What compaction ended first
    is not among the number: it stands in that pass's report.
    """
    directory = Path(events) / "journal" / observer
    if not directory.is_dir():
        return 0
    with directory_lock(Path(events), wait_s=None):
        settled = _load_settled(directory)
        dead = dead_writers(directory, settled)
        files = [path for path in _unsettled(directory, settled) if writer_of(path) in dead]
        if not files:
            return 0
        lost, anchors = _open_requests(files, decode)
        ended = write_ends(Path(events), observer, lost, anchors)
        done = {path.name for path in files}
        present = {path.name for path in directory.glob("*.jsonl")}
        _save_settled(directory, (settled & present) | done)
        return ended


@contextmanager
def directory_lock(events: Path, wait_s: float | None = LOCK_WAIT_S) -> Iterator[None]:
    """One compaction or recovery of the directory at a time. None waits for as long as the other one takes.

    JournalError when the lock cannot be had, or another one does not finish within `wait_s` seconds.
    """
    try:
        fd = os.open(events / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise UnwritableError(f"events directory {str(events)!r}: {error.strerror}") from None
    try:
        if wait_s is None:
            fcntl.flock(fd, fcntl.LOCK_EX)
        else:
            _lock_within(fd, wait_s, events)
        yield
    finally:
        os.close(fd)


def _lock_within(fd: int, wait_s: float, events: Path) -> None:
    until = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                text = f"events directory {str(events)!r}: another compaction has been running for {wait_s:g} s"
                raise JournalError(text) from None
            time.sleep(0.05)


def dead_writers(directory: Path, settled: Collection[str] = ()) -> set[str]:
    """Writers of one observer's directory that hold no lock any more; names of files in `settled` are not looked at.

    Looked at twice, because a writer may rotate between the listing and the look at its lock: the new file is
    there before the old one's lock is free, so the second listing has it. And sizes are looked at before locks: a
    writer takes its lock before it writes, so one whose only file is empty may be about to take it.
    """
    dead: set[str] = set()
    for attempt in range(2):
        files = _unsettled(directory, settled)
        locked_once = {writer_of(path) for path in files if _is_written(path)}
        unlocked = locked_once - {writer_of(path) for path in files if is_live(path)}
        dead = unlocked if attempt == 0 else dead & unlocked
    return dead


def _is_written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _unsettled(directory: Path, settled: Collection[str]) -> list[Path]:
    return sorted((path for path in directory.glob("*.jsonl") if path.name not in settled), key=order_of)


def write_ends(events: Path, observer: str, lost: Iterable[Lost], anchors: Mapping[str, records.Record]) -> int:
    """Ends each as unfinished(recorder_lost), under the last clock anchor of its writer. Returns how many.

    They go to a fresh journal of the same observer, so they are records like any other. Needs the directory's lock.
    JournalError when they cannot be written.
    """
    by_writer: dict[str, list[Lost]] = defaultdict(list)
    for each in lost:
        by_writer[each.writer].append(each)
    if not by_writer:
        return 0
    with JournalWriter(events, observer, SystemClock()) as journal:
        for writer, ends in by_writer.items():
            # The stamps are of the dead writer's clock, which may be that of an earlier boot.
            if writer in anchors:
                journal.append(anchors[writer])
            for end in ends:
                journal.append(_end(end))
            if not journal.flush():
                if journal.written <= 1:
                    journal.path.unlink(missing_ok=True)  # no end is in it, and the next try makes a file of its own
                raise UnwritableError(f"recovery: ends cannot be written: {journal.last_error}")
    return sum(len(ends) for ends in by_writer.values())


def _end(lost: Lost) -> records.Record:
    return records.make(
        "end",
        request_id=lost.request_id,
        attempt=lost.attempt or None,
        outcome="unfinished",
        reason="recorder_lost",
        end_ns=lost.end_ns,
    )


def _load_settled(directory: Path) -> set[str]:
    try:
        names = json.loads((directory / _SETTLED).read_bytes())
    except (FileNotFoundError, ValueError):
        return set()  # then everything is read once more, which is slow and harmless
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _save_settled(directory: Path, names: set[str]) -> None:
    write_atomically(directory / _SETTLED, json.dumps(sorted(names)).encode() + b"\n")


def _open_requests(
    files: Iterable[Path], decode: Callable[[bytes], Any]
) -> tuple[list[Lost], dict[str, records.Record]]:
    """What these files leave open, and the last anchor of each writer. Two readings: which, then their last stamps."""
    begun: dict[Key, str] = {}  # → writer
    ended: set[Key] = set()
    for path in files:
        for record in read_journal(Tail(path), decode):
            if record["kind"] == "begin":
                begun[_key(record)] = writer_of(path)
            elif record["kind"] == "end":
                ended.add(_key(record))
    still_open = {key: writer for key, writer in begun.items() if key not in ended}
    anchors: dict[str, records.Record] = {}
    if not still_open:
        return [], anchors
    last_ns: dict[Key, int] = {}
    for path in files:
        for record in read_journal(Tail(path), decode):
            if record["kind"] == "clock":
                anchors[writer_of(path)] = record
            elif "request_id" in record and _key(record) in still_open:
                key = _key(record)
                last_ns[key] = max(last_ns.get(key, 0), _last_stamp(record))
    return [Lost(writer, *key, last_ns[key]) for key, writer in still_open.items()], anchors


def _key(record: records.Record) -> Key:
    return record["request_id"], record.get("attempt", 0)


def _last_stamp(record: records.Record) -> int:
    stamps = [record[name] for name in _STAMPS if name in record]
    stamps += [stamp for name in _STAMP_LISTS for stamp in record.get(name, ()) if stamp is not None]
    return max(stamps, default=0)
