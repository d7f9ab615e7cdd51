"""When a request is asked for a second time, elsewhere: how long to wait, and how often at most. No I/O."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import deque
from math import ceil
from typing import NamedTuple

from sloscope.definitions import nearest_rank
from sloscope.errors import ConfigError
from sloscope.exposition import MetricStore
from sloscope.units import NS_PER_S, parse_duration_ns

# What became of a request that could have been hedged, exactly one each.
RESULTS = ("not_needed", "won", "lost", "undecided", "over_share", "no_upstream", "no_threshold", "not_kept")
WINDOW = 1000  # recent first outputs
WINDOW_NS = 300 * NS_PER_S
_BEYOND = 5  # so many of the recent ones have to lie beyond the quantile before it is believed
_MOST_SAVED = 10  # hedges that a quiet time may save up
_MILLION = 1_000_000
_QUANTILE = re.compile(r"p([0-9]{2}(?:\.[0-9])?)")
_REQUESTS, _WASTE = "sloscope_hedge_requests_total", "sloscope_hedge_waste_prompt_tokens_total"


class HedgeAfter(NamedTuple):
    """One of the two is set."""

    permille: int | None  # the quantile of recent first outputs, in thousandths
    ns: int | None


def parse_hedge_after(text: str) -> HedgeAfter:
    match = _QUANTILE.fullmatch(text)
    if match is not None and 50 <= float(match[1]) <= 99:
        return HedgeAfter(round(float(match[1]) * 10), None)
    accepted = "accepted: p50 to p99, or a duration such as 300ms"
    if text.startswith("p"):
        raise ConfigError(f"--hedge-after: {text!r} is not accepted; {accepted}")
    try:
        return HedgeAfter(None, parse_duration_ns(text, "--hedge-after"))
    except ConfigError:
        raise ConfigError(f"--hedge-after: {text!r} is not accepted; {accepted}") from None


def init_series(store: MetricStore) -> None:
    """They are exposed with hedging off, too: a panel or an alert that reads them has an answer."""
    for result in RESULTS:
        store.init(_REQUESTS, (result,))


class Hedges:
    """Shared by all requests of a data plane.

    The threshold is a quantile of recent first attempts: from the request being whole to the first output event. A
    first attempt that was closed for a faster second one counts with the time it had run, which is less than it would
    have taken and more than the threshold, so that hedging does not lower its own threshold.
    """

    def __init__(self, after: HedgeAfter, max_share: float, store: MetricStore) -> None:
        self._after = after
        self._share = round(max_share * _MILLION)
        self._credit = 0  # millionths of a hedge
        self._store = store
        self._recent: deque[tuple[int, int]] = deque()  # (when, how long)
        self._sorted: list[int] = []
        self.least = 1 if after.permille is None else ceil(_BEYOND * 1000 / (1000 - after.permille))

    def offered(self) -> None:
        """One more request that could be hedged."""
        self._credit = min(self._credit + self._share, _MOST_SAVED * _MILLION)

    def take(self) -> bool:
        """Whether one more hedge is within the share. It counts as made."""
        if self._credit < _MILLION:
            return False
        self._credit -= _MILLION
        return True

    def wait_ns(self, now: int) -> int | None:
        """How long to wait for a first output event; None while too few recent ones are known."""
        if self._after.permille is None:
            return self._after.ns
        while self._recent and now - self._recent[0][0] > WINDOW_NS:
            self._forget()
        if len(self._sorted) < self.least:
            return None
        return self._sorted[nearest_rank(self._after.permille, len(self._sorted)) - 1]

    def took(self, ns: int, now: int) -> None:
        """A first attempt had its first output event after this time, or was closed after it without one."""
        self._recent.append((now, ns))
        insort(self._sorted, ns)
        if len(self._recent) > WINDOW:
            self._forget()

    def _forget(self) -> None:
        _, ns = self._recent.popleft()
        del self._sorted[bisect_left(self._sorted, ns)]

    def ended(self, result: str) -> None:
        assert result in RESULTS, result
        self._store.inc(_REQUESTS, 1, (result,))

    def wasted(self, tokens: int) -> None:
        self._store.inc(_WASTE, tokens)
