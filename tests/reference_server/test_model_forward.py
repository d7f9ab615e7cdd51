"""The forward pass against Hugging Face's Llama with the same weights, however the tokens are cut into steps."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from reference_server.builtin import random_state
from reference_server.model import Llama, Projection, tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.runner import Runner
from reference_server.step_types import StepItem

# Both sides compute in float32 in another order of additions; logits are of size 3.
TOLERANCE = 2e-4


def tiny_config(tie_embeddings: bool = False) -> ModelConfig:
    return ModelConfig(
        layers=3,
        hidden=48,
        heads=6,
        kv_heads=2,
        head_dim=16,  # 6 * 16 = 96: the attention is wider than the hidden state
        intermediate=80,
        vocab=101,
        rope_theta=500.0,
        norm_eps=1e-5,
        tie_embeddings=tie_embeddings,
        max_context=64,
        bos_id=None,
        eos_ids=(7,),
    )


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    state = random_state(config, seed=5)
    for name in state:
        if state[name].ndim == 1:  # norms other than 1, so that a norm left out shows
            state[name] = torch.linspace(0.5, 1.5, config.hidden)
    return state


def oracle_logits(config: ModelConfig, sequence: Sequence[int]) -> torch.Tensor:  # [tokens, vocab]
    oracle = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()
    state = weights_of(config)
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    oracle.load_state_dict(state)
    with torch.inference_mode():
        return oracle(torch.tensor([list(sequence)])).logits[0]


BLOCK_TOKENS = 4
# In a pool of 64, far apart and out of order.
TABLES = ([3, 2, 1, 0], list(range(40, 24, -1)), [60, 5, 61, 6, 62, 7], [10, 20, 11, 21, 12, 22, 13, 23, 14])


def make_runner(config: ModelConfig) -> Runner:
    model = Llama(config, weights_of(config), torch.float32, torch.device("cpu"))
    return Runner(model, kv_blocks=64, block_tokens=BLOCK_TOKENS)


def sequence_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_prefill_in_one_piece_gives_the_oracles_logits(tie_embeddings: bool) -> None:
    config = tiny_config(tie_embeddings)
    sequence = sequence_of(23, seed=1)
    logits = make_runner(config).forward([StepItem(TABLES[1], sequence, 0, sample=True)])
    torch.testing.assert_close(logits[0], oracle_logits(config, sequence)[-1], atol=TOLERANCE, rtol=0)


def test_prefill_chunks_and_decode_steps_give_the_logits_of_the_whole() -> None:
    config = tiny_config()
    sequence = sequence_of(20, seed=2)
    expected = oracle_logits(config, sequence)
    runner = make_runner(config)
    position = 0
    for length in (1, 7, 5, 1, 1, 4, 1):  # 20 tokens
        chunk = sequence[position : position + length]
        logits = runner.forward([StepItem(TABLES[2], chunk, position, sample=True)])
        position += length
        torch.testing.assert_close(logits[0], expected[position - 1], atol=TOLERANCE, rtol=0)
    assert position == 20


def test_a_mixed_batch_gives_each_sequence_its_own_logits_in_batch_order() -> None:
    config = tiny_config()
    sequences = [sequence_of(length, seed=i) for i, length in enumerate((9, 30, 12, 17))]
    expected = [oracle_logits(config, sequence) for sequence in sequences]
    runner = make_runner(config)
    # 0, 1 and 3 are ready to decode, with different lengths; 2 is in the middle of its prompt.
    before = (8, 29, 5, 16)
    runner.forward([StepItem(TABLES[i], sequences[i][:n], 0, sample=False) for i, n in enumerate(before)])
    order = (3, 2, 0, 1)
    logits = runner.forward([StepItem(TABLES[i], sequences[i][before[i] :], before[i], sample=True) for i in order])
    for row, i in enumerate(order):
        torch.testing.assert_close(logits[row], expected[i][-1], atol=TOLERANCE, rtol=0)


def test_a_shared_prefix_is_read_by_several_sequences() -> None:
    config = tiny_config()
    runner = make_runner(config)
    prefix = sequence_of(8, seed=7)  # two blocks
    runner.forward([StepItem([9, 4], prefix, 0, sample=False)])
    tails = [sequence_of(length, seed=10 + i) for i, length in enumerate((1, 1, 3, 6))]
    tables = [[9, 4, 1], [9, 4, 2], [9, 4, 3], [9, 4, 7, 5]]
    logits = runner.forward([StepItem(t, tail, 8, sample=True) for t, tail in zip(tables, tails, strict=True)])
    for row, tail in enumerate(tails):
        torch.testing.assert_close(logits[row], oracle_logits(config, prefix + tail)[-1], atol=TOLERANCE, rtol=0)


def test_only_items_that_sample_get_a_token() -> None:
    config = tiny_config()
    runner = make_runner(config)
    first, second = sequence_of(6, seed=3), sequence_of(4, seed=4)
    result = runner.step([StepItem(TABLES[1], first, 0, sample=False), StepItem(TABLES[0], second, 0, sample=True)])
    assert result.token_ids == [None, int(oracle_logits(config, second)[-1].argmax())]
    assert result.end_ns > result.start_ns > 0 and result.device_ns is None
    nothing_sampled = runner.step([StepItem(TABLES[2], first, 0, sample=False)])
    assert nothing_sampled.token_ids == [None]
    assert runner.step([]).token_ids == []


def test_a_block_that_changed_hands_serves_the_next_sequence_as_if_it_were_new() -> None:
    config = tiny_config()
    runner = make_runner(config)
    runner.step([StepItem(range(10), sequence_of(40, seed=5), 0, sample=True)])
    sequence = sequence_of(11, seed=6)
    runner.forward([StepItem([7, 3, 5], sequence[:10], 0, sample=True)])
    logits = runner.forward([StepItem([7, 3, 5], sequence[10:], 10, sample=True)])
    torch.testing.assert_close(logits[0], oracle_logits(config, sequence)[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ([StepItem([64], [1], 0, True)], "a block beyond 64"),
        ([StepItem([1], [1] * 5, 0, True)], "item 0: 5 tokens in 1 blocks"),
        ([StepItem([], [1], 0, True)], "item 0: 1 tokens in 0 blocks"),
        ([StepItem([0], [], 0, True)], "item 0: a step without tokens"),
        ([StepItem(range(20), [1] * 65, 0, True)], "item 0: 65 tokens > 64"),
        ([StepItem([0], [1], 0, True), StepItem([3, 0], [2], 4, True)], "written that stands in another table"),
        ([StepItem([0], [1], 2, True), StepItem([0, 3], [2], 4, True)], "written that stands in another table"),
    ],
)
def test_a_step_that_does_not_fit_the_kv_is_our_bug_and_named(batch: list[StepItem], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        make_runner(tiny_config()).step(batch)


def test_bfloat16_stays_near_float32_in_prefill_chunk_and_decode() -> None:
    config = tiny_config()
    sequences = [sequence_of(23, seed=1), sequence_of(14, seed=2)]
    expected = torch.stack([oracle_logits(config, sequence)[-1] for sequence in sequences])
    model = Llama(config, weights_of(config), torch.bfloat16, torch.device("cpu"))
    runner = Runner(model, kv_blocks=16, block_tokens=BLOCK_TOKENS)
    tables = (range(1, 13, 2), range(0, 8, 2))
    for cuts in ((0, 0), (17, 13), (22, 13)):  # all at once; a chunk of 6 and a decode; two decodes
        if any(cuts):
            runner.forward([StepItem(t, s[:n], 0, False) for t, s, n in zip(tables, sequences, cuts, strict=True)])
        batch = [StepItem(t, s[n:], n, True) for t, s, n in zip(tables, sequences, cuts, strict=True)]
        logits = runner.forward(batch)
        assert logits.dtype == torch.float32
        # bfloat16 keeps 8 bits: 3 layers of rounding at 2**-8 of values around 3.
        torch.testing.assert_close(logits, expected, atol=0.3, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_a_packed_projection_is_the_same_matrix_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(70, 50, generator=generator), torch.randn(rows, 50, generator=generator)
    added = torch.randn(rows, 70, generator=generator)
    projection = Projection(weight)
    assert (projection.packed is not None) == torch.backends.mkldnn.is_available()
    for plain in (weight, None):  # one row goes by the plain weight while there is one
        projection.plain = plain
        torch.testing.assert_close(projection(x), x @ weight.T, atol=1e-4, rtol=0)
        torch.testing.assert_close(projection(x, added), x @ weight.T + added, atol=1e-4, rtol=0)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed here")
@pytest.mark.parametrize("plain_is_faster", [True, False])
def test_plain_weights_stay_only_where_one_row_is_faster_by_them(
    plain_is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*_: object, **__: object) -> Tensor:
        time.sleep(0.001)
        return torch.empty(0)

    slow = "by_packed" if plain_is_faster else "by_plain"
    monkeypatch.setattr(Projection, slow, slowly)
    model = Llama(tiny_config(), weights_of(tiny_config()), torch.float32, torch.device("cpu"))
    kept = {p.plain is not None for layer in model.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)}
    assert kept == {plain_is_faster} == {model.head.plain is not None}


def test_the_configs_weight_count_is_that_of_its_tensors() -> None:
    config = tiny_config()
    matrices = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    del matrices["model.embed_tokens.weight"]
    assert config.matmul_weights == sum(rows * columns for rows, columns in matrices.values())
    assert config.kv_values_per_token == 192  # keys and values 2 * layers 3 * KV heads 2 * head size 16
