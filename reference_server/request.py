"""One request inside the engine: its states, and which of them may follow which. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from reference_server.faults import Fault
from reference_server.step_types import SamplingParams


class State(StrEnum):
    """Where a request stands at an iteration boundary."""

    WAITING = "WAITING"  # accepted, holds no KV
    PREFILL = "PREFILL"  # holds KV, its prompt is being run
    DECODE = "DECODE"  # one token an iteration
    PAUSED = "PAUSED"  # holds KV, left out of the batch
    PREEMPTED = "PREEMPTED"  # lost its KV, to be run again from the start
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    REJECTED = "REJECTED"


ENDED = frozenset({State.FINISHED, State.CANCELLED, State.REJECTED})
_LEAVE = frozenset({State.FINISHED, State.CANCELLED})  # a stop string is seen late, so it may end any that produced

# The one table of legal transitions. None is "not known to the engine yet".
TRANSITIONS: dict[State | None, frozenset[State]] = {
    None: frozenset({State.WAITING, State.REJECTED}),
    State.WAITING: frozenset({State.PREFILL, State.CANCELLED, State.REJECTED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED}) | _LEAVE,
    State.DECODE: frozenset({State.PAUSED, State.PREEMPTED}) | _LEAVE,
    State.PAUSED: frozenset({State.DECODE, State.PREEMPTED}) | _LEAVE,
    State.PREEMPTED: frozenset({State.PREFILL}) | _LEAVE,
    State.FINISHED: frozenset(),
    State.CANCELLED: frozenset(),
    State.REJECTED: frozenset(),
}


class InvariantError(AssertionError):
    """Our bug, and one that would go on to corrupt states or KV: raised where asserts are switched off, too."""


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows of a request. It holds tokens, never text.

    `stop_after` ends the answer naturally (`stop`) at that many tokens, `max_tokens` cuts it (`length`). `computed`
    counts the tokens whose KV the blocks hold; the newest token of an answer is always one ahead of it.
    """

    key: str
    prompt: Sequence[int]
    max_tokens: int
    stop_after: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    arrived_ns: int = 0  # first request byte at the server; carried for the engine's metrics, not read here
    fault: Fault | None = None
    request_class: str = ""
    lane: int = 0  # priority, 0 is the most urgent
    streaming: bool = True
    ttft_limit_ns: int | None = None
    itl_max_limit_ns: int | None = None
    state: State | None = None
    blocks: list[int] = field(default_factory=list)  # its block table, kept by the pool
    computed: int = 0
    reused: int = 0  # tokens taken over from the prefix cache at the latest admission
    charged: int = 0  # positions charged as service; what is computed again is not charged again
    delivered: int = 0  # output tokens that the reader took
    output: list[int] = field(default_factory=list)
    finish_reason: str = ""
    retry_after_s: int = 1  # told with a late refusal
    queue_noted: bool = False
    preemptions: int = 0
    rank: int = 0  # by first admission
    queued_ns: int = 0
    started_ns: int = 0  # first entry into PREFILL: its admission, a step may not run it yet
    last_token_ns: int = 0
    paused_ns: int | None = None  # since when its reader holds it
    taken_ns: int = 0  # when its reader last took something

    def __post_init__(self) -> None:
        assert self.prompt and self.max_tokens >= 1, "a request runs at least one token and asks for one"

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)

    def sequence(self) -> Sequence[int]:
        """Prompt and output so far; what a preempted request runs again."""
        return [*self.prompt, *self.output] if self.output else self.prompt

    @property
    def undelivered(self) -> int:
        return len(self.output) - self.delivered

    @property
    def deadline_ns(self) -> int | None:
        """When its first token is due."""
        return None if self.ttft_limit_ns is None else self.arrived_ns + self.ttft_limit_ns

    @property
    def total_tokens(self) -> int:
        """The most tokens that it can come to hold."""
        return len(self.prompt) + self.max_tokens

    def move(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise InvariantError(f"request {self.key}: {self.state} -> {to} is not legal")
        self.state = to
