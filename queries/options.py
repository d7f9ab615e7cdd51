"""What the query commands share: options, and how a contract is found."""

from pathlib import Path

import typer

from sloscope import contract as contracts
from sloscope.contract import Contract
from sloscope.errors import ConfigError
from sloscope.output import FORMAT_HELP, message
from sloscope.units import format_ns, parse_duration_ns

CONTRACT_FILE = "contract.toml"  # what a replay, a sidecar or the lab leaves beside its records

EVENTS = typer.Option(..., "--events", metavar="DIR", help="Events directory.")
CONTRACT = typer.Option(None, "--contract", metavar="FILE", help="Contract; default: DIR/contract.toml.")
GOODPUT = typer.Option(
    None, "--goodput", metavar="TEXT", help="Limits in ms for every class, instead of a file: 'ttft:300 itl_max:30'."
)
OBSERVER = typer.Option(None, "--observer", help="client, sidecar or engine; default: the contract's.")
WINDOW = typer.Option(
    None, "--window", metavar="A..B", help="ISO 8601, A..B or A+10m, B excluded; default: all data, whole seconds."
)
RELAX = typer.Option(None, "--relax", metavar="LIMIT=VALUE", help="Change one limit of the contract: itl_max=80ms.")
FORMAT = typer.Option("table", "--format", help=FORMAT_HELP)


def find_contract(
    events: Path, file: Path | None, goodput: str | None, preset: str | None = None
) -> tuple[Contract, str]:
    """The contract and its name: the one given, else the one saved with the events. None is made up, unless the caller
    names the preset to fall back on, which is said on stderr.
    """
    if file is not None and goodput is not None:
        raise ConfigError("--contract and --goodput: both are given; accepted: one of them")
    if file is not None:
        return contracts.load(file), str(file)
    if goodput is not None:
        return contracts.from_shorthand(goodput), f"'{goodput}' for every class"
    saved = Path(events) / CONTRACT_FILE
    if saved.exists():
        return contracts.load(saved), str(saved)
    if preset is not None:
        message(
            f"contract: none with the events and none given, so the verdicts are those of the preset {preset}; "
            "--contract FILE or --goodput TEXT gives others"
        )
        return contracts.preset(preset), preset
    raise ConfigError(
        f"contract: {str(saved)!r} does not exist; accepted: --contract FILE (sloscope contract init writes one) "
        "or --goodput 'ttft:300 itl_max:30'"
    )


def relaxed(contract: Contract, name: str, change: str | None) -> tuple[Contract, str]:
    """The contract with one limit changed, and a name that says what was changed. None changes nothing."""
    if change is None:
        return contract, name
    limit, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"--relax: {change!r} is not accepted; accepted: LIMIT=VALUE such as itl_max=80ms")
    ns = parse_duration_ns(value, f"--relax {limit}")
    changed = contract.relaxed(limit, ns)
    before = sorted({format_ns(row.limits.declared()[limit]) for row in contract.classes.values()
                     if limit in row.limits.declared()})  # fmt: skip
    return changed, f"{name} with {limit} {', '.join(before)} -> {format_ns(ns)} (base {contract.hash[:12]})"
