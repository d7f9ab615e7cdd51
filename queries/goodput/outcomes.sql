-- question: How did the offered requests end, and what share was each ending?
-- grain: one row per outcome and reason; every outcome has a row
-- inputs: cohort
-- outputs:
--   outcome         varchar  -         completed, failed, cancelled, unfinished or unobserved
--   reason          varchar  -         empty where an outcome has none
--   requests        bigint   requests
--   offered         bigint   requests  the denominator
--   share           double   ratio     requests / offered
--   share_low       double   ratio     Wilson 95 %
--   share_high      double   ratio     Wilson 95 %
--   qualified       bigint   requests
--   output_tokens   bigint   tokens    received before the cut; none is thrown away with its request
-- rules: An outcome that did not occur has one row with 0 requests and an empty reason. Wilson's interval assumes
--   independent requests.
with

cohort as (
    select
        outcome,
        reason,
        qualified,
        output_tokens_before_cut
    from cohort
),

outcomes as (
    select 'completed' as outcome
    union all
    select 'failed' as outcome
    union all
    select 'cancelled' as outcome
    union all
    select 'unfinished' as outcome
    union all
    select 'unobserved' as outcome
),

by_reason as (
    select
        outcome,
        reason,
        count(*) as requests,
        count(*) filter (where qualified) as qualified,
        cast(sum(output_tokens_before_cut) as bigint) as output_tokens
    from cohort
    group by outcome, reason
),

totals as (
    select count(*) as offered
    from cohort
),

final as (
    select
        outcomes.outcome,
        coalesce(by_reason.reason, '') as reason,
        coalesce(by_reason.requests, 0) as requests,
        totals.offered,
        ratio(coalesce(by_reason.requests, 0), totals.offered) as share,
        wilson_low(coalesce(by_reason.requests, 0), totals.offered) as share_low,
        wilson_high(coalesce(by_reason.requests, 0), totals.offered) as share_high,
        coalesce(by_reason.qualified, 0) as qualified,
        coalesce(by_reason.output_tokens, 0) as output_tokens
    from outcomes
    left join by_reason on outcomes.outcome = by_reason.outcome
    cross join totals
)

select * from final
order by
    case outcome
        when 'completed' then 1 when 'failed' then 2 when 'cancelled' then 3 when 'unfinished' then 4 else 5
    end,
    requests desc,
    reason
