"""The records of one request, from every observer, put together.

A side is one attempt of a request at one observer. If two recorders began the same side (a receipt that was journaled
and posted), the one that arrived first stands and the other is counted; what a recorder without a begin adds (a
restarted process, a recovery) completes it. Only of engines they are sides of their own: a server does not know that it
runs a hedge, so that each of two began attempt 0.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from queries.batches import Batch, moved_together
from queries.intake import Line, arrival_stamp
from sloscope import records

_BESIDE_SIDES = frozenset(("state", "late", "decision"))


@dataclass(slots=True)
class Side:
    """One attempt at one observer, or what one recorder wrote of it."""

    begin: records.Record | None = None
    end: records.Record | None = None
    begin_wall_offset: int = 0
    batches: list[Batch] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        """Send or arrived: the zero of every latency."""
        assert self.begin is not None
        name = "send_ns" if "send_ns" in self.begin else "arrived_ns"
        return int(self.begin[name])

    @property
    def arrival_at_ns(self) -> int:
        assert self.begin is not None
        return arrival_stamp(self.begin) + self.begin_wall_offset

    @property
    def end_at_ns(self) -> int | None:
        """Placed by the anchor of the arrival: a step of the wall clock in between must not move it over a cut."""
        return None if self.end is None else int(self.end["end_ns"]) + self.begin_wall_offset

    @property
    def is_open(self) -> bool:
        return self.begin is not None and self.end is None

    @property
    def last_stamp_ns(self) -> int:
        """The last stamp seen of this side."""
        stamps = [self.start_ns, *(self.begin[n] for n in ("body_complete_ns",) if self.begin and n in self.begin)]
        return max(*stamps, *(batch.last_stamp_ns for batch in self.batches), stamps[0])


class Request:
    """Everything that the journals say of one request id."""

    __slots__ = ("attempts", "in_tables", "last_wall_ns", "late", "receipts", "request_id", "sources", "states")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.attempts: dict[tuple[str, int], dict[str, Side]] = {}  # (observer, attempt) → writer → side
        self.late: list[records.Record] = []
        self.states: dict[str, list[records.Record]] = {}  # writer → its own, in order
        self.sources: dict[str, array[int]] = {}  # journal → start, end, wall_offset of each line
        self.receipts = 0
        self.last_wall_ns = 0
        self.in_tables: bool | None = None  # whether final files hold a row of it; None: not looked up

    def add(self, line: Line) -> None:
        record, journal, writer, observer, _, *span = line
        spans = self.sources.get(journal)
        if spans is None:
            spans = self.sources[journal] = array("q")
        spans.extend(span)
        if isinstance(record, Batch):
            self._side(observer, record.attempt, writer).batches.append(record)
            self.receipts += record.events
            return
        kind = record["kind"]
        if kind in _BESIDE_SIDES:
            if kind == "state":
                self.states.setdefault(writer, []).append(record)
            elif kind == "late":
                self.late.append(record)
            return
        side = self._side(observer, record.get("attempt", 0), writer)
        if kind == "begin":
            if side.begin is None:
                side.begin, side.begin_wall_offset = record, line.wall_offset
            self.last_wall_ns = max(self.last_wall_ns, arrival_stamp(record) + line.wall_offset)
        else:
            assert kind == "end", kind
            if side.end is None:
                side.end = record
            self.last_wall_ns = max(self.last_wall_ns, record["end_ns"] + line.wall_offset)

    def _side(self, observer: str, attempt: int, writer: str) -> Side:
        writers = self.attempts.get((observer, attempt))
        if writers is None:
            writers = self.attempts[observer, attempt] = {}
        side = writers.get(writer)
        if side is None:
            side = writers[writer] = Side()
        return side

    @property
    def begun(self) -> bool:
        return any(side.begin is not None for writers in self.attempts.values() for side in writers.values())

    def sides(self) -> Iterator[tuple[str, int, str, Side, int]]:
        """(observer, attempt, writer, side, recorders that were set aside) of every attempt that began, in order."""
        for (observer, attempt), writers in sorted(self.attempts.items()):
            if len(writers) == 1:
                ((writer, side),) = writers.items()
                if side.begin is not None:
                    yield observer, attempt, writer, side, 0
                continue
            begun = sorted((s.arrival_at_ns, w) for w, s in writers.items() if s.begin is not None)
            if not begun:
                continue
            first, *others = (writer for _, writer in begun)
            rest = [side for side in writers.values() if side.begin is None]
            if observer != "engine":
                yield observer, attempt, first, _complete(writers[first], rest), len(others)
                continue
            for _, writer in begun:
                # What a recovery ended is a side that has no end: one end for each.
                side = writers[writer]
                yield observer, attempt, writer, _complete(side, [rest.pop(0)]) if rest and not side.end else side, 0

    def states_of(self, side: Side | None) -> list[records.Record]:
        """Of the engine that ran this side: where two ran the request, of the one in which it ended as in the side."""
        if len(self.states) < 2:
            return next(iter(self.states.values()), [])
        is_finished = side is not None and (side.end or {}).get("outcome") == "completed"
        return min(
            self.states.values(),
            key=lambda states: any(state["to_state"] == "FINISHED" for state in states) != is_finished,
        )

    def open_sides(self) -> Iterator[tuple[str, int, str, Side]]:
        for observer, attempt, writer, side, _ in self.sides():
            if side.is_open:
                yield observer, attempt, writer, side

    def settled(self, horizon_ns: int, settle_ns: int) -> bool:
        """Every observer that began it has ended, and long enough ago that the others would have begun."""
        if self.last_wall_ns + settle_ns > horizon_ns or not self.begun:
            return False
        if all(len(writers) == 1 for writers in self.attempts.values()):
            return not any(side.is_open for writers in self.attempts.values() for side in writers.values())
        return next(self.open_sides(), None) is None


def _complete(side: Side, rest: list[Side]) -> Side:
    """The side with what recorders without a begin add to it. A stamp of theirs is placed by the begin's anchor."""
    ends = [other for other in rest if other.end is not None]
    # A true end goes before a recovery's.
    ends.sort(key=lambda other: (other.end or {}).get("reason") == "recorder_lost")
    whole = Side(side.begin, side.end, side.begin_wall_offset, list(side.batches))
    if whole.end is None and ends:
        whole.end = ends[0].end
    for other in rest:
        whole.batches += other.batches
    return whole


def winner(sides: list[Side]) -> Side:
    """Which side the consumer got: the completed one, else the one that ended last, since a loser is closed before.

    Of two that ended together, and of those that are open, the first.
    """

    def rank(side: Side) -> tuple[bool, int]:
        end = side.end or {}
        return end.get("outcome") != "completed", -end.get("end_ns", 0)

    return min(sides, key=rank)


def move_together(requests: Iterable[Request]) -> None:
    """Moves the batches of these requests into columns of their own, so that what is written with others is freed."""
    sides = [side for request in requests for writers in request.attempts.values() for side in writers.values()]
    moved = iter(moved_together(batch for side in sides for batch in side.batches))
    for side in sides:
        side.batches = list(itertools.islice(moved, len(side.batches)))
