"""Which upstream gets a request: by outstanding tokens, and around those that cannot be reached."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter import upstream as upstream_module
from exporter.settings import parse_upstream
from exporter.upstream import Pool, Upstreams, Work, estimate
from sloscope.clock import FakeClock
from sloscope.exposition import MetricStore
from sloscope.units import NS_PER_S
from tests.exporter.harness import (
    ASK,
    DONE,
    STREAM_HEAD,
    Bench,
    Script,
    ScriptedUpstream,
    Seen,
    answering,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
)

WHOLE = answering(event(), finish(), DONE)


def ask(max_tokens: int, **more: Any) -> bytes:
    return json.dumps({"model": "m", "stream": True, "max_tokens": max_tokens, **more}).encode()


def pools(count: int, clock: FakeClock) -> list[Pool]:
    store = MetricStore("sidecar")
    return [Pool(parse_upstream(f"http://host{number}:1"), None, store, clock) for number in range(count)]


@asynccontextmanager
async def beside(
    tmp_path: Path, first: Script, second: Script, **changes: Any
) -> AsyncIterator[tuple[Bench, Any, Any]]:
    """Two scripted upstreams; an idle sidecar asks the first one first."""
    other = ScriptedUpstream(first)
    url = await other.start()
    try:
        async with bench(tmp_path, second, upstreams=(url,), **changes) as b:
            yield b, other, b.upstream
    finally:
        await other.stop()


# --- the estimate


def test_a_prompt_is_a_quarter_of_its_bytes_and_the_output_what_may_come() -> None:
    assert estimate({"max_tokens": 100}, 4000) == Work(1000, 100)
    assert estimate({"max_completion_tokens": 50, "max_tokens": 100, "n": 3}, 400) == Work(100, 150)
    assert estimate({"prompt": [5, 6, 7], "max_tokens": 9}, 4000) == Work(3, 9)  # token ids are counted
    assert estimate({"prompt": "text"}, 400) == Work(100, 256)  # no maximum named
    assert estimate(None, 400) == Work(100, 0)  # no completion


@pytest.mark.parametrize("value", [0, -1, True, "9", 1.5, None, [1]])
def test_a_maximum_that_is_none_counts_as_unnamed(value: Any) -> None:
    assert estimate({"max_tokens": value, "n": value}, 0) == Work(0, 256)


def test_no_request_counts_for_more_than_sixteen_million_tokens() -> None:
    assert estimate({"max_tokens": 2**62}, 2**62) == Work(1 << 24, 1 << 24)


# --- the choice


def test_the_fewest_outstanding_tokens_are_chosen_then_the_fewest_requests_then_turns() -> None:
    clock = FakeClock()
    a, b, c = pools(3, clock)
    upstreams = Upstreams([a, b, c], clock)
    assert [upstreams.choose() for _ in range(4)] == [a, b, c, a]
    long, short = Work(10, 500), Work(10, 40)
    a.begin(long)
    b.begin(short)
    b.begin(Work(10, 40))
    c.begin(Work(100))
    # a 510, b 100 in two requests, c 100 in one.
    assert upstreams.choose() is c
    a.progress(long, 1)  # 499: the prompt is done with its first output
    a.progress(long, 450)
    assert (a.tokens, long) == (49, Work(0, 49))
    assert upstreams.choose() is a
    a.progress(long, 1000)  # more than was announced
    assert a.tokens == 0 and a.requests == 1
    a.end(long)
    assert (a.tokens, a.requests) == (0, 0)


def test_by_requests_one_long_answer_counts_less_than_two_short_ones() -> None:
    clock = FakeClock()
    a, b = pools(2, clock)
    a.begin(Work(10, 5000))
    for _ in range(2):
        b.begin(Work(1, 1))
    assert Upstreams([a, b], clock, by_tokens=False).choose() is a
    assert Upstreams([a, b], clock).choose() is b


def refuse(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect() -> None:
        async def refused(*_: Any, **__: Any) -> None:
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)
        with pytest.raises(ConnectionRefusedError):
            await pool.connect()

    asyncio.run(connect())


def test_an_upstream_that_refuses_rests_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    (pool,) = pools(1, clock)
    rests = []
    for _ in range(9):
        refuse(pool, monkeypatch)
        rests.append((pool.rests_until_ns - clock.monotonic_ns()) / NS_PER_S)
    assert rests == [0.25, 0.5, 1, 2, 4, 8, 16, 16, 16]
    assert not pool.up and not pool.may_be_tried(pool.rests_until_ns - 1) and pool.may_be_tried(pool.rests_until_ns)


def test_after_its_rest_one_request_finds_out_and_the_others_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    sick, busy = pools(2, clock)
    upstreams = Upstreams([sick, busy], clock)
    busy.begin(Work(10, 90))
    refuse(sick, monkeypatch)
    assert [upstreams.choose() for _ in range(3)] == [busy, busy, busy]
    clock.advance(NS_PER_S)
    assert [upstreams.choose() for _ in range(3)] == [sick, busy, busy]
    assert upstreams.choose_up([busy]) is None, "a hedge goes to nobody that may be down"
    clock.advance(6 * NS_PER_S)  # the one that went to find out was cancelled and told nobody
    assert upstreams.choose() is sick


def test_where_all_rest_the_one_whose_rest_ends_first_is_tried_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    a, b = pools(2, clock)
    upstreams = Upstreams([a, b], clock)
    refuse(a, monkeypatch)
    refuse(a, monkeypatch)
    refuse(b, monkeypatch)
    assert upstreams.choose() is b
    assert upstreams.choose([b]) is a
    assert upstreams.choose([a, b]) is None


def one_of_two_is_busy() -> tuple[FakeClock, Pool, Pool, Upstreams]:
    """So that all requests would go to the other one, which is to fall sick."""
    clock = FakeClock()
    sick, busy = pools(2, clock)
    busy.begin(Work(10, 90))
    return clock, sick, busy, Upstreams([sick, busy], clock)


def fail(pool: Pool, times: int) -> None:
    """Each a request of its own, which was under way before."""
    for _ in range(times):
        pool.answered(Work(0), False)


def tried(pool: Pool) -> Work:
    """The request that was sent to it just now."""
    work = Work(0)
    pool.begin(work)
    return work


def conclude(pool: Pool, work: Work, ok: bool) -> None:
    pool.answered(work, ok)
    pool.end(work)


def test_three_bad_answers_in_a_row_are_a_rest_and_two_are_none() -> None:
    clock, sick, busy, upstreams = one_of_two_is_busy()
    fail(sick, 2)
    sick.answered(Work(0), True)
    fail(sick, 2)
    assert upstreams.choose() is sick
    fail(sick, 1)
    assert (sick.up, sick.rests, sick.rests_until_ns - clock.monotonic_ns()) == (True, True, NS_PER_S // 4)
    assert upstreams.choose() is busy
    assert upstreams.choose_up([busy]) is None, "a hedge goes to nobody that may fail"
    sick.answered(Work(0), True)  # of a request that was under way
    assert upstreams.choose() is sick


def test_a_bad_answer_after_a_rest_doubles_it_and_a_good_one_ends_it() -> None:
    clock, sick, busy, upstreams = one_of_two_is_busy()
    fail(sick, 3)
    rests = []
    for _ in range(8):
        fail(sick, 5)  # that were under way when its rest began: they say nothing new
        rests.append((sick.rests_until_ns - clock.monotonic_ns()) / NS_PER_S)
        clock.advance(sick.rests_until_ns - clock.monotonic_ns())
        assert [upstreams.choose() for _ in range(3)] == [sick, busy, busy], "one request finds out"
        work = tried(sick)
        fail(sick, 5)  # still those
        conclude(sick, work, ok=False)
    assert rests == [0.25, 0.5, 1, 2, 4, 8, 16, 16]
    clock.advance(16 * NS_PER_S)
    assert upstreams.choose() is sick
    conclude(sick, tried(sick), ok=True)
    assert not sick.rests and upstreams.choose() is sick
    fail(sick, 3)
    assert sick.rests_until_ns - clock.monotonic_ns() == NS_PER_S // 4


def test_a_trial_that_tells_nothing_leaves_the_next_request_to_find_out() -> None:
    clock, sick, busy, upstreams = one_of_two_is_busy()
    fail(sick, 3)
    clock.advance(NS_PER_S)
    for _ in range(3):  # nobody observes them, or their clients leave
        assert [upstreams.choose() for _ in range(2)] == [sick, busy], "one at once"
        sick.end(tried(sick))
    assert upstreams.choose() is sick
    conclude(sick, tried(sick), ok=True)
    assert not sick.rests


def test_a_trial_that_found_no_connection_is_over_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sick, busy, upstreams = one_of_two_is_busy()
    fail(sick, 3)
    clock.advance(NS_PER_S)
    assert upstreams.choose() is sick
    work = tried(sick)
    refuse(sick, monkeypatch)
    sick.end(work)
    assert sick.rests_until_ns - clock.monotonic_ns() == NS_PER_S // 4, "as after any connect that failed"
    assert upstreams.choose() is busy


def test_where_nobody_else_is_there_or_all_rest_bad_answers_keep_nobody_from_being_asked() -> None:
    clock = FakeClock()
    a, b = pools(2, clock)
    fail(a, 50)
    assert Upstreams([a], clock).choose() is a
    fail(b, 3)
    upstreams = Upstreams([a, b], clock)
    assert {upstreams.choose(), upstreams.choose()} == {a, b}


# --- on sockets


def test_outstanding_tokens_fall_with_output_and_are_exposed(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _number in range(3):
            writer.write(b"%x\r\n%b\r\n" % (len(event()), event()))
        await go_on.wait()
        writer.write(chunked(finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            gauge = "sloscope_upstream_outstanding_tokens"
            client = await b.connect()
            await client.send(request(ask(20)))
            # 20 that may come, 3 that came, and the prompt is done with.
            await b.until(lambda: b.total(gauge) == 17)
            assert b.total("sloscope_upstream_inflight_requests") == 1
            go_on.set()
            await client.response()
            await b.until(lambda: b.total(gauge) == 0 and b.total("sloscope_upstream_inflight_requests") == 0)

    run(test())


@pytest.mark.parametrize(("balance", "first", "second"), [("tokens", 1, 5), ("requests", 3, 3)])
def test_six_short_answers_go_around_one_that_is_long(tmp_path: Path, balance: str, first: int, second: int) -> None:
    go_on = asyncio.Event()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await WHOLE(seen, writer)

    async def test() -> None:
        async with beside(tmp_path, script, script, balance=balance) as (b, one, other):
            clients = []
            for max_tokens in (1000, 10, 10, 10, 10, 10):
                clients.append(await b.connect())
                await clients[-1].send(request(ask(max_tokens)))
                await b.until(lambda: len(one.seen) + len(other.seen) == len(clients))
            assert (len(one.seen), len(other.seen)) == (first, second)
            go_on.set()
            for client in clients:
                assert (await client.response()).status == 200

    run(test())


def test_a_dead_upstream_costs_no_request_and_is_used_again_once_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "_FIRST_REST_NS", 60 * NS_PER_S)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def test() -> None:
        url = f"http://127.0.0.1:{port}"
        async with bench(tmp_path, WHOLE, upstreams=(url,)) as b:
            assert [(await b.ask()).status for _ in range(3)] == [200, 200, 200]
            assert len(b.upstream.seen) == 3
            assert b.total("sloscope_upstream_up", upstream=url) == 0
            # Who was chosen is in the begin; where nobody was there, the end says who it went to instead.
            other = b.plane.settings.upstreams[1]
            chosen = {record["request_id"]: record["upstream"] for record in b.records("begin")}
            went = [(chosen[end["request_id"]], end.get("upstream")) for end in await b.ends(3)]
            assert went == [(url, other), (other, None), (other, None)]
            back = ScriptedUpstream(WHOLE)
            await back.start(port)
            b.plane.upstreams.pools[0].rests_until_ns = 0
            assert [(await b.ask()).status for _ in range(4)] == [200] * 4
            assert len(back.seen) == 2 and b.total("sloscope_upstream_up", upstream=url) == 1
            await back.stop()

    run(test())


async def fails_at_once(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")


async def refuses_the_request(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}")


async def closes(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def breaks_off_before_output(_: Seen, writer: asyncio.StreamWriter) -> None:
    role = event("", delta={"role": "assistant"})
    writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(role), role))
    await writer.drain()
    writer.close()


async def breaks_off_in_a_chunk(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"nonsense\r\n")


async def breaks_off_after_output(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
    await writer.drain()
    writer.close()


async def answers_nothing_that_is_http(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")


async def statuses(b: Bench, count: int, body: bytes = ASK) -> list[int]:
    """Of requests one after the other; 0 where the answer broke off."""
    found = []
    for _ in range(count):
        try:
            found.append((await b.ask(body)).status)
        except (asyncio.IncompleteReadError, ConnectionError):
            found.append(0)
    return found


def test_who_fails_at_once_does_not_draw_the_requests_of_all(tmp_path: Path) -> None:
    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        await WHOLE(seen, writer)

    async def test() -> None:
        async with beside(tmp_path, fails_at_once, slow) as (b, sick, well):
            working = [asyncio.create_task(statuses(b, 25)) for _ in range(4)]
            found = [status for each in await asyncio.gather(*working) for status in each]
            # Three find out, three more may be under way by then; the run is over within a rest or two.
            assert found.count(500) == len(sick.seen) and found.count(200) == len(well.seen)
            assert 3 <= found.count(500) <= 10 and len(found) == 100
            assert b.total("sloscope_upstream_up") == 2, "it can be reached"
            ours, its = b.plane.settings.upstreams  # of the one that fails, and of the one that is well
            assert b.total("sloscope_upstream_resting", upstream=its) == 0
            for url, result in ((ours, "failed"), (its, "ok")):
                count = b.total("sloscope_upstream_answers_total", upstream=url, result=result)
                assert (
                    count
                    == b.total("sloscope_upstream_answers_total", upstream=url)
                    == found.count(200 if result == "ok" else 500)
                )

    run(test())


@pytest.mark.parametrize(
    "script", [fails_at_once, closes, breaks_off_before_output, breaks_off_in_a_chunk, answers_nothing_that_is_http]
)
@pytest.mark.parametrize("hedge_after", ["", "10s"])
def test_a_failure_of_any_kind_before_the_output_counts(tmp_path: Path, script: Script, hedge_after: str) -> None:
    async def test() -> None:
        async with beside(tmp_path, script, WHOLE, hedge_after=hedge_after) as (b, sick, _):
            await statuses(b, 12)
            pool = next(each for each in b.plane.upstreams.pools if each.upstream.url != b.plane.settings.upstreams[1])
            assert pool.rests and pool.up and len(sick.seen) >= 3

    run(test())


@pytest.mark.parametrize("script", [refuses_the_request, breaks_off_after_output, WHOLE])
def test_the_requests_own_fault_and_an_end_after_output_do_not_count(tmp_path: Path, script: Script) -> None:
    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert len(await statuses(b, 5)) == 5
            (pool,) = b.plane.upstreams.pools
            assert not pool.rests

    run(test())


def test_output_counts_while_its_stream_goes_on(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if b"long" not in seen.body:
            await fails_at_once(seen, writer)
            return
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        await asyncio.Event().wait()

    async def test() -> None:
        async with beside(tmp_path, script, script) as (b, *_):
            one, other = b.plane.upstreams.pools
            other.begin(Work(1000, 1000))  # so that all go to one
            assert await statuses(b, 2) == [500, 500]
            client = await b.connect()
            await client.send(request(b'{"model":"long","stream":true,"max_tokens":5}'))
            await client.reader.readuntil(b"\n\n")
            await b.until(lambda: one._bad == 0)
            assert await statuses(b, 2) == [500, 500] and not one.rests
            await statuses(b, 1)
            assert b.total("sloscope_upstream_resting", upstream=one.upstream.url) == 1
            assert b.total("sloscope_upstream_resting", upstream=other.upstream.url) == 0

    run(test())


def test_requests_that_nobody_observes_say_nothing_of_an_upstream(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, fails_at_once) as b:
            assert [(await b.ask(path="/v1/embeddings")).status for _ in range(5)] == [500] * 5
            assert not b.plane.upstreams.pools[0].rests

    run(test())
