"""How many more tokens an answer will have, from the lengths of earlier answers. Pure.

The table is what `sloscope query survival_curve --events DIR --format json` writes: the Kaplan-Meier curve of output
length of each cohort, in which an answer that was cut off counts as longer than what was seen of it. A mean of
finished answers is too short, since the long ones are those cut off, and max_tokens is what was asked for and not what
will come. The arithmetic is that of `queries/survival/remaining_length.sql`; the tail beyond the curve is added here.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from reference_server.request import Request
from sloscope.errors import ConfigError

POOLED = "all"  # the cohort of `--param by=all`
TOLERANCE = 1e-9  # a curve that is a sum of logarithms meets a level to within this
GROUPINGS = ("class", "tenant")
KV_LEVEL = 0.9  # the share of like answers that do not outgrow the KV which is kept for them


class Curve:
    """The share of answers longer than t tokens: 1 before the first of `lengths`, flat between them.

    `known_below`: of an answer with fewer tokens than this the curve knows how it went on.
    """

    __slots__ = ("_lengths", "_minus_survival", "_survival", "known_below", "largest")

    def __init__(self, lengths: Sequence[int], survival: Sequence[float]) -> None:
        assert lengths and len(lengths) == len(survival)
        self.largest = lengths[-1]
        self._lengths = list(lengths)
        self._survival = list(survival)
        self._minus_survival = [-share for share in survival]
        # With late entries a small risk set may take the curve to 0 for good, before its end.
        self.known_below = next((t for t, share in zip(lengths, survival, strict=True) if not share), lengths[-1])

    def share_beyond(self, tokens: int) -> float:
        at = bisect_right(self._lengths, tokens) - 1
        return self._survival[at] if at >= 0 else 1.0

    def quantile(self, level: float, generated: int, cap: int) -> int:
        """The fewest tokens m beyond `generated` for which the chance of more than m is 1 - level or below; where the
        curve never gets there, all that the cap leaves."""
        lengths = self._lengths
        at = bisect_right(lengths, generated)
        share = self._survival[at - 1] if at else 1.0
        at = bisect_left(self._minus_survival, share * (level - 1 - TOLERANCE), at)
        return (min(lengths[at], cap) if at < len(lengths) else cap) - generated


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is known of the tokens that are still to come, given that `generated` came and `cap` is the most in all.

    Beyond `horizon` = min(cap, largest length seen) nothing is known: the share `unresolved` of such answers gets
    there, and is counted as running to the cap in every quantile. So none is ever too short for want of data, and
    `unresolved` says how much of it is an assumption. Without a curve all of it is.
    """

    generated: int
    cap: int
    curve: Curve | None
    source: str  # cohort, pooled, cap

    @property
    def horizon(self) -> int:
        return self.generated if self.curve is None else min(self.cap, self.curve.largest)

    @property
    def unresolved(self) -> float:
        if self.curve is None:
            return 1.0
        return self.curve.share_beyond(self.horizon) / self.curve.share_beyond(self.generated)

    def quantile(self, level: float) -> int:
        """The fewest tokens m for which the chance of more than m is 1 - level or below."""
        if self.curve is None:
            return self.cap - self.generated
        return self.curve.quantile(level, self.generated, self.cap)


class LengthTable:
    """A curve for each cohort, and one of all together."""

    def __init__(self, curves: Mapping[str, Curve] | None = None, pooled: Curve | None = None) -> None:
        self._curves = dict(curves or {})
        self._pooled = pooled

    @classmethod
    def parse(cls, text: str, field: str = "lengths") -> "LengthTable":
        """Raises ConfigError for anything that is not such a table."""
        rows: dict[str, list[_Row]] = {}
        for number, given in enumerate(_list_of(text, field), 1):
            cohort, row = _row(given, f"{field}: row {number}")
            before = rows.setdefault(cohort, [])
            if before:
                _check_order(before[-1], row, f"{field}: row {number}")
            before.append(row)
        # The query's sums may make a curve rise in its last digit.
        curves = {
            cohort: Curve([row.tokens for row in of], list(accumulate((row.survival for row in of), min)))
            for cohort, of in rows.items()
        }
        return cls(curves, curves[POOLED] if POOLED in curves else _pool(rows.values()))

    def remaining(self, cohort: str, generated: int, cap: int) -> Remaining:
        """From the cohort's curve, else from the pooled one, else from the cap alone. A curve in which no answer was
        longer than `generated` says nothing of one that is."""
        assert 0 <= generated <= cap, f"{generated} tokens generated of at most {cap}"
        curve, source = self._curve(cohort, generated)
        return Remaining(generated, cap, curve, source)

    def quantile(self, cohort: str, generated: int, cap: int, level: float) -> int:
        """`remaining(…).quantile(level)` alone: policies ask it for each running request at each boundary."""
        curve = self._curve(cohort, generated)[0]
        return cap - generated if curve is None else curve.quantile(level, generated, cap)

    def _curve(self, cohort: str, generated: int) -> tuple[Curve | None, str]:
        curve = self._curves.get(cohort)
        if curve is not None and generated < curve.known_below:
            return curve, "cohort"
        curve = self._pooled
        if curve is not None and generated < curve.known_below:
            return curve, "pooled"
        return None, "cap"


@dataclass(slots=True)
class Lengths:
    """The table in use, shared by all who ask; a newer one takes its place while serving. `by`: what a cohort is."""

    table: LengthTable = field(default_factory=LengthTable)
    by: str = GROUPINGS[0]

    def __post_init__(self) -> None:
        assert self.by in GROUPINGS

    def of(self, request: Request) -> Remaining:
        return self.table.remaining(self._cohort(request), len(request.output), request.max_tokens)

    def quantile(self, request: Request, level: float) -> int:
        return self.table.quantile(self._cohort(request), len(request.output), request.max_tokens, level)

    def _cohort(self, request: Request) -> str:
        return (request.request_class if self.by == "class" else request.tenant) or "(none)"


class EstimatedReservation:
    """Promises KV for a length that the given share of such answers does not exceed: between Full and Optimistic."""

    def __init__(self, lengths: Lengths, level: float = KV_LEVEL) -> None:
        assert 0 < level < 1
        self.lengths = lengths
        self.level = level

    def promised_tokens(self, request: Request) -> int:
        more = max(self.lengths.quantile(request, self.level), 1)
        return min(request.tokens + more, request.total_tokens)


# --- reading a table


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: int
    at_risk: int
    events: int
    left: int  # events and censored
    survival: float


def _list_of(text: str, field: str) -> list[Any]:
    accepted = "accepted: the JSON of `sloscope query survival_curve --format json`"
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{field}: is not JSON ({str(error)[:80]}); {accepted}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{field}: {type(rows).__name__} is not a list of rows; {accepted}")
    return rows


def _row(given: Any, field: str) -> tuple[str, _Row]:
    if not isinstance(given, dict):
        raise ConfigError(f"{field}: {type(given).__name__} is no row; accepted: an object keyed by column")
    cohort = given.get("cohort")
    if not isinstance(cohort, str):
        raise ConfigError(f"{field}: cohort: {_shown(cohort)} is not accepted; accepted: a text")
    tokens, at_risk = _count(given, "tokens", 0, field), _count(given, "at_risk", 1, field)
    events, censored = _count(given, "events", 0, field), _count(given, "censored", 0, field)
    if not 1 <= events + censored <= at_risk:
        raise ConfigError(f"{field}: events + censored: {events + censored} is not accepted; accepted: 1 to {at_risk}")
    survival = given.get("survival")
    if isinstance(survival, bool) or not isinstance(survival, int | float) or not 0 <= survival <= 1:
        raise ConfigError(f"{field}: survival: {_shown(survival)} is not accepted; accepted: a number from 0 to 1")
    return cohort, _Row(tokens, at_risk, events, events + censored, float(survival))


def _count(given: Mapping[str, Any], name: str, least: int, field: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{field}: {name}: {_shown(value)} is not accepted; accepted: a whole number from {least}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:40]


def _check_order(before: _Row, row: _Row, field: str) -> None:
    if row.tokens <= before.tokens:
        raise ConfigError(f"{field}: tokens: {row.tokens} is not accepted; accepted: more than {before.tokens}")
    if row.survival > before.survival + TOLERANCE:
        raise ConfigError(f"{field}: survival: {row.survival} is not accepted; accepted: at most {before.survival}")


def _pool(cohorts: Iterable[Sequence[_Row]]) -> Curve | None:
    """The curve of all answers together, from the counts of each cohort.

    None where somebody entered late (population `period`): a cohort's rows do not say at which length, so how many of
    all were at risk is not known. `--param by=all` asks the recording itself.
    """
    left: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for rows in cohorts:
        at_risk = sum(row.left for row in rows)
        for row in rows:
            if row.at_risk != at_risk:
                return None
            at_risk -= row.left
            left[row.tokens] += row.left
            ended[row.tokens] += row.events
    if not left:
        return None
    lengths, survival, share = sorted(left), [], 1.0
    at_risk = left.total()
    for tokens in lengths:
        share *= 1 - ended[tokens] / at_risk
        at_risk -= left[tokens]
        survival.append(share)
    return Curve(lengths, survival)
