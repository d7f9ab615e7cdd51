"""What the sockets of one loop brought: stamped when it was read, understood when there is time.

Engines emit for all their streams at once, so hundreds of sockets become readable together. Who parses each read before
the next one is made stamps the last of them by the time that all the others took to parse. Here a read costs its stamp
and a place in a queue; the loop reads every socket that is readable before it comes back to the queue, and then works
through it in slices, with a look at the sockets after each.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

NEVER_NS = 1 << 63
_SLICE_NS = 150_000  # a read that comes meanwhile is stamped late by this at most, and by what one read takes to parse
_MAX_BYTES = 16 << 20  # that wait; beyond, whoever brings more has the oldest understood first
_OVERHEAD = 200  # bytes of memory that a read takes beside its own


class Reader(Protocol):
    def understand(self, t_ns: int, data: bytes | None) -> None:
        """What one read brought at `t_ns`; None: the connection is gone."""


class Inbox:
    """In the order in which it was read. One loop alone uses it.

    `on_due` is called once `due_ns` is over, however much there is to read: a loop with a thousand sockets gets to its
    timers late.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Reader, int, bytes | None]] = deque()
        self._bytes = 0
        self._is_set = False
        self.due_ns = NEVER_NS
        self.on_due: Callable[[], None] = lambda: None

    def put(self, reader: Reader, t_ns: int, data: bytes | None) -> None:
        self._waiting.append((reader, t_ns, data))
        self._bytes += _OVERHEAD if data is None else len(data) + _OVERHEAD
        if not self._is_set:
            self._set()
        if t_ns >= self.due_ns:
            self.on_due()
        while self._bytes > _MAX_BYTES:
            self._next()

    def catch_up(self, reader: Reader | None = None) -> None:
        """Understands what waits, or what waits of one reader, at once: its end is at hand."""
        if reader is None:
            while self._waiting:
                self._next()
            return
        own = [entry for entry in self._waiting if entry[0] is reader]
        if own:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not reader)
            for _, t_ns, data in own:
                self._bytes -= _OVERHEAD if data is None else len(data) + _OVERHEAD
                reader.understand(t_ns, data)

    def _set(self) -> None:
        self._is_set = True
        asyncio.get_running_loop().call_soon(self._some)

    def _some(self) -> None:
        self._is_set = False
        now = time.monotonic_ns()
        until = now + _SLICE_NS
        try:
            while self._waiting and now < until:
                self._next()
                now = time.monotonic_ns()
                if now >= self.due_ns:
                    self.on_due()
        finally:
            if self._waiting and not self._is_set:
                self._set()

    def _next(self) -> None:
        reader, t_ns, data = self._waiting.popleft()
        self._bytes -= _OVERHEAD if data is None else len(data) + _OVERHEAD
        reader.understand(t_ns, data)
