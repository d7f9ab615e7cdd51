-- question: How many late holds had which verdict, and how much waiting did each verdict cost?
-- grain: one row per verdict that occurred
-- inputs: judged_holds
-- outputs:
--   verdict       varchar  -
--   holds         bigint   holds
--   requests      bigint   requests  with at least one such hold
--   all_holds     bigint   holds     of every verdict: the denominator of holds_share
--   holds_share   double   ratio     holds / all_holds
--   excess_s      double   seconds   waiting beyond the limits, summed; NULL: not known of any of these holds
--   excess_share  double   ratio     of the excess of every verdict
--   longest_s     double   seconds   longest hold
-- rules: Verdicts as in `judged_holds`. A hold whose length is not known (a compressed span without engine stamps) is
--   counted and adds no excess.
with

judged_holds as (
    select
        verdict,
        request_id,
        excess_ns,
        held_ns
    from judged_holds
),

by_verdict as (
    select
        verdict,
        count(*) as holds,
        count(distinct request_id) as requests,
        sum(excess_ns) as excess_ns,
        max(held_ns) as longest_ns
    from judged_holds
    group by verdict
),

final as (
    select
        verdict,
        holds,
        requests,
        cast(sum(holds) over () as bigint) as all_holds,
        ratio(holds * 1e0, sum(holds) over ()) as holds_share,
        excess_ns / 1e9 as excess_s,
        ratio(excess_ns * 1e0, sum(excess_ns) over ()) as excess_share,
        longest_ns / 1e9 as longest_s
    from by_verdict
)

select * from final
order by excess_s desc nulls last, verdict
