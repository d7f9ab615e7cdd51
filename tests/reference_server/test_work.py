from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from reference_server.builtin import make_builtin
from reference_server.model import Llama, Projection
from reference_server.model_config import ModelConfig
from reference_server.step_types import StepItem
from reference_server.work import Work, attended_pairs, step_work
from sloscope.records import SCHEMA

# Worked by hand: 1 layer, hidden 4, 2 query heads of 2 sharing 1 KV head, feed-forward 8, vocabulary 10.
CONFIG = ModelConfig(
    layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10, rope_theta=1e4, norm_eps=1e-5,
    tie_embeddings=True, max_context=64, bos_id=None, eos_ids=(),
)  # fmt: skip
# q 4·4 + k 4·2 + v 4·2 + o 4·4 = 48; feed-forward 3 · 4 · 8 = 96; together 144. Head 4 · 10 = 40.
# KV of a token: keys and values of 1 head of 2 = 4 numbers. A pair: 4 · 1 layer · 2 heads · 2 wide = 16 operations.


BLOCKS = range(4)  # where the KV lies has no part in the work


def item(token_ids: Sequence[int], position0: int, sample: bool) -> StepItem:
    return StepItem(BLOCKS, token_ids, position0, sample)


DECODE = item([7], position0=5, sample=True)
PIECE = item([7, 8, 9], position0=2, sample=False)


def test_a_decode_token_attends_everything_before_it_and_itself() -> None:
    assert step_work(CONFIG, [DECODE], dtype_bytes=4, decodes=1) == Work(
        prefill_linear_flops=0,
        prefill_attention_flops=0,
        decode_linear_flops=2 * 144 + 2 * 40,
        decode_attention_flops=6 * 16,  # positions 0 … 5
        weight_bytes=(144 + 40) * 4,
        kv_read_bytes=6 * 4 * 4,
        kv_write_bytes=1 * 4 * 4,
        transfer_bytes=8 + 8 + 8 + 8,  # id, position and row in, id out
    )


def test_a_prefill_piece_without_a_sample_leaves_the_head_out() -> None:
    assert step_work(CONFIG, [PIECE], dtype_bytes=2) == Work(
        prefill_linear_flops=3 * 2 * 144,
        prefill_attention_flops=(3 + 4 + 5) * 16,  # positions 2, 3, 4 attend 3, 4 and 5
        decode_linear_flops=0,
        decode_attention_flops=0,
        weight_bytes=144 * 2,
        kv_read_bytes=5 * 4 * 2,
        kv_write_bytes=3 * 4 * 2,
        transfer_bytes=3 * (8 + 8),
    )


def test_a_mixed_step_reads_the_weights_once_and_tells_prefill_from_decode() -> None:
    mixed = step_work(CONFIG, [DECODE, PIECE], 4, decodes=1)
    decode, piece = step_work(CONFIG, [DECODE], 4, decodes=1), step_work(CONFIG, [PIECE], 4)
    assert mixed.weight_bytes == decode.weight_bytes == 184 * 4
    assert mixed[:4] == (piece[0], piece[1], decode[2], decode[3])
    assert mixed[5:] == tuple(a + b for a, b in zip(decode[5:], piece[5:], strict=True))


def test_totals_are_the_sums_of_the_parts() -> None:
    work = Work(1, 20, 300, 4_000, 5, 60, 700, 8_000)
    assert (work.flops, work.bytes) == (4_321, 8_765)


def test_a_step_without_items_moves_nothing() -> None:
    assert step_work(CONFIG, [], 4) == Work(0, 0, 0, 0, 0, 0, 0, 0)


def test_attended_pairs_are_a_triangle_on_a_rectangle() -> None:
    assert attended_pairs(0, 1) == 1
    assert attended_pairs(0, 4) == 1 + 2 + 3 + 4
    assert attended_pairs(10, 3) == 11 + 12 + 13
    assert attended_pairs(10, 0) == 0


def test_every_part_has_a_field_in_the_step_record() -> None:
    fields = {field.name for field in SCHEMA["step"]}
    assert set(Work._fields) <= fields


def test_linear_flops_are_those_that_torch_counts() -> None:
    """The counter sees F.linear's products only when the weights are plain; attention is left out of the run."""
    checkpoint = make_builtin()
    with torch.inference_mode():
        model = Llama(checkpoint.config, checkpoint.state, torch.float32, torch.device("cpu"))
        for layer in model.layers:
            for projection in (layer.qkv, layer.output, layer.gate_up, layer.down):
                unpack(projection)
        unpack(model.head)
        batch = [item([1], position0=8, sample=True), item([1, 2, 3, 4, 5], position0=0, sample=False)]
        rows = torch.tensor([0])
        with FlopCounterMode(display=False) as counter:
            model.forward(
                torch.tensor([1, 1, 2, 3, 4, 5]),
                torch.tensor([8, 0, 1, 2, 3, 4]),
                rows,
                lambda _layer, q, *_kv: q.flatten(1),
            )
    work = step_work(checkpoint.config, batch, 4, decodes=1)
    assert counter.get_total_flops() == work.prefill_linear_flops + work.decode_linear_flops


def test_attention_flops_are_those_that_torch_counts_for_a_decode() -> None:
    """A decode has no triangle, so that the counter, which knows no causality, agrees."""
    q = torch.zeros(1, 2, 1, 2, device="meta")  # batch, heads, queries, head_dim
    kv = torch.zeros(1, 2, 6, 2, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.matmul(torch.matmul(q, kv.transpose(-1, -2)).softmax(-1), kv)
    assert counter.get_total_flops() == step_work(CONFIG, [DECODE], 4, decodes=1).decode_attention_flops == 96


def unpack(projection: Projection) -> None:
    """A plain weight again: only its shape is counted."""
    projection.packed = None
    projection.plain = torch.zeros(projection.out_features, projection.in_features)
