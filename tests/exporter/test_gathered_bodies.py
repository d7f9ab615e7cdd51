"""Bodies under way that are to be read: what they hold together has a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exporter import exchange
from tests.exporter.harness import (
    DONE,
    Seen,
    answering,
    bench,
    event,
    finish,
    request,
    run,
)
from tests.exporter.test_routing import beside

PROBLEMS = "sloscope_parse_problems_total"


def test_bodies_under_way_hold_no_more_than_a_bound_together_and_the_largest_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients send 90, 60 and 40 kB of more, with 150 kB as the bound: 90 + 60 fit, and 40 do not."""
    monkeypatch.setattr(exchange, "_MOST_GATHERED", 150_000)

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            gathering = b.plane.gathering
            clients, rests = [], []
            for number, sent in enumerate((90_000, 60_000, 40_000)):
                body = b'{"model":"m%d","stream":true,"prompt":"' % number + b"x" * 100_000 + b'"}'
                whole = request(body)
                head, _, _ = whole.partition(b"\r\n\r\n")
                cut = len(head) + 4 + sent
                client = await b.connect()
                await client.send(whole[:cut])
                clients.append(client)
                rests.append(whole[cut:])
                held = {0: 90_000, 1: 150_000, 2: 100_000}[number]  # 190 000 without the largest
                await b.until(lambda held=held: gathering.bytes == held)
            await b.until(lambda: b.upstream.connections == 1)  # it is under way, not complete
            assert b.upstream.seen == []
            for client, rest in zip(clients, rests, strict=True):
                await client.send(rest)
                assert (await client.response()).status == 200
            await b.ends(3)
            assert [begin.get("model") for begin in b.records("begin")] == [None, "m1", "m2"]
            assert [seen.body.count(b"x") for seen in b.upstream.seen] == [100_000] * 3
            assert b.total(PROBLEMS, problem="request_above_inspect_limit") == 1
            assert gathering.bytes == 0

    run(test())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_a_client_sent_before_it_left_is_not_held(tmp_path: Path, is_chunked: bool) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            client = await b.connect()
            framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: 5000"
            sent = b"fa0\r\n" + b"x" * 4000 if is_chunked else b"x" * 4000  # 0xfa0 is 4000
            await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n" + sent)
            # Chunks are held as they came and as what they hold: 4005 + 4000.
            await b.until(lambda: b.plane.gathering.bytes == (8005 if is_chunked else 4000))
            await client.close()
            assert await b.end() == ("cancelled", "disconnect")
            assert b.plane.gathering.bytes == 0

    run(test())


def sized(number: int, size: int) -> bytes:
    """A request whose body has so many bytes."""
    start = b'{"model":"m%d","stream":true,"prompt":"' % number
    return request(start + b"x" * (size - len(start) - 2) + b'"}')


def test_bodies_that_wait_for_their_answer_count_and_the_largest_is_not_sent_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """90, 60 and 40 kB with 150 kB as the bound, over connections that the upstream closes: two are sent again."""
    monkeypatch.setattr(exchange, "_MOST_GATHERED", 150_000)
    close = asyncio.Event()
    whole = answering(event(), finish(), DONE)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.connection < 3 and len(seen.body) > 1000:
            await close.wait()
            writer.close()
            return
        if len(seen.body) < 1000:
            warm.append(seen)
            while len(warm) % 3:
                await asyncio.sleep(0.005)  # three connections
        await whole(seen, writer)

    warm: list[Seen] = []

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            gathering = b.plane.gathering
            clients = [await b.connect() for _ in range(3)]
            for client in clients:
                await client.send(request())
            assert [(await client.response()).status for client in clients] == [200] * 3
            assert b.upstream.connections == 3 and gathering.bytes == 0
            sizes, held = (90_000, 60_000, 40_000), (90_000, 150_000, 100_000)
            for number, client in enumerate(clients):
                await client.send(sized(number, sizes[number]))
                await b.until(lambda number=number: gathering.bytes == held[number])
                await b.until(lambda number=number: len(b.upstream.seen) == 4 + number)
            close.set()
            assert [(await client.response()).status for client in clients] == [502, 200, 200]
            assert sorted(len(seen.body) for seen in b.upstream.seen[6:]) == [40_000, 60_000]
            assert b.total(PROBLEMS, problem="request_above_inspect_limit") == 0  # every one was read
            assert gathering.bytes == 0

    run(test())


def test_a_body_that_waits_for_its_answer_gives_way_to_a_smaller_one_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_MOST_GATHERED", 150_000)
    answer = asyncio.Event()

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answer.wait()
        await answering(event(), finish(), DONE)(seen, writer)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            waiting, under_way = await b.connect(), await b.connect()
            await waiting.send(sized(0, 80_000))
            await b.until(lambda: b.plane.gathering.bytes == 80_000)
            asked = sized(1, 100_000)
            await under_way.send(asked[:-10_000])  # 80,000 + 90,000 and a bit are too many: the 80,000 are let go
            await b.until(lambda: 80_000 < b.plane.gathering.bytes <= 90_000)
            await under_way.send(asked[-10_000:])
            answer.set()
            assert [(await client.response()).status for client in (waiting, under_way)] == [200, 200]
            await b.ends(2)
            assert [begin["model"] for begin in b.records("begin")] == ["m0", "m1"]
            assert b.plane.gathering.bytes == 0

    run(test())


def test_a_request_whose_body_was_let_go_is_not_hedged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 + 50 kB with 100 kB as the bound, before either has waited for long enough."""
    monkeypatch.setattr(exchange, "_MOST_GATHERED", 100_000)
    hedged = "sloscope_hedge_requests_total"
    answer = asyncio.Event()

    async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answer.wait()
        await answering(event(), finish(), DONE)(seen, writer)

    async def test() -> None:
        async with beside(tmp_path, slow, slow, hedge_after="1s", hedge_max_share=1.0) as (b, first, second):
            clients = []
            for number, size in enumerate((60_000, 50_000)):
                clients.append(await b.connect())
                await clients[-1].send(sized(number, size))
                await b.until(lambda: len(first.seen) + len(second.seen) == len(clients))
            assert b.plane.gathering.bytes == 50_000
            await b.until(lambda: len(first.seen) + len(second.seen) == 3)
            await b.until(lambda: b.total(hedged, result="not_kept") == 1)
            answer.set()
            assert [(await client.response()).status for client in clients] == [200, 200]
            asked = [len(seen.body) for seen in (*first.seen, *second.seen)]
            assert sorted(asked) == [50_000, 50_000, 60_000]
            assert b.plane.gathering.bytes == 0

    run(test())


def test_an_upload_that_was_streamed_is_not_sent_once_more_without_its_body(tmp_path: Path) -> None:
    """Its connection had been used, and the upstream closes it without an answer once it has all."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.body:
            writer.close()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request(b"", path="/v1/files"))
            assert (await client.response()).status == 200
            asked = request(b"x" * 1000, path="/v1/files")
            await client.send(asked[:-500])
            await b.until(lambda: [each for each in b.plane.clients if each.exchange and each.exchange.is_dispatched])
            await client.send(asked[-500:])
            assert (await client.response()).status == 502
            assert [len(seen.body) for seen in b.upstream.seen] == [0, 1000]

    run(test())
