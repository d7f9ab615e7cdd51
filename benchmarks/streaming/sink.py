"""A client that opens streams, stamps every read of a socket and looks at the bytes only when all is over.

`python -m benchmarks.streaming.sink URL --streams 100 --seconds 20 OUT` opens the streams evenly within a second and
writes to OUT one line per output event: stream, stamp of the source, stamp of the read that made the event whole.
"""

import argparse
import asyncio
import gc
import json
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from benchmarks.streaming.source import STAMP_DIGITS

_STAMP = re.compile(rb'"content": ?" (\d{%d})"' % STAMP_DIGITS)
KEY = "sk-bench"  # LiteLLM's proxy does not start without one; nobody else asks
_REQUEST = {"model": "bench", "messages": [{"role": "user", "content": "the river"}], "stream": True}


class Event(NamedTuple):
    stream: int
    sent_ns: int
    received_ns: int


class Reader(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.reads: list[tuple[int, bytes]] = []
        self.opened = False
        self.whole = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened = True
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.monotonic_ns(), data))
        if b"[DONE]" in data:
            self.whole.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.whole.set()


class Body:
    """Pieces of a chunked body as they become known, by llhttp."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.data += body


def events_of(stream: int, reads: list[tuple[int, bytes]]) -> list[Event]:
    """An event is received when the blank line that ends it is."""
    body, found, searched = Body(), [], 0
    for stamp, data in reads:
        body.parser.feed_data(data)
        end = body.data.rfind(b"\n\n")
        if end < 0:
            continue
        found += [Event(stream, int(match[1]), stamp) for match in _STAMP.finditer(body.data, searched, end)]
        searched = max(searched, end)
    return found


def request_bytes(url: str) -> tuple[str, int, bytes]:
    parts = urlsplit(url)
    body = json.dumps(_REQUEST).encode()
    head = (
        f"POST {parts.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port, head.encode() + body


async def receive(url: str, streams: int, seconds: float) -> list[Reader]:
    """All readers; those that are not whole after so many seconds are given up."""
    loop = asyncio.get_running_loop()
    host, port, request = request_bytes(url)
    began = loop.time()
    readers = []
    for number in range(streams):
        await asyncio.sleep(began + number / streams - loop.time())
        _, reader = await loop.create_connection(lambda: Reader(request), host, port)
        readers.append(reader)
    _, late = await asyncio.wait(
        [loop.create_task(reader.whole.wait()) for reader in readers], timeout=began + seconds - loop.time()
    )
    for task in late:
        task.cancel()
    for reader in readers:
        reader.transport.abort()
    return readers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="until open streams are given up")
    asked = parser.parse_args()
    gc.disable()
    readers = uvloop.run(receive(asked.url, asked.streams, asked.seconds))
    with asked.out.open("w") as out:
        for number, reader in enumerate(readers):
            for event in events_of(number, reader.reads):
                out.write(f"{event.stream} {event.sent_ns} {event.received_ns}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
