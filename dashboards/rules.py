"""Recording rules and alerts of one contract.

Every class gets attainment, goodput and burn over the windows below, measured where the contract says. Windows and
budget shares: Google, The Site Reliability Workbook, chapter 5 "Alerting on SLOs", table 5-8 (2 % of the budget in
1 h, 5 % in 6 h, 10 % in 3 d; the short window is a twelfth of the long one and ends the alert soon after the trouble
ended). Of the three we page for the first only.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

from dashboards import promql
from dashboards.rulefile import Alert, Condition, Group, Recording
from sloscope import catalogue
from sloscope.contract import LIMIT_NAMES, Contract, RequestClass
from sloscope.errors import DashboardError
from sloscope.units import NS_PER, NS_PER_S

RUNBOOKS = "docs/operations.md"
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
_SLOW_WINDOWS = ("6h", "3d")  # evaluated less often: they move slowly and read much
MIN_OFFERED = 20  # in the long window; with fewer requests a single miss would page
BEYOND_SHARE = "0.01"
# Prometheus fills in the name: written into the template, a name with braces would be read as one.
_CLASS = "{{ $labels.class }}"


class BurnWindow(NamedTuple):
    alert: str
    long: str
    short: str
    spent: Decimal  # share of the period's budget gone within the long window
    hold: str
    severity: str


BURN_WINDOWS = (
    BurnWindow("SloscopeErrorBudgetFastBurn", "1h", "5m", Decimal("0.02"), "2m", "page"),
    BurnWindow("SloscopeErrorBudgetSlowBurn", "6h", "30m", Decimal("0.05"), "15m", "ticket"),
    BurnWindow("SloscopeErrorBudgetLeak", "3d", "6h", Decimal("0.10"), "1h", "ticket"),
)


def groups(contract: Contract, runbooks: str = RUNBOOKS) -> tuple[Group, ...]:
    """Raises DashboardError when the contract is judged where Prometheus cannot see it, or gives no burn alert."""
    if contract.observer == "engine":
        raise DashboardError(
            "observer: 'engine' has no receipt counters, so no rule can be made; accepted: client, sidecar"
        )
    made = (
        Group(
            "sloscope-recording", "30s", tuple(_recordings(contract, [w for w in WINDOWS if w not in _SLOW_WINDOWS]))
        ),
        Group("sloscope-recording-slow", "2m", tuple(_recordings(contract, _SLOW_WINDOWS))),
        Group("sloscope-limits", "30s", (*_limits_met(contract), *_beyond_last_bucket(contract))),
        Group("sloscope-burn", "30s", tuple(_burn_alerts(contract, runbooks))),
        Group("sloscope-record", "30s", tuple(_recorder_alerts(contract, runbooks))),
    )
    for group in made:
        if not group.rules:
            raise DashboardError(f"rules: group {group.name} would be empty, so nothing would ever warn")
    return made


def attainment_name(window: str) -> str:
    return f"class:sloscope_attainment:ratio_rate{window}"


def excl_voluntary_name(window: str) -> str:
    return f"class:sloscope_attainment_excl_voluntary:ratio_rate{window}"


def goodput_name(window: str) -> str:
    return f"class:sloscope_goodput_rps:rate{window}"


def offered_name(window: str) -> str:
    return f"class:sloscope_offered_rps:rate{window}"


def burn_name(window: str) -> str:
    return f"class:sloscope_error_budget_burn:ratio_rate{window}"


LIMIT_MET = "class:sloscope_limit_met_of_measured:ratio_rate5m"
BEYOND = "sloscope_beyond_last_bucket:ratio_rate5m"


def budget(row: RequestClass) -> Decimal:
    """The share that may miss, in decimals: 1 - 0.99 is 0.01 and not 0.010000000000000009."""
    return 1 - Decimal(str(row.objective))


def factor(row: RequestClass, window: BurnWindow) -> Decimal:
    """Burn at which the window's share of the budget is gone: 0.02 * 720 h / 1 h = 14.4 for a period of 30 days."""
    return window.spent * row.period_ns / _ns(window.long)


def _ns(window: str) -> int:
    return int(window[:-1]) * NS_PER[window[-1]]


def _recordings(contract: Contract, windows: list[str] | tuple[str, ...]) -> Iterator[Recording]:
    by = ("class",)
    qualified = promql.receipt("requests_qualified_total", contract.observer)
    offered = promql.receipt("requests_offered_total", contract.observer)
    for window in windows:
        attained = promql.attainment(contract.observer, by, window, filtered=False)
        yield Recording(offered_name(window), promql.per_second(offered, by, window))
        yield Recording(goodput_name(window), promql.per_second(qualified, by, window))
        yield Recording(attainment_name(window), attained)
        if contract.voluntary == "excluded":
            beside = promql.attainment_excl_voluntary(contract.observer, by, window, filtered=False)
            yield Recording(excl_voluntary_name(window), beside)
        for row in contract.classes.values():
            mine = promql.recorded(attainment_name(window), row.name)
            yield Recording(burn_name(window), promql.burn(mine, str(budget(row))))


def _limits_met(contract: Contract) -> Iterator[Recording]:
    """Each limit by itself, counted from the bucket whose edge is the limit, of the requests that had a value.

    Not of the offered: a request that failed before its first output has no TTFT and is in neither number, so an
    outage does not lower this share. Attainment is what counts it. Over the offered a gap that could not be measured,
    which meets its limit, would look like a miss.
    """
    for row in contract.classes.values():
        for limit in row.limits.declared():
            series = promql.receipt(f"{limit}_seconds", contract.observer)
            share = promql.within_limit(series, row.name, limit, contract, "5m")
            yield Recording(LIMIT_MET, share, {"limit": limit})


def _beyond_last_bucket(contract: Contract) -> Iterator[Recording]:
    for limit in LIMIT_NAMES:
        series = promql.receipt(f"{limit}_seconds", contract.observer)
        yield Recording(BEYOND, promql.beyond_last_edge(series, (), "5m"), {"family": limit})


def _burn_alerts(contract: Contract, runbooks: str) -> Iterator[Alert]:
    for window in BURN_WINDOWS:
        for row in contract.classes.values():
            threshold = factor(row, window)
            # Below 1 the budget lasts longer than the period: that is no trouble, however long it goes on.
            if threshold < 1:
                continue
            yield Alert(
                window.alert,
                (*_burning(row, window, threshold), _enough(row, window.long)),
                window.hold,
                window.severity,
                f"Class {_CLASS} burns its error budget at more than {_plain(threshold)}× the sustainable rate",
                f"Over {window.long} and over {window.short} the error budget of class {_CLASS} "
                f"(objective {row.objective}) burns above {_plain(threshold)}; now {{{{ $value | humanize }}}}. At "
                f"{_plain(threshold)}, {_plain(window.spent * 100)} % of the period's budget is gone in {window.long}.",
                runbook(window.alert, runbooks),
            )


def _burning(row: RequestClass, window: BurnWindow, threshold: Decimal) -> Iterator[Condition]:
    for span in (window.long, window.short):
        yield Condition(promql.recorded(burn_name(span), row.name), ">", _plain(threshold))


def _enough(row: RequestClass, window: str) -> Condition:
    offered = promql.recorded(offered_name(window), row.name)
    return Condition(promql.expected(offered, _ns(window) // NS_PER_S), ">=", str(MIN_OFFERED))


def _plain(number: Decimal) -> str:
    """14.4 and 1, not 14.40 and 1E+0."""
    return f"{number.normalize():f}"


def _recorder_alerts(contract: Contract, runbooks: str) -> Iterator[Alert]:
    yield Alert(
        "SloscopeBeyondLastBucket",
        (Condition(BEYOND, ">", BEYOND_SHARE),),
        "10m",
        "ticket",
        "{{ $labels.family }}: over 1 % of the samples lie beyond the last bucket",
        "{{ $value | humanizePercentage }} of {{ $labels.family }} samples lie beyond the last bucket edge: its p99 is "
        "only known to be larger than that edge.",
        runbook("SloscopeBeyondLastBucket", runbooks),
    )
    yield Alert(
        "SloscopeSidecarDown",
        (Condition(promql.scraped("1h"), "==", "0"),),
        "2m",
        "page",
        "The sidecar at {{ $labels.instance }} does not answer",
        "Its last scrapes failed. If requests go through it they fail too, and no other alert can see that: without "
        "counters there is no burn.",
        runbook("SloscopeSidecarDown", runbooks),
    )
    yield Alert(
        "SloscopeJournalDropping",
        (Condition(promql.increase(promql.row("sloscope_journal_dropped_total"), "5m"), ">", "0"),),
        "0s",
        "ticket",
        "Journal records are lost at {{ $labels.instance }} ({{ $labels.observer }})",
        "Streams go on, but {{ $value | humanize }} records of the last 5 minutes are missing from every SQL answer.",
        runbook("SloscopeJournalDropping", runbooks),
    )
    yield Alert(
        "SloscopeDataPlaneRestarted",
        (Condition(promql.increase(promql.row("sloscope_data_plane_restarts_total"), "15m"), ">", "0"),),
        "0s",
        "ticket",
        "The data plane died and was started again at {{ $labels.instance }}",
        "{{ $value | humanize }} restarts in 15 minutes; streams that were open then were cut.",
        runbook("SloscopeDataPlaneRestarted", runbooks),
    )
    promised = {name: _first_output_ns(row) for name, row in contract.classes.items()}
    if longest_ns := max(promised.values()):
        limit = catalogue.format_edge(longest_ns / 1e9)
        waiting = promql.row("sloscope_engine_oldest_waiting_seconds")
        for name in (name for name, limit_ns in promised.items() if not limit_ns):
            waiting = waiting.where("class", name, "!=")
        yield Alert(
            "SloscopeEngineOldestWaiting",
            (Condition(waiting.selector(), ">", limit),),
            "1m",
            "ticket",
            f"A request of class {_CLASS} waits {{{{ $value | humanizeDuration }}}} for its admission at "
            "{{ $labels.instance }}",
            f"The longest promise for a first output is {limit} s, so it has been missed in the queue already.",
            runbook("SloscopeEngineOldestWaiting", runbooks),
        )


def _first_output_ns(row: RequestClass) -> int:
    """0: the class promises none, and may wait."""
    limits = row.limits.declared()
    return max(limits.get("ttft", 0), limits.get("ttft_visible", 0)) or limits.get("e2e", 0)


def runbook(alert: str, runbooks: str = RUNBOOKS) -> str:
    """The heading of the same name: `SloscopeX` becomes the anchor `#sloscopex`."""
    return f"{runbooks}#{alert.lower()}"
