"""Much that is received at once is understood in slices: nobody else waits for it, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from exporter import observation as observation_module
from exporter.backlog import Backlog
from exporter.observation import MAX_READS, Observation, Watch
from exporter.upstream import UpstreamConnection
from sloscope.clock import FakeClock
from sloscope.contract import from_shorthand
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter, Tail, journal_files, read_journal
from sloscope.recorder import Recorder, encode
from sloscope.records import Record
from tests.exporter.harness import DONE, STREAM_HEAD, Seen, bench, event, finish, run, settings_for

CONTRACT = from_shorthand("ttft:300 itl_max:30")


class TickingClock(FakeClock):
    """Each look at it takes 50 µs."""

    def monotonic_ns(self) -> int:
        self.mono += 50_000
        return self.mono


class Turns:
    """A loop's `call_soon`, a turn at a time."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> None:
        self.waiting.append(callback)

    def turn(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()

    def to_the_last(self) -> None:
        while self.waiting:
            self.turn()


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def watch(tmp_path: Path, turns: Turns, errors: list[Exception]) -> Iterator[Watch]:
    events = tmp_path
    clock, loop = TickingClock(), asyncio.new_event_loop()
    journal = Recorder(lambda: JournalWriter(events, "sidecar", clock, encode), clock, loop)
    watch = Watch(
        settings_for(events, "", ("http://127.0.0.1:1",)),
        CONTRACT,
        MetricStore("sidecar", CONTRACT, 50),
        journal,
        clock,
    )
    watch.backlog = Backlog(turns, errors.append)
    yield watch
    watch.recorder.close()
    loop.close()


def records_of(watch: Watch, events: Path) -> list[Record]:
    """After the last of them."""
    watch.recorder.close()
    return [each for path in journal_files(events) for each in read_journal(Tail(path))]


def begun(watch: Watch) -> Observation:
    observation = Observation(watch, {}, "/v1/chat/completions", 0)
    observation.begin(orjson.dumps({"stream": True}), 0, "", None)
    observation.response_started(200, "text/event-stream", "")
    return observation


def ended(watch: Watch) -> Observation:
    """A whole answer of 1000 events that came at once, none of it understood yet."""
    observation = begun(watch)
    observation.forwarded(event("x" * 500) * 1000 + finish() + DONE, 1, 2, 3)
    observation.ended("eof", "", True, 77_000_000)
    return observation


def test_a_burst_is_understood_a_slice_a_turn_and_others_have_turns_between(
    watch: Watch, turns: Turns, errors: list[Exception]
) -> None:
    first, second = begun(watch), begun(watch)
    burst = event("x" * 500) * 1000
    first.forwarded(burst, 1, 2, 3)
    second.forwarded(burst, 1, 2, 3)
    assert (first.events, second.events) == (0, 0), "nothing in the read's own turn"
    seen = []
    while turns.waiting:
        turns.turn()
        seen.append((first.events, second.events))
    assert seen[-1] == (1000, 1000) and errors == []
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise([(0, 0), *seen])]
    assert max(steps) <= 40 and len(seen) > 50
    assert any(0 < a < 1000 and 0 < b < 1000 for a, b in seen), "one does not wait for the other's end"


def test_an_end_waits_for_what_came_before_it_and_is_that_of_its_time(
    tmp_path: Path, watch: Watch, turns: Turns, errors: list[Exception]
) -> None:
    observation = ended(watch)
    assert watch.active, "not ended yet"
    turns.to_the_last()
    assert not watch.active and errors == [] and observation.events == 1000
    ends = [each for each in records_of(watch, tmp_path) if each["kind"] == "end"]
    assert [(each["outcome"], each["output_tokens"]) for each in ends] == [("completed", 1000)]
    assert ends[0]["end_ns"] <= 77_000_000


def test_a_sidecar_that_stops_ends_such_a_request_as_it_had_ended(
    tmp_path: Path, watch: Watch, turns: Turns, errors: list[Exception]
) -> None:
    observation = ended(watch)
    observation.ended("timeout", "", False, 99_000_000)
    turns.to_the_last()
    (end,) = (each for each in records_of(watch, tmp_path) if each["kind"] == "end")
    assert (end["outcome"], end["output_tokens"]) == ("completed", 1000) and errors == []


def test_what_raises_costs_itself_only(
    watch: Watch, turns: Turns, errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    observation = begun(watch)
    receive, calls = observation._stream.receive, itertools.count()

    class Raising:
        type = observation._stream.type

        def receive_alike(self, reads: object) -> int:
            return 0

        def receive(self, t_ns: int, data: bytes) -> None:
            if next(calls) == 5:
                raise RuntimeError
            receive(t_ns, data)

    with monkeypatch.context() as patch:
        patch.setattr(observation, "_stream", Raising())
        for _ in range(MAX_READS):
            observation.forwarded(event(), 1, 2, 3)
        turns.to_the_last()
    assert [type(each) for each in errors] == [RuntimeError]
    assert observation.events == MAX_READS - 1 and not observation.is_behind


def test_a_flood_is_not_read_on_until_it_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[str] = []
    pause = UpstreamConnection.pause_reading

    def counted(self: UpstreamConnection, reason: str) -> None:
        paused.append(reason)
        pause(self, reason)

    monkeypatch.setattr(UpstreamConnection, "pause_reading", counted)
    monkeypatch.setattr(observation_module, "_FAR_BEHIND", MAX_READS)
    chunk = event("x" * 500) * 100
    body = b"%x\r\n%b\r\n" % (len(chunk), chunk) * 40
    last = finish() + DONE
    body += b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + body)
        await writer.drain()

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()
            assert answer.body == body
            assert await b.end() == ("completed", "")
            assert "observer" in paused
            assert sum(len(each["t_ns"]) for each in b.records("chunks")) == 4000

    run(test(), timeout_s=60)
