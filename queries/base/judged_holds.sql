-- view: every late hold of the cohort at the declared receipt observer, with who held it
-- grain: one row per late hold: a first output, a gap, or a compressed span
-- inputs: cohort, late_gaps
-- rules: late_ns is the request's itl_max limit, without one 100 ms; a hold is late when it is longer. Gaps below 10 ms
--   are not recorded, so a limit below that finds those above 10 ms.
--   Three kinds. `gap`: between two receipts of a choice. `first_output`: from the computation of a choice's first event
--   to its receipt (one clock only). `span_compression`: a completed answer that was received in less than half the
--   time that it took to emit; its hold is the first output's, across clocks emission span minus receipt span, and it
--   stands in place of the request's first_output. Without engine stamps it is suspected when an answer of 4 events
--   or more came whole within 2 ms and not before late_ns; how long it was held is NULL then.
--   Decomposition of a gap: gap = emit_gap + (hold - prev_hold), so delivery_ns = gap - emit_gap, which needs no common
--   clock. What exceeds late_ns is the excess. The engine owes what its own gap exceeds late_ns by, delivery the rest:
--   engine_share + delivery_share = 1. A compressed span hides the engine's gaps: its largest of the request, where late,
--   counts beside the hold, each by its own excess.
--   Verdicts, the first that holds, jitter being 5 ms: above what a forwarding hop adds (under 2 ms), below what a
--   person sees.
--   unknown(receipt_before_emission): a receipt earlier than its emission on one clock, so a clock is wrong;
--   client_late: the client's loop lag, or the time that its consumer held off, is 4/5 of what delivery added or more,
--     and delivery owes 9/10 of the excess. The consumer's time is only known as a sum over the request. It goes to the
--     choice's late holds that it could cover (4/5), the largest excess of delivery first, to each what delivery added,
--     until it is used up; so an ordinary gap beside a long pause is not the client's. A pause holds the events of every
--     choice at once, so each choice has the whole sum. At a sidecar its own loop lag gives unknown(recorder_lag);
--   decoder_stall: the engine's gap was late, and it owes 9/10 or delivery added no more than jitter;
--   unknown(near_limit): the engine's gap was in time and delivery added no more than jitter;
--   buffered_delivery: delivery owes 9/10. `together` above 1 tells a buffer that was emptied from a lasting delay;
--   mixed: anything between, with both shares.
--   Without an aligned emission: an engine whose largest gap was in time makes it suspected_buffered_delivery. Else what
--   follows the gap decides. A burst of 2 or more events within 2 ms that is half of what the request's mean gap would
--   have queued: suspected_buffered_delivery. One event alone: suspected_decoder_stall, unless it was the last
--   (unknown, last_event: nothing was left to catch up). A smaller burst: unknown(small_burst).
with

receipts as (
    select
        request_id,
        class,
        model,
        tenant,
        outcome,
        coalesce(limit_itl_max_ns, 100000000) as late_ns,
        observed_arrival_at_ns - case
            when getvariable('observer') = 'client' then coalesce(client_intended_ns, start_ns)
            else start_ns
        end as wall_offset_ns,
        case getvariable('observer')
            when 'client' then client_alignment
            when 'sidecar' then sidecar_alignment
        end as alignment,
        first_ns,
        last_ns,
        ttft_ns,
        events,
        loop_lag_max_ns,
        consumer_hold_ns,
        engine_observed,
        engine_clock_id,
        engine_first_ns,
        engine_last_ns,
        engine_events,
        engine_itl_max_ns,
        clock_id = engine_clock_id as same_clock
    from cohort
    where getvariable('observer') in ('client', 'sidecar') and first_ns is not null
),

recorded as (
    select
        request_id,
        choice,
        ordinal,
        kind,
        prev_ns,
        at_ns,
        gap_ns,
        emit_prev_ns,
        emit_at_ns,
        emit_gap_ns,
        hold_ns,
        prev_hold_ns,
        together,
        emit_together,
        alignment
    from late_gaps
    where observer = getvariable('observer')
),

first_outputs as (
    select
        request_id,
        max(hold_ns) as hold_ns,
        max(together) as together,
        max(emit_together) as emit_together
    from recorded
    where kind = 'first_output'
    group by request_id
),

compressed as (
    select
        receipts.request_id,
        case
            when receipts.engine_last_ns is not null
                then coalesce(
                    first_outputs.hold_ns,
                    (receipts.engine_last_ns - receipts.engine_first_ns) - (receipts.last_ns - receipts.first_ns)
                )
        end as held_ns,
        first_outputs.together,
        first_outputs.emit_together
    from receipts
    inner join first_outputs on receipts.request_id = first_outputs.request_id
    where
        receipts.outcome = 'completed'
        and (
            (
                receipts.engine_events >= 2
                and receipts.engine_last_ns - receipts.engine_first_ns > receipts.late_ns
                and 2 * (receipts.last_ns - receipts.first_ns) < receipts.engine_last_ns - receipts.engine_first_ns
            )
            or (
                not coalesce(receipts.engine_observed, false)
                and receipts.events >= 4
                and first_outputs.together = receipts.events
                and receipts.ttft_ns > receipts.late_ns
            )
        )
),

holds as (
    select
        request_id,
        'gap' as kind,
        choice,
        ordinal,
        at_ns,
        gap_ns as held_ns,
        emit_gap_ns,
        gap_ns - emit_gap_ns as delivery_ns,
        emit_prev_ns,
        emit_at_ns,
        together,
        emit_together,
        coalesce(hold_ns < 0 or prev_hold_ns < 0, false) as is_skewed
    from recorded
    where kind = 'gap'
    union all
    select
        recorded.request_id,
        'first_output' as kind,
        recorded.choice,
        recorded.ordinal,
        recorded.at_ns,
        recorded.hold_ns as held_ns,
        cast(0 as bigint) as emit_gap_ns,
        recorded.hold_ns as delivery_ns,
        cast(null as bigint) as emit_prev_ns,
        recorded.emit_at_ns,
        recorded.together,
        recorded.emit_together,
        false as is_skewed
    from recorded
    left join compressed on recorded.request_id = compressed.request_id
    where recorded.kind = 'first_output' and compressed.request_id is null
    union all
    select
        compressed.request_id,
        'span_compression' as kind,
        cast(null as integer) as choice,
        cast(1 as bigint) as ordinal,
        receipts.first_ns as at_ns,
        compressed.held_ns,
        receipts.engine_itl_max_ns as emit_gap_ns,
        compressed.held_ns as delivery_ns,
        cast(null as bigint) as emit_prev_ns,
        cast(null as bigint) as emit_at_ns,
        compressed.together,
        compressed.emit_together,
        false as is_skewed
    from compressed
    inner join receipts on compressed.request_id = receipts.request_id
),

late_holds as (
    select
        holds.*,
        receipts.class,
        receipts.model,
        receipts.tenant,
        receipts.late_ns,
        receipts.alignment,
        receipts.same_clock,
        receipts.engine_clock_id,
        receipts.engine_observed,
        receipts.engine_itl_max_ns,
        receipts.events,
        receipts.last_ns - receipts.first_ns as span_ns,
        receipts.last_ns,
        receipts.loop_lag_max_ns,
        receipts.consumer_hold_ns,
        holds.at_ns + receipts.wall_offset_ns as held_at_ns,
        holds.held_ns - receipts.late_ns as excess_ns,
        greatest(holds.emit_gap_ns - receipts.late_ns, 0) as emit_excess_ns
    from holds
    inner join receipts on holds.request_id = receipts.request_id
    where
        holds.held_ns > receipts.late_ns
        or (holds.kind = 'span_compression' and holds.held_ns is null)
),

apportioned as (
    select
        late_holds.*,
        case
            -- The product of two durations does not fit into 64 bits.
            when kind = 'span_compression'
                then cast(excess_ns * (emit_excess_ns * 1e0 / nullif(excess_ns + emit_excess_ns, 0)) as bigint)
            else least(emit_excess_ns, excess_ns)
        end as engine_excess_ns
    from late_holds
),

-- A compressed span is the whole answer's; beside the gaps of further choices it is counted with the first one.
claimed as (
    select
        apportioned.*,
        consumer_hold_ns - coalesce(
            sum(
                case
                    when 5 * consumer_hold_ns >= 4 * coalesce(delivery_ns, held_ns)
                        then greatest(coalesce(delivery_ns, held_ns), 0)
                    else 0
                end
            ) over (
                partition by request_id, coalesce(choice, 0)
                order by excess_ns - engine_excess_ns desc nulls last, at_ns, ordinal
                rows between unbounded preceding and 1 preceding
            ),
            0
        ) as consumer_hold_left_ns
    from apportioned
),

explained as (
    select
        claimed.*,
        excess_ns - engine_excess_ns as delivery_excess_ns,
        coalesce(5 * loop_lag_max_ns >= 4 * coalesce(delivery_ns, held_ns), false) as is_loop_late,
        coalesce(5 * consumer_hold_left_ns >= 4 * coalesce(delivery_ns, held_ns), false) as is_consumer_late,
        coalesce(emit_gap_ns > late_ns and kind <> 'first_output', false) as is_engine_late,
        -- A compressed span is seen without alignment, but then only suspected.
        emit_gap_ns is not null and (kind <> 'span_compression' or alignment <> 'none') as is_aligned,
        together >= 2 and 2 * together * span_ns >= held_ns * (events - 1) as is_burst
    from claimed
),

judged as (
    select
        explained.*,
        case
            when is_skewed then 'unknown'
            when
                (is_loop_late or is_consumer_late) and getvariable('observer') = 'client'
                and (not is_aligned or 10 * delivery_excess_ns >= 9 * excess_ns)
                and coalesce(delivery_ns, held_ns) > 5000000
                then 'client_late'
            when
                is_loop_late and getvariable('observer') = 'sidecar'
                and (not is_aligned or 10 * delivery_excess_ns >= 9 * excess_ns)
                and coalesce(delivery_ns, held_ns) > 5000000
                then 'unknown'
            when is_aligned and is_engine_late and (10 * engine_excess_ns >= 9 * excess_ns or delivery_ns <= 5000000)
                then 'decoder_stall'
            when is_aligned and delivery_ns <= 5000000 then 'unknown'
            when is_aligned and 10 * delivery_excess_ns >= 9 * excess_ns then 'buffered_delivery'
            when is_aligned then 'mixed'
            when kind = 'span_compression' or engine_itl_max_ns <= late_ns or is_burst
                then 'suspected_buffered_delivery'
            when together = 1 and at_ns < last_ns then 'suspected_decoder_stall'
            else 'unknown'
        end as verdict
    from explained
),

final as (
    select
        request_id,
        class,
        model,
        tenant,
        kind,
        cast(choice as bigint) as choice,
        ordinal,
        verdict,
        case
            when verdict <> 'unknown' then null
            when is_skewed then 'receipt_before_emission'
            when is_loop_late and getvariable('observer') = 'sidecar' then 'recorder_lag'
            when is_aligned then 'near_limit'
            when together = 1 then 'last_event'
            else 'small_burst'
        end as reason,
        held_at_ns,
        at_ns,
        held_ns,
        late_ns,
        excess_ns,
        case when is_aligned and kind <> 'first_output' then emit_gap_ns end as emit_gap_ns,
        case when is_aligned then delivery_ns end as delivery_ns,
        case when is_aligned then engine_excess_ns end as engine_excess_ns,
        case when is_aligned then delivery_excess_ns end as delivery_excess_ns,
        case when is_aligned then engine_excess_ns / nullif(excess_ns * 1e0, 0) end as engine_share,
        case when is_aligned then delivery_excess_ns / nullif(excess_ns * 1e0, 0) end as delivery_share,
        emit_prev_ns,
        emit_at_ns,
        together,
        emit_together,
        loop_lag_max_ns,
        consumer_hold_ns,
        alignment,
        same_clock,
        engine_clock_id
    from judged
)

select * from final
