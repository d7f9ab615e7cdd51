"""The engine process: `python -m reference_server.engine_process FD CONFIG`.

FD is one end of a socket pair, CONFIG the JSON of an EngineConfig. It says `ready` or `failed` once, then runs until
the other end closes, however the front end died: no engine is left behind.
"""

import gc
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from reference_server.assembly import PolicyChoice, assemble, declared_gap_bound
from reference_server.engine import Engine, StepRunner
from reference_server.kv_blocks import BLOCK_TOKENS, BlockPool
from reference_server.ledger import Identity, Ledger
from reference_server.link import EngineLink, LinkClosedError
from reference_server.model_store import resolve_model
from reference_server.scheduler import MAX_WAITING, Limits, Scheduler
from reference_server.step_types import GREEDY, SamplingParams, StepItem
from sloscope.clock import SystemClock
from sloscope.errors import SloscopeError
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.output import message
from sloscope.units import NS_PER_S, format_ns


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Plain data that crosses to the engine process; its defaults are those of the command line. `max_context` 0: what
    the model was trained for."""

    model: str
    slots: int = 16
    max_context: int = 0
    kv_blocks: int = 0  # 0: room for every slot at full context
    block_tokens: int = BLOCK_TOKENS
    max_waiting: int = MAX_WAITING
    max_undelivered: int = 256
    slow_reader_ns: int = 30 * NS_PER_S
    prefix_reuse: bool = False
    policies: PolicyChoice = field(default_factory=PolicyChoice)
    calibrate: bool = False
    threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    events: str = ""

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> "EngineConfig":
        fields = orjson.loads(text)
        return cls(**fields | {"policies": PolicyChoice(**fields["policies"])})


def serve(link: EngineLink, config: EngineConfig) -> None:
    # torch is slow to import: what does not need it has been checked by now.
    import torch

    from reference_server.loader import DTYPES, load_checkpoint, make_runner

    torch.set_num_threads(config.threads)
    source = resolve_model(config.model)
    checkpoint = load_checkpoint(source, DTYPES.get(config.dtype, torch.float32))
    model = checkpoint.config
    context = min(config.max_context or model.max_context, model.max_context)
    blocks = config.kv_blocks or config.slots * -(-context // config.block_tokens)
    runner = make_runner(checkpoint, blocks, config.block_tokens, context, config.dtype, config.device)
    clock = SystemClock()
    journal = JournalWriter(Path(config.events), "engine", clock, orjson.dumps) if config.events else None
    parts = assemble(config.policies)
    limits = Limits(config.slots, context, config.max_waiting, config.max_undelivered or None, config.slow_reader_ns)
    pool = BlockPool(blocks, config.block_tokens, config.prefix_reuse)
    scheduler = Scheduler(limits, pool, model.eos_ids, parts.policies)
    lengths = parts.lengths.lengths if parts.lengths is not None else None
    ledger = Ledger(
        scheduler, MetricStore("server"), journal, model, DTYPES[config.dtype].itemsize, parts.unit, lengths
    )
    engine = Engine(runner, scheduler, link, ledger, journal, clock, parts.cost, parts.lengths, config.policies.lanes)
    began_ns = clock.monotonic_ns()
    if programs := runner.prepare(config.slots):
        message(f"captured {programs} decode programs in {format_ns(clock.monotonic_ns() - began_ns)}")
    warm_up(runner, blocks, config.block_tokens, config.slots)
    ceilings: dict[str, float] = {}
    if config.calibrate:
        from reference_server.ceilings import measure

        ceilings = measure(model, DTYPES[config.dtype], torch.device(config.device)).record_fields()
        message(
            "calibrated: " + ", ".join(f"{name.removeprefix('ceiling_')} {rate:.3g}" for name, rate in ceilings.items())
        )
    policies = config.policies.names() | {
        "prefix_reuse": config.prefix_reuse,
        "max_context": context,
        "max_waiting": config.max_waiting,
        "max_undelivered": config.max_undelivered,
        "slow_reader_after": format_ns(config.slow_reader_ns),
    }
    gap_bound = declared_gap_bound(parts.policies, limits, pool)
    identity = Identity(source.name, config.dtype, config.device, config.threads, policies, ceilings, gap_bound)
    ledger.introduce(identity, clock.monotonic_ns(), clock.clock_id)
    spec = asdict(checkpoint.tokenizer)
    # What is alive now stays: a collection in mid-run would walk the whole model for nothing.
    gc.collect()
    gc.freeze()
    link.send_all(
        {
            "op": "ready",
            "model": source.name,
            "tokenizer": spec | {"control_ids": sorted(checkpoint.tokenizer.control_ids)},
            "mask_eos": checkpoint.mask_eos,
            "max_context": context,
            "kv_tokens": blocks * config.block_tokens,
        }
    )
    try:
        engine.run()
    finally:
        if journal is not None:
            journal.close()


def warm_up(runner: StepRunner, kv_blocks: int, block_tokens: int, slots: int) -> None:
    """Steps that nobody waits for: first uses of the kernels take a hundred times longer. A prompt, a chunk of one,
    and decodes of 1, 2, 4, … sequences, one of them drawn; they may read the same blocks, since nobody reads them."""
    table = list(range(kv_blocks))
    prompt = max(2, min(block_tokens * kv_blocks // 2 - 2, 64))
    drawn = SamplingParams(temperature=1.0, top_p=0.9)
    runner.step([StepItem(table, [0] * prompt, position0=0, sample=True)])
    runner.step([StepItem(table, [0, 0], position0=prompt, sample=True, sampling=drawn)])
    batch = 1
    while batch <= min(slots, kv_blocks):
        runner.step(
            [
                StepItem([block], [0], position0=0, sample=True, sampling=drawn if block else GREEDY)
                for block in range(batch)
            ]
        )
        batch *= 2


def main() -> None:
    # Ctrl-C reaches the whole group; the front end decides, and closes the link when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(link, EngineConfig.from_json(sys.argv[2]))
    except LinkClosedError:
        pass  # the usual end
    except SloscopeError as error:
        link.send_all({"op": "failed", "message": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main()
