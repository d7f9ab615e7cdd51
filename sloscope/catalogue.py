"""Every metric, once. Exporter, server, rules, dashboards and docs read these rows.

Names take base units and end in `_seconds`, `_tokens`, `_total`, `_ratio` or `_bytes`. A receipt value is never published
under an engine name, nor the reverse: `measured_at` says where a row's stamps come from.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sloscope.contract import Contract
from sloscope.errors import DashboardError

PREFIX = "sloscope_"


class Metric(NamedTuple):
    name: str  # as exposed, counters with _total
    kind: str  # counter, gauge, histogram, info
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper edges in the metric's unit, without +Inf
    measured_at: str = "sidecar"  # client, sidecar, engine, upstream, recorder, sql
    processes: tuple[str, ...] = ("sidecar",)  # which expositions carry it: sidecar, server
    limit: str = ""  # the contract limit whose values become bucket edges
    optional: bool = False  # absent until it is known, since 0 would be a value

    @property
    def family(self) -> str:
        """The name without the suffix that the Python client adds to counters."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


TTFT_EDGES = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
GAP_EDGES = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
E2E_EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
WORK_EDGES = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
ADDED_EDGES = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1.0)
_REQUEST = ("class", "model", "tenant")


def _receipt_families(point: str, where: str) -> list[Metric]:
    """The same families at a receipt point: `point` is client or sidecar."""

    def histogram(name: str, edges: tuple[float, ...], limit: str, text: str) -> Metric:
        return Metric(f"{PREFIX}{point}_{name}_seconds", "histogram", text, _REQUEST, edges, point, ("sidecar",), limit)

    def counter(name: str, text: str, *labels: str) -> Metric:
        return Metric(f"{PREFIX}{point}_{name}_total", "counter", text, (*_REQUEST, *labels), (), point)

    zero = "send" if point == "client" else "the first request byte"
    return [
        histogram("ttft", TTFT_EDGES, "ttft", f"From {zero} to the first output event received {where}."),
        histogram("ttft_visible", TTFT_EDGES, "ttft_visible", f"From {zero} to the first output that is not reasoning, {where}."),
        histogram("itl", GAP_EDGES, "", f"Gap between consecutive tokens received {where}; only where token counts are known."),
        histogram("icl", GAP_EDGES, "", f"Gap between consecutive output events of one choice received {where}."),
        histogram("itl_max", GAP_EDGES, "itl_max", f"Largest gap of a request between output events {where}, one sample a request."),
        histogram("tpot", GAP_EDGES, "tpot", f"Mean time per output token after the first {where}, one sample a request."),
        histogram("e2e", E2E_EDGES, "e2e", f"From {zero} to the last output event received {where}."),
        counter("requests_offered", f"Requests that arrived, whatever became of them, seen {where}."),
        counter("requests", f"Requests that ended, by outcome, seen {where}.", "outcome", "reason"),
        counter("requests_qualified", f"Requests that completed and met every declared limit {where}."),
        counter("contract_misses", f"Obligations missed {where}; a request can miss several.", "obligation"),
        counter("output_tokens", f"Output tokens received {where}, of qualified and other requests.", "qualified"),
        Metric(f"{PREFIX}{point}_inflight_requests", "gauge", f"Requests begun and not ended {where}.", _REQUEST, (), point),
    ]  # fmt: skip


_BOTH = ("sidecar", "server")


def _engine(
    name: str,
    kind: str,
    text: str,
    labels: tuple[str, ...] = (),
    edges: tuple[float, ...] = (),
    *,
    optional: bool = False,
) -> Metric:
    return Metric(f"{PREFIX}engine_{name}", kind, text, labels, edges, "engine", ("server",), optional=optional)


_ENGINE = [
    _engine("info", "info", "The model that this server serves; its other engine metrics carry no label for what they share.", ("model",), optional=True),
    _engine("queue_seconds", "histogram", "From arrival in the scheduler to admission into the batch.", (), WORK_EDGES),
    _engine("prefill_seconds", "histogram", "From admission into the batch to the first token computed; steps whose token budget went to others included.", (), WORK_EDGES),
    _engine("decode_step_seconds", "histogram", "Duration of iterations that decoded only.", (), WORK_EDGES),
    _engine("step_seconds", "histogram", "Duration of every iteration, planning included.", (), WORK_EDGES),
    _engine("ttft_seconds", "histogram", "From the first request byte at the server to the first token computed.", (), TTFT_EDGES),
    _engine("token_interval_seconds", "histogram", "Between consecutive tokens of a sequence as computed.", (), GAP_EDGES),
    _engine("cancel_cleanup_seconds", "histogram", "From the abort seen by the scheduler to the last KV block free, of requests that held KV.", (), WORK_EDGES),
    _engine("requests", "gauge", "Requests by scheduler state.", ("state",)),
    _engine("oldest_waiting_seconds", "gauge", "Age of the request of the class that has waited longest for its admission into the batch; 0 when none waits.", ("class",)),
    _engine("kv_blocks", "gauge", "KV blocks that hold tokens, are promised to admitted work, or neither.", ("kind",)),
    _engine("kv_blocks_cached", "gauge", "KV blocks that nobody holds, promised or not, with a prefix to reuse."),
    _engine("kv_blocks_paused", "gauge", "The part of the resident KV blocks that paused requests hold."),
    _engine("undelivered_tokens", "gauge", "Tokens computed and not yet taken by the socket of their reader."),
    _engine("preemptions_total", "counter", "Sequences whose KV was taken back before they ended."),
    _engine("pauses_total", "counter", "Times that flow control took a request out of the batch.", ("reason",)),
    _engine("pause_seconds", "histogram", "How long a pause lasted, by how it ended: resumed, slow_reader, or otherwise.", ("end",), WORK_EDGES),
    _engine("prefix_reused_tokens_total", "counter", "Prompt tokens whose KV was taken from the prefix cache instead of run, each once."),
    _engine("admissions_total", "counter", "Admission decisions.", ("verdict", "reason")),
    _engine("first_token_late_seconds", "histogram", "How much later than admission predicted a first token was computed; the others are in _early.", (), WORK_EDGES),
    _engine("first_token_early_seconds", "histogram", "How much earlier than admission predicted, or at that very moment, a first token was computed.", (), WORK_EDGES),
    _engine("cost_error_ratio", "gauge", "Step times as the cost model predicts them: |predicted - real| / real at quantile q of recent steps; absent before the first.", ("q",), optional=True),
    _engine("lengths_age_seconds", "gauge", "Age of the length table that policies read; absent without a table.", optional=True),
    _engine("requests_offered_total", "counter", "Requests that arrived, whatever became of them; those that have not ended are in inflight_requests."),
    _engine("requests_ended_total", "counter", "Requests that ended at the server, those that never came to the scheduler among them.", ("outcome",)),
    _engine("inflight_requests", "gauge", "Requests that began at the server and have not ended; beside those in a state of the scheduler, the ones that it does not know yet, or no more because only their reader is still missing."),
    _engine("service_units_total", "counter", "Service received: declared weights of prompt and output tokens.", ("tenant",)),
    _engine("prompt_tokens_total", "counter", "Prompt tokens run, each once."),
    _engine("recomputed_tokens_total", "counter", "Tokens that prefills ran after a preemption: of prompts again, and of answers so far."),
    _engine("output_tokens_total", "counter", "Output tokens computed."),
    _engine("modelled_flops_total", "counter", "Floating point operations that the model's shape implies for the work done."),
    _engine("modelled_bytes_total", "counter", "Bytes that the model's shape implies were moved for the work done."),
    _engine("work_flops_total", "counter", "The modelled operations by phase (prefill, decode) and part (linear, attention).", ("phase", "part")),
    _engine("work_bytes_total", "counter", "The modelled bytes by part: weights, kv_read, kv_write, transfer.", ("part",)),
    _engine("ceiling_flops_per_second", "gauge", "Operations a second that this machine was measured to reach; absent until calibrated.", optional=True),
    _engine("ceiling_bytes_per_second", "gauge", "Bytes a second that this machine was measured to reach: weights, kv, transfer; absent until calibrated.", ("part",), optional=True),
]  # fmt: skip

_UPSTREAM_ENGINE = ("upstream", "kind", "model")


def _upstream(name: str, kind: str, text: str, *labels: str) -> Metric:
    """What an upstream's engine says on its own /metrics, see foreign_names.py. Its histograms keep their own edges."""
    return Metric(f"{PREFIX}upstream_engine_{name}", kind, text, (*_UPSTREAM_ENGINE, *labels), (), "upstream")


_UPSTREAM = [
    _upstream("requests_running", "gauge", "Requests in the batch, by the word of the upstream's engine."),
    _upstream("requests_waiting", "gauge", "Requests not in the batch yet, by the word of the upstream's engine."),
    _upstream("kv_usage_ratio", "gauge", "Share of the KV cache in use, by the word of the upstream's engine; of several ranks the fullest."),
    _upstream("ttft_seconds", "histogram", "Time to first token as the upstream's engine measures it; where it begins and ends is the engine's own choice."),
    _upstream("token_interval_seconds", "histogram", "Time between tokens or engine outputs of a request as the upstream's engine measures it."),
    _upstream("queue_seconds", "histogram", "Time in the queue as the upstream's engine measures it."),
    _upstream("prefill_seconds", "histogram", "Time from scheduling to the first token as the upstream's engine measures it."),
    _upstream("e2e_seconds", "histogram", "Time of a request from begin to end as the upstream's engine measures it."),
    _upstream("prompt_tokens_total", "counter", "Prompt tokens, by the word of the upstream's engine."),
    _upstream("generation_tokens_total", "counter", "Output tokens, by the word of the upstream's engine."),
    _upstream("preemptions_total", "counter", "Requests whose KV was taken back before they ended, by the word of the upstream's engine."),
    _upstream("requests_total", "counter", "Requests that ended, by the word of the upstream's engine; the reasons are its own.", "reason"),
    _upstream("prefix_queried_tokens_total", "counter", "Tokens that were looked for in the prefix cache, by the word of the upstream's engine."),
    _upstream("prefix_reused_tokens_total", "counter", "Tokens that were found in the prefix cache, by the word of the upstream's engine."),
]  # fmt: skip

_RECORDER = [
    Metric(f"{PREFIX}sidecar_added_seconds", "histogram", "What the sidecar itself added to an event: read to handed on. A readable socket's wait while the loop works is not in it.", (), ADDED_EDGES),
    Metric(f"{PREFIX}sidecar_passthrough_total", "counter", "Requests of other APIs, forwarded untouched and not judged."),
    Metric(f"{PREFIX}sidecar_clients_displaced_total", "counter", "Idle connections closed to make place for another client: no open file was left for one more.", (), (), "recorder"),
    Metric(f"{PREFIX}sidecar_clients_refused_total", "counter", "Connections answered 503 at once: no open file was left for one more client and its upstream.", (), (), "recorder"),
    Metric(f"{PREFIX}journal_records_total", "counter", "Journal records written.", ("observer",), (), "recorder", _BOTH),
    Metric(f"{PREFIX}journal_dropped_total", "counter", "Journal records that could not be written.", ("observer",), (), "recorder", _BOTH),
    Metric(f"{PREFIX}journal_bytes_total", "counter", "Journal bytes written.", ("observer",), (), "recorder", _BOTH),
    Metric(f"{PREFIX}journal_lag_seconds", "gauge", "Age of the oldest record waiting to be written.", ("observer",), (), "recorder", _BOTH),
    Metric(f"{PREFIX}journal_late_begins_total", "counter", "Requests that went on before their begin record was on disk, after 5 ms.", (), (), "recorder", _BOTH),
    Metric(f"{PREFIX}snapshot_failures_total", "counter", "Scrapes that got the latest snapshot because the data plane did not answer in time.", (), (), "recorder"),
    Metric(f"{PREFIX}sql_failures_total", "counter", "Refreshes of the sloscope_sql_ results that failed.", (), (), "sql"),
    Metric(f"{PREFIX}recovered_requests_total", "counter", "Requests closed as unfinished after their recorder died.", (), (), "recorder"),
    Metric(f"{PREFIX}reason_revisions_total", "counter", "Late reasons taken; also those of requests that nobody saw or that did not disconnect, which refine nothing.", (), (), "recorder"),
    Metric(f"{PREFIX}receipts_rejected_total", "counter", "Client receipts refused, by cause.", ("cause",), (), "recorder"),
    Metric(f"{PREFIX}tenant_overflow_total", "counter", "Requests whose tenant label was folded into other.", ("observer",), (), "recorder", _BOTH),
    Metric(f"{PREFIX}parse_problems_total", "counter", "Events that could not be understood; they were forwarded.", ("problem",), (), "recorder"),
    Metric(f"{PREFIX}upstream_up", "gauge", "1 if the last connect to the upstream worked.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}upstream_resting", "gauge", "1 while the upstream is left alone, after connects or answers that failed.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}upstream_answers_total", "counter", "Answers to observed requests, as they count for the upstream's health: failed is a 5xx, or an end before the first output event that HTTP does not allow. A connect that failed is no answer.", ("upstream", "result"), (), "recorder"),
    Metric(f"{PREFIX}upstream_inflight_requests", "gauge", "Requests sent to the upstream and not ended.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}upstream_outstanding_tokens", "gauge", "Estimate of the tokens that the upstream still has to work off: prompts without output yet, and output not received.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}hedge_requests_total", "counter", "Requests that could have been sent to a second upstream, by what became of that.", ("result",), (), "recorder"),
    Metric(f"{PREFIX}hedge_waste_prompt_tokens_total", "counter", "Prompt tokens sent to attempts that did not answer their request: by the answer's usage, else estimated from the body.", (), (), "recorder"),
    Metric(f"{PREFIX}upstream_engine_up", "gauge", "1 if the engine's metrics came and were understood at the last poll.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}upstream_engine_scrape_seconds", "gauge", "How long the last poll of the engine's metrics took.", ("upstream",), (), "recorder"),
    Metric(f"{PREFIX}upstream_engine_scrape_failures_total", "counter", "Polls of the engine's metrics that failed, by cause.", ("upstream", "cause"), (), "recorder"),
    Metric(f"{PREFIX}upstream_engine_lines_skipped_total", "counter", "Lines of the engine's metrics that were not passed on, by cause.", ("upstream", "cause"), (), "recorder"),
    Metric(f"{PREFIX}data_plane_restarts_total", "counter", "Times the data plane was started again after it died.", (), (), "recorder"),
    Metric(f"{PREFIX}sql_attainment_ratio", "gauge", "Qualified over offered, latest result of the goodput question; over --sql-window up to then.", ("class",), (), "sql"),
    Metric(f"{PREFIX}sql_goodput_rps", "gauge", "Qualified requests per second, latest result of the goodput question; over --sql-window up to then.", ("class",), (), "sql"),
    Metric(f"{PREFIX}sql_holds", "gauge", "Late deliveries by verdict, latest result of the stalls question; over --sql-window up to then.", ("verdict",), (), "sql"),
    Metric(f"{PREFIX}sql_computed_at_seconds", "gauge", "When the sloscope_sql_ results were computed, seconds since the epoch.", ("query",), (), "sql"),
    Metric(f"{PREFIX}build_info", "info", "Version and contract of this process.", ("version", "contract_hash", "observer"), (), "recorder"),
    Metric(f"{PREFIX}contract_limit_seconds", "gauge", "Declared limits, so that panels can draw them.", ("class", "limit"), (), "recorder"),
    Metric(f"{PREFIX}contract_objective_ratio", "gauge", "Declared objective of a class.", ("class",), (), "recorder"),
]  # fmt: skip

METRICS: tuple[Metric, ...] = (
    *_receipt_families("client", "by the consumer's own process"),
    *_receipt_families("sidecar", "at the sidecar"),
    *_ENGINE,
    *_UPSTREAM,
    *_RECORDER,
)
_BY_NAME = {metric.name: metric for metric in METRICS}
assert len(_BY_NAME) == len(METRICS), "a metric name stands twice in the catalogue"


def get(name: str) -> Metric:
    """Raises DashboardError for a name that is not in the catalogue: a rename must fail a test, not blank a panel."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise DashboardError(f"metric: {name!r} is not in the catalogue") from None


def receipt(point: str, name: str) -> Metric:
    """`receipt("client", "ttft_seconds")`: a family at a receipt point."""
    return get(f"{PREFIX}{point}_{name}")


def exposed_by(process: str) -> Iterator[Metric]:
    """The rows that one exposition carries: sidecar or server."""
    return (metric for metric in METRICS if process in metric.processes)


def edges(metric: Metric, contract: Contract | None = None) -> tuple[float, ...]:
    """Upper edges in seconds, with every declared limit among them: an objective needs its threshold as an edge."""
    extra: Iterable[int] = contract.limit_edges_ns(metric.limit) if contract and metric.limit else ()
    return tuple(sorted({*metric.buckets, *(ns / 1e9 for ns in extra)}))


def edges_ns(metric: Metric, contract: Contract | None = None) -> tuple[int, ...]:
    """The same edges as integers, so that binning and judging agree at the limit itself."""
    extra: Iterable[int] = contract.limit_edges_ns(metric.limit) if contract and metric.limit else ()
    return tuple(sorted({*(round(edge * 1e9) for edge in metric.buckets), *extra}))


def format_edge(edge: float) -> str:
    """`le` as the Python client renders it: 2.0, not 2."""
    return str(float(edge))


def markdown() -> str:
    """The reference page of all metrics."""
    lines = [
        "# Metrics",
        "",
        "Generated from `sloscope/catalogue.py` by `make generate`; do not edit.",
        "",
        "| metric | kind | labels | measured at | exposed by | help |",
        "|---|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(metric.labels) or "-"
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {labels} | {metric.measured_at} | {', '.join(metric.processes)} | "
            f"{metric.help} |"
        )
    return "\n".join(lines) + "\n"
