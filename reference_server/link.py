"""Frames between the front end and the engine process: a length in four bytes, then JSON.

All tokens of a step travel in one frame. The engine never waits for the front end: what the socket does not take stays
in a buffer and goes at the next boundary.
"""

import select
import socket
import struct
from typing import Any

import orjson

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")


class LinkClosedError(Exception):
    """The other process is gone."""


def encode(message: Message) -> bytes:
    body = orjson.dumps(message)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._held += data
        messages, at = [], 0
        while len(self._held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, at)
            start = at + _LENGTH.size
            if len(self._held) - start < length:
                break
            messages.append(orjson.loads(self._held[start : start + length]))
            at = start + length
        del self._held[:at]
        return messages


class EngineLink:
    """The engine's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._poll = select.poll()

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Hands over what the socket takes now."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            del self._unsent[:sent]

    def receive(self, timeout_s: float) -> list[Message]:
        """What has come; waits up to timeout_s for the first. LinkClosedError at the end."""
        self.flush()
        messages = self._read()
        if messages or timeout_s <= 0:
            return messages
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        self._poll.poll(timeout_s * 1000)
        self.flush()
        return self._read()

    def _read(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            if not data:
                raise LinkClosedError("end of stream")
            messages += self._frames.feed(data)

    def send_all(self, message: Message, timeout_s: float = 10) -> None:
        """Blocks until all is handed over; for the first and last words of the process."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(bytes(self._unsent) + encode(message))
        except OSError as error:
            raise LinkClosedError(str(error)) from None
        self._unsent.clear()
        self._socket.setblocking(False)
