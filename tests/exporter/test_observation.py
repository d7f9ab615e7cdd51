"""What the sidecar records and counts of a request, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from exporter import observation
from sloscope import recorder
from sloscope.ids import new_request_id
from sloscope.journal import Tail, journal_files, read_journal
from tests.exporter.harness import (
    ASK,
    DONE,
    STREAM_HEAD,
    Bench,
    Seen,
    answering,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
    sse,
    usage,
)

CONTRACT = """
version = 1
default_class = "chat"
[classes.chat]
ttft = "300ms"
itl_max = "30ms"
[classes.batch]
e2e = "5s"
streaming = "optional"
"""
PROBLEMS = "sloscope_parse_problems_total"


def test_begin_is_on_disk_before_the_upstream_gets_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "BEGIN_PATIENCE_S", 10)  # a busy machine may need more than 5 ms
    found: list[list[str]] = []

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        ids = [
            record["request_id"]
            for path in journal_files(tmp_path / "events")
            for record in read_journal(Tail(path))
            if record["kind"] == "begin"
        ]
        found.append(ids)
        assert seen.header("x-sloscope-request-id") is not None
        writer.write(STREAM_HEAD + chunked(event(), finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            sent = [(await b.ask()).header("x-sloscope-request-id") for _ in range(20)]
            assert [ids[-1] for ids in found] == sent
            assert b.total("sloscope_journal_late_begins_total") == 0

    run(test())


def test_a_disk_that_does_not_answer_delays_a_request_by_five_milliseconds_and_is_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.until(lambda: b.plane.recorder._writer is not None)
            writer = b.plane.recorder._writer
            assert writer is not None
            flush, answers = writer.flush, threading.Event()

            def silent_flush() -> bool:
                return answers.wait(30) and flush()

            writer.flush = silent_flush  # type: ignore[method-assign]
            began = asyncio.get_running_loop().time()
            answer = await b.ask()
            took = asyncio.get_running_loop().time() - began
            assert answer.status == 200 and took >= 0.0045  # a timer may fire within its resolution
            assert b.total("sloscope_journal_late_begins_total") == 1
            assert b.records("begin") == []
            answers.set()
            assert await b.end() == ("completed", "")  # late, and not lost

    run(test())


def test_stamps_are_taken_at_the_read_before_forwarding_and_parsing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_ns: list[int] = []

    def loads(data: bytes) -> Any:
        parsed_ns.append(time.monotonic_ns())
        return orjson.loads(data)

    class TimedRecord(observation.StreamRecord):
        def __init__(self, _: object, max_body_bytes: int) -> None:
            super().__init__(loads, max_body_bytes)

    monkeypatch.setattr(observation, "StreamRecord", TimedRecord)

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.ask()
            await b.ends()
            (chunks,) = b.records("chunks")
            (received,), (forwarded,) = chunks["t_ns"], chunks["forwarded_ns"]
            assert received <= forwarded <= parsed_ns[0]

    run(test())


def test_what_the_head_of_a_response_says_is_understood_after_it_was_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    understood_ns: list[int] = []

    def slow(method: Any) -> Any:
        def delayed(*arguments: Any) -> Any:
            understood_ns.append(time.monotonic_ns())
            time.sleep(0.2)
            return method(*arguments)

        return delayed

    for name in ("response_started", "timed"):
        monkeypatch.setattr(observation.Observation, name, slow(getattr(observation.Observation, name)))

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        head = STREAM_HEAD.replace(b"\r\n", b"\r\nserver-timing: gateway;dur=40\r\n", 1)
        writer.write(head + chunked(event(), finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            await b.ask()
            (end,) = await b.ends()
            assert (end["http_status"], end["server_timing"]) == (200, {"gateway": 40_000_000})
            (chunks,) = b.records("chunks")
            (received,), (forwarded,) = chunks["t_ns"], chunks["forwarded_ns"]
            assert len(understood_ns) == 2 and received <= forwarded <= min(understood_ns)
            # The 400 ms of the two are not in it.
            (begin,) = b.records("begin")
            assert b.total("sloscope_sidecar_added_seconds_sum") <= (min(understood_ns) - begin["arrived_ns"]) / 1e9

    run(test())


OUTCOMES = {
    "usage and DONE": ([event(), event(), finish(), usage(9), DONE], ("completed", "")),
    "finish reason without DONE": ([event(), finish()], ("completed", "")),
    "DONE without a finish reason": ([event(), DONE], ("completed", "")),
    "neither": ([event(), event()], ("failed", "truncated")),
    "an error event after output": (
        [event(), sse({"error": {"message": "x", "code": 500}})],
        ("failed", "in_band_error"),
    ),
    "aborted by the engine": ([event(), finish("abort"), DONE], ("failed", "in_band_error")),
    "nothing": ([], ("failed", "empty_stream")),
    "only a role": (
        [sse({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}), DONE],
        ("failed", "empty_stream"),
    ),
    "rubbish": ([b"data: {broken\n\n"], ("failed", "bad_stream")),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_outcome_follows_the_end_of_the_stream(tmp_path: Path, name: str) -> None:
    events, expected = OUTCOMES[name]

    async def test() -> None:
        async with bench(tmp_path, answering(*events)) as b:
            await b.ask()
            assert await b.end() == expected
            outcome, reason = expected
            assert b.total("sloscope_sidecar_requests_total", outcome=outcome, reason=reason) == 1
            assert b.check_identity() == 1

    run(test())


@pytest.mark.parametrize(
    ("status", "expected"),
    [(429, "rejected"), (503, "rejected"), (500, "http_error"), (504, "timeout"), (404, "http_error")],
)
def test_an_error_status_is_a_failure_of_its_own_kind(tmp_path: Path, status: int, expected: str) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % status)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert (await b.ask()).status == status
            (end,) = await b.ends()
            assert (end["outcome"], end["reason"], end["http_status"]) == ("failed", expected, status)

    run(test())


def test_tokens_come_from_usage_and_are_assumed_only_without_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), event(), finish(), usage(9), DONE)) as b:
            await b.ask()
            (end,) = await b.ends()
            assert (end["output_tokens"], end["token_source"], end["prompt_tokens"]) == (9, "usage", 7)
            assert b.total("sloscope_sidecar_output_tokens_total", qualified="true") == 9
            assert b.total("sloscope_sidecar_itl_seconds_count") == 0  # 9 tokens in 2 events: which is not known
            assert b.total("sloscope_sidecar_icl_seconds_count") == 1
        async with bench(tmp_path / "second", answering(event(), event(), finish(), DONE)) as b:
            await b.ask()
            (end,) = await b.ends()
            assert (end["output_tokens"], end["token_source"]) == (2, "assumed_one")

    run(test())


def test_continuous_usage_gives_tokens_to_events(tmp_path: Path) -> None:
    def counted(total: int) -> bytes:
        choice = {"index": 0, "delta": {"content": "x"}}
        return sse({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": total}})

    async def test() -> None:
        async with bench(tmp_path, answering(counted(1), counted(4), counted(6), finish(), usage(6), DONE)) as b:
            await b.ask()
            await b.ends()
            (chunks,) = b.records("chunks")
            assert chunks["tokens"] == [1, 3, 2]  # 1, 4 - 1, 6 - 4
            # Gaps between 6 tokens: two between events, and 2 + 1 of zero within them.
            assert b.total("sloscope_sidecar_itl_seconds_count") == 5

    run(test())


def test_every_choice_has_its_own_receipts_and_finish_reason(tmp_path: Path) -> None:
    both = sse({"choices": [{"index": i, "delta": {"content": "x"}} for i in (0, 1)]})
    events = [both, event(index=1), finish("stop", 0), finish("length", 1), DONE]

    async def test() -> None:
        async with bench(tmp_path, answering(*events)) as b:
            await b.ask(b'{"model":"m","stream":true,"n":2}')
            (end,) = await b.ends()
            (begin,), (chunks,) = b.records("begin"), b.records("chunks")
            assert begin["n_choices"] == 2
            assert chunks["choice"] == [0, 1, 1]
            assert end["finish_reason"] == ["stop", "length"]
            assert end["outcome"] == "completed"

    run(test())


def test_one_choice_of_two_without_an_end_is_truncated(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), event(index=1), finish("stop", 0))) as b:
            await b.ask(b'{"model":"m","stream":true,"n":2}')
            assert await b.end() == ("failed", "truncated")

    run(test())


def test_a_whole_answer_that_failed_has_no_e2e(tmp_path: Path) -> None:
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "hel"}, "finish_reason": "abort"}]}).encode()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            await b.ask(b'{"model":"m"}')
            assert await b.end() == ("failed", "in_band_error")
            assert b.total("sloscope_sidecar_e2e_seconds_count") == 0

    run(test())


def test_an_answer_that_does_not_stream_has_usage_and_no_first_token(tmp_path: Path) -> None:
    body = json.dumps(
        {
            "choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 5},
        }
    ).encode()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)

    async def test() -> None:
        async with bench(tmp_path, script, contract=CONTRACT, contract_is_shorthand=False) as b:
            assert (await b.ask(b'{"model":"m"}')).body == body
            await b.ask(b'{"model":"m"}', "x-slo-class: batch")
            for end in await b.ends(2):
                assert (end["outcome"], end["output_tokens"], end["finish_reason"]) == ("completed", 5, ["stop"])
            assert b.records("chunks") == []
            assert [begin["streaming"] for begin in b.records("begin")] == [False, False]
            assert b.total("sloscope_sidecar_ttft_seconds_count") == 0
            # chat promised a first token and got none; batch may answer as a whole, within 5 s.
            qualified = "sloscope_sidecar_requests_qualified_total"
            assert (b.total(qualified, **{"class": "chat"}), b.total(qualified, **{"class": "batch"})) == (0, 1)
            assert b.total("sloscope_sidecar_contract_misses_total", obligation="ttft") == 1

    run(test())


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_stream_is_forwarded_untouched_and_understood(tmp_path: Path, coding: str, compress: Any) -> None:
    raw = compress(event() + event() + finish() + usage(2) + DONE)

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", f"\r\ncontent-encoding: {coding}\r\n\r\n".encode()))
        for at in range(0, len(raw), 11):
            writer.write(b"%x\r\n%b\r\n" % (len(raw[at : at + 11]), raw[at : at + 11]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()
            assert answer.header("content-encoding") == coding
            (end,) = await b.ends()
            assert (end["outcome"], end["output_tokens"], end["token_source"]) == ("completed", 2, "usage")

    run(test())


@pytest.mark.parametrize(("coding", "problem"), [("br", "unknown_content_encoding"), ("deflate", "bad_compression")])
def test_a_stream_that_cannot_be_decoded_is_judged_by_http_alone(tmp_path: Path, coding: str, problem: str) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", f"\r\ncontent-encoding: {coding}\r\n\r\n".encode()))
        writer.write(chunked(b"\x8b\x02\x80not what it says", b"\x03"))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert (await b.ask()).body == chunked(b"\x8b\x02\x80not what it says", b"\x03")
            (end,) = await b.ends()
            assert end["outcome"] == "completed" and "token_source" not in end and "output_tokens" not in end
            assert b.total(PROBLEMS, problem=problem) == 1

    run(test())


def test_a_stream_that_claims_to_be_gzip_and_is_not_is_a_bad_stream(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"))
        writer.write(chunked(event() + finish() + DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            await b.ask()
            assert await b.end() == ("failed", "bad_stream")
            assert b.total(PROBLEMS, problem="bad_compression") == 1

    run(test())


def test_a_stream_that_the_drain_time_cuts_failed_by_the_deadline_of_a_sidecar_that_is_alive(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        await asyncio.sleep(60)

    async def test() -> None:
        async with bench(tmp_path, script) as b:  # it drains for 200 ms when the block is left
            client = await b.connect()
            await client.send(request())
            await client.reader.readuntil(b"\n\n")
            b.clients.remove(client)  # it stays, and waits for more
        await client.close()
        (end,) = b.records("end")
        assert (end["outcome"], end["reason"], end["output_tokens"]) == ("failed", "timeout", 1)
        assert b.total("sloscope_sidecar_requests_total", outcome="failed", reason="timeout") == 1

    run(test())


def test_an_unknown_class_is_forwarded_under_a_name_of_its_own_and_never_qualifies(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            assert (await b.ask(ASK, "x-slo-class: gold")).status == 200
            await b.ends()
            (begin,) = b.records("begin")
            assert begin["class"] == "_unknown"
            labels = {"class": "_unknown"}
            assert b.total("sloscope_sidecar_requests_total", outcome="completed", **labels) == 1
            assert b.total("sloscope_sidecar_requests_qualified_total", **labels) == 0
            assert b.total("sloscope_sidecar_contract_misses_total", obligation="class") == 1

    run(test())


def test_limits_of_the_request_itself_are_in_force_and_bad_ones_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.ask(ASK, "x-slo-ttft-ms: 0.001")
            await b.ask(ASK, "x-slo-ttft-ms: soon")
            await b.ends(2)
            own, bad = b.records("begin")
            assert own["own_limits"] == {"ttft_ns": 1000} and own["limits"]["ttft_ns"] == 1000
            assert "own_limits" not in bad and bad["limits"]["ttft_ns"] == 300_000_000
            assert b.total(PROBLEMS, problem="bad_limit_header") == 1
            assert b.total("sloscope_sidecar_contract_misses_total", obligation="ttft") == 1
            assert b.total("sloscope_sidecar_requests_qualified_total") == 1

    run(test())


def test_a_request_id_is_believed_once(tmp_path: Path) -> None:
    mine = new_request_id()

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            header = f"x-sloscope-request-id: {mine}"
            first = await b.ask(ASK, header, "x-request-id: theirs")
            repeated = await b.ask(ASK, header)
            retried = await b.ask(ASK, header, "x-stainless-retry-count: 1")
            malformed = await b.ask(ASK, "x-sloscope-request-id: x")
            ids = [each.header("x-sloscope-request-id") for each in (first, repeated, retried, malformed)]
            assert ids[0] == mine and len({*ids}) == 4
            assert [seen.header("x-sloscope-request-id") for seen in b.upstream.seen] == ids
            await b.ends(4)
            begins = b.records("begin")
            assert [begin["request_id"] for begin in begins] == ids
            assert begins[0]["external_id"] == "theirs"
            assert [begin.get("retry_of") for begin in begins] == [None, None, mine, None]
            assert begins[2]["labels"] == {"retry_count": 1}

    run(test())


def test_a_named_retry_says_which_request_it_repeats(tmp_path: Path) -> None:
    earlier = new_request_id()

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.ask(ASK, f"x-sloscope-retry-of: {earlier}")
            await b.ask(ASK, "x-sloscope-retry-of: rubbish")
            await b.ends(2)
            assert [begin.get("retry_of") for begin in b.records("begin")] == [earlier, None]

    run(test())


def test_a_flood_of_tenants_fills_one_label(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE), max_label_values=4) as b:
            for number in range(9):
                await b.ask(ASK, f"x-slo-tenant: t{number}")
            await b.ends(9)
            assert b.records("begin")[8]["tenant"] == "t8"  # the record keeps what the label folds
            # Four values: t0 to t3; t4 to t8 are five.
            assert b.total("sloscope_sidecar_requests_offered_total", tenant="other") == 5
            assert b.total("sloscope_tenant_overflow_total") == 5
            assert b.check_identity() == 9

    run(test())


def test_a_body_above_the_limit_is_forwarded_unread(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE), inspect_limit=1024) as b:
            large = b'{"model":"m","prompt":"' + b"x" * 300_000 + b'"}'
            assert (await b.ask(large)).status == 200
            client = await b.connect()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            await client.send(head + chunked(*(large[at : at + 999] for at in range(0, len(large), 999))))
            assert (await client.response()).status == 200
            assert b.upstream.seen[0].body == large
            await b.ends(2)
            assert ["model" in begin for begin in b.records("begin")] == [False, False]
            assert b.total(PROBLEMS, problem="request_above_inspect_limit") == 2

    run(test())


def test_events_under_another_content_type_are_receipts_as_they_are_at_the_client(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        head = STREAM_HEAD.replace(b"text/event-stream", b"text/plain")
        assert head != STREAM_HEAD
        writer.write(head + chunked(event(), event(), finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            await b.ask()
            (end,) = await b.ends()
            assert end["outcome"] == "completed"
            assert sum(len(chunks["t_ns"]) for chunks in b.records("chunks")) == 2

    run(test())


def test_a_request_that_was_not_read_may_have_streamed_and_is_held_to_every_limit(tmp_path: Path) -> None:
    contract = 'version = 1\n[classes.any]\nttft = "1ns"\ne2e = "1h"\nstreaming = "optional"\n'
    large = b'{"model":"m","stream":true,"prompt":"' + b"x" * 3000 + b'"}'

    async def test() -> None:
        stream = answering(event(), finish(), DONE)
        async with bench(tmp_path, stream, inspect_limit=1024, contract=contract, contract_is_shorthand=False) as b:
            await b.ask(large)
            await b.ends()
            (begin,) = b.records("begin")
            assert not {"streaming", "n_choices"} & begin.keys()  # unknown is left out, never false
            assert b.total("sloscope_sidecar_contract_misses_total", obligation="ttft") == 1

    run(test())


def test_no_text_of_prompt_or_answer_is_in_the_journal(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event("tell-nobody"), finish(), DONE)) as b:
            await b.ask(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"my-secret"}]}')
            await b.ends()

    run(test())
    text = b"".join(path.read_bytes() for path in journal_files(tmp_path / "events"))
    assert b'"m"' in text and b"secret" not in text and b"tell-nobody" not in text


def test_offered_is_ended_plus_open_at_every_snapshot(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(5):
            writer.write(b"%x\r\n%b\r\n" % (len(event()), event()))
            await asyncio.sleep(0.01)
        writer.write(chunked(finish(), DONE))

    async def leave(b: Bench) -> None:
        client = await b.connect()
        await client.send(request())
        await client.reader.readuntil(b"\n\n")
        await client.close()

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            asked: list[asyncio.Task[Any]] = []
            seen_open = 0.0
            for _ in range(10):
                asked += [asyncio.create_task(b.ask()), asyncio.create_task(leave(b))]
                await asyncio.sleep(0.007)
                b.check_identity()
                seen_open = max(seen_open, b.total("sloscope_sidecar_inflight_requests"))
            await asyncio.gather(*asked)
            await b.ends(20)
            assert seen_open > 0
            assert b.check_identity() == 20
            assert b.total("sloscope_sidecar_requests_total", outcome="completed") == 10
            assert b.total("sloscope_sidecar_requests_total", outcome="cancelled", reason="disconnect") == 10
            assert b.total("sloscope_sidecar_inflight_requests") == 0

    run(test())


def test_receipts_of_a_long_stream_are_on_disk_before_its_end(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        await release.wait()
        writer.write(chunked(event(), finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            asking = asyncio.create_task(b.ask())
            await b.until(lambda: b.records("chunks"))
            assert b.records("end") == []
            release.set()
            await asking
            await b.ends()
            assert [(chunks["ordinal0"], len(chunks["t_ns"])) for chunks in b.records("chunks")] == [(0, 1), (1, 1)]

    run(test())


def test_a_full_disk_loses_records_counted_and_no_stream(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.until(lambda: b.plane.recorder._writer is not None)
            writer = b.plane.recorder._writer
            assert writer is not None
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, writer._fd)
            os.close(full)
            assert (await b.ask()).status == 200
            # begin, chunks and end, and the anchor that is tried again before each write after the first
            await b.until(lambda: b.total("sloscope_journal_dropped_total", observer="sidecar") >= 3)
            assert b.total("sloscope_sidecar_requests_total", outcome="completed") == 1

    run(test())
