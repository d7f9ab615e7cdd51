-- question: What share of answers is longer than t tokens, and what share was lost before it could end?
-- grain: one row per cohort and length at which a request left the risk set
-- inputs: length_curves
-- params:
--   by          varchar  class|model|tenant|all  class    how to split into cohorts
--   population  varchar  arrival|period          arrival
-- outputs:
--   cohort            varchar  -
--   tokens            bigint   tokens
--   at_risk           bigint   requests
--   events            bigint   requests  natural ends
--   losses            bigint   requests  failed or cancelled, among the censored
--   censored          bigint   requests
--   survival          double   ratio     share longer than `tokens`
--   variance          double   ratio²    Greenwood
--   survival_se       double   ratio
--   survival_low      double   ratio     log-log, 95 %
--   survival_high     double   ratio     log-log, 95 %
--   end_incidence     double   ratio     ended by itself at this length or before, losses competing
--   loss_incidence    double   ratio     lost at this length or before
-- rules: Those of `length_curves` and `output_lengths`. The curve is flat between rows, and says nothing beyond the last.
-- source: Kaplan and Meier (1958); Greenwood (1926); Aalen and Johansen (1978)
with

length_curves as (
    select
        cohort,
        tokens,
        at_risk,
        events,
        losses,
        censored,
        survival,
        greenwood,
        survival_low,
        survival_high,
        end_incidence,
        loss_incidence
    from length_curves
    where grouping = $by and population = $population and part = 'whole'
),

final as (
    select
        cohort,
        tokens,
        at_risk,
        events,
        losses,
        censored,
        survival,
        survival * survival * greenwood as variance,
        survival * sqrt(greenwood) as survival_se,
        survival_low,
        survival_high,
        end_incidence,
        loss_incidence
    from length_curves
)

select * from final
order by cohort, tokens
