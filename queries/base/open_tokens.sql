-- view: output tokens that the declared observer had received at the cut, of requests that were open there
-- grain: one row per request of the window that was open at the cut and had output before it
-- inputs: observed_requests, chunks
-- rules: An event without a token count counts as one token (assumed_one). Where no event has a count but the request
--   has, as one that ended after the cut may, the events before it have their share of that. A stamp is placed on
--   the wall by the request's own arrival: `observed_arrival_at_ns` is the wall time of the scheduled arrival, else of
--   the start.
--   A receipt exactly at the cut came before it.
with

open_requests as (
    select
        request_id,
        case
            when getvariable('observer') = 'client' then coalesce(client_intended_ns, start_ns)
            else start_ns
        end + (getvariable('cut_ns') - observed_arrival_at_ns) as cut_stamp_ns,
        case when token_source is distinct from 'assumed_one' then tokens end as known_tokens
    from observed_requests
    where
        observed
        and arrival_at_ns >= getvariable('window_start_ns')
        and arrival_at_ns < getvariable('window_end_ns')
        and (end_at_ns is null or end_at_ns > getvariable('cut_ns'))
),

receipts as (
    select
        chunks.request_id,
        open_requests.cut_stamp_ns,
        open_requests.known_tokens,
        unnest(case getvariable('observer')
            when 'client' then chunks.client_t_ns when 'sidecar' then chunks.sidecar_t_ns
        end) as received_ns,
        unnest(case getvariable('observer')
            when 'client' then chunks.client_tokens when 'sidecar' then chunks.sidecar_tokens
        end) as tokens
    from chunks
    inner join open_requests on chunks.request_id = open_requests.request_id
    where getvariable('observer') <> 'engine'
),

emissions as (
    select
        chunks.request_id,
        open_requests.cut_stamp_ns,
        unnest(chunks.engine_computed_ns) as computed_ns,
        unnest(chunks.engine_choice) as choice,
        unnest(chunks.engine_cum_tokens) as cum_tokens
    from chunks
    inner join open_requests on chunks.request_id = open_requests.request_id
    where getvariable('observer') = 'engine'
),

emitted as (
    select
        request_id,
        choice,
        max(cum_tokens) as tokens
    from emissions
    where computed_ns <= cut_stamp_ns
    group by request_id, choice
),

received as (
    select
        request_id,
        case when count(tokens) = 0 then max(known_tokens) end as known_tokens,
        count(*) as events,
        sum(coalesce(tokens, 1)) filter (where received_ns <= cut_stamp_ns) as tokens
    from receipts
    group by request_id
),

final as (
    select
        request_id,
        cast(coalesce(tokens * known_tokens // events, tokens) as bigint) as tokens
    from received
    where tokens is not null
    union all
    select
        request_id,
        cast(sum(tokens) as bigint) as tokens
    from emitted
    group by request_id
)

select * from final
