"""The record of one client process: a journal file, a callback, or both.

`open` begins a request and gives its `RequestRecorder`, which the transport then tells of bytes and of the end.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sloscope import records
from sloscope.client.receipt_writer import BEGIN_PATIENCE_S, Writer, WriterThread
from sloscope.client.recorder import RequestRecorder
from sloscope.clock import Clock, SystemClock
from sloscope.contract import Limits, Resolved
from sloscope.recorder import encode

# A batch is written when its first receipt is this old: with a tick every quarter second, or with batches spread over
# half a second, within a second.
BATCH_AGE_NS = 400_000_000


class ReceiptLog:
    """Writes the records of one process as observer `client`. Safe for threads, and after a fork.

    `on_end` is called with each recorder that has ended. `lag_since` gives the largest delay of the event loop since
    a stamp, where a loop is watched. Writing never raises: what could not be written is counted in `lost`.

    Who opens, ends and ticks also writes, until `start_thread` hands the writing to a thread.

    A log that was closed opens a new file for the next request. A forked child does the same; what was open at the
    fork is its parent's.
    """

    def __init__(
        self,
        events: Path | None,
        clock: Clock | None = None,
        on_end: Callable[[RequestRecorder], None] | None = None,
        lag_since: Callable[[int], int] | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        # The journal may be opened anew after the process has changed its directory.
        self._events = None if events is None else Path(events).absolute()
        self._on_end = on_end
        self._lag_since = lag_since
        self._begin()
        if self._writer is not None:
            self._writer.open()
        _logs.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: WriterThread | None = None
        self._writer = self._new_writer()
        self._late_begin = threading.Lock()  # the latest begin that came late: locked until it is on disk
        self._closing: list[Writer] = []  # which their threads have not closed yet
        self._lost_before = 0  # by those that are closed
        self._error_before = ""
        self._open: dict[int, RequestRecorder] = {}  # by identity
        # Recorders with receipts that are not written, oldest first; each stands here once.
        self._due: deque[RequestRecorder] = deque()
        self._abandoned: deque[tuple[RequestRecorder, int]] = deque()

    def _new_writer(self) -> Writer | None:
        return None if self._events is None else Writer(self._events, self.clock)

    def _writers(self) -> list[Writer]:
        return [*self._closing, *([] if self._writer is None else [self._writer])]

    @property
    def lost(self) -> int:
        """Records that could not be written."""
        return self._lost_before + sum(writer.lost for writer in self._writers())

    @property
    def last_error(self) -> str:
        said = (writer.last_error for writer in reversed(self._writers()) if writer.last_error)
        return next(said, self._error_before)

    @property
    def path(self) -> Path | None:
        return None if self._writer is None else self._writer.path

    def open(
        self,
        request_id: str,
        send_ns: int,
        *,
        streaming: bool | None,
        n_choices: int | None = 1,
        intended_ns: int | None = None,
        resolved: Resolved | None = None,
        lag_since: Callable[[int], int] | None = None,
        **fields: Any,
    ) -> RequestRecorder:
        """Records the begin, which is on disk when this returns; where a thread writes, nobody waits for a disk for
        longer than 5 ms, and not at all while it has yet to write a begin that was waited for so long. `fields` are
        those of a `begin` record.

        `streaming` and `n_choices` None: the request could not be read. `lag_since`: of the loop that this request is
        read in, if it is another than the log's.
        """
        limits = resolved.limits if resolved is not None else Limits()
        if self._events is not None:
            record = records.make(
                "begin",
                request_id=request_id,
                observer="client",
                role="client",
                clock_id=self.clock.clock_id,
                send_ns=send_ns,
                intended_ns=intended_ns,
                streaming=streaming,
                n_choices=n_choices,
                class_=(resolved.class_name or None) if resolved is not None else None,
                limits=limits.as_record() if resolved is not None else None,
                own_limits=dict(resolved.own) if resolved is not None and resolved.own else None,
                **fields,
            )
            self._write_begin(record)
        recorder = RequestRecorder(
            self,
            request_id,
            send_ns,
            intended_ns,
            streaming,
            n_choices,
            limits.min_tokens,
            lag_since or self._lag_since,
            resolved,
            fields,
        )
        self._open[id(recorder)] = recorder
        return recorder

    def _write_begin(self, record: records.Record) -> None:
        with self._lock:
            if self._thread is None:
                self._write([record])
                return
            written = threading.Lock()
            written.acquire()
            self._thread.put(self._encoded([record]), written)
            # The caller may be an event loop, which many requests that wait one after the other would hold up for long.
            if self.is_behind:
                return
        if not written.acquire(timeout=BEGIN_PATIENCE_S):
            self._late_begin = written

    def _write(self, batch: list[records.Record]) -> None:
        """In one write(2). The lock is held."""
        assert self._writer is not None
        lines = self._encoded(batch)
        if self._thread is not None:
            self._thread.put(lines)
        else:
            self._writer.write(lines)

    def _encoded(self, batch: list[records.Record]) -> list[bytes]:
        try:
            return [encode(record) for record in batch]
        except (TypeError, ValueError) as error:  # a caller's label that is no JSON
            assert self._writer is not None
            self._writer.give_up(batch, f"{type(error).__name__}: {error}")
            return []

    @property
    def is_behind(self) -> bool:
        """A begin that was waited for in vain is not on disk yet: nobody waits for those behind it."""
        return self._late_begin.locked()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests with receipts that are not written yet."""
        return len(self._due)

    def tick(self, now_ns: int, most: int | None = None) -> None:
        """Writes the batches that are old enough, `most` of them, in one write(2)."""
        while self._abandoned:
            recorder, end_ns = self._abandoned.popleft()
            recorder.end(end_ns, left="disconnect")
        if not self._is_due(now_ns):
            return
        left = len(self._due) if most is None else most
        batch: list[records.Record] = []
        with self._lock:
            while left > 0 and self._is_due(now_ns):
                batch += self._due.popleft().take_batch()
                left -= 1
            if batch:
                self._write(batch)

    def _is_due(self, now_ns: int) -> bool:
        return bool(self._due) and now_ns - self._due[0].pending_since_ns >= BATCH_AGE_NS

    def flush(self) -> None:
        """Writes every receipt that waits, those of requests that are still open too."""
        with self._lock:
            batch: list[records.Record] = []
            while self._due:
                batch += self._due.popleft().take_batch()
            if batch:
                self._write(batch)

    def start_thread(self, ticks: bool = True) -> None:
        """Writes in a thread of its own until `close`, so that no caller waits for a disk. `ticks`: it also ticks, for
        transports, whose callers have no loop that does.
        """
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = WriterThread(self._writer, _ticks_of(weakref.ref(self)) if ticks else lambda: True)

    def end_open(self, end_ns: int, left: str) -> None:
        """Ends what is open: its reader is leaving."""
        for recorder in list(self._open.values()):
            recorder.end(end_ns, left=left)

    def close(self) -> None:
        """Flushes and frees the journal file. Safe to call twice; open requests stay without an end."""
        self._put_rest()
        with self._lock:
            # Who opens a request from here on gets another thread and another file.
            thread, self._thread = self._thread, None
            writer, self._writer = self._writer, self._new_writer()
            if writer is not None:
                self._closing.append(writer)
        if thread is not None:
            thread.finish()
            if not thread.join():
                return  # it goes on with what it has once its disk answers
        elif writer is not None:
            writer.close()
        if writer is not None:
            with self._lock:
                self._closing.remove(writer)
                self._lost_before += writer.lost
                self._error_before = writer.last_error or self._error_before

    def _put_rest(self) -> None:
        self.tick(self.clock.monotonic_ns())
        self.flush()
        self._disown()

    def _disown(self) -> None:
        for recorder in list(self._open.values()):
            recorder.disown()
        self._open.clear()

    def __del__(self) -> None:
        # Nobody else has it, so nobody holds its lock. For the thread a finaliser may not wait.
        if "_abandoned" not in vars(self):
            return
        self._put_rest()
        if self._thread is not None:
            self._thread.finish()
        elif self._writer is not None:
            self._writer.close()

    def leave(self) -> None:
        """The process ends."""
        self.end_open(self.clock.monotonic_ns(), "disconnect")
        self.close()

    def forked(self) -> None:
        """In the child: files, threads and requests are the parent's."""
        self._disown()
        self._begin()

    def abandon(self, recorder: RequestRecorder, end_ns: int) -> None:
        """For a finaliser, which may run anywhere and so must take no lock: the next tick records the end."""
        self._abandoned.append((recorder, end_ns))

    def has_waiting(self, recorder: RequestRecorder) -> None:
        if self._events is not None:
            self._due.append(recorder)

    def may_end(self, recorder: RequestRecorder) -> bool:
        """True once for each recorder, in whatever threads its reader, its closer and the ticks run."""
        return self._open.pop(id(recorder), None) is not None

    def has_ended(self, recorder: RequestRecorder) -> None:
        if self._events is not None:
            with self._lock:
                self._write([*recorder.take_batch(), recorder.end_record()])
        if self._on_end is not None:
            self._on_end(recorder)


_logs: weakref.WeakSet[ReceiptLog] = weakref.WeakSet()


def _ticks_of(log: weakref.ref[ReceiptLog]) -> Callable[[], bool]:
    """Its thread must not keep alive a log that nobody else has."""

    def tick() -> bool:
        living = log()
        if living is None:
            return False
        living.tick(living.clock.monotonic_ns())
        return True

    return tick


def _forked() -> None:
    for log in list(_logs):
        log.forked()


@atexit.register
def leave_all() -> None:
    """The process ends: what is open has, and is recorded. Safe to call twice."""
    for log in list(_logs):
        log.leave()


os.register_at_fork(after_in_child=_forked)
