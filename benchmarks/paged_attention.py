"""Decode attention on a CPU over paged KV: gathered side by side and attended at once, or block by block where it lies.

The shape is SmolLM2's in float32; every sequence holds the same context, in blocks that follow one another. The floor
is the same kernel over KV that lies side by side already: attention without the gathering. One pass goes through all
layers, so that the KV does not stay in the cache. All sides take turns in every round; times are medians, ratios are
medians of the ratios within a round. `python -m benchmarks.paged_attention`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kept import options_of, save
from reference_server.attention import PagedKV, Span
from reference_server.model_config import ModelConfig
from sloscope.output import FORMATS, message, print_rows

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_TOKENS = (16, 32, 64)
Row = dict[str, object]


def model_config(layers: int, context: int) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=HEADS * HEAD_DIM, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, intermediate=1536,
        vocab=49_152, max_context=context, rope_theta=100_000.0, norm_eps=1e-5, tie_embeddings=True, bos_id=None,
        eos_ids=(),
    )  # fmt: skip


def paged(
    batch: int, context: int, layers: int, block_tokens: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A pass that gathers, and one that goes blockwise, over the same KV; what the last layer gives."""
    need = -(-context // block_tokens)
    kv = PagedKV(model_config(layers, context), batch * need, block_tokens, torch.float32, torch.device("cpu"))
    for pool in kv._pools:
        pool.normal_()
    spans = [Span(range(i * need, (i + 1) * need), context - 1, 1) for i in range(batch)]
    q, new = torch.randn(batch, HEADS, HEAD_DIM), torch.randn(batch, 2 * KV_HEADS, HEAD_DIM)

    def attend(blockwise: bool) -> Callable[[], Tensor]:
        plan = kv.plan(spans, context, blockwise)

        def run() -> Tensor:
            for layer in range(layers):
                out = kv.attend(plan, layer, q, new)
            return out

        return run

    return attend(False), attend(True)


def side_by_side(batch: int, context: int, layers: int) -> Callable[[], None]:
    kv = torch.randn(layers, 2, batch, KV_HEADS, context, HEAD_DIM)
    # Query heads that share a KV head stand where query positions usually do, as where KV is gathered.
    q = torch.randn(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)

    def run() -> None:
        for keys, values in kv:
            scaled_dot_product_attention(q, keys, values)

    return run


def rows_of(batch: int, context: int, layers: int, rounds: int) -> list[Row]:
    """Of each size of block. The first round does not count."""
    message(f"batch {batch}")
    floor = side_by_side(batch, context, layers)
    sides = {block_tokens: paged(batch, context, layers, block_tokens) for block_tokens in BLOCK_TOKENS}
    floors: list[float] = []
    seen: dict[int, list[tuple[float, float]]] = {block_tokens: [] for block_tokens in BLOCK_TOKENS}
    for number in range(rounds + 1):
        floor_ms = measured_ms(floor)
        took = {block_tokens: (measured_ms(a), measured_ms(b)) for block_tokens, (a, b) in sides.items()}
        if number > 0:
            floors.append(floor_ms)
            for block_tokens, each in took.items():
                seen[block_tokens].append(each)
    return [row(batch, block_tokens, each, floors) for block_tokens, each in seen.items()]


def row(batch: int, block_tokens: int, seen: Sequence[tuple[float, float]], floors: Sequence[float]) -> Row:
    def middle(values: Sequence[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return {
        "batch": batch,
        "block_tokens": block_tokens,
        "side_by_side_ms": middle(floors, 3),
        "gathered_ms": middle([gathered for gathered, _ in seen], 3),
        "blockwise_ms": middle([blockwise for _, blockwise in seen], 3),
        "gathered_x_floor": middle([a / floor for (a, _), floor in zip(seen, floors, strict=True)], 2),
        "blockwise_x_floor": middle([b / floor for (_, b), floor in zip(seen, floors, strict=True)], 2),
        "gathered_x_blockwise": middle([a / b for a, b in seen], 2),
    }


def measured_ms(work: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="(default: 1 16)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence (default: 512)")
    parser.add_argument("--layers", type=int, default=30, help="(default: 30)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--format", default="table", choices=FORMATS, help="(default: table)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep rows and machine as JSON")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    torch.manual_seed(1)
    with torch.inference_mode():
        rows = [r for batch in asked.batches for r in rows_of(batch, asked.context, asked.layers, asked.rounds)]
    print_rows(rows, asked.format, title=f"{asked.layers} layers, context {asked.context}, medians of {asked.rounds}")
    save(asked.save, "paged_attention", {"rows": rows}, **options_of(asked))


if __name__ == "__main__":
    main()
