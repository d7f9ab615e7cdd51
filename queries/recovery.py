"""Requests whose recorder died: their end is recorded as unfinished(recorder_lost), once.

A recorder is dead when the lock of its journal is free, which is asked before the journal is read; whatever it had
to say has then been read. The end goes to a fresh journal of the same observer, so it is a record like any other.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from queries.histories import Request
from queries.intake import Intake, Line, Problems, read_lines
from sloscope import records
from sloscope.clock import SystemClock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter, Manifest

LOCK_WAIT_S = 10.0
ROTATION_S = 0.05  # between closing a full file and opening the next a writer holds no lock


@contextlib.contextmanager
def directory_lock(events: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """One compaction or recovery at a time. JournalError when another one does not finish within `wait_s` seconds."""
    try:
        fd = os.open(events / "compact.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise JournalError(f"events directory {str(events)!r}: {error.strerror}") from None
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    text = f"events directory {str(events)!r}: another compaction has been running for {wait_s:g} s"
                    raise JournalError(text) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def load_pending(events: Path, manifest: Manifest, problems: Problems) -> dict[str, Request]:
    """The requests that earlier passes did not finish, read again from their journal lines."""
    name = manifest.state.get("pending")
    if not name:
        return {}
    requests = {}
    try:
        text = (events / name).read_text()
        for line in text.splitlines():
            body = json.loads(line)
            flat = [(journal, list(zip(*[iter(spans)] * 3, strict=True))) for journal, spans in body["sources"]]
            requests[body["request_id"]] = reread(events, body["request_id"], flat, problems)
    except (OSError, ValueError, KeyError) as error:
        raise JournalError(f"pending file {name!r}: damaged ({error})") from None
    return requests


def reread(
    events: Path, request_id: str, sources: Iterable[tuple[str, list[tuple[int, int, int]]]], problems: Problems
) -> Request:
    """A request from its journal lines. Two passes over the same lines give the same request."""
    request = Request(request_id)
    for journal, spans in sorted(sources):
        try:
            for line in read_lines(events, journal, spans):
                request.add(line)
        except FileNotFoundError:
            problems.add(f"{journal}: is gone, but request {request_id} still needs it")
    return request


def pending_text(requests: Iterable[Request]) -> bytes:
    lines = [
        json.dumps(
            {"request_id": request.request_id, "sources": [[j, s.tolist()] for j, s in request.sources.items()]},
            separators=(",", ":"),
        )
        for request in requests
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def feed(requests: dict[str, Request], line: Line) -> None:
    request_id = line.record.get("request_id")
    if request_id is not None:
        request = requests.get(request_id)
        if request is None:
            request = requests[request_id] = Request(request_id)
        request.add(line)


def close_lost(events: Path, requests: Iterable[Request], intake: Intake, observer: str | None = None) -> int:
    """Writes the ends that dead recorders owe. Needs the directory's lock. Returns how many."""
    dead = intake.dead_writers
    owed: dict[str, list[records.Record]] = {}
    suspects: set[str] = set()
    for request in requests:
        for seen_by, attempt, writer, side in request.open_sides():
            if writer in dead and observer in (None, seen_by):
                suspects.add(writer)
                end = records.make(
                    "end",
                    request_id=request.request_id,
                    attempt=attempt or None,
                    outcome="unfinished",
                    reason="recorder_lost",
                    end_ns=side.last_stamp_ns,
                )
                owed.setdefault(writer, []).append(end)
    if not owed:
        return 0
    time.sleep(ROTATION_S)
    closed = 0
    by_observer: dict[str, list[records.Record]] = {}
    for writer, ends in owed.items():
        if not intake.new_files_of(writer):
            by_observer.setdefault(writer.partition("/")[0], []).extend(ends)
    for name, ends in sorted(by_observer.items()):
        with JournalWriter(events, name, SystemClock()) as journal:
            for end in ends:
                journal.append(end)
            if not journal.flush():
                raise JournalError(f"events directory {str(events)!r}: {journal.last_error}")
        closed += len(ends)
    return closed


def recover(events: Path, observer: str | None = None) -> int:
    """Closes what dead recorders left open, of one observer or of all. Returns how many ends were written.

    Safe to call at any time and from several processes: an end that is there is never written again.
    """
    events = Path(events)
    if not events.is_dir():
        return 0
    with directory_lock(events):
        manifest, problems = Manifest.load(events), Problems()
        requests = load_pending(events, manifest, problems)
        intake = Intake(events, dict(manifest.journals), dict(manifest.state.get("anchors", {})), problems)
        for lines, _ in intake.blocks():
            for line in lines:
                feed(requests, line)
        return close_lost(events, requests.values(), intake, observer)
