"""Samples for the cost model from the engine's journal."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from reference_server.cost_model import CostModel, FitError, Sample, StepShape, error_of, fit
from sloscope.errors import JournalError
from sloscope.journal import Tail, journal_files, order_of, read_journal

LATEST = 200_000  # steps: what came before says less about the machine as it is
HELD_OUT_EVERY = 5
LEAST_OF_KIND = 10


@dataclass(slots=True)
class JournalSamples:
    samples: list[Sample] = field(default_factory=list)
    faults: int = 0  # steps left out because they had an injected fault
    captures: int = 0  # steps left out because most of their time was the capture of a program
    unusable: int = 0  # steps left out: no shape, or no time
    bad_lines: int = 0
    engines: set[tuple[Any, ...]] = field(default_factory=set)  # (model, dtype, device, threads)


class HeldOutFit(NamedTuple):
    model: CostModel
    fitted: int  # steps
    error: FitError  # of the steps that the fit did not see


class _Step(NamedTuple):
    prefill_tokens: int
    decode_tokens: int
    kv_read_tokens: int
    prefill_attention_flops: float
    decode_attention_flops: float
    duration_ns: int


def samples_from_journal(events: Path) -> JournalSamples:
    """The latest steps of the engines that wrote into this directory, in the order in which they ran."""
    found = JournalSamples()
    latest: deque[Sample] = deque(maxlen=LATEST)
    for path in sorted(journal_files(events), key=order_of):
        if path.parent.name == "engine":
            tail = Tail(path)
            latest.extend(_samples(deque(_steps(read_journal(tail, orjson.loads), found), maxlen=LATEST)))
            found.bad_lines += tail.bad_lines
    found.samples = list(latest)
    return found


def _steps(records: Iterable[dict[str, Any]], found: JournalSamples) -> Iterator[_Step]:
    for record in records:
        if record["kind"] == "engine":
            found.engines.add(tuple(record.get(name) for name in ("model", "dtype", "device", "threads")))
        if record["kind"] != "step":
            continue
        if "fault" in record:
            found.faults += 1
            continue
        if record.get("captured"):
            found.captures += 1
            continue
        step = _Step(
            record.get("prefill_tokens", -1),
            record.get("decode_tokens", -1),
            record.get("kv_read_tokens", -1),
            record.get("prefill_attention_flops", 0.0),
            record.get("decode_attention_flops", 0.0),
            record["end_ns"] - record["start_ns"],
        )
        if step.duration_ns > 0 and min(step) >= 0:
            yield step
        else:
            found.unusable += 1


def _samples(steps: Collection[_Step]) -> Iterator[Sample]:
    """A pair of a token and a position takes the same attention FLOPs in prefill and decode, and a decode attends what
    it reads: a step of decodes alone gives the FLOPs of a pair, and they give the pairs of a prefill. 0 pairs where no
    such step was recorded.
    """
    alone = next((s for s in steps if not s.prefill_tokens and s.decode_attention_flops and s.kv_read_tokens), None)
    pair_flops = alone.decode_attention_flops / alone.kv_read_tokens if alone is not None else float("inf")
    for step in steps:
        pairs = round(step.prefill_attention_flops / pair_flops)
        yield Sample(StepShape(*step[:3], pairs), step.duration_ns)


def fit_held_out(samples: list[Sample]) -> HeldOutFit:
    """Fitted to four steps of five, tried on the fifth. JournalError where the steps cannot show every cost."""
    known = [sample for i, sample in enumerate(samples) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    prefills = sum(sample.shape.prefill_tokens > 0 for sample in known)
    decodes = sum(sample.shape.decode_tokens > 0 for sample in known)
    for name, count in (("prefill_tokens", prefills), ("decode_tokens", decodes)):
        if count < LEAST_OF_KIND:
            raise JournalError(
                f"step.{name}: above 0 in {count} of {len(known)} steps to fit; accepted: at least {LEAST_OF_KIND}, "
                "with kv_read_tokens and without an injected fault"
            )
    model, _ = fit(known)
    return HeldOutFit(model, len(known), error_of(model, samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]))
