"""A trace through the simulator: the same rows, lengths and caps that `sloscope replay` sends."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from reference_server.admission import DeadlineAdmission
from reference_server.cost_model import CostModel, OnlineFit, StepShape
from reference_server.kv_blocks import BlockPool
from reference_server.orders import Fcfs
from reference_server.policies import Admission, AdmitAll, Full, QueueOrder
from reference_server.prefill_budget import Static
from reference_server.remaining import Lengths, LengthTable
from reference_server.request import Request
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.simulation import Arrival, Observer, Result, Simulation, qualified
from sloscope.client import schedule, traces
from sloscope.contract import Contract, from_shorthand


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


def deadline_admission(cost: CostModel, server: Server, lengths: LengthTable | None = None) -> Admission:
    known = Lengths() if lengths is None else Lengths(lengths)
    return DeadlineAdmission(OnlineFit(cost), known, Full(), Static(server.prefill_tokens))


def earlier_lengths(trace: str, goodput: str, seed: int) -> LengthTable:
    """The survival curve that the answers of an earlier trace would have left."""
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
    return LengthTable.parse(json.dumps(rows))


def admit_all(cost: CostModel, server: Server) -> Admission:
    return AdmitAll()


def simulate(
    arriving: Sequence[Arrival],
    server: Server,
    cost: CostModel,
    order: QueueOrder | None = None,
    admission: Callable[[CostModel, Server], Admission] = admit_all,
    noise: float = 0.0,
    observers: Sequence[Observer] = (),
    until_ns: int | None = None,
) -> Simulation:
    policies = Policies(
        Fcfs() if order is None else order, admission(cost, server), Full(), Static(server.prefill_tokens)
    )
    limits = Limits(server.slots, server.max_context, max_waiting=1 << 30)
    simulation = Simulation(Scheduler(limits, server.pool, (), policies), cost, arriving, observers, noise, seed=1)
    simulation.run(until_ns)
    return simulation


def count_qualified(results: Sequence[Result], contract: Contract) -> int:
    limits = contract.classes[contract.default_class].limits
    return sum(qualified(result, limits).qualified for result in results)
