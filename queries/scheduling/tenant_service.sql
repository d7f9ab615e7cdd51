-- question: How much service did each tenant receive, and how evenly did the engine share it among those who waited?
-- grain: one row per engine process and tenant
-- inputs: tenant_timeline
-- params:
--   unit_prompt  double  units  null  min 0  of a prompt token; null: as the engine recorded it, else 1
--   unit_output  double  units  null  min 0  of an output token; null: as the engine recorded it, else 2
-- outputs:
--   engine_id         varchar  -
--   tenant            varchar  -
--   prompt_tokens     bigint   tokens   run for it, what is run again after a preemption left out
--   output_tokens     bigint   tokens
--   service_units     double   units    of both
--   share             double   ratio    of the engine's units
--   backlogged_s      double   seconds  in which a request of it waited or was preempted
--   backlogged_units  double   units    received in that time
--   units_per_s       double   units/s  backlogged_units / backlogged_s
--   backlogged        bigint   tenants  of the engine, with any such time: Jain's index is over these
--   jain_index        double   ratio    1: all received the same while they waited; 1/n: one of n received everything
-- rules: In the window and, after it, as long as the engine worked on its requests, see `tenant_timeline`. A tenant that asks for little is
--   served little, so fairness is judged over the time in which it had something waiting. Jain's index of units_per_s:
--   (sum)² / (n · sum of squares), every tenant at the same weight. NULL when nobody waited, or those who did got nothing.
-- source: R. Jain, D. Chiu, W. Hawe, DEC TR-301, 1984
with

timeline as (
    select
        engine_id,
        tenant,
        at_ns,
        from_ns,
        to_ns,
        prompt_tokens,
        output_tokens,
        coalesce($unit_prompt, unit_prompt, 1) * prompt_tokens + coalesce($unit_output, unit_output, 2) * output_tokens
            as units,
        waiting - waiting_change as waited,
        lead(at_ns) over (partition by engine_id, tenant order by at_ns) as next_ns,
        waiting
    from tenant_timeline
),

clipped as (
    select
        timeline.*,
        at_ns > from_ns and at_ns <= to_ns as is_inside,
        case
            when waiting > 0
                then greatest(least(coalesce(next_ns, to_ns), to_ns) - greatest(at_ns, from_ns), 0)
            else 0
        end as backlogged_ns
    from timeline
),

by_tenant as (
    select
        engine_id,
        tenant,
        cast(sum(case when is_inside then prompt_tokens else 0 end) as bigint) as prompt_tokens,
        cast(sum(case when is_inside then output_tokens else 0 end) as bigint) as output_tokens,
        sum(case when is_inside then units else 0e0 end) as service_units,
        cast(sum(backlogged_ns) as bigint) as backlogged_ns,
        sum(case when is_inside and waited > 0 then units else 0e0 end) as backlogged_units
    from clipped
    group by engine_id, tenant
),

rated as (
    select
        by_tenant.*,
        backlogged_units * 1e9 / nullif(backlogged_ns, 0) as units_per_s
    from by_tenant
    where service_units > 0 or backlogged_ns > 0
),

final as (
    select
        engine_id,
        tenant,
        prompt_tokens,
        output_tokens,
        service_units,
        service_units / nullif(sum(service_units) over (partition by engine_id), 0) as share,
        backlogged_ns / 1e9 as backlogged_s,
        backlogged_units,
        units_per_s,
        count(units_per_s) over (partition by engine_id) as backlogged,
        sum(units_per_s) over (partition by engine_id) * sum(units_per_s) over (partition by engine_id)
        / nullif(
            count(units_per_s) over (partition by engine_id) * sum(units_per_s * units_per_s) over (partition by engine_id),
            0
        ) as jain_index
    from rated
)

select * from final
order by engine_id, service_units desc, tenant
