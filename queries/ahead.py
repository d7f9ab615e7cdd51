"""Blocks of journals decoded by a second process while the pass decodes the ones before."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from queries.decode import Decoded, decoded, packed, unpacked, whole_lines
from queries.forked import child

BLOCKS = 2  # to one that the pass decodes, since it also sorts what both have decoded


class Ahead:
    """Questions and answers of the child: `ask` early, then `answer` when the block's turn has come."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._asked: deque[tuple[str, int, int]] = deque()  # in order, as the child answers
        self._came: dict[tuple[str, int, int], bytes] = {}

    def ask(self, path: Path, offset: int, size: int) -> tuple[str, int, int]:
        asked = (str(path), offset, size)
        try:
            self._pipe.send(asked)
            self._asked.append(asked)
        except OSError:
            self._asked.clear()
        return asked

    def answer(self, asked: tuple[str, int, int]) -> list[Decoded]:
        while asked not in self._came and asked in self._asked:
            try:
                self._came[self._asked[0]] = self._pipe.recv_bytes()
                self._asked.popleft()
            except (EOFError, OSError):
                self._asked.clear()
        came = self._came.pop(asked, None)
        return decoded(whole_lines(*asked, BLOCKS)) if came is None else unpacked(came)


@contextmanager
def reading_ahead() -> Iterator[Ahead]:
    with child(_answer_all) as pipe:
        yield Ahead(pipe)


def _answer_all(pipe: Connection) -> None:
    while True:
        path, offset, size = pipe.recv()
        pipe.send_bytes(packed(decoded(whole_lines(path, offset, size, BLOCKS))))
