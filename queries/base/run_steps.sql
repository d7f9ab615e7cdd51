-- view: engine steps, each with the part of its time that goes to prompt tokens
-- grain: one row per step
-- inputs: steps
-- rules: Per engine process (engine_id). median_decode_step_ns: lower median duration of the steps without prompt tokens,
--   0 without any. prefill_ns: what so many prompt tokens normally cost in this run, at most the step's duration: the
--   step's prompt tokens times the normal time per token. A step takes from its prompt tokens what it lasts beyond the
--   median step without any at a similar batch (at any, where there are fewer than 8 such; not below 0). The normal time
--   per token is the lower median of that over the tokens, among the steps with a similar number of prompt tokens.
--   Fewer than 8 of those are too few to tell a normal step from a stalled one. Then it is the median over all steps with
--   prompt tokens, but no more than the median time per request of a step without any (0 without such a step): a
--   prompt token passes the model as a decode token does, so it costs no more. Similar: between the same two powers of
--   two; a batch of 0 decode requests is as one of 1. Every step counts, also outside the window: the medians want many.
with

timed as (
    select
        steps.*,
        end_ns - start_ns as duration_ns,
        coalesce(prefill_tokens, 0) > 0 as has_prefill,
        greatest(coalesce(decode_requests, 0), 1) as batch,
        floor(log2(greatest(coalesce(decode_requests, 0), 1))) as batch_power,
        floor(log2(greatest(coalesce(prefill_tokens, 0), 1))) as prefill_power
    from steps
),

decode_medians as (
    select
        engine_id,
        quantile_disc(duration_ns, 0.5) as median_decode_step_ns,
        quantile_disc(duration_ns * 1e0 / batch, 0.5) as ns_per_decode
    from timed
    where not has_prefill
    group by engine_id
),

batch_medians as (
    select
        engine_id,
        batch_power,
        quantile_disc(duration_ns, 0.5) as median_decode_step_ns
    from timed
    where not has_prefill
    group by engine_id, batch_power
    having count(*) >= 8
),

prefills as (
    select
        timed.engine_id,
        timed.prefill_power,
        greatest(
            timed.duration_ns
            - coalesce(batch_medians.median_decode_step_ns, decode_medians.median_decode_step_ns, 0),
            0
        ) * 1e0 / timed.prefill_tokens as ns_per_token
    from timed
    left join decode_medians on timed.engine_id = decode_medians.engine_id
    left join batch_medians
        on timed.engine_id = batch_medians.engine_id and timed.batch_power = batch_medians.batch_power
    where timed.has_prefill
),

similar_medians as (
    select
        engine_id,
        prefill_power,
        quantile_disc(ns_per_token, 0.5) as ns_per_token
    from prefills
    group by engine_id, prefill_power
    having count(*) >= 8
),

prefill_medians as (
    select
        prefills.engine_id,
        least(quantile_disc(prefills.ns_per_token, 0.5), coalesce(max(decode_medians.ns_per_decode), 0)) as ns_per_token
    from prefills
    left join decode_medians on prefills.engine_id = decode_medians.engine_id
    group by prefills.engine_id
),

final as (
    select
        timed.* exclude (batch, batch_power, prefill_power),
        coalesce(decode_medians.median_decode_step_ns, 0) as median_decode_step_ns,
        case
            when timed.has_prefill
                then least(
                    timed.duration_ns,
                    cast(
                        timed.prefill_tokens
                        * coalesce(similar_medians.ns_per_token, prefill_medians.ns_per_token, 0) as bigint
                    )
                )
            else 0
        end as prefill_ns
    from timed
    left join decode_medians on timed.engine_id = decode_medians.engine_id
    left join prefill_medians on timed.engine_id = prefill_medians.engine_id
    left join similar_medians
        on timed.engine_id = similar_medians.engine_id and timed.prefill_power = similar_medians.prefill_power
)

select * from final
