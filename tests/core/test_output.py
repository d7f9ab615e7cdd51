"""Tables for people: what fits stands in rows, what does not stands upright, and nothing is cut."""

import io
from collections.abc import Sequence
from contextlib import redirect_stdout

import pytest

from sloscope.output import Row, print_rows

WIDE = [{f"a_rather_long_name_{n}": n * row for n in range(12)} for row in (1, 2)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Row]) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no colours
    with redirect_stdout(Terminal()) as terminal:
        print_rows(rows)
    return terminal.getvalue().splitlines()


def test_rows_that_do_not_fit_into_the_terminal_stand_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, WIDE)
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if "a_rather" in line] == [*WIDE[0]] * 2
    assert sum("├" in line for line in lines) == 1, "a line between the rows"


def test_rows_that_fit_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("a" in line and "b" in line for line in on_terminal(monkeypatch, [{"a": 1, "b": 2}]))


def test_a_piped_table_is_as_wide_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert all(name in lines[1] for name in WIDE[0])


def test_one_wide_row_stands_upright_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(WIDE[:1])
    assert sum("a_rather" in line for line in capsys.readouterr().out.splitlines()) == 12


def test_wall_time_reads_as_such_in_a_table_and_stays_a_number_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"held_at_s": 1_796_078_318.25, "gap_at_s": 12.5}]
    print_rows(rows)
    said = capsys.readouterr().out
    assert "2026-11-30T22:38:38.250Z" in said and "12.5" in said
    print_rows(rows, "json")
    assert "1796078318.25" in capsys.readouterr().out
