"""The `sloscope` command.

A part is imported only when its subcommand runs, so `--help` stays fast and torch stays out.
"""

import importlib
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from sloscope import __version__
from sloscope.errors import ConfigError, SloscopeError


class Command(NamedTuple):
    target: str  # module:attribute, a Typer app
    help: str
    extra: str = ""  # the extra that brings what it needs


COMMANDS: dict[str, Command] = {
    "lab": Command("queries.lab:app", "The eight requests of the lab, judged: start here."),
    "contract": Command("queries.contract_cli:app", "Check, print as a design sheet, or write an SLO contract."),
    "model": Command("reference_server.model_cli:app", "Models for the reference server, their step times.", "server"),
    "serve": Command("reference_server.cli:app", "Run the instrumented reference server.", "server"),
    "sidecar": Command("exporter.cli:app", "Run the sidecar: forward, stamp, record, expose."),
    "replay": Command("sloscope.client.replay_cli:app", "Replay a trace open loop, with receipts."),
    "compact": Command("queries.cli:compact_app", "Turn journal files into Parquet tables."),
    "query": Command("queries.cli:query_app", "Answer one question with SQL, or list the questions."),
    "compare": Command("queries.cli:compare_app", "Two event directories side by side."),
    "sql": Command("queries.cli:sql_app", "Your own read-only SQL over the views."),
    "dashboards": Command("dashboards.cli:dashboards_app", "Build or check the Grafana dashboards.", "dashboards"),
    "rules": Command("dashboards.cli:rules_app", "Build or check the Prometheus rules.", "dashboards"),
}


class LazyGroup(TyperGroup):
    """Lists every subcommand from the table and imports only the one that is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        if command is None:
            return None
        if ctx.resilient_parsing or _only_listing(cmd_name):
            return _placeholder(cmd_name, command.help)
        module, _, attribute = command.target.partition(":")
        try:
            app = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if command.extra and not (error.name or "").startswith(("sloscope", module.partition(".")[0])):
                raise SloscopeError(
                    f"{cmd_name}: needs {error.name}; install it with: pip install 'sloscope[{command.extra}]'"
                ) from None
            raise
        loaded = typer.main.get_command(app)
        loaded.name = cmd_name
        return loaded


def _only_listing(cmd_name: str) -> bool:
    """True while `sloscope --help` prints the one-line helps: no argument names this command."""
    return cmd_name not in sys.argv[1:]


def _placeholder(name: str, text: str) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name=name, help=text)(lambda: None)
    command = typer.main.get_command(app)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Did the people waiting for tokens get what they were promised, and if not, which link broke the promise?

    Start with `sloscope lab`. Rows go to stdout (--format table|json|csv), messages to stderr.
    Exit codes: 0 done, 1 the answer is no, 2 wrong use or input.""",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sloscope {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    try:
        if "--events=" in sys.argv or ("--events", "") in pairwise(sys.argv):
            # A variable that is not set, and a path of no characters would be the current directory.
            raise ConfigError("--events: '' is not accepted; accepted: a directory")
        app()
    except SloscopeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left, as `| head` does.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # A name that is too long, a disk that is full: the world's, wherever it was met.
        name = f"{str(error.filename)[:200]!r}: " if error.filename is not None else ""
        typer.echo(f"error: {name}{error.strerror or error}", err=True)
        sys.exit(2)
