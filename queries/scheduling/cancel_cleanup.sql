-- question: How long after a cancel does the engine stop, and is every KV block given back?
-- grain: one row per stretch: socket to abort, abort to KV free, socket to KV free
-- inputs: cohort, states
-- outputs:
--   stretch     varchar  -
--   cancelled   bigint   requests  of the cohort whose end was cancelled, or that the engine saw leave or abort
--   n           bigint   requests  of those, with both stamps
--   p50_s       double   seconds   nearest rank
--   p90_s       double   seconds
--   p99_s       double   seconds
--   max_s       double   seconds
--   negative    bigint   requests  in which the later stamp is the earlier one
--   not_running bigint   requests  of the cancelled of which the scheduler had nothing to stop
--   unfinished  bigint   requests  of the others, with the first stamp and never the second: a leak
-- rules: Three stamps of the engine's clock, so the declared observer may be on another host. Socket: the server saw
--   the consumer's socket close; a cancel without that (it came by another way, or the server does not stamp it) has no
--   stretch from it. Abort: the abort reached the scheduler. KV free: the last block of the request was free. By
--   its states a request that was cancelled in WAITING or PREEMPTED held none: it has no stretch to KV free. A consumer may
--   leave before the scheduler has heard of its request (the server says that it sent no abort), or when all is computed
--   (so say the states): there was nothing to stop, and no stamp is missing. Requests that no engine observed are left
--   out. Quantiles are these requests' own order statistics. The rows are there without cancels too,
--   with n = 0.
with

computed_all as (
    select distinct request_id
    from states
    where to_state = 'FINISHED'
),

held_none as (
    select distinct request_id
    from states
    where to_state = 'CANCELLED' and from_state in ('WAITING', 'PREEMPTED')
),

cancelled as (
    select
        request_id,
        engine_socket_closed_ns,
        engine_abort_seen_ns,
        engine_kv_freed_ns,
        request_id in (select held_none.request_id from held_none) as is_without_kv,
        engine_abort_seen_ns is null
        and (
            not coalesce(engine_abort_sent, true)
            or request_id in (select computed_all.request_id from computed_all)
        ) as is_not_running
    from cohort
    where
        engine_observed
        and (outcome = 'cancelled' or engine_socket_closed_ns is not null or engine_abort_seen_ns is not null)
),

stretches as (
    select *
    from (values (1, 'socket_to_abort'), (2, 'abort_to_kv_free'), (3, 'socket_to_kv_free')) as named (position, stretch)
),

from_to as (
    select
        stretches.position,
        stretches.stretch,
        cancelled.request_id,
        cancelled.is_not_running,
        case
            when stretches.position > 1 and cancelled.is_without_kv then null
            when stretches.position = 2 then cancelled.engine_abort_seen_ns
            else cancelled.engine_socket_closed_ns
        end as from_ns,
        case when stretches.position = 1 then cancelled.engine_abort_seen_ns else cancelled.engine_kv_freed_ns end
            as to_ns
    from stretches
    left join cancelled on 1 = 1
),

ranked as (
    select
        from_to.*,
        to_ns - from_ns as stretch_ns,
        row_number() over (partition by position order by to_ns - from_ns nulls last, request_id) as place,
        count(to_ns - from_ns) over (partition by position) as n
    from from_to
),

by_stretch as (
    select
        position,
        stretch,
        count(request_id) as cancelled,
        count(stretch_ns) as n,
        max(case when place = (50 * n + 99) // 100 then stretch_ns end) as p50_ns,
        max(case when place = (90 * n + 99) // 100 then stretch_ns end) as p90_ns,
        max(case when place = (99 * n + 99) // 100 then stretch_ns end) as p99_ns,
        max(stretch_ns) as max_ns,
        count(*) filter (where stretch_ns < 0) as negative,
        count(*) filter (where is_not_running) as not_running,
        count(*) filter (where from_ns is not null and to_ns is null and not is_not_running) as unfinished
    from ranked
    group by position, stretch
),

final as (
    select
        stretch,
        cancelled,
        n,
        p50_ns / 1e9 as p50_s,
        p90_ns / 1e9 as p90_s,
        p99_ns / 1e9 as p99_s,
        max_ns / 1e9 as max_s,
        negative,
        not_running,
        unfinished
    from by_stretch
)

select * from final
order by case stretch when 'socket_to_abort' then 1 when 'abort_to_kv_free' then 2 else 3 end
