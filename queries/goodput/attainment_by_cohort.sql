-- question: Which part of the traffic kept its contract, and which did not?
-- grain: one row per value of what is split by
-- inputs: cohort, run_window
-- params:
--   by  varchar  class|model|tenant|outcome|streaming|upstream  class
-- outputs:
--   part                     varchar  -         value of what is split by; '-' where a request has none
--   offered                  bigint   requests  the denominator
--   qualified                bigint   requests
--   completed                bigint   requests
--   unobserved               bigint   requests
--   attainment               double   ratio     qualified / offered
--   attainment_low           double   ratio     Wilson 95 %
--   attainment_high          double   ratio     Wilson 95 %
--   attainment_min           double   ratio     had every unobserved request missed
--   attainment_max           double   ratio     had every unobserved request qualified
--   goodput_rps              double   req/s
--   token_goodput            double   tokens/s
--   observed_tokens_per_s    double   tokens/s  received before the cut, of every request
--   objective                double   ratio     the smallest objective among the part's classes; NULL: class unknown
--   meets_objective          boolean  -         attainment >= objective; NULL without an objective
-- rules: Parts that had no request have no row. Wilson's interval assumes independent requests.
with

cohort as (
    select
        case $by
            when 'class' then class
            when 'model' then model
            when 'tenant' then tenant
            when 'outcome' then outcome
            when 'upstream' then sidecar_upstream
            when 'streaming'
                then case when streaming then 'streaming' when not streaming then 'not streaming' end
        end as part,
        outcome,
        unobserved,
        qualified,
        objective,
        output_tokens,
        output_tokens_before_cut
    from cohort
),

run_window as (
    select window_ns
    from run_window
),

counted as (
    select
        coalesce(part, '-') as part,
        count(*) as offered,
        count(*) filter (where qualified) as qualified,
        count(*) filter (where outcome = 'completed') as completed,
        count(*) filter (where unobserved) as unobserved,
        cast(coalesce(sum(output_tokens) filter (where qualified), 0) as bigint) as qualified_tokens,
        cast(sum(output_tokens_before_cut) as bigint) as observed_tokens,
        min(objective) as objective
    from cohort
    group by coalesce(part, '-')
),

final as (
    select
        counted.part,
        counted.offered,
        counted.qualified,
        counted.completed,
        counted.unobserved,
        ratio(counted.qualified, counted.offered) as attainment,
        wilson_low(counted.qualified, counted.offered) as attainment_low,
        wilson_high(counted.qualified, counted.offered) as attainment_high,
        ratio(counted.qualified, counted.offered) as attainment_min,
        ratio(counted.qualified + counted.unobserved, counted.offered) as attainment_max,
        ratio(counted.qualified * 1e9, run_window.window_ns) as goodput_rps,
        ratio(counted.qualified_tokens * 1e9, run_window.window_ns) as token_goodput,
        ratio(counted.observed_tokens * 1e9, run_window.window_ns) as observed_tokens_per_s,
        counted.objective,
        ratio(counted.qualified, counted.offered) >= counted.objective as meets_objective
    from counted
    cross join run_window
)

select * from final
order by part
