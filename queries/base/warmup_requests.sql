-- view: the warm-up requests of the window, which no question counts
-- grain: one row per offered request
-- inputs: observed_requests
select
    request_id,
    class
from observed_requests
where
    warmup
    and arrival_at_ns >= getvariable('window_start_ns')
    and arrival_at_ns < getvariable('window_end_ns')
