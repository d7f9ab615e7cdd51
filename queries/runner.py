"""Runs questions: opens an events directory, judges it by a contract, answers with rows.

    with Session(events, contract, window=(start_ns, end_ns)) as session:
        result = session.run("goodput_over_time", bucket_s=10)

A question is a file `<topic>/<name>.sql` whose header (queries.header) is its interface. It selects from base views
(`base/*.sql`), which read the tables of compaction. Nothing that a caller gives becomes SQL: questions are found by
name in a fixed list, params are bound, and after opening DuckDB reaches no file outside the tables.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
from duckdb.sqltypes import BIGINT, BOOLEAN, DOUBLE, VARCHAR

from queries import tables
from queries.header import Header, read_header
from sloscope.contract import LIMIT_NAMES, OBSERVERS, Contract
from sloscope.errors import QueryError, UnwritableError
from sloscope.journal import Manifest
from sloscope.units import NS_PER_S, format_instant, format_ns

HERE = Path(__file__).parent
BASE = "base"
QUANTILE_METHOD = "nearest_rank"
Window = tuple[int, int]  # wall ns, end excluded
# What DuckDB raises when the files are at fault, and not the question.
_UNREADABLE = (duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException)
_AGAIN_S = 0.05
_OUT_OF_RANGE = (duckdb.ConversionException, duckdb.OutOfRangeException)


@dataclass(frozen=True, slots=True)
class Meta:
    """Under which rules a result was made. Two results compare only if the first five of these agree."""

    contract_hash: str
    observer: str
    window_rule: str  # with its limit, such as "drain 10m"
    quantile_method: str
    question: str
    contract: str  # file or preset, and for a sensitivity run the base and what was changed
    window_start: str  # ISO 8601, UTC
    window_end: str  # excluded
    window_start_ns: int
    window_end_ns: int
    window_is: str  # "given", or what was chosen without one

    def line(self) -> str:
        """What is printed with every result."""
        return (
            f"{self.question}: {self.observer} receipts, contract {self.contract} ({self.contract_hash[:12]}), "
            f"window {self.window_start}..{self.window_end} ({self.window_is}), rule {self.window_rule}, "
            f"quantiles {self.quantile_method}"
        )

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Result:
    columns: list[str]
    rows: list[dict[str, Any]]
    meta: Meta
    truncated: bool = False  # the row cap was reached


@cache
def questions() -> Mapping[str, Header]:
    """Every question by name. Two topics never use the same name."""
    found: dict[str, Header] = {}
    for path in sorted(HERE.glob("*/*.sql")):
        if path.parent.name != BASE:
            assert path.stem not in found, f"two questions are called {path.stem}"
            found[path.stem] = read_header(path)
    return found


@cache
def base_views() -> tuple[Header, ...]:
    """The base views, each after the ones that it reads."""
    waiting = {path.stem: read_header(path) for path in sorted((HERE / BASE).glob("*.sql"))}
    ordered: list[Header] = []
    while waiting:
        ready = [view for view in waiting.values() if not any(name in waiting for name in view.inputs)]
        assert ready, f"base views read each other in a circle: {', '.join(waiting)}"
        ordered.extend(waiting.pop(view.name) for view in ready)
    return tuple(ordered)


def list_questions() -> list[dict[str, str]]:
    rows = [{"name": h.name, "topic": h.topic, "question": h.question} for h in questions().values()]
    return sorted(rows, key=lambda row: (row["topic"], row["name"]))


def question(name: str) -> Header:
    header = questions().get(name)
    if header is None:
        raise QueryError(f"question: {str(name)[:60]!r} is unknown; accepted: {', '.join(sorted(questions()))}")
    return header


def bound(header: Header, given: Mapping[str, object]) -> dict[str, Any]:
    """Every param of a question as DuckDB takes it, in the header's type: a bare 10 would be an INTEGER of 32 bits."""
    types = {"bigint": BIGINT, "double": DOUBLE, "varchar": VARCHAR, "boolean": BOOLEAN}
    return {name: duckdb.Value(value, types[header.params[name].type]) for name, value in header.values(given).items()}


class Session:
    """One events directory under one contract, observer and window. Not shared between threads: `run` takes a lock.

    `window` is [start, end) in wall ns. Without one it is every whole second from the first arrival to the last,
    warm-up left out, so that a rate divides by the time in which requests could arrive. `observer` None: the
    contract's own.
    `contract_name` is printed with every result; of a sensitivity run it names the base and what was changed.
    `every_class`: the contract's default class is meant for requests of whatever class, as limits typed on a command
    line are.
    """

    def __init__(
        self,
        events: Path | str,
        contract: Contract,
        *,
        contract_name: str = "contract",
        every_class: bool = False,
        observer: str | None = None,
        window: Window | None = None,
        compact_first: bool = True,
        threads: int = 2,
        memory_limit: str = "2GiB",
    ) -> None:
        self.events = Path(events)
        if not self.events.is_dir():
            raise QueryError(f"events: {str(events)!r} is not a directory")
        self._prepare(contract, contract_name, every_class, observer, window, threads, memory_limit)
        if compact_first:
            self._compact_or_beside()
        self._create_tables(self._table_views())
        self._finish()

    @classmethod
    def from_rows(
        cls,
        rows: Mapping[str, Iterable[Mapping[str, Any]]],
        contract: Contract,
        *,
        observer: str | None = None,
        window: Window | None = None,
        contract_name: str = "contract",
        every_class: bool = False,
    ) -> "Session":
        """A session over rows in memory: table → rows with only the columns that matter; the rest is NULL."""
        session = cls.__new__(cls)
        session.events = Path()
        session._prepare(contract, contract_name, every_class, observer, window, 2, "2GiB")
        session._create_tables({name: tables.empty_sql(name) for name in tables.TABLES}, kind="table")
        for name, given in rows.items():
            for row in given:
                columns = ", ".join(f'"{column}"' for column in row)
                marks = ", ".join("?" for _ in row)
                session._connection.execute(f"insert into {name} ({columns}) values ({marks})", list(row.values()))
        session._finish()
        return session

    def _prepare(
        self,
        contract: Contract,
        contract_name: str,
        every_class: bool,
        observer: str | None,
        window: Window | None,
        threads: int,
        memory_limit: str,
    ) -> None:
        if observer is not None and observer not in OBSERVERS:
            raise QueryError(f"observer: {observer!r} is not accepted; accepted: {', '.join(OBSERVERS)}")
        self.note = ""  # what a person must know of how the records were read
        self._tables_at = self.events
        self._scratch: weakref.finalize | None = None
        self.contract = contract
        self.contract_name = contract_name
        self.every_class = every_class
        self.observer = observer or contract.observer
        self._given_window = window
        self._lock = threading.Lock()
        self._connection = duckdb.connect(
            config={
                "threads": threads,
                "memory_limit": memory_limit,
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            }
        )
        self._connection.execute("set enable_progress_bar = false")  # it would stand on stdout, between the rows

    def _table_views(self) -> dict[str, str]:
        manifest = Manifest.load(self._tables_at)
        return {name: tables.table_sql(manifest, self._tables_at, name) for name in tables.TABLES}

    def _compact_or_beside(self) -> None:
        """Where the directory cannot be written what is new is compacted in a temporary place, which ends with the
        session.
        """
        try:
            _compact(self.events)
        except UnwritableError as error:
            # Imported late, as compaction is.
            from queries.beside import compact_beside

            try:
                scratch = Path(tempfile.mkdtemp(prefix="sloscope-"))
                self._scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
                compact_beside(self.events, scratch)
            except (OSError, UnwritableError) as why:
                raise UnwritableError(f"{error}; nor is there room in a temporary place: {why}") from None
            self._tables_at = scratch
            self.note = f"{error}; what is new was compacted in {tempfile.gettempdir()!r}, for this answer alone"

    def _create_tables(self, sqls: Mapping[str, str], kind: str = "view") -> None:
        for name, sql in sqls.items():
            try:
                self._connection.execute(f"create or replace {kind} {name} as select * from {sql}")
            except _UNREADABLE as error:
                raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> QueryError:
        return QueryError(
            f"events {str(self.events)!r}: a table cannot be read: {_first_line(error)}; accepted: the files that "
            "manifest.json names; without it and `tables` both are made anew from the journal"
        )

    def _finish(self) -> None:
        """Registers the contract, sets the window and closes the door behind it."""
        self._register_contract()
        self._set_window(self._given_window)
        self._connection.execute((HERE / "functions.sql").read_text(encoding="utf-8"))
        self._created: set[str] = set()
        # Both: what stands in a temporary place as a link is opened where it is.
        folders = {"tables": f"{self._tables_at / 'tables'}/", "linked": f"{self.events.resolve() / 'tables'}/"}
        self._connection.execute("set allowed_directories = [$tables, $linked]", folders)
        self._connection.execute("set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")

    def _create_views(self, names: Iterable[str]) -> None:
        """The base views among `names`, and those that they read. All of them would be half of a short question."""
        wanted = set(names)
        for view in reversed(base_views()):
            if view.name in wanted:
                wanted.update(view.inputs)
        for view in base_views():
            if view.name in wanted - self._created:
                self._connection.execute(f"create view {view.name} as {view.sql}")
                self._created.add(view.name)

    def _register_contract(self) -> None:
        execute = self._connection.execute
        limits = ", ".join(f"{name}_ns bigint" for name in LIMIT_NAMES)
        execute(
            f"create table run_classes (class varchar, streaming varchar, {limits}, min_tokens bigint, "
            "objective double, period_ns bigint)"
        )
        for row in self.contract.classes.values():
            values = [getattr(row.limits, f"{name}_ns") for name in LIMIT_NAMES]
            execute(
                f"insert into run_classes values ({', '.join('?' * (len(values) + 5))})",
                [row.name, row.streaming, *values, row.limits.min_tokens, row.objective, row.period_ns],
            )
        execute("create table run_budget (link varchar, limit_ns bigint)")
        for link, ns in self.contract.budget.items():
            execute("insert into run_budget values (?, ?)", [link, ns])
        for name, value in (
            ("observer", self.observer),
            ("window_rule", self.contract.window_rule),
            ("voluntary_rule", self.contract.voluntary),
            ("default_class", self.contract.default_class),
            ("every_class", self.every_class),
        ):
            execute(f"set variable {name} = ?", [value])

    def _set_window(self, window: Window | None) -> None:
        self._window_is = "given"
        self._warmup_from_ns: int | None = None if window is None else window[0]
        if window is None:
            window, self._window_is = self._whole_data()
        if window[1] < window[0]:
            raise QueryError(f"window: ends at {window[1]} ns, before it starts at {window[0]} ns")
        self.window = window
        after = self.contract.drain_limit_ns if self.contract.window_rule == "drain" else self.contract.grace_ns
        for name, value in (
            ("window_start_ns", window[0]),
            ("window_end_ns", window[1]),
            ("cut_ns", window[1] + after),
            ("warmup_from_ns", self._warmup_from_ns),
        ):
            self._connection.execute(f"set variable {name} = ?::bigint", [value])

    def _whole_data(self) -> tuple[Window, str]:
        """From the first arrival to the last, warm-up left out: its time would thin the rates."""
        first, last, first_of_all, last_of_all = self._connection.execute(
            "select min(arrival_at_ns) filter (where not coalesce(warmup, false)), "
            "max(arrival_at_ns) filter (where not coalesce(warmup, false)), min(arrival_at_ns), max(arrival_at_ns) "
            "from requests"
        ).fetchall()[0]
        if first_of_all is None or last_of_all is None:
            return (0, 0), "no requests"
        # The warm-up before the window is still counted.
        self._warmup_from_ns = first_of_all
        if first is None or last is None:
            return (last_of_all + 1, last_of_all + 1), "nothing but warm-up"
        return (first // NS_PER_S * NS_PER_S, (last // NS_PER_S + 1) * NS_PER_S), "all data, whole seconds"

    def refresh(self, window: Window | None = None) -> None:
        """Compacts what is new and moves the window; None keeps the window given at the start, or all data."""
        if self._scratch is not None:
            raise QueryError(f"events {str(self.events)!r}: could not be written at the start; accepted: a new session")
        with self._lock:
            _compact(self.events)
            self._create_tables(self._table_views())
            self._set_window(window if window is not None else self._given_window)

    def observed_by(self) -> dict[str, int]:
        """Observer → requests that it began a record of, in every window."""
        counts = ", ".join(f"count(*) filter ({each}_observed) as {each}" for each in OBSERVERS)
        return self._answer("observed_by", f"select {counts} from requests", [], {}, None, None).rows[0]

    @property
    def _window_rule(self) -> str:
        if self.contract.window_rule == "drain":
            return f"drain {format_ns(self.contract.drain_limit_ns)}"
        return f"unfinished {'0s' if not self.contract.grace_ns else format_ns(self.contract.grace_ns)} after the end"

    def meta(self, question_name: str) -> Meta:
        start, end = self.window
        return Meta(
            contract_hash=self.contract.hash,
            observer=self.observer,
            window_rule=self._window_rule,
            quantile_method=QUANTILE_METHOD,
            question=question_name,
            contract=self.contract_name,
            window_start=format_instant(start),
            window_end=format_instant(end),
            window_start_ns=start,
            window_end_ns=end,
            window_is=self._window_is,
        )

    def run(
        self,
        name: str,
        params: Mapping[str, object] | None = None,
        *,
        max_rows: int | None = None,
        timeout_s: float | None = None,
        **named: object,
    ) -> Result:
        """Answers one question. QueryError: unknown name or param, a value that is not accepted, or out of time."""
        header = question(name)
        values = bound(header, {**(params or {}), **named})
        return self._answer(name, header.sql, header.inputs, values, max_rows, timeout_s)

    def sql(self, text: str, *, max_rows: int | None = None, timeout_s: float | None = None) -> Result:
        """The user's own SQL: one SELECT over the views, which can reach no file and change nothing."""
        try:
            statements = self._connection.extract_statements(text)
        except duckdb.Error as error:
            raise QueryError(f"sql: {_first_line(error)}") from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError(f"sql: {text.strip()[:60]!r} is not accepted; accepted: one SELECT statement")
        return self._answer("sql", text, [view.name for view in base_views()], {}, max_rows, timeout_s)

    def _answer(
        self,
        name: str,
        sql: str,
        inputs: Sequence[str],
        values: Mapping[str, Any],
        max_rows: int | None,
        timeout_s: float | None,
    ) -> Result:
        with self._lock, self._time_limit(name, timeout_s), _ctrl_c_reaches(self._connection):
            try:
                self._create_views(inputs)
                cursor = self._connection.execute(sql, values)
                columns = [column[0] for column in cursor.description]
                found = cursor.fetchall() if max_rows is None else cursor.fetchmany(max_rows + 1)
            except duckdb.InterruptException:
                raise
            except RuntimeError as error:
                # What DuckDB makes of Ctrl-C in the main thread.
                if not isinstance(error, duckdb.Error) and "interrupted" in str(error):
                    raise KeyboardInterrupt from None
                raise
            except duckdb.Error as error:
                # What a view refuses about the data (`error('refused: …')`) is no bug of ours.
                _, refused, why = _first_line(error).partition("refused: ")
                if name != "sql" and not refused and isinstance(error, _UNREADABLE):
                    raise self._unreadable(error) from None
                if name != "sql" and isinstance(error, _OUT_OF_RANGE):
                    text = f"{name}: the records hold a number that has no sum: {_first_line(error)}"
                    raise QueryError(text) from None
                if name != "sql" and not refused:
                    raise
                raise QueryError(f"{name}: {why or _first_line(error)}") from None
        truncated = max_rows is not None and len(found) > max_rows
        rows = [dict(zip(columns, row, strict=True)) for row in (found[:max_rows] if truncated else found)]
        return Result(columns, rows, self.meta(name), truncated)

    @contextmanager
    def _time_limit(self, name: str, timeout_s: float | None) -> Iterator[None]:
        if timeout_s is None:
            yield
            return
        began = time.monotonic()
        over = threading.Event()

        def interrupt() -> None:
            # An interrupt that meets no running statement is lost, and the next statement would run without a limit.
            left_s = timeout_s
            while not over.wait(left_s):
                self._connection.interrupt()
                left_s = _AGAIN_S

        timer = threading.Thread(target=interrupt, daemon=True)
        timer.start()
        try:
            yield
        except duckdb.InterruptException:
            if time.monotonic() - began < timeout_s:
                raise  # someone else's interrupt, such as Ctrl-C
            raise QueryError(f"{name}: took longer than the limit of {timeout_s:g} s") from None
        finally:
            over.set()
            timer.join()

    def close(self) -> None:
        self._connection.close()
        if self._scratch is not None:
            self._scratch()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextmanager
def _ctrl_c_reaches(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Ctrl-C stops the query at once.

    DuckDB's Python client looks for signals between tasks, and one task of a large join can take minutes. The signal's
    wake-up byte is written in any case; a thread that waits for it interrupts the connection.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pressed, over = threading.Event(), threading.Event()

    def wait() -> None:
        while (byte := os.read(reader, 1)) and byte != bytes([signal.SIGINT]):
            pass  # another signal of this process
        if byte:
            pressed.set()
            connection.interrupt()
            while not over.wait(_AGAIN_S):  # as with a time limit: one that meets no statement is lost
                connection.interrupt()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    try:
        yield
    except duckdb.InterruptException:
        if pressed.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the waiter
        waiter.join()
        os.close(reader)


def _compact(events: Path) -> None:
    # Imported late: who reads what is compacted already needs no pyarrow.
    from queries.compaction import compact

    compact(events)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
