"""kill -9 of the sidecar's data plane in mid-traffic, twenty times. What was begun is known; what was cut is named."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sloscope.demo.processes import SLOSCOPE, Stage, ask
from sloscope.journal import Tail, journal_files, read_journal, writer_of
from tests.end_to_end.support import start_server, start_sidecar, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
KILLS = 20
EVERY_S = 1.8
RATE = 12


def data_plane_pid(supervisor: int) -> int:
    """The supervisor's child that runs the data plane; 0 while there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        if parent == supervisor and b"exporter.data_plane" in command:
            return int(entry.name)
    return 0


def serving(events: Path, pid: int) -> int:
    """`pid` once its journal holds a request."""
    files = (events / "journal" / "sidecar").glob(f"*-{pid}-*.jsonl")
    return pid if pid and any(b'"begin"' in path.read_bytes() for path in files) else 0


def raw(events: Path, observer: str) -> dict[str, list[dict[str, Any]]]:
    """Every record of an observer by kind, straight from the files."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for path in journal_files(events):
        if path.parent.name == observer:
            for record in read_journal(Tail(path)):
                kinds.setdefault(record["kind"], []).append(record)
    return kinds


def test_twenty_kills_lose_no_request_and_no_written_record(tmp_path: Path) -> None:
    events = tmp_path / "events"
    rng = random.Random(20)
    written: dict[Path, bytes] = {}
    with Stage(tmp_path) as stage:
        server = start_server(stage, events, "--allow-faults")
        url, _, sidecar = start_sidecar(stage, server, events, "--sql-every", "off")
        seconds = 5 * KILLS * EVERY_S  # more than enough; it is interrupted after the last kill
        load = stage.start(
            "replay", *SLOSCOPE, "replay",
            f"synthetic:poisson?rate={RATE}&n={int(RATE * seconds)}&prompt_p50=20&output_p50=40&output_sigma=0.5",
            "--url", url, "--events", str(events), "--goodput", "ttft:300 itl_max:30", "--drain", "20s", "--seed", "20",
            "--header", "x-sloscope-fault: slow=1ms",
        )  # fmt: skip
        until(lambda: len(list((events / "journal" / "client").glob("*.jsonl"))) > 0, 30)
        for _ in range(KILLS):
            pid = until(lambda: serving(events, data_plane_pid(sidecar.process.pid)), 30)
            time.sleep(EVERY_S * rng.uniform(0.6, 1.2))
            os.kill(pid, signal.SIGKILL)
            # What write(2) has returned for is in the file now, and must be there at the end.
            for path in (events / "journal" / "sidecar").glob("*.jsonl"):
                if f"-{pid}-" in path.name:
                    written[path] = path.read_bytes()
            # A busy machine may take a moment to end it, and the next turn must not find this one again.
            until(lambda pid=pid: data_plane_pid(sidecar.process.pid) != pid, 30)
        time.sleep(1)
        load.process.send_signal(signal.SIGINT)
        assert load.process.wait(60) in (0, 130)
    assert len(written) == KILLS

    for path, data in written.items():
        assert path.read_bytes().startswith(data), "a written record is gone"
    rows = json.loads(
        ask("sql", "select request_id, client_observed, sidecar_observed, engine_observed, sidecar_outcome, "
            "sidecar_reason, client_outcome from requests", "--events", str(events), "--format", "json")
    )  # fmt: skip
    client, sidecar_raw = raw(events, "client"), raw(events, "sidecar")
    begun_client = {record["request_id"] for record in client["begin"]}
    begun_sidecar = {record["request_id"] for record in sidecar_raw["begin"]}
    table = {row["request_id"]: row for row in rows}
    assert len(table) == len(rows), "a request stands twice"
    assert set(table) >= begun_client | begun_sidecar
    assert {key for key, row in table.items() if row["client_observed"]} == begun_client
    assert {key for key, row in table.items() if row["sidecar_observed"]} == begun_sidecar

    # `begin` is written before the first byte goes upstream, unless that takes more than 5 ms: a busy machine may
    # show a few that the server saw and the killed sidecar had not yet written. The client's journal has them.
    late = {key for key, row in table.items() if row["engine_observed"] and not row["sidecar_observed"]}
    assert late <= begun_client
    assert len(late) <= KILLS, f"{len(late)} requests reached the server without a record at the sidecar"

    ends = Counter(record["request_id"] for record in sidecar_raw["end"])
    assert max(ends.values()) == 1, "a request ended twice"
    assert set(ends) == begun_sidecar, "a begun request has no end"
    lost = {r["request_id"] for r in sidecar_raw["end"] if r.get("reason") == "recorder_lost"}
    assert len(lost) >= KILLS // 2, f"only {len(lost)} requests were cut by {KILLS} kills: there was no traffic"
    assert lost == {key for key, row in table.items() if row["sidecar_reason"] == "recorder_lost"}
    completed = sum(row["sidecar_outcome"] == "completed" for row in rows)
    # How many are cut depends on how long an answer takes on this machine. That it came back to work is a completed
    # answer in each life, which has files of its own; a life or two may be shorter than their first answer.
    began: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for path in journal_files(events):
        if path.parent.name == "sidecar":
            for record in read_journal(Tail(path)):
                began[writer_of(path)] += record["kind"] == "begin"
                done[writer_of(path)] += record["kind"] == "end" and record["outcome"] == "completed"
    lives = [writer for writer, requests in began.items() if requests]
    idle = [writer for writer in lives if not done[writer]]
    assert len(lives) > KILLS and len(idle) <= KILLS // 10, (
        f"{len(lives)} lives with requests, {len(idle)} completed none of them"
    )
    print(
        f"{KILLS} kills: {len(begun_client)} begun at the client, {len(begun_sidecar)} at the sidecar, {len(late)} not "
        f"yet written when killed, {completed} completed, {len(lost)} cut and recorded as recorder_lost"
    )
