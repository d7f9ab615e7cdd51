"""What the demo does to the stream while it runs: one decoder stall, one phase of buffering."""

import json
import re
import threading
import time
import urllib.request

from sloscope.demo.processes import Child
from sloscope.output import message
from sloscope.units import format_instant

# Shares of the time over which requests arrive.
STALL_AT, HOLD_FROM, HOLD_TO = 0.30, 0.55, 0.75
REPLAY_STARTS_S = 1.0  # what the replay needs before its first send, about
DECODING_WITHIN_S = 15.0
_DECODING = re.compile(r'^sloscope_engine_requests\{state="DECODE"\} (\S+)$', re.MULTILINE)


class Injection(threading.Thread):
    """Runs beside the replay and keeps the wall times of what it did. Durations are well above the gap limit."""

    def __init__(self, server_url: str, hop: Child, seconds: float, itl_max_ms: float) -> None:
        super().__init__(daemon=True)
        self._server_url, self._hop, self._seconds = server_url, hop, seconds
        self.stall_ms = int(max(250, 10 * itl_max_ms))
        self.hold_ms = int(max(400, 15 * itl_max_ms))
        self.stall_at_ns = self.hold_from_ns = self.hold_to_ns = 0
        self.problem = ""

    def run(self) -> None:
        start = time.monotonic() + REPLAY_STARTS_S
        _sleep_until(start + STALL_AT * self._seconds)
        body = json.dumps({"stall_ms": self.stall_ms}).encode()
        fault = urllib.request.Request(f"{self._server_url}/faults", body, {"content-type": "application/json"})
        try:
            self._wait_for_decoding()
            self.stall_at_ns = time.time_ns()
            with urllib.request.urlopen(fault, timeout=10) as answer:
                answer.read()
        except OSError as error:
            self.problem = f"the stall could not be injected: {error}"
        message(f"injected: a decoder stall of {self.stall_ms} ms at {format_instant(self.stall_at_ns)}")
        _sleep_until(start + HOLD_FROM * self._seconds)
        self._hop.tell(f"hold {self.hold_ms}")
        self.hold_from_ns = time.time_ns()
        message(f"injected: buffering of {self.hold_ms} ms from {format_instant(self.hold_from_ns)}")
        _sleep_until(start + HOLD_TO * self._seconds)
        self._hop.tell("pass")
        self.hold_to_ns = time.time_ns()
        message(f"injected: buffering ended at {format_instant(self.hold_to_ns)}")

    def _wait_for_decoding(self) -> None:
        """A stall is felt by those who are being answered: wait, but not for ever, until the engine decodes two."""
        deadline = time.monotonic() + DECODING_WITHIN_S
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self._server_url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            found = _DECODING.search(text)
            if found is not None and float(found[1]) >= 2:
                return
            time.sleep(0.05)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
