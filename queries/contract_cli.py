"""`sloscope contract`: check a contract, print it as a design sheet, write one to start from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from queries.options import FORMAT
from queries.runner import Session
from sloscope import contract as contracts
from sloscope.contract import LIMIT_NAMES, Contract
from sloscope.errors import ConfigError, QueryError
from sloscope.journal import write_atomically
from sloscope.output import check_format, message, print_rows
from sloscope.units import format_ns

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check, explain or write an SLO contract.")
FILE = typer.Argument(..., metavar="FILE", help="Contract, TOML.")


@app.command()
def check(file: Path = FILE, format: str = FORMAT) -> None:
    """Print the classes with their limits, and the hash under which results are compared.

    \b
    sloscope contract check slo.toml
    """
    check_format(format)
    contract = contracts.load(file)
    print_rows([_class_row(contract, name) for name in contract.classes], format)
    message(_rules(contract))


def _class_row(contract: Contract, name: str) -> dict[str, Any]:
    row = contract.classes[name]
    limits = {limit: _limit(row.limits.declared().get(limit)) for limit in LIMIT_NAMES}
    return {
        "class": name,
        "default": name == contract.default_class,
        **limits,
        "min_tokens": row.limits.min_tokens,
        "objective": row.objective,
        "period": format_ns(row.period_ns),
        "streaming": row.streaming,
    }


def _limit(ns: int | None) -> str | None:
    return None if ns is None else format_ns(ns)


def _rules(contract: Contract) -> str:
    after = contract.drain_limit_ns if contract.window_rule == "drain" else contract.grace_ns
    return (
        f"measured at the {contract.observer}; window rule {contract.window_rule}, "
        f"{format_ns(after) if after else '0s'} after the end; voluntary cancellation {contract.voluntary}; "
        f"hash {contract.hash}"
    )


@app.command()
def init(
    file: Path = FILE,
    preset: str = typer.Option("exercise", help=f"One of {', '.join((*contracts.PRESETS, 'exercise'))}."),
    force: bool = typer.Option(False, "--force", help="Replace a file that is there."),
) -> None:
    """Write a contract to start from.

    \b
    sloscope contract init slo.toml --preset voice
    """
    text = contracts.preset_text(preset)
    if file.exists() and not force:
        raise ConfigError(f"FILE: {str(file)!r} exists; accepted: a new name, or --force to replace it")
    if file.is_dir():
        raise ConfigError(f"FILE: {str(file)!r} is a directory; accepted: a file name")
    write_atomically(file, text.encode())
    message(f"wrote {file}: preset {preset}")


@app.command()
def sheet(
    file: Path = FILE,
    events: Path = typer.Option(None, metavar="DIR", help="Print measured lengths beside the declared ones."),
    observer: str = typer.Option(None, help="client, sidecar or engine; default: the contract's."),
    lengths: bool = typer.Option(False, "--lengths", help="Print the lengths alone."),
    format: str = FORMAT,
) -> None:
    """Print the design sheet: who owes what, from when, within which limit, and the metric that exposes a miss; then
    the workload that the limits were written for.

    \b
    sloscope contract sheet slo.toml --events run1
    sloscope contract sheet slo.toml --events run1 --lengths --format json
    """
    check_format(format)
    contract = contracts.load(file)
    if events is not None and not events.is_dir():
        raise QueryError(f"--events: {str(events)!r} is not a directory")
    if not lengths:
        print_rows([asdict(line) for line in contracts.sheet(contract)], format)
    # JSON and CSV are one table.
    if lengths or format == "table":
        print_rows(workload_rows(contract, file, events, observer), format)
    message(_rules(contract))


def workload_rows(contract: Contract, file: Path, events: Path | None, observer: str | None) -> list[dict[str, Any]]:
    """Declared and, with events, measured lengths in tokens."""
    measured: dict[str, dict[str, Any]] = {}
    if events is not None:
        with Session(events, contract, contract_name=str(file), observer=observer) as session:
            measured = {row["length"]: row for row in session.run("lengths").rows}
            if session.note:
                message(session.note)
    rows = []
    for length in ("prompt_tokens", "output_tokens"):
        declared = contract.workload.get(length, {})
        found = measured.get(length, {})
        row: dict[str, Any] = {"length": length}
        for quantile in ("p50", "p90", "p99"):
            row[f"declared_{quantile}"] = declared.get(quantile)
            if events is not None:
                row[f"measured_{quantile}"] = found.get(f"{quantile}_tokens")
        if events is not None:
            row["requests"] = found.get("requests", 0)
        rows.append(row)
    return rows
