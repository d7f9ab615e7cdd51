"""Batches of output events as columns: what was read together lies together, and a batch is a stretch of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NULL_NS = -(2**63)  # in a column of stamps: not known
NULL_TOKENS = -1  # in a column of token counts: not known
# What stands where a batch lacks the column. An engine does not tell types apart.
MISSING = {"type": 0, "tokens": NULL_TOKENS, "cum_tokens": NULL_TOKENS}
DTYPES: dict[str, Any] = {"choice": np.int32, "type": np.int8, "tokens": np.int32, "cum_tokens": np.int32}
STAMPS = ("t_ns", "forwarded_ns", "computed_ns", "handed_ns", "written_ns")


@dataclass(slots=True, eq=False)
class Columns:
    """Values by name, all of one length; a name that no batch of it has is left out. Stamps are int64."""

    size: int
    values: dict[str, NDArray[Any]]

    def column(self, name: str) -> NDArray[Any]:
        found = self.values.get(name)
        if found is None:
            return np.full(self.size, MISSING.get(name, NULL_NS), dtype=DTYPES.get(name, np.int64))
        return found


class Batch(NamedTuple):
    """A `chunks` or `emit` record: the events [start, start + events) of its columns."""

    request_id: str
    attempt: int
    ordinal0: int
    start: int
    events: int
    columns: Columns

    @property
    def kind(self) -> str:
        return "emit" if "computed_ns" in self.columns.values else "chunks"

    @property
    def last_stamp_ns(self) -> int:
        """The largest stamp of its last event."""
        if not self.events:
            return NULL_NS
        last = self.start + self.events - 1
        return max(int(values[last]) for name, values in self.columns.values.items() if name in STAMPS)


class Stretches:
    """Where the events of some batches lie, batch after batch, so that any column of them is taken at once."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        numbers: dict[int, int] = {}
        self.columns: list[Columns] = []
        of: list[int] = []
        for batch in batches:
            columns = batch.columns
            number = numbers.get(id(columns))
            if number is None:
                number = numbers[id(columns)] = len(numbers)
                self.columns.append(columns)
            of.append(number)
        sizes = np.array([columns.size for columns in self.columns], dtype=np.int64)
        base = np.cumsum(sizes) - sizes
        start = np.array([batch.start for batch in batches], dtype=np.int64)
        self.start = start + base[np.array(of, dtype=np.int64)]
        self.count = np.array([batch.events for batch in batches], dtype=np.int64)

    def index(self) -> Ints:
        """The place of each event in the columns laid one behind the other."""
        return runs(self.start, self.count)

    def take(self, name: str, index: Ints) -> NDArray[Any]:
        if not self.columns:
            return np.zeros(0, dtype=DTYPES.get(name, np.int64))
        return np.concatenate([columns.column(name) for columns in self.columns])[index]


def runs(start: Ints, count: Ints) -> Ints:
    """The integers [start, start + events) of each pair, one after another."""
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


def moved_together(batches: Iterable[Batch]) -> list[Batch]:
    """The same batches in columns that hold nothing else: those of what was written can go."""
    moved = list(batches)
    by_names: dict[frozenset[str], list[int]] = {}
    for place, batch in enumerate(moved):
        by_names.setdefault(frozenset(batch.columns.values), []).append(place)
    for names, places in by_names.items():
        stretches = Stretches([moved[place] for place in places])
        index = stretches.index()
        columns = Columns(len(index), {name: stretches.take(name, index) for name in sorted(names)})
        starts = np.cumsum(stretches.count) - stretches.count
        for place, start in zip(places, starts.tolist(), strict=True):
            moved[place] = moved[place]._replace(start=start, columns=columns)
    return moved
