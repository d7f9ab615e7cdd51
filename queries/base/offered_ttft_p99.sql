-- view: the p99 of TTFT over the offered requests of the window
-- grain: one row
-- inputs: cohort
-- rules: Nearest rank: the value at rank ceil(0.99 n) of the n offered. What was not completed, or has no TTFT, waits
--   forever: it ranks above every value, and a p99 among it is NULL with the reason '> max'. Not among the n is what
--   completed without streaming in a class with streaming = 'optional': no first token was owed. Below 299 requests no
--   upper 95 % bound of a p99 exists, and the value is NULL with the reason. The rank is found by counting
--   milliseconds first, and only the millisecond that holds it is sorted. `quantiles` answers the same with bounds.
with

offered as (
    select
        count(*) as n,
        (99 * count(*) + 99) // 100 as wanted_rank
    from cohort
    where not (e2e_alone and outcome = 'completed' and ttft_ns is null)
),

measured as (
    select ttft_ns
    from cohort
    where outcome = 'completed' and ttft_ns is not null
),

milliseconds as (
    select
        ttft_ns // 1000000 as ms,
        count(*) as requests
    from measured
    group by ttft_ns // 1000000
),

counted as (
    select
        ms,
        requests,
        sum(requests) over (order by ms rows between unbounded preceding and current row) as up_to
    from milliseconds
),

wanted as (
    select
        counted.ms,
        offered.wanted_rank - (counted.up_to - counted.requests) as place
    from counted
    inner join offered
        on counted.up_to - counted.requests < offered.wanted_rank and offered.wanted_rank <= counted.up_to
    where offered.n >= 299
),

placed as (
    select
        measured.ttft_ns,
        row_number() over (order by measured.ttft_ns) as place
    from measured
    inner join wanted on measured.ttft_ns // 1000000 = wanted.ms
),

found as (
    select placed.ttft_ns
    from placed
    inner join wanted on placed.place = wanted.place
),

final as (
    select
        offered.n,
        found.ttft_ns as ttft_p99_ns,
        case
            when offered.n < 299 then 'n=' || cast(offered.n as varchar) || ' < 299'
            when found.ttft_ns is null then '> max'
        end as reason
    from offered
    left join found on true
)

select * from final
