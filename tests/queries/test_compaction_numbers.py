"""The columns of `requests` are what the pure definitions say of the same stamps."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from queries.compaction import compact
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.definitions import normalise_finish, summarise
from sloscope.journal import JournalWriter
from tests.queries.journal_factory import MS, SECOND, new_id
from tests.queries.test_compaction import select

WALL = 1_700_000_000 * SECOND
ENDS = [(outcome, reason) for outcome, reasons in records.OUTCOMES.items() for reason in reasons]


@dataclass
class History:
    """One request at one observer, and its records in the order in which they are written."""

    number: int
    observer: str
    start_ns: int
    n_choices: int
    stamps: list[int]
    choice: list[int]
    types: list[int]
    tokens: list[int] | None  # of each event
    end: dict[str, Any] | None
    batches: list[int]

    def written(self) -> list[records.Record]:
        key = {"request_id": new_id(self.number)}
        start = "send_ns" if self.observer == "client" else "arrived_ns"
        fields = {"observer": self.observer, "clock_id": "fake:0:0", start: self.start_ns, "n_choices": self.n_choices}
        lines = [records.make("begin", **key, **fields)]
        edges = sorted({0, len(self.stamps), *(edge for edge in self.batches if edge < len(self.stamps))})
        for first, stop in itertools.pairwise(edges):
            part = slice(first, stop)
            if self.observer == "engine":
                more: dict[str, Any] = {"computed_ns": self.stamps[part], "cum_tokens": self.cumulative[part]}
                lines.append(records.make("emit", **key, ordinal0=first, choice=self.choice[part], **more))
            else:
                more = {"t_ns": self.stamps[part], "type": self.types[part]}
                more["tokens"] = None if self.tokens is None else self.tokens[part]
                lines.append(records.make("chunks", **key, ordinal0=first, choice=self.choice[part], **more))
        if self.end is not None:
            lines.append(records.make("end", **key, **self.end))
        return lines

    @property
    def cumulative(self) -> list[int]:
        sums: dict[int, int] = {}
        out = []
        for index, count in zip(self.choice, self.tokens or [], strict=True):
            sums[index] = sums.get(index, 0) + count
            out.append(sums[index])
        return out

    def expected(self) -> dict[str, Any]:
        end = self.end or {}
        engine = self.observer == "engine"
        tokens: int | None = len(self.stamps)
        source: str | None = "assumed_one"
        if self.tokens is not None and self.stamps:
            tokens, source = sum(self.tokens), "engine" if engine else "continuous_usage"
        if "output_tokens" in end:
            tokens, source = end["output_tokens"], end.get("token_source", "assumed_one")
        elif end.get("outcome") == "completed" and not self.stamps:
            tokens, source = None, None
        types = [0] * len(self.stamps) if engine else self.types
        summary = summarise(
            self.start_ns,
            self.stamps,
            self.choice,
            types,
            self.n_choices,
            tokens,
            self.tokens if self.stamps else None,
            completed_ns=end["end_ns"] if end.get("outcome") == "completed" else None,
        )
        finish = [normalise_finish(each) for each in end.get("finish_reason", [])]
        names = ("first", "last", "ttft", "ttft_visible", "ttft_worst", "ttft_visible_worst", "itl_max", "span", "e2e")
        return {
            **{f"{name}_ns": getattr(summary, f"{name}_ns") for name in names},
            "observed": True,
            "clock_id": "fake:0:0",
            "arrival_at_ns": WALL + self.start_ns,
            "start_ns": self.start_ns,
            "end_ns": end.get("end_ns"),
            "end_at_ns": None if self.end is None else WALL + end["end_ns"],
            "stream_end_ns": None if self.end is None else end["end_ns"] - self.start_ns,
            "events": summary.events,
            "span_tokens": summary.span_tokens,
            "tokens": tokens,
            "token_source": source,
            "outcome": end.get("outcome"),
            "reason": end.get("reason"),
            "finish_reason": None if not finish else finish[0] if len(set(finish)) == 1 else ",".join(finish),
            "http_status": end.get("http_status"),
            "loop_lag_max_ns": end.get("loop_lag_max_ns"),
            "consumer_hold_ns": end.get("consumer_hold_ns"),
        }


@st.composite
def histories(draw: st.DrawFn, number: int, observer: str, n_choices: int) -> History:
    start = draw(st.integers(0, 10 * SECOND))
    size = draw(st.integers(0, 12))
    # Gaps of zero (one read, many events) and steps backwards (a broken client) are both stamps that come.
    gaps = draw(st.lists(st.integers(-2 * MS, 40 * MS) | st.just(0), min_size=size, max_size=size))
    stamps = list(itertools.accumulate(gaps, initial=start))[1:]
    engine = observer == "engine"
    counts = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    tokens = counts if engine or draw(st.booleans()) else None
    end: dict[str, Any] | None = None
    if draw(st.integers(0, 4)) > 0:
        outcome, reason = draw(st.sampled_from([each for each in ENDS if each[1] != "disconnect"]))
        end = {"outcome": outcome, "reason": reason, "end_ns": max([start, *stamps]) + draw(st.integers(0, MS))}
        if draw(st.booleans()):
            end["output_tokens"] = draw(st.integers(0, 40) | st.just(sum(counts)))
            end["token_source"] = draw(st.sampled_from(records.TOKEN_SOURCES))
        for name in ("http_status", "loop_lag_max_ns", "consumer_hold_ns"):
            if draw(st.booleans()):
                end[name] = draw(st.integers(0, 500))
        finishes = st.sampled_from(["stop", "eos", "length", "tool_use", "abort", "odd"])
        if draw(st.booleans()):
            end["finish_reason"] = draw(st.lists(finishes, min_size=1, max_size=n_choices))
    return History(
        number,
        observer,
        start,
        n_choices,
        stamps,
        draw(st.lists(st.integers(0, n_choices - 1), min_size=size, max_size=size)),
        draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)),
        tokens,
        end,
        draw(st.lists(st.integers(1, 12), max_size=3)),
    )


@st.composite
def cohorts(draw: st.DrawFn) -> list[History]:
    cohort = []
    for number in range(draw(st.integers(1, 5))):
        n_choices = draw(st.sampled_from([1, 1, 1, 2, 3]))
        observers = draw(st.lists(st.sampled_from(records.OBSERVERS), min_size=1, max_size=3, unique=True))
        cohort += [draw(histories(number, observer, n_choices)) for observer in observers]
    return cohort


@settings(max_examples=25, deadline=None)
@given(cohort=cohorts(), shuffle=st.randoms(use_true_random=False), passes=st.integers(1, 3))
def test_every_column_of_every_observer_equals_the_definitions_in_any_order_and_number_of_passes(
    cohort: list[History], shuffle: Any, passes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder)
        writers = {o: JournalWriter(events, o, FakeClock(wall_ns=WALL)) for o in records.OBSERVERS}
        # The records of one request and observer keep their order; everything else may come in any.
        queues = [(history.observer, history.written()) for history in cohort]
        order = [index for index, (_, lines) in enumerate(queues) for _ in lines]
        shuffle.shuffle(order)
        for position, index in enumerate(order):
            observer, lines = queues[index]
            writers[observer].write(lines.pop(0))
            if position % (len(order) // passes + 1) == 1:
                compact(events, settle_ns=0)
        report = compact(events, settle_ns=0)
        for writer in writers.values():
            writer.close()
        assert report.problems == []
        said = [history.expected() for history in cohort]
        columns = [f"{observer}_{name}" for observer in records.OBSERVERS for name in said[0]]
        found = {
            row[0]: dict(zip(columns, row[1:], strict=True))
            for row in select(events, f"select request_id, {', '.join(columns)} from {{requests}} order by request_id")
        }
        for history, expected in zip(cohort, said, strict=True):
            row = found[new_id(history.number)]
            assert {name: row[f"{history.observer}_{name}"] for name in expected} == expected
        assert select(events, "select count(*) from {requests}") == [(len({h.number for h in cohort}),)]
