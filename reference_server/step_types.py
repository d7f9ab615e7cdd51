"""What goes into one engine iteration and what comes out. Pure: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one sequence is chosen.

    temperature 0 is greedy. The draw is a function of (seed, position) alone: it does not depend on who else is
    in the batch, and a sequence that was preempted and recomputed draws the same numbers again. `mask_eos`
    makes the tokens that end an answer impossible, for answers whose length is decided elsewhere.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    mask_eos: bool = False

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and 0 < self.top_p <= 1


GREEDY = SamplingParams()


class StepItem(NamedTuple):
    """New tokens of one sequence: a prompt, a prefill chunk, or the one token of a decode step.

    A sequence is its block table: `blocks[i]` holds the KV of the positions i * block_tokens and on, and those before
    position0 must have been computed. `token_ids` take the positions position0, position0 + 1, …; the blocks that
    they fall into are written, all others are only read and may stand in the tables of several items. Blocks beyond
    the last new token are ignored. With `sample`, the token after the last of them is chosen.
    """

    blocks: Sequence[int]
    token_ids: Sequence[int]
    position0: int
    sample: bool
    sampling: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry of `token_ids` per item, in the order of the batch; None where nothing was sampled.

    start_ns and end_ns are monotonic; the tokens are in host memory by end_ns. `device_ns` is what the
    accelerator measured between the first and the last kernel; None on a CPU. `captured`: a program for its shape was
    made first, which took most of its time.
    """

    token_ids: list[int | None]
    start_ns: int
    end_ns: int
    device_ns: int | None = None
    captured: bool = False
