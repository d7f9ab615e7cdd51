"""A runner without a model: it checks every rule of the step interface and gives tokens that a test can foresee."""

import time
from collections.abc import Sequence

from reference_server.step_types import StepItem, StepResult

EOS = 1


class TinyRunner:
    """The token at position p is 100 + p, except where `ends` says that a slot's answer ends there."""

    def __init__(self, slots: int, max_context: int) -> None:
        self.max_context = max_context
        self.held = [0] * slots
        self.eos_at: set[int] = set()  # positions at which the end token comes
        self.steps = 0

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        start_ns = time.monotonic_ns()
        assert batch, "an empty step"
        assert len({item.slot for item in batch}) == len(batch), "a slot twice in one step"
        tokens: list[int | None] = []
        for item in batch:
            assert item.token_ids and item.position0 == self.held[item.slot]
            self.held[item.slot] += len(item.token_ids)
            position = self.held[item.slot]
            assert position <= self.max_context
            token = EOS if position in self.eos_at and not item.sampling.mask_eos else 100 + position
            tokens.append(token if item.sample else None)
        self.steps += 1
        return StepResult(tokens, start_ns, time.monotonic_ns())

    def free(self, slot: int) -> None:
        self.held[slot] = 0
