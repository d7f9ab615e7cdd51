"""A runner without a model: it checks every rule of the step interface and gives tokens that a test can foresee."""

import time
from collections.abc import Sequence

from reference_server.step_types import StepItem, StepResult

EOS = 1


class TinyRunner:
    """The token at position p is 100 + p, except where `eos_at` says that an answer ends there.

    It remembers which token each place of each block holds, as KV would: `content` reads a block table back, so that a
    test sees when a sequence reads what another one wrote.
    """

    def __init__(self, blocks: int, block_tokens: int, max_context: int) -> None:
        self.max_context = max_context
        self.block_tokens = block_tokens
        self.cells: list[list[int | None]] = [[None] * block_tokens for _ in range(blocks)]
        self.eos_at: set[int] = set()  # positions at which the end token comes
        self.steps = 0

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        start_ns = time.monotonic_ns()
        assert batch, "an empty step"
        written: set[tuple[int, int]] = set()
        tokens: list[int | None] = []
        for item in batch:
            assert item.token_ids
            for position, token in enumerate(item.token_ids, item.position0):
                block, at = item.blocks[position // self.block_tokens], position % self.block_tokens
                assert (block, at) not in written, "two sequences write to one place"
                written.add((block, at))
                self.cells[block][at] = token
            position = item.position0 + len(item.token_ids)
            assert position <= self.max_context
            token = EOS if position in self.eos_at and not item.sampling.mask_eos else 100 + position
            tokens.append(token if item.sample else None)
        for item in batch:
            for position in range(item.position0):
                place = item.blocks[position // self.block_tokens], position % self.block_tokens
                assert place not in written, "a sequence writes where another one reads"
        self.steps += 1
        return StepResult(tokens, start_ns, time.monotonic_ns())

    def content(self, blocks: Sequence[int], tokens: int) -> list[int | None]:
        """What the first positions of a block table hold."""
        size = self.block_tokens
        return [self.cells[blocks[position // size]][position % size] for position in range(tokens)]
