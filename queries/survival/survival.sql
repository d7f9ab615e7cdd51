-- question: How long are answers really, given that some were cut off before they ended?
-- grain: one row per cohort
-- inputs: cohort_lengths, length_curves
-- params:
--   by          varchar  class|model|tenant|all  class    how to split into cohorts
--   population  varchar  arrival|period          arrival
--   cap         bigint   tokens                  null  min 1  restrict the mean to min(cap, largest observed length)
-- outputs:
--   cohort                 varchar  -
--   requests               bigint   requests  of the population
--   n                      bigint   requests  in the curve
--   excluded               bigint   requests  not in it: unobserved, several choices, no length known, never at risk
--   events                 bigint   requests  natural ends: stop, tool_calls
--   censored_cap           bigint   requests  reached max_tokens
--   censored_cancelled     bigint   requests
--   censored_failed        bigint   requests
--   censored_unfinished    bigint   requests  still running when the window closed, or the recorder was lost
--   censored_other         bigint   requests  completed in another way
--   assumed_tokens         bigint   requests  whose events were counted as one token each
--   delayed_entries        bigint   requests  that entered after their first token (population period)
--   p25_tokens             double   tokens
--   p25_low_tokens         double   tokens    95 %, from the log-log bounds of the curve
--   p25_high_tokens        double   tokens
--   median_tokens          double   tokens
--   median_low_tokens      double   tokens
--   median_high_tokens     double   tokens
--   p75_tokens             double   tokens
--   p75_low_tokens         double   tokens
--   p75_high_tokens        double   tokens
--   restricted_mean_tokens double   tokens    mean of min(length, horizon)
--   restricted_mean_se     double   tokens
--   horizon_tokens         bigint   tokens    min(cap, largest observed)
--   unresolved             double   ratio     share of answers longer than the horizon
--   naive_mean_tokens      double   tokens    mean of the requests that completed
--   naive_bias_tokens      double   tokens    naive - restricted mean
--   at_risk_min            bigint   requests  smallest risk set at which an answer ended
-- rules: A quantile is the first length at which the curve is at its level or below; where the curve runs level with it
--   (within 1e-9), the middle of that stretch. NULL when the curve never gets there. The same for the bounds. Variance of
--   the restricted mean: sum over ends of (area of the curve from there to the horizon)² d / (n (n - d)).
--   Losses are taken as uninformative here; `survival_curve` has the competing-risk curves beside it.
-- source: Klein and Moeschberger, Survival Analysis, 2nd ed., 4.5; Brookmeyer and Crowley, Biometrics 38 (1982)
with

cohort_lengths as (
    select
        cohort,
        entry_tokens,
        exit_tokens,
        ending,
        exclusion,
        token_source
    from cohort_lengths
    where grouping = $by and population = $population and part = 'whole'
),

length_curves as (
    select
        cohort,
        tokens,
        at_risk,
        events,
        survival,
        survival_low,
        survival_high,
        next_tokens,
        largest_tokens,
        least(largest_tokens, coalesce(cast($cap as bigint), largest_tokens)) as horizon_tokens
    from length_curves
    where grouping = $by and population = $population and part = 'whole'
),

counted as (
    select
        cohort,
        count(*) as requests,
        count(*) filter (where exclusion is null) as n,
        count(*) filter (where exclusion is not null) as excluded,
        count(*) filter (where exclusion is null and ending = 'end') as events,
        count(*) filter (where exclusion is null and ending = 'cap') as censored_cap,
        count(*) filter (where exclusion is null and ending = 'cancelled') as censored_cancelled,
        count(*) filter (where exclusion is null and ending = 'failed') as censored_failed,
        count(*) filter (where exclusion is null and ending = 'unfinished') as censored_unfinished,
        count(*) filter (where exclusion is null and ending = 'other') as censored_other,
        count(*) filter (where exclusion is null and token_source = 'assumed_one') as assumed_tokens,
        count(*) filter (where exclusion is null and entry_tokens > 0) as delayed_entries,
        avg(exit_tokens) filter (where exclusion is null and ending in ('end', 'cap', 'other')) as naive_mean_tokens
    from cohort_lengths
    group by cohort
),

levels as (
    select *
    from (values (0.75e0), (0.5e0), (0.25e0)) as shares (level)
),

-- The first length at the level or below it, and the first clearly below: equal, unless the curve runs level with it.
crossings as (
    select
        length_curves.cohort,
        levels.level,
        max(length_curves.largest_tokens) as largest_tokens,
        min(case when survival <= level + 1e-9 then tokens end) as at_level,
        min(case when survival < level - 1e-9 then tokens end) as below_level,
        min(case when survival_low <= level + 1e-9 then tokens end) as low_at_level,
        min(case when survival_low < level - 1e-9 then tokens end) as low_below_level,
        min(case when survival_high <= level + 1e-9 then tokens end) as high_at_level,
        min(case when survival_high < level - 1e-9 then tokens end) as high_below_level
    from length_curves
    cross join levels
    group by length_curves.cohort, levels.level
),

quantiles as (
    select
        cohort,
        level,
        (at_level + coalesce(below_level, largest_tokens)) / 2e0 as tokens,
        (low_at_level + coalesce(low_below_level, largest_tokens)) / 2e0 as low_tokens,
        (high_at_level + coalesce(high_below_level, largest_tokens)) / 2e0 as high_tokens
    from crossings
),

cohort_quantiles as (
    select
        cohort,
        max(case when level = 0.75e0 then tokens end) as p25_tokens,
        max(case when level = 0.75e0 then low_tokens end) as p25_low_tokens,
        max(case when level = 0.75e0 then high_tokens end) as p25_high_tokens,
        max(case when level = 0.5e0 then tokens end) as median_tokens,
        max(case when level = 0.5e0 then low_tokens end) as median_low_tokens,
        max(case when level = 0.5e0 then high_tokens end) as median_high_tokens,
        max(case when level = 0.25e0 then tokens end) as p75_tokens,
        max(case when level = 0.25e0 then low_tokens end) as p75_low_tokens,
        max(case when level = 0.25e0 then high_tokens end) as p75_high_tokens
    from quantiles
    group by cohort
),

stretches as (
    select
        length_curves.*,
        survival * greatest(least(coalesce(next_tokens, horizon_tokens), horizon_tokens) - tokens, 0) as area
    from length_curves
),

tails as (
    select
        stretches.*,
        sum(area) over (
            partition by cohort order by tokens rows between current row and unbounded following
        ) as area_after
    from stretches
),

means as (
    select
        cohort,
        -- Before the first length the curve is 1.
        least(min(tokens), max(horizon_tokens)) + sum(area) as restricted_mean_tokens,
        sqrt(
            sum(
                case
                    when tokens <= horizon_tokens and events < at_risk
                        then area_after * area_after * events / (at_risk * 1e0 * (at_risk - events))
                    else 0
                end
            )
        ) as restricted_mean_se,
        max(horizon_tokens) as horizon_tokens,
        coalesce(min(case when tokens <= horizon_tokens then survival end), 1e0) as unresolved,
        min(case when events > 0 then at_risk end) as at_risk_min
    from tails
    group by cohort
),

final as (
    select
        counted.cohort,
        counted.requests,
        counted.n,
        counted.excluded,
        counted.events,
        counted.censored_cap,
        counted.censored_cancelled,
        counted.censored_failed,
        counted.censored_unfinished,
        counted.censored_other,
        counted.assumed_tokens,
        counted.delayed_entries,
        cohort_quantiles.p25_tokens,
        cohort_quantiles.p25_low_tokens,
        cohort_quantiles.p25_high_tokens,
        cohort_quantiles.median_tokens,
        cohort_quantiles.median_low_tokens,
        cohort_quantiles.median_high_tokens,
        cohort_quantiles.p75_tokens,
        cohort_quantiles.p75_low_tokens,
        cohort_quantiles.p75_high_tokens,
        means.restricted_mean_tokens,
        means.restricted_mean_se,
        means.horizon_tokens,
        means.unresolved,
        counted.naive_mean_tokens,
        counted.naive_mean_tokens - means.restricted_mean_tokens as naive_bias_tokens,
        means.at_risk_min
    from counted
    left join cohort_quantiles on counted.cohort = cohort_quantiles.cohort
    left join means on counted.cohort = means.cohort
)

select * from final
order by cohort
