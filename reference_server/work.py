"""What a step costs by the model's shape: floating point operations and bytes. Pure arithmetic, nothing measured."""

from collections.abc import Sequence
from typing import NamedTuple

from reference_server.model_config import ModelConfig
from reference_server.step_types import StepItem


class Work(NamedTuple):
    flops: int
    bytes: int


def step_work(config: ModelConfig, items: Sequence[StepItem], dtype_bytes: int) -> Work:
    """FLOPs and bytes of one iteration.

    A matrix product of a token with w weights is 2w operations; the output head is run for sampled tokens only.
    Attention of one token over p positions is 2p·d for the scores and 2p·d for the values in each query head.
    Bytes: every weight once, the KV of all positions read once for each sequence, the new KV written. Activations
    are left out.
    """
    head_weights = config.vocab * config.hidden
    layer_weights = config.matmul_weights - head_weights
    tokens = sampled = attended = kv_read = 0
    for item in items:
        count, end = len(item.token_ids), item.position0 + len(item.token_ids)
        tokens += count
        sampled += item.sample
        # Token at position p attends p + 1 positions: position0 + 1 … end.
        attended += (item.position0 + 1 + end) * count // 2
        kv_read += end
    attention = 4 * config.layers * config.heads * config.head_dim * attended
    flops = 2 * layer_weights * tokens + 2 * head_weights * sampled + attention
    values = (config.matmul_weights if sampled else layer_weights) + config.kv_values_per_token * (kv_read + tokens)
    return Work(flops, values * dtype_bytes if tokens else 0)
