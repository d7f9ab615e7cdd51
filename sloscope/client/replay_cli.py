"""`sloscope replay`: a trace against an OpenAI-compatible server, open loop, with receipts."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from sloscope import bearer_token
from sloscope import contract as contracts
from sloscope.client import contract_file, replay_processes, replay_report, schedule, traces
from sloscope.client.h1 import Origin, parse_url
from sloscope.client.receipts import probe_control
from sloscope.client.replay import APIS, Conduct, Tally, Target, probe
from sloscope.client.replay_processes import Job, Progress
from sloscope.client.traces import Arrivals, Lengths, arrivals, synthetic
from sloscope.contract import Contract
from sloscope.errors import ConfigError
from sloscope.output import FORMAT_HELP, check_format, message, print_rows
from sloscope.units import NS_PER_S, parse_duration_ns

OWNER = "sloscope"  # what our reference server says as owned_by of its models
MAX_RETRIES = 20
MAX_PROCESSES = 256
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    trace: str = typer.Argument(
        help="A trace file (Azure, BurstGPT, Mooncake, Vidur, ServeGen, own JSONL), or synthetic:poisson?rate=5&n=200&…"
    ),
    url: list[str] = typer.Option([], "--url", help="Server, such as http://127.0.0.1:8000; several take turns."),
    events: Path | None = typer.Option(None, "--events", help="Directory for the records; needed to send."),
    contract: Path | None = typer.Option(None, "--contract", help="SLO contract (TOML)."),
    goodput: str | None = typer.Option(None, "--goodput", help="Limits in ms instead: 'ttft:300 itl_max:30'."),
    rate: float | None = typer.Option(
        None,
        "--rate",
        help="Scale arrivals to this mean rate, requests/s; with --arrivals, the rate that is drawn for.",
    ),
    speedup: float | None = typer.Option(None, "--speedup", help="Divide every gap by this."),
    arrival_kind: str = typer.Option(
        "trace", "--arrivals", help=f"trace: as recorded; or {', '.join(arrivals.KINDS)}, with the trace's lengths."
    ),
    arrival_cv: float | None = typer.Option(
        None, "--arrival-cv", help=f"Coefficient of variation of gamma gaps; default: {arrivals.CV:g}."
    ),
    burst_size: int | None = typer.Option(
        None, "--burst-size", help=f"Arrivals of a burst; default: {arrivals.BURST_SIZE}."
    ),
    burst_period: str | None = typer.Option(
        None, "--burst-period", help="From burst to burst, such as 10s; in place of --rate."
    ),
    burst_on: float | None = typer.Option(
        None, "--burst-on", help=f"Share of the period in which the burst falls; default: {arrivals.BURST_ON:g}."
    ),
    scale_lengths: float = typer.Option(1.0, "--scale-lengths", help="Multiply prompt and output lengths."),
    scale_prompts: float | None = typer.Option(
        None, "--scale-prompts", help="Multiply prompt lengths by this instead; pairs stay together."
    ),
    synthetic_lengths: str | None = typer.Option(
        None, "--synthetic-lengths", help=f"Lengths for ServeGen windows, as in '{Lengths()}'."
    ),
    limit: int | None = typer.Option(None, "--limit", help="Only the first N rows."),
    seed: int = typer.Option(0, "--seed", help="For everything that is drawn: the same seed, the same requests."),
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
    timeout: str | None = typer.Option(
        None, "--timeout", help="The consumer leaves so long after the send: cancelled(client_timeout). Default: never."
    ),
    slow_readers: float = typer.Option(
        0.0, "--slow-readers", help="Share whose consumer holds off after each read, behind a small kernel buffer."
    ),
    read_pause: str = typer.Option("500ms", "--read-pause", help="How long a slow reader holds off after each read."),
    retries: int = typer.Option(
        0, "--retries", help="After 429, 503 or no connection: a new request when Retry-After is over, so often."
    ),
    retry_wait: str = typer.Option(
        "500ms", "--retry-wait", help="The wait where the server names none; doubled with each retry."
    ),
    drain: str | None = typer.Option(
        None,
        "--drain",
        help="How long open requests are followed after the last arrival; default: the contract's window.",
    ),
    receipts: str | None = typer.Option(None, "--receipts", help="Control plane of a sidecar to post receipts to."),
    token_file: str = typer.Option(
        "", "--token-file", help=f"File with the bearer token of that control plane; or set {bearer_token.VARIABLE}."
    ),
    header: list[str] = typer.Option([], "--header", help="'NAME: VALUE' sent with every request; never recorded."),
    processes: str = typer.Option(
        "1", "--processes", help="Processes that share the schedule: a number, or auto: by its busiest second."
    ),
    format_trace: str = typer.Option(
        "", "--format-trace", help=f"{', '.join(traces.FORMATS)}; default: by the first line."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the schedule and send nothing."),
    format: str = typer.Option("table", "--format", help=FORMAT_HELP),
) -> None:
    """Replay TRACE open loop: every request leaves at its scheduled time, late ones at once.

    Latencies from the scheduled arrival stand beside those from the send. What is open at the end is unfinished.

    Ctrl-C keeps what was recorded. Exit: 0 done, 1 every request failed, 2 wrong use or input.

    \b
    sloscope replay trace.jsonl --url http://127.0.0.1:8001 --contract slo.toml --events run --rate 2 --limit 500
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
    if token_file and control is None:
        raise ConfigError("--token-file: is for --receipts alone; accepted: with --receipts URL")
    token = bearer_token.read(token_file) if control is not None else ""
    drain_ns = parse_duration_ns(drain, "--drain") if drain is not None else _drain_ns(promised)
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: {limit!r} is not accepted; accepted: 1 or more requests")
    conduct = _conduct(timeout, read_pause, retries, retry_wait)
    drawn = _arrivals(arrival_kind, rate, speedup, arrival_cv, burst_size, burst_period, burst_on)
    given_lengths = synthetic.parse_lengths(synthetic_lengths, "--synthetic-lengths") if synthetic_lengths else None
    loaded = traces.load(trace, format_trace, seed, limit, drawn, given_lengths)
    plan = schedule.Plan(
        rate=rate if drawn is None else None,
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
        slow_readers=slow_readers,
        until_ns=loaded.until_ns,
    )
    # Built before the first connection, so that a bad option stops it here.
    fixed = schedule.build(loaded.rows, promised, plan)
    number = _processes(processes, fixed)
    if loaded.reordered:
        message(f"{loaded.source}: {loaded.reordered} rows stood after a later arrival and were sorted")
    if loaded.left_out:
        message(f"{loaded.source}: {loaded.left_out} rows are failed requests of unknown length and are left out")
    source = {
        "trace": loaded.source,
        "arrivals": loaded.arrivals,
        "trace_lengths": loaded.lengths,
        "left_out": loaded.left_out,
    }
    if dry_run:
        _print_one({**source, "lengths": lengths, "processes": number, **schedule.summary(fixed)}, format)
        return
    if not origins:
        raise ConfigError("--url: is missing; accepted: http://HOST:PORT, or --dry-run")
    if events is None:
        raise ConfigError("--events: is missing; accepted: a directory for the records")
    target = replace(
        replay_processes.run_coroutine(probe(origins, model, headers)), api=api, ignore_eos=lengths != "capped"
    )
    natural = lengths == "natural" or (lengths == "auto" and target.owned_by == OWNER)
    if natural != plan.natural:
        fixed = schedule.build(loaded.rows, promised, replace(plan, natural=natural))
    if control is not None:
        replay_processes.run_coroutine(probe_control(control, token))
    contract_file.keep(promised, contract, events)
    kind = "natural" if natural else "forced" if target.ignore_eos else "capped"
    message(_opening(loaded, fixed, target, kind, plan, number))
    _raise_descriptor_limit()
    try:
        tally = replay_processes.run(
            Job(fixed, promised, target, events, drain_ns, seed, conduct, control, token),
            number,
            partial(_progress, len(fixed.requests)) if sys.stderr.isatty() else None,
        )
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        message(f"records: {events}")
    row = {**source, **replay_report.report(tally, fixed, promised), "followed_s": drain_ns / NS_PER_S}
    _finish(tally, row, format, kind == "forced")


def _conduct(timeout: str | None, read_pause: str, retries: int, retry_wait: str) -> Conduct:
    if not 0 <= retries <= MAX_RETRIES:
        raise ConfigError(f"--retries: {retries!r} is not accepted; accepted: 0 to {MAX_RETRIES}")
    return Conduct(
        retries,
        parse_duration_ns(retry_wait, "--retry-wait"),
        parse_duration_ns(timeout, "--timeout") if timeout is not None else None,
        parse_duration_ns(read_pause, "--read-pause"),
    )


def _arrivals(
    kind: str,
    rate: float | None,
    speedup: float | None,
    cv: float | None,
    size: int | None,
    period: str | None,
    on: float | None,
) -> Arrivals | None:
    """None: the trace's own."""
    accepted = ("trace", *arrivals.KINDS)
    if kind not in accepted:
        raise ConfigError(f"--arrivals: {kind!r} is not accepted; accepted: {', '.join(accepted)}")
    for name, value, needs in (
        ("--arrival-cv", cv, "gamma"),
        ("--burst-size", size, "burst"),
        ("--burst-period", period, "burst"),
        ("--burst-on", on, "burst"),
    ):
        if value is not None and kind != needs:
            raise ConfigError(f"{name}: {value!r} is not for --arrivals {kind}; accepted: with --arrivals {needs}")
    if kind == "trace":
        return None
    if speedup is not None:
        raise ConfigError(f"--speedup: {speedup!r} is not for --arrivals {kind}; accepted: --rate")
    if cv is not None and not 0.01 <= cv <= 100:
        raise ConfigError(f"--arrival-cv: {cv!r} is not accepted; accepted: a number from 0.01 to 100")
    if size is not None and size < 1:
        raise ConfigError(f"--burst-size: {size!r} is not accepted; accepted: 1 or more arrivals")
    if on is not None and not 0 <= on <= 1:
        raise ConfigError(f"--burst-on: {on!r} is not accepted; accepted: a share from 0 to 1")
    size = arrivals.BURST_SIZE if size is None else size
    if period is not None:
        if rate is not None:
            raise ConfigError("--burst-period: not together with --rate; accepted: one of the two")
        rate = size * NS_PER_S / parse_duration_ns(period, "--burst-period")
    if rate is None:
        raise ConfigError(f"--rate: is missing; accepted: the mean rate of --arrivals {kind}, requests/s")
    if not 0 < rate < 1e6:
        raise ConfigError(f"--rate: {rate!r} is not accepted; accepted: a number above 0")
    return Arrivals(kind, rate, arrivals.CV if cv is None else cv, size, arrivals.BURST_ON if on is None else on)


def _processes(text: str, fixed: schedule.Schedule) -> int:
    if text == "auto":
        return replay_processes.processes_for(fixed, replay_processes.cores())
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_PROCESSES):
        raise ConfigError(f"--processes: {text!r} is not accepted; accepted: 1 to {MAX_PROCESSES}, or auto")
    return int(text)


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


_BAR = 30


def _progress(scheduled: int, now: Progress) -> None:
    """One line, written by hand: a rich bar takes milliseconds to draw, which requests would leave late by."""
    done = _BAR * now.sent // scheduled
    sys.stderr.write(
        f"\r\x1b[K[{'#' * done}{'.' * (_BAR - done)}] sent {now.sent}/{scheduled}  open {now.open}  "
        f"completed {now.completed}  failed {now.failed}"
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


def _opening(
    loaded: traces.Trace, fixed: schedule.Schedule, target: Target, lengths: str, plan: schedule.Plan, processes: int
) -> str:
    rate = f"{fixed.mean_rate:.4g} req/s" if fixed.mean_rate is not None else "all at once"
    # A description says it itself.
    said = loaded.format == "synthetic" or loaded.arrivals == traces.AS_RECORDED
    made = "" if said else f"; arrivals {loaded.arrivals}"
    return (
        f"replaying {len(fixed.requests)} requests of {loaded.source} ({loaded.format}) over "
        f"{fixed.span_ns / NS_PER_S:.3f}s, {rate}, to {', '.join(str(origin) for origin in target.origins)}"
        f"{f' from {processes} processes' if processes > 1 else ''}; lengths {lengths}{made}{_scaling(plan)}"
    )


def _finish(tally: Tally, row: dict[str, Any], format: str, forced: bool) -> None:
    _print_one(row, format)
    if row["invalid_reason"]:
        message(f"INVALID RUN: {row['invalid_reason']}. Its latencies are those of another load than the trace's.")
    late = replay_report.outgrown(tally, replay_processes.cores())
    if late is not None:
        message(late)
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
    if tally.processes_lost:
        raise typer.Exit(1)
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
