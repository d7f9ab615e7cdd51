"""Options of `sloscope sidecar` that are refused, in one line and before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.cli import link_engines
from exporter.settings import HOPS, check_role
from sloscope.clock import FakeClock
from sloscope.errors import ConfigError
from sloscope.journal import JournalWriter, journal_files
from sloscope.records import ROLES
from tests.command import sloscope

TWO = ("--upstream", "http://127.0.0.1:9", "--upstream", "http://127.0.0.1:10")


def refused(events: Path, *options: str) -> str:
    good = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--goodput", "ttft:300", "--events", str(events))
    done = sloscope("sidecar", *good, *options)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_hop_has_one_of_the_records_roles() -> None:
    assert [check_role(role) for role in HOPS] == [role for role in ROLES if role not in ("client", "server")]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--balance", "luck"), "error: --balance: 'luck' is not accepted; accepted: tokens, requests"),
        (("--role", "client"), "error: --role: 'client' is not accepted; accepted: gateway, router, sidecar"),
        (("--role", "server"), "error: --role: 'server' is not accepted; accepted: gateway, router, sidecar"),
        (("--role", "Sidecar"), "error: --role: 'Sidecar' is not accepted; accepted: gateway, router, sidecar"),
        (
            ("--hedge-after", "p95x"),
            "error: --hedge-after: 'p95x' is not accepted; accepted: p50 to p99, or a duration",
        ),
        (("--hedge-max-share", "0"), "error: --hedge-max-share: 0 is not accepted; accepted: above 0, at most 1"),
        (("--hedge-max-share", "1.01"), "error: --hedge-max-share: 1.01 is not accepted"),
        (("--hedge-max-share", "nan"), "error: --hedge-max-share: nan is not accepted"),
        (
            ("--upstream", "http://127.0.0.1:9/"),
            "error: --upstream: 'http://127.0.0.1:9/' is given twice; accepted: each upstream once",
        ),
        (
            ("--sql-window", "all"),
            "error: --sql-window: 'all' is not a duration; accepted: a number with ns, us, ms, s, m, h or d; or 0",
        ),
        (
            ("--sql-every", "0s"),
            "error: --sql-every: '0s' must be above zero and a whole number of nanoseconds; or off",
        ),
        (("--receipts-rate", "0"), "error: --receipts-rate: 0 is not accepted; accepted: 1 to 1000000"),
        (("--receipts-burst", "0"), "error: --receipts-burst: 0 is not accepted; accepted: 1 to 10000000"),
        (
            ("--receipts-max-bytes", "1000"),
            "error: --receipts-max-bytes: 1000 is not accepted; accepted: 1024 to 1073741824",
        ),
        (("--engine-events", "/nowhere"), "error: --engine-events: '/nowhere' is no directory; accepted: an events"),
    ],
)
def test_a_bad_option_is_one_line(tmp_path: Path, options: tuple[str, str], line: str) -> None:
    assert refused(tmp_path / "events", *TWO, *options).startswith(line)
    assert journal_files(tmp_path / "events") == []


def test_hedging_needs_somebody_else_to_ask(tmp_path: Path) -> None:
    said = refused(tmp_path / "events", *TWO[:2], "--hedge-after", "p95")
    assert said == "error: --hedge-after: 'p95' needs a second --upstream to ask"


def test_engine_records_of_two_places_are_not_mixed(tmp_path: Path) -> None:
    events, engine = tmp_path / "events", tmp_path / "engine"
    engine.mkdir()
    with JournalWriter(events, "engine", FakeClock()):
        pass
    said = refused(events, *TWO, "--engine-events", str(engine))
    assert "records of an engine stand there already" in said
    assert len(journal_files(events)) == 1
    assert "is --events, which needs no second name" in refused(events, *TWO, "--engine-events", str(events))


def test_an_engines_journal_is_joined_once_and_read_from_then_on(tmp_path: Path) -> None:
    events, engine, other = tmp_path / "events", tmp_path / "engine", tmp_path / "other"
    (events / "journal" / "engine").mkdir(parents=True)  # empty, as another start may have left it
    engine.mkdir()
    other.mkdir()
    for _ in range(2):
        link_engines(events, engine)
    with JournalWriter(engine, "engine", FakeClock()) as writer:  # the server starts later
        (found,) = journal_files(events)
        assert found.samefile(writer.path)
    with pytest.raises(ConfigError, match="records of an engine stand there already"):
        link_engines(events, other)
