"""docs/architecture.md names everything that a question may select from."""

import re
from pathlib import Path

from queries import tables
from queries.runner import HERE, base_views

PAGE = (HERE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
_, _, QUESTIONS = PAGE.partition("## Questions")


def variables() -> set[str]:
    """Every variable that some view reads."""
    read = {name for path in sorted(HERE.glob("*/*.sql")) for name in _read(path)}
    assert len(read) > 5
    return read


def _read(path: Path) -> list[str]:
    return re.findall(r"getvariable\('(\w+)'\)", path.read_text(encoding="utf-8"))


def macros() -> list[str]:
    return re.findall(r"create macro (\w+)\(", (HERE / "functions.sql").read_text(encoding="utf-8"))


def missing(names: set[str], text: str) -> list[str]:
    return sorted(name for name in names if not re.search(rf"\b{name}\b", text))


def test_every_base_view_variable_and_macro_is_named() -> None:
    assert missing({view.name for view in base_views()}, QUESTIONS) == []
    assert missing(variables(), QUESTIONS) == []
    assert missing(set(macros()), QUESTIONS) == []


def test_every_column_of_every_table_is_named() -> None:
    for table in tables.TABLES:
        assert missing({table}, PAGE) == []
    of_each_observer = {column.name for column in tables.OBSERVER_COLUMNS}
    assert missing({f"O_{name}" for name in of_each_observer}, PAGE) == []
    of_one = {f"{o}_{name}" for o in ("client", "sidecar", "engine") for name in of_each_observer}
    for table in ("requests", "chunks", "late_gaps", "steps", "step_requests", "states", "engines"):
        assert missing({column.name for column in tables.columns(table)} - of_one, PAGE) == [], table
