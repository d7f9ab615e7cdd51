"""Latency as it was received, at the observer that the dashboard's variable names."""

from typing import Any

from dashboards import promql, style

_CLASS = ("class",)
_HIDDEN = (
    "Quantiles are interpolated inside a bucket and end at its last edge. Dashed: the declared limit, a bucket edge."
)


def _quantiles(title: str, description: str, family: str, limit: str = "") -> Any:
    series = promql.receipt(family).filtered()
    targets = [
        style.query(promql.quantile(0.99, series, _CLASS), "p99 {{class}}"),
        style.query(promql.quantile(0.5, series, _CLASS), "p50 {{class}}"),
    ]
    if limit:
        targets.append(style.query(promql.limit(limit), "limit {{class}}"))
    return style.lines(title, f"{description} {_HIDDEN}", "s", targets)


def ttft() -> Any:
    text = "From send to the first output received; one request in a hundred is slower than p99."
    return _quantiles("TTFT p50 and p99", text, "ttft_seconds", "ttft")


def ttft_heatmap() -> Any:
    return style.distribution(
        "TTFT distribution",
        "First outputs by their TTFT. Two bands mean two kinds of requests, which no quantile shows.",
        "s",
        promql.buckets(promql.receipt("ttft_seconds").filtered()),
    )


def ttft_visible() -> Any:
    text = "From send to the first output that is not reasoning: what a person who cannot see the reasoning waits for."
    return _quantiles("Visible TTFT p50 and p99", text, "ttft_visible_seconds", "ttft_visible")


def largest_gap() -> Any:
    text = "The largest pause inside each answer, one sample a request. Averages hide it: a single freeze is felt."
    return _quantiles("Largest gap p50 and p99", text, "itl_max_seconds", "itl_max")


def largest_gap_heatmap() -> Any:
    return style.distribution(
        "Largest gap distribution",
        "Requests by the largest pause inside their answer.",
        "s",
        promql.buckets(promql.receipt("itl_max_seconds").filtered()),
    )


def stream_chunk_gap() -> Any:
    text = "Between consecutive output events of one choice, which is all that a proxy can see."
    return _quantiles("Gap between stream chunks p50 and p99", text, "icl_seconds")


def token_gap() -> Any:
    text = "Between consecutive tokens, only where token counts are known; k tokens in one event are k-1 gaps of zero."
    return _quantiles("Gap between tokens p50 and p99", text, "itl_seconds")


def tpot() -> Any:
    text = "Mean time per output token after the first, one sample a request. A good mean can hide a long pause."
    return _quantiles("TPOT p50 and p99", text, "tpot_seconds", "tpot")


def e2e() -> Any:
    text = "From send to the last output received. It grows with the length of the answer."
    return _quantiles("End to end p50 and p99", text, "e2e_seconds", "e2e")


def beyond_last_bucket() -> Any:
    families = ("ttft", "ttft_visible", "itl_max", "tpot", "e2e")
    return style.lines(
        "Share beyond the last bucket",
        "Samples above the last finite bucket edge. Above 1 % a p99 of that family only says that it is larger.",
        "percentunit",
        [style.query(promql.beyond_last_edge(promql.receipt(f"{name}_seconds").filtered()), name) for name in families],
    )
