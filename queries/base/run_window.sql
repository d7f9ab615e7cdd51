-- view: the window of this run and the rules that it is read by
-- grain: one row
-- inputs:
-- rules: [window_start_ns, window_end_ns) in wall ns since the epoch. What is open after cut_ns is unfinished.
select
    cast(getvariable('observer') as varchar) as observer,
    cast(getvariable('window_rule') as varchar) as window_rule,
    cast(getvariable('voluntary_rule') as varchar) as voluntary_rule,
    cast(getvariable('window_start_ns') as bigint) as window_start_ns,
    cast(getvariable('window_end_ns') as bigint) as window_end_ns,
    cast(getvariable('window_end_ns') as bigint) - cast(getvariable('window_start_ns') as bigint) as window_ns,
    cast(getvariable('cut_ns') as bigint) as cut_ns
