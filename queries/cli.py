"""`sloscope query`, `compact`, `compare` and `sql`."""

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from queries.options import CONTRACT, EVENTS, FORMAT, GOODPUT, OBSERVER, RELAX, WINDOW, find_contract, relaxed
from queries.runner import Meta, Result, Session, list_questions, question
from sloscope.errors import CompareError, ConfigError, QueryError
from sloscope.journal import Manifest
from sloscope.output import check_format, message, plain, print_rows
from sloscope.units import parse_window

query_app = typer.Typer(add_completion=False)
compact_app = typer.Typer(add_completion=False)
compare_app = typer.Typer(add_completion=False)
sql_app = typer.Typer(add_completion=False)

SAME_RULES = ("contract_hash", "observer", "window_rule", "quantile_method", "question")


def open_session(
    events: Path,
    contract_file: Path | None,
    goodput: str | None,
    relax: str | None = None,
    observer: str | None = None,
    window: str | None = None,
    preset: str | None = None,
) -> Session:
    """`preset`: the contract to take, said on stderr, where none was given and none lies with the events."""
    contract, name = relaxed(*find_contract(_recorded(events), contract_file, goodput, preset), relax)
    session = Session(
        events,
        contract,
        contract_name=name,
        every_class=goodput is not None,
        observer=observer,
        window=None if window is None else parse_window(window, "--window"),
    )
    if session.note:
        message(session.note)
    return session


def _recorded(events: Path) -> Path:
    """The directory, unless it is somebody else's: compaction would leave its files there."""
    if not events.is_dir():
        raise QueryError(f"--events: {str(events)!r} is not a directory")
    if not (events / "journal").exists() and not Manifest.path(events).exists():
        raise QueryError(
            f"--events: {str(events)!r} holds no records; accepted: a directory that a recorder was given with --events"
        )
    return events


def print_result(result: Result, format: str) -> None:
    """Rows to stdout; under which rules they were made to stderr."""
    print_rows(result.rows, format, result.columns)
    message(result.meta.line())


def _who_recorded(session: Session) -> None:
    """Says so where the observer that is asked recorded nothing and another one did."""
    by = session.observed_by()
    others = [each for each, count in by.items() if count and not by[session.observer]]
    if others:
        message(
            f"no request has a record by the {session.observer}, so all are unobserved; try --observer "
            f"{' or '.join(others)}, who recorded some"
        )


def _params(given: list[str]) -> dict[str, str]:
    params: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param: {item!r} is not accepted; accepted: NAME=VALUE")
        if name in params:
            raise ConfigError(f"--param: {name!r} is given twice")
        params[name] = value
    return params


def _help(name: str, format: str) -> None:
    header = question(name)
    message(f"{header.question}\none row: {header.grain}\nrules: {header.rules}")
    if header.source:
        message(f"source: {header.source}")
    for param in header.params.values():
        message(f"  --param {param.describe()} {param.remark}".rstrip())
    print_rows([{"output": o.name, "type": o.type, "unit": o.unit, "says": o.remark} for o in header.outputs], format)


@query_app.command()
def query(
    name: str = typer.Argument("", metavar="NAME", help="The question; --list prints them."),
    list_: bool = typer.Option(False, "--list", help="List every question and leave."),
    describe: bool = typer.Option(False, "--describe", help="Print what a question takes and gives, and leave."),
    events: Path = typer.Option(None, "--events", metavar="DIR", help="Events directory."),
    contract: Path = CONTRACT,
    goodput: str | None = GOODPUT,
    window: str | None = WINDOW,
    observer: str = OBSERVER,
    param: list[str] = typer.Option([], "--param", metavar="K=V", help="A parameter of the question; repeatable."),
    relax: str | None = RELAX,
    columns: str = typer.Option("", "--columns", metavar="A,B", help="Print only these, in this order."),
    save: Path = typer.Option(None, "--save", metavar="FILE", help="Also keep rows and rules as JSON, for compare."),
    format: str = FORMAT,
) -> None:
    """Answer one question with SQL. What is new in the journal is compacted first.

    \b
    sloscope query --list
    sloscope query quantiles --describe
    sloscope query goodput --events run1 --contract slo.toml
    sloscope query goodput_over_time --events run1 --window 2026-01-31T12:00+10m --param bucket_s=30
    sloscope query step_work --events run1 --columns step_kind,batch_to,steps,achieved_share,binds
    sloscope query misses_by_obligation --events run1 --goodput 'ttft:300 itl_max:30' --format json
    """
    check_format(format)
    if list_:
        print_rows(list_questions(), format)
        return
    if not name:
        raise ConfigError("NAME: no question is given; accepted: one of those that --list prints")
    if describe:
        _help(name, format)
        return
    header = question(name)
    values = header.values(_params(param))
    chosen = _columns(columns, [output.name for output in header.outputs])
    if events is None:
        raise ConfigError("--events: is missing; accepted: an events directory")
    with open_session(events, contract, goodput, relax, observer, window) as session:
        result = session.run(name, values)
        _who_recorded(session)
    if save is not None:
        try:
            save.write_text(_saved(result), encoding="utf-8")
        except OSError as why:
            raise ConfigError(f"--save: {str(save)!r} cannot be written: {why.strerror}") from None
    print_result(replace(result, columns=chosen), format)


def _columns(text: str, known: list[str]) -> list[str]:
    """The columns of the answer that are named; all, where none is."""
    chosen = [name.strip() for name in text.split(",")] if text else known
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--columns: {name!r} is not accepted; accepted: {', '.join(known)}")
    return chosen


def _saved(result: Result) -> str:
    rows = [{name: plain(value) for name, value in row.items()} for row in result.rows]
    return json.dumps({"meta": result.meta.as_row(), "rows": rows}, indent=1) + "\n"


@sql_app.command()
def sql(
    text: str = typer.Argument(..., metavar="SELECT", help="One SELECT statement over the views."),
    events: Path = EVENTS,
    contract: Path = CONTRACT,
    goodput: str | None = GOODPUT,
    window: str | None = WINDOW,
    observer: str = OBSERVER,
    max_rows: int = typer.Option(10_000, "--max-rows", min=1, help="Rows printed at most."),
    timeout: float = typer.Option(300.0, "--timeout", min=0.1, help="Seconds until the query is stopped."),
    format: str = FORMAT,
) -> None:
    """Your own SQL, read-only. Views: requests, chunks, late_gaps, steps, step_requests, states, decisions;
    observed_requests and cohort, which add the observer's columns and the verdict. Without any contract the verdict is
    that of the preset exercise.

    \b
    sloscope sql "select class, count(*) as n from cohort group by class order by class" --events run1
    sloscope sql "describe cohort" --events run1 --goodput 'ttft:300'
    """
    check_format(format)
    with open_session(events, contract, goodput, None, observer, window, preset="exercise") as session:
        result = session.sql(text, max_rows=max_rows, timeout_s=timeout)
    print_result(result, format)
    if result.truncated:
        message(f"only the first {max_rows} rows are shown; --max-rows raises the limit")


@compact_app.command()
def compact(events: Path = EVENTS, format: str = FORMAT) -> None:
    """Turn what is new in the journal into Parquet tables. Queries do this themselves; safe at any time.

    Requests that ended in the last two seconds or are still open (`requests_pending`) count in every answer, and are
    written for good by a later pass.

    \b
    sloscope compact --events run1
    """
    from queries.compaction import compact as run_compaction  # pyarrow is loaded only when it is needed

    check_format(format)
    report = run_compaction(_recorded(events))
    print_rows([{name: value for name, value in asdict(report).items() if name != "problems"}], format)
    for problem in report.problems:
        message(f"skipped: {problem}")


@compare_app.command()
def compare(
    a: Path = typer.Argument(..., metavar="A", help="Events directory, or a result kept with query --save."),
    b: Path = typer.Argument(..., metavar="B", help="The same kind of thing."),
    name: str = typer.Option("goodput", "--question", help="What is asked of two directories."),
    contract: Path = typer.Option(None, "--contract", metavar="FILE", help="For both; default: each one's own."),
    goodput: str | None = GOODPUT,
    observer: str = OBSERVER,
    param: list[str] = typer.Option([], "--param", metavar="K=V", help="A parameter of the question; repeatable."),
    format: str = FORMAT,
) -> None:
    """Two recordings side by side, one row a column. Refused when contract, observer, window rule or quantile method
    differ: such numbers say nothing about each other.

    \b
    sloscope compare before after
    sloscope compare before.json after.json        results of: sloscope query … --save FILE
    """
    check_format(format)
    if a.is_dir() != b.is_dir():
        raise CompareError(f"{a} and {b}: one is a directory, the other is not; accepted: two of the same kind")
    with ExitStack() as stack:
        if a.is_dir():
            sessions = [stack.enter_context(open_session(path, contract, goodput, None, observer)) for path in (a, b)]
            # Before the work on the data: a refusal should not need a long wait.
            refuse_unlike(sessions[0].meta(name), sessions[1].meta(name), str(a), str(b))
            results = [session.run(name, _params(param)) for session in sessions]
            sides = [(result.meta, result.rows) for result in results]
        else:
            sides = [_load(path) for path in (a, b)]
    (meta_a, rows_a), (meta_b, rows_b) = sides
    refuse_unlike(meta_a, meta_b, str(a), str(b))
    print_rows(side_by_side(rows_a, rows_b), format, ["row", "column", "a", "b", "difference"])
    message(f"a: {meta_a.line()}")
    message(f"b: {meta_b.line()}")


def _load(path: Path) -> tuple[Meta, list[dict[str, Any]]]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return Meta(**saved["meta"]), list(saved["rows"])
    except OSError as error:
        raise CompareError(f"{str(path)!r}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CompareError(f"{str(path)!r}: is no saved result; accepted: a file written by query --save") from None


def refuse_unlike(a: Meta, b: Meta, name_a: str, name_b: str) -> None:
    """CompareError that names the first rule under which the two differ."""
    for field in SAME_RULES:
        left, right = getattr(a, field), getattr(b, field)
        if left != right:
            raise CompareError(
                f"{field}: {name_a} has {left!r}, {name_b} has {right!r}; accepted: results made under the same rules"
            )


def side_by_side(rows_a: list[dict[str, Any]], rows_b: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each row and column; rows pair by position, which is the order of the question."""
    lines = []
    for number in range(max(len(rows_a), len(rows_b))):
        left = rows_a[number] if number < len(rows_a) else {}
        right = rows_b[number] if number < len(rows_b) else {}
        for column in left or right:
            x, y = left.get(column), right.get(column)
            both = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (x, y))
            lines.append(
                {"row": number + 1, "column": column, "a": x, "b": y, "difference": y - x if both else None}  # type: ignore[operator]
            )
    return lines
