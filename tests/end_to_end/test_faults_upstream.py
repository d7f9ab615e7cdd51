"""An upstream that is killed at every point of a request, is silent, stopped, slow, or no server at all."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from sloscope.demo.processes import Stage
from tests.end_to_end.fault_peers import WHOLE
from tests.end_to_end.fault_rig import Answer, Ends, ask, ask_many, ends_of, records, rig
from tests.end_to_end.support import start_sidecar
from tests.end_to_end.test_sidecar_processes import at_once, upstream
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
AT_ONCE = 4
RESET = ("failed", "upstream_reset")
LEFT = ("cancelled", "disconnect")
COMPLETED = ("completed", "")

# Where the upstream process is killed while four requests are there → the status and the output events that each of the
# four clients gets, and how the requests end.
PHASES = {
    "dies_at_accept": (502, 0, RESET),
    "dies_after_request_head": (502, 0, RESET),
    "dies_mid_upload": (502, 0, RESET),
    "dies_before_response_head": (502, 0, RESET),
    "dies_in_response_head": (502, 0, RESET),
    "dies_before_first_event": (200, 0, ("failed", "empty_stream")),
    "dies_mid_stream": (200, WHOLE, ("failed", "truncated")),
    "dies_mid_stream_until_close": (200, WHOLE, ("failed", "truncated")),
    "dies_mid_event": (200, WHOLE, ("failed", "truncated")),
    # `[DONE]` came: the answer is complete, though HTTP says that it is not and its client can see that.
    "dies_in_last_chunk": (200, WHOLE, COMPLETED),
}


def test_an_upstream_killed_at_every_point_of_a_request_fails_its_own_requests_only(tmp_path: Path) -> None:
    with rig(tmp_path, "--inspect-limit", "65536") as r:
        with r.unharmed():
            before: Ends = r.ends()
            for fault, (status, events, end) in PHASES.items():
                bad = r.bad(fault, after=AT_ONCE)
                before[COMPLETED] += r.asked_until_found
                # A body above the limit goes up while it comes, so that there is a middle of it.
                upload = 4 << 20 if fault in ("dies_after_request_head", "dies_mid_upload") else 0
                answers = ask_many(r.proxy, AT_ONCE, upload=upload)
                assert bad.process.wait(10) == -signal.SIGKILL
                assert [(each.status, each.events) for each in answers] == [(status, events)] * AT_ONCE, fault
                assert not any(each.is_whole for each in answers), fault
                after = r.ends()
                assert after - before == {end: AT_ONCE}, fault
                before = after
            # The next request finds it dead and goes to the other one.
            assert ask(r.proxy).is_whole
            until(lambda: r.ends() - before == {COMPLETED: 1})
        killed = len(PHASES)
    ends = ends_of(r.events)
    assert ends == before + Counter({COMPLETED: 2})  # the last one and the stream beside
    print(f"{killed} upstreams killed with {AT_ONCE} requests each: {dict(ends)}")


def test_an_upstream_killed_between_two_requests_of_a_connection_costs_no_request(tmp_path: Path) -> None:
    """But for one that the dying process had accepted on a new connection: it may have been begun, so it is not sent
    again, and its client sees a 502."""
    kills, cut = 8, 0
    with rig(tmp_path) as r, r.unharmed():
        for _ in range(kills):
            bad = r.bad("dies_when_idle")
            # The answer is whole, and its connection dies at once: what follows on its heels meets the dying process,
            # the closed connection or the closed port.
            answers = ask_many(r.proxy, 1) + ask_many(r.proxy, AT_ONCE)
            assert bad.process.wait(10) == -signal.SIGKILL
            broken = [each.raw for each in answers if not each.is_whole]
            assert all(b" 502 " in raw and b"closed the connection without an answer" in raw for raw in broken), broken
            cut += len(broken)
        ends = r.ends()
        assert sum(count for end, count in ends.items() if end != COMPLETED) == cut, ends
        assert cut <= kills // 2, f"{cut} of {kills * (1 + AT_ONCE)} requests were not answered"


def test_an_upstream_that_never_answers_is_left_when_its_client_leaves(tmp_path: Path) -> None:
    with rig(tmp_path, "--inspect-limit", "65536") as r, r.unharmed():
        r.bad("mute")
        before = r.ends()
        assert {each.how for each in ask_many(r.proxy, AT_ONCE, patience_s=0.5)} == {"timeout"}
        assert r.ends() - before == {LEFT: AT_ONCE}
        until(lambda: len(r.lines("closed")) >= AT_ONCE)
        r.stage.stop(r.stage.children[-1])

        # It does not even read: the upload is held, and its client is noticed all the same.
        r.bad("reads_nothing")
        before = r.ends()
        assert {each.how for each in ask_many(r.proxy, AT_ONCE, patience_s=0.5, upload=12 << 20)} == {"timeout"}
        assert r.ends() - before == {LEFT: AT_ONCE}


def test_an_upstream_that_is_stopped_holds_its_own_streams_and_goes_on_with_them(tmp_path: Path) -> None:
    """SIGSTOP is a half-open connection: the kernel accepts and acknowledges, and nobody is there."""
    with rig(tmp_path) as r, r.unharmed():
        bad = r.bad("none")
        before = r.ends()
        found: list[Answer] = []
        asking = threading.Thread(
            target=lambda: found.extend(ask_many(r.proxy, AT_ONCE, {"events": 100, "gap_ms": 10}))
        )
        asking.start()
        until(lambda: r.inflight() == AT_ONCE)
        time.sleep(0.2)
        os.kill(bad.process.pid, signal.SIGSTOP)
        # Who comes now is connected by the kernel and gets no answer.
        assert {each.how for each in ask_many(r.proxy, AT_ONCE, patience_s=1)} == {"timeout"}
        os.kill(bad.process.pid, signal.SIGCONT)
        asking.join()
        assert [(each.is_whole, each.events) for each in found] == [(True, 100)] * AT_ONCE
        assert r.ends() - before == {COMPLETED: AT_ONCE, LEFT: AT_ONCE}

        # Stopped again, and killed without a word.
        asking = threading.Thread(target=lambda: found.extend(ask_many(r.proxy, AT_ONCE, {"events": 0, "gap_ms": 10})))
        asking.start()
        until(lambda: r.inflight() == AT_ONCE)
        time.sleep(0.2)
        os.kill(bad.process.pid, signal.SIGSTOP)
        time.sleep(0.3)
        bad.process.kill()
        asking.join()
        assert r.ends() - before == {COMPLETED: AT_ONCE, LEFT: AT_ONCE, ("failed", "truncated"): AT_ONCE}
    ends_of(r.events)
    gaps_s = [longest_gap_s(each) for each in stamps_by_request(r.events).values() if len(each) == 100]
    assert len(gaps_s) == AT_ONCE and min(gaps_s) > 0.9
    print(f"largest gaps of the streams that were stopped for a second: {[f'{gap:.2f} s' for gap in sorted(gaps_s)]}")


def stamps_by_request(events: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records(events)["chunks"]:
        found.setdefault(record["request_id"], []).extend(record["t_ns"])
    return found


def longest_gap_s(stamps: list[int]) -> float:
    return max(after - before for before, after in itertools.pairwise(stamps)) / 1e9


RUBBISH = (
    b"\x15\x03\x01\x00\x02\x02\x46",  # a TLS alert
    b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18),  # HTTP/2 SETTINGS
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\nContent-Type: text/event-stream\n\n",
    b"\x00" * 70_000,
    b"\r\n\r\n\r\n",
    b"",
)


def test_an_upstream_that_is_no_server_is_a_502(tmp_path: Path) -> None:
    """Two kinds from each, since one that answered badly three times in a row would be left alone."""
    with rig(tmp_path) as r, r.unharmed():
        for number in range(0, len(RUBBISH), 2):
            kinds = RUBBISH[number : number + 2]
            file = tmp_path / f"rubbish{number}"
            file.write_text("".join(f"{each.hex()}\n" for each in kinds))
            r.bad(f"rubbish:{file}")
            before = r.ends()
            for kind in kinds:
                answer = ask(r.proxy)
                assert answer.status == 502 and b"sloscope_sidecar" in answer.raw, kind
            assert r.ends() - before == {RESET: len(kinds)}
            r.stage.stop(r.stage.children[-1])


def test_an_upstream_that_answers_badly_again_and_again_is_left_alone_for_a_while(tmp_path: Path) -> None:
    with rig(tmp_path) as r, r.unharmed():
        (tmp_path / "rubbish").write_text(f"{RUBBISH[1].hex()}\n")
        r.bad(f"rubbish:{tmp_path / 'rubbish'}")
        assert [ask(r.proxy).status for _ in range(3)] == [502] * 3
        # One more finds out where a quarter of a second has passed by then; the rest after it is longer.
        assert any(ask(r.proxy).is_whole for _ in range(3))


def test_an_upstream_that_answers_byte_by_byte_is_forwarded_whole(tmp_path: Path) -> None:
    with rig(tmp_path) as r, r.unharmed():
        r.bad("slow")
        before = r.ends()
        answers = ask_many(r.proxy, AT_ONCE)
        assert [(each.is_whole, each.events) for each in answers] == [(True, WHOLE)] * AT_ONCE
        assert r.ends() - before == {COMPLETED: AT_ONCE}
    print(f"byte by byte in {max(each.took_s for each in answers):.1f} s")


def test_an_upstream_whose_queue_is_full_costs_five_seconds_and_no_request(tmp_path: Path) -> None:
    """It listens and does not accept: the connect gets no answer at all, as behind a firewall that drops."""
    with socket.socket() as listener, Stage(tmp_path) as stage, upstream(at_once) as (good, _):
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        full = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxy, _, sidecar = start_sidecar(stage, full, tmp_path / "events", "--upstream", good, "--sql-every", "off")
        first = ask_many(proxy, AT_ONCE)
        next_ = ask_many(proxy, AT_ONCE)
        for each in waiting:
            each.close()
        assert sidecar.stop() == 0
    assert all(b"[DONE]" in each.raw and each.status == 200 for each in (*first, *next_))
    # Those that waited for the connect did for its five seconds; who comes later goes to the other at once.
    assert 5 <= max(each.took_s for each in first) < 50
    assert max(each.took_s for each in next_) < 5
    assert ends_of(tmp_path / "events") == {COMPLETED: 2 * AT_ONCE}
