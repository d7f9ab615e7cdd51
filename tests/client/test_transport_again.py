"""The transports where a request is sent several times, a process forks or a disk fails. Real sockets."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sloscope.client import AsyncReceiptTransport, ReceiptTransport
from sloscope.ids import is_request_id
from tests.client.sse_server import Asked, Reply, Script, SseServer, tokens
from tests.client.transport_use import (
    BODY,
    CHAT,
    CONTRACT,
    MS,
    Recorded,
    ends,
    held_back,
    observed,
    only,
    receipts,
    run_async,
    url_of,
)
from tests.waiting import until

# --- one request and several sends --------------------------------------------------------------------------------


def moves(status: int, asked_before: float = 0.0) -> Script:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.path != "/moved/completions":
            await asyncio.sleep(asked_before)
            await reply.json(status, {"moved": True}, {"location": "/moved/completions"})
        else:
            await tokens(2)(asked, reply)

    return script


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_that_is_followed_is_one_request_from_its_first_send(
    tmp_path: Path, recorded: Recorded, status: int
) -> None:
    with observed(moves(status, asked_before=0.1), tmp_path) as (client, server):
        assert client.post(url_of(server), json=BODY, follow_redirects=True).status_code == 200
    first, second = server.asked
    records = recorded(tmp_path)
    begin = only(records, "begin")
    assert first.headers["x-sloscope-request-id"] == second.headers["x-sloscope-request-id"] == begin["request_id"]
    assert begin["streaming"] is True and begin["path"] == "/v1/completions"
    assert ends(records) == [("completed", "")] and only(records, "end")["http_status"] == 200
    assert only(records, "chunks")["t_ns"][0] - begin["send_ns"] >= 100 * MS


def test_a_followed_redirect_of_the_openai_package_is_one_request_and_its_retry_another(
    tmp_path: Path, recorded: Recorded
) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if "moved" not in asked.path:
            await reply.json(307, {}, {"location": "/moved/completions"})
        elif asked.number == 1:
            await reply.json(429, {"error": {}}, {"retry-after-ms": "20"})
        else:
            await tokens(1)(asked, reply)

    async def use(server: SseServer) -> None:
        transport = AsyncReceiptTransport(tmp_path, CONTRACT)
        # A client given to the package keeps its own word on redirects.
        http_client = httpx.AsyncClient(transport=transport, follow_redirects=True)
        async with openai.AsyncOpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=http_client) as client:
            assert [piece async for piece in await client.chat.completions.create(**CHAT, stream=True)]
        assert transport.observer_errors == 0, transport.last_error

    with SseServer(script) as server:
        asyncio.run(use(server))
    records = recorded(tmp_path)
    first, second = records["begin"]
    assert len(server.asked) == 4 and second["retry_of"] == first["request_id"]
    assert ends(records) == [("failed", "rejected"), ("completed", "")]


@pytest.mark.parametrize("status", [302, 303, 307, 308])
def test_a_redirect_that_nobody_follows_is_an_http_error(tmp_path: Path, recorded: Recorded, status: int) -> None:
    with observed(moves(status), tmp_path) as (client, server):
        assert client.post(url_of(server), json=BODY).status_code == status
    records = recorded(tmp_path)
    assert ends(records) == [("failed", "http_error")] and only(records, "end")["http_status"] == status


def test_a_loop_of_redirects_is_one_failed_request(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.json(307, {}, {"location": "/again/completions"})

    with observed(script, tmp_path) as (client, server), pytest.raises(httpx.TooManyRedirects):
        client.post(url_of(server), json=BODY, follow_redirects=True)
    records = recorded(tmp_path)
    assert len(server.asked) == 21  # httpx follows twenty
    assert len(records["begin"]) == 1 and ends(records) == [("failed", "http_error")]


def test_a_request_that_is_sent_again_is_a_new_one_that_names_the_first(tmp_path: Path, recorded: Recorded) -> None:
    """A retrying transport around ours, or an auth flow, sends the same httpx.Request twice."""

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 0:
            await reply.json(503, {})
        else:
            await tokens(1)(asked, reply)

    with observed(script, tmp_path) as (client, server):
        request = client.build_request("POST", url_of(server), json=BODY)
        assert [client.send(request).status_code for _ in range(2)] == [503, 200]
    first, second = recorded(tmp_path)["begin"]
    assert second["retry_of"] == first["request_id"] != second["request_id"]
    assert is_request_id(second["request_id"])
    assert server.asked[1].headers["x-sloscope-request-id"] == second["request_id"]
    assert server.asked[1].headers["x-sloscope-retry-of"] == first["request_id"]


# --- fork ---------------------------------------------------------------------------------------------------------


def test_a_child_says_nothing_of_the_streams_that_it_inherited(tmp_path: Path, recorded: Recorded) -> None:
    release = threading.Event()

    with (
        observed(held_back(release), tmp_path) as (client, server),
        client.stream("POST", url_of(server), json=BODY) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        child = os.fork()
        if child == 0:
            # As a worker that its server forked: drops what it has, and ends by its own exit.
            try:
                signal.alarm(20)
                del lines, response
                gc.collect()
                client._transport._observer.log.tick(time.monotonic_ns())  # type: ignore[attr-defined]
                client._transport._observer.close()  # type: ignore[attr-defined]
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        list(lines)
    records = recorded(tmp_path)
    assert ends(records) == [("completed", "")] and receipts(records) == 1


def test_a_child_of_a_process_that_was_just_writing_does_not_hang(tmp_path: Path, recorded: Recorded) -> None:
    with observed(tokens(1), tmp_path) as (client, server):
        transport: Any = client._transport
        with transport._observer.log._lock:  # as another thread may, in the moment of the fork
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(20)
                    with httpx.Client(transport=transport) as own:
                        own.post(url_of(server), json=BODY)
                    os._exit(transport.observer_errors)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        client.post(url_of(server), json=BODY)
    assert ends(recorded(tmp_path)) == [("completed", "")] * 2


# --- a disk that fails --------------------------------------------------------------------------------------------


def test_a_directory_removed_in_mid_stream_breaks_nothing_and_later_records_are_kept(
    tmp_path: Path, recorded: Recorded
) -> None:
    events = tmp_path / "events"
    with SseServer(tokens(3, gap_s=0.05)) as server:
        transport = ReceiptTransport(events, CONTRACT)
        with httpx.Client(transport=transport) as client:
            with client.stream("POST", url_of(server), json=BODY) as response:
                lines = response.iter_lines()
                next(lines)
                shutil.rmtree(events)
                assert "[DONE]" in "".join(lines)
            assert client.post(url_of(server), json=BODY).status_code == 200
    assert transport.observer_errors > 0 and "deleted" in transport.last_error
    assert ends(recorded(events))[-1] == ("completed", "")


def test_a_directory_that_became_a_file_breaks_nothing_and_every_loss_is_counted(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with SseServer(tokens(3)) as server:
        transport = ReceiptTransport(events, CONTRACT)
        shutil.rmtree(events)
        events.write_text("no directory")
        with httpx.Client(transport=transport) as client:
            assert b"[DONE]" in client.post(url_of(server), json=BODY).content
        assert transport.observer_errors >= 3 and transport.last_error  # begin, chunks, end
        lost = transport.observer_errors
        # Nor when the transport has to open its journal anew.
        with httpx.Client(transport=transport) as client:
            assert b"[DONE]" in client.post(url_of(server), json=BODY).content
        assert transport.observer_errors >= lost + 3


def test_a_full_disk_breaks_nothing_and_every_loss_is_counted(tmp_path: Path, recorded: Recorded) -> None:
    program = textwrap.dedent("""
        import resource, sys, httpx
        from sloscope.client import ReceiptTransport
        transport = ReceiptTransport(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        with httpx.Client(transport=transport) as client:
            for _ in range(20):
                response = client.post(sys.argv[2], json={"model": "tiny", "prompt": "p", "stream": True})
                assert b"[DONE]" in response.content
        print(transport.observer_errors, transport.last_error)
    """)
    with SseServer(tokens(3)) as server:
        run = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), url_of(server)], capture_output=True, text=True
        )
    assert run.returncode == 0, run.stderr
    lost, _, why = run.stdout.partition(" ")
    (journal,) = tmp_path.rglob("*.jsonl")
    kept = journal.read_bytes().count(b'"request_id"')
    assert journal.stat().st_size <= 1500 and why.strip() in ("File too large", "short write")
    assert kept > 0 and int(lost) >= 20 * 3 - kept  # begin, chunks and end of twenty requests; a cut line is a loss


@contextmanager
def silent_disk(events: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No write to a file below comes back before the event is set, as on a disk that is busy with something else."""
    write, answers = os.write, threading.Event()
    gave_up: list[int] = []

    def silent(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(events)) and not answers.wait(30):
            gave_up.append(fd)
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", silent)
        try:
            yield answers
        finally:
            answers.set()
    assert not gave_up


def test_a_disk_that_answers_late_holds_up_no_call_no_loop_and_loses_nothing(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        with silent_disk(tmp_path, monkeypatch) as answers:
            for _ in range(3):
                assert b"[DONE]" in (await client.post(url, json=BODY)).content
            assert recorded(tmp_path)["begin"] == []
            answers.set()
            until(lambda: len(recorded(tmp_path)["begin"]) == 3)

    run_async(tokens(3, gap_s=0.02), tmp_path, use)
    records = recorded(tmp_path)
    assert ends(records) == [("completed", "")] * 3 and receipts(records) == 9


def test_many_calls_begun_at_once_wait_for_a_silent_disk_once_and_again_when_it_answers(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": []})

    async def main(answers: threading.Event) -> None:

        async def call() -> None:
            request = httpx.Request("POST", "http://any/v1/completions", json=BODY)
            await (await transport.handle_async_request(request)).aclose()

        calls = [asyncio.create_task(call()) for _ in range(100)]
        monkeypatch.setattr("sloscope.client.receipt_log.BEGIN_PATIENCE_S", 0.2)
        begun = time.monotonic()
        await asyncio.gather(*calls)
        took = time.monotonic() - begun
        assert 0.2 <= took < 10  # one patience; a hundred of them are 20 s
        assert recorded(tmp_path)["begin"] == []
        answers.set()
        until(lambda: len(recorded(tmp_path)["begin"]) == 100)
        # Nothing is late any more, so a begin is on disk again before its request goes on, also on a busy machine.
        monkeypatch.setattr("sloscope.client.receipt_log.BEGIN_PATIENCE_S", 30.0)
        for count in range(101, 111):
            await call()
            assert len(recorded(tmp_path)["begin"]) == count
        await transport.aclose()

    transport = AsyncReceiptTransport(tmp_path, CONTRACT, inner=httpx.MockTransport(answer))
    with silent_disk(tmp_path, monkeypatch) as answers:
        asyncio.run(main(answers))


def test_a_client_that_closes_waits_two_seconds_for_a_disk_and_the_record_comes_after(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SseServer(tokens(1)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        client = httpx.Client(transport=transport)
        with silent_disk(tmp_path, monkeypatch):
            client.post(url_of(server), json=BODY)
            begun = time.monotonic()
            client.close()
            assert 1.9 < time.monotonic() - begun < 20
    until(lambda: ends(recorded(tmp_path)) == [("completed", "")])
    assert transport.observer_errors == 0, transport.last_error
