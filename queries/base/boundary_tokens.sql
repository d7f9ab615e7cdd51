-- view: output tokens that the declared observer had received when the window opened and when it closed
-- grain: one row per request that was open at either moment and had output
-- inputs: observed_requests, chunks
-- rules: An event without a token count counts as one (assumed_one); `counted_tokens` is the sum over all events under
--   that rule, so that a share of it can be scaled to the request's own count. A receipt exactly at a moment came
--   before it. Stamps are placed on the wall as in `open_tokens`, which stays apart: every question asks it, hardly any
--   request is open at its cut, and one view of all three moments would read the receipts of all that lies between.
with

crossing as (
    select
        request_id,
        case
            when getvariable('observer') = 'client' then coalesce(client_intended_ns, start_ns)
            else start_ns
        end - observed_arrival_at_ns as stamp_offset_ns
    from observed_requests
    where
        observed
        and arrival_at_ns < getvariable('window_end_ns')
        and (end_at_ns is null or end_at_ns > getvariable('window_start_ns'))
        and (
            arrival_at_ns < getvariable('window_start_ns')
            or end_at_ns is null
            or end_at_ns > getvariable('window_end_ns')
        )
),

receipts as (
    select
        chunks.request_id,
        unnest(case getvariable('observer')
            when 'client' then chunks.client_t_ns
            when 'sidecar' then chunks.sidecar_t_ns
            when 'engine' then chunks.engine_computed_ns
        end) - crossing.stamp_offset_ns as at_ns,
        unnest(case getvariable('observer')
            when 'client' then chunks.client_tokens
            when 'sidecar' then chunks.sidecar_tokens
            -- One choice: the cumulative counts of the engine are those of the request.
            when 'engine' then list_transform(
                range(1, len(chunks.engine_cum_tokens) + 1),
                lambda i: chunks.engine_cum_tokens[i] - coalesce(chunks.engine_cum_tokens[i - 1], 0)
            )
        end) as tokens
    from chunks
    inner join crossing on chunks.request_id = crossing.request_id
),

final as (
    select
        request_id,
        cast(coalesce(sum(coalesce(tokens, 1)) filter (where at_ns <= getvariable('window_start_ns')), 0) as bigint)
            as start_tokens,
        cast(coalesce(sum(coalesce(tokens, 1)) filter (where at_ns <= getvariable('window_end_ns')), 0) as bigint)
            as end_tokens,
        cast(sum(coalesce(tokens, 1)) as bigint) as counted_tokens
    from receipts
    group by request_id
)

select * from final
