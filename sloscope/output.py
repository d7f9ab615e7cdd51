"""Rows to stdout as a table, JSON or CSV; messages to stderr."""

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sloscope.errors import ConfigError

FORMATS = ("table", "json", "csv")
UPRIGHT_ABOVE = 8  # columns
_PIPED_WIDTH = 1000  # where nobody's screen is to be fitted into
_WALL_ABOVE_S = 1e8  # what is said to be at such a second is on the wall clock
FORMAT_HELP = "How rows are printed: table, json (a list of objects) or csv."

Row = Mapping[str, Any]


def message(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)


def check_format(format: str) -> str:
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} is not accepted; accepted: {', '.join(FORMATS)}")
    return format


def print_rows(
    rows: Iterable[Row], format: str = "table", columns: Sequence[str] | None = None, title: str = ""
) -> None:
    """Prints rows; `columns` keeps the header when there are none. NULL is empty in CSV and tables, null in JSON."""
    rows = list(rows)
    columns = list(columns if columns is not None else (rows[0].keys() if rows else ()))
    if check_format(format) == "json":
        print(json.dumps([{name: plain(row.get(name)) for name in columns} for row in rows], indent=1))  # noqa: T201
    elif format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([["" if (v := plain(row.get(name))) is None else v for name in columns] for row in rows])
    else:
        _print_table(rows, columns, title)


def _print_table(rows: Sequence[Row], columns: Sequence[str], title: str) -> None:
    """Rows that do not fit into a terminal stand upright, a line per column; elsewhere a line is as long as it is."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, width=None if is_terminal else _PIPED_WIDTH)
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name in columns:
        numeric = any(isinstance(row.get(name), (int, float)) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in columns))
    width = Measurement.get(console, console.options.update(max_width=_PIPED_WIDTH), table).maximum
    is_wide = len(columns) > UPRIGHT_ABOVE
    if is_wide and (len(rows) == 1 or (is_terminal and width > console.width and rows)):
        table = _upright(rows, columns, title)
    elif not is_terminal:
        console.width = max(width, len(title))
    console.print(table)
    if not rows:
        console.print("(no rows)")


def _upright(rows: Sequence[Row], columns: Sequence[str], title: str) -> Table:
    table = Table(title=title or None, title_justify="left", header_style="bold")
    table.add_column("", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for row in rows:
        for name in columns:
            table.add_row(name, _cell(name, row.get(name)), end_section=name == columns[-1])
    return table


def _cell(name: str, value: Any) -> str:
    value = plain(value)
    if name.endswith("_at_s") and isinstance(value, float) and value > _WALL_ABOVE_S:
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def plain(value: Any) -> Any:
    """A JSON value. NaN and infinity are no JSON: NaN becomes null, infinity the text "inf"."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return value
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)
