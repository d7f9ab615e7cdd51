"""The neighbours of a sidecar in the fault tests, each a process of its own, so that a kill is a kill.

    python -m tests.end_to_end.fault_peers ROLE ...

    upstream PORT FAULT AFTER LOG    an upstream that does one thing wrong
    reader HOST PORT FILE            one stream, read and stamped as it comes
    crowd HOST PORT COUNT            so many streams, open until it is killed
    quick PORT                       an upstream that answers at once
    tenants HOST PORT FIRST COUNT    so many requests, each of a tenant of its own
    load HOST PORT WORKERS FILE      short streams one after the other, and what became of each, until a line comes
    receipts URL FILE                receipts one after the other, and which were accepted, until a line comes

A stamp is of the monotonic clock, which all processes of a host share. Nothing heavy is imported: they start quickly.
"""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sloscope.clock import host_clock_id
from sloscope.ids import new_request_id

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHAT = "/v1/chat/completions"
WHOLE = 10  # events before a fault in the middle of a stream


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int, stamp_ns: int) -> bytes:
    """An output event that says which of its stream it is, and when it was sent."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%08d %020d"},"finish_reason":null}]}\n\n' % (
        number, stamp_ns,
    )  # fmt: skip


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = chunk(FINISH) + chunk(DONE) + b"0\r\n\r\n"
FRAME = len(chunk(event(0, 0)))


class Upstream:
    """Understands one request after the other on a connection, and from `arm` on does what its fault says.

    A fault that ends the process waits until so many connections have come as far, so that all of them are at the
    same point when it happens. Before it is armed it serves as others do, so that it is known to be up.
    """

    def __init__(self, fault: str, after: int, log: Path) -> None:
        self._fault = fault
        self._after = after
        self._log = log.open("ab", buffering=0)
        self._reached = 0
        self._finishing = False  # streams without end finish
        self._armed = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def run(self, port: int) -> None:
        listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        await asyncio.start_server(self._serve, sock=listener, limit=1 << 16)
        stdin = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        say(f"ready on {port}")
        while line := await stdin.readline():
            if line == b"arm\n":
                self._armed = True
                # What is idle was made without a fault.
                for writer in self._writers:
                    writer.close()
            else:
                self._finishing = True
            say("done")

    async def _dies(self) -> None:
        self._reached += 1
        if self._reached >= self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(600)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._requests(reader, writer, self._fault if self._armed else "none")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._log.write(b"closed\n")
            self._writers.discard(writer)
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str) -> None:
        if fault == "dies_at_accept":
            await self._dies()
        if fault == "reads_nothing":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(600)
        if fault == "strict":
            await self._strict(reader, writer)
            return
        if fault.startswith("rubbish:"):
            await reader.readuntil(b"\r\n\r\n")
            kinds = Path(fault.removeprefix("rubbish:")).read_text().splitlines()  # in hexadecimal, one after the other
            writer.write(bytes.fromhex(kinds[self._reached % len(kinds)]))
            self._reached += 1
            await writer.drain()
            return
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self._log.write(b"seen %b\n" % header(head, b"x-sloscope-request-id"))
            if fault == "dies_after_request_head":
                await self._dies()
            length = int(header(head, b"content-length") or b"0")
            if fault == "dies_mid_upload":
                await reader.readexactly(length // 2)
                await self._dies()
            body = await reader.readexactly(length)
            asked = json.loads(body) if body.startswith(b"{") else {}
            if fault == "dies_before_response_head":
                await self._dies()
            await self._answer(asked, reader, writer, fault)
            if fault == "dies_when_idle":
                await self._dies()

    async def _strict(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads as a strict server does, and notes what such a one would have to refuse."""
        import h11

        connection = h11.Connection(h11.SERVER)
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    data = await reader.read(1 << 16)
                    if not data:
                        return  # in the middle of a message or between two: the client of the sidecar left
                    connection.receive_data(data)
                elif isinstance(event, h11.EndOfMessage):
                    self._log.write(b"message\n")
                    head = h11.Response(status_code=200, headers=[("content-length", "2")])
                    for part in (head, h11.Data(data=b"ok"), h11.EndOfMessage()):
                        writer.write(connection.send(part) or b"")
                    if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                        return
                    connection.start_next_cycle()
                elif isinstance(event, h11.ConnectionClosed):
                    return
        except h11.RemoteProtocolError as error:
            self._log.write(f"broken {error}\n".encode())

    async def _says(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Exactly these bytes, in these pieces, and then the end of the connection or a reset."""
        for piece in asked["says"]:
            writer.write(bytes.fromhex(piece))
            await writer.drain()
            await asyncio.sleep(0.0005)
        if asked["resets"]:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionError

    async def _answer(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str
    ) -> None:
        if "says" in asked:
            await self._says(asked, writer)
        write = slowly(writer) if fault == "slow" else at_once(writer)
        if fault == "mute":
            await reader.read(1)  # its end
            raise ConnectionError
        if fault == "dies_in_response_head":
            await write(HEAD[:30])
            await self._dies()
        await write(UNTIL_CLOSE if fault == "dies_mid_stream_until_close" else HEAD)
        if fault == "dies_before_first_event":
            await self._dies()
        if fault in ("dies_mid_stream", "dies_mid_stream_until_close", "dies_mid_event", "dies_in_last_chunk"):
            for number in range(WHOLE):
                data = event(number, time.monotonic_ns())
                await write(data if fault == "dies_mid_stream_until_close" else chunk(data))
            if fault == "dies_mid_event":
                await write(chunk(event(WHOLE, 0))[: FRAME // 2])
            if fault == "dies_in_last_chunk":
                await write(LAST[:-5])  # all but the chunk that says that it is the last
            await self._dies()
        gap_s = asked.get("gap_ms", 0) / 1e3
        count = asked.get("events", WHOLE)
        number = 0
        if "flood_bytes" in asked:
            await self._flood(asked["flood_bytes"], writer)
        while number < count or (count == 0 and not self._finishing):
            await write(chunk(event(number, time.monotonic_ns())))
            number += 1
            if gap_s and await _ends_within(reader, gap_s):
                raise ConnectionError
        await write(LAST)

    async def _flood(self, size: int, writer: asyncio.StreamWriter) -> None:
        """As fast as the other side takes it; how much it took is told as it goes on."""
        filler = chunk(b": " + b"x" * (1 << 16) + b"\n\n")
        sent = 0
        while sent < size:
            writer.write(filler)
            await writer.drain()
            sent += len(filler)
            self._log.write(b"flooded %d\n" % sent)


async def _ends_within(reader: asyncio.StreamReader, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return not await reader.read(1)
    except TimeoutError:
        return False


Write = Callable[[bytes], Awaitable[None]]


def at_once(writer: asyncio.StreamWriter) -> Write:
    async def write(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    return write


def slowly(writer: asyncio.StreamWriter) -> Write:
    """Byte by byte."""

    async def write(data: bytes) -> None:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.0005)

    return write


def header(head: bytes, name: bytes) -> bytes:
    match = re.search(rb"(?im)^%b: *([^\r\n]*)" % re.escape(name), head)
    return match[1] if match else b""


def request(asked: dict[str, object], *headers: str) -> bytes:
    body = json.dumps({"model": "m", "stream": True, **asked}).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "host: sidecar", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def read_steadily(host: str, port: int, file: Path) -> None:
    """Reads one stream to its end and leaves (number, sent, received) of every event; says how it went.

    Every byte of the body is compared with what the upstream must have sent.
    """
    # So much outstanding work that the sidecar sends everything else to another upstream.
    ask = request({"events": 0, "gap_ms": 10, "max_tokens": 1 << 24}, "connection: close")
    with socket.create_connection((host, port)) as sock, file.open("w") as out:
        sock.sendall(ask)
        buffer = b""
        while b"\r\n\r\n" not in buffer:
            buffer += sock.recv(1 << 16)
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        say(f"streams {header(head, b'x-sloscope-request-id').decode()}")
        number, wrong = 0, 0
        while True:
            received_ns = time.monotonic_ns()
            while len(buffer) >= FRAME and not buffer.startswith(chunk(FINISH)[:24]):
                frame, buffer = buffer[:FRAME], buffer[FRAME:]
                match = re.search(rb'"(\d{8}) (\d{20})"', frame)
                stamp = int(match[2]) if match else 0
                wrong += frame != chunk(event(number, stamp))
                out.write(f"{number} {stamp} {received_ns}\n")
                number += 1
            data = sock.recv(1 << 16)
            if not data:
                break
            buffer += data
        is_whole = head.startswith(b"HTTP/1.1 200 ") and not wrong and buffer == LAST
    say(f"over {number} {'whole' if is_whole else 'damaged'}")


async def crowd(host: str, port: int, count: int) -> None:
    """Opens streams and reads their first bytes; says so, and holds them until it is killed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ask = request({"events": 0, "gap_ms": 5000})
    held = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(ask)
        await reader.readuntil(b'"finish_reason":null')
        held.append(writer)

    for first in range(0, count, 100):
        await asyncio.gather(*(one() for _ in range(first, min(count, first + 100))))
    say(f"holding {len(held)}")
    await asyncio.sleep(600)


QUICK = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 80\r\n\r\n"
    b'{"choices":[{"index":0,"message":{"content":"yes"},"finish_reason":"stop"}]}    '
)


_TENANT_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: sidecar\r\nx-slo-tenant: tenant-NUMBER\r\ncontent-length: 13\r\n\r\n"
    b'{"model":"m"}'
)


class QuickUpstream(asyncio.Protocol):
    """Every request comes in one read, and so does its answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._write(QUICK)


class TenantClient(asyncio.Protocol):
    """One request after the other on a connection, until the numbers are used up."""

    def __init__(self, numbers: Iterator[int], over: Callable[[], None]) -> None:
        self._numbers = numbers
        self._over = over
        self.answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]
        self._next()

    def data_received(self, data: bytes) -> None:
        self.answers += data.startswith(b"HTTP/1.1 200 ") and data.endswith(QUICK[-80:])
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over()

    def _next(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._over()
        else:
            self._write(_TENANT_REQUEST.replace(b"NUMBER", b"%06d" % number))


async def tenants(host: str, port: int, first: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    numbers = iter(range(first, first + count))
    clients = []
    overs = []
    for _ in range(32):
        over = asyncio.Event()
        overs.append(over.wait())
        _, client = await loop.create_connection(lambda over=over: TenantClient(numbers, over.set), host, port)
        clients.append(client)
    await asyncio.gather(*overs)
    say(f"answered {sum(client.answers for client in clients)}")


async def load(host: str, port: int, workers: int, file: Path) -> None:
    """`whole ID` of an answer that came to its end, `cut ID` of any other."""
    over = await _told_on_stdin()
    with file.open("ab", buffering=0) as out:

        async def one(request_id: str) -> bool:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(request({"gap_ms": 15}, f"x-sloscope-request-id: {request_id}", "connection: close"))
                    return (await reader.read(-1)).endswith(LAST)
                finally:
                    writer.transport.abort()

        async def work() -> None:
            while not over.is_set():
                request_id = new_request_id()
                try:
                    is_whole = await one(request_id)
                except (OSError, TimeoutError):
                    is_whole = False
                out.write(f"{'whole' if is_whole else 'cut'} {request_id}\n".encode())
                if not is_whole:
                    await asyncio.sleep(0.02)

        say("ready")
        await asyncio.gather(*(work() for _ in range(workers)))
    say("over")


async def receipts(url: str, file: Path) -> None:
    """`accepted ID` once the answer says so. Each is sent again until it is, as a client with a queue does it."""
    over = await _told_on_stdin()
    clock_id = host_clock_id()

    def post(receipt: dict[str, object]) -> bool:
        ask = urllib.request.Request(
            f"{url}/v1/receipts", json.dumps(receipt).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(ask, timeout=5) as answer:
                return json.load(answer)["accepted"] == 1
        except urllib.error.HTTPError as error:
            with error:
                # The first try was recorded, and its answer lost with the process.
                return b"was reported before" in error.read()
        except (OSError, ValueError, HTTPException):
            return False  # no answer, or half of one

    with file.open("ab", buffering=0) as out:
        say("ready")
        while not over.is_set():
            now = time.monotonic_ns()
            receipt = {
                "request_id": new_request_id(), "clock_id": clock_id, "send_ns": now - 3000, "t_ns": [now - 2000],
                "end_ns": now, "outcome": "completed",
            }  # fmt: skip
            while not await asyncio.to_thread(post, receipt) and not over.is_set():
                await asyncio.sleep(0.02)
            out.write(f"accepted {receipt['request_id']}\n".encode())
            await asyncio.sleep(0.01)
    say("over")


async def _told_on_stdin() -> asyncio.Event:
    over = asyncio.Event()
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)

    async def wait() -> None:
        await stdin.readline()
        over.set()

    over.task = asyncio.create_task(wait())  # type: ignore[attr-defined]  # kept with what it sets
    return over


async def quick(port: int) -> None:
    await asyncio.get_running_loop().create_server(QuickUpstream, "127.0.0.1", port, backlog=4096)
    say(f"ready on {port}")
    await asyncio.sleep(600)


def main(role: str, *arguments: str) -> None:
    if role == "upstream":
        port, fault, after, log = arguments
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(Upstream(fault, int(after), Path(log)).run(int(port)))
    elif role == "reader":
        host, port, file = arguments
        read_steadily(host, int(port), Path(file))
    elif role == "load":
        host, port, workers, file = arguments
        asyncio.run(load(host, int(port), int(workers), Path(file)))
    elif role == "receipts":
        asyncio.run(receipts(arguments[0], Path(arguments[1])))
    elif role == "quick":
        asyncio.run(quick(int(arguments[0])))
    elif role == "tenants":
        host, *numbers = arguments
        asyncio.run(tenants(host, *map(int, numbers)))
    else:
        host, port, count = arguments
        asyncio.run(crowd(host, int(port), int(count)))


if __name__ == "__main__":
    main(*sys.argv[1:])
