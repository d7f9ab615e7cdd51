"""The records of one request, from every observer, put together.

A side is one attempt of a request at one observer. If two recorders began the same side (a receipt that was journaled
and posted), the one that arrived first stands and the other is counted; what a recorder without a begin adds (a
restarted process, a recovery) completes it. Only of engines they are sides of their own: a server does not know that it
runs a hedge, so that each of two began attempt 0.
"""

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from queries.decode import NULL_NS, NULL_TOKENS
from queries.intake import Line, arrival_stamp
from sloscope import records

_BESIDE_SIDES = frozenset(("state", "late", "decision"))
_STAMPS = {"chunks": "t_ns", "emit": "computed_ns"}
_TOKENS = {"chunks": "tokens", "emit": "cum_tokens"}
_DELIVERY = {"chunks": ("forwarded_ns",), "emit": ("handed_ns", "written_ns")}


@dataclass(slots=True)
class Side:
    """One attempt at one observer, or what one recorder wrote of it."""

    begin: records.Record | None = None
    end: records.Record | None = None
    begin_wall_offset: int = 0
    batches: list[records.Record] = field(default_factory=list)

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
    def last_stamp_ns(self) -> int:
        """The last stamp seen of this side."""
        stamps = [self.start_ns, *(self.begin[n] for n in ("body_complete_ns",) if self.begin and n in self.begin)]
        for batch in self.batches:
            for name in (_STAMPS[batch["kind"]], *_DELIVERY[batch["kind"]]):
                stamps += batch.get(name, ())[-1:]
        return max(stamps)


@dataclass(slots=True)
class Events:
    """The output events of one side, in the order of receipt. `lost` events were recorded by nobody."""

    t_ns: "array[int]" = field(default_factory=lambda: array("q"))
    choice: "array[int]" = field(default_factory=lambda: array("i"))
    types: bytearray = field(default_factory=bytearray)
    tokens: "array[int] | None" = field(default_factory=lambda: array("i"))  # engine: cumulative per choice
    delivery: "dict[str, array[int]]" = field(default_factory=dict)
    lost: int = 0
    repeated: int = 0


def events_of(side: Side) -> Events:
    """Batches joined by their position; a repeated position keeps what came first."""
    events = Events()
    batches = side.batches
    if not batches:
        events.tokens = None
        return events
    kind = batches[0]["kind"]
    of_stamps, of_tokens, delivery = _STAMPS[kind], _TOKENS[kind], _DELIVERY[kind]
    if any([a["ordinal0"] > b["ordinal0"] for a, b in itertools.pairwise(batches)]):
        batches = sorted(batches, key=lambda batch: batch["ordinal0"])
    has_tokens = any([of_tokens in batch for batch in batches])
    names = [name for name in delivery if any([name in batch for batch in batches])]
    expected = 0
    t_ns, choice, types, tokens = events.t_ns, events.choice, events.types, array("i")
    joined = {name: array("q") for name in names}
    for batch in batches:
        position, count = batch["ordinal0"], len(batch[of_stamps])
        if position != expected:
            skip = min(max(expected - position, 0), count)
            events.lost += max(position - expected, 0)
            events.repeated += skip
            batch = _without_first(batch, skip)
            count -= skip
            position += skip
        expected = max(expected, position + count)
        t_ns += batch[of_stamps]
        choice += batch["choice"]
        types += batch["type"] if "type" in batch else bytes(count)
        if has_tokens:
            tokens += batch[of_tokens] if of_tokens in batch else array("i", [NULL_TOKENS]) * count
        for name, values in joined.items():
            values += batch[name] if name in batch else array("q", [NULL_NS]) * count
    events.tokens = tokens if has_tokens else None
    events.delivery = joined
    return events


def _without_first(batch: records.Record, skip: int) -> records.Record:
    lists = (array, bytes)
    return {name: value[skip:] if isinstance(value, lists) else value for name, value in batch.items()}


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
        record = line.record
        kind = record["kind"]
        spans = self.sources.get(line.journal)
        if spans is None:
            spans = self.sources[line.journal] = array("q")
        spans.extend((line.start, line.end, line.wall_offset))
        if kind in _BESIDE_SIDES:
            if kind == "state":
                self.states.setdefault(line.writer, []).append(record)
            elif kind == "late":
                self.late.append(record)
            return
        attempt = (line.observer, record.get("attempt", 0))
        writers = self.attempts.get(attempt)
        if writers is None:
            writers = self.attempts[attempt] = {}
        side = writers.get(line.writer)
        if side is None:
            side = writers[line.writer] = Side()
        if kind == "begin":
            if side.begin is None:
                side.begin, side.begin_wall_offset = record, line.wall_offset
            self.last_wall_ns = max(self.last_wall_ns, arrival_stamp(record) + line.wall_offset)
        elif kind == "end":
            if side.end is None:
                side.end = record
            self.last_wall_ns = max(self.last_wall_ns, record["end_ns"] + line.wall_offset)
        else:
            side.batches.append(record)
            self.receipts += len(record["choice"])

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
            if side.end is None:
                yield observer, attempt, writer, side

    def settled(self, horizon_ns: int, settle_ns: int) -> bool:
        """Every observer that began it has ended, and long enough ago that the others would have begun."""
        return self.begun and self.last_wall_ns + settle_ns <= horizon_ns and next(self.open_sides(), None) is None


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
