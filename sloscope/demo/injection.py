"""What the demo does to the stream while it runs: one decoder stall, one phase of buffering."""

import contextlib
import json
import re
import threading
import time
import urllib.request

from sloscope.demo.processes import Child
from sloscope.output import message
from sloscope.units import format_instant

# Shares of the time over which requests arrive. Early, since a trace may have a lull later.
CALM_S = 2.0  # between the stall and the buffering
STALL_AT, HOLD_FROM = 0.10, 0.20
REPLAY_STARTS_S = 1.0  # what the replay needs before its first send, about
GIVE_UP_AT = 0.90  # a lull of the trace is waited out, but not beyond this
_DECODING = re.compile(r'^sloscope_engine_requests\{state="DECODE"\} (\S+)$', re.MULTILINE)


class Injection(threading.Thread):
    """Runs beside the replay and keeps the wall times of what it did. Durations are well above the gap limit."""

    def __init__(self, server_url: str, hop: Child, seconds: float, hold_share: float, itl_max_ms: float) -> None:
        super().__init__(daemon=True)
        self._server_url, self._hop = server_url, hop
        self._seconds, self._hold_share = seconds, hold_share
        self.stall_ms = int(max(250, 10 * itl_max_ms))
        self.hold_ms = int(max(400, 15 * itl_max_ms))
        self.stall_at_ns = self.hold_from_ns = self.hold_to_ns = 0
        self.problem = ""

    def run(self) -> None:
        start = time.monotonic() + REPLAY_STARTS_S
        give_up_at = start + GIVE_UP_AT * self._seconds
        _sleep_until(start + STALL_AT * self._seconds)
        body = json.dumps({"stall_ms": self.stall_ms, "decoding": True}).encode()
        fault = urllib.request.Request(f"{self._server_url}/faults", body, {"content-type": "application/json"})
        try:
            self._wait_for_decoding(give_up_at)
            self.stall_at_ns = time.time_ns()
            with urllib.request.urlopen(fault, timeout=10) as answer:
                answer.read()
        except OSError as error:
            self.problem = f"the stall could not be injected: {error}"
        message(f"injected: a decoder stall of {self.stall_ms} ms at {format_instant(self.stall_at_ns)}")
        _sleep_until(max(start + HOLD_FROM * self._seconds, time.monotonic() + CALM_S))
        with contextlib.suppress(OSError):
            self._wait_for_decoding(give_up_at)
        self._hop.tell(f"hold {self.hold_ms}")
        self.hold_from_ns = time.time_ns()
        message(f"injected: buffering of {self.hold_ms} ms from {format_instant(self.hold_from_ns)}")
        _sleep_until(time.monotonic() + self._hold_share * self._seconds)
        self._hop.tell("pass")
        self.hold_to_ns = time.time_ns()
        message(f"injected: buffering ended at {format_instant(self.hold_to_ns)}")

    def _wait_for_decoding(self, give_up_at: float) -> None:
        """A stall is felt by who is being answered: wait, but not for ever, until the engine decodes."""
        while time.monotonic() < give_up_at:
            with urllib.request.urlopen(f"{self._server_url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            found = _DECODING.search(text)
            if found is not None and float(found[1]) >= 1:
                return
            time.sleep(0.02)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
