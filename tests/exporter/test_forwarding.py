"""Bytes in, the same bytes out: framings, connections, back-pressure and ends, on real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

import pytest

from exporter import data_plane
from tests.exporter.harness import (
    ASK,
    CHAT,
    DONE,
    STREAM_HEAD,
    Bench,
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

STREAM = event("a") + event("b") + finish() + DONE


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


ODD_BODIES = {
    "in one chunk": chunked(STREAM),
    "a chunk for every three bytes": chunked(*pieces(STREAM, 3)),
    "CRLF lines and a comment": chunked(b": ping\r\n\r\n" + STREAM.replace(b"\n", b"\r\n")),
    "chunk extensions and trailers": b"%x;a=b\r\n%b\r\n0;c\r\nx-late: 1\r\nx-more: 2\r\n\r\n" % (len(STREAM), STREAM),
    "sizes with leading zeros, in capitals": b"000%X\r\n%b\r\n0000\r\n\r\n" % (len(STREAM), STREAM),
}


@pytest.mark.parametrize("name", ODD_BODIES)
@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_a_chunked_stream_arrives_byte_for_byte_however_it_is_framed_and_cut(
    tmp_path: Path, name: str, cut: int
) -> None:
    raw = ODD_BODIES[name]

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in pieces(STREAM_HEAD + raw, cut):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()
            assert answer.body == raw
            assert answer.header("transfer-encoding") == "chunked" and answer.header("content-length") is None
            assert await b.end() == ("completed", "")
            (chunks,) = b.records("chunks")
            assert len(chunks["t_ns"]) == 2

    run(test())


def test_a_stream_with_a_content_length_keeps_it(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(STREAM)
        writer.write(head + STREAM)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()
            assert answer.body == STREAM and answer.header("content-length") == str(len(STREAM))
            assert await b.end() == ("completed", "")

    run(test())


def test_a_page_that_may_read_the_answer_may_read_its_id_too(tmp_path: Path) -> None:
    """Which pages may is the upstream's word; to those it names no headers that it does not know of."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        allowed = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: x-own\r\n"
        head = STREAM_HEAD.replace(b"\r\n", b"\r\n" + allowed, 1) if seen.header("origin") else STREAM_HEAD
        writer.write(head + chunked(STREAM))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            page = await b.ask(ASK, "origin: https://app.example")
            exposed = [line for line in page.head.lower().split(b"\r\n") if b"expose" in line]
            assert exposed == [
                b"access-control-expose-headers: x-own",
                b"access-control-expose-headers: x-sloscope-request-id",
            ]
            assert b"access-control" not in (await b.ask()).head.lower()

    run(test())


def test_a_close_delimited_stream_of_an_http10_server_ends_with_the_connection(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + STREAM)
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()  # reads to the end of the connection
            assert answer.body == STREAM and answer.header("connection") == "close"
            assert await b.end() == ("completed", "")

    run(test())


def test_a_client_of_http10_gets_the_payload_of_chunks_and_the_end_of_the_connection(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(*pieces(STREAM, 9))) as b:
            client = await b.connect()
            await client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(ASK), ASK))
            answer = await client.response()
            assert answer.body == STREAM and answer.header("transfer-encoding") is None

    run(test())


def test_request_bodies_go_up_unchanged_in_their_own_framing(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            await b.ask(ASK)
            raw = chunked(ASK[:4], ASK[4:])
            client = await b.connect()
            await client.send(b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode())
            for piece in pieces(raw, 5):
                await client.send(piece)
                await asyncio.sleep(0.001)
            await client.response()
            sized, in_chunks = b.upstream.seen
            assert sized.body == ASK and sized.header("content-length") == str(len(ASK))
            assert in_chunks.body == raw and in_chunks.header("transfer-encoding") == "chunked"
            assert [record["model"] for record in b.records("begin")] == ["m", "m"]

    run(test())


def test_both_connections_are_kept_alive(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            for _ in range(3):
                await client.send(request())
                assert (await client.response()).status == 200
            assert b.upstream.connections == 1
            assert b.check_identity() == 3

    run(test())


def test_pipelined_requests_are_answered_one_after_the_other(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + seen.line.split(b"/")[1][:1])

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(b"".join(request(b"", path=f"/{name}", method="GET") for name in "abc"))
            assert [(await client.response()).body for _ in range(3)] == [b"a", b"b", b"c"]
            assert b.upstream.connections == 1

    run(test())


def test_other_requests_pass_untouched_and_are_counted(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        body = b"" if seen.line.startswith(b"HEAD") else b"hello"
        writer.write(b"HTTP/1.1 200 Fine\r\nX-Own: 1\r\ncontent-length: 5\r\n\r\n" + body)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request(b"", path="/v1/models?a=b", method="GET"))
            answer = await client.response()
            assert answer.body == b"hello" and answer.head.startswith(b"HTTP/1.1 200 Fine\r\nX-Own: 1\r\n")
            await client.send(request(b"", path="/v1/models", method="HEAD"))
            assert (await client.response(b"HEAD")).header("content-length") == "5"
            await client.send(request(b"x" * 100_000, path="/v1/embeddings"))
            assert (await client.response()).body == b"hello"
            # A GET of an observed path asks for no completion.
            await client.send(request(b"", path=CHAT, method="GET"))
            await client.response()
            assert b.upstream.seen[0].line == b"GET /v1/models?a=b HTTP/1.1"
            assert b.upstream.seen[0].header("x-sloscope-request-id") is None
            assert b.total("sloscope_sidecar_passthrough_total") == 4
            assert b.check_identity() == 0 and b.records("begin") == []

    run(test())


def test_an_expected_continue_is_given_at_once_and_not_asked_of_the_upstream(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            head, _, _ = request(ASK, "expect: 100-continue").partition(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            assert (await client.response()).status == 100
            await client.send(ASK)
            assert (await client.response()).status == 200
            assert b.upstream.seen[0].header("expect") is None

    run(test())


def test_interim_responses_are_passed_on(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + STREAM_HEAD + chunked(STREAM))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request())
            assert (await client.response()).status == 103
            assert (await client.response()).body == chunked(STREAM)

    run(test())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (70 << 10) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (70 << 10), 431),
        (b"rubbish\r\n\r\n", 501),
        (b"GET /\r\n\r\n", 505),
    ],
)
def test_what_is_refused_never_reaches_the_upstream(tmp_path: Path, raw: bytes, status: int) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            await client.send(raw)
            answer = await client.response()
            assert answer.status == status and answer.header("connection") == "close"
            assert await client.to_end() == b""
            assert b.upstream.seen == []

    run(test())


def test_a_chunked_request_that_breaks_its_framing_is_cut_off(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            client = await b.connect()
            head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
            await client.send(head + b"3\r\nabcd\r\n")
            assert (await client.response()).status == 400
            assert b.upstream.seen == []
            assert await b.end() == ("cancelled", "disconnect")

    run(test())


def test_when_the_client_leaves_the_upstream_connection_is_closed(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        await asyncio.sleep(60)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request())
            await client.reader.readuntil(b"\n\n")
            writer = _server_side(b)
            client.writer.close()
            await b.until(lambda: writer() == [])
            assert await b.end() == ("cancelled", "disconnect")
            assert b.total("sloscope_upstream_inflight_requests") == 0

    def _server_side(b: Bench):  # type: ignore[no-untyped-def]
        """Exchanges that still hold a connection to the upstream."""
        return lambda: [client for client in b.plane.clients if client.exchange is not None]

    run(test())


def test_the_upstream_sees_the_client_leave(tmp_path: Path) -> None:
    seen_closed: list[bool] = []

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(ASK))
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        seen_closed.append(True)
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with bench(tmp_path, answering(STREAM), upstreams=(url,)) as b:
            client = await b.connect()
            await client.send(request())
            await client.reader.readuntil(b"\n\n")
            client.writer.close()
            await b.until(lambda: seen_closed)
        server.close()

    run(test())


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize(("reset", "reason"), [(True, "upstream_reset"), (False, "truncated")])
def test_a_stream_that_breaks_off_upstream_breaks_off_at_the_client_too(
    tmp_path: Path, reset: bool, reason: str
) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        await writer.drain()
        await asyncio.sleep(0.05)
        _reset(writer) if reset else writer.close()
        await asyncio.sleep(60)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await b.ask()
            assert await b.end() == ("failed", reason)

    run(test())


def test_a_reset_of_a_close_delimited_stream_does_not_look_like_its_end(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event())
        await writer.drain()
        await asyncio.sleep(0.05)
        _reset(writer)
        await asyncio.sleep(60)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            with pytest.raises(ConnectionResetError):
                await b.ask()
            assert await b.end() == ("failed", "upstream_reset")

    run(test())


def test_an_upstream_that_cannot_be_reached_is_a_502_and_a_connect_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering()) as b:
            await b.upstream.stop()
            answer = await b.ask()
            assert answer.status == 502 and answer.header("content-type") == "application/json"
            assert len(answer.header("x-sloscope-request-id") or "") == 26
            assert await b.end() == ("failed", "connect_error")
            assert b.total("sloscope_upstream_up") == 0
            assert b.check_identity() == 1

    run(test())


def test_with_several_upstreams_the_one_that_answers_is_used(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def test() -> None:
            async with bench(tmp_path, answering(STREAM), upstreams=(dead,)) as b:
                assert [(await b.ask()).status for _ in range(4)] == [200] * 4
                assert b.total("sloscope_upstream_up", upstream=dead) == 0
                assert b.total("sloscope_upstream_inflight_requests") == 0

        run(test())


def test_a_request_goes_to_the_upstream_with_the_least_outstanding_work(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(_: Seen, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(STREAM_HEAD + chunked(STREAM))

    async def test() -> None:
        first = ScriptedUpstream(slow)
        url = await first.start()
        async with bench(tmp_path, slow, upstreams=(url,)) as b:
            asked = [asyncio.create_task(b.ask()) for _ in range(6)]
            await b.until(lambda: len(first.seen) + len(b.upstream.seen) == 6)
            assert (len(first.seen), len(b.upstream.seen)) == (3, 3)
            release.set()
            await asyncio.gather(*asked)
        await first.stop()

    run(test())


def test_an_idle_connection_that_the_upstream_closed_costs_no_request(tmp_path: Path) -> None:
    """The upstream closes the connection on receipt of its second request, unanswered, as one that had timed out."""

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.connection == 0 and len(b_seen) == 1:
            writer.close()
            b_seen.append(seen)
            await asyncio.sleep(60)
        b_seen.append(seen)
        writer.write(STREAM_HEAD + chunked(STREAM))

    b_seen: list[Seen] = []

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert (await b.ask()).status == 200
            assert (await b.ask()).status == 200
            assert b.upstream.connections == 2
            assert [end["outcome"] for end in await b.ends(2)] == ["completed", "completed"]

    run(test())


@pytest.mark.parametrize(
    "rubbish",
    [
        b"rubbish\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (80 << 10),
    ],
)
def test_an_upstream_that_answers_rubbish_is_a_502(tmp_path: Path, rubbish: bytes) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(rubbish)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert (await b.ask()).status == 502
            ((outcome, _),) = [await b.end()]
            assert outcome == "failed"

    run(test())


def test_bytes_after_the_end_of_a_response_do_not_reach_the_client(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(STREAM) + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            for _ in range(2):
                await client.send(request())
                assert (await client.response()).body == chunked(STREAM)
            assert b.upstream.connections == 2  # the connection that said too much is not used again

    run(test())


def test_a_reader_that_stops_holds_the_upstream_and_no_memory(tmp_path: Path) -> None:
    total = 64 << 20
    sent = 0

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % total)
        block = event("x" * 65_000)
        while sent < total:
            piece = block[: total - sent]
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            reader, writer = await asyncio.open_connection(*b.address, limit=1 << 16)
            writer.write(request())
            await reader.readuntil(b"\r\n\r\n")
            await b.until(lambda: any(client.is_held for client in b.plane.clients))
            held_at = -1
            while sent != held_at:
                held_at = sent
                await asyncio.sleep(0.3)
            # What fits into the sockets' own buffers went out, and then nothing more.
            assert sent < total // 2
            (connection,) = [c for c in b.plane.clients if c.exchange is not None]
            assert connection.transport.get_write_buffer_size() <= 512 << 10
            received = 0
            while received < total:
                received += len(await reader.read(1 << 20))
            writer.close()
            (end,) = await b.ends()
            assert end["consumer_hold_ns"] > 200_000_000 and end["bytes"] == total

    run(test())


def test_a_large_upload_to_an_upstream_that_does_not_read_is_held_back(tmp_path: Path) -> None:
    total = 100_000_000
    held: list[asyncio.StreamWriter] = []

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)  # and the reader's small buffer stays full

    async def test() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0, limit=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with bench(tmp_path, answering(), upstreams=(url,)) as b:
            client = await b.connect()
            client.writer.transport.set_write_buffer_limits(high=1 << 16)
            head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % total
            client.writer.write(head)
            sent = 0
            try:
                async with asyncio.timeout(0.5):
                    while sent < total:
                        await client.send(b"x" * 65536)
                        sent += 65536
            except TimeoutError:
                pass
            # What fits into the sockets' own buffers went out, and then nothing more.
            assert sent < total // 2
            for writer in held:
                writer.transport.abort()
        server.close()

    run(test())


def test_an_answer_that_comes_before_the_whole_request_reaches_the_client(tmp_path: Path) -> None:
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        try:
            while await reader.read(1 << 20):
                pass
        except ConnectionError:
            pass
        writer.transport.abort()

    async def test() -> None:
        server = await asyncio.start_server(refusing, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with bench(tmp_path, answering(), upstreams=(url,)) as b:
            client = await b.connect()
            await client.send(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 1000)
            answer = await client.response()
            assert (answer.status, answer.body) == (413, b"big")
            assert answer.header("connection") == "close"
            assert await client.to_end() == b""
        server.close()

    run(test())


def test_an_idle_client_connection_and_a_head_without_end_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(STREAM)) as b:
            idle, slow, served = await b.connect(), await b.connect(), await b.connect()
            await slow.send(b"GET / HTTP/1.1\r\nhost:")
            await b.until(lambda: any(client.is_in_head for client in b.plane.clients))
            await served.send(request())
            assert (await served.response()).status == 200
            monkeypatch.setattr(data_plane, "HEAD_TIMEOUT_NS", 100_000_000)
            monkeypatch.setattr(data_plane, "IDLE_TIMEOUT_NS", 100_000_000)
            assert [await client.to_end() for client in (idle, slow, served)] == [b"", b"", b""]

    run(test())
