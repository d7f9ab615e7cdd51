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
from typing import NamedTuple

from sloscope import contract as contracts
from sloscope.demo.injection import Injection
from sloscope.demo.processes import SLOSCOPE, Stage, ask
from sloscope.demo.report import report, rows
from sloscope.errors import ConfigError, SloscopeError, TraceError
from sloscope.output import message

MS = 1_000_000
# Prompts run in pieces, so that a gap shows what was injected and not each neighbour's prompt.
SERVE = ("--listen", "127.0.0.1:0", "--prefill-tokens", "16", "--allow-faults")


class Plan(NamedTuple):
    """What the load aims at. The two models differ by a factor of ten in speed."""

    target_batch: int
    prompt_tokens: int  # median
    output_tokens: int  # median
    load: float  # share of the measured capacity
    seconds: float  # of arrivals
    idle_rate: float  # requests/s while the idle server is measured
    warmup: int


PLANS = {
    "builtin-14m": Plan(8, prompt_tokens=24, output_tokens=48, load=0.5, seconds=40, idle_rate=3, warmup=5),
    "smollm2": Plan(4, prompt_tokens=24, output_tokens=32, load=0.6, seconds=60, idle_rate=1, warmup=3),
}


class Measured(NamedTuple):
    step_ms: float  # median iteration that only decodes, at the target batch
    ttft_ms: float  # median TTFT of an idle server
    capacity_rps: float  # requests/s that the engine's own time allows at the target batch


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
    with Stage(directory) as stage:
        measured = calibrate(stage, plan, model, directory)
        limits = write_contract(contract, measured)
        rate = plan.load * measured.capacity_rps
        message(
            f"contract: ttft {limits['ttft']} ms (3 × idle median {measured.ttft_ms:.1f} ms), "
            f"itl_max {limits['itl_max']} ms (3 × median step {measured.step_ms:.2f} ms at batch {plan.target_batch}); "
            f"load {rate:.2f} req/s ({plan.load:.0%} of {measured.capacity_rps:.2f})"
        )
        server = stage.sloscope("server", "serve", "--model", model, "--events", str(events), *SERVE)
        server_url = server.wait_for(r"on (http://\S+)", 90)[1]
        address = server_url.removeprefix("http://")
        hop = stage.start("hop", sys.executable, "-m", "sloscope.demo.hop", "--upstream", address)
        hop_url = "http://" + hop.wait_for(r"hop on (\S+)", 20)[1]
        sidecar = stage.sloscope(
            "sidecar", "sidecar", "--upstream", hop_url, "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--contract", str(contract), "--events", str(events), "--sql-every", "off",
        )  # fmt: skip
        ready = sidecar.wait_for(r"listening on (http://\S+), control on (http://\S+)", 30)
        injection = Injection(server_url, hop, plan.seconds, limits["itl_max"])
        injection.start()
        code = replay(plan, trace, (ready[1], ready[2]), contract, events, rate, seed)
        injection.join()
        with urllib.request.urlopen(f"{ready[2]}/metrics", timeout=10) as answer:
            (directory / "metrics.txt").write_bytes(answer.read())
    if code != 0:
        message(f"no: the replay ended with exit code {code}; logs are in {directory}")
        return 1
    return report(events, contract, injection)


def calibrate(stage: Stage, plan: Plan, model: str, directory: Path) -> Measured:
    """Measures a server of its own: one request at a time, then the whole target batch at once."""
    message(f"calibrating {model}: an idle server, then {plan.target_batch} at once")
    idle, busy = directory / "calibration-idle", directory / "calibration-batch"
    shape = f"prompt_p50={plan.prompt_tokens}&prompt_sigma=0.3&output_p50={plan.output_tokens}&output_sigma=0.01"
    server = stage.sloscope("calibration-1", "serve", "--model", model, "--events", str(idle), *SERVE)
    url = server.wait_for(r"on (http://\S+)", 90)[1]
    load(f"rate={plan.idle_rate}&n=12&{shape}", url, idle)
    stage.stop(server)
    server = stage.sloscope("calibration-2", "serve", "--model", model, "--events", str(busy), *SERVE)
    url = server.wait_for(r"on (http://\S+)", 90)[1]
    for seed in range(3):
        load(f"rate=1000&n={plan.target_batch}&{shape}", url, busy, seed)
    stage.stop(server)
    # The first two answers warm the server up.
    ttft = rows("sql", "select client_ttft_ns from requests order by arrival_at_ns offset 2", idle)
    steps = rows("sql", "select end_ns - start_ns as step_ns, prefill_tokens, decode_requests from steps", busy)
    full = [s["step_ns"] for s in steps if not s["prefill_tokens"] and s["decode_requests"] >= plan.target_batch - 1]
    if len(ttft) < 5 or len(full) < 10:
        raise ConfigError(f"calibration: {len(ttft)} answers and {len(full)} steps are too few; see {directory}")
    return Measured(
        statistics.median(full) / MS,
        statistics.median(row["client_ttft_ns"] for row in ttft) / MS,
        3 * plan.target_batch / (sum(step["step_ns"] for step in steps) / 1e9),
    )


def load(shape: str, url: str, events: Path, seed: int = 0) -> None:
    source = f"synthetic:poisson?{shape}"
    options = ("--url", url, "--events", str(events), "--goodput", "ttft:60000", "--seed", str(seed))
    ask("replay", source, *options, timeout_s=180)


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


def replay(
    plan: Plan, trace: str | None, sidecar: tuple[str, str], contract: Path, events: Path, rate: float, seed: int
) -> int:
    """Runs the replay with its own progress bar on this terminal. Its exit code."""
    url, control = sidecar
    count = max(20, round(rate * plan.seconds))
    options = ["--url", url, "--receipts", control, "--contract", str(contract), "--events", str(events)]
    options += ["--seed", str(seed), "--warmup", str(plan.warmup), "--drain", "60s"]
    if trace is None:
        source = (
            f"synthetic:poisson?rate={rate:.4f}&n={count}&prompt_p50={plan.prompt_tokens}&prompt_sigma=0.5"
            f"&output_p50={plan.output_tokens}&output_sigma=0.5"
        )
    else:
        source = trace
        options += ["--rate", f"{rate:.4f}", "--limit", str(count), *scaling(trace, plan, count)]
    return subprocess.run([*SLOSCOPE, "replay", source, *options], check=False).returncode


def scaling(trace: str, plan: Plan, count: int) -> list[str]:
    """Brings the median prompt and answer of the trace near the plan's, never above what they are.

    A CPU serves no prompts of thousands of tokens in the time of a demo. The replay prints the factors.
    """
    dry = ("replay", trace, "--limit", str(count), "--dry-run", "--format", "json", "--goodput", "ttft:60000")
    shape = json.loads(ask(*dry))[0]
    prompts = min(1.0, plan.prompt_tokens / shape["prompt_tokens_p50"])
    outputs = min(1.0, plan.output_tokens / shape["output_tokens_p50"])
    return ["--scale-prompts", f"{prompts:.5f}", "--scale-lengths", f"{outputs:.5f}"]


if __name__ == "__main__":
    main()
