"""Compaction and questions on a file system without a free page."""

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.questions import Questions
from sloscope.clock import FakeClock
from sloscope.contract import from_shorthand
from sloscope.journal import JournalWriter
from tests.command import sloscope
from tests.queries.journal_factory import MS, SECOND, new_id, write_request

pytestmark = pytest.mark.e2e
COMPACTED, REQUESTS = 40, 400


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB of their own. A limit on file sizes is no substitute: it would hold for the answers' own files, too."""
    events = tmp_path / "events"
    events.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(events)]
    mounted = subprocess.run(mount, capture_output=True, check=False, text=True)
    if mounted.returncode:
        why = f"no file system may be mounted here: {mounted.stderr.strip()}"
        if os.environ.get("SLOSCOPE_NO_SKIP"):
            pytest.fail(f"{why}, and nothing may be skipped")
        pytest.skip(why)
    try:
        yield events
    finally:
        subprocess.run(["umount", "-l", str(events)], check=True)


def record(events: Path, numbers: range) -> None:
    """A request a second at client and engine; every tenth has no end, and its recorders are dead."""
    for observer, after in (("client", 3 * MS), ("engine", 0)):
        with JournalWriter(events, observer, FakeClock(mono_ns=numbers.start)) as writer:
            for number in numbers:
                start = number * SECOND
                stamps = [start + after + 25 * MS * event + number % 7 for event in range(1, 9)]
                write_request(writer, observer, new_id(number), start, stamps, ended=number % 10 > 0)


def fill(events: Path) -> None:
    with (events / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def listed(events: Path) -> dict[str, bytes]:
    return {str(p.relative_to(events)): p.read_bytes() for p in events.rglob("*") if p.is_file()}


def asked(events: Path, question: str) -> tuple[list[dict[str, str]], str]:
    done = sloscope("query", question, "--events", str(events), "--goodput", "ttft:300 itl_max:30", "--format", "csv")
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout))), done.stderr


def test_a_full_disk_is_read_in_place_and_left_as_it_was(disk: Path, tmp_path: Path) -> None:
    record(disk, range(1, COMPACTED + 1))
    control = Questions(disk, from_shorthand("ttft:300 itl_max:30"))
    assert control.ask("goodput")[0]["offered"] == COMPACTED
    record(disk, range(COMPACTED + 1, REQUESTS + 1))
    roomy = tmp_path / "roomy"
    shutil.copytree(disk, roomy)
    fill(disk)
    before = listed(disk)
    other_name = tmp_path / "other-name"
    other_name.symlink_to(disk)

    done = sloscope("compact", "--events", str(disk))
    assert done.returncode == 2
    assert "No space left on device" in done.stderr and done.stderr.count("\n") == 1
    assert listed(disk) == before, "neither a half table nor a journal without a record stays"

    for question in ("goodput", "outcomes", "holds"):
        rows, said = asked(other_name, question)
        assert rows == asked(roomy, question)[0]
        assert "No space left on device" in said and "for this answer alone" in said
    (goodput,) = asked(disk, "goodput")[0]
    assert int(goodput["offered"]) == REQUESTS
    assert listed(disk) == before

    assert control.ask("goodput")[0]["offered"] == REQUESTS, "the control plane answers as the command does"
    assert control.ask("goodput", (0, 1))[0]["offered"] == 0, "over the window that it is asked for"
    assert listed(disk) == before

    (disk / "ballast").unlink()
    assert sloscope("compact", "--events", str(disk)).returncode == 0
    manifest = json.loads((disk / "manifest.json").read_text())
    named = {name for names in manifest["tables"].values() for name in names}
    assert named <= listed(disk).keys()
    assert "for this answer alone" not in asked(disk, "goodput")[1]
