"""Observations in, Prometheus text out. The hot path appends an integer to a list; counting happens at a scrape.

A store holds the catalogue rows of one exposition. Where the observing process is not the one that is scraped, `drain`
hands over what changed and `absorb` takes it: cumulative values, so that a payload that got lost is mended by the next
full one. A counter that both sides have is exposed as their sum; a gauge is the other side's, unless it was set here.
Not safe for several threads: what another one is to read is a snapshot.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

import numpy as np
import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from sloscope import catalogue
from sloscope.contract import Contract
from sloscope.text_format import Counts, Key, Labels, Row, TextWriter, les

__all__ = ["OTHER", "Labels", "MetricStore", "Row", "Snapshot"]

OTHER = "other"
_AT_ONCE = 2000  # values that are counted in one go, about 0.1 ms of work: no loop is held up for longer
_FEW = 40  # below, numpy's calls cost more than a search in Python for each value
_A_PIECE = 16  # series, about 0.02 ms of work


class _Histogram:
    """Pending values and counts per bin; edges and values in ns, compared as integers (`value <= edge`)."""

    __slots__ = ("bins", "edges_ns", "pending", "sum_ns")

    def __init__(self, edges_ns: Sequence[int]) -> None:
        self.edges_ns = edges_ns
        self.pending: list[int] = []
        self.bins = [0] * (len(edges_ns) + 1)  # replaced and never changed: who has the list has its moment
        self.sum_ns = 0

    def count(self) -> None:
        """Bins what is pending, at most so much at once. The list object stays, since appenders hold on to it."""
        taken = self.pending[:_AT_ONCE]
        del self.pending[: len(taken)]
        bins = self.bins.copy()
        if len(taken) < _FEW:
            for value in taken:
                bins[bisect_left(self.edges_ns, value)] += 1
        else:
            places = np.searchsorted(self.edges_ns, np.array(taken, dtype=np.int64), side="left")
            for place, count in enumerate(np.bincount(places).tolist()):
                bins[place] += count
        self.bins = bins
        self.sum_ns += sum(taken)


class MetricStore:
    """Series of the catalogue rows that `process` (sidecar or server) exposes.

    Labels are tuples in the catalogue's order. A name outside the catalogue is our bug and raises KeyError.
    """

    def __init__(self, process: str, contract: Contract | None = None, max_label_values: int = 50) -> None:
        self._metrics = {metric.name: metric for metric in catalogue.exposed_by(process)}
        self._contract = contract
        self._max_label_values = max_label_values
        self._edges = {
            name: catalogue.edges_ns(metric, contract)
            for name, metric in self._metrics.items()
            if metric.kind == "histogram"
        }
        self._writer = TextWriter(self._metrics.values(), self._edges)
        self._histograms: dict[Key, _Histogram] = {}
        self._values: dict[Key, float] = {}  # counters and gauges
        self._absorbed: dict[Key, float] = {}  # the other side's
        self._set: set[Key] = set()  # of the values, those that `set` gave; the others may be a mere 0 from the start
        self._dirty_values: set[Key] = set()
        self._dirty_histograms: dict[Key, _Histogram] = {}
        self._remote: set[Key] = set()
        self._seen: dict[str, set[str]] = {}
        self._sources: list[Callable[[], Iterable[Row]]] = []
        for name, metric in self._metrics.items():
            if not metric.labels and not metric.optional:
                self.init(name)

    # --- writing

    def init(self, name: str, labels: Labels = ()) -> None:
        """A child that exists from the start: a series that appears with its first increment loses that increment
        in rate().
        """
        metric = self._metrics[name]
        assert len(labels) == len(metric.labels), f"{name} has labels {metric.labels}, got {labels}"
        if metric.kind == "histogram":
            self._histogram(name, labels)
        else:
            self._values.setdefault((name, labels), 0)
            self._dirty_values.add((name, labels))

    def observe(self, name: str, value_ns: int, labels: Labels = ()) -> None:
        self.appender(name, labels)(value_ns)

    def observe_many(self, name: str, values_ns: Iterable[int], labels: Labels = ()) -> None:
        histogram = self._histogram(name, labels)
        histogram.pending.extend(values_ns)
        while len(histogram.pending) >= _AT_ONCE:  # memory is bounded without a scrape, and a scrape finds little to do
            histogram.count()
            self._dirty_histograms[name, labels] = histogram

    def appender(self, name: str, labels: Labels = ()) -> Callable[[int], None]:
        """`append` of the series' list: about 20 ns a value. It stays valid for the life of the store."""
        return self._histogram(name, labels).pending.append

    def inc(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        key = (name, labels)
        if key not in self._values:
            self.init(name, labels)
        self._values[key] += amount
        self._dirty_values.add(key)

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        key = (name, labels)
        if key not in self._values:
            self.init(name, labels)
        self._values[key] = value
        self._set.add(key)
        self._dirty_values.add(key)

    def get(self, name: str, labels: Labels = ()) -> float:
        """As exposed."""
        key = (name, labels)
        own, theirs = self._values.get(key, 0), self._absorbed.get(key, 0)
        if self._metrics[name].kind == "counter":
            return own + theirs
        return own if key in self._set or key not in self._absorbed else theirs

    def bounded(self, label: str, value: str) -> str:
        """`value`, or `other` once this label has taken its K values: a caller must not be able to make series
        without end.
        """
        seen = self._seen.setdefault(label, set())
        if value in seen:
            return value
        if len(seen) < self._max_label_values:
            seen.add(value)
            return value
        return OTHER

    def _histogram(self, name: str, labels: Labels) -> _Histogram:
        key = (name, labels)
        histogram = self._histograms.get(key)
        if histogram is None:
            metric = self._metrics[name]
            assert metric.kind == "histogram" and len(labels) == len(metric.labels), (name, labels)
            histogram = self._histograms[key] = self._dirty_histograms[key] = _Histogram(self._edges[name])
        return histogram

    def _count(self) -> Iterator[None]:
        """Bins what is pending by now, a little in a step. What comes meanwhile may stay pending."""
        for key, histogram in list(self._histograms.items()):
            for _ in range(0, len(histogram.pending), _AT_ONCE):
                histogram.count()
                self._dirty_histograms[key] = histogram
                yield

    def _count_all(self) -> None:
        for _ in self._count():
            pass

    # --- from one process to another

    def drain(self, full: bool = False) -> bytes:
        """What changed since the last drain, or everything. Values are cumulative, so taking one twice does no
        harm.
        """
        return b"".join(self.drain_in_pieces(full))

    def drain_in_pieces(self, full: bool = False, at_the_moment: Callable[[], None] | None = None) -> Iterator[bytes]:
        """The same payload, for a loop that has other things to do between two pieces; some are empty.

        Most of the counting comes first, then one short step that takes hold of all series, then the writing: all
        pieces are of the moment of that one step, whatever is observed before the last of them. The step is the one
        thing that grows with the number of series. `at_the_moment` is called in it, for what is still to be set.
        """
        for _ in self._count():
            yield b""
        if at_the_moment is not None:
            at_the_moment()
        self._count_all()
        taken = self._histograms if full else self._dirty_histograms
        histograms = [(*key, histogram.bins, histogram.sum_ns) for key, histogram in taken.items()]
        values = self._values.copy()
        keys = iter(values if full else self._dirty_values)
        self._dirty_histograms, self._dirty_values = {}, set()
        yield orjson.dumps({"full": full}) + b"\n"
        for at in range(0, len(histograms), _A_PIECE):
            # A sum as text: nanoseconds of many streams outgrow 64 bits.
            rows: list[object] = [(*row[:3], str(row[3])) for row in histograms[at : at + _A_PIECE]]
            yield orjson.dumps({"histograms": rows}) + b"\n"
        while rows := [(*key, values[key]) for key in islice(keys, 4 * _A_PIECE)]:
            yield orjson.dumps({"values": rows}) + b"\n"

    def absorb(self, payload: bytes, but: frozenset[str] = frozenset()) -> None:
        """Takes a drained payload, `but` for counters and gauges of these names. A full one first forgets every series
        that came from the other side before.
        """
        first, *rest = map(orjson.loads, payload.splitlines())
        if first["full"]:
            for key in self._remote:
                self._histograms.pop(key, None)
                self._dirty_histograms.pop(key, None)
            self._remote = set()
            self._absorbed = {}
        for piece in rest:
            for name, labels, bins, sum_ns in piece.get("histograms", ()):
                key = (name, tuple(labels))
                histogram = self._histogram(*key)
                histogram.bins, histogram.sum_ns = bins, int(sum_ns)
                self._remote.add(key)
            for name, labels, value in piece.get("values", ()):
                if name not in but and value is not None:  # JSON has none for a value that is no number
                    self._absorbed[name, tuple(labels)] = value

    # --- reading

    def add_source(self, rows: Callable[[], Iterable[Row]]) -> None:
        """`rows` is called for every snapshot, in the thread that takes it. Its series are those of no one else."""
        self._sources.append(rows)

    def snapshot(self) -> "Snapshot":
        """All series as of now: little work, where the rest of a scrape may be done in another thread."""
        self._count_all()
        return Snapshot(
            tuple(self._metrics.values()),
            {key: self.get(*key) for key in self._values.keys() | self._absorbed.keys()},
            {key: Counts(histogram.bins, histogram.sum_ns) for key, histogram in self._histograms.items()},
            [row for rows in self._sources for row in rows()],
            self._writer,
            self._edges,
        )

    def collect(self) -> Iterator[Family]:
        return self.snapshot().collect()

    def render(self) -> bytes:
        return self.snapshot().render()


class Snapshot(Collector):
    """One moment of a store. Nothing changes it any more."""

    def __init__(
        self,
        metrics: Iterable[catalogue.Metric],
        values: Mapping[Key, float],
        histograms: Mapping[Key, Counts],
        rows: Sequence[Row],
        writer: TextWriter,
        edges_ns: Mapping[str, Sequence[int]],
    ) -> None:
        self._metrics = metrics
        self._values = values
        self._histograms = histograms
        self._rows = rows
        self._writer = writer
        self._edges_ns = edges_ns

    def collect(self) -> Iterator[Family]:
        families = {metric.name: _family(metric) for metric in self._metrics}
        for (name, labels), value in sorted(self._values.items(), key=_key):
            families[name].add_metric(labels, value)  # type: ignore[attr-defined]
        for (name, labels), counts in sorted(self._histograms.items(), key=_key):
            buckets = list(zip(les(self._edges_ns[name]), accumulate(counts.bins), strict=True))
            families[name].add_metric(labels, buckets, counts.sum_ns / 1e9)  # type: ignore[attr-defined]
        for row in self._rows:
            values = (row.buckets, row.value) if row.buckets else (row.value,)
            families[row.name].add_metric(row.labels, *values)  # type: ignore[attr-defined]
        yield from families.values()

    def render(self) -> bytes:
        """The exposition in Prometheus text format 0.0.4."""
        return self._writer.write(self._values, self._histograms, self._rows)


def _key(item: tuple[Key, object]) -> Key:
    return item[0]


def _family(metric: catalogue.Metric) -> Family:
    match metric.kind:
        case "counter":
            return CounterMetricFamily(metric.family, metric.help, labels=metric.labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        case "gauge" | "info":
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    raise AssertionError(f"unknown kind {metric.kind}")
