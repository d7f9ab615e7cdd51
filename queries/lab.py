"""`sloscope lab`: the eight requests, written as journal records, compacted, judged with SQL."""

import shlex
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer

from queries.options import FORMAT, relaxed
from queries.runner import Result, Session
from sloscope import contract as contracts
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.errors import ConfigError
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter
from sloscope.lab import REQUESTS, WINDOW_S, LabRequest
from sloscope.output import message, print_rows
from sloscope.units import NS_PER_S, format_ns, parse_instant_ns

START_AT_NS = parse_instant_ns("2026-01-01T00:00:00Z")  # where the lab's time 0 lies on the wall
WINDOW = (START_AT_NS, START_AT_NS + WINDOW_S * NS_PER_S)
SUMMARY = (
    "offered",
    "qualified",
    "attainment",
    "goodput_rps",
    "token_goodput",
    "observed_tokens_per_s",
    "ttft_p99_s",
    "ttft_p99_reason",
)

app = typer.Typer(add_completion=False)


def write_journal(events: Path) -> None:
    """The eight requests as a client would have recorded them, on a clock that is moved by hand."""
    contract = contracts.preset("exercise")
    clock = FakeClock(wall_ns=START_AT_NS)
    with JournalWriter(events, "client", clock) as journal:
        for number, request in enumerate(REQUESTS):
            clock.advance(request.send_ns - clock.monotonic_ns())
            request_id = new_request_id(clock.wall_ns(), number.to_bytes(10, "big"))
            for record in _records(request, request_id, clock.clock_id, contract):
                journal.write(records.check(record))


def _records(
    request: LabRequest, request_id: str, clock_id: str, contract: contracts.Contract
) -> Iterable[records.Record]:
    row = contract.classes[contract.default_class]
    receipts = request.receipts_ns
    yield records.make(
        "begin",
        request_id=request_id,
        attempt=0,
        observer="client",
        role="client",
        clock_id=clock_id,
        external_id=request.name,
        send_ns=request.send_ns,
        model="lab",
        class_=row.name,
        contract_hash=contract.hash,
        limits=row.limits.as_record(),
        streaming=True,
        n_choices=1,
    )
    yield records.make(
        "chunks",
        request_id=request_id,
        attempt=0,
        ordinal0=0,
        t_ns=receipts,
        choice=[0] * len(receipts),
        type=[0] * len(receipts),
        tokens=[1] * len(receipts),
    )
    yield records.make(
        "end",
        request_id=request_id,
        attempt=0,
        outcome=request.outcome,
        reason=request.reason,
        finish_reason=["stop"] if request.outcome == "completed" else [],
        end_ns=request.end_ns,
        output_tokens=request.tokens,
        token_source="usage" if request.outcome == "completed" else "continuous_usage",
        http_status=200,
    )


def judge(events: Path, contract: contracts.Contract, name: str) -> tuple[list[dict[str, Any]], Result]:
    """(the eight with their verdicts, the one row of the window)."""
    with Session(events, contract, contract_name=name, window=WINDOW) as session:
        return session.run("requests").rows, session.run("goodput")


@app.command()
def lab(
    relax: str | None = typer.Option(
        None, metavar="LIMIT=VALUE", help="Change one limit, for example itl_max=80ms: ttft, itl_max."
    ),
    requests: bool = typer.Option(False, "--requests", help="Print the eight requests with their verdicts as rows."),
    events: Path = typer.Option(None, help="Keep the records in this directory (new or empty) to query them later."),
    format: str = FORMAT,
) -> None:
    """Eight requests that can be judged by hand: the first token within 300 ms, no gap above 30 ms.

    They are written as journal records, compacted to Parquet and judged with SQL, as any recording is.

    \b
    sloscope lab                            the verdicts and the summary
    sloscope lab --relax itl_max=80ms       what a looser gap would give
    sloscope lab --format json              the summary as one row
    sloscope lab --events lab               keeps the records, and prints the query that judges the same window
    """
    contract, name = relaxed(contracts.preset("exercise"), "exercise", relax)
    with ExitStack() as stack:
        if events is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sloscope-lab-")))
        else:
            directory = events
            if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
                raise ConfigError(f"--events: {str(directory)!r} is not empty; accepted: a new or empty directory")
        write_journal(directory)
        (directory / "contract.toml").write_text(contracts.preset_text("exercise"), encoding="utf-8")
        verdicts, result = judge(directory, contract, name)
    summary = {column: result.rows[0][column] for column in SUMMARY}
    if requests:
        print_rows(verdicts, format)
    elif format != "table":
        print_rows([summary], format)
    else:
        _explain(verdicts, summary, contract)
    message(result.meta.line())
    if events is not None:
        # Without it a query takes the seconds in which requests arrived, 0 to 15, and its rates differ from these.
        window = f"{result.meta.window_start}..{result.meta.window_end}"
        asked = ["--events", str(events), "--window", window, *(["--relax", relax] if relax else [])]
        message(f"records kept; ask them with: sloscope query goodput {shlex.join(asked)}")


def _explain(verdicts: list[dict[str, Any]], summary: dict[str, Any], contract: contracts.Contract) -> None:
    rows = [
        {
            "request": row["external_id"],
            "TTFT ms": row["ttft_s"] * 1e3,
            "largest gap ms": row["itl_max_s"] * 1e3,
            "tokens": row["output_tokens"],
            "end": row["outcome"] + (f" ({row['reason']})" if row["reason"] else ""),
            "verdict": "qualified" if row["qualified"] else f"missed: {row['misses']}",
        }
        for row in verdicts
    ]
    limits = contract.classes[contract.default_class].limits.declared()
    title = ", ".join(f"{name} <= {format_ns(ns)}" for name, ns in limits.items())
    print_rows(rows, title=title)
    print_rows([{"": name, "value": value} for name, value in summary.items()], title="the window of 20 s")
