"""What a load generator does with its receipts when the control plane will not take them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sloscope.client import receipts
from sloscope.client.h1 import Origin, parse_url
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipts import ReceiptPoster
from sloscope.clock import FakeClock, SystemClock
from sloscope.ids import new_request_id
from tests.client.control import control_plane
from tests.client.sse_server import Asked, Reply, SseServer


def add(poster: ReceiptPoster, log: ReceiptLog, events: int = 2) -> None:
    recorder = log.open(new_request_id(), 0, streaming=True)
    recorder.response(200, {"content-type": "text/event-stream"})
    recorder.receive(1, b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' * events)
    recorder.end(2)
    poster.add(recorder, log)


def test_receipts_that_are_too_many_for_now_wait_and_are_not_lost() -> None:
    async def control(asked: Asked, reply: Reply) -> None:
        if asked.number == 0:
            await reply.json(429, {}, {"retry-after": "1"})
        else:
            await reply.json(200, {"accepted": len(asked.json["receipts"]), "rejected": []})

    async def main(url: str) -> None:
        poster, log = ReceiptPoster(parse_url(url)), ReceiptLog(None, FakeClock())
        add(poster, log)
        add(poster, log)
        poster.start()
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        await poster.close()
        assert (poster.failed, poster.last_error) == (0, f"{url} answered 429")

    with SseServer(control) as server:
        asyncio.run(main(server.url))
    first, second = server.asked
    assert len(first.json["receipts"]) == 2 and first.body == second.body


@pytest.mark.parametrize(("most", "bound", "kept"), [("_MOST_WAITING", 3, 3), ("_MOST_WAITING_BYTES", 600, 1)])
def test_what_waits_for_a_control_plane_is_bounded_in_requests_and_in_bytes(
    most: str, bound: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, most, bound)
    poster = ReceiptPoster(Origin("http", "127.0.0.1", 9, ""))
    log = ReceiptLog(None, FakeClock())
    for _ in range(5):
        add(poster, log)
    # A receipt of two events takes more than 300 bytes and less than 600.
    assert 300 < len(poster._waiting[0]) < 600 and poster._bytes == sum(map(len, poster._waiting))
    assert (len(poster._waiting), poster.failed) == (kept, 5 - kept)


def test_a_post_that_is_too_large_is_halved_and_only_a_receipt_that_is_too_large_alone_fails(tmp_path: Path) -> None:
    with control_plane(tmp_path / "events", receipts_max_bytes=4096) as control:

        async def main() -> None:
            poster, log = ReceiptPoster(parse_url(control.url)), ReceiptLog(None, SystemClock())
            for number in range(61):
                add(poster, log, events=2000 if number == 30 else 2)
            poster.start()
            await poster.close()
            assert (poster.failed, poster.last_error) == (1, f"{control.url} answered 413")

        asyncio.run(main())
        # All at once, then the 30 before the long one, which does not fit beside them, then half of those, and once the
        # long one alone; a quarter of 30 receipts of some 400 bytes is 3 KB.
        assert (control.ended(), control.rejected(cause="too_large"), control.rejected()) == (60, 4, 4)
