"""What engines answer at /metrics, in their own spelling. Small numbers, so that sums can be worked by hand."""

from collections.abc import Sequence

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def histogram(name: str, labels: str, edges: Sequence[str], counts: Sequence[int], total: float) -> str:
    """As prometheus_client writes it: buckets with `le` among the sorted labels, then count and sum."""
    pairs = zip((*edges, "+Inf"), counts, strict=True)
    rows = [f'{name}_bucket{{{labels},le="{edge}"}} {count:.1f}' for edge, count in pairs]
    rows += [f"{name}_count{{{labels}}} {counts[-1]:.1f}", f"{name}_sum{{{labels}}} {total}"]
    return f"# HELP {name} Histogram.\n# TYPE {name} histogram\n" + "\n".join(rows) + "\n"


def vllm(
    engine: str = "0",
    kv: str = "vllm:kv_cache_usage_perc",
    interval: str = "vllm:inter_token_latency_seconds",
    scale: int = 1,
) -> str:
    """One engine of vLLM. Newer names by default."""
    labels = f'engine="{engine}",model_name="{MODEL}"'

    def sample(name: str, value: float, kind: str = "counter", more: str = "") -> str:
        return f"# HELP {name} Text.\n# TYPE {name} {kind}\n{name}{{{labels}{more}}} {value}\n"

    return (
        "# HELP python_gc_objects_collected_total Objects collected during gc\n"
        "# TYPE python_gc_objects_collected_total counter\n"
        'python_gc_objects_collected_total{generation="0"} 9763.0\n'
        + sample("vllm:num_requests_running", 3.0, "gauge")
        + sample("vllm:num_requests_waiting", 2.0, "gauge")
        + sample(kv, min(1.0, 0.25 * scale), "gauge")
        + sample("vllm:prefix_cache_queries_total", 400.0 * scale)
        + sample("vllm:prefix_cache_queries_created", 1.7463e09, "gauge")
        + sample("vllm:prefix_cache_hits_total", 100.0 * scale)
        + sample("vllm:num_preemptions_total", 4.0 * scale)
        + sample("vllm:prompt_tokens_total", 400.0 * scale)
        + sample("vllm:generation_tokens_total", 90.0 * scale)
        + sample("vllm:request_success_total", 7.0 * scale, more=',finished_reason="stop"')
        + sample("vllm:request_success_total", 1.0 * scale, more=',finished_reason="abort"')
        + sample(
            "vllm:cache_config_info", 1.0, "gauge", ',block_size="16",cache_dtype="auto",gpu_memory_utilization="0.9"'
        )
        + histogram("vllm:iteration_tokens_total", labels, ("1.0", "8.0"), (1, 5, 9), 120.0)
        + histogram(
            "vllm:time_to_first_token_seconds", labels, ("0.1", "0.25"), (2 * scale, 6 * scale, 8 * scale), 1.5 * scale
        )
        + histogram(interval, labels, ("0.01", "0.025"), (0, 80 * scale, 82 * scale), 1.64 * scale)
        + histogram("vllm:request_queue_time_seconds", labels, ("0.3",), (8 * scale, 8 * scale), 0.2 * scale)
        + histogram("vllm:request_prefill_time_seconds", labels, ("0.3",), (8 * scale, 8 * scale), 1.2 * scale)
        + histogram("vllm:e2e_request_latency_seconds", labels, ("0.3", "0.5"), (0, 7 * scale, 8 * scale), 3.3 * scale)
    )


SGLANG = (
    "".join(
        f"# TYPE sglang:{name} gauge\n"
        f'sglang:{name}{{engine_type="unified",model_name="{MODEL}",pp_rank="0",tp_rank="{rank}"}} {value}\n'
        for name, value in (("num_running_reqs", 5.0), ("num_queue_reqs", 6.0), ("token_usage", 0.28))
        for rank in (0, 1)
    )
    + "".join(
        f'sglang:{name}{{is_streaming="{streaming}",model_name="{MODEL}"}} {value}\n'
        for name, value in (
            ("prompt_tokens_total", 300.0),
            ("generation_tokens_total", 200.0),
            ("num_requests_total", 10),
        )
        for streaming in ("true", "false")
    )
    + f'sglang:cached_tokens_total{{cache_source="device",model_name="{MODEL}"}} 120.0\n'
    + histogram("sglang:time_to_first_token_seconds", f'model_name="{MODEL}"', ("0.1", "0.2"), (1, 2, 4), 0.9)
    + histogram("sglang:inter_token_latency_seconds", f'model_name="{MODEL}"', ("0.002",), (10, 40), 0.5)
)

LLAMACPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 479209
# HELP llamacpp:prompt_seconds_total Prompt process time
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 145.713
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 123063
# HELP llamacpp:predicted_tokens_seconds Average generation throughput in tokens/s.
# TYPE llamacpp:predicted_tokens_seconds gauge
llamacpp:predicted_tokens_seconds nan
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 4
"""

TGI = """\
# TYPE tgi_request_count counter
tgi_request_count 42

# TYPE tgi_request_success counter
tgi_request_success 40

# TYPE tgi_request_failure counter
tgi_request_failure{err="overloaded"} 2
tgi_request_failure{err="validation"} 1

# TYPE tgi_queue_size gauge
tgi_queue_size 3

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8

# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="2048"} 40
tgi_request_generated_tokens_bucket{le="+Inf"} 40
tgi_request_generated_tokens_sum 5000
tgi_request_generated_tokens_count 40

# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_bucket{le="0.00015000000000000001"} 30
tgi_request_queue_duration_bucket{le="0.00022500000000000002"} 39
tgi_request_queue_duration_bucket{le="+Inf"} 40
tgi_request_queue_duration_sum 0.009
tgi_request_queue_duration_count 40
"""
