-- question: How many more tokens will an answer have that has already had some?
-- grain: one row per cohort
-- inputs: length_curves
-- params:
--   by          varchar  class|model|tenant|all  class    how to split into cohorts
--   population  varchar  arrival|period          arrival
--   generated   bigint   tokens                  0     min 0  tokens that the answer has had
--   cap         bigint   tokens                  null  min 1  its max_tokens: nothing is said beyond it
--   until       bigint   tokens                  null  min 0  also the chance that the answer is longer than this
-- outputs:
--   cohort                 varchar  -
--   generated_tokens       bigint   tokens
--   longer_requests        bigint   requests  seen longer than this
--   horizon_tokens         bigint   tokens    min(cap, largest observed)
--   p25_tokens             bigint   tokens    more
--   median_tokens          bigint   tokens    more
--   p75_tokens             bigint   tokens    more
--   p90_tokens             bigint   tokens    more
--   restricted_mean_tokens double   tokens    mean of min(remaining, horizon - generated)
--   unresolved             double   ratio     chance of going beyond the horizon
--   until_tokens           bigint   tokens
--   longer_than_until      double   ratio     chance of being longer than `until`
--   longer_than_until_se   double   ratio
--   longer_than_until_low  double   ratio     log-log, 95 %
--   longer_than_until_high double   ratio     log-log, 95 %
--   reason                 varchar  -         why there is no answer
-- rules: The curve beyond `generated` divided by the curve at it, which needs no distribution. NULL with the reason where
--   no answer longer than that was seen, or the horizon is not beyond it; a quantile beyond the horizon is NULL, and
--   `unresolved` says how much lies there. A quantile is the fewest tokens m for which the chance of more than m is its
--   level or below (within 1e-9): tokens are planned in whole numbers, so no middle is taken. `until` not beyond `generated` is certain; beyond the largest observed
--   length it is NULL. Variance: Greenwood's sum over the ends in (generated, until].
-- source: Klein and Moeschberger, Survival Analysis, 2nd ed., 2.4 and 4.3
with

length_curves as (
    select
        cohort,
        tokens,
        at_risk,
        survival,
        greenwood,
        next_tokens,
        largest_tokens,
        cast($generated as bigint) as generated_tokens,
        least(largest_tokens, coalesce(cast($cap as bigint), largest_tokens)) as horizon_tokens,
        cast($until as bigint) as until_tokens
    from length_curves
    where grouping = $by and population = $population and part = 'whole'
),

starts as (
    select
        cohort,
        coalesce(min(case when tokens <= generated_tokens then survival end), 1e0) as survival_at_start,
        coalesce(max(case when tokens <= generated_tokens then greenwood end), 0e0) as greenwood_at_start,
        coalesce(min(case when tokens <= horizon_tokens then survival end), 1e0) as survival_at_horizon,
        coalesce(min(case when tokens <= until_tokens then survival end), 1e0) as survival_at_until,
        coalesce(max(case when tokens <= until_tokens then greenwood end), 0e0) as greenwood_at_until,
        coalesce(max(case when tokens > generated_tokens then at_risk end), 0) as longer_requests,
        min(case when tokens > generated_tokens then tokens end) as first_tokens,
        max(largest_tokens) as largest_tokens,
        max(horizon_tokens) as horizon_tokens
    from length_curves
    group by cohort
),

conditional as (
    select
        length_curves.cohort,
        length_curves.tokens,
        length_curves.generated_tokens,
        length_curves.horizon_tokens,
        length_curves.survival / nullif(starts.survival_at_start, 0) as survival,
        least(coalesce(length_curves.next_tokens, length_curves.horizon_tokens), length_curves.horizon_tokens)
        - length_curves.tokens as width
    from length_curves
    inner join starts on length_curves.cohort = starts.cohort
    where length_curves.tokens > length_curves.generated_tokens and length_curves.tokens <= length_curves.horizon_tokens
),

levels as (
    select *
    from (values (0.75e0), (0.5e0), (0.25e0), (0.1e0)) as shares (level)
),

crossings as (
    select
        conditional.cohort,
        levels.level,
        min(conditional.tokens - conditional.generated_tokens) as remaining_tokens
    from conditional
    cross join levels
    where conditional.survival <= levels.level + 1e-9
    group by conditional.cohort, levels.level
),

quantiles as (
    select
        cohort,
        max(case when level = 0.75e0 then remaining_tokens end) as p25_tokens,
        max(case when level = 0.5e0 then remaining_tokens end) as median_tokens,
        max(case when level = 0.25e0 then remaining_tokens end) as p75_tokens,
        max(case when level = 0.1e0 then remaining_tokens end) as p90_tokens
    from crossings
    group by cohort
),

areas as (
    select
        cohort,
        sum(survival * width) as area
    from conditional
    group by cohort
),

answered as (
    select
        starts.*,
        cast($generated as bigint) as generated_tokens,
        cast($until as bigint) as until_tokens,
        case
            when starts.survival_at_start = 0 or starts.longer_requests = 0
                then 'no answer longer than ' || cast($generated as varchar) || ' tokens was seen'
            when starts.horizon_tokens <= $generated
                then 'horizon ' || cast(starts.horizon_tokens as varchar) || ' is not beyond '
                    || cast($generated as varchar)
        end as reason
    from starts
),

chances as (
    select
        answered.*,
        case
            when until_tokens <= generated_tokens then 1e0
            when until_tokens <= largest_tokens then survival_at_until / nullif(survival_at_start, 0)
        end as longer_than_until,
        case
            when until_tokens > generated_tokens and until_tokens <= largest_tokens and survival_at_until > 0
                then greatest(greenwood_at_until - greenwood_at_start, 0e0)
        end as greenwood
    from answered
),

final as (
    select
        chances.cohort,
        chances.generated_tokens,
        chances.longer_requests,
        chances.horizon_tokens,
        quantiles.p25_tokens,
        quantiles.median_tokens,
        quantiles.p75_tokens,
        quantiles.p90_tokens,
        case
            -- Flat until the first length beyond `generated`, or until the horizon if that comes before it.
            when chances.reason is null
                then least(chances.first_tokens, chances.horizon_tokens) - chances.generated_tokens
                    + coalesce(areas.area, 0e0)
        end as restricted_mean_tokens,
        case
            when chances.reason is null then chances.survival_at_horizon / nullif(chances.survival_at_start, 0)
        end as unresolved,
        chances.until_tokens,
        case when chances.reason is null then chances.longer_than_until end as longer_than_until,
        case when chances.reason is null then chances.longer_than_until * sqrt(chances.greenwood) end
            as longer_than_until_se,
        case
            when
                chances.reason is null and chances.greenwood > 0
                and chances.longer_than_until > 0 and chances.longer_than_until < 1
                then pow(
                    chances.longer_than_until,
                    exp(-1.959963984540054e0 * sqrt(chances.greenwood) / ln(chances.longer_than_until))
                )
        end as longer_than_until_low,
        case
            when
                chances.reason is null and chances.greenwood > 0
                and chances.longer_than_until > 0 and chances.longer_than_until < 1
                then pow(
                    chances.longer_than_until,
                    exp(1.959963984540054e0 * sqrt(chances.greenwood) / ln(chances.longer_than_until))
                )
        end as longer_than_until_high,
        chances.reason
    from chances
    left join quantiles on chances.cohort = quantiles.cohort
    left join areas on chances.cohort = areas.cohort
)

select * from final
order by cohort
