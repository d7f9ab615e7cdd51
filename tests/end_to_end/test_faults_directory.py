"""Two sidecars that write into one events directory: neither takes the other's requests for lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sloscope.demo.processes import Stage
from sloscope.demo.processes import ask as command
from tests.end_to_end.fault_rig import Answer, ask_many, child_pid, ends_of, peer, records
from tests.end_to_end.scrapes import scrape
from tests.end_to_end.support import free_port, start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
OPEN = 6
ENDLESS = {"events": 0, "gap_ms": 20}
LOST = ("unfinished", "recorder_lost")


def test_two_sidecars_on_one_directory_close_what_is_dead_and_leave_what_lives(tmp_path: Path) -> None:
    events = tmp_path / "events"
    found: dict[str, list[Answer]] = {}
    with Stage(tmp_path) as stage:
        port = free_port()
        upstream = peer(stage, "upstream", "upstream", str(port), "none", "1", str(tmp_path / "seen"))
        upstream.wait_for("ready on", 60)

        def start(name: str) -> tuple[str, str, int]:
            proxy, control, child = start_sidecar(
                stage, f"http://127.0.0.1:{port}", events, "--sql-every", "off", name=name
            )
            return proxy, control, child.process.pid

        def open_streams(name: str, proxy: str, control: str) -> threading.Thread:
            thread = threading.Thread(target=lambda: found.update({name: ask_many(proxy, OPEN, ENDLESS)}))
            thread.start()
            until(lambda: scrape(control).total("sloscope_sidecar_inflight_requests") == OPEN)
            return thread

        (proxy1, control1, pid1), (proxy2, control2, pid2) = start("one"), start("two")
        streams1, streams2 = open_streams("one", proxy1, control1), open_streams("two", proxy2, control2)
        until(lambda: len(records(events)["begin"]) == 2 * OPEN)

        # The data plane of one dies: its own streams are closed, those of the other are not.
        os.kill(child_pid(pid1, "exporter.data_plane"), signal.SIGKILL)
        streams1.join()
        until(lambda: len(records(events)["end"]) == OPEN)
        until(lambda: scrape(control1).total("sloscope_recovered_requests_total") == OPEN)
        assert scrape(control2).total("sloscope_recovered_requests_total") == 0
        assert scrape(control2).check_identity()["sidecar"] == OPEN

        # Both are asked at once, again and again: one directory, one lock, one answer.
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(
                    lambda number: httpx.get(
                        f"{(control1, control2)[number % 2]}/api/q/goodput", params={"observer": "sidecar"}, timeout=30
                    ),
                    range(16),
                )
            )
        assert {each.status_code for each in answers} == {200}
        assert {each.json()[0]["offered"] for each in answers} == {2 * OPEN}

        # The other one dies as a whole. Nobody is left who would start it again; the next one that starts closes it.
        planes = [child_pid(pid2, f"exporter.{plane}_plane") for plane in ("data", "control")]
        for pid in (pid2, *planes):
            os.kill(pid, signal.SIGKILL)
        streams2.join()
        assert len(records(events)["end"]) == OPEN
        proxy3, control3, _ = start("three")
        until(lambda: scrape(control3).total("sloscope_recovered_requests_total") == OPEN)

        # A stream through each that lives comes to its end.
        streams = [open_streams("one again", proxy1, control1), open_streams("three", proxy3, control3)]
        upstream.tell("finish")
        for each in streams:
            each.join()
        assert all(each.is_whole for name in ("one again", "three") for each in found[name])
        for control in (control1, control3):
            scrape(control).check_identity()
    assert ends_of(events) == {LOST: 2 * OPEN, ("completed", ""): 2 * OPEN}
    (row,) = json.loads(
        command("sql", "select count(*) as n, count(distinct request_id) as ids, count(*) filter (sidecar_reason = "
                "'recorder_lost') as lost from requests", "--events", str(events), "--format", "json")
    )  # fmt: skip
    assert row == {"n": 4 * OPEN, "ids": 4 * OPEN, "lost": 2 * OPEN}
    print(f"{4 * OPEN} requests of three sidecars on one directory: {row['lost']} recorder_lost, the rest completed")
