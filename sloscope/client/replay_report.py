"""What a replay prints: its tally in seconds and shares, and whether the run may be trusted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sloscope.client.replay import Tally
from sloscope.client.schedule import Schedule
from sloscope.contract import Contract
from sloscope.definitions import min_n_upper, nearest_rank, ratio
from sloscope.units import NS_PER_S, format_ns

QUANTILE_METHOD = "nearest rank"
LATE_NS = 5_000_000  # dispatch lag at p99 that one core should keep
BUSY_SHARE = 0.7  # of a core: beyond it a send waits for the process itself
Row = dict[str, Any]


def report(tally: Tally, schedule: Schedule, contract: Contract) -> Row:
    """One row. Counts are requests; `_s` seconds; None is not known or not defined."""
    lag, begin = sorted(tally.dispatch_lag_ns), sorted(tally.begin_wait_ns)
    reason = invalid_reason(tally, schedule)
    return {
        "scheduled": tally.scheduled,
        "sent": tally.sent,
        "warmup_excluded": tally.warmup,
        "offered": tally.offered,
        "completed": tally.outcomes["completed"],
        "failed": tally.outcomes["failed"],
        "cancelled": tally.outcomes["cancelled"],
        "unfinished": tally.unfinished,
        "reasons": " ".join(f"{name}={count}" for name, count in sorted(tally.reasons.items())) or None,
        "qualified": tally.qualified,
        "attainment": ratio(tally.qualified, tally.offered),
        "vacuous": tally.vacuous,
        "retries": tally.retries,
        "retries_completed": tally.retries_completed,
        "retries_not_sent": tally.retries_not_sent,
        "slow_readers": tally.slow_readers,
        "own_limit": tally.own_limit,
        "late_begins": tally.late_begins,
        "output_tokens": tally.output_tokens,
        **_ttft("offered", tally, tally.offered),
        **_ttft("completed", tally, len(tally.ttft_ns)),
        "dispatch_lag_p50_s": _rank_s(lag, 500),
        "dispatch_lag_p99_s": _rank_s(lag, 990),
        "dispatch_lag_max_s": lag[-1] / NS_PER_S if lag else None,
        "begin_wait_p99_s": _rank_s(begin, 990),
        "first_send_offset_s": tally.first_send_offset_ns / NS_PER_S
        if tally.first_send_offset_ns is not None
        else None,
        "schedule_span_s": schedule.span_ns / NS_PER_S,
        "scheduled_rate_rps": schedule.mean_rate,
        "wall_s": tally.wall_ns / NS_PER_S,
        "processes": tally.processes,
        "cpu_share": tally.cpu_share,
        "interrupted": tally.interrupted,
        "valid": reason is None,
        "invalid_reason": reason,
        "window_rule": contract.window_rule,
        "observer": contract.observer,
        "quantile_method": QUANTILE_METHOD,
        "contract_hash": contract.hash,
    }


def invalid_reason(tally: Tally, schedule: Schedule) -> str | None:
    """Why the run did not offer the load it claims: processes that were lost, requests that met a limit of the
    generator itself, or sends that were late by more than a tenth of the TTFT limit at p99.
    """
    if tally.processes_lost:
        return f"{tally.processes_lost} of {tally.processes} processes ended without their counts"
    if tally.own_limit:
        return f"{tally.own_limit} requests found no free descriptor or port in this process (see ulimit -n)"
    if tally.warmup and not tally.offered:
        return f"all {tally.warmup} requests that were sent are warm-up, and none is offered"
    limit, lag = schedule.ttft_limit_ns, sorted(tally.dispatch_lag_ns)
    if limit is None or not lag:
        return None
    p99 = lag[nearest_rank(990, len(lag)) - 1]
    if p99 * 10 <= limit:
        return None
    return f"dispatch lag p99 {p99 / 1e6:.1f}ms is above a tenth of the ttft limit {format_ns(limit)}"


def outgrown(tally: Tally, cores: int) -> str | None:
    """Whether sends were late, and for want of a core: what there is to do about it."""
    lag = sorted(tally.dispatch_lag_ns)
    p99 = lag[nearest_rank(990, len(lag)) - 1] if lag else 0
    if p99 <= LATE_NS or tally.cpu_share is None:
        return None
    used = f"sends left {p99 / 1e6:.1f}ms late at p99 with {tally.cpu_share:.0%} of a core used"
    if tally.cpu_share < BUSY_SHARE:
        return f"{used}: other work on this machine holds the replay up"
    if tally.processes >= cores:
        return f"{used} in each of {tally.processes} processes, and there are {cores} cores: a bigger machine would do"
    return f"{used}: --processes {tally.processes + 1} shares the load"


def _ttft(series: str, tally: Tally, n: int) -> Row:
    """Over `n` requests, of which those without a TTFT rank above every value: a failing service cannot look fast."""
    row: Row = {}
    for name, permille in (("p50", 500), ("p99", 990)):
        for of, values in (("ttft", tally.ttft_ns), ("ttft_intended", tally.ttft_intended_ns)):
            row[f"{of}_{series}_{name}_s"] = (
                None if _note(values, n, permille) else _rank_s(sorted(values), permille, n)
            )
        row[f"ttft_{series}_{name}_note"] = _note(tally.ttft_ns, n, permille)
    return row


def _rank_s(ordered: Sequence[int], permille: int, n: int | None = None) -> float | None:
    rank = nearest_rank(permille, len(ordered) if n is None else n)
    return ordered[rank - 1] / NS_PER_S if ordered else None


def _note(values: Sequence[int], n: int, permille: int) -> str | None:
    """Why there is no quantile: below a number of requests nothing bounds it from above at 95 %."""
    need = min_n_upper(permille / 1000)
    if n < need:
        return f"n={n} < {need}"
    return "> max" if nearest_rank(permille, n) > len(values) else None
