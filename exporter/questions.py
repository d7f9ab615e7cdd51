"""The named questions of `queries`, asked over HTTP and for the `sloscope_sql_` series. One at a time, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sloscope.contract import Contract
from sloscope.errors import ConfigError, QueryError, UnwritableError
from sloscope.exposition import Row
from sloscope.output import plain
from sloscope.units import parse_instant_ns

MAX_ROWS = 10_000
TIMEOUT_S = 30.0
Window = tuple[int, int]
Rows = list[dict[str, Any]]
_LAST_NS = 180 * 365 * 86_400 * 10**9  # the year 2149
VERDICTS = ("decoder_stall", "buffered_delivery", "mixed", "client_late", "unknown")


class OutOfTimeError(QueryError):
    pass


class Questions:
    """Sessions stay open, one per observer: opening one costs more than most answers."""

    def __init__(self, events: Path, contract: Contract) -> None:
        self._events = events
        self._contract = contract
        self._lock = threading.Lock()
        self._sessions: dict[str, Any] = {}

    def list(self) -> Rows:
        from queries.runner import list_questions

        return [dict(row) for row in list_questions()]

    def ask(
        self,
        name: str,
        window: Window | None = None,
        observer: str | None = None,
        params: Mapping[str, object] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Rows:
        """Rows as JSON values. Blocks; QueryError for what was asked wrongly, OutOfTimeError after the limit.

        `window` None: everything recorded.
        """
        began = time.monotonic()
        if not self._lock.acquire(timeout=timeout_s):
            raise OutOfTimeError(f"{name}: other questions took longer than {timeout_s:g} s")
        try:
            session = self._session(observer, window)
            left = max(0.1, timeout_s - (time.monotonic() - began))
            result = session.run(name, params, max_rows=MAX_ROWS, timeout_s=left)
        except QueryError as error:
            if time.monotonic() - began >= timeout_s:
                raise OutOfTimeError(str(error)) from None
            raise
        finally:
            self._lock.release()
        return [{column: plain(row[column]) for column in result.columns} for row in result.rows]

    def latest(self, window_ns: int, now_ns: int) -> Window | None:
        """The last `window_ns` up to `now_ns`, wall time, and nothing before the first request, so that rates of a
        young directory are not thinned. None: nothing is recorded, or nothing but what is yet to come. Blocks.
        """
        with self._lock:
            first, end = self._session(None, None).window
        start = max(first, now_ns - window_ns)
        return (start, now_ns) if first < end and start < now_ns else None

    def _session(self, observer: str | None, window: Window | None) -> Any:
        from queries.runner import Session

        key = observer or self._contract.observer
        session = self._sessions.get(key)
        if session is None:
            # Opened without a window, since that one would answer every later question that names none.
            session = Session(self._events, self._contract, observer=observer, compact_first=False)
            self._sessions[key] = session
        try:
            session.refresh(window)
        except UnwritableError:
            # As on the command line: what is new is compacted in a temporary place, for this answer alone.
            session = Session(self._events, self._contract, observer=observer, window=window)
        return session


def parse_time_ns(text: str, field: str) -> int:
    """Epoch milliseconds or ISO 8601, as Grafana sends them, to wall ns."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        ns = int(text) * 1_000_000
        if ns > _LAST_NS:
            raise ConfigError(f"{field}: {text!r} is out of range; accepted: milliseconds up to the year 2150")
        return ns
    return parse_instant_ns(text, field)


def published(questions: Questions, window_ns: int, now_ns: int) -> list[Row]:
    """The `sloscope_sql_` series over the last `window_ns` up to `now_ns`, wall time; 0: over everything. Blocks."""
    window = questions.latest(window_ns, now_ns) if window_ns else None
    is_empty = bool(window_ns) and window is None
    rows: list[Row] = []
    for row in [] if is_empty else questions.ask("goodput", window):
        if row["attainment"] is not None:
            rows.append(Row("sloscope_sql_attainment_ratio", ("all",), row["attainment"]))
        if row["goodput_rps"] is not None:
            rows.append(Row("sloscope_sql_goodput_rps", ("all",), row["goodput_rps"]))
    asked = [] if is_empty else questions.ask("hold_summary", window)
    found = {row["verdict"]: row["holds"] for row in asked}
    rows += [
        Row("sloscope_sql_holds", (verdict,), count) for verdict, count in (dict.fromkeys(VERDICTS, 0) | found).items()
    ]
    rows += [Row("sloscope_sql_computed_at_seconds", (query,), now_ns / 1e9) for query in ("goodput", "hold_summary")]
    return rows
