"""A disk that is full and free again, under streams that must not notice."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sloscope.demo.processes import Stage
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.records import Record
from tests.end_to_end.fault_peers import header
from tests.end_to_end.fault_rig import Answer, Rig, ask, ask_many, child_pid, rig
from tests.end_to_end.scrapes import scrape
from tests.end_to_end.support import start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
AT_ONCE = 5
WHILE_FULL = 8
PART_OF_A_RECORD = 100  # bytes
Switch = Callable[[Rig, bool], None]


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Switch]:
    """A file system of 2 MiB, which a file beside the journal fills to the last page (ENOSPC). Where none may be
    mounted the journal has room for a part of a record, as in such a page.
    """
    events = directory / "events"
    events.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(events)], capture_output=True, check=False, text=True
    )
    if mounted.returncode:
        print(f"no file system may be mounted here ({mounted.stderr.strip()}): a limit on file sizes instead")
        yield lambda r, full: limit_files(r, journal_bytes(events) + PART_OF_A_RECORD if full else None)
        return

    def switch(_: Rig, full: bool) -> None:
        ballast = events / "ballast"
        if not full:
            ballast.unlink()
            return
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        yield switch
    finally:
        subprocess.run(["umount", "-l", str(events)], check=True)


@contextlib.contextmanager
def limited_files(_: Path) -> Iterator[Switch]:
    """No file of the sidecar's processes may grow (EFBIG)."""
    yield lambda r, full: limit_files(r, 0 if full else None)


def limit_files(r: Rig, most: int | None) -> None:
    """Bytes of a file that the sidecar's processes write; None: as many as before."""
    parent = r.sidecar.process.pid
    for pid in (parent, r.data_plane, child_pid(parent, "exporter.control_plane")):
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


def journal_bytes(events: Path) -> int:
    return max(path.stat().st_size for path in journal_files(events) if path.parent.name == "sidecar")


def lines(events: Path) -> tuple[list[Record], int]:
    """The sidecar's records in order, and how many lines are none."""
    found: list[Record] = []
    bad = 0
    for path in journal_files(events):
        if path.parent.name == "sidecar":
            tail = Tail(path)
            found += read_journal(tail)
            bad += tail.bad_lines
    return found, bad


def ids_of(answers: list[Answer]) -> set[str]:
    return {header(each.raw, b"x-sloscope-request-id").decode() for each in answers}


@pytest.mark.parametrize("disk", [small_disk, limited_files])
def test_a_full_disk_costs_records_and_no_stream_and_the_journal_goes_on_once_it_is_free(
    tmp_path: Path, disk: Callable[[Path], contextlib.AbstractContextManager[Switch]]
) -> None:
    across: list[Answer] = []

    def stream(r: Rig, events: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: across.append(ask(r.proxy, {"events": events, "gap_ms": 10})))
        thread.start()
        until(lambda: r.inflight() == 1)
        return thread

    with disk(tmp_path) as switch:
        with rig(tmp_path) as r:
            with r.unharmed():
                r.bad("none")
                before = ask_many(r.proxy, AT_ONCE)
                r.ends()
                # One stream begins before and ends while the disk is full, another begins then and ends after it.
                into = stream(r, 100)
                known = until(lambda: begun(r.events) if len(begun(r.events)) >= AT_ONCE + 2 else None)
                switch(r, True)
                into.join()
                meanwhile = [each for _ in range(WHILE_FULL) for each in ask_many(r.proxy, AT_ONCE)]
                question = httpx.get(f"{r.control}/api/q/goodput", params={"observer": "sidecar"}, timeout=20)
                assert httpx.get(f"{r.control}/health").json() == {"status": "ok", "data_plane": True}
                out = stream(r, 100)
                until(lambda: counted(r, "dropped") >= 3 * len(meanwhile))
                switch(r, False)
                out.join()
                after = [each for _ in range(2) for each in ask_many(r.proxy, AT_ONCE)]
                assert all(each.is_whole for each in (*before, *across, *meanwhile, *after))
                r.ends()
                until(lambda: len(begun(r.events)) == len(known) + len(after))
            until(lambda: len(lines(r.events)[0]) == counted(r, "records"))
            lost, good = counted(r, "dropped"), counted(r, "records")

        # Each of the short requests is a begin, a batch of receipts and an end; the loss is theirs, and of the longer
        # streams a batch a second.
        found, torn = lines(r.events)
        assert len(found) == good and torn <= 1
        kept = begun(r.events)
        assert ids_of(after) <= kept and ids_of(before) <= kept and not ids_of(meanwhile) & kept
        # Every write that fails tries to set an anchor first, which is lost with the others.
        assert 3 * len(meanwhile) <= lost <= 2 * 3 * len(meanwhile) + 60
        check_question(question, len(known))
        # After a loss the anchor comes first, and the stamps before it are placed by the one before them.
        resumed = next(at for at, record in enumerate(found) if record.get("request_id") in ids_of(after))
        assert any(record["kind"] == "clock" for record in found[:resumed][-20:])

        # Whose end was lost is closed by the next sidecar, since its recorder is gone.
        open_now = kept - {record["request_id"] for record in found if record["kind"] == "end"}
        assert open_now and open_now < ids_of(across) | known
        with Stage(tmp_path) as stage:
            _, control, _ = start_sidecar(
                stage, "http://127.0.0.1:9", r.events, "--sql-every", "off", name="next_sidecar"
            )
            until(lambda: scrape(control).total("sloscope_recovered_requests_total") == len(open_now))
            (row,) = httpx.get(f"{control}/api/q/goodput", params={"observer": "sidecar"}).json()
            assert row["offered"] >= len(kept)
    print(
        f"{len(meanwhile) + 2} streams on a full disk ({disk.__name__}): all whole, {lost} records lost and counted, "
        f"{torn} torn line, {good} on disk; a question meanwhile: {question.status_code} {question.text[:120]}; "
        f"{len(open_now)} without an end closed by the next sidecar"
    )


def check_question(answer: httpx.Response, on_disk: int) -> None:
    """It counts every request that is on disk, or says in a line what the disk says; never a part of them."""
    if answer.status_code == 200:
        (row,) = answer.json()
        assert row["offered"] >= on_disk
    else:
        assert answer.status_code == 503
        (line,) = answer.json()["error"].splitlines()
        assert any(os.strerror(why) in line for why in (errno.ENOSPC, errno.EFBIG)), line


def begun(events: Path) -> set[str]:
    return {record["request_id"] for record in lines(events)[0] if record["kind"] == "begin"}


def counted(r: Rig, name: str) -> int:
    return r.scrape().total(f"sloscope_journal_{name}_total", observer="sidecar")
