-- question: What share of the offered requests kept its whole contract, and how many good requests and tokens is that per second?
-- grain: one row for the window
-- inputs: cohort, warmup_requests, run_window, offered_ttft_p99
-- outputs:
--   offered                       bigint   requests   the denominator: every request of the cohort
--   qualified                     bigint   requests   completed, every limit met
--   completed                     bigint   requests
--   failed                        bigint   requests
--   cancelled                     bigint   requests
--   unfinished                    bigint   requests
--   unobserved                    bigint   requests   no record at the declared observer
--   vacuous                       bigint   requests   completed, and a promised gap or TPOT has no value: met, whatever else was missed
--   voluntary                     bigint   requests   cancelled(voluntary)
--   warmup_excluded               bigint   requests   in the window, not in the cohort
--   attainment                    double   ratio      qualified / offered
--   attainment_low                double   ratio      Wilson 95 %
--   attainment_high               double   ratio      Wilson 95 %
--   attainment_min                double   ratio      had every unobserved request missed
--   attainment_max                double   ratio      had every unobserved request qualified
--   attainment_excl_voluntary     double   ratio      qualified / (offered - voluntary); NULL: not asked for
--   goodput_rps                   double   req/s
--   token_goodput                 double   tokens/s   output tokens of qualified requests
--   observed_tokens_per_s         double   tokens/s   output tokens received before the cut, of every request
--   qualified_tokens              bigint   tokens
--   observed_tokens               bigint   tokens
--   output_tokens                 bigint   tokens     of every request, also after the cut
--   window_s                      double   seconds
--   ttft_p99_s                    double   seconds    nearest rank over those owed one; not completed is above every value
--   ttft_p99_reason               varchar  -          why the p99 is NULL: too few requests, or beyond every value (> max)
-- rules: attainment is NULL without offered requests; rates are 0 then and NULL only without a window. Wilson's
--   interval assumes independent requests, which requests that share a queue are not: read it as a lower bound on
--   the uncertainty. With several choices each has to meet the limits, but the p99 is of TTFT, the first receipt of any.
-- source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927) 209-212
with

cohort as (
    select
        outcome,
        reason,
        unobserved,
        qualified,
        vacuous,
        output_tokens,
        output_tokens_before_cut
    from cohort
),

run_window as (
    select
        window_ns,
        voluntary_rule
    from run_window
),

counted as (
    select
        count(*) as offered,
        count(*) filter (where qualified) as qualified,
        count(*) filter (where outcome = 'completed') as completed,
        count(*) filter (where outcome = 'failed') as failed,
        count(*) filter (where outcome = 'cancelled') as cancelled,
        count(*) filter (where outcome = 'unfinished') as unfinished,
        count(*) filter (where unobserved) as unobserved,
        count(*) filter (where vacuous) as vacuous,
        count(*) filter (where outcome = 'cancelled' and reason = 'voluntary') as voluntary,
        cast(coalesce(sum(output_tokens) filter (where qualified), 0) as bigint) as qualified_tokens,
        cast(coalesce(sum(output_tokens_before_cut), 0) as bigint) as observed_tokens,
        cast(coalesce(sum(output_tokens), 0) as bigint) as output_tokens
    from cohort
),

warmed_up as (
    select count(*) as warmup_excluded
    from warmup_requests
),

final as (
    select
        counted.offered,
        counted.qualified,
        counted.completed,
        counted.failed,
        counted.cancelled,
        counted.unfinished,
        counted.unobserved,
        counted.vacuous,
        counted.voluntary,
        warmed_up.warmup_excluded,
        ratio(counted.qualified, counted.offered) as attainment,
        wilson_low(counted.qualified, counted.offered) as attainment_low,
        wilson_high(counted.qualified, counted.offered) as attainment_high,
        ratio(counted.qualified, counted.offered) as attainment_min,
        ratio(counted.qualified + counted.unobserved, counted.offered) as attainment_max,
        case
            when run_window.voluntary_rule = 'excluded'
                then ratio(counted.qualified, counted.offered - counted.voluntary)
        end as attainment_excl_voluntary,
        ratio(counted.qualified * 1e9, run_window.window_ns) as goodput_rps,
        ratio(counted.qualified_tokens * 1e9, run_window.window_ns) as token_goodput,
        ratio(counted.observed_tokens * 1e9, run_window.window_ns) as observed_tokens_per_s,
        counted.qualified_tokens,
        counted.observed_tokens,
        counted.output_tokens,
        run_window.window_ns / 1e9 as window_s,
        offered_ttft_p99.ttft_p99_ns / 1e9 as ttft_p99_s,
        offered_ttft_p99.reason as ttft_p99_reason
    from counted
    cross join warmed_up
    cross join run_window
    cross join offered_ttft_p99
)

select * from final
order by offered
