"""`definitions.summarise` for many requests at once, on flat arrays; a property test holds the two to each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sloscope.definitions import REASONING, summarise

Ints = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True)
class Grouped:
    """Events of many requests, ordered by (row, choice, receipt). Group g is events[start[g]:stop[g]]."""

    order: Ints | None  # position before ordering; None: it was in order
    t_ns: Ints
    row: Ints  # of each group
    choice: Ints  # of each group
    start: Ints
    stop: Ints
    group: Ints  # of each event

    def ordered(self, values: NDArray) -> NDArray:
        return values if self.order is None else values[self.order]

    @property
    def ordinal0(self) -> Ints:
        """Position of each event in its group, from 0."""
        return np.arange(len(self.t_ns)) - self.start[self.group]


def grouped(counts: Ints, t_ns: Ints, choice: Ints) -> Grouped:
    """`counts` is the number of events of each row; `t_ns` and `choice` hold the rows one after another."""
    row = np.repeat(np.arange(len(counts)), counts)
    order = None
    if choice.any():
        order = np.lexsort((choice, row))
        row, t_ns, choice = row[order], t_ns[order], choice[order]
    size = len(t_ns)
    new = np.ones(size, dtype=bool)
    if size:
        new[1:] = (row[1:] != row[:-1]) | (choice[1:] != choice[:-1])
    start = np.flatnonzero(new)
    stop = np.append(start[1:], size) if size else start
    return Grouped(order, t_ns, row[start], choice[start], start, stop, np.cumsum(new) - 1)


@dataclass(slots=True)
class Optional:
    """A column of integers with a mask of what is known."""

    values: Ints
    known: NDArray[np.bool_]

    def minus(self, other: Ints) -> "Optional":
        return Optional(self.values - other, self.known)


@dataclass(slots=True)
class Numbers:
    """One column per field of `definitions.Summary`, except the tokens that were put in."""

    events: Ints
    first_ns: Optional
    last_ns: Optional
    ttft_ns: Optional
    ttft_visible_ns: Optional
    ttft_worst_ns: Optional
    ttft_visible_worst_ns: Optional
    itl_max_ns: Optional
    span_ns: Optional
    span_tokens: Optional
    e2e_ns: Optional


def reduce_receipts(
    events: Grouped,
    counts: Ints,
    start_ns: Ints,
    types: NDArray,
    n_choices: Ints,
    total_tokens: Sequence[int | None],
    event_tokens: NDArray,
    completed_ns: Optional,
) -> Numbers:
    """`types` and `event_tokens` are in the order of receipt, as `grouped` took them; negative tokens: not known."""
    rows = len(counts)
    has = counts > 0
    first = events.t_ns[events.start]
    last = events.t_ns[events.stop - 1] if len(first) else first
    # Groups of one row stand together, so a row is a slice of the groups.
    choices = np.bincount(events.row, minlength=rows)
    some = np.flatnonzero(choices)
    at = np.concatenate(([0], np.cumsum(choices)[:-1]))[some] if rows else some

    def per_row(ufunc: np.ufunc, values: Ints) -> Ints:
        out = np.zeros(rows, dtype=np.int64)
        if len(some):
            out[some] = ufunc.reduceat(values, at)
        return out

    first_ns = per_row(np.minimum, first)
    last_ns = per_row(np.maximum, last)
    enough = has & (choices >= n_choices)
    position = np.where(events.ordered(types) != REASONING, np.arange(len(events.t_ns)), _NEVER)
    seen_at = np.minimum.reduceat(position, events.start) if len(first) else first
    shown = seen_at != _NEVER
    visible = events.t_ns[np.where(shown, seen_at, 0)] if len(first) else first
    shown_choices = per_row(np.add, shown.astype(np.int64))
    visible_ns = per_row(np.minimum, np.where(shown, visible, _NEVER))
    visible_worst = per_row(np.maximum, np.where(shown, visible, -_NEVER))

    gaps = np.diff(events.t_ns, prepend=0)
    gaps[events.start] = -_NEVER
    itl_max = per_row(np.maximum, np.maximum.reduceat(gaps, events.start) if len(first) else first)
    widest = per_row(np.maximum, last - first)

    tokens = np.array([-1 if total is None else total for total in total_tokens], dtype=np.int64)
    tokens_known = np.array([total is not None for total in total_tokens], dtype=bool)
    alone = (n_choices <= 1) & (choices == 1)
    span = Optional(widest, has.copy())
    span_tokens = Optional(tokens, alone & tokens_known)
    _spans_of_several(events, counts, types, n_choices, total_tokens, event_tokens, has & ~alone, span, span_tokens)
    return Numbers(
        events=counts,
        first_ns=Optional(first_ns, has),
        last_ns=Optional(last_ns, has),
        ttft_ns=Optional(first_ns - start_ns, has),
        ttft_visible_ns=Optional(visible_ns - start_ns, shown_choices > 0),
        ttft_worst_ns=Optional(per_row(np.maximum, first) - start_ns, enough),
        ttft_visible_worst_ns=Optional(visible_worst - start_ns, has & (shown_choices >= n_choices)),
        itl_max_ns=Optional(itl_max, counts > choices),
        span_ns=span,
        span_tokens=span_tokens,
        e2e_ns=Optional(np.where(has, last_ns, completed_ns.values) - start_ns, has | completed_ns.known),
    )


def _spans_of_several(
    events: Grouped,
    counts: Ints,
    types: NDArray,
    n_choices: Ints,
    total_tokens: Sequence[int | None],
    event_tokens: NDArray,
    several: NDArray[np.bool_],
    span: Optional,
    span_tokens: Optional,
) -> None:
    """The worst TPOT among several choices, row by row: such requests are few."""
    if not several.any():
        return
    ends = np.cumsum(counts)
    t_ns, choice = events.t_ns, events.choice[events.group]
    if events.order is not None:
        back = np.empty_like(events.order)
        back[events.order] = np.arange(len(back))
        t_ns, choice = t_ns[back], choice[back]
    for row in np.flatnonzero(several).tolist():
        part = slice(ends[row] - counts[row], ends[row])
        tokens = event_tokens[part].tolist()
        summary = summarise(
            0,
            t_ns[part].tolist(),
            choice[part].tolist(),
            types[part].tolist(),
            int(n_choices[row]),
            total_tokens[row],
            tokens if min(tokens) >= 0 else None,
        )
        span.values[row] = summary.span_ns or 0
        span_tokens.known[row] = summary.span_tokens is not None
        span_tokens.values[row] = summary.span_tokens or 0
