"""The engine's own stamps, beside the same obligation as it was received."""

from typing import Any

from dashboards import promql, style

_OBSERVERS = ("client", "sidecar")
_NOT_MIXED = (
    "Each observer has its own clock and its own name here; a line is never one observer's value under another's name."
)
_NO_ENGINE = "no engine"


def _beside(title: str, description: str, q: float, engine_series: str, family: str) -> Any:
    targets = [style.query(promql.quantile(q, promql.engine(engine_series)), "engine")]
    targets += [style.query(promql.quantile(q, promql.receipt(family, at).filtered()), at) for at in _OBSERVERS]
    return style.lines(title, f"{description} {_NOT_MIXED}", "s", targets)


def _quantiles(title: str, description: str, series: promql.Series, no_value: str = _NO_ENGINE) -> Any:
    targets = [style.query(promql.quantile(q, series), f"p{q * 100:.0f}") for q in (0.99, 0.5)]
    return style.lines(title, description, "s", targets, no_value=no_value)


def ttft_p99() -> Any:
    text = "First token computed beside first output received. Engine low and client high: the time went between them."
    return _beside("TTFT p99: engine, sidecar, client", text, 0.99, "ttft_seconds", "ttft_seconds")


def ttft_p50() -> Any:
    text = "The same for the median. p99 apart and p50 together points to something that happens to few requests."
    return _beside("TTFT p50: engine, sidecar, client", text, 0.5, "ttft_seconds", "ttft_seconds")


def queue() -> Any:
    text = "From arrival in the scheduler to admission into the batch."
    return _quantiles("Engine queue p50 and p99", text, promql.engine("queue_seconds"))


def prefill() -> Any:
    text = (
        "From admission into the batch to the first token computed: every chunk of the prompt, and the steps whose "
        "token budget went to others."
    )
    return _quantiles("Engine prefill p50 and p99", text, promql.engine("prefill_seconds"))


def gap_p99() -> Any:
    text = "Tokens as computed beside output events as received. Engine even and receipts bunched: a buffer on the way."
    return _beside("Token interval and chunk gap p99", text, 0.99, "token_interval_seconds", "icl_seconds")


def largest_gap() -> Any:
    targets = [
        style.query(promql.quantile(0.99, promql.receipt("itl_max_seconds", point).filtered()), point)
        for point in _OBSERVERS
    ]
    targets.append(style.query(promql.limit("itl_max"), "limit {{class}}"))
    text = "The largest pause inside an answer at both receipt points; higher at the client: the network or the reader."
    return style.lines("Largest gap p99: sidecar, client", text, "s", targets)


def decode_step() -> Any:
    text = "Duration of iterations that only decoded: the floor under every gap between tokens."
    return _quantiles("Engine decode step p50 and p99", text, promql.engine("decode_step_seconds"))


def step() -> Any:
    text = "Duration of every iteration, planning included. Far above decode steps: prefill interferes with decoding."
    return _quantiles("Engine step p50 and p99", text, promql.engine("step_seconds"))


def added_by_sidecar() -> Any:
    text = "What the sidecar itself added to an event, from read to handed on."
    return _quantiles(
        "Added by the sidecar p50 and p99", text, promql.row("sloscope_sidecar_added_seconds"), style.NO_TRAFFIC
    )


def states() -> Any:
    return style.lines(
        "Engine requests by state",
        "Requests by scheduler state.",
        "short",
        [style.query(promql.level(promql.engine("requests"), ("state",)), "{{state}}")],
        no_value=_NO_ENGINE,
        stacked=True,
    )


def in_flight() -> Any:
    return style.lines(
        "Requests in the server",
        "In the server: begun and not ended. In the scheduler: in one of its states. What lies between is being read, "
        "or is computed to its end and not taken by its reader.",
        "short",
        [
            style.query(promql.level(promql.engine("inflight_requests")), "in the server"),
            style.query(promql.level(promql.engine("requests")), "in the scheduler"),
        ],
        no_value=_NO_ENGINE,
    )


def oldest_waiting() -> Any:
    return style.lines(
        "Oldest waiting request",
        "Age of the request of each class that has waited longest for its admission: a class that starves climbs while "
        "others do not. Above the TTFT limit it has missed already.",
        "s",
        [
            style.query(promql.highest(promql.engine("oldest_waiting_seconds"), ("class",)), "oldest {{class}}"),
            style.query(promql.limit("ttft"), "limit {{class}}"),
        ],
        no_value=_NO_ENGINE,
    )


def kv_blocks() -> Any:
    return style.lines(
        "KV blocks",
        "Blocks that hold tokens (resident), are promised to admitted work (reserved), or neither (free).",
        "short",
        [style.query(promql.level(promql.engine("kv_blocks"), ("kind",)), "{{kind}}")],
        no_value=_NO_ENGINE,
    )


def kv_held_and_cached() -> Any:
    return style.lines(
        "KV held by paused requests, and cached",
        "Paused: resident blocks of readers that do not read. Cached: held by nobody, with a prefix to reuse.",
        "short",
        [
            style.query(promql.level(promql.engine("kv_blocks_paused")), "paused"),
            style.query(promql.level(promql.engine("kv_blocks_cached")), "cached"),
        ],
        no_value=_NO_ENGINE,
    )


def preemptions() -> Any:
    return style.lines(
        "Preemptions",
        "Sequences a second whose KV was taken back before they ended; what is recomputed lies inside a gap.",
        "ops",
        [style.query(promql.per_second(promql.engine("preemptions_total")), "preemptions")],
        no_value=_NO_ENGINE,
    )


def admissions() -> Any:
    admitted = promql.engine("admissions_total")
    return style.lines(
        "Admission decisions",
        "Decisions a second by verdict and reason.",
        "ops",
        [style.query(promql.per_second(admitted, ("verdict", "reason")), "{{verdict}} {{reason}}")],
        no_value=_NO_ENGINE,
    )


def first_token_error() -> Any:
    targets = [
        style.query(promql.quantile(q, promql.engine(f"first_token_{side}_seconds")), f"{side} p{q * 100:.0f}")
        for side in ("late", "early")
        for q in (0.99, 0.5)
    ]
    text = (
        "First token against the moment that admission predicted, late and early apart: their quantiles do not cancel."
    )
    return style.lines("First token against its prediction", text, "s", targets, no_value="no predictions")


def first_tokens_late() -> Any:
    late, early = (
        promql.observed_per_second(promql.engine(f"first_token_{side}_seconds")) for side in ("late", "early")
    )
    return style.lines(
        "First tokens later than predicted",
        "Share of predictions that the first token came after. Half of them is an even-handed prediction.",
        "percentunit",
        [style.query(promql.ratio(late, f"({late} + {early})"), "late")],
        no_value="no predictions",
    )


def cost_error() -> Any:
    return style.lines(
        "Error of the step cost model",
        "Predicted step time against the real one, relative, at quantiles of recent steps. No slack is surer.",
        "percentunit",
        [style.query(promql.highest(promql.engine("cost_error_ratio"), ("q",)), "quantile {{q}}")],
        no_value="no cost model",
    )


def lengths_age() -> Any:
    return style.lines(
        "Age of the length table",
        "Since the survival table that policies read was written. An old table describes other traffic.",
        "s",
        [style.query(promql.highest(promql.engine("lengths_age_seconds")), "age")],
        no_value="no length table",
    )


def ended() -> Any:
    return style.lines(
        "Requests that came to the engine and left it",
        "By outcome, as the engine saw it. A request that completed here can still have been cut off on its way. "
        "Offered lastingly above the sum of the others: requests pile up.",
        "reqps",
        [
            style.query(promql.per_second(promql.engine("requests_offered_total")), "offered"),
            style.query(promql.per_second(promql.engine("requests_ended_total"), ("outcome",)), "{{outcome}}"),
        ],
        no_value=_NO_ENGINE,
    )


def cancel_cleanup() -> Any:
    text = "From the abort seen by the scheduler to the last KV block free: work done for nobody."
    return _quantiles("Cancel cleanup p50 and p99", text, promql.engine("cancel_cleanup_seconds"))


def pauses() -> Any:
    return style.lines(
        "Pauses by flow control",
        "Requests a second that flow control took out of the batch, by reason.",
        "ops",
        [style.query(promql.per_second(promql.engine("pauses_total"), ("reason",)), "{{reason}}")],
        no_value=_NO_ENGINE,
    )


def pause_length() -> Any:
    series = promql.engine("pause_seconds")
    return style.lines(
        "Pause p99 by how it ended",
        "From leaving the batch to coming back (resumed), being cut off (slow_reader), or ending otherwise.",
        "s",
        [style.query(promql.quantile(0.99, series, ("end",)), "{{end}}")],
        no_value=_NO_ENGINE,
    )


def undelivered() -> Any:
    return style.lines(
        "Undelivered tokens",
        "Tokens computed and not yet written to a socket. Growth means that readers are slower than the engine.",
        "short",
        [style.query(promql.level(promql.engine("undelivered_tokens")), "undelivered")],
        no_value=_NO_ENGINE,
    )


def tokens() -> Any:
    return style.lines(
        "Tokens run and reused",
        "Prompt tokens prefilled or taken from the prefix cache instead, output tokens computed, and what preemptions "
        "made run again, a second.",
        "short",
        [
            style.query(promql.per_second(promql.engine("prompt_tokens_total")), "prompt"),
            style.query(promql.per_second(promql.engine("prefix_reused_tokens_total")), "reused"),
            style.query(promql.per_second(promql.engine("output_tokens_total")), "output"),
            style.query(promql.per_second(promql.engine("recomputed_tokens_total")), "run again"),
        ],
        no_value=_NO_ENGINE,
    )


def service_by_tenant() -> Any:
    service = promql.engine("service_units_total").filtered()
    return style.lines(
        "Service by tenant",
        "Service units a second by tenant. Unequal shares are unfair only while all of them have work waiting.",
        "short",
        [style.query(promql.per_second(service, ("tenant",)), "{{tenant}}")],
        no_value=_NO_ENGINE,
        stacked=True,
    )


def modelled_flops() -> Any:
    parts = promql.engine("work_flops_total")
    return style.lines(
        "Modelled arithmetic",
        "Floating point operations a second that the model's shape implies for the work done, in total and by part.",
        "flops",
        [
            style.query(promql.per_second(promql.engine("modelled_flops_total")), "total"),
            style.query(promql.per_second(parts, ("phase", "part")), "{{phase}} {{part}}"),
            style.query(promql.level(promql.engine("ceiling_flops_per_second")), "limit measured"),
        ],
        no_value=_NO_ENGINE,
    )


def modelled_bytes() -> Any:
    return style.lines(
        "Modelled memory traffic",
        "Bytes a second that the model's shape implies were moved for the work done, in total and by part.",
        "Bps",
        [
            style.query(promql.per_second(promql.engine("modelled_bytes_total")), "total"),
            style.query(promql.per_second(promql.engine("work_bytes_total"), ("part",)), "{{part}}"),
            style.query(promql.level(promql.engine("ceiling_bytes_per_second"), ("part",)), "limit {{part}} measured"),
        ],
        no_value=_NO_ENGINE,
    )


# Part of the ceilings' name → the parts of the work that it bounds.
_BOUNDED = {"weights": "weights", "kv": "kv_read|kv_write", "transfer": "transfer"}


def work_against_ceilings() -> Any:
    flops = promql.per_second(promql.engine("work_flops_total"))
    targets = [
        style.query(promql.ratio(flops, promql.level(promql.engine("ceiling_flops_per_second"))), "arithmetic"),
    ]
    for bound, parts in _BOUNDED.items():
        moved = promql.per_second(promql.engine("work_bytes_total").where("part", parts, "=~"))
        ceiling = promql.level(promql.engine("ceiling_bytes_per_second").where("part", bound))
        targets.append(style.query(promql.ratio(moved, ceiling), bound))
    return style.lines(
        "Work against measured ceilings",
        "Share of time that the work done would need at the machine's measured speed, idle time included. The largest "
        "is what binds; far from 1 while requests wait, time goes elsewhere.",
        "percentunit",
        targets,
        no_value="not calibrated",
    )
