"""The scheduler and the forward pass in this process, step by step, and what the steps cost."""

import json
import random
import time
from pathlib import Path

import torch

from reference_server.cost_fit import HeldOutFit, fit_held_out
from reference_server.cost_model import CostModel, Sample, shape_of
from reference_server.kv_blocks import BLOCK_TOKENS, BlockPool
from reference_server.loader import load_checkpoint, make_runner
from reference_server.model_store import resolve_model
from reference_server.prefill_budget import Static
from reference_server.request import Request
from reference_server.runner import Runner
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.step_types import SamplingParams
from sloscope.output import message

MASKED = SamplingParams(mask_eos=True)  # answers end where the test says


class RealEngine:
    """A model, and a scheduler of one's own for each run. Readers take everything at once."""

    def __init__(self, model: str, kv_tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = model
        self.threads = threads
        self.kv_blocks = -(-kv_tokens // BLOCK_TOKENS)
        self.runner: Runner = make_runner(load_checkpoint(resolve_model(model)), self.kv_blocks, BLOCK_TOKENS)
        self.samples: list[Sample] = []
        self.scheduler = self.restart(1, Policies())

    def restart(self, slots: int, policies: Policies) -> Scheduler:
        limits = Limits(slots, self.runner.max_context)
        self.scheduler = Scheduler(limits, BlockPool(self.kv_blocks, BLOCK_TOKENS), (), policies)
        return self.scheduler

    def submit(self, key: str, prompt_tokens: int, max_tokens: int, itl_max_ns: int | None = None) -> Request:
        now_ns = time.monotonic_ns()
        prompt = [3 + (7 * i) % 200 for i in range(prompt_tokens)]
        request = Request(key, prompt, max_tokens, sampling=MASKED, arrived_ns=now_ns, itl_max_limit_ns=itl_max_ns)
        refusal = self.scheduler.submit(request, now_ns)
        assert refusal is None, refusal
        return request

    def step(self) -> tuple[int, int]:
        """Start and end."""
        start_ns = time.monotonic_ns()
        plan = self.scheduler.plan(start_ns)
        result = self.runner.step(plan.items)
        emitted = self.scheduler.apply(plan, result.token_ids, result.end_ns)
        for token in emitted:
            self.scheduler.delivered(token.request.key, len(token.request.output), result.end_ns)
        end_ns = time.monotonic_ns()
        self.samples.append(Sample(shape_of(plan.items, plan.decodes), end_ns - start_ns))
        self.scheduler.policies.admission.observe_step(plan, end_ns - start_ns)
        self.scheduler.take_transitions()
        self.scheduler.take_decisions()
        return start_ns, end_ns


def record_mixed_steps(engine: RealEngine, slots: int, requests: int, longest_prompt: int, seed: int = 1) -> None:
    """Prompts of all lengths beside decodes at all batch sizes, so that a fit can tell the terms apart."""
    drawn = random.Random(seed)
    budgets = (32, 128, 512, None)
    for number, budget in enumerate(budgets):
        engine.restart(slots, Policies(budget=Static(budget)))
        for i in range(requests):
            prompt = max(1, round(longest_prompt * drawn.random() ** 3))
            engine.submit(f"{number}-{i}", prompt, drawn.randint(1, 60))
            for _ in range(drawn.randrange(4)):
                if engine.scheduler.has_work:
                    engine.step()
        while engine.scheduler.has_work:
            engine.step()


def cost_model(path: Path | None, model: str, threads: int) -> CostModel:
    """From a file, or measured here and now."""
    if path is not None:
        return CostModel.from_json(path.read_text(encoding="utf-8"))
    message(f"measuring the steps of {model} (--cost-model FILE takes a recorded fit instead)")
    engine = RealEngine(model, 32_768, threads)
    record_mixed_steps(engine, slots=16, requests=24, longest_prompt=1200)
    fitted = fit_held_out(engine.samples)
    message(describe_fit(fitted))
    return fitted.model


def describe_fit(fitted: HeldOutFit) -> str:
    terms = ", ".join(f"{name} {value:.0f}" for name, value in json.loads(fitted.model.to_json()).items())
    error = fitted.error
    return (
        f"cost model: {terms}; error over {error.n} steps that the fit did not see: median "
        f"{error.median or 0:.1%}, p90 {error.p90 or 0:.1%}, bias {error.bias or 0:+.1%}"
    )
