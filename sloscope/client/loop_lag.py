"""How late this process's own event loop was, and for which requests that matters."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

PROBE_EVERY_S = 0.005


class LagProbe:
    """Sleeps for five milliseconds again and again and notes by how much each sleep ran over.

    `since(t)` is the largest overrun of a sleep that ended at or after t: what the loop may have added to receipts
    from then on.
    """

    def __init__(self) -> None:
        # Stamps rise and lags fall from left to right: an older, smaller lag can never be the largest since anything.
        self._stamps: list[int] = []
        self._lags: list[int] = []

    def note(self, at_ns: int, lag_ns: int) -> None:
        while self._lags and self._lags[-1] <= lag_ns:
            self._lags.pop()
            self._stamps.pop()
        self._stamps.append(at_ns)
        self._lags.append(lag_ns)

    def since(self, t_ns: int) -> int:
        position = bisect_left(self._stamps, t_ns)
        return self._lags[position] if position < len(self._lags) else 0

    async def run(self) -> None:
        while True:
            start = time.monotonic_ns()
            await asyncio.sleep(PROBE_EVERY_S)
            now = time.monotonic_ns()
            self.note(now, max(0, now - start - int(PROBE_EVERY_S * 1e9)))
