"""A real control plane on a socket of its own, in a thread, as a client's process sees it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exporter.control_plane import ControlPlane, Server
from sloscope.clock import SystemClock
from tests.exporter.harness import settings_for, total


class Control:
    def __init__(self, plane: ControlPlane, url: str) -> None:
        self._plane = plane
        self.url = url

    def ended(self, **labels: str) -> float:
        """Requests whose receipts it has counted."""
        return total(self._plane.store, "sloscope_client_requests_total", **labels)

    def rejected(self, **labels: str) -> float:
        return total(self._plane.store, "sloscope_receipts_rejected_total", **labels)


@contextmanager
def control_plane(events: Path, **changes: Any) -> Iterator[Control]:
    plane = ControlPlane(settings_for(events, str(events / "none"), ("http://a",), **changes), SystemClock())
    server = Server(plane)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            yield Control(plane, f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()
