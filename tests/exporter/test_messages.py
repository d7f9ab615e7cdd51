"""HTTP/1.1 as servers and clients really speak it: heads without bodies, early answers, trailers, connections."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from exporter import upstream
from tests.exporter.harness import (
    ASK,
    CHAT,
    DONE,
    STREAM_HEAD,
    Bench,
    RawClient,
    Seen,
    answering,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
    serving,
)
from tests.exporter.test_routing import beside

STREAM = event("a") + finish() + DONE
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

# Method, answer of the upstream, and the header lines that reach the client. None of these has a body.
BODILESS = {
    "HEAD with a length": ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", [b"content-length: 5"]),
    "HEAD in chunks": ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", []),
    "HEAD without either": ("HEAD", b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n", [b"x: y"]),
    "204": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", []),
    "204 with a length": ("GET", b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n", []),
    "304 with a length": ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", [b"content-length: 5"]),
    "304 in chunks": ("GET", b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n", []),
    "a length of 0": ("GET", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", [b"content-length: 0"]),
}


def test_a_head_that_has_no_body_ends_the_answer_and_keeps_both_connections(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(BODILESS[seen.header("case") or ""][1])

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            for name, (method, _, lines) in BODILESS.items():
                await client.send(request(b"", f"case: {name}", path="/v1/models", method=method))
                head = await client.reader.readuntil(b"\r\n\r\n")
                assert head.split(b"\r\n")[1:-2] == lines, name
            assert b.upstream.connections == 1

    run(test())


def test_a_client_that_closes_leaves_the_upstreams_connection_open_and_the_reverse(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.header("case") == "upstream closes":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nok")
            writer.close()
        else:
            writer.write(OK)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            for _ in range(2):
                client = await b.connect()
                await client.send(request(b"", "connection: close", path="/", method="GET"))
                answer = await client.response()
                assert answer.body == b"ok" and answer.header("connection") == "close"
                assert await client.to_end() == b""
            assert b.upstream.connections == 1
            client = await b.connect()
            for _ in range(2):
                await client.send(request(b"", "case: upstream closes", path="/", method="GET"))
                answer = await client.response()
                assert answer.body == b"ok" and answer.header("connection") is None
            assert b.upstream.connections == 2  # the first of these went over the one that was there

    run(test())


def test_a_client_of_http10_is_answered_and_its_connection_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            await client.send(b"GET /v1/models HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            answer = await client.response()
            # Chunks are taken apart for it, since it knows none.
            assert answer.body == STREAM and answer.header("connection") == "close"
            assert b.upstream.seen[0].line == b"GET /v1/models HTTP/1.1"

    run(test())


def test_extensions_and_trailers_go_up_as_they_came(tmp_path: Path) -> None:
    raw = b"%x;name=value;other\r\n%b\r\n0;last\r\nx-checksum: 1\r\nX-More:2\r\n\r\n" % (len(ASK), ASK)

    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            for path in (CHAT, "/v1/files"):
                head = f"POST {path} HTTP/1.1\r\nhost: a\r\ntrailer: x-checksum\r\ntransfer-encoding: chunked\r\n\r\n"
                await client.send(head.encode() + raw)
                assert (await client.response()).status == 200
            assert [seen.body for seen in b.upstream.seen] == [raw, raw]
            assert [seen.header("trailer") for seen in b.upstream.seen] == ["x-checksum"] * 2
            (begin,) = b.records("begin")
            assert begin["model"] == "m"

    run(test())


def test_trailers_of_an_answer_end_with_the_chunks_that_they_belong_to(tmp_path: Path) -> None:
    """A client of HTTP/1.0 gets neither; tests/exporter/test_forwarding.py has one of HTTP/1.1."""
    raw = b"%x\r\n%b\r\n0\r\nserver-timing: db;dur=1\r\n\r\n" % (len(STREAM), STREAM)

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + raw)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(ASK), ASK))
            assert (await client.response()).body == STREAM
            assert await b.end() == ("completed", "")

    run(test())


def test_an_error_before_the_body_reaches_a_client_that_asked_to_continue(tmp_path: Path) -> None:
    """The sidecar gives the 100 itself, so that it can read the body of a request that is observed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno")
        await reader.read()

    async def test() -> None:
        async with serving(script) as url, bench(tmp_path, answering(), upstreams=(url,)) as b:
            client = await b.connect()
            await client.send(request(b"x" * 100_000, "expect: 100-continue", path="/v1/files")[:-100_000])
            assert (await client.response()).status == 100
            answer = await client.response()
            assert (answer.status, answer.body, answer.header("connection")) == (401, b"no", "close")

    run(test())


def _refuse(listener: socket.socket) -> None:
    """Reads heads, never a body, and closes: a RST follows the answer as soon as more of the body comes."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
        connection.close()


def test_an_answer_is_not_lost_to_an_upload_that_its_server_refused_and_reset(tmp_path: Path) -> None:
    """Seen without a look at the socket before each write: 148 of 150 became a 502."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = threading.Thread(target=_refuse, args=(listener,), daemon=True)
    server.start()

    async def test() -> None:
        async with bench(tmp_path, answering(), upstreams=(url,)) as b:
            del b.plane.upstreams.pools[1:]
            statuses = [await status_of_an_upload(b) for _ in range(30)]
            assert statuses == [413] * 30

    async def status_of_an_upload(b: Bench) -> int:
        client = await b.connect()
        upload = asyncio.create_task(send_much(client))
        status = (await client.response()).status
        await client.close()
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
        return status

    async def send_much(client: RawClient) -> None:
        await client.send(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n")
        for _ in range(50):
            await client.send(b"x" * 100_000)
            await asyncio.sleep(0)

    try:
        run(test())
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # which ends its accept
        server.join()
        listener.close()


def test_a_connection_that_owes_the_rest_of_a_body_serves_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer came while the last bytes waited for a look at the socket: they never went up."""
    monkeypatch.setattr(upstream, "_ONE_LOOK_S", 0.2)
    monkeypatch.setattr("exporter.upstream.is_ready", lambda *_: True)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await asyncio.sleep(0.05)
            writer.write(OK)
            if heads[-1].startswith(b"POST"):
                await reader.readexactly(10)

    async def test() -> None:
        async with serving(serve) as url, bench(tmp_path, answering(), upstreams=(url,)) as b:
            del b.plane.upstreams.pools[1:]
            client = await b.connect()
            await client.send(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
            await b.until(lambda: heads)
            await client.send(b"0123456789")
            assert (await client.response()).body == b"ok"
            await client.send(request(b"", path="/next", method="GET"))
            assert (await client.response()).body == b"ok"
            assert heads[1].startswith(b"GET /next ")

    run(test())


def test_an_upstream_that_says_nothing_but_1xx_to_a_client_that_does_not_read_fills_no_memory(tmp_path: Path) -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: %b\r\n\r\n" % (b"x" * 10_000)
    sent = 0

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 64 << 20:
            writer.write(hint)
            await writer.drain()
            sent += len(hint)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            reader, writer = await asyncio.open_connection(*b.address, limit=1 << 16)
            writer.write(request())
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)
            unread = max(client.transport.get_write_buffer_size() for client in b.plane.clients)
            writer.transport.abort()
            assert unread < 1 << 20 and sent < 64 << 20

    run(test())


def test_an_unasked_continue_of_the_upstream_is_passed_on_and_hides_no_answer(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\ncontent-length: 7\r\n\r\n" + STREAM_HEAD + chunked(STREAM))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request())
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert (await client.response()).body == chunked(STREAM)
            old = await b.connect()
            await old.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(ASK), ASK))
            assert (await old.response()).status == 200  # HTTP/1.0 has no 1xx

    run(test())


@pytest.mark.parametrize("changes", [{}, {"ask_usage": True}, {"hedge_after": "5s"}], ids=str)
@pytest.mark.parametrize("in_one_read", [True, False])
def test_events_before_a_malformed_chunk_of_the_same_read_are_forwarded_and_recorded(
    tmp_path: Path, changes: dict[str, Any], in_one_read: bool
) -> None:
    good = chunked(event("a"), event("b"))[: -len(b"0\r\n\r\n")]

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        if not in_one_read:
            writer.write(STREAM_HEAD)
            await asyncio.sleep(0.05)
        writer.write((STREAM_HEAD if in_one_read else b"") + good + b"no size\r\n")
        await writer.drain()
        await asyncio.sleep(5)

    async def test() -> None:
        async with beside(tmp_path, script, script, **changes) as (b, _, _):
            client = await b.connect()
            await client.send(request())
            head, _, body = (await client.to_end()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert (event("a") in body, event("b") in body) == (True, True)
            assert b"no size" not in body and not body.endswith(b"0\r\n\r\n")
            assert await b.end() == ("failed", "truncated")
            assert sum(len(batch["t_ns"]) for batch in b.records("chunks")) == 2

    run(test())
