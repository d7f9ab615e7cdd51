"""What a load generator does with its receipts when the control plane will not take them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sloscope.client import receipts
from sloscope.client.h1 import Origin
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipts import ReceiptPoster
from sloscope.clock import FakeClock
from sloscope.ids import new_request_id

TAKEN = b'{"accepted":2,"rejected":[]}'


def test_receipts_that_are_too_many_for_now_wait_and_are_not_lost() -> None:
    answers = [
        b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(TAKEN), TAKEN),
    ]
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                bodies.append(await reader.readexactly(int(length.partition(b":")[2])))
                writer.write(answers.pop(0))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            poster = ReceiptPoster(Origin("http", "127.0.0.1", port, ""), SimpleNamespace(model="m"), "host:1")
            poster._waiting += [{"t_ns": [1]}, {"t_ns": [2]}]
            await poster._post_waiting()
            assert (len(poster._waiting), poster.failed, poster.last_error) == (2, 0, "status 429")
            assert await poster.close() == 0
            assert bodies == [b'{"receipts":[{"t_ns":[1]},{"t_ns":[2]}]}'] * 2

    asyncio.run(main())


@pytest.mark.parametrize(("most", "kept"), [("_MOST_WAITING", 3), ("_MOST_WAITING_EVENTS", 1)])
def test_what_waits_for_a_control_plane_is_bounded_in_requests_and_in_events(
    most: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, most, 3)
    poster = ReceiptPoster(Origin("http", "127.0.0.1", 9, ""), SimpleNamespace(model="m"), "host:1")
    log = ReceiptLog(None, FakeClock())
    for _ in range(5):
        recorder = log.open(new_request_id(), 0, streaming=True)
        recorder.response(200, {"content-type": "text/event-stream"})
        recorder.receive(1, b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * 2)
        recorder.end(2)
        poster.add(recorder, SimpleNamespace(class_name="default", tenant=""))
    # Three requests of the five; or one of two events, since two have four, which is more than three.
    assert (len(poster._waiting), poster.failed) == (kept, 5 - kept)
