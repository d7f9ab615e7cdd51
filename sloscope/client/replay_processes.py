"""A replay in one process or in several: each sends every n-th request of one schedule, at the times of one t0.

CLOCK_MONOTONIC is one clock for all processes of a host, so nothing has to be agreed on but t0. Each has its own loop,
connections and journal file. The first process sends nothing when there are several: it shows progress, passes on a
Ctrl-C and adds up the counts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from sloscope.client.h1 import Origin
from sloscope.client.replay import Conduct, Replay, Tally, Target
from sloscope.client.schedule import Schedule, peak_rate
from sloscope.contract import Contract
from sloscope.errors import ConfigError, SloscopeError
from sloscope.units import NS_PER_S

# What one core is asked to carry where the number of processes is left to us: below the goal of 500 requests/s and
# 20,000 events/s.
_REQUESTS_PER_CORE = 400
_EVENTS_PER_CORE = 15_000
_START_PATIENCE_S = 60.0
_START_IN_NS = 200_000_000  # until every process has heard of t0
_END_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Job:
    schedule: Schedule
    contract: Contract
    target: Target
    events: Path
    drain_ns: int
    seed: int
    conduct: Conduct
    receipts: Origin | None = None
    receipts_token: str = field(default="", repr=False)

    def replay(self, schedule: Schedule) -> Replay:
        return Replay(
            schedule,
            self.contract,
            self.target,
            self.events,
            drain_ns=self.drain_ns,
            seed=self.seed,
            conduct=self.conduct,
            receipts=self.receipts,
            receipts_token=self.receipts_token,
        )


class Progress(NamedTuple):
    """Counts of requests so far. Retries are in `open`, not in `sent`."""

    sent: int = 0
    open: int = 0
    completed: int = 0
    failed: int = 0

    @classmethod
    def of(cls, running: Replay) -> Progress:
        tally = running.tally
        return cls(tally.sent - tally.retries, running.open, tally.outcomes["completed"], tally.outcomes["failed"])


Show = Callable[[Progress], None]


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_for(schedule: Schedule, cores: int) -> int:
    """As many as the busiest second and the mean flow of events ask for, at most one a core."""
    requests = peak_rate([each.offset_ns for each in schedule.requests])
    events = sum(each.output_tokens for each in schedule.requests) / max(1.0, schedule.span_ns / NS_PER_S)
    wanted = max(-(-requests // _REQUESTS_PER_CORE), -(-events // _EVENTS_PER_CORE))
    return max(1, min(cores, int(wanted)))


def run_coroutine(main: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:  # Windows has none
        return asyncio.run(main)
    return uvloop.run(main)


def run(job: Job, processes: int, show: Show | None) -> Tally:
    """The whole schedule. A first Ctrl-C ends it early, with everything that was received recorded."""
    processes = min(processes, len(job.schedule.requests))
    if processes == 1:
        return run_coroutine(_run_here(job, show))
    return _Crew(job, processes).run(show)


async def _run_here(job: Job, show: Show | None) -> Tally:
    running = job.replay(job.schedule)
    loop = asyncio.get_running_loop()
    for signum in _SIGNALS:
        loop.add_signal_handler(signum, running.interrupt)
    try:
        return await running.run(progress=None if show is None else lambda replay: show(Progress.of(replay)))
    finally:
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)


class _Member(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _Crew:
    """The processes of one run, as the first one sees them."""

    def __init__(self, job: Job, processes: int) -> None:
        self._job = job
        self._parts = processes
        self._members: list[_Member] = []
        self._stopping = False

    def run(self, show: Show | None) -> Tally:
        try:
            with _on_signals(self._stop):
                self._start()
                return self._follow(show)
        finally:
            for process, pipe in self._members:
                # A pipe that closes ends a member which still runs, as Ctrl-C would.
                pipe.close()
                process.join(_END_PATIENCE_S)
                if process.is_alive():
                    process.kill()
                    process.join()

    def _start(self) -> None:
        # Not forked: a member inherits neither loops nor threads nor the caller's signal handlers.
        context = multiprocessing.get_context("spawn")
        for number in range(self._parts):
            here, there = context.Pipe()
            part = self._job.schedule.part(number, self._parts)
            process = context.Process(target=_member, args=(there, self._job, part), daemon=True)
            process.start()
            there.close()
            self._members.append(_Member(process, here))
        until_s = time.monotonic() + _START_PATIENCE_S
        for number, (member, pipe) in enumerate(self._members):
            word = _receive(pipe) if pipe.poll(max(0.0, until_s - time.monotonic())) else None
            if isinstance(word, SloscopeError):
                raise word
            if word is None:
                raise ConfigError(
                    f"--processes: process {number + 1} of {self._parts} did not start "
                    f"(exit code {member.exitcode}); accepted: fewer processes"
                )

    def _follow(self, show: Show | None) -> Tally:
        t0_ns = time.monotonic_ns() + _START_IN_NS
        for _, pipe in self._members:
            _say(pipe, t0_ns)
        total = Tally(processes=self._parts)
        seen: dict[Connection, Progress] = {pipe: Progress() for _, pipe in self._members}
        running = set(seen)
        shown_s = time.monotonic()
        while running:
            if self._stopping:
                total.interrupted = True
                for pipe in running:
                    _say(pipe, _STOP)
                self._stopping = False
            for ready in wait(list(running), _LOOK_EVERY_S):
                assert isinstance(ready, Connection)
                word = _receive(ready)
                if isinstance(word, Progress):
                    seen[ready] = word
                    continue
                running.discard(ready)
                if isinstance(word, Tally):
                    total.add(word)
                else:
                    total.processes_lost += 1
            if show is not None and time.monotonic() - shown_s >= _LOOK_EVERY_S:
                shown_s = time.monotonic()
                show(Progress(*(sum(column) for column in zip(*seen.values(), strict=True))))
        total.scheduled = len(self._job.schedule.requests)
        return total

    def _stop(self) -> None:
        self._stopping = True


def _say(pipe: Connection, word: object) -> None:
    try:
        pipe.send(word)
    except OSError:
        pass  # it has ended; its pipe says so when it is read


def _receive(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def _on_signals(call: Callable[[], None]) -> Iterator[None]:
    before = {signum: signal.signal(signum, lambda *_: call()) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# --- in a process of its own ------------------------------------------------------------------------------------


def _member(pipe: Connection, job: Job, part: Schedule) -> None:
    # A terminal's Ctrl-C reaches every process of its group; the first one passes it on, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_coroutine(_run_part(pipe, job, part))


async def _run_part(pipe: Connection, job: Job, part: Schedule) -> None:
    try:
        running = job.replay(part)
    except SloscopeError as error:
        pipe.send(error)
        return
    pipe.send("ready")
    t0_ns = _receive(pipe)
    if not isinstance(t0_ns, int):
        return  # stopped before it began, or left alone
    loop = asyncio.get_running_loop()

    def hear() -> None:
        # Whatever comes, the end of the pipe too, means to stop.
        loop.remove_reader(pipe.fileno())
        running.interrupt()

    loop.add_reader(pipe.fileno(), hear)
    loop.add_signal_handler(signal.SIGTERM, running.interrupt)
    tally = await running.run(t0_ns, lambda replay: _say(pipe, Progress.of(replay)))
    loop.remove_reader(pipe.fileno())
    _say(pipe, tally)
