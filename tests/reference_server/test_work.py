from reference_server.model_config import ModelConfig
from reference_server.step_types import StepItem
from reference_server.work import step_work

# Worked by hand: 1 layer, hidden 4, 2 query heads of 2 sharing 1 KV head, feed-forward 8, vocabulary 10.
CONFIG = ModelConfig(
    layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10, rope_theta=1e4, norm_eps=1e-5,
    tie_embeddings=True, max_context=64, bos_id=None, eos_ids=(),
)  # fmt: skip
# q 4·4 + k 4·2 + v 4·2 + o 4·4 = 48; feed-forward 3 · 4 · 8 = 96; together 144. Head 4 · 10 = 40.
# KV of a token: keys and values of 1 head of 2 = 4 numbers.


def test_a_decode_token_attends_everything_before_it_and_itself() -> None:
    work = step_work(CONFIG, [StepItem(0, [7], position0=5, sample=True)], dtype_bytes=4)
    # 2·144 + 2·40 + attention 4 · 2 heads · 2 wide · 6 positions = 288 + 80 + 96
    assert work.flops == 464
    # (144 + 40 weights + 6 tokens of KV read · 4 + 1 written · 4) · 4 bytes = 212 · 4
    assert work.bytes == 848


def test_a_prefill_piece_without_a_sample_leaves_the_head_out() -> None:
    work = step_work(CONFIG, [StepItem(0, [7, 8, 9], position0=2, sample=False)], dtype_bytes=2)
    # 3 · 288; positions 2, 3, 4 attend 3 + 4 + 5 = 12 positions, 16 each
    assert work.flops == 864 + 192
    # (144 + 5 · 4 + 3 · 4) · 2
    assert work.bytes == 352


def test_the_weights_are_read_once_for_the_whole_batch() -> None:
    item = StepItem(0, [7], position0=0, sample=True)
    one = step_work(CONFIG, [item], 4)
    two = step_work(CONFIG, [item, StepItem(1, [7], 0, True)], 4)
    assert two.flops == 2 * one.flops
    assert two.bytes - one.bytes == (4 + 4) * 4  # KV of one more token, read and written
