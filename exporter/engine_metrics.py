"""What the engines behind this sidecar say of themselves: their own /metrics, polled and shown beside ours.

    GET /metrics ──► read() ──► Reading ──► at a scrape: sloscope_upstream_engine_… with the engine's own edges

One task per engine. What does not answer or is not understood is counted and shown as down, and its series end: a
number of an engine that is gone must not stand. Counters pass as they came; one that starts again from 0 is Prometheus'
business, which knows resets.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from exporter.settings import Settings, parse_engine_metrics, tls_context
from sloscope import catalogue
from sloscope.clock import Clock
from sloscope.exposition import OTHER, MetricStore, Row
from sloscope.foreign_names import MODEL_LABELS, MODEL_TOLD_BY, REPLICA_LABELS, SOURCES, Source

MAX_BYTES = 2 << 20
MAX_LINE = 1024  # characters of a line that is parsed
MAX_SERIES = 5_000  # samples of known names, per engine
MAX_LABEL = 200  # characters of a model or a reason
PATIENCE_S = 3.0  # for a whole answer
NOT_TOLD = "unknown"
FAILURES = ("connect", "timeout", "bad_http", "status", "too_large", "not_metrics", "unknown_names")
SKIPPED = ("bad_line", "not_finite", "bad_histogram", "too_many")

_UP, _TOOK = "sloscope_upstream_engine_up", "sloscope_upstream_engine_scrape_seconds"
_FAILED, _SKIPPED = "sloscope_upstream_engine_scrape_failures_total", "sloscope_upstream_engine_lines_skipped_total"

Labels = tuple[str, ...]
Limit = Callable[[str, str], str]  # (label, value) → value or `other`
Series = dict[tuple[tuple[str, str], ...], float]  # sorted labels → value


class Buckets(NamedTuple):
    """A classic histogram as it came."""

    counts: dict[float, float]  # upper edge, +Inf last → cumulative count
    sum: float


class Reading(NamedTuple):
    values: dict[tuple[str, Labels], float]  # (family, (kind, model[, reason])) → counter or gauge
    histograms: dict[tuple[str, Labels], Buckets]
    skipped: Counter[str]  # lines by cause
    lines: int  # that were samples of any name

    @property
    def understood(self) -> bool:
        return bool(self.values or self.histograms)


def _wanted() -> frozenset[str]:
    """Sample names of any use."""
    names = set(MODEL_TOLD_BY.values())
    for source in SOURCES:
        for name in source.spellings():
            suffixes = ("_bucket", "_sum") if source.metric.kind == "histogram" else ("",)
            names |= {name + suffix for suffix in suffixes}
    return frozenset(names)


_WANTED = _wanted()
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{.*\}[ \t]*|[ \t])[^ \t]")


def read(text: str, limit: Limit) -> Reading:
    """Prometheus or OpenMetrics text → our families. A line that cannot be understood is skipped and counted.

    Types are not looked at: the table says what a name is, and an engine that calls a counter a gauge means the same.
    """
    skipped: Counter[str] = Counter()
    found: dict[str, Series] = {}
    lines = kept = 0
    for line in text.split("\n"):  # not splitlines: a label value may hold what it takes for an end
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        if match is None or (match[1] in _WANTED and len(line) > MAX_LINE):
            skipped["bad_line"] += 1
            continue
        lines += 1
        if match[1] not in _WANTED:
            continue
        if kept == MAX_SERIES:
            skipped["too_many"] += 1
            continue
        try:
            ((labels, value),) = _samples(line)
            if "le" in labels:
                labels["le"] = repr(float(labels["le"]))
        except (ValueError, IndexError, OverflowError):  # the parser's own ways to say that it cannot read a line
            skipped["bad_line"] += 1
            continue
        if not math.isfinite(value):
            skipped["not_finite"] += 1
            continue
        kept += 1
        found.setdefault(match[1], {})[tuple(sorted(labels.items()))] = value
    values: dict[tuple[str, Labels], float] = {}
    histograms: dict[tuple[str, Labels], Buckets] = {}
    told = {kind: _told(found.get(name, {})) for kind, name in MODEL_TOLD_BY.items()}
    for source in SOURCES:
        model = told.get(source.kind, NOT_TOLD)
        if source.metric.kind == "histogram":
            _add_histograms(source, found, limit, model, histograms, skipped)
        else:
            _add_values(source, found, limit, model, values)
    finite = {place: value for place, value in values.items() if math.isfinite(value)}  # a sum can overflow
    return Reading(finite, histograms, skipped, lines)


def _samples(line: str) -> Iterator[tuple[dict[str, str], float]]:
    """The one sample of a line. ValueError for a line that holds none or cannot be read."""
    for family in text_string_to_metric_families(line):
        for sample in family.samples:
            yield sample.labels, float(sample.value)


def _first_exposed(source: Source, found: Mapping[str, Series], suffix: str = "") -> str:
    return next((name for name in source.spellings() if name + suffix in found), "")


def _one_replica(series: Series) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value, of ranks that say the same only the first."""
    speakers: dict[tuple[tuple[str, str], ...], tuple[str, ...]] = {}
    for key, value in series.items():
        labels = dict(key)
        rank = tuple(labels.pop(name, "") for name in REPLICA_LABELS)
        rest = tuple((name, text) for name, text in labels.items() if name != "le")
        if speakers.setdefault(rest, rank) == rank:
            yield labels, value


def _model(labels: Mapping[str, str], otherwise: str = NOT_TOLD) -> str:
    return next((labels[name] for name in MODEL_LABELS if labels.get(name)), otherwise)


def _told(series: Series) -> str:
    return _model(dict(next(iter(series), ())))


def _add_values(
    source: Source, found: Mapping[str, Series], limit: Limit, model: str, values: dict[tuple[str, Labels], float]
) -> None:
    """`model`: of the samples that name none."""
    name = _first_exposed(source, found)
    sums: dict[Labels, float] = {}
    whole: dict[Labels, float] = {}
    label, selected = source.only
    for labels, value in _one_replica(found.get(name, {})):
        key: Labels = (source.kind, limit("model", _model(labels, model)))
        if "reason" in source.metric.labels:
            key = (*key, limit("reason", labels.get(source.reason_label, "") or source.reason or NOT_TOLD))
        whole[key] = whole.get(key, 0.0) + value
        if label and labels.get(label) not in selected:
            continue
        if source.metric.name.endswith("_ratio") and not source.share:
            sums[key] = max(sums.get(key, value), value)  # shares do not add up; the fullest rank is the one in need
        else:
            sums[key] = sums.get(key, 0.0) + value
    for key, value in sums.items():
        if source.share:
            if not whole[key]:
                continue
            value /= whole[key]
        place = (source.metric.name, key)
        values[place] = values.get(place, 0.0) + value


def _add_histograms(
    source: Source,
    found: Mapping[str, Series],
    limit: Limit,
    model: str,
    histograms: dict[tuple[str, Labels], Buckets],
    skipped: Counter[str],
) -> None:
    name = _first_exposed(source, found, "_bucket")
    if not name:
        return
    sums = {_identity(labels): value for labels, value in _one_replica(found.get(f"{name}_sum", {}))}
    parts: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    models: dict[tuple[tuple[str, str], ...], str] = {}
    for labels, value in _one_replica(found[f"{name}_bucket"]):
        edge = float(labels.pop("le", "nan"))
        if math.isnan(edge):
            skipped["bad_line"] += 1
            continue
        parts.setdefault(_identity(labels), {})[edge] = value
        models[_identity(labels)] = limit("model", _model(labels, model))
    for identity, counts in parts.items():
        ordered = dict(sorted(counts.items()))
        if math.inf not in ordered or identity not in sums or not _grows(ordered.values()):
            skipped["bad_histogram"] += 1
            continue
        place = (source.metric.name, (source.kind, models[identity]))
        merged = _merged(histograms.get(place), Buckets(ordered, sums[identity]))
        if not math.isfinite(merged.sum + merged.counts[math.inf]):
            skipped["bad_histogram"] += 1
            continue
        histograms[place] = merged


def _identity(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _grows(counts: Iterable[float]) -> bool:
    """Cumulative counts never fall; where they do, a line is missing or wrong."""
    last = 0.0
    for count in counts:
        if count < last:
            return False
        last = count
    return True


def _merged(a: Buckets | None, b: Buckets) -> Buckets:
    """The sum of two histograms. Cumulative counts add up at the edges that both have, and at no others."""
    if a is None:
        return b
    return Buckets(
        {edge: count + b.counts[edge] for edge, count in a.counts.items() if edge in b.counts}, a.sum + b.sum
    )


class LabelLimit:
    """At most so many values of a label, each of bounded length; the rest is `other`. The first to come stay."""

    def __init__(self, values: int) -> None:
        self._values = values
        self._seen: dict[str, set[str]] = {}

    def __call__(self, label: str, value: str) -> str:
        seen = self._seen.setdefault(label, set())
        if value not in seen:
            if len(seen) >= self._values or len(value) > MAX_LABEL:
                return OTHER
            seen.add(value)
        return value


class _PollError(Exception):
    """Why a poll gave nothing: one of FAILURES."""


class EngineMetrics:
    """The engines of one sidecar. A poll touches nothing but the latest reading of its own engine."""

    def __init__(self, settings: Settings, store: MetricStore, clock: Clock) -> None:
        self._urls = dict(parse_engine_metrics(url) for url in settings.engine_metrics)
        self._limits = {label: LabelLimit(settings.max_label_values) for label in self._urls}
        self._every_ns = settings.engine_metrics_every_ns
        self._tls = tls_context(settings.ca_file) if self._urls else None
        self._store = store
        self._clock = clock
        self._latest: dict[str, list[Row]] = {}
        for label in self._urls:
            store.set(_UP, 0, (label,))
            for cause in FAILURES:
                store.init(_FAILED, (label, cause))
            for cause in SKIPPED:
                store.init(_SKIPPED, (label, cause))
        store.add_source(self._rows)

    def pollers(self) -> list[Coroutine[Any, Any, None]]:
        """One for each engine, to be run as tasks."""
        return [self._keep_polling(label) for label in self._urls]

    async def _keep_polling(self, label: str) -> None:
        """Until cancelled. Each poll has a connection of its own: one that is kept would be closed by a server whose
        patience is as long as our pause, now and then in the middle of a request.
        """
        assert self._tls is not None
        async with httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,
            timeout=None,  # `poll` has one limit for everything, so that a drip does not last
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client:
            while True:
                began_ns = self._clock.monotonic_ns()
                await self.poll(label, client)
                took_ns = self._clock.monotonic_ns() - began_ns
                await asyncio.sleep(max(0, self._every_ns - took_ns) / 1e9)

    async def poll(self, label: str, client: httpx.AsyncClient) -> None:
        began_ns = self._clock.monotonic_ns()
        try:
            async with asyncio.timeout(PATIENCE_S):
                body = await _get(self._urls[label], client)
            # In a thread: a long text would hold up receipts and scrapes.
            reading = await asyncio.to_thread(read, body.decode("utf-8", "replace"), self._limits[label])
            if not reading.understood:
                raise _PollError("unknown_names" if reading.lines else "not_metrics")
        except (TimeoutError, _PollError) as error:
            cause = "timeout" if isinstance(error, TimeoutError) else str(error)
            self._latest.pop(label, None)
            self._store.set(_UP, 0, (label,))
            self._store.inc(_FAILED, 1, (label, cause))
        else:
            self._latest[label] = list(_rows(label, reading))
            self._store.set(_UP, 1, (label,))
            for cause, lines in reading.skipped.items():
                self._store.inc(_SKIPPED, lines, (label, cause))
        self._store.set(_TOOK, (self._clock.monotonic_ns() - began_ns) / 1e9, (label,))

    def _rows(self) -> Iterator[Row]:
        for label in self._urls:
            yield from self._latest.get(label, ())


def _rows(upstream: str, reading: Reading) -> Iterator[Row]:
    for (name, labels), value in reading.values.items():
        yield Row(name, (upstream, *labels), value)
    for (name, labels), histogram in reading.histograms.items():
        buckets = [(_le(edge), count) for edge, count in histogram.counts.items()]
        yield Row(name, (upstream, *labels), histogram.sum, buckets)


def _le(edge: float) -> str:
    return "+Inf" if edge == math.inf else catalogue.format_edge(edge)


async def _get(url: str, client: httpx.AsyncClient) -> bytes:
    """The body of a 200, never more than MAX_BYTES of it in memory."""
    headers = {"accept": "text/plain;version=0.0.4", "accept-encoding": "identity", "connection": "close"}
    pieces: list[bytes] = []
    size = 0
    try:
        async with client.stream("GET", url, headers=headers) as answer:
            if answer.status_code != 200:
                raise _PollError("status")
            async for piece in answer.aiter_raw():
                size += len(piece)
                if size > MAX_BYTES:
                    raise _PollError("too_large")
                pieces.append(piece)
    except httpx.ConnectError:
        raise _PollError("connect") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        raise _PollError("bad_http") from None
    return b"".join(pieces)
