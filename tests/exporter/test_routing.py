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
