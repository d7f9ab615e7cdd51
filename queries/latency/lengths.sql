-- question: How long were the prompts and the answers, beside the lengths that the limits were written for?
-- grain: one row for the prompt and one for the output length
-- inputs: cohort
-- outputs:
--   length       varchar  -        prompt_tokens or output_tokens
--   requests     bigint   requests  with a known length
--   p50_tokens   bigint   tokens
--   p90_tokens   bigint   tokens
--   p99_tokens   bigint   tokens
-- rules: Nearest rank, over offered requests for prompts and completed ones for answers, each where its length is known. An
--   answer cut off by its cap counts with the length it had: what the model would have written is a question of
--   survival.
with

cohort as (
    select
        prompt_tokens,
        tokens,
        outcome
    from cohort
),

measured as (
    select
        'prompt_tokens' as length,
        prompt_tokens as tokens
    from cohort
    where prompt_tokens is not null
    union all
    select
        'output_tokens' as length,
        tokens
    from cohort
    where outcome = 'completed' and tokens is not null
),

ranked as (
    select
        length,
        tokens,
        row_number() over (partition by length order by tokens) as place,
        count(*) over (partition by length) as n
    from measured
),

by_length as (
    select
        length,
        count(*) as requests,
        max(tokens) filter (where place = (50 * n + 99) // 100) as p50_tokens,
        max(tokens) filter (where place = (90 * n + 99) // 100) as p90_tokens,
        max(tokens) filter (where place = (99 * n + 99) // 100) as p99_tokens
    from ranked
    group by length
),

lengths as (
    select 'prompt_tokens' as length
    union all
    select 'output_tokens' as length
),

final as (
    select
        lengths.length,
        coalesce(by_length.requests, 0) as requests,
        by_length.p50_tokens,
        by_length.p90_tokens,
        by_length.p99_tokens
    from lengths
    left join by_length on lengths.length = by_length.length
)

select * from final
order by length desc
