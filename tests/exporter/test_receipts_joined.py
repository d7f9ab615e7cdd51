"""Receipts beside what the sidecar itself saw of the same request, in every order, as compaction joins them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from exporter.control_plane import ControlPlane, create_app
from queries.compaction import compact
from sloscope.clock import SystemClock
from sloscope.ids import new_request_id
from tests.exporter.harness import DONE, STREAM_HEAD, Bench, Seen, bench, chunked, event, finish, request, run, total
from tests.queries.test_compaction import select

COLUMNS = (
    "request_id, sidecar_outcome, sidecar_reason, client_outcome, client_reason, sidecar_ttft_ns > 0, client_ttft_ns"
)
Report = Callable[..., Awaitable[dict[str, Any]]]


def with_both_planes(tmp_path: Path, test: Callable[[Bench, Report, ControlPlane], Awaitable[None]]) -> None:
    """The stream's second half comes with a request to /go on."""

    async def main() -> None:
        go = asyncio.Event()

        async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if seen.line.startswith(b"GET /go"):
                go.set()
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                return
            writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(event()), event()))
            await go.wait()
            writer.write(chunked(finish(), DONE))

        async with bench(tmp_path, script) as b:
            plane = ControlPlane(b.plane.settings, SystemClock())
            transport = httpx.ASGITransport(create_app(plane))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

                async def report(**fields: Any) -> dict[str, Any]:
                    return dict((await client.post("/v1/receipts", json=fields)).json())

                await test(b, report, plane)
            plane.receipts.close()

    run(main())


async def begun(b: Bench) -> tuple[Any, str]:
    """A request whose first event came, and its id."""
    client = await b.connect()
    await client.send(request())
    head = await client.reader.readuntil(b"\r\n\r\n")
    await client.reader.readuntil(b"\n\n")
    (line,) = (line for line in head.split(b"\r\n") if line.startswith(b"x-sloscope-request-id: "))
    return client, line.partition(b": ")[2].decode()


async def go_on(b: Bench, client: Any) -> None:
    """To the end. Two requests are recorded by then, or one and its receipt."""
    other = await b.connect()
    await other.send(request(b"", path="/go", method="GET"))
    await client.reader.readuntil(b"0\r\n\r\n")
    await b.ends(2)


def whole(request_id: str, **changes: Any) -> dict[str, Any]:
    told = {"request_id": request_id, "clock_id": "page:1", "send_ns": 1000, "t_ns": [3500], "end_ns": 4000}
    return {**told, "outcome": "completed", **changes}


def rows(tmp_path: Path) -> list[tuple[Any, ...]]:
    compact(tmp_path / "events", settle_ns=0)
    return select(tmp_path / "events", f"select {COLUMNS} from {{requests}} order by request_id")


def test_a_receipt_that_comes_before_the_sidecar_saw_the_end_is_the_same_request(tmp_path: Path) -> None:
    ids: list[str] = []

    async def test(b: Bench, report: Report, _: ControlPlane) -> None:
        client, request_id = await begun(b)
        ids.append(request_id)
        assert await report(**whole(request_id)) == {"accepted": 1, "rejected": []}
        assert b.total("sloscope_sidecar_inflight_requests") == 1
        await go_on(b, client)
        # And once more, after the end: it is told of already.
        assert "was reported before" in (await report(**whole(request_id)))["rejected"][0]["error"]

    with_both_planes(tmp_path, test)
    assert rows(tmp_path) == [(ids[0], "completed", "", "completed", "", True, 2500)]  # 3500 - 1000


def test_a_receipt_of_a_request_that_never_came_is_the_clients_alone(tmp_path: Path) -> None:
    lost = new_request_id()

    async def test(b: Bench, report: Report, plane: ControlPlane) -> None:
        told = whole(lost, outcome="failed", reason="connect_error", t_ns=[])
        assert (await report(**told))["accepted"] == 1
        assert total(plane.store, "sloscope_client_requests_offered_total") == 1
        assert b.check_identity() == 0

    with_both_planes(tmp_path, test)
    assert rows(tmp_path) == [(lost, None, None, "failed", "connect_error", None, None)]


def test_a_late_reason_of_a_request_that_never_came_makes_no_request(tmp_path: Path) -> None:
    async def test(_: Bench, report: Report, plane: ControlPlane) -> None:
        reason = {"request_id": new_request_id(), "outcome": "cancelled", "reason": "voluntary"}
        assert (await report(**reason))["accepted"] == 1
        assert total(plane.store, "sloscope_client_requests_offered_total") == 0
        # It is counted as taken: only the data plane could say that nobody saw the request.
        assert total(plane.store, "sloscope_reason_revisions_total") == 1

    with_both_planes(tmp_path, test)
    assert rows(tmp_path) == []


def test_a_late_reason_refines_a_disconnect_and_nothing_else(tmp_path: Path) -> None:
    left: list[str] = []
    stayed: list[str] = []

    async def test(b: Bench, report: Report, plane: ControlPlane) -> None:
        leaving, request_id = await begun(b)
        left.append(request_id)
        # The page says why before its connection is closed.
        assert (await report(request_id=request_id, outcome="cancelled", reason="voluntary"))["accepted"] == 1
        await leaving.close()
        assert await b.end() == ("cancelled", "disconnect")
        staying, request_id = await begun(b)
        stayed.append(request_id)
        await go_on(b, staying)
        assert (await report(request_id=request_id, outcome="cancelled", reason="client_timeout"))["accepted"] == 1
        assert total(plane.store, "sloscope_reason_revisions_total") == 2

    with_both_planes(tmp_path, test)
    outcomes = {row[0]: row[1:3] for row in rows(tmp_path)}
    assert outcomes == {left[0]: ("cancelled", "voluntary"), stayed[0]: ("completed", "")}


def test_a_report_that_is_repeated_after_a_restart_is_one_request_with_the_first_one_s_receipts(tmp_path: Path) -> None:
    """The control plane that took it first is gone, and with it what it remembered."""
    request_id = new_request_id()

    async def test(b: Bench, report: Report, _: ControlPlane) -> None:
        assert (await report(**whole(request_id)))["accepted"] == 1
        second = ControlPlane(b.plane.settings, SystemClock())
        second.receipts.take(whole(request_id, t_ns=[9000], end_ns=9000))
        second.receipts.close()

    with_both_planes(tmp_path, test)
    assert rows(tmp_path) == [(request_id, None, None, "completed", "", None, 2500)]
