"""Clocks are passed in, never reached for, so that a test can step them.

Stamps are integers in nanoseconds of a monotonic clock. Two stamps may be subtracted only if
their `clock_id` is the same: kind, boot id and time namespace together name one clock.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple, Protocol


class Clock(Protocol):
    @property
    def clock_id(self) -> str: ...
    def monotonic_ns(self) -> int: ...
    def wall_ns(self) -> int: ...


def boot_id() -> str:
    """The kernel's boot id; on a system without one, a value for this process only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"pid{os.getpid()}"


def host_clock_id() -> str:
    try:
        namespace = str(os.stat("/proc/self/ns/time").st_ino)
    except OSError:
        namespace = "0"
    return f"monotonic:{boot_id()}:{namespace}"


class SystemClock:
    """CLOCK_MONOTONIC and the wall clock of this host."""

    def __init__(self) -> None:
        self.clock_id = host_clock_id()

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


class FakeClock:
    """A clock that moves when told to."""

    def __init__(self, mono_ns: int = 0, wall_ns: int = 1_700_000_000_000_000_000, clock_id: str = "fake:0:0") -> None:
        self.mono = mono_ns
        self.wall = wall_ns
        self.clock_id = clock_id

    def monotonic_ns(self) -> int:
        return self.mono

    def wall_ns(self) -> int:
        return self.wall

    def advance(self, ns: int) -> None:
        self.mono += ns
        self.wall += ns

    def step_wall(self, ns: int) -> None:
        """What an NTP correction does: the wall moves, the monotonic clock does not."""
        self.wall += ns


class Anchor(NamedTuple):
    """A pair of readings that places monotonic stamps on the wall."""

    mono_ns: int
    wall_ns: int

    def wall_at(self, stamp_ns: int) -> int:
        return self.wall_ns + (stamp_ns - self.mono_ns)
