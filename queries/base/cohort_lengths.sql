-- view: output lengths under each way to split them into cohorts
-- grain: one row per population, grouping and request
-- inputs: output_lengths
-- rules: Grouping `all` is one cohort named all. A request without the label is in cohort (none).
with

groupings as (
    select *
    from (values ('class'), ('model'), ('tenant'), ('all')) as named (grouping)
),

final as (
    select
        output_lengths.*,
        groupings.grouping,
        case groupings.grouping
            when 'class' then coalesce(output_lengths.class, '(none)')
            when 'model' then coalesce(output_lengths.model, '(none)')
            when 'tenant' then coalesce(output_lengths.tenant, '(none)')
            else 'all'
        end as cohort
    from output_lengths
    cross join groupings
)

select * from final
