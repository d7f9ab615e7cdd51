"""The raw record on disk: append-only files, one writer each, a tolerant reader, and the manifest.

`EVENTS/journal/<observer>/<boot8>-<pid>-<start_ns>-<seq>.jsonl`. A writer holds its file's flock for as long as it
lives, so a dead writer's file is known by the free lock: pids are reused, locks are not.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sloscope import records
from sloscope.clock import Clock, boot_id
from sloscope.errors import JournalError, RecordError, UnwritableError
from sloscope.units import NS_PER_S

CLOCK_EVERY_NS = 10 * NS_PER_S
WALL_STEP_NS = 50_000_000  # a wall clock that moved this much against the monotonic one was stepped
_NAME = re.compile(r"[0-9A-Za-z]{1,8}(-[0-9]{1,20}){3}\.jsonl")
Encode = Callable[[Any], bytes]


def encode_json(record: Any) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


class JournalWriter:
    """Appends records to a file of its own.

    `write` is one write(2): when it returns True the record survives the process. `append` buffers until `flush` or
    `write`. Neither raises for
    a full or broken disk: the observed stream goes on, and `lost` counts what could not be written. No fsync: a
    record survives kill -9, not a
    power cut.
    """

    def __init__(
        self,
        events: Path,
        observer: str,
        clock: Clock,
        encode: Encode = encode_json,
        max_bytes: int = 256 << 20,
    ) -> None:
        assert observer in records.OBSERVERS
        self._directory = Path(events) / "journal" / observer
        self._clock = clock
        self._encode = encode
        self._max_bytes = max_bytes
        self._buffer: list[bytes] = []
        self._sequence = 0
        self._start_ns = clock.monotonic_ns()
        self._fd = -1
        self._torn = False
        self._anchor_mono = self._anchor_wall = 0
        self._anchored = False  # the latest anchor is on disk
        self._in_file = 0  # records
        self.written = 0  # records
        self.lost = 0  # records
        self.bytes = 0
        self.file_bytes = 0
        self.last_error: str = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UnwritableError(f"events directory {str(events)!r}: {error.strerror}") from None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def write(self, record: records.Record) -> bool:
        """What is buffered and this record in one write(2). False: lost, counted, and the reason in `last_error`."""
        self._buffer.append(self._encode(record))
        return self.flush()

    def append(self, record: records.Record) -> None:
        self._buffer.append(self._encode(record))

    def flush(self) -> bool:
        if not self._buffer:
            return True
        try:
            self._tend()
        except OSError as error:
            return self._drop(error)
        return self._put(self._buffer)

    def _put(self, lines: list[bytes]) -> bool:
        count = len(lines)
        # After a torn write the next one starts on a line of its own.
        data = (b"\n" if self._torn else b"") + b"\n".join(lines) + b"\n"
        try:
            done = os.write(self._fd, data)
        except OSError as error:
            return self._drop(error)
        self._buffer = []
        self.bytes += done
        self.file_bytes += done
        self._torn = done < len(data) and data[done - 1 : done] != b"\n"
        if done < len(data):
            whole = data[:done].count(b"\n") - (1 if data[:1] == b"\n" else 0)
            self.written += max(whole, 0)
            self.lost += count - max(whole, 0)
            self._in_file += max(whole, 0)
            self._anchored = False  # it may have been in what was cut off
            self.last_error = "short write"
            return False
        self.written += count
        self._in_file += count
        return True

    def _drop(self, error: OSError) -> bool:
        self.lost += len(self._buffer)
        self._buffer = []
        self._anchored = False  # it may have been among them
        self.last_error = error.strerror or errno.errorcode.get(error.errno or 0, "error")
        return False

    def _tend(self) -> None:
        """Rotate a full file or one that was deleted, and set a new anchor every ten seconds, after a step of the wall
        clock, and when the last one was lost.
        """
        deleted = os.fstat(self._fd).st_nlink == 0
        if deleted:
            self.lost += self._in_file
            self._in_file = 0
            self.last_error = "the journal file was deleted"
            self._directory.mkdir(parents=True, exist_ok=True)
        if deleted or self.file_bytes >= self._max_bytes:
            # The new lock is held before the old one is free: at no moment does this writer look dead.
            old = self._fd
            self._open()
            os.close(old)
            return
        mono, wall = self._clock.monotonic_ns(), self._clock.wall_ns()
        if mono - self._anchor_mono >= CLOCK_EVERY_NS or self._stepped(mono, wall) or not self._anchored:
            self._buffer.insert(0, self._clock_record(mono, wall))

    def _stepped(self, mono: int, wall: int) -> bool:
        return abs((wall - self._anchor_wall) - (mono - self._anchor_mono)) >= WALL_STEP_NS

    def watch_wall(self) -> None:
        """For a writer with nothing to write, now and then: sets a new anchor if the wall clock was stepped.

        With the next record it would come too late: what arrived since the step is placed by the anchor before it.
        """
        mono, wall = self._clock.monotonic_ns(), self._clock.wall_ns()
        if self._stepped(mono, wall):
            self._buffer.append(self._clock_record(mono, wall))
            self.flush()

    def _clock_record(self, mono: int, wall: int) -> bytes:
        self._anchor_mono, self._anchor_wall, self._anchored = mono, wall, True
        return self._encode(records.make("clock", mono_ns=mono, wall_ns=wall, clock_id=self._clock.clock_id))

    def _open(self) -> None:
        name = f"{boot_id()[:8]}-{os.getpid()}-{self._start_ns}-{self._sequence}.jsonl"
        self._sequence += 1
        self._path = self._directory / name
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        # Waits only for `is_live` of a reader, which holds the lock of a new file for a moment.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.file_bytes = self._in_file = 0
        self._torn = False
        waiting, self._buffer = self._buffer, []
        self._put([self._clock_record(self._clock.monotonic_ns(), self._clock.wall_ns())])
        self._buffer = waiting

    def close(self) -> None:
        """Flushes and frees the lock. Safe to call twice."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def journal_files(events: Path) -> list[Path]:
    """Every journal file of the directory, oldest name first within an observer."""
    return sorted(path for path in (Path(events) / "journal").glob("*/*.jsonl") if path.is_file())


def is_journal_name(name: str) -> bool:
    """Whether a writer here calls its files so: no path is among them."""
    return _NAME.fullmatch(name) is not None


def writer_of(path: Path) -> str:
    """Which process wrote the file: its name without the sequence number, boot8-pid-start."""
    return path.stem.rpartition("-")[0] or path.stem


def order_of(path: Path) -> tuple[str, int, str]:
    """Sorts the files of each writer in the order in which they were written."""
    number = path.stem.rpartition("-")[2]
    return writer_of(path), int(number) if number.isdecimal() else 0, path.name


def is_live(path: Path) -> bool:
    """Whether some process still writes this file, which its lock tells."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@dataclass(slots=True)
class Tail:
    """Where a reader stands in one file, and what it had to skip."""

    path: Path
    offset: int = 0  # bytes consumed: always the start of a line
    bad_lines: int = 0
    torn: bool = False  # the last line has no end; it is not consumed
    problems: list[str] = field(default_factory=list)  # at most ten, for people


def read_journal(
    tail: Tail, decode: Callable[[bytes], Any] = json.loads, block: int = 1 << 20
) -> Iterator[records.Record]:
    """The records from `tail.offset` on. Bad lines are skipped, counted and named; a torn last line stays unread.

    `tail` is advanced as records are yielded, so a caller that stops early knows where it stopped.
    """
    with open(tail.path, "rb", buffering=block) as file:
        file.seek(tail.offset)
        tail.torn = False
        for line in file:
            if not line.endswith(b"\n"):
                tail.torn = True
                return
            start, tail.offset = tail.offset, tail.offset + len(line)
            if line == b"\n":
                continue
            try:
                record = records.check(decode(line))
            except (ValueError, RecordError) as error:
                tail.bad_lines += 1
                if len(tail.problems) < 10:
                    why = str(error) if isinstance(error, RecordError) else "not JSON"
                    tail.problems.append(f"{tail.path.name} at byte {start}: {why}")
                continue
            yield record


@dataclass(slots=True)
class Manifest:
    """Which files are live, replaced as a whole, so that a reader finds each record in exactly one place.

    `journals` maps a journal file (relative path) to the byte up to which its records are in the tables; `tables`
    maps a table to its Parquet
    files (relative paths).
    """

    generation: int = 0
    journals: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)  # compaction's own notes, such as its pending file

    @staticmethod
    def path(events: Path) -> Path:
        return Path(events) / "manifest.json"

    @classmethod
    def load(cls, events: Path) -> "Manifest":
        try:
            text = cls.path(events).read_bytes()
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise JournalError(f"manifest {str(cls.path(events))!r}: cannot be read: {error.strerror}") from None
        try:
            body = json.loads(text)
            if body["v"] != 1:
                raise JournalError(f"manifest: v: {body['v']!r} is not readable; accepted: 1")
            manifest = cls(body["generation"], body["journals"], body["tables"], body["state"])
            manifest._check()
            return manifest
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise JournalError(
                f"manifest {str(cls.path(events))!r}: damaged ({error}); accepted: what compaction wrote; without the "
                "file the tables are made anew from the journal"
            ) from None

    def _check(self) -> None:
        """Raises TypeError for a field that is not what compaction writes."""
        whole = {
            "generation": type(self.generation) is int,
            "journals": isinstance(self.journals, dict) and all(type(n) is int for n in self.journals.values()),
            "tables": isinstance(self.tables, dict)
            and all(isinstance(n, list) and all(isinstance(f, str) for f in n) for n in self.tables.values()),
            "state": isinstance(self.state, dict),
        }
        for name, fits in whole.items():
            if not fits:
                raise TypeError(f"{name}: has another type")

    def save(self, events: Path) -> None:
        body = {
            "v": 1,
            "generation": self.generation,
            "journals": self.journals,
            "tables": self.tables,
            "state": self.state,
        }
        write_atomically(self.path(events), json.dumps(body, sort_keys=True, indent=1).encode() + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or the old one: written beside, synced, renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UnwritableError(f"{str(path)!r}: cannot be written: {error.strerror}") from None
