"""A sidecar between a good upstream and a bad one, with a stream beside that nothing may touch.

What holds after every fault is written here once: the books balance at every scrape and in the journal, the stream
beside is whole and was not delayed, and the data plane has given its memory back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sloscope.demo.processes import Child, Stage
from sloscope.journal import Tail, journal_files, read_journal
from tests.end_to_end.fault_peers import request
from tests.end_to_end.scrapes import Scrape, Scraper, scrape
from tests.end_to_end.support import free_port, start_sidecar
from tests.waiting import until

CALM_S = 0.5  # how long the stream beside runs before anything happens
# Beyond its largest delay while nothing happened. Two cores with other work on them make a tenth of a second of it, two
# thousand clients that leave at once some more; a loop that waits for something makes seconds.
MOST_DELAY_S = 1.0
MOST_GROWTH_MIB = 12.0

Ends = Counter[tuple[str, str]]


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def child_pid(supervisor: int, module: str) -> int:
    """The supervisor's child that runs this module; 0 while there is none."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == supervisor and module.encode() in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except (OSError, IndexError, ValueError):
            continue
    return 0


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def records(events: Path, observer: str = "sidecar") -> dict[str, list[dict[str, Any]]]:
    """Every record of an observer by kind, straight from the files. A line that is none is a failure."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in journal_files(events):
        if path.parent.name == observer:
            tail = Tail(path)
            for record in read_journal(tail):
                found[record["kind"]].append(record)
            assert tail.bad_lines == 0, tail.problems
    return found


def ends_of(events: Path) -> Ends:
    """How the requests ended. Each that was begun has one end, and nothing ended that was not begun."""
    kinds = records(events)
    begun = Counter(record["request_id"] for record in kinds["begin"])
    ended = Counter(record["request_id"] for record in kinds["end"])
    assert begun == ended and max(begun.values(), default=1) == 1
    return Counter((record["outcome"], record.get("reason", "")) for record in kinds["end"])


@dataclass
class Answer:
    """What one client saw."""

    raw: bytes = b""
    how: str = "eof"  # eof, reset, timeout: how the connection ended
    took_s: float = 0.0

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1]) if self.raw.startswith(b"HTTP/1.1 ") else 0

    @property
    def events(self) -> int:
        return self.raw.count(b'"finish_reason":null}]}\n\n')

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def ask(
    proxy: str, asked: dict[str, object] | None = None, *headers: str, patience_s: float = 30, upload: int = 0
) -> Answer:
    """One request on a connection of its own, read to its end. `upload`: a body of so many bytes that is no JSON.

    A client that is out of patience resets its connection: a plain end would wait behind the bytes that it has to send.
    """
    data = request(asked or {}, "connection: close", *headers)
    if upload:
        head = data.partition(b"\r\n\r\n")[0].replace(b"content-length: ", b"x-was: ")
        data = head + b"\r\ncontent-length: %d\r\n\r\n" % upload + bytes(upload)
    answer = Answer()
    began = time.monotonic()
    with socket.create_connection(address(proxy), 10) as sock:
        sock.settimeout(patience_s)
        # An answer may come before all of the body is taken.
        sending = threading.Thread(target=_send, args=(sock, data))
        sending.start()
        try:
            while piece := sock.recv(1 << 16):
                answer.raw += piece
        except TimeoutError:
            answer.how = "timeout"
        except ConnectionError:
            answer.how = "reset"
        sending.join()
        if answer.how == "timeout":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    answer.took_s = time.monotonic() - began
    return answer


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the answer says why
        sock.sendall(data)


def ask_many(proxy: str, count: int, *arguments: Any, **options: Any) -> list[Answer]:
    """So many at once."""
    found: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: found.append(ask(proxy, *arguments, **options)), daemon=True)
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@dataclass
class Beside:
    """The stream that runs beside: what it met before `fault_ns` and after."""

    child: Child
    file: Path
    request_id: str
    fault_ns: int = 0
    events: int = 0
    calm_s: float = 0.0  # the largest delay of an event, from its send upstream to its receipt at the client
    worst_s: float = 0.0  # the same, since the fault
    gap_calm_s: float = 0.0
    gap_worst_s: float = 0.0

    def read(self) -> None:
        rows = [tuple(map(int, line.split())) for line in self.file.read_text().splitlines()]
        self.events = len(rows)
        assert [row[0] for row in rows] == list(range(len(rows)))

        def worst(part: list[tuple[int, ...]]) -> tuple[float, float]:
            stamps = [row[2] for row in part]
            gaps = [after - before for before, after in itertools.pairwise(stamps)]
            return max((row[2] - row[1] for row in part), default=0) / 1e9, max(gaps, default=0) / 1e9

        calm = [row for row in rows if self.fault_ns - CALM_S * 1e9 < row[1] < self.fault_ns]
        self.calm_s, self.gap_calm_s = worst(calm)
        self.worst_s, self.gap_worst_s = worst([row for row in rows if row[1] >= self.fault_ns])

    def __str__(self) -> str:
        return (
            f"beside {self.events} events whole, largest delay {self.calm_s * 1e3:.0f} → {self.worst_s * 1e3:.0f} ms, "
            f"largest gap {self.gap_calm_s * 1e3:.0f} → {self.gap_worst_s * 1e3:.0f} ms"
        )


@dataclass
class Rig:
    stage: Stage
    directory: Path
    events: Path
    good: Child
    bad_port: int
    proxy: str = ""
    control: str = ""
    sidecar: Child = None  # type: ignore[assignment]  # set by start
    bads: int = 0
    asked_until_found: int = 0  # requests, all completed, that it took to find the latest bad upstream
    logs: list[Path] = field(default_factory=list)

    def start(self, *options: str, good_port: int) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in (self.bad_port, good_port)]
        self.proxy, self.control, self.sidecar = start_sidecar(
            self.stage, urls[0], self.events, "--upstream", urls[1], "--sql-every", "off", *options
        )

    def bad(self, fault: str, after: int = 1) -> Child:
        """The upstream that does one thing wrong, on the same port each time."""
        self.bads += 1
        name = f"bad{self.bads}"
        log = self.directory / f"{name}.seen"
        self.logs.append(log)
        child = peer(self.stage, name, "upstream", str(self.bad_port), fault, str(after), str(log))
        child.wait_for("ready on", 60)

        self.asked_until_found = 0

        def is_found() -> bool:
            assert ask(self.proxy).is_whole
            self.asked_until_found += 1
            return bool(log.read_text())

        until(is_found, every_s=0.1)
        child.tell("arm")
        child.wait_for("done", 60)
        return child

    def lines(self, start: str) -> list[str]:
        """What the bad upstreams wrote down, without that first word."""
        found = []
        for log in self.logs:
            found += [line[len(start) + 1 :] for line in log.read_text().splitlines() if line.startswith(start)]
        return found

    @property
    def data_plane(self) -> int:
        return child_pid(self.sidecar.process.pid, "exporter.data_plane")

    def scrape(self) -> Scrape:
        return scrape(self.control)

    def inflight(self) -> int:
        """Besides the stream beside."""
        return self.scrape().total("sloscope_sidecar_inflight_requests") - 1

    def ends(self) -> Ends:
        """How the requests ended so far, by the metrics, once only the stream beside is in flight."""

        def idle() -> Scrape | None:
            found = self.scrape()
            return found if found.total("sloscope_sidecar_inflight_requests") == 1 else None

        found = until(idle).sums("sloscope_sidecar_requests_total", "outcome", "reason")
        return Counter({(outcome, reason): count for (outcome, reason), count in found.items() if count})

    @contextlib.contextmanager
    def beside(self) -> Iterator[Beside]:
        """A stream through the good upstream for as long as the block takes; whole and on time, or a failure."""
        file = self.directory / f"beside{time.monotonic_ns()}.txt"
        child = peer(self.stage, "beside", "reader", *map(str, address(self.proxy)), str(file))
        beside = Beside(child, file, child.wait_for(r"streams (\S+)", 60)[1])
        yield beside
        self.good.tell("finish")
        over = child.wait_for(r"over (\d+) (\w+)", 60)
        assert over[2] == "whole", "the stream beside is not what was sent"
        beside.read()
        assert beside.events == int(over[1])
        assert beside.worst_s < beside.calm_s + MOST_DELAY_S, beside

    @contextlib.contextmanager
    def unharmed(self, first: Callable[[], object] = lambda: None) -> Iterator[Beside]:
        """All that holds whatever happens in the block: books, the stream beside, memory, the process itself.

        `first` is done before anything is measured: what it costs once and for all is spent then.
        """
        with self.beside() as beside, Scraper(self.control, may_fail=True) as books:
            first()
            time.sleep(CALM_S)
            beside.fault_ns = time.monotonic_ns()
            pid, before = self.data_plane, rss_mib(self.data_plane)
            yield beside
            self.ends()
            until(lambda: rss_mib(pid) - before < MOST_GROWTH_MIB)
            grown = rss_mib(pid) - before
            assert self.data_plane == pid, "the data plane was started again"
            problems = self.scrape().total("sloscope_parse_problems_total", problem="observer_error")
            assert problems == 0, self.sidecar.log.read_text()
        assert books.scrapes > 0
        print(f"{beside}; books balanced at {books.scrapes} scrapes; memory {grown:+.1f} MiB")


def peer(stage: Stage, name: str, *arguments: str) -> Child:
    return stage.start(name, sys.executable, "-m", "tests.end_to_end.fault_peers", *arguments)


@contextlib.contextmanager
def rig(directory: Path, *options: str) -> Iterator[Rig]:
    """Routing is by outstanding tokens, and the stream beside has sixteen million: all others go to the bad upstream
    for as long as it can be reached.
    """
    with Stage(directory) as stage:
        good_port = free_port()
        good = peer(stage, "good", "upstream", str(good_port), "none", "1", str(directory / "good.seen"))
        good.wait_for("ready on", 60)
        found = Rig(stage, directory, directory / "events", good, free_port())
        found.start(*options, good_port=good_port)
        yield found
