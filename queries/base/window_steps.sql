-- view: the engine's steps in the window and, after it, those that still ran its requests
-- grain: one row per step
-- inputs: steps, step_requests, cohort, run_window
-- rules: A step that began in the window counts whatever it ran. One that began later, up to the cut, counts when it ran
--   prefill or decode of a request of the cohort: a window that was taken from the arrivals ends with the last of them,
--   while the engine works on.
with

later as (
    select distinct
        steps.engine_id,
        steps.step_id
    from steps
    inner join run_window
        on steps.start_at_ns >= run_window.window_end_ns and steps.start_at_ns < run_window.cut_ns
    inner join step_requests
        on steps.engine_id = step_requests.engine_id and steps.step_id = step_requests.step_id
    inner join cohort on step_requests.request_id = cohort.request_id
    where step_requests.role in ('prefill', 'decode')
)

select steps.*
from steps
cross join run_window
left join later on steps.engine_id = later.engine_id and steps.step_id = later.step_id
where
    (steps.start_at_ns >= run_window.window_start_ns and steps.start_at_ns < run_window.window_end_ns)
    or later.step_id is not null
