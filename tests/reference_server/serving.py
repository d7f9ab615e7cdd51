"""A real server process for tests, and a client on a plain socket that can leave whenever it likes."""

import json
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from sloscope.demo.processes import SLOSCOPE, Child
from sloscope.records import Record
from tests.journals import journal_of
from tests.waiting import until


class Served:
    """`sloscope serve --model builtin` on a free port, its journal beside it."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.events = directory / "events"
        command = [*SLOSCOPE, "serve", "--listen", "127.0.0.1:0", "--events", str(self.events), "--threads", "1"]
        self.child = Child("serve", [*command, *arguments], directory)
        weakref.finalize(self, self.child.stop)  # a test that fails leaves no server behind
        self.url = self.child.wait_for(r"^serving \S+ on (http://127\.0\.0\.1:\d+)", 60)[1]
        self.port = int(self.url.rpartition(":")[2])

    def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "builtin"} | body, headers=headers, timeout=30)

    def text(self, **body: Any) -> httpx.Response:
        headers = body.pop("headers", None)
        return self.post(headers=headers, **({"prompt": "the river", "max_tokens": 8} | body))

    def stream(self, headers: dict[str, str] | None = None, **body: Any) -> "Conversation":
        asked = {"model": "builtin", "prompt": "the river", "max_tokens": 8, "stream": True} | body
        return Conversation(self.port, asked, headers or {})

    def records(self, kind: str, request_id: str) -> list[Record]:
        return [r for r in self.journal() if r["kind"] == kind and r.get("request_id") == request_id]

    def journal(self) -> list[Record]:
        return journal_of(self.events)

    def wait_for_end(self, request_id: str, timeout_s: float = 60) -> Record:
        return until(lambda: next(iter(self.records("end", request_id)), None), timeout_s)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.child.process.pid}/task/{self.child.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def stop(self) -> int:
        return self.child.stop()


WAYS_TO_LEAVE = ("close", "half-close", "reset")


def leave(connection: socket.socket, how: str) -> None:
    """close: the kernel says FIN, or resets when something is unread."""
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Event(NamedTuple):
    at_ns: int
    body: Any  # the decoded chunk, or "[DONE]"

    @property
    def text(self) -> str:
        choices = self.body["choices"] if isinstance(self.body, dict) and "choices" in self.body else []
        if not choices:
            return ""
        return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""


class Conversation:
    """One streaming request on a socket of its own."""

    def __init__(
        self, port: int, body: dict[str, Any], headers: dict[str, str], path: str = "", receive_buffer: int = 0
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.sent_ns = time.monotonic_ns()
        self.socket.sendall(head.encode() + b"\r\n" + data)
        self._unread = b""

    def read_head(self) -> dict[str, str]:
        while b"\r\n\r\n" not in self._unread:
            data = self.socket.recv(65536)
            assert data, "closed before the headers"
            self._unread += data
        head, _, self._unread = self._unread.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return headers | {"status": status.split()[1]}

    def events(self) -> Iterator[Event]:
        """SSE events as they come; after `read_head`. Chunk framing is removed line by line."""
        at_ns = time.monotonic_ns()
        while True:
            while b"\n\n" in self._unread:
                block, _, self._unread = self._unread.partition(b"\n\n")
                for line in block.split(b"\n"):
                    if line.startswith(b"data: "):
                        payload = line.removeprefix(b"data: ")
                        yield Event(at_ns, "[DONE]" if payload == b"[DONE]" else json.loads(payload))
            if self._unread.endswith(b"0\r\n\r\n"):
                self.close()
                return
            data = self.socket.recv(65536)
            at_ns = time.monotonic_ns()
            if not data:
                self.close()
                return
            self._unread += data

    def whole(self) -> list[Event]:
        self.read_head()
        return list(self.events())

    def close(self) -> None:
        self.socket.close()
