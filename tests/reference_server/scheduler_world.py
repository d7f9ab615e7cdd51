"""The scheduler and a tiny runner, for the scheduler's tests."""

from reference_server.kv_blocks import BlockPool
from reference_server.request import ENDED, Request, State
from reference_server.scheduler import Emitted, Limits, Policies, Scheduler, StepPlan
from tests.reference_server.tiny_runner import EOS, TinyRunner


class World:
    """A scheduler and a runner, stepped together, with every invariant checked after each step. A step takes 1 ns."""

    def __init__(
        self,
        slots: int = 2,
        context: int = 64,
        blocks: int = 32,
        block_tokens: int = 4,
        prefix_reuse: bool = False,
        policies: Policies | None = None,
        **limits: int | None,
    ) -> None:
        self.runner = TinyRunner(blocks, block_tokens, context)
        self.scheduler = Scheduler(
            Limits(slots, context, **limits),  # type: ignore[arg-type]
            BlockPool(blocks, block_tokens, prefix_reuse),
            [EOS],
            policies,
        )
        self.now_ns = 0
        self.ended: list[str] = []
        self.history: list[tuple[str, State]] = []

    def settle(self) -> None:
        for request, _, to, _ in self.scheduler.take_transitions():
            self.history.append((request.key, to))
            if to in ENDED:
                self.ended.append(request.key)
        self.scheduler.check_integrity()
        for request in self.scheduler.running():
            held = self.runner.content(request.blocks, request.computed)
            assert held == list(request.sequence()[: request.computed]), f"{request.key} reads what is not its own"

    def submit(
        self,
        key: str,
        prompt: int = 3,
        max_tokens: int = 4,
        stop_after: int | None = None,
        tokens: list[int] | None = None,
        streaming: bool = False,
        lane: int = 0,
    ) -> Request:
        prompt_tokens = tokens or list(range(10, 10 + prompt))
        request = Request(key, prompt_tokens, max_tokens, stop_after, streaming=streaming, lane=lane)
        self.scheduler.submit(request, self.now_ns)
        self.settle()
        return request

    def step(self) -> list[Emitted]:
        self.now_ns += 1
        plan = self.scheduler.plan(self.now_ns)
        self.settle()
        emitted = self.run(plan) if plan.items else []
        self.settle()
        return emitted

    def run(self, plan: StepPlan) -> list[Emitted]:
        return self.scheduler.apply(plan, self.runner.step(plan.items).token_ids, self.now_ns)

    def cancel(self, key: str) -> Request | None:
        request = self.scheduler.cancel(key, "disconnect")
        self.settle()
        return request

    def run_out(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests that never end")

    def states(self, key: str) -> list[State]:
        return [to for name, to in self.history if name == key]
