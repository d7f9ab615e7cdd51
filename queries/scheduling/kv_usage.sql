-- question: How full was the KV pool, what was promised and held back, and what did that cost?
-- grain: one row per engine process that ran steps in the window and bucket of the window, idle buckets included
-- inputs: window_steps, engines, run_window, numbers
-- params:
--   bucket_s  bigint  seconds  10  min 1  length of a bucket
-- outputs:
--   engine_id         varchar  -
--   bucket_start_s    double   seconds   after the start of the window
--   bucket_at_s       double   seconds   the same as wall time since the epoch
--   bucket_length_s   double   seconds   the last bucket may be shorter
--   steps             bigint   steps     that began in the bucket
--   busy_s            double   seconds   their duration in sum
--   kv_blocks         bigint   blocks    of the pool: the sum of resident, reserved and free in the bucket's last step
--   resident_mean     double   blocks    hold tokens
--   resident_max      bigint   blocks
--   reserved_mean     double   blocks    promised to admitted work
--   reserved_max      bigint   blocks
--   free_mean         double   blocks    neither
--   free_min          bigint   blocks
--   cached_mean       double   blocks    held by nobody, promised ones too, with a prefix to reuse
--   resident_share    double   ratio     resident_mean over the mean of the pool
--   promised_share    double   ratio     resident and reserved together over the mean of the pool
--   paused_share      double   ratio     time in which requests were held back by flow control / in which they held KV
--   preemptions       bigint   requests
--   reused_tokens     bigint   tokens    of prompts, taken from the prefix cache instead of run
--   prefill_tokens    bigint   tokens    of prefills, run; after a preemption again
--   reused_share      double   ratio     reused / (reused + run)
--   unbalanced        bigint   steps     whose resident, reserved and free do not sum to the engine's pool: 0 is right
-- rules: Steps of the window and of its requests' drain: buckets go on after the window until the last step that still
--   ran one of its requests. A step belongs to the bucket in which it began. Means and shares weigh each step by its
--   duration, so they say nothing of the time between steps. Requests that hold KV are those in prefill, in decode and
--   paused. What no step of the bucket recorded is NULL, as everything is in an idle bucket. `unbalanced` compares with
--   the pool that the engine recorded, and is NULL when it recorded none; more cached blocks than nobody holds are
--   unbalanced too. A bucket_s that makes more than 100000 buckets gives the first 100000.
with

run_window as (
    select
        window_start_ns,
        window_end_ns,
        $bucket_s * 1000000000 as bucket_ns
    from run_window
),

-- The last step's own moment is in the last bucket.
drained as (
    select
        max(run_window.window_start_ns) as window_start_ns,
        max(run_window.bucket_ns) as bucket_ns,
        greatest(max(run_window.window_end_ns), coalesce(max(window_steps.end_ns - window_steps.start_ns
        + window_steps.start_at_ns), 0)) as end_ns
    from run_window
    left join window_steps on 1 = 1
),

buckets as (
    select
        numbers.n as bucket,
        drained.window_start_ns,
        drained.window_start_ns + numbers.n * drained.bucket_ns as bucket_start_ns,
        least(drained.window_start_ns + (numbers.n + 1) * drained.bucket_ns, drained.end_ns) as bucket_end_ns
    from numbers
    inner join drained on drained.window_start_ns + numbers.n * drained.bucket_ns < drained.end_ns
),

engines as (
    select
        engine_id,
        at_ns,
        lead(at_ns) over (partition by engine_id order by at_ns, place) as until_ns,
        kv_blocks
    from engines
),

bucketed as (
    select
        window_steps.*,
        window_steps.end_ns - window_steps.start_ns as duration_ns,
        (window_steps.start_at_ns - run_window.window_start_ns) // run_window.bucket_ns as bucket,
        window_steps.kv_blocks_resident + window_steps.kv_blocks_reserved + window_steps.kv_blocks_free as pool,
        coalesce(window_steps.prefill_requests, 0) + coalesce(window_steps.decode_requests, 0)
        + window_steps.paused as holders
    from window_steps
    cross join run_window
),

placed as (
    select
        bucketed.*,
        engines.kv_blocks,
        row_number() over (
            partition by bucketed.engine_id, bucketed.bucket
            order by bucketed.start_ns desc, bucketed.step_id desc
        ) as from_last
    from bucketed
    left join engines
        on
            bucketed.engine_id = engines.engine_id
            and bucketed.start_ns >= engines.at_ns
            and (engines.until_ns is null or bucketed.start_ns < engines.until_ns)
),

by_bucket as (
    select
        engine_id,
        bucket,
        count(*) as steps,
        cast(sum(duration_ns) as bigint) as busy_ns,
        max(case when from_last = 1 then pool end) as kv_blocks,
        cast(sum(case when pool is not null then duration_ns end) as bigint) as pool_ns,
        sum(pool * 1e0 * duration_ns) as pool_block_ns,
        sum(kv_blocks_resident * 1e0 * duration_ns) as resident_block_ns,
        max(kv_blocks_resident) as resident_max,
        sum(kv_blocks_reserved * 1e0 * duration_ns) as reserved_block_ns,
        max(kv_blocks_reserved) as reserved_max,
        sum(kv_blocks_free * 1e0 * duration_ns) as free_block_ns,
        min(kv_blocks_free) as free_min,
        sum(kv_blocks_cached * 1e0 * duration_ns) as cached_block_ns,
        cast(sum(case when kv_blocks_cached is not null then duration_ns end) as bigint) as cached_ns,
        sum(paused * 1e0 * duration_ns) as paused_request_ns,
        sum(holders * 1e0 * duration_ns) as holder_request_ns,
        cast(sum(preempted) as bigint) as preemptions,
        cast(sum(reused_tokens) as bigint) as reused_tokens,
        cast(sum(prefill_tokens) as bigint) as prefill_tokens,
        case
            when count(kv_blocks) > 0
                then count(*) filter (where pool <> kv_blocks or kv_blocks_cached > kv_blocks_reserved + kv_blocks_free)
        end as unbalanced
    from placed
    group by engine_id, bucket
),

engine_buckets as (
    select
        seen.engine_id,
        buckets.bucket,
        buckets.window_start_ns,
        buckets.bucket_start_ns,
        buckets.bucket_end_ns - buckets.bucket_start_ns as bucket_ns
    from buckets
    cross join (select distinct engine_id from bucketed) as seen
),

final as (
    select
        engine_buckets.engine_id,
        (engine_buckets.bucket_start_ns - engine_buckets.window_start_ns) / 1e9 as bucket_start_s,
        engine_buckets.bucket_start_ns / 1e9 as bucket_at_s,
        engine_buckets.bucket_ns / 1e9 as bucket_length_s,
        coalesce(by_bucket.steps, 0) as steps,
        coalesce(by_bucket.busy_ns, 0) / 1e9 as busy_s,
        by_bucket.kv_blocks,
        by_bucket.resident_block_ns / nullif(by_bucket.pool_ns, 0) as resident_mean,
        by_bucket.resident_max,
        by_bucket.reserved_block_ns / nullif(by_bucket.pool_ns, 0) as reserved_mean,
        by_bucket.reserved_max,
        by_bucket.free_block_ns / nullif(by_bucket.pool_ns, 0) as free_mean,
        by_bucket.free_min,
        by_bucket.cached_block_ns / nullif(by_bucket.cached_ns, 0) as cached_mean,
        by_bucket.resident_block_ns / nullif(by_bucket.pool_block_ns, 0) as resident_share,
        (by_bucket.resident_block_ns + by_bucket.reserved_block_ns) / nullif(by_bucket.pool_block_ns, 0)
            as promised_share,
        by_bucket.paused_request_ns / nullif(by_bucket.holder_request_ns, 0) as paused_share,
        by_bucket.preemptions,
        by_bucket.reused_tokens,
        by_bucket.prefill_tokens,
        by_bucket.reused_tokens * 1e0 / nullif(by_bucket.reused_tokens + by_bucket.prefill_tokens, 0) as reused_share,
        by_bucket.unbalanced
    from engine_buckets
    left join by_bucket
        on engine_buckets.engine_id = by_bucket.engine_id and engine_buckets.bucket = by_bucket.bucket
)

select * from final
order by engine_id, bucket_start_s
