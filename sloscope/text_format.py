"""Prometheus text format 0.0.4, kept series by series: a scrape finds most of them as the one before left them.

What is written is, byte for byte, what `prometheus_client.generate_latest` makes of the same snapshot; a test holds the
two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from sloscope import catalogue

Labels = tuple[str, ...]
Key = tuple[str, Labels]
_EXPONENT_FROM = 1_000_000  # from here on Go writes a number in another way than Python


class Row(NamedTuple):
    """A series that is kept elsewhere, such as a histogram with edges of its own."""

    name: str
    labels: Labels
    value: float  # of a histogram its sum
    buckets: Sequence[tuple[str, float]] = ()  # `le` and cumulative count, +Inf last


class Counts(NamedTuple):
    """A histogram at one moment."""

    bins: Sequence[int]  # one more than edges; never changed: another moment has another list
    sum_ns: int


class TextWriter:
    """The latest text of every series of a store. Two threads that write at once cost each other time, no more."""

    def __init__(self, metrics: Iterable[catalogue.Metric], edges_ns: Mapping[str, Sequence[int]]) -> None:
        metrics = tuple(metrics)
        self._heads = {metric.name: _head(metric) for metric in metrics}
        # Label names are written in order, and `le` is one of them.
        self._places = {metric.name: sorted((label, i) for i, label in enumerate(metric.labels)) for metric in metrics}
        self._les = {name: les(edges) for name, edges in edges_ns.items()}
        self._values: dict[Key, tuple[float, str]] = {}
        self._histograms: dict[Key, tuple[Counts, str]] = {}

    def write(self, values: Mapping[Key, float], histograms: Mapping[Key, Counts], rows: Iterable[Row]) -> bytes:
        texts = {name: [head] for name, head in self._heads.items()}
        # Series that are gone are not carried on.
        earlier_values, kept_values = self._values, {}
        for key in sorted(values):
            kept = earlier_values.get(key)
            if kept is None or kept[0] != values[key]:
                kept = values[key], self._value(*key, values[key])
            kept_values[key] = kept
            texts[key[0]].append(kept[1])
        earlier_histograms, kept_histograms = self._histograms, {}
        for key in sorted(histograms):
            found, counts = earlier_histograms.get(key), histograms[key]
            if found is None or found[0].bins is not counts.bins or found[0].sum_ns != counts.sum_ns:
                buckets = list(zip(self._les[key[0]], accumulate(counts.bins), strict=True))
                found = counts, self._histogram(*key, counts.sum_ns / 1e9, buckets)
            kept_histograms[key] = found
            texts[key[0]].append(found[1])
        self._values, self._histograms = kept_values, kept_histograms
        for row in rows:
            written = self._histogram(*row) if row.buckets else self._value(*row[:3])
            texts[row.name].append(written)
        return "".join([text for of_family in texts.values() for text in of_family]).encode()

    def _value(self, name: str, labels: Labels, value: float) -> str:
        return f"{name}{_braced(self._pairs(name, labels))} {floatToGoString(value)}\n"

    def _histogram(self, name: str, labels: Labels, total: float, buckets: Sequence[tuple[str, float]]) -> str:
        pairs = self._pairs(name, labels)
        earlier = sum(label < "le" for label, _ in self._places[name])
        before = "".join(f"{pair}," for pair in pairs[:earlier])
        after = "".join(f",{pair}" for pair in pairs[earlier:])
        lines = [f'{name}_bucket{{{before}le="{_escaped(le)}"{after}}} {_count(count)}\n' for le, count in buckets]
        if float(buckets[0][0]) >= 0:  # as prometheus_client has it: below 0 a sum is no counter
            braced = _braced(pairs)
            lines.append(f"{name}_count{braced} {_count(buckets[-1][1])}\n")
            lines.append(f"{name}_sum{braced} {floatToGoString(total)}\n")
        return "".join(lines)

    def _pairs(self, name: str, labels: Labels) -> list[str]:
        return [f'{label}="{_escaped(labels[i])}"' for label, i in self._places[name]]


def les(edges_ns: Iterable[int]) -> list[str]:
    """Upper edges as the Python client spells them, with the last one."""
    return [*(catalogue.format_edge(edge / 1e9) for edge in edges_ns), "+Inf"]


def _head(metric: catalogue.Metric) -> str:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    kind = "gauge" if metric.kind == "info" else metric.kind
    return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {kind}\n"


def _braced(pairs: Sequence[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _count(count: float) -> str:
    if type(count) is int and 0 <= count < _EXPONENT_FROM:
        return f"{count}.0"  # as floatToGoString, in a fifth of its time
    return floatToGoString(count)
