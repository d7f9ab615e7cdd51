"""Whether the promise was kept: attainment, goodput, budget, and what became of the requests."""

from typing import Any

from dashboards import promql, style

_CLASS = ("class",)


def attainment_in_range() -> Any:
    return style.number(
        "Attainment",
        "Qualified over offered requests in the time range, by class. Offered counts every request whatever became "
        "of it; requests still in flight count as not yet qualified.",
        "percentunit",
        [
            style.query(promql.attainment(window=promql.RANGE), "{{class}}"),
            style.query(promql.objective(), "objective {{class}}"),
        ],
    )


def budget_in_range() -> Any:
    return style.number(
        "Error budget spent",
        "Missed share in the time range over the share that the objective lets miss: above 100 % the range spent more "
        "than its own budget.",
        "percentunit",
        [style.query(promql.budget_spent(promql.attainment(window=promql.RANGE)), "{{class}}")],
    )


def goodput_now() -> Any:
    qualified = promql.receipt("requests_qualified_total").filtered()
    return style.number(
        "Goodput",
        "Requests a second that completed and met every limit, by class.",
        "reqps",
        [style.query(promql.per_second(qualified, _CLASS), "{{class}}")],
    )


def offered_in_range() -> Any:
    offered = promql.receipt("requests_offered_total").filtered()
    return style.number(
        "Offered requests",
        "Requests that arrived in the time range, by class; _unknown is not in the contract and cannot qualify.",
        "short",
        [style.query(promql.count(offered, _CLASS), "{{class}}")],
    )


def attainment_over_time() -> Any:
    return style.lines(
        "Attainment",
        "Qualified over offered requests, by class. The dashed line is the objective. Dips at the start of a burst of "
        "long answers are requests that have not ended yet.",
        "percentunit",
        [style.query(promql.attainment(), "{{class}}"), style.query(promql.objective(), "objective {{class}}")],
    )


def attainment_excl_voluntary() -> Any:
    return style.lines(
        "Attainment without voluntary stops",
        "Qualified over offered requests, those left out that their caller stopped of their own will. It stands beside "
        "attainment and never replaces it.",
        "percentunit",
        [
            style.query(promql.attainment_excl_voluntary(), "{{class}}"),
            style.query(promql.objective(), "objective {{class}}"),
        ],
    )


def budget_burn() -> Any:
    return style.lines(
        "Error budget burn",
        "How many times faster than sustainable the budget is spent; 1 spends it exactly by the end of the period. "
        "The alerts compare the same quotient over fixed windows.",
        "none",
        [style.query(promql.budget_spent(promql.attainment()), "{{class}}")],
    )


def goodput_over_time() -> Any:
    qualified = promql.receipt("requests_qualified_total").filtered()
    offered = promql.receipt("requests_offered_total").filtered()
    return style.lines(
        "Goodput beside offered load",
        "Qualified and offered requests a second. Between them: what missed its promise, or has not ended.",
        "reqps",
        [
            style.query(promql.per_second(qualified, _CLASS), "qualified {{class}}"),
            style.query(promql.per_second(offered, _CLASS), "offered {{class}}"),
        ],
    )


def token_goodput() -> Any:
    tokens = promql.receipt("output_tokens_total").filtered()
    return style.lines(
        "Output tokens by fate of their request",
        "Output tokens a second in requests that qualified and in all others. Counted when a request ends.",
        "short",
        [style.query(promql.per_second(tokens, ("qualified",)), "qualified {{qualified}}")],
        stacked=True,
    )


def ended_by_outcome() -> Any:
    ended = promql.receipt("requests_total").filtered()
    offered = promql.receipt("requests_offered_total").filtered()
    return style.lines(
        "Offered against ended, by outcome",
        "Every offered request ends as completed, failed, cancelled or unfinished. Offered lastingly above their sum: "
        "requests pile up.",
        "reqps",
        [
            style.query(promql.per_second(ended, ("outcome",)), "{{outcome}}"),
            style.query(promql.per_second(offered), "offered"),
        ],
    )


def ended_by_reason() -> Any:
    ended = promql.receipt("requests_total").filtered().where("outcome", "completed", "!=")
    return style.lines(
        "Not completed, by reason",
        "Requests a second that failed, were cancelled or remained unfinished, each under its own name. A caller's "
        "own stop is no failure of the service.",
        "reqps",
        [style.query(promql.per_second(ended, ("outcome", "reason")), "{{outcome}} {{reason}}")],
        stacked=True,
    )


def misses_by_obligation() -> Any:
    misses = promql.receipt("contract_misses_total").filtered()
    return style.lines(
        "Misses by obligation over time",
        "Missed limits a second, by limit. A request can miss several, so the sum can exceed the requests that missed.",
        "reqps",
        [style.query(promql.per_second(misses, ("class", "obligation")), "{{class}} {{obligation}}")],
    )


def in_flight() -> Any:
    running = promql.receipt("inflight_requests").filtered()
    return style.lines(
        "In flight",
        "Requests begun and not ended, by class.",
        "short",
        [style.query(promql.level(running, _CLASS), "{{class}}")],
    )
