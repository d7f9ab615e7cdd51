-- view: engine steps, each with the part of its time that goes to prompt tokens
-- grain: one row per step
-- inputs: steps
-- rules: Per engine process (engine_id). median_decode_step_ns: lower median duration of the steps without prompt tokens,
--   0 without any. prefill_ns: the step's prompt tokens times the prefill time per token, at most its duration; that
--   time is the lower median, over the steps with prompt tokens, of (duration - median decode step, not below 0) /
--   prompt tokens. Every step counts, also outside the window: the medians want many.
with

timed as (
    select
        steps.*,
        end_ns - start_ns as duration_ns,
        coalesce(prefill_tokens, 0) > 0 as has_prefill
    from steps
),

ranked as (
    select
        timed.*,
        row_number() over (partition by engine_id, has_prefill order by duration_ns) as place,
        count(*) over (partition by engine_id, has_prefill) as n
    from timed
),

decode_medians as (
    select
        engine_id,
        duration_ns as median_decode_step_ns
    from ranked
    where not has_prefill and place = (n + 1) // 2
),

prefills as (
    select
        ranked.engine_id,
        greatest(ranked.duration_ns - coalesce(decode_medians.median_decode_step_ns, 0), 0) * 1e0
        / ranked.prefill_tokens as ns_per_token
    from ranked
    left join decode_medians on ranked.engine_id = decode_medians.engine_id
    where ranked.has_prefill
),

ranked_prefills as (
    select
        engine_id,
        ns_per_token,
        row_number() over (partition by engine_id order by ns_per_token) as place,
        count(*) over (partition by engine_id) as n
    from prefills
),

prefill_medians as (
    select
        engine_id,
        ns_per_token
    from ranked_prefills
    where place = (n + 1) // 2
),

final as (
    select
        timed.*,
        coalesce(decode_medians.median_decode_step_ns, 0) as median_decode_step_ns,
        case
            when timed.has_prefill
                then least(timed.duration_ns, cast(timed.prefill_tokens * prefill_medians.ns_per_token as bigint))
            else 0
        end as prefill_ns
    from timed
    left join decode_medians on timed.engine_id = decode_medians.engine_id
    left join prefill_medians on timed.engine_id = prefill_medians.engine_id
)

select * from final
