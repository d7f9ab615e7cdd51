"""Exact answers from the journal: SQL at the control plane, and the few results that it exposes as gauges."""

from typing import Any

from dashboards import promql, style

# Each is a file under queries/, answered at /api/q/NAME.
QUESTIONS = (
    "goodput",
    "goodput_over_time",
    "attainment_by_cohort",
    "misses_by_obligation",
    "outcomes",
    "error_budget",
    "quantiles",
    "hold_summary",
    "hold_timeline",
    "holds",
    "stall_causes",
    "ttft_budget",
    "survival",
    "dispatch_lag",
    "step_work",
    "admission_calibration",
    "state_times",
    "kv_usage",
)
_MINUTES = {"bucket_s": "60"}
_RULES = "Requests are assigned by arrival."


def goodput() -> Any:
    return style.answer(
        "Goodput of the window", f"Offered, qualified, attainment with its interval, and goodput. {_RULES}", "goodput"
    )


def goodput_over_time() -> Any:
    text = f"Qualified requests a second by the minute in which they arrived. {_RULES}"
    return style.timeline(
        "Goodput by arrival", text, "reqps", "goodput_over_time", "bucket_at_s", ("goodput_rps",), _MINUTES
    )


def attainment_over_time() -> Any:
    columns = ("attainment", "attainment_low", "attainment_high")
    text = f"Qualified over offered by the minute of arrival, with its interval; no line in an empty minute. {_RULES}"
    return style.timeline(
        "Attainment by arrival", text, "percentunit", "goodput_over_time", "bucket_at_s", columns, _MINUTES
    )


def attainment_by_class() -> Any:
    return _by_cohort("class")


def attainment_by_tenant() -> Any:
    return _by_cohort("tenant")


def _by_cohort(by: str) -> Any:
    text = f"Which {by} did not get what it was promised, with the interval of each share. {_RULES}"
    return style.answer(f"Attainment by {by}", text, "attainment_by_cohort", {"by": by})


def outcomes() -> Any:
    text = f"Every offered request under exactly one outcome and reason. {_RULES}"
    return style.answer("Outcomes", text, "outcomes")


def error_budget() -> Any:
    text = f"What the window took from each class's budget, and how long a whole budget lasts at this burn. {_RULES}"
    return style.answer("Error budget", text, "error_budget")


def misses_by_obligation() -> Any:
    text = f"How many requests missed each limit, and how many missed it alone. {_RULES}"
    return style.answer("Misses by obligation", text, "misses_by_obligation")


def quantiles() -> Any:
    text = f"Order statistics without buckets, with rank bounds; empty with the reason where n is too small. {_RULES}"
    return style.answer("Exact quantiles", text, "quantiles")


def holds() -> Any:
    text = "One row for each output that was held too long, with its verdict and both sides' share of the waiting."
    return style.answer("Late holds", text, "holds")


def hold_summary() -> Any:
    text = (
        "Late deliveries by verdict: the engine was late; it was on time and the events waited; both; the client was "
        "late; unknown. Without engine stamps a verdict is only suspected."
    )
    return style.answer("Stall verdicts", text, "hold_summary")


def hold_timeline() -> Any:
    verdicts = ("decoder_stall", "buffered_delivery", "mixed", "client_late", "unknown")
    suspected = ("suspected_decoder_stall", "suspected_buffered_delivery")
    text = "Late holds by the time at which they ended and by verdict: when it started, and on which side."
    return style.timeline(
        "Stall verdicts over time",
        text,
        "short",
        "hold_timeline",
        "bucket_at_s",
        (*verdicts, *suspected),
        _MINUTES,
        stacked=True,
    )


def stall_causes() -> Any:
    text = "Decoder stalls by the steps that they overlap: prefill interference, preemption, KV pressure and others."
    return style.answer("Causes of decoder stalls", text, "stall_causes")


def ttft_budget() -> Any:
    text = "TTFT link by link from independent stamps, beside the declared budget; unstamped time is the residual."
    return style.answer("TTFT budget", text, "ttft_budget", span=24)


def survival() -> Any:
    text = "Output length with censoring: answers that were cut off are known only to exceed what was seen."
    return style.answer("Output length (Kaplan-Meier)", text, "survival")


def dispatch_lag() -> Any:
    text = "Scheduled arrival to send of replayed requests. A sender that lags hides queueing: the run is invalid."
    return style.answer("Dispatch lag", text, "dispatch_lag")


def attainment_by_both() -> Any:
    from_sql = promql.row("sloscope_sql_attainment_ratio")
    return style.lines(
        "Attainment: counters and SQL",
        "The same share from counters over the time range and from the journal over the sidecar's --sql-window: an "
        "hour. Over a range as long they differ only by requests in flight; a lasting difference means lost records.",
        "percentunit",
        [
            style.query(promql.attainment(by=(), window=promql.RANGE), "counters"),
            style.query(promql.highest(from_sql, ("class",)), "SQL {{class}}"),
        ],
    )


def step_work() -> Any:
    text = (
        "Per kind of step and batch size: time, modelled work, the least time that the measured ceilings allow, and "
        "which of them binds. Steps by their begin."
    )
    return style.answer("Steps against the machine's ceilings", text, "step_work", span=24)


def admission_calibration() -> Any:
    text = f"First tokens against what admission said, by verdict and decile of what it said. {_RULES}"
    return style.answer("Admission's predictions", text, "admission_calibration", span=24)


def state_times() -> Any:
    text = f"How long requests stay in each state of the engine, and by which way they leave it. {_RULES}"
    return style.answer("Time in each state", text, "state_times")


def kv_usage() -> Any:
    text = "By the minute: KV that holds tokens, is promised, free or cached, held by paused requests; what was reused."
    return style.answer("KV usage", text, "kv_usage", _MINUTES)


def goodput_gauge() -> Any:
    from_sql = promql.row("sloscope_sql_goodput_rps")
    return style.lines(
        "Goodput from SQL",
        "Latest result of the goodput question, by class, over the sidecar's --sql-window: an hour.",
        "reqps",
        [style.query(promql.highest(from_sql, ("class",)), "{{class}}")],
        no_value="not computed yet",
    )


def holds_gauge() -> Any:
    return style.lines(
        "Late deliveries by verdict, from SQL",
        "Latest result of the stalls question, over the sidecar's --sql-window: an hour.",
        "short",
        [style.query(promql.highest(promql.row("sloscope_sql_holds"), ("verdict",)), "{{verdict}}")],
        no_value="not computed yet",
        stacked=True,
    )


def computed_ago() -> Any:
    return style.number(
        "Age of the SQL results",
        "Seconds since the gauges above were computed.",
        "s",
        [style.query(promql.age(promql.row("sloscope_sql_computed_at_seconds"), ("query",)), "{{query}}")],
        span=12,
        no_value="not computed yet",
    )
