"""Helpers of the client's tests: the records of a directory, checked against the schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sloscope.journal import Tail, journal_files, read_journal

Records = dict[str, list[dict[str, Any]]]  # kind → records


@pytest.fixture
def recorded() -> Callable[[Path], Records]:
    def read(events: Path) -> Records:
        result: Records = {"clock": [], "begin": [], "chunks": [], "end": [], "late": []}
        for path in journal_files(events):
            tail = Tail(path)
            for record in read_journal(tail):
                result[record["kind"]].append(record)
            assert not tail.problems and not tail.torn, tail.problems
        return result

    return read
