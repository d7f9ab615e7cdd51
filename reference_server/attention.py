"""KV in paged tensors, and attention over them.

A step's tokens come flat: first the decode tokens, then each prefill in one piece.

    row        0 1 2 | 3 4 5 6 7 | 8 9
    sequence   a b c | d d d d d | e e
               decode  prefill     prefill
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_config import ModelConfig


class Span(NamedTuple):
    """New tokens of one sequence at positions position0 … position0 + tokens - 1."""

    blocks: Sequence[int]
    position0: int
    tokens: int

    @property
    def end(self) -> int:
        return self.position0 + self.tokens


@dataclass(slots=True)
class Group:
    """Sequences that attend together, padded to the longest: queries on the right, keys on the right."""

    rows: Tensor  # [n, queries], rows of the step; padding repeats row 0 of the sequence
    tables: Tensor  # [n, blocks], block ids; padding names block 0
    mask: Tensor  # [n, 1, queries, positions], True where a key is seen
    kept: Tensor  # [tokens of the group], places in the flattened [n * queries]
    kept_rows: Tensor  # [tokens of the group], their rows of the step


@dataclass(slots=True)
class AttentionPlan:
    """Index tensors of one step, made once and used by every layer."""

    positions: Tensor  # [tokens]
    blocks: Tensor  # [tokens], the block that a token's KV is written to
    offsets: Tensor  # [tokens], the place in it
    groups: list[Group]


class PagedKV:
    """Keys and values, per layer [kv_blocks, kv_heads, block_tokens, head_dim] each.

    The tensors are zero pages until written, so an unused block costs no memory on a CPU. Stale values of a block
    that changed hands stay where they are: they are finite, and the mask gives them weight 0.
    """

    def __init__(
        self, config: ModelConfig, kv_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert kv_blocks >= 1 and block_tokens >= 1
        self.config = config
        self.kv_blocks = kv_blocks
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.device = device
        shape = (config.layers, kv_blocks, config.kv_heads, block_tokens, config.head_dim)
        self._keys = _zero_pages(shape, dtype, device).unbind(0)
        self._values = _zero_pages(shape, dtype, device).unbind(0)

    def check(self, spans: Sequence[Span], max_context: int) -> None:
        """A step that does not fit the KV is our bug."""
        written: set[int] = set()
        for number, (blocks, position0, tokens) in enumerate(spans):
            end = position0 + tokens
            assert tokens >= 1, f"item {number}: a step without tokens"
            assert position0 >= 0 and end <= max_context, f"item {number}: {end} tokens > {max_context}"
            need = -(-end // self.block_tokens)
            assert need <= len(blocks), f"item {number}: {end} tokens in {len(blocks)} blocks of {self.block_tokens}"
            used = blocks[:need]
            assert min(used) >= 0 and max(used) < self.kv_blocks, f"item {number}: a block beyond {self.kv_blocks}"
            mine = set(used[position0 // self.block_tokens :])
            assert not mine & written, f"item {number}: writes a block that another item writes"
            written |= mine

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        positions = [p for span in spans for p in range(span.position0, span.end)]
        blocks = [span.blocks[p // self.block_tokens] for span in spans for p in range(span.position0, span.end)]
        position = torch.tensor(positions, dtype=torch.long)
        return AttentionPlan(
            positions=position.to(self.device),
            blocks=torch.tensor(blocks, dtype=torch.long, device=self.device),
            offsets=(position % self.block_tokens).to(self.device),
            groups=self._groups(spans),
        )

    def _groups(self, spans: Sequence[Span]) -> list[Group]:
        groups = []
        row0 = 0
        decodes = next((i for i, span in enumerate(spans) if span.tokens > 1), len(spans))
        for members in ([spans[:decodes]] if decodes else []) + [[span] for span in spans[decodes:]]:
            queries = max(span.tokens for span in members)
            width = max(-(-span.end // self.block_tokens) for span in members)
            rows, kept, kept_rows, tables, seen = [], [], [], [], []
            for i, span in enumerate(members):
                rows.append([row0 + min(j, span.tokens - 1) for j in range(queries)])
                kept += range(i * queries, i * queries + span.tokens)
                kept_rows += range(row0, row0 + span.tokens)
                used = list(span.blocks[: -(-span.end // self.block_tokens)])
                tables.append(used + [used[0]] * (width - len(used)))
                seen.append([span.position0 + min(j, span.tokens - 1) for j in range(queries)])
                row0 += span.tokens
            mask = torch.arange(width * self.block_tokens) <= torch.tensor(seen).unsqueeze(-1)
            at = {"dtype": torch.long, "device": self.device}
            groups.append(
                Group(
                    torch.tensor(rows, **at),
                    torch.tensor(tables, **at),
                    mask.unsqueeze(1).to(self.device),
                    torch.tensor(kept, **at),
                    torch.tensor(kept_rows, **at),
                )
            )
        return groups

    def attend(self, plan: AttentionPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [tokens, kv_heads, head_dim], then attend with q [tokens, heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[plan.blocks, :, plan.offsets] = k
        values[plan.blocks, :, plan.offsets] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in plan.groups:
            attended = F.scaled_dot_product_attention(
                q[group.rows].transpose(1, 2),  # [n, heads, queries, head_dim]
                self._gather(keys, group.tables),
                self._gather(values, group.tables),
                attn_mask=group.mask,
                enable_gqa=True,
            )
            out[group.kept_rows] = attended.transpose(1, 2).flatten(0, 1)[group.kept]
        return out.view(out.shape[0], -1)

    def _gather(self, pool: Tensor, tables: Tensor) -> Tensor:  # -> [n, kv_heads, positions, head_dim]
        return pool[tables].transpose(1, 2).flatten(2, 3)


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU mapped and not touched: writing every page would take seconds and all the memory.

    In small pages, which numpy's zeros are not: a sequence touches a little in every layer, and with pages of 2 MiB the
    first token of a block waited most of a second for the kernel to clear them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
