"""https upstreams, with a certificate of the test's own."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.exporter.harness import DONE, STREAM_HEAD, answering, bench, chunked, event, finish, read_body, run


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


@pytest.mark.parametrize("trusted", [True, False])
def test_an_https_upstream_is_used_only_with_a_certificate_that_is_trusted(tmp_path: Path, trusted: bool) -> None:
    key, cert = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    served: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await read_body(head, reader)
                served.append(writer.get_extra_info("ssl_object").version())
                for piece in (STREAM_HEAD, chunked(event(), event(), finish(), DONE)):
                    writer.write(piece)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def test() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        async with bench(tmp_path, answering(), upstreams=(url,), ca_file=str(cert) if trusted else "") as b:
            await b.upstream.stop()
            b.plane.upstreams.pools = [pool for pool in b.plane.upstreams.pools if pool.upstream.tls]
            if trusted:
                for _ in range(2):
                    assert (await b.ask()).body == chunked(event(), event(), finish(), DONE)
                await b.ends(2)
                assert len(served) == 2 and served[0].startswith("TLS")
            else:
                assert (await b.ask()).status == 502
                assert await b.end() == ("failed", "connect_error")
                assert served == []
        server.close()

    run(test())
