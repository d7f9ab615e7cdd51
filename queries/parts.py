"""The Parquet files of an events directory: written beside, renamed, and named by the manifest.

A part is one file per table with the rows of the same requests: `tables/<table>/arrival_date=…/g<pass>-<n>.parquet`.
Files that the manifest does not name are leftovers; those that it named last stay for one more pass, for readers that
still hold the manifest before.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from queries import tables
from queries.assemble import arrow_schema
from sloscope.errors import UnwritableError
from sloscope.journal import Manifest

ROW_GROUP = 65_536
SMALL_ROWS = 50_000
MANY_SMALL = 16
WRITERS = 2
# What a pass writes below `tables`, a name that was not renamed yet included. Nothing else is ours to delete.
_OURS = re.compile(
    rf"(?:{'|'.join(tables.PER_REQUEST + tables.PER_EVENT)})/arrival_date=[0-9-]+/"
    r"\.?g[0-9]{8,}-[0-9]+(?:-open)?\.parquet(?:\.tmp)?"
    r"|\.?pending-g[0-9]{8,}\.jsonl(?:\.[0-9]+\.tmp)?"
)


@dataclass(frozen=True, slots=True)
class Part:
    """`name` is the path below the table's folder; `low` and `high` bound its request ids."""

    name: str
    low: str
    high: str
    rows: int


def write_parquet(path: Path, table: str, rows: pa.Table) -> None:
    """Integers as differences, of which few of the 64 bits remain.

    Not so the stamps of streams that stand one after another: each begins before the one before it ended, and that one
    large step backwards widens every difference of its block. Their bytes are split by place instead, so that the
    upper ones compress to almost nothing.
    """
    columns = tables.stored(table)
    split = [f"{c.name}.list.element" for c in columns if c.type == "BIGINT[]"]
    split += ["at_0_ns"] if table == "late_gaps" else []
    delta = [c.name for c in columns if c.type == "BIGINT" and c.name not in split]
    dictionary = [c.name for c in columns if c.type == "VARCHAR" and c.name != "request_id"]
    dictionary += [f"{c.name}.list.element" for c in columns if c.type in ("INTEGER[]", "TINYINT[]")]
    beside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            rows,
            beside,
            compression="zstd",
            use_dictionary=dictionary,
            column_encoding=dict.fromkeys(delta, "DELTA_BINARY_PACKED") | dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
            row_group_size=ROW_GROUP,
            write_statistics=[c.name for c in columns if not c.type.endswith("[]")],
        )
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UnwritableError(f"{str(path)!r}: cannot be written: {error.strerror or error}") from None


class Parts:
    """The final files, and what becomes of them in one pass."""

    def __init__(self, events: Path, manifest: Manifest) -> None:
        self._events = events
        self._root = events / "tables"
        self._generation = manifest.generation + 1
        self._number = 0
        self.final = [Part(**part) for part in manifest.state.get("parts", [])]
        self._gone: dict[Part, set[str]] = {}
        self.appended = {table: list(manifest.tables.get(table, [])) for table in tables.PER_EVENT}
        self.open: list[str] = []  # provisional names

    def _name(self, day: date, suffix: str = "") -> str:
        self._number += 1
        return f"arrival_date={day.isoformat()}/g{self._generation:08d}-{self._number}{suffix}.parquet"

    def write(self, day: date, rows: Iterable[tuple[str, pa.Table]]) -> None:
        """Each table of a part is written while the next one is made."""
        self.final.append(self._write(self._name(day), rows))

    def _write(self, name: str, rows: Iterable[tuple[str, pa.Table]]) -> Part:
        # Encoding and zstd are most of it, and leave the interpreter free.
        written = []
        with ThreadPoolExecutor(WRITERS) as pool:
            for table, made in rows:
                written.append(pool.submit(write_parquet, self._root / table / name, table, made))
                if table == "requests":
                    ids = made["request_id"]
        for each in written:
            each.result()
        assert len(written) == len(tables.PER_REQUEST), "a part has every table"
        bounds = pc.min_max(ids).as_py()
        return Part(name, bounds["min"], bounds["max"], len(ids))

    def write_open(self, day: date, rows: Iterable[tuple[str, pa.Table]]) -> None:
        """Rows that the next pass replaces."""
        name = self._name(day, "-open")
        for table, made in rows:
            if table != "sources":
                write_parquet(self._root / table / name, table, made)
        self.open.append(name)

    def append(self, table: str, day: date, rows: pa.Table) -> None:
        path = self._root / table / self._name(day)
        write_parquet(path, table, rows)
        self.appended[table].append(str(path.relative_to(self._events)))

    def find(self, ids: set[str]) -> dict[str, list[tuple[str, list[tuple[int, int, int]]]]]:
        """Those of the requests that have a final row, with the journal lines it was made from; the row is dropped."""
        found: dict[str, list[tuple[str, list[tuple[int, int, int]]]]] = {}
        if not ids:
            return found
        low, high = min(ids), max(ids)
        for part in self.final:
            if part.high < low or part.low > high:
                continue
            wanted = {each for each in ids if part.low <= each <= part.high} - self._gone.get(part, set())
            if not wanted:
                continue
            path = self._root / "requests" / part.name
            column = pq.ParquetFile(path).read(columns=["request_id"])["request_id"]
            hits = set(column.filter(pc.is_in(column, pa.array(sorted(wanted)))).to_pylist())
            if not hits:
                continue
            self._gone.setdefault(part, set()).update(hits)
            for row in self._read("sources", part, hits).to_pylist():
                spans = list(zip(row["starts"], row["ends"], row["wall_offsets"], strict=True))
                found.setdefault(row["request_id"], []).append((row["journal"], spans))
        return found

    def _read(self, table: str, part: Part, only: set[str] | None = None) -> pa.Table:
        rows = pq.ParquetFile(self._root / table / part.name).read().cast(arrow_schema(table))
        if only is None:
            return rows
        return rows.filter(pc.is_in(rows["request_id"], pa.array(sorted(only))))

    def settle(self) -> None:
        """Remakes the parts that lost rows, and joins small ones."""
        for part, gone in self._gone.items():
            self.final.remove(part)
            if part.rows == len(gone):
                continue
            rows = {}
            for table in tables.PER_REQUEST:
                whole = self._read(table, part)
                rows[table] = whole.filter(pc.invert(pc.is_in(whole["request_id"], pa.array(sorted(gone)))))
            self.final.append(self._write(self._name(_day(part.name)), rows.items()))
        self._gone = {}
        self._join_small()

    def _join_small(self) -> None:
        by_day: dict[date, list[Part]] = {}
        for part in self.final:
            if part.rows < SMALL_ROWS:
                by_day.setdefault(_day(part.name), []).append(part)
        for day, small in by_day.items():
            if len(small) < MANY_SMALL:
                continue
            rows = {t: pa.concat_tables([self._read(t, part) for part in small]) for t in tables.PER_REQUEST}
            self.final = [part for part in self.final if part not in small]
            self.final.append(self._write(self._name(day), rows.items()))
        for table, names in self.appended.items():
            self._join_small_files(table, names)

    def _join_small_files(self, table: str, names: list[str]) -> None:
        by_folder: dict[str, list[str]] = {}
        for name in names:
            if (self._events / name).stat().st_size < 1 << 20:
                by_folder.setdefault(str(Path(name).parent), []).append(name)
        for folder, small in by_folder.items():
            if len(small) < MANY_SMALL:
                continue
            joined = pa.concat_tables([pq.ParquetFile(self._events / name).read() for name in small])
            for name in small:
                names.remove(name)
            self.append(table, _day(f"{Path(folder).name}/"), joined.cast(arrow_schema(table)))

    def listed(self) -> dict[str, list[str]]:
        """What the manifest says: table → live files."""
        names = [part.name for part in self.final] + self.open
        shown = {table: [f"tables/{table}/{name}" for name in names] for table in tables.PER_REQUEST}
        del shown["sources"]
        return shown | self.appended

    def noted(self) -> list[dict]:
        return [asdict(part) for part in self.final]


def _day(name: str) -> date:
    return date.fromisoformat(name.partition("/")[0].removeprefix("arrival_date="))


def live_files(manifest: Manifest) -> set[str]:
    """Every file that this manifest needs, relative to the events directory."""
    named = {name for names in manifest.tables.values() for name in names}
    named |= {f"tables/sources/{part['name']}" for part in manifest.state.get("parts", [])}
    if manifest.state.get("pending"):
        named.add(manifest.state["pending"])
    return named


def remove_leftovers(events: Path, kept: Iterable[str]) -> None:
    """Deletes what no manifest names: a pass that was killed, and files that were replaced two passes ago.

    Only names that a pass gives: whatever else somebody keeps in `tables` stays.
    """
    keep = set(kept)
    for path in _our_files(events / "tables"):
        if str(path.relative_to(events)) not in keep:
            path.unlink(missing_ok=True)


def _our_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if _OURS.fullmatch(path.relative_to(folder).as_posix()) and path.is_file():
            yield path
