-- view: whole numbers, for what has to have a row even when nothing happened
-- grain: one row per number from 0 to 99999
-- inputs:
select range as n
from range(100000)
