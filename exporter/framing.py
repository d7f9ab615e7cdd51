"""Where the body of an HTTP/1.1 message ends, and what in it is payload. No I/O.

Bodies are forwarded as the bytes that came, so a framing never re-writes them: `feed` says how many of the bytes
belong to the body and what the payload is.
"""

from __future__ import annotations

import re

_MAX_CHUNK_LINE = 4096
_MAX_TRAILER_BYTES = 16 << 10
_LONG_LINE = "chunked body: a line is longer than 4096 bytes"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n\x00]*)?\r\n")
_PADDED_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\x00]*)?\r\n")
# Size lines of upstreams' short chunks that were read once, and the bytes that follow each: a stream's are alike.
SHORT_CHUNKS: dict[bytes, int] = {}
MAX_SHORT_LINE = 8
_MOST_LINES, _MOST_SHORT = 4096, 4096
_TRAILER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*\r\n")
# A neighbour that merges trailers into the head must not find there where the message ends, what it is or who sent it.
_NO_TRAILERS = frozenset(
    {
        b"authorization", b"connection", b"content-encoding", b"content-length", b"content-range", b"content-type",
        b"cookie", b"expect", b"host", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip


class MessageError(Exception):
    """A message that must not be forwarded. `status` is what a client is told.

    Of a body, `used` bytes of what was fed last are whole chunks before what is wrong, with `payload` in them.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.used = 0
        self.payload = b""


class NoBody:
    complete = True

    def feed(self, data: bytes) -> tuple[bytes, int]:
        return b"", 0

    def end_of_stream(self) -> bool:
        return True


class Sized:
    """A body of a declared length."""

    __slots__ = ("complete", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.complete = length == 0

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Payload and the number of bytes that belong to the body."""
        if len(data) > self.left:
            data = data[: self.left]
        self.left -= len(data)
        self.complete = self.left == 0
        return data, len(data)

    def end_of_stream(self) -> bool:
        """Whether the body may end here."""
        return self.complete


class UntilClose:
    """A body that the end of the connection ends, as HTTP/1.0 servers send it."""

    __slots__ = ("complete",)

    def __init__(self) -> None:
        self.complete = False

    def feed(self, data: bytes) -> tuple[bytes, int]:
        return data, len(data)

    def end_of_stream(self) -> bool:
        self.complete = True
        return True


class Chunked:
    """The chunked coding, read strictly: CRLF line ends only, hexadecimal sizes only, trailers that are just that.

    `padded`: blanks may follow a size, as some old servers write it.
    """

    __slots__ = ("_in_trailer", "_left", "_line", "_size_line", "_trailer_bytes", "complete", "is_between")

    #   5;ext\r\nhello\r\n0\r\nTrailer: x\r\n\r\n
    #   line     |---left---|line  |---trailer----|     left counts the CRLF after the data, too

    def __init__(self, padded: bool = False) -> None:
        self.complete = False
        self._size_line = _PADDED_SIZE if padded else _CHUNK_SIZE
        self._left = 0
        self._line = b""
        self._in_trailer = False
        self._trailer_bytes = 0
        self.is_between = True  # two chunks, so that the next byte begins a size

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Payload and the number of bytes that belong to the body. Raises MessageError(400)."""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        chunk = 0  # where the latest begins
        try:
            while at < size and not self.complete:
                if self._left:
                    at = self._data(data, at, pieces)
                    continue
                end = data.find(b"\n", at) + 1
                if end == 0:
                    self._line += data[at:]
                    if len(self._line) >= _MAX_CHUNK_LINE:
                        raise MessageError(400, _LONG_LINE)
                    at = size
                    break
                line = self._line + data[at:end] if self._line else data[at:end]
                self._line = b""
                if len(line) > _MAX_CHUNK_LINE:
                    raise MessageError(400, _LONG_LINE)
                if self._in_trailer:
                    self._trailer(line)
                else:
                    self._size(line)
                    chunk = at
                at = end
        except MessageError as error:
            # A part of a chunk, or its end without what follows, could pass for more than it is.
            is_within = self._in_trailer or self._left
            error.payload, error.used = b"".join(pieces), chunk if is_within else at
            raise
        self.is_between = not (self._left or self._line or self._in_trailer or self.complete)
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), at

    def _data(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        start, payload = at, min(self._left - 2, len(data) - at)
        if payload > 0:
            self._left -= payload
            at += payload
        if self._left <= 2 and at < len(data):
            ending = b"\r\n"[2 - self._left :]
            got = data[at : at + self._left]
            if not ending.startswith(got):
                raise MessageError(400, "chunked body: a chunk does not end where its size says")
            self._left -= len(got)
            at += len(got)
        if payload > 0:
            pieces.append(data[start : start + payload])
        return at

    def _size(self, line: bytes) -> None:
        match = self._size_line.fullmatch(line)
        if match is None:
            raise MessageError(400, "chunked body: a chunk size that is not hexadecimal with CRLF")
        length = int(match[1], 16)
        if length:
            self._left = length + 2
            if self._size_line is _PADDED_SIZE and length <= _MOST_SHORT and len(line) <= MAX_SHORT_LINE:
                if len(SHORT_CHUNKS) >= _MOST_LINES:
                    SHORT_CHUNKS.clear()
                SHORT_CHUNKS[line] = self._left
        else:
            self._in_trailer = True

    def _trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.complete = True
            return
        self._trailer_bytes += len(line)
        match = _TRAILER.fullmatch(line)
        if match is None or self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise MessageError(400, "chunked body: trailers that are malformed or above 16 KiB")
        if match[1].lower() in _NO_TRAILERS:
            raise MessageError(400, "chunked body: a trailer that belongs into the head")

    def end_of_stream(self) -> bool:
        return self.complete


Body = NoBody | Sized | UntilClose | Chunked
