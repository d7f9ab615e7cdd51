"""The record of one client process: a journal file, a callback, or both.

`open` begins a request and gives its `RequestRecorder`, which the transport then tells of bytes and of the end.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from sloscope import records
from sloscope.client.recorder import RequestRecorder
from sloscope.clock import Clock, SystemClock
from sloscope.contract import Limits, Resolved
from sloscope.journal import JournalWriter

# A batch is written when its first receipt is this old: with a tick every quarter second, or with batches spread over
# half a second, within a second.
BATCH_AGE_NS = 400_000_000
_TICK_S = 0.25


class ReceiptLog:
    """Writes the records of one process as observer `client`. Safe for threads, and after a fork.

    `on_end` is called with each recorder that has ended. `lag_since` gives the largest delay of the event loop since
    a stamp, where a loop is watched. Writing never raises: what could not be written is counted in `lost`.
    """

    def __init__(
        self,
        events: Path | None,
        clock: Clock | None = None,
        on_end: Callable[[RequestRecorder], None] | None = None,
        lag_since: Callable[[int], int] | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._events = events
        self._on_end = on_end
        self._lag_since = lag_since
        self._thread: threading.Thread | None = None
        # Recorders with receipts that are not written, oldest first; each stands here once.
        self._due: deque[RequestRecorder] = deque()
        self._abandoned: deque[tuple[RequestRecorder, int]] = deque()
        self._open_journal()

    def _open_journal(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._journal = (
            None if self._events is None else JournalWriter(self._events, "client", self.clock, orjson.dumps)
        )

    @property
    def lost(self) -> int:
        """Records that could not be written."""
        return 0 if self._journal is None else self._journal.lost

    @property
    def last_error(self) -> str:
        return "" if self._journal is None else self._journal.last_error

    @property
    def path(self) -> Path | None:
        return None if self._journal is None else self._journal.path

    def open(
        self,
        request_id: str,
        send_ns: int,
        *,
        streaming: bool | None,
        n_choices: int | None = 1,
        intended_ns: int | None = None,
        resolved: Resolved | None = None,
        **fields: Any,
    ) -> RequestRecorder:
        """Records the begin, which is on disk when this returns. `fields` are those of a `begin` record.

        `streaming` and `n_choices` None: the request could not be read.
        """
        if self._pid != os.getpid():
            # A forked child: the file belongs to the parent, and so do the receipts that wait.
            self._due.clear()
            self._abandoned.clear()
            self._thread = None
            self._open_journal()
        limits = resolved.limits if resolved is not None else Limits()
        if self._journal is not None:
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
            with self._lock:
                self._journal.write(record)
        return RequestRecorder(self, request_id, send_ns, intended_ns, streaming, n_choices, limits.min_tokens)

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
        with self._lock:
            while left > 0 and self._is_due(now_ns):
                self._append_chunks(self._due.popleft())
                left -= 1
            if self._journal is not None:
                self._journal.flush()

    def _is_due(self, now_ns: int) -> bool:
        return bool(self._due) and now_ns - self._due[0].pending_since_ns >= BATCH_AGE_NS

    def flush(self) -> None:
        """Writes every receipt that waits, those of requests that are still open too."""
        with self._lock:
            while self._due:
                self._append_chunks(self._due.popleft())
            if self._journal is not None:
                self._journal.flush()

    def start_ticking(self) -> None:
        """Ticks in a thread of its own, for transports that have no loop. Stops at `close`."""
        if self._thread is None and self._journal is not None:
            self._thread = threading.Thread(target=self._tick_until_closed, name="sloscope-receipts", daemon=True)
            self._thread.start()

    def _tick_until_closed(self) -> None:
        stop = self._stop
        while not stop.wait(_TICK_S):
            self.tick(self.clock.monotonic_ns())

    def close(self) -> None:
        """Flushes and frees the journal file. Safe to call twice; open requests stay without an end."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self.tick(self.clock.monotonic_ns())
        self.flush()
        if self._journal is not None:
            self._journal.close()

    def abandon(self, recorder: RequestRecorder, end_ns: int) -> None:
        """For a finaliser, which may run anywhere and so must take no lock: the next tick records the end."""
        self._abandoned.append((recorder, end_ns))

    def has_waiting(self, recorder: RequestRecorder) -> None:
        if self._journal is not None:
            self._due.append(recorder)

    def _append_chunks(self, recorder: RequestRecorder) -> None:
        batch = recorder.take_batch()
        if batch is not None and self._journal is not None:
            self._journal.append(batch)

    def has_ended(self, recorder: RequestRecorder) -> None:
        if self._lag_since is not None:
            recorder.loop_lag_max_ns = self._lag_since(recorder.send_ns)
        if self._journal is not None:
            with self._lock:
                self._append_chunks(recorder)
                self._journal.write(recorder.end_record())
        if self._on_end is not None:
            self._on_end(recorder)
