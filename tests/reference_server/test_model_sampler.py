"""Sampling: greedy, temperature, top-p, and draws that depend on nothing but seed and position."""

import math

import pytest
import torch

from reference_server.sampler import sample, uniform_draw
from reference_server.step_types import SamplingParams

NO_EOS = torch.tensor([], dtype=torch.long)


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities])


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 4000) -> list[float]:
    counts = torch.zeros(logits.shape[0])
    rows = logits.repeat(draws, 1)
    for token in sample(rows, [params] * draws, range(draws), NO_EOS):
        counts[token] += 1
    return (counts / draws).tolist()


def test_temperature_zero_takes_the_largest_logit() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [9.0, 3.0, 1.0]])
    assert sample(rows, [SamplingParams()] * 2, [0, 0], NO_EOS) == [1, 0]


def test_temperature_one_draws_by_the_models_probabilities() -> None:
    seen = frequencies(logits_of(0.5, 0.3, 0.2), SamplingParams(temperature=1.0, seed=11))
    # Four standard deviations of a share of 4000 draws: 4 * sqrt(0.25 / 4000) = 0.032.
    assert seen == pytest.approx([0.5, 0.3, 0.2], abs=0.032)


def test_a_higher_temperature_flattens_by_the_power_law() -> None:
    seen = frequencies(logits_of(0.8, 0.2), SamplingParams(temperature=2.0, seed=3))
    # p ** (1/2), normalised: 0.8944 and 0.4472 of 1.3416 are 2/3 and 1/3.
    assert seen == pytest.approx([2 / 3, 1 / 3], abs=0.032)


def test_top_p_keeps_the_smallest_set_that_holds_p_and_renormalises() -> None:
    seen = frequencies(logits_of(0.1, 0.5, 0.1, 0.3), SamplingParams(temperature=1.0, top_p=0.7, seed=4))
    # 0.5 alone is below 0.7; with 0.3 it is 0.8. Kept 0.5 and 0.3 of 0.8: 0.625 and 0.375.
    assert seen == pytest.approx([0, 0.625, 0, 0.375], abs=0.032)


def test_top_p_looks_beyond_its_first_look_when_the_distribution_is_flat() -> None:
    vocab = 2048  # four times the first look, all equally likely
    tokens = sample(
        torch.zeros(300, vocab), [SamplingParams(temperature=1.0, top_p=0.9, seed=1)] * 300, range(300), NO_EOS
    )
    assert len(set(tokens)) > 255  # 300 draws of 1843 hit about 277 different ones, of the first 512 about 227


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    rows = torch.tensor([[100.0, 50.0, float("-inf")]])
    assert sample(rows, [SamplingParams(temperature=1e-30)], [0], NO_EOS) == [0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    params = [SamplingParams(1.0, top_p, seed) for seed, top_p in enumerate([1.0, 0.9, 1.0, 0.5, 0.9, 1.0])]
    positions = [10, 20, 30, 40, 50, 60]
    together = sample(logits.clone(), params, positions, NO_EOS)
    alone = [sample(logits[i : i + 1].clone(), [params[i]], [positions[i]], NO_EOS)[0] for i in range(6)]
    assert together == alone
    assert uniform_draw(1, 5) == uniform_draw(1, 5)
    assert len({uniform_draw(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_masked_tokens_are_never_chosen() -> None:
    output_mask = torch.tensor([0.0, float("-inf"), 0.0, 0.0])
    eos = torch.tensor([3])
    rows = torch.tensor([[1.0, 9.0, 2.0, 8.0]] * 4)
    params = [
        SamplingParams(mask_eos=True),
        SamplingParams(),
        SamplingParams(temperature=50.0, mask_eos=True, seed=2),
        SamplingParams(temperature=50.0, top_p=0.999, mask_eos=True, seed=3),
    ]
    for position in range(50):
        greedy, greedy_with_eos, drawn, drawn_by_top_p = sample(rows.clone(), params, [position] * 4, eos, output_mask)
        assert (greedy, greedy_with_eos) == (2, 3)
        assert {drawn, drawn_by_top_p} <= {0, 2}
