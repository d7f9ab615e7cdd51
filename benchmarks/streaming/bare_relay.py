"""The least that a proxy on uvloop can be: what one side sends is written to the other, and nothing is looked at.

What it costs is the event loop's and the interpreter's part of any proxy in Python.

`UPSTREAM=http://127.0.0.1:PORT python -m benchmarks.streaming.bare_relay --port PORT`
"""

import argparse
import asyncio
import os
from typing import cast

import uvloop


class End(asyncio.Protocol):
    """One side of a relayed connection."""

    def __init__(self) -> None:
        self.other: End | None = None
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)

    def joined(self, other: "End") -> None:
        self.other = other
        for data in self._waiting:
            other.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._waiting.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Client(End):
    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._to = host, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        _, upstream = await asyncio.get_running_loop().create_connection(End, *self._to)
        upstream.joined(self)
        self.joined(upstream)


async def serve(port: int, host: str, to: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(host, to), "127.0.0.1", port, backlog=4096, start_serving=True
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    address = os.environ["UPSTREAM"].removeprefix("http://")
    uvloop.run(serve(parser.parse_args().port, address.rpartition(":")[0], int(address.rpartition(":")[2])))
