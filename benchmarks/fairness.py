"""What flooding tenants do to a polite one, under first come, first served, virtual counters and deficit round robin.

A polite tenant sends a tenth of what the server can run. Two others flood it with five times of that together,
one twice as much as the other. In simulated time, with a cost model of this machine's steps. Printed: the service each
tenant received; the largest drift between two tenants while both were backlogged, beside the declared bound; and how
many of the polite tenant's first tokens came within a limit.

docs/decisions/014-fairness-bound.md says by how much a flood can delay a first token at most; here that is known before
anything runs, from the cost model and the largest request (`late_bound_ms`). So `alone` within the limit is promised
within the limit and that time under the flood. A bound that is broken under virtual counters or deficit round robin
ends the run with exit code 1. `python -m benchmarks.fairness`.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from benchmarks.books import Books
from benchmarks.engine_steps import cost_model
from benchmarks.kept import options_of, save
from benchmarks.load import SERVER, Server, arrivals, common_options, full_step_ns, planned, simulate, synthetic
from reference_server.cost_model import CostModel, StepShape
from reference_server.fairness import QUANTUM, ServiceUnit, service_gap_bound
from reference_server.orders import OrderOptions, make_order
from reference_server.request import Request, State
from reference_server.scheduler import Emitted, StepPlan, Transition
from reference_server.simulation import Arrival, Observer, Result
from sloscope.output import message, print_rows
from sloscope.units import NS_PER_S

Row = dict[str, Any]
UNIT = ServiceUnit()
POLITE, FLOODS = "polite", {"flood-a": 10 / 3, "flood-b": 5 / 3}
POLITE_LOAD = 0.1
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


def worst_step_ns(cost: CostModel, server: Server, requests: Sequence[Request]) -> int:
    """Every slot decodes, the whole KV pool is read, and the whole chunk is the end of the longest prompt."""
    chunk, prompt = server.prefill_tokens, longest_prompt(requests)
    assert chunk is not None
    return cost.step_ns(StepShape(chunk, server.slots, server.kv_tokens, chunk * prompt))


def admission_bound_steps(server: Server, requests: Sequence[Request]) -> int:
    """Until there is room for the largest request, at the latest.

    While the next request does not fit, nobody is admitted. By the time that everything running has had its prompt and
    made its longest answer all slots and blocks are free. Prompts that are under way hold KV, so they are no more than
    the pool, and those that are not done get a whole chunk of each step. One step more runs when the wait begins.
    """
    assert server.prefill_tokens is not None
    prompts = min(server.slots * longest_prompt(requests), server.kv_tokens)
    return 1 + -(-prompts // server.prefill_tokens) + longest_output(requests)


def late_bound_steps(server: Server, requests: Sequence[Request], others: int) -> int:
    """How much later than alone the first token of a tenant comes that has nothing waiting, at most: an admission of
    each other tenant and its own, and a turn of each other tenant's prompts for each of its chunks."""
    assert server.prefill_tokens is not None
    chunks = -(-longest_prompt(requests) // server.prefill_tokens)
    return (others + 1) * (admission_bound_steps(server, requests) + chunks)


def longest_prompt(requests: Iterable[Request]) -> int:
    return max(len(request.prompt) for request in requests)


def longest_output(requests: Iterable[Request]) -> int:
    """What the trace makes of them, which may be less than max_tokens."""
    return max(min(request.stop_after or request.max_tokens, request.max_tokens) for request in requests)


def attainment(results: Iterable[Result], limit_ns: int, arrived_by_ns: int) -> float | None:
    """Of the polite tenant's requests that arrived by then, those whose first token came within the limit."""
    asked = [r for r in results if r.request.tenant == POLITE and r.request.arrived_ns <= arrived_by_ns]
    met = sum(r.first_token_ns is not None and r.first_token_ns - r.request.arrived_ns <= limit_ns for r in asked)
    return met / len(asked) if asked else None


def row_of(name: str, asked: argparse.Namespace, server: Server, cost: CostModel, rate: float, ttft_ns: int) -> Row:
    options = OrderOptions(UNIT, quantum=QUANTUM)
    alone, flooded = (traffic(asked, server, rate, floods) for floods in (False, True))
    requests = [arrival.request for arrival in chain(alone, flooded)]
    step_ns = worst_step_ns(cost, server, requests)
    late_ns = step_ns * late_bound_steps(server, requests, len(FLOODS))
    gap_bound = service_gap_bound(
        UNIT,
        max_prompt=longest_prompt(requests),
        max_output=max(request.max_tokens for request in requests),
        pool_tokens=server.kv_tokens,
        sequences=server.slots,
        quantum=QUANTUM if name == "drr" else 0,
    )
    # What counts is the time of the flood, not how long its backlog takes afterwards; and of it requests for which the
    # time that they may take is over.
    until_ns = round(asked.seconds * NS_PER_S)
    judged_ns = until_ns - ttft_ns - late_ns
    quiet = simulate(alone, server, cost, make_order(name, options)).results.values()
    watch = Watch()
    flood = simulate(flooded, server, cost, make_order(name, options), observers=[watch], until_ns=until_ns)
    seen = flood.results.values()
    promised, reached = attainment(quiet, ttft_ns, judged_ns), attainment(seen, ttft_ns + late_ns, judged_ns)
    declared = name != "fcfs"
    in_time = None if promised is None or reached is None else reached >= promised
    return {
        "order": name,
        **{f"service_{tenant}": round(watch.books.service.get(tenant, 0)) for tenant in (POLITE, *FLOODS)},
        "largest_gap": round(watch.books.worst_gap),
        "gap_bound": round(gap_bound) if declared else None,
        "gap_within_bound": watch.books.worst_gap <= gap_bound if declared else None,
        "alone": rounded(attainment(quiet, ttft_ns, until_ns - ttft_ns)),
        "flooded": rounded(attainment(seen, ttft_ns, until_ns - ttft_ns)),
        "flooded_late": rounded(reached),
        "promised_late": rounded(promised) if declared else None,
        "attainment_within_bound": in_time if declared else None,
        "late_bound_ms": round(late_ns / 1e6),
        "slowest_admission_ms": round(watch.slowest_admission_ns / 1e6),
        "admission_bound_ms": round(step_ns * admission_bound_steps(server, requests) / 1e6),
    }


def rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def broken(rows: Sequence[Row]) -> list[str]:
    """What was declared and did not hold."""
    names = ("gap_within_bound", "attainment_within_bound")
    return [f"{row['order']}: {name}" for row in rows for name in names if row[name] is False]


def main() -> int:
    parser = common_options(__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="simulated (default: 300)")
    asked = parser.parse_args()
    server = SERVER
    cost = cost_model(asked.cost_model, asked.model, asked.threads)
    rate = capacity(cost, server, traffic(asked, server, 100, False))
    ttft_ns = TTFT_STEPS * full_step_ns(cost, server)
    message(f"capacity {rate:.3g} requests/s; TTFT limit {TTFT_STEPS} full steps, {ttft_ns / 1e6:.0f} ms")
    rows = [row_of(name, asked, server, cost, rate, ttft_ns) for name in ("fcfs", "vtc", "drr")]
    print_rows(rows, asked.format, title=f"simulated, {asked.seconds:g} s")
    save(asked.save, "fairness", {"simulated": rows}, **options_of(asked), cost_model=json.loads(cost.to_json()))
    if any(row["flooded_late"] is None for row in rows):
        message(f"attainment under the flood is not judged: {asked.seconds:g} s are less than a first token may take")
    for which in broken(rows):
        message(f"a declared bound is broken: {which}")
    return 1 if broken(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
