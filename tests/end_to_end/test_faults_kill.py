"""kill -9 of either plane at two hundred random points, on one events directory that four sidecars share."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from sloscope.demo.processes import Child, Stage, ask
from sloscope.journal import journal_files
from tests.end_to_end.fault_rig import address, child_pid, ends_of, peer, records
from tests.end_to_end.scrapes import Scraper, scrape
from tests.end_to_end.support import free_port, start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
DATA_SIDECARS = 3
DATA_KILLS = 160
CONTROL_KILLS = 40
WORKERS = 4


class Killer(threading.Thread):
    """Kills one plane of a sidecar again and again at a random moment: a third of the times anywhere from its start
    on, else while it serves.
    """

    def __init__(self, sidecar: Child, module: str, kills: int, longest_s: float, events: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._sidecar = sidecar
        self._module = module
        self._kills = kills
        self._longest_s = longest_s
        self._events = events
        self._random = random.Random(seed)
        self._problem: BaseException | None = None
        self.killed = 0
        self.written: dict[Path, bytes] = {}  # what stood in the files of each killed process at its end

    def run(self) -> None:
        try:
            self._kill_all()
        except BaseException as problem:
            self._problem = problem

    def wait(self) -> None:
        self.join()
        if self._problem is not None:
            raise self._problem

    def _kill_all(self) -> None:
        for number in range(self._kills):
            pid = until(lambda: child_pid(self._sidecar.process.pid, self._module), 60)
            if number % 3:
                until(lambda pid=pid: self._files_of(pid), 60)
            time.sleep(self._random.uniform(0, self._longest_s))
            os.kill(pid, signal.SIGKILL)
            self.killed += 1
            self.written |= {path: path.read_bytes() for path in self._files_of(pid)}
            until(lambda pid=pid: child_pid(self._sidecar.process.pid, self._module) != pid, 60)

    def _files_of(self, pid: int) -> list[Path]:
        return [path for path in journal_files(self._events) if f"-{pid}-" in path.name]


def logged(files: list[Path], word: str) -> list[str]:
    return [line.split()[1] for file in files for line in file.read_text().splitlines() if line.startswith(word)]


def test_two_hundred_kills_lose_no_request_and_no_written_record(tmp_path: Path) -> None:
    events = tmp_path / "events"
    began = time.monotonic()
    with Stage(tmp_path) as stage:
        port = free_port()
        seen = tmp_path / "upstream.seen"
        upstream = peer(stage, "upstream", "upstream", str(port), "none", "1", str(seen))
        upstream.wait_for("ready on", 60)
        sidecars = [
            start_sidecar(stage, f"http://127.0.0.1:{port}", events, "--sql-every", "off", name=f"sidecar{number}")
            for number in range(DATA_SIDECARS + 1)
        ]
        files = [tmp_path / f"load{number}.txt" for number in range(len(sidecars))]
        peers = [
            peer(stage, file.stem, "load", *map(str, address(proxy)), str(WORKERS), str(file))
            for file, (proxy, _, _) in zip(files, sidecars, strict=True)
        ]
        receipts = tmp_path / "receipts.txt"
        peers.append(peer(stage, "receipts", "receipts", sidecars[-1][1], str(receipts)))
        for each in peers:
            each.wait_for("ready", 60)
        shares = [DATA_KILLS // DATA_SIDECARS + (n < DATA_KILLS % DATA_SIDECARS) for n in range(DATA_SIDECARS)]
        killers = [
            Killer(child, "exporter.data_plane", share, 0.7, events, seed)
            for seed, ((_, _, child), share) in enumerate(zip(sidecars, shares, strict=False))
        ]
        killers.append(Killer(sidecars[-1][2], "exporter.control_plane", CONTROL_KILLS, 1.0, events, 200))
        with (
            Scraper(sidecars[0][1], may_fail=True) as of_data_kills,
            Scraper(sidecars[-1][1], may_fail=True) as of_control_kills,
        ):
            for killer in killers:
                killer.start()
            for killer in killers:
                killer.wait()
        assert sum(killer.killed for killer in killers) == DATA_KILLS + CONTROL_KILLS
        for each in peers:
            each.tell("over")
        for each in peers:
            each.wait_for("over", 40)

        def all_ended() -> bool:
            kinds = records(events)
            return {r["request_id"] for r in kinds["begin"]} == {r["request_id"] for r in kinds["end"]}

        until(all_ended, 30, every_s=0.5)
        restarts = [scrape(control).total("sloscope_data_plane_restarts_total") for _, control, _ in sidecars]
        assert restarts == [*shares, 0]
        for _, control, _ in sidecars:
            scrape(control).check_identity()
    took_s = time.monotonic() - began

    written = {path: data for killer in killers for path, data in killer.written.items()}
    for path, data in written.items():
        assert path.read_bytes().startswith(data), f"a written record is gone from {path.name}"
    ends = ends_of(events)
    begun = {record["request_id"] for record in records(events)["begin"]}
    at_upstream = set(logged([seen], "seen"))
    # `begin` is on disk before the request leaves, unless the disk takes more than 5 ms: of what a kill then cuts only
    # its client knows.
    late = at_upstream - begun
    assert len(late) <= DATA_KILLS // 20, f"{len(late)} requests reached the upstream unrecorded"
    whole, cut = logged(files, "whole"), logged(files, "cut")
    assert set(whole) <= begun | late
    # Streams whose control plane was killed did not notice.
    assert not logged(files[-1:], "cut")
    assert len(logged(files[-1:], "whole")) > CONTROL_KILLS
    lost = ends["unfinished", "recorder_lost"]
    assert lost >= DATA_KILLS // 4, f"only {lost} requests were cut: there was no traffic"

    # A receipt that was accepted is on disk and whole, however its control plane ended. One whose answer was lost with
    # the process is sent again, and may stand there twice: the tables have it once.
    accepted = logged([receipts], "accepted")
    client = records(events, "client")
    for kind in ("begin", "end"):
        assert {r["request_id"] for r in client[kind]} >= set(accepted), kind
    (row,) = json.loads(
        ask("sql", "select count(*) as n, count(distinct request_id) as ids, count(*) filter (sidecar_observed) as "
            "sidecar, count(*) filter (client_observed) as client from requests", "--events", str(events),
            "--format", "json")
    )  # fmt: skip
    assert row["n"] == row["ids"] and row["sidecar"] == len(begun)
    assert row["client"] == len({record["request_id"] for record in client["begin"]})
    twice = len(client["end"]) - len({record["request_id"] for record in client["end"]})
    assert twice <= CONTROL_KILLS
    for _, _, child in sidecars:
        said = child.log.read_text().splitlines()
        assert all("is started again" in line or line.startswith("listening on") for line in said), said
    print(
        f"{DATA_KILLS} kills of data planes and {CONTROL_KILLS} of a control plane in {took_s:.0f} s: "
        f"{len(begun)} begun, {dict(ends)}, {len(whole)} whole and {len(cut)} cut at the clients, {len(late)} not yet "
        f"written when killed, {len(accepted)} receipts accepted and kept, {twice} of them sent twice; books "
        f"balanced at {of_data_kills.scrapes + of_control_kills.scrapes} scrapes; {len(written)} files of killed "
        "writers unharmed"
    )
