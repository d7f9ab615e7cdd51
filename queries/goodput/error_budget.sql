-- question: How much of each class's error budget did the window use, and how fast is it burning?
-- grain: one row per class of the contract
-- inputs: cohort, run_classes, run_window
-- outputs:
--   class                 varchar  -
--   objective             double   ratio     share of offered that must qualify
--   offered               bigint   requests  the denominator
--   bad                   bigint   requests  offered, not qualified
--   bad_ratio             double   ratio     bad / offered
--   bad_ratio_low         double   ratio     Wilson 95 %
--   bad_ratio_high        double   ratio     Wilson 95 %
--   budget_ratio          double   ratio     1 - objective
--   budget_requests       double   requests  bad requests that the offered ones allow
--   budget_left           double   requests  budget_requests - bad; below 0 it is overspent
--   burn_rate             double   -         bad_ratio / budget_ratio: 1 spends the budget exactly over the period
--   period_s              double   seconds
--   window_s              double   seconds
--   period_budget_used    double   ratio     share of a whole period's budget that this window took, at even traffic
--   exhausted_in_s        double   seconds   at this burn the whole budget of a period lasts so long; NULL: no bad ones
-- rules: A class without traffic has 0 offered and NULL ratios: nothing burns. A class that the contract does not have
--   has no budget and no row. Wilson's interval assumes independent requests.
-- source: B. Beyer et al. (eds.), The Site Reliability Workbook, O'Reilly 2018, chapter 5
with

cohort as (
    select
        contract_class,
        qualified
    from cohort
),

run_classes as (
    select
        class,
        objective,
        period_ns
    from run_classes
),

run_window as (
    select window_ns
    from run_window
),

by_class as (
    select
        contract_class,
        count(*) as offered,
        count(*) filter (where not qualified) as bad
    from cohort
    group by contract_class
),

counted as (
    select
        run_classes.class,
        run_classes.objective,
        1 - run_classes.objective as budget_ratio,
        run_classes.period_ns,
        run_window.window_ns,
        coalesce(by_class.offered, 0) as offered,
        coalesce(by_class.bad, 0) as bad,
        ratio(by_class.bad, by_class.offered) / nullif(1 - run_classes.objective, 0) as burn_rate
    from run_classes
    left join by_class on run_classes.class = by_class.contract_class
    cross join run_window
),

final as (
    select
        class,
        objective,
        offered,
        bad,
        ratio(bad, offered) as bad_ratio,
        wilson_low(bad, offered) as bad_ratio_low,
        wilson_high(bad, offered) as bad_ratio_high,
        budget_ratio,
        offered * budget_ratio as budget_requests,
        offered * budget_ratio - bad as budget_left,
        burn_rate,
        period_ns / 1e9 as period_s,
        window_ns / 1e9 as window_s,
        burn_rate * window_ns / nullif(period_ns, 0) as period_budget_used,
        period_ns / 1e9 / nullif(burn_rate, 0) as exhausted_in_s
    from counted
)

select * from final
order by class
