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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from sloscope.client.traces import BLOCK_TOKENS, TraceRow
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
    slow_readers: float = 0.0  # share of requests whose consumer holds off reading
    until_ns: int | None = None  # when the arrival after the last of all rows would be due; None: nobody knows


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
    index: int = 0  # position in the whole schedule
    blocks: tuple[int, ...] = ()  # of the prompt, by the trace's ids
    slow_reader: bool = False

    @property
    def capped(self) -> bool:
        return self.stop_after is not None and self.max_tokens < self.output_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    requests: tuple[Planned, ...]
    classes: dict[str, Resolved]  # what each class that occurs was promised
    span_ns: int  # from the first arrival to the last, of the whole schedule in every part of it
    block_tokens: Fraction = Fraction(BLOCK_TOKENS)  # of a prompt block after scaling
    until_ns: int | None = None  # when the next arrival would be due; None: nobody knows

    def part(self, number: int, parts: int) -> Schedule:
        """Every `parts`-th request from `number` on, at the times of the whole schedule. May be empty."""
        return replace(self, requests=self.requests[number::parts])

    @property
    def mean_rate(self) -> float | None:
        """Requests per second between first and last arrival, of bursts with the pause behind the last; None when they
        are one instant.
        """
        gaps, span_ns = _gaps(len(self.requests), self.span_ns, self.until_ns)
        return gaps / (span_ns / NS_PER_S) if span_ns else None

    @property
    def ttft_limit_ns(self) -> int | None:
        """The tightest first-token limit of the classes that occur."""
        limits = [row.limits.ttft_ns or row.limits.ttft_visible_ns for row in self.classes.values()]
        return min((ns for ns in limits if ns is not None), default=None)


def build(rows: Sequence[TraceRow], contract: Contract, plan: Plan) -> Schedule:
    """Raises ConfigError or ContractError for an option, class or trace that cannot be scheduled."""
    _check(plan)
    if plan.limit is not None and plan.limit < len(rows):
        rows, plan = rows[: plan.limit], replace(plan, until_ns=None)
    factor = _time_factor(rows, plan)
    warm_rows, warm_ns = _warmup(plan.warmup)
    draw_cap, draw_tenant, draw_cancel, draw_text, draw_slow = (
        random.Random(f"{plan.seed}:{name}") for name in ("caps", "tenants", "cancels", "texts", "slow")
    )
    lengths = Fraction(str(plan.scale_lengths))
    prompts = lengths if plan.scale_prompts is None else Fraction(str(plan.scale_prompts))
    outputs = sorted(_scaled(row.output_tokens, lengths) for row in rows)
    ladder = [(share, outputs[nearest_rank(permille, len(outputs)) - 1]) for share, permille in _CAP_SHARES]
    classes: dict[str, Resolved] = {}
    requests: list[Planned] = []
    for index, row in enumerate(rows):
        offset = row.offset_ns * factor.numerator // factor.denominator
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
                index=index,
                blocks=row.blocks,
                slow_reader=draw_slow.random() < plan.slow_readers,
            )
        )
    until_ns = None if plan.until_ns is None else plan.until_ns * factor.numerator // factor.denominator
    return Schedule(tuple(requests), classes, requests[-1].offset_ns, BLOCK_TOKENS * prompts, until_ns)


def _gaps(arrivals: int, span_ns: int, until_ns: int | None) -> tuple[int, int]:
    """(gaps between arrivals, ns that they take): the last arrival has one where it is known when the next is due."""
    return (arrivals - 1, span_ns) if until_ns is None else (arrivals, until_ns)


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
    for name, share in (("--cancel-rate", plan.cancel_rate), ("--slow-readers", plan.slow_readers)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}: {share!r} is not accepted; accepted: a share from 0 to 1")


def _time_factor(rows: Sequence[TraceRow], plan: Plan) -> Fraction:
    """By what every offset is multiplied. The mean rate is over the gaps between arrivals."""
    if plan.speedup is not None:
        return 1 / Fraction(str(plan.speedup))
    if plan.rate is None:
        return Fraction(1)
    gaps, span = _gaps(len(rows), rows[-1].offset_ns, plan.until_ns)
    if span == 0:
        raise ConfigError(f"--rate: {plan.rate!r} needs a trace whose arrivals differ; these are at one instant")
    return Fraction(gaps * NS_PER_S, span) / Fraction(str(plan.rate))


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
    # In integers: products of fractions add up over a trace of a million rows.
    return max(1, (2 * tokens * factor.numerator + factor.denominator) // (2 * factor.denominator))


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


_MARK_WORDS = 4
_MIX = 0x9E3779B1  # 2^32 over the golden ratio: neighbouring ids begin far from each other


class PromptText:
    """Prompts of a wanted length, cut from one long run of words at a place that the request's seed picks.

    Cutting costs no more than copying, so a prompt of 100,000 tokens is not late for it. Two prompts share a prefix
    only by chance, and where the trace says so: a block of a trace is the same text under the same id, and another from
    its first words on under another.
    """

    def __init__(self, seed: int, block_tokens: Fraction = Fraction(BLOCK_TOKENS)) -> None:
        generator = random.Random(f"{seed}:words")
        words = [generator.choice(_WORDS) for _ in range(_TEXT_WORDS)]
        self._starts = [0]
        for word in words:
            self._starts.append(self._starts[-1] + len(word) + 1)
        self._text = "".join(f" {word}" for word in words).encode()
        self._block_tokens = block_tokens

    def prompt(self, planned: Planned) -> bytes:
        """The request's own text behind the blocks that its trace names."""
        parts: list[bytes] = []
        done = 0
        for number, block_id in enumerate(planned.blocks, start=1):
            end = min(block_end(number, self._block_tokens), planned.prompt_tokens)
            parts.append(self._block(block_id, end - done))
            done = end
        parts.append(self.cut(planned.prompt_tokens - done, planned.text_seed))
        return b"".join(parts)

    def _block(self, block_id: int, tokens: int) -> bytes:
        """The id written in words, its last digit first, then text that it picks."""
        marks: list[bytes] = []
        rest = block_id
        for _ in range(min(_MARK_WORDS, tokens)):
            rest, digit = divmod(rest, len(_WORDS))
            marks.append(b" " + _WORDS[digit].encode())
        return b"".join(marks) + self.cut(tokens - len(marks), block_id * _MIX)

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


def block_end(number: int, block_tokens: Fraction) -> int:
    """Tokens of a prompt up to the end of its `number`-th block: rounded in sum, so that scaling keeps every share."""
    return int(number * block_tokens)


# --- what it comes to -------------------------------------------------------------------------------------------

_QUANTILES = ((500, "p50"), (900, "p90"), (990, "p99"))


def summary(schedule: Schedule) -> dict[str, Any]:
    """What a dry run prints. Counts are requests, `_tokens` of one request; None is not defined."""
    requests = schedule.requests
    row: dict[str, Any] = {
        "requests": len(requests),
        "span_s": schedule.span_ns / NS_PER_S,
        "mean_rate_rps": schedule.mean_rate,
        "peak_rate_rps": peak_rate([each.offset_ns for each in requests]),
        "arrival_cv": arrival_cv([each.offset_ns for each in requests]),
        "classes": _counted(each.class_name for each in requests),
        "tenants": _counted(each.tenant for each in requests if each.tenant),
    }
    for name, values in (
        ("prompt_tokens", sorted(each.prompt_tokens for each in requests)),
        ("output_tokens", sorted(each.output_tokens for each in requests)),
    ):
        for permille, said in _QUANTILES:
            row[f"{name}_{said}"] = values[nearest_rank(permille, len(values)) - 1]
        row[f"{name}_max"] = values[-1]
        row[f"{name}_sum"] = sum(values)
    return row | {
        "shared_prefix_share": shared_prefix_share(schedule),
        "capped": sum(each.capped for each in requests),
        "warmup": sum(each.warmup for each in requests),
        "cancelling": sum(each.cancel_after is not None for each in requests),
        "slow_readers": sum(each.slow_reader for each in requests),
    }


def _counted(names: Iterable[str]) -> str | None:
    return ", ".join(f"{name}={count}" for name, count in Counter(names).most_common()) or None


def peak_rate(offsets_ns: Sequence[int]) -> int:
    """Most arrivals in any one second, wherever it begins."""
    first = peak = 0
    for last, offset_ns in enumerate(offsets_ns):
        while offset_ns - offsets_ns[first] >= NS_PER_S:
            first += 1
        peak = max(peak, last - first + 1)
    return peak


def arrival_cv(offsets_ns: Sequence[int]) -> float | None:
    """Standard deviation of the gaps over their mean: 0 for constant arrivals, about 1 for Poisson's."""
    gaps = [after - before for before, after in pairwise(offsets_ns)]
    if len(gaps) < 2 or not any(gaps):
        return None
    return pstdev(gaps) / fmean(gaps)


def shared_prefix_share(schedule: Schedule) -> float | None:
    """Share of all prompt tokens that stand in a chain of blocks which an earlier prompt began with.

    What a prefix cache that forgets nothing could give. None for a trace that names no blocks.
    """
    if not any(each.blocks for each in schedule.requests):
        return None
    nodes: dict[tuple[int, int], int] = {}  # (node, block id) → the node behind it
    known: list[int] = [0]  # tokens that the longest prompt through a node has up to there
    shared = 0
    for each in schedule.requests:
        node = 0
        reused = 0
        for number, block_id in enumerate(each.blocks, start=1):
            end = min(block_end(number, schedule.block_tokens), each.prompt_tokens)
            found = nodes.get((node, block_id))
            if found is None:
                found = nodes[node, block_id] = len(known)
                known.append(end)
            else:
                reused = min(known[found], end)
                known[found] = max(known[found], end)
            node = found
        shared += reused
    return shared / sum(each.prompt_tokens for each in schedule.requests)
