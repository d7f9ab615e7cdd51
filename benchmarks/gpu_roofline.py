"""Decode steps of a 1B-class model on a GPU against the bytes that they must move.

First all GPU tests run. Then random weights of Llama-3.2-1B's shape in bfloat16 decode at batch 1, 8 and 64 with 512
tokens each; the floor is weights + KV read, by the model's shape, at the bandwidth of a large copy on the same device.
Rows go to the terminal and to benchmarks/results/gpu_roofline.json. `python -m benchmarks.gpu_roofline`; without a
device, `--tiny` runs the same code on the CPU with a toy model and keeps nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.model import Llama, tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.runner import Runner
from reference_server.step_types import StepItem
from reference_server.work import step_work
from sloscope.output import message, print_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_roofline.json"
Row = dict[str, object]


def model_config(tiny: bool, context: int) -> ModelConfig:
    # layers, hidden, heads, KV heads, intermediate, vocabulary
    shape = (2, 256, 4, 1, 512, 1000) if tiny else (16, 2048, 32, 8, 8192, 128_256)
    layers, hidden, heads, kv_heads, intermediate, vocab = shape
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocab=vocab,
        head_dim=64,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_context=context,
        bos_id=None,
        eos_ids=(),
    )


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Llama:
    """Made on the device: a billion numbers take minutes on a CPU."""
    generator = torch.Generator(device).manual_seed(1)
    state = {}
    for name, shape in tensor_shapes(config).items():
        state[name] = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            state[name].normal_(std=shape[1] ** -0.5, generator=generator)
    return Llama(config, state, dtype, device)


def copy_bytes_per_s(device: torch.device, size: int, runs: int) -> float:
    """Bytes read and written by a copy within the device's memory, each counted; the median."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = []
    for _ in range(runs):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        taken.append(time.perf_counter() - began)
    return 2 * size / statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode_batch(batch: int, context: int) -> list[StepItem]:
    """Each sequence holds context - 1 tokens and adds one; its blocks lie side by side."""
    need = -(-context // BLOCK_TOKENS)
    return [StepItem(range(i * need, (i + 1) * need), [i + 1], context - 1, True) for i in range(batch)]


def measure_row(model: Llama, batch: int, context: int, bytes_per_s: float, runs: int) -> Row:
    items = decode_batch(batch, context)
    runner = Runner(model, batch * len(items[0].blocks), BLOCK_TOKENS, context)
    for pool in runner.kv._pools:
        pool.normal_()  # zeros would draw less power than numbers do
    for _ in range(3):  # the first one captures
        runner.step(items)
    wall_ns, device_ns = [], []
    for _ in range(runs):
        result = runner.step(items)
        wall_ns.append(result.end_ns - result.start_ns)
        device_ns.append(result.device_ns)
    known_ns = [ns for ns in device_ns if ns is not None]
    on_device = statistics.median(known_ns) / 1e6 if len(known_ns) == len(device_ns) else None
    step_ms = statistics.median(wall_ns) / 1e6
    return roofline_row(model.config, items, model.dtype.itemsize, bytes_per_s, step_ms, on_device)


def roofline_row(
    config: ModelConfig,
    items: Sequence[StepItem],
    itemsize: int,
    bytes_per_s: float,
    step_ms: float,
    device_ms: float | None,
) -> Row:
    work = step_work(config, items, itemsize, decodes=len(items))
    floor_ms = (work.weight_bytes + work.kv_read_bytes) / bytes_per_s * 1e3
    return {
        "batch": len(items),
        "context": items[0].position0 + 1,
        "weight_mb": round(work.weight_bytes / 1e6, 3),
        "kv_read_mb": round(work.kv_read_bytes / 1e6, 3),
        "floor_ms": round(floor_ms, 4),
        "step_ms": round(step_ms, 4),
        "device_ms": None if device_ms is None else round(device_ms, 4),
        "step_over_floor": round(step_ms / floor_ms, 3),
        "tokens_per_s": round(len(items) / step_ms * 1e3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="(default: 1 8 64)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence (default: 512)")
    parser.add_argument("--runs", type=int, default=50, help="steps measured for each batch (default: 50)")
    parser.add_argument("--tiny", action="store_true", help="a toy model on the CPU; nothing is kept")
    asked = parser.parse_args(arguments)
    if not asked.tiny:
        if not torch.cuda.is_available():
            message("gpu_roofline: no CUDA device is visible; nothing was measured (--tiny runs on a CPU)")
            return 1
        tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"], cwd=ROOT)
        if tests.returncode:
            message("gpu_roofline: the GPU tests failed; nothing was measured")
            return 1
    device = torch.device("cpu" if asked.tiny else "cuda")
    bandwidth = copy_bytes_per_s(device, 2**24 if asked.tiny else 2**31, asked.runs)
    with torch.inference_mode():
        model = random_model(model_config(asked.tiny, asked.context), torch.bfloat16, device)
        rows = [measure_row(model, batch, asked.context, bandwidth, asked.runs) for batch in asked.batches]
    name = "CPU" if asked.tiny else torch.cuda.get_device_name()
    print_rows(rows, title=f"{name}, copy {bandwidth / 1e9:.0f} GB/s, bfloat16, medians of {asked.runs} steps")
    if not asked.tiny:
        RESULTS.parent.mkdir(exist_ok=True)
        about = {"device": name, "torch": torch.__version__, "copy_bytes_per_s": round(bandwidth), "runs": asked.runs}
        RESULTS.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        message(f"kept in {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
