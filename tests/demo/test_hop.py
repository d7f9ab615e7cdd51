"""The buffering hop on real sockets: it holds when told to, and only then."""

import asyncio
import time

import pytest

from sloscope.demo.hop import Hop

EVENTS = 6
EVERY_S = 0.03


async def receive(hold_ms: int) -> list[float]:
    """Arrival times of reads at a client behind the hop, seconds after the request.

    Without a hold each event is written when the client has the one before.
    """

    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        for number in range(1, EVENTS + 1):
            writer.write(b"x")
            await writer.drain()
            if hold_ms:
                await asyncio.sleep(EVERY_S)
            while not hold_ms and len(times) < number:
                await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")
        await reader.read()
        writer.close()

    times: list[float] = []
    origin = await asyncio.start_server(dripping, "127.0.0.1", 0)
    hop = Hop(origin.sockets[0].getsockname()[:2])
    hop.command(f"hold {hold_ms}" if hold_ms else "pass")
    front = await asyncio.start_server(hop.serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*front.sockets[0].getsockname()[:2])
    writer.write(b"go\n")
    start, data = time.monotonic(), b""
    while not data.endswith(b"0\r\n\r\n"):
        block = await reader.read(100)
        assert block
        data += block
        times.append(time.monotonic() - start)
    assert data == b"x" * EVENTS + b"0\r\n\r\n"
    writer.close()
    await writer.wait_closed()
    for server in (front, origin):
        server.close()
    await asyncio.sleep(0.05)
    return times


def test_without_a_hold_events_pass_one_by_one() -> None:
    times = asyncio.run(receive(0))
    assert len(times) == EVENTS + 1  # and the end


def test_a_held_response_arrives_together_when_it_ends() -> None:
    times = asyncio.run(receive(60_000))
    assert len(times) == 1 and times[0] >= EVENTS * EVERY_S * 0.9


@pytest.mark.parametrize("line", ["", "hold", "hold soon", "hold -5", "open"])
def test_what_is_no_command_changes_nothing(line: str) -> None:
    hop = Hop(("127.0.0.1", 1))
    hop.command("hold 200")
    hop.command(line)
    assert hop.hold_s == 0.2
