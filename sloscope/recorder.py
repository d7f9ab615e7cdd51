"""The journal behind a thread, so that a slow disk delays no stream."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import orjson

from sloscope.clock import Clock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter
from sloscope.records import Record
from sloscope.units import NS_PER_S

BEGIN_PATIENCE_S = 0.005  # how long a request waits for its `begin` to be on disk
_MAX_WAITING = 50_000  # records; beyond, the disk does not follow and records are dropped
_BATCH = 512
_GATHER_S = 0.05  # for which a record that is in no hurry waits for others
_IDLE_S = 1.0  # without a record; then somebody has to look whether the wall clock was stepped

Done = Callable[[], None]


def encode(record: Any) -> bytes:
    """Records arrive encoded, since the loop does it faster than two threads would share the interpreter."""
    return record if type(record) is bytes else orjson.dumps(record)


class Recorder:
    """Hands records to one writer thread, in order. Never raises and never blocks the loop."""

    def __init__(self, open_writer: Callable[[], JournalWriter], clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._open_writer = open_writer
        self._writer: JournalWriter | None = None
        self._opened_ns = 0  # when opening was last tried
        self._clock = clock
        self._loop = loop
        self._queue: queue.SimpleQueue[tuple[bytes, int, Done | None] | None] = queue.SimpleQueue()
        self._later: list[bytes] = []  # records that wait for others
        self._in_hand_ns = 0  # when the oldest record that is not on disk yet was put, 0 for none
        self.dropped = 0  # records that did not even reach the writer
        self.late_begins = 0
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, record: Record, written: Done | None = None) -> None:
        """`written` is called in the loop once the record's write(2) returned, or was given up."""
        if self._later:
            self._hand_over()
        self._put(orjson.dumps(record), written)

    def put_later(self, record: Record) -> None:
        """In order with the others, at most 50 ms later: each time that the thread wakes costs the loop."""
        if not self._later:
            self._loop.call_later(_GATHER_S, self._hand_over)
        self._later.append(orjson.dumps(record))

    def _hand_over(self) -> None:
        later, self._later = self._later, []
        for data in later:
            self._put(data, None)

    def _put(self, data: bytes, written: Done | None) -> None:
        if self._queue.qsize() >= _MAX_WAITING:
            self.dropped += 1
            if written is not None:
                self._loop.call_soon(written)
            return
        self._queue.put((data, self._clock.monotonic_ns(), written))

    def begin(self, record: Record, then: Done) -> None:
        """`then` runs once, when the record is on disk or after 5 ms, whichever is first."""
        waiting = True

        def go_on(late: bool) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                timer.cancel()
                self.late_begins += late
                then()

        timer = self._loop.call_later(BEGIN_PATIENCE_S, go_on, True)
        self.put(record, lambda: go_on(False))

    @property
    def lag_ns(self) -> int:
        """Age of the oldest record that waits to be written."""
        since = self._in_hand_ns
        return self._clock.monotonic_ns() - since if since else 0

    @property
    def written(self) -> int:
        return self._writer.written if self._writer else 0

    @property
    def lost(self) -> int:
        return (self._writer.lost if self._writer else 0) + self.dropped

    @property
    def bytes_written(self) -> int:
        return self._writer.bytes if self._writer else 0

    def close(self) -> None:
        """Writes what is waiting and frees the file."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join()
        if self._writer is not None:
            self._writer.close()

    def _run(self) -> None:
        self._open()  # now, so that the first request does not wait for it
        closing = False
        while not closing:
            try:
                item = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._watch_wall()
                continue
            lines: list[bytes] = []
            done: list[Done] = []
            while item is not None:
                data, put_ns, written = item
                if not lines:
                    self._in_hand_ns = put_ns
                lines.append(data)
                if written is not None:
                    done.append(written)
                if len(lines) >= _BATCH:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            closing = item is None
            self._write(lines)
            self._in_hand_ns = 0
            if done:
                self._tell(done)

    def _write(self, lines: list[bytes]) -> None:
        try:
            writer = self._writer or self._open()
            if writer is not None:
                for line in cast(list[Record], lines):  # `encode` passes them on as they are
                    writer.append(line)
                writer.flush()
                return
        except Exception as error:  # no fault of the journal may end the thread that requests wait for
            self.last_error = type(error).__name__
        self.dropped += len(lines)

    def _watch_wall(self) -> None:
        try:
            if self._writer is not None:
                self._writer.watch_wall()
        except Exception as error:  # as in `_write`
            self.last_error = type(error).__name__

    def _open(self) -> JournalWriter | None:
        """The writer, or None: an events directory that cannot be used is tried again every second."""
        now = self._clock.monotonic_ns()
        if self._opened_ns and now - self._opened_ns < NS_PER_S:
            return None
        self._opened_ns = now
        try:
            self._writer = self._open_writer()
        except JournalError as error:
            self.last_error = str(error)
        return self._writer

    def _tell(self, done: list[Done]) -> None:
        def call() -> None:
            for callback in done:
                callback()

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more
