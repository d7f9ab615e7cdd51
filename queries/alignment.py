"""Receipts of an observer beside the engine's emissions of the same request.

The rule, per request and observer:

- `ordinal`: each choice has as many events on both sides, so event k was emission k. Also when the request did not
  complete at the observer and no choice has more receipts than emissions: a stream that was cut is a prefix. There,
  what can be checked is checked: tokens of the events received, where a source gives them, must equal the emission's
  cumulative tokens; and on one clock no receipt may precede its emission.
- `tokens`: else, the tokens of the receipts of each choice sum to the engine's last cumulative count. Receipt k belongs
  to the emission that made its last token.
- `none`: else, and whenever a recorder lost events in the middle.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from queries.reduce import Grouped, Ints

LATE_NS = 10_000_000
TOGETHER_NS = 2_000_000
NAMES = ("none", "ordinal", "tokens")
NONE, ORDINAL, TOKENS = range(3)
_SPACE_NS = 4 * TOGETHER_NS
_SUMMABLE_NS = 2**60  # a few of these, and a stamp, fit 64 bits


@dataclass(slots=True)
class Aligned:
    """`how` per row (index into NAMES); `emitted` per receipt: index into the emissions, −1 where not aligned."""

    how: NDArray[np.int8]
    emitted: Ints


def align(
    receipts: Grouped,
    tokens: Ints,
    emissions: Grouped,
    cumulative: Ints,
    *,
    usable: NDArray[np.bool_],
    completed: NDArray[np.bool_],
    same_clock: NDArray[np.bool_],
) -> Aligned:
    """`tokens` (negative: not known) and `cumulative` are ordered as the groups are. Rows not `usable` get none."""
    rows = len(usable)
    how = np.zeros(rows, dtype=np.int8)
    emitted = np.full(len(receipts.t_ns), -1, dtype=np.int64)
    if not usable.any():
        return Aligned(how, emitted)
    partner = _partners(receipts, emissions)
    paired = partner >= 0
    received = receipts.stop - receipts.start
    sent = np.where(paired, (emissions.stop - emissions.start)[partner], 0) if len(emissions.row) else received * 0

    equal = _all_groups(receipts.row, received == sent, rows)
    equal &= _all_groups(emissions.row, np.isin(np.arange(len(emissions.row)), partner), rows)
    prefix = ~completed & _all_groups(receipts.row, received <= sent, rows)

    base = np.where(paired, emissions.start[partner], 0) if len(emissions.row) else received * 0
    by_ordinal = base[receipts.group] + receipts.ordinal0
    candidates = (usable & (equal | prefix))[receipts.row][receipts.group]
    trial = np.where(candidates, by_ordinal, -1)

    known = _all_groups(receipts.row, np.minimum.reduceat(tokens, receipts.start) >= 0, rows) if len(tokens) else usable
    sums = _running(tokens, receipts)
    last = receipts.stop - 1
    if len(emissions.t_ns):
        # Only a prefix can be wrong here: equal counts are taken at their word.
        event_row = receipts.row[receipts.group]
        early = same_clock[event_row] & (trial >= 0) & (receipts.t_ns < emissions.t_ns[np.maximum(trial, 0)])
        off = (trial[last] >= 0) & known[receipts.row] & (sums[last] != cumulative[np.maximum(trial[last], 0)])
        refuted = np.bincount(event_row, weights=early, minlength=rows) > 0
        prefix &= ~refuted & ~(np.bincount(receipts.row, weights=off, minlength=rows) > 0)
    ordinal = usable & (equal | prefix)
    how[ordinal] = ORDINAL
    emitted = np.where(ordinal[receipts.row][receipts.group], by_ordinal, -1)

    if len(emissions.t_ns) and len(receipts.t_ns):
        total = np.where(paired, cumulative[emissions.stop - 1][partner], -1)
        summed = usable & ~ordinal & known & _all_groups(receipts.row, sums[last] == total, rows)
        summed &= np.bincount(receipts.row, minlength=rows) > 0
        summed &= _all_groups(emissions.row, np.isin(np.arange(len(emissions.row)), partner), rows)
        how[summed] = TOKENS
        _by_tokens(receipts, sums, emissions, cumulative, partner, summed, emitted)
    return Aligned(how, emitted)


def _partners(receipts: Grouped, emissions: Grouped) -> Ints:
    """For each receipt group the emission group of the same row and choice, −1 without one."""
    if not len(emissions.row):
        return np.full(len(receipts.row), -1)
    width = 1 + max(int(emissions.choice.max()), int(receipts.choice.max(initial=0)))
    low = min(int(emissions.choice.min()), int(receipts.choice.min(initial=0)))
    span = width - low
    ours = receipts.row * span + (receipts.choice - low)
    theirs = emissions.row * span + (emissions.choice - low)
    found = np.minimum(np.searchsorted(theirs, ours), len(theirs) - 1)
    return np.where(theirs[found] == ours, found, -1)


def _all_groups(row: Ints, holds: NDArray[np.bool_], rows: int) -> NDArray[np.bool_]:
    """Per row: it holds for every group of the row (also when there is none)."""
    return np.bincount(row, weights=~holds, minlength=rows) == 0


def _running(values: Ints, groups: Grouped) -> Ints:
    """Cumulative sum within each group."""
    total = np.cumsum(values)
    before = total[groups.start] - values[groups.start] if len(values) else total
    return total - before[groups.group] if len(values) else total


def _by_tokens(
    receipts: Grouped,
    sums: Ints,
    emissions: Grouped,
    cumulative: Ints,
    partner: Ints,
    summed: NDArray[np.bool_],
    emitted: Ints,
) -> None:
    for group in np.flatnonzero(summed[receipts.row]):
        other = partner[group]
        part = slice(receipts.start[group], receipts.stop[group])
        theirs = cumulative[emissions.start[other] : emissions.stop[other]]
        emitted[part] = emissions.start[other] + np.searchsorted(theirs, sums[part])


@dataclass(slots=True)
class LateGaps:
    """Columns of `late_gaps` for one observer; `row` is the request. Masks tell what is known.

    `follows`: the one before is the event before, and the two differ by numbers of which several have a sum.
    """

    row: Ints
    choice: Ints
    ordinal: Ints
    at_ns: Ints
    prev_ns: Ints
    emit_at_ns: Ints
    emit_prev_ns: Ints
    together: Ints
    emit_together: Ints
    has_prev: NDArray[np.bool_]
    aligned: NDArray[np.bool_]
    prev_aligned: NDArray[np.bool_]
    follows: NDArray[np.bool_]

    @property
    def gap_ns(self) -> Ints:
        return self.at_ns - self.prev_ns

    @property
    def delivery_ns(self) -> Ints:
        return self.gap_ns - (self.emit_at_ns - self.emit_prev_ns)


def late_gaps(receipts: Grouped, emission_ns: Ints, emitted: Ints) -> LateGaps:
    """Every receipt gap or engine gap above 10 ms, and ordinal 1 of each choice."""
    t_ns = receipts.t_ns
    if not len(t_ns):
        empty = np.zeros(0, dtype=np.int64)
        no = empty.astype(bool)
        return LateGaps(empty, empty, empty, empty, empty, empty, empty, empty, empty, no, no, no, no)
    aligned = emitted >= 0
    sent_ns = emission_ns[np.maximum(emitted, 0)] if len(emission_ns) else np.zeros_like(t_ns)
    sent_ns = np.where(aligned, sent_ns, 0)
    first = np.zeros(len(t_ns), dtype=bool)
    first[receipts.start] = True
    both = aligned & np.roll(aligned, 1) & ~first
    late = np.diff(t_ns, prepend=t_ns[0]) > LATE_NS
    late |= both & (np.diff(sent_ns, prepend=sent_ns[0]) > LATE_NS)
    kept = np.flatnonzero(late | first)
    stop = receipts.stop[receipts.group[kept]]
    until = np.minimum(_within(t_ns, receipts, kept), stop)
    emitted_until = np.minimum(_within(sent_ns, receipts, kept), until)
    has_prev = ~first[kept]
    gaps = LateGaps(
        row=receipts.row[receipts.group[kept]],
        choice=receipts.choice[receipts.group[kept]],
        ordinal=receipts.ordinal0[kept] + 1,
        at_ns=t_ns[kept],
        prev_ns=t_ns[kept - 1],
        emit_at_ns=sent_ns[kept],
        emit_prev_ns=sent_ns[kept - 1],
        together=until - kept,
        emit_together=emitted_until - kept,
        has_prev=has_prev,
        aligned=aligned[kept],
        prev_aligned=both[kept],
        follows=has_prev & (np.diff(kept, prepend=-2) == 1) & (aligned[kept] == aligned[kept - 1]),
    )
    gaps.follows &= _summable(gaps.gap_ns) & (~gaps.aligned | _summable(gaps.delivery_ns))
    return gaps


def _summable(values: Ints) -> NDArray[np.bool_]:
    return (values > -_SUMMABLE_NS) & (values < _SUMMABLE_NS)


def _within(stamps: Ints, groups: Grouped, kept: Ints) -> Ints:
    """For each kept event, the index after the last event whose stamp is at most 2 ms later, backward steps ignored.

    One search serves every group: the groups are laid one behind the other on a line, further apart than 2 ms.
    """
    relative = stamps - stamps[groups.start][groups.group]
    width = np.maximum(np.maximum.reduceat(relative, groups.start), 0) + _SPACE_NS
    line = relative + (np.cumsum(width) - width)[groups.group]
    line = np.maximum.accumulate(line)
    return np.searchsorted(line, line[kept] + TOGETHER_NS, side="right")
