-- question: Did first tokens come when admission said they would, and did those come in time of which it said so?
-- grain: one row per verdict and decile of the predicted first-token time, and one per verdict without predictions
-- inputs: cohort, decisions
-- outputs:
--   verdict               varchar  -         admit, queue or refuse
--   decile                bigint   -         1 to 10 by predicted time within the verdict; NULL: nothing was predicted
--   decisions             bigint   requests  decided so
--   realised              bigint   requests  of them, with a first token
--   predicted_from_s      double   seconds   smallest predicted time of the decile, from arrival at the server
--   predicted_to_s        double   seconds   largest
--   predicted_mean_s      double   seconds   of the realised
--   realised_mean_s       double   seconds   of the realised, from arrival to first token computed
--   error_p10_s           double   seconds   realised minus predicted, nearest rank
--   error_p50_s           double   seconds
--   error_p90_s           double   seconds
--   later                 bigint   requests  of the realised, later than predicted
--   feasible              bigint   requests  said to meet their deadline, and known whether they did
--   feasible_met          bigint   requests  of them, met it
--   feasible_met_ratio    double   ratio     feasible_met / feasible
--   feasible_met_low      double   ratio     Wilson 95 %
--   feasible_met_high     double   ratio     Wilson 95 %
--   infeasible            bigint   requests  said to miss their deadline, and known whether they did
--   infeasible_met        bigint   requests  of them, met it all the same
--   infeasible_met_ratio  double   ratio     infeasible_met / infeasible
--   infeasible_met_low    double   ratio     Wilson 95 %
--   infeasible_met_high   double   ratio     Wilson 95 %
--   deadline_unknown      bigint   requests  without a deadline, or that left before it without a first token
--   unsafe                bigint   requests  whose KV was said to have no room
-- rules: Of the cohort's requests, the last decision for each verdict: who was queued and then admitted stands under both.
--   Within a verdict the request at place i of n by predicted time, from 1, is in decile 10(i-1)/n + 1, rounded down;
--   equal times in the order of request ids. Deadline: predicted stamp plus slack. A request meets it when its first
--   token is computed by then, and misses it when it is computed later or when the request ended later without one. What
--   left before its deadline without a first token, as all that was refused, tells neither. Where feasible was not
--   recorded it is slack >= 0. A prediction on another clock than the request's engine stamps is none. Admission acts on
--   its predictions: the refused would have made the others later, so this calibrates what was said of who stayed.
--   Wilson's interval assumes independent requests, and requests of one queue are not.
with

cohort as (
    select
        request_id,
        engine_clock_id,
        engine_start_ns,
        engine_end_ns,
        engine_first_computed_ns
    from cohort
),

last_decisions as (
    select
        request_id,
        clock_id,
        verdict,
        predicted_first_token_ns,
        slack_ns,
        feasible,
        resource_safe,
        row_number() over (partition by request_id, verdict order by at_ns desc, place desc) as from_last
    from decisions
),

decided as (
    select
        last_decisions.verdict,
        last_decisions.request_id,
        last_decisions.slack_ns,
        last_decisions.resource_safe,
        coalesce(last_decisions.feasible, last_decisions.slack_ns >= 0) as is_feasible,
        case
            when last_decisions.clock_id = cohort.engine_clock_id then last_decisions.predicted_first_token_ns
        end as predicted_at_ns,
        cohort.engine_start_ns,
        cohort.engine_end_ns,
        cohort.engine_first_computed_ns
    from last_decisions
    inner join cohort on last_decisions.request_id = cohort.request_id
    where last_decisions.from_last = 1
),

came_true as (
    select
        decided.*,
        predicted_at_ns - engine_start_ns as predicted_ns,
        engine_first_computed_ns - engine_start_ns as realised_ns,
        case
            when engine_first_computed_ns is not null
                then engine_first_computed_ns <= predicted_at_ns + slack_ns
            when engine_end_ns > predicted_at_ns + slack_ns then false
        end as is_met
    from decided
),

placed as (
    select
        came_true.*,
        row_number() over (partition by verdict order by predicted_ns nulls last, request_id) as place,
        count(predicted_ns) over (partition by verdict) as n
    from came_true
),

deciles as (
    select
        placed.*,
        case when predicted_ns is not null then 10 * (place - 1) // nullif(n, 0) + 1 end as decile,
        realised_ns - predicted_ns as error_ns
    from placed
),

ranked as (
    select
        deciles.*,
        row_number() over (partition by verdict, decile order by error_ns nulls last, request_id) as error_place,
        count(error_ns) over (partition by verdict, decile) as errors
    from deciles
),

by_decile as (
    select
        verdict,
        decile,
        count(*) as decisions,
        count(realised_ns) as realised,
        min(predicted_ns) as predicted_from_ns,
        max(predicted_ns) as predicted_to_ns,
        avg(case when error_ns is not null then predicted_ns end) as predicted_mean_ns,
        avg(realised_ns) as realised_mean_ns,
        max(case when error_place = (10 * errors + 99) // 100 then error_ns end) as error_p10_ns,
        max(case when error_place = (50 * errors + 99) // 100 then error_ns end) as error_p50_ns,
        max(case when error_place = (90 * errors + 99) // 100 then error_ns end) as error_p90_ns,
        count(*) filter (where error_ns > 0) as later,
        count(*) filter (where is_feasible and is_met is not null) as feasible,
        count(*) filter (where is_feasible and is_met) as feasible_met,
        count(*) filter (where not is_feasible and is_met is not null) as infeasible,
        count(*) filter (where not is_feasible and is_met) as infeasible_met,
        count(*) filter (where is_met is null) as deadline_unknown,
        count(*) filter (where not resource_safe) as unsafe
    from ranked
    group by verdict, decile
),

final as (
    select
        verdict,
        decile,
        decisions,
        realised,
        predicted_from_ns / 1e9 as predicted_from_s,
        predicted_to_ns / 1e9 as predicted_to_s,
        predicted_mean_ns / 1e9 as predicted_mean_s,
        realised_mean_ns / 1e9 as realised_mean_s,
        error_p10_ns / 1e9 as error_p10_s,
        error_p50_ns / 1e9 as error_p50_s,
        error_p90_ns / 1e9 as error_p90_s,
        later,
        feasible,
        feasible_met,
        ratio(feasible_met * 1e0, feasible) as feasible_met_ratio,
        wilson_low(feasible_met, feasible) as feasible_met_low,
        wilson_high(feasible_met, feasible) as feasible_met_high,
        infeasible,
        infeasible_met,
        ratio(infeasible_met * 1e0, infeasible) as infeasible_met_ratio,
        wilson_low(infeasible_met, infeasible) as infeasible_met_low,
        wilson_high(infeasible_met, infeasible) as infeasible_met_high,
        deadline_unknown,
        unsafe
    from by_decile
)

select * from final
order by case verdict when 'admit' then 1 when 'queue' then 2 else 3 end, decile
