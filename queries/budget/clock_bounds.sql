-- question: How far can two observers' clocks be apart, given that no one receives before the other sends?
-- grain: one row per pair of neighbouring observers and pair of their clocks
-- inputs: cohort
-- outputs:
--   outer_observer   varchar  -         nearer to the consumer
--   inner_observer   varchar  -
--   outer_clock_id   varchar  -
--   inner_clock_id   varchar  -
--   requests         bigint   requests  that both saw
--   offset_low_s     double   seconds   inner clock minus outer clock: at least this
--   offset_high_s    double   seconds   at most this
--   width_s          double   seconds   high - low: what the two fastest directions took together
--   middle_s         double   seconds   of the interval
--   is_possible      boolean  -         low <= high; false: a clock was set, or drifted by more than the width
--   is_same_clock    boolean  -
--   reversed         bigint   requests  on one clock, with an effect stamped before its cause; NULL on two
-- rules: A request reaches the inner observer after the outer one sent it, so offset <= inner start - outer start; the
--   first output reaches the outer one after the inner one had it, so offset >= inner first - outer first. Each
--   request narrows the interval. `inner first` is the engine's handing over, or the sidecar's receipt: stamps that
--   surely come before the bytes leave, as one after the write may not. One interval per pair for the whole window, so
--   drift widens nothing and can make it impossible. A client that the sidecar stands before is also paired with the
--   engine.
-- source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989) 146-158
with

cohort as (
    select
        request_id,
        client_observed,
        sidecar_observed,
        engine_observed,
        client_clock_id,
        sidecar_clock_id,
        engine_clock_id,
        client_start_ns,
        sidecar_start_ns,
        engine_start_ns,
        client_first_ns,
        sidecar_upstream_first_ns,
        engine_first_handed_ns
    from cohort
),

pairs as (
    select
        request_id,
        'client' as outer_observer,
        'sidecar' as inner_observer,
        client_clock_id as outer_clock_id,
        sidecar_clock_id as inner_clock_id,
        sidecar_upstream_first_ns - client_first_ns as low_ns,
        sidecar_start_ns - client_start_ns as high_ns
    from cohort
    where client_observed and sidecar_observed
    union all
    select
        request_id,
        'client' as outer_observer,
        'engine' as inner_observer,
        client_clock_id as outer_clock_id,
        engine_clock_id as inner_clock_id,
        engine_first_handed_ns - client_first_ns as low_ns,
        engine_start_ns - client_start_ns as high_ns
    from cohort
    where client_observed and engine_observed
    union all
    select
        request_id,
        'sidecar' as outer_observer,
        'engine' as inner_observer,
        sidecar_clock_id as outer_clock_id,
        engine_clock_id as inner_clock_id,
        engine_first_handed_ns - sidecar_upstream_first_ns as low_ns,
        engine_start_ns - sidecar_start_ns as high_ns
    from cohort
    where sidecar_observed and engine_observed
),

bounded as (
    select
        outer_observer,
        inner_observer,
        outer_clock_id,
        inner_clock_id,
        count(*) as requests,
        max(low_ns) as low_ns,
        min(high_ns) as high_ns,
        count(*) filter (where low_ns > 0 or high_ns < 0) as reversed
    from pairs
    where outer_clock_id is not null and inner_clock_id is not null
    group by outer_observer, inner_observer, outer_clock_id, inner_clock_id
),

final as (
    select
        outer_observer,
        inner_observer,
        outer_clock_id,
        inner_clock_id,
        requests,
        low_ns / 1e9 as offset_low_s,
        high_ns / 1e9 as offset_high_s,
        (high_ns - low_ns) / 1e9 as width_s,
        (low_ns + (high_ns - low_ns) / 2e0) / 1e9 as middle_s,
        low_ns <= high_ns as is_possible,
        outer_clock_id = inner_clock_id as is_same_clock,
        case when outer_clock_id = inner_clock_id then reversed end as reversed
    from bounded
)

select * from final
order by outer_observer, inner_observer, outer_clock_id, inner_clock_id
