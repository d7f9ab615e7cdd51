"""The engine's loop over a real socket, real journal and real metrics; only the model is a tiny one."""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from queries.runner import Session
from reference_server.assembly import PolicyChoice, assemble, declared_gap_bound
from reference_server.engine import Engine
from reference_server.kv_blocks import BlockPool
from reference_server.ledger import Identity, Ledger
from reference_server.link import EngineLink, FrameBuffer, LinkClosedError, Message, encode
from reference_server.policies import AdmitAll, Judgement, Optimistic, View
from reference_server.prefill_budget import Static
from reference_server.remaining import Lengths, LengthTable
from reference_server.request import Request, State
from reference_server.scheduler import Limits, Policies, Scheduler
from sloscope import records
from sloscope.clock import SystemClock
from sloscope.contract import preset
from sloscope.exposition import MetricStore
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter, journal_files
from tests.journals import journal_of
from tests.reference_server.test_work import CONFIG
from tests.reference_server.tiny_runner import EOS, TinyRunner


class Bench:
    def __init__(
        self,
        events: Path,
        slots: int = 2,
        blocks: int = 64,
        policies: Policies | None = None,
        prefix_reuse: bool = False,
        **limits: Any,
    ) -> None:
        ours, self.front = socket.socketpair()
        self.front.setblocking(False)
        self.events = events
        self.runner = TinyRunner(blocks, 4, 64)
        self.metrics = MetricStore("server")
        self.journal = JournalWriter(events, "engine", SystemClock())
        self.link_socket = ours
        scheduler = Scheduler(Limits(slots, 64, **limits), BlockPool(blocks, 4, prefix_reuse), [EOS], policies)
        self.ledger = Ledger(scheduler, self.metrics, self.journal, CONFIG)
        self.engine = Engine(self.runner, scheduler, EngineLink(ours), self.ledger, self.journal, SystemClock())
        self._frames = FrameBuffer()

    def new(self, prompt: int = 3, max_tokens: int = 4, **more: Any) -> str:
        key = new_request_id()
        self.tell(
            {
                "op": "new", "key": key, "prompt": list(range(10, 10 + prompt)), "max_tokens": max_tokens,
                "stop_after": None, "temperature": 0.0, "top_p": 1.0, "seed": 0, "mask_eos": False, "tenant": "",
                "arrived_ns": time.monotonic_ns(), "fault": "", "request_class": "", "streaming": True,
                "ttft_limit_ns": None, "itl_max_limit_ns": None,
            } | more
        )  # fmt: skip
        return key

    def begin(self, key: str, tenant: str) -> None:
        """What the front end records of a request."""
        fields = {"request_id": key, "tenant": tenant, "clock_id": SystemClock().clock_id}
        self.journal.append(records.make("begin", observer="engine", arrived_ns=0, **fields))

    def ask(self, question: str) -> list[dict[str, Any]]:
        self.journal.flush()
        with Session(self.events, preset("exercise"), window=(0, 1 << 62)) as session:
            return session.run(question).rows

    def tell(self, message: Message) -> None:
        self.front.sendall(encode(message))

    def turn(self, times: int = 1) -> list[Message]:
        for _ in range(times):
            self.engine.turn()
            self.engine.scheduler.check_integrity()
        return self.heard()

    def heard(self) -> list[Message]:
        messages: list[Message] = []
        try:
            while data := self.front.recv(1 << 16):
                messages += self._frames.feed(data)
        except BlockingIOError:
            pass
        return [message for message in messages if message["op"] != "metrics"]

    def records(self, kind: str) -> list[records.Record]:
        self.journal.flush()
        return journal_of(self.events, kind)

    def close(self) -> None:
        self.journal.close()
        self.front.close()
        self.link_socket.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_all_tokens_of_a_step_travel_in_one_frame(bench: Bench) -> None:
    a, b = bench.new(), bench.new()
    accepted, tokens = bench.turn()
    assert accepted == {"op": "accepted", "keys": [a, b]}
    # Prompts of 3 tokens at positions 0-2: the first token is 103.
    assert [row[:4] for row in tokens["rows"]] == [[a, 103, "", True], [b, 103, "", True]]
    assert tokens["step"] == 1 and tokens["computed_ns"] <= tokens["handed_ns"] <= time.monotonic_ns()


def test_only_the_first_token_brings_the_stamps_of_its_request(bench: Bench) -> None:
    bench.new()
    _, first = bench.turn()
    (second,) = bench.turn()
    _, _, _, _, queued_ns, started_ns = first["rows"][0]
    assert queued_ns <= started_ns <= first["computed_ns"]
    assert len(second["rows"][0]) == 4


def test_a_step_is_recorded_with_its_batch_and_the_three_kv_numbers(bench: Bench) -> None:
    a = bench.new(prompt=6, max_tokens=4)  # 10 tokens: 3 blocks of 4
    bench.turn()
    b = bench.new(prompt=2, max_tokens=2)  # 1 block
    bench.turn()
    first, second = bench.records("step")
    assert (first["prefill_ids"], first["decode_ids"]) == ([a], [])
    # 6 tokens: 2 blocks hold some, 1 more is promised, 64 - 3 are free.
    assert (first["kv_blocks_resident"], first["kv_blocks_reserved"], first["kv_blocks_free"]) == (2, 1, 61)
    assert (second["prefill_ids"], second["decode_ids"]) == ([b], [a])
    assert (second["prefill_tokens"], second["decode_tokens"]) == (2, 1)
    assert second["start_ns"] >= first["end_ns"] >= first["start_ns"] and "fault" not in second
    assert first["modelled_flops"] > 0 and first["modelled_bytes"] > 0


def test_every_transition_is_recorded_with_its_reason(bench: Bench) -> None:
    key = bench.new(max_tokens=2)
    bench.turn(2)
    states = bench.records("state")
    assert [(s.get("from_state"), s["to_state"], s["reason"]) for s in states] == [
        (None, "WAITING", "arrived"),
        ("WAITING", "PREFILL", "admitted"),
        ("PREFILL", "DECODE", "first_token"),
        ("DECODE", "FINISHED", "length"),
    ]
    assert {s["request_id"] for s in states} == {key}
    assert [s["at_ns"] for s in states] == sorted(s["at_ns"] for s in states)
    assert [(d["verdict"], d["reason"]) for d in bench.records("decision")] == [("admit", "fits")]


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_an_abort_acts_at_the_next_boundary_and_frees_the_kv(bench: Bench, turns: int) -> None:
    """0: it comes together with the request; later: in decode."""
    key = bench.new(max_tokens=9)
    bench.turn(turns)
    bench.tell({"op": "abort", "key": key, "reason": "disconnect"})
    asked_ns = time.monotonic_ns()
    steps = bench.runner.steps
    bench.turn(2)
    assert bench.runner.steps == steps, "no step ran for it any more"
    assert bench.engine.scheduler.pool.free == 64
    (late,) = bench.records("late")
    assert late["request_id"] == key and asked_ns <= late["abort_seen_ns"]
    if turns:
        assert late["abort_seen_ns"] <= late["kv_freed_ns"]
    else:
        assert "kv_freed_ns" not in late, "it held none"
    assert bench.records("state")[-1]["to_state"] == "CANCELLED"
    assert bench.records("state")[-1]["reason"] == "disconnect"
    m = _samples(bench.metrics.render().decode())
    assert m["sloscope_engine_cancel_cleanup_seconds_count"] == (1 if turns else 0)


def test_an_abort_that_leaves_kv_behind_has_no_stamp_of_kv_free(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bench.new(max_tokens=9)
    bench.turn(2)
    monkeypatch.setattr(bench.engine.scheduler.pool, "release", lambda key: 0)
    bench.tell({"op": "abort", "key": key, "reason": "disconnect"})
    bench.engine.turn()
    (late,) = bench.records("late")
    assert "abort_seen_ns" in late and "kv_freed_ns" not in late
    assert _samples(bench.metrics.render().decode())["sloscope_engine_cancel_cleanup_seconds_count"] == 0


def test_aborting_one_of_two_does_not_touch_the_other(bench: Bench) -> None:
    a, b = bench.new(max_tokens=4), bench.new(max_tokens=4)
    bench.turn()
    bench.tell({"op": "abort", "key": a, "reason": "disconnect"})
    rows = [row[:3] for message in bench.turn(4) for row in message["rows"]]
    assert rows == [[b, 104, ""], [b, 105, ""], [b, 106, "length"]]


def test_an_abort_that_comes_too_late_leaves_no_trace(bench: Bench) -> None:
    key = bench.new(max_tokens=1)
    bench.turn()
    bench.tell({"op": "abort", "key": key, "reason": "disconnect"})
    bench.turn()
    assert bench.records("late") == []
    assert bench.records("state")[-1]["to_state"] == "FINISHED"


def test_an_answer_that_ends_in_its_text_is_finished(bench: Bench) -> None:
    key = bench.new(max_tokens=9)
    bench.turn()
    bench.tell({"op": "finish", "key": key})
    assert bench.turn() == []
    assert bench.records("state")[-1]["to_state"] == "FINISHED" and bench.engine.scheduler.pool.free == 64


def test_a_refusal_says_why_and_whether_to_ask_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=1, blocks=4, max_waiting=1)
    bench.new(max_tokens=9)
    bench.turn()
    bench.new()
    full = bench.new()
    never = bench.new(prompt=10, max_tokens=10)  # 20 tokens: 5 blocks of 4
    refused = {m["key"]: m for m in bench.turn() if m["op"] == "refused"}
    assert (refused[full]["reason"], refused[full]["retry"]) == ("queue_full", True)
    assert (refused[never]["reason"], refused[never]["retry"]) == ("kv_never_fits", False)
    assert "need 5 KV blocks; accepted: at most 4" in refused[never]["message"]
    assert [s["request_id"] for s in bench.records("state") if s["to_state"] == "REJECTED"] == [full, never]
    bench.close()


def test_a_stall_makes_the_whole_batch_wait_in_the_step_of_that_token(bench: Bench) -> None:
    slow = bench.new(max_tokens=4, fault="stall=30ms@3")
    other = bench.new(max_tokens=4)
    bench.turn(4)
    steps = bench.records("step")
    assert [step.get("fault") for step in steps] == [None, None, "stall=30ms@3", None]
    long = [step["end_ns"] - step["start_ns"] >= 30_000_000 for step in steps]
    assert long == [False, False, True, False]
    assert steps[2]["decode_ids"] == [slow, other]


def test_an_error_asked_for_ends_the_request_after_that_many_tokens(bench: Bench) -> None:
    key = bench.new(max_tokens=9, fault="error@2")
    messages = bench.turn(4)
    assert [m["op"] for m in messages] == ["accepted", "tokens", "tokens", "error"]
    assert messages[-1]["key"] == key and bench.engine.scheduler.pool.free == 64
    assert bench.records("state")[-1]["reason"] == "fault"


def test_a_stall_can_be_asked_of_the_next_step(bench: Bench) -> None:
    bench.new(max_tokens=2)
    bench.tell({"op": "stall", "ns": 20_000_000, "decoding": False})
    bench.turn(2)
    assert [step.get("fault") for step in bench.records("step")] == ["stall=20ms", None]


def test_a_stall_of_the_decoder_waits_for_a_step_that_decodes(bench: Bench) -> None:
    bench.tell({"op": "stall", "ns": 20_000_000, "decoding": True})
    bench.new(max_tokens=1)  # ends with its prefill: the stall would be in nobody's gap
    bench.turn(1)
    bench.new(max_tokens=3)
    bench.turn(3)
    steps = bench.records("step")
    assert [step.get("fault") for step in steps] == [None, None, "stall=20ms", None]
    assert [len(step.get("decode_ids", [])) for step in steps] == [0, 0, 1, 1]


def test_a_step_that_captured_a_program_says_so_and_teaches_the_cost_model_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = bench.runner.step
    monkeypatch.setattr(bench.runner, "step", lambda batch: replace(step(batch), captured=bench.runner.steps == 2))
    bench.new(max_tokens=4)
    bench.turn(4)
    assert [record.get("captured") for record in bench.records("step")] == [None, True, None, None]
    assert bench.engine._cost.steps == 3


def _samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_the_metrics_count_what_was_done(bench: Bench) -> None:
    done, gone = bench.new(prompt=3, max_tokens=4, tenant="t1"), bench.new(prompt=5, max_tokens=9)
    bench.turn(2)
    bench.tell({"op": "abort", "key": gone, "reason": "disconnect"})
    bench.turn(2)
    assert done
    m = _samples(bench.metrics.render().decode())
    assert m["sloscope_engine_prompt_tokens_total"] == 8  # 3 + 5
    assert m["sloscope_engine_output_tokens_total"] == 6  # 4, and 2 before the abort
    assert m["sloscope_engine_step_seconds_count"] == 4
    assert m["sloscope_engine_decode_step_seconds_count"] == 3  # all but the first
    assert m["sloscope_engine_queue_seconds_count"] == m["sloscope_engine_ttft_seconds_count"] == 2
    assert m["sloscope_engine_token_interval_seconds_count"] == 4  # 3 gaps of 4 tokens, 1 of 2
    assert m['sloscope_engine_admissions_total{reason="fits",verdict="admit"}'] == 2
    # 3 prompt tokens at 1 and 4 output tokens at 2; 5 + 2 · 2 for the other
    assert m['sloscope_engine_service_units_total{tenant="t1"}'] == 11
    assert m['sloscope_engine_service_units_total{tenant=""}'] == 9


def test_the_oldest_waiting_request_is_shown_for_each_class(bench: Bench) -> None:
    keys = [bench.new(request_class=name, max_tokens=9) for name in ("runs", "runs", "batch", "editor", "batch")]
    bench.turn()
    bench.tell({"op": "drain"})
    bench.turn()
    name = "sloscope_engine_oldest_waiting_seconds"
    during = {k: n for k, n in _samples(bench.metrics.render().decode()).items() if k.startswith(name)}
    assert set(during) == {f'{name}{{class="batch"}}', f'{name}{{class="editor"}}'}
    assert during[f'{name}{{class="batch"}}'] > during[f'{name}{{class="editor"}}'] > 0  # the first of them came before
    bench.tell({"op": "abort", "key": keys[3], "reason": "disconnect"})
    bench.tell({"op": "drain"})
    bench.turn()
    after = _samples(bench.metrics.render().decode())
    assert after[f'{name}{{class="editor"}}'] == 0 < after[f'{name}{{class="batch"}}']


def test_gauges_return_to_the_baseline_when_everything_is_aborted(bench: Bench) -> None:
    bench.tell({"op": "drain"})
    bench.turn()
    before = _samples(bench.metrics.render().decode())
    keys = [bench.new(max_tokens=9) for _ in range(5)]
    bench.turn(2)
    bench.tell({"op": "drain"})
    bench.turn()
    during = _samples(bench.metrics.render().decode())
    assert during['sloscope_engine_requests{state="DECODE"}'] == 2
    assert during['sloscope_engine_requests{state="WAITING"}'] == 3
    assert during['sloscope_engine_oldest_waiting_seconds{class=""}'] > 0
    for key in keys:
        bench.tell({"op": "abort", "key": key, "reason": "disconnect"})
    bench.tell({"op": "drain"})
    bench.turn()
    after = _samples(bench.metrics.render().decode())
    gauges = [name for name in before if "kv_blocks" in name or "engine_requests{" in name]
    assert len(gauges) == 3 + 2 + 5
    assert after['sloscope_engine_oldest_waiting_seconds{class=""}'] == 0
    assert {name: after[name] for name in gauges} == {name: before[name] for name in gauges}
    assert after["sloscope_engine_cancel_cleanup_seconds_count"] == 2, "of those that held KV"


def test_no_text_and_no_token_reaches_the_journal(bench: Bench) -> None:
    bench.new(prompt=4, max_tokens=3)
    bench.turn(3)
    for path in journal_files(bench.events):
        for line in path.read_text().splitlines():
            assert not any(value == [10, 11, 12, 13] for value in json.loads(line).values())
    assert len(bench.records("step")) == 3  # every line passed the schema, which has no field for text


def test_the_engine_ends_when_the_front_end_is_gone(bench: Bench) -> None:
    bench.new()
    bench.turn()
    bench.front.close()
    with pytest.raises(LinkClosedError):
        bench.engine.run()


def test_a_reader_that_is_behind_pauses_and_goes_on_when_it_has_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_undelivered=2)
    slow, other = bench.new(max_tokens=4), bench.new(max_tokens=4, streaming=False)
    rows = [row[:2] for m in bench.turn(4) if m["op"] == "tokens" for row in m["rows"]]
    assert rows == [[slow, 103], [other, 103], [slow, 104], [other, 104], [other, 105], [other, 106]]
    bench.turn()
    assert bench.records("step")[-1]["paused_ids"] == [slow]
    bench.tell({"op": "drain"})
    bench.turn()
    m = _samples(bench.metrics.render().decode())
    # 3 of the prompt and 1 token: 1 block of 4.
    assert m["sloscope_engine_kv_blocks_paused"] == 1 and m['sloscope_engine_requests{state="PAUSED"}'] == 1
    bench.tell({"op": "delivered", "rows": [[slow, 2]]})
    assert [row[:3] for row in bench.turn()[0]["rows"]] == [[slow, 105, ""]]
    bench.turn()
    reasons = [s["reason"] for s in bench.records("state") if s["request_id"] == slow]
    assert reasons == ["arrived", "admitted", "first_token", "flow_control", "caught_up", "length"]
    m = _samples(bench.metrics.render().decode())
    assert m['sloscope_engine_pauses_total{reason="flow_control"}'] == 1
    assert m['sloscope_engine_pause_seconds_count{end="resumed"}'] == 1
    bench.close()


def test_a_reader_that_takes_nothing_is_cut_off_and_the_front_end_is_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_undelivered=1, slow_reader_ns=300_000_000)
    key = bench.new(max_tokens=9)
    bench.turn(2)
    time.sleep(0.4)
    assert bench.turn() == [{"op": "cut", "key": key, "reason": "slow_reader"}]
    assert bench.records("state")[-1]["reason"] == "slow_reader" and bench.engine.scheduler.pool.free == 64
    m = _samples(bench.metrics.render().decode())
    assert m['sloscope_engine_pause_seconds_count{end="slow_reader"}'] == 1
    bench.close()


def test_a_preemption_is_recorded_with_the_step_after_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, blocks=6, policies=Policies(reservation=Optimistic()))
    a, b = bench.new(prompt=4, max_tokens=12), bench.new(prompt=4, max_tokens=12)
    bench.turn(40)
    assert [s["preempted_ids"] for s in bench.records("step") if "preempted_ids" in s] == [[b]]
    m = _samples(bench.metrics.render().decode())
    assert m["sloscope_engine_preemptions_total"] == 1
    # Both were served 4 prompt and 12 output tokens: 4 + 24 each. What b ran again is not service.
    assert m['sloscope_engine_service_units_total{tenant=""}'] == 56
    charged = [
        (key, count)
        for s in bench.records("step")
        for key, count in zip(s["prefill_ids"], s["prefill_charged_counts"], strict=True)
    ]
    assert charged == [(a, 4), (b, 4), (b, 0)]
    bench.close()


def test_an_answer_that_ends_in_its_text_while_it_is_run_again_is_served_what_the_engine_counted(
    tmp_path: Path,
) -> None:
    """No step ended it, so its leaving PREFILL brought no token."""
    bench = Bench(tmp_path, blocks=6, policies=Policies(reservation=Optimistic(), budget=Static(4)))
    bench.new(prompt=4, max_tokens=12)
    b = bench.new(prompt=4, max_tokens=12, tenant="t1")
    bench.turn()
    request = bench.engine.scheduler.get(b)
    assert request is not None
    while not request.preemptions:
        bench.turn()
    while request.state is not State.PREFILL:
        bench.turn()
    made = len(request.output)
    assert made and 0 < request.computed < request.tokens, "in the middle of its recomputation"
    bench.tell({"op": "finish", "key": b})
    bench.turn()
    assert [bench.records("state")[-1][name] for name in ("from_state", "to_state")] == ["PREFILL", "FINISHED"]
    bench.new()  # the steps go on after it, so it ended among those that are asked for
    bench.turn(4)
    m = _samples(bench.metrics.render().decode())
    assert m['sloscope_engine_service_units_total{tenant="t1"}'] == 4 + 2 * made
    bench.begin(b, "t1")
    (row,) = bench.ask("tenant_service")
    assert (row["prompt_tokens"], row["output_tokens"], row["service_units"]) == (4, made, 4 + 2 * made)
    bench.close()


@pytest.mark.parametrize(
    ("choice", "bound"),
    [
        (PolicyChoice(), None),
        # 2 · the pool's 32 tokens at 2, and of drr 2 quanta
        (PolicyChoice(order="vtc"), 128),
        (PolicyChoice(order="drr", quantum=20), 128 + 40),
        (PolicyChoice(order="vtc", tenant_weights={"b": 0.5}), 256),
    ],
    ids=["fcfs", "vtc", "drr", "vtc-weights"],
)
def test_the_promised_bound_stands_beside_the_gap_of_a_recorded_run(
    tmp_path: Path, choice: PolicyChoice, bound: float | None
) -> None:
    policies = assemble(choice).policies
    bench = Bench(tmp_path, slots=2, blocks=8, policies=policies)
    limits, pool = bench.engine.scheduler.limits, bench.engine.scheduler.pool
    promised = declared_gap_bound(policies, limits, pool)
    identity = Identity("m", "float32", "cpu", 1, choice.names(), {}, promised)
    bench.ledger.introduce(identity, time.monotonic_ns(), SystemClock().clock_id)
    for tenant, prompt in [("a", 3)] * 30 + [("b", 5)] * 30:
        bench.begin(bench.new(prompt=prompt, max_tokens=4, tenant=tenant), tenant)
    while bench.turn() or bench.engine.scheduler.has_work:
        pass
    (row,) = bench.ask("service_gap")
    within = None if bound is None else True
    assert (row["gap_bound_units"], row["gap_within_bound"]) == (bound, within)
    # First come, first served: a gets 28 · (3 + 2 · 4) units and more before b gets any, which would have broken the
    # promise of every other.
    assert row["gap_units"] > 256 if bound is None else 0 < row["gap_units"] <= bound
    bench.close()


def test_a_reused_prefix_is_recorded_and_not_charged(tmp_path: Path) -> None:
    bench = Bench(tmp_path, prefix_reuse=True)
    bench.new(prompt=9, max_tokens=2)
    bench.turn()
    bench.new(prompt=9, max_tokens=2)
    bench.turn(3)
    assert [s.get("reused_tokens") for s in bench.records("step")] == [None, 8, None]
    assert [s["prefill_charged_counts"] for s in bench.records("step")] == [[9], [1], []]
    m = _samples(bench.metrics.render().decode())
    assert m["sloscope_engine_prefix_reused_tokens_total"] == 8
    assert m['sloscope_engine_service_units_total{tenant=""}'] == 9 + 1 + 2 * 4
    bench.close()


class Fickle(AdmitAll):
    """Lets everybody wait, and refuses who has waited for two judgements."""

    name = "fickle"
    late_refusals = True
    reasons = (("queue", "not_yet"), ("refuse", "deadline"))

    def __init__(self) -> None:
        self.asked = 0

    def judge(self, request: Request, view: View, now_ns: int) -> Judgement:
        self.asked += 1
        if self.asked > 3:
            return Judgement("refuse", "deadline", now_ns, -1, False, True, retry_after_s=7)
        return Judgement("queue", "not_yet", now_ns + 5, 4, True, False)


def test_where_admission_may_refuse_late_nobody_is_told_that_he_is_accepted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policies=Policies(admission=Fickle()))
    key = bench.new()
    assert bench.turn(2) == []
    (refused,) = bench.turn()
    assert (refused["op"], refused["retry"], refused["retry_after_s"]) == ("refused", True, 7)
    decisions = bench.records("decision")
    assert [(d["verdict"], d["reason"]) for d in decisions] == [("queue", "not_yet"), ("refuse", "deadline")]
    assert decisions[0]["feasible"] and not decisions[0]["resource_safe"] and decisions[0]["slack_ns"] == 4
    assert {d["policy"] for d in decisions} == {"fickle"} and decisions[0]["request_id"] == key
    bench.close()


def test_a_decision_says_how_much_work_its_prediction_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=1, policies=assemble(PolicyChoice(admission="deadline")).policies)
    first, second = bench.new(max_tokens=5), bench.new(prompt=7)
    bench.turn()
    decisions = {d["request_id"]: d for d in bench.records("decision")}
    names = ("predicted_start_steps", "predicted_steps", "predicted_prefill_tokens", "predicted_decode_tokens")
    assert [decisions[first][name] for name in names] == [0, 1, 3, 0]
    # There is no slot for it, so it was not judged.
    assert second in decisions and names[0] not in decisions[second]
    bench.close()


def test_every_verdict_that_admission_may_give_is_counted_from_the_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policies=assemble(PolicyChoice(admission="deadline")).policies)
    m = _samples(bench.metrics.render().decode())
    assert {name: count for name, count in m.items() if name.startswith("sloscope_engine_admissions_total")} == {
        f'sloscope_engine_admissions_total{{reason="{reason}",verdict="{verdict}"}}': 0
        for verdict, reasons in (
            ("admit", ["fits"]),
            ("queue", ["no_slot", "no_kv", "arrived", "behind", "kv_unsafe"]),
            ("refuse", ["context", "kv_never_fits", "queue_full", "deadline", "deadline_passed"]),
        )
        for reason in reasons
    }
    bench.close()


def test_a_decision_says_how_much_of_the_length_is_assumed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=1)
    bench.new(request_class="chat", max_tokens=9)
    bench.turn()
    # One of two such answers ended at 4 tokens; the other was cut off there, and may have gone on to the 9.
    rows = [{"cohort": "chat", "tokens": 4, "at_risk": 2, "events": 1, "censored": 1, "survival": 0.5}]
    bench.ledger._lengths = Lengths(LengthTable.parse(json.dumps(rows)))
    bench.new(request_class="chat", max_tokens=9)
    bench.new(request_class="poem", max_tokens=3)
    bench.turn()
    said = [(d.get("length_source"), d.get("length_unresolved")) for d in bench.records("decision")]
    # Of all answers of 3 tokens at most the table knows that they are longer.
    assert said == [(None, None), ("cohort", 0.5), ("pooled", 1.0)]
    bench.close()


def test_an_engine_says_once_what_it_is_and_what_was_measured(bench: Bench) -> None:
    ceilings = {"ceiling_flops_per_s": 5e10, "ceiling_kv_bytes_per_s": 2e9}
    bench.ledger.introduce(Identity("m", "float32", "cpu", 1, {"order": "fcfs"}, ceilings, None), 1, "host:x:y")
    (record,) = bench.records("engine")
    assert record["ceiling_flops_per_s"] == 5e10 and record["policies"] == {"order": "fcfs"}
    assert "service_gap_bound" not in record
    assert (record["kv_blocks"], record["block_tokens"], record["max_batch"]) == (64, 4, 2)
    m = _samples(bench.metrics.render().decode())
    assert m['sloscope_engine_ceiling_bytes_per_second{part="kv"}'] == 2e9
    assert not any('part="weights"' in name and "ceiling" in name for name in m)


def test_the_journal_is_counted(bench: Bench) -> None:
    bench.new(max_tokens=1)
    bench.turn()
    bench.tell({"op": "drain"})
    bench.turn()
    m = _samples(bench.metrics.render().decode())
    written = sum(len(bench.records(kind)) for kind in ("clock", "state", "decision", "step"))
    assert m['sloscope_journal_records_total{observer="engine"}'] == written
    assert m['sloscope_journal_dropped_total{observer="engine"}'] == 0
