"""Attempts of one request, and the engine's own tables."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from queries.compaction import compact
from queries.runner import Session
from sloscope import contract as contracts
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.journal import JournalWriter
from tests.queries.journal_factory import MS, SECOND, new_id, write_request
from tests.queries.test_compaction import WALL, one, select


def test_a_row_names_the_upstream_whose_answer_the_consumer_got(tmp_path: Path) -> None:
    lost = {"outcome": "cancelled", "reason": "disconnect"}
    a, b = {"upstream": "http://a:1"}, {"upstream": "http://b:1"}
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS], begin=a)
        # The chosen one could not be reached.
        write_request(sidecar, "sidecar", new_id(2), 0, [20 * MS], begin=a, end=b)
        # The second attempt was the faster one.
        write_request(sidecar, "sidecar", new_id(3), 0, attempt=0, begin=a, end=lost, end_ns=20 * MS)
        write_request(sidecar, "sidecar", new_id(3), 0, [20 * MS], attempt=1, begin=b)
        write_request(sidecar, "sidecar", new_id(4), 0, begin=a, ended=False)
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(5), 0, [20 * MS])
    compact(tmp_path)
    upstreams = select(tmp_path, "select sidecar_upstream from {requests} order by request_id")
    assert [name for (name,) in upstreams] == ["http://a:1", "http://b:1", "http://b:1", "http://a:1", None]


def test_the_loser_of_a_hedge_is_waste_of_the_same_request(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        lost = {"outcome": "cancelled", "reason": "voluntary", "output_tokens": 3}
        write_request(sidecar, "sidecar", new_id(1), 0, [50 * MS], attempt=0, end=lost)
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS, 30 * MS], attempt=1)
    compact(tmp_path)
    row = one(tmp_path, "sidecar_outcome, sidecar_ttft_ns, sidecar_events, hedge_waste_output_tokens")
    assert row == ("completed", 20 * MS, 2, 3)


def test_a_request_with_an_open_attempt_is_not_final(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(wall_ns=WALL)) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS], attempt=0)
        write_request(sidecar, "sidecar", new_id(1), 0, attempt=1, ended=False)
        report = compact(tmp_path)
    assert (report.requests_written, report.requests_open) == (0, 1)


def test_a_cancel_keeps_the_three_stamps_of_the_engine_and_no_socket_of_another_clock(tmp_path: Path) -> None:
    left = {"outcome": "cancelled", "reason": "disconnect"}
    with JournalWriter(tmp_path, "sidecar", FakeClock(clock_id="s")) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS], end=left)
        sidecar.write(records.make("late", request_id=new_id(1), observer="sidecar", socket_closed_ns=3))
    with JournalWriter(tmp_path, "engine", FakeClock(clock_id="e")) as engine:
        engine.write(
            records.make("late", request_id=new_id(1), observer="engine", socket_closed_ns=20, abort_sent=True)
        )
        engine.write(records.make("late", request_id=new_id(1), observer="engine", abort_seen_ns=25, kv_freed_ns=40))
    compact(tmp_path)
    columns = "engine_socket_closed_ns, engine_abort_sent, engine_abort_seen_ns, engine_kv_freed_ns"
    assert one(tmp_path, columns) == (20, True, 25, 40)


def test_steps_are_joined_to_their_requests_and_states_and_decisions_keep_what_was_recorded(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "engine", FakeClock(wall_ns=WALL, clock_id="c")) as engine:
        step = {"prefill_tokens": 64, "decode_tokens": 1, "prefill_ids": [new_id(1)], "decode_ids": [new_id(2)]}
        engine.write(records.make("step", step_id=7, start_ns=5 * MS, end_ns=9 * MS, **step))
        again = {"preempted_ids": [new_id(2)], "captured": True}
        engine.write(records.make("step", step_id=8, start_ns=11 * MS, end_ns=12 * MS, **again))
        engine.write(records.make("state", request_id=new_id(1), at_ns=6, from_state="DECODE", to_state="PREEMPTED"))
        said = {"verdict": "refuse", "reason": "late", "predicted_first_token_ns": 9, "slack_ns": -4, "feasible": False}
        planned: dict[str, Any] = {"predicted_start_steps": 1, "predicted_steps": 2, "predicted_prefill_tokens": 30}
        planned |= {"length_source": "cohort", "length_unresolved": 0.25}
        engine.write(
            records.make(
                "decision", request_id=new_id(1), at_ns=5, resource_safe=True, policy="deadline", **said | planned
            )
        )
        compact(tmp_path)
    columns = "step_id, clock_id, start_at_ns, prefill_requests, decode_requests, preempted, gap_before_ns, captured"
    # The gap: 11 − 9 = 2 ms.
    assert select(tmp_path, f"select {columns} from {{steps}} order by 1") == [
        (7, "c", WALL + 5 * MS, 1, 1, 0, None, None),
        (8, "c", WALL + 11 * MS, None, None, 1, 2 * MS, True),
    ]
    assert select(tmp_path, "select step_id, request_id, role from {step_requests} order by 1, 3") == [
        (7, new_id(2), "decode"),
        (7, new_id(1), "prefill"),
        (8, new_id(2), "preempted"),
    ]
    ((engine_id,),) = select(tmp_path, "select distinct engine_id from {steps}")
    assert engine.path.name == f"{engine_id}-0.jsonl"
    state = (new_id(1), engine_id, "c", 6, "DECODE", "PREEMPTED", None)
    assert one(tmp_path, "* exclude (place)", "states") == state
    decision = (new_id(1), 0, engine_id, "c", 5, "refuse", "late", 9, -4, False, True, "deadline", 1, 2, 30, None)
    assert one(tmp_path, "* exclude (place)", "decisions") == (*decision, "cohort", 0.25)
    assert select(tmp_path, "select * from {requests}") == [], "nobody recorded a begin"


def test_the_work_of_a_step_stays_apart_and_its_requests_keep_their_part_of_it(tmp_path: Path) -> None:
    ids = [new_id(number) for number in range(4)]
    with JournalWriter(tmp_path, "engine", FakeClock(wall_ns=WALL, clock_id="c")) as engine:
        said = {
            "prefill_ids": ids[:2],
            "prefill_token_counts": [3, 5],
            "prefill_charged_counts": [3, 0],
            "paused_ids": ids[2:],
            "kv_read_tokens": 40,
            "sampled_tokens": 1,
            "reused_tokens": 16,
            "token_budget": 8,
            "kv_blocks_cached": 2,
            "prefill_linear_flops": 2**60 + 1,  # a model's arithmetic is written as an integer
            "kv_write_bytes": 12.5,
        }
        engine.write(records.make("step", step_id=1, start_ns=5 * MS, end_ns=9 * MS, **said))
    compact(tmp_path)
    columns = "kv_read_tokens, sampled_tokens, reused_tokens, token_budget, kv_blocks_cached, paused, preempted"
    assert one(tmp_path, columns, "steps") == (40, 1, 16, 8, 2, 2, 0)
    floats = "prefill_linear_flops, kv_write_bytes, decode_linear_flops"
    assert one(tmp_path, floats, "steps") == (2.0**60, 12.5, None)
    assert select(tmp_path, "select request_id, role, tokens, charged from {step_requests} order by 1") == [
        (ids[0], "prefill", 3, 3),
        (ids[1], "prefill", 5, 0),
        (ids[2], "paused", None, None),
        (ids[3], "paused", None, None),
    ]


def test_what_an_engine_is_stands_in_one_row_for_each_time_that_it_said_so(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "engine", FakeClock(wall_ns=WALL, clock_id="c")) as engine:
        policies = {"order": "fcfs", "budget": 512}
        engine.write(records.make("engine", at_ns=0, clock_id="c", model="builtin", kv_blocks=64, policies=policies))
        engine.write(records.make("engine", at_ns=3 * MS, clock_id="c", model="builtin", ceiling_flops_per_s=2e11))
        compact(tmp_path)
    columns = "at_ns, started_at_ns, kv_blocks, policies, ceiling_flops_per_s, ceiling_kv_bytes_per_s"
    assert select(tmp_path, f"select {columns} from {{engines}} order by at_ns") == [
        (0, WALL, 64, '{"budget": 512, "order": "fcfs"}', None, None),
        (3 * MS, WALL + 3 * MS, None, None, 2e11, None),
    ]
    assert select(tmp_path, "select engine_id, clock_id from {engines}") == [(engine.path.stem[:-2], "c")] * 2


def test_transitions_of_one_boundary_keep_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    chain = ["PAUSED", "DECODE", "PREEMPTED", "CANCELLED"]
    with JournalWriter(tmp_path, "engine", FakeClock(wall_ns=WALL, clock_id="c")) as engine:
        for before, after in itertools.pairwise(chain):
            engine.append(records.make("state", request_id=new_id(1), at_ns=7, from_state=before, to_state=after))
        engine.flush()
    compact(tmp_path)
    rows = select(tmp_path, "select from_state from {states} order by at_ns, place")
    assert [before for (before,) in rows] == chain[:-1]


def test_a_journal_that_was_written_before_steps_named_their_work_still_answers(tmp_path: Path) -> None:
    """The lines as an earlier release wrote them."""
    folder = tmp_path / "journal" / "engine"
    folder.mkdir(parents=True)
    key = new_id(1)
    lines = [
        f'{{"v":1,"kind":"clock","mono_ns":0,"wall_ns":{WALL},"clock_id":"c"}}',
        f'{{"v":1,"kind":"state","request_id":"{key}","attempt":0,"at_ns":5,"to_state":"WAITING","reason":"arrived"}}',
        f'{{"v":1,"kind":"decision","request_id":"{key}","attempt":0,"at_ns":6,"verdict":"admit","reason":"fits"}}',
        f'{{"v":1,"kind":"step","step_id":1,"start_ns":10,"end_ns":30,"device_ns":15,"prefill_tokens":8,"decode_tokens":0,'
        f'"prefill_ids":["{key}"],"decode_ids":[],"kv_blocks_resident":1,"kv_blocks_reserved":2,"kv_blocks_free":5,'
        f'"modelled_flops":1000,"modelled_bytes":2000}}',
    ]
    (folder / "00000000-1-0-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with Session(tmp_path, contracts.preset("exercise"), window=(WALL, WALL + SECOND)) as session:
        (step,) = session.run("step_work").rows
        (usage,) = session.run("kv_usage", bucket_s=1).rows
    assert (step["step_kind"], step["steps"], step["reason"]) == ("prefill", 1, "no work recorded")
    # 1 + 2 + 5 blocks
    assert (usage["kv_blocks"], usage["free_min"], usage["cached_mean"], usage["unbalanced"]) == (8, 5, None, None)
    assert (usage["paused_share"], usage["preemptions"], usage["reused_share"]) == (0, 0, 0), "it knew none of these"


def test_steps_of_an_engine_that_was_started_again_on_the_same_boot_are_told_apart(tmp_path: Path) -> None:
    for life in range(2):
        clock = FakeClock(mono_ns=life * SECOND, wall_ns=WALL, clock_id="boot")
        with JournalWriter(tmp_path, "engine", clock, max_bytes=150) as engine:  # so that each life spans files
            for step in (1, 2):
                start = life * SECOND + step * 10 * MS
                record = {"start_ns": start, "end_ns": start + 4 * MS, "decode_ids": [new_id(life)]}
                engine.write(records.make("step", step_id=step, **record))
    assert len(list((tmp_path / "journal" / "engine").iterdir())) == 4
    compact(tmp_path)
    # Each life: its first step has none before it; the second starts 10 ms later, 10 - 4 = 6 ms after the first ended.
    rows = select(tmp_path, "select clock_id, step_id, gap_before_ns from {steps} order by start_ns")
    assert rows == [("boot", 1, None), ("boot", 2, 6 * MS)] * 2
    joined = (
        "select steps.start_ns, step_requests.request_id from {steps} as steps inner join {step_requests} as"
        " step_requests on steps.engine_id = step_requests.engine_id and steps.step_id = step_requests.step_id"
        " order by steps.start_ns"
    )
    assert select(tmp_path, joined) == [
        (life * SECOND + step * 10 * MS, new_id(life)) for life in range(2) for step in (1, 2)
    ]


def test_a_request_that_spans_files_of_a_rotating_writer_is_whole(tmp_path: Path) -> None:
    clock = FakeClock()
    with JournalWriter(tmp_path, "client", clock, max_bytes=400) as client:
        stamps = [n * 10 * MS for n in range(1, 101)]
        write_request(client, "client", new_id(1), 0, stamps, batch=5)
        clock.advance(SECOND)
    assert len(list((tmp_path / "journal" / "client").iterdir())) > 10, "so that 10 sorts before 2 by name"
    report = compact(tmp_path)
    assert (report.lost_events, report.repeated) == (0, 0)
    assert one(tmp_path, "client_t_ns", "chunks") == (stamps,)


def clock_of(process: int) -> FakeClock:
    """Of one host: a process that started later, so that its file has a name of its own."""
    clock = FakeClock(wall_ns=WALL)
    clock.advance(process)
    return clock


def test_of_two_engines_that_ran_a_hedge_the_row_shows_the_one_that_answered(tmp_path: Path) -> None:
    """Both began attempt 0, since a server does not know. The slow one got it first, was closed after two tokens."""
    with (
        JournalWriter(tmp_path, "sidecar", clock_of(0)) as sidecar,
        JournalWriter(tmp_path, "engine", clock_of(1)) as slow,
        JournalWriter(tmp_path, "engine", clock_of(2)) as quick,
        JournalWriter(tmp_path, "engine", clock_of(3)) as slow_engine,
        JournalWriter(tmp_path, "engine", clock_of(4)) as quick_engine,
    ):
        stopped = {"outcome": "cancelled", "reason": "voluntary"}
        write_request(sidecar, "sidecar", new_id(1), 0, attempt=0, end=stopped, end_ns=95 * MS)
        write_request(sidecar, "sidecar", new_id(1), 0, [95 * MS, 97 * MS], attempt=1)
        left = {"outcome": "cancelled", "reason": "disconnect", "output_tokens": 2}
        write_request(slow, "engine", new_id(1), 1 * MS, [98 * MS], end=left, end_ns=99 * MS)
        write_request(quick, "engine", new_id(1), 80 * MS, [94 * MS, 96 * MS])
        for writer, queued, prefill, last in ((slow_engine, 2, 90, "CANCELLED"), (quick_engine, 81, 82, "FINISHED")):
            for at, state in ((queued, "WAITING"), (prefill, "PREFILL"), (99, last)):
                writer.write(records.make("state", request_id=new_id(1), at_ns=at * MS, to_state=state))
        report = compact(tmp_path)
    assert (report.requests_written, report.requests_open) == (1, 0)
    columns = (
        "sidecar_outcome, engine_outcome, engine_start_ns, engine_first_computed_ns, engine_queued_ns, "
        "engine_prefill_start_ns, hedge_waste_output_tokens"
    )
    row = ("completed", "completed", 80 * MS, 94 * MS, 81 * MS, 82 * MS, 2)
    assert one(tmp_path, columns) == row
    assert one(tmp_path, "sidecar_alignment") == ("ordinal",)


def test_of_two_attempts_that_did_not_complete_the_row_shows_the_one_that_ended_last(tmp_path: Path) -> None:
    """The second had won, then the client left."""
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        stopped = {"outcome": "cancelled", "reason": "voluntary"}
        write_request(sidecar, "sidecar", new_id(1), 0, attempt=0, end=stopped, end_ns=20 * MS)
        left = {"outcome": "cancelled", "reason": "disconnect"}
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS], attempt=1, end=left, end_ns=30 * MS)
    compact(tmp_path)
    row = one(tmp_path, "sidecar_outcome, sidecar_reason, sidecar_events, hedge_waste_output_tokens")
    assert row == ("cancelled", "disconnect", 1, None)  # nobody counted what the first one had


LOSERS = {  # end of the attempt that lost, receipts of it → waste
    "counted": ({"output_tokens": 3}, [], 3),
    "counted as none": ({"output_tokens": 0}, [], 0),
    "received, not counted": ({}, [6 * MS, 7 * MS], 2),
    "neither": ({}, [], None),
    "lost with its recorder": ({"outcome": "unfinished", "reason": "recorder_lost"}, [], None),
    "a whole answer without usage": ({"outcome": "completed", "reason": ""}, [], None),
}


@pytest.mark.parametrize("name", LOSERS)
def test_the_waste_of_a_hedge_is_zero_only_where_it_is_known_to_be(tmp_path: Path, name: str) -> None:
    said, receipts, waste = LOSERS[name]
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        lost = {"outcome": "cancelled", "reason": "voluntary"} | said
        write_request(sidecar, "sidecar", new_id(1), 0, receipts, attempt=0, end=lost, end_ns=9 * MS)
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS, 30 * MS], attempt=1, end_ns=30 * MS)
    compact(tmp_path)
    assert one(tmp_path, "sidecar_events, hedge_waste_output_tokens") == (2, waste)


def test_two_dead_engines_that_ran_a_hedge_are_both_closed(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(wall_ns=WALL)) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [20 * MS])
    for process in range(2):
        with JournalWriter(tmp_path, "engine", clock_of(process)) as engine:
            write_request(engine, "engine", new_id(1), 0, [10 * MS], ended=False)
    reports = [compact(tmp_path) for _ in range(4)]
    assert sum(report.requests_written for report in reports) == 1
    assert reports[-1].requests_open == 0
    assert one(tmp_path, "engine_outcome, engine_reason") == ("unfinished", "recorder_lost")
