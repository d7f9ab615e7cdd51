"""The receipts API: a control plane's app with its real store and journal."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from exporter.control_plane import ControlPlane, Server, create_app
from exporter.questions import published
from exporter.receipts import MAX_BATCH
from exporter.settings import parse_cors_origin
from sloscope.clock import FakeClock
from sloscope.errors import ConfigError, SloscopeError
from sloscope.ids import new_request_id
from sloscope.journal import Tail, journal_files, read_journal
from tests.exporter.harness import settings_for, total

MS = 1_000_000
Test = Callable[[httpx.AsyncClient, ControlPlane], Awaitable[None]]


def with_app(tmp_path: Path, test: Test, **changes: Any) -> None:
    async def main() -> None:
        clock = FakeClock(mono_ns=10_000 * MS, clock_id="fake:0:0")
        plane = ControlPlane(settings_for(tmp_path / "events", str(tmp_path / "none"), ("http://a",), **changes), clock)
        transport = httpx.ASGITransport(create_app(plane))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(client, plane)
        plane.receipts.close()

    asyncio.run(main())


def receipt(**changes: Any) -> dict[str, Any]:
    """TTFT 200 ms, gaps of 20 and 25 ms: qualified under 300 ms / 30 ms."""
    values: dict[str, Any] = {
        "request_id": new_request_id(),
        "clock_id": "fake:0:0",
        "send_ns": 1000 * MS,
        "t_ns": [1200 * MS, 1220 * MS, 1245 * MS],
        "choice": [0, 0, 0],
        "type": ["reasoning", 0, 0],
        "outcome": "completed",
        "reason": "",
        "end_ns": 1250 * MS,
        "output_tokens": 3,
        "token_source": "usage",
        "model": "m",
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


def records(tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in journal_files(tmp_path / "events"):
        tail = Tail(path)
        found += list(read_journal(tail))
        assert path.parent.name == "client" and not tail.problems
    return found


def test_a_receipt_is_recorded_and_observed_under_the_clients_names(tmp_path: Path) -> None:
    sent = receipt(tenant="acme", streaming=True, labels={"app": "web"})

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        answer = await client.post("/v1/receipts", json=sent)
        assert answer.status_code == 200 and answer.json() == {"accepted": 1, "rejected": []}
        store = plane.store
        assert total(store, "sloscope_client_requests_offered_total", tenant="acme") == 1
        assert total(store, "sloscope_client_requests_qualified_total") == 1
        # 1200 - 1000 and, the first being reasoning, 1220 - 1000 ms
        assert total(store, "sloscope_client_ttft_seconds_sum") == pytest.approx(0.200)
        assert total(store, "sloscope_client_ttft_visible_seconds_sum") == pytest.approx(0.220)
        assert total(store, "sloscope_client_itl_max_seconds_sum") == pytest.approx(0.025)
        assert total(store, "sloscope_client_itl_seconds_count") == 2
        assert total(store, "sloscope_client_inflight_requests") == 0
        assert total(store, "sloscope_sidecar_requests_offered_total") == 0

    with_app(tmp_path, test)
    clock, begin, chunks, end = records(tmp_path)
    assert [clock["kind"], begin["kind"], chunks["kind"], end["kind"]] == ["clock", "begin", "chunks", "end"]
    assert (begin["observer"], begin["class"], begin["labels"]) == ("client", "default", {"app": "web"})
    assert chunks["t_ns"] == sent["t_ns"] and chunks["type"] == [1, 0, 0]
    assert (end["outcome"], end["output_tokens"], end["token_source"]) == ("completed", 3, "usage")


def test_a_receipt_that_its_sender_records_is_observed_only(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", json=receipt(recorded=True))).status_code == 200
        assert total(plane.store, "sloscope_client_requests_total", outcome="completed") == 1

    with_app(tmp_path, test)
    assert records(tmp_path) == []


def test_a_receipt_of_an_answer_that_did_not_stream_has_an_e2e_and_no_ttft(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        whole = receipt(t_ns=None, choice=None, type=None, streaming=False)
        lost = receipt(t_ns=None, choice=None, type=None, streaming=False, outcome="failed", reason="timeout")
        await client.post("/v1/receipts", json={"receipts": [whole, lost]})
        # Sent at 1000, ended at 1250 ms; the one that failed never had its last token.
        assert total(plane.store, "sloscope_client_e2e_seconds_count") == 1
        assert total(plane.store, "sloscope_client_e2e_seconds_sum") == pytest.approx(0.25)
        assert total(plane.store, "sloscope_client_ttft_seconds_count") == 0

    with_app(tmp_path, test)


def test_stamps_of_a_foreign_clock_are_placed_by_an_anchor_of_their_own(tmp_path: Path) -> None:
    wall = 1_700_000_000_000_000_000

    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        await client.post("/v1/receipts", json=receipt(clock_id="browser:abc"))
        given = {"mono_ns": 5, "wall_ns": wall - 60_000 * MS}
        await client.post("/v1/receipts", json=receipt(clock_id="browser:def", anchor=given))
        await client.post("/v1/receipts", json=receipt())

    with_app(tmp_path, test)
    found = records(tmp_path)
    anchors: list[tuple[str, int, int]] = []
    for record in found:
        if record["kind"] == "clock":
            anchor = (record["clock_id"], record["mono_ns"], record["wall_ns"])
        elif record["kind"] == "begin":
            assert record["clock_id"] == anchor[0]
            anchors.append(anchor)
    # Without a word about it, the end was just now.
    assert anchors[0] == ("browser:abc", 1250 * MS, wall)
    assert anchors[1] == ("browser:def", 5, wall - 60_000 * MS)
    assert anchors[2] == ("fake:0:0", 10_000 * MS, wall)


@pytest.mark.parametrize("late_ms", [-1, 24 * 3600 * 1000 + 1, 1_700_000_000_000])
def test_an_anchor_by_which_the_end_is_yet_to_come_or_long_past_is_not_believed(tmp_path: Path, late_ms: int) -> None:
    wall = 1_700_000_000_000_000_000

    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        anchor = {"mono_ns": 1250 * MS, "wall_ns": wall - late_ms * MS}
        answer = await client.post("/v1/receipts", json=receipt(clock_id="browser:abc", anchor=anchor))
        assert answer.status_code == 200

    with_app(tmp_path, test)
    (clock,) = (each for each in records(tmp_path) if each.get("clock_id") == "browser:abc" and each["kind"] == "clock")
    assert (clock["mono_ns"], clock["wall_ns"]) == (1250 * MS, wall)


BAD = {
    "no ULID": (receipt(request_id="x"), "request_id"),
    "backwards": (receipt(t_ns=[1200 * MS, 1100 * MS, 1300 * MS]), "stamps"),
    "before the send": (receipt(t_ns=[999 * MS, 1200 * MS, 1245 * MS]), "stamps"),
    "an end before the last receipt": (receipt(end_ns=1244 * MS), "stamps"),
    "lengths that differ": (receipt(choice=[0, 0]), "malformed"),
    "tokens that differ in length": (receipt(tokens=[1]), "malformed"),
    "a type that is none": (receipt(type=[0, 0, "thought"]), "malformed"),
    "a truth as a stamp": (receipt(t_ns=[True, True, True]), "malformed"),
    "a fraction as a stamp": (receipt(send_ns=1.5), "malformed"),
    "a stamp above 63 bits": (receipt(end_ns=2**63), "malformed"),
    "no outcome": (receipt(outcome=None), "outcome"),
    "a reason of another outcome": (receipt(outcome="failed", reason="voluntary"), "outcome"),
    "an outcome's reason under another outcome": (receipt(outcome="completed", reason="window_closed"), "outcome"),
    "an unknown class": (receipt(**{"class": "gold"}), "unknown_class"),
    "the class of no class": (receipt(**{"class": "_unknown"}), "unknown_class"),
    "text": (receipt(prompt="my secret"), "malformed"),
    "a label that is a list": (receipt(labels={"a": []}), "malformed"),
    "a label that is a story": (receipt(labels={"a": "secret" * 50}), "malformed"),
    "labels without end": (receipt(labels={f"label{n}": n for n in range(33)}), "malformed"),
    "an own limit that no query knows": (receipt(own_limits={"min_tokens": 2}), "malformed"),
    "a token source that is none": (receipt(token_source="guess"), "malformed"),
    "a token source without a count": (receipt(output_tokens=None), "malformed"),
    "a count that nobody vouches for": (receipt(token_source=None), "malformed"),
    "a send before its scheduled arrival": (receipt(intended_ns=1000 * MS + 1), "stamps"),
    "receipts of another observer": (receipt(observer="sidecar"), "malformed"),
    "an endless name": (receipt(model="m" * 2000), "malformed"),
    "a retry of a number": (receipt(retry_of=7), "malformed"),
    "no object": ([], "malformed"),
    "a whole answer without its end": (receipt(t_ns=None, choice=None, type=None, end_ns=None), "malformed"),
    "stamps without a send": (receipt(send_ns=None), "malformed"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_receipt_is_refused_with_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    sent, cause = BAD[name]

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        answer = await client.post("/v1/receipts", json=sent)
        assert answer.status_code == 400
        ((rejected),) = answer.json()["rejected"]
        assert rejected["index"] == 0 and "\n" not in rejected["error"] and "secret" not in rejected["error"]
        assert total(plane.store, "sloscope_receipts_rejected_total", cause=cause) == 1
        assert total(plane.store, "sloscope_client_requests_offered_total") == 0

    with_app(tmp_path, test)
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    ("fits", "too_long", "said"),
    [
        ({"model": "m" * 200}, {"model": "m" * 201}, "model: 201 characters; accepted: at most 200"),
        ({"tenant": "t" * 200}, {"tenant": "t" * 201}, "tenant: 201 characters; accepted: at most 200"),
        ({"external_id": "x" * 200}, {"external_id": "x" * 201}, "external_id: 201 characters; accepted: at most 200"),
        ({"clock_id": "c" * 200}, {"clock_id": "c" * 201}, "clock_id: 201 characters; accepted: at most 200"),
        (
            {"retry_of": "01JGFJJZ000000000000000001"},
            {"retry_of": "what was said"},
            "retry_of: 13 characters that are no 26-character ULID",
        ),
        (
            {"n_choices": 2, "finish_reason": ["stop", "r" * 64]},
            {"n_choices": 2, "finish_reason": ["stop", "r" * 65]},
            "finish_reason: 65 characters; accepted: at most 64 for each choice",
        ),
        (
            {"finish_reason": [None] * 1024},
            {"finish_reason": ["an answer", "in words"] * 513},
            "finish_reason: 1026 texts; accepted: at most 1024",
        ),
    ],
)
def test_a_name_or_a_finish_reason_is_no_place_for_what_was_said(
    tmp_path: Path, fits: dict[str, Any], too_long: dict[str, Any], said: str
) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", json=receipt(**fits))).status_code == 200
        answer = await client.post("/v1/receipts", json=receipt(**too_long))
        assert (answer.status_code, answer.json()["rejected"]) == (400, [{"index": 0, "error": said}])

    with_app(tmp_path, test)
    assert len([record for record in records(tmp_path) if record["kind"] == "begin"]) == 1


def test_one_bad_receipt_of_a_batch_costs_only_itself(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        batch = [receipt(), receipt(end_ns=1), receipt()]
        answer = await client.post("/v1/receipts", json={"receipts": batch})
        assert answer.status_code == 200
        body = answer.json()
        assert body["accepted"] == 2 and [row["index"] for row in body["rejected"]] == [1]
        assert total(plane.store, "sloscope_client_requests_offered_total") == 2

    with_app(tmp_path, test)


def test_a_warm_up_request_is_recorded_and_not_counted_as_in_every_question(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        batch = [receipt(labels={"warmup": True}), receipt(labels={"warmup": False})]
        assert (await client.post("/v1/receipts", json={"receipts": batch})).json()["accepted"] == 2
        assert total(plane.store, "sloscope_client_requests_offered_total") == 1
        assert total(plane.store, "sloscope_client_requests_total") == 1

    with_app(tmp_path, test)
    assert len([record for record in records(tmp_path) if record["kind"] == "begin"]) == 2


def test_a_receipt_that_is_sent_twice_counts_once(tmp_path: Path) -> None:
    sent = receipt()

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", json=sent)).status_code == 200
        assert (await client.post("/v1/receipts", json=sent)).status_code == 400
        assert total(plane.store, "sloscope_client_requests_offered_total") == 1

    with_app(tmp_path, test)
    assert len([record for record in records(tmp_path) if record["kind"] == "end"]) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (json.dumps({"receipts": []}).encode(), 400),
        (json.dumps({"receipts": [{}] * (MAX_BATCH + 1)}).encode(), 400),
        (b" " * (4 << 20) + b"{}", 413),
    ],
)
def test_a_body_that_is_no_batch_is_refused_as_a_whole(tmp_path: Path, body: bytes, status: int) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", content=body)).status_code == status

    with_app(tmp_path, test)


def test_a_reason_that_comes_late_completes_the_sidecars_record(tmp_path: Path) -> None:
    request_id = new_request_id()
    sent = {"request_id": request_id, "outcome": "cancelled", "reason": "voluntary"}

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", json=sent)).status_code == 200
        assert (await client.post("/v1/receipts", json={**sent, "reason": "bored"})).status_code == 400
        # It says why a consumer left. That the request completed is nothing that the sidecar could have missed.
        other = {"request_id": new_request_id(), "outcome": "completed"}
        answer = await client.post("/v1/receipts", json=other)
        assert (answer.status_code, answer.json()["rejected"][0]["error"]) == (
            400,
            "outcome: 'completed' is no late reason; accepted: cancelled",
        )
        assert total(plane.store, "sloscope_reason_revisions_total") == 1
        assert total(plane.store, "sloscope_client_requests_total") == 0

    with_app(tmp_path, test)
    _, late = records(tmp_path)
    assert (late["kind"], late["observer"], late["reason"]) == ("late", "sidecar", "voluntary")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observer": "sidecar"}, "observer: 'sidecar'; accepted: client"),
        ({"intended_ns": 1000 * MS + 1}, "intended_ns: 1000000001 is after send_ns, 1000000000"),
        ({"output_tokens": None}, "token_source: 'usage' without output_tokens"),
        (
            {"token_source": None},
            "token_source: is missing beside output_tokens; accepted: usage, continuous_usage, engine, tokenizer, "
            "assumed_one",
        ),
    ],
)
def test_what_a_receipt_says_of_itself_has_to_hold(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    fits = ({"observer": "client"}, {"intended_ns": 1000 * MS}, {"output_tokens": None, "token_source": "assumed_one"})

    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        for each in fits:
            assert (await client.post("/v1/receipts", json=receipt(**each))).status_code == 200
        answer = await client.post("/v1/receipts", json=receipt(**changes))
        assert (answer.status_code, answer.json()["rejected"]) == (400, [{"index": 0, "error": said}])

    with_app(tmp_path, test)
    ends = [record for record in records(tmp_path) if record["kind"] == "end"]
    assert [end["token_source"] for end in ends] == ["usage", "usage", "assumed_one"]
    assert [end["output_tokens"] for end in ends] == [3, 3, 3]


def test_a_late_reason_is_of_the_client_or_the_sidecar_and_never_of_the_engine(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        for observer, status in (("client", 200), ("sidecar", 200), ("engine", 400), (7, 400)):
            sent = {"request_id": new_request_id(), "outcome": "cancelled", "reason": "voluntary", "observer": observer}
            answer = await client.post("/v1/receipts", json=sent)
            assert answer.status_code == status, observer
            if status == 400:
                (rejected,) = answer.json()["rejected"]
                assert rejected["error"] == f"observer: {str(observer)!r}; accepted: client, sidecar"

    with_app(tmp_path, test)
    assert [record["observer"] for record in records(tmp_path) if record["kind"] == "late"] == ["client", "sidecar"]


def test_who_reports_without_end_is_told_when_to_go_on_and_nobody_else_is(tmp_path: Path) -> None:
    rate = 1000  # receipts a second, after a burst of 20,000
    refused: dict[str, Any] = {"receipts": [{}] * MAX_BATCH}  # a refusal costs time, too
    size = len(json.dumps(refused, separators=(",", ":"))) // 2048  # which bytes add: 3014 // 2048 = 1

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        clock = plane.receipts._clock
        assert isinstance(clock, FakeClock)
        for _ in range(20):
            assert (await client.post("/v1/receipts", json=refused)).status_code == 400
        # 20 * (1000 + 1) = 20,020: 20 above the burst, paid for in 20 ms.
        over = 20 * (MAX_BATCH + size) - 20 * rate
        assert over == 20
        answer = await client.post("/v1/receipts", json=receipt())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert (
            answer.json()["error"] == "receipts: 127.0.0.1 reports more than this sidecar takes; accepted again in 1 s"
        )
        assert total(plane.store, "sloscope_receipts_rejected_total", cause="rate") == 1
        elsewhere = httpx.ASGITransport(create_app(plane), client=("10.0.0.2", 1))
        async with httpx.AsyncClient(transport=elsewhere, base_url="http://localhost") as other:
            assert (await other.post("/v1/receipts", json=receipt())).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        clock.advance(20 * MS)
        assert (await client.post("/v1/receipts", json=receipt())).status_code == 200

    with_app(tmp_path, test)


def test_the_rate_the_burst_and_the_size_of_a_report_are_the_operators(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        clock = plane.receipts.rate._clock
        assert isinstance(clock, FakeClock)
        for _ in range(3):  # a burst of two, and the one that takes it beyond
            assert (await client.post("/v1/receipts", json=receipt())).status_code == 200
        answer = await client.post("/v1/receipts", json=receipt())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        clock.advance(99 * MS)
        assert (await client.post("/v1/receipts", json=receipt())).status_code == 429
        clock.advance(MS)  # a tenth of a second for each
        assert (await client.post("/v1/receipts", json=receipt())).status_code == 200
        clock.advance(1000 * MS)
        answer = await client.post("/v1/receipts", content=b" " * 1025)
        assert (answer.status_code, answer.json()) == (413, {"error": "body: accepted: at most 1024 bytes"})
        assert total(plane.store, "sloscope_receipts_rejected_total", cause="too_large") == 1

    with_app(tmp_path, test, receipts_rate=10, receipts_burst=2, receipts_max_bytes=1024)


def test_who_reports_is_known_by_its_connection_whatever_its_headers_say(tmp_path: Path) -> None:
    async def main() -> None:
        clock = FakeClock(mono_ns=10_000 * MS, clock_id="fake:0:0")
        plane = ControlPlane(settings_for(tmp_path / "events", str(tmp_path / "none"), ("http://a",)), clock)
        server = Server(plane)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/receipts"
            async with httpx.AsyncClient() as client:
                assert (await client.post(url, json=receipt())).status_code == 200
                plane.receipts.rate.took("127.0.0.1", 20_000)  # the whole burst, and one is taken already
                for headers in ({}, {"x-forwarded-for": "10.0.0.2"}, {"x-forwarded-for": "10.0.0.3, 10.0.0.4"}):
                    answer = await client.post(url, json=receipt(), headers=headers)
                    assert answer.status_code == 429
                    assert answer.json()["error"].startswith("receipts: 127.0.0.1 reports more")
            server.should_exit = True
            await serving

    asyncio.run(main())


def test_a_long_body_is_paid_for_by_its_bytes(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        long = b" " * (4 << 20)  # 4 MiB: as much as 2048 receipts, and one
        statuses = [(await client.post("/v1/receipts", content=long)).status_code for _ in range(11)]
        # 9 * 2049 = 18,441 are within the burst of 20,000, the tenth is not and is taken, the eleventh has to wait.
        assert statuses == [400] * 10 + [429]

    with_app(tmp_path, test)


def test_a_token_is_asked_for_everywhere_but_at_the_health_check(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        assert (await client.get("/health")).status_code == 200
        for path in ("/metrics", "/api/q", "/api/contract"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer right"})).status_code == 200
        assert (await client.post("/v1/receipts", json=receipt())).status_code == 401

    with_app(tmp_path, test, token="right")


def test_an_events_directory_that_cannot_be_written_costs_the_records_and_never_a_scrape(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file stands where the directory should be")

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        assert (await client.post("/v1/receipts", json=receipt())).json() == {"accepted": 1, "rejected": []}
        with pytest.raises(SloscopeError):
            published(plane.questions, 0, 0)
        answer = await client.get("/metrics")
        assert answer.status_code == 200 and "NaN" not in answer.text
        assert total(plane.store, "sloscope_client_requests_qualified_total") == 1
        # begin, chunks and end
        assert total(plane.store, "sloscope_journal_dropped_total", observer="client") == 3

    with_app(tmp_path, test)


SITE = "https://app.example:8443"


def test_a_page_of_a_named_origin_may_post_receipts_and_nothing_else(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        asks = {"origin": SITE, "access-control-request-method": "POST"}
        allowed = await client.options("/v1/receipts", headers=asks)
        assert allowed.status_code == 204 and allowed.content == b""
        assert allowed.headers["access-control-allow-origin"] == SITE
        assert allowed.headers["access-control-allow-methods"] == "POST"
        assert allowed.headers["access-control-allow-headers"] == "authorization, content-type"
        token = {"authorization": "Bearer right"}
        taken = await client.post("/v1/receipts", json=receipt(), headers={"origin": SITE, **token})
        refused = await client.post("/v1/receipts", json=receipt(), headers={"origin": SITE})
        assert (taken.status_code, refused.status_code) == (200, 401)
        for answer in (taken, refused):
            assert (answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (SITE, "origin")
        for path in ("/metrics", "/api/q", "/api/contract", "/health"):
            answer = await client.get(path, headers={"origin": SITE, **token})
            assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
            assert (await client.options(path, headers={**asks, **token})).status_code == 405
        assert total(plane.store, "sloscope_client_requests_total") == 1

    with_app(tmp_path, test, token="right", cors_origins=("http://other", SITE))


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://[", f"{SITE}.evil.example"])
def test_a_page_of_another_origin_is_refused_without_asking_first_too(tmp_path: Path, origin: str) -> None:
    """A browser posts text/plain unasked: that the page may not read the answer would come too late."""

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        asks = {"origin": origin, "access-control-request-method": "POST"}
        simple = {"origin": origin, "content-type": "text/plain"}
        for answer in (
            await client.options("/v1/receipts", headers=asks),
            await client.post("/v1/receipts", content=json.dumps(receipt()), headers=simple),
        ):
            assert answer.status_code == 403 and "--cors-origin" in answer.json()["error"]
            assert "access-control-allow-origin" not in answer.headers
        assert total(plane.store, "sloscope_client_requests_total") == 0

    with_app(tmp_path, test, cors_origins=(SITE,))


def test_a_page_of_the_same_address_and_a_client_that_is_no_page_need_no_name(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        # Behind a proxy that ends TLS the scheme is another one.
        for headers in ({}, {"origin": "http://localhost"}, {"origin": "https://localhost"}):
            assert (await client.post("/v1/receipts", json=receipt(), headers=headers)).status_code == 200

    with_app(tmp_path, test)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:9464", 200),
        ("sidecar.localhost:9464", 200),
        ("127.0.0.1:9464", 200),
        ("127.9.9.9", 200),
        ("[::1]:9464", 200),
        ("app.example", 200),  # of SITE, whose proxy keeps its name
        ("evil.example:9464", 403),
        ("localhost.evil.example", 403),
        ("evillocalhost", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.7:9464", 403),
        ("[::2]", 403),
        ("[::1].evil.example", 403),
        ("localhost@evil.example", 403),
        ("", 403),
    ],
)
def test_a_page_whose_name_was_pointed_here_after_it_was_loaded_gets_nothing(
    tmp_path: Path, host: str, status: int
) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        own = {"host": host, "origin": f"http://{host}"}
        answers = [await client.get(path, headers=own) for path in ("/metrics", "/api/q", "/api/contract", "/health")]
        answers.append(await client.post("/v1/receipts", json=receipt(), headers=own))
        assert [answer.status_code for answer in answers] == [status] * 5
        assert total(plane.store, "sloscope_client_requests_total") == (status == 200)
        if status == 403:
            for answer in answers:
                assert answer.json()["error"] == (
                    f"host: {host!r} is not accepted; accepted: localhost, a loopback address, the host of a"
                    " --cors-origin, or any with a token"
                )

    with_app(tmp_path, test, cors_origins=(SITE,))


def test_with_a_token_a_proxy_in_front_may_keep_its_own_name(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        proxied = {"host": "metrics.example"}
        assert (await client.get("/metrics", headers={**proxied, "authorization": "Bearer right"})).status_code == 200
        assert (await client.get("/metrics", headers=proxied)).status_code == 401
        page = {**proxied, "origin": "http://metrics.example"}
        assert (await client.post("/v1/receipts", json=receipt(), headers=page)).status_code == 401

    with_app(tmp_path, test, token="right")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTPS://App.Example:443", "https://app.example"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_an_origin_is_kept_as_browsers_spell_it(text: str, origin: str) -> None:
    assert parse_cors_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "null",
        "app.example",
        "https://app.example/",
        "http://a:0",
        "http://a:x",
        "http://u@a",
        "ftp://a",
        "http://a b",
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--cors-origin: .*accepted: http://HOST"):
        parse_cors_origin(text)
