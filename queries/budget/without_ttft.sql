-- question: Which requests never had a first token, how far did they get, and how long did they wait?
-- grain: one row per request of the cohort without a receipt at the declared observer
-- inputs: cohort
-- outputs:
--   request_id   varchar  -
--   class        varchar  -
--   arrival_at_s double   seconds  wall time, since the epoch
--   streaming    boolean  -
--   outcome      varchar  -
--   reason       varchar  -
--   http_status  bigint   -
--   reached      varchar  -        the furthest point with a stamp: sent, sidecar, server, queue, prefill, computed or written
--   waited_s     double   seconds  start to end of stream; NULL while open
-- rules: `reached` is what some observer recorded, not what must have happened. A request that nobody observed at the
--   declared observer is here with outcome unobserved and the point that another observer saw.
with

cohort as (
    select
        request_id,
        class,
        arrival_at_ns,
        streaming,
        outcome,
        reason,
        http_status,
        ttft_ns,
        start_ns,
        end_ns,
        open_at_cut,
        client_observed,
        sidecar_observed,
        engine_observed,
        engine_queued_ns,
        engine_prefill_start_ns,
        engine_first_computed_ns,
        engine_first_written_ns
    from cohort
),

final as (
    select
        request_id,
        class,
        arrival_at_ns / 1e9 as arrival_at_s,
        streaming,
        outcome,
        reason,
        http_status,
        case
            when engine_first_written_ns is not null then 'written'
            when engine_first_computed_ns is not null then 'computed'
            when engine_prefill_start_ns is not null then 'prefill'
            when engine_queued_ns is not null then 'queue'
            when engine_observed then 'server'
            when sidecar_observed then 'sidecar'
            when client_observed then 'sent'
        end as reached,
        case when not open_at_cut then end_ns - start_ns end / 1e9 as waited_s
    from cohort
    where ttft_ns is null
)

select * from final
order by arrival_at_s, request_id
