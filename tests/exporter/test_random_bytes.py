"""What is valid arrives as it was sent, in whatever pieces; what is not reaches nobody half-read."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import h11
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exporter.harness import CHAT, DONE, Seen, answering, bench, event, finish, request, run, serving

SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
BODIES = st.one_of(
    st.binary(max_size=300), st.sampled_from([b"", event() + finish() + DONE, b"\r\n\r\n", b"0\r\n\r\n"])
)


@st.composite
def chunked_bodies(draw: st.DrawFn) -> bytes:
    body, raw = draw(BODIES), b""
    while body:
        size = draw(st.integers(1, len(body)))
        digits = draw(st.sampled_from([b"%x", b"%X", b"00%x"])) % size
        raw += digits + draw(st.sampled_from([b"", b";a", b';a="b c"'])) + b"\r\n" + body[:size] + b"\r\n"
        body = body[size:]
    trailers = draw(st.sampled_from([b"", b"x-sum: 1\r\n", b"a:\r\nb: \t c\r\n"]))
    return raw + draw(st.sampled_from([b"0", b"000", b"0;last"])) + b"\r\n" + trailers + b"\r\n"


@st.composite
def framed(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Header line and the body under it, as on the wire."""
    if draw(st.booleans()):
        return b"transfer-encoding: chunked\r\n", draw(chunked_bodies())
    body = draw(BODIES)
    return b"content-length: %d\r\n" % len(body), body


@dataclass
class Exchange:
    request: bytes
    request_body: bytes
    response: bytes
    response_body: bytes


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    path = draw(st.sampled_from([CHAT, "/v1/completions", "/v1/files"])).encode()
    line, body = draw(framed())
    head = b"POST %b HTTP/1.1\r\nHost: a\r\n%bx-mine: y\r\n\r\n" % (path, line)
    answer_line, answer = draw(framed())
    kind = draw(st.sampled_from([b"text/event-stream", b"application/json", b"application/octet-stream"]))
    answer_head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n" % (kind, answer_line)
    return Exchange(head + body, body, answer_head + answer, answer)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(marks)]


@SLOW
@given(st.lists(exchanges(), min_size=1, max_size=4), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_valid_messages_in_random_pieces_arrive_as_they_were_sent(sent: list[Exchange], places: list[int]) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in cut(answers.pop(0).response, places):
            writer.write(piece)
            await asyncio.sleep(0)

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with bench(Path(folder), script) as b:
                client = await b.connect()
                for piece in cut(b"".join(each.request for each in sent), places):
                    await client.send(piece)
                    await asyncio.sleep(0)
                for each in sent:
                    answer = await client.response()
                    assert (answer.status, answer.body) == (200, each.response_body)
                assert [seen.body for seen in b.upstream.seen] == [each.request_body for each in sent]
                assert all(seen.header("x-mine") == "y" for seen in b.upstream.seen)
                b.check_identity()
                assert b.total("sloscope_parse_problems_total", problem="observer_error") == 0

    answers = list(sent)
    run(test())


REQUEST = request(b'{"model":"m","stream":true}')
IN_CHUNKS = b"POST /v1/files HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + (
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(event()), event())
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
# What parsers have disagreed on before.
SHARDS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0", b"5\r\n", b"0\r\n\r\n", b"chunked", b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1", b"GET / HTTP/1.1\r\nhost: b\r\n\r\n", b"\xff",
    b"+", b"0x", b",", b";",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, *whole: bytes) -> bytes:
    data = bytearray(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = start + draw(st.sampled_from([0, 0, 0, 1, 1, 2, 20]))
        data[start:stop] = draw(st.one_of(st.sampled_from(SHARDS), st.binary(max_size=4)))
    return bytes(data)


def rubbish(*whole: bytes) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.one_of(damaged(*whole), damaged(*whole), st.binary(max_size=200)), min_size=1, max_size=8)


def read_by_another(data: bytes) -> None:
    """Raises h11.RemoteProtocolError where another reader finds what is no HTTP. It may stop short."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    reader.receive_data(data)
    while True:
        got = reader.next_event()
        if got is h11.NEED_DATA:
            return
        if got is h11.PAUSED:
            if reader.our_state is h11.SEND_RESPONSE:
                reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                reader.send(h11.EndOfMessage())
            if reader.our_state is not h11.DONE or reader.their_state is not h11.DONE:
                return
            reader.start_next_cycle()


@SLOW
@given(rubbish(REQUEST, IN_CHUNKS))
def test_whatever_a_client_sends_another_server_reads_what_goes_up(sent: list[bytes]) -> None:
    received: list[bytearray] = []

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        received.append(mine)
        while data := await reader.read(1 << 16):
            mine += data
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with serving(upstream) as url, bench(Path(folder), answering(), upstreams=(url,)) as b:
                del b.plane.upstreams.pools[1:]
                for data in sent:
                    client = await b.connect()
                    await client.send(data)
                    await asyncio.sleep(0.002)
                    await client.close()
                alive = await b.connect()
                await alive.send(REQUEST)
                assert (await alive.response()).status == 200
                assert b.total("sloscope_parse_problems_total", problem="observer_error") == 0
        for each in filter(None, received):  # to h11, no bytes are the end of the connection
            read_by_another(bytes(each))

    run(test())


@SLOW
@given(rubbish(ANSWER, SIZED))
def test_whatever_an_upstream_answers_another_client_reads_what_comes_down(answers: list[bytes]) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        number = int(seen.header("number") or 0)
        writer.write(answers[number] if number < len(answers) else SIZED)
        await writer.drain()
        writer.close()

    async def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with bench(Path(folder), script) as b:
                for number in range(len(answers)):
                    client = await b.connect()
                    await client.send(request(REQUEST[-27:], f"number: {number}", "connection: close"))
                    try:
                        got = await client.to_end()
                    except ConnectionResetError:
                        continue  # a body without a length was cut off, and looks it
                    assert got
                    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
                    reader.send(
                        h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", "0")])
                    )
                    reader.send(h11.EndOfMessage())
                    reader.receive_data(got)
                    while reader.next_event() not in (h11.NEED_DATA, h11.PAUSED) and reader.their_state is not h11.DONE:
                        pass
                    if reader.their_state is h11.DONE:  # else it still holds what it cannot read yet
                        assert reader.trailing_data[0] == b"", got
                assert (await b.ask(b"{}", f"number: {len(answers)}")).status == 200
                assert b.check_identity() == len(answers) + 1

    run(test())
