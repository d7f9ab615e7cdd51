"""`make demo`: a server, a hop that can buffer, a sidecar and a replay; one stall, one phase of buffering; the
answers.

The contract is derived from this machine: itl_max is 3 times the median iteration at the batch size that the load
aims at, ttft is 3 times the median TTFT of an idle server. Exit 0 when the diagnosis names both injected causes and
attainment lies between 0.3 and 0.95, else 1 with the reason.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from sloscope import contract as contracts
from sloscope.demo.injection import Injection
from sloscope.demo.processes import SLOSCOPE, Stage, ask
from sloscope.demo.report import report, rows
from sloscope.errors import ConfigError, SloscopeError, TraceError
from sloscope.output import message

MS = 1_000_000


class Plan(NamedTuple):
    """What the load aims at. The two models differ by a factor of ten in speed."""

    target_batch: int
    prompt_tokens: int  # median
    output_tokens: int  # median
    prefill_tokens: int  # of a prompt in one iteration: a gap shows what was injected, not each neighbour's prompt
    load: float  # share of the measured capacity
    seconds: float  # of arrivals
    hold_share: float  # of that time is spent buffering
    idle_rate: float  # requests/s while the idle server is measured
    warmup: int


PLANS = {
    "builtin-14m": Plan(
        target_batch=8, prompt_tokens=24, output_tokens=48, prefill_tokens=16, load=0.35, seconds=40, hold_share=0.08,
        idle_rate=3, warmup=5,
    ),
    "smollm2": Plan(
        target_batch=4, prompt_tokens=24, output_tokens=32, prefill_tokens=32, load=0.25, seconds=60, hold_share=0.05,
        idle_rate=1, warmup=3,
    ),
}  # fmt: skip


class Measured(NamedTuple):
    step_ms: float  # median iteration that only decodes, at the target batch
    ttft_ms: float  # median TTFT of an idle server
    capacity_rps: float  # requests/s of the load's own lengths that the engine's time allows at the target batch


class Source(NamedTuple):
    """What is replayed, and how it is brought near the plan."""

    trace: str
    options: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sloscope.demo", description=__doc__)
    parser.add_argument("--model", default="builtin-14m", help="a model name or a GGUF file (default: builtin-14m)")
    parser.add_argument("--trace", help="an Azure CSV or sloscope JSONL trace (default: synthetic Poisson arrivals)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="working directory, replaced (default: .demo)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default: 1)")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        code = run(arguments.model, arguments.trace, arguments.dir, arguments.seed)
    except SloscopeError as error:
        message(f"error: {error}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    message(f"demo: {time.monotonic() - started:.0f} s, exit {code}")
    sys.exit(code)


def run(model: str, trace: str | None, directory: Path, seed: int) -> int:
    plan = PLANS.get(model, PLANS["smollm2"])
    if trace is not None and not Path(trace).is_file():
        raise TraceError(f"trace {trace!r}: no such file")
    if directory.exists() and not (directory / "contract.toml").exists() and any(directory.iterdir()):
        raise ConfigError(
            f"--dir: {str(directory)!r} holds other things than a demo; accepted: a new or empty directory"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    events, contract = directory / "events", directory / "contract.toml"
    if model == "smollm2":
        message("model: SmolLM2-135M-Instruct, fetched unless it is here")
        ask("model", "get", model, timeout_s=600)
    serve = ["serve", "--model", model, "--listen", "127.0.0.1:0", "--prefill-tokens", str(plan.prefill_tokens)]
    serve += ["--max-batch", str(2 * plan.target_batch)]  # a burst is not made to queue
    source = scaled(trace, plan) if trace is not None else Source("", ())
    with Stage(directory) as stage:
        measured = calibrate(stage, plan, serve, source, directory)
        limits = write_contract(contract, measured)
        rate = plan.load * measured.capacity_rps
        message(
            f"contract: ttft {limits['ttft']} ms (3 × idle median {measured.ttft_ms:.1f} ms), "
            f"itl_max {limits['itl_max']} ms (3 × median step {measured.step_ms:.2f} ms at batch {plan.target_batch}); "
            f"load {rate:.2f} req/s ({plan.load:.0%} of {measured.capacity_rps:.2f})"
        )
        server = stage.sloscope("server", *serve, "--events", str(events), "--allow-faults")
        server_url = server.wait_for(r"on (http://\S+)", 90)[1]
        address = server_url.removeprefix("http://")
        hop = stage.start("hop", sys.executable, "-m", "sloscope.demo.hop", "--upstream", address)
        hop_url = "http://" + hop.wait_for(r"hop on (\S+)", 20)[1]
        sidecar = stage.sloscope(
            "sidecar", "sidecar", "--upstream", hop_url, "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--contract", str(contract), "--events", str(events), "--sql-every", "off",
        )  # fmt: skip
        ready = sidecar.wait_for(r"listening on (http://\S+), control on (http://\S+)", 30)
        injection = Injection(server_url, hop, plan.seconds, plan.hold_share, limits["itl_max"])
        injection.start()
        count = max(20, round(rate * plan.seconds))
        options = ("--receipts", ready[2], "--contract", str(contract), "--warmup", str(plan.warmup), "--drain", "60s")
        command = load(plan, source, rate, count, ready[1], events, seed)
        code = subprocess.run([*SLOSCOPE, *command, *options], check=False).returncode
        injection.join()
        with urllib.request.urlopen(f"{ready[2]}/metrics", timeout=10) as answer:
            (directory / "metrics.txt").write_bytes(answer.read())
    if code != 0:
        message(f"no: the replay ended with exit code {code}; logs are in {directory}")
        return 1
    return report(events, contract, injection)


def calibrate(stage: Stage, plan: Plan, serve: list[str], source: Source, directory: Path) -> Measured:
    """Measures a server of its own: one request at a time, the whole batch at once, then the load's own lengths."""
    message(f"calibrating: an idle server, {plan.target_batch} at once, then the lengths of the load")
    events = directory / "calibration"
    server = stage.sloscope("calibration", *serve, "--events", str(events))
    url = server.wait_for(r"on (http://\S+)", 90)[1]
    batch = plan.target_batch
    steady = (
        f"synthetic:poisson?prompt_p50={plan.prompt_tokens}&prompt_sigma=0.3&output_p50={plan.output_tokens}"
        "&output_sigma=0.01"
    )

    seen = 0

    def measure(command: list[str]) -> list[dict[str, Any]]:
        """Runs the load and gives the engine's iterations of it alone."""
        nonlocal seen
        ask(*command, "--goodput", "ttft:60000", timeout_s=300)
        columns = "step_id, end_ns - start_ns as step_ns, prefill_tokens, decode_requests"
        steps = rows("sql", f"select {columns} from steps where step_id > {seen}", events)
        seen = max((step["step_id"] for step in steps), default=seen)
        return steps

    load_steady = Source(f"{steady}&rate={plan.idle_rate}&n=12")
    measure(load(plan, load_steady, None, 12, url, events, 0))
    # The first two answers warm the server up.
    ttft = rows("sql", "select client_ttft_ns from requests order by arrival_at_ns offset 2", events)
    at_once = Source(f"{steady}&rate=1000&n={batch}")
    steps = [step for seed in range(3) for step in measure(load(plan, at_once, None, batch, url, events, seed))]
    count = 6 * batch
    mixed = measure(load(plan, source, 1000.0, count, url, events, 2))
    stage.stop(server)
    full = [s["step_ns"] for s in steps if not s["prefill_tokens"] and s["decode_requests"] >= batch - 1]
    if len(ttft) < 5 or len(full) < 10:
        raise ConfigError(f"calibration: {len(ttft)} answers and {len(full)} steps are too few; see {directory}")
    return Measured(
        statistics.median(full) / MS,
        statistics.median(row["client_ttft_ns"] for row in ttft) / MS,
        count / (sum(step["step_ns"] for step in mixed) / 1e9),
    )


def write_contract(path: Path, measured: Measured) -> dict[str, float]:
    """The limits, ms, as they stand in the file."""
    limits = {"ttft": round(3 * measured.ttft_ms, 1), "itl_max": round(3 * measured.step_ms, 2)}
    path.write_text(
        "# Derived from this machine by the demo.\n"
        'version = 1\nobserver = "client"\ndefault_class = "interactive"\n\n[classes.interactive]\n'
        f'ttft = "{limits["ttft"]}ms"\nitl_max = "{limits["itl_max"]}ms"\nobjective = 0.95\n\n'
        '[window]\nrule = "drain"\ndrain_limit = "60s"\n'
    )
    contracts.load(path)
    return limits


def load(plan: Plan, source: Source, rate: float | None, count: int, url: str, events: Path, seed: int) -> list[str]:
    """The replay command of `count` requests; without a trace, Poisson arrivals and lognormal lengths."""
    options = ["--url", url, "--events", str(events), "--seed", str(seed), *source.options]
    if not source.trace:
        lengths = f"prompt_p50={plan.prompt_tokens}&prompt_sigma=0.5&output_p50={plan.output_tokens}&output_sigma=0.5"
        return ["replay", f"synthetic:poisson?rate={rate:.4f}&n={count}&{lengths}", *options]
    if rate is not None:
        options += ["--rate", f"{rate:.4f}"]
    return ["replay", source.trace, "--limit", str(count), *options]


def scaled(trace: str, plan: Plan) -> Source:
    """Brings the median prompt and answer of a trace near the plan's, never above what they are.

    A CPU serves no prompts of thousands of tokens in the time of a demo. The replay prints the factors.
    """
    dry = ("replay", trace, "--limit", "1000", "--dry-run", "--format", "json", "--goodput", "ttft:60000")
    shape = json.loads(ask(*dry))[0]
    prompts = min(1.0, plan.prompt_tokens / shape["prompt_tokens_p50"])
    outputs = min(1.0, plan.output_tokens / shape["output_tokens_p50"])
    return Source(trace, ("--scale-prompts", f"{prompts:.5f}", "--scale-lengths", f"{outputs:.5f}"))


if __name__ == "__main__":
    main()
