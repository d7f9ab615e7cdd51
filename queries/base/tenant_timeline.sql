-- view: the service that each tenant received from an engine, and how many of its requests waited
-- grain: one row per engine process, tenant and stamp at which one of the two changed
-- inputs: requests, steps, step_requests, states, engines, window_steps
-- rules: Prompt tokens count at the end of the step that ran them, those that the engine charged: what is run again after
--   a preemption, or was taken over from the prefix cache, is no service. Where a step did not record what it charged,
--   what it ran counts, in sum at most the request's prompt: of a request that took over a prefix and was preempted later
--   that may be too much. Where it did not record what it ran either, the whole prompt counts at the first step that ran
--   some of it. An output token counts at the end of the step of its decode; the token that a prompt's last part brings
--   counts at the end of the step that ran this part, where the request leaves PREFILL for DECODE or FINISHED: one that
--   ends between two steps, by its text and while it is run again, brings none. `waiting` counts requests in WAITING or
--   PREEMPTED from this stamp on; one that was preempted out of PAUSED is held back by its reader and does not count.
--   All on the engine's clock, from its first record on. [from_ns, to_ns] reach from the first to the last of
--   `window_steps`, so the work after the window that its requests still needed is in. The units, the bound and the
--   weights are those that the engine recorded last; NULL: none, a weight then is 1. Without a step in the window an engine
--   has no row. A request without a tenant is of tenant ''.
with

seen as (
    select
        engine_id,
        min(start_ns) as from_ns,
        max(end_ns) as to_ns
    from window_steps
    group by engine_id
),

units as (
    select
        engine_id,
        unit_prompt,
        unit_output,
        service_gap_bound,
        -- As the command line takes them: 'free=0.5,gold=4'. No name in it holds a comma or an equals sign.
        ',' || json_extract_string(policies, '$.tenant_weights') as weights,
        row_number() over (partition by engine_id order by at_ns desc, place desc) as from_last
    from engines
),

tenants as (
    select
        request_id,
        coalesce(tenant, '') as tenant,
        prompt_tokens
    from requests
),

prompt_parts as (
    select
        step_requests.engine_id,
        step_requests.request_id,
        tenants.tenant,
        steps.end_ns as at_ns,
        tenants.prompt_tokens,
        step_requests.charged,
        coalesce(step_requests.tokens, tenants.prompt_tokens, 0) as part,
        sum(coalesce(step_requests.tokens, tenants.prompt_tokens, 0)) over (
            partition by step_requests.engine_id, step_requests.request_id
            order by step_requests.step_id
            rows between unbounded preceding and current row
        ) as run_by_now
    from step_requests
    inner join steps on step_requests.engine_id = steps.engine_id and step_requests.step_id = steps.step_id
    inner join tenants on step_requests.request_id = tenants.request_id
    where step_requests.role = 'prefill'
),

changes as (
    select
        engine_id,
        tenant,
        at_ns,
        coalesce(charged, least(run_by_now, prompt_tokens) - least(run_by_now - part, prompt_tokens)) as prompt_tokens,
        0 as output_tokens,
        0 as waiting_change
    from prompt_parts
    union all
    select
        step_requests.engine_id,
        tenants.tenant,
        steps.end_ns as at_ns,
        0 as prompt_tokens,
        1 as output_tokens,
        0 as waiting_change
    from step_requests
    inner join steps on step_requests.engine_id = steps.engine_id and step_requests.step_id = steps.step_id
    inner join tenants on step_requests.request_id = tenants.request_id
    where step_requests.role = 'decode'
    union all
    select
        states.engine_id,
        tenants.tenant,
        states.at_ns,
        0 as prompt_tokens,
        case
            when
                states.from_state = 'PREFILL' and states.to_state in ('DECODE', 'FINISHED')
                and prompt_parts.request_id is not null
                then 1
            else 0
        end as output_tokens,
        case
            when states.to_state = 'WAITING' or states.to_state = 'PREEMPTED' and states.from_state <> 'PAUSED' then 1
            else 0
        end
        - case
            when
                states.from_state = 'WAITING' or states.from_state = 'PREEMPTED' and states.came_from <> 'PAUSED'
                then 1
            else 0
        end as waiting_change
    from (
        select
            states.*,
            lag(from_state) over (partition by engine_id, request_id order by at_ns, place) as came_from
        from states
    ) as states
    inner join tenants on states.request_id = tenants.request_id
    left join prompt_parts
        on
            states.engine_id = prompt_parts.engine_id
            and states.request_id = prompt_parts.request_id
            and states.at_ns = prompt_parts.at_ns
),

by_stamp as (
    select
        engine_id,
        tenant,
        at_ns,
        cast(sum(prompt_tokens) as bigint) as prompt_tokens,
        cast(sum(output_tokens) as bigint) as output_tokens,
        cast(sum(waiting_change) as bigint) as waiting_change
    from changes
    group by engine_id, tenant, at_ns
),

final as (
    select
        by_stamp.*,
        cast(
            sum(by_stamp.waiting_change) over (
                partition by by_stamp.engine_id, by_stamp.tenant
                order by by_stamp.at_ns
                rows between unbounded preceding and current row
            ) as bigint
        ) as waiting,
        seen.from_ns,
        seen.to_ns,
        units.unit_prompt,
        units.unit_output,
        units.service_gap_bound,
        coalesce(
            try_cast(split_part(split_part(units.weights, ',' || by_stamp.tenant || '=', 2), ',', 1) as double),
            1
        ) as weight
    from by_stamp
    inner join seen on by_stamp.engine_id = seen.engine_id
    left join units on by_stamp.engine_id = units.engine_id and units.from_last = 1
)

select * from final
