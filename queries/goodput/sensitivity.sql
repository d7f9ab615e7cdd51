-- question: What would attainment and goodput be if one limit were tighter or looser and all others stayed?
-- grain: one row per promised limit and factor
-- inputs: cohort, run_window
-- outputs:
--   limit_name        varchar  -         ttft, ttft_visible, itl_max, tpot or e2e
--   factor            double   -         the limit is multiplied by it; 1 is the contract itself
--   limit_min_s       double   seconds   the smallest changed limit among the requests
--   limit_max_s       double   seconds   the largest; the same unless classes or requests promise differently
--   offered           bigint   requests
--   qualified         bigint   requests
--   gained            bigint   requests  qualified here less qualified under the contract
--   attainment        double   ratio     qualified / offered
--   attainment_low    double   ratio     Wilson 95 %
--   attainment_high   double   ratio     Wilson 95 %
--   goodput_rps       double   req/s
--   token_goodput     double   tokens/s
-- rules: One limit at a time, in whole ns: limit * thousandths // 1000, and `<=` meets it. A limit that no request
--   has gives no row. The outcome, the class and what was observed do not change. Wilson's interval assumes
--   independent requests; the rows of one limit share their requests, so their difference is far better known than
--   two intervals suggest.
with

cohort as (
    select
        qualified,
        output_tokens,
        ttft_worst_ns,
        ttft_visible_worst_ns,
        itl_max_ns,
        tpot_ceil_ns,
        e2e_ns,
        limit_ttft_ns,
        limit_ttft_visible_ns,
        limit_itl_max_ns,
        limit_tpot_ns,
        limit_e2e_ns,
        miss_ttft,
        miss_ttft_visible,
        miss_itl_max,
        miss_tpot,
        miss_e2e,
        cast(unobserved as int) + cast(miss_outcome as int) + cast(miss_class as int) + cast(miss_ttft as int)
        + cast(miss_ttft_visible as int) + cast(miss_itl_max as int) + cast(miss_tpot as int) + cast(miss_e2e as int)
        + cast(miss_min_tokens as int) as misses
    from cohort
),

run_window as (
    select window_ns
    from run_window
),

factors as (
    select 250 as thousandths
    union all
    select 500 as thousandths
    union all
    select 750 as thousandths
    union all
    select 900 as thousandths
    union all
    select 1000 as thousandths
    union all
    select 1100 as thousandths
    union all
    select 1250 as thousandths
    union all
    select 1500 as thousandths
    union all
    select 2000 as thousandths
    union all
    select 4000 as thousandths
),

-- A missing TTFT or e2e meets no limit, a missing gap or TPOT every one.
measured as (
    select
        1 as place,
        'ttft' as limit_name,
        limit_ttft_ns as limit_ns,
        ttft_worst_ns as value_ns,
        false as missing_meets,
        misses - cast(miss_ttft as int) as other_misses,
        qualified,
        output_tokens
    from cohort
    union all
    select
        2 as place,
        'ttft_visible' as limit_name,
        limit_ttft_visible_ns as limit_ns,
        ttft_visible_worst_ns as value_ns,
        false as missing_meets,
        misses - cast(miss_ttft_visible as int) as other_misses,
        qualified,
        output_tokens
    from cohort
    union all
    select
        3 as place,
        'itl_max' as limit_name,
        limit_itl_max_ns as limit_ns,
        itl_max_ns as value_ns,
        true as missing_meets,
        misses - cast(miss_itl_max as int) as other_misses,
        qualified,
        output_tokens
    from cohort
    union all
    select
        4 as place,
        'tpot' as limit_name,
        limit_tpot_ns as limit_ns,
        tpot_ceil_ns as value_ns,
        true as missing_meets,
        misses - cast(miss_tpot as int) as other_misses,
        qualified,
        output_tokens
    from cohort
    union all
    select
        5 as place,
        'e2e' as limit_name,
        limit_e2e_ns as limit_ns,
        e2e_ns as value_ns,
        false as missing_meets,
        misses - cast(miss_e2e as int) as other_misses,
        qualified,
        output_tokens
    from cohort
),

judged as (
    select
        measured.place,
        measured.limit_name,
        factors.thousandths,
        measured.limit_ns * factors.thousandths // 1000 as changed_ns,
        measured.qualified,
        measured.output_tokens,
        measured.other_misses = 0
        and (
            measured.limit_ns is null
            or coalesce(measured.value_ns <= measured.limit_ns * factors.thousandths // 1000, measured.missing_meets)
        ) as would_qualify
    from measured
    cross join factors
),

counted as (
    select
        place,
        limit_name,
        thousandths,
        min(changed_ns) as limit_min_ns,
        max(changed_ns) as limit_max_ns,
        count(*) as offered,
        count(*) filter (where would_qualify) as qualified,
        count(*) filter (where would_qualify) - count(*) filter (where qualified) as gained,
        cast(coalesce(sum(output_tokens) filter (where would_qualify), 0) as bigint) as qualified_tokens
    from judged
    group by place, limit_name, thousandths
    having count(changed_ns) > 0
),

final as (
    select
        counted.limit_name,
        counted.thousandths / 1e3 as factor,
        counted.limit_min_ns / 1e9 as limit_min_s,
        counted.limit_max_ns / 1e9 as limit_max_s,
        counted.offered,
        counted.qualified,
        counted.gained,
        ratio(counted.qualified, counted.offered) as attainment,
        wilson_low(counted.qualified, counted.offered) as attainment_low,
        wilson_high(counted.qualified, counted.offered) as attainment_high,
        ratio(counted.qualified * 1e9, run_window.window_ns) as goodput_rps,
        ratio(counted.qualified_tokens * 1e9, run_window.window_ns) as token_goodput
    from counted
    cross join run_window
)

select * from final
order by limit_name, factor
