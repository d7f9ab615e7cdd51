-- view: the p99 of TTFT over the completed requests of the window
-- grain: one row
-- inputs: cohort
-- rules: Nearest rank: the value at rank ceil(0.99 n). Below 299 requests no upper 95 % bound of a p99 exists, and the
--   value is NULL with the reason. The rank is found by counting milliseconds first, and only the millisecond that
--   holds it is sorted. `latency/quantiles` answers the same with bounds.
with

measured as (
    select ttft_worst_ns
    from cohort
    where outcome = 'completed' and ttft_worst_ns is not null
),

milliseconds as (
    select
        ttft_worst_ns // 1000000 as ms,
        count(*) as requests
    from measured
    group by ttft_worst_ns // 1000000
),

counted as (
    select
        ms,
        requests,
        sum(requests) over () as n,
        sum(requests) over (order by ms rows between unbounded preceding and current row) as up_to
    from milliseconds
),

wanted as (
    select
        ms,
        n,
        -- integer ceil(0.99 n), less the values in the milliseconds before this one
        (99 * n + 99) // 100 - (up_to - requests) as place
    from counted
    where (99 * n + 99) // 100 > up_to - requests and (99 * n + 99) // 100 <= up_to
),

placed as (
    select
        measured.ttft_worst_ns,
        row_number() over (order by measured.ttft_worst_ns) as place
    from measured
    inner join wanted on measured.ttft_worst_ns // 1000000 = wanted.ms
),

final as (
    select
        coalesce(max(wanted.n), 0) as n,
        max(placed.ttft_worst_ns) filter (where wanted.n >= 299) as ttft_p99_ns,
        case
            when coalesce(max(wanted.n), 0) < 299
                then 'n=' || cast(coalesce(max(wanted.n), 0) as varchar) || ' < 299'
        end as reason
    from wanted
    left join placed on wanted.place = placed.place
)

select * from final
