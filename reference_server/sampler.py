"""Choosing the next token, all rows at once: argmax, or one draw by temperature and top-p."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_server.step_types import SamplingParams

# Top-p keeps few tokens in practice. On a CPU, looking at this many first saves sorting the whole vocabulary; elsewhere
# the look would wait for the device.
TOP_P_FIRST_LOOK = 512

TEMPERATURE, TOP_P, DRAW, MASK_EOS = range(4)
_LEAST = np.finfo(np.float32).tiny


def uniform_draws(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), each a function of its seed and position: Philox 4x32-10 (Salmon et al., 2011).

    The key is the seed modulo 2**64, the counter the position; 53 of the first 64 bits count.
    """
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    k0, k1 = key & low, key >> word
    c0, c1, c2, c3 = counter & low, counter >> word, np.zeros_like(counter), np.zeros_like(counter)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> word) ^ c1 ^ k0, p1 & low, (p0 >> word) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return ((c0 << word | c1) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_values(params: Sequence[SamplingParams], positions: Sequence[int]) -> NDArray[np.float64]:
    """[rows, 4]: temperature, top_p, draw, mask_eos. `positions` are those that the chosen tokens will take."""
    values = np.array([(p.temperature, p.top_p, 0.0, p.mask_eos) for p in params], dtype=np.float64).reshape(-1, 4)
    # The logits are float32, and there a positive number must not turn into 0, which means something else.
    values[:, : TOP_P + 1] = np.where(values[:, : TOP_P + 1] > 0, np.maximum(values[:, : TOP_P + 1], _LEAST), 0.0)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        values[drawn, DRAW] = uniform_draws([params[i].seed for i in drawn], [positions[i] for i in drawn])
    return values


def mask_logits(logits: Tensor, values: Tensor, eos_ids: Tensor, output_mask: Tensor | None) -> None:
    """`output_mask` [vocab] is added to the logits: 0 for a token that may be chosen, else -inf."""
    if output_mask is not None:
        logits += output_mask
    ends = logits.index_select(1, eos_ids)
    logits.index_copy_(1, eos_ids, ends.masked_fill_(values[:, MASK_EOS, None] > 0, float("-inf")))


def draw(logits: Tensor, values: Tensor) -> Tensor:
    """By temperature, from the whole vocabulary. -> [rows]"""
    return _invert(_probabilities(logits, values), values[:, DRAW, None])


def draw_nucleus(logits: Tensor, values: Tensor) -> Tensor:
    """By temperature, from the smallest set of most likely tokens that holds at least top_p. -> [rows]"""
    probabilities = _probabilities(logits, values)
    top_p = values[:, TOP_P, None].float()
    if logits.device.type != "cpu" or logits.shape[1] <= TOP_P_FIRST_LOOK:
        return _invert_nucleus(*probabilities.sort(dim=-1, descending=True, stable=True), values, top_p)
    ordered, token_ids = probabilities.topk(TOP_P_FIRST_LOOK, dim=-1)
    picks = _invert_nucleus(ordered, token_ids, values, top_p)
    # Row by row: which order equally likely tokens stand in must not depend on who else is in the batch.
    flat = (ordered.sum(dim=-1, keepdim=True) < top_p).squeeze(1).nonzero().squeeze(1)
    if len(flat):
        whole = probabilities[flat].sort(dim=-1, descending=True, stable=True)
        picks[flat] = _invert_nucleus(*whole, values[flat], top_p[flat])
    return picks


def sample(
    logits: Tensor,  # [rows, vocab] float32; changed in place
    params: Sequence[SamplingParams],
    values: Tensor,  # of `sampling_values`, on the device of the logits
    eos_ids: Tensor,
    output_mask: Tensor | None = None,
) -> Tensor:
    """The chosen token of each row, on the device of the logits. Only rows that draw pay for drawing."""
    mask_logits(logits, values, eos_ids, output_mask)
    chosen = logits.argmax(dim=-1)
    for nucleus, pick in ((False, draw), (True, draw_nucleus)):
        rows = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_p < 1) == nucleus]
        if len(rows) == len(params):
            return pick(logits, values)
        if rows:
            at = torch.tensor(rows, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
            chosen.index_copy_(0, at, pick(logits.index_select(0, at), values.index_select(0, at)))
    return chosen


def sample_static(
    logits: Tensor, values: Tensor, eos_ids: Tensor, output_mask: Tensor | None, draws: bool, nucleus: bool
) -> Tensor:
    """The same with the same operations whatever the values are, for a captured graph.

    `draws`: some row may have a temperature; `nucleus`: and some a top_p below 1.
    """
    mask_logits(logits, values, eos_ids, output_mask)
    chosen = logits.argmax(dim=-1)
    if draws:
        picks = draw(logits, values)
        if nucleus:
            picks = torch.where(values[:, TOP_P] < 1, draw_nucleus(logits, values), picks)
        chosen = torch.where(values[:, TEMPERATURE] > 0, picks, chosen)
    return chosen


def _probabilities(logits: Tensor, values: Tensor) -> Tensor:
    temperature = values[:, TEMPERATURE, None].float()
    temperature = torch.where(temperature > 0, temperature, 1.0)  # a greedy row: anything finite
    # Shifted to a largest logit of 0 before the division: a tiny temperature must not overflow.
    return torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def _invert(probabilities: Tensor, draws: Tensor) -> Tensor:
    """The token at which the running sum passes the draw. [rows, n], [rows, 1] -> [rows]"""
    running = probabilities.double().cumsum(dim=-1)
    picks = torch.searchsorted(running, draws * running[:, -1:], right=True).squeeze(1)
    # A draw next to 1 may round up to the whole sum; the last token with any probability is meant then.
    last_possible = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(picks, last_possible)


def _invert_nucleus(ordered: Tensor, token_ids: Tensor, values: Tensor, top_p: Tensor) -> Tensor:
    before = ordered.cumsum(dim=-1) - ordered
    picks = _invert(ordered.masked_fill(before >= top_p, 0.0), values[:, DRAW, None])
    return token_ids.gather(1, picks.unsqueeze(1)).squeeze(1)
