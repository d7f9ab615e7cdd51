"""The front end in a thread of its own, over a real link and real sockets. The test speaks for the engine."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

from reference_server.app import make_app, make_server
from reference_server.front_end import FrontEnd
from reference_server.link import FrameBuffer, Message, encode
from reference_server.tokenizer import byte_alphabet
from sloscope import recorder
from sloscope.clock import SystemClock
from sloscope.contract import Contract
from sloscope.journal import JournalWriter
from sloscope.records import Record
from tests.journals import journal_of
from tests.reference_server.serving import leave
from tests.waiting import until

CHARACTER_OF = {byte: character for character, byte in byte_alphabet().items()}
END_TOKEN = 256  # tokens 0 … 255 are the bytes
READY = {
    "op": "ready", "model": "bytes", "mask_eos": False, "max_context": 1 << 25, "kv_tokens": 1 << 25,
    "tokenizer": {
        "tokens": [*(CHARACTER_OF[byte] for byte in range(256)), "<|end|>"], "merges": [], "control_ids": [END_TOKEN],
        "pre": "gpt-2", "bos_id": None, "eos_ids": [END_TOKEN], "add_bos": False, "chat_template": None,
    },
}  # fmt: skip


class FrontRig:
    def __init__(
        self, events: Path, contract: Contract | None = None, slow_reader_ns: int | None = None, send_buffer: int = 0
    ) -> None:
        self.events = events
        self._engine, theirs = socket.socketpair()
        self._engine.settimeout(20)
        self._frames = FrameBuffer()
        self._unheard: list[Message] = []
        self._tokens: dict[str, int] = {}  # how many each request got
        self._clients: list[Client] = []
        self.taken: dict[str, int] = {}  # tokens delivered as heard by now, by request
        self.tell(READY)
        listener = socket.socket()
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(theirs, listener, contract, slow_reader_ns))
        self._thread.start()

    def _run(self, theirs: socket.socket, listener: socket.socket, contract: Any, slow_reader_ns: int | None) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(theirs, listener, contract, slow_reader_ns))

    async def _serve(self, theirs: socket.socket, listener: socket.socket, contract: Any, slow_reader_ns: Any) -> None:
        self.journal_writer = JournalWriter(self.events, "engine", SystemClock(), recorder.encode)
        front = FrontEnd(SystemClock(), contract, lambda: self.journal_writer, slow_reader_ns=slow_reader_ns)
        await front.connect(theirs)
        front.on_ready(await front.engine.ready)
        server = make_server(make_app(front), 64)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        probe = asyncio.create_task(front.probe_loop())
        while not self._over.is_set():
            await asyncio.sleep(0.01)
        for live in list(front.live.values()):
            live.cut()
        # As uvicorn ends, but for two waits of its own of a tenth of a second each.
        for connection in list(server.server_state.connections):
            connection.shutdown()
        while server.server_state.tasks:
            await asyncio.sleep(0.001)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for each in server.servers:
            each.close()
        probe.cancel()
        front.engine.close()
        front.close_journal()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._engine.close()
        for client in self._clients:
            client.socket.close()

    # --- the engine's side

    def tell(self, message: Message) -> None:
        self._engine.sendall(encode(message))

    def hear(self, op: str) -> Message:
        """The next message, which must be this; a scrape's `drain` apart, and deliveries that were not asked for.

        A kernel may take some more at any time.
        """
        while True:
            while not self._unheard:
                self._unheard += self._frames.feed(self._engine.recv(1 << 18))
            message = self._unheard.pop(0)
            if message["op"] == "delivered":
                self.taken |= dict(message["rows"])
            if message["op"] == op or message["op"] not in ("drain", "delivered"):
                assert message["op"] == op, message
                return message

    def give(self, *keys: str, text: str = "x", token_id: int | None = None, finish: str = "") -> None:
        """One token for each key, in one frame."""
        rows: list[list[Any]] = []
        for key in keys:
            row: list[Any] = [key, ord(text) if token_id is None else token_id, finish, token_id != END_TOKEN]
            self._tokens[key] = self._tokens.get(key, 0) + 1
            rows.append([*row, 1, 2] if self._tokens[key] == 1 else row)
        self.tell({"op": "tokens", "step": 1, "computed_ns": 3, "handed_ns": 4, "rows": rows})

    def accept(self, *keys: str) -> None:
        self.tell({"op": "accepted", "keys": list(keys)})

    # --- what the front end shows

    def ask(self, **body: Any) -> "Client":
        client = self.client()
        client.ask(**body)
        return client

    def client(self, receive_buffer: int = 0) -> "Client":
        """It stays until the end of the test, unless it leaves."""
        self._clients.append(Client(self.port, receive_buffer))
        return self._clients[-1]

    def undelivered(self) -> int:
        return self.metric("sloscope_engine_undelivered_tokens")

    def metric(self, name: str) -> int:
        client = self.client()
        client.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        (line,) = [line for line in client.rest().splitlines() if line.startswith(name.encode() + b" ")]
        return int(float(line.split()[1]))

    def journal(self, kind: str) -> list[Record]:
        return journal_of(self.events, kind)

    def records(self, kind: str, request_id: str) -> list[Record]:
        return [record for record in self.journal(kind) if record["request_id"] == request_id]

    def end_of(self, request_id: str) -> Record:
        end: Record = until(lambda: next(iter(self.records("end", request_id)), None))
        return end

    def socket_closed_ns(self, request_id: str) -> int | None:
        """After its end."""
        return self._left(request_id, "socket_closed_ns")

    def abort_sent(self, request_id: str) -> bool | None:
        """After its end: what its record says; None where the consumer did not leave."""
        return self._left(request_id, "abort_sent")

    def _left(self, request_id: str, name: str) -> Any:
        told = [late[name] for late in self.records("late", request_id)]
        assert len(told) <= 1
        return told[0] if told else None


class Client:
    """A consumer on a bare socket."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(20)
        self.socket.connect(("127.0.0.1", port))

    @staticmethod
    def request(headers: str = "", **body: Any) -> bytes:
        data = json.dumps({"model": "bytes", "prompt": "go", "stream": True} | body).encode()
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data
        )

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, headers: str = "", **body: Any) -> None:
        self.send(self.request(headers, **body))

    def read(self, *, until: bytes) -> bytes:
        data = b""
        while until not in data:
            block = self.socket.recv(1 << 16)
            assert block, f"the connection ended before {until!r}"
            data += block
        return data

    def rest(self) -> bytes:
        """All until the connection ends, in whatever way."""
        data = b""
        try:
            while block := self.socket.recv(1 << 16):
                data += block
        except ConnectionResetError:
            pass
        self.socket.close()
        return data

    def leave(self, how: str) -> int:
        """When it began, in ns."""
        at_ns = time.monotonic_ns()
        leave(self.socket, how)
        return at_ns
