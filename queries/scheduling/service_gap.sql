-- question: How far did the service of two tenants drift apart while both had requests waiting?
-- grain: one row per engine process and pair of tenants that were backlogged at once
-- inputs: tenant_timeline
-- params:
--   unit_prompt  double  units    null  min 0  of a prompt token; null: as the engine recorded it, else 1
--   unit_output  double  units    null  min 0  of an output token; null: as the engine recorded it, else 2
--   tenants      bigint  tenants  20    min 2  of each engine those with the most service; pairs are among these
-- outputs:
--   engine_id          varchar  -
--   tenant_a           varchar  -          the name that sorts first
--   tenant_b           varchar  -
--   intervals          bigint   intervals  in which both were backlogged without a break
--   both_backlogged_s  double   seconds    their length in sum
--   units_a            double   units      received in them
--   units_b            double   units
--   gap_units          double   units      the largest drift within one interval, by weight
--   gap_bound_units    double   units      what the engine's order promises; NULL: no such promise, or by other units
--   gap_within_bound   boolean  -          gap_units <= gap_bound_units
--   gap_interval_s     double   seconds    length of that interval
--   gap_at_s           double   seconds    its start, after the engine's first step in the window
-- rules: In the window and, after it, as long as the engine worked on its requests, see `tenant_timeline`. Backlogged: a request WAITING or
--   PREEMPTED. Within an interval the difference of service a - b, each divided by the tenant's weight, starts at 0
--   and changes with each step; the drift is its largest value minus its smallest, 0 among them, which is the most that
--   any part of the interval saw. A fair order bounds it whatever the load (decision 014): vtc and drr without lanes;
--   where either has nothing waiting there is no bound, so that time is left out. Of equal drifts the earliest interval.
-- source: Y. Sheng et al., Fairness in Serving Large Language Models, OSDI 2024
with

timeline as (
    select
        engine_id,
        tenant,
        at_ns,
        from_ns,
        to_ns,
        coalesce($unit_prompt, unit_prompt, 1) * prompt_tokens + coalesce($unit_output, unit_output, 2) * output_tokens
            as units,
        weight,
        case
            when
                coalesce($unit_prompt, unit_prompt) = unit_prompt and coalesce($unit_output, unit_output) = unit_output
                then service_gap_bound
        end as bound,
        waiting_change
    from tenant_timeline
),

ranked as (
    select
        engine_id,
        tenant,
        row_number() over (
            partition by engine_id
            order by sum(case when at_ns > from_ns and at_ns <= to_ns then units else 0e0 end) desc, tenant
        ) as place
    from timeline
    group by engine_id, tenant
),

pairs as (
    select
        ranked_a.engine_id,
        ranked_a.tenant as tenant_a,
        ranked_b.tenant as tenant_b
    from ranked as ranked_a
    inner join ranked as ranked_b
        on ranked_a.engine_id = ranked_b.engine_id and ranked_a.tenant < ranked_b.tenant
    where ranked_a.place <= $tenants and ranked_b.place <= $tenants
),

of_either as (
    select
        pairs.tenant_a,
        pairs.tenant_b,
        timeline.*,
        units as units_a,
        0e0 as units_b,
        units / nullif(weight, 0) as ahead,
        waiting_change as change_a,
        0 as change_b
    from pairs
    inner join timeline on pairs.engine_id = timeline.engine_id and pairs.tenant_a = timeline.tenant
    union all
    select
        pairs.tenant_a,
        pairs.tenant_b,
        timeline.*,
        0e0 as units_a,
        units as units_b,
        -units / nullif(weight, 0) as ahead,
        0 as change_a,
        waiting_change as change_b
    from pairs
    inner join timeline on pairs.engine_id = timeline.engine_id and pairs.tenant_b = timeline.tenant
),

by_stamp as (
    select
        engine_id,
        tenant_a,
        tenant_b,
        at_ns,
        max(from_ns) as from_ns,
        max(to_ns) as to_ns,
        sum(units_a) as units_a,
        sum(units_b) as units_b,
        sum(ahead) as ahead,
        max(bound) as bound,
        sum(change_a) as change_a,
        sum(change_b) as change_b
    from of_either
    group by engine_id, tenant_a, tenant_b, at_ns
),

waited as (
    select
        by_stamp.*,
        lag(at_ns) over (partition by engine_id, tenant_a, tenant_b order by at_ns) as since_ns,
        sum(change_a) over (
            partition by engine_id, tenant_a, tenant_b
            order by at_ns
            rows between unbounded preceding and current row
        ) - change_a as waited_a,
        sum(change_b) over (
            partition by engine_id, tenant_a, tenant_b
            order by at_ns
            rows between unbounded preceding and current row
        ) - change_b as waited_b
    from by_stamp
),

-- What happened up to this stamp happened while both were backlogged; the last stamp of an interval is its end.
numbered as (
    select
        waited.*,
        waited_a > 0 and waited_b > 0 as is_both,
        sum(case when waited_a > 0 and waited_b > 0 then 0 else 1 end) over (
            partition by engine_id, tenant_a, tenant_b
            order by at_ns
            rows between unbounded preceding and current row
        ) as interval_number
    from waited
),

drifting as (
    select
        engine_id,
        tenant_a,
        tenant_b,
        interval_number,
        units_a,
        units_b,
        bound,
        greatest(since_ns, from_ns) - from_ns as begin_ns,
        at_ns - greatest(since_ns, from_ns) as part_ns,
        sum(ahead) over (
            partition by engine_id, tenant_a, tenant_b, interval_number
            order by at_ns
            rows between unbounded preceding and current row
        ) as difference
    from numbered
    where is_both and at_ns > from_ns and at_ns <= to_ns
),

intervals as (
    select
        engine_id,
        tenant_a,
        tenant_b,
        sum(units_a) as units_a,
        sum(units_b) as units_b,
        max(bound) as bound,
        min(begin_ns) as begin_ns,
        cast(sum(part_ns) as bigint) as length_ns,
        greatest(max(difference), 0e0) - least(min(difference), 0e0) as gap_units
    from drifting
    group by engine_id, tenant_a, tenant_b, interval_number
),

placed as (
    select
        intervals.*,
        row_number() over (
            partition by engine_id, tenant_a, tenant_b
            order by gap_units desc, begin_ns
        ) as place
    from intervals
),

final as (
    select
        engine_id,
        tenant_a,
        tenant_b,
        count(*) as intervals,
        sum(length_ns) / 1e9 as both_backlogged_s,
        sum(units_a) as units_a,
        sum(units_b) as units_b,
        max(gap_units) as gap_units,
        max(bound) as gap_bound_units,
        -- Shares by weight are sums of rounded numbers.
        max(gap_units) <= max(bound) * (1 + 1e-9) as gap_within_bound,
        max(case when place = 1 then length_ns end) / 1e9 as gap_interval_s,
        max(case when place = 1 then begin_ns end) / 1e9 as gap_at_s
    from placed
    group by engine_id, tenant_a, tenant_b
)

select * from final
order by engine_id, gap_units desc, tenant_a, tenant_b
