"""One side that leaves, waits or does not read: who learns of it, how soon, and who does not suffer from it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from exporter import data_plane
from exporter.client_connection import ClientConnection
from exporter.sockets import reset_on_close
from tests.exporter.harness import (
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
)


def _is_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("amid", [False, True], ids=["before the answer", "amid the answer"])
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_a_disconnect_reaches_the_upstream_within_one_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: bool, reset: bool
) -> None:
    told: list[bool] = []
    gone = ClientConnection._gone

    async def test() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with bench(tmp_path, answering(), upstreams=(url,)) as b:
                client = await b.connect()
                await client.send(request())
                upstream, _ = await loop.sock_accept(listener)
                upstream.setblocking(False)
                while not (await loop.sock_recv(upstream, 1 << 16)).endswith(b"}"):
                    pass
                if amid:
                    await loop.sock_sendall(upstream, STREAM_HEAD + chunked(event())[:-5])
                    await client.reader.readuntil(b"\n\n")

                def gone_and_told(self: ClientConnection) -> None:
                    assert not _is_ended(upstream) or told
                    gone(self)
                    loop.call_soon(lambda: told.append(_is_ended(upstream)))  # in the next turn, not the one after

                with monkeypatch.context() as patch, upstream:
                    patch.setattr(ClientConnection, "_gone", gone_and_told)
                    if reset:
                        reset_on_close(client.writer.transport)
                    await client.close()
                    await b.until(lambda: told)
                assert told[0]
                assert await b.end() == ("cancelled", "disconnect")

    run(test())


def test_others_stream_on_while_one_client_does_not_read_at_all(tmp_path: Path) -> None:
    flood = event("x" * 60_000)
    events = [event(str(number)) for number in range(50)]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        if seen.header("case") == "flood":
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(flood), flood))
                await writer.drain()
        for each in events:
            writer.write(b"%x\r\n%b\r\n" % (len(each), each))
            await asyncio.sleep(0.001)
        writer.write(chunked(finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            stuck = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*b.address, limit=1 << 12)
                writer.write(request(b'{"model":"m","stream":true}', "case: flood"))
                stuck.append((reader, writer))
            await b.until(lambda: sum(client.is_held for client in b.plane.clients) == 3)
            held = {client for client in b.plane.clients if client.is_held}
            answers = await asyncio.gather(*(b.ask() for _ in range(20)))
            assert {answer.status for answer in answers} == {200}
            assert {answer.body for answer in answers} == {
                b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events) + chunked(finish(), DONE)
            }
            # None of the three came on meanwhile, and none holds more than a read of the socket beyond the kernel's.
            assert {client for client in b.plane.clients if client.is_held} == held
            assert max(client.transport.get_write_buffer_size() for client in held) <= 512 << 10
            for _, writer in stuck:
                writer.transport.abort()

    run(test())


async def unread_answer(b: Bench) -> tuple[Any, ClientConnection]:
    """A client that has read nothing of its answer, which the sidecar has read whole."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, b.address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12)
    (connection,) = await b.until(lambda: list(b.plane.clients))
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    writer.write(request(b"", "connection: close", path="/", method="GET"))
    await b.until(lambda: connection.is_closing)
    assert connection.transport.get_write_buffer_size() > 0
    return (reader, writer), connection


def whole_answer(size: int) -> Any:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size))

    return script


def test_a_client_that_never_reads_the_rest_of_its_answer_is_dropped_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with bench(tmp_path, whole_answer(60_000)) as b:
            (_, writer), connection = await unread_answer(b)
            monkeypatch.setattr(data_plane, "IDLE_TIMEOUT_NS", 100_000_000)
            await b.until(lambda: connection not in b.plane.clients)
            writer.transport.abort()

    run(test())


def test_a_sidecar_that_stops_lets_an_answer_go_out_that_is_over_but_for_its_reader(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, whole_answer(60_000), drain_ns=60_000_000_000) as b:
            (reader, writer), _ = await unread_answer(b)
            draining = asyncio.create_task(b.plane.drain())
            await asyncio.sleep(0.1)
            assert not draining.done()
            answer = await reader.read(-1)
            assert len(answer.partition(b"\r\n\r\n")[2]) == 60_000
            await draining
            writer.close()

    run(test())


def test_a_body_whose_rest_does_not_come_is_a_408(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "IDLE_TIMEOUT_NS", 100_000_000)

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            client = await b.connect()
            await client.send(request()[:-5])
            assert (await client.response()).status == 408
            assert await b.end() == ("cancelled", "disconnect")
            assert b.upstream.seen == []

    run(test())
