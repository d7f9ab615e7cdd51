"""The async transport, httpx2 and forked processes: the same records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from sloscope import contract as contracts
from sloscope.client import AsyncReceiptTransport, ReceiptTransport, stop_reason
from tests.client.conftest import Records
from tests.client.sse_server import Asked, Reply, Script, SseServer, base, tokens
from tests.client.transport_use import Reads

Recorded = Callable[[Path], Records]
CONTRACT = contracts.from_shorthand("ttft:300 itl_max:30")
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "secret prompt"}]}


def async_client(server: SseServer, transport: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="k", base_url=f"{server.url}/v1", http_client=httpx.AsyncClient(transport=transport), **options
    )


def stamps(records: Records) -> list[int]:
    return [t for batch in records["chunks"] for t in batch["t_ns"]]


def run_async(script: Script, events: Path, use: Callable[[openai.AsyncOpenAI], Any], **options: Any) -> None:
    async def main(server: SseServer) -> None:
        transport = AsyncReceiptTransport(events, CONTRACT)
        async with async_client(server, transport, **options) as client:
            await use(client)
        assert transport.observer_errors == 0, transport.last_error

    with SseServer(script) as server:
        asyncio.run(main(server))


def test_async_streams_of_chat_and_completions_are_recorded(tmp_path: Path, recorded: Recorded) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        async def chat() -> int:
            return len([piece async for piece in await client.chat.completions.create(**CHAT, stream=True)])

        counts = await asyncio.gather(*(chat() for _ in range(10)))
        assert counts == [22] * 10  # twenty texts, finish, usage

    run_async(tokens(20, gap_s=0.01), tmp_path, use)
    records = recorded(tmp_path)
    assert len(stamps(records)) == 200
    assert [end["outcome"] for end in records["end"]] == ["completed"] * 10
    assert all("retry_of" not in begin for begin in records["begin"])


def test_async_non_streaming_and_retries(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 0:
            await reply.json(500, {"error": {}}, {"retry-after-ms": "20"})
        else:
            usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
            await reply.json(
                200, base() | {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}], "usage": usage}
            )

    async def use(client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="tiny", prompt="p")

    run_async(script, tmp_path, use, max_retries=1)
    records = recorded(tmp_path)
    first, second = records["begin"]
    assert second["retry_of"] == first["request_id"]
    assert [(end["reason"], end["output_tokens"]) for end in records["end"]] == [("http_error", 0), ("", 2)]


def test_an_async_call_that_is_refused_comes_again_and_a_stream_that_breaks_does_not(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 0:
            await reply.json(429, {"error": {"message": "busy"}}, {"retry-after-ms": "20"})
            return
        await reply.stream()
        for number in (1, 2):
            await reply.text()
            await reads.reach(number)
        reply.reset()

    async def use(client: openai.AsyncOpenAI) -> None:
        got = 0

        async def read() -> None:
            nonlocal got
            async for _ in await client.chat.completions.create(**CHAT, stream=True):
                got += 1

        with pytest.raises((openai.APIConnectionError, httpx.ReadError)):
            await read()
        assert got == 2

    run_async(script, tmp_path, use, max_retries=3)
    records = recorded(tmp_path)
    first, second = records["begin"]
    assert second["retry_of"] == first["request_id"] and len(stamps(records)) == 2
    assert [(end["outcome"], end["reason"]) for end in records["end"]] == [
        ("failed", "rejected"),
        ("failed", "upstream_reset"),
    ]


def test_a_cancelled_task_is_a_disconnect_unless_a_reason_is_said(tmp_path: Path, recorded: Recorded) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        async def read() -> None:
            async for _ in await client.chat.completions.create(**CHAT, stream=True):
                pass

        async def read_with_deadline() -> None:
            with stop_reason("client_timeout"):
                await read()

        for reading in (read, read_with_deadline):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reading(), 0.2)

    run_async(tokens(2, gap_s=60), tmp_path, use)
    assert [(end["outcome"], end["reason"]) for end in recorded(tmp_path)["end"]] == [
        ("cancelled", "disconnect"),
        ("cancelled", "client_timeout"),
    ]


# --- httpx2, which the openai package uses by itself ------------------------------------------------------------


def test_httpx2_clients_are_recorded_too(tmp_path: Path, recorded: Recorded) -> None:
    async def use_async(server: SseServer) -> None:
        transport = AsyncReceiptTransport(tmp_path, CONTRACT, inner=httpx2.AsyncHTTPTransport())
        http_client = httpx2.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=http_client) as client:
            assert len([piece async for piece in await client.chat.completions.create(**CHAT, stream=True)]) == 5

    with SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT, inner=httpx2.HTTPTransport())
        http_client = httpx2.Client(transport=transport)
        with openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=http_client) as client:
            assert len(list(client.chat.completions.create(**CHAT, stream=True))) == 5
        assert transport.observer_errors == 0, transport.last_error
        asyncio.run(use_async(server))
    records = recorded(tmp_path)
    assert len(stamps(records)) == 6
    assert [end["outcome"] for end in records["end"]] == ["completed"] * 2


def test_a_forked_child_records_in_a_file_of_its_own(tmp_path: Path, recorded: Recorded) -> None:
    body = {"model": "tiny", "prompt": "p", "stream": True}
    with SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        client = httpx.Client(transport=transport)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.post(f"{server.url}/v1/completions", json=body)
                client.close()
                code = transport.observer_errors
            finally:
                os._exit(code)
        client.post(f"{server.url}/v1/completions", json=body)
        assert os.waitpid(child, 0)[1] == 0
        client.close()
    names = [path.name for path in (tmp_path / "journal" / "client").iterdir()]
    assert sorted(int(name.split("-")[1]) for name in names) == sorted([os.getpid(), child])
    records = recorded(tmp_path)
    assert len({begin["request_id"] for begin in records["begin"]}) == 2
    assert [end["outcome"] for end in records["end"]] == ["completed"] * 2
