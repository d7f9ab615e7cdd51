"""The built-in model: the same everywhere, quick, and visible text all the way."""

import time

import pytest
import torch

from reference_server.builtin import SIZES, make_builtin
from reference_server.loader import make_runner
from reference_server.model_store import BUILTIN
from reference_server.sampler import sample, sampling_values
from reference_server.step_types import SamplingParams, StepItem
from reference_server.tokenizer import Tokenizer
from sloscope.errors import ConfigError


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = make_builtin(), make_builtin()
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    other = make_builtin(seed=1)
    assert not torch.equal(first.state["lm_head.weight"], other.state["lm_head.weight"])


def test_every_sampled_token_is_visible_text_and_none_ends_the_answer() -> None:
    checkpoint = make_builtin()
    runner = make_runner(checkpoint, kv_blocks=64, max_context=256)
    tokenizer = Tokenizer(checkpoint.tokenizer)
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Grüße, 世界 \U0001f600\n1 2"}]))
    params = [SamplingParams(temperature=t, seed=t, mask_eos=checkpoint.mask_eos) for t in (0, 1, 3, 40)]
    new: list[list[int]] = [prompt] * 4
    for step in range(100):
        position = 0 if step == 0 else len(prompt) + step - 1
        batch = [StepItem(range(i * 16, i * 16 + 16), new[i], position, True, params[i]) for i in range(4)]
        for i, token in enumerate(runner.step(batch).token_ids):
            assert token is not None
            text = tokenizer.decode([token])
            assert text.strip() and text.isascii() and text.isprintable()
            new[i] = [token]


def test_the_end_token_can_be_sampled_by_a_request_that_asks_for_it() -> None:
    checkpoint = make_builtin()
    vocab, eos_ids = checkpoint.config.vocab, torch.tensor(checkpoint.config.eos_ids)
    logits = torch.zeros(2, vocab)
    logits[:, eos_ids] = 10.0
    params = [SamplingParams(), SamplingParams(mask_eos=True)]
    values = torch.from_numpy(sampling_values(params, [0, 0]))
    asked, default = sample(logits, params, values, eos_ids, checkpoint.output_mask).tolist()
    assert checkpoint.tokenizer.tokens[asked] == "<|end|>"
    assert default not in checkpoint.config.eos_ids


def test_a_greedy_answer_does_not_run_in_a_short_circle() -> None:
    checkpoint = make_builtin()
    runner = make_runner(checkpoint, kv_blocks=32, max_context=512)
    tokens, new = [], Tokenizer(checkpoint.tokenizer).encode("Once upon a time")
    position = 0
    for _ in range(200):
        (token,) = runner.step([StepItem(range(32), new, position, True, SamplingParams(mask_eos=True))]).token_ids
        assert token is not None
        position, new = position + len(new), [token]
        tokens.append(token)
    assert len(set(tokens[-100:])) > 20


def test_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dtype: 'int1'; accepted: float32, bfloat16"):
        make_runner(make_builtin(), kv_blocks=64, dtype="int1")


def test_it_is_made_in_under_a_second() -> None:
    # A ceiling against an accident of a hundred times the work, not a benchmark: it takes about 30 ms.
    start = time.process_time()
    make_runner(make_builtin(), kv_blocks=64 * 512)
    assert time.process_time() - start < 1.0


def test_every_built_in_name_has_a_shape() -> None:
    assert tuple(SIZES) == BUILTIN
    parameters = sum(tensor.numel() for tensor in make_builtin(name="builtin-14m").state.values())
    assert parameters == 13_342_080
