"""What the consumers of a replay do beside reading: retry, run out of patience, read slowly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from sloscope.client.h1 import parse_url
from sloscope.client.replay import Conduct, Replay, Tally, Target, retry_after_ns
from sloscope.client.schedule import Plan, build
from sloscope.client.traces import TraceRow
from tests.client.sse_server import Asked, Reply, Script, SseServer, chunk, tokens
from tests.client.test_replay import CONTRACT, MS, Recorded, S, constant, run


def refuse_first(headers: dict[str, str], status: int = 429) -> Script:
    """Refuses what is no retry."""

    async def script(asked: Asked, reply: Reply) -> None:
        if "x-sloscope-retry-of" in asked.headers:
            await tokens(2)(asked, reply)
        else:
            await reply.json(status, {"error": {}}, headers)

    return script


async def refuse(asked: Asked, reply: Reply) -> None:
    await reply.json(503, {"error": {}})


@pytest.mark.parametrize("status", [429, 503])
def test_a_refused_request_comes_again_as_a_request_of_its_own_when_retry_after_is_over(
    tmp_path: Path, recorded: Recorded, status: int
) -> None:
    script = refuse_first({"retry-after": "1"}, status)
    tally, server = run(constant(10, 100.0), script, tmp_path, conduct=Conduct(retries=2))
    assert (tally.scheduled, tally.sent, tally.offered) == (10, 20, 20)
    assert (tally.retries, tally.retries_completed, tally.retries_not_sent) == (10, 10, 0)
    assert tally.outcomes == {"failed": 10, "completed": 10} and tally.reasons == {"failed(rejected)": 10}
    records = recorded(tmp_path)
    begins = {begin["request_id"]: begin for begin in records["begin"]}
    ends = {end["request_id"]: end for end in records["end"]}
    retried = [begin for begin in begins.values() if "retry_of" in begin]
    assert len({begin["retry_of"] for begin in retried}) == len(retried) == 10
    for begin in retried:
        # Due a second after the refusal was received; what it asks is what was refused.
        assert begin["intended_ns"] == ends[begin["retry_of"]]["end_ns"] + S
        assert begin["send_ns"] - begin["intended_ns"] >= 0
    asked = {each.headers["x-sloscope-request-id"]: each for each in server.asked}
    for begin in retried:
        assert asked[begin["request_id"]].headers["x-sloscope-retry-of"] == begin["retry_of"]
        assert asked[begin["request_id"]].body == asked[begin["retry_of"]].body


def test_retries_take_no_ones_place(tmp_path: Path) -> None:
    tally, _ = run(constant(150, 100.0), refuse_first({"retry-after": "1"}), tmp_path, conduct=Conduct(retries=1))
    assert (tally.sent, tally.retries, tally.retries_completed) == (300, 150, 150)
    assert len(tally.dispatch_lag_ns) == 300 and min(tally.dispatch_lag_ns) >= 0
    # One place that a retry held would be held for a second.
    assert sorted(tally.dispatch_lag_ns)[150] < 500 * MS


def test_without_a_retry_after_the_wait_doubles_and_the_retries_end(tmp_path: Path, recorded: Recorded) -> None:
    conduct = Conduct(retries=2, retry_wait_ns=100 * MS)
    tally, _ = run(constant(1, 1.0), refuse, tmp_path, conduct=conduct)
    assert (tally.sent, tally.retries, tally.retries_completed) == (3, 2, 0)
    records = recorded(tmp_path)
    ends = [end["end_ns"] for end in records["end"]]
    first, second, third = records["begin"]
    assert (second["retry_of"], third["retry_of"]) == (first["request_id"], second["request_id"])
    assert second["intended_ns"] == ends[0] + 100 * MS and third["intended_ns"] == ends[1] + 200 * MS


def test_a_request_without_a_connection_comes_again(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as gone:
        dead = parse_url(f"{gone.url}/v1")
    with SseServer(tokens(1)) as server:
        target = Target((dead, parse_url(f"{server.url}/v1")), "tiny", "sloscope")
        running = Replay(
            constant(10, 100.0), CONTRACT, target, tmp_path, drain_ns=60 * S,
            conduct=Conduct(retries=1, retry_wait_ns=50 * MS),
        )  # fmt: skip
        tally: Tally = uvloop.run(running.run())
        # Every second one met the dead address; its retry asked the next.
        assert tally.reasons == {"failed(connect_error)": 5} and len(server.asked) == 10
    assert (tally.retries, tally.retries_completed, tally.outcomes["completed"]) == (5, 5, 10)


def test_other_failures_and_answers_are_not_asked_for_again(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        match asked.number % 3:
            case 0:
                await reply.json(500, {"error": {}}, {"retry-after": "0"})
            case 1:
                await reply.stream()
                await reply.text()
                reply.reset()
            case 2:
                await tokens(1)(asked, reply)

    tally, _ = run(constant(9, 100.0), script, tmp_path, conduct=Conduct(retries=3))
    assert (tally.sent, tally.retries) == (9, 0)


def test_a_retry_that_is_due_after_the_end_is_counted_and_not_sent(tmp_path: Path) -> None:
    tally, _ = run(
        constant(4, 100.0), refuse_first({"retry-after": "60"}), tmp_path, conduct=Conduct(retries=1), drain_ns=S
    )
    assert (tally.sent, tally.retries, tally.retries_not_sent) == (4, 0, 4)
    assert tally.wall_ns < 30 * S


def test_a_retry_of_a_warmup_row_is_warmup(tmp_path: Path, recorded: Recorded) -> None:
    script = refuse_first({"retry-after": "0"})
    tally, _ = run(constant(4, 100.0, Plan(warmup="1")), script, tmp_path, conduct=Conduct(retries=1))
    assert (tally.sent, tally.warmup, tally.offered) == (8, 2, 6)
    assert sum("labels" in begin for begin in recorded(tmp_path)["begin"]) == 2


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2", 2 * S),
        (" 0 ", 0),
        ("Wed, 21 Oct 2026 07:28:03 GMT", 3 * S),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1e9", None),
        ("9" * 40, None),
        ("Wed, 21 Oct 2026 07:28:03 -0000", None),
        ("Wed, 21 Oct 2026 07:28:03 +9999999999999999", None),
        ("Wed, 99999999999999999999 Oct 2026 07:28:03 GMT", None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date(text: str, ns: int | None) -> None:
    assert retry_after_ns(text, "Wed, 21 Oct 2026 07:28:00 GMT") == ns


def test_a_date_to_wait_for_says_nothing_beside_no_date_of_the_answer() -> None:
    assert retry_after_ns("Wed, 21 Oct 2026 07:28:03 GMT") is None


# --- patience ---------------------------------------------------------------------------------------------------


def test_a_consumer_that_runs_out_of_time_leaves_as_client_timeout(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number % 2:
            await tokens(2)(asked, reply)
        else:
            await reply.stream()
            await reply.text()
            await asyncio.sleep(60)

    tally, _ = run(constant(6, 100.0), script, tmp_path, conduct=Conduct(timeout_ns=S))
    assert tally.outcomes == {"completed": 3, "cancelled": 3}
    assert tally.reasons == {"cancelled(client_timeout)": 3}
    # The first text and the time until then are kept; nobody waited for the rest of the drain.
    records = recorded(tmp_path)
    sends = {begin["request_id"]: begin["send_ns"] for begin in records["begin"]}
    for end in records["end"]:
        if end["outcome"] == "cancelled":
            assert end["end_ns"] - sends[end["request_id"]] >= S and end["output_tokens"] == 1
    assert tally.wall_ns < 30 * S


# --- slow readers -----------------------------------------------------------------------------------------------

_LONG = 400  # events of some 190 bytes: 75 KB


def test_a_slow_reader_really_reads_slowly_and_says_how_long_it_held_off(tmp_path: Path, recorded: Recorded) -> None:
    plan = Plan(slow_readers=1.0)
    tally, _ = run(constant(2, 50.0, plan), tokens(_LONG), tmp_path, conduct=Conduct(read_pause_ns=50 * MS))
    assert (tally.slow_readers, tally.outcomes["completed"], tally.output_tokens) == (2, 2, 2 * _LONG)
    records = recorded(tmp_path)
    begins = {begin["request_id"]: begin for begin in records["begin"]}
    assert all(begin["labels"] == {"slow_reader": True} for begin in begins.values())
    for end in records["end"]:
        stamps = [t for batch in records["chunks"] if batch["request_id"] == end["request_id"] for t in batch["t_ns"]]
        reads = len(set(stamps))
        # The kernel holds some 8 KB for it, so 75 KB take several reads, each followed by a pause but the last.
        assert reads >= 5
        assert (reads - 1) * 50 * MS <= end["consumer_hold_ns"] <= end["end_ns"] - begins[end["request_id"]]["send_ns"]
        assert end["end_ns"] - begins[end["request_id"]]["send_ns"] >= (reads - 1) * 50 * MS


def test_a_slow_reader_takes_the_first_output_as_soon_as_it_comes(tmp_path: Path) -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.event(chunk({"role": "assistant", "content": ""}))
        await asyncio.sleep(0.1)
        await reply.text()
        await reply.finish(usage=1)

    plan = Plan(slow_readers=1.0)
    tally, _ = run(constant(1, 1.0, plan), answer, tmp_path, conduct=Conduct(read_pause_ns=S))
    (ttft_ns,) = tally.ttft_ns
    assert 100 * MS <= ttft_ns < S  # it would be a pause later


def test_a_slow_reader_slows_nobody_else(tmp_path: Path, recorded: Recorded) -> None:
    rows = [TraceRow(0, 5, _LONG, 1), *(TraceRow(n * 20 * MS, 5, 8, n + 1) for n in range(1, 20))]
    fixed = build(rows, CONTRACT, Plan(slow_readers=0.2, seed=4))
    slow = sum(row.slow_reader for row in fixed.requests)
    assert 0 < slow < 20

    async def script(asked: Asked, reply: Reply) -> None:
        await tokens(_LONG)(asked, reply)

    tally, _ = run(fixed, script, tmp_path, conduct=Conduct(read_pause_ns=100 * MS), drain_ns=60 * S)
    assert tally.outcomes["completed"] == 20
    records = recorded(tmp_path)
    held = {end["request_id"]: end.get("consumer_hold_ns") for end in records["end"]}
    assert sum(ns is not None for ns in held.values()) == slow
    sends = {begin["request_id"]: begin["send_ns"] for begin in records["begin"]}
    took: dict[bool, list[int]] = {True: [], False: []}
    for end in records["end"]:
        took[held[end["request_id"]] is None].append(end["end_ns"] - sends[end["request_id"]])
    assert 2 * sorted(took[True])[len(took[True]) // 2] < min(took[False])


def test_a_reset_is_the_servers_failure_however_slowly_it_was_read(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        await asyncio.sleep(0.1)
        reply.reset()

    plan = Plan(slow_readers=1.0)
    tally, _ = run(constant(2, 50.0, plan), script, tmp_path, conduct=Conduct(read_pause_ns=20 * MS))
    assert tally.reasons == {"failed(upstream_reset)": 2}


def test_a_hold_that_the_end_of_the_run_cuts_short_is_counted_as_far_as_it_went(
    tmp_path: Path, recorded: Recorded
) -> None:
    plan = Plan(slow_readers=1.0)
    tally, _ = run(
        constant(1, 1.0, plan), tokens(_LONG), tmp_path, conduct=Conduct(read_pause_ns=60 * S), drain_ns=400 * MS
    )
    assert tally.unfinished == 1
    (end,) = recorded(tmp_path)["end"]
    assert (end["outcome"], end["reason"]) == ("unfinished", "window_closed")
    (begin,) = recorded(tmp_path)["begin"]
    assert 0 < end["consumer_hold_ns"] <= end["end_ns"] - begin["send_ns"] < 60 * S
