"""What the kernel knows of a connection and its transport does not. Linux's."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import struct
import termios


def is_ready(transport: asyncio.BaseTransport, events: int) -> bool:
    """Whether one of these events of poll(2) is there now; errors and hang-ups always count."""
    poll = select.poll()
    poll.register(_fileno(transport), events)
    return bool(poll.poll(0))


def unsent_bytes(transport: asyncio.BaseTransport) -> int:
    """Written, and not acknowledged by the other end."""
    (count,) = struct.unpack("i", fcntl.ioctl(_fileno(transport), termios.TIOCOUTQ, bytes(4)))
    return int(count)


def reset_on_close(transport: asyncio.BaseTransport) -> None:
    """Makes closing send a RST, as a plain close would read as a proper end."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _fileno(transport: asyncio.BaseTransport) -> int:
    return int(transport.get_extra_info("socket").fileno())
