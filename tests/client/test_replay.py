"""Replay over real sockets: open loop, never re-anchored, and every row where it belongs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop
from httptools import HttpResponseParser

from sloscope import contract as contracts
from sloscope.client import replay_report
from sloscope.client.h1 import Call, Connection, parse_url
from sloscope.client.receipt_writer import Writer
from sloscope.client.recorder import RequestRecorder
from sloscope.client.replay import Replay, Tally, probe
from sloscope.client.schedule import Plan, Schedule, build
from sloscope.client.traces import TraceRow, load
from sloscope.errors import ConfigError
from sloscope.ids import is_request_id
from tests.client.conftest import Records
from tests.client.sse_server import Asked, Reply, Script, SseServer, tokens
from tests.waiting import until

MS = 1_000_000
S = 1_000_000_000
Recorded = Callable[[Path], Records]
CONTRACT = contracts.from_shorthand("ttft:300 itl_max:30")


def constant(n: int, rate: float, plan: Plan | None = None) -> Schedule:
    rows = load(f"synthetic:constant?n={n}&rate={rate}&prompt_p50=20&output_p50=8&prompt_sigma=0&output_sigma=0").rows
    return build(rows, CONTRACT, plan or Plan())


def run(
    fixed: Schedule,
    script: Script,
    events: Path,
    *,
    contract: contracts.Contract = CONTRACT,
    drain_ns: int = 60 * S,
    meanwhile: Callable[[asyncio.AbstractEventLoop, Replay], None] | None = None,
    settled: Callable[[SseServer], bool] = lambda server: True,
    urls: Callable[[SseServer], list[str]] = lambda server: [f"{server.url}/v1"],
    **options: Any,
) -> tuple[Tally, SseServer]:
    with SseServer(script) as server:

        async def main() -> Tally:
            target = await probe([parse_url(url) for url in urls(server)], "", {})
            running = Replay(fixed, contract, target, events, drain_ns=drain_ns, **options)
            if meanwhile is not None:
                meanwhile(asyncio.get_running_loop(), running)
            return await running.run()

        tally = uvloop.run(main())
        until(lambda: settled(server))
        return tally, server


def p99_s(values: Any) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1] / 1e9


def test_every_request_is_sent_recorded_and_judged(tmp_path: Path, recorded: Recorded) -> None:
    tally, server = run(constant(40, 200.0), tokens(8, gap_s=0.005), tmp_path)
    assert (tally.scheduled, tally.sent, tally.offered, tally.outcomes["completed"]) == (40, 40, 40, 40)
    assert (tally.qualified, tally.output_tokens, tally.unfinished) == (40, 320, 0)  # 40 · 8 tokens
    records = recorded(tmp_path)
    assert len(records["begin"]) == len(records["end"]) == len(server.asked) == 40
    assert sum(len(batch["t_ns"]) for batch in records["chunks"]) == 320
    assert {begin["request_id"] for begin in records["begin"]} == {
        asked.headers["x-sloscope-request-id"] for asked in server.asked
    }


def test_what_goes_over_the_wire_is_the_schedule(tmp_path: Path, recorded: Recorded) -> None:
    fixed = constant(5, 100.0, Plan(tenants=("t1", "t2"), seed=3))
    _, server = run(fixed, tokens(2), tmp_path)
    by_id = {begin["request_id"]: begin for begin in recorded(tmp_path)["begin"]}
    for asked, planned in zip(server.asked, fixed.requests, strict=True):
        begin = by_id[asked.headers["x-sloscope-request-id"]]
        assert is_request_id(begin["request_id"]) and asked.path == "/v1/chat/completions"
        assert asked.headers["x-sloscope-stop-after"] == "8" and begin["stop_after"] == 8
        assert "x-slo-class" not in asked.headers and begin["class"] == "default"
        assert asked.headers["x-slo-tenant"] == begin["tenant"] == planned.tenant
        body = asked.json
        assert (body["model"], body["stream"], body["stream_options"]) == ("tiny", True, {"include_usage": True})
        assert body["max_tokens"] == begin["max_tokens"] == planned.max_tokens and "ignore_eos" not in body
        assert len(body["messages"][0]["content"].split()) == 20 == begin["prompt_tokens"]
        assert "labels" not in begin


class SilentDisk:
    """A disk that writes a begin only when it hears that the server has as many requests as it waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        self._write, self._needed, self._written = Writer.write, first, 0
        self._arrived = threading.Semaphore(0)
        self.gave_up = 0  # the disk heard nothing for so long that it wrote all the same
        monkeypatch.setattr(Writer, "write", lambda writer, lines: self._write_late(writer, lines))

    async def script(self, asked: Asked, reply: Reply) -> None:
        self._arrived.release()
        await tokens(1)(asked, reply)

    def _write_late(self, writer: Writer, lines: list[bytes]) -> None:
        for _ in range(sum(b'"kind":"begin"' in line for line in lines)):
            needed, self._needed = self._needed, 1 if self._needed == 1 else 0
            for _ in range(needed):
                self.gave_up += not self._arrived.acquire(timeout=30)
        self._write(writer, lines)


def test_a_disk_that_answers_after_the_server_delays_no_send_by_more_than_its_patience(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SilentDisk(monkeypatch, first=1)
    tally, server = run(constant(10, 10.0), disk.script, tmp_path)
    # Each begin was written once its own request had reached the server: no send had waited for it.
    assert disk.gave_up == 0
    assert (len(server.asked), tally.outcomes["completed"], tally.records_lost) == (10, 10, 0)
    assert tally.late_begins == 10 and tally.begin_wait_ns[0] >= 5 * MS
    assert replay_report.report(tally, constant(10, 10.0), CONTRACT)["late_begins"] == 10
    # The report's lag is that of the records, which know nothing of the disk.
    records = recorded(tmp_path)
    assert len(records["end"]) == 10
    in_journal = [begin["send_ns"] - begin["intended_ns"] for begin in records["begin"]]
    assert in_journal == list(tally.dispatch_lag_ns)


def test_every_request_that_leaves_while_the_disk_is_silent_is_counted(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SilentDisk(monkeypatch, first=20)  # the first begin is written when the server has all requests
    tally, server = run(constant(20, 50.0), disk.script, tmp_path)
    assert disk.gave_up == 0
    assert (len(server.asked), tally.outcomes["completed"], tally.records_lost) == (20, 20, 0)
    # Those that had not waited themselves are late too.
    assert tally.late_begins == 20
    assert len(recorded(tmp_path)["begin"]) == len(recorded(tmp_path)["end"]) == 20


def test_a_class_that_is_not_the_default_is_sent(tmp_path: Path, recorded: Recorded) -> None:
    contract = contracts.parse(
        'version = 1\ndefault_class = "chat"\n[classes.chat]\nttft = "1s"\n[classes.bulk]\ne2e = "9s"\n'
    )
    rows = [TraceRow(0, 5, 5, 1), TraceRow(10 * MS, 5, 5, 2, class_name="bulk")]
    tally, server = run(build(rows, contract, Plan()), tokens(2), tmp_path, contract=contract)
    assert [asked.headers.get("x-slo-class") for asked in server.asked] == [None, "bulk"]
    assert [begin["class"] for begin in recorded(tmp_path)["begin"]] == ["chat", "bulk"]
    assert recorded(tmp_path)["begin"][1]["limits"] == {"e2e_ns": 9 * S, "min_tokens": 1}
    assert tally.qualified == 2


def test_forced_lengths_say_so_in_every_row(tmp_path: Path, recorded: Recorded) -> None:
    _, server = run(constant(3, 100.0, Plan(natural=False)), tokens(2), tmp_path)
    assert all(asked.json["ignore_eos"] is True and asked.json["max_tokens"] == 8 for asked in server.asked)
    assert all("x-sloscope-stop-after" not in asked.headers for asked in server.asked)
    assert all(begin["labels"] == {"length_forced": True} for begin in recorded(tmp_path)["begin"])


def test_no_request_leaves_early_and_t0_is_the_first_arrival(tmp_path: Path, recorded: Recorded) -> None:
    tally, _ = run(constant(100, 250.0), tokens(1), tmp_path)
    assert min(tally.dispatch_lag_ns) >= 0
    assert tally.first_send_offset_ns == tally.dispatch_lag_ns[0]
    intended = sorted(begin["intended_ns"] for begin in recorded(tmp_path)["begin"])
    assert [after - before for before, after in pairwise(intended)] == [4 * MS] * 99


def test_a_receipt_sends_what_is_due_when_the_timer_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = build([TraceRow(0, 5, 8, 1), TraceRow(300 * MS, 5, 8, 2)], CONTRACT, Plan())
    lost: list[int] = []
    send, asked = Replay._send, asyncio.Event()

    def send_and_lose_the_timer(running: Replay, *planned: Any) -> None:
        send(running, *planned)
        if running.tally.sent == 1:
            loop = asyncio.get_running_loop()
            loop.call_soon(lose, running)
            loop.call_later(30, running.interrupt)  # or a failure would hang

    def lose(running: Replay) -> None:
        assert running._timer is not None
        running._timer.cancel()
        lost.append(running.tally.sent)

    monkeypatch.setattr(Replay, "_send", send_and_lose_the_timer)

    async def script(request: Asked, reply: Reply) -> None:
        if request.number == 1:
            asked.set()
            await tokens(1)(request, reply)
            return
        # An event every 20 ms until the second request is there; nothing else can send it.
        await reply.stream()
        while not asked.is_set():
            await reply.text()
            await asyncio.sleep(0.02)
        await reply.finish()

    tally, _ = run(fixed, script, tmp_path)
    assert lost == [1]
    assert tally.sent == 2 and not tally.interrupted
    assert tally.dispatch_lag_ns[1] >= 0


def test_a_server_that_stalls_is_seen_whole_because_nothing_waits_for_it(tmp_path: Path, recorded: Recorded) -> None:
    stood_still: list[int] = []

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 50:
            stood_still.append(time.monotonic_ns())
            time.sleep(1)  # the whole server stands still
            stood_still.append(time.monotonic_ns())
        await tokens(1)(asked, reply)

    tally, server = run(constant(150, 100.0), script, tmp_path)
    start, end = stood_still
    # 100 of 150 arrivals fall into the stall; the second longest wait (rank 149) is one gap of 10 ms below it.
    # A busy machine may send some late. One that waits for the server sends none.
    assert sum(start < begin["send_ns"] < end for begin in recorded(tmp_path)["begin"]) >= 50
    assert p99_s(tally.ttft_ns) > 0.5 * (end - start) / S
    # The generator had no part in it.
    assert sorted(tally.dispatch_lag_ns)[75] < 0.2 * (end - start)
    assert server.connections > 50


def test_a_generator_that_stalls_shows_it_in_the_corrected_ttft_alone(tmp_path: Path) -> None:
    def stall(loop: asyncio.AbstractEventLoop, running: Replay) -> None:
        loop.call_later(1.0, time.sleep, 1.0)

    fixed = constant(300, 100.0)
    tally, _ = run(fixed, tokens(1), tmp_path, meanwhile=stall)
    row = replay_report.report(tally, fixed, CONTRACT)
    # 100 of 300 sends fall into the stall; rank 297 is three gaps of 10 ms below 1 s.
    assert row["ttft_intended_completed_p99_s"] > 0.9
    assert row["ttft_completed_p99_s"] < 0.5 * row["ttft_intended_completed_p99_s"]
    assert tally.sent == tally.scheduled == 300
    # Not re-anchored: what is due after the stall leaves on time again.
    assert sorted(tally.dispatch_lag_ns[-100:])[50] < 200 * MS
    assert row["valid"] is False
    assert "is above a tenth of the ttft limit 300ms" in row["invalid_reason"]


def test_two_hundred_arrivals_at_one_instant_are_all_open_at_once(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        while len(asked_all()) < 200:
            await asyncio.sleep(0.01)
        await tokens(1)(asked, reply)

    holder: list[SseServer] = []

    def asked_all() -> list[Asked]:
        return holder[0].asked

    fixed = build([TraceRow(0, 5, 5, line) for line in range(1, 201)], CONTRACT, Plan())
    with SseServer(script) as server:
        holder.append(server)

        async def main() -> Tally:
            target = await probe([parse_url(f"{server.url}/v1")], "", {})
            return await Replay(fixed, CONTRACT, target, tmp_path, drain_ns=60 * S).run()

        tally = uvloop.run(main())
    assert tally.outcomes["completed"] == 200


def test_what_is_open_after_the_drain_is_recorded_as_unfinished(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number % 2:
            await tokens(2)(asked, reply)
        else:
            await reply.stream()
            await reply.text()
            await asyncio.sleep(30)

    tally, _ = run(constant(6, 100.0), script, tmp_path, drain_ns=1500 * MS)
    assert (tally.offered, tally.outcomes["completed"], tally.unfinished) == (6, 3, 3)
    records = recorded(tmp_path)
    ends = {end["request_id"]: (end["outcome"], end.get("reason", "")) for end in records["end"]}
    open_ids = {request_id for request_id, end in ends.items() if end == ("unfinished", "window_closed")}
    assert len(ends) == 6 and len(open_ids) == 3
    # What they had received is kept.
    assert {batch["request_id"] for batch in records["chunks"]} >= open_ids


def test_warmup_rows_are_sent_and_flagged_and_counted_apart(tmp_path: Path, recorded: Recorded) -> None:
    tally, _ = run(constant(10, 200.0, Plan(warmup="4")), tokens(2), tmp_path)
    assert (tally.sent, tally.warmup, tally.offered, tally.outcomes["completed"]) == (10, 4, 6, 6)
    assert len(tally.ttft_ns) == 6 and len(tally.dispatch_lag_ns) == 10
    labels = [begin.get("labels") for begin in recorded(tmp_path)["begin"]]
    assert labels == [{"warmup": True}] * 4 + [None] * 6


def test_cancelled_answers_are_voluntary_and_the_server_sees_the_socket_close(
    tmp_path: Path, recorded: Recorded
) -> None:
    fixed = constant(10, 100.0, Plan(cancel_rate=1.0))
    # Of each request its own connection, and that of the probe before them.
    tally, server = run(fixed, tokens(8, gap_s=0.02), tmp_path, settled=lambda server: server.disconnects == 1 + 10)
    assert tally.outcomes == {"cancelled": 10} and tally.reasons == {"cancelled(voluntary)": 10}
    assert (tally.qualified, tally.offered) == (0, 10)
    # Emitted tokens of every outcome stay in the observed output.
    stopped_after = sum(planned.cancel_after or 0 for planned in fixed.requests)
    assert tally.output_tokens == sum(end["output_tokens"] for end in recorded(tmp_path)["end"]) >= stopped_after > 0
    assert server.disconnects == server.connections == 1 + 10


def test_failures_stand_under_their_own_names_and_never_in_the_latencies(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        match asked.number % 5:
            case 0:
                await reply.json(429, {"error": {}})
            case 1:
                await reply.json(500, {"error": {}})
            case 2:
                await reply.stream()
                await reply.text()
                await asyncio.sleep(0.02)
                reply.reset()
            case 3:
                await reply.stream()
                await reply.over()
            case 4:
                await tokens(1)(asked, reply)

    tally, _ = run(constant(10, 50.0), script, tmp_path)
    assert tally.reasons == {
        "failed(rejected)": 2,
        "failed(http_error)": 2,
        "failed(upstream_reset)": 2,
        "failed(empty_stream)": 2,
    }
    assert (tally.outcomes["completed"], len(tally.ttft_ns), tally.offered) == (2, 2, 10)
    assert tally.output_tokens == 4  # two before a reset, two completed


def test_several_urls_take_turns(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as other:
        tally, server = run(
            constant(10, 200.0), tokens(1), tmp_path, urls=lambda first: [f"{first.url}/v1", f"{other.url}/v1"]
        )
        assert (len(server.asked), len(other.asked)) == (5, 5)
    assert tally.outcomes["completed"] == 10


def test_the_loops_own_lag_is_recorded_with_the_requests_it_touched(tmp_path: Path, recorded: Recorded) -> None:
    stood_still: list[int] = []

    def stand_still() -> None:
        stood_still.append(time.monotonic_ns())
        time.sleep(0.2)
        stood_still.append(time.monotonic_ns())

    def stall(loop: asyncio.AbstractEventLoop, running: Replay) -> None:
        tally = running.tally
        under_way = tally.sent - tally.outcomes.total()
        if tally.sent < 10 or under_way < 2:  # on a slow machine the first send is late
            loop.call_later(0.01, stall, loop, running)
        else:
            stand_still()

    run(constant(40, 30.0), tokens(3, gap_s=0.05), tmp_path, meanwhile=stall)
    records = recorded(tmp_path)
    ends = {end["request_id"]: end for end in records["end"]}
    touched, spared = [], []
    for begin in records["begin"]:
        end = ends[begin["request_id"]]
        if begin["send_ns"] < stood_still[0] and end["end_ns"] >= stood_still[1]:
            touched.append(end["loop_lag_max_ns"])
        elif end["end_ns"] < stood_still[0] or begin["send_ns"] > stood_still[1] + 20 * MS:
            spared.append(end["loop_lag_max_ns"])
    # An answer takes 100 ms and one leaves every 33 ms: about three are under way at any time.
    assert len(touched) >= 2 and min(touched) >= 150 * MS
    assert len(spared) >= 10 and sorted(spared)[len(spared) // 2] < min(touched)


def test_receipts_are_posted_as_recorded_and_counted_when_they_cannot_be(tmp_path: Path) -> None:
    async def control(asked: Asked, reply: Reply) -> None:
        count = len(asked.json["receipts"])
        await reply.json(200, {"accepted": count - 1, "rejected": [{"index": 0, "error": "t_ns: goes backwards"}]})

    with SseServer(control) as plane:
        fixed = constant(15, 100.0, Plan(warmup="3"))
        tally, _ = run(fixed, tokens(3), tmp_path / "a", receipts=parse_url(plane.url))
        posted = [entry for asked in plane.asked for entry in asked.json["receipts"]]
        assert {asked.path for asked in plane.asked} == {"/v1/receipts"}
    assert tally.receipts_failed == len(plane.asked) >= 1 and tally.receipts_error == "t_ns: goes backwards"
    assert len({entry["request_id"] for entry in posted}) == 15
    assert sum(entry.get("labels") == {"warmup": True} for entry in posted) == 3
    for entry in posted:
        assert entry["recorded"] is True and entry["outcome"] == "completed" and len(entry["t_ns"]) == 3
        assert entry["send_ns"] >= entry["intended_ns"] and entry["class"] == "default"
    gone, _ = run(constant(12, 100.0), tokens(3), tmp_path / "b", receipts=parse_url(plane.url))
    assert (gone.receipts_failed, gone.outcomes["completed"]) == (12, 12)


def test_a_server_is_asked_for_its_model_and_its_owner() -> None:
    with SseServer(tokens(1), owned_by="vllm") as server:
        origin = parse_url(f"{server.url}/v1")
        target = uvloop.run(probe([origin], "", {}))
        assert (target.model, target.owned_by) == ("tiny", "vllm")
        assert uvloop.run(probe([origin], "mine", {})).model == "mine"
        with pytest.raises(ConfigError, match=r"--model: .* names no model"):
            uvloop.run(probe([parse_url(f"{server.url}/nowhere")], "", {}))


def test_a_run_without_a_ttft_limit_cannot_be_late_by_a_tenth_of_it() -> None:
    tally = Tally(scheduled=2, sent=2, offered=2)
    tally.dispatch_lag_ns.extend([0, 30 * MS])
    fixed = build([TraceRow(0, 1, 1, 1)] * 2, CONTRACT, Plan())
    assert replay_report.invalid_reason(tally, fixed) is None  # 30 ms is exactly a tenth of 300 ms
    tally.dispatch_lag_ns[1] += 1
    assert replay_report.invalid_reason(tally, fixed) is not None
    bare = build([TraceRow(0, 1, 1, 1)] * 2, contracts.from_shorthand("e2e:1000"), Plan())
    assert replay_report.invalid_reason(tally, bare) is None


def test_a_p99_of_few_requests_is_null_with_the_reason() -> None:
    tally = Tally(scheduled=298, sent=298, offered=298)
    tally.ttft_ns.extend(range(298))
    tally.ttft_intended_ns.extend(range(298))
    row = replay_report.report(tally, constant(2, 1.0), CONTRACT)
    for series in ("offered", "completed"):
        assert (row[f"ttft_{series}_p99_s"], row[f"ttft_{series}_p99_note"]) == (None, "n=298 < 299")
        assert row[f"ttft_{series}_p50_s"] == 148 / 1e9  # rank 149 of 0 … 297
    tally.offered += 1
    tally.ttft_ns.append(298)
    tally.ttft_intended_ns.append(298)
    row = replay_report.report(tally, constant(2, 1.0), CONTRACT)
    for series in ("offered", "completed"):  # rank ceil(0.99 · 299) = 297
        assert (row[f"ttft_{series}_p99_s"], row[f"ttft_{series}_p99_note"]) == (296 / 1e9, None)


def test_requests_that_did_not_complete_wait_forever_in_the_quantiles_of_the_offered() -> None:
    tally = Tally(scheduled=400, sent=400, offered=400)
    tally.ttft_ns.extend(range(300))
    tally.ttft_intended_ns.extend(value + 1000 for value in range(300))
    row = replay_report.report(tally, constant(2, 1.0), CONTRACT)
    # Rank ceil(0.5 · 400) = 200 of the offered, 150 of the completed; ceil(0.99 · 400) = 396 is above all 300.
    assert (row["ttft_offered_p50_s"], row["ttft_completed_p50_s"]) == (199 / 1e9, 149 / 1e9)
    assert (row["ttft_offered_p99_s"], row["ttft_offered_p99_note"]) == (None, "> max")
    assert (row["ttft_intended_offered_p99_s"], row["ttft_intended_offered_p50_s"]) == (None, 1199 / 1e9)
    assert (row["ttft_completed_p99_s"], row["ttft_completed_p99_note"]) == (296 / 1e9, None)
    names = [name for name in row if name.startswith("ttft_")]
    assert names[0] == "ttft_offered_p50_s" and all("offered" in name for name in names[: len(names) // 2])


def test_a_run_leaves_nothing_for_the_collector_which_is_off_meanwhile(tmp_path: Path) -> None:
    was_on: list[bool] = []

    def look(loop: asyncio.AbstractEventLoop, running: Replay) -> None:
        if running.tally.sent:
            was_on.append(gc.isenabled())
        else:
            loop.call_later(0.01, look, loop, running)

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number % 3:
            await tokens(3)(asked, reply)
        else:  # and the connection is gone
            await reply.stream()
            reply.reset()

    left: list[object] = []
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        tally, _ = run(constant(60, 200.0), script, tmp_path, meanwhile=look)
        gc.collect()
        left = [
            each for each in gc.garbage if isinstance(each, (RequestRecorder, Connection, Call, HttpResponseParser))
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert tally.outcomes == {"completed": 40, "failed": 20}
    assert was_on == [False] and gc.isenabled()
    assert len(left) < 10  # of 60 requests: what tests before this one left may be among it
