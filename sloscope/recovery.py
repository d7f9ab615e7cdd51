"""Closing what a dead recorder left open: an offered request must end, and the one word for this end is
unfinished(recorder_lost).
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sloscope import records
from sloscope.clock import SystemClock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter, Tail, is_live, read_journal, write_atomically

Key = tuple[str, int]  # request_id, attempt
_LOCK = "compact.lock"  # one for the whole events directory, since compaction ends lost requests, too
_SETTLED = ".recovered.json"  # files of dead writers in which nothing is open: never read again
_STAMPS = ("intended_ns", "send_ns", "arrived_ns", "body_complete_ns", "at_ns")
_STAMP_LISTS = ("t_ns", "forwarded_ns", "computed_ns", "handed_ns", "written_ns")


def recover(events: Path, observer: str, decode: Callable[[bytes], Any] = json.loads) -> int:
    """Ends every request of this observer that was begun by a dead writer and has no end; how many it ended.

    Idempotent, and safe beside live writers and beside another recovery: the directory's lock makes the second wait.
    The `end` carries the last stamp that was seen of the request, under the clock anchor of the writer that died.
    Raises JournalError when the ends cannot be written: nothing is counted as ended then.
    """
    directory = Path(events) / "journal" / observer
    if not directory.is_dir():
        return 0
    with _alone(Path(events)):
        settled = _load_settled(directory)
        files = _dead_files(directory, settled)
        if not files:
            return 0
        ended = _close_open_requests(Path(events), observer, files, decode)
        present = {path.name for path in directory.glob("*.jsonl")}
        _save_settled(directory, (settled & present) | {path.name for path in files})
        return ended


@contextmanager
def _alone(events: Path) -> Iterator[None]:
    fd = os.open(events / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _load_settled(directory: Path) -> set[str]:
    try:
        names = json.loads((directory / _SETTLED).read_bytes())
    except (FileNotFoundError, ValueError):
        return set()  # then everything is read once more, which is slow and harmless
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _save_settled(directory: Path, names: set[str]) -> None:
    write_atomically(directory / _SETTLED, json.dumps(sorted(names)).encode() + b"\n")


def _writer_of(path: Path) -> str:
    """A file's name without its sequence number: a writer that rotates keeps the lock of its newest file only."""
    return path.stem.rpartition("-")[0]


def _dead_files(directory: Path, settled: set[str]) -> list[Path]:
    """Files of writers that hold no lock any more.

    Looked at twice, because a writer may rotate between the listing and the look at its lock: the new file is
    there before the old one's lock is free, so the second listing has it.
    """
    dead: set[str] = set()
    for attempt in range(2):
        files = sorted(path for path in directory.glob("*.jsonl") if path.name not in settled)
        live = {_writer_of(path) for path in files if is_live(path)}
        unlocked = {_writer_of(path) for path in files} - live
        dead = unlocked if attempt == 0 else dead & unlocked
    return [path for path in files if _writer_of(path) in dead]


def _close_open_requests(events: Path, observer: str, files: Iterable[Path], decode: Callable[[bytes], Any]) -> int:
    """Two readings: which are open, then the last stamps of those alone."""
    begun: dict[Key, str] = {}  # → writer
    ended: set[Key] = set()
    for path in files:
        for record in read_journal(Tail(path), decode):
            if record["kind"] == "begin":
                begun[_key(record)] = _writer_of(path)
            elif record["kind"] == "end":
                ended.add(_key(record))
    open_requests = {key: writer for key, writer in begun.items() if key not in ended}
    if not open_requests:
        return 0
    last_ns: dict[Key, int] = {}
    anchors: dict[str, records.Record] = {}
    for path in files:
        writer_name = _writer_of(path)
        for record in read_journal(Tail(path), decode):
            if record["kind"] == "clock":
                anchors[writer_name] = record
            elif (key := _key_or_none(record)) in open_requests:
                assert key is not None
                last_ns[key] = max(last_ns.get(key, 0), _last_stamp(record))
    by_writer: dict[str, list[Key]] = {}
    for key, writer_name in open_requests.items():
        by_writer.setdefault(writer_name, []).append(key)
    with JournalWriter(events, observer, SystemClock()) as writer:
        for writer_name, keys in by_writer.items():
            # The stamps are of the dead writer's clock, which may be that of an earlier boot.
            if writer_name in anchors:
                writer.append(anchors[writer_name])
            for key in keys:
                writer.append(_end(key, last_ns[key]))
            if not writer.flush():
                raise JournalError(f"recovery: ends cannot be written: {writer.last_error}")
    return len(open_requests)


def _key(record: records.Record) -> Key:
    return record["request_id"], record.get("attempt", 0)


def _key_or_none(record: records.Record) -> Key | None:
    return _key(record) if "request_id" in record else None


def _last_stamp(record: records.Record) -> int:
    stamps = [record[name] for name in _STAMPS if name in record]
    stamps += [stamp for name in _STAMP_LISTS for stamp in record.get(name, ()) if stamp is not None]
    return max(stamps, default=0)


def _end(key: Key, end_ns: int) -> records.Record:
    request_id, attempt = key
    return records.make(
        "end",
        request_id=request_id,
        attempt=attempt or None,
        outcome="unfinished",
        reason="recorder_lost",
        end_ns=end_ns,
    )
