"""The YAML cases of a question: `tests/queries/<topic>/<question>.yaml`.

    defaults:                     # of every case; optional
      goodput: 'ttft:300 itl_max:30'
      window_s: [0, 20]
    cases:
      - name: what the case claims
        contract: |               # TOML; or `goodput: '…'` (milliseconds); default: the exercise contract
        observer: sidecar         # default: the contract's
        window_s: [0, 20]         # wall seconds since the epoch, end excluded
        params: {bucket_s: 10}
        given:
          requests:               # table → rows, only the columns that matter
            - {id: A, arrival_s: 2, client: {ttft_ms: 180, itl_max_ms: 24, tokens: 40, outcome: completed}}
        expect:                   # rows in order, only the columns that matter; floats at 1e-9
          - {offered: 1, attainment: 1.0}

Shorthand in given rows, all tables: a key that ends in `_s` (but no rate, `_per_s`) or `_ms` is the column ending in
`_ns`, as whole ns. In
`requests` and `chunks`: `id` is request_id, `arrival_s` is arrival_at_ns, and a mapping `client`, `sidecar` or `engine`
holds that observer's columns without prefix. In it:
- the observer has observed the request, and arrived when the request did, at stamp 0 unless `start_ms` says otherwise;
- `ttft_ms` and `ttft_visible_ms` are also the worst choice's; `ttft_visible` is as `ttft` unless given;
- `span_ms` defaults to 0 and `span_tokens` to `tokens`; `events` to `tokens`;
- an `outcome` without `end_ms` (stamp) ends the request at its arrival: inside every window. `open` says no outcome.
In `steps`, `step_requests`, `states` and `decisions` a clock has one engine unless `engine_id` says otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from queries import tables
from queries.runner import Result, Session, Window
from sloscope import contract as contracts
from sloscope.records import OBSERVERS
from sloscope.units import NS_PER_S

HERE = Path(__file__).parent
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built
_in_use = False
KEYS = {"name", "contract", "goodput", "observer", "window_s", "params", "given", "expect"}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(question, case) of every file."""
    for path in sorted(HERE.glob("*/*.yaml")):
        document = yaml.load(path.read_text(encoding="utf-8"), Loader)
        for case in document["cases"]:
            merged = document.get("defaults", {}) | case
            assert merged.keys() <= KEYS, f"{path}: {merged.keys() - KEYS} is no key of a case"
            yield path.stem, merged


def contract_of(case: Mapping[str, Any]) -> contracts.Contract:
    if "contract" in case:
        return contracts.parse(case["contract"])
    if "goodput" in case:
        return contracts.from_shorthand(case["goodput"])
    return contracts.preset("exercise")


@cache
def _shared() -> Session:
    return Session.from_rows({}, contracts.preset("exercise"), window=(0, 1))


@contextmanager
def session_over(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    contract: contracts.Contract,
    *,
    observer: str | None = None,
    window: Window | None = None,
    every_class: bool = False,
) -> Iterator[Session]:
    """What `Session.from_rows` gives, over one set of views for the whole process, which DuckDB takes ten times as long
    to make as tables to fill. One at a time."""
    global _in_use
    assert not _in_use, "the rows of another session would go"
    session = _shared()
    execute = session._connection.execute
    session.contract, session.observer = contract, observer or contract.observer
    session.every_class, session._given_window = every_class, window
    execute("drop table run_classes; drop table run_budget")
    session._register_contract()
    for table in tables.TABLES:
        execute(f"delete from {table}")
    for table, given in rows.items():
        if given:
            columns = list(dict.fromkeys(column for row in given for column in row))
            marks = ", ".join([f"({', '.join('?' * len(columns))})"] * len(given))
            names = ", ".join(f'"{column}"' for column in columns)
            values = [row.get(column) for row in given for column in columns]
            execute(f"insert into {table} ({names}) values {marks}", values)
    session._set_window(window)
    _in_use = True
    try:
        yield session
    finally:
        _in_use = False


@contextmanager
def held(session: Session, view: str) -> Iterator[None]:
    """The view's rows as they are now, for many questions about them: to plan a view anew takes a tenth of a second."""
    execute = session._connection.execute
    session._create_views([view])
    execute(f"create table {view}_held as from {view}")
    execute(f"create or replace view {view} as from {view}_held")
    try:
        yield
    finally:
        execute(f"drop view {view}; drop table {view}_held")
        session._created.discard(view)


@contextmanager
def session_of(case: Mapping[str, Any]) -> Iterator[Session]:
    window = case.get("window_s")
    with session_over(
        {table: [expand(table, row) for row in rows or []] for table, rows in (case.get("given") or {}).items()},
        contract_of(case),
        observer=case.get("observer"),
        window=(_ns(window[0], NS_PER_S), _ns(window[1], NS_PER_S)) if window else None,
    ) as session:
        yield session


def answer(question: str, case: Mapping[str, Any]) -> Result:
    with session_of(case) as session:
        return session.run(question, **case.get("params", {}))


def expand(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as written to a row of the table."""
    given = _nanoseconds(row)
    result: dict[str, Any] = {}
    if "id" in given:
        given["request_id"] = given.pop("id")
    if table == "requests":
        given["arrival_at_ns"] = given.pop("arrival_ns", given.get("arrival_at_ns", 0))
        result = {"streaming": True, "warmup": False, "length_forced": False, "n_choices": 1}
        result |= {f"{observer}_observed": False for observer in OBSERVERS}
    for observer in OBSERVERS:
        side = given.pop(observer, None)
        if side is not None:
            filled = _observer(_nanoseconds(side), given["arrival_at_ns"]) if table == "requests" else side
            given |= {f"{observer}_{name}": value for name, value in filled.items()}
    if table in tables.PER_EVENT:
        given.setdefault("engine_id", given.get("clock_id"))
    result |= given
    known = {column.name for column in tables.columns(table)}
    assert result.keys() <= known, f"{table}: no column {sorted(result.keys() - known)}"
    return result


def _observer(side: dict[str, Any], arrival_at_ns: int) -> dict[str, Any]:
    filled: dict[str, Any] = {"observed": True, "arrival_at_ns": arrival_at_ns, "start_ns": 0, "reason": ""} | side
    if filled.get("outcome") == "open":
        filled |= {"outcome": None, "reason": None}
    elif "outcome" in filled:
        filled.setdefault("end_ns", filled["start_ns"])
        filled.setdefault("end_at_ns", arrival_at_ns + filled["end_ns"] - filled["start_ns"])
    if "ttft_ns" in side:
        filled.setdefault("ttft_visible_ns", side["ttft_ns"])
        filled.setdefault("span_ns", 0)
        filled.setdefault("e2e_ns", side["ttft_ns"] + filled["span_ns"])
        filled.setdefault("first_ns", filled["start_ns"] + side["ttft_ns"])
    for name in ("ttft", "ttft_visible"):
        if f"{name}_ns" in filled:
            filled.setdefault(f"{name}_worst_ns", filled[f"{name}_ns"])
    if "tokens" in side:
        filled.setdefault("span_tokens", side["tokens"])
        filled.setdefault("events", side["tokens"])
    return filled


def _nanoseconds(row: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in row.items():
        for ending, factor in (("_ms", 1_000_000), ("_s", NS_PER_S)):
            if name.endswith(ending) and not name.endswith("_per_s"):
                value = None if value is None else _ns(value, factor)
                name = name.removesuffix(ending) + "_ns"
                break
        result[name] = value
    return result


def _ns(value: float | int, factor: int) -> int:
    ns = Decimal(str(value)) * factor
    assert ns == int(ns), f"{value} is no whole number of ns"
    return int(ns)
