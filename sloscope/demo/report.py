"""What the demo prints at the end, all of it from the recorded events through SQL."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sloscope.demo.injection import Injection
from sloscope.demo.processes import ask
from sloscope.output import message, print_rows
from sloscope.units import format_instant

ATTAINMENT = (0.3, 0.95)
Rows = list[dict[str, Any]]
# question → title and the columns that fit a terminal; the question itself prints them all
SHOWN = {
    "goodput": (
        "Goodput",
        "offered qualified completed warmup_excluded attainment attainment_low attainment_high goodput_rps "
        "token_goodput observed_tokens_per_s ttft_p99_s ttft_p99_reason",
    ),
    "misses_by_obligation": ("Misses", "obligation missed missed_alone offered miss_ratio"),
    "hold_summary": ("Diagnosis of late deliveries", "verdict holds requests excess_s excess_share longest_s"),
    "stall_causes": ("What the engine did in its stalls", "cause stalls requests longest_s with_fault fault"),
    "survival": (
        "Answer length, stops and caps",
        "cohort n events censored_cap median_tokens median_low_tokens median_high_tokens restricted_mean_tokens "
        "naive_mean_tokens naive_bias_tokens",
    ),
    "ttft_budget": ("TTFT, link by link", "link n p50_s p99_s mean_s tail_excess_s tail_excess_share"),
}


def rows(command: str, text: str, events: Path, *options: str) -> Rows:
    """The rows that `sloscope sql TEXT` or `sloscope query NAME` prints."""
    result: Rows = json.loads(ask(command, text, "--events", str(events), "--format", "json", *options))
    return result


def report(events: Path, contract: Path, injection: Injection) -> int:
    """Prints the tables and says whether the diagnosis found what was injected: 0, or 1."""

    def query(name: str) -> Rows:
        return rows("query", name, events, "--contract", str(contract))

    answers = {name: query(name) for name in SHOWN}
    answers["stall_causes"] = causes(answers["stall_causes"])
    for name, (title, columns) in SHOWN.items():
        print_rows(answers[name], columns=columns.split(), title=f"{title}: sloscope query {name} --events {events}")
    message(
        f"records: {events} (sloscope query --list); contract: {contract}; last scrape: {events.parent / 'metrics.txt'}"
    )
    message("dashboards: dashboards/generated/*.json, to be imported into Grafana")
    return verdict(answers["goodput"], query("holds"), injection)


def causes(stalls: Rows) -> Rows:
    """One row per cause, longest first. The fault is evidence from the engine's journal, not what the cause rests
    on.
    """
    groups: dict[str, Rows] = defaultdict(list)
    for row in stalls:
        groups[row["cause"]].append(row)
    summary = [
        {
            "cause": cause,
            "stalls": len(group),
            "requests": len({row["request_id"] for row in group}),
            "longest_s": max(row["emit_gap_s"] or 0 for row in group),
            "with_fault": sum(row["step_fault"] is not None for row in group),
            "fault": next((row["step_fault"] for row in group if row["step_fault"]), None),
        }
        for cause, group in groups.items()
    ]
    return sorted(summary, key=lambda row: -float(str(row["longest_s"])))


def verdict(goodput: Rows, holds: Rows, injection: Injection) -> int:
    problems = [injection.problem] if injection.problem else []
    attainment = goodput[0]["attainment"]
    low, high = ATTAINMENT
    if attainment is None or not low <= attainment <= high:
        problems.append(
            f"attainment {attainment} is not between {low} and {high}: "
            "the machine was busier or idler while it served than while it was measured"
        )
    stalls = within(holds, "decoder_stall", injection.stall_at_ns, injection.hold_from_ns)
    longest = max((row["emit_gap_s"] for row in stalls), default=0.0)
    if longest < injection.stall_ms / 1000:
        problems.append(f"no decoder_stall of {injection.stall_ms} ms was found where one was injected")
    buffered = within(holds, "buffered_delivery", injection.hold_from_ns, injection.hold_to_ns)
    if not buffered:
        problems.append("no buffered_delivery was found in the phase of buffering")
    print_rows(
        [
            {
                "injected": f"decoder stall of {injection.stall_ms} ms",
                "at": format_instant(injection.stall_at_ns),
                "diagnosed": "decoder_stall" if stalls else None,
                "holds": len(stalls),
                "longest_s": longest,
            },
            {
                "injected": f"buffering of {injection.hold_ms} ms",
                "at": format_instant(injection.hold_from_ns),
                "diagnosed": "buffered_delivery" if buffered else None,
                "holds": len(buffered),
                "longest_s": max((row["held_s"] for row in buffered), default=0.0),
            },
        ],
        title="Injected against diagnosed",
    )
    if problems:
        for problem in problems:
            message(f"no: {problem}")
    else:
        message("yes: both injected causes were diagnosed; other stalls above are this machine's own")
    return 1 if problems else 0


def within(holds: Rows, word: str, from_ns: int, to_ns: int) -> Rows:
    """Holds with this verdict that ended in the interval, give or take half a second for what was on its way."""
    slack_s = 0.5
    return [
        row
        for row in holds
        if row["verdict"] == word and from_ns / 1e9 - slack_s <= row["held_at_s"] <= to_ns / 1e9 + slack_s
    ]
