"""What a load generator does with its receipts when the control plane will not take them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from sloscope.client.h1 import Origin
from sloscope.client.receipts import ReceiptPoster

TAKEN = b'{"accepted":2,"rejected":[]}'


def test_receipts_that_are_too_many_for_now_wait_and_are_not_lost() -> None:
    answers = [
        b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(TAKEN), TAKEN),
    ]
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                bodies.append(await reader.readexactly(int(length.partition(b":")[2])))
                writer.write(answers.pop(0))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            poster = ReceiptPoster(Origin("http", "127.0.0.1", port, ""), SimpleNamespace(model="m"), "host:1")
            poster._waiting += [{"t_ns": [1]}, {"t_ns": [2]}]
            await poster._post_waiting()
            assert (len(poster._waiting), poster.failed, poster.last_error) == (2, 0, "status 429")
            assert await poster.close() == 0
            assert bodies == [b'{"receipts":[{"t_ns":[1]},{"t_ns":[2]}]}'] * 2

    asyncio.run(main())
