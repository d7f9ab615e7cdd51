"""How late this process's own event loop was, and for which requests that matters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sloscope.lag_peaks import LagPeaks

PROBE_EVERY_S = 0.005
_PROBE_EVERY_NS = 5_000_000


class LagProbe:
    """Sets a timer every five milliseconds and notes by how much each one ran over.

    `since(t)` is the largest overrun of a timer that fired at or after t, as far as it lies after t: what the loop may
    have added to receipts from then on. Any thread may ask. `wanted`: the probe stops itself when it says no.
    """

    def __init__(self, wanted: Callable[[], bool] | None = None) -> None:
        self._peaks = LagPeaks()
        self._wanted = wanted
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def since(self, t_ns: int) -> int:
        noted = self._peaks.since(t_ns)
        if self._timer is None or self._loop is None or not self._loop.is_running():
            return noted
        # After a stall the loop reads its sockets before it runs its timers, so the probe itself may be overdue.
        return max(noted, time.monotonic_ns() - max(self._due_ns, t_ns))

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """In the loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._due_ns = time.monotonic_ns() + _PROBE_EVERY_NS
        self._timer = self._loop.call_later(PROBE_EVERY_S, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = time.monotonic_ns()
        self._peaks.note(now, max(0, now - self._due_ns))
        if self._wanted is None or self._wanted():
            self.start()
        else:
            self._timer = None


class LoopProbes:
    """One probe for each loop of this process in which requests are open, for as long as `wanted` says so."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._probes: dict[asyncio.AbstractEventLoop, LagProbe] = {}

    def here(self) -> LagProbe | None:
        """The running loop's probe, set; None in a loop that is not asyncio's."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        probe = self._probes.get(loop)
        if probe is None:
            for closed in [each for each in list(self._probes) if each.is_closed()]:
                self._probes.pop(closed, None)
            probe = self._probes[loop] = LagProbe(self._wanted)
        if not probe.is_set:
            probe.start()
        return probe
