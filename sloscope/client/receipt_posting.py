"""Posts the receipts of a transport in a thread of its own, since its consumer may have no loop, or a busy one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from typing import Any

from sloscope import bearer_token
from sloscope.client import receipt_log
from sloscope.client.h1 import parse_url
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipts import ReceiptPoster
from sloscope.client.recorder import RequestRecorder

_CLOSE_PATIENCE_S = 2.0  # how long a client that closes waits for a control plane that does not answer
_JOIN_PATIENCE_S = 0.5  # beyond that, for the thread to see it


class ReceiptPosting:
    """From `start` until `close` in a daemon thread; after a close it can be started again. Nobody waits for it but who
    closes. A forked child posts nothing of its parent's.
    """

    def __init__(self, url: str, token: str) -> None:
        """Raises ConfigError for a URL or a token that cannot be one."""
        self._poster = ReceiptPoster(parse_url(url, "receipts"), token=bearer_token.checked(token, "receipts_token"))
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None

    @property
    def failed(self) -> int:
        """Requests whose receipts did not arrive."""
        return self._poster.failed

    @property
    def last_error(self) -> str:
        return self._poster.last_error

    def start(self) -> None:
        if self._running is None:
            with self._lock:
                if self._running is None:
                    self._running = _Running(self._poster)

    def add(self, recorder: RequestRecorder, log: ReceiptLog) -> None:
        self._poster.add(recorder, log)

    def stop(self) -> _Running | None:
        """Tells the thread to post the rest and end."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.stop()
        return running

    def close(self) -> None:
        """Posts the rest within two seconds; what is left then has failed."""
        running = self.stop()
        if running is not None:
            running.join(time.monotonic() + _CLOSE_PATIENCE_S + _JOIN_PATIENCE_S)

    def __del__(self) -> None:
        # Nobody else has it, so nobody holds its lock. For the thread a finaliser may not wait.
        if "_running" in vars(self):
            self.stop()

    def forked(self) -> None:
        """In the child: the thread, its connections and what waits are the parent's."""
        if self._running is not None:
            _of_parents.append(self._running)
        self._begin()
        self._poster.forget()


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Here and not in a thread of asyncio's, of which none can be started while the interpreter ends."""
        return socket.getaddrinfo(host, port, **options)


class _Running:
    """The thread. It knows nothing of the transport, which may be dropped while it runs."""

    def __init__(self, poster: ReceiptPoster) -> None:
        self._loop = _Loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=_post, args=(self._loop, poster, self._stop), name="sloscope-posts", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:  # no more threads
            self._loop.close()
            raise

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, until_s: float) -> None:
        """Waits to this stamp of the monotonic clock at most."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, until_s - time.monotonic()))


def _post(loop: _Loop, poster: ReceiptPoster, stop: asyncio.Event) -> None:
    async def main() -> None:
        poster.start()
        await stop.wait()
        await poster.close(_CLOSE_PATIENCE_S)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


_all: weakref.WeakSet[ReceiptPosting] = weakref.WeakSet()
_of_parents: list[_Running] = []  # never closed here: their loop's own book of sockets is shared with the parent


@atexit.register
def _leave() -> None:
    # In whatever order the two were registered: what ends now is posted, too.
    receipt_log.leave_all()
    running = [each.stop() for each in list(_all)]
    until_s = time.monotonic() + _CLOSE_PATIENCE_S + _JOIN_PATIENCE_S
    for each in running:
        if each is not None:
            each.join(until_s)


def _forked() -> None:
    for each in list(_all):
        each.forked()


os.register_at_fork(after_in_child=_forked)
