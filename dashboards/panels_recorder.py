"""Whether the record itself can be trusted: journal, data plane, upstreams."""

from typing import Any

from dashboards import promql, style
from sloscope import catalogue

_NOTHING = "not scraped"


def _rates(title: str, description: str, *queries: tuple[str, tuple[str, ...], str], unit: str = "ops") -> Any:
    targets = [style.query(promql.per_second(promql.row(name), by), legend) for name, by, legend in queries]
    return style.lines(title, description, unit, targets, no_value=_NOTHING)


def journal_records() -> Any:
    return _rates(
        "Journal records",
        "Records a second written and lost, by observer. A lost record is a request that SQL cannot judge.",
        ("sloscope_journal_records_total", ("observer",), "written {{observer}}"),
        ("sloscope_journal_dropped_total", ("observer",), "lost {{observer}}"),
    )


def journal_bytes() -> Any:
    return _rates(
        "Journal bytes",
        "Bytes a second written to the journal, by observer.",
        ("sloscope_journal_bytes_total", ("observer",), "{{observer}}"),
        unit="Bps",
    )


def journal_lag() -> Any:
    lag = promql.row("sloscope_journal_lag_seconds")
    return style.lines(
        "Journal lag",
        "Age of the oldest record waiting to be written, by observer.",
        "s",
        [style.query(promql.highest(lag, ("observer",)), "{{observer}}")],
        no_value=_NOTHING,
    )


def troubles() -> Any:
    return _rates(
        "What went wrong while recording",
        "Events a second that should be rare: restarts, recovered requests, revised reasons, refused receipts, folded "
        "tenants, events not understood, requests of other APIs. Each line is named as its metric.",
        *((row.name, row.labels, _named(row)) for row in _rare()),
    )


def _rare() -> list[catalogue.Metric]:
    """Every counter of the recorder without a panel of its own, so that a new one shows without further work."""
    shown = ("sloscope_journal_records_total", "sloscope_journal_dropped_total", "sloscope_journal_bytes_total")
    passed = catalogue.get("sloscope_sidecar_passthrough_total")
    recorder = [row for row in catalogue.METRICS if row.kind == "counter" and row.measured_at in ("recorder", "sql")]
    return [row for row in (passed, *recorder) if row.name not in shown]


def _named(row: catalogue.Metric) -> str:
    words = row.family.removeprefix(catalogue.PREFIX).replace("_", " ")
    return " ".join((words, *(f"{{{{{label}}}}}" for label in row.labels)))


def upstreams_up() -> Any:
    up = promql.row("sloscope_upstream_up")
    resting = promql.row("sloscope_upstream_resting")
    return style.lines(
        "Upstreams reachable, and resting",
        "Reachable: 1 if the last connect to the upstream worked. Resting: 1 while it is left alone, after connects or"
        " answers that failed.",
        "none",
        [
            style.query(promql.lowest(up, ("upstream",)), "{{upstream}} reachable"),
            style.query(promql.highest(resting, ("upstream",)), "{{upstream}} resting"),
        ],
        no_value=_NOTHING,
    )


def upstreams_in_flight() -> Any:
    running = promql.row("sloscope_upstream_inflight_requests")
    return style.lines(
        "In flight by upstream",
        "Requests sent to each upstream and not ended. Uneven numbers under even load: one of them is slower.",
        "short",
        [style.query(promql.level(running, ("upstream",)), "{{upstream}}")],
        no_value=_NOTHING,
    )


def upstreams_outstanding() -> Any:
    tokens = promql.row("sloscope_upstream_outstanding_tokens")
    return style.lines(
        "Outstanding tokens by upstream",
        "By which the sidecar chooses: prompts without output yet and output that may still come. An estimate.",
        "short",
        [style.query(promql.level(tokens, ("upstream",)), "{{upstream}}")],
        no_value=_NOTHING,
    )


def builds() -> Any:
    build = promql.row("sloscope_build_info")
    return style.facts(
        "What is running",
        "Version, contract and observer of every scraped process. Two contract hashes: do not compare their numbers.",
        [style.query(promql.highest(build, ("version", "contract_hash", "observer")), "")],
    )


def served_models() -> Any:
    info = promql.row("sloscope_engine_info")
    return style.facts(
        "What the reference server serves",
        "The models of the reference servers. Their engine metrics have no label for it: one server, one model.",
        [style.query(promql.highest(info, ("model",)), "")],
    )
