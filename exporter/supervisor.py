"""The parent of both planes. It holds the sockets, so that a child may die and none of its callers is refused.

    supervisor ── stdin: settings, then totals ──► control plane   (FastAPI: metrics, receipts, questions)
        │      ── stdin: settings ───────────────► data plane      (proxy, journal)
        └ listening sockets, inherited by both;  data plane ── unix socket: metrics ──► control plane

The end of a child's stdin tells it that the supervisor is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from exporter.descriptors import raise_limit, room
from exporter.priority import give_way, thread_gives_way
from exporter.settings import Settings
from sloscope.errors import ConfigError, SloscopeError
from sloscope.recovery import recover

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_HEALTHY_S = 1.0  # a child that lived this long starts again without a pause
_READY_S = 30.0
_FEW_CLIENTS = 2000  # at once: fewer are worth a line
_STOP_S = 5.0  # beyond the drain time, until a child is killed
_RECOVERED = ("sidecar", "client")  # the observers whose journals this sidecar writes


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket, or ConfigError that names the option."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{option}: {host}:{port} cannot be listened on: {why}") from None


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Child:
    """One of the two processes, started again when it dies."""

    def __init__(self, name: str, module: str, first_line: dict[str, object], fds: tuple[int, ...]) -> None:
        self.name = name
        self._module = module
        self._first_line = json.dumps(first_line).encode() + b"\n"
        self._fds = fds
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.was_ready = False
        self.started_at = 0.0
        self.start_again_at = 0.0
        self._backoff_s = 0.0

    def start(self) -> IO[bytes]:
        """Starts it and returns its stdout, on which `ready` will stand."""
        self.ready = False
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._fds,
            process_group=0,  # Ctrl-C is for the supervisor, which stops the two in order
        )
        self.tell(self._first_line)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        return self.process.stdout

    def tell(self, line: bytes) -> None:
        """Writes a line to its stdin; a dead child is noticed elsewhere."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(line)
                self.process.stdin.flush()

    def plan_restart(self) -> None:
        now = time.monotonic()
        lived = now - self.started_at
        self._backoff_s = 0.0 if lived > _HEALTHY_S else min(_MAX_BACKOFF_S, self._backoff_s * 2 or _FIRST_BACKOFF_S)
        self.start_again_at = now + self._backoff_s

    def stop(self, patience_s: float) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Supervisor:
    def __init__(self, settings: Settings, listener: socket.socket, control: socket.socket) -> None:
        self._settings = settings
        self._listener, self._control_listener = listener, control
        self._metrics = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._metrics.bind(settings.socket_path)
        self._metrics.listen(64)
        body = settings.to_json()
        # The token stays out of the process that faces the callers.
        data_first = {
            "settings": {**body, "token": ""},
            "listen_fd": listener.fileno(),
            "metrics_fd": self._metrics.fileno(),
        }
        data_fds = (listener.fileno(), self._metrics.fileno())
        self._data = Child("data plane", "exporter.data_plane", data_first, data_fds)
        control_first = {"settings": body, "listen_fd": control.fileno()}
        self._control = Child("control plane", "exporter.control_plane", control_first, (control.fileno(),))
        self._children = (self._data, self._control)
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._totals = {"data_plane_restarts": 0, "recovered_requests": 0}
        self._stopping = False
        self._announced = False
        self._priority_refused = False

    def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit status."""
        with self._signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, None)
            self._recover_in_background()
            for child in self._children:
                self._start(child)
            deadline = time.monotonic() + _READY_S
            while not self._stopping:
                self._wait(wakeup)
                for child in self._children:
                    self._tend(child)
                self._announce()
                if not self._announced and time.monotonic() > deadline:
                    raise ConfigError(f"sidecar: not ready after {_READY_S:g} s")
            return 0

    def close(self) -> None:
        """Stops what runs, the data plane first, so that the control plane can still tell how it went.

        The listener goes at once: who connects now is refused, and not left waiting in its queue for a reset.
        """
        self._listener.close()
        self._data.stop(self._settings.drain_ns / 1e9 + _STOP_S)
        self._control.stop(_STOP_S)
        self._selector.close()
        self._metrics.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)

        def stop(*_: object) -> None:
            self._stopping = True

        earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up
        earlier_fd = signal.set_wakeup_fd(writer.fileno())
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(earlier_fd)
            for number, handler in earlier.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

    def _wait(self, wakeup: socket.socket) -> None:
        """Until a signal, a word of a child, or the time to start one again; half a second at most."""
        due = [child.start_again_at - time.monotonic() for child in self._children if child.process is None]
        for key, _ in self._selector.select(max(0.0, min([0.5, *due]))):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    wakeup.recv(4096)
                continue
            child: Child = key.data
            said = os.read(key.fd, 4096)
            if not said:
                self._selector.unregister(key.fileobj)
            elif b"ready" in said:
                child.ready = child.was_ready = True

    def _start(self, child: Child) -> None:
        self._selector.register(child.start(), selectors.EVENT_READ, child)
        if child is self._control:
            self._put_behind(child)
            self._tell_totals()

    def _put_behind(self, child: Child) -> None:
        """From outside, so that its imports give way, too: a control plane may be started again amid streams."""
        assert child.process is not None
        why = give_way(child.process.pid)
        if why is not None and child.process.poll() is None and not self._priority_refused:
            self._priority_refused = True
            sys.stderr.write(f"sidecar: the {child.name} keeps its priority, so a scrape may delay events: {why}\n")

    def _tend(self, child: Child) -> None:
        if child.process is None:
            if time.monotonic() >= child.start_again_at:
                self._start(child)
            return
        status = child.process.poll()
        if status is None or self._stopping:
            return
        if not child.was_ready:
            raise SloscopeError(f"sidecar: the {child.name} ended before it was ready (status {status})")
        sys.stderr.write(f"sidecar: the {child.name} ended (status {status}) and is started again\n")
        self._release(child)
        child.plan_restart()
        if child is self._data:
            with self._lock:
                self._totals["data_plane_restarts"] += 1
            self._tell_totals()
        self._recover_in_background()

    def _release(self, child: Child) -> None:
        process, child.process = child.process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.stdout)
        process.stdout.close()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _announce(self) -> None:
        if not self._announced and all(child.ready for child in self._children):
            self._announced = True
            sys.stderr.write(
                f"listening on http://{address_of(self._listener)}, control on http://"
                f"{address_of(self._control_listener)}\n"
            )
            sys.stderr.flush()

    def _recover_in_background(self) -> None:
        threading.Thread(target=self._recover, name="recovery", daemon=True).start()

    def _recover(self) -> None:
        """Closes what a dead recorder left open, while the next one works already: locks tell them apart."""
        thread_gives_way()
        for observer in _RECOVERED:
            try:
                closed = recover(Path(self._settings.events), observer)
            except (SloscopeError, OSError) as error:
                sys.stderr.write(f"sidecar: requests of a dead recorder could not be closed: {error}\n")
                continue
            if closed:
                with self._lock:
                    self._totals["recovered_requests"] += closed
                self._tell_totals()

    def _tell_totals(self) -> None:
        with self._lock:
            self._control.tell(json.dumps(self._totals).encode() + b"\n")


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    """A directory of our own for the socket between the planes."""
    directory = tempfile.mkdtemp(prefix="sloscope-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def supervise(settings: Settings, listener: socket.socket, control: socket.socket) -> int:
    raise_limit()
    fits = room(len(settings.upstreams), bool(settings.hedge_after))
    if fits.clients < _FEW_CLIENTS:
        sys.stderr.write(
            f"sidecar: {fits.files} files may be open (ulimit -n), so {fits.clients} clients fit at once; "
            "others take the place of one that idles, or get a 503\n"
        )
    supervisor = Supervisor(settings, listener, control)
    try:
        return supervisor.run()
    finally:
        supervisor.close()
