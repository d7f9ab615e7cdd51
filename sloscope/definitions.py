"""What the numbers mean: pure functions on integer nanoseconds, the same that the SQL computes.

Every function takes stamps of one monotonic clock. Undefined is None, never 0: a zero would improve a
latency exactly when service failed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, comb, log, sqrt
from operator import sub
from typing import NamedTuple

from sloscope.contract import Limits

CONTENT, REASONING, TOOL = range(3)  # positions in records.OUTPUT_TYPES
Z_95 = 1.959963984540054  # 97.5 % point of the standard normal distribution


# --- one request: stamps → durations ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """A request at one observer. Durations and stamps in ns, None where undefined.

    `ttft_worst_ns` is the first receipt of the choice that waited longest, None when a choice never got output.
    `span_ns` and
    `span_tokens` belong to the choice with the largest TPOT; `span_tokens` is None when its tokens are unknown.
    """

    events: int = 0
    tokens: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    ttft_ns: int | None = None
    ttft_visible_ns: int | None = None
    ttft_worst_ns: int | None = None
    ttft_visible_worst_ns: int | None = None
    itl_max_ns: int | None = None
    span_ns: int | None = None
    span_tokens: int | None = None
    e2e_ns: int | None = None


def summarise(
    start_ns: int,
    t_ns: Sequence[int],
    choice: Sequence[int],
    types: Sequence[int],
    n_choices: int = 1,
    total_tokens: int | None = None,
    event_tokens: Sequence[int] | None = None,
    completed_ns: int | None = None,
) -> Summary:
    """Receipts (in order of receipt, one entry per choice and event) to the numbers that a contract judges.

    `start_ns` is send at a client, arrived at a sidecar or server. `event_tokens` gives tokens per event; they are
    used for a choice
    of several only when they sum to `total_tokens`. `completed_ns` is the end of a completed answer: what came
    without a receipt (a whole body, or a tool call without arguments) was received then. It has no TTFT.
    """
    if not t_ns:
        return Summary(tokens=total_tokens, e2e_ns=None if completed_ns is None else completed_ns - start_ns)
    of_choice = _by_choice(t_ns, choice)
    first = {index: stamps[0] for index, stamps in of_choice.items()}
    last = {index: stamps[-1] for index, stamps in of_choice.items()}
    visible = first
    if REASONING in types:
        seen = [(stamp, index) for stamp, index, kind in zip(t_ns, choice, types, strict=True) if kind != REASONING]
        visible = {index: stamps[0] for index, stamps in _by_choice(*zip(*seen, strict=True)).items()} if seen else {}
    itl_max = max((max(_gaps(stamps)) for stamps in of_choice.values() if len(stamps) > 1), default=None)
    span_ns, span_tokens = _worst_span(first, last, choice, n_choices, total_tokens, event_tokens)
    return Summary(
        events=len(t_ns),
        tokens=total_tokens,
        first_ns=min(first.values()),
        last_ns=max(last.values()),
        ttft_ns=min(first.values()) - start_ns,
        ttft_visible_ns=min(visible.values()) - start_ns if visible else None,
        ttft_worst_ns=max(first.values()) - start_ns if len(first) >= n_choices else None,
        ttft_visible_worst_ns=max(visible.values()) - start_ns if len(visible) >= n_choices else None,
        itl_max_ns=itl_max,
        span_ns=span_ns,
        span_tokens=span_tokens,
        e2e_ns=max(last.values()) - start_ns,
    )


def _worst_span(
    first: Mapping[int, int],
    last: Mapping[int, int],
    choice: Sequence[int],
    n_choices: int,
    total_tokens: int | None,
    event_tokens: Sequence[int] | None,
) -> tuple[int, int | None]:
    if n_choices <= 1 and len(first) == 1:
        index = next(iter(first))
        return last[index] - first[index], total_tokens
    if event_tokens is None or sum(event_tokens) != total_tokens:
        return max(last[i] - first[i] for i in first), None
    tokens: dict[int, int] = {}
    for index, count in zip(choice, event_tokens, strict=True):
        tokens[index] = tokens.get(index, 0) + count
    timed = {i: (last[i] - first[i], tokens[i]) for i in first if tokens[i] > 1}
    if not timed:
        return 0, 1
    return max(timed.values(), key=lambda pair: pair[0] / (pair[1] - 1))


def tpot_s(span_ns: int | None, tokens: int | None) -> float | None:
    """Mean seconds per output token after the first: (last − first) / (tokens − 1).

    None below two tokens: the mean is undefined, and a 0 would flatter the histogram. Source: vLLM v1
    mean_time_per_output_token, which yields 0 there.
    """
    if span_ns is None or tokens is None or tokens < 2:
        return None
    return span_ns / (tokens - 1) / 1e9


def token_gaps_ns(t_ns: Sequence[int], choice: Sequence[int], event_tokens: Sequence[int]) -> list[int]:
    """ITL: k tokens in one event are k − 1 gaps of 0 and one gap of the ICL; the first event of a choice opens none
    but its zeros. An event without tokens opens and ends none.
    """
    timed = [(stamp, index) for stamp, index, tokens in zip(t_ns, choice, event_tokens, strict=True) if tokens > 0]
    if not timed:
        return []
    return event_gaps_ns(*zip(*timed, strict=True)) + [0] * (sum(event_tokens) - len(timed))


def event_gaps_ns(t_ns: Sequence[int], choice: Sequence[int]) -> list[int]:
    """ICL: gaps between consecutive receipts of one choice; one choice after the other."""
    gaps: list[int] = []
    for stamps in _by_choice(t_ns, choice).values():
        gaps.extend(_gaps(stamps))
    return gaps


def _by_choice(t_ns: Sequence[int], choice: Sequence[int]) -> dict[int, Sequence[int]]:
    """Stamps of each choice, in order of receipt. Nearly every answer has one, and then nothing is copied."""
    if not t_ns:
        return {}
    if choice.count(choice[0]) == len(choice):
        return {choice[0]: t_ns}
    stamps: dict[int, list[int]] = {}
    for stamp, index in zip(t_ns, choice, strict=True):
        stamps.setdefault(index, []).append(stamp)
    return {**stamps}


def _gaps(stamps: Sequence[int]) -> Iterable[int]:
    return map(sub, stamps[1:], stamps)


# --- one request: how it ended -----------------------------------------------------------------------------

_FINISH = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_FAILING_FINISH = frozenset({"abort", "error"})


def normalise_finish(reason: str) -> str:
    """stop, length, tool_calls, content_filter or other."""
    return _FINISH.get(reason, "other")


@dataclass(slots=True)
class StreamEnd:
    """What an observer saw of the end of one request."""

    http_status: int | None = None
    transport: str = "eof"  # eof, reset, connect_error, timeout
    left: str = ""  # the consumer ended it: voluntary, client_timeout, disconnect, slow_reader
    finishes: Mapping[int, str] = field(default_factory=dict)  # choice → finish_reason as sent
    n_choices: int = 1
    done: bool = False  # data: [DONE]
    error: str | None = None  # class of an in-band error
    malformed: bool = False  # an event that was no event of this API
    events: int = 0  # output events
    tokens: int | None = None  # output tokens that the final usage counts
    min_tokens: int = 1


class Ended(NamedTuple):
    outcome: str
    reason: str


def classify_end(end: StreamEnd) -> Ended:
    """The one outcome of a request. First match wins: what the service did before what the consumer did after it."""
    if end.transport == "connect_error":
        return Ended("failed", "connect_error")
    status = end.http_status
    if status in (429, 503):
        return Ended("failed", "rejected")
    if status in (408, 504):
        return Ended("failed", "timeout")
    if status is not None and status >= 300:
        return Ended("failed", "http_error")
    if end.error is not None or any(reason in _FAILING_FINISH for reason in end.finishes.values()):
        return Ended("failed", "in_band_error")
    proper = end.done or len(end.finishes) >= end.n_choices
    if proper:
        # A tool call without arguments is an answer with tokens and no output event: complete, and without a TTFT.
        if end.events == 0 and not end.tokens and end.min_tokens > 0:
            return Ended("failed", "empty_stream")
        return Ended("completed", "")
    if end.left:
        return Ended("cancelled", end.left)
    if end.transport == "timeout":
        return Ended("failed", "timeout")
    if end.transport == "reset":
        return Ended("failed", "upstream_reset")
    if end.malformed:
        return Ended("failed", "bad_stream")
    if end.events == 0:
        return Ended("failed", "empty_stream")
    return Ended("failed", "truncated")


# --- one request against its contract ------------------------------------------------------------------


class Verdict(NamedTuple):
    qualified: bool
    misses: tuple[str, ...]  # limit names, `min_tokens`, `outcome`, `class`
    vacuous: bool  # completed, and a limit on gaps counted as met because there was no gap


def judge(
    outcome: str | None,
    summary: Summary,
    limits: Limits,
    *,
    streamed: bool = True,
    streaming: str = "required",
    class_known: bool = True,
) -> Verdict:
    """Completed, and every declared limit met. Comparisons are `<=` on integers.

    A missing TTFT is a miss, unless the class says streaming = "optional" and the request did not stream: then only
    e2e is judged. A missing gap or TPOT of a completed request is met, and counted as vacuous, whatever else was
    missed.
    """
    misses: list[str] = []
    vacuous = False
    if not class_known:
        misses.append("class")
    if outcome != "completed":
        misses.append("outcome")
    declared = limits.declared()
    if streaming == "optional" and not streamed:
        declared = {name: ns for name, ns in declared.items() if name == "e2e"}
    for name, limit in declared.items():
        value, limit = _measured(name, limit, summary)
        if value is None:
            if name in ("itl_max", "tpot"):
                vacuous = vacuous or outcome == "completed"
            else:
                misses.append(name)
        elif value > limit:
            misses.append(name)
    if outcome == "completed" and summary.tokens is not None and summary.tokens < limits.min_tokens:
        misses.append("min_tokens")
    return Verdict(not misses, tuple(misses), vacuous)


def _measured(name: str, limit: int, summary: Summary) -> tuple[int | None, int]:
    """Measured value and limit as two integers that may be compared."""
    match name:
        case "ttft":
            return summary.ttft_worst_ns, limit
        case "ttft_visible":
            return summary.ttft_visible_worst_ns, limit
        case "itl_max":
            return summary.itl_max_ns, limit
        case "e2e":
            return summary.e2e_ns, limit
        case "tpot":
            # span / (tokens − 1) <= limit without a division
            if summary.span_ns is None or summary.span_tokens is None or summary.span_tokens < 2:
                return None, limit
            return summary.span_ns, limit * (summary.span_tokens - 1)
    raise AssertionError(f"no such limit: {name}")


# --- cohorts -----------------------------------------------------------------------------------------------


def ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def wilson(k: int, n: int, z: float = Z_95) -> tuple[float | None, float | None]:
    """Wilson score interval of k of n at 95 %. It assumes independent requests; requests that share a queue are
    not.
    """
    if n == 0:
        return None, None
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def nearest_rank(q_permille: int, n: int) -> int:
    """Rank (from 1) of the quantile by nearest rank: ceil(q · n), in integers. q in thousandths, so 990 is p99."""
    return max(1, -(-q_permille * n // 1000))


def min_n_two_sided(q: float) -> int:
    """Fewest samples for which a two-sided 95 % rank interval of quantile q exists: p99 368, p95 72, p90 36."""
    return ceil(log(0.025) / log(max(q, 1 - q)))


def min_n_upper(q: float) -> int:
    """Fewest samples for which an upper 95 % rank bound of quantile q exists: p99 299, p95 59, p90 29."""
    return ceil(log(0.05) / log(q))


def binomial_cdf(k: int, n: int, p: float) -> float:
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
