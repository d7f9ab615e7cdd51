"""How many keep their contract at 1.5 times the load that can be sustained: all let in, or deadline admission.

Simulated: the highest rate at which first come, first served qualifies 99 % is found by bisection; then ten minutes of
1.5 times it under both. Steps take what a cost model of this machine says, with noise. Admission is not told it: it
learns from the steps as they end, and begins with no model, or with one that is off by a factor. Real (`--real`): a
shorter trace at the same rate through `sloscope serve` and `sloscope replay`, one run of each. The contract is a
multiple of a full step's time, so that it means the same on any machine. `python -m benchmarks.admission --real`.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_steps import cost_model
from benchmarks.kept import options_of, save
from benchmarks.load import (
    SERVER,
    Learning,
    Server,
    arrivals,
    common_options,
    count_qualified,
    deadline_admission,
    earlier_lengths,
    full_step_ns,
    planned,
    simulate,
    synthetic,
)
from benchmarks.served import serve
from reference_server.cost_model import CostModel, OnlineFit
from reference_server.remaining import LengthTable
from reference_server.simulation import Result
from sloscope.contract import from_shorthand
from sloscope.definitions import nearest_rank
from sloscope.demo.processes import Stage, ask
from sloscope.output import message, print_rows
from sloscope.units import NS_PER_S

ATTAINMENT = 0.99
TTFT_STEPS, GAP_STEPS = 40, 4
SEARCHES = 7
PRIOR_FACTORS = (0.5, 2.0)
FCFS, DEADLINE, INFORMED = "everybody", "deadline, lengths unknown", "deadline, earlier lengths"


def contract_of(cost: CostModel, server: Server) -> str:
    """In full steps, rounded up to milliseconds."""
    step_ms = full_step_ns(cost, server) / 1e6
    return f"ttft:{1 + int(TTFT_STEPS * step_ms)} itl_max:{1 + int(GAP_STEPS * step_ms)}"


def sustainable_rate(asked: argparse.Namespace, server: Server, cost: CostModel, goodput: str) -> float:
    """Requests per second: doubled until FCFS misses, then halved between, geometrically."""

    def holds(rate: float) -> bool:
        requests, contract = planned(synthetic(rate, asked.search_seconds, asked.lengths), goodput, asked.seed)
        simulation = simulate(arrivals(requests, contract, server), server, cost, noise=asked.noise)
        share = count_qualified(list(simulation.results.values()), contract) / len(requests)
        message(f"{rate:.3g} requests/s: attainment {share:.3f}")
        return share >= ATTAINMENT

    low = 0.25
    if not holds(low):
        raise SystemExit(
            f"error: {low} requests/s are not sustained; accepted: a shorter --lengths or a faster machine"
        )
    while holds(2 * low):
        low *= 2
    high = 2 * low
    for _ in range(SEARCHES):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def simulated_rows(asked: argparse.Namespace, server: Server, cost: CostModel, rate: float, goodput: str) -> list[dict]:
    trace = synthetic(rate, asked.seconds, asked.lengths)
    requests, contract = planned(trace, goodput, asked.seed)
    lengths = earlier_lengths(trace, goodput, asked.seed + 1)
    choices: list[tuple[str, float | None, LengthTable | None]] = [
        (FCFS, None, None),
        (DEADLINE, None, None),
        (INFORMED, None, lengths),
        *((f"{INFORMED}, steps x{factor:g} at first", factor, lengths) for factor in PRIOR_FACTORS),
    ]
    rows = []
    for name, factor, known in choices:
        costs = OnlineFit(None if factor is None else cost.scaled(factor))
        admission = None if name == FCFS else deadline_admission(costs, server, known)
        arriving = arrivals(requests, contract, server)
        simulation = simulate(
            arriving, server, cost, admission=admission, noise=asked.noise, observers=[Learning(costs)]
        )
        results = list(simulation.results.values())
        row = {
            "policy": name,
            "offered": len(results),
            "qualified": count_qualified(results, contract),
            "refused": sum(result.ended == ("failed", "rejected") for result in results),
        }
        error = None if admission is None else costs.error().median
        of_steps = {"steps": simulation.steps, "step_error_p50": None if error is None else round(error, 3)}
        rows.append(row | _attained(row) | errors(results) | of_steps)
    return _with_ratio(rows)


def _attained(row: dict) -> dict[str, object]:
    return {"attainment": round(row["qualified"] / row["offered"], 4)}


def _with_ratio(rows: list[dict]) -> list[dict]:
    base = rows[0]["qualified"]
    for row in rows:
        row["times_fcfs"] = round(row["qualified"] / base, 2) if base else None
    return rows


def errors(results: Sequence[Result]) -> dict[str, object]:
    """First token realised - predicted at arrival, of those that got one: quantiles by nearest rank."""
    found = sorted(
        (result.first_token_ns - result.predicted_first_token_ns) / NS_PER_S
        for result in results
        if result.first_token_ns is not None and result.predicted_first_token_ns is not None
    )
    names = {"error_p10_s": 100, "error_p50_s": 500, "error_p90_s": 900}
    return {
        name: round(found[nearest_rank(permille, len(found)) - 1], 4) if found else None
        for name, permille in names.items()
    }


def real_rows(asked: argparse.Namespace, server: Server, cost: CostModel, rate: float, goodput: str) -> list[dict]:
    trace = synthetic(rate, asked.real_seconds, asked.lengths)
    rows = []
    with tempfile.TemporaryDirectory(prefix="sloscope-admission-") as folder:
        model = Path(folder, "cost.json")
        model.write_text(cost.to_json(), encoding="utf-8")
        lengths = Path(folder, "lengths.json")
        for name, policy in (
            (FCFS, ("--admission", "none")),
            (INFORMED, ("--admission", "deadline", "--lengths", str(lengths))),
        ):
            events = Path(folder, policy[1])
            events.mkdir()
            with Stage(events) as stage:
                url = _serve(stage, asked, server, events, goodput, "--cost-model", str(model), *policy)
                options = ("--goodput", goodput, "--seed", str(asked.seed), "--drain", "30s", "--format", "json")
                ask(
                    "replay",
                    trace,
                    "--url",
                    url,
                    "--events",
                    str(events),
                    *options,
                    timeout_s=60 + 4 * asked.real_seconds,
                )
            if not lengths.exists():  # the second run knows what the first one saw
                shown = ("survival_curve", "--events", str(events), "--param", "by=all", "--format", "json")
                lengths.write_text(ask("query", *shown), encoding="utf-8")
            (found,) = _query("goodput", events, goodput)
            row = {"policy": name} | {key: found[key] for key in ("offered", "qualified")}
            outcomes = _query("outcomes", events, goodput)
            row["refused"] = sum(each["requests"] for each in outcomes if each.get("reason") == "rejected")
            rows.append(row | _attained(row) | calibration(_query("admission_calibration", events, goodput)))
    return _with_ratio(rows)


def _serve(stage: Stage, asked: argparse.Namespace, server: Server, events: Path, goodput: str, *policy: str) -> str:
    return serve(
        stage, asked.model, events, "--goodput", goodput, "--max-waiting", "100000", "--max-batch", str(server.slots),
        "--max-context", str(server.max_context), "--block-tokens", str(server.block_tokens),
        "--kv-blocks", str(server.kv_tokens // server.block_tokens),
        "--prefill-tokens", str(server.prefill_tokens or 0), "--threads", str(asked.threads), *policy,
    )  # fmt: skip


def _query(name: str, events: Path, goodput: str) -> list[dict]:
    rows: list[dict] = json.loads(ask("query", name, "--events", str(events), "--goodput", goodput, "--format", "json"))
    return rows


def calibration(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Rows of `admission_calibration`. Of what was said at arrival: the median over the deciles of each quantile of
    realised - predicted."""
    found: dict[str, object] = {}
    for name in ("error_p10_s", "error_p50_s", "error_p90_s"):
        values = [row[name] for row in rows if row["verdict"] == "queue" and row[name] is not None]
        found[name] = round(statistics.median(values), 4) if values else None
    return found


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--goodput", help=f"contract in ms; default: {TTFT_STEPS} and {GAP_STEPS} full steps")
    parser.add_argument("--overload", type=float, default=1.5, help="times the sustainable rate (default: 1.5)")
    parser.add_argument("--seconds", type=float, default=600, help="simulated (default: 600)")
    parser.add_argument("--search-seconds", type=float, default=200, help="of each trace of the search (default: 200)")
    parser.add_argument(
        "--noise", type=float, default=0.1, help="of step times, standard deviation of the logarithm (default: 0.1)"
    )
    parser.add_argument("--real", action="store_true", help="also through `sloscope serve` and `sloscope replay`")
    parser.add_argument(
        "--real-seconds", type=float, help="of the real trace; default: 20 times the TTFT limit, 45 to 150"
    )
    asked = parser.parse_args()
    server = SERVER
    cost = cost_model(asked.cost_model, asked.model, asked.threads)
    goodput = asked.goodput or contract_of(cost, server)
    rate = asked.overload * sustainable_rate(asked, server, cost, goodput)
    message(f"contract {goodput}; {rate:.3g} requests/s, {asked.overload:g} times the sustainable rate")
    rows = {"simulated": simulated_rows(asked, server, cost, rate, goodput)}
    print_rows(
        rows["simulated"], asked.format, title=f"simulated, {asked.seconds:g} s at {rate:.3g} requests/s, {goodput}"
    )
    if asked.real:
        ttft_ns = next(iter(from_shorthand(goodput).classes.values())).limits.ttft_ns or 0
        asked.real_seconds = asked.real_seconds or min(150, max(45, round(20 * ttft_ns / NS_PER_S)))
        rows["real"] = real_rows(asked, server, cost, rate, goodput)
        print_rows(
            rows["real"], asked.format, title=f"real, {asked.real_seconds:g} s at {rate:.3g} requests/s, {goodput}"
        )
    about = {"goodput": goodput, "rate": rate, "cost_model": json.loads(cost.to_json())}
    save(asked.save, "admission", rows, **options_of(asked), **about)


if __name__ == "__main__":
    main()
