"""How late this process's own event loop was, and for which requests that matters."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

PROBE_EVERY_S = 0.005
_PROBE_EVERY_NS = 5_000_000


class LagProbe:
    """Sets a timer every five milliseconds and notes by how much each one ran over.

    `since(t)` is the largest overrun of a timer that fired at or after t: what the loop may have added to receipts
    from then on.
    """

    def __init__(self) -> None:
        # Stamps rise and lags fall from left to right: an older, smaller lag can never be the largest since anything.
        self._stamps: list[int] = []
        self._lags: list[int] = []
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, at_ns: int, lag_ns: int) -> None:
        while self._lags and self._lags[-1] <= lag_ns:
            self._lags.pop()
            self._stamps.pop()
        self._stamps.append(at_ns)
        self._lags.append(lag_ns)

    def since(self, t_ns: int) -> int:
        position = bisect_left(self._stamps, t_ns)
        noted = self._lags[position] if position < len(self._lags) else 0
        if self._timer is None:
            return noted
        # After a stall the loop reads its sockets before it runs its timers, so the probe itself may be overdue.
        return max(noted, time.monotonic_ns() - max(self._due_ns, t_ns))

    def start(self) -> None:
        self._due_ns = time.monotonic_ns() + _PROBE_EVERY_NS
        self._timer = asyncio.get_running_loop().call_later(PROBE_EVERY_S, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = time.monotonic_ns()
        self.note(now, max(0, now - self._due_ns))
        self.start()
