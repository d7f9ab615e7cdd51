-- view: Kaplan-Meier curve of output length with its variance, and the competing-risk curves beside it
-- grain: one row per population, grouping, part, cohort and length at which a request left
-- inputs: cohort_lengths
-- rules: survival is the share of answers longer than `tokens`. At risk at t: entry < t <= exit; events precede
--   censorings at ties, so who is censored at t still counts there. greenwood is the sum of d / (n (n - d)); it, and the
--   bounds, are NULL where the curve is 0. Bounds: S^exp(-/+ z sqrt(greenwood) / ln S), 95 %, NULL where S is 1 or 0.
--   end_incidence and loss_incidence are Aalen-Johansen estimates, an end and a loss (failed or cancelled) competing;
--   cap and open requests are censored there too. With delayed entry a small early risk set can take the curve to 0 or
--   near it for good: see `at_risk`.
-- source: Kaplan and Meier, JASA 53 (1958); Greenwood (1926); Kalbfleisch and Prentice, The Statistical Analysis of
--   Failure Time Data; Aalen and Johansen, Scand. J. Statist. 5 (1978)
with

moves as (
    select
        population,
        grouping,
        part,
        cohort,
        entry_tokens as tokens,
        count(*) as entered,
        0 as left_set,
        0 as events,
        0 as losses
    from cohort_lengths
    where exclusion is null
    group by population, grouping, part, cohort, entry_tokens
    union all
    select
        population,
        grouping,
        part,
        cohort,
        exit_tokens as tokens,
        0 as entered,
        count(*) as left_set,
        count(*) filter (where ending = 'end') as events,
        count(*) filter (where ending in ('failed', 'cancelled')) as losses
    from cohort_lengths
    where exclusion is null
    group by population, grouping, part, cohort, exit_tokens
),

lengths as (
    select
        population,
        grouping,
        part,
        cohort,
        tokens,
        sum(entered) as entered,
        sum(left_set) as left_set,
        sum(events) as events,
        sum(losses) as losses
    from moves
    group by population, grouping, part, cohort, tokens
),

risk_sets as (
    select
        lengths.*,
        sum(entered - left_set) over (
            partition by population, grouping, part, cohort
            order by tokens
            rows between unbounded preceding and 1 preceding
        ) as at_risk
    from lengths
),

left_lengths as (
    select
        population,
        grouping,
        part,
        cohort,
        tokens,
        cast(at_risk as bigint) as at_risk,
        cast(events as bigint) as events,
        cast(losses as bigint) as losses,
        cast(left_set - events as bigint) as censored
    from risk_sets
    where left_set > 0
),

sums as (
    select
        left_lengths.*,
        -- ln(0) differs between engines: whoever takes the curve to 0 is counted instead.
        sum(case when events < at_risk then ln(1 - events * 1e0 / at_risk) else 0 end) over so_far as log_survival,
        sum(case when events = at_risk then 1 else 0 end) over so_far as ended_all,
        sum(case when events < at_risk then events / (at_risk * 1e0 * (at_risk - events)) else 0 end) over so_far
            as greenwood_sum,
        sum(
            case when events + losses < at_risk then ln(1 - (events + losses) * 1e0 / at_risk) else 0 end
        ) over so_far as log_free,
        sum(case when events + losses = at_risk then 1 else 0 end) over so_far as left_all
    from left_lengths
    window so_far as (
        partition by population, grouping, part, cohort
        order by tokens
        rows between unbounded preceding and current row
    )
),

curves as (
    select
        sums.*,
        case when ended_all = 0 then exp(log_survival) else 0e0 end as survival,
        case when ended_all = 0 then greenwood_sum end as greenwood,
        case when left_all = 0 then exp(log_free) else 0e0 end as free
    from sums
),

with_free_before as (
    select
        curves.*,
        coalesce(lag(free) over (partition by population, grouping, part, cohort order by tokens), 1e0) as free_before
    from curves
),

final as (
    select
        population,
        grouping,
        part,
        cohort,
        tokens,
        at_risk,
        events,
        losses,
        censored,
        survival,
        greenwood,
        case
            when survival > 0 and greenwood > 0
                then pow(survival, exp(-1.959963984540054e0 * sqrt(greenwood) / ln(survival)))
        end as survival_low,
        case
            when survival > 0 and greenwood > 0
                then pow(survival, exp(1.959963984540054e0 * sqrt(greenwood) / ln(survival)))
        end as survival_high,
        sum(free_before * events / at_risk) over (
            partition by population, grouping, part, cohort
            order by tokens
            rows between unbounded preceding and current row
        ) as end_incidence,
        sum(free_before * losses / at_risk) over (
            partition by population, grouping, part, cohort
            order by tokens
            rows between unbounded preceding and current row
        ) as loss_incidence,
        lead(tokens) over (partition by population, grouping, part, cohort order by tokens) as next_tokens,
        max(tokens) over (partition by population, grouping, part, cohort) as largest_tokens
    from with_free_before
)

select * from final
