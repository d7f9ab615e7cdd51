"""Choosing the next token: argmax, or one draw by temperature and top-p."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_server.step_types import SamplingParams

# Top-p keeps few tokens in practice. Looking at this many first saves sorting the whole vocabulary.
TOP_P_FIRST_LOOK = 512


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (counter-based generator Philox 4x64)."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def sample(
    logits: Tensor,  # [rows, vocab] float32; changed in place
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    eos_ids: Tensor,
    output_mask: Tensor | None = None,
) -> list[int]:
    """The chosen token of each row. `positions` are those that the chosen tokens will take.

    `output_mask` [vocab] is added to the logits: 0 for a token that may be chosen, else -inf.
    """
    if output_mask is not None:
        logits += output_mask
    without_eos = [row for row, p in enumerate(params) if p.mask_eos]
    if without_eos:
        logits[torch.tensor(without_eos, device=logits.device).unsqueeze(1), eos_ids] = float("-inf")
    chosen = logits.argmax(dim=-1).tolist()
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    for whole in (True, False):
        rows = [row for row in drawn if (params[row].top_p == 1) == whole]
        if not rows:
            continue
        temperature = torch.tensor([params[row].temperature for row in rows], device=logits.device)
        # Shifted to a largest logit of 0 before the division: a tiny temperature must not overflow.
        shifted = logits[rows] - logits[rows].amax(dim=-1, keepdim=True)
        probabilities = torch.softmax(shifted / temperature.unsqueeze(1), dim=-1)
        draws = torch.tensor(
            [uniform_draw(params[row].seed, positions[row]) for row in rows],
            dtype=torch.float64,
            device=logits.device,
        ).unsqueeze(1)
        if whole:
            picks = _invert(probabilities, draws)
        else:
            top_p = torch.tensor([params[row].top_p for row in rows], device=logits.device).unsqueeze(1)
            picks = _invert_nucleus(probabilities, draws, top_p)
        for row, pick in zip(rows, picks.tolist(), strict=True):
            chosen[row] = pick
    return chosen


def _invert(probabilities: Tensor, draws: Tensor) -> Tensor:
    """The token at which the running sum passes the draw. [rows, n], [rows, 1] -> [rows]"""
    running = probabilities.double().cumsum(dim=-1)
    picks = torch.searchsorted(running, draws * running[:, -1:], right=True).squeeze(1)
    # A draw next to 1 may round up to the whole sum; the last token with any probability is meant then.
    last_possible = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(picks, last_possible)


def _invert_nucleus(probabilities: Tensor, draws: Tensor, top_p: Tensor) -> Tensor:
    """The same within the smallest set of most likely tokens that holds at least top_p."""
    vocab = probabilities.shape[-1]
    ordered, token_ids = probabilities.topk(min(vocab, TOP_P_FIRST_LOOK), dim=-1)
    if ordered.shape[-1] < vocab and bool((ordered.sum(dim=-1, keepdim=True) < top_p).any()):
        ordered, token_ids = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    picks = _invert(ordered.masked_fill(before >= top_p, 0.0), draws)
    return token_ids.gather(1, picks.unsqueeze(1)).squeeze(1)
