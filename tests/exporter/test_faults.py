"""What a hostile or broken neighbour can send, and a disk can do, without a question or a stream suffering for it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from exporter.control_plane import ControlPlane, create_app
from exporter.framing import MessageError
from exporter.http1 import parse_response_head
from exporter.questions import parse_time_ns
from exporter.sockets import reset_on_close
from sloscope.clock import SystemClock
from sloscope.errors import ConfigError
from tests.exporter.harness import ASK, DONE, Bench, Seen, answering, bench, event, finish, request, run, usage


def asking(b: Bench) -> httpx.AsyncClient:
    control = ControlPlane(b.plane.settings, SystemClock())
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(control)), base_url="http://localhost")


def test_a_limit_that_no_column_holds_is_counted_and_the_request_still_recorded(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.ask(ASK, "x-slo-ttft-ms: 99999999999999999")  # 1e17 ms is 1e23 ns, and a column ends at 9.2e18
            assert await b.end() == ("completed", "")
            (begin,) = b.records("begin")
            assert "own_limits" not in begin
            assert b.total("sloscope_parse_problems_total", problem="bad_limit_header") == 1
            assert b.total("sloscope_parse_problems_total", problem="observer_error") == 0

    run(test())


def test_a_token_count_that_no_answer_has_spoils_no_sum(tmp_path: Path) -> None:
    """Two counts of 2^63 - 1 have no BIGINT sum: one such answer would take the goodput of everybody away."""

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), usage(2**63 - 1), DONE)) as b:
            await b.ask()
            await b.ask()
            assert [end["output_tokens"] for end in await b.ends(2)] == [1, 1]  # one event each, assumed one token
            async with asking(b) as client:
                answer = await client.get("/api/q/goodput", params={"observer": "sidecar"})
            assert answer.status_code == 200 and answer.json()[0]["offered"] == 2

    run(test())


@pytest.mark.parametrize("status", ["000", "099", "001"])
def test_a_status_below_100_is_rubbish_and_no_interim_answer(status: str) -> None:
    with pytest.raises(MessageError, match=f"status {status}") as caught:
        parse_response_head(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode(), b"POST")
    assert caught.value.status == 502


@pytest.mark.parametrize("name", ["max_rows", "timeout_s", "name", "params", "self", "x' or 1=1 --"])
def test_no_name_of_a_parameter_reaches_anything_but_the_question(tmp_path: Path, name: str) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b, asking(b) as client:
            await b.until(b.events.is_dir)  # the recorder makes it, in its own time
            answer = await client.get("/api/q/goodput", params={name: "1"})
            assert answer.status_code == 400
            assert answer.json()["error"] == f"goodput: param {name!r} is unknown; accepted: none"

    run(test())


def test_a_time_that_no_column_holds_is_refused() -> None:
    assert parse_time_ns("1700000000000", "from") == 1_700_000_000_000_000_000
    with pytest.raises(ConfigError, match="accepted: milliseconds up to the year 2150"):
        parse_time_ns("999999999999999", "from")


def test_an_events_directory_that_is_gone_is_one_line_and_not_an_internal_error(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b, asking(b) as client:
            await b.ask()
            await b.ends()
            assert (await client.get("/api/q/goodput")).status_code == 200
            shutil.rmtree(b.events)
            answer = await client.get("/api/q/goodput")
            assert answer.status_code == 503 and "does not exist" in answer.json()["error"]
            # The stream goes on, and what it leaves is recorded where the directory was.
            assert (await b.ask()).status == 200
            (end,) = await b.ends(1)
            assert end["outcome"] == "completed"
            assert b.total("sloscope_journal_dropped_total", observer="sidecar") == 4  # clock, begin, chunks, end

    run(test())


def test_a_damaged_table_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            await b.ask()
            await b.ends()
            async with asking(b) as client:
                assert (await client.get("/api/q/goodput")).status_code == 200
            for path in (b.events / "tables" / "requests").rglob("*.parquet"):
                path.write_bytes(b"garbage" * 100)
            async with asking(b) as client:
                answer = await client.get("/api/q/goodput")
            assert answer.status_code == 400, answer.text
            assert "a table cannot be read" in answer.json()["error"] and ".parquet" in answer.json()["error"]

    run(test())


ID = "01M8MJY2FJWHZRWY1FSS668JK7"
WHOLE = {"request_id": ID, "clock_id": "b:1", "send_ns": 1000, "t_ns": [2000], "end_ns": 3000, "outcome": "completed"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("send_ns", None),
        ("output_tokens", 2**31),
        ("prompt_tokens", 2**62),
        ("tokens", [2**31]),
        ("own_limits", {"ttft_ns": 2**63}),
        ("recorded", "yes"),
        ("end_ns", 2**62),
        ("t_ns", [2**62]),
    ],
)
def test_a_receipt_with_a_value_that_no_column_takes_is_refused_and_its_id_stays_free(
    tmp_path: Path, field: str, value: object
) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b, asking(b) as client:
            answer = await client.post("/v1/receipts", json=WHOLE | {field: value})
            assert answer.status_code == 400, answer.text
            assert answer.json()["rejected"][0]["error"].startswith(f"{field}: ")
            assert (await client.post("/v1/receipts", json=WHOLE)).json() == {"accepted": 1, "rejected": []}

    run(test())


def test_a_client_that_resets_while_its_upload_is_held_is_noticed(tmp_path: Path) -> None:
    """The upstream does not read, so neither do we, and who does not read is not told."""

    async def test() -> None:
        done = asyncio.Event()

        async def never_reads(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await done.wait()
            writer.transport.abort()

        server = await asyncio.start_server(never_reads, "127.0.0.1", 0, limit=1024)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with bench(tmp_path, answering(DONE), (url,), inspect_limit=1024) as b:
                client = await b.connect()
                client.writer.write(request(b"x" * (30 << 20)))
                await b.until(lambda: any(not each._reading for each in b.plane.clients))
                assert b.total("sloscope_sidecar_inflight_requests") == 1
                reset_on_close(client.writer.transport)
                await client.close()
                await b.until(lambda: b.total("sloscope_sidecar_inflight_requests") == 0)
                assert await b.end() == ("cancelled", "disconnect")
        finally:
            done.set()
            server.close()
            await asyncio.sleep(0.05)

    run(test())


@pytest.mark.parametrize(
    "rubbish", [b"\0\1\2\r\n\r\n", b"HTTP/1.1 99 x\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000]
)
def test_an_answer_that_is_no_http_is_no_empty_stream(tmp_path: Path, rubbish: bytes) -> None:
    """An empty stream is what a server says with status 200. The client names this upstream_reset, too."""

    async def test() -> None:
        async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(rubbish)

        async with bench(tmp_path, script) as b:
            assert (await b.ask()).status == 502
            assert await b.end() == ("failed", "upstream_reset")

    run(test())


@pytest.mark.parametrize("anchor", [{"mono_ns": 2**62, "wall_ns": 0}, {"mono_ns": 0, "wall_ns": -1}])
def test_a_receipt_placed_where_no_column_reaches_is_refused(tmp_path: Path, anchor: dict[str, int]) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b, asking(b) as client:
            answer = await client.post("/v1/receipts", json=WHOLE | {"anchor": anchor})
            assert answer.status_code == 400, answer.text
            assert answer.json()["rejected"][0]["error"].startswith(("mono_ns: ", "wall_ns: "))

    run(test())
