"""Journals read in step: every file from where the last pass stopped, the one that lags furthest behind first.

A request's records stand in several files. Reading them in step lets compaction write what is complete before
everything is read, so that its memory does not grow with the journals.
"""

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from queries.batches import Batch
from queries.decode import decode
from queries.scan import Text
from sloscope import records
from sloscope.clock import Anchor
from sloscope.errors import RecordError
from sloscope.journal import journal_files, order_of, writer_of
from sloscope.recovery import dead_writers

BLOCK = 1 << 20  # arrays of this size are made again and again in the same memory
KEPT_ANCHORS = 8  # a record is written at most seconds after its stamp, an anchor every ten
KEPT_PROBLEMS = 20
_REMEMBERED_CLOCKS = 1000  # of one file: the recorder's, and one of each page that reports receipts to it
_mono_ns = attrgetter("mono_ns")
_STAMP = {"state": "at_ns", "decision": "at_ns", "end": "end_ns", "step": "start_ns", "engine": "at_ns"}


class Line(NamedTuple):
    """One record and its place. `wall_offset` is wall minus monotonic time by the last anchor before its stamp.

    A batch is placed by the begin of its request, and names neither clock nor offset.
    """

    record: records.Record | Batch
    journal: str  # relative to the events directory
    writer: str  # observer/boot-pid-start: the same for every file of one writer
    observer: str
    clock_id: str
    start: int
    end: int
    wall_offset: int


# Up to here the sum of a stamp and an offset between two clocks fits 64 bits: 146 years of uptime, the year 2116.
MAX_STAMP_NS = 2**62


@dataclass(slots=True)
class Problems:
    """What had to be skipped: counted in full, named up to a limit."""

    bad_lines: int = 0
    torn: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        if len(self.named) < KEPT_PROBLEMS:
            self.named.append(text)


def arrival_stamp(begin: records.Record) -> int:
    """Intended if scheduled, else send or arrived."""
    for name in ("intended_ns", "send_ns", "arrived_ns"):
        if name in begin:
            return int(begin[name])
    raise AssertionError("a checked begin has a stamp")


def recorder_of(path: Path) -> str:
    return f"{path.parent.name}/{writer_of(path)}"


class Chain:
    """The files of one writer in the order in which they were written."""

    def __init__(
        self,
        events: Path,
        paths: list[Path],
        live: bool,
        consumed: dict[str, int],
        anchors: dict[str, list],
        problems: Problems,
    ) -> None:
        self.writer = recorder_of(paths[0])
        self.observer = paths[0].parent.name
        self._batch_kind = "emit" if self.observer == "engine" else "chunks"
        self.live = live
        self.horizon = 0  # wall time up to which this writer has been read
        self._events = events
        self._paths = sorted(paths, key=order_of)
        self._consumed = consumed
        self._kept = anchors
        self._problems = problems

    @property
    def last_anchor(self) -> records.Record | None:
        """The last clock record that was read of this writer."""
        for path in reversed(self._paths):
            clock_id, *anchors = self._kept.get(str(path.relative_to(self._events)), [""])
            if anchors:
                return records.make("clock", mono_ns=anchors[-1][0], wall_ns=anchors[-1][1], clock_id=clock_id)
        return None

    def blocks(self) -> Iterator[list[Line]]:
        for index, path in enumerate(self._paths):
            whole = index + 1 < len(self._paths) or not self.live
            yield from self._file(path, whole)

    def _file(self, path: Path, whole: bool) -> Iterator[list[Line]]:
        name = str(path.relative_to(self._events))
        offset = self._consumed.get(name, 0)
        self._consumed.setdefault(name, 0)
        size = path.stat().st_size
        if size < offset:
            self._problems.add(f"{name}: {size} bytes, but {offset} were read before; the file was cut")
            return
        if size == offset:
            return
        place = _Anchors(self._kept.get(name, []))
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            rest = b""
            while offset < size:
                block = file.read(min(BLOCK, size - offset - len(rest)))
                data = rest + block
                end = data.rfind(b"\n") + 1
                lines = self._lines(name, data[:end], offset, place)
                offset += end
                rest = data[end:]
                self._consumed[name] = offset
                self._kept[name] = place.kept()
                yield lines
                if not block:
                    break
                if offset + len(rest) >= size:
                    break
        if rest and whole:
            # Nobody will finish this line.
            self._problems.torn += 1
            self._problems.add(f"{name} at byte {offset}: torn line of {len(rest)} bytes")
            self._consumed[name] = offset + len(rest)

    def _lines(self, name: str, data: bytes, offset: int, place: "_Anchors") -> list[Line]:
        block = Text(data)
        lines: list[Line | None] = [None] * len(block.starts)
        single = np.ones(len(lines), dtype=bool)
        for found in block.batches(self._batch_kind):
            single[found.lines] = False
            starts = (block.starts[found.lines] + offset).tolist()
            ends = (block.stops[found.lines] + (offset + 1)).tolist()
            same = repeat(name), repeat(self.writer), repeat(self.observer), repeat("")
            batches = map(Line._make, zip(found.batches, *same, starts, ends, repeat(0), strict=False))
            for number, batch in zip(found.lines.tolist(), batches, strict=True):
                lines[number] = batch
        numbers = np.flatnonzero(single)
        for number, first, stop in zip(
            numbers.tolist(), block.starts[numbers].tolist(), block.stops[numbers].tolist(), strict=True
        ):
            if first == stop:
                continue
            start = offset + first
            try:
                lines[number] = self._place(decode(data[first:stop]), name, start, offset + stop + 1, place)
            except (ValueError, RecordError) as error:
                self._problems.bad_lines += 1
                why = str(error) if isinstance(error, RecordError) else "not JSON"
                self._problems.add(f"{name} at byte {start}: {why}")
        return [line for line in lines if line is not None]

    def _place(self, record: records.Record | Batch, name: str, start: int, end: int, place: "_Anchors") -> Line | None:
        if isinstance(record, Batch):
            if record.kind != self._batch_kind:
                raise RecordError(f"kind: {record.kind!r} does not belong to observer {self.observer!r}")
            return Line(record, name, self.writer, self.observer, "", start, end, 0)
        kind = record["kind"]
        if kind == "clock":
            if not (0 <= record["mono_ns"] < MAX_STAMP_NS and 0 <= record["wall_ns"] < MAX_STAMP_NS):
                raise RecordError("clock: places stamps where no column reaches; accepted: 0 to 2^62 ns")
            place.add(record)
            self.horizon = max(self.horizon, record["wall_ns"])
            return None
        if kind == "begin" and record["observer"] != self.observer:
            raise RecordError(f"begin.observer: {record['observer']!r} in a journal of {self.observer!r}")
        wall_offset = 0
        if kind == "begin" or kind in _STAMP:
            stamp = arrival_stamp(record) if kind == "begin" else record[_STAMP[kind]]
            anchor = place.before(stamp)
            if anchor is None:
                raise RecordError(f"{kind}: stands before the first clock record of its file")
            if not 0 <= stamp < MAX_STAMP_NS:
                raise RecordError(f"{kind}: has a stamp that no column places; accepted: 0 to 2^62 ns")
            wall_offset = anchor.wall_ns - anchor.mono_ns
            self.horizon = max(self.horizon, stamp + wall_offset)
        return Line(record, name, self.writer, self.observer, place.clock_id, start, end, wall_offset)


class _Anchors:
    """The clock records of one file, each clock's by itself: receipts of several pages stand in one file, and the
    stamps of a page begin at 0.
    """

    def __init__(self, kept: list) -> None:
        self.clock_id: str = kept[0] if kept else ""
        self._of = {self.clock_id: [Anchor(mono, wall) for mono, wall in kept[1:]]}

    def add(self, record: records.Record) -> None:
        self.clock_id = record["clock_id"]
        anchors = self._of.pop(self.clock_id, [])
        # A page reports its requests as they end, and an anchor is as old as its request.
        insort(anchors, Anchor(record["mono_ns"], record["wall_ns"]), key=_mono_ns)
        self._of[self.clock_id] = anchors  # the latest clock stands last
        if len(self._of) > _REMEMBERED_CLOCKS:
            del self._of[next(iter(self._of))]

    def before(self, stamp_ns: int) -> Anchor | None:
        """The clock's last anchor at or before the stamp; its first one for a stamp that is older."""
        anchors = self._of[self.clock_id]
        return anchors[max(bisect_right(anchors, stamp_ns, key=_mono_ns) - 1, 0)] if anchors else None

    def kept(self) -> list:
        return [self.clock_id, *(list(anchor) for anchor in self._of[self.clock_id][-KEPT_ANCHORS:])]


class Intake:
    """Every journal of a directory from the consumed offsets on.

    `consumed` and `anchors` are updated in place as blocks are handed out; `dead_writers` held before anything was
    read, so a writer in it will never say more than what is read here.
    """

    def __init__(self, events: Path, consumed: dict[str, int], anchors: dict[str, list], problems: Problems) -> None:
        self.problems = problems
        self._events = events
        self._consumed = consumed
        self._anchors = anchors
        self._seen: set[Path] = set()
        self._chains: list[Chain] = []
        self._waiting = self._open()

    def _open(self) -> list[Chain]:
        by_writer: dict[str, list[Path]] = {}
        # Asked before the files are listed and read: what a live writer adds after this is read in the next pass.
        dead = {
            f"{observer}/{writer}"
            for observer in records.OBSERVERS
            for writer in dead_writers(self._events / "journal" / observer)
        }
        for path in journal_files(self._events):
            if path not in self._seen and path.parent.name in records.OBSERVERS:
                by_writer.setdefault(recorder_of(path), []).append(path)
                self._seen.add(path)
        opened = [
            Chain(self._events, paths, writer not in dead, self._consumed, self._anchors, self.problems)
            for writer, paths in by_writer.items()
        ]
        self._chains += opened
        return opened

    @property
    def unread_bytes(self) -> int:
        names = [(path, str(path.relative_to(self._events))) for path in self._seen]
        return sum(max(path.stat().st_size - self._consumed.get(name, 0), 0) for path, name in names)

    @property
    def dead_writers(self) -> set[str]:
        return {chain.writer for chain in self._chains if not chain.live} - {
            chain.writer for chain in self._chains if chain.live
        }

    def blocks(self) -> Iterator[tuple[list[Line], int]]:
        """Lines, and the wall time up to which every journal that is still being read has been read.

        A second call reads the files that were made since the first.
        """
        chains = self._waiting or self._open()
        self._waiting = []
        heap = [(chain.horizon, number, chain, chain.blocks()) for number, chain in enumerate(chains)]
        heapq.heapify(heap)
        while heap:
            _, number, chain, blocks = heapq.heappop(heap)
            lines = next(blocks, None)
            if lines is None:
                continue
            heapq.heappush(heap, (chain.horizon, number, chain, blocks))
            yield lines, heap[0][0]

    @property
    def last_anchors(self) -> dict[str, records.Record]:
        """Writer → the last clock record that was read of it."""
        found = {chain.writer: chain.last_anchor for chain in self._chains}
        return {writer: anchor for writer, anchor in found.items() if anchor is not None}


def read_lines(events: Path, journal: str, spans: list[tuple[int, int, int]]) -> Iterator[Line]:
    """Lines read before, by (start, end, wall_offset)."""
    path = Path(events) / journal
    with open(path, "rb") as file:
        for start, end, wall_offset in spans:
            file.seek(start)
            record = decode(file.read(end - start))
            yield Line(record, journal, recorder_of(path), path.parent.name, "", start, end, wall_offset)
