"""`sloscope dashboards` and `sloscope rules`: build generated files, or check that they are current."""

from pathlib import Path

import typer

from dashboards import build, push, rules
from sloscope import output
from sloscope.contract import Contract, load
from sloscope.errors import ConfigError

dashboards_app = typer.Typer(no_args_is_help=True, help="Grafana dashboards, generated from the metric catalogue.")
rules_app = typer.Typer(
    no_args_is_help=True, help="Prometheus rules and alerts, generated from catalogue and contract."
)

_OUT = typer.Option(None, "--out", help="Folder of the generated files (default: the one that ships with the package).")
_CONTRACT = typer.Option(None, "--contract", help="Contract file (default: the preset `exercise`, 300 ms / 30 ms).")
_RUNBOOKS = typer.Option(rules.RUNBOOKS, "--runbooks", help="Where the runbook is published; alerts link into it.")
_FORMAT = typer.Option("table", "--format", help=output.FORMAT_HELP)


@dashboards_app.command("build")
def build_dashboards(out: Path | None = _OUT, format: str = _FORMAT) -> None:
    """Write the dashboards as JSON that Grafana imports or provisions."""
    _write(build.dashboard_files(), out, format)


@dashboards_app.command("check")
def check_dashboards(out: Path | None = _OUT) -> None:
    """Rebuild in memory and compare; exit 1 and name each file that differs."""
    _compare(build.dashboard_files(), out, "dashboards")


@dashboards_app.command("push")
def push_dashboards(
    url: str = typer.Option(..., "--url", help="Address of Grafana, such as http://127.0.0.1:3000."),
    token_file: Path | None = typer.Option(
        None, "--token-file", help=f"File with a service account's token; or set {push.TOKEN_VARIABLE}."
    ),
    folder: str = typer.Option("", "--folder", help="Uid of the folder (default: the general one)."),
    format: str = _FORMAT,
) -> None:
    """Create or replace the dashboards in a running Grafana, by their uid."""
    output.check_format(format)
    files = build.dashboard_files()
    output.print_rows(push.push(files, url, push.token(token_file), folder), format)


@rules_app.command("build")
def build_rules(
    contract: Path | None = _CONTRACT, out: Path | None = _OUT, runbooks: str = _RUNBOOKS, format: str = _FORMAT
) -> None:
    """Write recording rules and alerts as a Prometheus rule file."""
    if contract is not None and out is None:
        # What ships is made from the preset; someone's own contract must not replace it unasked.
        raise ConfigError("--out: is missing; accepted: a folder for the rules of --contract")
    _write(build.rule_files(_contract(contract), runbooks), out, format)


@rules_app.command("check")
def check_rules(contract: Path | None = _CONTRACT, out: Path | None = _OUT, runbooks: str = _RUNBOOKS) -> None:
    """Rebuild in memory and compare; exit 1 and name each file that differs."""
    _compare(build.rule_files(_contract(contract), runbooks), out, "rules")


def _contract(path: Path | None) -> Contract | None:
    return load(path) if path is not None else None


def _write(files: dict[str, str], out: Path | None, format: str) -> None:
    output.check_format(format)
    folder = out or build.GENERATED
    build.write(files, folder)
    rows = [{"file": str(folder / name), "bytes": len(text.encode())} for name, text in files.items()]
    output.print_rows(rows, format)


def _compare(files: dict[str, str], out: Path | None, command: str) -> None:
    different = list(build.differences(files, out or build.GENERATED))
    for line in different:
        output.message(line)
    if different:
        output.message(f"rebuild with: sloscope {command} build")
        raise typer.Exit(1)
    output.message(f"{len(files)} generated file(s) are current")
