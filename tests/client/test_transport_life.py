"""The transports under consumers that leave, wait, hold off and read in their own way. Real sockets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from sloscope.client import AsyncReceiptTransport, ReceiptTransport, stop_reason
from sloscope.client.recorder import RequestRecorder
from tests.client.sse_server import Asked, Reply, Script, SseServer, chunk, tokens
from tests.client.transport_use import (
    BODY,
    CONTRACT,
    ENDLESS,
    MS,
    Reads,
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

# --- a consumer that leaves ---------------------------------------------------------------------------------------


class ConsumersError(Exception):
    pass


def breaks(response: httpx.Response) -> None:
    for _ in response.iter_lines():
        break


def returns(response: httpx.Response) -> str | None:
    for line in response.iter_lines():
        return line
    return None


def raises(response: httpx.Response) -> None:
    for _ in response.iter_raw():
        raise ConsumersError


def never_reads(response: httpx.Response) -> None:
    assert response.status_code == 200


@pytest.mark.parametrize("leave", [breaks, returns, raises, never_reads])
def test_a_with_block_left_early_is_a_disconnect(
    tmp_path: Path, recorded: Recorded, leave: Callable[[httpx.Response], object]
) -> None:
    with observed(ENDLESS, tmp_path) as (client, server):
        try:
            with client.stream("POST", url_of(server), json=BODY) as response:
                leave(response)
        except ConsumersError:
            pass
    records = recorded(tmp_path)
    assert ends(records) == [("cancelled", "disconnect")]
    assert (receipts(records) > 0) == (leave is not never_reads)


async def breaks_async(response: httpx.Response) -> None:
    async for _ in response.aiter_lines():
        break


async def returns_async(response: httpx.Response) -> str | None:
    async for line in response.aiter_text():
        return line
    return None


async def raises_async(response: httpx.Response) -> None:
    async for _ in response.aiter_bytes():
        raise ConsumersError


async def never_reads_async(response: httpx.Response) -> None:
    assert response.status_code == 200


@pytest.mark.parametrize("leave", [breaks_async, returns_async, raises_async, never_reads_async])
def test_an_async_with_block_left_early_is_a_disconnect(
    tmp_path: Path, recorded: Recorded, leave: Callable[[httpx.Response], Any]
) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        try:
            async with client.stream("POST", url, json=BODY) as response:
                await leave(response)
        except ConsumersError:
            pass

    run_async(ENDLESS, tmp_path, use)
    records = recorded(tmp_path)
    assert ends(records) == [("cancelled", "disconnect")]
    assert (receipts(records) > 0) == (leave is not never_reads_async)


def test_an_async_generator_that_nobody_closes_is_a_disconnect_once_it_is_collected(
    tmp_path: Path, recorded: Recorded
) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        response = await client.send(client.build_request("POST", url, json=BODY), stream=True)
        lines = response.aiter_lines()
        await anext(lines)
        connection = response.stream._stream._inner  # type: ignore[attr-defined]
        del response, lines
        async with asyncio.timeout(60):
            while not ends(recorded(tmp_path)):  # the loop closes the generator, and a tick writes the end
                gc.collect()
                await asyncio.sleep(0.02)
        assert ends(recorded(tmp_path)) == [("cancelled", "disconnect")]
        await connection.aclose()

    run_async(ENDLESS, tmp_path, use)


def test_a_dropped_stream_is_told_to_a_callback_without_a_journal() -> None:
    told: list[RequestRecorder] = []
    with SseServer(ENDLESS) as server:
        client = httpx.Client(transport=ReceiptTransport(None, CONTRACT, on_end=told.append))
        response = client.send(client.build_request("POST", url_of(server), json=BODY), stream=True)
        next(response.iter_raw())
        connection = response.stream._stream._inner  # type: ignore[attr-defined]
        del response
        gc.collect()
        until(lambda: len(told) == 1)
        connection.close()
        client.close()
    assert told[0].ended == ("cancelled", "disconnect")


def test_a_callback_that_fails_for_a_dropped_stream_stops_no_later_record(tmp_path: Path, recorded: Recorded) -> None:
    def broken(_: RequestRecorder) -> None:
        raise RuntimeError("the callback's own bug")

    release = threading.Event()

    with observed(held_back(release), tmp_path, errors=2, on_end=broken) as (client, server):
        dropped = client.send(client.build_request("POST", url_of(server), json=BODY), stream=True)
        next(dropped.iter_raw())
        connection = dropped.stream._stream._inner  # type: ignore[attr-defined]
        del dropped
        gc.collect()
        until(lambda: len(recorded(tmp_path)["end"]) == 1)
        with client.stream("POST", url_of(server), json=BODY) as response:
            lines = response.iter_lines()
            next(lines)
            # The thread that writes batches is still there.
            until(lambda: receipts(recorded(tmp_path)) == 2)
            release.set()
            list(lines)
        connection.close()
    assert ends(recorded(tmp_path)) == [("cancelled", "disconnect"), ("completed", "")]


def test_a_client_that_is_closed_ends_its_open_streams(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(ENDLESS) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        client = httpx.Client(transport=transport)
        open_streams = [
            client.send(client.build_request("POST", url_of(server), json=BODY), stream=True) for _ in range(3)
        ]
        for response in open_streams[:2]:
            next(response.iter_raw())
        with stop_reason("voluntary"):
            client.close()
        records = recorded(tmp_path)
        assert ends(records) == [("cancelled", "voluntary")] * 3
        assert [end["output_tokens"] for end in records["end"]][2] == 0
        for response in open_streams:
            response.close()
        assert transport.observer_errors == 0, transport.last_error
    assert len(recorded(tmp_path)["end"]) == 3


def test_a_client_closed_while_another_thread_reads_is_the_consumers_end_and_not_the_servers(
    tmp_path: Path, recorded: Recorded
) -> None:
    reading = threading.Event()
    failure: list[BaseException] = []

    def read(client: httpx.Client, url: str) -> None:
        try:
            with client.stream("POST", url, json=BODY) as response:
                for _ in response.iter_raw():
                    reading.set()
        except Exception as error:
            failure.append(error)

    with SseServer(tokens(2, gap_s=60)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        client = httpx.Client(transport=transport, timeout=httpx.Timeout(60, read=1))
        thread = threading.Thread(target=read, args=(client, url_of(server)))
        thread.start()
        assert reading.wait(30)
        client.close()
        thread.join(30)
    assert not thread.is_alive() and failure
    assert ends(recorded(tmp_path)) == [("cancelled", "disconnect")]
    assert transport.observer_errors == 0, transport.last_error


def test_a_transport_that_was_closed_records_its_next_client_too(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        for _ in range(2):
            with httpx.Client(transport=transport) as client:
                client.post(url_of(server), json=BODY)
        assert transport.observer_errors == 0, transport.last_error
    assert ends(recorded(tmp_path)) == [("completed", "")] * 2


def test_a_transport_that_is_dropped_unclosed_leaves_no_thread_and_no_file_behind(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "sloscope-receipts" for thread in threading.enumerate())

    def journals() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{name}").startswith(str(tmp_path))
            for name in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{name}")
        )

    with SseServer(tokens(2)) as server:
        for _ in range(5):
            transport = ReceiptTransport(tmp_path, CONTRACT)
            client = httpx.Client(transport=transport)
            client.post(url_of(server), json=BODY)
            transport._inner.close()
        assert (threads(), journals()) != (0, 0)
        del client, transport
        gc.collect()
        until(lambda: (threads(), journals()) == (0, 0))


def test_a_process_that_just_ends_leaves_no_stream_without_an_end(tmp_path: Path, recorded: Recorded) -> None:
    program = textwrap.dedent("""
        import sys, httpx
        from sloscope.client import ReceiptTransport
        client = httpx.Client(transport=ReceiptTransport(sys.argv[1]))
        response = client.send(client.build_request("POST", sys.argv[2], json={"stream": True}), stream=True)
        next(response.iter_raw())
    """)
    with SseServer(ENDLESS) as server:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), url_of(server)],
            capture_output=True,
            text=True,
        )
    assert (run.returncode, run.stderr) == (0, "")
    records = recorded(tmp_path)
    assert ends(records) == [("cancelled", "disconnect")] and receipts(records) >= 1


# --- deadlines ----------------------------------------------------------------------------------------------------


@contextmanager
def unaccepting() -> Iterator[str]:
    """An address whose queue of connections is full: a connect waits."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listener.getsockname())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        finally:
            for each in waiting:
                each.close()


def test_a_connect_that_takes_too_long_is_a_connect_error(tmp_path: Path, recorded: Recorded) -> None:
    client = httpx.Client(transport=ReceiptTransport(tmp_path, CONTRACT), timeout=httpx.Timeout(5, connect=0.2))
    with unaccepting() as url, client, pytest.raises(httpx.ConnectTimeout):
        client.post(url, json=BODY)
    records = recorded(tmp_path)
    assert ends(records) == [("failed", "connect_error")] and "http_status" not in only(records, "end")


def test_a_server_that_does_not_take_the_request_in_time_met_the_clients_deadline(
    tmp_path: Path, recorded: Recorded
) -> None:
    client = httpx.Client(transport=ReceiptTransport(tmp_path, CONTRACT), timeout=httpx.Timeout(5, write=0.3))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        with client, pytest.raises(httpx.WriteTimeout):
            client.post(url, json=BODY | {"prompt": "x" * (32 << 20)})
    assert ends(recorded(tmp_path)) == [("cancelled", "client_timeout")]


def test_a_wait_for_the_pool_that_is_too_long_met_the_clients_deadline(tmp_path: Path, recorded: Recorded) -> None:
    one_slot = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    with SseServer(ENDLESS) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT, inner=one_slot)
        with httpx.Client(transport=transport, timeout=httpx.Timeout(5, pool=0.2)) as client:
            with client.stream("POST", url_of(server), json=BODY) as response:
                reading = response.iter_raw()
                next(reading)
                with pytest.raises(httpx.PoolTimeout):
                    client.post(url_of(server), json=BODY)
            assert len(server.asked) == 1
        assert transport.observer_errors == 0, transport.last_error
    assert ends(recorded(tmp_path)) == [("cancelled", "client_timeout"), ("cancelled", "disconnect")]


def test_the_read_deadline_holds_between_two_events_too(tmp_path: Path, recorded: Recorded) -> None:
    with (
        observed(tokens(2, gap_s=60), tmp_path) as (client, server),
        pytest.raises(httpx.ReadTimeout),
        client.stream("POST", url_of(server), json=BODY, timeout=httpx.Timeout(60, read=0.5)) as response,
    ):
        list(response.iter_lines())
    records = recorded(tmp_path)
    assert ends(records) == [("cancelled", "client_timeout")] and receipts(records) == 1


def test_a_task_cancelled_while_its_consumer_thinks_is_a_disconnect(tmp_path: Path, recorded: Recorded) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        thinks = asyncio.Event()

        async def read() -> None:
            async with client.stream("POST", url, json=BODY) as response:
                async for _ in response.aiter_lines():
                    thinks.set()
                    await asyncio.sleep(60)

        task = asyncio.create_task(read())
        await thinks.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(ENDLESS, tmp_path, use)
    assert ends(recorded(tmp_path)) == [("cancelled", "disconnect")]


# --- what a body is read by ---------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[httpx.Response], object]] = {
    "read": lambda response: response.read(),
    "raw": lambda response: b"".join(response.iter_raw()),
    "raw of 7": lambda response: b"".join(response.iter_raw(7)),
    "bytes": lambda response: b"".join(response.iter_bytes()),
    "text": lambda response: "".join(response.iter_text()),
    "lines": lambda response: list(response.iter_lines()),
}


def events_of(count: int) -> bytes:
    text = b"".join(b"data: " + orjson.dumps(chunk({"content": "é"})) + b"\n\n" for _ in range(count))
    return text + b"data: [DONE]\n\n"


def packed_stream(coding: str, count: int, reads: Reads) -> Script:
    """Each event flushed on its own, as a server that streams and compresses has to."""

    async def script(asked: Asked, reply: Reply) -> None:
        packer = zlib.compressobj(wbits=31) if coding == "gzip" else zlib.compressobj(wbits=15)
        await reply.head(200, {"content-type": "text/event-stream", "content-encoding": coding})
        for number, event in enumerate(events_of(count).split(b"\n\n")[:-1], 1):
            await reply.body(packer.compress(event + b"\n\n") + packer.flush(zlib.Z_SYNC_FLUSH))
            await reads.reach(number)
        await reply.body(packer.flush())
        await reply.over()

    return script


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coding", ["plain", "gzip", "deflate"])
def test_however_a_body_is_read_it_has_the_same_receipts(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, way: str, coding: str
) -> None:
    reads = Reads(monkeypatch)

    async def plain(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for number, event in enumerate(events_of(4).split(b"\n\n")[:-1], 1):
            await reply.body(event + b"\n\n")
            await reads.reach(number)
        await reply.over()

    script = plain if coding == "plain" else packed_stream(coding, 4, reads)
    with (
        observed(script, tmp_path) as (client, server),
        client.stream("POST", url_of(server), json=BODY) as response,
    ):
        WAYS[way](response)
    records = recorded(tmp_path)
    stamps = [t for batch in records["chunks"] for t in batch["t_ns"]]
    assert ends(records) == [("completed", "")] and len(stamps) == 4
    # Each of the four events was read before the next was written, whatever they were packed in.
    assert all(later > earlier for earlier, later in itertools.pairwise(stamps))
    assert only(records, "end")["bytes"] > 0


def test_gzip_that_is_none_is_a_bad_stream_and_no_disconnect_of_the_reader_whose_library_gave_up(
    tmp_path: Path, recorded: Recorded
) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.head(200, {"content-type": "text/event-stream", "content-encoding": "gzip"})
        await reply.body(events_of(2))
        await reply.over()

    with observed(script, tmp_path) as (client, server), pytest.raises(httpx.DecodingError):
        client.post(url_of(server), json=BODY)
    assert ends(recorded(tmp_path)) == [("failed", "bad_stream")]


def test_the_time_before_the_first_pull_is_the_consumers_own(tmp_path: Path, recorded: Recorded) -> None:
    with observed(tokens(2), tmp_path) as (client, server):
        with client.stream("POST", url_of(server), json=BODY) as response:
            time.sleep(0.3)  # the events are there; nobody asks for them
            response.read()
        with client.stream("POST", url_of(server), json=BODY) as response:
            response.read()
    records = recorded(tmp_path)
    late, prompt = records["end"]
    assert late["consumer_hold_ns"] >= 300 * MS
    assert prompt["consumer_hold_ns"] < late["consumer_hold_ns"]
    # It is in the TTFT, too: the receipt at a client that pulls is the pull.
    assert records["chunks"][0]["t_ns"][0] - records["begin"][0]["send_ns"] >= 300 * MS


# --- the consumer's own loop --------------------------------------------------------------------------------------


def test_a_loop_that_was_busy_is_recorded_with_the_requests_that_it_delayed(tmp_path: Path, recorded: Recorded) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        async def read() -> None:
            async with client.stream("POST", url, json=BODY) as response:
                async for _ in response.aiter_raw():
                    begun.set()

        begun = asyncio.Event()
        reading = asyncio.create_task(read())
        await begun.wait()
        assert not reading.done()
        time.sleep(0.5)  # on the loop
        released.set()
        await reading
        await read()

    released = threading.Event()
    run_async(held_back(released), tmp_path, use)
    late, prompt = recorded(tmp_path)["end"]
    assert late["loop_lag_max_ns"] >= 400 * MS
    assert prompt["loop_lag_max_ns"] < late["loop_lag_max_ns"]


def test_a_sync_client_has_no_loop_that_could_be_late(tmp_path: Path, recorded: Recorded) -> None:
    with observed(tokens(1), tmp_path) as (client, server):
        client.post(url_of(server), json=BODY)
    assert "loop_lag_max_ns" not in only(recorded(tmp_path), "end")


class EachLoopItsOwn(httpx.AsyncBaseTransport):
    """The pool of httpx knows one loop: two that change it at once make it lose connections."""

    def __init__(self) -> None:
        self._inner: dict[asyncio.AbstractEventLoop, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if loop not in self._inner:
            self._inner[loop] = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))
        return await self._inner[loop].handle_async_request(request)


def test_one_transport_serves_two_loops_one_after_the_other_and_two_at_once(tmp_path: Path, recorded: Recorded) -> None:
    transport = AsyncReceiptTransport(tmp_path, CONTRACT, inner=EachLoopItsOwn())

    async def read(url: str, count: int) -> None:
        async def one() -> None:
            request = httpx.Request("POST", url, json=BODY, extensions={"timeout": {"read": 60.0}})
            response = await transport.handle_async_request(request)
            async for _ in response.stream:
                pass
            await response.aclose()

        await asyncio.gather(*(one() for _ in range(count)))

    with SseServer(tokens(5, gap_s=0.02)) as server:
        for _ in range(2):
            asyncio.run(read(url_of(server), 3))
        threads = [threading.Thread(target=lambda: asyncio.run(read(url_of(server), 5))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(transport.aclose())
    assert transport.observer_errors == 0, transport.last_error
    records = recorded(tmp_path)
    assert ends(records) == [("completed", "")] * 16 and receipts(records) == 80  # (3 + 3 + 5 + 5) × 5
    assert all(end["loop_lag_max_ns"] < 1000 * MS for end in records["end"])


def test_fifty_threads_share_one_client(tmp_path: Path, recorded: Recorded) -> None:
    with observed(tokens(10, gap_s=0.005), tmp_path) as (client, server):
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                assert client.post(url_of(server), json=BODY, timeout=60).status_code == 200
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=ask) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
    records = recorded(tmp_path)
    assert ends(records) == [("completed", "")] * 50 and receipts(records) == 500
    assert len({begin["request_id"] for begin in records["begin"]}) == 50
    assert all("retry_of" not in begin for begin in records["begin"])
