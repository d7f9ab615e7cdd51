"""`sloscope serve`: everything is checked before anything starts; one line when it is ready; a clean end."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
import uvloop

from reference_server.app import make_app, make_server
from reference_server.assembly import PolicyChoice, assemble
from reference_server.engine_process import EngineConfig
from reference_server.fairness import LEAST, MOST
from reference_server.front_end import DEFAULT_MAX_TOKENS, FrontEnd
from reference_server.model_store import resolve_model
from reference_server.orders import ORDERS
from sloscope import contract as contracts
from sloscope.clock import SystemClock
from sloscope.contract import Contract
from sloscope.errors import ConfigError
from sloscope.journal import JournalWriter
from sloscope.output import message
from sloscope.recorder import encode
from sloscope.units import NS_PER_S, format_ns, parse_address, parse_duration_ns

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
POLICIES = "Policies"
ENGINE = EngineConfig("builtin")
CHOICE = ENGINE.policies
ENGINE_EXIT_S = 5.0
MIN_CONTEXT = 16
MAX_COUNT = 1 << 31  # of blocks, tokens, requests
BACKLOG = 2048
SEND_BUFFER = 16384  # bytes; the kernel doubles it, and some 130 tokens fill that
LOST_GRACE_S = 1.0  # how long /health still answers after the engine is gone


@app.command()
def serve(
    model: str = typer.Option(
        ENGINE.model, help="builtin, builtin-14m, smollm2, a GGUF file or a directory in Hugging Face's layout."
    ),
    listen: str = typer.Option("127.0.0.1:8000", help="HOST:PORT; without a host 127.0.0.1; port 0 takes a free one."),
    events: Path | None = typer.Option(None, help="Events directory for the journal; without it nothing is recorded."),
    contract: Path | None = typer.Option(None, help="SLO contract (TOML); unknown classes are then refused."),
    goodput: str | None = typer.Option(None, help="A contract as limits in ms: 'ttft:300 itl_max:30'."),
    max_batch: int = typer.Option(ENGINE.slots, min=1, max=1024, help="Requests in one iteration."),
    max_waiting: int = typer.Option(
        ENGINE.max_waiting, min=1, help="Requests that may wait; one more is refused with 429."
    ),
    max_context: int = typer.Option(
        ENGINE.max_context, min=0, help="Tokens of prompt and answer together; 0: what the model knows."
    ),
    kv_blocks: int = typer.Option(
        ENGINE.kv_blocks, min=0, help="KV blocks of the pool; 0: full context for the whole batch."
    ),
    block_tokens: int = typer.Option(ENGINE.block_tokens, min=1, help="Tokens in a KV block."),
    prefix_reuse: bool = typer.Option(
        ENGINE.prefix_reuse, "--prefix-reuse", help="Use the KV of an equal beginning again."
    ),
    prefill_tokens: int = typer.Option(
        CHOICE.prefill_tokens, min=0, help="Prompt tokens run in one iteration; 0: whole prompts."
    ),
    prefill_slack: bool = typer.Option(
        CHOICE.prefill_slack,
        "--prefill-slack",
        help="As many prompt tokens as the gap limits of running sequences leave time for; at most --prefill-tokens.",
    ),
    prefill_gap: str = typer.Option(
        format_ns(CHOICE.prefill_gap_ns),
        help="With --prefill-slack: the gap that is kept for running sequences which declare no limit.",
    ),
    order: str = typer.Option(CHOICE.order, help=f"Who is next: {', '.join(ORDERS)}.", rich_help_panel=POLICIES),
    lanes: str = typer.Option(
        ",".join(CHOICE.lanes),
        help="Classes by priority, the most urgent first: 'interactive,batch'.",
        rich_help_panel=POLICIES,
    ),
    lane_wait: str = typer.Option(
        format_ns(CHOICE.lane_wait_ns), help="After so long a lower lane's next goes first.", rich_help_panel=POLICIES
    ),
    unit_prompt: float = typer.Option(
        CHOICE.unit_prompt, min=0, help="Service units of a prompt token.", rich_help_panel=POLICIES
    ),
    unit_output: float = typer.Option(
        CHOICE.unit_output, min=0, help="Service units of an output token.", rich_help_panel=POLICIES
    ),
    quantum: float = typer.Option(
        CHOICE.quantum, min=1, help="Service units that drr gives a tenant in a round.", rich_help_panel=POLICIES
    ),
    longest_wait: str = typer.Option(
        format_ns(CHOICE.longest_wait_ns),
        help="With edf: when a request without a deadline is due.",
        rich_help_panel=POLICIES,
    ),
    tenant_weights: str = typer.Option(
        "", help="Shares of tenants for vtc and drr: 'gold=4,free=1'; others have 1.", rich_help_panel=POLICIES
    ),
    admission: str = typer.Option(
        CHOICE.admission, help="none, or deadline: refuse with 429 what would come too late.", rich_help_panel=POLICIES
    ),
    admission_doubt: float = typer.Option(
        CHOICE.admission_doubt,
        min=0.01,
        max=0.99,
        help="The chance to be in time below which deadline admission refuses.",
        rich_help_panel=POLICIES,
    ),
    reservation: str = typer.Option(
        CHOICE.reservation,
        help="KV promised at admission: full (prompt and max_tokens), optimistic, or estimate (see --lengths).",
        rich_help_panel=POLICIES,
    ),
    lengths: Path | None = typer.Option(
        None,
        help="Output lengths: the JSON of `sloscope query survival_curve`; read again when it is replaced.",
        rich_help_panel=POLICIES,
    ),
    lengths_by: str = typer.Option(
        CHOICE.lengths_by, help="What a cohort of the length table is: class or tenant.", rich_help_panel=POLICIES
    ),
    length_level: float = typer.Option(
        CHOICE.length_level,
        min=0.01,
        max=0.999,
        help="Quantile of the remaining length that KV is kept for: by --reservation estimate, and where --admission "
        "deadline asks whether there will be room.",
        rich_help_panel=POLICIES,
    ),
    cost_model: Path | None = typer.Option(
        None, help="Step times to begin with: what `sloscope model fit` writes.", rich_help_panel=POLICIES
    ),
    calibrate: bool = typer.Option(
        ENGINE.calibrate,
        "--calibrate",
        help="Measure the ceilings of this machine before serving, for the step_work question.",
    ),
    default_max_tokens: int = typer.Option(
        DEFAULT_MAX_TOKENS, min=1, help="Answer length when the request does not say, tokens."
    ),
    max_undelivered: int = typer.Option(
        ENGINE.max_undelivered,
        min=0,
        help="Output tokens that a reader may be behind; then its sequence pauses. 0: it never does.",
    ),
    slow_reader_after: str = typer.Option(
        format_ns(ENGINE.slow_reader_ns), help="A paused reader that takes nothing for so long is cut off."
    ),
    send_buffer: int = typer.Option(
        SEND_BUFFER,
        min=0,
        max=1 << 30,
        help="Kernel send buffer of a connection, bytes: what it has taken counts as delivered. 0: the kernel's own, "
        "megabytes.",
    ),
    threads: int = typer.Option(0, min=0, max=512, help="torch threads; 0: cores - 1, at least 1."),
    dtype: str = typer.Option(ENGINE.dtype, help="float32 or bfloat16."),
    device: str = typer.Option(ENGINE.device, help="cpu or cuda."),
    drain: str = typer.Option("10s", help="At SIGTERM, how long running requests may go on; a second signal ends it."),
    allow_faults: bool = typer.Option(False, "--allow-faults", help="Obey x-sloscope-fault and POST /faults."),
) -> None:
    """Run the instrumented reference server (OpenAI-compatible)."""
    drain_ns = parse_duration_ns(drain, "--drain")
    if 0 < max_context < MIN_CONTEXT:
        raise ConfigError(f"--max-context: {max_context} tokens; accepted: 0, or {MIN_CONTEXT} and more")
    for flag, count in (
        ("--max-waiting", max_waiting), ("--max-context", max_context), ("--kv-blocks", kv_blocks),
        ("--block-tokens", block_tokens), ("--prefill-tokens", prefill_tokens),
        ("--default-max-tokens", default_max_tokens), ("--max-undelivered", max_undelivered),
    ):  # fmt: skip
        if count > MAX_COUNT:
            raise ConfigError(f"{flag}: {count}; accepted: at most {MAX_COUNT}")
    if 0 < kv_blocks * block_tokens < MIN_CONTEXT:
        raise ConfigError(
            f"--kv-blocks: {kv_blocks} of {block_tokens} tokens; accepted: 0, or room for {MIN_CONTEXT} tokens and more"
        )
    slow_reader_ns = parse_duration_ns(slow_reader_after, "--slow-reader-after")
    resolve_model(model)
    promised = _contract(contract, goodput)
    policies = PolicyChoice(
        order=order,
        lanes=_names(lanes, "--lanes"),
        lane_wait_ns=parse_duration_ns(lane_wait, "--lane-wait"),
        unit_prompt=unit_prompt,
        unit_output=unit_output,
        quantum=quantum,
        longest_wait_ns=parse_duration_ns(longest_wait, "--longest-wait"),
        tenant_weights=_weights(tenant_weights),
        admission=admission,
        admission_doubt=admission_doubt,
        reservation=reservation,
        lengths=str(lengths) if lengths is not None else "",
        lengths_by=lengths_by,
        length_level=length_level,
        prefill_tokens=prefill_tokens,
        prefill_slack=prefill_slack,
        prefill_gap_ns=parse_duration_ns(prefill_gap, "--prefill-gap"),
        cost_model=str(cost_model) if cost_model is not None else "",
    )
    assemble(policies)  # says what is wrong with them before anything starts
    for note in notes_on(policies, promised):
        message(f"note: {note}")
    if unknown := set(policies.lanes) - set(promised.classes if promised else policies.lanes):
        known = ", ".join(promised.classes) if promised else ""
        raise ConfigError(f"--lanes: class {sorted(unknown)[0]!r} is not in the contract; accepted: {known}")
    # Listening starts when the engine is ready; the address is taken before anything else is started.
    sock = _bind(listen, send_buffer)
    clock = SystemClock()
    # Opened here, so that a directory that cannot be used is said before anything starts; written to by a thread.
    journal = JournalWriter(events, "engine", clock, encode) if events is not None else None
    config = EngineConfig(
        model=model,
        slots=max_batch,
        max_context=max_context,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        max_waiting=max_waiting,
        max_undelivered=max_undelivered,
        slow_reader_ns=slow_reader_ns,
        prefix_reuse=prefix_reuse,
        policies=policies,
        calibrate=calibrate,
        threads=threads or max(1, len(os.sched_getaffinity(0)) - 1),
        dtype=dtype,
        device=device,
        events=str(events) if events is not None else "",
    )
    front_end = FrontEnd(
        clock,
        promised,
        (lambda: journal) if journal is not None else None,
        slow_reader_ns=slow_reader_ns,
        default_max_tokens=default_max_tokens,
        allow_faults=allow_faults,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(front_end, config, sock, drain_ns / NS_PER_S))
    finally:
        front_end.close_journal()
        if journal is not None:
            journal.close()
    raise typer.Exit(code)


def _contract(path: Path | None, goodput: str | None) -> Contract | None:
    if path is not None and goodput is not None:
        raise ConfigError("--goodput: given together with --contract; accepted: one of them")
    if path is not None:
        return contracts.load(path)
    return contracts.from_shorthand(goodput) if goodput is not None else None


def notes_on(policies: PolicyChoice, promised: Contract | None) -> Iterator[str]:
    """What was asked for and can do nothing, or not what one may think."""
    default = PolicyChoice()
    if policies.order not in ("vtc", "drr"):
        for flag, is_given in (
            ("--tenant-weights", bool(policies.tenant_weights)),
            ("--quantum", policies.quantum != default.quantum),
        ):
            if is_given:
                yield f"{flag} does nothing with --order {policies.order}; vtc and drr tell tenants apart"
    by_deadline = [
        flag
        for flag, is_given in (
            ("--admission deadline", policies.admission == "deadline"),
            ("--order edf", policies.order == "edf"),
        )
        if is_given
    ]
    has_deadline = promised is not None and any(row.limits.ttft_ns is not None for row in promised.classes.values())
    if by_deadline and not has_deadline:
        yield (
            f"{by_deadline[0]}: no class has a ttft limit (--contract or --goodput gives one), so only requests with "
            "x-slo-ttft-ms have a deadline"
        )
    if policies.lanes and promised is None:
        yield "--lanes: without --contract every request is of one class, and so in one lane"
    if policies.admission == "deadline" and not policies.lengths:
        yield "without --lengths an answer counts as long as its max_tokens; waits look longer than they are"


def _names(text: str, field: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"{field}: {text!r}; accepted: different names, joined by commas")
    return names


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in text.split(",") if text else ():
        name, _, number = item.strip().partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or name in weights or not LEAST <= weight <= MOST:
            accepted = f"each tenant once as TENANT=NUMBER from {LEAST:g} to {MOST:g}, joined by commas"
            raise ConfigError(f"--tenant-weights: {item.strip()!r}; accepted: {accepted}")
        weights[name] = weight
    return weights


def _bind(listen: str, send_buffer: int) -> socket.socket:
    host, port = parse_address(listen, "--listen")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _not_free(listen, error) from None
    return sock


def _not_free(address: str, error: OSError) -> ConfigError:
    return ConfigError(f"--listen: {address!r}: {error.strerror}; accepted: a free address of this host")


class EngineProcess:
    """The child. It ends when its socket closes; `stop` makes sure."""

    def __init__(self, config: EngineConfig) -> None:
        self.sock, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reference_server.engine_process", str(theirs.fileno()), config.to_json()],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self) -> int:
        """Its exit code."""
        try:
            return await asyncio.to_thread(self._process.wait, ENGINE_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)


async def _run(front_end: FrontEnd, config: EngineConfig, sock: socket.socket, drain_s: float) -> int:
    """Exit code: 0 after a signal, 1 when the engine died. ConfigError when it could not start."""
    signalled = asyncio.Event()
    hurried = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurried if signalled.is_set() else signalled).set())
    process = EngineProcess(config)
    await front_end.connect(process.sock)
    engine = front_end.engine
    try:
        await _first_of(engine.ready, signalled.wait(), engine.lost.wait())
        if engine.ready.done():
            word = engine.ready.result()
            if word["op"] == "failed":
                raise ConfigError(word["message"])
            front_end.on_ready(word)
            return await _serve(front_end, process, sock, signalled, hurried, drain_s)
        if signalled.is_set():
            return 0
        message(f"error: the engine process ended before it was ready (exit code {await process.stop()})")
        return 1
    finally:
        engine.close()
        await process.stop()
        sock.close()


async def _serve(
    front_end: FrontEnd,
    process: EngineProcess,
    sock: socket.socket,
    signalled: asyncio.Event,
    hurried: asyncio.Event,
    drain_s: float,
) -> int:
    host, port = sock.getsockname()[:2]
    try:
        # Someone may have begun to listen since our bind, and uvloop would not say so.
        sock.listen(BACKLOG)
    except OSError as error:
        raise _not_free(f"{host}:{port}", error) from None
    server = make_server(make_app(front_end), BACKLOG)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    background = [asyncio.create_task(front_end.tend_journal()), asyncio.create_task(front_end.probe_loop())]
    # What is alive now stays: collections in mid-run walk the requests only.
    gc.collect()
    gc.freeze()
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    message(f"serving {front_end.model} on http://{f'[{host}]' if ':' in host else host}:{port}")
    lost = front_end.engine.lost
    await _first_of(signalled.wait(), lost.wait(), serving)
    front_end.stopping = True
    if lost.is_set():
        code = await process.stop()
        message(f"error: the engine process ended (exit code {code}); running requests get an error")
        front_end.fail_all("the engine process is gone")
        await _first_of(asyncio.sleep(LOST_GRACE_S), signalled.wait())
    else:
        if front_end.live:
            message(f"{len(front_end.live)} requests have {drain_s:g} s to end; the same signal again ends them now")
        await _first_of(_idle(front_end), hurried.wait(), lost.wait(), asyncio.sleep(drain_s))
        front_end.fail_all("the server is stopping")
        await _first_of(_idle(front_end), asyncio.sleep(1.0))
    for live in list(front_end.live.values()):
        live.cut()  # does not read: waiting longer would not help
    server.should_exit = True
    await serving
    for task in background:
        task.cancel()
    return 1 if lost.is_set() else 0


async def _idle(front_end: FrontEnd) -> None:
    while front_end.live:
        await asyncio.sleep(0.01)


async def _first_of(*waits: object) -> None:
    """Returns when the first is done; those that were only waited for are dropped, tasks and futures go on."""
    own = [wait for wait in waits if asyncio.iscoroutine(wait)]
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for wait, task in zip(waits, tasks, strict=True):
        if wait in own:
            task.cancel()
