"""Journals to Parquet: incremental, one at a time, and visible to readers only as a whole.

A pass reads each journal from where the last one stopped. A request whose every observer has ended goes to a final
file; the others are written as provisional rows, which the next pass replaces, and the lines they were made from are
kept in a pending file. When something comes for a request that has a final row, that row is made again from its
journal lines, so that each request stands in exactly one row. The manifest is replaced last: a pass that is killed
leaves the old state, and its files are removed by the next one.
"""

import gc
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from queries import tables
from queries.assemble import Assembly, Row, arrow_schema, row_of
from queries.batches import Batch
from queries.histories import Request, move_together
from queries.intake import Intake, Line, Problems, recorder_of
from queries.parts import Parts, live_files, remove_leftovers
from queries.pending import close_lost, feed, load_pending, pending_text, reread
from sloscope.errors import JournalError, UnwritableError
from sloscope.journal import Manifest, write_atomically, writer_of
from sloscope.records import Record
from sloscope.recovery import directory_lock
from sloscope.units import NS_PER_S

SETTLE_NS = 2 * NS_PER_S
HELD_EVENTS = 4_000_000  # output events in memory before what is settled is written
ROWS_PER_PART = 100_000
EPOCH = date(1970, 1, 1)
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class CompactionReport:
    """What one pass did. `problems` names what was skipped, at most twenty of each pass; the counts are complete."""

    requests_written: int = 0  # final rows, remade ones included
    requests_pending: int = 0  # provisional rows
    requests_open: int = 0  # of those, without an end somewhere
    receipts: int = 0  # output events read, both sides
    journal_bytes: int = 0  # read
    bad_lines: int = 0
    torn: int = 0
    repeated: int = 0  # records of something that was there already
    lost_events: int = 0  # positions that no batch covers
    orphans: int = 0  # requests given up because nobody recorded their begin
    recovered: int = 0  # ends written for dead recorders
    late_merged: int = 0  # final rows made again
    seconds: float = 0.0
    generation: int = 0
    problems: list[str] = field(default_factory=list)


def compact(
    events: Path,
    *,
    now_wall_ns: int | None = None,
    progress: Progress | None = None,
    settle_ns: int = SETTLE_NS,
) -> CompactionReport:
    """One pass. `now_wall_ns` is the wall time against which `settle_ns` is counted; default: the system's.

    JournalError when the directory is missing or another pass does not finish. UnwritableError when it cannot be
    written: its tables stay as they were.
    """
    events = Path(events)
    if not events.is_dir():
        raise JournalError(f"events directory {str(events)!r}: does not exist")
    started = time.monotonic()
    now = time.time_ns() if now_wall_ns is None else now_wall_ns
    with directory_lock(events), _no_cycle_search():
        compaction = _Pass(events, now, settle_ns, progress or _silent)
        try:
            report = compaction.run()
        except UnwritableError:
            compaction.clear()  # a full disk has no room for files that nobody reads
            raise
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """A pass makes millions of objects and no cycle; looking for cycles among them took a quarter of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _silent(phase: str, done: int, total: int) -> None:
    pass


class _Pass:
    def __init__(self, events: Path, now: int, settle_ns: int, progress: Progress) -> None:
        self._events = events
        self._now = now
        self._settle_ns = settle_ns
        self._progress = progress
        self._before = _of_this_schema(Manifest.load(events), events)
        state = self._before.state
        self._consumed = dict(self._before.journals)
        self._anchors = dict(state.get("anchors", {}))
        self._last_step: dict[str, int] = dict(state.get("last_step", {}))
        self._parts = Parts(events, self._before)
        self._problems = Problems()
        self._records = _EventRows()
        self._report = CompactionReport()

    def run(self) -> CompactionReport:
        before, report = self._before, self._report
        self.clear()
        self._requests = load_pending(self._events, before, self._problems)
        for request in self._requests.values():
            request.in_tables = False
        intake = Intake(self._events, self._consumed, self._anchors, self._problems)
        self._read(intake)
        report.recovered = close_lost(self._events, self._requests.values(), intake)
        if report.recovered:
            self._read(intake)
        self._write_settled(self._now)
        changed = self._consumed != before.journals or report.requests_written > 0
        if changed or not Manifest.path(self._events).exists():
            self._finish(intake)
        else:
            report.generation = before.generation
            report.requests_pending = len(self._requests)
        report.requests_open = sum(1 for r in self._requests.values() if next(r.open_sides(), None) is not None)
        report.bad_lines, report.torn = self._problems.bad_lines, self._problems.torn
        report.problems = self._problems.named
        return report

    def clear(self) -> None:
        """Removes what no manifest names: of a pass that was killed, or of this one where it failed."""
        remove_leftovers(self._events, live_files(self._before) | set(self._before.state.get("previous", [])))

    def _read(self, intake: Intake) -> None:
        total = intake.unread_bytes
        before = sum(self._consumed.values())
        held_limit = HELD_EVENTS
        held = 0
        for lines, horizon in intake.blocks():
            for line in lines:
                feed(self._requests, line)
                record = line.record
                if isinstance(record, Batch):
                    held += record.events
                elif record["kind"] in _EventRows.KINDS:
                    self._records.add(record, line, self._last_step)
            done = sum(self._consumed.values()) - before
            self._progress("read", done, total)
            if held >= held_limit:
                self._report.receipts += held
                self._write_settled(min(horizon, self._now))
                move_together(self._requests.values())
                held = 0
                still = sum(request.receipts for request in self._requests.values())
                held_limit = max(HELD_EVENTS, still)
        self._report.receipts += held
        self._report.journal_bytes += sum(self._consumed.values()) - before

    def _write_settled(self, horizon: int) -> None:
        self._look_up()
        settled = [r for r in self._requests.values() if r.settled(horizon, self._settle_ns)]
        for day, rows in _by_day(settled):
            for first in range(0, len(rows), ROWS_PER_PART):
                part = rows[first : first + ROWS_PER_PART]
                self._parts.write(day, self._assemble(part, day))
                self._progress("write", self._report.requests_written, len(settled))
                self._report.requests_written += len(part)
        for request in settled:
            del self._requests[request.request_id]
        self._records.write(self._parts)

    def _look_up(self) -> None:
        """Requests that have a final row already are taken back, with everything they were made from."""
        unknown = {r.request_id for r in self._requests.values() if r.in_tables is None}
        found = self._parts.find(unknown)
        for request_id, sources in found.items():
            fresh = [
                (journal, list(zip(*[iter(spans)] * 3, strict=True)))
                for journal, spans in self._requests[request_id].sources.items()
            ]
            self._requests[request_id] = reread(self._events, request_id, sources + fresh, self._problems)
            self._report.late_merged += 1
        for request_id in unknown:
            self._requests[request_id].in_tables = False

    def _assemble(self, rows: list[Row], day: date) -> Iterator[tuple[str, pa.Table]]:
        assembly = Assembly(rows, day)
        self._report.repeated += assembly.repeated
        self._report.lost_events += assembly.lost_events
        if assembly.lost_events:
            self._problems.add(f"{assembly.lost_events} output events were never recorded by their observer")
        return assembly.tables()

    def _finish(self, intake: Intake) -> None:
        self._drop_orphans(intake.dead_writers)
        waiting = [request for request in self._requests.values() if request.begun]
        for day, rows in _by_day(waiting):
            self._parts.write_open(day, self._assemble(rows, day))
        self._report.requests_pending = len(waiting)
        self._parts.settle()
        manifest = Manifest(self._before.generation + 1, self._consumed, self._parts.listed())
        pending = ""
        if self._requests:
            pending = f"tables/pending-g{manifest.generation:08d}.jsonl"
            write_atomically(self._events / pending, pending_text(self._requests.values()))
        manifest.state = {
            "schema": tables.fingerprint(),
            "anchors": self._anchors,
            "last_step": self._last_step,
            "parts": self._parts.noted(),
            "pending": pending,
        }
        manifest.state["previous"] = sorted(live_files(self._before) - live_files(manifest))
        manifest.save(self._events)
        self._report.generation = manifest.generation

    def _drop_orphans(self, dead: set[str]) -> None:
        """Without a begin there is no arrival and no row. While its recorders live, the begin may still come."""
        orphans = [
            request
            for request in self._requests.values()
            if not request.begun and all(recorder_of(Path(journal)) in dead for journal in request.sources)
        ]
        for request in orphans:
            del self._requests[request.request_id]
        self._report.orphans = len(orphans)
        if orphans:
            self._problems.add(f"{len(orphans)} requests have records but no begin, such as {orphans[0].request_id}")


def _of_this_schema(manifest: Manifest, events: Path) -> Manifest:
    """The manifest, or a blank one where the tables were written under another schema: then every journal is read
    again.

    The old files stay until the new manifest stands. Raises JournalError when a journal is gone that they were made
    from.
    """
    if manifest.generation == 0 or manifest.state.get("schema") == tables.fingerprint():
        return manifest
    for journal in manifest.journals:
        if not (events / journal).exists():
            raise JournalError(
                f"tables in {str(events)!r} were written by another version, and {journal} is gone, without which they "
                "cannot be made anew; accepted: the version that wrote them, or the journal"
            )
    return Manifest(manifest.generation, state={"previous": sorted(live_files(manifest))})


def _by_day(requests: Iterable[Request]) -> list[tuple[date, list[Row]]]:
    """Rows by day of arrival, in the order of arrival."""
    days: dict[int, list[Row]] = {}
    for row in sorted(map(row_of, requests), key=lambda row: (row.arrival_at_ns, row.request.request_id)):
        days.setdefault(row.arrival_day, []).append(row)
    return [(EPOCH + timedelta(days=day), rows) for day, rows in sorted(days.items())]


class _EventRows:
    """Rows of the tables that hold one row a record."""

    KINDS = ("step", "state", "decision", "engine")
    _ROLES = ("prefill", "decode", "preempted", "paused")

    def __init__(self) -> None:
        self._rows: dict[tuple[str, date], list[dict[str, Any]]] = {}

    def add(self, record: Record, line: Line, last_step: dict[str, int]) -> None:
        kind = record["kind"]
        stamp = record["start_ns"] if kind == "step" else record["at_ns"]
        wall = stamp + line.wall_offset
        day = datetime.fromtimestamp(wall // NS_PER_S, UTC).date()
        row = record | {"engine_id": writer_of(Path(line.journal)), "clock_id": line.clock_id}
        if kind != "step":
            row["place"] = line.start
            if kind == "engine":
                row["started_at_ns"] = wall
                row["policies"] = json.dumps(record["policies"], sort_keys=True) if "policies" in record else None
            else:
                row.setdefault("attempt", 0)
            self._rows.setdefault((f"{kind}s", day), []).append(row)
            return
        roles = {role: record.get(f"{role}_ids", ()) for role in self._ROLES}
        before = last_step.get(line.writer)
        last_step[line.writer] = record["end_ns"]
        row |= {
            "start_at_ns": wall,
            "decode_requests": len(roles["decode"]) if "decode_ids" in record else None,
            "prefill_requests": len(roles["prefill"]) if "prefill_ids" in record else None,
            "preempted": len(roles["preempted"]),
            "paused": len(roles["paused"]),
            "reused_tokens": record.get("reused_tokens", 0),
            "gap_before_ns": None if before is None else record["start_ns"] - before,
        }
        self._rows.setdefault(("steps", day), []).append(row)
        took_part = self._rows.setdefault(("step_requests", day), [])
        step = {name: row[name] for name in ("step_id", "engine_id", "clock_id")}
        for role, ids in roles.items():
            counts = record if role == "prefill" else {}
            tokens = counts.get("prefill_token_counts") or itertools.repeat(None)
            charged = counts.get("prefill_charged_counts") or itertools.repeat(None)
            for request_id, ran, new in zip(ids, tokens, charged, strict=False):
                took_part.append({**step, "request_id": request_id, "role": role, "tokens": ran, "charged": new})

    def write(self, parts: Parts) -> None:
        for (table, day), rows in sorted(self._rows.items()):
            if rows:
                schema = arrow_schema(table)
                arrays = [_column([row.get(f.name) for row in rows], f.type) for f in schema]
                parts.append(table, day, pa.table(arrays, schema=schema))
        self._rows = {}


def _column(values: list[Any], type_: pa.DataType) -> pa.Array:
    """A float may be written as an integer, of which Arrow takes none that it would have to round."""
    if type_ == pa.float64():
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, type_)
