"""What happens to the processes: killed, stopped, crowded, out of disk."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from sloscope.demo.processes import Stage
from tests.end_to_end.support import start_sidecar, until
from tests.end_to_end.test_sidecar_processes import (
    ASK,
    CHAT,
    at_once,
    held_back,
    metrics,
    upstream,
    without_end,
)

pytestmark = pytest.mark.e2e


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_who_connects_while_it_drains_is_refused_and_who_streams_is_served(tmp_path: Path) -> None:
    answers: list[bytes] = []
    release = threading.Event()
    with Stage(tmp_path) as stage, upstream(held_back(release)) as (url, server):
        proxy, _, sidecar = start_sidecar(stage, url, tmp_path / "events", "--drain", "60s")
        asking = threading.Thread(target=lambda: answers.append(httpx.post(proxy + CHAT, json=ASK).content))
        asking.start()
        until(lambda: server.seen)
        sidecar.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                socket.create_connection(address(proxy), 1).close()
            except ConnectionRefusedError:
                return True
            return False

        until(refused)
        assert asking.is_alive()
        release.set()
        asking.join()
        assert answers[0].count(b"data: ") == 22 and sidecar.process.wait(60) == 0  # 20 events, the finish and [DONE]


def test_four_hundred_clients_leave_at_once_and_every_one_is_accounted_for(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage, upstream(without_end) as (url, _):
        proxy, control, _ = start_sidecar(stage, url, tmp_path / "events")
        body = b'{"model":"m","stream":true}'
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        clients = [socket.create_connection(address(proxy)) for _ in range(400)]
        for client in clients:
            client.sendall(head + body)
        until(lambda: metrics(control)["sloscope_sidecar_inflight_requests"] == 400)
        for client in clients:
            client.close()
        until(lambda: metrics(control)["sloscope_sidecar_inflight_requests"] == 0)
        found = metrics(control)
        assert found["sloscope_sidecar_requests_offered_total"] == 400
        assert found["sloscope_sidecar_requests_total{cancelled}"] == 400


def test_the_events_directory_is_deleted_and_recording_goes_on_with_the_loss_counted(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with Stage(tmp_path) as stage, upstream(at_once) as (url, _):
        proxy, control, _ = start_sidecar(stage, url, events)
        assert httpx.post(proxy + CHAT, json=ASK).status_code == 200
        until(lambda: metrics(control)["sloscope_sidecar_requests_total"] == 1)
        shutil.rmtree(events)
        assert httpx.get(f"{control}/api/q/goodput").status_code == 503
        assert httpx.post(proxy + CHAT, json=ASK).status_code == 200
        until(lambda: list((events / "journal" / "sidecar").glob("*.jsonl")))
        until(lambda: metrics(control)["sloscope_journal_dropped_total"] >= 4)
        (row,) = httpx.get(f"{control}/api/q/goodput", params={"observer": "sidecar"}).json()
        assert row["offered"] == 1
