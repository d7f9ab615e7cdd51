-- question: What is the one word for how each request's output was delivered?
-- grain: one row per offered request of the cohort
-- inputs: cohort, judged_holds, run_window
-- outputs:
--   request_id       varchar  -
--   external_id      varchar  -         the caller's own
--   class            varchar  -
--   outcome          varchar  -
--   verdict          varchar  -         `on_time` without a late hold; NULL where is_judged is false
--   holds            bigint   holds
--   excess_s         double   seconds   waiting beyond the limit, of every hold
--   engine_s         double   seconds   the part that the engine owes, of holds with a decomposition
--   delivery_s       double   seconds   the part that delivery owes
--   engine_share     double   ratio     engine_s / (engine_s + delivery_s)
--   delivery_share   double   ratio
--   longest_s        double   seconds   longest hold
--   is_judged        boolean  -         had output at a receipt observer, so that a hold could be seen
-- rules: Engine and delivery both owing a tenth or more of what could be decomposed: mixed. Else the verdict with the
--   largest excess; equal ones by name. A hold of unknown length has an excess of 0 here.
with

cohort as (
    select
        request_id,
        external_id,
        class,
        outcome,
        first_ns,
        observer
    from cohort
    cross join run_window
),

judged_holds as (
    select
        request_id,
        verdict,
        excess_ns,
        held_ns,
        case when verdict <> 'unknown' then engine_excess_ns end as engine_excess_ns,
        case when verdict <> 'unknown' then delivery_excess_ns end as delivery_excess_ns
    from judged_holds
),

by_verdict as (
    select
        request_id,
        verdict,
        count(*) as holds,
        coalesce(sum(excess_ns), 0) as excess_ns,
        sum(engine_excess_ns) as engine_ns,
        sum(delivery_excess_ns) as delivery_ns,
        max(held_ns) as longest_ns
    from judged_holds
    group by request_id, verdict
),

ranked as (
    select
        by_verdict.*,
        row_number() over (partition by request_id order by excess_ns desc, verdict) as place
    from by_verdict
),

by_request as (
    select
        request_id,
        max(case when place = 1 then verdict end) as largest_verdict,
        cast(sum(holds) as bigint) as holds,
        sum(excess_ns) as excess_ns,
        sum(engine_ns) as engine_ns,
        sum(delivery_ns) as delivery_ns,
        max(longest_ns) as longest_ns
    from ranked
    group by request_id
),

final as (
    select
        cohort.request_id,
        cohort.external_id,
        cohort.class,
        cohort.outcome,
        case
            when by_request.request_id is null and cohort.first_ns is not null and cohort.observer <> 'engine'
                then 'on_time'
            when
                10 * by_request.engine_ns >= by_request.engine_ns + by_request.delivery_ns
                and 10 * by_request.delivery_ns >= by_request.engine_ns + by_request.delivery_ns
                and by_request.engine_ns + by_request.delivery_ns > 0
                and by_request.largest_verdict in ('decoder_stall', 'buffered_delivery', 'client_late', 'mixed')
                then 'mixed'
            else by_request.largest_verdict
        end as verdict,
        coalesce(by_request.holds, 0) as holds,
        coalesce(by_request.excess_ns, 0) / 1e9 as excess_s,
        by_request.engine_ns / 1e9 as engine_s,
        by_request.delivery_ns / 1e9 as delivery_s,
        ratio(by_request.engine_ns * 1e0, by_request.engine_ns + by_request.delivery_ns) as engine_share,
        ratio(by_request.delivery_ns * 1e0, by_request.engine_ns + by_request.delivery_ns) as delivery_share,
        by_request.longest_ns / 1e9 as longest_s,
        cohort.first_ns is not null and cohort.observer <> 'engine' as is_judged
    from cohort
    left join by_request on cohort.request_id = by_request.request_id
)

select * from final
order by request_id
