"""Measures what this machine can do at most, with the kernels, the dtype and the threads that the server runs with.

A few seconds and some hundred MiB, given back at the end. Each rate is the median of several runs; where there is more
than one way to do the same work, the best of them, since a ceiling is what can be reached.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model import Projection
from reference_server.model_config import ModelConfig
from reference_server.roofline import Ceilings

Run = Callable[[], object]
LEAST_RUNS, MOST_RUNS = 3, 25
CONTEXT = 1024  # positions of each sequence in the KV measurement


def measure(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 2.0,
    working_set_bytes: int | None = None,
    width: int | None = None,
) -> Ceilings:
    """`seconds` are shared out between the measurements; each makes LEAST_RUNS whatever they take.

    FLOP/s: a product of 512 (GPU: 8192) tokens with a square Projection of `width`, 2 · tokens · width² operations.
    Weights: one and four tokens through Projections of `working_set_bytes` in all, more than the caches hold.
    KV: attention of one token over that many bytes of keys and values with the model's heads, by the fused kernel and
    by plain products with one query for each KV head.
    Transfer: host to device and back from pinned memory; on a CPU, where both are one, a copy in memory, each byte
    counted once in each direction.
    """
    on_gpu = device.type == "cuda"
    tokens = 8192 if on_gpu else 512
    width = width or (8192 if on_gpu else 2048)
    working_set = working_set_bytes or (1 << 30 if on_gpu else 256 << 20)
    wait: Run = torch.cuda.synchronize if on_gpu else lambda: None
    each = seconds / 6
    with torch.inference_mode():
        flops = _flops(dtype, device, tokens, width)
        flops_per_s = rate(*flops, each, wait)
        weights = _weights(dtype, device, working_set, width)
        weight_bytes_per_s = max(rate(run, amount, each, wait) for run, amount in weights)
        del weights
        attention = _attention(config, dtype, device, working_set)
        kv_bytes_per_s = max(rate(run, amount, each, wait) for run, amount in attention)
        del attention
        transfer_bytes_per_s = rate(*_transfer(device, working_set // 4), each, wait)
    return Ceilings(flops_per_s, weight_bytes_per_s, kv_bytes_per_s, transfer_bytes_per_s)


def rate(run: Run, amount: float, seconds: float, wait: Run, now: Callable[[], float] = time.monotonic) -> float:
    """`amount` over the median duration of `run`, a first one for warming up left out."""
    run()
    wait()
    durations: list[float] = []
    while len(durations) < LEAST_RUNS or (sum(durations) < seconds and len(durations) < MOST_RUNS):
        start = now()
        run()
        wait()
        durations.append(now() - start)
    return amount / statistics.median(durations)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Not zeros: some processors are faster with them."""
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _flops(dtype: torch.dtype, device: torch.device, tokens: int, width: int) -> tuple[Run, float]:
    projection = Projection(_random((width, width), dtype, device))
    x = _random((tokens, width), dtype, device)
    return lambda: projection(x), 2.0 * tokens * width * width


def _weights(dtype: torch.dtype, device: torch.device, working_set: int, width: int) -> list[tuple[Run, float]]:
    weight = _random((width, width), dtype, device)
    count = max(1, working_set // (weight.numel() * dtype.itemsize))
    projections = [Projection(weight.clone()) for _ in range(count)]

    def through_all(x: Tensor) -> None:
        for projection in projections:
            projection(x)

    amount = float(count * weight.numel() * dtype.itemsize)
    rows = [_random((tokens, width), dtype, device) for tokens in (1, 4)]
    return [(lambda x=x: through_all(x), amount) for x in rows]  # type: ignore[misc]


def _attention(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, working_set: int
) -> list[tuple[Run, float]]:
    heads, group = config.kv_heads, config.heads // config.kv_heads
    row = heads * CONTEXT * config.head_dim * dtype.itemsize
    sequences = max(1, working_set // (2 * row))
    block = _random((1, heads, CONTEXT, config.head_dim), dtype, device)
    keys, values = (block.repeat(sequences, 1, 1, 1) for _ in range(2))
    queries = _random((sequences, heads, group, config.head_dim), dtype, device)
    one = queries[:, :, :1].contiguous()
    amount = 2.0 * sequences * row
    return [
        (lambda: F.scaled_dot_product_attention(queries, keys, values), amount),
        (lambda: torch.matmul(torch.matmul(one, keys.transpose(-1, -2)).softmax(-1), values), amount),
    ]


def _transfer(device: torch.device, amount: int) -> tuple[Run, float]:
    on_gpu = device.type == "cuda"
    host = torch.ones(amount, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.ones(amount, dtype=torch.uint8, device=device)

    def to_and_fro() -> None:
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)

    return to_and_fro, 2.0 * amount
