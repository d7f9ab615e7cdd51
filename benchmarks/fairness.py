"""What flooding tenants do to a polite one, under first come, first served, virtual counters and deficit round robin.

A polite tenant sends a tenth of what the server can run. Two others flood it with five times of that together,
one twice as much as the other. In simulated time, with a cost model of this machine's steps. Printed: the polite one's
attainment alone and flooded, beside the least that docs/decisions/014-fairness-bound.md promises; the service each
tenant received; and the largest drift between two tenants while both were backlogged, beside the declared bound.
`python -m benchmarks.fairness`.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine_steps import cost_model, options_of, save
from benchmarks.load import Server, arrivals, full_step_ns, planned, simulate, synthetic
from reference_server.cost_model import CostModel, StepShape
from reference_server.fairness import ServiceUnit, service_gap_bound
from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.orders import OrderOptions, make_order
from reference_server.request import State
from reference_server.scheduler import Emitted, StepPlan, Transition
from reference_server.simulation import Arrival, Observer, Result, qualified
from sloscope.contract import Limits
from sloscope.output import FORMATS, message, print_rows
from sloscope.units import NS_PER_S
from tests.reference_server.order_world import Books

UNIT = ServiceUnit()
POLITE, FLOODS = "polite", {"flood-a": 10 / 3, "flood-b": 5 / 3}
POLITE_LOAD = 0.1
QUANTUM = 1024
TTFT_STEPS = 50
BACKLOG_STATES = (State.WAITING, State.PREEMPTED)


class Watch(Observer):
    """Keeps the books, and the longest time between admissions while somebody waits."""

    def __init__(self) -> None:
        self.books = Books(UNIT, {})
        self.slowest_admission_ns = 0
        self._waiting: Counter[str] = Counter()
        self._last_ns = 0

    def moved(self, transition: Transition, now_ns: int) -> None:
        request, before, after, _ = transition
        if not self._waiting.total():
            self._last_ns = now_ns
        if after is State.PREFILL:
            self.slowest_admission_ns = max(self.slowest_admission_ns, now_ns - self._last_ns)
            self._last_ns = now_ns
        self._waiting[request.tenant] += (after in BACKLOG_STATES) - (before in BACKLOG_STATES)
        self._note()

    def stepped(self, plan: StepPlan, emitted: Sequence[Emitted], start_ns: int, end_ns: int) -> None:
        for request, fresh in zip(plan.requests, plan.fresh, strict=True):
            self.books.note_service(request.tenant, fresh, 0)
        for token in emitted:
            self.books.note_service(token.request.tenant, 0, 1)
        self._note()

    def _note(self) -> None:
        self.books.note_backlog({tenant for tenant, count in self._waiting.items() if count})


def traffic(asked: argparse.Namespace, server: Server, sustainable: float, floods: bool) -> list[Arrival]:
    found = []
    shares = {POLITE: POLITE_LOAD} | (FLOODS if floods else {})
    for number, (tenant, share) in enumerate(shares.items()):
        trace = synthetic(share * sustainable, asked.seconds, asked.lengths)
        requests, contract = planned(trace, "e2e:1000", asked.seed + number)
        for arrival in arrivals(requests, contract, server):
            arrival.request.tenant = tenant
            arrival.request.key = f"{tenant}-{arrival.request.key}"
            found.append(arrival)
    return sorted(found, key=lambda arrival: arrival.request.arrived_ns)


def capacity(cost: CostModel, server: Server, arriving: Sequence[Arrival]) -> float:
    """Requests per second when every slot decodes and prompts run beside it."""
    count = len(arriving)
    prompt = sum(len(arrival.request.prompt) for arrival in arriving) / count
    output = sum(min(arrival.request.stop_after or 0, arrival.request.max_tokens) for arrival in arriving) / count
    steps = output / server.slots  # of a request's share
    context = server.slots * (prompt + output / 2)
    return 1e9 / (steps * cost.step_ns(StepShape(0, server.slots, round(context))) + prompt * cost.prefill_token_ns)


def attainment(results: Sequence[Result], limits: Limits) -> float:
    polite = [result for result in results if result.request.tenant == POLITE]
    return sum(qualified(result, limits).qualified for result in polite) / len(polite)


def rows_of(asked: argparse.Namespace, server: Server, cost: CostModel, rate: float, limits: Limits) -> list[dict]:
    rows = []
    for name in ("fcfs", "vtc", "drr"):
        options = OrderOptions(UNIT, quantum=QUANTUM)
        alone = simulate(traffic(asked, server, rate, False), server, cost, make_order(name, options))
        watch = Watch()
        flooded = traffic(asked, server, rate, True)
        # What counts is the time of the flood, not how long its backlog takes afterwards.
        until_ns = round(asked.seconds * NS_PER_S)
        simulation = simulate(flooded, server, cost, make_order(name, options), observers=[watch], until_ns=until_ns)
        results = list(simulation.results.values())
        requests = [arrival.request for arrival in flooded]
        bound = service_gap_bound(
            UNIT,
            max_prompt=max(len(request.prompt) for request in requests),
            max_output=max(request.max_tokens for request in requests),
            pool_tokens=server.kv_tokens,
            sequences=server.slots,
            quantum=QUANTUM if name == "drr" else 0,
        )
        # One admission of each other tenant, and its own, may come first.
        late_ns = (len(FLOODS) + 1) * watch.slowest_admission_ns
        ttft_ns = limits.ttft_ns or 0
        floor = attainment(list(alone.results.values()), Limits(ttft_ns=max(0, ttft_ns - late_ns)))
        rows.append(
            {
                "order": name,
                "polite_alone": round(attainment(list(alone.results.values()), limits), 4),
                "polite_flooded": round(attainment(results, limits), 4),
                "promised_at_least": round(floor, 4) if name != "fcfs" else None,
                **{f"service_{tenant}": round(watch.books.service[tenant]) for tenant in (POLITE, *FLOODS)},
                "largest_gap": round(watch.books.worst_gap),
                "bound": round(bound) if name != "fcfs" else None,
                "slowest_admission_ms": round(watch.slowest_admission_ns / 1e6),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin-14m", help="as for `sloscope serve` (default: builtin-14m)")
    parser.add_argument("--cost-model", type=Path, help="a recorded fit; default: measured at the start")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument(
        "--lengths",
        default="prompt_p50=128&prompt_sigma=0.8&output_p50=32&output_sigma=0.7",
        help="of prompts and outputs, as in a synthetic trace (default: medians of 128 and 32 tokens)",
    )
    parser.add_argument("--seconds", type=float, default=300, help="simulated (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args()
    server = Server(slots=16, kv_tokens=16_384, block_tokens=BLOCK_TOKENS, max_context=2048, prefill_tokens=256)
    cost = cost_model(asked.cost_model, asked.model, asked.threads)
    rate = capacity(cost, server, traffic(asked, server, 100, False))
    limits = Limits(ttft_ns=TTFT_STEPS * full_step_ns(cost, server))
    message(f"capacity {rate:.3g} requests/s; TTFT limit {TTFT_STEPS} full steps, {(limits.ttft_ns or 0) / 1e6:.0f} ms")
    rows = {"simulated": rows_of(asked, server, cost, rate, limits)}
    print_rows(rows["simulated"], asked.format, title=f"simulated, {asked.seconds:g} s")
    save(asked.save, "fairness", rows, **options_of(asked), cost_model=json.loads(cost.to_json()))


if __name__ == "__main__":
    main()
