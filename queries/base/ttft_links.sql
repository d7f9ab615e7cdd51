-- view: the TTFT of each request, link by link
-- grain: one row per request of the cohort with a first receipt, and link; `residual` always, another link if stamped
-- inputs: cohort
-- rules: total_ns is the first receipt minus the scheduled arrival, without one minus the start (send, or arrived): the
--   TTFT, and dispatch before it. A link is the difference of two stamps of one clock, and never what another link
--   left over:
--     dispatch        send - intended                                   (client)
--     network_out     sidecar arrived - send; without a sidecar, server arrived - send
--     sidecar         server arrived - sidecar arrived, and forwarded - received from upstream
--     front_end       queued - server arrived
--     queue           admitted into the batch - queued
--     prefill         first computed - admitted, steps whose token budget went to others included
--     first_emission  written - computed
--     network_back    client receipt - forwarded, and sidecar receipt - written; without a sidecar, receipt - written
--   Between two hops on different clocks neither direction is known: the difference of their durations (the outer's
--   from request to first output, minus the inner's) is the link network_round_trip, in place of that hop's share of
--   network_out, sidecar and network_back. residual = total - every known link: what no pair of stamps covers. Seen
--   from the sidecar the chain starts with its arrival and ends with its receipt; seen from the engine it is
--   front_end, queue and prefill. A negative link (a wrong clock) stays negative.
with

requests as (
    select
        request_id,
        class,
        arrival_at_ns,
        getvariable('observer') as observer,
        start_ns,
        first_ns,
        case when getvariable('observer') = 'client' then client_intended_ns end as intended_ns,
        getvariable('observer') = 'client' and coalesce(sidecar_observed, false) as has_sidecar,
        getvariable('observer') <> 'engine' and coalesce(engine_observed, false) as has_engine,
        coalesce(client_clock_id = sidecar_clock_id, false) as client_sidecar,
        coalesce(clock_id = engine_clock_id, false) as observer_engine,
        coalesce(sidecar_clock_id = engine_clock_id, false) as sidecar_engine,
        sidecar_start_ns,
        sidecar_upstream_first_ns,
        sidecar_forwarded_first_ns,
        engine_start_ns,
        engine_queued_ns,
        engine_prefill_start_ns,
        engine_first_computed_ns,
        engine_first_written_ns
    from cohort
    where first_ns is not null
),

-- Each hop's share; NULL where a stamp is missing or the clocks differ.
shares as (
    select
        request_id,
        class,
        arrival_at_ns,
        first_ns - coalesce(intended_ns, start_ns) as total_ns,
        start_ns - intended_ns as dispatch_ns,
        case
            when has_sidecar and client_sidecar then sidecar_start_ns - start_ns
            when not has_sidecar and has_engine and observer = 'client' and observer_engine
                then engine_start_ns - start_ns
        end as network_out_ns,
        case
            when has_sidecar and has_engine and sidecar_engine then engine_start_ns - sidecar_start_ns
            when has_engine and observer = 'sidecar' and observer_engine then engine_start_ns - start_ns
        end as sidecar_out_ns,
        case when has_sidecar then sidecar_forwarded_first_ns - sidecar_upstream_first_ns end as sidecar_back_ns,
        engine_queued_ns - engine_start_ns as front_end_ns,
        engine_prefill_start_ns - engine_queued_ns as queue_ns,
        engine_first_computed_ns - engine_prefill_start_ns as prefill_ns,
        case when observer <> 'engine' then engine_first_written_ns - engine_first_computed_ns end
            as first_emission_ns,
        case
            when has_sidecar and client_sidecar then first_ns - sidecar_forwarded_first_ns
            when not has_sidecar and has_engine and observer_engine then first_ns - engine_first_written_ns
        end as network_back_ns,
        case
            when has_sidecar and has_engine and sidecar_engine
                then sidecar_upstream_first_ns - engine_first_written_ns
        end as inner_back_ns,
        case
            when has_sidecar and not client_sidecar
                then (first_ns - start_ns) - (sidecar_forwarded_first_ns - sidecar_start_ns)
            when not has_sidecar and has_engine and not observer_engine
                then (first_ns - start_ns) - (engine_first_written_ns - engine_start_ns)
        end as round_trip_ns,
        case
            when has_sidecar and has_engine and not sidecar_engine
                then (sidecar_upstream_first_ns - sidecar_start_ns) - (engine_first_written_ns - engine_start_ns)
        end as inner_round_trip_ns
    from requests
),

links as (
    select *
    from (
        values
        (1, 'dispatch'), (2, 'network_out'), (3, 'sidecar'), (4, 'front_end'), (5, 'queue'), (6, 'prefill'),
        (7, 'first_emission'), (8, 'network_back'), (9, 'network_round_trip'), (10, 'residual')
    ) as named (position, link)
),

sums as (
    select
        shares.*,
        coalesce(sidecar_out_ns + sidecar_back_ns, sidecar_out_ns, sidecar_back_ns) as sidecar_ns,
        coalesce(network_back_ns + inner_back_ns, network_back_ns, inner_back_ns) as back_ns,
        coalesce(round_trip_ns + inner_round_trip_ns, round_trip_ns, inner_round_trip_ns) as network_round_trip_ns
    from shares
),

measured as (
    select
        sums.request_id,
        sums.class,
        sums.arrival_at_ns,
        sums.total_ns,
        links.position,
        links.link,
        case links.link
            when 'dispatch' then dispatch_ns
            when 'network_out' then network_out_ns
            when 'sidecar' then sidecar_ns
            when 'front_end' then front_end_ns
            when 'queue' then queue_ns
            when 'prefill' then prefill_ns
            when 'first_emission' then first_emission_ns
            when 'network_back' then back_ns
            when 'network_round_trip' then network_round_trip_ns
            when 'residual'
                then
                    total_ns - coalesce(dispatch_ns, 0) - coalesce(network_out_ns, 0) - coalesce(sidecar_ns, 0)
                    - coalesce(front_end_ns, 0) - coalesce(queue_ns, 0) - coalesce(prefill_ns, 0)
                    - coalesce(first_emission_ns, 0) - coalesce(back_ns, 0) - coalesce(network_round_trip_ns, 0)
        end as link_ns
    from sums
    cross join links
),

final as (
    select
        request_id,
        class,
        arrival_at_ns,
        total_ns,
        cast(position as bigint) as position,
        link,
        link_ns
    from measured
    where link_ns is not null
)

select * from final
