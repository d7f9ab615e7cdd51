"""Few files that may be open: whoever is let in is served, and the others are told at once."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from exporter.descriptors import RESERVE, room
from sloscope.demo.processes import SLOSCOPE, Child, Stage
from sloscope.units import NS_PER_S
from tests.exporter.harness import (
    DONE,
    Bench,
    RawClient,
    Response,
    Script,
    ScriptedUpstream,
    Seen,
    answering,
    bench,
    event,
    finish,
    request,
    run,
)

WHOLE = answering(event(), finish(), DONE)
LIMIT = 128


@contextmanager
def limited(files: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("files", "upstreams", "hedged", "clients"),
    [
        (128, 1, False, 32),  # (128 - 64) / 2
        (128, 2, False, 28),  # (128 - 64 - 2 * 4 that are kept) / 2
        (128, 2, True, 18),  # … / 3
        (70, 4, True, 1),
        (10, 1, False, 1),  # less than the reserve
    ],
)
def test_every_client_that_fits_has_room_for_its_upstreams(
    files: int, upstreams: int, hedged: bool, clients: int
) -> None:
    with limited(files):
        found = room(upstreams, hedged)
    assert (found.files, found.clients) == (files, clients)
    if files > RESERVE + 8 * upstreams:
        kept = found.idle * upstreams if upstreams > 1 else 0
        assert found.clients * (3 if hedged else 2) + kept <= files - RESERVE


def sidecar(stage: Stage, limit: str, events: Path, *options: str) -> tuple[tuple[str, int], str, Child]:
    """(address, control URL, process); `limit`: options and value of ulimit."""
    child = stage.start(
        "sidecar", "sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *SLOSCOPE, "sidecar", "--listen", "127.0.0.1:0",
        "--control", "127.0.0.1:0", "--events", str(events), "--goodput", "ttft:300", "--sql-every", "off", *options,
    )  # fmt: skip
    match = child.wait_for(r"listening on http://(\S+):(\d+), control on (http://\S+)", 30)
    return (match[1], int(match[2])), match[3], child


async def ask(address: tuple[str, int]) -> Response:
    client = RawClient(*await asyncio.open_connection(*address))
    try:
        await client.send(request())
        answer = await client.response()
        if answer.status == 503:
            assert await client.to_end() == b"", "the connection ends with it"
        return answer
    finally:
        await client.close()


@pytest.mark.parametrize("upstreams", [1, 2])
def test_of_more_clients_than_fit_those_inside_get_their_answer_and_the_others_a_503(
    tmp_path: Path, upstreams: int
) -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await go_on.wait()
            await WHOLE(seen, writer)

        servers = [ScriptedUpstream(script) for _ in range(upstreams)]
        urls = [word for each in servers for word in ("--upstream", await each.start())]
        with Stage(tmp_path) as stage:
            address, control, child = await asyncio.to_thread(sidecar, stage, f"-n {LIMIT}", tmp_path / "events", *urls)
            fits = int(re.search(r"128 files may be open .*, so (\d+) clients fit at once", child.log.read_text())[1])  # type: ignore[index]
            crowd = 3 * fits
            for _ in range(3):  # what the first ones left behind takes nothing from the next
                go_on.clear()
                asking = [asyncio.create_task(ask(address)) for _ in range(crowd)]
                while sum(task.done() for task in asking) < crowd - fits:
                    await asyncio.sleep(0.01)
                go_on.set()
                answers = await asyncio.gather(*asking)
                assert Counter(answer.status for answer in answers) == {200: fits, 503: crowd - fits}
                assert {answer.header("retry-after") for answer in answers if answer.status == 503} == {"1"}
            url = f"{control}/metrics"
            text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
            assert f"\nsloscope_sidecar_clients_refused_total {3 * (crowd - fits)}" in text
            assert await asyncio.to_thread(child.stop) == 0
        for each in servers:
            await each.stop()

    run(test(), 60)


def a_second_goes_by(b: Bench) -> None:
    for client in b.plane.clients:
        client.since_ns -= NS_PER_S
    b.plane._sweep(b.plane.clock.monotonic_ns())


@asynccontextmanager
async def few_places(tmp_path: Path, places: int, script: Script = WHOLE) -> AsyncIterator[Bench]:
    async with bench(tmp_path, script) as b:
        b.plane.room = b.plane.room._replace(clients=places)
        b.plane._second_due_ns = 1 << 62  # only the test says that a second is over
        yield b


def test_whoever_idles_the_longest_makes_place_for_one_who_asks(tmp_path: Path) -> None:
    async def test() -> None:
        async with few_places(tmp_path, 3) as b:
            served, silent, working = [await b.connect() for _ in range(3)]
            ask = request()
            await served.send(ask)
            assert (await served.response()).status == 200
            await working.send(ask[:-5])
            assert (await b.ask()).status == 503, "nobody has idled for a second"
            a_second_goes_by(b)
            assert (await b.ask()).status == 200
            assert await silent.to_end() == b""
            await served.send(ask)
            assert (await served.response()).status == 200
            assert (await b.ask()).status == 503, "it did not idle meanwhile, so its place is its own"
            a_second_goes_by(b)
            another = await b.connect()
            assert await b.clients[4].to_end() == b"", "who was let in before served was answered again"
            for client, rest in ((working, ask[-5:]), (another, ask), (served, ask)):
                await client.send(rest)
                assert (await client.response()).status == 200
            assert b.total("sloscope_sidecar_clients_refused_total") == 2
            assert b.total("sloscope_sidecar_clients_displaced_total") == 2

    run(test())


def test_places_are_looked_for_when_they_are_needed(tmp_path: Path) -> None:
    async def test() -> None:
        async with few_places(tmp_path, 3) as b:
            idle = [await b.connect() for _ in range(2)]
            a_second_goes_by(b)  # while one place is free
            for _ in range(3):
                assert (await b.ask()).status == 200
            assert [await each.to_end() for each in idle] == [b"", b""]
            assert (await b.ask()).status == 503

    run(test())


def test_a_request_that_is_not_read_yet_keeps_its_connection(tmp_path: Path) -> None:
    async def test() -> None:
        async with few_places(tmp_path, 1) as b:
            with socket.create_connection(b.address) as client:
                await b.until(lambda: b.plane.clients)
                a_second_goes_by(b)
                # As when the next client is let in in the turn of the loop in which this one would be read.
                client.sendall(request())
                assert not b.plane._make_place()
                client.setblocking(False)
                assert (await b.plane.loop.sock_recv(client, 64)).startswith(b"HTTP/1.1 200")

    run(test())


def test_an_answer_that_its_client_has_not_taken_keeps_its_connection(tmp_path: Path) -> None:
    async def long(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 400000\r\n\r\n" + bytes(400_000))

    async def test() -> None:
        async with few_places(tmp_path, 1, long) as b:
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.connect(b.address)
                slow.sendall(request())
                await b.until(lambda: b.plane.clients and all(each.exchange is None for each in b.plane.clients))
                a_second_goes_by(b)
                for _ in range(3):
                    assert (await b.ask()).status == 503
                    a_second_goes_by(b)
                slow.setblocking(False)
                taken = 0
                while taken < 400_000:
                    taken += len(await b.plane.loop.sock_recv(slow, 1 << 16))
                while (await b.ask()).status == 503:  # until the kernel knows that all was taken
                    a_second_goes_by(b)

    run(test())


def test_a_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    with Stage(tmp_path) as stage:
        *_, child = sidecar(stage, f"-Sn {LIMIT}", tmp_path / "events", "--upstream", "http://127.0.0.1:9")
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert resource.prlimit(child.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        for pid in Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text().split():
            assert resource.prlimit(int(pid), resource.RLIMIT_NOFILE) == (hard, hard)


def test_where_no_file_is_left_the_upstream_is_not_taken_for_dead(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, WHOLE) as b:
            client = await b.connect()
            assert (await b.ask()).status == 200  # what is imported late is there
            b.plane.upstreams.close_stale(1 << 62)
            await asyncio.sleep(0.05)
            with ExitStack() as stack:
                stack.enter_context(limited(256))
                while True:
                    try:
                        stack.enter_context(open(os.devnull))
                    except OSError:
                        break
                await client.send(request())
                answer = await client.response()
            assert answer.status == 502 and b.plane.upstreams.pools[0].up
            assert (await b.ask()).status == 200

    run(test())
