-- question: Which outputs were held back for too long, and was it the engine or the delivery?
-- grain: one row per late hold of the cohort at the declared receipt observer
-- inputs: judged_holds
-- params:
--   longer_than_ns  bigint  ns  0  min 0  only holds longer than this
-- outputs:
--   request_id        varchar  -
--   class             varchar  -
--   kind              varchar  -         first_output, gap or span_compression
--   choice            bigint   -         NULL in a compressed span, which is the whole answer's
--   ordinal           bigint   -         of the event that ends the hold
--   verdict           varchar  -         decoder_stall, buffered_delivery, mixed, client_late, unknown or suspected_…
--   reason            varchar  -         why the verdict is unknown
--   held_at_s         double   seconds   wall time of the receipt, since the epoch
--   held_s            double   seconds   how long
--   late_s            double   seconds   the limit that it exceeded
--   excess_s          double   seconds   held - late
--   emit_gap_s        double   seconds   the engine's own gap; in a compressed span its largest
--   delivery_s        double   seconds   what delivery added
--   engine_share      double   ratio     of the excess; both sum to 1
--   delivery_share    double   ratio     of the excess
--   together          bigint   events    received within 2 ms from the hold's end on
--   emit_together     bigint   events    how many of those the engine emitted within 2 ms
--   loop_lag_max_s    double   seconds   of the observer, over the request
--   consumer_hold_s   double   seconds   of the consumer, summed over the request
--   alignment         varchar  -
--   same_clock        boolean  -
-- rules: The verdicts, their order and thresholds are those of `judged_holds`. The shares are NULL without an aligned
--   emission. An engine is no receipt observer: declared so, there are no rows.
with

judged_holds as (
    select
        request_id,
        class,
        kind,
        choice,
        ordinal,
        verdict,
        reason,
        held_at_ns,
        held_ns,
        late_ns,
        excess_ns,
        emit_gap_ns,
        delivery_ns,
        engine_share,
        delivery_share,
        together,
        emit_together,
        loop_lag_max_ns,
        consumer_hold_ns,
        alignment,
        same_clock
    from judged_holds
),

final as (
    select
        request_id,
        class,
        kind,
        choice,
        ordinal,
        verdict,
        reason,
        held_at_ns / 1e9 as held_at_s,
        held_ns / 1e9 as held_s,
        late_ns / 1e9 as late_s,
        excess_ns / 1e9 as excess_s,
        emit_gap_ns / 1e9 as emit_gap_s,
        delivery_ns / 1e9 as delivery_s,
        engine_share,
        delivery_share,
        together,
        emit_together,
        loop_lag_max_ns / 1e9 as loop_lag_max_s,
        consumer_hold_ns / 1e9 as consumer_hold_s,
        alignment,
        same_clock
    from judged_holds
    where coalesce(held_ns > $longer_than_ns, true)
)

select * from final
order by held_at_s, request_id, choice, ordinal
