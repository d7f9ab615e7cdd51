-- view: the offered requests of the window, warm-up excluded, each with its verdict
-- grain: one row per offered request
-- inputs: judged_requests
-- rules: `warmup_requests` has what is left out here. Columns and verdict are those of `judged_requests`.
select * from judged_requests
where not coalesce(warmup, false)
