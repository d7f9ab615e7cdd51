"""What the engine's loop costs beside the forward pass: plan, apply, hand-over, journal, metrics.

The loop is the real one: requests come over a socket pair, tokens go back over it, the journal is written to disk, and
the reader reports what it took, as the front end does. Of each turn the time inside the runner's step is taken off.
Turns with prompts are not measured, so prompts are not run: the KV holds what it held.
"""

import gc
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from reference_server.assembly import PolicyChoice, assemble
from reference_server.engine import Engine, StepRunner
from reference_server.engine_process import EngineConfig
from reference_server.kv_blocks import BLOCK_TOKENS, BlockPool
from reference_server.ledger import Ledger
from reference_server.link import EngineLink, FrameBuffer, Message, encode
from reference_server.model_config import ModelConfig
from reference_server.scheduler import Limits, Scheduler
from reference_server.step_types import StepItem, StepResult
from sloscope.clock import SystemClock
from sloscope.exposition import MetricStore
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter

WARM_UP_TURNS = 3
CHOSEN = 100  # a plain byte, and no model's end token


class Turn(NamedTuple):
    wall_ns: int
    forward_wall_ns: int
    cpu_ns: int  # of the loop's thread, which waits for nobody: what a machine that others use does not change
    forward_cpu_ns: int

    @property
    def overhead_ns(self) -> int:
        return self.wall_ns - self.forward_wall_ns

    @property
    def overhead_cpu_ns(self) -> int:
        return self.cpu_ns - self.forward_cpu_ns


class InstantRunner:
    """Chooses the same token for everyone, at once: what remains of a turn is the loop."""

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        now_ns = time.monotonic_ns()
        return StepResult([CHOSEN if item.sample else None for item in batch], now_ns, now_ns)


class _TimedRunner:
    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.took = (0, 0)  # wall and CPU time of the latest step
        self.tokens = 0

    def step(self, batch: Sequence[StepItem]) -> StepResult:
        # The CPU clock takes microseconds to read: innermost here and outermost around the turn, its own cost falls
        # into the forward pass or outside.
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        runner = self._runner if all(len(item.token_ids) == 1 for item in batch) else InstantRunner()
        result = runner.step(batch)
        cpu_ns = time.thread_time_ns() - cpu_ns
        self.took = time.perf_counter_ns() - wall_ns, cpu_ns
        self.tokens = sum(len(item.token_ids) for item in batch)
        return result


def blocks_needed(batch: int, context: int, turns: int) -> int:
    return batch * -(-(context + turns + WARM_UP_TURNS + 2) // BLOCK_TOKENS)


def measure_turns(
    runner: StepRunner, config: ModelConfig, dtype_bytes: int, batch: int, context: int, turns: int, events: Path
) -> Generator[Turn, None, None]:
    """Turns in which `batch` sequences of `context` tokens and more take a decode step each."""
    timed = _TimedRunner(runner)
    ours, front = socket.socketpair()
    clock = SystemClock()
    journal = JournalWriter(events, "engine", clock, orjson.dumps)
    max_tokens = turns + WARM_UP_TURNS + 2
    parts = assemble(PolicyChoice())
    served = EngineConfig(model="")
    limits = Limits(batch, context + max_tokens, served.max_waiting, served.max_undelivered, served.slow_reader_ns)
    pool = BlockPool(blocks_needed(batch, context, turns), BLOCK_TOKENS)
    scheduler = Scheduler(limits, pool, config.eos_ids, parts.policies)
    ledger = Ledger(scheduler, MetricStore("server"), journal, config, dtype_bytes, parts.unit)
    engine = Engine(timed, scheduler, EngineLink(ours), ledger, journal, clock, parts.cost, parts.lengths)
    reader = _Reader(front)
    gc.collect()
    gc.freeze()  # as the engine process does
    try:
        for _ in range(batch):
            reader.ask(context, max_tokens)
        decodes = 0
        while decodes < turns + WARM_UP_TURNS:
            timed.tokens = 0
            cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
            engine.turn()
            wall_ns = time.perf_counter_ns() - wall_ns
            turn = Turn(wall_ns, timed.took[0], time.thread_time_ns() - cpu_ns, timed.took[1])
            reader.take()
            assert timed.tokens, "the requests ended before the turns"
            if timed.tokens == batch:  # not a prefill
                decodes += 1
                if decodes > WARM_UP_TURNS:
                    yield turn
    finally:
        gc.unfreeze()
        journal.close()
        ours.close()
        front.close()


class _Reader:
    """The front end's side of the socket, between turns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self._taken: dict[str, int] = {}

    def ask(self, prompt_tokens: int, max_tokens: int) -> None:
        message: Message = {
            "op": "new", "key": new_request_id(), "prompt": [3] * prompt_tokens, "max_tokens": max_tokens,
            "stop_after": None, "temperature": 0.0, "top_p": 1.0, "seed": 0, "mask_eos": True, "tenant": "",
            "arrived_ns": time.monotonic_ns(), "fault": "", "request_class": "", "streaming": True,
            "ttft_limit_ns": None, "itl_max_limit_ns": None,
        }  # fmt: skip
        self._socket.sendall(encode(message))

    def take(self) -> None:
        try:
            while data := self._socket.recv(1 << 18):
                for message in self._frames.feed(data):
                    for key, *_ in message.get("rows", ()):
                        self._taken[key] = self._taken.get(key, 0) + 1
        except BlockingIOError:
            pass
        if self._taken:
            self._socket.sendall(encode({"op": "delivered", "rows": list(self._taken.items())}))
