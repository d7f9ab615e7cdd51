"""The largest delay of an event loop since any moment, kept in little."""

from __future__ import annotations

from bisect import bisect_left


class LagPeaks:
    """Delays with the stamps at which each ended, ns. Any thread may ask."""

    def __init__(self) -> None:
        # (stamp, lag): stamps rise and lags fall from left to right, since an older, smaller lag can never be the
        # largest since anything.
        self._peaks: list[tuple[int, int]] = []

    def note(self, at_ns: int, lag_ns: int) -> None:
        while self._peaks and self._peaks[-1][1] <= lag_ns:
            self._peaks.pop()
        self._peaks.append((at_ns, lag_ns))

    def since(self, t_ns: int) -> int:
        """The largest that ended at or after `t_ns`, as far as it lies after it."""
        position = bisect_left(self._peaks, (t_ns,))
        # Only the first can have begun before t: each is watched for from when the one before it ended.
        return max((min(lag, at_ns - t_ns) for at_ns, lag in self._peaks[position : position + 2]), default=0)
