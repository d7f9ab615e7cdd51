"""Observations in, Prometheus text out. The hot path appends an integer to a list; counting happens at a scrape.

A store holds the catalogue rows of one exposition. Where the observing process is not the one that is scraped,
`drain` hands
over what changed and `absorb` takes it: cumulative values, so that a payload that got lost is mended by the next
full one. A counter that both sides have is exposed as their sum; a gauge is the other side's, unless it was set here.
Not safe for several threads: what another one is to read is a snapshot.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from sloscope import catalogue
from sloscope.contract import Contract

Labels = tuple[str, ...]
Key = tuple[str, Labels]
OTHER = "other"
_BIN_ABOVE = 50_000  # pending values are counted early, so that memory is bounded without a scrape


class Row(NamedTuple):
    """A series that is kept elsewhere, such as a histogram with edges of its own."""

    name: str
    labels: Labels
    value: float  # of a histogram its sum
    buckets: Sequence[tuple[str, float]] = ()  # `le` and cumulative count, +Inf last


class _Histogram:
    """Pending values and counts per bucket; edges and values in ns, compared as integers (`value <= edge`)."""

    __slots__ = ("bins", "edges_ns", "pending", "sum_ns")

    def __init__(self, edges_ns: np.ndarray) -> None:
        self.edges_ns = edges_ns
        self.pending: list[int] = []
        self.bins = np.zeros(len(edges_ns) + 1, dtype=np.int64)
        self.sum_ns = 0

    def count(self) -> bool:
        """Bins what is pending. The list object stays, since appenders hold on to it."""
        if not self.pending:
            return False
        taken = len(self.pending)
        values = np.array(self.pending[:taken], dtype=np.int64)
        del self.pending[:taken]
        places = np.searchsorted(self.edges_ns, values, side="left")
        self.bins += np.bincount(places, minlength=len(self.bins))
        self.sum_ns += int(values.sum())
        return True


class MetricStore:
    """Series of the catalogue rows that `process` (sidecar or server) exposes.

    Labels are tuples in the catalogue's order. A name outside the catalogue is our bug and raises KeyError.
    """

    def __init__(self, process: str, contract: Contract | None = None, max_label_values: int = 50) -> None:
        self._metrics = {metric.name: metric for metric in catalogue.exposed_by(process)}
        self._contract = contract
        self._max_label_values = max_label_values
        self._edges = {
            name: np.array(catalogue.edges_ns(metric, contract), dtype=np.int64)
            for name, metric in self._metrics.items()
            if metric.kind == "histogram"
        }
        self._histograms: dict[Key, _Histogram] = {}
        self._values: dict[Key, float] = {}  # counters and gauges
        self._absorbed: dict[Key, float] = {}  # the other side's
        self._set: set[Key] = set()  # of the values, those that `set` gave; the others may be a mere 0 from the start
        self._dirty: set[Key] = set()
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
            self._dirty.add((name, labels))

    def observe(self, name: str, value_ns: int, labels: Labels = ()) -> None:
        self.appender(name, labels)(value_ns)

    def observe_many(self, name: str, values_ns: Iterable[int], labels: Labels = ()) -> None:
        histogram = self._histogram(name, labels)
        histogram.pending.extend(values_ns)
        if len(histogram.pending) > _BIN_ABOVE and histogram.count():
            self._dirty.add((name, labels))

    def appender(self, name: str, labels: Labels = ()) -> Callable[[int], None]:
        """`append` of the series' list: about 20 ns a value. It stays valid for the life of the store."""
        return self._histogram(name, labels).pending.append

    def inc(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        key = (name, labels)
        if key not in self._values:
            self.init(name, labels)
        self._values[key] += amount
        self._dirty.add(key)

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        key = (name, labels)
        if key not in self._values:
            self.init(name, labels)
        self._values[key] = value
        self._set.add(key)
        self._dirty.add(key)

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
            histogram = self._histograms[key] = _Histogram(self._edges[name])
            self._dirty.add(key)
        return histogram

    def _count(self) -> None:
        for key, histogram in list(self._histograms.items()):
            if histogram.count():
                self._dirty.add(key)

    # --- from one process to another

    def drain(self, full: bool = False) -> bytes:
        """What changed since the last drain, or everything. Values are cumulative, so taking one twice does no
        harm.
        """
        self._count()
        keys = {*self._histograms, *self._values} if full else self._dirty
        histograms = [
            [name, labels, self._histograms[name, labels].bins.tolist(), self._histograms[name, labels].sum_ns]
            for name, labels in keys
            if (name, labels) in self._histograms
        ]
        values = [[name, labels, self._values[name, labels]] for name, labels in keys if (name, labels) in self._values]
        self._dirty = set()
        return json.dumps({"full": full, "histograms": histograms, "values": values}, separators=(",", ":")).encode()

    def absorb(self, payload: bytes) -> None:
        """Takes a drained payload. A full one first forgets every series that came from the other side before."""
        body = json.loads(payload)
        if body["full"]:
            for key in self._remote:
                self._histograms.pop(key, None)
            self._remote = set()
            self._absorbed = {}
        for name, labels, bins, sum_ns in body["histograms"]:
            key = (name, tuple(labels))
            histogram = self._histogram(*key)
            histogram.bins = np.array(bins, dtype=np.int64)
            histogram.sum_ns = sum_ns
            self._remote.add(key)
        for name, labels, value in body["values"]:
            self._absorbed[name, tuple(labels)] = value

    # --- reading

    def add_source(self, rows: Callable[[], Iterable[Row]]) -> None:
        """`rows` is called for every snapshot, in the thread that takes it. Its series are those of no one else."""
        self._sources.append(rows)

    def snapshot(self) -> "Snapshot":
        """All series as of now: little work, where the rest of a scrape may be done in another thread."""
        self._count()
        return Snapshot(
            tuple(self._metrics.values()),
            {key: self.get(*key) for key in self._values.keys() | self._absorbed.keys()},
            {key: (row.edges_ns, row.bins.copy(), row.sum_ns) for key, row in self._histograms.items()},
            [row for rows in self._sources for row in rows()],
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
        histograms: Mapping[Key, tuple[np.ndarray, np.ndarray, int]],  # edges and bins, and the sum of what they count
        rows: Iterable[Row],
    ) -> None:
        self._metrics = metrics
        self._values = values
        self._histograms = histograms
        self._rows = rows

    def collect(self) -> Iterator[Family]:
        families = {metric.name: _family(metric) for metric in self._metrics}
        for (name, labels), value in sorted(self._values.items(), key=_key):
            families[name].add_metric(labels, value)  # type: ignore[attr-defined]
        for (name, labels), (edges_ns, bins, sum_ns) in sorted(self._histograms.items(), key=_key):
            cumulative = np.cumsum(bins).tolist()
            edges = [str(edge / 1e9) for edge in edges_ns.tolist()] + ["+Inf"]
            buckets = list(zip(edges, cumulative, strict=True))
            families[name].add_metric(labels, buckets, sum_ns / 1e9)  # type: ignore[attr-defined]
        for row in self._rows:
            values = (row.buckets, row.value) if row.buckets else (row.value,)
            families[row.name].add_metric(row.labels, *values)  # type: ignore[attr-defined]
        yield from families.values()

    def render(self) -> bytes:
        """The exposition in Prometheus text format 0.0.4."""
        return generate_latest(self)


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
