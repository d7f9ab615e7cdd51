"""A trace that is described and not recorded: `synthetic:poisson?rate=5&n=200&prompt_p50=128&…`.

Lengths are lognormal: median, and standard deviation of the logarithm.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from urllib.parse import parse_qsl

from sloscope.client.traces import arrivals
from sloscope.client.traces.arrivals import Arrivals
from sloscope.client.traces.text import MAX_ROWS, MAX_TOKENS, TraceRow
from sloscope.errors import TraceError

SCHEME = "synthetic:"
LOOKS_LIKE = f"{SCHEME}…"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths, each lognormal: median in tokens, standard deviation of the logarithm."""

    prompt_p50: float = 128.0
    prompt_sigma: float = 0.8
    output_p50: float = 64.0
    output_sigma: float = 0.7

    def __str__(self) -> str:
        return (
            f"prompt_p50={self.prompt_p50:g}&prompt_sigma={self.prompt_sigma:g}"
            f"&output_p50={self.output_p50:g}&output_sigma={self.output_sigma:g}"
        )

    def pairs(self, seed: int) -> Iterator[tuple[int, int]]:
        # A generator for each, so that changing one parameter leaves the other draws as they were.
        prompts, outputs = (random.Random(f"{seed}:{name}") for name in ("prompts", "outputs"))
        while True:
            yield (
                _lognormal(prompts, self.prompt_p50, self.prompt_sigma),
                _lognormal(outputs, self.output_p50, self.output_sigma),
            )


def _lognormal(generator: random.Random, median: float, sigma: float) -> int:
    # The exponent is bounded, so that a huge sigma gives a long prompt and not an overflow.
    exponent = min(log(median) + sigma * generator.gauss(0.0, 1.0), log(MAX_TOKENS))
    return min(max(1, round(exp(exponent))), MAX_TOKENS)


_LENGTHS = ("prompt_p50", "prompt_sigma", "output_p50", "output_sigma")
_DEFAULTS = {"rate": 5.0, "n": 200.0} | {name: float(getattr(Lengths(), name)) for name in _LENGTHS}
# Only the kinds that know them take them.
_OF_KIND = {
    "gamma": {"cv": arrivals.CV},
    "burst": {"burst_size": float(arrivals.BURST_SIZE), "burst_on": arrivals.BURST_ON},
}
_ZERO_IS_FINE = ("prompt_sigma", "output_sigma", "burst_on")
_HELP = (
    f"{SCHEME} and one of {', '.join(arrivals.KINDS)}, then ?"
    + "&".join(f"{name}={value:g}" for name, value in _DEFAULTS.items())
)  # fmt: skip


def parse_lengths(text: str, field: str) -> Lengths:
    """`prompt_p50=128&output_p50=64`; what is not named keeps its default."""
    given = _values(f"{field} {text!r}", text, {name: _DEFAULTS[name] for name in _LENGTHS})
    return Lengths(**given)


def described(source: str, seed: int, limit: int | None) -> tuple[list[TraceRow], Arrivals]:
    """The rows of a `synthetic:…` description. The same seed, the same rows."""
    kind, _, query = source.removeprefix(SCHEME).partition("?")
    where = f"trace {source!r}"
    if kind not in arrivals.KINDS:
        raise TraceError(f"{where}: arrivals {kind!r} are not accepted; accepted: {_HELP}")
    values = _values(where, query, _DEFAULTS | _OF_KIND.get(kind, {}))
    count, size = _whole(where, "n", values["n"]), _whole(where, "burst_size", values.get("burst_size", 1))
    asked = Arrivals(
        kind, values["rate"], values.get("cv", arrivals.CV), size, values.get("burst_on", arrivals.BURST_ON)
    )
    if asked.burst_on > 1:
        raise TraceError(f"{where}: burst_on: {asked.burst_on:g} is not accepted; accepted: a share from 0 to 1")
    lengths = Lengths(**{name: values[name] for name in _LENGTHS})
    count = min(count, limit) if limit is not None else count
    stamps = islice(asked.offsets_ns(seed), count)
    rows = [
        TraceRow(at_ns, prompt, output, line)
        for line, (at_ns, (prompt, output)) in enumerate(zip(stamps, lengths.pairs(seed), strict=False), start=1)
    ]
    return rows, asked


def _values(where: str, query: str, defaults: dict[str, float]) -> dict[str, float]:
    values = dict(defaults)
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in values:
            raise TraceError(f"{where}: {name!r} is not accepted; accepted: {', '.join(values)}")
        values[name] = _positive(where, name, text)
    return values


def _positive(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9 or (value == 0 and name not in _ZERO_IS_FINE):
        raise TraceError(f"{where}: {name}: {text[:40]!r} is not accepted; accepted: a number above 0")
    return value


def _whole(where: str, name: str, value: float) -> int:
    if value != int(value) or not 1 <= value <= MAX_ROWS:
        raise TraceError(f"{where}: {name}: {value:g} is not accepted; accepted: 1 to {MAX_ROWS}")
    return int(value)
