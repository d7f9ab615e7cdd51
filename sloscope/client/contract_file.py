"""A contract as TOML text, and its place beside the events that were recorded under it."""

from __future__ import annotations

from pathlib import Path

from sloscope import contract as contracts
from sloscope.contract import Contract
from sloscope.errors import ContractError, JournalError
from sloscope.journal import write_atomically
from sloscope.units import format_ns

NAME = "contract.toml"


def to_toml(contract: Contract) -> str:
    """Text that parses to the same contract, and so to the same hash."""
    lines = [
        "version = 1",
        f"observer = {_text(contract.observer)}",
        f"default_class = {_text(contract.default_class)}",
    ]
    for name, row in contract.classes.items():
        lines += ["", f"[classes.{_text(name)}]"]
        lines += [f"{limit} = {_text(format_ns(ns))}" for limit, ns in row.limits.declared().items()]
        lines += [
            f"min_tokens = {row.limits.min_tokens}",
            f"objective = {row.objective!r}",
            f"period = {_text(format_ns(row.period_ns))}",
            f"streaming = {_text(row.streaming)}",
        ]
    lines += ["", "[window]", f"rule = {_text(contract.window_rule)}"]
    lines.append(f"drain_limit = {_text(format_ns(contract.drain_limit_ns))}")
    if contract.grace_ns:
        lines.append(f"grace = {_text(format_ns(contract.grace_ns))}")
    lines += ["", "[cancellation]", f"voluntary = {_text(contract.voluntary)}"]
    if contract.budget:
        lines += ["", "[budget]", *(f"{link} = {_text(format_ns(ns))}" for link, ns in contract.budget.items())]
    for name, values in contract.workload.items():
        lines += ["", f"[workload.{name}]", *(f"{q} = {tokens}" for q, tokens in values.items())]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """A TOML basic string, which quotes what JSON quotes; nothing that needs another escape is accepted anywhere."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    assert escaped.isprintable(), value
    return f'"{escaped}"'


def keep(contract: Contract, source: Path | None, events: Path) -> Path:
    """Writes EVENTS/contract.toml: the bytes of `source`, or the contract spelt out.

    Raises ContractError when the directory was recorded under another contract, since its rows would be judged by
    limits that nobody had promised them.
    """
    path = Path(events) / NAME
    if path.exists():
        there = contracts.load(path)
        if there.hash != contract.hash:
            raise ContractError(
                f"contract: {str(path)!r} has hash {there.hash[:12]}, this run {contract.hash[:12]}; "
                "accepted: the same contract, or another --events directory"
            )
        return path
    data = source.read_bytes() if source is not None else to_toml(contract).encode()
    try:
        Path(events).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"events directory {str(events)!r}: {error.strerror}") from None
    write_atomically(path, data)
    return path
