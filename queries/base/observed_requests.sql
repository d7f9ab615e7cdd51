-- view: the requests as the declared observer saw them
-- grain: one row per offered request, warm-up included
-- inputs: requests
-- rules: The declared observer's columns stand without prefix; every column of `requests` stays beside them. A view
--   takes no parameter, so the observer comes from a variable; DuckDB folds it and reads the one column. A wall time
--   of the observer is `observed_arrival_at_ns` (of the scheduled arrival where there is one), since `arrival_at_ns`
--   belongs to the request.
select
    requests.*,
    case getvariable('observer')
        when 'client' then requests.client_arrival_at_ns
        when 'sidecar' then requests.sidecar_arrival_at_ns
        when 'engine' then requests.engine_arrival_at_ns
    end as observed_arrival_at_ns,
    coalesce(case getvariable('observer')
        when 'client' then requests.client_observed
        when 'sidecar' then requests.sidecar_observed
        when 'engine' then requests.engine_observed
    end, false) as observed,
    case getvariable('observer')
        when 'client' then requests.client_role
        when 'sidecar' then requests.sidecar_role
        when 'engine' then requests.engine_role
    end as role,
    case getvariable('observer')
        when 'client' then requests.client_clock_id
        when 'sidecar' then requests.sidecar_clock_id
        when 'engine' then requests.engine_clock_id
    end as clock_id,
    case getvariable('observer')
        when 'client' then requests.client_end_at_ns
        when 'sidecar' then requests.sidecar_end_at_ns
        when 'engine' then requests.engine_end_at_ns
    end as end_at_ns,
    case getvariable('observer')
        when 'client' then requests.client_start_ns
        when 'sidecar' then requests.sidecar_start_ns
        when 'engine' then requests.engine_start_ns
    end as start_ns,
    case getvariable('observer')
        when 'client' then requests.client_first_ns
        when 'sidecar' then requests.sidecar_first_ns
        when 'engine' then requests.engine_first_ns
    end as first_ns,
    case getvariable('observer')
        when 'client' then requests.client_last_ns
        when 'sidecar' then requests.sidecar_last_ns
        when 'engine' then requests.engine_last_ns
    end as last_ns,
    case getvariable('observer')
        when 'client' then requests.client_end_ns
        when 'sidecar' then requests.sidecar_end_ns
        when 'engine' then requests.engine_end_ns
    end as end_ns,
    case getvariable('observer')
        when 'client' then requests.client_ttft_ns
        when 'sidecar' then requests.sidecar_ttft_ns
        when 'engine' then requests.engine_ttft_ns
    end as ttft_ns,
    case getvariable('observer')
        when 'client' then requests.client_ttft_visible_ns
        when 'sidecar' then requests.sidecar_ttft_visible_ns
        when 'engine' then requests.engine_ttft_visible_ns
    end as ttft_visible_ns,
    case getvariable('observer')
        when 'client' then requests.client_ttft_worst_ns
        when 'sidecar' then requests.sidecar_ttft_worst_ns
        when 'engine' then requests.engine_ttft_worst_ns
    end as ttft_worst_ns,
    case getvariable('observer')
        when 'client' then requests.client_ttft_visible_worst_ns
        when 'sidecar' then requests.sidecar_ttft_visible_worst_ns
        when 'engine' then requests.engine_ttft_visible_worst_ns
    end as ttft_visible_worst_ns,
    case getvariable('observer')
        when 'client' then requests.client_itl_max_ns
        when 'sidecar' then requests.sidecar_itl_max_ns
        when 'engine' then requests.engine_itl_max_ns
    end as itl_max_ns,
    case getvariable('observer')
        when 'client' then requests.client_span_ns
        when 'sidecar' then requests.sidecar_span_ns
        when 'engine' then requests.engine_span_ns
    end as span_ns,
    case getvariable('observer')
        when 'client' then requests.client_span_tokens
        when 'sidecar' then requests.sidecar_span_tokens
        when 'engine' then requests.engine_span_tokens
    end as span_tokens,
    case getvariable('observer')
        when 'client' then requests.client_e2e_ns
        when 'sidecar' then requests.sidecar_e2e_ns
        when 'engine' then requests.engine_e2e_ns
    end as e2e_ns,
    case getvariable('observer')
        when 'client' then requests.client_stream_end_ns
        when 'sidecar' then requests.sidecar_stream_end_ns
        when 'engine' then requests.engine_stream_end_ns
    end as stream_end_ns,
    case getvariable('observer')
        when 'client' then requests.client_events
        when 'sidecar' then requests.sidecar_events
        when 'engine' then requests.engine_events
    end as events,
    case getvariable('observer')
        when 'client' then requests.client_tokens
        when 'sidecar' then requests.sidecar_tokens
        when 'engine' then requests.engine_tokens
    end as tokens,
    case getvariable('observer')
        when 'client' then requests.client_token_source
        when 'sidecar' then requests.sidecar_token_source
        when 'engine' then requests.engine_token_source
    end as token_source,
    case getvariable('observer')
        when 'client' then requests.client_outcome
        when 'sidecar' then requests.sidecar_outcome
        when 'engine' then requests.engine_outcome
    end as outcome,
    case getvariable('observer')
        when 'client' then requests.client_reason
        when 'sidecar' then requests.sidecar_reason
        when 'engine' then requests.engine_reason
    end as reason,
    case getvariable('observer')
        when 'client' then requests.client_finish_reason
        when 'sidecar' then requests.sidecar_finish_reason
        when 'engine' then requests.engine_finish_reason
    end as finish_reason,
    case getvariable('observer')
        when 'client' then requests.client_http_status
        when 'sidecar' then requests.sidecar_http_status
        when 'engine' then requests.engine_http_status
    end as http_status,
    case getvariable('observer')
        when 'client' then requests.client_loop_lag_max_ns
        when 'sidecar' then requests.sidecar_loop_lag_max_ns
        when 'engine' then requests.engine_loop_lag_max_ns
    end as loop_lag_max_ns,
    case getvariable('observer')
        when 'client' then requests.client_consumer_hold_ns
        when 'sidecar' then requests.sidecar_consumer_hold_ns
        when 'engine' then requests.engine_consumer_hold_ns
    end as consumer_hold_ns
from requests
