-- view: the requests of the window against the contract, warm-up included
-- grain: one row per offered request of the window
-- inputs: observed_requests, open_tokens, run_classes
-- rules: The same verdict as sloscope.definitions.judge, in integers; `<=` meets a limit. The request's own limits
--   replace those of its class. Outcome after the window rule: no record at the declared observer is 'unobserved',
--   offered and never qualified, and nothing more is said about it (every miss false); open at the cut, or ended
--   after it, is unfinished(window_closed). A class that the contract does not have never qualifies; limits that were
--   given for every class (`--goodput`) are those of `contract_class` for all but `_unknown`. A request that did not stream in a class with streaming = 'optional' has the limit e2e alone. With n > 1 the worst choice is
--   judged. tpot_ceil_ns is the TPOT rounded up, which meets an integer limit exactly when the quotient does. A
--   missing TTFT or e2e misses its limit; a missing gap or TPOT of a completed request meets it, and the request is
--   vacuous, whatever else it missed.
with

window_requests as (
    select
        observed_requests.* exclude (outcome, reason, class),
        observed_requests.outcome as recorded_outcome,
        observed_requests.reason as recorded_reason,
        coalesce(observed_requests.class, getvariable('default_class')) as class,
        case
            when getvariable('every_class') and coalesce(observed_requests.class, '') <> '_unknown'
                then getvariable('default_class')
            else coalesce(observed_requests.class, getvariable('default_class'))
        end as contract_class,
        not observed_requests.observed as unobserved,
        coalesce(
            observed_requests.outcome is null or observed_requests.end_at_ns > getvariable('cut_ns'), false
        ) as open_at_cut,
        case
            when observed_requests.span_tokens >= 2
                then
                    (observed_requests.span_ns + observed_requests.span_tokens - 2)
                    // (observed_requests.span_tokens - 1)
        end as tpot_ceil_ns
    from observed_requests
    where
        observed_requests.arrival_at_ns >= getvariable('window_start_ns')
        and observed_requests.arrival_at_ns < getvariable('window_end_ns')
),

classified as (
    select
        window_requests.*,
        run_classes.class is not null as class_known,
        coalesce(run_classes.streaming = 'optional' and not window_requests.streaming, false) as e2e_alone,
        run_classes.ttft_ns as class_ttft_ns,
        run_classes.ttft_visible_ns as class_ttft_visible_ns,
        run_classes.itl_max_ns as class_itl_max_ns,
        run_classes.tpot_ns as class_tpot_ns,
        run_classes.e2e_ns as class_e2e_ns,
        coalesce(run_classes.min_tokens, 1) as min_tokens,
        run_classes.objective,
        run_classes.period_ns
    from window_requests
    left join run_classes on window_requests.contract_class = run_classes.class
),

with_limits as (
    select
        classified.*,
        case
            when unobserved then 'unobserved'
            when open_at_cut then 'unfinished'
            else recorded_outcome
        end as outcome,
        case
            when unobserved then ''
            when open_at_cut then 'window_closed'
            else coalesce(recorded_reason, '')
        end as reason,
        case when not e2e_alone then coalesce(own_ttft_ns, class_ttft_ns) end as limit_ttft_ns,
        case
            when not e2e_alone then coalesce(own_ttft_visible_ns, class_ttft_visible_ns)
        end as limit_ttft_visible_ns,
        case when not e2e_alone then coalesce(own_itl_max_ns, class_itl_max_ns) end as limit_itl_max_ns,
        case when not e2e_alone then coalesce(own_tpot_ns, class_tpot_ns) end as limit_tpot_ns,
        coalesce(own_e2e_ns, class_e2e_ns) as limit_e2e_ns
    from classified
),

compared as (
    select
        with_limits.*,
        not unobserved and outcome <> 'completed' as miss_outcome,
        not unobserved and not class_known as miss_class,
        not unobserved and limit_ttft_ns is not null and coalesce(ttft_worst_ns > limit_ttft_ns, true) as miss_ttft,
        not unobserved and limit_ttft_visible_ns is not null
        and coalesce(ttft_visible_worst_ns > limit_ttft_visible_ns, true) as miss_ttft_visible,
        not unobserved and coalesce(itl_max_ns > limit_itl_max_ns, false) as miss_itl_max,
        not unobserved and coalesce(tpot_ceil_ns > limit_tpot_ns, false) as miss_tpot,
        not unobserved and limit_e2e_ns is not null and coalesce(e2e_ns > limit_e2e_ns, true) as miss_e2e,
        not unobserved and outcome = 'completed' and coalesce(tokens < min_tokens, false) as miss_min_tokens
    from with_limits
),

judged as (
    select
        compared.*,
        not (
            unobserved or miss_outcome or miss_class or miss_ttft or miss_ttft_visible or miss_itl_max or miss_tpot
            or miss_e2e or miss_min_tokens
        ) as qualified
    from compared
),

final as (
    select
        judged.*,
        judged.outcome = 'completed' and (
            (judged.limit_itl_max_ns is not null and judged.itl_max_ns is null)
            or (judged.limit_tpot_ns is not null and judged.tpot_ceil_ns is null)
        ) as vacuous,
        case
            when judged.unobserved then 0
            else coalesce(judged.tokens, open_tokens.tokens, 0)
        end as output_tokens,
        case
            when judged.unobserved then 0
            when judged.end_at_ns <= getvariable('cut_ns') then coalesce(judged.tokens, 0)
            else coalesce(open_tokens.tokens, 0)
        end as output_tokens_before_cut
    from judged
    left join open_tokens on judged.request_id = open_tokens.request_id
)

select * from final
