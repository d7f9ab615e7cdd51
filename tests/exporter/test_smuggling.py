"""What two readers could understand differently is refused by the first, and the second never sees a byte of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from exporter.client_connection import ClientConnection
from exporter.http1 import parse_request_head
from tests.exporter.harness import (
    CHAT,
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
    serving,
)

FILES = "/v1/files"  # a path that is not observed: its body is not read before it goes up
CHUNKED = "transfer-encoding: chunked"
EMPTY = b"0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"


def post(*lines: str, body: bytes = b"", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join((f"POST {FILES} {version}", "host: a", *lines)).encode() + b"\r\n\r\n" + body


def get(target: str = "/", *lines: str) -> bytes:
    return "\r\n".join((f"GET {target} HTTP/1.1", "host: a", *lines)).encode() + b"\r\n\r\n"


def in_chunks(body: bytes) -> bytes:
    return post(CHUNKED, body=body)


REFUSED = {
    # Two lengths, or one that is read in two ways
    "length and chunks": (post("content-length: 3", CHUNKED, body=EMPTY + SMUGGLED), 400),
    "chunks and length": (post(CHUNKED, "content-length: 3", body=EMPTY + SMUGGLED), 400),
    "the same length twice": (post("content-length: 5", "content-length: 5", body=b"hello"), 400),
    "two lengths": (post("content-length: 5", "content-length: 0", body=b"hello"), 400),
    "a list of lengths": (post("content-length: 5, 5", body=b"hello"), 400),
    "two lengths in a line": (post("content-length: 5 5", body=b"hello"), 400),
    "a length with a sign": (post("content-length: +5", body=b"hello"), 400),
    "a negative length": (post("content-length: -5", body=b"hello"), 400),
    "a hexadecimal length": (post("content-length: 0x5", body=b"hello"), 400),
    "a length with a point": (post("content-length: 5.0", body=b"hello"), 400),
    "a length with an underscore": (post("content-length: 1_0", body=b"hellohello"), 400),
    "a length in foreign digits": (post("content-length: \u0665", body=b"hello"), 400),
    "a length behind a vertical tab": (post("content-length: \x0b5", body=b"hello"), 400),
    "no length": (post("content-length:", body=b"hello"), 400),
    "a length above 64 bits": (post("content-length: 99999999999999999999", body=b"hello"), 400),
    # Codings that are not chunked to everybody
    "xchunked": (post("transfer-encoding: xchunked", body=EMPTY), 400),
    "chunked twice in a line": (post("transfer-encoding: chunked, chunked", body=EMPTY), 400),
    "chunked twice": (post(CHUNKED, CHUNKED, body=EMPTY), 400),
    "chunked in quotes": (post('transfer-encoding: "chunked"', body=EMPTY), 400),
    "chunked behind a vertical tab": (post("transfer-encoding: \x0bchunked", body=EMPTY), 400),
    "chunked and a comma": (post("transfer-encoding: chunked,", body=EMPTY), 400),
    "a comma and chunked": (post("transfer-encoding: , chunked", body=EMPTY), 501),
    "chunked with a parameter": (post("transfer-encoding: chunked;a=b", body=EMPTY), 400),
    "gzip before chunked": (post("transfer-encoding: gzip, chunked", body=EMPTY), 501),
    "identity after chunked": (post("transfer-encoding: chunked, identity", body=EMPTY), 400),
    "identity": (post("transfer-encoding: identity", "content-length: 5", body=b"hello"), 400),
    "a coding without a name": (post("transfer-encoding:", body=EMPTY), 400),
    "chunked in a folded line": (post("transfer-encoding:\r\n chunked", body=EMPTY), 400),
    "chunked in HTTP/1.0": (post(CHUNKED, body=EMPTY, version="HTTP/1.0"), 400),
    # Lines and names
    "a blank before the colon": (post("transfer-encoding : chunked", body=EMPTY), 400),
    "a tab before the colon": (post("transfer-encoding\t: chunked", body=EMPTY), 400),
    "a blank before the name": (post(" transfer-encoding: chunked", body=EMPTY), 400),
    "a folded line": (post("x: y", " z: w"), 400),
    "a line folded with a tab": (post("x: y", "\tz"), 400),
    "LF throughout": (b"GET / HTTP/1.1\nhost: a\n\n", 400),
    "an LF within": (post("x: y\ncontent-length: 5", body=b"hello"), 400),
    "an LF as the blank line": (b"GET / HTTP/1.1\r\nhost: a\r\n\n" + SMUGGLED, 400),
    "a CR within": (post("x: y\rcontent-length: 5", body=b"hello"), 400),
    "CRs as the blank line": (b"GET / HTTP/1.1\r\nhost: a\r\r" + SMUGGLED, 400),
    "NUL in a value": (post("x: a\0b"), 400),
    "NUL in a name": (post("x\0: a"), 400),
    "a control character in a value": (post("x: a\x01b"), 400),
    "DEL in a value": (post("x: a\x7fb"), 400),
    "a line without a colon": (post("rubbish"), 400),
    "a header without a name": (post(": x"), 400),
    "parentheses in a name": (post("a(b): x"), 400),
    "a letter in a name that is none": (post("\u00e9: x"), 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (get("/", "host: b"), 400),
    # The request line
    "a blank in the target": (get("/a b"), 400),
    "a tab in the target": (get("/a\tb"), 400),
    "NUL in the target": (get("/a\0b"), 400),
    "a control character in the target": (get("/a\x01"), 400),
    "a fragment": (get("/a#b"), 400),
    "a target without a slash": (get("a"), 400),
    "the target of OPTIONS": (get("*"), 400),
    "a target of another scheme": (get("ftp://a/b"), 400),
    "a target without a host": (get("http:///b"), 400),
    "a target with credentials": (get("http://u:p@a/b"), 400),
    "two blanks": (b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "tabs between the words": (b"GET\t/\tHTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "a blank at the end": (b"GET / HTTP/1.1 \r\nhost: a\r\n\r\n", 400),
    "a method in lower case": (b"get / HTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "http in lower case": (b"GET / http/1.1\r\nhost: a\r\n\r\n", 400),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nhost: a\r\n\r\n", 400),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "RTSP": (b"DESCRIBE / RTSP/1.0\r\nhost: a\r\n\r\n", 400),
    "ICE": (b"SOURCE / ICE/1.0\r\nhost: a\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32) + b"\r\n\r\n", 400),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", 501),
    "an upgrade": (get("/", "upgrade: websocket", "connection: upgrade"), 501),
    "an expectation": (post("expect: 200-ok", "content-length: 0"), 417),
    "a target above 16 KiB": (get("/" + "a" * (17 << 10)), 414),
    "201 headers": (get("/", *(f"x{n}: y" for n in range(200))), 431),
    "a head above 64 KiB": (get("/", "x: " + "y" * (70 << 10)), 431),
    "a head above 64 KiB without an end": (get("/", "x: " + "y" * (70 << 10))[:-4], 431),
    # Chunks
    "a size that ends with LF": (in_chunks(b"5\nhello\r\n" + EMPTY), 400),
    "a size that ends with CR": (in_chunks(b"5\rhello\r\n" + EMPTY), 400),
    "a negative size": (in_chunks(b"-5\r\nhello\r\n" + EMPTY), 400),
    "a size with a sign": (in_chunks(b"+5\r\nhello\r\n" + EMPTY), 400),
    "a size with 0x": (in_chunks(b"0x5\r\nhello\r\n" + EMPTY), 400),
    "a size with an underscore": (in_chunks(b"1_0\r\nhello\r\n" + EMPTY), 400),
    "a size above 64 bits": (in_chunks(b"10000000000000005\r\nhello\r\n" + EMPTY), 400),
    "a size of nothing but zeros, twenty of them": (in_chunks(b"0" * 20 + b"\r\n\r\n"), 400),
    "a blank before the size": (in_chunks(b" 5\r\nhello\r\n" + EMPTY), 400),
    "a blank after the size": (in_chunks(b"5 \r\nhello\r\n" + EMPTY), 400),
    "no size": (in_chunks(b"\r\nhello\r\n" + EMPTY), 400),
    "less than the chunk holds": (in_chunks(b"4\r\nhello\r\n" + EMPTY), 400),
    "a chunk that ends with LF": (in_chunks(b"5\r\nhello\n" + EMPTY), 400),
    "an LF in an extension": (in_chunks(b"5;a\nb\r\nhello\r\n" + EMPTY), 400),
    "a CR in an extension": (in_chunks(b"5;a\rb\r\nhello\r\n" + EMPTY), 400),
    "NUL in an extension": (in_chunks(b"5;a\0b\r\nhello\r\n" + EMPTY), 400),
    "an extension above 4 KiB": (in_chunks(b"5;" + b"e" * 5000 + b"\r\nhello\r\n" + EMPTY), 400),
    # Trailers: what is forwarded must not be taken for a head
    "a trailer that ends with LF": (in_chunks(b"0\r\nx: y\n\r\n"), 400),
    "an LF for the end of the trailers": (in_chunks(b"0\r\n\n" + SMUGGLED), 400),
    "a CR in a trailer": (in_chunks(b"0\r\nx: y\rz\r\n\r\n"), 400),
    "NUL in a trailer": (in_chunks(b"0\r\nx: \0\r\n\r\n"), 400),
    "a folded trailer": (in_chunks(b"0\r\nx: y\r\n z\r\n\r\n"), 400),
    "a trailer without a colon": (in_chunks(b"0\r\n" + SMUGGLED), 400),
    "a length as a trailer": (in_chunks(b"0\r\nContent-Length: 5\r\n\r\n"), 400),
    "a coding as a trailer": (in_chunks(b"0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400),
    "a host as a trailer": (in_chunks(b"0\r\nhost: b\r\n\r\n"), 400),
    "trailers above 16 KiB": (in_chunks(b"0\r\n" + b"x: %b\r\n" % (b"y" * 4000) * 5 + b"\r\n"), 400),
}


class Recording:
    """An upstream that keeps every byte. Answers each GET of /alive, and nothing else."""

    def __init__(self) -> None:
        self.received = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received += data
            if data.startswith(b"GET /alive"):
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


@asynccontextmanager
async def recording(tmp_path: Path) -> AsyncIterator[tuple[Bench, Recording]]:
    upstream = Recording()
    async with serving(upstream.serve) as url, bench(tmp_path, answering(), upstreams=(url,)) as b:
        del b.plane.upstreams.pools[1:]
        yield b, upstream


async def check_alive(b: Bench) -> None:
    client = await b.connect()
    await client.send(b"GET /alive HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.response()).status == 204
    await client.close()


def test_what_can_be_read_in_two_ways_is_refused_and_nothing_of_it_reaches_the_upstream(tmp_path: Path) -> None:
    async def test() -> None:
        async with recording(tmp_path) as (b, upstream):
            wrong: dict[str, object] = {}
            for name, (raw, status) in REFUSED.items():
                for sent in dict.fromkeys((raw, raw.replace(FILES.encode(), CHAT.encode()))):
                    await check_alive(b)  # and leaves a connection to the upstream that could be used at once
                    upstream.received = b""
                    client = await b.connect()
                    await client.send(sent)
                    got = await client.to_end()
                    await client.close()
                    await check_alive(b)
                    seen = upstream.received.partition(b"GET /alive")[0]
                    is_one_answer = got.count(b"\r\nconnection: close\r\n") == 1
                    if not got.startswith(b"HTTP/1.1 %d " % status) or not is_one_answer or seen:
                        wrong[name] = got[:120], seen
            assert wrong == {}

    run(test(), timeout_s=60)


def test_a_body_that_turns_bad_later_never_becomes_a_whole_request_upstream(tmp_path: Path) -> None:
    async def test() -> None:
        async with recording(tmp_path) as (b, upstream):
            client = await b.connect()
            await client.send(in_chunks(b"5\r\nhello\r\n"))
            await b.until(lambda: upstream.received.endswith(b"hello\r\n"))
            await client.send(b"0\r\n\n" + SMUGGLED)
            assert (await client.to_end()).startswith(b"HTTP/1.1 400 ")
            await check_alive(b)  # over a connection of its own: the other one is closed
            body = upstream.received.partition(b"\r\n\r\n")[2]
            assert body.startswith(b"5\r\nhello\r\nGET /alive ")

    run(test())


MISREAD = {
    "the same length twice": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 4\r\n\r\nhello",
    "a list of lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\nhello",
    "a length with a sign": b"HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\nhello",
    "a hexadecimal length": b"HTTP/1.1 200 OK\r\ncontent-length: 0x5\r\n\r\nhello",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "xchunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked behind a vertical tab": b"HTTP/1.1 200 OK\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "gzip before chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": b"HTTP/1.1 200 OK\r\ncontent-length : 5\r\n\r\nhello",
    "a folded line": b"HTTP/1.1 200 OK\r\nx: y\r\n content-length: 0\r\ncontent-length: 5\r\n\r\nhello",
    "LF throughout": b"HTTP/1.1 200 OK\ncontent-length: 5\n\nhello",
    "an LF within": b"HTTP/1.1 200 OK\r\nx: y\ncontent-length: 5\r\n\r\nhello",
    "a CR within": b"HTTP/1.1 200 OK\r\nx: y\rcontent-length: 5\r\n\r\nhello",
    "NUL in a value": b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 0\r\n\r\n",
    "an upgrade that nobody asked for": b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "HTTP/0.9": b"hello",
    "RTSP": b"RTSP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "a head above 64 KiB": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (70 << 10) + b"\r\ncontent-length: 0\r\n\r\n",
    "a head above 64 KiB without an end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (70 << 10),
}


@pytest.mark.parametrize("path", [CHAT, FILES])
def test_an_answer_that_can_be_read_in_two_ways_is_a_502(tmp_path: Path, path: str) -> None:
    answer = b""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()  # and the connection stays open: nothing more comes

    async def test() -> None:
        nonlocal answer
        async with bench(tmp_path, script) as b:
            wrong: dict[str, bytes] = {}
            for name, raw in MISREAD.items():
                answer = raw
                client = await b.connect()
                await client.send(request(path=path))
                got = await client.to_end()
                if not got.startswith(b"HTTP/1.1 502 ") or got.count(b"\r\nconnection: close\r\n") != 1:
                    wrong[name] = got[:120]
            assert wrong == {}

    run(test())


TORN_CHUNKS = {
    "a size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a size that ends with LF": b"5\nhello\r\n0\r\n\r\n",
    "less than the chunk holds": b"4\r\nhello\r\n0\r\n\r\n",
    "a size above 64 bits": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "an LF for the end of the trailers": b"0\r\n\n",
    "a length as a trailer": b"0\r\ncontent-length: 5\r\n\r\n",
}


@pytest.mark.parametrize("name", TORN_CHUNKS)
def test_an_answer_whose_chunks_break_stops_short_at_the_client_too(tmp_path: Path, name: str) -> None:
    begun = b"%x\r\n%b\r\n" % (len(event()), event())

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + begun)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(TORN_CHUNKS[name])

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request())
            got = await client.to_end()
            assert got.partition(b"\r\n\r\n")[2] == begun  # nothing of what broke, and no last chunk
            assert await b.end() == ("failed", "truncated")

    run(test())


def test_what_is_forwarded_is_read_anew_by_the_same_rules() -> None:
    """Blanks that may stand are taken away, so that nobody else has to know that they may."""
    head = parse_request_head(post("Transfer-Encoding: \t CHUNKED", "X:\t y \t"))
    assert head.headers == [(b"host", b"a"), (b"Transfer-Encoding", b"CHUNKED"), (b"X", b"y")]


def test_a_target_with_a_scheme_keeps_its_query(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            client = await b.connect()
            for target in ("http://other:81?x=/y", "HTTP://other/a?b", "https://other"):
                await client.send(get(target))
                await client.response()
            assert [seen.line for seen in b.upstream.seen] == [
                b"GET /?x=/y HTTP/1.1",
                b"GET /a?b HTTP/1.1",
                b"GET / HTTP/1.1",
            ]
            assert {seen.header("host") for seen in b.upstream.seen} == {b.plane.settings.upstreams[0][7:]}

    run(test())


def test_a_flood_of_blank_lines_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            flooding, other = await b.connect(), await b.connect()
            loop = asyncio.get_running_loop()
            await flooding.send(b"\r\n" * (8 << 20))
            began = loop.time()
            await other.send(request())
            assert (await other.response()).status == 200
            assert loop.time() - began < 20  # taken away one at a time, each would move all that follow: minutes
            await flooding.send(request())
            assert (await flooding.response()).status == 200

    run(test())


def test_requests_that_wait_are_not_read_as_one_when_more_comes_in_the_turn_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sockets can be ready in one turn of the loop: the end of an answer, then the next bytes of its client."""
    over = ClientConnection.exchange_over

    def over_and_more(self: ClientConnection) -> None:
        over(self)
        if late:
            self.data_received(late.pop())

    monkeypatch.setattr(ClientConnection, "exchange_over", over_and_more)
    late = [request(b"", path="/c", method="GET")]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + seen.line.split(b" ")[1])

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request(b"", path="/a", method="GET") + request(b"", path="/b", method="GET"))
            assert [(await client.response()).body for _ in range(3)] == [b"/a", b"/b", b"/c"]

    run(test())


def test_a_request_that_waits_for_an_earlier_answer_arrived_when_it_was_read(tmp_path: Path) -> None:
    stream = chunked(event(), finish(), DONE)

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(STREAM_HEAD + stream)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            client = await b.connect()
            await client.send(request() * 3)
            for _ in range(3):
                await client.response()
            await b.ends(3)
            begins = b.records("begin")
            # One read brought all three, whole.
            assert len({begin["arrived_ns"] for begin in begins}) == 1
            assert len({begin["body_complete_ns"] for begin in begins}) == 1
            assert b.total("sloscope_sidecar_ttft_seconds_sum") >= 0.1 + 0.2 + 0.3

    run(test())
