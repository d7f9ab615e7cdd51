"""Events of many requests as flat arrays, and back to one list a row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from queries.batches import NULL_NS, Stretches
from queries.histories import Side
from queries.reduce import Grouped, Ints, grouped

_DELIVERY = {"client": (), "sidecar": ("forwarded_ns",), "engine": ("handed_ns", "written_ns")}


class Flat:
    """The events of one observer in the order of receipt, the rows one after another. None: the row was not observed.

    `lost` counts the events that nobody recorded: those of rows that are not `unbroken`. `repeated` counts what was
    there already.
    """

    def __init__(self, sides: Sequence[Side | None], observer: str) -> None:
        batches = [batch for side in sides if side is not None for batch in side.batches]
        each = np.array([0 if side is None else len(side.batches) for side in sides], dtype=np.int64)
        row = np.repeat(np.arange(len(sides)), each)
        ordinal0 = np.array([batch.ordinal0 for batch in batches], dtype=np.int64)
        stretches = Stretches(batches)
        if ((np.diff(ordinal0) < 0) & (np.diff(row) == 0)).any():
            order = np.lexsort((ordinal0, row))
            ordinal0, stretches.start = ordinal0[order], stretches.start[order]
            stretches.count = stretches.count[order]
        self.lost = 0
        self.repeated = 0
        self.unbroken = np.ones(len(sides), dtype=bool)
        self._set_aside(row, ordinal0, stretches)
        self.observed = np.array([side is not None for side in sides], dtype=bool)
        self.counts = np.bincount(row, weights=stretches.count, minlength=len(sides)).astype(np.int64)
        self._offsets: Ints = np.concatenate(([0], np.cumsum(self.counts)))
        index = stretches.index()
        stamps, tokens = ("computed_ns", "cum_tokens") if observer == "engine" else ("t_ns", "tokens")
        self.t_ns: Ints = stretches.take(stamps, index)
        self.choice: Ints = stretches.take("choice", index).astype(np.int64)
        self.types = stretches.take("type", index)
        self.tokens: Ints = stretches.take(tokens, index).astype(np.int64)
        self.delivery: dict[str, Ints] = {name: stretches.take(name, index) for name in _DELIVERY[observer]}
        self.groups: Grouped = grouped(self.counts, self.t_ns, self.choice)

    def _set_aside(self, row: Ints, ordinal0: Ints, stretches: Stretches) -> None:
        """Batches are joined by their position; a repeated position keeps what came first."""
        expected = np.zeros(len(row), dtype=np.int64)
        follows = row[1:] == row[:-1]
        expected[1:][follows] = (ordinal0 + stretches.count)[:-1][follows]
        for broken in np.unique(row[ordinal0 != expected]).tolist():
            position, lost = 0, 0
            for batch in range(*np.searchsorted(row, (broken, broken + 1)).tolist()):
                first, count = int(ordinal0[batch]), int(stretches.count[batch])
                skip = min(max(position - first, 0), count)
                lost += max(first - position, 0)
                self.repeated += skip
                stretches.start[batch] += skip
                stretches.count[batch] -= skip
                position = max(position, first + count)
            self.lost += lost
            self.unbroken[broken] = lost == 0

    def of_row(self, values: Ints, row: int) -> list[int]:
        """The values of one row's events."""
        found: list[int] = values[self._offsets[row] : self._offsets[row + 1]].tolist()
        return found

    def event_tokens(self, observer: str) -> Ints:
        """Tokens of each event in the order of receipt; negative where not known."""
        if observer != "engine":
            return self.tokens
        cumulative = self.groups.ordered(self.tokens)
        each = np.diff(cumulative, prepend=0)
        each[self.groups.start] = cumulative[self.groups.start]
        if self.groups.order is None:
            return each
        back = np.empty_like(each)
        back[self.groups.order] = each
        return back

    def first(self, values: Ints) -> pa.Array:
        """The value of each row's first event."""
        has = self.counts > 0
        found = np.full(len(has), NULL_NS)
        found[has] = values[self._offsets[:-1][has]]
        return pa.array(found, mask=found == NULL_NS)

    def lists(self, values: Any, type_: pa.DataType, null: int | None, *, whole: bool) -> pa.Array:
        """One list a row. NULL when not observed and, unless `whole`, when no value of the row is known."""
        known = self.observed
        mask = None if null is None else values == null
        if mask is not None and not whole:
            has_value = np.add.reduceat(~mask, self._offsets[:-1][self.counts > 0]) if mask.size else None
            some = np.zeros(len(self.counts), dtype=bool)
            if has_value is not None:
                some[self.counts > 0] = has_value > 0
            known = known & some
        kept = np.repeat(known, self.counts)
        items = pa.array(values[kept], type_, mask=None if mask is None else mask[kept])
        offsets = np.concatenate(([0], np.cumsum(np.where(known, self.counts, 0)))).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), items, mask=pa.array(~known))
