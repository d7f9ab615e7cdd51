"""Engine against receipt: the same obligation by the engine's stamps and by the receivers'."""

from typing import Any

from dashboards import layout, panels_engine, panels_recorder, panels_sql, panels_upstream

UID = "sloscope-engine-against-receipt"


def dashboard() -> Any:
    return layout.dashboard(
        UID,
        "Engine against receipt",
        "Which side of the socket a late token comes from: the engine's own stamps beside those of sidecar and client.",
        (
            layout.Row(
                "First token",
                (panels_engine.ttft_p99, panels_engine.ttft_p50, panels_engine.queue, panels_engine.prefill),
            ),
            layout.Row(
                "Between tokens",
                (panels_engine.gap_p99, panels_engine.largest_gap, panels_engine.decode_step, panels_engine.step),
            ),
            layout.Row(
                "On the way",
                (
                    panels_engine.added_by_sidecar,
                    panels_engine.undelivered,
                    panels_recorder.upstreams_up,
                    panels_recorder.upstreams_in_flight,
                    panels_recorder.upstreams_outstanding,
                ),
            ),
            layout.Row(
                "By the word of the upstream's engine",
                (
                    panels_upstream.ttft,
                    panels_upstream.token_interval,
                    panels_upstream.e2e,
                    panels_upstream.beyond_last_edge,
                    panels_upstream.queue_and_prefill,
                    panels_upstream.requests,
                    panels_upstream.kv_usage,
                    panels_upstream.tokens,
                    panels_upstream.prefix_reuse,
                    panels_upstream.preemptions,
                    panels_upstream.ended,
                    panels_upstream.polled,
                    panels_upstream.poll_time,
                ),
            ),
            layout.Row(
                "Inside the engine",
                (
                    panels_engine.states,
                    panels_engine.in_flight,
                    panels_engine.oldest_waiting,
                    panels_engine.kv_blocks,
                    panels_engine.kv_held_and_cached,
                    panels_engine.preemptions,
                    panels_engine.service_by_tenant,
                    panels_engine.ended,
                    panels_engine.cancel_cleanup,
                ),
            ),
            layout.Row(
                "Admission and its predictions",
                (
                    panels_engine.admissions,
                    panels_engine.first_tokens_late,
                    panels_engine.first_token_error,
                    panels_engine.cost_error,
                    panels_engine.lengths_age,
                ),
            ),
            layout.Row(
                "Flow control",
                (panels_engine.pauses, panels_engine.pause_length),
            ),
            layout.Row(
                "Work",
                (
                    panels_engine.tokens,
                    panels_engine.work_against_ceilings,
                    panels_engine.modelled_flops,
                    panels_engine.modelled_bytes,
                ),
            ),
            layout.Row(
                "The engine's journal",
                (
                    panels_sql.step_work,
                    panels_sql.admission_calibration,
                    panels_sql.state_times,
                    panels_sql.kv_usage,
                ),
            ),
        ),
    )
