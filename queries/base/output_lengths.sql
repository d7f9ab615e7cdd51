-- view: how far each answer was followed, in output tokens, and how it was left
-- grain: one row per population and request
-- inputs: cohort, observed_requests, boundary_tokens
-- rules: Population `arrival`: the cohort, each request from its start to its end or to the cut of the window rule.
--   Population `period`: every request without warm-up that was open at some time inside the window, followed only
--   there: at risk in (entry, exit], entry being the tokens it had when the window opened, exit those at its end or at
--   the window's. Who began inside enters before the first token: entry -1.
--   Ending: `end` is the event, a completed answer with finish reason stop or tool_calls. The rest is censored: `cap`
--   (length), `other` (completed in another way, or without a reason), `cancelled`, `failed`, `unfinished` (open, by
--   the window or a lost recorder). A request with several choices has no one length, one that nobody observed or
--   that completed without a token count has none known, and one that got no token inside a period was never at
--   risk: these have an `exclusion` and no part in a curve.
--   A forced length is refused: it says nothing about natural ones, and a curve of it would be a drawing of the trace.
with

arrivals as (
    select
        request_id,
        class,
        model,
        tenant,
        arrival_at_ns,
        length_forced,
        n_choices,
        unobserved,
        outcome,
        finish_reason,
        tokens,
        token_source,
        cast(-1 as bigint) as entry_tokens,
        output_tokens_before_cut as exit_tokens
    from cohort
),

periods as (
    select
        observed_requests.request_id,
        coalesce(observed_requests.class, getvariable('default_class')) as class,
        observed_requests.model,
        observed_requests.tenant,
        observed_requests.arrival_at_ns,
        observed_requests.length_forced,
        observed_requests.n_choices,
        not observed_requests.observed as unobserved,
        coalesce(observed_requests.end_at_ns > getvariable('window_end_ns'), true) as is_open,
        observed_requests.outcome,
        observed_requests.finish_reason,
        observed_requests.tokens,
        observed_requests.token_source,
        observed_requests.arrival_at_ns >= getvariable('window_start_ns') as is_new,
        boundary_tokens.start_tokens,
        boundary_tokens.end_tokens,
        -- Where the events carry no counts, their share is scaled to the request's own count.
        coalesce(observed_requests.tokens * 1e0 / nullif(boundary_tokens.counted_tokens, 0), 1e0) as per_counted
    from observed_requests
    left join boundary_tokens on observed_requests.request_id = boundary_tokens.request_id
    where
        not coalesce(observed_requests.warmup, false)
        and observed_requests.arrival_at_ns < getvariable('window_end_ns')
        and (
            observed_requests.arrival_at_ns >= getvariable('window_start_ns')
            or observed_requests.end_at_ns > getvariable('window_start_ns')
            or observed_requests.end_at_ns is null
        )
),

followed as (
    select
        'arrival' as population,
        request_id,
        class,
        model,
        tenant,
        arrival_at_ns,
        length_forced,
        n_choices,
        unobserved,
        outcome,
        finish_reason,
        tokens,
        token_source,
        entry_tokens,
        exit_tokens
    from arrivals
    union all
    select
        'period' as population,
        request_id,
        class,
        model,
        tenant,
        arrival_at_ns,
        length_forced,
        n_choices,
        unobserved,
        case when is_open then 'unfinished' else outcome end as outcome,
        finish_reason,
        tokens,
        token_source,
        case
            when is_new then -1
            else coalesce(cast(floor(start_tokens * per_counted) as bigint), 0)
        end as entry_tokens,
        case
            when is_open then coalesce(cast(floor(end_tokens * per_counted) as bigint), 0)
            else coalesce(tokens, 0)
        end as exit_tokens
    from periods
),

final as (
    select
        population,
        request_id,
        class,
        model,
        tenant,
        arrival_at_ns,
        token_source,
        case
            when length_forced
                then error(
                    'refused: request ' || request_id
                    || ' has a forced length (length_forced); accepted: requests that end by themselves'
                )
            else entry_tokens
        end as entry_tokens,
        exit_tokens,
        case
            when outcome = 'completed' and finish_reason in ('stop', 'tool_calls') then 'end'
            when outcome = 'completed' and finish_reason = 'length' then 'cap'
            when outcome in ('cancelled', 'failed', 'unfinished') then outcome
            else 'other'
        end as ending,
        case
            when unobserved then 'unobserved'
            when n_choices > 1 then 'several_choices'
            when outcome = 'completed' and tokens is null then 'unknown_length'
            when exit_tokens <= entry_tokens then 'never_at_risk'
        end as exclusion
    from followed
)

select * from final
