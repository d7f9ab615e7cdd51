"""Habits that a linter does not know."""

import ast
import os
import re
from functools import cache
from pathlib import Path

from sloscope import catalogue

ROOT = Path(__file__).parent.parent.parent
PARTS = ("sloscope", "exporter", "reference_server", "queries", "dashboards")
MAX_LINES = 600
TEXT = {".py", ".sql", ".md", ".toml", ".yaml", ".yml", ".cfg", ""}

# Who may read the wall clock: to place something in a window or to print a time, never for a duration.
WALL = {
    "sloscope/clock.py",  # the one clock of everything that is recorded
    "sloscope/ids.py",  # the time in a ULID
    "sloscope/demo/injection.py",  # when it injected, to be found in the record
    "queries/compaction.py",  # how long ago the last record of a request came
}
# Words that look like metrics.
NOT_METRICS = {"sloscope_stop_reason", "sloscope_last_attempt"}


@cache
def ours() -> tuple[Path, ...]:
    """Every hand-written text file outside hidden folders."""
    found = []
    for folder, below, files in os.walk(ROOT):
        below[:] = [name for name in below if not_hidden(name)]  # a virtual environment alone has 50,000 files
        found += [Path(folder) / name for name in files if not_hidden(name) and Path(name).suffix in TEXT]
    generated = {path for path in found if "generated" in path.parts or ROOT / "docs" / "reference" in path.parents}
    return tuple(sorted(set(found) - generated))


def not_hidden(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__" and not name.endswith(".egg-info")


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    return tuple((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


@cache
def named(tree: ast.Module) -> frozenset[str]:
    """What the code refers to: `time.time`, `print`."""
    return frozenset(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name)))


def test_files_are_short_enough_to_be_read() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in ours()}
    assert len(lengths) > 200
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_the_wall_clock_is_read_only_where_a_wall_time_is_meant() -> None:
    wall = re.compile(r"time\.time(_ns)?|datetime\.(now|utcnow|today)|date\.today")
    readers = {name for name, tree in modules() if any(wall.fullmatch(word) for word in named(tree))}
    assert sorted(readers - WALL) == []
    assert sorted(WALL - readers) == [], "these no longer need to be excepted"


def test_intervals_are_of_the_monotonic_clock() -> None:
    # perf_counter has another zero: its stamps cannot be subtracted from those of the record.
    other = re.compile(r"time\.(perf_counter|process_time|thread_time)(_ns)?|loop\.time")
    readers = {name for name, tree in modules() for word in named(tree) if other.fullmatch(word)}
    # The hop of the demo asks its loop when to let go; it records nothing.
    assert sorted(readers - {"sloscope/demo/hop.py"}) == []


def test_rows_and_messages_are_printed_in_one_place() -> None:
    assert [name for name, tree in modules() if "print" in named(tree) and name != "sloscope/output.py"] == []


def test_a_metric_named_in_the_code_is_in_the_catalogue() -> None:
    known = {metric.name for metric in catalogue.METRICS}
    found: dict[str, str] = {}
    for name, tree in modules():
        if name == "dashboards/rules.py":
            continue  # names what it records; tests/dashboards holds it to the catalogue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {word: name for word in re.findall(r"\bsloscope_[a-z0-9_]*[a-z0-9]\b", node.value)}
    assert len(found.keys() & known) > 30
    # A beginning such as sloscope_sql stands for its family in prose.
    unknown = {word: name for word, name in found.items() if not any(row.startswith(f"{word}_") for row in known)}
    assert {word: name for word, name in unknown.items() if word not in known | NOT_METRICS} == {}


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"TODO|FIXME|XXX|raise NotImplementedError|assert True\b")
    assert found_in_ours(later) == {}


def test_files_speak_of_the_project_and_of_no_machine() -> None:
    lore = re.compile(r"/(work|root)/|/home/(?!sloscope)|helper-\d", re.IGNORECASE)
    assert found_in_ours(lore) == {}


def found_in_ours(pattern: re.Pattern[str]) -> dict[str, str]:
    """File → the first match; this file, which has the patterns, aside."""
    texts = {path: path.read_text(encoding="utf-8") for path in ours() if path != Path(__file__)}
    return {
        path.relative_to(ROOT).as_posix(): match[0] for path, text in texts.items() if (match := pattern.search(text))
    }
