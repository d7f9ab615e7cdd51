"""The engine on a CPU: the forward pass beside its floor and two other engines, and what the loop costs around it.

Forward pass: a decode step at batch 1 and 16 and a prefill, all from the same context, by
- the model's matrix products alone, by F.linear on plain weights and by the packed product that the model uses;
- the plain products and one read of the keys and values, which at batch 16 are 0.7 times the size of the weights;
- sloscope's runner on paged KV, the choice of the tokens included;
- transformers, a bare call with its KV cache, and `generate`;
- llama.cpp, where --llama-python names an interpreter that has llama-cpp-python.
All have the same weights, dtype and number of threads. The sides take turns in every round; the medians count.

Loop: turns of the real engine less the time inside the runner, at batch 64 with a runner that answers at once, and at
batch 16 with the model, for as long as --loop-seconds. Ctrl-C or SIGTERM ends the run; what was measured is kept.

llama-cpp-python is built from source, in an environment of its own (about 20 minutes on one core):

    python -m venv /tmp/llama
    CMAKE_ARGS=-DGGML_NATIVE=ON /tmp/llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python -m benchmarks.engine_cpu --llama-python /tmp/llama/bin/python
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import forward_sides
from benchmarks.engine_overhead import InstantRunner, Turn, blocks_needed, measure_turns
from benchmarks.forward_sides import LlamaCpp, Ours, Side, TransformersForward, TransformersGenerate
from reference_server.engine import StepRunner
from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.loader import DTYPES, load_checkpoint
from reference_server.model import Llama
from reference_server.model_config import ModelConfig
from reference_server.model_store import ModelSource, resolve_model
from reference_server.runner import Runner
from reference_server.weights import Checkpoint
from sloscope.errors import ConfigError, SloscopeError
from sloscope.output import FORMATS, message, print_rows

BATCHES = (1, 16)
LOOP_BATCH, BARE_LOOP_BATCH = 16, 64
INTERRUPTED = 130  # exit code
FLOORS = {
    "x_plain": forward_sides.PLAIN_FLOOR,
    "x_packed": forward_sides.PACKED_FLOOR,
    "x_plain_kv": forward_sides.KV_FLOOR,
}
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames arguments from release to release
    try:
        return run(asked)
    except SloscopeError as error:
        raise SystemExit(f"error: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for `sloscope serve` (default: smollm2)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="(default: float32)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument("--rounds", type=int, default=9, help="in which every side has its turn (default: 9)")
    parser.add_argument("--steps", type=int, default=5, help="decode steps of a side in a round (default: 5)")
    parser.add_argument("--turns", type=int, default=200, help="of the loop, at most (default: 200)")
    parser.add_argument(
        "--loop-seconds", type=float, default=40, help="of the loop with the model, at most (default: 40)"
    )
    parser.add_argument("--part", default="all", choices=["all", "forward", "loop"], help="(default: all)")
    parser.add_argument("--llama-python", help="interpreter of the environment with llama-cpp-python")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep rows and machine as JSON, say in benchmarks/results"
    )
    return parser


def run(asked: argparse.Namespace) -> int:
    if (
        asked.context < 1
        or asked.threads < 1
        or asked.rounds < 1
        or asked.steps < 1
        or asked.turns < 1
        or asked.loop_seconds <= 0
    ):
        raise ConfigError(
            "--context, --threads, --rounds, --steps, --turns: accepted: 1 and more; --loop-seconds: above 0"
        )
    torch.set_num_threads(asked.threads)
    torch.manual_seed(1)
    source = resolve_model(asked.model)
    checkpoint = load_checkpoint(source, DTYPES[asked.dtype])
    with torch.inference_mode():
        model = Llama(checkpoint.config, checkpoint.state, DTYPES[asked.dtype], torch.device("cpu"))
    about = describe(asked, source)
    forward: list[Row] = []
    loop: list[Row] = []
    code = 0
    try:
        if asked.part in ("all", "forward"):
            forward.extend(forward_rows(asked, source, checkpoint, model, about))
        if asked.part in ("all", "loop"):
            checkpoint.state.clear()
            loop.extend(loop_rows(asked, checkpoint.config, model))
    except KeyboardInterrupt:
        message("interrupted; what was measured before is kept")
        code = INTERRUPTED
    if asked.format == "json":
        print(json.dumps({"about": about, "forward": forward, "loop": loop}, indent=1))
    else:
        if forward:
            print_rows(forward, asked.format, title=f"medians of {asked.rounds} rounds; {about['llama_cpp']}")
        if loop:
            print_rows(loop, asked.format, title="turns of the engine's loop")
    if asked.save is not None:
        asked.save.parent.mkdir(parents=True, exist_ok=True)
        asked.save.write_text(json.dumps({"about": about, "forward": forward, "loop": loop}, indent=1) + "\n")
    return code


def describe(asked: argparse.Namespace, source: ModelSource) -> dict[str, Any]:
    return {
        "model": source.name,
        "context": asked.context,
        "dtype": asked.dtype,
        "threads": asked.threads,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "torch": torch.__version__,
        "rounds": asked.rounds,
        "steps": asked.steps,
        "turns": asked.turns,
    }


def _cpu() -> str:
    """Its name, and which vector instructions torch takes on it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def forward_rows(
    asked: argparse.Namespace, source: ModelSource, checkpoint: Checkpoint, model: Llama, about: dict[str, Any]
) -> Iterator[Row]:
    """A word on llama.cpp goes into `about`."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(checkpoint.config.vocab) for _ in range(asked.context)] for _ in range(max(BATCHES))]
    oracle = forward_sides.transformers_model(checkpoint, DTYPES[asked.dtype])
    sides: list[Side] = [
        *forward_sides.floors(checkpoint, model, asked.context, max(BATCHES)),
        Ours(model, prompts),
        TransformersForward(oracle, prompts, BATCHES),
        TransformersGenerate(oracle, prompts, BATCHES),
    ]
    llama: LlamaCpp | None = None
    about["llama_cpp"] = "llama.cpp left out: no --llama-python (see --help for how to make its environment)"
    with tempfile.TemporaryDirectory(prefix="sloscope-llama-") as folder:
        if asked.llama_python is not None:
            if source.path is None or source.path.is_dir():
                raise ConfigError(f"--llama-python: with --model {asked.model}; accepted: a model in a GGUF file")
            path = Path(folder) / f"{asked.dtype}.gguf"
            forward_sides.write_gguf(source.path, path, asked.dtype)
            llama = LlamaCpp(asked.llama_python, path, prompts, asked.dtype, asked.threads)
            sides.append(llama)
            about["llama_cpp"] = f"llama.cpp on a {asked.dtype} GGUF of the same weights ({llama.about})"
        try:
            for batch in BATCHES:
                yield from _decode_rows(asked, sides, batch)
            yield from _prefill_rows(asked, sides)
        finally:
            if llama is not None:
                llama.close()


def _decode_rows(asked: argparse.Namespace, sides: Sequence[Side], batch: int) -> list[Row]:
    message(f"decode at batch {batch}")

    def steps(side: Side) -> list[float]:
        return [side.decode(batch) for _ in range(asked.steps)]

    return [
        {"what": f"decode, batch {batch}", "side": name, "ms": ms, "tokens_per_s": round(batch / ms * 1000, 1)} | rest
        for name, ms, rest in _in_turns(asked.rounds, sides, steps)
    ]


def _prefill_rows(asked: argparse.Namespace, sides: Sequence[Side]) -> list[Row]:
    message("prefill")
    return [
        {
            "what": f"prefill, {asked.context}",
            "side": name,
            "ms": ms,
            "tokens_per_s": round(asked.context / ms * 1000, 1),
        }
        | rest
        for name, ms, rest in _in_turns(asked.rounds, sides, lambda side: [side.prefill()])
    ]


def _in_turns(rounds: int, sides: Sequence[Side], work: Callable[[Side], list[float]]) -> list[tuple[str, float, Row]]:
    """(name, median ms, ratios to the floors and the spread) of each side, after a round that does not count.

    A ratio is the median of the ratios within a round, so that a slow minute of the machine hits both halves of it.
    """
    medians: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            took = statistics.median(work(side))
            if number > 0:
                medians[side.name].append(took)
    found = []
    for name, each in medians.items():
        ratios = {
            column: round(statistics.median(a / b for a, b in zip(each, medians[floor], strict=True)), 3)
            for column, floor in FLOORS.items()
        }
        spread = {"min_ms": round(min(each), 2), "max_ms": round(max(each), 2)}
        found.append((name, round(statistics.median(each), 2), ratios | spread))
    return found


def loop_rows(asked: argparse.Namespace, config: ModelConfig, model: Llama) -> Iterator[Row]:
    yield from _loop_row(asked, config, "instant runner", InstantRunner(), BARE_LOOP_BATCH, None)
    runner = Runner(model, blocks_needed(LOOP_BATCH, asked.context, asked.turns), BLOCK_TOKENS)
    for pool in runner.kv._pools:
        pool.normal_()  # prompts are not run, and pages that were never written read faster than KV does
    yield from _loop_row(asked, config, "the model", runner, LOOP_BATCH, asked.loop_seconds)


def _loop_row(
    asked: argparse.Namespace, config: ModelConfig, who: str, runner: StepRunner, batch: int, most_s: float | None
) -> Iterator[Row]:
    """One row, of one turn at least; also when the run is interrupted."""
    message(f"loop at batch {batch}, {who}")
    size = DTYPES[asked.dtype].itemsize
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="sloscope-loop-") as folder:
        measuring = measure_turns(runner, config, size, batch, asked.context, asked.turns, Path(folder))
        began_s = time.monotonic()
        try:
            for turn in measuring:
                turns.append(turn)
                if most_s is not None and time.monotonic() - began_s > most_s:
                    break
        except KeyboardInterrupt:
            if turns:
                yield {"batch": batch, "runner": who} | _summary(turns)
            raise
        finally:
            measuring.close()
    row = {"batch": batch, "runner": who} | _summary(turns)
    message(f"  overhead {row['overhead_us']} us, of which CPU {row['cpu_us']} us; {row['turns']} turns")
    yield row


def _summary(turns: Sequence[Turn]) -> Row:
    overheads = sorted(turn.overhead_ns for turn in turns)
    return {
        "turns": len(turns),
        "overhead_us": round(statistics.median(overheads) / 1e3, 1),
        "p90_us": round(overheads[len(overheads) * 9 // 10] / 1e3, 1),
        "cpu_us": round(statistics.median(turn.overhead_cpu_ns for turn in turns) / 1e3, 1),
        "forward_ms": round(statistics.median(turn.forward_wall_ns for turn in turns) / 1e6, 3),
        "share_of_turn_pct": round(100 * statistics.median(turn.overhead_ns / turn.wall_ns for turn in turns), 2),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
