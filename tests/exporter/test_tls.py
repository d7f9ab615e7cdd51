"""https upstreams, with a certificate of the test's own."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.exporter.harness import (
    DONE,
    STREAM_HEAD,
    Bench,
    answering,
    bench,
    chunked,
    event,
    finish,
    read_body,
    request,
    run,
)


def certificate(directory: Path) -> tuple[Path, Path]:
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, cert


@asynccontextmanager
async def tls_bench(
    tmp_path: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], trusted: bool = True
) -> AsyncIterator[Bench]:
    """A sidecar whose only upstream is this one."""
    key, cert = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(one, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    async with bench(tmp_path, answering(), upstreams=(url,), ca_file=str(cert) if trusted else "") as b:
        await b.upstream.stop()
        b.plane.upstreams.pools = [pool for pool in b.plane.upstreams.pools if pool.upstream.tls]
        yield b
    server.close()


async def read_request(reader: asyncio.StreamReader) -> None:
    await read_body(await reader.readuntil(b"\r\n\r\n"), reader)


@pytest.mark.parametrize("trusted", [True, False])
def test_an_https_upstream_is_used_only_with_a_certificate_that_is_trusted_and_its_connection_again(
    tmp_path: Path, trusted: bool
) -> None:
    connections: list[str] = []
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("ssl_object").version())
        number = len(connections)
        while True:
            await read_request(reader)
            served.append(number)
            for piece in (STREAM_HEAD, chunked(event(), event(), finish(), DONE)):
                writer.write(piece)

    async def test() -> None:
        async with tls_bench(tmp_path, serve, trusted) as b:
            if trusted:
                for number in (1, 2):
                    assert (await b.ask()).body == chunked(event(), event(), finish(), DONE)
                    await b.ends(number)
                assert served == [1, 1] and connections[0].startswith("TLS")
            else:
                assert (await b.ask()).status == 502
                assert await b.end() == ("failed", "connect_error")
                assert served == []

    run(test())


def test_a_client_that_does_not_read_stops_an_https_upstream_until_it_reads(tmp_path: Path) -> None:
    flood = event("x" * 60_000)
    most = (128 << 20) // len(flood)  # far more than all buffers on the way hold
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(STREAM_HEAD)
        while written < most:
            writer.write(b"%x\r\n%b\r\n" % (len(flood), flood))
            await writer.drain()
            written += 1

    async def test() -> None:
        async with tls_bench(tmp_path, serve) as b:
            reader, writer = await asyncio.open_connection(*b.address, limit=1 << 12)
            writer.write(request())
            await b.until(lambda: any(client.is_held for client in b.plane.clients))
            before = -1
            while written != before:
                before = written
                await asyncio.sleep(0.3)
            assert 0 < before < most
            received = 0
            while written == before:
                received += len(await reader.read(1 << 16))
            assert received > 0
            writer.transport.abort()

    run(test())


def test_a_client_that_leaves_is_seen_by_an_https_upstream(tmp_path: Path) -> None:
    left: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
        try:
            await reader.read()
        finally:
            left.append(True)

    async def test() -> None:
        async with tls_bench(tmp_path, serve) as b:
            client = await b.connect()
            await client.send(request())
            await client.reader.readuntil(b"\n\n")
            assert left == []
            await client.close()
            await b.until(lambda: left)
            assert await b.end() == ("cancelled", "disconnect")

    run(test())
