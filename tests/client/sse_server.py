"""A small real HTTP/1.1 server on loopback whose answers a test scripts event by event.

It runs in a thread with a loop of its own, so that a client which blocks, or whose loop is late, is not timed by it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    number: int  # of the request at this server, from 0
    arrived_ns: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """What the script does with the connection."""

    writer: asyncio.StreamWriter
    chunked: bool = True
    closed: bool = False
    written_ns: list[int] = field(default_factory=list)  # of output events

    async def head(self, status: int = 200, headers: dict[str, str] | None = None, chunked: bool = True) -> None:
        self.chunked = chunked
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        if chunked:
            lines.append("transfer-encoding: chunked")
        await self.raw("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def stream(self) -> None:
        await self.head(200, {"content-type": "text/event-stream"})

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def body(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

    async def event(self, obj: Any) -> None:
        data = obj if isinstance(obj, bytes) else json.dumps(obj).encode()
        self.written_ns.append(time.monotonic_ns())
        await self.body(b"data: " + data + b"\n\n")

    async def text(self, text: str = "tok", **choice: Any) -> None:
        await self.event(chunk({"content": text}, **choice))

    async def finish(self, usage: int | None = None, reason: str = "stop", prompt: int = 7) -> None:
        await self.event(chunk({}, finish_reason=reason))
        if usage is not None:
            counts = {"prompt_tokens": prompt, "completion_tokens": usage, "total_tokens": prompt + usage}
            await self.event(base() | {"choices": [], "usage": counts})
        await self.event(b"[DONE]")
        await self.over()

    async def over(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, status: int, obj: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(obj).encode()
        await self.head(
            status, {"content-type": "application/json", "content-length": str(len(body))} | (headers or {}), False
        )
        await self.raw(body)

    def reset(self) -> None:
        """RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.closed = True
        self.writer.close()


def base() -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}


def chunk(delta: dict[str, Any], index: int = 0, finish_reason: str | None = None, **rest: Any) -> dict[str, Any]:
    return base() | {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]} | rest


Script = Callable[[Asked, Reply], Awaitable[None]]


class SseServer:
    """`with SseServer(script) as server:` … `server.url`, `server.asked`, `server.replies`."""

    def __init__(self, script: Script, owned_by: str = "sloscope", tls: Any = None) -> None:
        self._script = script
        self._owned_by = owned_by
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []
        self.replies: list[Reply] = []
        self.connections = 0
        self.disconnects = 0
        self.errors: list[BaseException] = []

    def __enter__(self) -> SseServer:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.soon(self._stop.set)
        self._thread.join(30)
        assert not self.errors, self.errors

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def soon(self, call: Callable[[], object]) -> None:
        """Calls it in the server's loop."""
        self._loop.call_soon_threadsafe(call)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.disconnects += 1
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        arrived_ns = time.monotonic_ns()
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        reply = Reply(writer)
        if path == "/v1/models":
            await reply.json(200, {"object": "list", "data": [{"id": "tiny", "owned_by": self._owned_by}]})
            return True
        asked = Asked(method, path, headers, body, len(self.asked), arrived_ns)
        self.asked.append(asked)
        self.replies.append(reply)
        await self._script(asked, reply)
        return not reply.closed


def tokens(count: int = 3, gap_s: float = 0.0, first_s: float = 0.0) -> Script:
    """`count` one-token events, a finish, usage and [DONE]."""

    async def script(asked: Asked, reply: Reply) -> None:
        await asyncio.sleep(first_s)
        await reply.stream()
        for index in range(count):
            if index and gap_s:
                await asyncio.sleep(gap_s)
            await reply.text()
        await reply.finish(usage=count)

    return script
