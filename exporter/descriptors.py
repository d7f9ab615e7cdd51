"""How many clients fit into the files that a process may have open, and that there is room for their upstreams."""

from __future__ import annotations

import contextlib
import resource
import sys
from typing import NamedTuple

RESERVE = 64  # files for the process itself, and for clients on their way out
MOST_LEAVING = 16  # of them, who were refused and have not closed their end yet
MOST_IDLE = 256  # connections to one upstream that wait for a request


class Room(NamedTuple):
    files: int  # that may be open at once
    clients: int  # at once, at least 1
    idle: int  # connections that one upstream may keep


def raise_limit() -> None:
    """The soft limit becomes the hard one, here and in children started from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems call a limit hard and take less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room(upstreams: int, hedged: bool) -> Room:
    """Under the limit of this process. A client takes one file, and one for each upstream that is asked for it.

    With one upstream no connection waits there that a client's request would not take. With several it may be
    another one's that waits, so that these have a share of their own.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        files = sys.maxsize
    left = max(files - RESERVE, 0)
    idle = MOST_IDLE if upstreams == 1 else min(MOST_IDLE, max(1, left // 8 // upstreams))
    kept = 0 if upstreams == 1 else idle * upstreams
    return Room(files, max(1, (left - kept) // (3 if hedged else 2)), idle)
