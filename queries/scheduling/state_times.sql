-- question: How long do requests stay in each state of the engine, and why do they leave it?
-- grain: one row per class and state, and one for each way out of it: next state and reason
-- inputs: cohort, states
-- outputs:
--   class       varchar  -
--   state       varchar  -         arrival: before the first state
--   next_state  varchar  -         any: of all ways out together; open: it never left
--   reason      varchar  -         why, as recorded; any: of all ways out together
--   requests    bigint   requests
--   stays       bigint   stays     a request can stay in a state more than once
--   timed       bigint   stays     of those, with a begin and an end: the columns below are theirs
--   total_s     double   seconds
--   p50_s       double   seconds   nearest rank
--   p90_s       double   seconds
--   p99_s       double   seconds
--   max_s       double   seconds
--   illegal     bigint   stays     that ended in a move which no engine may make, or began in a state never entered: 0 is right
-- rules: Of the requests that any engine recorded states of, on the engine's clock, each engine process for itself. A stay
--   begins with the transition into its state and ends with the next one; transitions of one boundary bear one stamp and
--   keep their order in the journal. FINISHED, CANCELLED and REJECTED are left by nobody, so they stand as next states.
--   Legal: arrival to WAITING or REJECTED; WAITING to PREFILL, CANCELLED or REJECTED; PREFILL to DECODE or PREEMPTED;
--   DECODE to PAUSED or PREEMPTED; PAUSED to DECODE or PREEMPTED; PREEMPTED to PREFILL; and from each of these four to
--   FINISHED or CANCELLED. A record that says it came from another state than the one before it went to is illegal too,
--   and its stay has no begin. A journal that lost records looks the same. Quantiles are these stays' own order
--   statistics.
with

cohort as (
    select
        request_id,
        class
    from cohort
),

transitions as (
    select
        cohort.class,
        states.request_id,
        states.engine_id,
        states.at_ns,
        coalesce(states.from_state, 'arrival') as from_state,
        states.to_state,
        coalesce(states.reason, '') as reason,
        coalesce(
            lag(states.to_state) over (
                partition by states.engine_id, states.request_id
                order by states.at_ns, states.place
            ),
            'arrival'
        ) as entered,
        lag(states.at_ns) over (
            partition by states.engine_id, states.request_id
            order by states.at_ns, states.place
        ) as entered_ns,
        row_number() over (
            partition by states.engine_id, states.request_id
            order by states.at_ns desc, states.place desc
        ) as from_last
    from states
    inner join cohort on states.request_id = cohort.request_id
),

legal as (
    select *
    from (
        values
        ('arrival', 'WAITING'), ('arrival', 'REJECTED'),
        ('WAITING', 'PREFILL'), ('WAITING', 'CANCELLED'), ('WAITING', 'REJECTED'),
        ('PREFILL', 'DECODE'), ('PREFILL', 'PREEMPTED'), ('PREFILL', 'FINISHED'), ('PREFILL', 'CANCELLED'),
        ('DECODE', 'PAUSED'), ('DECODE', 'PREEMPTED'), ('DECODE', 'FINISHED'), ('DECODE', 'CANCELLED'),
        ('PAUSED', 'DECODE'), ('PAUSED', 'PREEMPTED'), ('PAUSED', 'FINISHED'), ('PAUSED', 'CANCELLED'),
        ('PREEMPTED', 'PREFILL'), ('PREEMPTED', 'FINISHED'), ('PREEMPTED', 'CANCELLED')
    ) as pairs (from_state, to_state)
),

stays as (
    select
        transitions.class,
        transitions.request_id,
        transitions.from_state as state,
        transitions.to_state as next_state,
        transitions.reason,
        case when transitions.from_state = transitions.entered then transitions.at_ns - transitions.entered_ns end
            as stay_ns,
        case
            when legal.from_state is null or transitions.from_state <> transitions.entered then 1 else 0
        end as is_illegal
    from transitions
    left join legal
        on transitions.from_state = legal.from_state and transitions.to_state = legal.to_state
    union all
    select
        class,
        request_id,
        to_state as state,
        'open' as next_state,
        '' as reason,
        cast(null as bigint) as stay_ns,
        0 as is_illegal
    from transitions
    where from_last = 1 and to_state not in ('FINISHED', 'CANCELLED', 'REJECTED')
),

grouped as (
    select * from stays
    union all
    select
        class,
        request_id,
        state,
        'any' as next_state,
        'any' as reason,
        stay_ns,
        is_illegal
    from stays
),

ways as (
    select
        class,
        state,
        next_state,
        reason,
        row_number() over (order by class, state, next_state, reason) as way,
        count(distinct request_id) as requests,
        count(*) as stays,
        count(stay_ns) as timed,
        cast(sum(stay_ns) as bigint) as total_ns,
        max(stay_ns) as max_ns,
        cast(sum(is_illegal) as bigint) as illegal
    from grouped
    group by class, state, next_state, reason
),

-- By number: to sort millions of stays by four words takes several times as long.
ranked as (
    select
        ways.way,
        ways.timed,
        grouped.stay_ns,
        row_number() over (partition by ways.way order by grouped.stay_ns) as place
    from grouped
    inner join ways
        on
            grouped.class = ways.class
            and grouped.state = ways.state
            and grouped.next_state = ways.next_state
            and grouped.reason = ways.reason
    where grouped.stay_ns is not null
),

quantiles as (
    select
        way,
        max(case when place = (50 * timed + 99) // 100 then stay_ns end) as p50_ns,
        max(case when place = (90 * timed + 99) // 100 then stay_ns end) as p90_ns,
        max(case when place = (99 * timed + 99) // 100 then stay_ns end) as p99_ns
    from ranked
    group by way
),

final as (
    select
        ways.class,
        ways.state,
        ways.next_state,
        ways.reason,
        ways.requests,
        ways.stays,
        ways.timed,
        ways.total_ns / 1e9 as total_s,
        quantiles.p50_ns / 1e9 as p50_s,
        quantiles.p90_ns / 1e9 as p90_s,
        quantiles.p99_ns / 1e9 as p99_s,
        ways.max_ns / 1e9 as max_s,
        ways.illegal
    from ways
    left join quantiles on ways.way = quantiles.way
)

select * from final
order by
    class,
    case state
        when 'arrival' then 1
        when 'WAITING' then 2
        when 'PREFILL' then 3
        when 'DECODE' then 4
        when 'PAUSED' then 5
        when 'PREEMPTED' then 6
        else 7
    end,
    state,
    case when next_state = 'any' then 0 else 1 end,
    next_state,
    reason
