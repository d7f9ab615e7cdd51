-- question: Who keeps a limit on the average gap and breaks the same limit on the largest, and the other way round?
-- grain: one row per verdict on the average and on the largest gap; all four have a row
-- inputs: cohort
-- params:
--   tpot_ns     bigint  ns  30000000  min 0  limit on the average, (last - first) / (tokens - 1)
--   itl_max_ns  bigint  ns  30000000  min 0  limit on the largest gap
-- outputs:
--   meets_tpot        boolean  -         the average gap is within its limit
--   meets_itl_max     boolean  -         the largest gap is within its limit
--   requests          bigint   requests
--   measured          bigint   requests  the denominator: completed, with a gap and a TPOT
--   share             double   ratio     requests / measured
--   share_low         double   ratio     Wilson 95 %
--   share_high        double   ratio     Wilson 95 %
--   mean_tpot_s       double   seconds   mean of the requests' TPOT
--   mean_itl_max_s    double   seconds   mean of the requests' largest gap
--   worst_itl_max_s   double   seconds   largest gap of all
-- rules: `<=` meets a limit, in whole ns. Only completed requests with both values are compared; a single token or event
--   has neither. A stream that pauses for a second in a hundred tokens has an average 10 ms worse and a largest gap of
--   a second: the first row of the table that is true and false is what an average hides.
with

cohort as (
    select
        outcome,
        itl_max_ns,
        tpot_ceil_ns,
        span_ns,
        span_tokens
    from cohort
),

judged as (
    select
        tpot_ceil_ns <= $tpot_ns as meets_tpot,
        itl_max_ns <= $itl_max_ns as meets_itl_max,
        span_ns / nullif(span_tokens - 1, 0) as tpot_ns,
        itl_max_ns
    from cohort
    where outcome = 'completed' and itl_max_ns is not null and tpot_ceil_ns is not null
),

verdicts as (
    select true as meets_tpot, true as meets_itl_max
    union all
    select true as meets_tpot, false as meets_itl_max
    union all
    select false as meets_tpot, true as meets_itl_max
    union all
    select false as meets_tpot, false as meets_itl_max
),

counted as (
    select
        meets_tpot,
        meets_itl_max,
        count(*) as requests,
        avg(tpot_ns) as mean_tpot_ns,
        avg(itl_max_ns) as mean_itl_max_ns,
        max(itl_max_ns) as worst_itl_max_ns
    from judged
    group by meets_tpot, meets_itl_max
),

totals as (
    select count(*) as measured
    from judged
),

final as (
    select
        verdicts.meets_tpot,
        verdicts.meets_itl_max,
        coalesce(counted.requests, 0) as requests,
        totals.measured,
        ratio(coalesce(counted.requests, 0), totals.measured) as share,
        wilson_low(coalesce(counted.requests, 0), totals.measured) as share_low,
        wilson_high(coalesce(counted.requests, 0), totals.measured) as share_high,
        counted.mean_tpot_ns / 1e9 as mean_tpot_s,
        counted.mean_itl_max_ns / 1e9 as mean_itl_max_s,
        counted.worst_itl_max_ns / 1e9 as worst_itl_max_s
    from verdicts
    cross join totals
    left join counted
        on verdicts.meets_tpot = counted.meets_tpot and verdicts.meets_itl_max = counted.meets_itl_max
)

select * from final
order by meets_tpot desc, meets_itl_max desc
