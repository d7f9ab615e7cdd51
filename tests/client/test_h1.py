"""The raw client against real sockets: framing, reuse, ends, and no limit on connections."""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from sloscope.client.h1 import Origin, Pool, fetch, make_room, parse_url, request_bytes, why
from sloscope.errors import ConfigError
from tests.client.sse_server import Asked, Reply, Script, SseServer, tokens

PATIENCE_S = 30


class Seen:
    """An exchange that keeps what it is told."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reads: list[tuple[int, bytes]] = []
        self.end: tuple[str, str | None] | None = None
        self.end_ns = 0

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    def responded(self, t_ns: int, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def received(self, t_ns: int, data: bytes) -> None:
        self.reads.append((t_ns, data))

    def ended(self, t_ns: int, transport: str, error: str | None) -> None:
        assert self.end is None, "ended twice"
        self.end, self.end_ns = (transport, error), t_ns
        self.over.set()


def with_pool(script: Script, use: Callable[[Pool, SseServer], Awaitable[None]]) -> SseServer:
    with SseServer(script) as server:

        async def main() -> None:
            pool = Pool(Origin("http", "127.0.0.1", server.port, ""))
            try:
                await use(pool, server)
            finally:
                await asyncio.wait_for(pool.close(), PATIENCE_S)

        uvloop.run(main())
    return server


async def get(pool: Pool, path: str = "/x", seen: Seen | None = None) -> Seen:
    seen = seen or Seen()
    pool.send(request_bytes("GET", pool.origin, path), seen)
    await asyncio.wait_for(seen.over.wait(), PATIENCE_S)
    return seen


def raw(*parts: bytes, close: bool = True) -> Script:
    """Writes the parts as they are, a moment apart."""

    async def script(asked: Asked, reply: Reply) -> None:
        for part in parts:
            await reply.raw(part)
            await asyncio.sleep(0.02)
        if close:
            reply.close()

    return script


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://10.0.0.1:8000", Origin("http", "10.0.0.1", 8000, "")),
        ("https://api.example.com/v1/", Origin("https", "api.example.com", 443, "/v1")),
        ("localhost:9", Origin("http", "localhost", 9, "")),
        ("8000", Origin("http", "127.0.0.1", 8000, "")),
        ("http://[::1]:80", Origin("http", "::1", 80, "")),
    ],
)
def test_urls_as_people_type_them(text: str, origin: Origin) -> None:
    assert parse_url(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        "", "ftp://x", "http://", "http://h:port", "http://h:1?x=1", "http://h:99999", "http://h:0", "http://h/a b",
        "http://h/ä", "http://a..b", "a..b:80", f"http://{'a' * 64}.b",
    ],
)  # fmt: skip
def test_what_is_no_url_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: .* is not accepted; accepted: http"):
        parse_url(text)


@pytest.mark.parametrize(
    "text", ["http://user:secret@h:1", "user:secret@h", "http://user:sec/ret@h", "http://secret@a..b"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--receipts: must not carry credentials; accepted: http") as refused:
        parse_url(text, "--receipts")
    assert "sec" not in str(refused.value)


def test_a_host_beyond_ascii_is_asked_for_as_idna_spells_it() -> None:
    assert parse_url("http://bücher.example").netloc == "xn--bcher-kva.example"


def test_the_host_header_names_a_port_only_where_it_is_not_the_schemes() -> None:
    assert parse_url("http://[::1]:8080").netloc == "[::1]:8080"
    assert parse_url("https://h").netloc == "h"


def test_connections_are_used_again_and_one_request_at_a_time() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        for _ in range(5):
            assert (await get(pool)).end == ("eof", None)

    assert with_pool(tokens(3), use).connections == 1


def test_nothing_waits_for_a_slot() -> None:
    all_are_there = asyncio.Event()  # in the server's loop

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 299:
            all_are_there.set()
        await asyncio.wait_for(all_are_there.wait(), PATIENCE_S)
        await tokens(1)(asked, reply)

    async def use(pool: Pool, server: SseServer) -> None:
        # Nobody is answered before all have asked.
        assert {seen.end for seen in await asyncio.gather(*(get(pool) for _ in range(300)))} == {("eof", None)}

    assert with_pool(script, use).connections == 300


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.json(200, {}, {"connection": "close"})
        reply.close()

    async def use(pool: Pool, server: SseServer) -> None:
        for _ in range(3):
            assert (await get(pool)).body == b"{}"

    assert with_pool(script, use).connections == 3


def test_events_of_one_read_share_its_stamp_and_later_ones_have_a_later() -> None:
    seen = Seen()

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
        while not seen.reads:
            await asyncio.sleep(0.001)
        await reply.raw(b"1\r\nc\r\n0\r\n\r\n")

    async def use(pool: Pool, server: SseServer) -> None:
        await get(pool, seen=seen)
        assert [data for _, data in seen.reads] == [b"a", b"b", b"c"]
        (first, _), (second, _), (third, _) = seen.reads
        assert first == second < third
        assert seen.end == ("eof", None)

    with_pool(script, use)


def test_a_response_cut_at_any_byte_is_read_the_same() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-a: b\r\n\r\nhello"

    async def script(asked: Asked, reply: Reply) -> None:
        cut = asked.number + 1
        await reply.raw(whole[:cut])
        await asyncio.sleep(0.005)
        await reply.raw(whole[cut:])

    async def use(pool: Pool, server: SseServer) -> None:
        for _ in range(1, len(whole)):
            seen = await get(pool)
            assert (seen.status, seen.headers["x-a"], seen.body, seen.end) == (200, "b", b"hello", ("eof", None))

    with_pool(script, use)


@pytest.mark.parametrize(
    ("parts", "transport", "body"),
    [
        ([b"HTTP/1.0 200 OK\r\n\r\nab", b"cd"], "eof", b"abcd"),  # the close ends it
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"], "reset", b"ab"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"], "reset", b"ab"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], "reset", b""),
        ([b"SSH-2.0-OpenSSH\r\n"], "reset", b""),
        ([b""], "reset", b""),
        ([b"HTTP/1.1 200 OK\r\nx-begun"], "reset", b""),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"], "eof", b"ok"),
    ],
)
def test_how_a_message_ends_is_told_once(parts: list[bytes], transport: str, body: bytes) -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        seen = await get(pool)
        assert seen.end is not None and seen.end[0] == transport
        assert seen.body == body

    with_pool(raw(*parts), use)


def test_a_reset_in_mid_answer_is_a_reset_with_the_class_of_its_error() -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        await asyncio.sleep(0.05)
        reply.reset()

    async def use(pool: Pool, server: SseServer) -> None:
        seen = await get(pool)
        assert seen.end == ("reset", "ConnectionResetError")
        assert seen.body.startswith(b"data: ")

    with_pool(script, use)


def test_a_refused_connection_is_a_connect_error() -> None:
    with SseServer(tokens(1)) as server:
        port = server.port

    async def main() -> None:
        pool = Pool(Origin("http", "127.0.0.1", port, ""))
        assert (await get(pool)).end == ("connect_error", "ConnectionRefusedError")
        with pytest.raises(ConnectionError):
            await fetch(pool, "GET", "/x")

    uvloop.run(main())


def test_an_aborted_call_hears_nothing_more_and_the_server_sees_it_leave() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        seen = Seen()
        call = pool.send(request_bytes("GET", pool.origin, "/x"), seen)
        while not seen.reads:
            await asyncio.sleep(0.01)
        call.abort()
        heard = len(seen.reads)
        while not server.disconnects:
            await asyncio.sleep(0.01)
        assert len(seen.reads) == heard and seen.end is None

    with_pool(tokens(1_000_000, gap_s=0.02), use)


def test_a_call_aborted_while_it_connects_sends_nothing() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        seen = Seen()
        pool.send(request_bytes("GET", pool.origin, "/x"), seen).abort()
        await asyncio.sleep(0.1)
        assert seen.end is None and server.asked == []

    with_pool(tokens(1), use)


def test_bytes_that_nobody_asked_for_retire_the_connection() -> None:
    answered = asyncio.Event()  # in the server's loop

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.json(200, {})
        if asked.number == 0:
            await answered.wait()
            await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    async def use(pool: Pool, server: SseServer) -> None:
        assert (await get(pool)).body == b"{}"
        (idle,) = pool._idle
        server.soon(answered.set)
        while idle.usable and idle.quiet:
            await asyncio.sleep(0.01)
        assert (await get(pool)).body == b"{}"

    assert with_pool(script, use).connections == 2


def test_fetch_gives_up_after_its_timeout() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        with pytest.raises(TimeoutError):
            await fetch(pool, "GET", "/x", timeout_s=0.1)

    with_pool(tokens(1, first_s=60), use)


def self_signed(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, certificate


def test_https_is_verified_and_a_certificate_that_is_not_trusted_is_a_connect_error(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    with SseServer(tokens(2), tls=serving) as server:
        origin = parse_url(server.url)
        trusting = ssl.create_default_context(cafile=str(certificate))

        async def main() -> None:
            pool = Pool(origin, trusting)
            seen = await get(pool)
            assert seen.end == ("eof", None) and b"[DONE]" in seen.body
            await pool.close()
            refused = await get(Pool(origin))
            assert refused.end == ("connect_error", "SSLCertVerificationError")
            with pytest.raises(ConnectionError) as raised:
                await fetch(Pool(origin), "GET", "/v1/models")
            assert why(raised.value) == "its certificate is not trusted"

        uvloop.run(main())


def test_a_connection_with_a_small_buffer_is_of_one_use_and_reads_nothing_while_held() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        seen = Seen()
        call = pool.send(request_bytes("GET", pool.origin, "/x"), seen, receive_buffer=4096)
        while not seen.reads:
            await asyncio.sleep(0.01)
        assert call.connection is not None and call.connection.hold()
        got = len(seen.body)
        await asyncio.sleep(0.3)
        assert len(seen.body) == got and not seen.over.is_set()
        call.connection.go_on()
        await asyncio.wait_for(seen.over.wait(), PATIENCE_S)
        assert seen.end == ("eof", None) and len(seen.body) > got
        assert not call.connection.hold()
        await get(pool)
        assert pool.opened == 2

    with_pool(tokens(1000), use)


def test_a_small_buffer_and_no_connection_is_told_like_any_other() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        dead = Pool(Origin("http", "127.0.0.1", 9, ""))
        seen = Seen()
        dead.send(request_bytes("GET", dead.origin, "/x"), seen, receive_buffer=4096)
        await asyncio.wait_for(seen.over.wait(), PATIENCE_S)
        assert seen.end == ("connect_error", "ConnectionRefusedError")
        await dead.close()

    with_pool(tokens(1), use)


def test_a_connection_with_bytes_that_are_not_understood_yet_gets_no_request() -> None:
    async def use(pool: Pool, server: SseServer) -> None:
        await get(pool)
        (idle,) = pool._idle
        idle.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")  # before the request that it would answer
        assert (await get(pool)).body
        assert pool.opened == 2 and not idle.usable

    with_pool(tokens(1), use)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how long the table is")
@pytest.mark.parametrize("beyond", [0, 1_000_000])
def test_room_for_sockets_is_made_before_they_are_opened_as_far_as_the_limit_allows(beyond: int) -> None:
    def room() -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["FDSize"])

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, descriptors = 2 * room(), len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY and limit > hard:
        pytest.skip("the table is as long as it may get")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        make_room(limit + beyond)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert room() >= limit
    assert len(os.listdir("/proc/self/fd")) == descriptors
