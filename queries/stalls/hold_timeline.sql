-- question: When did outputs start to be held, and by whom?
-- grain: one row per bucket of wall time in which a request arrived or a hold ended
-- inputs: cohort, judged_holds, run_window
-- params:
--   bucket_s  bigint  seconds  10  min 1  width of a bucket; the first starts with the window
-- outputs:
--   bucket_at_s                   double   seconds   start, since the epoch
--   arrivals                      bigint   requests  of the cohort that arrived in the bucket
--   holds                         bigint   holds     that ended in the bucket
--   decoder_stall                 bigint   holds
--   buffered_delivery             bigint   holds
--   mixed                         bigint   holds
--   client_late                   bigint   holds
--   suspected_decoder_stall       bigint   holds
--   suspected_buffered_delivery   bigint   holds
--   unknown                       bigint   holds
--   excess_s                      double   seconds   waiting beyond the limits
--   worst                         varchar  -         verdict with the largest excess; `none` without a hold
-- rules: A hold belongs to the bucket of its end, also after the window's end. A bucket in which nothing happened has no
--   row. Equal excesses: the verdict first by name.
with

run_window as (
    select
        window_start_ns,
        cast($bucket_s as bigint) * 1000000000 as bucket_ns
    from run_window
),

cohort as (
    select
        request_id,
        arrival_at_ns
    from cohort
),

judged_holds as (
    select
        verdict,
        held_at_ns,
        excess_ns
    from judged_holds
),

arrived as (
    select
        (cohort.arrival_at_ns - run_window.window_start_ns) // nullif(run_window.bucket_ns, 0) as bucket,
        count(*) as arrivals
    from cohort
    cross join run_window
    group by (cohort.arrival_at_ns - run_window.window_start_ns) // nullif(run_window.bucket_ns, 0)
),

by_verdict as (
    select
        (judged_holds.held_at_ns - run_window.window_start_ns) // nullif(run_window.bucket_ns, 0) as bucket,
        judged_holds.verdict,
        count(*) as holds,
        coalesce(sum(judged_holds.excess_ns), 0) as excess_ns
    from judged_holds
    cross join run_window
    group by
        (judged_holds.held_at_ns - run_window.window_start_ns) // nullif(run_window.bucket_ns, 0),
        judged_holds.verdict
),

ranked as (
    select
        by_verdict.*,
        row_number() over (partition by bucket order by excess_ns desc, verdict) as place
    from by_verdict
),

held as (
    select
        bucket,
        sum(holds) as holds,
        sum(holds) filter (where verdict = 'decoder_stall') as decoder_stall,
        sum(holds) filter (where verdict = 'buffered_delivery') as buffered_delivery,
        sum(holds) filter (where verdict = 'mixed') as mixed,
        sum(holds) filter (where verdict = 'client_late') as client_late,
        sum(holds) filter (where verdict = 'suspected_decoder_stall') as suspected_decoder_stall,
        sum(holds) filter (where verdict = 'suspected_buffered_delivery') as suspected_buffered_delivery,
        sum(holds) filter (where verdict = 'unknown') as unknown,
        sum(excess_ns) as excess_ns,
        max(case when place = 1 then verdict end) as worst
    from ranked
    group by bucket
),

buckets as (
    select bucket from arrived
    union
    select bucket from held
),

final as (
    select
        (run_window.window_start_ns + buckets.bucket * run_window.bucket_ns) / 1e9 as bucket_at_s,
        coalesce(arrived.arrivals, 0) as arrivals,
        cast(coalesce(held.holds, 0) as bigint) as holds,
        cast(coalesce(held.decoder_stall, 0) as bigint) as decoder_stall,
        cast(coalesce(held.buffered_delivery, 0) as bigint) as buffered_delivery,
        cast(coalesce(held.mixed, 0) as bigint) as mixed,
        cast(coalesce(held.client_late, 0) as bigint) as client_late,
        cast(coalesce(held.suspected_decoder_stall, 0) as bigint) as suspected_decoder_stall,
        cast(coalesce(held.suspected_buffered_delivery, 0) as bigint) as suspected_buffered_delivery,
        cast(coalesce(held.unknown, 0) as bigint) as unknown,
        coalesce(held.excess_ns, 0) / 1e9 as excess_s,
        coalesce(held.worst, 'none') as worst
    from buckets
    cross join run_window
    left join arrived on buckets.bucket = arrived.bucket
    left join held on buckets.bucket = held.bucket
)

select * from final
order by bucket_at_s
