"""The `chunks` and `emit` lines of a block of a journal, read column by column instead of line by line.

A recorder writes its batches in few shapes: the same names in the same order, and only ids and numbers differ. The
shape of one line is laid over all others of the block; what lies on it is a record that `records.check` accepts, and
its numbers are made of the bytes, eight digits at a time. Whatever differs in anything (a null, a minus, a space, a
number of more than 18 digits, an empty list) is left to the reader of single lines, which accepts or names the fault.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from queries.batches import DTYPES, Batch, Columns, Ints, runs
from sloscope import records

FEW_LINES = 8  # fewer are read faster one by one
MANY_SHAPES = 16
_PAD = 128  # bytes before and after the block that a look at a place may touch
_ID = 26
_VALUE = re.compile(rb',"(\w+)":(?:[0-9]+|(\[)[0-9,]+\])')
_HEADS = {kind: f'{{"v":{records.VERSION},"kind":"{kind}","request_id":"'.encode() for kind in ("chunks", "emit")}
_LISTS = {kind: {f.name for f in records.SCHEMA[kind] if f.type == "ints"} for kind in _HEADS}
_REQUIRED = {kind: {f.name for f in records.SCHEMA[kind] if f.required} - {"request_id"} for kind in _HEADS}
_INTEGERS = {"attempt", "ordinal0"}
_LARGEST = {"type": len(records.OUTPUT_TYPES) - 1, "choice": 2**31 - 1, "tokens": 2**31 - 1, "cum_tokens": 2**31 - 1}
_UNUSED = {"step_id"}  # checked like the others, and in no table

_IN_ID = np.zeros(256, dtype=bool)
_IN_ID[list(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ")] = True
_ZEROS, _HIGH_BITS = np.uint64(0x3030303030303030), np.uint64(0x8080808080808080)
_OVER_NINE = np.uint64(0x7676767676767676)  # added to a byte of 10 or more, it sets the high bit
# The last n bytes of a word, which holds the digits in the order of the text.
_LAST_BYTES = np.array([0] + [(2**64 - 1) ^ (2 ** (8 * (8 - n)) - 1) for n in range(1, 9)], dtype=np.uint64)
# Neighbours joined: digits to pairs, pairs to fours, fours to eight.
_JOINS = (
    (np.uint64(10 * 2**8 + 1), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(100 * 2**16 + 1), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(10_000 * 2**32 + 1), np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
)
_MAX_DIGITS = 18  # always below 2^63


class _Value(NamedTuple):
    before: bytes  # the text between the value before and this one
    name: str
    is_list: bool


@dataclass(slots=True)
class Found:
    """Batches of one shape, and the number of each one's line in the block."""

    lines: Ints
    batches: list[Batch]


class Text:
    """A block of whole lines as bytes and as words of eight bytes at any place."""

    def __init__(self, data: bytes) -> None:
        padded = bytes(_PAD) + data + bytes(_PAD)
        self._padded = padded
        self._bytes = np.frombuffer(padded, dtype=np.uint8)
        self._words: NDArray[np.uint64] = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))
        self._closes = np.flatnonzero(self._bytes == ord("]"))
        self._commas = np.flatnonzero(self._bytes == ord(","))
        self._stops = np.flatnonzero(self._bytes == ord("\n"))
        self._starts = np.concatenate(([_PAD], self._stops[:-1] + 1)) if len(self._stops) else self._stops

    @property
    def starts(self) -> Ints:
        """First byte of each line, counted from the start of the block."""
        return self._starts - _PAD

    @property
    def stops(self) -> Ints:
        """The line feed of each line, counted likewise."""
        return self._stops - _PAD

    def batches(self, kind: str) -> Iterator[Found]:
        head = _HEADS[kind]
        usual = self._stands(self._starts, head)
        usual[usual] = self._are_ids(self._starts[usual] + len(head))
        left = np.flatnonzero(usual)
        for _ in range(MANY_SHAPES):
            if len(left) < FEW_LINES:
                return
            first = int(left[0])
            shape = _shape(kind, self._padded[self._starts[first] + len(head) + _ID : self._stops[first] + 1])
            if shape is None:
                left = left[1:]
                continue
            fits, found = self._read(left, len(head), *shape)
            yield found
            left = left[~fits] if fits.any() else left[1:]

    def _window(self, at: Ints, size: int) -> NDArray[np.uint8]:
        """The `size` bytes at each place."""
        every = np.ndarray(len(self._padded) - size + 1, dtype=f"V{size}", buffer=self._padded, strides=(1,))
        return every[np.minimum(at, len(every) - 1)].view(np.uint8).reshape(len(at), size)

    def _stands(self, at: Ints, text: bytes) -> NDArray[np.bool_]:
        return (self._window(at, len(text)) == np.frombuffer(text, dtype=np.uint8)).all(axis=1)

    def _are_ids(self, at: Ints) -> NDArray[np.bool_]:
        text = self._window(at, _ID)
        return _IN_ID[text].all(axis=1) & (text[:, 0] <= ord("7"))

    def _read(self, lines: Ints, head: int, values: list[_Value], tail: bytes) -> tuple[NDArray[np.bool_], Found]:
        """Which of the lines have this shape, and their batches."""
        cursor = self._starts[lines] + head + _ID
        fits = np.ones(len(lines), dtype=bool)
        spans: dict[str, tuple[Ints, Ints]] = {}
        for value in values:
            fits &= self._stands(cursor, value.before)
            start = cursor + len(value.before)
            # Behind a line that does not fit nothing is found, or something wrong; it is set aside below.
            cursor = self._end_of_list(start) if value.is_list else self._end_of_digits(start)
            spans[value.name] = start, cursor
        fits &= self._stands(cursor, tail)
        fits &= cursor <= self._stops[lines]
        kept = np.flatnonzero(fits)
        spans = {name: (start[kept], stop[kept]) for name, (start, stop) in spans.items()}
        lists = [value.name for value in values if value.is_list]
        first_comma = {name: np.searchsorted(self._commas, spans[name][0]) for name in lists}
        counts = {name: np.searchsorted(self._commas, spans[name][1]) - first_comma[name] + 1 for name in lists}
        count = counts[lists[0]]
        good = np.ones(len(kept), dtype=bool)
        for name in lists:
            good &= counts[name] == count
        # A line whose lists differ in length is set aside with what was found of it.
        if not good.all():
            fits[kept[~good]] = False
            kept = kept[good]
            spans = {name: (start[good], stop[good]) for name, (start, stop) in spans.items()}
            first_comma = {name: at[good] for name, at in first_comma.items()}
            count = count[good]
            good = good[good]
        at = np.cumsum(count) - count
        columns = Columns(int(count.sum()), {})
        for name in lists:
            numbers, bad = self._list(*spans[name], first_comma[name], at, count, _LARGEST.get(name))
            if bad is not None and bad.any():
                good &= np.add.reduceat(bad, at) == 0
            if name not in _UNUSED:
                columns.values[name] = numbers.astype(DTYPES.get(name, np.int64), copy=False)
        heads = {}
        for name in _INTEGERS & spans.keys():
            heads[name], bad = self._numbers(*spans[name])
            good &= ~bad
        fits[kept[~good]] = False
        ids = self._window(self._starts[lines[kept]] + head, _ID).tobytes().decode("ascii")
        found = zip(
            [ids[place : place + _ID] for place in range(0, len(ids), _ID)],
            heads["attempt"].tolist() if "attempt" in heads else [0] * len(kept),
            heads["ordinal0"].tolist(),
            at.tolist(),
            count.tolist(),
            [columns] * len(kept),
            strict=True,
        )
        batches = list(map(Batch._make, found))
        if not good.all():
            batches = [batch for batch, is_good in zip(batches, good.tolist(), strict=True) if is_good]
        return fits, Found(lines[kept[good]], batches)

    def _end_of_list(self, start: Ints) -> Ints:
        if not len(self._closes):
            return start
        return self._closes[np.minimum(np.searchsorted(self._closes, start), len(self._closes) - 1)]

    def _end_of_digits(self, start: Ints) -> Ints:
        other = self._window(start, _MAX_DIGITS + 1) - np.uint8(ord("0")) > 9
        return start + np.argmax(other, axis=1)

    def _list(
        self, start: Ints, stop: Ints, comma: Ints, at: Ints, count: Ints, largest: int | None
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """The numbers of many lists one after another, and which are none; None: all are right."""
        if not len(at):
            return np.zeros(0, dtype=np.int64), None
        ends = self._commas.take(runs(comma, count), mode="clip")
        ends[at + count - 1] = stop
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1] + 1
        starts[at] = start
        numbers, bad = self._numbers(starts, ends)
        if largest is not None:
            bad |= numbers > largest
        return numbers, bad

    def _numbers(self, start: Ints, stop: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The integer in each stretch of bytes, and which of them are none."""
        size = stop - start
        narrowest, widest = (int(size.min()), int(size.max())) if len(size) else (1, 1)
        if narrowest == widest == 1:
            digit = self._bytes[start] - np.uint8(ord("0"))
            return digit, digit > 9
        bad = self._bytes[start] == ord("0")
        bad &= size > 1
        if narrowest < 1 or widest > _MAX_DIGITS:
            bad |= (size < 1) | (size > _MAX_DIGITS)
            widest = min(widest, _MAX_DIGITS)
        total: NDArray[np.uint64] | None = None
        for before in reversed(range(0, max(widest, 1), 8)):  # digits behind those of the word
            word = self._words[stop - (8 + before)]
            word ^= _ZEROS
            if narrowest < before + 8:
                is_same = narrowest == widest
                digits: Any = narrowest - before if is_same else np.clip(size - before, 0, 8)
                word &= _LAST_BYTES[digits]
            bad |= ((word + _OVER_NINE) | word) & _HIGH_BITS != 0
            for factor, shift, mask in _JOINS:
                word *= factor
                word >>= shift
                word &= mask
            if total is None:
                total = word
            else:
                total *= np.uint64(10**8)
                total += word
        assert total is not None
        return total.view(np.int64), bad


def _shape(kind: str, line: bytes) -> tuple[list[_Value], bytes] | None:
    """What stands where behind the id, and the end; None for a line that is not as recorders write it."""
    values: list[_Value] = []
    at, closing = 1, b'"'
    if line[:1] != closing:
        return None
    while (value := _VALUE.match(line, at)) is not None:
        name, is_list = value[1].decode("ascii"), value[2] is not None
        values.append(_Value(closing + b',"' + value[1] + b'":' + (b"[" if is_list else b""), name, is_list))
        at, closing = value.end(), b"]" if is_list else b""
    names = [value.name for value in values]
    if line[at:] != b"}\n" or len(set(names)) < len(names) or not _REQUIRED[kind] <= set(names):
        return None
    if any(value.name not in (_LISTS[kind] if value.is_list else _INTEGERS) for value in values):
        return None
    return values, closing + b"}\n"
