"""One call per engine iteration: the whole batch through the model, and a token for each that asked for one."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from reference_server.attention import PagedKV, Span
from reference_server.model import Llama
from reference_server.sampler import sample
from reference_server.step_types import StepItem, StepResult


class Runner:
    """Owns the model and the paged KV. Not thread-safe: one iteration at a time.

    Nothing is kept about a sequence: every item brings its block table. Its tokens are run in order, in as many steps
    as the caller likes. `max_context` bounds what one sequence may hold. `output_mask` is added to all logits (see
    sampler).
    """

    def __init__(
        self,
        model: Llama,
        kv_blocks: int,
        block_tokens: int = 16,
        max_context: int | None = None,
        output_mask: Tensor | None = None,
    ) -> None:
        self.model = model
        self.config = model.config
        self.max_context = min(max_context or self.config.max_context, self.config.max_context)
        self.kv = PagedKV(self.config, kv_blocks, block_tokens, model.dtype, model.device)
        self._eos_ids = torch.tensor(self.config.eos_ids, dtype=torch.long, device=model.device)
        self._output_mask = None if output_mask is None else output_mask.to(model.device)

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        start_ns = time.monotonic_ns()
        chosen: list[int | None] = [None] * len(batch)
        sampled = [i for i, item in enumerate(batch) if item.sample]
        timer = _DeviceTimer(self.model.device)
        with torch.inference_mode():
            if batch:
                logits = self.forward(batch)
                token_ids = sample(
                    logits,
                    [batch[i].sampling for i in sampled],
                    [batch[i].position0 + len(batch[i].token_ids) for i in sampled],
                    self._eos_ids,
                    self._output_mask,
                )
                for i, token_id in zip(sampled, token_ids, strict=True):
                    chosen[i] = token_id
            device_ns = timer.stop()
        return StepResult(chosen, start_ns, time.monotonic_ns(), device_ns)

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepItem]) -> Tensor:
        """Run the batch; logits [n, vocab] of the items that sample, in the order of the batch."""
        spans = [Span(item.blocks, item.position0, len(item.token_ids)) for item in batch]
        self.kv.check(spans, self.max_context)
        order = sorted(range(len(batch)), key=lambda i: spans[i].tokens > 1)  # decodes first
        plan = self.kv.plan([spans[i] for i in order])
        last_row: dict[int, int] = {}
        token_ids: list[int] = []
        for i in order:
            token_ids.extend(batch[i].token_ids)
            last_row[i] = len(token_ids) - 1
        device = self.model.device
        return self.model.forward(
            torch.tensor(token_ids, device=device),
            plan.positions,
            torch.tensor([last_row[i] for i, item in enumerate(batch) if item.sample], dtype=torch.long, device=device),
            lambda layer, q, k, v: self.kv.attend(plan, layer, q, k, v),
        )


class _DeviceTimer:
    """Time between two events on the accelerator's stream; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> int | None:
        """Waits for the device; nanoseconds."""
        if self._events is None:
            return None
        first, last = self._events
        last.record()
        last.synchronize()
        return int(first.elapsed_time(last) * 1e6)
