"""How the metrics of other people's engines are called, and which of our families each one feeds.

The families stand in the catalogue as `sloscope_upstream_engine_…`: neither a receipt nor our own engine's word. Names
come and go with releases, so a row lists them newest first and the first one that is exposed counts: an engine in
transition exposes both, with the same samples. Rows of one kind and family add up.
"""

# ruff: noqa: E501 - a table: one source a line

from collections.abc import Iterator
from typing import NamedTuple

from sloscope import catalogue
from sloscope.catalogue import Metric

FAMILY_PREFIX = f"{catalogue.PREFIX}upstream_engine_"
MODEL_LABELS = ("model_name", "model")
# Where no sample of a kind has such a label, the first sample of this name says it for all of them.
MODEL_TOLD_BY = {"sloscope": "sloscope_engine_info"}
# Ranks that run one model together say the same thing of the same requests; the first one that speaks is listened to.
# A data-parallel rank has requests of its own, so `dp_rank` and vLLM's `engine` are not among them: those add up.
REPLICA_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")


class Source(NamedTuple):
    kind: str
    family: str  # catalogue name without FAMILY_PREFIX
    names: tuple[str, ...]  # newest first; of a histogram without suffix, of a counter with or without `_total`
    note: str = ""  # where the meaning is not the family's own
    reason_label: str = ""  # whose values become `reason`
    reason: str = ""  # `reason` where no label says it
    only: tuple[str, tuple[str, ...]] = ("", ())  # (label, values): the other series of the name do not count
    share: bool = False  # what `only` selects over all series of the name

    @property
    def metric(self) -> Metric:
        return catalogue.get(FAMILY_PREFIX + self.family)

    def spellings(self) -> Iterator[str]:
        """Sample names to look for, of a histogram its family name. A counter gains `_total` on some expositions."""
        for name in self.names:
            if self.metric.kind == "counter" and not name.endswith(("_total", "_sum")):
                yield f"{name}_total"
            yield name


_FRONT_END = "ends when its front end sees the token, not when the token is computed, sent or received"
_PER_FINISHED = "counted when a request ends, so running requests are not in it"

SOURCES: tuple[Source, ...] = (
    Source("vllm", "requests_running", ("vllm:num_requests_running",)),
    Source("vllm", "requests_waiting", ("vllm:num_requests_waiting",), "a preempted request waits again"),
    Source("vllm", "kv_usage_ratio", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), "a share of 1, whatever the name says"),
    Source("vllm", "ttft_seconds", ("vllm:time_to_first_token_seconds",), f"begins at its front end; {_FRONT_END}"),
    Source("vllm", "token_interval_seconds", ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"), "one sample an engine output, which with speculative decoding brings several tokens"),
    Source("vllm", "queue_seconds", ("vllm:request_queue_time_seconds",), _PER_FINISHED),
    Source("vllm", "prefill_seconds", ("vllm:request_prefill_time_seconds",), _PER_FINISHED),
    Source("vllm", "e2e_seconds", ("vllm:e2e_request_latency_seconds",), f"begins and ends at its front end; {_PER_FINISHED}"),
    Source("vllm", "prompt_tokens_total", ("vllm:prompt_tokens",)),
    Source("vllm", "generation_tokens_total", ("vllm:generation_tokens",)),
    Source("vllm", "preemptions_total", ("vllm:num_preemptions",)),
    Source("vllm", "requests_total", ("vllm:request_success",), "an aborted request is in it too, with reason abort", reason_label="finished_reason"),
    Source("vllm", "prefix_queried_tokens_total", ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")),
    Source("vllm", "prefix_reused_tokens_total", ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")),
    Source("sglang", "requests_running", ("sglang:num_running_reqs",), "as of its last log interval"),
    Source("sglang", "requests_waiting", ("sglang:num_queue_reqs",), "as of its last log interval"),
    Source("sglang", "kv_usage_ratio", ("sglang:token_usage",), "as of its last log interval"),
    Source("sglang", "ttft_seconds", ("sglang:time_to_first_token_seconds",), f"nothing below its first edge, 0.1 s in newer releases, can be told apart; {_FRONT_END}"),
    Source("sglang", "token_interval_seconds", ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"), "a gap divided by the tokens that it brought, one sample a token"),
    Source("sglang", "queue_seconds", ("sglang:queue_time_seconds",)),
    Source("sglang", "e2e_seconds", ("sglang:e2e_request_latency_seconds",), f"begins and ends at its front end; {_PER_FINISHED}"),
    Source("sglang", "prompt_tokens_total", ("sglang:prompt_tokens_total",)),
    Source("sglang", "generation_tokens_total", ("sglang:generation_tokens_total",)),
    Source("sglang", "preemptions_total", ("sglang:num_retracted_requests_total",), "retracted, in its words"),
    Source("sglang", "requests_total", ("sglang:num_requests_total",), "not by reason", reason="any"),
    Source("sglang", "prefix_queried_tokens_total", ("sglang:prompt_tokens_total",), "every prompt token is looked up"),
    Source("sglang", "prefix_reused_tokens_total", ("sglang:cached_tokens_total",)),
    Source("tgi", "requests_running", ("tgi_batch_current_size",)),
    Source("tgi", "requests_waiting", ("tgi_queue_size",)),
    Source("tgi", "queue_seconds", ("tgi_request_queue_duration",), _PER_FINISHED),
    Source("tgi", "e2e_seconds", ("tgi_request_duration",), f"of successful requests only; {_PER_FINISHED}"),
    Source("tgi", "prompt_tokens_total", ("tgi_request_input_length_sum",), "the sum of a histogram"),
    Source("tgi", "generation_tokens_total", ("tgi_request_generated_tokens_sum",), f"the sum of a histogram; {_PER_FINISHED}"),
    Source("tgi", "requests_total", ("tgi_request_success",), reason="success"),
    Source("tgi", "requests_total", ("tgi_request_failure",), reason_label="err"),
    Source("llamacpp", "requests_running", ("llamacpp:requests_processing",)),
    Source("llamacpp", "requests_waiting", ("llamacpp:requests_deferred",)),
    Source("llamacpp", "kv_usage_ratio", ("llamacpp:kv_cache_usage_ratio",), "older releases only"),
    Source("llamacpp", "prompt_tokens_total", ("llamacpp:prompt_tokens_total",), "run, without those that its cache gave"),
    Source("llamacpp", "generation_tokens_total", ("llamacpp:tokens_predicted_total",)),
    Source("sloscope", "requests_running", ("sloscope_engine_requests",), only=("state", ("PREFILL", "DECODE"))),
    Source("sloscope", "requests_waiting", ("sloscope_engine_requests",), "a paused request neither runs nor waits", only=("state", ("WAITING", "PREEMPTED"))),
    Source("sloscope", "kv_usage_ratio", ("sloscope_engine_kv_blocks",), "resident blocks over all", only=("kind", ("resident",)), share=True),
    Source("sloscope", "ttft_seconds", ("sloscope_engine_ttft_seconds",), "ends when the token is computed"),
    Source("sloscope", "token_interval_seconds", ("sloscope_engine_token_interval_seconds",)),
    Source("sloscope", "queue_seconds", ("sloscope_engine_queue_seconds",)),
    Source("sloscope", "prefill_seconds", ("sloscope_engine_prefill_seconds",)),
    Source("sloscope", "prompt_tokens_total", ("sloscope_engine_prompt_tokens_total",), "run, each once"),
    Source("sloscope", "prompt_tokens_total", ("sloscope_engine_prefix_reused_tokens_total",), "and reused"),
    Source("sloscope", "generation_tokens_total", ("sloscope_engine_output_tokens_total",)),
    Source("sloscope", "preemptions_total", ("sloscope_engine_preemptions_total",)),
    Source("sloscope", "requests_total", ("sloscope_engine_requests_ended_total",), reason_label="outcome"),
    Source("sloscope", "prefix_queried_tokens_total", ("sloscope_engine_prompt_tokens_total",), "run"),
    Source("sloscope", "prefix_queried_tokens_total", ("sloscope_engine_prefix_reused_tokens_total",), "and reused"),
    Source("sloscope", "prefix_reused_tokens_total", ("sloscope_engine_prefix_reused_tokens_total",)),
)  # fmt: skip
KINDS = tuple(dict.fromkeys(source.kind for source in SOURCES))

_MEAN = "one mean a request or since the start: a pause inside an answer does not show in it"
_WORK = "a distribution of lengths or parameters; the journal has them request by request"
_CACHE = "another cache than the KV prefix"
_LIFE = "about KV blocks, not about requests"
_ROUTER = "a router's, not an engine's: averages as gauges, in the name space of the engine"
_DERIVED = "a rate or share that the counters give for any window"
_PHASE = "a part of the time that no other engine tells in the same way"
_ALSO = "may be among the requests that are counted already, so that a sum would count them twice"

# Known names that feed no family, each with the reason, so that a name that is in neither table stands out as new.
NOT_MAPPED: dict[str, str] = {
    "vllm:request_time_per_output_token_seconds": _MEAN,
    "vllm:request_inference_time_seconds": _PHASE,
    "vllm:request_decode_time_seconds": _PHASE,
    "vllm:request_prompt_tokens": _WORK,
    "vllm:request_generation_tokens": _WORK,
    "vllm:request_max_num_generation_tokens": _WORK,
    "vllm:request_params_n": _WORK,
    "vllm:request_params_max_tokens": _WORK,
    "vllm:request_prefill_kv_computed_tokens": _WORK,
    "vllm:iteration_tokens_total": "a histogram of tokens a step, in spite of its name",
    "vllm:prompt_tokens_cached": "the hits of the prefix cache once more, those of other caches included",
    "vllm:prompt_tokens_by_source": "the prompt tokens once more, by source",
    "vllm:external_prefix_cache_queries": _CACHE,
    "vllm:external_prefix_cache_hits": _CACHE,
    "vllm:mm_cache_queries": _CACHE,
    "vllm:mm_cache_hits": _CACHE,
    "vllm:cpu_cache_usage_perc": _CACHE,
    "vllm:gpu_prefix_cache_hit_rate": _DERIVED,
    "vllm:num_requests_swapped": "gone with the engine that swapped",
    "vllm:corrupted_requests": "a request with NaN in its logits may end in any way",
    "vllm:kv_block_lifetime_seconds": _LIFE,
    "vllm:kv_block_idle_before_evict_seconds": _LIFE,
    "vllm:kv_block_reuse_gap_seconds": _LIFE,
    "vllm:lora_requests_info": "labels, not a number",
    "vllm:cache_config_info": "labels, not a number",
    "vllm:spec_decode_num_drafts": "of one way to decode",
    "vllm:spec_decode_num_draft_tokens": "of one way to decode",
    "vllm:spec_decode_num_accepted_tokens": "of one way to decode",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "of one way to decode",
    "vllm:current_qps": _ROUTER,
    "vllm:avg_ttft": _ROUTER,
    "vllm:avg_itl": _ROUTER,
    "vllm:avg_latency": _ROUTER,
    "vllm:avg_decoding_length": _ROUTER,
    "vllm:num_incoming_requests_total": _ROUTER,
    "vllm:healthy_pods_total": _ROUTER,
    "sglang:cache_hit_rate": _DERIVED,
    "sglang:gen_throughput": _DERIVED,
    "sglang:utilization": _DERIVED,
    "sglang:full_token_usage": "the usage of one of several pools",
    "sglang:num_used_tokens": "the numerator of token_usage",
    "sglang:kv_used_tokens": "the numerator of token_usage",
    "sglang:kv_available_tokens": "the rest of token_usage",
    "sglang:kv_evictable_tokens": "the rest of token_usage",
    "sglang:num_retracted_reqs": "a gauge of the last retraction; newer releases count them",
    "sglang:num_paused_reqs": "paused by hand",
    "sglang:num_aborted_requests_total": _ALSO,
    "sglang:num_so_requests_total": _ALSO,
    "sglang:realtime_tokens_total": "the tokens once more, by mode",
    "sglang:spec_accept_length": "of one way to decode",
    "sglang:func_latency_seconds": "of its own functions",
    "sglang:per_stage_req_latency_seconds": _PHASE,
    "sglang:prompt_tokens_histogram": _WORK,
    "sglang:uncached_prompt_tokens_histogram": _WORK,
    "sglang:generation_tokens_histogram": _WORK,
    "tgi_request_count": "requests that came; the families count those that ended",
    "tgi_request_mean_time_per_token_duration": _MEAN,
    "tgi_request_inference_duration": _PHASE,
    "tgi_request_validation_duration": _PHASE,
    "tgi_request_max_new_tokens": _WORK,
    "tgi_request_skipped_tokens": "of one way to decode",
    "tgi_batch_inference_duration": "of batches, not of requests",
    "tgi_batch_forward_duration": "of batches, not of requests",
    "tgi_batch_decode_duration": "of batches, not of requests",
    "tgi_batch_filter_duration": "of batches, not of requests",
    "tgi_batch_concat_duration": "of batches, not of requests",
    "tgi_batch_next_size": "of batches, not of requests",
    "tgi_batch_current_max_tokens": "of batches, not of requests",
    "llamacpp:prompt_seconds_total": _MEAN,
    "llamacpp:tokens_predicted_seconds_total": _MEAN,
    "llamacpp:prompt_tokens_seconds": _MEAN,
    "llamacpp:predicted_tokens_seconds": _MEAN,
    "llamacpp:kv_cache_tokens": "the numerator of kv_cache_usage_ratio",
    "llamacpp:n_tokens_max": "a highest value since the start",
    "llamacpp:n_decode_total": "of batches, not of requests",
    "llamacpp:n_busy_slots_per_decode": "of batches, not of requests",
}  # fmt: skip


def markdown() -> str:
    """The reference page of both tables."""
    lines = [
        "# Metrics of upstream engines",
        "",
        "Generated from `sloscope/foreign_names.py` by `make generate`; do not edit.",
        "",
        f"What `sloscope sidecar --engine-metrics` understands, and which `{FAMILY_PREFIX}…` family it feeds. What it means "
        "and what is not comparable: [engine metrics beside ours](../sidecar.md#engine-metrics-beside-ours).",
        "",
        f"| family | {' | '.join(KINDS)} |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    told = {(source.kind, source.metric.name) for source in SOURCES}
    for metric in families():
        cells = ("yes" if (kind, metric.name) in told else "-" for kind in KINDS)
        lines.append(f"| `{metric.name.removeprefix(FAMILY_PREFIX)}` | {' | '.join(cells)} |")
    lines += ["", "Of several names the first one that is exposed counts. Rows of one engine and family add up.", ""]
    for kind in KINDS:
        lines += [f"## {kind}", "", "| family | read from | note |", "|---|---|---|"]
        mine = (source for source in SOURCES if source.kind == kind)
        lines += [f"| `{source.family}` | {_read_from(source)} | {source.note or '-'} |" for source in mine]
        lines.append("")
    lines += ["## Known and not mapped", "", "| name | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in NOT_MAPPED.items()]
    return "\n".join(lines) + "\n"


def families() -> list[Metric]:
    """The families that sources feed, in the catalogue's order."""
    return [metric for metric in catalogue.METRICS if metric.measured_at == "upstream"]


def _read_from(source: Source) -> str:
    text = ", else ".join(f"`{name}`" for name in source.names)
    label, values = source.only
    if label:
        text += f" with {label} {' or '.join(values)}"
    if source.share:
        text += f" over all {label}s"
    if source.reason_label:
        text += f", reason from `{source.reason_label}`"
    if source.reason:
        text += f", reason `{source.reason}`"
    return text
