"""What stands in the journals of an events directory."""

from pathlib import Path

from sloscope.journal import Tail, journal_files, read_journal
from sloscope.records import Record


def journal_of(events: Path, kind: str = "") -> list[Record]:
    """Every record, or those of one kind. A line that is none is a failure."""
    found: list[Record] = []
    for path in journal_files(events):
        tail = Tail(path)
        found += [record for record in read_journal(tail) if kind in ("", record["kind"])]
        assert tail.bad_lines == 0, tail.problems
    return found
