"""Requests to rows: the three observers side by side, their arrays, and the gaps worth judging."""

import json
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa

from queries import tables
from queries.alignment import NAMES, LateGaps, align, late_gaps
from queries.batches import NULL_NS, NULL_TOKENS
from queries.flat import Flat
from queries.histories import Request, Side, winner
from queries.reduce import Numbers, Optional, reduce_receipts
from sloscope import records
from sloscope.definitions import normalise_finish
from sloscope.units import NS_PER_S

_ARROW = {
    "VARCHAR": pa.string(),
    "BIGINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "DOUBLE": pa.float64(),
    "DATE": pa.date32(),
    "INTEGER": pa.int32(),
    "BIGINT[]": pa.list_(pa.int64()),
    "INTEGER[]": pa.list_(pa.int32()),
    "TINYINT[]": pa.list_(pa.int8()),
}
_DAY_NS = 86_400 * NS_PER_S
_OWN_LIMITS = ("ttft_ns", "ttft_visible_ns", "itl_max_ns", "tpot_ns", "e2e_ns")
_BEGIN_TEXT = ("external_id", "retry_of", "model", "tenant", "class", "contract_hash")


def arrow_schema(table: str) -> pa.Schema:
    return pa.schema([(column.name, _ARROW[column.type]) for column in tables.stored(table)])


@dataclass(slots=True)
class Row:
    """One request with the sides that its row shows."""

    request: Request
    sides: dict[str, Side]  # observer → side
    ordered: list[Side]  # the same, client first
    waste_tokens: int | None
    set_aside: int  # recorders whose begin came second
    arrival_at_ns: int

    @property
    def arrival_day(self) -> int:
        """Days since the epoch, UTC."""
        return self.arrival_at_ns // _DAY_NS


def row_of(request: Request) -> Row:
    """The request as its row shows it. It must have begun."""
    attempts: dict[str, list[Side]] = {}
    set_aside = 0
    for observer, _, _, side, aside in request.sides():
        attempts.setdefault(observer, []).append(side)
        set_aside += aside
    sides = {observer: winner(found) for observer, found in attempts.items()}
    ordered = [sides[observer] for observer in records.OBSERVERS if observer in sides]
    row = Row(request, sides, ordered, None, set_aside, ordered[0].arrival_at_ns)
    # The engine knows what was computed, others what they received of it.
    for observer in reversed(records.OBSERVERS):
        lost = [side for side in attempts.get(observer, ()) if side is not sides[observer]]
        if lost:
            wasted = [_lost_tokens(observer, side) for side in lost]
            known = [tokens for tokens in wasted if tokens is not None]
            row.waste_tokens = sum(known) if len(known) == len(wasted) else None
            break
    return row


def _lost_tokens(observer: str, side: Side) -> int | None:
    """Output tokens of an attempt that lost. Without a count and without an event nothing is known: its server may have
    computed, and a 0 would make the hedge look free.
    """
    flat = Flat([side], observer)
    if "output_tokens" not in (side.end or {}) and not flat.counts[0]:
        return None
    return _tokens(observer, side, flat, 0)[0]


def _tokens(observer: str, side: Side, flat: Flat, row: int) -> tuple[int | None, str | None]:
    """Output tokens and where they come from; without a source each event is taken for one, and said so. An answer that
    came whole has no events: without a count of its own nothing is known.
    """
    end = side.end or {}
    if "output_tokens" in end:
        return end["output_tokens"], end.get("token_source", "assumed_one")
    tokens = flat.of_row(flat.tokens, row)
    if observer == "engine" and side.batches:
        return sum(dict(zip(flat.of_row(flat.choice, row), tokens, strict=True)).values()), "engine"
    if tokens and min(tokens) >= 0:
        return sum(tokens), "continuous_usage"
    if not tokens and end.get("outcome") == "completed":
        return None, None
    return len(tokens), "assumed_one"


class Assembly:
    """Rows of one day, built column by column."""

    def __init__(self, rows: list[Row], day: date) -> None:
        self._rows = rows
        self._day = day
        self._sides = {observer: [row.sides.get(observer) for row in rows] for observer in records.OBSERVERS}
        self._begins = {o: [(side and side.begin) or {} for side in sides] for o, sides in self._sides.items()}
        self._ends = {o: [(side and side.end) or {} for side in sides] for o, sides in self._sides.items()}
        by_observer = [self._begins[observer] for observer in reversed(records.OBSERVERS)]
        self._merged = [engine | sidecar | client for engine, sidecar, client in zip(*by_observer, strict=True)]
        self._requests: dict[str, Any] = {}
        self._chunks: dict[str, Any] = {}
        self._flat = {observer: Flat(sides, observer) for observer, sides in self._sides.items()}
        self._endings = {o: [_ending(row, o) for row in rows] for o in records.OBSERVERS}
        self._alignment: dict[str, pa.Array] = {}
        self.lost_events = sum(flat.lost for flat in self._flat.values())
        self.repeated = sum(flat.repeated for flat in self._flat.values())
        self.repeated += sum(row.set_aside for row in rows)

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """Each table as soon as it is made, so that it can be written while the next one is: the large ones first."""
        self._common()
        for observer in records.OBSERVERS:
            self._arrays(observer)
        yield "chunks", _table("chunks", self._chunks)
        with ThreadPoolExecutor(2) as pool:  # numpy leaves the interpreter free
            gaps = list(pool.map(self._align, ("client", "sidecar")))
        yield "late_gaps", pa.concat_tables(gaps)
        for observer in records.OBSERVERS:
            self._observer(observer)
        self._client()
        self._sidecar()
        self._engine()
        for observer, names in self._alignment.items():
            self._requests[f"{observer}_alignment"] = names
        yield "requests", _table("requests", self._requests)
        yield "sources", self._sources()

    def _each(self, value: Callable[[Row], Any]) -> list[Any]:
        return [value(row) for row in self._rows]

    def _side(self, observer: str, value: Callable[[Side], Any]) -> list[Any]:
        return [None if side is None else value(side) for side in self._sides[observer]]

    def _begin(self, observer: str, name: str) -> list[Any]:
        return _field(self._begins[observer], name)

    def _end(self, observer: str, name: str) -> list[Any]:
        return _field(self._ends[observer], name)

    def _first(self, name: str) -> list[Any]:
        """The begin field of the first observer that has it."""
        return _field(self._merged, name)

    def _common(self) -> None:
        out = self._requests
        sides = self._each(lambda row: row.ordered)
        out["request_id"] = self._each(lambda row: row.request.request_id)
        out["arrival_date"] = [self._day] * len(self._rows)
        out["arrival_at_ns"] = self._each(lambda row: row.arrival_at_ns)
        for name in (*_BEGIN_TEXT, "streaming", "n_choices", "max_tokens", "stop_after"):
            out[name] = self._first(name)
        own = [limits or {} for limits in self._first("own_limits")]
        for name in _OWN_LIMITS:
            out[f"own_{name}"] = [limits.get(name) for limits in own]
        # From a usage, else as the request was begun.
        counted = zip(map(_counted_prompt, sides), self._first("prompt_tokens"), strict=True)
        out["prompt_tokens"] = [begun if usage is None else usage for usage, begun in counted]
        labels = self._first("labels")
        out["labels"] = [None if found is None else json.dumps(found, sort_keys=True) for found in labels]
        for name in ("warmup", "length_forced"):
            out[name] = [_label(each, name) for each in sides]
        out["hedge_waste_output_tokens"] = self._each(lambda row: row.waste_tokens)
        self._chunks["request_id"] = out["request_id"]
        self._chunks["arrival_date"] = out["arrival_date"]

    def _observer(self, observer: str) -> None:
        out, flat = self._requests, self._flat[observer]
        totals = [
            None if side is None else _tokens(observer, side, flat, number)
            for number, side in enumerate(self._sides[observer])
        ]
        tokens = [None if total is None else total[0] for total in totals]
        n_choices = np.array([choices or 1 for choices in self._first("n_choices")], dtype=np.int64)
        start = self._side(observer, lambda side: side.start_ns)
        end = self._end(observer, "end_ns")
        starts = np.array([stamp or 0 for stamp in start], dtype=np.int64)
        ends = self._endings[observer]
        completed = np.array([outcome == "completed" for outcome, _ in ends], dtype=bool)
        numbers = reduce_receipts(
            flat.groups,
            flat.counts,
            starts,
            flat.types,
            n_choices,
            tokens,
            flat.event_tokens(observer),
            Optional(np.array([stamp or 0 for stamp in end], dtype=np.int64), completed),
        )
        for field in fields(Numbers):
            value = getattr(numbers, field.name)
            if isinstance(value, Optional):
                out[f"{observer}_{field.name}"] = pa.array(value.values, mask=~value.known)
        stream_end = [None if e is None else e - s for s, e in zip(start, end, strict=True)]
        columns = {
            "observed": self._each(lambda row: observer in row.sides),
            "role": self._begin(observer, "role"),
            "clock_id": self._begin(observer, "clock_id"),
            "arrival_at_ns": self._side(observer, lambda side: side.arrival_at_ns),
            "end_at_ns": self._side(observer, lambda side: side.end_at_ns),
            "start_ns": start,
            "end_ns": end,
            "stream_end_ns": stream_end,
            "events": pa.array(numbers.events, mask=~flat.observed),
            "tokens": tokens,
            "token_source": [None if total is None else total[1] for total in totals],
            "outcome": [outcome for outcome, _ in ends],
            "reason": [reason for _, reason in ends],
            "finish_reason": self._side(observer, _finish),
            "http_status": self._end(observer, "http_status"),
            "loop_lag_max_ns": self._end(observer, "loop_lag_max_ns"),
            "consumer_hold_ns": self._end(observer, "consumer_hold_ns"),
        }
        out.update({f"{observer}_{name}": values for name, values in columns.items()})

    def _client(self) -> None:
        out = self._requests
        send = out["client_start_ns"]
        intended = self._begin("client", "intended_ns")
        first = out["client_first_ns"].to_pylist()
        out["client_intended_ns"] = intended
        out["client_dispatch_lag_ns"] = _differences(send, intended)
        out["client_ttft_intended_ns"] = _differences(first, intended)

    def _sidecar(self) -> None:
        out, flat = self._requests, self._flat["sidecar"]
        out["sidecar_body_complete_ns"] = self._begin("sidecar", "body_complete_ns")
        chosen, went_to = self._begin("sidecar", "upstream"), self._end("sidecar", "upstream")
        out["sidecar_upstream"] = [to or first for to, first in zip(went_to, chosen, strict=True)]
        out["sidecar_upstream_first_ns"] = flat.first(flat.t_ns)
        out["sidecar_forwarded_first_ns"] = flat.first(flat.delivery["forwarded_ns"])
        timings = self._end("sidecar", "server_timing")
        out["sidecar_server_timing"] = [None if found is None else json.dumps(found) for found in timings]

    def _engine(self) -> None:
        out, flat = self._requests, self._flat["engine"]
        out["engine_body_complete_ns"] = self._begin("engine", "body_complete_ns")
        states = self._each(lambda row: row.request.states_of(row.sides.get("engine")))
        for column, state in (("queued", "WAITING"), ("prefill_start", "PREFILL")):
            at = [[s["at_ns"] for s in each if s["to_state"] == state] for each in states]
            out[f"engine_{column}_ns"] = [min(stamps, default=None) for stamps in at]
        counts = [sum(s["to_state"] == "PREEMPTED" for s in each) if each else None for each in states]
        out["engine_preemptions"] = counts
        for name in ("socket_closed_ns", "abort_seen_ns", "kv_freed_ns"):
            # Another observer stamps a closed socket on its own clock; only the engine has the other two to tell.
            told = ("engine",) if name == "socket_closed_ns" else records.OBSERVERS
            found = [
                [late[name] for late in row.request.late if name in late and late["observer"] in told]
                for row in self._rows
            ]
            out[f"engine_{name}"] = [min(stamps, default=None) for stamps in found]
        sent = [
            [late["abort_sent"] for late in row.request.late if "abort_sent" in late and late["observer"] == "engine"]
            for row in self._rows
        ]
        out["engine_abort_sent"] = [any(each) if each else None for each in sent]
        handed, written = flat.delivery["handed_ns"], flat.delivery["written_ns"]
        for name, stamps in (("computed", flat.t_ns), ("handed", handed), ("written", written)):
            out[f"engine_first_{name}_ns"] = flat.first(stamps)

    def _arrays(self, observer: str) -> None:
        out, flat = self._chunks, self._flat[observer]
        stamps = "computed_ns" if observer == "engine" else "t_ns"
        out[f"{observer}_{stamps}"] = flat.lists(flat.t_ns, pa.int64(), NULL_NS, whole=True)
        for name, values in flat.delivery.items():
            out[f"{observer}_{name}"] = flat.lists(values, pa.int64(), NULL_NS, whole=False)
        out[f"{observer}_choice"] = flat.lists(flat.choice, pa.int32(), None, whole=True)
        if observer == "engine":
            out["engine_cum_tokens"] = flat.lists(flat.tokens, pa.int32(), NULL_TOKENS, whole=True)
        else:
            out[f"{observer}_type"] = flat.lists(flat.types, pa.int8(), None, whole=True)
            out[f"{observer}_tokens"] = flat.lists(flat.tokens, pa.int32(), NULL_TOKENS, whole=False)

    def _align(self, observer: str) -> pa.Table:
        """Late gaps of the observer; how it was aligned is kept for the requests."""
        ours, engine = self._flat[observer], self._flat["engine"]
        clocks = zip(self._begin(observer, "clock_id"), self._begin("engine", "clock_id"), strict=True)
        same_clock = np.array([a is not None and a == b for a, b in clocks], dtype=bool)
        both = ours.observed & engine.observed
        completed = np.array([outcome == "completed" for outcome, _ in self._endings[observer]], dtype=bool)
        aligned = align(
            ours.groups,
            ours.groups.ordered(ours.tokens),
            engine.groups,
            engine.groups.ordered(engine.tokens),
            usable=both & ours.unbroken & engine.unbroken,
            completed=completed,
            same_clock=same_clock,
        )
        names = pa.array([NAMES[how] for how in aligned.how], mask=~both)
        self._alignment[observer] = names
        gaps = late_gaps(ours.groups, engine.groups.t_ns, aligned.emitted)
        return self._gap_table(observer, gaps, names, both, same_clock)

    def _gap_table(self, observer: str, gaps: LateGaps, names: pa.Array, both: Any, same_clock: Any) -> pa.Table:
        count = np.arange(len(gaps.row))
        start = np.maximum.accumulate(np.where(gaps.follows, 0, count))
        place = (count - start) % tables.GAPS_A_ROW
        head = np.flatnonzero(place == 0)
        row = gaps.row[head]
        columns: dict[str, Any] = {
            "request_id": pa.array(self._requests["request_id"], pa.string()).take(pa.array(row)),
            "arrival_date": pa.repeat(pa.scalar(self._day, pa.date32()), len(row)),
            "observer": pa.repeat(observer, len(row)),
            "choice": gaps.choice[head],
            "ordinal_0": gaps.ordinal[head],
            "at_0_ns": gaps.at_ns[head],
            "lag_0_ns": pa.array((gaps.at_ns - gaps.emit_at_ns)[head], mask=~gaps.aligned[head]),
            "same_clock": pa.array(same_clock[row], mask=~both[row]),
            "alignment": names.take(pa.array(row)),
        }
        gap_ns, delivery_ns = gaps.gap_ns, gaps.delivery_ns
        for each in range(tables.GAPS_A_ROW):
            at = np.minimum(head + each, len(place) - 1)
            there = place[at] == each
            aligned = there & gaps.aligned[at]
            columns |= {
                f"gap_{each}_ns": pa.array(gap_ns[at], mask=~(there & gaps.has_prev[at])),
                f"delivery_{each}_ns": pa.array(delivery_ns[at], mask=~(there & gaps.prev_aligned[at])),
                f"together_{each}": pa.array(gaps.together[at], mask=~there),
                f"emit_together_{each}": pa.array(gaps.emit_together[at], mask=~aligned),
            }
        return _table("late_gaps", columns)

    def _sources(self) -> pa.Table:
        ids, journals, counts, spans = [], [], [0], array("q")
        for row in self._rows:
            for journal, lines in row.request.sources.items():
                ids.append(row.request.request_id)
                journals.append(journal)
                spans += lines
                counts.append(len(spans) // 3)
        offsets = pa.array(counts, pa.int32())
        flat = np.frombuffer(spans, dtype=np.int64).reshape(-1, 3)
        lists = [pa.ListArray.from_arrays(offsets, pa.array(flat[:, column])) for column in range(3)]
        found = dict(zip(("starts", "ends", "wall_offsets"), lists, strict=True))
        return _table("sources", {"request_id": ids, "journal": journals, **found})


def _field(said: list[records.Record], name: str) -> list[Any]:
    return [each.get(name) for each in said]


def _ending(row: Row, observer: str) -> tuple[str | None, str | None]:
    """Outcome and reason at the observer.

    `disconnect` is refined, nothing else, and into a cancel only: by a late reason, else, where a server saw it, by the
    end that the client itself recorded, since it knows why it left.
    """
    side = row.sides.get(observer)
    if side is None or side.end is None:
        return None, None
    outcome, reason = side.end["outcome"], side.end.get("reason", "")
    if (outcome, reason) == ("cancelled", "disconnect"):
        for late in row.request.late:
            if late["observer"] == observer and late.get("outcome") == "cancelled":
                return late["outcome"], late.get("reason", "")
        if observer != "client" and (told := _ending(row, "client"))[0] == "cancelled":
            return told
    return outcome, reason


def _finish(side: Side) -> str | None:
    """One word where the choices agree; an end without a reason is null in the record and left out."""
    sent = [normalise_finish(reason) for reason in (side.end or {}).get("finish_reason", ()) if reason is not None]
    return None if not sent else sent[0] if len(set(sent)) == 1 else ",".join(sent)


def _counted_prompt(sides: list[Side]) -> int | None:
    for side in sides:
        if side.end is not None and "prompt_tokens" in side.end:
            return int(side.end["prompt_tokens"])
    return None


def _label(sides: list[Side], name: str) -> bool:
    labels = [side.begin["labels"] for side in sides if side.begin is not None and "labels" in side.begin]
    return next((bool(each[name]) for each in labels if name in each), False)


def _differences(ours: list[int | None], zero: list[int | None]) -> list[int | None]:
    return [None if a is None or b is None else a - b for a, b in zip(ours, zero, strict=True)]


def _table(name: str, values: dict[str, Any]) -> pa.Table:
    schema = arrow_schema(name)
    arrays = []
    for field in schema:
        value = values[field.name]
        column = value if isinstance(value, (pa.Array, pa.ChunkedArray)) else pa.array(value, field.type)
        arrays.append(column.cast(field.type) if column.type != field.type else column)
    return pa.table(arrays, schema=schema)
