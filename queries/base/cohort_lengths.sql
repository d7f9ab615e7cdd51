-- view: output lengths under each way to split them into cohorts
-- grain: one row per population, grouping, part and request
-- inputs: output_lengths
-- rules: Grouping `all` is one cohort named all. A request without the label is in cohort (none). Part `whole` is every
--   request; `early` arrived before the middle of the window, `late` at it or after.
with

groupings as (
    select *
    from (values ('class'), ('model'), ('tenant'), ('all')) as named (grouping)
),

parts as (
    select *
    from (values ('whole'), ('early'), ('late')) as named (part)
),

final as (
    select
        output_lengths.*,
        groupings.grouping,
        parts.part,
        case groupings.grouping
            when 'class' then coalesce(output_lengths.class, '(none)')
            when 'model' then coalesce(output_lengths.model, '(none)')
            when 'tenant' then coalesce(output_lengths.tenant, '(none)')
            else 'all'
        end as cohort
    from output_lengths
    cross join groupings
    cross join parts
    where
        parts.part = 'whole'
        or (parts.part = 'early') = (
            2 * (output_lengths.arrival_at_ns - getvariable('window_start_ns'))
            < getvariable('window_end_ns') - getvariable('window_start_ns')
        )
)

select * from final
