-- question: Where does the time to first token go, and which link makes the slow requests slow?
-- grain: one row per link that was measured or has a budget, and the total
-- inputs: ttft_links, run_budget
-- params:
--   class  varchar  -  null  only requests of this class
-- outputs:
--   position             bigint   -         along the path
--   link                 varchar  -         in the order of the path; `residual` is unstamped time; `total` the sum
--   n                    bigint   requests  in which the link was stamped
--   p50_s                double   seconds   nearest rank over these requests
--   p99_s                double   seconds
--   mean_s               double   seconds
--   budget_s             double   seconds   from the contract; NULL: none written
--   above_budget         bigint   requests  NULL without a budget
--   above_budget_ratio   double   ratio     above_budget / n
--   above_budget_low     double   ratio     Wilson 95 %
--   above_budget_high    double   ratio     Wilson 95 %
--   p99_within_budget    boolean  -
--   negative             bigint   requests  in which the link is below 0: a wrong clock
--   tail_requests        bigint   requests  with a total at or above its p99
--   tail_mean_s          double   seconds   the link in those
--   middle_mean_s        double   seconds   the link in the requests from p45 to p55 of the total
--   tail_excess_s        double   seconds   tail_mean - middle_mean
--   tail_excess_share    double   ratio     of the total's tail excess; the links' shares sum to 1 with the residual
-- rules: Links as in `ttft_links`; the total is TTFT from the scheduled arrival where there is one. A link that a request
--   lacks counts 0 in tail and middle means, since its time is in that request's residual; p50, p99 and mean are over
--   the n requests that have it. Quantiles are these requests' own order statistics and claim nothing beyond them
--   (`quantiles` has bounds). Ranks of the middle: ceil(0.45 N) to ceil(0.55 N) by total, equal totals by request.
--   Shares are NULL where the total has no excess. A budget is met by `<=`. Requests without TTFT are in `without_ttft`.
--   Wilson's interval assumes independent requests.
with

chosen_links as (
    select
        request_id,
        total_ns,
        position,
        link,
        link_ns
    from ttft_links
    where coalesce(class = $class, true)
),

run_budget as (
    select
        link,
        limit_ns
    from run_budget
),

totals as (
    select
        request_id,
        total_ns,
        row_number() over (order by total_ns, request_id) as place,
        count(*) over () as n
    from chosen_links
    where link = 'residual'
),

tail_start as (
    select total_ns as p99_ns
    from totals
    where place = (99 * n + 99) // 100
),

groups as (
    select
        totals.request_id,
        totals.total_ns >= tail_start.p99_ns as is_tail,
        totals.place >= (45 * totals.n + 99) // 100 and totals.place <= (55 * totals.n + 99) // 100 as is_middle
    from totals
    cross join tail_start
),

group_sizes as (
    select
        count(*) filter (where is_tail) as tail_requests,
        count(*) filter (where is_middle) as middle_requests
    from groups
),

with_total as (
    select
        request_id,
        position,
        link,
        link_ns
    from chosen_links
    union all
    select
        request_id,
        11 as position,
        'total' as link,
        total_ns as link_ns
    from totals
),

ranked as (
    select
        with_total.*,
        groups.is_tail,
        groups.is_middle,
        row_number() over (partition by with_total.link order by with_total.link_ns) as place,
        count(*) over (partition by with_total.link) as n
    from with_total
    inner join groups on with_total.request_id = groups.request_id
),

measured as (
    select
        ranked.link,
        max(ranked.position) as position,
        max(ranked.n) as n,
        max(case when ranked.place = (50 * ranked.n + 99) // 100 then ranked.link_ns end) as p50_ns,
        max(case when ranked.place = (99 * ranked.n + 99) // 100 then ranked.link_ns end) as p99_ns,
        avg(ranked.link_ns) as mean_ns,
        max(run_budget.limit_ns) as limit_ns,
        count(*) filter (where ranked.link_ns > run_budget.limit_ns) as above_budget,
        count(*) filter (where ranked.link_ns < 0) as negative,
        coalesce(sum(ranked.link_ns) filter (where ranked.is_tail), 0) as tail_ns,
        coalesce(sum(ranked.link_ns) filter (where ranked.is_middle), 0) as middle_ns
    from ranked
    left join run_budget on ranked.link = run_budget.link
    group by ranked.link
),

averaged as (
    select
        measured.*,
        group_sizes.tail_requests,
        ratio(tail_ns * 1e0, group_sizes.tail_requests) as tail_mean_ns,
        ratio(middle_ns * 1e0, group_sizes.middle_requests) as middle_mean_ns
    from measured
    cross join group_sizes
),

total_excess as (
    select tail_mean_ns - middle_mean_ns as excess_ns
    from averaged
    where link = 'total'
),

unmeasured as (
    select
        run_budget.link,
        run_budget.limit_ns
    from run_budget
    left join measured on run_budget.link = measured.link
    where measured.link is null
),

final as (
    select
        averaged.position,
        averaged.link,
        averaged.n,
        averaged.p50_ns / 1e9 as p50_s,
        averaged.p99_ns / 1e9 as p99_s,
        averaged.mean_ns / 1e9 as mean_s,
        averaged.limit_ns / 1e9 as budget_s,
        case when averaged.limit_ns is not null then averaged.above_budget end as above_budget,
        case when averaged.limit_ns is not null then ratio(averaged.above_budget * 1e0, averaged.n) end
            as above_budget_ratio,
        case when averaged.limit_ns is not null then wilson_low(averaged.above_budget, averaged.n) end
            as above_budget_low,
        case when averaged.limit_ns is not null then wilson_high(averaged.above_budget, averaged.n) end
            as above_budget_high,
        averaged.p99_ns <= averaged.limit_ns as p99_within_budget,
        averaged.negative,
        averaged.tail_requests,
        averaged.tail_mean_ns / 1e9 as tail_mean_s,
        averaged.middle_mean_ns / 1e9 as middle_mean_s,
        (averaged.tail_mean_ns - averaged.middle_mean_ns) / 1e9 as tail_excess_s,
        ratio(averaged.tail_mean_ns - averaged.middle_mean_ns, total_excess.excess_ns) as tail_excess_share
    from averaged
    cross join total_excess
    union all
    select
        12 as position,
        unmeasured.link,
        0 as n,
        null as p50_s,
        null as p99_s,
        null as mean_s,
        unmeasured.limit_ns / 1e9 as budget_s,
        0 as above_budget,
        null as above_budget_ratio,
        null as above_budget_low,
        null as above_budget_high,
        null as p99_within_budget,
        0 as negative,
        null as tail_requests,
        null as tail_mean_s,
        null as middle_mean_s,
        null as tail_excess_s,
        null as tail_excess_share
    from unmeasured
)

select * from final
order by position, link
