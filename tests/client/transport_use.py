"""What the tests of the transports share: clients that are observed, and what is read from their records."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sloscope import contract as contracts
from sloscope.client import AsyncReceiptTransport, ReceiptTransport
from sloscope.client.recorder import RequestRecorder
from tests.client.conftest import Records
from tests.client.sse_server import Asked, Reply, Script, SseServer, tokens

MS = 1_000_000
Recorded = Callable[[Path], Records]
CONTRACT = contracts.from_shorthand("ttft:300 itl_max:30")
BODY: dict[str, Any] = {"model": "tiny", "prompt": "p", "stream": True}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "p"}]}
ENDLESS = tokens(1000, gap_s=0.01)


class Reads:
    """Counts what all recorders were given, so that a server can wait until what it wrote was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        receive = RequestRecorder.receive

        def counted(recorder: RequestRecorder, t_ns: int, data: bytes) -> None:
            receive(recorder, t_ns, data)
            self._count += 1

        monkeypatch.setattr(RequestRecorder, "receive", counted)

    async def reach(self, count: int) -> None:
        while self._count < count:
            await asyncio.sleep(0.001)


def held_back(release: threading.Event) -> Script:
    """A token, and the end once it is told."""

    async def script(_: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        while not release.is_set():
            await asyncio.sleep(0.01)
        await reply.finish(usage=1)

    return script


def only(records: Records, kind: str) -> dict[str, Any]:
    assert len(records[kind]) == 1, records[kind]
    return records[kind][0]


def ends(records: Records) -> list[tuple[str, str]]:
    return [(end["outcome"], end["reason"]) for end in records["end"]]


def receipts(records: Records) -> int:
    return sum(len(batch["t_ns"]) for batch in records["chunks"])


def url_of(server: SseServer) -> str:
    return f"{server.url}/v1/completions"


@contextmanager
def observed(script: Script, events: Path, errors: int = 0, **options: Any) -> Iterator[tuple[httpx.Client, SseServer]]:
    with SseServer(script) as server:
        transport = ReceiptTransport(events, CONTRACT, **options)
        with httpx.Client(transport=transport) as client:
            yield client, server
        assert transport.observer_errors == errors, transport.last_error


def run_async(
    script: Script, events: Path, use: Callable[[httpx.AsyncClient, str], Any], errors: int = 0, **options: Any
) -> None:
    async def main(server: SseServer) -> None:
        transport = AsyncReceiptTransport(events, CONTRACT, **options)
        async with httpx.AsyncClient(transport=transport) as client:
            await use(client, url_of(server))
        assert transport.observer_errors == errors, transport.last_error

    with SseServer(script) as server:
        asyncio.run(main(server))
