"""The schedule of a replay: everything about every request, fixed before the first is sent. Pure.

Lengths. Towards the reference server an answer has a natural end after the trace's output length (`stop_after`)
under a cap (`max_tokens`) that is drawn without looking at it, so that some answers are really capped and their
length is really unknown. Towards other servers the only way to a length is `ignore_eos` with a cap equal to it;
such rows carry `length_forced`, since their lengths say nothing about when the model would have stopped. Servers
that refuse unknown fields get the cap alone (`capped`); answers may then end before it, and are marked all the same.

Caps, where the trace gives none: with the trace's own output lengths, 5 % of the requests get their p50 as cap,
15 % their p90, 30 % their p99 and 50 % twice their maximum. So about 5 %·½ + 15 %·⅒ + 30 %·¹⁄₁₀₀ = 4.3 % of the
answers end by their cap.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sloscope.client.traces import TraceRow
from sloscope.contract import UNKNOWN_CLASS, Contract, Resolved, resolve
from sloscope.definitions import nearest_rank
from sloscope.errors import ConfigError, ContractError
from sloscope.units import NS_PER_S, parse_duration_ns

LENGTHS = ("auto", "natural", "forced", "capped")
# Share of requests → which cap. Doubling the maximum never caps.
_CAP_SHARES = ((0.05, 500), (0.20, 900), (0.50, 990))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the schedule. `rate` and `speedup` exclude each other."""

    rate: float | None = None  # mean requests per second
    speedup: float | None = None  # 2 halves every gap
    scale_lengths: float = 1.0
    scale_prompts: float | None = None  # in place of scale_lengths, for the prompt of each pair
    limit: int | None = None
    seed: int = 0
    warmup: str = "0"  # a number of requests, or a duration from the first arrival
    natural: bool = True
    class_name: str = ""
    tenants: tuple[str, ...] = ()
    cancel_rate: float = 0.0  # share of requests stopped by the consumer after a drawn number of events


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `offset_ns` from t0 is when it is due."""

    offset_ns: int
    prompt_tokens: int
    output_tokens: int  # where the answer ends by itself, or is made to end
    max_tokens: int
    stop_after: int | None  # natural end asked of the reference server
    class_name: str
    tenant: str
    warmup: bool
    cancel_after: int | None  # output events after which the consumer stops it
    text_seed: int
    line: int

    @property
    def capped(self) -> bool:
        return self.stop_after is not None and self.max_tokens < self.output_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    requests: tuple[Planned, ...]
    classes: dict[str, Resolved]  # what each class that occurs was promised

    @property
    def span_ns(self) -> int:
        return self.requests[-1].offset_ns

    @property
    def mean_rate(self) -> float | None:
        """Requests per second between first and last arrival; None when they are one instant."""
        return (len(self.requests) - 1) / (self.span_ns / NS_PER_S) if self.span_ns else None

    @property
    def ttft_limit_ns(self) -> int | None:
        """The tightest first-token limit of the classes that occur."""
        limits = [row.limits.ttft_ns or row.limits.ttft_visible_ns for row in self.classes.values()]
        return min((ns for ns in limits if ns is not None), default=None)


def build(rows: Sequence[TraceRow], contract: Contract, plan: Plan) -> Schedule:
    """Raises ConfigError or ContractError for an option, class or trace that cannot be scheduled."""
    _check(plan)
    rows = rows[: plan.limit]
    factor = _time_factor(rows, plan)
    warm_rows, warm_ns = _warmup(plan.warmup)
    draw_cap, draw_tenant, draw_cancel, draw_text = (
        random.Random(f"{plan.seed}:{name}") for name in ("caps", "tenants", "cancels", "texts")
    )
    lengths = Fraction(str(plan.scale_lengths))
    prompts = lengths if plan.scale_prompts is None else Fraction(str(plan.scale_prompts))
    outputs = sorted(_scaled(row.output_tokens, lengths) for row in rows)
    ladder = [(share, outputs[nearest_rank(permille, len(outputs)) - 1]) for share, permille in _CAP_SHARES]
    classes: dict[str, Resolved] = {}
    requests: list[Planned] = []
    for index, row in enumerate(rows):
        offset = int(row.offset_ns * factor)
        output = _scaled(row.output_tokens, lengths)
        class_name = row.class_name or plan.class_name or contract.default_class
        if class_name not in classes:
            classes[class_name] = _resolve(contract, class_name, row.line)
        # Every generator is asked once a row, so that no option shifts another's draws.
        cap = _cap(draw_cap.random(), ladder, 2 * outputs[-1])
        tenant = draw_tenant.choice(plan.tenants) if plan.tenants else ""
        cancels, cancel_share = draw_cancel.random() < plan.cancel_rate, draw_cancel.random()
        tenant = _label(row.tenant or tenant, row.line)
        requests.append(
            Planned(
                offset_ns=offset,
                prompt_tokens=_scaled(row.prompt_tokens, prompts),
                output_tokens=output,
                max_tokens=(_scaled(row.max_tokens, lengths) if row.max_tokens else cap) if plan.natural else output,
                stop_after=output if plan.natural else None,
                class_name=class_name,
                tenant=tenant,
                warmup=index < warm_rows or offset < warm_ns,
                cancel_after=1 + int(cancel_share * (output - 1)) if cancels and output > 1 else None,
                text_seed=draw_text.getrandbits(32),
                line=row.line,
            )
        )
    return Schedule(tuple(requests), classes)


def _check(plan: Plan) -> None:
    if plan.rate is not None and plan.speedup is not None:
        raise ConfigError("--speedup: not together with --rate; accepted: one of the two")
    for name, value in (
        ("--rate", plan.rate),
        ("--speedup", plan.speedup),
        ("--scale-lengths", plan.scale_lengths),
        ("--scale-prompts", plan.scale_prompts),
    ):
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name}: {value!r} is not accepted; accepted: a number above 0")
    if plan.limit is not None and plan.limit < 1:
        raise ConfigError(f"--limit: {plan.limit!r} is not accepted; accepted: 1 or more requests")
    if not 0 <= plan.cancel_rate <= 1:
        raise ConfigError(f"--cancel-rate: {plan.cancel_rate!r} is not accepted; accepted: a share from 0 to 1")


def _time_factor(rows: Sequence[TraceRow], plan: Plan) -> Fraction:
    """By what every offset is multiplied. n arrivals have n − 1 gaps, and the mean rate is over those."""
    if plan.speedup is not None:
        return 1 / Fraction(str(plan.speedup))
    if plan.rate is None:
        return Fraction(1)
    span = rows[-1].offset_ns
    if span == 0:
        raise ConfigError(f"--rate: {plan.rate!r} needs a trace whose arrivals differ; these are at one instant")
    return Fraction((len(rows) - 1) * NS_PER_S, span) / Fraction(str(plan.rate))


def _warmup(text: str) -> tuple[int, int]:
    """(rows, ns): one of the two is 0."""
    if text.strip().isascii() and text.strip().isdigit():
        return int(text), 0
    try:
        return 0, parse_duration_ns(text, "--warmup")
    except ConfigError:
        raise ConfigError(f"--warmup: {text!r} is not accepted; accepted: a number of requests, or 30s") from None


def _scaled(tokens: int, factor: Fraction) -> int:
    """Rounded half up, at least one token."""
    return max(1, int(tokens * factor + Fraction(1, 2)))


def _cap(draw: float, ladder: Sequence[tuple[float, int]], beyond: int) -> int:
    return next((tokens for share, tokens in ladder if draw < share), beyond)


def _label(text: str, line: int) -> str:
    """A value that becomes a header: nothing in it may end the line."""
    if not (text.isascii() and text.isprintable() and len(text) <= 128):
        raise ConfigError(
            f"label: {text[:60]!r} (trace line {line}) is not accepted; accepted: printable ASCII, up to 128"
        )
    return text


def _resolve(contract: Contract, class_name: str, line: int) -> Resolved:
    resolved = resolve(contract, {"x-slo-class": _label(class_name, line)})
    if not resolved.known or class_name == UNKNOWN_CLASS:
        raise ContractError(
            f"class: {class_name!r} (trace line {line}) is not in the contract; accepted: {', '.join(contract.classes)}"
        )
    return resolved


# --- what is sent -----------------------------------------------------------------------------------------------

# Short everyday words: with the blank before it each is one token in the vocabularies of GPT-2, Llama and SmolLM.
_WORD_LIST = """
the of and to in is it for was on are as with they at be this from have or by one had not but what all were when
we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like see time could no make than first been who now made over did down only way find
use may water long little very after just where most know morning city garden house door window light night
river road stone tree winter summer street voice letter paper
"""
_WORDS = tuple(_WORD_LIST.split())
_TEXT_WORDS = 1 << 16


class PromptText:
    """Prompts of a wanted length, cut from one long run of words at a place that the request's seed picks.

    Cutting costs no more than copying, so a prompt of 100,000 tokens is not late for it. Two prompts share a prefix
    only by chance.
    """

    def __init__(self, seed: int) -> None:
        generator = random.Random(f"{seed}:words")
        words = [generator.choice(_WORDS) for _ in range(_TEXT_WORDS)]
        self._starts = [0]
        for word in words:
            self._starts.append(self._starts[-1] + len(word) + 1)
        self._text = "".join(f" {word}" for word in words).encode()

    def cut(self, tokens: int, text_seed: int) -> bytes:
        """About `tokens` tokens: as many words, each with the blank before it. Needs no escaping in JSON."""
        first = text_seed % _TEXT_WORDS
        parts: list[bytes] = []
        while tokens > 0:
            last = min(first + tokens, _TEXT_WORDS)
            parts.append(self._text[self._starts[first] : self._starts[last]])
            tokens -= last - first
            first = 0
        return b"".join(parts)


def summary(schedule: Schedule) -> dict[str, Any]:
    """What a dry run prints."""
    requests = schedule.requests
    prompts = sorted(row.prompt_tokens for row in requests)
    outputs = sorted(row.output_tokens for row in requests)

    def rank(values: Sequence[int], permille: int) -> int:
        return values[nearest_rank(permille, len(values)) - 1]

    return {
        "requests": len(requests),
        "span_s": schedule.span_ns / NS_PER_S,
        "mean_rate_rps": schedule.mean_rate,
        "classes": ", ".join(schedule.classes),
        "prompt_tokens_p50": rank(prompts, 500),
        "prompt_tokens_p90": rank(prompts, 900),
        "prompt_tokens_max": prompts[-1],
        "output_tokens_p50": rank(outputs, 500),
        "output_tokens_p90": rank(outputs, 900),
        "output_tokens_max": outputs[-1],
        "capped": sum(row.capped for row in requests),
        "warmup": sum(row.warmup for row in requests),
        "cancelling": sum(row.cancel_after is not None for row in requests),
    }
