"""SLO overview: was the promise kept, to whom not, and which obligation was missed."""

from typing import Any

from dashboards import layout, panels_receipt, panels_recorder, panels_slo, panels_sql

UID = "sloscope-overview"


def dashboard() -> Any:
    return layout.dashboard(
        UID,
        "SLO overview",
        "Whether the people waiting for tokens got what they were promised, at the chosen observer.",
        (
            layout.Row(
                "Was the promise kept",
                (
                    panels_slo.attainment_in_range,
                    panels_slo.budget_in_range,
                    panels_slo.goodput_now,
                    panels_slo.offered_in_range,
                    panels_slo.attainment_over_time,
                    panels_slo.budget_burn,
                    panels_slo.attainment_excl_voluntary,
                    panels_slo.goodput_over_time,
                ),
            ),
            layout.Row(
                "What became of the requests",
                (
                    panels_slo.ended_by_outcome,
                    panels_slo.misses_by_obligation,
                    panels_slo.ended_by_reason,
                    panels_slo.in_flight,
                    panels_slo.token_goodput,
                ),
            ),
            layout.Row(
                "How long they waited",
                (
                    panels_receipt.ttft,
                    panels_receipt.ttft_heatmap,
                    panels_receipt.largest_gap,
                    panels_receipt.largest_gap_heatmap,
                    panels_receipt.ttft_visible,
                    panels_receipt.tpot,
                    panels_receipt.e2e,
                    panels_receipt.token_gap,
                    panels_receipt.stream_chunk_gap,
                    panels_receipt.beyond_last_bucket,
                ),
            ),
            layout.Row(
                "Exact answers from the journal",
                (
                    panels_sql.goodput,
                    panels_sql.misses_by_obligation,
                    panels_sql.outcomes,
                    panels_sql.error_budget,
                    panels_sql.goodput_over_time,
                    panels_sql.attainment_over_time,
                    panels_sql.attainment_by_class,
                    panels_sql.attainment_by_tenant,
                    panels_sql.hold_summary,
                    panels_sql.hold_timeline,
                    panels_sql.holds,
                    panels_sql.stall_causes,
                    panels_sql.quantiles,
                    panels_sql.survival,
                    panels_sql.ttft_budget,
                    panels_sql.attainment_by_both,
                    panels_sql.goodput_gauge,
                    panels_sql.holds_gauge,
                    panels_sql.computed_ago,
                ),
            ),
            layout.Row(
                "Can the record be trusted",
                (
                    panels_recorder.journal_records,
                    panels_recorder.journal_bytes,
                    panels_recorder.journal_lag,
                    panels_recorder.troubles,
                    panels_sql.dispatch_lag,
                    panels_recorder.builds,
                    panels_recorder.served_models,
                ),
            ),
        ),
    )
