"""Clients that stop reading, that leave by the thousand, and that name a new tenant each time."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloscope.demo.processes import Stage
from tests.end_to_end.fault_peers import LAST, request
from tests.end_to_end.fault_rig import Rig, address, child_pid, ends_of, peer, records, rig, rss_mib
from tests.end_to_end.scrapes import Scraper, scrape
from tests.end_to_end.support import free_port, start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
COMPLETED = ("completed", "")
LEFT = ("cancelled", "disconnect")
MIB = 1 << 20
CROWD = 2000
TENANTS = 100_000
AGAIN = 10_000
LABELS = 50


def flooded(r: Rig) -> int:
    """Bytes of the latest flood that the upstream got rid of."""
    return int((r.lines("flooded") or ["0"])[-1])


def test_a_client_that_stops_reading_holds_its_upstream_and_no_memory_and_may_go_on(tmp_path: Path) -> None:
    size = 64 * MIB
    with rig(tmp_path) as r, r.unharmed():
        r.bad("none")
        before = r.ends()
        pid, start_mib = r.data_plane, rss_mib(r.data_plane)
        with socket.create_connection(address(r.proxy)) as reader:
            reader.sendall(request({"flood_bytes": size}, "connection: close"))
            until(lambda: flooded(r) > MIB)
            # It fills what the kernel buffers on both sides, and no more.
            stuck = -1
            while stuck != (stuck := flooded(r)):
                time.sleep(0.5)
            assert stuck < size
            held_mib = rss_mib(pid) - start_mib
            assert held_mib < 8
            got, tail = 0, b""
            while piece := reader.recv(MIB):
                got += len(piece)
                tail = (tail + piece)[-len(LAST) :]
            assert got > size and tail == LAST
        assert r.ends() - before == {COMPLETED: 1}

        # Another one never reads again, and leaves.
        leaves = socket.create_connection(address(r.proxy))
        leaves.sendall(request({"flood_bytes": size}))
        until(lambda: r.inflight() == 1)
        time.sleep(1)
        leaves.close()
        assert r.ends() - before == {COMPLETED: 1, LEFT: 1}
    ends_of(r.events)
    hold_s = max(record.get("consumer_hold_ns", 0) for record in records(r.events)["end"]) / 1e9
    assert hold_s > 0.5
    print(
        f"{stuck / MIB:.1f} MiB of {size / MIB:.0f} left the upstream while nobody read, the data plane held "
        f"{held_mib:+.1f} MiB of it; consumer_hold {hold_s:.1f} s"
    )


@pytest.fixture
def crowd_size() -> Iterator[int]:
    """As many clients as the limit on open files allows: each takes a connection on both sides of the sidecar. Where
    that is less than the crowd it is said, and where nothing may be skipped it is a failure.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the sidecar inherits it
    size = CROWD if hard == resource.RLIM_INFINITY else min(CROWD, (hard - 200) // 2)
    if size < CROWD:
        short = f"{hard} files may be open (ulimit -Hn), so the crowd is {size} clients and not {CROWD}"
        if os.environ.get("SLOSCOPE_NO_SKIP"):
            pytest.fail(short)
        print(short)
    yield size
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_clients_leave_at_once_and_every_one_is_accounted_for(tmp_path: Path, crowd_size: int) -> None:
    with rig(tmp_path) as r:

        def first() -> None:
            r.bad("none")
            for _ in range(2):  # from the second on they find the memory of those before
                crowd_leaves(r, crowd_size)

        with r.unharmed(first):
            noticed = len(r.lines("closed"))
            gone_s = crowd_leaves(r, crowd_size)
            until(lambda: len(r.lines("closed")) >= noticed + crowd_size)  # each by its upstream, too
    assert ends_of(r.events)[LEFT] == 3 * crowd_size
    print(f"{crowd_size} of {CROWD} clients killed at once: all of them cancelled {gone_s:.2f} s later")


def crowd_leaves(r: Rig, count: int) -> float:
    """Seconds from the kill of all clients to the scrape that counts none of them as in flight."""
    clients = peer(r.stage, "crowd", "crowd", *map(str, address(r.proxy)), str(count))
    assert clients.wait_for(r"holding (\d+)", 60)[1] == str(count)
    until(lambda: r.inflight() == count)
    clients.process.kill()
    killed = time.monotonic()
    until(lambda: r.inflight() == 0, 30)
    return time.monotonic() - killed


def test_a_page_that_leaves_in_the_middle_of_its_receipts_records_nothing_and_says_nothing(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        _, control, sidecar = start_sidecar(stage, "http://127.0.0.1:9", tmp_path / "events", "--sql-every", "off")
        for _ in range(10):
            with socket.create_connection(address(control)) as page:
                page.sendall(
                    b"POST /v1/receipts HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n" + b'{"receipts": ['
                )
                time.sleep(0.05)
        # It answers the next one, and its log is no place for what pages do.
        found = scrape(control)
        assert found.total("sloscope_client_requests_offered_total") == 0
        assert sidecar.stop() == 0
    assert len(sidecar.log.read_text().splitlines()) == 1, sidecar.log.read_text()
    assert not records(tmp_path / "events", "client")


def test_a_hundred_thousand_tenants_make_fifty_labels_and_no_memory(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        port = free_port()
        peer(stage, "quick", "quick", str(port)).wait_for("ready on", 60)
        proxy, control, sidecar = start_sidecar(
            stage, f"http://127.0.0.1:{port}", tmp_path / "events", "--sql-every", "off"
        )
        pid = child_pid(sidecar.process.pid, "exporter.data_plane")

        def flood(first: int, count: int) -> float:
            began = time.monotonic()
            clients = peer(stage, "tenants", "tenants", *map(str, (*address(proxy), first, count)))
            assert clients.wait_for(r"answered (\d+)", 150)[1] == str(count)
            return time.monotonic() - began

        with Scraper(control, may_fail=True) as books:
            fresh_mib = rss_mib(pid)
            took_s = flood(0, TENANTS)
            full_mib, size = rss_mib(pid), len(scrape(control).text)
            flood(TENANTS, AGAIN)
            found, grown_mib = scrape(control), rss_mib(pid) - full_mib
        offered = found.sums("sloscope_sidecar_requests_offered_total", "tenant")
        assert sum(offered.values()) == TENANTS + AGAIN
        # Fifty, one of which is the default that is there from the start, and the rest under one name, counted.
        assert len({tenant for (tenant,), count in offered.items() if count}) == LABELS + 1
        assert offered["other",] == TENANTS + AGAIN - LABELS
        overflow = found.total("sloscope_tenant_overflow_total", observer="sidecar")
        assert overflow == offered["other",]
        assert len(found.text) < size * 1.01 + 1000, "a tenant beyond the fiftieth made a series"
        assert grown_mib < 2
        # The latest 100,000 request ids are remembered; nothing else may stay.
        assert full_mib - fresh_mib < 40
    ends = ends_of(tmp_path / "events")
    assert ends == {COMPLETED: TENANTS + AGAIN}
    print(
        f"{TENANTS} tenants at {TENANTS / took_s:.0f} requests/s: {LABELS} labels and `other` for {overflow}, "
        f"{size >> 10} KiB of metrics, memory {full_mib - fresh_mib:+.1f} MiB, and {grown_mib:+.1f} MiB for "
        f"{AGAIN} more; books balanced at {books.scrapes} scrapes"
    )
