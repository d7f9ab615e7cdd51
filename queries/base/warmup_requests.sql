-- view: the warm-up requests, which no question counts
-- grain: one row per offered request
-- inputs: observed_requests
-- rules: Those of a given window; where the window was taken from the data, and so begins after the warm-up, all of
--   them.
select
    request_id,
    class
from observed_requests
where
    warmup
    and arrival_at_ns >= getvariable('warmup_from_ns')
    and arrival_at_ns < getvariable('window_end_ns')
