"""A trace through the simulator: the same rows, lengths and caps that `sloscope replay` sends."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from reference_server.admission import DeadlineAdmission
from reference_server.cost_model import CostModel, OnlineFit, StepShape, shape_of
from reference_server.kv_blocks import BLOCK_TOKENS, BlockPool
from reference_server.orders import Fcfs
from reference_server.policies import Admission, AdmitAll, Full, QueueOrder
from reference_server.prefill_budget import Static
from reference_server.remaining import Lengths, LengthTable
from reference_server.request import Request
from reference_server.scheduler import Emitted, Limits, Policies, Scheduler, StepPlan
from reference_server.simulation import Arrival, Observer, Result, Simulation, qualified
from sloscope.client import schedule, traces
from sloscope.contract import Contract, from_shorthand
from sloscope.output import FORMATS


class Server(NamedTuple):
    """What `sloscope serve` would be started with."""

    slots: int
    kv_tokens: int
    block_tokens: int
    max_context: int
    prefill_tokens: int | None

    @property
    def pool(self) -> BlockPool:
        return BlockPool(self.kv_tokens // self.block_tokens, self.block_tokens)


SERVER = Server(slots=16, kv_tokens=16_384, block_tokens=BLOCK_TOKENS, max_context=2048, prefill_tokens=256)


class Learning(Observer):
    """Feeds the steps to the cost model that admission goes by, as the engine does: it is not told what times them."""

    def __init__(self, costs: OnlineFit) -> None:
        self._costs = costs

    def stepped(self, plan: StepPlan, emitted: Sequence[Emitted], start_ns: int, end_ns: int) -> None:
        self._costs.observe(shape_of(plan.items, plan.decodes), end_ns - start_ns)


def common_options(about: str | None) -> argparse.ArgumentParser:
    """Of the benchmarks that simulate SERVER with a model of this machine's steps."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin-14m", help="as for `sloscope serve` (default: builtin-14m)")
    parser.add_argument("--cost-model", type=Path, help="a recorded fit; default: measured at the start")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument(
        "--lengths",
        default="prompt_p50=128&prompt_sigma=0.8&output_p50=32&output_sigma=0.7",
        help="of prompts and outputs, as in a synthetic trace (default: medians of 128 and 32 tokens)",
    )
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    return parser


def full_step_ns(cost: CostModel, server: Server) -> int:
    """A full batch beside a whole chunk: the unit of contracts that mean the same on any machine."""
    return cost.step_ns(StepShape(server.prefill_tokens or 0, server.slots, server.slots * 256))


def synthetic(rate: float, seconds: float, lengths: str) -> str:
    """A trace of `sloscope replay`; `lengths` as in `prompt_p50=128&prompt_sigma=0.8&…`."""
    return f"synthetic:poisson?rate={rate:g}&n={max(1, round(rate * seconds))}&{lengths}"


def planned(trace: str, goodput: str, seed: int) -> tuple[list[schedule.Planned], Contract]:
    contract = from_shorthand(goodput)
    rows = traces.load(trace, seed=seed).rows
    return list(schedule.build(rows, contract, schedule.Plan(seed=seed)).requests), contract


def arrivals(requests: Sequence[schedule.Planned], contract: Contract, server: Server) -> list[Arrival]:
    limits = contract.classes[contract.default_class].limits
    found = []
    for number, each in enumerate(requests):
        prompt = [1] * min(each.prompt_tokens, server.max_context - 1)
        found.append(
            Arrival(
                Request(
                    f"{each.tenant}{number}",
                    prompt,
                    min(each.max_tokens, server.max_context - len(prompt)),
                    each.stop_after,
                    tenant=each.tenant,
                    arrived_ns=each.offset_ns,
                    ttft_limit_ns=limits.ttft_ns,
                    itl_max_limit_ns=limits.itl_max_ns,
                )
            )
        )
    return found


def deadline_admission(costs: OnlineFit, server: Server, lengths: LengthTable | None = None) -> Admission:
    known = Lengths() if lengths is None else Lengths(lengths)
    return DeadlineAdmission(costs, known, Full(), Static(server.prefill_tokens))


def earlier_lengths(trace: str, goodput: str, seed: int) -> LengthTable:
    return LengthTable.parse(earlier_curve(trace, goodput, seed))


def earlier_curve(trace: str, goodput: str, seed: int) -> str:
    """The survival curve that the answers of an earlier trace would have left, as `--lengths` takes it."""
    requests, _ = planned(trace, goodput, seed)
    ended = Counter(each.output_tokens for each in requests if not each.capped)
    cut = Counter(each.max_tokens for each in requests if each.capped)
    rows, at_risk, survival = [], len(requests), 1.0
    for tokens in sorted(ended | cut):
        events, censored = ended[tokens], cut[tokens]
        survival *= 1 - events / at_risk
        counts = {"at_risk": at_risk, "events": events, "censored": censored}
        rows.append({"cohort": "all", "tokens": tokens, **counts, "survival": survival})
        at_risk -= events + censored
    return json.dumps(rows)


def simulate(
    arriving: Sequence[Arrival],
    server: Server,
    cost: CostModel,
    order: QueueOrder | None = None,
    admission: Admission | None = None,
    noise: float = 0.0,
    observers: Sequence[Observer] = (),
    until_ns: int | None = None,
) -> Simulation:
    """`cost` times the steps; nothing else is told it."""
    chosen = AdmitAll() if admission is None else admission
    policies = Policies(Fcfs() if order is None else order, chosen, Full(), Static(server.prefill_tokens))
    limits = Limits(server.slots, server.max_context, max_waiting=1 << 30)
    simulation = Simulation(Scheduler(limits, server.pool, (), policies), cost, arriving, observers, noise, seed=1)
    simulation.run(until_ns)
    return simulation


def count_qualified(results: Sequence[Result], contract: Contract) -> int:
    limits = contract.classes[contract.default_class].limits
    return sum(qualified(result, limits).qualified for result in results)
