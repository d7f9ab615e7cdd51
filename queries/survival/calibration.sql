-- question: Does the length curve of the window's first half predict the answers of the second?
-- grain: one row per cohort and predicted share
-- inputs: length_curves
-- params:
--   by          varchar  class|model|tenant|all  class    how to split into cohorts
--   population  varchar  arrival|period          arrival
-- outputs:
--   cohort           varchar  -
--   level            double   ratio     0.9, 0.75, 0.5, 0.25, 0.1: the share for which a length was looked up
--   tokens           bigint   tokens    first length at which the early curve is at the level or below
--   predicted        double   ratio     share of the early answers longer than this
--   observed         double   ratio     share of the late answers longer than this
--   observed_low     double   ratio     log-log, 95 %
--   observed_high    double   ratio     log-log, 95 %
--   difference       double   ratio     observed - predicted
--   difference_se    double   ratio     of two independent curves, Greenwood
--   is_calibrated    boolean  -         |difference| <= 1.96 difference_se
--   early_requests   bigint   requests  at risk when the early curve starts
--   late_requests    bigint   requests  at risk when the late curve starts
--   reason           varchar  -         why there is no comparison
-- rules: Early arrived before the middle of the window, late at it or after; both are followed to their ends, as the
--   window rule has it, so the early curve knows more than one drawn at the middle would. Beyond the largest length
--   seen late, or at a curve of 0 or 1 on both sides, there is no comparison. Five levels are five looks: one in four
--   cohorts that are calibrated fails at some level.
-- source: Klein and Moeschberger, Survival Analysis, 2nd ed., 7.8
with

length_curves as (
    select
        part,
        cohort,
        tokens,
        at_risk,
        survival,
        greenwood,
        largest_tokens
    from length_curves
    where grouping = $by and population = $population and part <> 'whole'
),

levels as (
    select *
    from (values (0.9e0), (0.75e0), (0.5e0), (0.25e0), (0.1e0)) as shares (level)
),

sizes as (
    select
        cohort,
        coalesce(max(case when part = 'early' then at_risk end), 0) as early_requests,
        coalesce(max(case when part = 'late' then at_risk end), 0) as late_requests,
        max(case when part = 'late' then largest_tokens end) as largest_late_tokens
    from length_curves
    group by cohort
),

looked_up as (
    select
        sizes.cohort,
        levels.level,
        min(length_curves.tokens) as tokens
    from sizes
    cross join levels
    left join length_curves
        on
            sizes.cohort = length_curves.cohort
            and length_curves.part = 'early'
            and length_curves.survival <= levels.level + 1e-9
    group by sizes.cohort, levels.level
),

-- Survival only falls and Greenwood's sum only grows, so the last value up to a length is their extreme.
compared as (
    select
        looked_up.cohort,
        looked_up.level,
        looked_up.tokens,
        min(case when length_curves.part = 'early' then length_curves.survival end) as predicted,
        coalesce(max(case when length_curves.part = 'early' then length_curves.greenwood end), 0e0) as early_greenwood,
        coalesce(min(case when length_curves.part = 'late' then length_curves.survival end), 1e0) as late_survival,
        coalesce(max(case when length_curves.part = 'late' then length_curves.greenwood end), 0e0) as late_greenwood
    from looked_up
    left join length_curves
        on looked_up.cohort = length_curves.cohort and length_curves.tokens <= looked_up.tokens
    group by looked_up.cohort, looked_up.level, looked_up.tokens
),

judged as (
    select
        compared.*,
        sizes.early_requests,
        sizes.late_requests,
        case when compared.tokens <= sizes.largest_late_tokens then compared.late_survival end as observed,
        case
            when sizes.early_requests = 0 then 'no early request'
            when sizes.late_requests = 0 then 'no late request'
            when compared.tokens is null then 'the early curve does not fall to the level'
            when compared.tokens > sizes.largest_late_tokens then 'no late answer was followed so far'
        end as reason
    from compared
    inner join sizes on compared.cohort = sizes.cohort
),

with_errors as (
    select
        judged.*,
        sqrt(
            predicted * predicted * early_greenwood + observed * observed * late_greenwood
        ) as difference_se
    from judged
),

final as (
    select
        cohort,
        level,
        tokens,
        predicted,
        observed,
        case
            when observed > 0 and observed < 1
                then pow(observed, exp(-1.959963984540054e0 * sqrt(late_greenwood) / ln(observed)))
        end as observed_low,
        case
            when observed > 0 and observed < 1
                then pow(observed, exp(1.959963984540054e0 * sqrt(late_greenwood) / ln(observed)))
        end as observed_high,
        observed - predicted as difference,
        difference_se,
        case
            when difference_se > 0 then abs(observed - predicted) <= 1.959963984540054e0 * difference_se
        end as is_calibrated,
        early_requests,
        late_requests,
        reason
    from with_errors
)

select * from final
order by cohort, level desc
