"""An observer that raises: the stream goes on, and its request ends once, in metrics and journal alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exporter import families, observation
from tests.exporter.harness import (
    DONE,
    answering,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
)

PROBLEMS = "sloscope_parse_problems_total"
LOST = ("unfinished", "recorder_lost")


def test_what_the_observer_raises_is_counted_and_the_stream_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret text of a prompt")

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            for method in ("forwarded", "understand", "begin", "response_started", "ended"):
                with monkeypatch.context() as patch:
                    patch.setattr(observation.Observation, method, broken)
                    assert (await b.ask()).body == chunked(event(), finish(), DONE)
            assert b.total(PROBLEMS, problem="observer_error") >= 4

    run(test())
    printed = capsys.readouterr().err
    assert "ZeroDivisionError" in printed and "secret" not in printed


def raising(*_: object, **__: object) -> Any:
    raise ZeroDivisionError


BREAKS = {  # where it raises → the end, and how many receipts the journal has
    "the receipts cannot be recorded": (observation.StreamRecord, "chunks", LOST, 0),
    "the outcome cannot be told": (observation.StreamRecord, "classify", LOST, 2),
    "what the stream says cannot be told": (observation.StreamRecord, "ended", LOST, 2),
    "the request cannot be summarised": (observation.StreamRecord, "summary", LOST, 2),
    "its gaps cannot be counted": (families, "event_gaps_ns", ("completed", ""), 2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_whatever_raises_at_its_end_the_request_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    owner, broken, (outcome, reason), receipts = BREAKS[name]

    async def test() -> None:
        async with bench(tmp_path, answering(event(), event(), finish(), DONE)) as b:
            with monkeypatch.context() as patch:
                patch.setattr(owner, broken, raising)
                assert (await b.ask()).body == chunked(event(), event(), finish(), DONE)
                assert await b.end() == (outcome, reason)
            assert b.check_identity() == 1
            assert b.total("sloscope_sidecar_inflight_requests") == 0
            assert b.total("sloscope_sidecar_requests_total", outcome=outcome, reason=reason) == 1
            assert b.total(PROBLEMS, problem="observer_error") == 1
            assert sum(len(chunks["t_ns"]) for chunks in b.records("chunks")) == receipts
            assert not b.plane.watch.active
            await b.ask()
            assert [end["outcome"] for end in await b.ends(2)] == [outcome, "completed"]

    run(test())


def test_at_the_end_of_a_drain_one_that_raises_keeps_no_other_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering()) as b:
            watch = b.plane.watch
            for arrived_ns in range(3):  # their connections are gone, as after an error in the plane itself
                observation.Observation(watch, {}, "/v1/completions", arrived_ns).begin(None, None, "", None)
            broken, *others = watch.active
            monkeypatch.setattr(watch.active[broken], "ended", raising)
        assert {record["request_id"] for record in b.records("end")} == set(others)
        assert b.total(PROBLEMS, problem="observer_error") == 1

    run(test())


def test_a_request_that_cannot_be_read_is_offered_once_and_ends_as_its_answer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            with monkeypatch.context() as patch:
                patch.setattr(observation, "_count", raising)
                await b.ask(b'{"model":"m","stream":true}')
            assert await b.end() == ("completed", "")
            (begin,) = b.records("begin")
            assert begin["limits"] and begin["arrived_ns"] and "model" not in begin
            assert b.check_identity() == 1
            assert b.total("sloscope_sidecar_requests_total", outcome="completed") == 1
            assert b.total("sloscope_sidecar_inflight_requests") == 0
            assert b.total(PROBLEMS, problem="observer_error") == 1

    run(test())


@pytest.mark.parametrize(("sent", "recorded"), [("12", 12), ("²", None), ("1234567890", None), ("-1", None)])
def test_a_stop_after_that_is_no_small_number_is_left_out(tmp_path: Path, sent: str, recorded: int | None) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            client = await b.connect()
            asking = request(b'{"model":"m","stream":true}', "x-sloscope-stop-after: @")
            await client.send(asking.replace(b"@", sent.encode("latin-1")))
            await b.ends()
            await client.close()
            (begin,) = b.records("begin")
            assert (begin["model"], begin.get("stop_after")) == ("m", recorded)
            assert b.total(PROBLEMS, problem="observer_error") == 0

    run(test())
