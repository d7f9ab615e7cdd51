"""Who writes a receipt log's records: the caller's own thread, or one that no disk can make the caller wait for.

Records come encoded. A thread that encoded them would hold the interpreter for up to its switch interval, 5 ms, while
a loop waits for it with sockets to read and requests to send.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import NamedTuple, cast

from sloscope.clock import Clock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter
from sloscope.recorder import encode
from sloscope.records import Record

BEGIN_PATIENCE_S = 0.005  # how long a request waits for its `begin` to be on disk
_CLOSE_PATIENCE_S = 2.0  # how long a client that closes waits for a disk that does not answer
# Beyond either the disk does not follow and records are dropped.
_MAX_WAITING = 50_000  # batches
_MAX_WAITING_BYTES = 64 << 20
_MOST_AT_ONCE = 512  # batches of one write(2)
_TICK_S = 0.25


class Writer:
    """A journal file of the observer `client`, opened anew where it could not be made. One thread at a time."""

    def __init__(self, events: Path, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._lost = 0
        self._last_error = ""
        self._journal: JournalWriter | None = None

    def open(self) -> JournalWriter:
        """The file, which is opened if it is not. Raises JournalError for a directory that cannot be used."""
        if self._journal is None:
            self._journal = JournalWriter(self._events, "client", self._clock, encode)
        return self._journal

    @property
    def lost(self) -> int:
        return self._lost + (0 if self._journal is None else self._journal.lost)

    @property
    def last_error(self) -> str:
        return ("" if self._journal is None else self._journal.last_error) or self._last_error

    @property
    def path(self) -> Path | None:
        return None if self._journal is None else self._journal.path

    def write(self, lines: list[bytes]) -> None:
        """In one write(2)."""
        try:
            journal = self.open()
        except JournalError as error:
            self.give_up(lines, str(error))
            return
        for line in cast(list[Record], lines):  # `encode` passes them on as they are
            journal.append(line)
        journal.flush()

    def give_up(self, lines: Sized, why: str) -> None:
        self._lost += len(lines)
        self._last_error = why

    def close(self) -> None:
        """Frees the file; the next write opens another."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()
            self._lost += journal.lost
            self._last_error = journal.last_error or self._last_error


class _Item(NamedTuple):
    lines: list[bytes]
    size: int
    written: threading.Lock | None  # released when the lines are on disk, or were given up


class WriterThread:
    """Writes in a thread of its own, in the order in which it was given: what waits together goes in one write(2).
    Nobody waits for it without a limit.
    """

    def __init__(self, writer: Writer | None, tick: Callable[[], bool]) -> None:
        """`tick` is called every quarter second; the thread ends when it says no. None: there is nothing to write."""
        self._writer = writer
        self._tick = tick
        # Its put is reentrant, so that a finaliser may put something in.
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._put_bytes = self._done_bytes = 0  # each counted by one side alone
        self._thread = threading.Thread(target=self._run, name="sloscope-receipts", daemon=True)
        self._thread.start()

    def put(self, lines: list[bytes], written: threading.Lock | None = None) -> None:
        """`written`: as in _Item. One thread at a time puts."""
        assert self._writer is not None
        size = sum(map(len, lines))
        waiting = self._put_bytes - self._done_bytes
        if self._queue.qsize() < _MAX_WAITING and (not waiting or waiting + size <= _MAX_WAITING_BYTES):
            self._put_bytes += size
            self._queue.put(_Item(lines, size, written))
            return
        self._writer.give_up(lines, "the disk does not follow")
        if written is not None:
            written.release()

    def finish(self) -> None:
        """Closes the file after what was put in before."""
        self._queue.put(None)

    def join(self) -> bool:
        """Whether it has finished: a disk may take longer than anybody wants to wait."""
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_PATIENCE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        tick_at = time.monotonic() + _TICK_S
        item: _Item | None
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, tick_at - time.monotonic()))
            except queue.Empty:
                tick_at = time.monotonic() + _TICK_S
                if self._ticks():
                    continue
                break
            items: list[_Item] = []
            while item is not None:
                items.append(item)
                if len(items) == _MOST_AT_ONCE:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            self._write(items)
            if item is None:
                break
        if self._writer is not None:
            self._writer.close()

    def _ticks(self) -> bool:
        try:
            return self._tick()
        except Exception as error:
            if self._writer is not None:
                self._writer.give_up([], f"{type(error).__name__}: {error}")
            return True

    def _write(self, items: list[_Item]) -> None:
        lines = [line for item in items for line in item.lines]
        if lines:
            assert self._writer is not None
            try:
                self._writer.write(lines)
            except Exception as error:
                # Nothing may end the thread that requests wait for.
                self._writer.give_up(lines, f"{type(error).__name__}: {error}")
        for item in items:
            self._done_bytes += item.size
            if item.written is not None:
                item.written.release()
