"""The wall clock steps by an hour under running streams: nothing that is measured moves."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sloscope.demo.processes import SLOSCOPE, Stage
from sloscope.demo.processes import ask as command
from tests.end_to_end.fault_peers import header
from tests.end_to_end.fault_rig import Answer, ask, ends_of, peer, records
from tests.end_to_end.scrapes import Scraper
from tests.end_to_end.support import free_port
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
NS = 10**9
HOUR_S = 3600
NEAR_S = 2.0
QUIET_S = 3.0


def faketime() -> Path:
    """libfaketime. Where nothing may be skipped, its absence is a failure."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        if os.environ.get("SLOSCOPE_NO_SKIP"):
            pytest.fail("libfaketime is not installed, and nothing may be skipped here")
        pytest.skip("libfaketime is not installed")
    return found[0]


def test_steps_of_the_wall_clock_under_streams_move_no_stamp_and_place_arrivals_by_the_anchor_before(
    tmp_path: Path,
) -> None:
    events, offset = tmp_path / "events", tmp_path / "offset"
    answers: dict[str, Answer] = {}
    real_s: dict[str, float] = {}

    def step(seconds: int) -> None:
        beside = offset.with_suffix(".new")
        beside.write_text(f"{seconds:+d}\n")
        beside.replace(offset)

    step(0)
    with Stage(tmp_path) as stage:
        port = free_port()
        upstream = peer(stage, "upstream", "upstream", str(port), "none", "1", str(tmp_path / "seen"))
        upstream.wait_for("ready on", 60)
        sidecar = stage.start(
            "sidecar", "/usr/bin/env", f"LD_PRELOAD={faketime()}", f"FAKETIME_TIMESTAMP_FILE={offset}",
            "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", *SLOSCOPE, "sidecar",
            "--upstream", f"http://127.0.0.1:{port}", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--events", str(events), "--goodput", "ttft:300 itl_max:30", "--sql-every", "off",
        )  # fmt: skip
        match = sidecar.wait_for(r"listening on (http://\S+?),? .*control on (http://\S+)", 30)
        proxy, control = match[1].rstrip(","), match[2]

        def stream(name: str, count: int) -> threading.Thread:
            real_s[name] = time.time()

            def run() -> None:
                answers[name] = ask(proxy, {"events": count, "gap_ms": 10})

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def anchors() -> list[int]:
            return offsets_s(records(events)["clock"], time.time())

        with Scraper(control, may_fail=True):
            across = stream("across", 0)
            time.sleep(1)
            for name, seconds in (("forward", HOUR_S), ("backward", -HOUR_S)):
                step(seconds)
                until(lambda seconds=seconds: seconds in anchors(), 10)
                stream(name, 20).join()
            time.sleep(1)
            upstream.tell("finish")
            across.join()
            # Nothing is recorded while it steps: who wakes up after a suspended night is such a one.
            time.sleep(1)
            step(2 * HOUR_S)
            time.sleep(QUIET_S)
            stream("quiet", 20).join()
    found = anchors()
    assert found[0] == 0 and set(found) == {0, HOUR_S, -HOUR_S, 2 * HOUR_S}
    assert all(each.is_whole for each in answers.values())
    assert ends_of(events) == {("completed", ""): 4}

    ids = {header(each.raw, b"x-sloscope-request-id").decode(): name for name, each in answers.items()}
    worst_ns = 0
    for record in records(events)["chunks"]:
        gaps = [after - before for before, after in itertools.pairwise(record["t_ns"])]
        assert min(gaps, default=0) >= 0
        worst_ns = max(worst_ns, *gaps, 0)
    assert worst_ns < 2 * NS  # a busy machine's own; the steps are of hours

    rows = json.loads(
        command("sql", "select request_id, arrival_at_ns, sidecar_end_at_ns, sidecar_e2e_ns, sidecar_ttft_ns from "
                "requests", "--events", str(events), "--format", "json")
    )  # fmt: skip
    assert len(rows) == 4
    for row in rows:
        name = ids[row["request_id"]]
        shift_s = {"across": 0, "forward": HOUR_S, "backward": -HOUR_S, "quiet": 2 * HOUR_S}[name]
        assert abs(row["arrival_at_ns"] / NS - real_s[name] - shift_s) < NEAR_S, name
        took_s = answers[name].took_s
        assert 0 < row["sidecar_ttft_ns"] < NS
        assert abs(row["sidecar_e2e_ns"] / NS - took_s) < NEAR_S
        # The end is placed by the anchor under which the request arrived, so that it lies behind it.
        assert abs((row["sidecar_end_at_ns"] - row["arrival_at_ns"]) / NS - took_s) < NEAR_S
    print(
        f"anchors at {sorted(set(found))} s from the real clock; a stream of {answers['across'].took_s:.1f} s across "
        f"two steps: {answers['across'].events} events, largest gap {worst_ns / 1e6:.0f} ms"
    )


def offsets_s(clocks: list[dict[str, Any]], now_s: float) -> list[int]:
    """How far each anchor's wall clock was from the real one, to the second."""
    zero_s = now_s - time.monotonic()
    return [round((each["wall_ns"] - each["mono_ns"]) / NS - zero_s) for each in clocks]
