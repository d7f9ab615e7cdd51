"""What can be exchanged in the scheduler: who is next, who is let in, how much KV is promised, how long a chunk is.

Pure. Each policy is one class behind one of these protocols; the scheduler keeps every other promise (states, KV,
slots) whatever a policy says. Times are monotonic nanoseconds that the caller passes in.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reference_server.kv_blocks import BlockPool
from reference_server.request import Request

if TYPE_CHECKING:
    from reference_server.forecast import Forecast
    from reference_server.scheduler import Limits, StepPlan


Reasons = tuple[tuple[str, str], ...]  # verdict, reason


class Judgement(NamedTuple):
    """What admission says of one request, and on what ground.

    `feasible` is about time: the plan meets the deadline. `resource_safe` is about room: the KV that the request will
    create fits beside what running work will create. `plan`: the steps and the work up to its first token. None where
    the policy does not predict.
    """

    verdict: str  # admit, queue, refuse
    reason: str
    predicted_first_token_ns: int | None = None
    slack_ns: int | None = None
    feasible: bool | None = None
    resource_safe: bool | None = None
    retry_after_s: int = 1
    plan: "Forecast | None" = None


class View(NamedTuple):
    """What a policy may look at."""

    running: Sequence[Request]  # PREFILL, DECODE, PAUSED in order of admission
    ahead: Iterable[Request]  # those that wait before this one, in order; to be read once
    pool: BlockPool
    limits: "Limits"
    moment: int | None = None  # two views of one moment differ in `ahead` alone; None: of none that comes again


class QueueOrder(Protocol):
    """Who waits, and who of them is next."""

    def add(self, request: Request, now_ns: int) -> None:
        """It waits: new, or preempted and then before newcomers of its rank."""

    def remove(self, request: Request) -> None:
        """It waits no longer: admitted, cancelled or refused."""

    def peek(self, now_ns: int) -> Request | None:
        """Who is next; the same until something changes."""

    def sort_prefills(self, prefills: list[Request]) -> list[Request]:
        """Which running prompt gets the token budget first; the argument is in order of admission."""

    def admitted(self, request: Request) -> None:
        """It runs from now on."""

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Service of one step. What is computed again after a preemption is not service."""

    def ended(self, request: Request) -> None:
        """It left the engine for good."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Those who wait, in the order in which they would be next as of now."""

    def check_integrity(self) -> None: ...


class Admission(Protocol):
    """Whether a request may come in. Asked at arrival (state None), and at each boundary for the next in order."""

    name: str  # as the command line says it
    late_refusals: bool  # a waiting request may still be refused, so its answer's headers wait until it runs
    reasons: Reasons  # all verdicts that it may give

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement: ...

    def leaves_queue_in_ns(self, head: Request, view: View, now_ns: int) -> int | None:
        """How long until the next in order stands in the queue no more; None: it does not predict."""

    def observe_step(self, plan: "StepPlan", duration_ns: int) -> None:
        """What an iteration really took."""


class Reservation(Protocol):
    """How many tokens of KV are promised when a request is admitted."""

    def promised_tokens(self, request: Request) -> int: ...


class PrefillBudget(Protocol):
    """How many prompt tokens the next iteration may run; None: no bound."""

    def tokens(self, decodes: Sequence[Request], prefills: Sequence[Request], now_ns: int) -> int | None: ...


class AdmitAll:
    """Nobody is refused but for room that can never be had."""

    name = "none"
    late_refusals = False
    reasons: Reasons = (("admit", "fits"),)

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement:
        return Judgement("admit", "fits")

    def leaves_queue_in_ns(self, head: Request, view: View, now_ns: int) -> int | None:
        return None

    def observe_step(self, plan: "StepPlan", duration_ns: int) -> None:
        pass


class Full:
    """Prompt and max_tokens: admitted work never lacks room."""

    def promised_tokens(self, request: Request) -> int:
        return request.total_tokens


class Optimistic:
    """What it holds and one more token: more requests run, and some are preempted when the pool is full."""

    def promised_tokens(self, request: Request) -> int:
        return request.tokens + 1
