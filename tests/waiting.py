"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any

import httpx


def until(what: Callable[[], Any], timeout_s: float = 60, every_s: float = 0.02) -> Any:
    """The first true value of `what`; a failed assert or connection counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if value := what():
                return value
        except (AssertionError, httpx.HTTPError, OSError):
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(every_s)
