"""What the size of a prefill chunk trades: TTFT of a long prompt against the largest gap of sixty running sequences.

Sixty sequences decode; then a prompt of 4,000 tokens comes. Really: the built-in model and the scheduler in this
process. And in simulated time, with a cost model that is fitted to those real steps. The largest gap is of the sixty,
from the arrival of the prompt to its first token and five steps on; the median step is of decodes alone, before it.
`python -m benchmarks.chunk_size`; `--only simulated --cost-model FILE` needs no model.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.engine_steps import RealEngine, describe_fit
from benchmarks.kept import options_of, save
from reference_server.cost_fit import HeldOutFit, fit_held_out
from reference_server.cost_model import CostModel, StepShape
from reference_server.kv_blocks import BLOCK_TOKENS, BlockPool
from reference_server.policies import PrefillBudget
from reference_server.prefill_budget import DecodeSlack, Static
from reference_server.request import Request
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.simulation import Arrival, Simulation
from sloscope.output import FORMATS, message, print_rows

MS = 1_000_000
BUDGETS: tuple[int | None, ...] = (None, 2048, 1024, 512, 256, 128, 64)
SLACK = "slack"
WARM_UP, MEASURED, AFTER = 5, 15, 5  # steps
MOST_OUTPUT = 200  # tokens of a running sequence: more than there are steps
LIMIT = 10  # times the median step
SLACK_GAP = 5  # what the slack budget is told to keep, times the median step


class Seen(NamedTuple):
    median_step_ns: float
    largest_gap_ns: int
    ttft_ns: int
    steps: int  # from the arrival of the prompt to its first token


class Engine(Protocol):
    @property
    def scheduler(self) -> Scheduler: ...

    def restart(self, slots: int, policies: Policies) -> Scheduler: ...

    def submit(self, key: str, prompt_tokens: int, max_tokens: int, itl_max_ns: int | None = None) -> Request: ...

    def step(self) -> tuple[int, int]:
        """Start and end."""


class SimulatedEngine:
    def __init__(self, cost: CostModel, kv_tokens: int, max_context: int) -> None:
        self._cost = cost
        self._kv_blocks = -(-kv_tokens // BLOCK_TOKENS)
        self._max_context = max_context
        self.restart(1, Policies())

    def restart(self, slots: int, policies: Policies) -> Scheduler:
        pool = BlockPool(self._kv_blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(Limits(slots, self._max_context), pool, (), policies)
        self._simulation = Simulation(self.scheduler, self._cost, ())
        return self.scheduler

    def submit(self, key: str, prompt_tokens: int, max_tokens: int, itl_max_ns: int | None = None) -> Request:
        at_ns = self._simulation.now_ns
        request = Request(key, [1] * prompt_tokens, max_tokens, arrived_ns=at_ns, itl_max_limit_ns=itl_max_ns)
        self._simulation.arrive(Arrival(request))
        return request

    def step(self) -> tuple[int, int]:
        start_ns = self._simulation.now_ns
        self._simulation.step()
        return start_ns, self._simulation.now_ns


def run(engine: Engine, budget: PrefillBudget, asked: argparse.Namespace, gap_limit_ns: int | None) -> Seen:
    engine.restart(asked.sequences + 1, Policies(budget=budget))
    most = MOST_OUTPUT
    running = [engine.submit(f"running-{i}", asked.prompt, most, gap_limit_ns) for i in range(asked.sequences)]
    engine.step()
    while any(not request.output for request in running):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    alone = [engine.step() for _ in range(MEASURED)]
    long = engine.submit("long", asked.long_prompt, most)
    together = [engine.step()]
    while not long.output:
        together.append(engine.step())
    ttft_ns = together[-1][1] - long.arrived_ns
    together += [engine.step() for _ in range(AFTER)]
    assert all(request.output for request in running) and engine.scheduler.has_work
    # Each step makes a token of every running sequence, so their gaps lie between the ends of steps.
    ends = [alone[-1][1], *(end for _, end in together)]
    gap_ns = max(later - earlier for earlier, later in pairwise(ends))
    return Seen(statistics.median(end - start for start, end in alone), gap_ns, ttft_ns, len(together) - AFTER)


def row(name: object, seen: list[Seen]) -> dict[str, object]:
    """Medians over the runs; the ratio is of each run."""
    ratio = statistics.median(each.largest_gap_ns / each.median_step_ns for each in seen)
    return {
        "budget": "whole prompt" if name is None else name,
        "median_step_ms": round(statistics.median(each.median_step_ns for each in seen) / MS, 2),
        "largest_gap_ms": round(statistics.median(each.largest_gap_ns for each in seen) / MS, 1),
        "gap_in_steps": round(ratio, 1),
        f"within_{LIMIT}_steps": ratio <= LIMIT,
        "steps": statistics.median(each.steps for each in seen),
        "ttft_ms": round(statistics.median(each.ttft_ns for each in seen) / MS, 1),
    }


def real_runs(engine: RealEngine, asked: argparse.Namespace) -> tuple[dict[int | str | None, list[Seen]], HeldOutFit]:
    """The budgets take turns. The slack budget goes by a model that is fitted to what ran before."""
    seen: dict[int | str | None, list[Seen]] = {budget: [] for budget in (*BUDGETS, SLACK)}
    for _ in range(asked.runs):
        for size in BUDGETS:
            seen[size].append(run(engine, Static(size), asked, None))
            message(f"budget {size}: {seen[size][-1]}")
        fitted = fit_held_out(engine.samples)
        step_ns = statistics.median(each.median_step_ns for of in seen.values() for each in of)
        seen[SLACK].append(run(engine, slack_budget(fitted.model), asked, round(SLACK_GAP * step_ns)))
        message(f"budget {SLACK}: {seen[SLACK][-1]}")
    return seen, fitted


def simulated_rows(engine: SimulatedEngine, cost: CostModel, asked: argparse.Namespace) -> list[dict[str, object]]:
    rows = [row(size, [run(engine, Static(size), asked, None)]) for size in BUDGETS]
    step_ns = cost.step_ns(StepShape(0, asked.sequences, asked.sequences * (asked.prompt + WARM_UP + MEASURED)))
    return [*rows, row(SLACK, [run(engine, slack_budget(cost), asked, SLACK_GAP * step_ns)])]


def slack_budget(cost: CostModel) -> PrefillBudget:
    return DecodeSlack(lambda: cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin-14m", help="as for `sloscope serve` (default: builtin-14m)")
    parser.add_argument("--sequences", type=int, default=60, help="that decode (default: 60)")
    parser.add_argument("--prompt", type=int, default=64, help="their prompts, tokens (default: 64)")
    parser.add_argument("--long-prompt", type=int, default=4000, help="tokens (default: 4000)")
    parser.add_argument("--runs", type=int, default=3, help="of each budget, in turns (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--only", choices=("real", "simulated"), help="(default: both)")
    parser.add_argument("--cost-model", type=Path, help="a fit for the simulated part; default: fitted to the real one")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args()
    if asked.only == "simulated" and asked.cost_model is None:
        parser.error("--only simulated: needs --cost-model FILE")
    rows: dict[str, list[dict[str, object]]] = {}
    cost = CostModel.from_json(asked.cost_model.read_text(encoding="utf-8")) if asked.cost_model else None
    kv_tokens = asked.sequences * (asked.prompt + MOST_OUTPUT + BLOCK_TOKENS) + asked.long_prompt + MOST_OUTPUT
    kv_tokens += BLOCK_TOKENS
    if asked.only != "simulated":
        engine = RealEngine(asked.model, kv_tokens, asked.threads)
        seen, fitted = real_runs(engine, asked)
        message(describe_fit(fitted))
        cost = cost or fitted.model
        rows["real"] = [row(name, each) for name, each in seen.items()]
        print_rows(rows["real"], asked.format, title=f"real: {asked.model}, medians of {asked.runs} runs")
    if asked.only != "real":
        assert cost is not None
        rows["simulated"] = simulated_rows(
            SimulatedEngine(cost, kv_tokens, asked.long_prompt + MOST_OUTPUT), cost, asked
        )
        print_rows(rows["simulated"], asked.format, title="simulated, with the fitted cost model")
    about = {"cost_model": json.loads(cost.to_json()) if cost else None}
    save(asked.save, "chunk_size", rows, **options_of(asked), **about)


if __name__ == "__main__":
    main()
