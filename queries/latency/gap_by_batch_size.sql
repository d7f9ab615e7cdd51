-- question: How do the largest gap and TTFT depend on the batch that a request landed in?
-- grain: one row per range of batch sizes that occurred
-- inputs: cohort, step_requests, steps
-- outputs:
--   batch_from       bigint   requests  smallest batch size that occurred in the range
--   batch_to         bigint   requests  largest; ranges are 1, 2, 3-4, 5-8, … 257-512, 513 and more
--   requests         bigint   requests  landed there
--   completed        bigint   requests  of them; the values below are theirs
--   ttft_p50_s       double   seconds   nearest rank
--   ttft_max_s       double   seconds
--   itl_max_p50_s    double   seconds   nearest rank of the requests' largest gaps
--   itl_max_max_s    double   seconds
--   tpot_mean_s      double   seconds   mean of the requests' TPOT
--   step_mean_s      double   seconds   mean duration of the landing steps
--   qualified        bigint   requests
--   attainment       double   ratio     qualified / requests
--   attainment_low   double   ratio     Wilson 95 %
--   attainment_high  double   ratio     Wilson 95 %
-- rules: The batch is prefill and decode requests of the first step that ran the request, this one included. Requests that
--   no recorded step ran are left out. Quantiles are of few requests where `completed` is small: read them with it.
--   A larger batch often comes with a busier server, so this is an association, not an effect. Wilson's interval assumes
--   independent requests, and requests of one batch are not.
with

cohort as (
    select
        request_id,
        outcome,
        qualified,
        ttft_ns,
        itl_max_ns,
        span_ns,
        span_tokens
    from cohort
),

steps as (
    select
        step_id,
        engine_id,
        start_ns,
        end_ns,
        prefill_requests,
        decode_requests
    from steps
),

request_steps as (
    select
        step_requests.request_id,
        coalesce(steps.prefill_requests, 0) + coalesce(steps.decode_requests, 0) as batch_size,
        steps.end_ns - steps.start_ns as step_ns,
        row_number() over (
            partition by step_requests.request_id
            order by steps.start_ns, steps.step_id
        ) as place
    from step_requests
    inner join steps on step_requests.step_id = steps.step_id and step_requests.engine_id = steps.engine_id
    where step_requests.role in ('prefill', 'decode')
),

landed as (
    select
        cohort.request_id,
        cohort.outcome,
        cohort.qualified,
        cohort.ttft_ns,
        cohort.itl_max_ns,
        cohort.span_ns / nullif(cohort.span_tokens - 1, 0) as tpot_ns,
        request_steps.step_ns,
        case
            when request_steps.batch_size <= 1 then 1
            when request_steps.batch_size <= 2 then 2
            when request_steps.batch_size <= 4 then 4
            when request_steps.batch_size <= 8 then 8
            when request_steps.batch_size <= 16 then 16
            when request_steps.batch_size <= 32 then 32
            when request_steps.batch_size <= 64 then 64
            when request_steps.batch_size <= 128 then 128
            when request_steps.batch_size <= 256 then 256
            when request_steps.batch_size <= 512 then 512
            else 1024
        end as size_class,
        request_steps.batch_size
    from cohort
    inner join request_steps on cohort.request_id = request_steps.request_id
    where request_steps.place = 1
),

ttft_ranked as (
    select
        size_class,
        ttft_ns as value_ns,
        row_number() over (partition by size_class order by ttft_ns) as place,
        count(*) over (partition by size_class) as n
    from landed
    where outcome = 'completed' and ttft_ns is not null
),

gap_ranked as (
    select
        size_class,
        itl_max_ns as value_ns,
        row_number() over (partition by size_class order by itl_max_ns) as place,
        count(*) over (partition by size_class) as n
    from landed
    where outcome = 'completed' and itl_max_ns is not null
),

ttft_median as (
    select
        size_class,
        value_ns
    from ttft_ranked
    where place = (n + 1) // 2
),

gap_median as (
    select
        size_class,
        value_ns
    from gap_ranked
    where place = (n + 1) // 2
),

counted as (
    select
        size_class,
        min(batch_size) as batch_from,
        max(batch_size) as batch_to,
        count(*) as requests,
        count(*) filter (where outcome = 'completed') as completed,
        count(*) filter (where qualified) as qualified,
        max(ttft_ns) filter (where outcome = 'completed') as ttft_max_ns,
        max(itl_max_ns) filter (where outcome = 'completed') as itl_max_max_ns,
        avg(tpot_ns) filter (where outcome = 'completed') as tpot_mean_ns,
        avg(step_ns) as step_mean_ns
    from landed
    group by size_class
),

final as (
    select
        counted.batch_from,
        counted.batch_to,
        counted.requests,
        counted.completed,
        ttft_median.value_ns / 1e9 as ttft_p50_s,
        counted.ttft_max_ns / 1e9 as ttft_max_s,
        gap_median.value_ns / 1e9 as itl_max_p50_s,
        counted.itl_max_max_ns / 1e9 as itl_max_max_s,
        counted.tpot_mean_ns / 1e9 as tpot_mean_s,
        counted.step_mean_ns / 1e9 as step_mean_s,
        counted.qualified,
        ratio(counted.qualified, counted.requests) as attainment,
        wilson_low(counted.qualified, counted.requests) as attainment_low,
        wilson_high(counted.qualified, counted.requests) as attainment_high
    from counted
    left join ttft_median on counted.size_class = ttft_median.size_class
    left join gap_median on counted.size_class = gap_median.size_class
)

select * from final
order by batch_from
