-- question: What was the verdict on each request, and what did it miss?
-- grain: one row per offered request
-- inputs: cohort, run_window
-- outputs:
--   request_id      varchar  -
--   external_id     varchar  -         the caller's own id
--   class           varchar  -
--   arrival_s       double   seconds   after the start of the window
--   ttft_s          double   seconds   worst choice
--   itl_max_s       double   seconds   largest gap, worst choice
--   tpot_s          double   seconds   worst choice
--   e2e_s           double   seconds
--   output_tokens   bigint   tokens
--   outcome         varchar  -
--   reason          varchar  -
--   qualified       boolean  -
--   vacuous         boolean  -         completed, and a promised gap or TPOT has no value: met, whatever else was missed
--   misses          varchar  -         obligations in the order outcome, class, limits; empty when qualified
-- rules: A request that misses several obligations names them all. 'unobserved' is no miss of a limit: nothing is known.
with

cohort as (
    select
        request_id,
        external_id,
        class,
        arrival_at_ns,
        ttft_worst_ns,
        itl_max_ns,
        span_ns,
        span_tokens,
        e2e_ns,
        output_tokens,
        outcome,
        reason,
        unobserved,
        qualified,
        vacuous,
        miss_outcome,
        miss_class,
        miss_ttft,
        miss_ttft_visible,
        miss_itl_max,
        miss_tpot,
        miss_e2e,
        miss_min_tokens
    from cohort
),

run_window as (
    select window_start_ns
    from run_window
),

final as (
    select
        cohort.request_id,
        cohort.external_id,
        cohort.class,
        (cohort.arrival_at_ns - run_window.window_start_ns) / 1e9 as arrival_s,
        cohort.ttft_worst_ns / 1e9 as ttft_s,
        cohort.itl_max_ns / 1e9 as itl_max_s,
        case
            when cohort.span_tokens >= 2 then ratio(cohort.span_ns, cohort.span_tokens - 1) / 1e9
        end as tpot_s,
        cohort.e2e_ns / 1e9 as e2e_s,
        cohort.output_tokens,
        cohort.outcome,
        cohort.reason,
        cohort.qualified,
        cohort.vacuous,
        ltrim(
            case when cohort.unobserved then ' unobserved' else '' end
            || case when cohort.miss_outcome then ' outcome' else '' end
            || case when cohort.miss_class then ' class' else '' end
            || case when cohort.miss_ttft then ' ttft' else '' end
            || case when cohort.miss_ttft_visible then ' ttft_visible' else '' end
            || case when cohort.miss_itl_max then ' itl_max' else '' end
            || case when cohort.miss_tpot then ' tpot' else '' end
            || case when cohort.miss_e2e then ' e2e' else '' end
            || case when cohort.miss_min_tokens then ' min_tokens' else '' end
        ) as misses
    from cohort
    cross join run_window
)

select * from final
order by arrival_s, request_id
