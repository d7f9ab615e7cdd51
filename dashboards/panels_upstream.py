"""What an upstream's engine says of itself, where the sidecar polls its /metrics, beside what was received."""

from typing import Any

from dashboards import promql, style

_EACH = ("upstream", "kind")
_NAMED = "{{upstream}} {{kind}}"
_NONE = "no engine polled"
_RECEIVERS = ("sidecar", "client")
_OWN_WORD = (
    "The engine's own word with its own edges and its own idea of where a time begins and ends; see the sidecar's page "
    "for what is not comparable."
)


def _beside(title: str, description: str, own: str, received: str) -> Any:
    targets = [style.query(promql.quantile(0.99, promql.upstream_engine(own), _EACH), _NAMED)]
    targets += [style.query(promql.quantile(0.99, promql.receipt(received, at).filtered()), at) for at in _RECEIVERS]
    return style.lines(title, f"{description} {_OWN_WORD}", "s", targets, no_value=_NONE)


def _levels(title: str, description: str, unit: str, *named: tuple[str, str]) -> Any:
    targets = [
        style.query(promql.level(promql.upstream_engine(name), _EACH), f"{legend} {_NAMED}") for name, legend in named
    ]
    return style.lines(title, description, unit, targets, no_value=_NONE)


def _rates(title: str, description: str, unit: str, *named: tuple[str, tuple[str, ...], str]) -> Any:
    targets = [
        style.query(promql.per_second(promql.upstream_engine(name), (*_EACH, *by)), f"{legend} {_NAMED}")
        for name, by, legend in named
    ]
    return style.lines(title, description, unit, targets, no_value=_NONE)


def ttft() -> Any:
    text = "First token by the upstream's engine beside first output received. Engine low, sidecar high: on the way."
    return _beside("TTFT p99: upstream's engine, sidecar, client", text, "ttft_seconds", "ttft_seconds")


def token_interval() -> Any:
    text = "Between tokens by the upstream's engine beside the gap between output events received."
    return _beside("Token interval p99: upstream's engine, receipts", text, "token_interval_seconds", "icl_seconds")


def e2e() -> Any:
    text = "A whole request by the upstream's engine beside the same as received."
    return _beside("End to end p99: upstream's engine, receipts", text, "e2e_seconds", "e2e_seconds")


def queue_and_prefill() -> Any:
    targets = [
        style.query(promql.quantile(0.99, promql.upstream_engine(f"{link}_seconds"), _EACH), f"{link} {_NAMED}")
        for link in ("queue", "prefill")
    ]
    return style.lines("Queue and prefill p99 of the upstream's engine", _OWN_WORD, "s", targets, no_value=_NONE)


def beyond_last_edge() -> Any:
    targets = [
        style.query(promql.beyond_last_edge(promql.upstream_engine(f"{name}_seconds"), _EACH), f"{name} {_NAMED}")
        for name in ("ttft", "token_interval", "e2e")
    ]
    return style.lines(
        "Beyond the last edge of the upstream's engine",
        "Share of its samples that no quantile can see, because they lie above its last finite bucket edge. Above 1 %, "
        "its p99 is that edge whatever happens.",
        "percentunit",
        targets,
        no_value=_NONE,
    )


def requests() -> Any:
    return _levels(
        "Running and waiting at the upstream's engine",
        "Requests in its batch and before it, as of the last poll.",
        "short",
        ("requests_running", "running"),
        ("requests_waiting", "waiting"),
    )


def kv_usage() -> Any:
    usage = promql.upstream_engine("kv_usage_ratio")
    return style.lines(
        "KV cache of the upstream's engine",
        "Share in use, of several ranks the fullest. Near 1 while requests wait: room for KV is what they wait for.",
        "percentunit",
        [style.query(promql.highest(usage, _EACH), _NAMED)],
        no_value=_NONE,
    )


def tokens() -> Any:
    return _rates(
        "Tokens of the upstream's engine",
        "Prompt and output tokens a second.",
        "short",
        ("prompt_tokens_total", (), "prompt"),
        ("generation_tokens_total", (), "output"),
    )


def prefix_reuse() -> Any:
    found, looked_for = (
        promql.per_second(promql.upstream_engine(f"prefix_{what}_tokens_total"), _EACH)
        for what in ("reused", "queried")
    )
    return style.lines(
        "Prefix cache of the upstream's engine",
        "Share of the tokens looked for that were found.",
        "percentunit",
        [style.query(promql.ratio(found, looked_for), _NAMED)],
        no_value=_NONE,
    )


def preemptions() -> Any:
    return _rates(
        "Preemptions of the upstream's engine",
        "Requests a second whose KV was taken back before they ended.",
        "ops",
        ("preemptions_total", (), "preempted"),
    )


def ended() -> Any:
    return _rates(
        "Requests that ended at the upstream's engine",
        "Requests a second by the engine's own reason. A good end there can still be a cut answer here.",
        "reqps",
        ("requests_total", ("reason",), "{{reason}}"),
    )


def polled() -> Any:
    up = promql.upstream_engine("up")
    return style.lines(
        "Engines polled",
        "1 if the engine's metrics came and were understood at the last poll. At 0 it has no series here.",
        "none",
        [style.query(promql.lowest(up, ("upstream",)), "{{upstream}}")],
        no_value=_NONE,
    )


def poll_time() -> Any:
    took = promql.upstream_engine("scrape_seconds")
    return style.lines(
        "Time to poll an engine",
        "From connecting to having read the last answer.",
        "s",
        [style.query(promql.highest(took, ("upstream",)), "{{upstream}}")],
        no_value=_NONE,
    )
