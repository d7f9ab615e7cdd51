"""When requests arrive, where a trace does not say or something else is wanted. Pure: the same seed, the same stamps.

| kind | gaps |
|---|---|
| `poisson` | exponential: independent callers |
| `gamma` | gamma with coefficient of variation `cv`: above 1 burstier than Poisson, below 1 more even |
| `constant` | all the same |
| `burst` | on and off: `burst_size` arrivals, evenly spaced in the first `burst_on` of each period, then none |

Each has the mean rate that was asked for. Random gaps are independent draws, so that a finite run has it about.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sloscope.units import NS_PER_S

KINDS = ("poisson", "gamma", "constant", "burst")
CV, BURST_SIZE, BURST_ON = 2.0, 10, 0.1


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` in requests per second is the mean; for bursts it is burst_size / period."""

    kind: str
    rate: float
    cv: float = CV
    burst_size: int = BURST_SIZE
    burst_on: float = BURST_ON  # share of the period

    def __str__(self) -> str:
        said = f"{self.kind} at {self.rate:g} req/s"
        if self.kind == "gamma":
            said += f", cv {self.cv:g}"
        if self.kind == "burst":
            period = self.burst_size / self.rate
            said += f", {self.burst_size} in {self.burst_on * period:g}s of every {period:g}s"
        return said

    def offsets_ns(self, seed: int) -> Iterator[int]:
        """Of arrival after arrival without end, from 0 and never falling."""
        if self.kind == "burst":
            yield from self._bursts_ns()
            return
        draw = random.Random(f"{seed}:arrivals")
        at_s = 0.0
        while True:
            yield round(at_s * NS_PER_S)
            match self.kind:
                case "poisson":
                    at_s += draw.expovariate(self.rate)
                case "gamma":
                    # Mean shape · scale = 1 / rate, and cv = 1 / √shape.
                    at_s += draw.gammavariate(1 / self.cv**2, self.cv**2 / self.rate)
                case _:
                    at_s += 1 / self.rate

    def until_ns(self, count: int) -> int | None:
        """When the arrival after so many bursty ones is due, so that the pause behind a burst is theirs; None: another
        kind, of which gaps alone make the mean rate.
        """
        return next(islice(self._bursts_ns(), count, None)) if self.kind == "burst" else None

    def _bursts_ns(self) -> Iterator[int]:
        period_ns = self.burst_size * NS_PER_S / self.rate
        number = 0
        while True:
            for position in range(self.burst_size):
                yield round((number + self.burst_on * position / self.burst_size) * period_ns)
            number += 1
