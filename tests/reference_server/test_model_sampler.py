"""Sampling: greedy, temperature, top-p, and draws that depend on nothing but seed and position."""

import math
from collections.abc import Sequence

import pytest
import torch

from reference_server.sampler import sample, sample_static, sampling_values, uniform_draws
from reference_server.step_types import SamplingParams

NO_EOS = torch.tensor([], dtype=torch.long)


def chosen(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    eos_ids: torch.Tensor = NO_EOS,
    output_mask: torch.Tensor | None = None,
) -> list[int]:
    """The tokens, which a captured program would choose too."""
    values = torch.from_numpy(sampling_values(params, positions))
    static = sample_static(logits.clone(), values, eos_ids, output_mask, draws=True, nucleus=True)
    assert torch.equal(sample(logits, params, values, eos_ids, output_mask), static)
    return static.tolist()


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities])


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 4000) -> list[float]:
    counts = torch.zeros(logits.shape[0])
    rows = logits.repeat(draws, 1)
    for token in chosen(rows, [params] * draws, range(draws)):
        counts[token] += 1
    return (counts / draws).tolist()


def test_temperature_zero_takes_the_largest_logit() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [9.0, 3.0, 1.0]])
    assert chosen(rows, [SamplingParams()] * 2, [0, 0]) == [1, 0]


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
    tokens = chosen(torch.zeros(300, vocab), [SamplingParams(temperature=1.0, top_p=0.9, seed=1)] * 300, range(300))
    assert len(set(tokens)) > 255  # 300 draws of 1843 hit about 277 different ones, of the first 512 about 227


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    rows = torch.tensor([[100.0, 50.0, float("-inf")]])
    assert chosen(rows, [SamplingParams(temperature=1e-30)], [0]) == [0]


@pytest.mark.parametrize("tiny", [{"temperature": 1e-50}, {"temperature": 5e-324}, {"top_p": 1e-50}])
def test_what_is_zero_in_single_precision_still_takes_the_likeliest(tiny: dict[str, float]) -> None:
    params = [SamplingParams(**{"temperature": 1.0, "seed": seed} | tiny) for seed in range(100)]
    assert set(chosen(logits_of(0.3, 0.6, 0.1).repeat(100, 1), params, [0] * 100)) == {1}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 2048, generator=generator)
    logits[3] = logits[6] = 0.0  # flat: the first look of top-p is not enough, for these rows only
    logits[4:6] = logits[4:6].round()  # many tokens are equally likely
    kinds = [1.0, 0.9, 1.0, 0.5, 0.9, 0.99, 0.999, 1.0]
    params = [SamplingParams(1.0, top_p, seed) for seed, top_p in enumerate(kinds)] + [SamplingParams()]
    logits = torch.cat([logits, logits[:1]])
    positions = [10, 20, 30, 40, 50, 60, 70, 80, 90]
    together = chosen(logits.clone(), params, positions)
    alone = [chosen(logits[i : i + 1].clone(), [params[i]], [positions[i]])[0] for i in range(9)]
    assert together == alone


def test_draws_are_those_of_philox_and_all_differ() -> None:
    # The known answer of Random123 for philox4x32-10 with counter and key zero: 6627e8d5 e169c58d …
    assert uniform_draws([0], [0]).tolist() == [(0x6627E8D5E169C58D >> 11) / 2**53]
    seeds, positions = zip(
        *[(seed, position) for seed in (0, 1, 2**32, 2**63, -1) for position in range(80)], strict=True
    )
    draws = uniform_draws(seeds, positions)
    assert len(set(draws.tolist())) == 400
    assert draws.min() >= 0 and draws.max() < 1
    assert draws.tolist() == [float(uniform_draws([s], [p])[0]) for s, p in zip(seeds, positions, strict=True)]
    # The mean of 400 uniform numbers: 0.5 within four standard deviations of 1 / sqrt(12 * 400) = 0.0144.
    assert draws.mean() == pytest.approx(0.5, abs=0.058)


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
        greedy, greedy_with_eos, drawn, drawn_by_top_p = chosen(rows.clone(), params, [position] * 4, eos, output_mask)
        assert (greedy, greedy_with_eos) == (2, 3)
        assert {drawn, drawn_by_top_p} <= {0, 2}
