-- question: How close do the engine's steps come to what the machine can do, and which ceiling binds?
-- grain: one row per kind of step and range of batch sizes that occurred
-- inputs: window_steps, engines
-- params:
--   ceiling_flops_per_s           double  FLOP/s   null  min 0  null: as the engine recorded it
--   ceiling_weight_bytes_per_s    double  bytes/s  null  min 0  null: as the engine recorded it
--   ceiling_kv_bytes_per_s        double  bytes/s  null  min 0  null: as the engine recorded it
--   ceiling_transfer_bytes_per_s  double  bytes/s  null  min 0  null: as the engine recorded it
-- outputs:
--   step_kind              varchar  -         prefill, mixed, decode or empty
--   batch_from             bigint   requests  smallest batch size that occurred in the range
--   batch_to               bigint   requests  largest; ranges are 1, 2, 3-4, 5-8, … 257-512, 513 and more
--   steps                  bigint   steps
--   judged                 bigint   steps     of those, with work, all four ceilings and no capture: the columns from flops_s on are theirs
--   captured               bigint   steps     of all steps, spent mostly on capturing a program for their shape
--   step_s                 double   seconds   planning included, in sum
--   step_mean_s            double   seconds
--   device_s               double   seconds   the forward passes alone, in sum
--   prefill_tokens         bigint   tokens
--   decode_tokens          bigint   tokens
--   budgeted               bigint   steps     of all steps, with prompts and a bound on their tokens
--   budget_tokens          bigint   tokens    prompt tokens that those steps were allowed, in sum
--   budget_used_share      double   ratio     prompt tokens that they ran / budget_tokens
--   linear_flops           double   FLOP      matrix products with weights
--   attention_flops        double   FLOP      scores and values
--   weight_bytes           double   bytes
--   kv_read_bytes          double   bytes
--   kv_write_bytes         double   bytes
--   transfer_bytes         double   bytes     between host and device
--   flops_s                double   seconds   that the operations need at least
--   weight_s               double   seconds   that reading the weights needs at least
--   kv_s                   double   seconds   that reading and writing KV needs at least
--   transfer_s             double   seconds   that the transfers need at least
--   least_s                double   seconds   that the steps need at least
--   achieved_share         double   ratio     least_s / the judged steps' time
--   achieved_device_share  double   ratio     least_s / the judged steps' forward passes
--   binds                  varchar  -         flops, weight, kv or transfer: what holds most of least_s back
--   binds_share            double   ratio     of least_s in steps that it binds
--   reason                 varchar  -         why nothing was judged: no work recorded, not calibrated, or only captures
-- rules: Steps of the window and of its requests' drain. The kind is by prompt and decode tokens; a batch is the requests
--   in prefill and in decode. Work is what the model's shape implies, ceilings are those in force when the step began, unless given.
--   Per step: least = max(operations, weights + KV) + transfers, each over its ceiling. Arithmetic runs while memory
--   moves, weights and KV share the memory, transfers do not hide. The step is bound by transfers where they are the
--   larger part, else by operations where these take as long as memory or longer, else by the longer of weights and KV
--   (weights when equal). A step without work is bound by nothing. A share above 1 means that the ceiling does not hold
--   for such steps, as for weights that fit into a cache. A step that captured a program (its first use, on a GPU) took
--   the time for that and not for its work: it is counted and not judged. Sums of work are over the steps that recorded it.
-- source: S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009, doi:10.1145/1498765.1498785
with

window_steps as (
    select
        window_steps.*,
        end_ns - start_ns as duration_ns,
        coalesce(prefill_tokens, 0) > 0 as has_prefill,
        coalesce(decode_tokens, decode_requests, 0) > 0 as has_decode,
        coalesce(prefill_requests, 0) + coalesce(decode_requests, 0) as batch_size
    from window_steps
),

engines as (
    select
        engine_id,
        at_ns,
        lead(at_ns) over (partition by engine_id order by at_ns, place) as until_ns,
        ceiling_flops_per_s,
        ceiling_weight_bytes_per_s,
        ceiling_kv_bytes_per_s,
        ceiling_transfer_bytes_per_s
    from engines
),

classed as (
    select
        window_steps.*,
        case
            when has_prefill and has_decode then 'mixed'
            when has_prefill then 'prefill'
            when has_decode then 'decode'
            else 'empty'
        end as step_kind,
        case
            when batch_size <= 1 then 1
            when batch_size <= 2 then 2
            when batch_size <= 4 then 4
            when batch_size <= 8 then 8
            when batch_size <= 16 then 16
            when batch_size <= 32 then 32
            when batch_size <= 64 then 64
            when batch_size <= 128 then 128
            when batch_size <= 256 then 256
            when batch_size <= 512 then 512
            else 1024
        end as size_class,
        prefill_linear_flops + decode_linear_flops as linear_flops,
        prefill_attention_flops + decode_attention_flops as attention_flops,
        coalesce($ceiling_flops_per_s, engines.ceiling_flops_per_s) as flops_per_s,
        coalesce($ceiling_weight_bytes_per_s, engines.ceiling_weight_bytes_per_s) as weight_bytes_per_s,
        coalesce($ceiling_kv_bytes_per_s, engines.ceiling_kv_bytes_per_s) as kv_bytes_per_s,
        coalesce($ceiling_transfer_bytes_per_s, engines.ceiling_transfer_bytes_per_s) as transfer_bytes_per_s
    from window_steps
    left join engines
        on
            window_steps.engine_id = engines.engine_id
            and window_steps.start_ns >= engines.at_ns
            and (engines.until_ns is null or window_steps.start_ns < engines.until_ns)
),

bounded as (
    select
        classed.*,
        (linear_flops + attention_flops) * 1e9 / nullif(flops_per_s, 0) as flops_ns,
        weight_bytes * 1e9 / nullif(weight_bytes_per_s, 0) as weight_ns,
        (kv_read_bytes + kv_write_bytes) * 1e9 / nullif(kv_bytes_per_s, 0) as kv_ns,
        transfer_bytes * 1e9 / nullif(transfer_bytes_per_s, 0) as transfer_ns
    from classed
),

-- NULL where any of the four is: `greatest` alone would pass over it.
judged as (
    select
        bounded.*,
        case
            when captured then null
            else
                case when flops_ns >= weight_ns + kv_ns then flops_ns else weight_ns + kv_ns end
                + transfer_ns
                + 0 * flops_ns
        end as least_ns,
        case
            when captured then null
            when flops_ns is null or weight_ns is null or kv_ns is null or transfer_ns is null then null
            when flops_ns = 0 and weight_ns = 0 and kv_ns = 0 and transfer_ns = 0 then null
            when transfer_ns > flops_ns and transfer_ns > weight_ns + kv_ns then 'transfer'
            when flops_ns >= weight_ns + kv_ns then 'flops'
            when weight_ns >= kv_ns then 'weight'
            else 'kv'
        end as binds
    from bounded
),

by_bound as (
    select
        step_kind,
        size_class,
        binds,
        sum(least_ns) as least_ns,
        row_number() over (partition by step_kind, size_class order by sum(least_ns) desc, binds) as place
    from judged
    where binds is not null
    group by step_kind, size_class, binds
),

by_class as (
    select
        step_kind,
        size_class,
        min(batch_size) as batch_from,
        max(batch_size) as batch_to,
        count(*) as steps,
        count(least_ns) as judged,
        count(*) filter (where captured) as captured,
        count(linear_flops + attention_flops + weight_bytes + kv_read_bytes + kv_write_bytes + transfer_bytes)
            as with_work,
        cast(sum(duration_ns) as bigint) as step_ns,
        cast(sum(device_ns) as bigint) as device_ns,
        cast(sum(prefill_tokens) as bigint) as prefill_tokens,
        cast(sum(decode_tokens) as bigint) as decode_tokens,
        count(token_budget) as budgeted,
        cast(sum(token_budget) as bigint) as budget_tokens,
        cast(sum(case when token_budget is not null then prefill_tokens end) as bigint) as budget_used_tokens,
        sum(linear_flops) as linear_flops,
        sum(attention_flops) as attention_flops,
        sum(weight_bytes) as weight_bytes,
        sum(kv_read_bytes) as kv_read_bytes,
        sum(kv_write_bytes) as kv_write_bytes,
        sum(transfer_bytes) as transfer_bytes,
        sum(case when least_ns is not null then flops_ns end) as flops_ns,
        sum(case when least_ns is not null then weight_ns end) as weight_ns,
        sum(case when least_ns is not null then kv_ns end) as kv_ns,
        sum(case when least_ns is not null then transfer_ns end) as transfer_ns,
        sum(least_ns) as least_ns,
        cast(sum(case when least_ns is not null then duration_ns end) as bigint) as judged_step_ns,
        sum(case when device_ns is not null then least_ns end) as least_with_device_ns,
        cast(sum(case when least_ns is not null then device_ns end) as bigint) as judged_device_ns
    from judged
    group by step_kind, size_class
),

final as (
    select
        by_class.step_kind,
        by_class.batch_from,
        by_class.batch_to,
        by_class.steps,
        by_class.judged,
        by_class.captured,
        by_class.step_ns / 1e9 as step_s,
        by_class.step_ns / 1e9 / by_class.steps as step_mean_s,
        by_class.device_ns / 1e9 as device_s,
        by_class.prefill_tokens,
        by_class.decode_tokens,
        by_class.budgeted,
        by_class.budget_tokens,
        by_class.budget_used_tokens / nullif(by_class.budget_tokens, 0) as budget_used_share,
        by_class.linear_flops,
        by_class.attention_flops,
        by_class.weight_bytes,
        by_class.kv_read_bytes,
        by_class.kv_write_bytes,
        by_class.transfer_bytes,
        by_class.flops_ns / 1e9 as flops_s,
        by_class.weight_ns / 1e9 as weight_s,
        by_class.kv_ns / 1e9 as kv_s,
        by_class.transfer_ns / 1e9 as transfer_s,
        by_class.least_ns / 1e9 as least_s,
        by_class.least_ns / nullif(by_class.judged_step_ns, 0) as achieved_share,
        by_class.least_with_device_ns / nullif(by_class.judged_device_ns, 0) as achieved_device_share,
        by_bound.binds,
        by_bound.least_ns / nullif(by_class.least_ns, 0) as binds_share,
        case
            when by_class.judged > 0 then null
            when by_class.with_work = 0 then 'no work recorded'
            when by_class.captured = by_class.with_work then 'only captures'
            else 'not calibrated'
        end as reason
    from by_class
    left join by_bound
        on
            by_class.step_kind = by_bound.step_kind
            and by_class.size_class = by_bound.size_class
            and by_bound.place = 1
)

select * from final
order by case step_kind when 'prefill' then 1 when 'mixed' then 2 when 'decode' then 3 else 4 end, batch_from
