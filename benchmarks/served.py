"""The real server in a process of its own, the same load for every run of it, and what its journal answers."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from queries.runner import Session
from sloscope.client import traces
from sloscope.contract import Contract
from sloscope.definitions import nearest_rank
from sloscope.demo.processes import Stage, ask
from sloscope.errors import SloscopeError
from sloscope.output import FORMATS, message
from sloscope.units import NS_PER_S

Row = dict[str, Any]
PATIENT = "e2e:600000"  # a contract that hardly anything breaks, where none is asked about
WHOLE_S = 3600  # a bucket that holds a whole run


def served_options(about: str | None, model: str = "builtin") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model, help=f"as for `sloscope serve` (default: {model})")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    return parser


def positive(parser: argparse.ArgumentParser, asked: argparse.Namespace, *names: str) -> None:
    """One line, and exit 2, for an option that is not above 0."""
    for name in names:
        if getattr(asked, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(asked, name):g} is not accepted; accepted: above 0")


def run(main: Callable[[], int]) -> int:
    """Its exit code; what the project refuses is one line."""
    try:
        return main()
    except SloscopeError as error:
        message(f"error: {error}")
        return 1


def serve(stage: Stage, model: str, events: Path, *options: str) -> str:
    """The URL of `sloscope serve` on a free port of loopback; it ends with the stage."""
    child = stage.sloscope(
        "server", "serve", "--model", model, "--listen", "127.0.0.1:0", "--events", str(events), *options
    )
    return str(child.wait_for(r"on (http://\S+)", 60)[1])


@contextmanager
def served(asked: argparse.Namespace, events: Path, *options: str) -> Iterator[str]:
    events.mkdir()
    with Stage(events) as stage:
        yield serve(stage, asked.model, events, "--threads", str(asked.threads), *options)


def write_trace(path: Path, trace: str, seed: int, max_tokens: int, classes: Sequence[str] = ("",)) -> None:
    """The rows of a synthetic trace, of the classes in turn, all with the same max_tokens: it says nothing of how long
    an answer is."""
    with path.open("w", encoding="utf-8") as file:
        for row, class_name in zip(traces.load(trace, seed=seed).rows, cycle(classes)):
            at_s = f"{row.offset_ns // NS_PER_S}.{row.offset_ns % NS_PER_S:09d}"  # exact, which a float is not
            lengths = f'"prompt_tokens": {row.prompt_tokens}, "output_tokens": {row.output_tokens}'
            file.write(f'{{"at_s": {at_s}, "class": "{class_name}", {lengths}, "max_tokens": {max_tokens}}}\n')


def replay(trace: Path, url: str, events: Path, seed: int, contract: Path | None = None) -> None:
    """Returns when every answer has ended, or is given up a minute after the last was asked for."""
    promised = ("--goodput", PATIENT) if contract is None else ("--contract", str(contract))
    shown = (*promised, "--seed", str(seed), "--drain", "60s", "--format", "json")
    ask("replay", str(trace), "--url", url, "--events", str(events), *shown, timeout_s=180)


def questions(events: Path, contract: Contract, observer: str | None = None) -> Session:
    return Session(events, contract, observer=observer)


def quantile_of(session: Session, metric: str, quantile: str) -> float | None:
    """Seconds, of completed requests; None where there are too few for it."""
    rows = session.run("quantiles", metric=metric).rows
    (value,) = (row["value_s"] for row in rows if (row["series"], row["quantile"]) == ("completed", quantile))
    return None if value is None else float(value)


def stays(session: Session, state: str, class_name: str) -> Row | None:
    """All stays in a state, whatever followed."""
    rows = session.run("state_times").rows
    key = (class_name, state, "any")
    return next((row for row in rows if (row["class"], row["state"], row["next_state"]) == key), None)


def at_once(session: Session) -> tuple[float | None, int | None]:
    """Requests in the batch, weighed by the time that steps took: mean, and the 95th percentile by nearest rank."""
    steps = session.sql(
        "select coalesce(prefill_requests, 0) + coalesce(decode_requests, 0) as requests, end_ns - start_ns as ns "
        "from window_steps"
    ).rows
    return weighed([(step["requests"], step["ns"]) for step in steps])


def weighed(steps: Sequence[tuple[int, int]]) -> tuple[float | None, int | None]:
    """(requests, ns) of steps."""
    all_ns = sum(ns for _, ns in steps)
    if not all_ns:
        return None, None
    mean = sum(requests * ns for requests, ns in steps) / all_ns
    rank, passed_ns = nearest_rank(950, all_ns), 0
    for requests, ns in sorted(steps):
        passed_ns += ns
        if passed_ns >= rank:
            return mean, requests
    raise AssertionError("a rank beyond the sum")


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def survival_curve(events: Path) -> str:
    """Of all classes together, as `--lengths` takes it."""
    curve = ask("query", "survival_curve", "--events", str(events), "--param", "by=all", "--format", "json")
    assert json.loads(curve), "no answer has ended"
    return curve
