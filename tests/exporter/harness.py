"""A data plane on real sockets, an upstream whose answers a test writes byte by byte, and a client as raw."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.samples import Sample

from exporter.data_plane import DataPlane
from exporter.settings import Settings
from sloscope.clock import SystemClock
from sloscope.exposition import MetricStore
from sloscope.journal import Tail, journal_files, read_journal

CHAT = "/v1/chat/completions"
ASK = b'{"model":"m","stream":true}'


@dataclass
class Seen:
    """A request as it reached the upstream."""

    head: bytes
    body: bytes
    connection: int  # number of the connection that brought it, from 0

    @property
    def line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


Script = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


class ScriptedUpstream:
    """Reads requests with a content length or in chunks, and lets the script answer."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.seen: list[Seen] = []
        self.connections = 0
        self.lost: list[int] = []  # numbers of the connections that ended
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 24)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self.connections = self.connections, self.connections + 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await read_body(head, reader)
                seen = Seen(head, body, number)
                self.seen.append(seen)
                await self._script(seen, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.lost.append(number)
            writer.close()
            self._tasks.discard(task)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], limit: int = 1 << 16
) -> AsyncIterator[str]:
    """URL of a server that does as the handler says; its connections end with the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=limit)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)


async def read_body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    """The body's bytes as they came, chunk framing included."""
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        raw = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            raw += line
            if int(line.partition(b";")[0], 16) == 0:
                while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
                    raw += trailer
                return raw + trailer
            raw += await reader.readexactly(int(line.partition(b";")[0], 16) + 2)
    for line in lowered.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.partition(b":")[2]))
    return b""


@dataclass
class Response:
    head: bytes
    body: bytes  # raw, chunk framing included

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    def header(self, name: str) -> str | None:
        return Seen(self.head, b"", 0).header(name)


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def response(self, method: bytes = b"POST") -> Response:
        head = await self.reader.readuntil(b"\r\n\r\n")
        if method == b"HEAD" or head.split(b" ")[1] in (b"204", b"304", b"100", b"103"):
            return Response(head, b"")
        lowered = head.lower()
        if b"content-length:" in lowered or b"transfer-encoding: chunked" in lowered:
            return Response(head, await read_body(head, self.reader))
        return Response(head, await self.reader.read())

    async def to_end(self) -> bytes:
        return await self.reader.read()

    async def close(self) -> None:
        self.writer.transport.abort()  # what could not be sent is not waited for
        await asyncio.sleep(0)


@dataclass
class Bench:
    plane: DataPlane
    upstream: ScriptedUpstream
    address: tuple[str, int]
    events: Path
    clients: list[RawClient] = field(default_factory=list)

    async def connect(self) -> RawClient:
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 24)
        client = RawClient(reader, writer)
        self.clients.append(client)
        return client

    async def ask(self, body: bytes = ASK, *headers: str, path: str = CHAT) -> Response:
        client = await self.connect()
        await client.send(request(body, *headers, path=path))
        return await client.response()

    async def until(self, what: Callable[[], Any], timeout_s: float = 30) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (value := what()):
                await asyncio.sleep(0.005)
            return value

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Of the sidecar's journal, checked against the schema."""
        found = []
        for path in journal_files(self.events):
            tail = Tail(path)
            found += [record for record in read_journal(tail) if record["kind"] == kind]
            assert not tail.problems, tail.problems
        return found

    async def ends(self, count: int = 1) -> list[dict[str, Any]]:
        """The `end` records, once there are so many."""
        await self.until(lambda: len(self.records("end")) >= count)
        found = self.records("end")
        assert len(found) == count
        return found

    async def end(self) -> tuple[str, str]:
        (record,) = await self.ends()
        return record["outcome"], record["reason"]

    def scrape(self) -> MetricStore:
        """What the control plane would have after a full snapshot."""
        store = MetricStore("sidecar", self.plane.watch.contract)
        store.absorb(b"".join(self.plane.snapshot(full=True)))
        return store

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series of a counter or gauge whose labels contain these."""
        return total(self.scrape(), name, **labels)

    def check_identity(self) -> float:
        """offered = ended + open, of one snapshot; the number of offered requests."""
        store = self.scrape()
        offered = total(store, "sloscope_sidecar_requests_offered_total")
        ended = total(store, "sloscope_sidecar_requests_total")
        open_now = total(store, "sloscope_sidecar_inflight_requests")
        assert offered == ended + open_now
        return offered


def samples(store: MetricStore, name: str, **labels: str) -> list[Sample]:
    """The series of a name whose labels contain these."""
    return [
        sample
        for family in store.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def total(store: MetricStore, name: str, **labels: str) -> float:
    return sum(sample.value for sample in samples(store, name, **labels))


def children(store: MetricStore, name: str, **labels: str) -> list[dict[str, str]]:
    return [sample.labels for sample in samples(store, name, **labels)]


def settings_for(events: Path, socket_path: str, upstreams: tuple[str, ...], **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "upstreams": upstreams,
        "contract": "ttft:300 itl_max:30",
        "contract_is_shorthand": True,
        "events": str(events),
        "role": "sidecar",
        "tenant_header": "x-slo-tenant",
        "inspect_limit": 1 << 20,
        "drain_ns": 200_000_000,
        "max_label_values": 50,
        "ca_file": "",
        "socket_path": socket_path,
        "sql_every_ns": 0,
    }
    return Settings(**(values | changes))


@asynccontextmanager
async def bench(
    tmp_path: Path, script: Script, upstreams: tuple[str, ...] = (), **changes: Any
) -> AsyncIterator[Bench]:
    """`upstreams` come before the scripted one."""
    upstream = ScriptedUpstream(script)
    url = await upstream.start()
    events = tmp_path / "events"
    with tempfile.TemporaryDirectory() as directory:  # a path short enough for a unix socket
        settings = settings_for(events, f"{directory}/m", (*upstreams, url), **changes)
        plane = DataPlane(settings, SystemClock(), asyncio.get_running_loop())
        listener = socket.create_server(("127.0.0.1", 0))
        metrics = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        metrics.bind(settings.socket_path)
        await plane.start(listener, metrics)
        running = Bench(plane, upstream, listener.getsockname()[:2], events)
        try:
            yield running
        finally:
            for client in running.clients:
                await client.close()
            await plane.drain()
            await upstream.stop()
            await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, None], timeout_s: float = 60) -> None:
    async def limited() -> None:
        async with asyncio.timeout(timeout_s):
            await test

    uvloop.run(limited())


def request(body: bytes = ASK, *headers: str, path: str = CHAT, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: sidecar", *headers]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


def event(text: str = "tok", index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": None} | more
    return sse({"choices": [choice]})


def finish(reason: str = "stop", index: int = 0) -> bytes:
    return event("", index, finish_reason=reason)


def usage(tokens: int, prompt: int = 7) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})


def sse(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def answering(*events: bytes) -> Script:
    """A script that streams these events, each in a chunk of its own, and ends the body."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(*events))

    return script
