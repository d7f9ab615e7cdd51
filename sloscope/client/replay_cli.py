"""`sloscope replay`: a trace against an OpenAI-compatible server, open loop, with receipts."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from sloscope import contract as contracts
from sloscope.client import contract_file, replay_report, schedule, traces
from sloscope.client.h1 import Origin, parse_url
from sloscope.client.replay import APIS, Replay, Tally, Target, probe
from sloscope.contract import Contract
from sloscope.errors import ConfigError
from sloscope.output import FORMAT_HELP, check_format, message, print_rows
from sloscope.units import NS_PER_S, parse_duration_ns

OWNER = "sloscope"  # what our reference server says as owned_by of its models
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    trace: str = typer.Argument(help="A trace file (azure CSV, own JSONL), or synthetic:poisson?rate=5&n=200&…"),
    url: list[str] = typer.Option([], "--url", help="Server, such as http://127.0.0.1:8000; several take turns."),
    events: Path | None = typer.Option(None, "--events", help="Directory for the records."),
    contract: Path | None = typer.Option(None, "--contract", help="SLO contract (TOML)."),
    goodput: str | None = typer.Option(None, "--goodput", help="Limits in ms instead: 'ttft:300 itl_max:30'."),
    rate: float | None = typer.Option(None, "--rate", help="Scale arrivals to this mean rate, requests/s."),
    speedup: float | None = typer.Option(None, "--speedup", help="Divide every gap by this."),
    scale_lengths: float = typer.Option(1.0, "--scale-lengths", help="Multiply prompt and output lengths."),
    scale_prompts: float | None = typer.Option(
        None, "--scale-prompts", help="Multiply prompt lengths by this instead; pairs stay together."
    ),
    limit: int | None = typer.Option(None, "--limit", help="Only the first N rows."),
    seed: int = typer.Option(0, "--seed", help="For synthetic rows, caps, tenants, cancels and prompts."),
    warmup: str = typer.Option("0", "--warmup", help="Rows flagged as warm-up: a number, or a duration such as 30s."),
    lengths: str = typer.Option(
        "auto",
        "--lengths",
        help="natural: stop-after under drawn caps (reference server); forced: ignore_eos; capped: max_tokens alone, "
        "for servers that refuse ignore_eos; auto: natural or forced, by what the server says it is.",
    ),
    model: str = typer.Option("", "--model", help="Model name; default: the first that the server lists."),
    api: str = typer.Option("chat", "--api", help="chat or completions."),
    class_name: str = typer.Option("", "--class", help="Class of rows without one; default: the contract's."),
    tenant: list[str] = typer.Option([], "--tenant", help="Tenant of rows without one; several are drawn from."),
    cancel_rate: float = typer.Option(0.0, "--cancel-rate", help="Share stopped by the consumer in mid-answer."),
    drain: str | None = typer.Option(None, "--drain", help="Wait after the last send; default: the contract's window."),
    receipts: str | None = typer.Option(None, "--receipts", help="Control plane of a sidecar to post receipts to."),
    header: list[str] = typer.Option([], "--header", help="'NAME: VALUE' sent with every request; never recorded."),
    format_trace: str = typer.Option("", "--format-trace", help="azure, jsonl or synthetic; default: by the header."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the schedule and send nothing."),
    format: str = typer.Option("table", "--format", help=FORMAT_HELP),
) -> None:
    """Replay TRACE open loop: every request leaves at its scheduled time, late ones at once.

    Latencies from the scheduled arrival (`ttft_intended`) stand beside those from the send (`ttft`). What is open at
    the end is unfinished. Ctrl-C keeps what was recorded. Exit: 0 done, 1 every request failed, 2 wrong use or input.
    """
    check_format(format)
    promised = _contract(contract, goodput)
    if lengths not in schedule.LENGTHS:
        raise ConfigError(f"--lengths: {lengths!r} is not accepted; accepted: {', '.join(schedule.LENGTHS)}")
    if api not in APIS:
        raise ConfigError(f"--api: {api!r} is not accepted; accepted: {', '.join(APIS)}")
    headers = _headers(header)
    origins = tuple(_versioned(parse_url(text)) for text in url)
    control = parse_url(receipts, "--receipts") if receipts is not None else None
    drain_ns = parse_duration_ns(drain, "--drain") if drain is not None else _drain_ns(promised)
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: {limit!r} is not accepted; accepted: 1 or more requests")
    loaded = traces.load(trace, format_trace, seed, limit)
    plan = schedule.Plan(
        rate=rate,
        speedup=speedup,
        scale_lengths=scale_lengths,
        scale_prompts=scale_prompts,
        limit=limit,
        seed=seed,
        warmup=warmup,
        natural=lengths not in ("forced", "capped"),
        class_name=class_name,
        tenants=tuple(tenant),
        cancel_rate=cancel_rate,
    )
    # Built before the first connection, so that a bad option stops it here.
    fixed = schedule.build(loaded.rows, promised, plan)
    if loaded.reordered:
        message(f"{loaded.source}: {loaded.reordered} rows stood after a later arrival and were sorted")
    if dry_run:
        _print_one({"trace": loaded.source, "lengths": lengths, **schedule.summary(fixed)}, format)
        return
    if not origins:
        raise ConfigError("--url: is missing; accepted: http://HOST:PORT, or --dry-run")
    if events is None:
        raise ConfigError("--events: is missing; accepted: a directory for the records")

    async def run() -> Tally:
        nonlocal fixed
        target = replace(await probe(origins, model, headers), api=api, ignore_eos=lengths != "capped")
        natural = lengths == "natural" or (lengths == "auto" and target.owned_by == OWNER)
        if natural != plan.natural:
            fixed = schedule.build(loaded.rows, promised, replace(plan, natural=natural))
        contract_file.keep(promised, contract, events)
        message(
            _opening(loaded, fixed, target, "natural" if natural else "forced" if target.ignore_eos else "capped", plan)
        )
        return await _drive(
            Replay(fixed, promised, target, events, drain_ns=drain_ns, seed=seed, receipts=control), events
        )

    _raise_descriptor_limit()
    tally = _loop_runner()(run())
    forced = lengths != "capped" and fixed.requests[0].stop_after is None
    _finish(tally, replay_report.report(tally, fixed, promised), format, forced)


def _contract(path: Path | None, goodput: str | None) -> Contract:
    if (path is None) == (goodput is None):
        raise ConfigError("--contract: exactly one of --contract FILE and --goodput 'ttft:300 itl_max:30' is needed")
    return contracts.load(path) if path is not None else contracts.from_shorthand(goodput or "")


def _headers(texts: list[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name.strip()) or not (value.isascii() and value.isprintable()):
            raise ConfigError(f"--header: {name[:40]!r} is not accepted; accepted: 'NAME: VALUE' in printable ASCII")
        headers[name.strip().lower()] = value.strip()
    return headers


def _versioned(origin: Origin) -> Origin:
    """The API lives under /v1 unless the URL says otherwise."""
    return origin if origin.path else origin._replace(path="/v1")


def _drain_ns(contract: Contract) -> int:
    """How long open requests are followed: to the window's drain limit, or through its grace."""
    return contract.drain_limit_ns if contract.window_rule == "drain" else contract.grace_ns


def _raise_descriptor_limit() -> None:
    """As many sockets as the system allows, since nothing may wait for one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        # macOS calls its hard limit infinite and refuses it; requests that find no descriptor are counted anyway.
        pass


def _loop_runner() -> Callable[[Coroutine[Any, Any, Tally]], Tally]:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.run
    return uvloop.run


async def _drive(running: Replay, events: Path) -> Tally:
    """Runs to the end; the first Ctrl-C ends it early, with everything that was received recorded."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, running.interrupt)
    try:
        return await running.run(progress=_progress if sys.stderr.isatty() else None)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        message(f"records: {events}")


_BAR = 30


def _progress(running: Replay) -> None:
    """One line, written by hand: a rich bar takes milliseconds to draw, which requests would leave late by."""
    tally = running.tally
    done = _BAR * tally.sent // tally.scheduled
    sys.stderr.write(
        f"\r\x1b[K[{'#' * done}{'.' * (_BAR - done)}] sent {tally.sent}/{tally.scheduled}  open {running.open}  "
        f"completed {tally.outcomes['completed']}  failed {tally.outcomes['failed']}"
    )
    sys.stderr.flush()


def _scaling(plan: schedule.Plan) -> str:
    """What was done to the trace, for people: a scaled replay is not the trace."""
    prompts = plan.scale_lengths if plan.scale_prompts is None else plan.scale_prompts
    said = [
        f"{name} × {factor:g}"
        for name, factor in (("prompts", prompts), ("answers", plan.scale_lengths))
        if factor != 1
    ]
    if plan.rate is not None:
        said.append(f"arrivals scaled to {plan.rate:g} req/s")
    if plan.speedup is not None:
        said.append(f"arrivals × {plan.speedup:g}")
    return f"; scaled: {', '.join(said)}" if said else ""


def _opening(loaded: traces.Trace, fixed: schedule.Schedule, target: Target, lengths: str, plan: schedule.Plan) -> str:
    rate = f"{fixed.mean_rate:.4g} req/s" if fixed.mean_rate is not None else "all at once"
    return (
        f"replaying {len(fixed.requests)} requests of {loaded.source} ({loaded.format}) over "
        f"{fixed.span_ns / NS_PER_S:.3f}s, {rate}, to {', '.join(str(origin) for origin in target.origins)}; "
        f"lengths {lengths}{_scaling(plan)}"
    )


def _finish(tally: Tally, row: dict[str, Any], format: str, forced: bool) -> None:
    _print_one(row, format)
    if row["invalid_reason"]:
        message(f"this run is not valid: {row['invalid_reason']}")
    if tally.records_lost:
        message(f"{tally.records_lost} records could not be written")
    if tally.receipts_failed:
        message(
            f"the receipts of {tally.receipts_failed} requests could not be posted ({tally.receipts_error}); "
            "the journal has them"
        )
    message("attainment here is a first look; `sloscope query goodput` computes it from the records")
    if tally.interrupted:
        raise typer.Exit(130)
    if tally.ended and tally.outcomes["failed"] + tally.unfinished == tally.ended:
        message("every request failed" if not tally.unfinished else "no request came to its end")
        if forced and tally.reasons["failed(http_error)"] == tally.ended:
            message("forced lengths send ignore_eos, which some servers refuse: --lengths capped does without")
        raise typer.Exit(1)


def _print_one(row: dict[str, Any], format: str) -> None:
    """JSON and CSV: one object. A table of thirty columns reads better on its side."""
    if format == "table":
        print_rows([{"measure": name, "value": value} for name, value in row.items()], format)
    else:
        print_rows([row], format)
