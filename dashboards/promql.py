"""PromQL is written here and nowhere else: named functions from catalogue rows to expressions.

A series checks its labels against the catalogue when it is built, so a renamed metric or label fails the build
and does not blank a panel. No traffic gives no data: every ratio asks for a denominator above zero, every quantile
drops the NaN that empty buckets give.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sloscope import catalogue
from sloscope.catalogue import Metric
from sloscope.contract import Contract
from sloscope.errors import DashboardError

RATE_WINDOW = "$__rate_interval"  # Grafana: at least four scrape intervals, as wide as a pixel needs
RANGE = "$__range"  # Grafana: the whole time range of the dashboard
OBSERVER = "${observer}"
FILTERS = {"class": "$class", "model": "$model", "tenant": "$tenant"}  # label → dashboard variable


@dataclass(frozen=True, slots=True)
class Series:
    """A catalogue row with label matchers. `name` holds `${observer}` where the dashboard chooses the receipt point."""

    metric: Metric
    name: str
    matchers: tuple[str, ...] = ()

    def where(self, label: str, value: str, operator: str = "=") -> "Series":
        """Raises DashboardError for a label that the metric does not have."""
        self.check(label)
        return replace(self, matchers=(*self.matchers, f"{label}{operator}{quoted(value)}"))

    def filtered(self) -> "Series":
        """With the dashboard's variables, as far as the metric has their labels."""
        series = self
        for label, variable in FILTERS.items():
            if label in self.metric.labels:
                series = series.where(label, variable, "=~")
        return series

    def check(self, *labels: str) -> None:
        known = (*self.metric.labels, "le") if self.metric.kind == "histogram" else self.metric.labels
        for label in labels:
            if label not in known:
                raise DashboardError(
                    f"metric {self.metric.name}: has no label {label!r}; accepted: {', '.join(known) or 'none'}"
                )

    def selector(self, suffix: str = "") -> str:
        if bool(suffix) != (self.metric.kind == "histogram"):
            raise DashboardError(
                f"metric {self.metric.name}: a {self.metric.kind} has no series {self.name + suffix!r}"
            )
        return self.name + suffix + (f"{{{','.join(self.matchers)}}}" if self.matchers else "")


def quoted(value: str) -> str:
    """A PromQL string. A class name comes from a file, so quotes and backslashes in it must stay text."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def row(name: str) -> Series:
    """A metric by its full catalogue name."""
    return Series(catalogue.get(name), name)


def receipt(family: str, point: str = OBSERVER) -> Series:
    """A receipt family at a point: client, sidecar, or the one that the dashboard's variable names."""
    if point != OBSERVER:
        return row(f"{catalogue.PREFIX}{point}_{family}")
    # The same families stand at both points; the labels of one speak for both.
    both = [catalogue.receipt(where, family) for where in ("client", "sidecar")]
    return Series(both[0], f"{catalogue.PREFIX}{OBSERVER}_{family}")


def engine(name: str) -> Series:
    return row(f"{catalogue.PREFIX}engine_{name}")


def upstream_engine(name: str) -> Series:
    """What an upstream's engine says of itself, as the sidecar polled it."""
    return row(f"{catalogue.PREFIX}upstream_engine_{name}")


def _by(labels: Sequence[str], operator: str = "sum") -> str:
    return f"{operator} by ({', '.join(labels)})" if labels else operator


def per_second(series: Series, by: Sequence[str] = (), window: str = RATE_WINDOW) -> str:
    """Events per second of a counter."""
    series.check(*by)
    return f"{_by(by)} (rate({series.selector()}[{window}]))"


def count(series: Series, by: Sequence[str] = (), window: str = RANGE) -> str:
    """Events of a counter within the window; extrapolated by Prometheus, so not always whole."""
    series.check(*by)
    return f"{_by(by)} (increase({series.selector()}[{window}]))"


def increase(series: Series, window: str) -> str:
    """Events of a counter within the window, target by target, so that an alert says which."""
    return f"increase({series.selector()}[{window}])"


def observed_per_second(series: Series, by: Sequence[str] = (), window: str = RATE_WINDOW) -> str:
    """Samples per second of a histogram."""
    series.check(*by)
    return f"{_by(by)} (rate({series.selector('_count')}[{window}]))"


def level(series: Series, by: Sequence[str] = (), operator: str = "sum") -> str:
    """A gauge now."""
    series.check(*by)
    return f"{_by(by, operator)} ({series.selector()})"


def lowest(series: Series, by: Sequence[str] = ()) -> str:
    return level(series, by, "min")


def highest(series: Series, by: Sequence[str] = ()) -> str:
    return level(series, by, "max")


def age(series: Series, by: Sequence[str] = ()) -> str:
    """Seconds since the epoch stamp that a gauge carries."""
    return f"time() - {highest(series, by)}"


def ratio(numerator: str, denominator: str) -> str:
    """No data, never NaN, while the denominator is zero."""
    return f"{numerator} / ({denominator} > 0)"


def quantile(q: float, series: Series, by: Sequence[str] = (), window: str = RATE_WINDOW) -> str:
    """Interpolated within a bucket, and never above the last finite edge: see `beyond_last_edge`.

    Buckets without samples give NaN, which `>= 0` drops; a latency is never below zero.
    """
    series.check(*by)
    return f"histogram_quantile({q}, {_by((*by, 'le'))} (rate({series.selector('_bucket')}[{window}]))) >= 0"


def buckets(series: Series, window: str = RATE_WINDOW) -> str:
    """New samples per bucket, for a heatmap."""
    return f"sum by (le) (increase({series.selector('_bucket')}[{window}]))"


def beyond_last_edge(series: Series, by: Sequence[str] = (), window: str = RATE_WINDOW) -> str:
    """Share of samples above the last finite edge, where every quantile is blind.

    Buckets are cumulative, so the largest finite one is the last: no edge needs to be named, and none can be
    spelled differently from the exposition (`2` and `2.0` are two labels).
    """
    series.check(*by)
    finite = series.where("le", "+Inf", "!=").selector("_bucket")
    everything = series.where("le", "+Inf").selector("_bucket")
    last = f"{_by(by, 'max')} ({_by((*by, 'le'))} (rate({finite}[{window}])))"
    return f"1 - {ratio(last, f'{_by(by)} (rate({everything}[{window}]))')}"


def within_limit(series: Series, class_name: str, limit: str, contract: Contract, window: str) -> str:
    """Share of a class's samples at or below its declared limit, exact because the limit is a bucket edge.

    Raises DashboardError when it is none: an interpolated share must not pass for a counted one. A request
    with limits of its own is counted here by those of its class.
    """
    limit_ns = contract.classes[class_name].limits.declared()[limit]
    if series.metric.limit != limit or limit_ns not in catalogue.edges_ns(series.metric, contract):
        raise DashboardError(f"metric {series.metric.name}: {limit} of class {class_name!r} is no bucket edge")
    mine = series.where("class", class_name)
    edge = mine.where("le", catalogue.format_edge(limit_ns / 1e9)).selector("_bucket")
    return ratio(f"sum by (class) (rate({edge}[{window}]))", observed_per_second(mine, ("class",), window))


def attainment(
    point: str = OBSERVER, by: Sequence[str] = ("class",), window: str = RATE_WINDOW, filtered: bool = True
) -> str:
    """Qualified over offered.

    The denominator counts at the beginning of a request, the numerator at its end. Over *ended* requests an outage in
    which nothing ends would have no attainment at all; over offered ones it has 0. The price: requests in flight at
    the window's end count as not yet qualified, those in flight at its start may qualify without being offered in
    it. In a steady state the two cancel; while traffic falls the quotient may pass 1, hence the cap. SQL assigns
    requests by arrival and has no such edge. A class of which nothing ever qualified may have no qualified series
    yet: it has attainment 0, not none.
    """
    qualified, offered = receipt("requests_qualified_total", point), receipt("requests_offered_total", point)
    if filtered:
        qualified, offered = qualified.filtered(), offered.filtered()
    arrived = per_second(offered, by, window)
    return f"clamp_max({ratio(f'({per_second(qualified, by, window)} or 0 * {arrived})', arrived)}, 1)"


def attainment_excl_voluntary(
    point: str = OBSERVER, by: Sequence[str] = ("class",), window: str = RATE_WINDOW, filtered: bool = True
) -> str:
    """Qualified over offered without those that their caller stopped of their own will; stands beside `attainment`."""
    offered, ended = receipt("requests_offered_total", point), receipt("requests_total", point)
    qualified = receipt("requests_qualified_total", point)
    if filtered:
        offered, ended, qualified = offered.filtered(), ended.filtered(), qualified.filtered()
    arrived = per_second(offered, by, window)
    stopped = per_second(ended.where("outcome", "cancelled").where("reason", "voluntary"), by, window)
    judged = f"({arrived} - ({stopped} or 0 * {arrived}))"
    return f"clamp_max({ratio(f'({per_second(qualified, by, window)} or 0 * {arrived})', judged)}, 1)"


def objective() -> str:
    return highest(row("sloscope_contract_objective_ratio").where("class", FILTERS["class"], "=~"), ("class",))


def budget_spent(attained: str) -> str:
    """Missed share over the share that may miss: 1 spends the budget exactly as fast as the objective allows."""
    return f"(1 - {attained}) / on (class) (1 - {objective()})"


def limit(name: str) -> str:
    """The declared limit of each class as a line."""
    declared = row("sloscope_contract_limit_seconds").where("class", FILTERS["class"], "=~").where("limit", name)
    return highest(declared, ("class",))


def burn(attained: str, budget: str) -> str:
    """The same as `budget_spent` with the budget as a number, for rules made from one contract."""
    return f"(1 - {attained}) / {budget}"


def recorded(name: str, class_name: str = "") -> str:
    """A recorded series, of one class if named."""
    return f"{name}{{class={quoted(class_name)}}}" if class_name else name


def expected(rate: str, seconds: int) -> str:
    """How many events a rate amounts to."""
    return f"{rate} * {seconds}"


def scraped(window: str) -> str:
    """1 or 0 for every target that was one of ours within the window: its last scrape worked, or did not.

    `up` is Prometheus' own and outlives the target; our series tell which targets are meant, whatever the job's name.
    """
    ours = f"last_over_time({row('sloscope_build_info').selector()}[{window}])"
    return f"(up and on (instance, job) {ours})"


def restarts(window: str = RATE_WINDOW) -> str:
    """The moments at which a data plane came back."""
    return f"{count(row('sloscope_data_plane_restarts_total'), (), window)} > 0"


def label_values(series: Series, label: str) -> str:
    """Grafana's own function for the values of a variable; not an expression."""
    series.check(label)
    return f"label_values({series.name}, {label})"
