"""Steps in which every sequence decodes, as programs of fixed shapes: on CUDA captured once as graphs and replayed.

A program reads two input buffers and leaves the chosen tokens in a third. It is the same code on a CPU, where it runs
as it stands; only capture and replay need the device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from reference_server.attention import PagedKV
from reference_server.model import Llama
from reference_server.sampler import sample_static, sampling_values
from reference_server.step_types import StepItem

WARM_UP_RUNS = 2  # before a capture: libraries set themselves up at first use


class Shape(NamedTuple):
    rows: int  # sequences, up to the next power of two
    width: int  # blocks of the longest, likewise, but no more than the longest context has
    draws: bool
    nucleus: bool


def shape_of(batch: Sequence[StepItem], block_tokens: int, widest: int) -> Shape:
    width = max(item.position0 // block_tokens + 1 for item in batch)
    drawn = [item.sampling for item in batch if item.sampling.temperature > 0]
    return Shape(_bucket(len(batch)), min(_bucket(width), widest), bool(drawn), any(p.top_p < 1 for p in drawn))


def shapes(most_rows: int, widest: int, kv_blocks: int) -> Iterator[Shape]:
    """What `shape_of` may say of up to `most_rows` sequences, the largest first.

    Left out are those whose table has more places than the pool has blocks, to powers of two: mostly padding, seldom
    met, and they could take more memory than the KV itself.
    """
    for rows in _buckets(most_rows):
        for width in _buckets(widest):
            if rows * min(width, widest) <= _bucket(kv_blocks):
                for draws, nucleus in ((False, False), (True, False), (True, True)):
                    yield Shape(rows, min(width, widest), draws, nucleus)


def _buckets(most: int) -> list[int]:
    return [1 << bits for bits in range((most - 1).bit_length(), -1, -1)]


def _bucket(count: int) -> int:
    return 1 << (count - 1).bit_length()


class DecodePrograms:
    """One program for each shape that was prepared or has come up."""

    def __init__(
        self, model: Llama, kv: PagedKV, max_context: int, eos_ids: Tensor, output_mask: Tensor | None
    ) -> None:
        self._model = model
        self._kv = kv
        self._eos_ids = eos_ids
        self._output_mask = output_mask
        self._widest = -(-max_context // kv.block_tokens)
        self._programs: dict[Shape, _Program] = {}
        self._graph_memory = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    @staticmethod
    def suits(batch: Sequence[StepItem]) -> bool:
        return all(len(item.token_ids) == 1 and item.sample for item in batch)

    def __len__(self) -> int:
        return len(self._programs)

    def prepare(self, most_rows: int) -> None:
        """Makes the programs before anybody waits for them; a capture takes as long as many steps. The largest go
        first, since those after them then find memory that is large enough."""
        for shape in shapes(most_rows, self._widest, self._kv.kv_blocks):
            if shape not in self._programs:
                self._programs[shape] = _Program(self, shape)

    def run(self, batch: Sequence[StepItem]) -> Tensor:
        """The chosen tokens [items], on the device."""
        shape = shape_of(batch, self._kv.block_tokens, self._widest)
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = _Program(self, shape)
        program.fill(batch)
        program.replay()
        return program.chosen[: len(batch)]

    def compute(self, shape: Shape, numbers: Tensor, values: Tensor) -> Tensor:
        token_ids, positions, tables = numbers[:, 0], numbers[:, 1], numbers[:, 2:]
        plan = self._kv.plan_decodes(tables, positions)
        logits = self._model.forward(
            token_ids, positions, None, lambda layer, q, kv: self._kv.attend(plan, layer, q, kv)
        )
        return sample_static(logits, values, self._eos_ids, self._output_mask, shape.draws, shape.nucleus)


class _Program:
    def __init__(self, programs: DecodePrograms, shape: Shape) -> None:
        self._programs = programs
        self._shape = shape
        self._spare_block = programs._kv.kv_blocks
        self._block_tokens = programs._kv.block_tokens
        device = programs._model.device
        on_cuda = device.type == "cuda"
        # Token, position, block table; filled on the host, then copied as a whole.
        self._host_numbers = torch.zeros(shape.rows, 2 + shape.width, dtype=torch.long, pin_memory=on_cuda)
        self._host_values = torch.zeros(shape.rows, 4, dtype=torch.float64, pin_memory=on_cuda)
        self._host_numbers[:, 2:] = self._spare_block
        self._numbers = self._host_numbers.to(device, copy=True)
        self._values = self._host_values.to(device, copy=True)
        self._graph = self._capture() if on_cuda else None
        if not on_cuda:
            self.chosen = torch.zeros(shape.rows, dtype=torch.long)

    def fill(self, batch: Sequence[StepItem]) -> None:
        """Rows beyond the batch are padding: position 0 of the block that is nobody's."""
        numbers, values = self._host_numbers.numpy(), self._host_values.numpy()
        n = len(batch)
        numbers[:, :2] = 0
        numbers[:, 2:] = self._spare_block
        for row, item in zip(numbers, batch, strict=False):
            need = item.position0 // self._block_tokens + 1
            row[0], row[1] = item.token_ids[0], item.position0
            row[2 : 2 + need] = item.blocks[:need]
        values[:n] = sampling_values([item.sampling for item in batch], [item.position0 + 1 for item in batch])
        values[n:] = (0.0, 1.0, 0.0, 0.0)
        self._numbers.copy_(self._host_numbers, non_blocking=True)
        self._values.copy_(self._host_values, non_blocking=True)

    def replay(self) -> None:
        if self._graph is None:
            self.chosen = self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> Tensor:
        return self._programs.compute(self._shape, self._numbers, self._values)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._programs._graph_memory):
            self.chosen = self._compute()
        return graph
