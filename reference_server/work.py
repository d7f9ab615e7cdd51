"""What a step costs by the model's shape: floating point operations and bytes, each named. Pure arithmetic, nothing
measured.

The FLOPs are those that the model's definition asks for, the bytes the least that must move: an engine that does more
(recomputes, pads, reads KV once for each tile of queries) reaches a smaller share of the ceilings for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from reference_server.model_config import ModelConfig
from reference_server.step_types import StepItem

INDEX_BYTES = 8  # a token id, a position, a row number: int64 in torch


class Work(NamedTuple):
    """One iteration, under the names of the journal's `step` record. Linear: matrix products with weights, the output
    head among them. Attention: scores and values.
    """

    prefill_linear_flops: int
    prefill_attention_flops: int
    decode_linear_flops: int
    decode_attention_flops: int
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    transfer_bytes: int

    @property
    def flops(self) -> int:
        return sum(self[:4])

    @property
    def bytes(self) -> int:
        """All four kinds. Transfers go over another link than the rest; on a CPU both are the same memory."""
        return sum(self[4:])


def attended_pairs(position0: int, tokens: int) -> int:
    """Pairs of a query and a position that it attends, for tokens at position0, position0 + 1, …

    The token at position p attends p + 1 positions, itself among them, so this is the sum of position0 + 1 …
    position0 + tokens.
    """
    return tokens * (2 * position0 + tokens + 1) // 2


def step_work(config: ModelConfig, items: Sequence[StepItem], dtype_bytes: int, decodes: int = 0) -> Work:
    """The first `decodes` items are decodes, the rest is prefill.

    FLOPs. A token times a matrix of w weights is w multiplications and w additions: 2w (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). Weights of a layer: q and o, hidden · heads · head_dim each; k and v, hidden ·
    kv_heads · head_dim each; gate, up and down, hidden · intermediate each. The output head, vocab · hidden, runs for
    sampled tokens only. Attention of a query over one position is head_dim multiply-adds for the score and as many for
    the value, in each query head of each layer: 4 · layers · heads · head_dim per pair; causal, so pairs above the
    diagonal are not counted. Norms, rotation, softmax and activation are left out: they are linear in hidden, not in
    the weights.

    Bytes. Weights: every matrix once for the whole batch, the head if anything is sampled; norms and the looked-up
    embedding rows are left out (below a thousandth). KV: keys and values of each layer and KV head; every position up
    to the end of a sequence is read once for that sequence, shared blocks once for each that shares them, and every new
    token is written. Transfer: to the device an id and a position for each token and a row number for each sampled one;
    back to the host an id for each sampled one. Block tables and sampling parameters depend on the layout and are left
    out, and so is moving activations.
    """
    read = sum(item.position0 for item in items[:decodes]) + decodes
    decode, prefill = _Counts(decodes, decodes, read, read), _count(items[decodes:])
    head_weights = config.vocab * config.hidden
    layer_weights = config.matmul_weights - head_weights
    pair_flops = 4 * config.layers * config.heads * config.head_dim
    kv_bytes = config.kv_values_per_token * dtype_bytes
    tokens, sampled = decode.tokens + prefill.tokens, decode.sampled + prefill.sampled
    weights = layer_weights * (tokens > 0) + head_weights * (sampled > 0)
    return Work(
        prefill_linear_flops=2 * layer_weights * prefill.tokens + 2 * head_weights * prefill.sampled,
        prefill_attention_flops=pair_flops * prefill.pairs,
        decode_linear_flops=2 * layer_weights * decode.tokens + 2 * head_weights * decode.sampled,
        decode_attention_flops=pair_flops * decode.pairs,
        weight_bytes=weights * dtype_bytes,
        kv_read_bytes=(decode.kv_read + prefill.kv_read) * kv_bytes,
        kv_write_bytes=tokens * kv_bytes,
        transfer_bytes=INDEX_BYTES * (2 * tokens + 2 * sampled),
    )


class _Counts(NamedTuple):
    tokens: int
    sampled: int
    pairs: int
    kv_read: int  # positions


def _count(items: Sequence[StepItem]) -> _Counts:
    tokens = sampled = pairs = kv_read = 0
    for item in items:
        count, position0 = len(item.token_ids), item.position0
        tokens += count
        sampled += item.sample
        pairs += attended_pairs(position0, count)
        kv_read += position0 + count
    return _Counts(tokens, sampled, pairs, kv_read)
