"""KV in one preallocated row per slot, and attention over it.

A step's tokens come flat: first the decode tokens, in order of their slots, then each prefill in one piece.

    row        0 1 2 | 3 4 5 6 7 | 8 9
    slot       0 1 4 | 2 2 2 2 2 | 3 3
               decode  prefill     prefill

Decodes of neighbouring slots are one attention call over a view of the cache (no copy); each prefill is a
call of its own.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_config import ModelConfig


class Span(NamedTuple):
    """New tokens of one slot at positions position0 … position0 + tokens - 1."""

    slot: int
    position0: int
    tokens: int

    @property
    def end(self) -> int:
        return self.position0 + self.tokens


@dataclass(slots=True)
class DecodeRun:
    """One query token for each of the slots slot0, slot0 + 1, …"""

    row0: int
    slot0: int
    count: int
    length: int  # positions attended, the longest of the run
    mask: Tensor | None  # [count, 1, 1, length], 0 or -inf; None where all have the same length


@dataclass(slots=True)
class PrefillRun:
    row0: int
    span: Span
    mask: Tensor | None  # [tokens, end] bool; None from position 0, where plain causal masking is meant


@dataclass(slots=True)
class AttentionPlan:
    """Index tensors of one step, made once and used by every layer."""

    slots: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    decodes: list[DecodeRun]
    prefills: list[PrefillRun]


# A run is split where padding a neighbour to the longest would read more positions than a second call costs
# (a call is about 15 µs, which is some 100 to 300 positions of a small model).
PADDING_LIMIT = 256


class SlotKV:
    """Keys and values, [layers, slots, kv_heads, max_context, head_dim] each.

    The tensors are zero pages until written, so an unused slot costs no memory on a CPU. Stale values of a
    freed slot stay where they are: they are finite, and the mask gives them weight 0.
    """

    def __init__(
        self, config: ModelConfig, slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert slots >= 1 and max_context >= 1
        self.config = config
        self.slots = slots
        self.max_context = max_context
        self.dtype = dtype
        self.device = device
        shape = (config.layers, slots, config.kv_heads, max_context, config.head_dim)
        self._keys = _zero_pages(shape, dtype, device).unbind(0)
        self._values = _zero_pages(shape, dtype, device).unbind(0)
        self._lengths = [0] * slots

    def length(self, slot: int) -> int:
        """Tokens whose keys and values the slot holds."""
        return self._lengths[slot]

    def free(self, slot: int) -> None:
        self._lengths[slot] = 0

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """Check the step, make its index tensors, and count the new tokens as held."""
        for span in spans:
            assert 0 <= span.slot < self.slots, f"slot {span.slot} of {self.slots}"
            assert span.tokens >= 1, f"slot {span.slot}: a step without tokens"
            held = self._lengths[span.slot]
            assert span.position0 == held, f"slot {span.slot} holds {held} tokens, not {span.position0}"
            assert span.end <= self.max_context, f"slot {span.slot}: {span.end} tokens > {self.max_context}"
            self._lengths[span.slot] = span.end  # a slot named twice fails the check above
        slots = [span.slot for span in spans for _ in range(span.tokens)]
        positions = [p for span in spans for p in range(span.position0, span.end)]
        decode_count = next((i for i, span in enumerate(spans) if span.tokens > 1), len(spans))
        ordered = all(a.slot < b.slot for a, b in pairwise(spans[:decode_count]))
        assert ordered, "decodes out of order would lose their neighbours"
        return AttentionPlan(
            slots=torch.tensor(slots, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            decodes=self._decode_runs(spans[:decode_count]),
            prefills=self._prefill_runs(spans[decode_count:], decode_count),
        )

    def _decode_runs(self, spans: Sequence[Span]) -> list[DecodeRun]:
        runs: list[DecodeRun] = []
        start = 0
        for i in range(1, len(spans) + 1):
            if i < len(spans) and spans[i].slot == spans[i - 1].slot + 1:
                lengths = [span.end for span in spans[start : i + 1]]
                if max(lengths) * len(lengths) - sum(lengths) <= PADDING_LIMIT * len(lengths):
                    continue
            lengths = [span.end for span in spans[start:i]]
            longest = max(lengths)
            runs.append(DecodeRun(start, spans[start].slot, i - start, longest, self._padding_mask(lengths, longest)))
            start = i
        return runs

    def _padding_mask(self, lengths: list[int], longest: int) -> Tensor | None:
        if min(lengths) == longest:
            return None
        beyond = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)  # [count, longest]
        mask = torch.zeros(beyond.shape, dtype=self.dtype).masked_fill_(beyond, float("-inf"))
        return mask[:, None, None, :].to(self.device)

    def _prefill_runs(self, spans: Sequence[Span], row0: int) -> list[PrefillRun]:
        runs = []
        for span in spans:
            mask = None
            if span.position0 > 0:
                seen_until = torch.arange(span.position0, span.end, device=self.device).unsqueeze(1)
                mask = torch.arange(span.end, device=self.device) <= seen_until
            runs.append(PrefillRun(row0, span, mask))
            row0 += span.tokens
        return runs

    def attend(self, plan: AttentionPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [tokens, kv_heads, head_dim], then attend with q [tokens, heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[plan.slots, :, plan.positions] = k
        values[plan.slots, :, plan.positions] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for run in plan.decodes:
            rows, slots = slice(run.row0, run.row0 + run.count), slice(run.slot0, run.slot0 + run.count)
            # Query heads that share a KV head stand where query positions usually do: KV is read once for all.
            grouped = q[rows].view(run.count, self.config.kv_heads, -1, self.config.head_dim)
            attended = F.scaled_dot_product_attention(
                grouped, keys[slots, :, : run.length], values[slots, :, : run.length], attn_mask=run.mask
            )
            out[rows] = attended.reshape(run.count, self.config.heads, self.config.head_dim)
        for prefill in plan.prefills:
            slot, end = prefill.span.slot, prefill.span.end
            rows = slice(prefill.row0, prefill.row0 + prefill.span.tokens)
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1).unsqueeze(0),  # [1, heads, tokens, head_dim]
                keys[slot, :, :end].unsqueeze(0),
                values[slot, :, :end].unsqueeze(0),
                attn_mask=prefill.mask,
                is_causal=prefill.mask is None,
                enable_gqa=True,
            )
            out[rows] = attended.squeeze(0).transpose(0, 1)
        return out.view(out.shape[0], -1)


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU mapped and not touched: writing every page would take seconds and all the memory.

    In small pages, which numpy's zeros are not: a sequence touches a little in every layer, and with pages of 2 MiB the
    first token of a slot waited most of a second for the kernel to clear them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
