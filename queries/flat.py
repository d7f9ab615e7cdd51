"""Events of many requests as flat arrays, and back to one list a row."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from queries.decode import NULL_NS, NULL_TOKENS
from queries.histories import Events
from queries.reduce import Grouped, Ints, grouped

_DELIVERY = {"client": (), "sidecar": ("forwarded_ns",), "engine": ("handed_ns", "written_ns")}


class Flat:
    """The events of one observer, the rows one after another. None: the row was not observed."""

    def __init__(self, sides: Sequence[Events | None], observer: str) -> None:
        none = Events()
        each = [none if events is None else events for events in sides]
        t_ns, choice, types, tokens = array("q"), array("i"), bytearray(), array("i")
        delivery = {name: array("q") for name in _DELIVERY[observer]}
        for events in each:
            count = len(events.t_ns)
            t_ns += events.t_ns
            choice += events.choice
            types += events.types
            tokens += array("i", [NULL_TOKENS]) * count if events.tokens is None else events.tokens
            for name, joined in delivery.items():
                joined += events.delivery.get(name) or array("q", [NULL_NS]) * count
        self.counts = np.array([len(events.t_ns) for events in each], dtype=np.int64)
        self.observed = np.array([events is not None for events in sides], dtype=bool)
        self.unbroken = np.array([events.lost == 0 for events in each], dtype=bool)
        self.t_ns = np.frombuffer(t_ns, dtype=np.int64)
        self.choice = np.frombuffer(choice, dtype=np.int32).astype(np.int64)
        self.types = np.frombuffer(types, dtype=np.int8)
        self.tokens = np.frombuffer(tokens, dtype=np.int32).astype(np.int64)
        self.delivery = {name: np.frombuffer(values, dtype=np.int64) for name, values in delivery.items()}
        self.groups: Grouped = grouped(self.counts, self.t_ns, self.choice)

    @property
    def _offsets(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.counts)))

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
