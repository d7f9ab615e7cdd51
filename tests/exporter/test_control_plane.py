"""Metrics over the socket between the planes, and questions over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter import data_plane
from exporter.control_plane import ControlPlane, create_app
from exporter.families import ReceiptFamilies
from sloscope.clock import SystemClock
from sloscope.contract import from_shorthand
from tests.exporter.harness import ASK, DONE, Bench, answering, bench, event, finish, run, settings_for, total


def beside(b: Bench) -> ControlPlane:
    """A control plane for the data plane of a bench."""
    return ControlPlane(b.plane.settings, SystemClock())


def series(text: bytes, name: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    )


def test_a_scrape_shows_what_the_data_plane_counted_until_then(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), event(), finish(), DONE)) as b:
            control = beside(b)
            for count in (1, 2, 3):
                await b.ask()
                await b.ends(count)
                text = await control.metrics()
                assert series(text, "sloscope_sidecar_requests_offered_total") == count
                assert series(text, "sloscope_sidecar_ttft_seconds_count") == count
                assert series(text, "sloscope_sidecar_added_seconds_count") == 2 * count
            await control.link.close()

    run(test())


def test_a_snapshot_of_many_series_leaves_the_loop_to_others_and_is_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "TURN_NS", 0)  # a turn of the loop for each piece

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE), max_label_values=1000) as b:
            control = beside(b)
            families = b.plane.watch.families
            for number in range(100):
                families.begun("default", "m", f"t{number}")
                b.plane.store.observe("sloscope_sidecar_ttft_seconds", 5, ("default", "m", f"t{number}"))
            polling, others = asyncio.create_task(control.link.poll()), 0
            while not polling.done():
                if b.plane.metrics_connections:
                    families.begun("default", "m", f"t{others % 100}")
                    others += 1
                await asyncio.sleep(0)
            assert polling.result()
            # 100 histograms are counted one in a turn; 700 of them are written 16 at once, which makes 44 turns.
            assert others > 144
            taken = total(control.store, "sloscope_sidecar_requests_offered_total")
            assert 100 < taken < 100 + others
            assert total(control.store, "sloscope_sidecar_inflight_requests") == taken
            assert await control.link.poll()
            assert total(control.store, "sloscope_sidecar_requests_offered_total") == 100 + others
            await control.link.close()

    run(test())


def test_a_control_plane_that_leaves_amid_a_snapshot_gets_a_whole_one_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "TURN_NS", 0)

    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE), max_label_values=1000) as b:
            control = beside(b)
            for number in range(100):
                b.plane.watch.families.begun("default", "m", f"t{number}")
            polling = asyncio.create_task(control.link.poll())
            while not any(connection._pieces for connection in b.plane.metrics_connections):
                await asyncio.sleep(0)
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await b.until(lambda: not b.plane.metrics_connections)
            assert total(control.store, "sloscope_sidecar_requests_offered_total") == 0
            assert await control.link.poll()
            assert total(control.store, "sloscope_sidecar_requests_offered_total") == 100
            await control.link.close()

    run(test())


def test_a_new_data_plane_starts_its_series_anew(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            control = beside(b)
            control.take_totals({"data_plane_restarts": 1, "recovered_requests": 5})
            await b.ask()
            await b.ends()
            await control.metrics()
            b.plane.instance = "another"
            text = await control.metrics()
            # It still counts one request, and what the control plane counts itself is not touched by a full answer.
            assert series(text, "sloscope_sidecar_requests_offered_total") == 1
            assert series(text, "sloscope_recovered_requests_total") == 5
            assert series(text, "sloscope_data_plane_restarts_total") == 1
            await control.link.close()

    run(test())


def test_what_both_planes_count_is_told_apart_and_never_overwritten(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE), max_label_values=2) as b:
            control = beside(b)
            families = ReceiptFamilies(control.store, "client", control.contract)
            for number in range(7):
                families.begun("default", "m", f"t{number}")
            for number in range(3):
                await b.ask(ASK, f"x-slo-tenant: t{number}")
            await b.ends(3)
            await control.metrics()
            # Two values each: t2 to t6 are five at the client, t2 is one at the sidecar.
            overflow = "sloscope_tenant_overflow_total"
            assert total(control.store, overflow, observer="client") == 5
            assert total(control.store, overflow, observer="sidecar") == 1
            await control.link.close()

    run(test())


def test_without_a_data_plane_the_latest_snapshot_stands_and_that_is_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(event(), finish(), DONE)) as b:
            control = beside(b)
            assert series(await control.metrics(), "sloscope_snapshot_failures_total") == 0
            await b.ask()
            await b.ends()
            await control.metrics()
        text = await control.metrics()
        assert series(text, "sloscope_snapshot_failures_total") == 1
        assert series(text, "sloscope_sidecar_requests_offered_total") == 1
        await control.link.close()

    run(test())


def test_a_data_plane_that_does_not_answer_costs_a_scrape_one_second_at_most(tmp_path: Path) -> None:
    async def test() -> None:
        async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        held: list[asyncio.StreamWriter] = []
        path = f"{tmp_path}/s"
        server = await asyncio.start_unix_server(silent, path)
        control = ControlPlane(settings_for(tmp_path, path, ("http://a",)), SystemClock())
        loop = asyncio.get_running_loop()
        began = loop.time()
        text = await control.metrics()
        assert 0.9 < loop.time() - began < 15
        assert series(text, "sloscope_snapshot_failures_total") == 1
        assert series(text, "sloscope_build_info") == 1  # never empty
        for writer in held:
            writer.transport.abort()
        server.close()

    run(test())


def test_the_contract_is_among_the_metrics(tmp_path: Path) -> None:
    control = ControlPlane(settings_for(tmp_path, "/none", ("http://a",)), SystemClock())
    assert total(control.store, "sloscope_contract_limit_seconds", limit="ttft") == 0.3
    assert total(control.store, "sloscope_contract_limit_seconds", limit="itl_max") == 0.03
    assert total(control.store, "sloscope_contract_objective_ratio") == 0.99
    contract_hash = from_shorthand("ttft:300 itl_max:30").hash
    assert total(control.store, "sloscope_build_info", contract_hash=contract_hash) == 1


def asked(tmp_path: Path, test: Callable[[httpx.AsyncClient], Awaitable[None]], **changes: Any) -> None:
    """After three requests through the sidecar, the control plane's API."""

    async def main() -> None:
        async with bench(tmp_path, answering(event(), event(), finish(), DONE), **changes) as b:
            for _ in range(3):
                await b.ask()
            await b.ends(3)
            control = beside(b)
            transport = httpx.ASGITransport(create_app(control))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await test(client)
            await control.link.close()

    run(main())


def test_a_question_is_answered_with_a_flat_list(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        (row,) = (await client.get("/api/q/goodput", params={"observer": "sidecar"})).json()
        assert (row["offered"], row["qualified"], row["attainment"]) == (3, 3, 1.0)
        assert row["ttft_p99_s"] is None
        (row,) = (
            await client.get("/api/q/goodput", params={"from": "1000", "to": "2000", "observer": "sidecar"})
        ).json()
        assert row["offered"] == 0
        window = {"from": "2020-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z", "observer": "sidecar"}
        (row,) = (await client.get("/api/q/goodput", params=window)).json()
        assert row["offered"] == 3
        names = {row["name"] for row in (await client.get("/api/q")).json()}
        assert "goodput" in names
        assert (await client.get("/api/contract")).json()["default_class"] == "default"

    asked(tmp_path, test)


def test_a_question_without_a_window_is_about_all_data_whatever_window_was_asked_for_before(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        narrow = {"from": "1000", "to": "2000", "observer": "sidecar"}
        (row,) = (await client.get("/api/q/goodput", params=narrow)).json()
        assert row["offered"] == 0
        (row,) = (await client.get("/api/q/goodput", params={"observer": "sidecar"})).json()
        assert row["offered"] == 3

    asked(tmp_path, test)


def test_a_question_that_cannot_be_answered_says_why_in_one_line(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path, params, status in (
            ("/api/q/nope", {}, 404),
            ("/api/q/..%2Fbase%2Fcohort", {}, 404),
            ("/api/q/goodput", {"colour": "red"}, 400),
            ("/api/q/goodput", {"from": "1000"}, 400),
            ("/api/q/goodput", {"from": "yesterday", "to": "2000"}, 400),
            ("/api/q/goodput", {"from": "2000", "to": "1000"}, 400),
            ("/api/q/goodput", {"observer": "moon"}, 400),
        ):
            answer = await client.get(path, params=params)
            assert answer.status_code == status, (path, params, answer.text)
            if "error" in answer.json():
                assert "\n" not in answer.json()["error"]

    asked(tmp_path, test)


def test_sql_results_become_series_with_the_time_of_their_making(tmp_path: Path) -> None:
    contract = 'version = 1\nobserver = "sidecar"\n[classes.default]\nttft = "300ms"\nitl_max = "30ms"\n'

    async def main() -> None:
        async with bench(
            tmp_path,
            answering(event(), event(), finish(), DONE),
            contract=contract,
            contract_is_shorthand=False,
            sql_every_ns=60_000_000_000,
        ) as b:
            await b.ask()
            await b.ends()
            control = beside(b)
            publishing = asyncio.create_task(control.keep_publishing())
            await b.until(lambda: total(control.store, "sloscope_sql_computed_at_seconds", query="goodput"), 60)
            publishing.cancel()
            assert total(control.store, "sloscope_sql_failures_total") == 0
            assert total(control.store, "sloscope_sql_attainment_ratio") == 1
            assert b"sloscope_sql_attainment_ratio" in await control.metrics()
            await control.link.close()

    run(main())
