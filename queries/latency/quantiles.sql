-- question: What are the quantiles of one latency, and within which bounds are they known?
-- grain: one row per series and quantile
-- inputs: cohort
-- params:
--   metric  varchar  ttft|ttft_visible|ttft_intended|itl_max|tpot|e2e  ttft
-- outputs:
--   metric        varchar  -
--   series        varchar  -         completed, or offered: everything not completed waits forever
--   quantile      varchar  -         p50, p90, p95, p99
--   n             bigint   requests  in the series
--   value_s       double   seconds   NULL: too few, or beyond every value
--   low_s         double   seconds   lower 95 % rank bound of a two-sided interval; NULL below its n
--   high_s        double   seconds   upper rank bound; NULL below its n or beyond every value
--   bounds        varchar  -         two_sided, upper_only (an upper 95 % bound alone) or none
--   above_max     boolean  -         the quantile lies among what was not completed
--   high_above_max  boolean  -       so does its upper bound
--   shown         varchar  -         the value in seconds, '> max', or the reason why there is none
--   reason        varchar  -         such as n=8 < 299; NULL when there is a value
--   value_rank    bigint   -         from 1 in the sorted series
--   low_rank      bigint   -
--   high_rank     bigint   -
-- rules: With several choices a TTFT is that of the first one to come, and the largest gap and TPOT are the worst one's.
--   Nearest rank, ceil(q n). `completed` holds completed requests that have the value (a TTFT never measured is no
--   zero); `offered` holds every offered request, and one that was not completed, or has no TTFT or e2e, is above every
--   value; a completed one without a gap or TPOT to measure is left out of both, and so is, for the three TTFTs, a
--   completed one that did not stream in a class with streaming = 'optional'. Bounds are order statistics whose
--   ranks come from the exact binomial distribution: low is the largest l with P(B < l) <= 0.025, high the smallest u
--   with P(B < u) >= 0.975 (upper_only: 0.95), B binomial (n, q). They exist two-sided from
--   n = ceil(ln 0.025 / ln max(q, 1 - q)): p99 368, p95 72, p90 36, p50 6; the upper one alone from
--   ceil(ln 0.05 / ln q): 299, 59, 29, 5; below that everything is NULL. Requests are taken as independent.
--   The distribution is summed from ratios of neighbouring terms within 10 standard deviations and 30 ranks of its mean,
--   and scaled to 1: outside lies less than 1e-20.
-- source: W. J. Conover, Practical Nonparametric Statistics, 3rd ed., Wiley 1999, section 3.2
with

cohort as (
    select
        outcome,
        e2e_alone,
        ttft_ns,
        ttft_visible_ns,
        client_ttft_intended_ns,
        itl_max_ns,
        tpot_ceil_ns,
        e2e_ns
    from cohort
),

measured as (
    select
        outcome = 'completed' as is_completed,
        $metric in ('itl_max', 'tpot') or (e2e_alone and $metric <> 'e2e') as may_lack,
        case $metric
            when 'ttft' then ttft_ns
            when 'ttft_visible' then ttft_visible_ns
            when 'ttft_intended' then client_ttft_intended_ns
            when 'itl_max' then itl_max_ns
            when 'tpot' then tpot_ceil_ns
            when 'e2e' then e2e_ns
        end as value_ns
    from cohort
),

series_names as (
    select 'completed' as series
    union all
    select 'offered' as series
),

-- NULL is +inf in `offered`: it sorts last.
members as (
    select
        'completed' as series,
        value_ns
    from measured
    where is_completed and value_ns is not null
    union all
    select
        'offered' as series,
        case when is_completed then value_ns end as value_ns
    from measured
    where not is_completed or value_ns is not null or not may_lack
),

ranked as (
    select
        series,
        value_ns,
        row_number() over (partition by series order by value_ns nulls last) as place
    from members
),

quantiles as (
    select 'p50' as quantile, 500 as q_permille, 6 as two_sided_n, 5 as upper_n
    union all
    select 'p90' as quantile, 900 as q_permille, 36 as two_sided_n, 29 as upper_n
    union all
    select 'p95' as quantile, 950 as q_permille, 72 as two_sided_n, 59 as upper_n
    union all
    select 'p99' as quantile, 990 as q_permille, 368 as two_sided_n, 299 as upper_n
),

counted as (
    select
        series_names.series,
        count(ranked.place) as n
    from series_names
    left join ranked on series_names.series = ranked.series
    group by series_names.series
),

asked as (
    select
        counted.series,
        counted.n,
        quantiles.quantile,
        quantiles.q_permille / 1e3 as q,
        quantiles.two_sided_n,
        quantiles.upper_n,
        greatest((quantiles.q_permille * counted.n + 999) // 1000, 1) as value_rank,
        cast(
            ceil(10 * sqrt(counted.n * (quantiles.q_permille / 1e3) * (1 - quantiles.q_permille / 1e3))) + 30 as bigint
        ) as reach
    from counted
    cross join quantiles
),

-- Terms of the binomial distribution, B = place - 1, and B = n, which has no row of its own in the data.
places as (
    select
        asked.series,
        asked.quantile,
        asked.n,
        asked.q,
        asked.upper_n,
        asked.two_sided_n,
        ranked.place - 1 as successes
    from asked
    inner join ranked
        on
            asked.series = ranked.series
            and ranked.place between asked.value_rank - asked.reach and asked.value_rank + asked.reach
    where asked.n >= asked.upper_n
    union all
    select
        series,
        quantile,
        n,
        q,
        upper_n,
        two_sided_n,
        n as successes
    from asked
    where n >= upper_n and n < value_rank + reach
),

-- ln of a term, less that of the first one: each is the one before times (n - b + 1) / b * q / (1 - q).
log_steps as (
    select
        series,
        quantile,
        n,
        two_sided_n,
        successes,
        case
            when row_number() over (partition by series, quantile order by successes) = 1 then 0e0
            else ln((n - successes + 1) * q / nullif(successes * (1 - q), 0))
        end as ln_step
    from places
),

logs as (
    select
        series,
        quantile,
        n,
        two_sided_n,
        successes,
        sum(ln_step) over (
            partition by series, quantile
            order by successes
            rows between unbounded preceding and current row
        ) as ln_term
    from log_steps
),

terms as (
    select
        series,
        quantile,
        n,
        two_sided_n,
        successes,
        exp(ln_term - max(ln_term) over (partition by series, quantile)) as term
    from logs
),

distribution as (
    select
        series,
        quantile,
        n,
        two_sided_n,
        successes,
        sum(term) over (
            partition by series, quantile
            order by successes
            rows between unbounded preceding and current row
        ) / nullif(sum(term) over (partition by series, quantile), 0) as at_most
    from terms
),

-- P(B < l) = P(B <= l - 1): l is one more than a number of successes.
bounds as (
    select
        series,
        quantile,
        max(successes + 1) filter (where at_most <= 0.025 and n >= two_sided_n) as low_rank,
        min(successes + 1) filter (where at_most >= case when n >= two_sided_n then 0.975 else 0.95 end) as high_rank
    from distribution
    group by series, quantile
),

with_ranks as (
    select
        asked.series,
        asked.quantile,
        asked.n,
        asked.upper_n,
        asked.two_sided_n,
        case when asked.n >= asked.upper_n then asked.value_rank end as value_rank,
        bounds.low_rank,
        bounds.high_rank
    from asked
    left join bounds on asked.series = bounds.series and asked.quantile = bounds.quantile
),

with_values as (
    select
        with_ranks.series,
        with_ranks.quantile,
        with_ranks.n,
        with_ranks.upper_n,
        with_ranks.two_sided_n,
        with_ranks.value_rank,
        with_ranks.low_rank,
        with_ranks.high_rank,
        value_row.value_ns,
        low_row.value_ns as low_ns,
        high_row.value_ns as high_ns
    from with_ranks
    left join ranked as value_row
        on with_ranks.series = value_row.series and with_ranks.value_rank = value_row.place
    left join ranked as low_row
        on with_ranks.series = low_row.series and with_ranks.low_rank = low_row.place
    left join ranked as high_row
        on with_ranks.series = high_row.series and with_ranks.high_rank = high_row.place
),

final as (
    select
        $metric as metric,
        series,
        quantile,
        n,
        value_ns / 1e9 as value_s,
        low_ns / 1e9 as low_s,
        high_ns / 1e9 as high_s,
        case when n >= two_sided_n then 'two_sided' when n >= upper_n then 'upper_only' else 'none' end as bounds,
        n >= upper_n and value_ns is null as above_max,
        n >= upper_n and high_ns is null as high_above_max,
        case
            when n < upper_n then 'n=' || cast(n as varchar) || ' < ' || cast(upper_n as varchar)
            when value_ns is null then '> max'
            else cast(value_ns / 1e9 as varchar)
        end as shown,
        case
            when n < upper_n then 'n=' || cast(n as varchar) || ' < ' || cast(upper_n as varchar)
            when value_ns is null then '> max'
        end as reason,
        value_rank,
        low_rank,
        high_rank
    from with_values
)

select * from final
order by series, quantile
