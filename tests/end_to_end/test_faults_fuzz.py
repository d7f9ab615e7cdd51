"""Any bytes at all from either side, through real sockets and a real sidecar."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.fault_peers import CHAT, DONE, FINISH, HEAD, LAST, UNTIL_CLOSE, chunk, event
from tests.end_to_end.fault_rig import Answer, address, ask, ends_of, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
EXAMPLES = 150
PATIENCE_S = 5.0
quickly = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

ANYTHING = st.binary(max_size=40)
# What answers begin with and what follows, some of it broken, and anything.
HEADS = st.sampled_from(
    [
        HEAD, HEAD, HEAD, UNTIL_CLOSE, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 304 \r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: text/event-stream\r\n\r\n",
    ]
)  # fmt: skip
PARTS = st.sampled_from(
    [
        LAST, LAST, chunk(event(1, 2)), chunk(event(1, 2)), event(1, 2), chunk(FINISH), FINISH, DONE, b"0\r\n\r\n",
        b"\r\n", b"data: {", b"\xef\xbb\xbf", b"event: error\n\n", b"ffffffffffffffff\r\n", b"5\r\n", b": ping\n\n",
        b"\r\r",
    ]
)  # fmt: skip
BEGINNINGS = st.sampled_from(
    [
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n".encode() + b'{"stream":true}',
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode(),
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode(),
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"HEAD / HTTP/1.0\r\n\r\n",
    ]
)
PIECES = st.sampled_from(
    [
        b"content-length: 4\r\n", b"transfer-encoding: chunked\r\n", b"\r\n", b"\r\n\r\n", b"connection: close\r\n",
        b"expect: 100-continue\r\n", b"0\r\n\r\n", b"2\r\n{}\r\n", b"x: y\n", b"\0", b"x-slo-ttft-ms: 5\r\n",
        b"x-sloscope-request-id: 01M8MJY2FJWHZRWY1FSS668JK7\r\n",
    ]
)  # fmt: skip
CUTS = st.lists(st.integers(0, 500), max_size=6)


def messages(beginnings: st.SearchStrategy[bytes], parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Mostly a proper beginning and what may follow it, one to three times."""
    one = st.tuples(st.one_of(beginnings, beginnings, beginnings, ANYTHING), st.lists(parts | ANYTHING, max_size=5))
    return st.lists(one, min_size=1, max_size=3).map(
        lambda all_: b"".join(b"".join([head, *rest]) for head, rest in all_)
    )


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({n % (len(data) + 1) for n in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def read_strictly(answer: Answer) -> str:
    """What a strict client makes of it: a status, or that it stops short. Anything else is a failure."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("connection", "close")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer.raw)
    status = "none"
    while True:
        try:
            found = client.next_event()
        except h11.RemoteProtocolError as error:
            if "without sending complete message" in str(error) or "closed connection" in str(error):
                return "stops short"
            raise
        if found is h11.NEED_DATA:
            client.receive_data(b"")
        elif isinstance(found, h11.Response):
            status = str(found.status_code)
        elif isinstance(found, h11.EndOfMessage):
            return status


def test_whatever_an_upstream_answers_a_strict_client_understands_or_sees_cut(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    with rig(tmp_path) as r, r.unharmed():
        r.bad("none")

        @quickly
        @given(messages(HEADS, PARTS), CUTS, st.booleans())
        def answers(said: bytes, cuts: list[int], resets: bool) -> None:
            says = [piece.hex() for piece in cut(said, cuts)]
            answer = ask(r.proxy, {"says": says, "resets": resets}, patience_s=PATIENCE_S)
            assert answer.how != "timeout", "neither an answer nor an end"
            seen["reset" if answer.how == "reset" else read_strictly(answer)] += 1

        answers()
    ends = ends_of(r.events)
    print(f"{sum(seen.values())} answers: {dict(seen)}; ended {dict(ends)}")


def test_whatever_a_client_sends_its_upstream_gets_whole_requests_or_none(tmp_path: Path) -> None:
    statuses: Counter[int] = Counter()
    with rig(tmp_path) as r:
        with r.unharmed():
            r.bad("strict")

            @quickly
            @given(messages(BEGINNINGS, PIECES), CUTS, st.sampled_from(["waits", "half", "closes", "resets"]))
            def requests(sent: bytes, cuts: list[int], end: str) -> None:
                with socket.create_connection(address(r.proxy), 5) as client:
                    with contextlib.suppress(OSError):  # it may be refused before all of it is sent
                        for piece in cut(sent, cuts):
                            client.sendall(piece)
                            time.sleep(0.0005)
                    if end == "resets":
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    elif end != "closes":
                        if end == "half":
                            with contextlib.suppress(OSError):
                                client.shutdown(socket.SHUT_WR)
                        client.settimeout(0.03)
                        with contextlib.suppress(OSError):
                            answer = client.recv(1 << 16)
                            if answer.startswith(b"HTTP/1.1 "):
                                statuses[int(answer[9:12])] += 1

            requests()
        assert r.lines("broken") == []
        whole = len(r.lines("message"))
    ends = ends_of(r.events)
    assert whole and statuses
    print(f"{EXAMPLES} clients: statuses {dict(statuses)}, {whole} whole requests upstream; {dict(ends)}")
