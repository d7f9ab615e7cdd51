"""KV in paged tensors, and attention over them.

A step's tokens come flat: first the decode tokens, then each prefill in one piece.

    row        0 1 2 | 3 4 5 6 7 | 8 9
    sequence   a b c | d d d d d | e e
               decode  prefill     prefill

Two ways to attend, neither with a loop over sequences:
- Blockwise, for decodes with much KV on a CPU: each block meets the query of its owner where it lies in the pool, and
  the parts of a sequence are put together afterwards. The KV is read once and not copied; a copy costs about as much as
  the attention.
- Padded, for prefills, for decodes with little KV and for those on an accelerator: sequences of like lengths, their KV
  gathered side by side, in one call of the fused kernel. Prompts that begin need no gathering and no mask: they are
  padded on the right, where plain causal masking hides the padding.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reference_server.model_config import ModelConfig
from sloscope.errors import ConfigError

Ints = NDArray[np.int64]

# A stretch of the pool is attended where it lies if at least this share of its blocks belongs to the step: reading a
# strange block costs as much as one of ours, and gathering a block costs another two passes.
DENSE_SHARE = 0.5
# Decodes on a CPU whose keys and values in one layer are no more than this are gathered: the copy stays in the cache,
# and the fused kernel saves a dozen small operations.
GATHER_BYTES = 1 << 20
# Sequences are padded to one length as long as the (query, key) pairs for nothing stay below this share of the real
# ones plus what a call of its own would cost, in pairs.
PADDING_SHARE = 0.25
CALL_PAIRS = 1024


class Span(NamedTuple):
    """New tokens of one sequence at positions position0 … position0 + tokens - 1."""

    blocks: Sequence[int]
    position0: int
    tokens: int

    @property
    def end(self) -> int:
        return self.position0 + self.tokens


@dataclass(slots=True)
class Blockwise:
    """The decodes of a step as pairs of a block and the sequence that attends to it.

    First come the blocks low … high - 1 of the pool, one pair each; one that belongs to nobody is masked out. Then the
    pairs whose block is shared or lies elsewhere, which are gathered.
    """

    decodes: int
    low: int
    high: int
    gathered: Tensor | None  # block ids
    owner: Tensor  # [pairs] row of the decode
    mask: Tensor  # [pairs * kv_heads, 1, block_tokens], 0 or -inf
    pairs_of: Tensor  # [decodes * width]; padded with the first pair of the same decode


@dataclass(slots=True)
class Padded:
    """Sequences side by side. Queries and keys stand at the left, padding at the right."""

    sequences: int
    rows: Tensor  # [sequences * queries] of the step; padding repeats a row
    blocks: (
        Tensor | None
    )  # [sequences * kv_heads * width] (block, head) pairs of the pool; None: prompts from position 0
    mask: Tensor | None  # [sequences, 1, 1 or group * queries, positions], 0 or -inf; None: causal
    kept: Tensor  # which of [sequences * queries] are real
    kept_rows: Tensor  # and their rows of the step


@dataclass(slots=True)
class AttentionPlan:
    """Index tensors of one step, made once and used by every layer."""

    positions: Tensor  # [tokens]
    written: Tensor  # [tokens, 2 * kv_heads], where the keys and then the values go, in the pool as rows of head_dim
    blockwise: Blockwise | None
    padded: list[Padded]


class PagedKV:
    """Keys and values, per layer [2, kv_blocks + 1, kv_heads, block_tokens, head_dim].

    The tensors are zero pages until written, so an unused block costs no memory on a CPU. Stale values of a block
    that changed hands stay where they are: they are finite, and the mask gives them weight 0. The block behind the last
    is nobody's: padding of a fixed-size step writes there.
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
        shape = (config.layers, 2, kv_blocks + 1, config.kv_heads, block_tokens, config.head_dim)
        try:
            self._pools = _zero_pages(shape, dtype, device).unbind(0)
        except (OSError, OverflowError, torch.OutOfMemoryError):
            size = math.prod(shape) * dtype.itemsize
            raise ConfigError(
                f"kv_blocks: {kv_blocks} of {block_tokens} tokens take {size / 2**30:.3g} GiB; "
                "accepted: what the device has room for"
            ) from None
        block = config.kv_heads * block_tokens
        self._block_bytes = 2 * block * config.head_dim * dtype.itemsize  # in one layer
        heads = torch.arange(config.kv_heads, device=device)
        # Added to block * kv_heads * block_tokens + offset: the row of each key head, then of each value head.
        self._head_rows = torch.cat([heads * block_tokens, heads * block_tokens + (kv_blocks + 1) * block])
        self._heads = heads
        self._positions = torch.arange(config.max_context + block_tokens, device=device)

    def check(self, spans: Sequence[Span], max_context: int) -> None:
        _Layout(spans, self.kv_blocks, self.block_tokens, max_context)

    def plan(self, spans: Sequence[Span], max_context: int, blockwise: bool | None = None) -> AttentionPlan:
        """Decodes (one new token) first. `blockwise` None: what suits the device."""
        layout = _Layout(spans, self.kv_blocks, self.block_tokens, max_context)
        decodes = next((i for i, span in enumerate(spans) if span.tokens > 1), len(spans))
        if blockwise is None:
            read = layout.needs[:decodes].sum() * self._block_bytes
            blockwise = self.device.type == "cpu" and read > GATHER_BYTES
        if not blockwise:
            decodes = 0
        return AttentionPlan(
            positions=self._to_device(layout.positions),
            written=self.rows_of(self._to_device(layout.written_blocks), self._to_device(layout.written_offsets)),
            blockwise=self._blockwise(layout, decodes) if decodes else None,
            padded=[self._padded(layout, members) for members in _like_lengths(spans, decodes)],
        )

    def plan_decodes(self, tables: Tensor, positions: Tensor) -> AttentionPlan:
        """One decode for each row of `tables` [n, width], all on the device and of fixed shapes."""
        n, width = tables.shape
        block = tables.gather(1, (positions // self.block_tokens).unsqueeze(1)).squeeze(1)
        seen = self._positions[: width * self.block_tokens] <= positions.unsqueeze(1)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        rows = self._positions[:n]
        padded = Padded(n, rows, self._head_blocks(tables), mask[:, None, None, :], rows, rows)
        return AttentionPlan(positions, self.rows_of(block, positions % self.block_tokens), None, [padded])

    def rows_of(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        rows = blocks * (self.config.kv_heads * self.block_tokens) + offsets
        return rows.unsqueeze(1) + self._head_rows

    def _head_blocks(self, tables: Tensor) -> Tensor:
        return (tables.unsqueeze(1) * self.config.kv_heads + self._heads.view(1, -1, 1)).flatten()

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return to_device(values, self.device)

    def _blockwise(self, layout: "_Layout", decodes: int) -> Blockwise:
        needs = layout.needs[:decodes]
        blocks = layout.blocks[: needs.sum()]
        owners = np.repeat(np.arange(decodes), needs)
        places = np.arange(len(blocks)) - layout.starts[owners]
        lengths = np.minimum(self.block_tokens, layout.ends[owners] - places * self.block_tokens)
        used, first_use = np.unique(blocks, return_index=True)
        low = used[0]
        dense = np.flatnonzero((used - low + 1) * DENSE_SHARE <= np.arange(1, len(used) + 1))[-1]
        high = used[dense] + 1
        in_place = np.zeros(len(blocks), dtype=bool)
        in_place[first_use[: dense + 1]] = True
        elsewhere = np.flatnonzero(~in_place)
        pairs = blocks - low
        pairs[elsewhere] = high - low + np.arange(len(elsewhere))
        owner = np.zeros(high - low + len(elsewhere), dtype=np.int64)
        owner[pairs] = owners
        length = np.zeros(len(owner), dtype=np.int64)
        length[pairs] = lengths
        mask = np.where(np.arange(self.block_tokens) < length[:, None], np.float32(0), np.float32("-inf"))
        heads = self.config.kv_heads
        return Blockwise(
            decodes,
            int(low),
            int(high),
            self._to_device(blocks[elsewhere]) if len(elsewhere) else None,
            self._to_device(owner),
            self._to_device(np.repeat(mask, heads, axis=0)).to(self.dtype).unsqueeze(1),
            self._to_device(_side_by_side(pairs, needs).ravel()),
        )

    def _padded(self, layout: "_Layout", members: Ints) -> Padded:
        tokens, ends, needs = layout.tokens[members], layout.ends[members], layout.needs[members]
        queries = np.arange(tokens.max())
        query = np.minimum(queries, tokens[:, None] - 1)  # padding repeats the last one
        rows = layout.first_rows[members, None] + query
        real = queries < tokens[:, None]
        kept = np.flatnonzero(real)
        blocks = mask = None
        if (tokens < ends).any():
            table = _side_by_side(np.concatenate([layout.table(i) for i in members]), needs)
            blocks = self._head_blocks(self._to_device(table))
            seen = np.arange(table.shape[1] * self.block_tokens) <= (ends - tokens)[:, None, None] + query[:, :, None]
            group = self.config.heads // self.config.kv_heads
            masked = self._to_device(np.where(seen, np.float32(0), np.float32("-inf"))).to(self.dtype)
            mask = masked.repeat(1, group, 1).unsqueeze(1)
        return Padded(
            len(members),
            self._to_device(rows.ravel()),
            blocks,
            mask,
            self._to_device(kept),
            self._to_device(rows.ravel()[kept]),
        )

    def attend(self, plan: AttentionPlan, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store kv [tokens, 2 * kv_heads, head_dim], keys then values; attend with q [tokens, heads, head_dim].

        Returns [tokens, heads * head_dim].
        """
        pool = self._pools[layer]
        pool.view(-1, self.config.head_dim)[plan.written] = kv
        if plan.blockwise is not None and not plan.padded:
            return self._attend_blockwise(plan.blockwise, pool, q)
        out = torch.empty(q.shape[0], self.config.heads * self.config.head_dim, dtype=q.dtype, device=q.device)
        if plan.blockwise is not None:
            decodes = plan.blockwise.decodes
            out[:decodes] = self._attend_blockwise(plan.blockwise, pool, q[:decodes])
        for padded in plan.padded:
            attended = self._attend_begun if padded.blocks is not None else self._attend_new
            out.index_copy_(0, padded.kept_rows, attended(padded, pool, q, kv).index_select(0, padded.kept))
        return out

    def _attend_blockwise(self, plan: Blockwise, pool: Tensor, q: Tensor) -> Tensor:
        c, decodes = self.config, plan.decodes
        owner, pairs = plan.owner, plan.owner.shape[0]
        queries = q.reshape(decodes, -1).index_select(0, owner).view(pairs * c.kv_heads, -1, c.head_dim)
        scores = torch.empty(*queries.shape[:2], self.block_tokens, dtype=q.dtype, device=q.device)
        parts = torch.empty_like(queries)
        stretch = plan.high - plan.low
        pieces = [(slice(0, stretch * c.kv_heads), pool[:, plan.low : plan.high])]
        if plan.gathered is not None:
            pieces.append((slice(stretch * c.kv_heads, None), pool.index_select(1, plan.gathered)))
        for rows, (keys, _) in pieces:
            keys = keys.view(-1, self.block_tokens, c.head_dim).transpose(1, 2)
            torch.baddbmm(plan.mask[rows], queries[rows], keys, alpha=c.head_dim**-0.5, out=scores[rows])
        weights = scores.view(pairs, c.heads, -1).float()
        # The largest score of a sequence, over its blocks; a masked pair has -inf and comes to weight 0.
        largest = weights.amax(-1).index_select(0, plan.pairs_of).view(decodes, -1, c.heads).amax(1)
        weights.sub_(largest.index_select(0, owner).unsqueeze(-1)).exp_()
        whole = torch.zeros_like(largest).index_add_(0, owner, weights.sum(-1))
        weights = weights.to(q.dtype).view(scores.shape)
        for rows, (_, values) in pieces:
            torch.bmm(weights[rows], values.view(-1, self.block_tokens, c.head_dim), out=parts[rows])
        out = torch.zeros(decodes, c.heads * c.head_dim, dtype=torch.float32, device=q.device)
        out.index_add_(0, owner, parts.view(pairs, -1).float())
        return out.view(decodes, c.heads, -1).div_(whole.unsqueeze(-1)).view(decodes, -1).to(q.dtype)

    def _attend_begun(self, plan: Padded, pool: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Queries that see tokens of earlier steps: keys and values come from the pool."""
        c, n = self.config, plan.sequences
        assert plan.blocks is not None
        flat = pool.view(2, -1, self.block_tokens * c.head_dim)
        keys, values = (side.index_select(0, plan.blocks).view(n, c.kv_heads, -1, c.head_dim) for side in flat)
        # Query heads that share a KV head stand where query positions usually do: KV is read once for all.
        split = q.index_select(0, plan.rows).view(n, -1, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        queries = split.permute(0, 2, 3, 1, 4).reshape(n, c.kv_heads, -1, c.head_dim)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=plan.mask)
        split = attended.view(n, c.kv_heads, c.heads // c.kv_heads, -1, c.head_dim)
        return split.permute(0, 3, 1, 2, 4).reshape(plan.rows.shape[0], -1)

    def _attend_new(self, plan: Padded, pool: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Prompts from position 0: everything that is seen is in this step."""
        c, n = self.config, plan.sequences
        queries = q.index_select(0, plan.rows).view(n, -1, c.heads, c.head_dim).transpose(1, 2)
        both = kv.index_select(0, plan.rows).view(n, -1, 2 * c.kv_heads, c.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            queries, both[:, : c.kv_heads], both[:, c.kv_heads :], is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(plan.rows.shape[0], -1)


class _Layout:
    """The block tables of a step as flat arrays, checked: a step that does not fit the KV is our bug."""

    def __init__(self, spans: Sequence[Span], kv_blocks: int, block_tokens: int, max_context: int) -> None:
        for i, (blocks, position0, tokens) in enumerate(spans):
            end = position0 + tokens
            assert tokens >= 1, f"item {i}: a step without tokens"
            assert position0 >= 0 and end <= max_context, f"item {i}: {end} tokens > {max_context}"
            assert end <= len(blocks) * block_tokens, f"item {i}: {end} tokens in {len(blocks)} blocks"
        self.tokens = np.array([span.tokens for span in spans])
        self.ends = np.array([span.end for span in spans])
        self.needs = -(-self.ends // block_tokens)  # blocks of each sequence
        self.starts = np.cumsum(self.needs) - self.needs  # its first one in `blocks`
        used = (span.blocks[:need] for span, need in zip(spans, self.needs, strict=True))
        self.blocks: Ints = np.fromiter(chain.from_iterable(used), dtype=np.int64, count=self.needs.sum())
        assert self.blocks.min() >= 0 and self.blocks.max() < kv_blocks, f"a block beyond {kv_blocks}"
        self.first_rows = np.cumsum(self.tokens) - self.tokens
        items = np.repeat(np.arange(len(spans)), self.tokens)
        rows = np.arange(len(items))
        self.positions = rows - self.first_rows[items] + (self.ends - self.tokens)[items]
        self.written_blocks = self.blocks[self.starts[items] + self.positions // block_tokens]
        self.written_offsets = self.positions % block_tokens
        entered = (self.written_offsets == 0) | (rows == self.first_rows[items])
        readers = np.bincount(self.blocks)[self.written_blocks[entered]]
        assert readers.max() == 1, "a block is written that stands in another table"

    def table(self, item: int) -> Ints:
        return self.blocks[self.starts[item] : self.starts[item] + self.needs[item]]


def _side_by_side(values: Ints, counts: Ints) -> Ints:
    """[sum(counts)] -> [len(counts), max(counts)]; padding repeats the first value of the row."""
    starts = np.cumsum(counts) - counts
    places = np.arange(counts.max())
    return values[starts[:, None] + np.where(places < counts[:, None], places, 0)]


def _like_lengths(spans: Sequence[Span], first: int) -> list[Ints]:
    """Sequences that are padded together: prompts that begin apart from the others, then by length."""
    groups: list[list[int]] = []
    real = keys = 0
    order = sorted(range(first, len(spans)), key=lambda i: (spans[i].position0 == 0, spans[i].tokens, spans[i].end))
    for i in order:
        _, position0, tokens = spans[i]
        pairs = tokens * spans[i].end
        if groups and (spans[groups[-1][0]].position0 == 0) == (position0 == 0):
            group = groups[-1]
            padded = (len(group) + 1) * tokens * max(keys, spans[i].end)  # sorted: this one has the most tokens
            if padded <= (real + pairs) * (1 + PADDING_SHARE) + CALL_PAIRS * len(group):
                group.append(i)
                real, keys = real + pairs, max(keys, spans[i].end)
                continue
        groups.append([i])
        real, keys = pairs, spans[i].end
    return [np.array(group) for group in groups]


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Through page-locked memory where there is an accelerator: the copy then waits for nothing."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
