"""One call per engine iteration: the whole batch through the model, and a token for each that asked for one."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_server.attention import PagedKV, Span, to_device
from reference_server.decode_programs import DecodePrograms
from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.model import Llama
from reference_server.sampler import sample, sampling_values
from reference_server.step_types import StepItem, StepResult


class Runner:
    """Owns the model and the paged KV. Not thread-safe: one iteration at a time.

    Nothing is kept about a sequence: every item brings its block table. Its tokens are run in order, in as many steps
    as the caller likes. `max_context` bounds what one sequence may hold. `output_mask` is added to all logits (see
    sampler). `programs` None: steps that only decode run as captured programs where there is a graph to capture.
    """

    def __init__(
        self,
        model: Llama,
        kv_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        max_context: int | None = None,
        output_mask: Tensor | None = None,
        programs: bool | None = None,
    ) -> None:
        self.model = model
        self.config = model.config
        self.max_context = min(max_context or self.config.max_context, self.config.max_context)
        self.kv = PagedKV(self.config, kv_blocks, block_tokens, model.dtype, model.device)
        self._eos_ids = torch.tensor(self.config.eos_ids, dtype=torch.long, device=model.device)
        self._output_mask = None if output_mask is None else output_mask.to(model.device)
        self._programs = None
        if model.device.type == "cuda" if programs is None else programs:
            self._programs = DecodePrograms(model, self.kv, self.max_context, self._eos_ids, self._output_mask)

    @torch.inference_mode()
    def prepare(self, most_sequences: int) -> int:
        """Captures what steps of up to so many sequences will replay, and says how many programs there are."""
        if self._programs is None:
            return 0
        self._programs.prepare(most_sequences)
        return len(self._programs)

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        start_ns = time.monotonic_ns()
        programs = 0 if self._programs is None else len(self._programs)
        with torch.inference_mode():
            timer = _DeviceTimer(self.model.device)
            token_ids = _to_host(self._choose(batch))
            device_ns = timer.stop()  # waits: the tokens are on the host now
        chosen: list[int | None] = [None] * len(batch)
        sampled = (i for i, item in enumerate(batch) if item.sample)
        for i, token_id in zip(sampled, token_ids.tolist(), strict=True):
            chosen[i] = token_id
        captured = self._programs is not None and len(self._programs) > programs
        return StepResult(chosen, start_ns, time.monotonic_ns(), device_ns, captured)

    def _choose(self, batch: Sequence[StepItem]) -> Tensor:
        """The chosen tokens of the items that sample, on the device."""
        if batch and self._programs is not None and DecodePrograms.suits(batch):
            self.kv.check(_spans(batch), self.max_context)
            return self._programs.run(batch)
        sampled = [item for item in batch if item.sample]
        if not sampled:
            if batch:
                self.forward(batch)
            return torch.empty(0, dtype=torch.long)
        logits = self.forward(batch)
        params = [item.sampling for item in sampled]
        values = sampling_values(params, [item.position0 + len(item.token_ids) for item in sampled])
        on_device = to_device(values, self.model.device)
        return sample(logits, params, on_device, self._eos_ids, self._output_mask)

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepItem]) -> Tensor:
        """Run the batch; logits [n, vocab] of the items that sample, in the order of the batch."""
        order = sorted(range(len(batch)), key=lambda i: len(batch[i].token_ids) > 1)  # decodes first
        plan = self.kv.plan(_spans([batch[i] for i in order]), self.max_context)
        token_ids = np.concatenate([np.asarray(batch[i].token_ids) for i in order])
        last_rows = np.empty(len(batch), dtype=np.int64)
        last_rows[order] = np.cumsum([len(batch[i].token_ids) for i in order]) - 1
        sampled = np.array([item.sample for item in batch])
        return self.model.forward(
            to_device(token_ids, self.model.device),
            plan.positions,
            to_device(last_rows[sampled], self.model.device),
            lambda layer, q, kv: self.kv.attend(plan, layer, q, kv),
        )


def _spans(batch: Sequence[StepItem]) -> list[Span]:
    return [Span(item.blocks, item.position0, len(item.token_ids)) for item in batch]


def _to_host(token_ids: Tensor) -> Tensor:
    """On its way; there once the stream has got so far."""
    if not token_ids.is_cuda:
        return token_ids
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    return host.copy_(token_ids, non_blocking=True)


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
