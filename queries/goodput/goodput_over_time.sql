-- question: How did goodput move within the window?
-- grain: one row per bucket of the window, empty ones included
-- inputs: cohort, run_window, numbers
-- params:
--   bucket_s  bigint  seconds  10  min 1  length of a bucket
-- outputs:
--   bucket_start_s          double   seconds   after the start of the window
--   bucket_at_s             double   seconds   the same as wall time since the epoch
--   bucket_length_s         double   seconds   the last bucket ends with the window and may be shorter
--   offered                 bigint   requests  arrived in the bucket: the denominator
--   qualified               bigint   requests
--   completed               bigint   requests
--   failed                  bigint   requests
--   cancelled               bigint   requests
--   unfinished              bigint   requests
--   unobserved              bigint   requests
--   attainment              double   ratio     qualified / offered; NULL in an empty bucket
--   attainment_low          double   ratio     Wilson 95 %
--   attainment_high         double   ratio     Wilson 95 %
--   goodput_rps             double   req/s
--   token_goodput           double   tokens/s
--   observed_tokens_per_s   double   tokens/s  of the requests that arrived in the bucket, whenever they came
-- rules: A request belongs to the bucket of its arrival. The window rule applies to the outer window: nobody is cut
--   off at the end of a bucket. A bucket_s that makes more than 100000 buckets gives
--   the first 100000. Wilson's interval assumes independent requests.
with

cohort as (
    select
        arrival_at_ns,
        outcome,
        unobserved,
        qualified,
        output_tokens,
        output_tokens_before_cut
    from cohort
),

run_window as (
    select
        window_start_ns,
        window_end_ns,
        $bucket_s * 1000000000 as bucket_ns
    from run_window
),

buckets as (
    select
        numbers.n as bucket,
        run_window.window_start_ns,
        run_window.window_start_ns + numbers.n * run_window.bucket_ns as bucket_start_ns,
        least(run_window.window_start_ns + (numbers.n + 1) * run_window.bucket_ns, run_window.window_end_ns)
        as bucket_end_ns
    from numbers
    inner join run_window
        on run_window.window_start_ns + numbers.n * run_window.bucket_ns < run_window.window_end_ns
),

by_bucket as (
    select
        (cohort.arrival_at_ns - run_window.window_start_ns) // run_window.bucket_ns as bucket,
        count(*) as offered,
        count(*) filter (where cohort.qualified) as qualified,
        count(*) filter (where cohort.outcome = 'completed') as completed,
        count(*) filter (where cohort.outcome = 'failed') as failed,
        count(*) filter (where cohort.outcome = 'cancelled') as cancelled,
        count(*) filter (where cohort.outcome = 'unfinished') as unfinished,
        count(*) filter (where cohort.unobserved) as unobserved,
        cast(coalesce(sum(cohort.output_tokens) filter (where cohort.qualified), 0) as bigint) as qualified_tokens,
        cast(sum(cohort.output_tokens_before_cut) as bigint) as observed_tokens
    from cohort
    cross join run_window
    group by (cohort.arrival_at_ns - run_window.window_start_ns) // run_window.bucket_ns
),

filled as (
    select
        buckets.window_start_ns,
        buckets.bucket_start_ns,
        buckets.bucket_end_ns - buckets.bucket_start_ns as bucket_ns,
        coalesce(by_bucket.offered, 0) as offered,
        coalesce(by_bucket.qualified, 0) as qualified,
        coalesce(by_bucket.completed, 0) as completed,
        coalesce(by_bucket.failed, 0) as failed,
        coalesce(by_bucket.cancelled, 0) as cancelled,
        coalesce(by_bucket.unfinished, 0) as unfinished,
        coalesce(by_bucket.unobserved, 0) as unobserved,
        coalesce(by_bucket.qualified_tokens, 0) as qualified_tokens,
        coalesce(by_bucket.observed_tokens, 0) as observed_tokens
    from buckets
    left join by_bucket on buckets.bucket = by_bucket.bucket
),

final as (
    select
        (bucket_start_ns - window_start_ns) / 1e9 as bucket_start_s,
        bucket_start_ns / 1e9 as bucket_at_s,
        bucket_ns / 1e9 as bucket_length_s,
        offered,
        qualified,
        completed,
        failed,
        cancelled,
        unfinished,
        unobserved,
        ratio(qualified, offered) as attainment,
        wilson_low(qualified, offered) as attainment_low,
        wilson_high(qualified, offered) as attainment_high,
        ratio(qualified * 1e9, bucket_ns) as goodput_rps,
        ratio(qualified_tokens * 1e9, bucket_ns) as token_goodput,
        ratio(observed_tokens * 1e9, bucket_ns) as observed_tokens_per_s
    from filled
)

select * from final
order by bucket_start_s
