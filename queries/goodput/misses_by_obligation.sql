-- question: Which obligation was missed how often, and how often was it the only one?
-- grain: one row per obligation, whether promised or not
-- inputs: cohort
-- outputs:
--   place             bigint   -         order of the rows
--   obligation        varchar  -         outcome, class, ttft, ttft_visible, itl_max, tpot, e2e, min_tokens, unobserved
--   promised          bigint   requests  with a limit on it; every request has an outcome, a class and an observer
--   missed            bigint   requests
--   missed_alone      bigint   requests  nothing else was missed: these would have qualified
--   offered           bigint   requests  the denominator
--   miss_ratio        double   ratio     missed / offered
--   miss_ratio_low    double   ratio     Wilson 95 %
--   miss_ratio_high   double   ratio     Wilson 95 %
-- rules: A request counts under every obligation that it missed, so the rows do not add up to the misses. A missing
--   TTFT or e2e misses its limit; a missing gap or TPOT does not. Nothing is known of an unobserved request: it
--   misses 'unobserved' and nothing else. Wilson's interval assumes independent requests.
with

cohort as (
    select
        unobserved,
        miss_outcome,
        miss_class,
        miss_ttft,
        miss_ttft_visible,
        miss_itl_max,
        miss_tpot,
        miss_e2e,
        miss_min_tokens,
        outcome,
        min_tokens,
        limit_ttft_ns,
        limit_ttft_visible_ns,
        limit_itl_max_ns,
        limit_tpot_ns,
        limit_e2e_ns,
        cast(unobserved as int) + cast(miss_outcome as int) + cast(miss_class as int) + cast(miss_ttft as int)
        + cast(miss_ttft_visible as int) + cast(miss_itl_max as int) + cast(miss_tpot as int) + cast(miss_e2e as int)
        + cast(miss_min_tokens as int) as misses
    from cohort
),

obligations as (
    select 1 as place, 'outcome' as obligation, true as promised, miss_outcome as missed, misses from cohort
    union all
    select 2 as place, 'class' as obligation, true as promised, miss_class as missed, misses from cohort
    union all
    select
        3 as place,
        'ttft' as obligation,
        limit_ttft_ns is not null as promised,
        miss_ttft as missed,
        misses
    from cohort
    union all
    select
        4 as place,
        'ttft_visible' as obligation,
        limit_ttft_visible_ns is not null as promised,
        miss_ttft_visible as missed,
        misses
    from cohort
    union all
    select
        5 as place,
        'itl_max' as obligation,
        limit_itl_max_ns is not null as promised,
        miss_itl_max as missed,
        misses
    from cohort
    union all
    select
        6 as place,
        'tpot' as obligation,
        limit_tpot_ns is not null as promised,
        miss_tpot as missed,
        misses
    from cohort
    union all
    select
        7 as place,
        'e2e' as obligation,
        limit_e2e_ns is not null as promised,
        miss_e2e as missed,
        misses
    from cohort
    union all
    select
        8 as place,
        'min_tokens' as obligation,
        min_tokens > 0 as promised,
        miss_min_tokens as missed,
        misses
    from cohort
    union all
    select 9 as place, 'unobserved' as obligation, true as promised, unobserved as missed, misses from cohort
),

names as (
    select 1 as place, 'outcome' as obligation
    union all
    select 2 as place, 'class' as obligation
    union all
    select 3 as place, 'ttft' as obligation
    union all
    select 4 as place, 'ttft_visible' as obligation
    union all
    select 5 as place, 'itl_max' as obligation
    union all
    select 6 as place, 'tpot' as obligation
    union all
    select 7 as place, 'e2e' as obligation
    union all
    select 8 as place, 'min_tokens' as obligation
    union all
    select 9 as place, 'unobserved' as obligation
),

counted as (
    select
        place,
        count(*) as offered,
        count(*) filter (where promised) as promised,
        count(*) filter (where missed) as missed,
        count(*) filter (where missed and misses = 1) as missed_alone
    from obligations
    group by place
),

numbered as (
    select
        names.place,
        names.obligation,
        coalesce(counted.promised, 0) as promised,
        coalesce(counted.missed, 0) as missed,
        coalesce(counted.missed_alone, 0) as missed_alone,
        coalesce(counted.offered, 0) as offered
    from names
    left join counted on names.place = counted.place
),

final as (
    select
        cast(place as bigint) as place,
        obligation,
        promised,
        missed,
        missed_alone,
        offered,
        ratio(missed, offered) as miss_ratio,
        wilson_low(missed, offered) as miss_ratio_low,
        wilson_high(missed, offered) as miss_ratio_high
    from numbered
)

select * from final
order by place
