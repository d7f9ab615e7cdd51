"""Bodies under way that are to be read: what they hold together has a bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter import exchange
from tests.exporter.harness import (
    DONE,
    answering,
    bench,
    event,
    finish,
    request,
    run,
)

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
