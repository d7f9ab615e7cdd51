-- question: What was the engine doing while its own gap was late?
-- grain: one row per late gap whose verdict is decoder_stall or mixed
-- inputs: judged_holds, run_steps, step_requests, states, numbers
-- outputs:
--   request_id           varchar  -
--   ordinal              bigint   -
--   verdict              varchar  -
--   held_at_s            double   seconds   wall time of the receipt
--   emit_gap_s           double   seconds   the engine's own gap
--   cause                varchar  -         preemption, flow_control_pause, prefill_interference, kv_pressure, host_gap, slow_step or unknown
--   cause_s              double   seconds   the cause's time within the gap
--   preempted_s          double   seconds   from the preemption to the next event
--   paused_s             double   seconds   in PAUSED
--   prefill_s            double   seconds   steps' time that goes to other requests' prompt tokens
--   kv_wait_s            double   seconds   steps without this request while no KV block was free
--   host_gap_s           double   seconds   between steps
--   slow_step_s          double   seconds   the rest of the longest step beyond a median decode step
--   steps                bigint   steps     that overlap the gap
--   step_id              bigint   -         the longest of them
--   step_s               double   seconds   its duration
--   step_device_s        double   seconds   its forward pass
--   step_prefill_tokens  bigint   tokens
--   step_decode_requests bigint   requests
--   step_fault           varchar  -         a fault injected into it: evidence, never a cause
--   step_captured        boolean  -         it captured a program for its shape, at its first use: evidence of a slow step
--   kv_blocks_free_min   bigint   blocks    lowest during the gap
--   preempted_requests   bigint   requests  preempted during the gap, of any request
-- rules: The engine is the one whose steps ran the request, by the most steps where a hedge ran in two; without recorded
--   request ids it is every engine of the clock. A step overlaps when it ended after the event before and not after the
--   event itself, on the engine's clock.
--   Parts of its time. Prefill: what so many prompt tokens normally cost in this run, as in `run_steps`, and never more,
--   however long the step took; none in the step of the request's own prefill. KV wait: the rest of a step without this
--   request while no block was free. Slow: the rest of the longest remaining step beyond the median decode-only step.
--   Host gap: start of a step minus the end of the one before, from the event before on.
--   Cause: preemption if half of the gap or more lies after a preemption of this request in it, else
--   flow_control_pause if half of it or more was PAUSED, whatever the steps did meanwhile. Else the largest of
--   preemption, pause, prefill, KV wait, host gap and slow step (equal ones in this order), if it is a tenth of the gap
--   or more. Else unknown, as without steps. A median is the lower one. Where there is no decode-only step, the median
--   is 0.
with

own_steps as (
    select
        engine_id,
        step_id,
        request_id,
        max(case when role = 'prefill' then 1 else 0 end) as is_prefill
    from step_requests
    where role in ('prefill', 'decode')
    group by engine_id, step_id, request_id
),

own_engines as (
    select
        request_id,
        engine_id,
        row_number() over (partition by request_id order by count(*) desc, engine_id) as place
    from own_steps
    group by request_id, engine_id
),

late_gaps_of_engine as (
    select
        request_id,
        ordinal,
        verdict,
        held_at_ns,
        emit_prev_ns,
        emit_at_ns,
        emit_gap_ns,
        engine_clock_id,
        row_number() over (order by held_at_ns, request_id, choice, ordinal) as stall
    from judged_holds
    where kind = 'gap' and verdict in ('decoder_stall', 'mixed')
),

stalls as (
    select
        late_gaps_of_engine.*,
        own_engines.engine_id
    from late_gaps_of_engine
    left join own_engines on late_gaps_of_engine.request_id = own_engines.request_id and own_engines.place = 1
),

run_steps as (
    select
        step_id,
        engine_id,
        clock_id,
        start_ns,
        end_ns,
        duration_ns,
        device_ns,
        prefill_tokens,
        decode_requests,
        kv_blocks_free,
        preempted,
        gap_before_ns,
        fault,
        captured,
        prefill_ns,
        median_decode_step_ns
    from run_steps
),

transitions as (
    select
        request_id,
        engine_id,
        clock_id,
        at_ns,
        to_state,
        lead(at_ns) over (partition by request_id, engine_id order by at_ns, place) as until_ns
    from states
),

state_times as (
    select
        stalls.stall,
        max(
            case
                when
                    transitions.to_state = 'PREEMPTED' and transitions.at_ns >= stalls.emit_prev_ns
                    and transitions.at_ns < stalls.emit_at_ns
                    then stalls.emit_at_ns - transitions.at_ns
            end
        ) as preempted_ns,
        cast(
            sum(
                case
                    when transitions.to_state = 'PAUSED'
                        then greatest(
                            least(coalesce(transitions.until_ns, stalls.emit_at_ns), stalls.emit_at_ns)
                            - greatest(transitions.at_ns, stalls.emit_prev_ns),
                            0
                        )
                end
            ) as bigint
        ) as paused_ns
    from stalls
    inner join transitions
        on
            stalls.request_id = transitions.request_id
            and stalls.engine_clock_id = transitions.clock_id
            and (stalls.engine_id is null or stalls.engine_id = transitions.engine_id)
    group by stalls.stall
),

numbers as (
    select n
    from numbers
),

-- Every tenth of a second that a stall touches: joined by equality, a step meets only the stalls near it.
stall_tenths as (
    select
        stalls.stall,
        stalls.emit_prev_ns // 100000000 + numbers.n as tenth
    from stalls
    inner join numbers on numbers.n <= stalls.emit_at_ns // 100000000 - stalls.emit_prev_ns // 100000000
),

step_tenths as (
    select
        run_steps.*,
        end_ns // 100000000 as tenth
    from run_steps
),

overlapping as (
    select
        stalls.stall,
        step_tenths.*,
        case when coalesce(own_steps.is_prefill, 0) = 1 then 0 else step_tenths.prefill_ns end as others_prefill_ns,
        own_steps.request_id is null and step_tenths.kv_blocks_free = 0 as is_kv_wait,
        coalesce(own_steps.is_prefill, 0) = 1 as is_own_prefill,
        least(
            coalesce(step_tenths.gap_before_ns, 0), greatest(step_tenths.start_ns - stalls.emit_prev_ns, 0)
        ) as host_gap_ns,
        row_number() over (
            partition by stalls.stall
            order by step_tenths.duration_ns desc, step_tenths.step_id
        ) as place
    from stalls
    inner join stall_tenths on stalls.stall = stall_tenths.stall
    inner join step_tenths
        on
            stalls.engine_clock_id = step_tenths.clock_id
            and (stalls.engine_id is null or stalls.engine_id = step_tenths.engine_id)
            and stall_tenths.tenth = step_tenths.tenth
            and step_tenths.end_ns > stalls.emit_prev_ns
            and step_tenths.end_ns <= stalls.emit_at_ns
    left join own_steps
        on
            step_tenths.step_id = own_steps.step_id
            and step_tenths.engine_id = own_steps.engine_id
            and stalls.request_id = own_steps.request_id
),

step_times as (
    select
        stall,
        count(*) as steps,
        cast(sum(others_prefill_ns) as bigint) as prefill_ns,
        cast(sum(case when is_kv_wait then duration_ns - others_prefill_ns else 0 end) as bigint) as kv_wait_ns,
        cast(sum(host_gap_ns) as bigint) as host_gap_ns,
        max(
            case
                when not is_kv_wait and not is_own_prefill
                    then greatest(duration_ns - others_prefill_ns - median_decode_step_ns, 0)
                else 0
            end
        ) as slow_step_ns,
        max(case when place = 1 then step_id end) as step_id,
        max(case when place = 1 then duration_ns end) as step_ns,
        max(case when place = 1 then device_ns end) as step_device_ns,
        max(case when place = 1 then prefill_tokens end) as step_prefill_tokens,
        max(case when place = 1 then decode_requests end) as step_decode_requests,
        max(case when place = 1 then fault end) as step_fault,
        coalesce(bool_or(captured) filter (where place = 1), false) as step_captured,
        min(kv_blocks_free) as kv_blocks_free_min,
        cast(sum(coalesce(preempted, 0)) as bigint) as preempted_requests
    from overlapping
    group by stall
),

with_times as (
    select
        stalls.*,
        coalesce(state_times.preempted_ns, 0) as preempted_ns,
        coalesce(state_times.paused_ns, 0) as paused_ns,
        coalesce(step_times.prefill_ns, 0) as prefill_ns,
        coalesce(step_times.kv_wait_ns, 0) as kv_wait_ns,
        coalesce(step_times.host_gap_ns, 0) as host_gap_ns,
        coalesce(step_times.slow_step_ns, 0) as slow_step_ns,
        greatest(
            coalesce(state_times.preempted_ns, 0),
            coalesce(state_times.paused_ns, 0),
            coalesce(step_times.prefill_ns, 0),
            coalesce(step_times.kv_wait_ns, 0),
            coalesce(step_times.host_gap_ns, 0),
            coalesce(step_times.slow_step_ns, 0)
        ) as largest_ns,
        coalesce(step_times.steps, 0) as steps,
        step_times.step_id,
        step_times.step_ns,
        step_times.step_device_ns,
        step_times.step_prefill_tokens,
        step_times.step_decode_requests,
        step_times.step_fault,
        step_times.step_captured,
        step_times.kv_blocks_free_min,
        step_times.preempted_requests
    from stalls
    left join state_times on stalls.stall = state_times.stall
    left join step_times on stalls.stall = step_times.stall
),

named as (
    select
        with_times.*,
        case
            when 2 * preempted_ns >= emit_gap_ns then 'preemption'
            when 2 * paused_ns >= emit_gap_ns then 'flow_control_pause'
            when 10 * largest_ns < emit_gap_ns then 'unknown'
            when preempted_ns = largest_ns then 'preemption'
            when paused_ns = largest_ns then 'flow_control_pause'
            when prefill_ns = largest_ns then 'prefill_interference'
            when kv_wait_ns = largest_ns then 'kv_pressure'
            when host_gap_ns = largest_ns then 'host_gap'
            else 'slow_step'
        end as cause
    from with_times
),

final as (
    select
        request_id,
        ordinal,
        verdict,
        held_at_ns / 1e9 as held_at_s,
        emit_gap_ns / 1e9 as emit_gap_s,
        cause,
        case cause
            when 'preemption' then preempted_ns / 1e9
            when 'flow_control_pause' then paused_ns / 1e9
            when 'unknown' then null
            else largest_ns / 1e9
        end as cause_s,
        preempted_ns / 1e9 as preempted_s,
        paused_ns / 1e9 as paused_s,
        prefill_ns / 1e9 as prefill_s,
        kv_wait_ns / 1e9 as kv_wait_s,
        host_gap_ns / 1e9 as host_gap_s,
        slow_step_ns / 1e9 as slow_step_s,
        steps,
        step_id,
        step_ns / 1e9 as step_s,
        step_device_ns / 1e9 as step_device_s,
        step_prefill_tokens,
        step_decode_requests,
        step_fault,
        step_captured,
        kv_blocks_free_min,
        preempted_requests
    from named
)

select * from final
order by held_at_s, request_id, ordinal
