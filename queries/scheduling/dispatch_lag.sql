-- question: Did the load generator send when it had planned to, or is its own lateness in the numbers?
-- grain: one row per class with scheduled requests that were sent
-- inputs: cohort
-- params:
--   bound_ns  bigint  ns  null  min 0  a lag above this is too much; null: a tenth of the class's TTFT limit
-- outputs:
--   class                varchar  -
--   scheduled_sent       bigint   requests  sent, with a scheduled arrival: the denominator
--   p50_s                double   seconds   dispatch lag: send minus schedule, nearest rank
--   p90_s                double   seconds
--   p99_s                double   seconds
--   max_s                double   seconds
--   first_s              double   seconds   lag of the first request scheduled
--   bound_s              double   seconds
--   above_bound          bigint   requests
--   above_bound_ratio    double   ratio     above_bound / scheduled_sent
--   above_bound_low      double   ratio     Wilson 95 %
--   above_bound_high     double   ratio     Wilson 95 %
--   is_valid             boolean  -         p99 <= bound; NULL without a bound
-- rules: The client's own stamps, whichever observer is declared. Where requests carry their own TTFT limits the
--   smallest of the class counts. Requests that were sent without a schedule are not here: they waited for nothing.
--   Nor is what was scheduled and never sent: a record begins with the send, so only the load generator can count those.
--   Quantiles are these requests' own order statistics. Wilson's interval assumes independent requests.
with

scheduled as (
    select
        class,
        request_id,
        client_intended_ns,
        client_dispatch_lag_ns,
        limit_ttft_ns
    from cohort
    where client_dispatch_lag_ns is not null
),

bounds as (
    select
        class,
        coalesce(cast($bound_ns as bigint), min(limit_ttft_ns) // 10) as bound_ns
    from scheduled
    group by class
),

ranked as (
    select
        scheduled.class,
        scheduled.client_dispatch_lag_ns,
        bounds.bound_ns,
        row_number() over (
            partition by scheduled.class
            order by scheduled.client_dispatch_lag_ns, scheduled.request_id
        ) as place,
        count(*) over (partition by scheduled.class) as n,
        row_number() over (
            partition by scheduled.class
            order by scheduled.client_intended_ns, scheduled.request_id
        ) as turn
    from scheduled
    inner join bounds on scheduled.class = bounds.class
),

by_class as (
    select
        class,
        count(*) as scheduled_sent,
        max(case when place = (50 * n + 99) // 100 then client_dispatch_lag_ns end) as p50_ns,
        max(case when place = (90 * n + 99) // 100 then client_dispatch_lag_ns end) as p90_ns,
        max(case when place = (99 * n + 99) // 100 then client_dispatch_lag_ns end) as p99_ns,
        max(client_dispatch_lag_ns) as max_ns,
        max(case when turn = 1 then client_dispatch_lag_ns end) as first_ns,
        max(bound_ns) as bound_ns,
        count(*) filter (where client_dispatch_lag_ns > bound_ns) as above_bound
    from ranked
    group by class
),

final as (
    select
        class,
        scheduled_sent,
        p50_ns / 1e9 as p50_s,
        p90_ns / 1e9 as p90_s,
        p99_ns / 1e9 as p99_s,
        max_ns / 1e9 as max_s,
        first_ns / 1e9 as first_s,
        bound_ns / 1e9 as bound_s,
        case when bound_ns is not null then above_bound end as above_bound,
        case when bound_ns is not null then ratio(above_bound * 1e0, scheduled_sent) end as above_bound_ratio,
        case when bound_ns is not null then wilson_low(above_bound, scheduled_sent) end as above_bound_low,
        case when bound_ns is not null then wilson_high(above_bound, scheduled_sent) end as above_bound_high,
        p99_ns <= bound_ns as is_valid
    from by_class
)

select * from final
order by class
