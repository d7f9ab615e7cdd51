"""Requests that much was received of at once, understood in slices, so that nobody else's event waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exporter.observation import Observation

SLICE_NS = 200_000


class Backlog:
    """A slice of one request in a turn of the loop, in turns.

    `call_soon` as the loop's; `failed` takes what an observation raises.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], Any], failed: Callable[[Exception], None]) -> None:
        self._call_soon = call_soon
        self._failed = failed
        self._waiting: deque[Observation] = deque()

    def add(self, observation: Observation) -> None:
        """Once, until it has caught up."""
        self._waiting.append(observation)
        if len(self._waiting) == 1:
            self._call_soon(self._turn)

    def _turn(self) -> None:
        observation = self._waiting.popleft()
        try:
            observation.catch_up(SLICE_NS)
        except Exception as error:
            self._failed(error)
        if observation.is_behind:
            self._waiting.append(observation)
        if self._waiting:
            self._call_soon(self._turn)
