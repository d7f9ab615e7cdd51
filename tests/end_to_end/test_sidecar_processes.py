"""The sidecar as a command: its three processes, their deaths and their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sloscope.demo.processes import SLOSCOPE, Child, Stage, ask
from sloscope.journal import Tail, journal_files, read_journal
from tests.end_to_end.support import start_sidecar, until
from tests.exporter.harness import DONE, STREAM_HEAD, Script, ScriptedUpstream, Seen, chunked, event, finish

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "stream": True}


@contextmanager
def upstream(script: Script) -> Iterator[tuple[str, ScriptedUpstream]]:
    """A scripted upstream in a thread with a loop of its own."""
    server = ScriptedUpstream(script)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(5), server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def at_once(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunked(event(), event(), finish(), DONE))


def held_back(release: threading.Event) -> Script:
    """Ten events, and ten more once it is told."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(20):
            while number >= 10 and not release.is_set():
                await asyncio.sleep(0.01)
            writer.write(b"%x\r\n%b\r\n" % (len(event()), event()))
        writer.write(chunked(finish(), DONE))

    return script


async def without_end(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
    await asyncio.sleep(600)


def children(sidecar: Child, module: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == sidecar.process.pid and module.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


def one_child(sidecar: Child, module: str) -> int:
    (pid,) = children(sidecar, module)
    return pid


def niceness(pid: int) -> int:
    """proc_pid_stat(5): field 19, of which the first two end at the last parenthesis."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])


def metrics(control: str) -> dict[str, float]:
    """Sum over the series of every name, and `name{outcome}` of those that have one."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{control}/metrics").text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
            if reason := sample.labels.get("outcome"):
                key = f"{sample.name}{{{reason}}}"
                totals[key] = totals.get(key, 0) + sample.value
    return totals


def check_identity(control: str) -> dict[str, float]:
    found = metrics(control)
    offered = found["sloscope_sidecar_requests_offered_total"]
    assert offered == found["sloscope_sidecar_requests_total"] + found["sloscope_sidecar_inflight_requests"]
    return found


def records(events: Path, kind: str) -> list[dict[str, object]]:
    return [
        record
        for path in journal_files(events)
        if path.parent.name == "sidecar"
        for record in read_journal(Tail(path))
        if record["kind"] == kind
    ]


def stream_until_cut(url: str, seen: list[str]) -> None:
    try:
        with httpx.stream("POST", f"{url}{CHAT}", json=ASK, timeout=30) as answer:
            seen.append(answer.headers["x-sloscope-request-id"])
            for _ in answer.iter_bytes():
                pass
    except httpx.HTTPError:
        pass  # cut is what the test does


def test_a_killed_data_plane_is_started_again_and_its_requests_are_closed(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with upstream(without_end) as (url, server), Stage(tmp_path) as stage:
        proxy, control, sidecar = start_sidecar(stage, url, events, "--sql-every", "off")
        seen: list[str] = []
        streams = [threading.Thread(target=stream_until_cut, args=(proxy, seen)) for _ in range(5)]
        for thread in streams:
            thread.start()
        until(lambda: len(seen) == 5)
        assert check_identity(control)["sloscope_sidecar_inflight_requests"] == 5
        first = one_child(sidecar, "exporter.data_plane")
        os.kill(first, signal.SIGKILL)
        for thread in streams:
            thread.join(10)
        second = until(lambda: [pid for pid in children(sidecar, "exporter.data_plane") if pid != first])
        assert len(second) == 1
        stream = threading.Thread(target=stream_until_cut, args=(proxy, seen))
        stream.start()
        until(lambda: len(seen) == 6)
        # The series belong to the life of the new process; what the old one left is counted apart.
        found = until(lambda: (f := check_identity(control))["sloscope_sidecar_requests_offered_total"] == 1 and f)
        assert found["sloscope_data_plane_restarts_total"] == 1
        until(lambda: check_identity(control)["sloscope_recovered_requests_total"] == 5)
        os.kill(second[0], signal.SIGKILL)
        stream.join(10)
        until(lambda: len(records(events, "end")) == 6)
    # Every request that the upstream saw was begun on disk, and every one begun has one end.
    began = {record["request_id"] for record in records(events, "begin")}
    ended = [record["request_id"] for record in records(events, "end")]
    assert {seen_.header("x-sloscope-request-id") for seen_ in server.seen} == began == set(seen) == set(ended)
    assert len(ended) == 6
    assert {record["reason"] for record in records(events, "end")} == {"recorder_lost"}


def test_the_contract_lies_beside_the_events_so_that_questions_need_not_be_told(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with upstream(at_once) as (url, _), Stage(tmp_path) as stage:
        proxy, _, first = start_sidecar(stage, url, events, "--sql-every", "off", goodput="ttft:321")
        httpx.post(proxy + CHAT, json=ASK)
        assert "321ms" in (events / "contract.toml").read_text()
        stage.stop(first)
        _, _, other = start_sidecar(stage, url, events, "--sql-every", "off", goodput="ttft:999", name="other")
        assert "999" not in (events / "contract.toml").read_text(), "what earlier records were promised stays"
        stage.stop(other)
        assert "questions will need --contract" in other.log.read_text()
    (row,) = json.loads(ask("query", "goodput", "--observer", "sidecar", "--events", str(events), "--format", "json"))
    assert (row["offered"], row["qualified"]) == (1, 1)


def test_a_killed_control_plane_is_started_again_and_keeps_the_identity(tmp_path: Path) -> None:
    release = threading.Event()
    release.set()
    with upstream(held_back(release)) as (url, _), Stage(tmp_path) as stage:
        proxy, control, sidecar = start_sidecar(stage, url, tmp_path / "events", "--sql-every", "off")
        assert httpx.post(f"{proxy}{CHAT}", json=ASK).text.endswith("[DONE]\n\n")
        release.clear()
        thread = threading.Thread(target=stream_until_cut, args=(proxy, []))
        thread.start()
        until(lambda: check_identity(control)["sloscope_sidecar_inflight_requests"] == 1)
        os.kill(one_child(sidecar, "exporter.control_plane"), signal.SIGKILL)
        # The open stream does not notice, and the new process knows all that the data plane counted.
        found = until(lambda: check_identity(control))
        assert found["sloscope_sidecar_requests_offered_total"] == 2
        release.set()
        thread.join(60)
        until(lambda: check_identity(control)["sloscope_sidecar_requests_total{completed}"] == 2)


def test_a_running_control_plane_gives_way_to_the_data_plane_also_after_a_restart(tmp_path: Path) -> None:
    with upstream(at_once) as (url, _), Stage(tmp_path) as stage:
        _, control, sidecar = start_sidecar(stage, url, tmp_path / "events", "--sql-every", "off")
        data = niceness(one_child(sidecar, "exporter.data_plane"))
        assert data == niceness(os.getpid())
        first = one_child(sidecar, "exporter.control_plane")
        assert niceness(first) > data
        os.kill(first, signal.SIGKILL)
        until(lambda: [pid for pid in children(sidecar, "exporter.control_plane") if pid != first])
        until(lambda: check_identity(control))
        assert niceness(one_child(sidecar, "exporter.control_plane")) > data


def test_sigterm_lets_open_streams_end_and_refuses_new_ones(tmp_path: Path) -> None:
    release = threading.Event()
    with upstream(held_back(release)) as (url, _), Stage(tmp_path) as stage:
        proxy, _, sidecar = start_sidecar(stage, url, tmp_path / "events", "--sql-every", "off", "--drain", "60s")
        with httpx.stream("POST", f"{proxy}{CHAT}", json=ASK, timeout=30) as answer:
            body = answer.iter_bytes()
            text = next(body)
            sidecar.process.send_signal(signal.SIGTERM)
            until(lambda: not _connects(proxy))
            release.set()
            text += b"".join(body)
            assert text.endswith(DONE) and text.count(b'"tok"') == 20
        assert sidecar.process.wait(60) == 0
    (end,) = records(tmp_path / "events", "end")
    assert end["outcome"] == "completed"


def _connects(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_a_stream_that_outlasts_the_drain_time_is_cut_and_recorded(tmp_path: Path) -> None:
    with upstream(without_end) as (url, _), Stage(tmp_path) as stage:
        proxy, _, sidecar = start_sidecar(stage, url, tmp_path / "events", "--drain", "300ms", "--sql-every", "off")
        seen: list[str] = []
        thread = threading.Thread(target=stream_until_cut, args=(proxy, seen))
        thread.start()
        until(lambda: seen)
        asked_at = time.monotonic()
        sidecar.process.send_signal(signal.SIGINT)
        assert sidecar.process.wait(60) == 0
        assert time.monotonic() - asked_at < 30
        thread.join(60)
    (end,) = records(tmp_path / "events", "end")
    assert (end["outcome"], end["reason"]) == ("failed", "timeout")


def test_children_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    with upstream(at_once) as (url, _), Stage(tmp_path) as stage:
        _, _, sidecar = start_sidecar(stage, url, tmp_path / "events", "--sql-every", "off", "--drain", "100ms")
        pids = [one_child(sidecar, f"exporter.{plane}_plane") for plane in ("data", "control")]
        sidecar.process.kill()
        sidecar.process.wait()
        until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--upstream", "ftp://x"], "--upstream"),
        (["--upstream", "http://u:p@x"], "--upstream"),
        (["--listen", "nowhere"], "--listen"),
        (["--listen", "127.0.0.1:99999"], "--listen"),
        (["--control", "0.0.0.0:0"], "--control"),
        (["--goodput", "speed:9"], "goodput"),
        (["--goodput", ""], "--contract"),
        (["--contract", "/nowhere.toml", "--goodput", ""], "contract"),
        (["--role", "king"], "--role"),
        (["--drain", "soon"], "--drain"),
        (["--events", "/proc/nowhere"], "--events"),
        (["--tenant-header", "a b"], "--tenant-header"),
        (["--ca-file", "/nowhere.pem"], "--ca-file"),
        (["--token-file", "/nowhere"], "--token-file"),
    ],
)
def test_a_bad_option_is_one_line_and_nothing_starts(tmp_path: Path, options: list[str], says: str) -> None:
    good = {
        "--upstream": "http://127.0.0.1:9", "--listen": "127.0.0.1:0", "--control": "127.0.0.1:0",
        "--goodput": "ttft:300", "--events": str(tmp_path / "events"),
    }  # fmt: skip
    chosen = good | dict(zip(options[::2], options[1::2], strict=True))
    command = [*SLOSCOPE, "sidecar", *(word for pair in chosen.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and says in line
    assert not (tmp_path / "events" / "journal" / "sidecar").is_dir() or not journal_files(tmp_path / "events")


def test_an_occupied_port_is_one_line_and_nothing_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            *SLOSCOPE, "sidecar", "--upstream", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{port}",
            "--control", "127.0.0.1:0", "--goodput", "ttft:300", "--events", str(tmp_path / "events"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert str(port) in line and "in use" in line
    assert not (tmp_path / "events").exists()
