"""The same request at a second upstream: when, how often, who answers, and what becomes of the other one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.hedging import RESULTS, WINDOW_NS, Hedges, parse_hedge_after
from exporter.observation import Observation
from exporter.settings import OBSERVED
from sloscope.errors import ConfigError
from sloscope.exposition import MetricStore
from sloscope.stream_record import StreamRecord
from tests.exporter.harness import (
    ASK,
    DONE,
    STREAM_HEAD,
    Bench,
    Script,
    Seen,
    chunked,
    event,
    finish,
    request,
    run,
    sse,
    usage,
)
from tests.exporter.test_routing import beside

MS = 1_000_000
SOON = {"hedge_after": "40ms", "hedge_max_share": 1.0}
REQUESTS, WASTE = "sloscope_hedge_requests_total", "sloscope_hedge_waste_prompt_tokens_total"
ROLE = event("", delta={"role": "assistant", "content": ""})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def saying(text: str, after_s: float = 0, head_s: float = 0, *more: bytes) -> Script:
    """Head and role at once, the output later."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(head_s)
        writer.write(STREAM_HEAD + chunk(ROLE))
        await asyncio.sleep(after_s)
        writer.write(chunked(event(text), finish(), *more, DONE))

    return script


def whole(text: str, *more: bytes) -> bytes:
    return chunk(ROLE) + chunked(event(text), finish(), *more, DONE)


async def never(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Pings and no output, until the other side closes."""
    writer.write(STREAM_HEAD + chunk(ROLE))
    while True:
        writer.write(chunk(b": ping\n\n"))
        await writer.drain()
        await asyncio.sleep(0.005)


def failing(status: int, after_s: float = 0, body: bytes = b"no") -> Script:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    return script


def breaking(after_s: float, said: bytes = b"") -> Script:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        writer.write(said)
        await writer.drain()
        writer.transport.abort() if not said else writer.close()

    return script


def results(b: Bench) -> dict[str, float]:
    return {name: count for name in RESULTS if (count := b.total(REQUESTS, result=name))}


def by_attempt(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {record.get("attempt", 0): record for record in records}


# --- who answers


def test_a_faster_second_attempt_answers_whole_and_the_first_is_closed_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, never, saying("b", 0, 0, usage(1, 11)), **SOON) as (b, first, second):
            answer = await b.ask()
            assert answer.body == whole("b", usage(1, 11))
            await b.until(lambda: first.lost == [0])
            assert (len(first.seen), len(second.seen)) == (1, 1)
            assert first.seen[0].body == second.seen[0].body == ASK
            named = {seen.header("x-sloscope-request-id") for seen in (first.seen[0], second.seen[0])}
            assert named == {answer.header("x-sloscope-request-id")}
            begins, ends = by_attempt(b.records("begin")), by_attempt(await b.ends(2))
            assert begins[0]["upstream"] != begins[1]["upstream"]
            assert begins[0]["arrived_ns"] == begins[1]["arrived_ns"], "its time began when the request came"
            assert (ends[0]["outcome"], ends[0]["reason"]) == ("cancelled", "voluntary")
            assert (ends[1]["outcome"], ends[1]["output_tokens"]) == ("completed", 1)
            (chunks,) = b.records("chunks")
            assert chunks["attempt"] == 1 and chunks["t_ns"][0] - begins[0]["arrived_ns"] >= 40 * MS
            assert results(b) == {"won": 1} and b.total(WASTE) == 11  # the prompt of the one that lost
            assert b.check_identity() == 1
            assert b.total("sloscope_sidecar_requests_total", outcome="completed") == 1

    run(test())


def test_a_first_attempt_that_has_output_after_all_answers_and_the_second_is_closed(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, saying("a", 0.15), never, **SOON) as (b, _, second):
            assert (await b.ask()).body == whole("a")
            await b.until(lambda: second.lost == [0])
            ends = by_attempt(await b.ends(2))
            assert [(ends[n]["outcome"], ends[n].get("reason")) for n in (0, 1)] == [
                ("completed", ""),
                ("cancelled", "voluntary"),
            ]
            assert results(b) == {"lost": 1}
            assert b.total(WASTE) == len(ASK) // 4  # no usage: the estimate
            assert b.total("sloscope_upstream_inflight_requests") == 0
            assert b.total("sloscope_upstream_outstanding_tokens") == 0

    run(test())


def test_output_in_time_goes_on_as_it_comes_and_asks_nobody_else(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(ROLE) + chunk(event("a")))
        await go_on.wait()
        writer.write(chunked(finish(), DONE))

    async def test() -> None:
        async with beside(tmp_path, script, never, hedge_after="1s", hedge_max_share=1.0) as (b, _, second):
            client = await b.connect()
            await client.send(request())
            assert await client.reader.readuntil(b'"a"}')
            await asyncio.sleep(1.2)  # longer than the threshold
            go_on.set()
            assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"[DONE]") == 1
            (end,) = await b.ends()
            assert (end["outcome"], second.seen) == ("completed", [])
            assert results(b) == {"not_needed": 1}

    run(test())


def test_nothing_is_held_without_hedging_and_only_what_is_no_output_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        for after in ("", "60s"):
            output = asyncio.Event()

            async def script(_: Seen, writer: asyncio.StreamWriter, output: asyncio.Event = output) -> None:
                writer.write(STREAM_HEAD + chunk(ROLE))
                await output.wait()
                writer.write(chunked(event("a"), finish(), DONE))

            async with beside(tmp_path / f"after{after}", script, script, hedge_after=after) as (b, *_):
                client = await b.connect()
                await client.send(request())
                head = asyncio.create_task(client.reader.readuntil(b"\r\n\r\n"))
                if after:
                    await asyncio.wait([head], timeout=0.3)
                    assert not head.done()
                    output.set()
                assert (await head).startswith(b"HTTP/1.1 200")
                output.set()

    run(test())


# --- failures


NO_OUTPUT = STREAM_HEAD + chunked(ROLE, DONE)
IN_BAND = STREAM_HEAD + chunked(ROLE, sse({"error": {"type": "overloaded"}}), DONE)


def said(data: bytes, after_s: float = 0.08) -> Script:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        writer.write(data)

    return script


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (breaking(0.08), "upstream_reset"),
        (breaking(0.08, b"rubbish\r\n\r\n"), "upstream_reset"),
        (breaking(0.08, STREAM_HEAD + chunk(ROLE)), "empty_stream"),
        (failing(503, 0.08), "rejected"),
        (failing(500, 0.08, b"x" * 100_000), "http_error"),
        (said(NO_OUTPUT), "empty_stream"),
        (said(IN_BAND), "in_band_error"),
    ],
)
def test_of_two_that_run_a_failure_before_output_leaves_it_to_the_other(
    tmp_path: Path, script: Script, reason: str
) -> None:
    async def test() -> None:
        for name, pair in {"first": (script, saying("b", 0.2)), "second": (saying("b", 0.3), script)}.items():
            async with beside(tmp_path / name, *pair, **SOON) as (b, *_):
                assert (await b.ask()).body == whole("b")
                ends = by_attempt(await b.ends(2))
                failed = 0 if name == "first" else 1
                assert (ends[failed]["outcome"], ends[failed]["reason"]) == ("failed", reason)
                assert ends[1 - failed]["outcome"] == "completed"
                assert results(b) == {"won" if name == "first" else "lost": 1}
                assert b.check_identity() == 1

    run(test())


@pytest.mark.parametrize("quick", [True, False])
def test_two_failures_are_one_failure_and_the_client_gets_a_whole_answer(tmp_path: Path, quick: bool) -> None:
    """Of a refusal and a reset the refusal is the answer, whichever came first."""
    first, second = failing(503, 0.08), breaking(0.08 if quick else 0.2)

    async def test() -> None:
        for name, pair in {"a": (first, second), "b": (second, first)}.items():
            async with beside(tmp_path / name, *pair, **SOON) as (b, *_):
                answer = await b.ask()
                assert (answer.status, answer.body) == (503, b"no")
                ends = by_attempt(await b.ends(2))
                assert sorted(end["reason"] for end in ends.values()) == ["rejected", "upstream_reset"]
                assert b.check_identity() == 1
                assert b.total("sloscope_sidecar_requests_total", outcome="failed") == 1
                assert b.total("sloscope_sidecar_requests_total", reason="rejected") == 1

    run(test())


def test_two_refusals_are_one_and_two_resets_are_a_502(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path / "a", failing(503, 0.08, b"one"), failing(500, 0.08, b"two"), **SOON) as (b, *_):
            answer = await b.ask()
            assert (answer.status, answer.body) in {(503, b"one"), (500, b"two")}
            assert len(await b.ends(2)) == 2 and b.check_identity() == 1
        async with beside(tmp_path / "b", breaking(0.1), breaking(0.1), **SOON) as (b, *_):
            assert (await b.ask()).status == 502
            assert {end["reason"] for end in await b.ends(2)} == {"upstream_reset"}
            assert b.total("sloscope_sidecar_requests_total", reason="upstream_reset") == 1

    run(test())


def test_a_failure_before_the_threshold_is_the_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, failing(503), never, hedge_after="60s", hedge_max_share=1.0) as (b, _, second):
            assert (await b.ask()).status == 503
            assert second.seen == [] and results(b) == {"not_needed": 1}
            assert await b.end() == ("failed", "rejected")

    run(test())


def test_a_client_that_leaves_while_both_run_leaves_both(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, never, never, **SOON) as (b, first, second):
            client = await b.connect()
            await client.send(request())
            await b.until(lambda: second.seen)
            await client.close()
            await b.until(lambda: first.lost and second.lost)
            assert {(e["outcome"], e["reason"]) for e in await b.ends(2)} == {("cancelled", "disconnect")}
            assert results(b) == {"undecided": 1} and b.check_identity() == 1
            assert b.total("sloscope_sidecar_inflight_requests") == 0
            assert b.total("sloscope_upstream_outstanding_tokens") == 0

    run(test())


def test_a_second_upstream_that_cannot_be_reached_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, saying("a", 0.2), never, **SOON) as (b, _, second):
            await second.stop()
            assert (await b.ask()).body == whole("a")
            ends = by_attempt(await b.ends(2))
            assert (ends[0]["outcome"], ends[1]["reason"]) == ("completed", "connect_error")
            assert b.total(WASTE) == 0, "its prompt was never sent"
            # Known to be down it is not asked again.
            assert (await b.ask()).body == whole("a")
            assert results(b) == {"lost": 1, "no_upstream": 1}

    run(test())


def test_a_drain_that_ends_while_both_run_ends_one_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with beside(tmp_path, never, never, **SOON) as (b, _, second):
            client = await b.connect()
            await client.send(request())
            await b.until(lambda: second.seen)
            await b.plane.drain()
            assert {(e["outcome"], e["reason"]) for e in b.records("end")} == {("failed", "timeout")}
            assert len(b.records("end")) == 2 and b.check_identity() == 1

    run(test())


# --- what is hedged


NOT_HEDGED = {
    "an answer that does not stream": request(b'{"model":"m"}'),
    "another path": request(ASK, path="/v1/embeddings"),
    "a body that is too large to be kept": request(b'{"stream":true,"x":"' + b"y" * 5000 + b'"}'),
    "a body that is not JSON": request(b"\x1f\x8b stream"),
    "GET": request(b"", path=OBSERVED[0].decode(), method="GET"),
}


@pytest.mark.parametrize("name", NOT_HEDGED)
def test_only_streams_of_the_observed_paths_are_hedged(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        async with beside(tmp_path, saying("a", 0.1), never, inspect_limit=4096, **SOON) as (b, _, second):
            client = await b.connect()
            await client.send(NOT_HEDGED[name])
            assert (await client.response()).body == whole("a")
            assert second.seen == [] and results(b) == {}

    run(test())


def test_a_body_in_chunks_reaches_both_as_it_came(tmp_path: Path) -> None:
    raw = chunked(ASK[:5], ASK[5:])

    async def test() -> None:
        async with beside(tmp_path, never, saying("b"), **SOON) as (b, first, second):
            client = await b.connect()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            await client.send(head + raw)
            assert (await client.response()).body == whole("b")
            assert first.seen[0].body == second.seen[0].body == raw

    run(test())


def test_the_share_bounds_the_second_requests_and_the_rest_is_forwarded_as_it_comes(tmp_path: Path) -> None:
    asked: set[str | None] = set()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        """Who asks first is answered after the threshold, who asks for the same again never."""
        request_id = seen.header("x-sloscope-request-id")
        answer = never if request_id in asked else saying("a", 0.06)
        asked.add(request_id)
        await answer(seen, writer)

    async def test() -> None:
        changes = {"hedge_after": "20ms", "hedge_max_share": 0.25}
        async with beside(tmp_path, script, script, **changes) as (b, first, second):
            for _ in range(8):
                assert (await b.ask()).body == whole("a")
            assert len(first.seen) + len(second.seen) == 10  # a quarter of 8 is two more
            assert results(b) == {"lost": 2, "over_share": 6}

    run(test())


def test_a_quantile_waits_until_enough_first_outputs_are_known(tmp_path: Path) -> None:
    async def test() -> None:
        quick = saying("a")
        async with beside(tmp_path, quick, quick, hedge_after="p50", hedge_max_share=1.0) as (b, *_):
            for _ in range(10):
                await b.ask()
            # Beyond the median five have to lie: ten requests.
            assert results(b) == {"no_threshold": 10}
            await b.ask()
            assert b.total(REQUESTS) == 11 and b.total(REQUESTS, result="no_threshold") == 10

    run(test())


# --- what the client gets


@given(
    seed=st.integers(0, 2**32),
    kinds=st.tuples(*[st.sampled_from(["stream", "stream", "reset", "refuse", "close"])] * 2),
    ask_usage=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_reaches_the_client_is_one_attempts_bytes(
    tmp_path: Path, seed: int, kinds: tuple[str, str], ask_usage: bool
) -> None:
    """Each attempt writes its own text in pieces of its own at times of its own. Never two texts in one answer."""
    rng = random.Random(seed)
    bodies: dict[str, bytes] = {}

    def script_of(name: str, kind: str) -> Script:
        events = [ROLE, *(event(name * rng.randint(1, 3)) for _ in range(rng.randint(1, 4))), finish(), DONE]
        bodies[name] = chunked(*events)
        raw = STREAM_HEAD + bodies[name]
        cuts = sorted(rng.sample(range(1, len(raw)), rng.randint(0, 6)))
        pieces = [raw[a:z] for a, z in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        waits = [rng.choice([0, 0, 0.005, 0.02, 0.04]) for _ in pieces]

        async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
            for piece, wait_s in zip(pieces, waits, strict=True):
                await asyncio.sleep(wait_s)
                if kind in ("reset", "close") and rng.random() < 0.4:
                    writer.transport.abort() if kind == "reset" else writer.close()
                    return
                if kind == "refuse":
                    writer.write(b"HTTP/1.1 429 X\r\ncontent-length: 1\r\n\r\n%b" % name.encode())
                    return
                writer.write(piece)
                await writer.drain()

        return script

    first, second = script_of("a", kinds[0]), script_of("b", kinds[1])

    async def test() -> None:
        events = Path(mkdtemp(dir=tmp_path))  # an example may come again
        changes = {"hedge_after": "15ms", "hedge_max_share": 1.0, "ask_usage": ask_usage}
        async with beside(events, first, second, **changes) as (b, *_):
            client = await b.connect()
            await client.send(request(ASK, "connection: close"))
            got = await client.to_end()
            head, _, body = got.partition(b"\r\n\r\n")
            status = int(head.split(b" ")[1])
            if status == 200:
                assert any(payload_of(bodies[name]).startswith(payload_of(body)) for name in bodies), seed
                if body.endswith(b"0\r\n\r\n"):
                    assert ask_usage or body in bodies.values(), seed
            else:
                assert (status, body) in {(429, b"a"), (429, b"b")} or status == 502, seed
            assert b.check_identity() == 1
            await b.until(lambda: b.total("sloscope_sidecar_inflight_requests") == 0)
            assert b.total(REQUESTS) == 1
            assert b.total("sloscope_upstream_outstanding_tokens") == 0
        # All is on disk once the sidecar has stopped.
        begun, ended = ([each.get("attempt", 0) for each in b.records(kind)] for kind in ("begin", "end"))
        assert sorted(begun) == sorted(ended) in ([0], [0, 1]), seed

    run(test())


def payload_of(raw: bytes) -> bytes:
    """Of a body in chunks that may break off anywhere."""
    payload = b""
    while raw:
        size, separator, raw = raw.partition(b"\r\n")
        if not separator or not size:
            break
        payload += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return payload


@pytest.mark.parametrize("method", ["new_stream", "begin_attempt", "decided", "released", "end_attempt"])
def test_an_observer_that_breaks_breaks_no_hedged_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("on purpose")

    async def test() -> None:
        monkeypatch.setattr(Observation, method, broken)
        async with beside(tmp_path, saying("a", 0.1), saying("b", 0), **SOON) as (b, *_):
            assert (await b.ask()).body in (whole("a"), whole("b"))
            assert b.total("sloscope_parse_problems_total", problem="observer_error") >= 1
            assert b.check_identity() == 1

    run(test())


def test_a_losing_attempt_has_an_end_whatever_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the request would stay open, and out of every table, until the sidecar starts again."""
    classify = StreamRecord.classify

    def broken(stream: StreamRecord, transport: str, left: str, min_tokens: int) -> Any:
        if left == "voluntary":
            raise RuntimeError("on purpose")
        return classify(stream, transport, left, min_tokens)

    async def test() -> None:
        monkeypatch.setattr(StreamRecord, "classify", broken)
        async with beside(tmp_path, saying("a", 0.1), saying("b", 0), **SOON) as (b, *_):
            assert (await b.ask()).body == whole("b")
            ends = {end.get("attempt", 0): (end["outcome"], end["reason"]) for end in await b.ends(2)}
            assert ends[0] == ("unfinished", "recorder_lost") and ends[1][0] == "completed"
            assert b.total("sloscope_parse_problems_total", problem="observer_error") == 1

    run(test())


# --- the policy alone


def hedges(after: str, share: float = 1.0) -> Hedges:
    return Hedges(parse_hedge_after(after), share, MetricStore("sidecar"))


def test_the_threshold_is_the_quantile_of_the_recent_first_outputs() -> None:
    policy = hedges("p95")
    for number in range(1, 100):
        policy.took(number * MS, number)
    assert policy.wait_ns(100) is None, "p95 needs 100: five beyond it"
    policy.took(100 * MS, 100)
    assert policy.wait_ns(100) == 95 * MS
    assert policy.wait_ns(WINDOW_NS + 2) is None, "the first is too old to count"
    for number in range(1000):
        policy.took(7 * MS, number)
    assert policy.wait_ns(1000) == 7 * MS, "the last thousand only"


def test_a_duration_needs_no_history() -> None:
    assert hedges("250ms").wait_ns(0) == 250 * MS
    assert (hedges("p50").least, hedges("p90").least, hedges("p99").least) == (10, 50, 500)


def test_no_more_than_the_share_is_hedged_at_any_time_and_little_is_saved_up() -> None:
    policy = hedges("1s", 0.05)
    made = 0
    for offered in range(1, 2001):
        policy.offered()
        made += policy.take()
        assert made <= 0.05 * offered
    assert made == 100
    for _ in range(10_000):
        policy.offered()
    assert sum(policy.take() for _ in range(100)) == 10


@pytest.mark.parametrize("text", ["p49", "p99.9", "p100", "p", "95", "p9", "0ms", "-1s", "p95 ", "fast"])
def test_a_threshold_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hedge-after: .* accepted: p50 to p99, or a duration such as 300ms"):
        parse_hedge_after(text)
