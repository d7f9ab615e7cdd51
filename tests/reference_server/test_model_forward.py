"""The forward pass against Hugging Face's Llama with the same weights, however the tokens are cut into steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reference_server.attention import Span
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


def make_runner(config: ModelConfig, slots: int = 4) -> Runner:
    return Runner(Llama(config, weights_of(config), torch.float32, torch.device("cpu")), slots)


def sequence_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_prefill_in_one_piece_gives_the_oracles_logits(tie_embeddings: bool) -> None:
    config = tiny_config(tie_embeddings)
    sequence = sequence_of(23, seed=1)
    logits = make_runner(config).forward([StepItem(0, sequence, 0, sample=True)])
    torch.testing.assert_close(logits[0], oracle_logits(config, sequence)[-1], atol=TOLERANCE, rtol=0)


def test_prefill_chunks_and_decode_steps_give_the_logits_of_the_whole() -> None:
    config = tiny_config()
    sequence = sequence_of(20, seed=2)
    expected = oracle_logits(config, sequence)
    runner = make_runner(config)
    position = 0
    for length in (1, 7, 5, 1, 1, 4, 1):  # 20 tokens
        chunk = sequence[position : position + length]
        logits = runner.forward([StepItem(2, chunk, position, sample=True)])
        position += length
        torch.testing.assert_close(logits[0], expected[position - 1], atol=TOLERANCE, rtol=0)
    assert runner.held(2) == 20


def test_a_mixed_batch_gives_each_sequence_its_own_logits_in_batch_order() -> None:
    config = tiny_config()
    sequences = {slot: sequence_of(length, seed=slot) for slot, length in {0: 9, 1: 30, 2: 12, 3: 17}.items()}
    expected = {slot: oracle_logits(config, sequence) for slot, sequence in sequences.items()}
    runner = make_runner(config)
    # Slots 0, 1 and 3 are ready to decode, with different lengths; slot 2 is in the middle of its prompt.
    before = {0: 8, 1: 29, 3: 16, 2: 5}
    runner.forward([StepItem(slot, sequences[slot][:n], 0, sample=False) for slot, n in before.items()])
    batch = [
        StepItem(3, sequences[3][16:17], 16, sample=True),
        StepItem(2, sequences[2][5:12], 5, sample=True),
        StepItem(0, sequences[0][8:9], 8, sample=True),
        StepItem(1, sequences[1][29:30], 29, sample=True),
    ]
    logits = runner.forward(batch)
    for row, item in enumerate(batch):
        torch.testing.assert_close(logits[row], expected[item.slot][-1], atol=TOLERANCE, rtol=0)


def test_only_items_that_sample_get_a_token() -> None:
    config = tiny_config()
    runner = make_runner(config)
    first, second = sequence_of(6, seed=3), sequence_of(4, seed=4)
    result = runner.step([StepItem(1, first, 0, sample=False), StepItem(0, second, 0, sample=True)])
    assert result.token_ids == [None, int(oracle_logits(config, second)[-1].argmax())]
    assert result.end_ns > result.start_ns > 0 and result.device_ns is None
    nothing_sampled = runner.step([StepItem(2, first, 0, sample=False)])
    assert nothing_sampled.token_ids == [None]
    assert runner.step([]).token_ids == []


def test_a_freed_slot_serves_the_next_sequence_as_if_it_were_new() -> None:
    config = tiny_config()
    runner = make_runner(config)
    runner.step([StepItem(0, sequence_of(40, seed=5), 0, sample=True)])
    runner.free(0)
    assert runner.held(0) == 0
    sequence = sequence_of(11, seed=6)
    logits = runner.forward([StepItem(0, sequence, 0, sample=True)])
    torch.testing.assert_close(logits[0], oracle_logits(config, sequence)[-1], atol=TOLERANCE, rtol=0)


def test_neighbouring_slots_decode_in_one_call_and_a_long_one_apart() -> None:
    config = replace(tiny_config(), max_context=1024)
    runner = make_runner(config, slots=8)
    held = {0: 9, 1: 30, 2: 900, 4: 5, 5: 5}
    runner.step([StepItem(slot, [1] * length, 0, False) for slot, length in held.items()])
    plan = runner.kv.plan([Span(slot, length, 1) for slot, length in held.items()])
    # 0 and 1 are padded to 31 positions. With 2, two of three would be padded to 901: (901 - 10) + (901 - 31) = 1761
    # positions for nothing, more than 3 * 256. Slot 3 is not in the step, so 4 cannot be a neighbour of 2.
    assert [(run.row0, run.slot0, run.count, run.length) for run in plan.decodes] == [
        (0, 0, 2, 31),
        (2, 2, 1, 901),
        (3, 4, 2, 6),
    ]
    assert [run.mask is None for run in plan.decodes] == [False, True, True]


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ([StepItem(4, [1], 0, True)], "slot 4 of 4"),
        ([StepItem(0, [1], 1, True)], "holds 0 tokens, not 1"),
        ([StepItem(0, [], 0, True)], "without tokens"),
        ([StepItem(0, [1] * 65, 0, True)], "65 tokens > 64"),
        ([StepItem(0, [1], 0, True), StepItem(0, [2], 0, True)], "holds 1 tokens, not 0"),
    ],
)
def test_a_step_that_does_not_fit_the_kv_is_our_bug_and_named(batch: list[StepItem], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        make_runner(tiny_config()).step(batch)


def test_bfloat16_stays_near_float32() -> None:
    config = tiny_config()
    sequence = sequence_of(23, seed=1)
    model = Llama(config, weights_of(config), torch.bfloat16, torch.device("cpu"))
    logits = Runner(model, slots=1).forward([StepItem(0, sequence, 0, sample=True)])
    assert logits.dtype == torch.float32
    # bfloat16 keeps 8 bits: 3 layers of rounding at 2**-8 of values around 3.
    torch.testing.assert_close(logits[0], oracle_logits(config, sequence)[-1], atol=0.3, rtol=0)


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_a_packed_projection_is_the_same_matrix_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(70, 50, generator=generator), torch.randn(rows, 50, generator=generator)
    projection = Projection(weight)
    assert projection.packed == torch.backends.mkldnn.is_available()
    torch.testing.assert_close(projection(x), x @ weight.T, atol=1e-4, rtol=0)


def test_the_configs_weight_count_is_that_of_its_tensors() -> None:
    config = tiny_config()
    matrices = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    del matrices["model.embed_tokens.weight"]
    assert config.matmul_weights == sum(rows * columns for rows, columns in matrices.values())
    assert config.kv_values_per_token == 192  # keys and values 2 * layers 3 * KV heads 2 * head size 16
