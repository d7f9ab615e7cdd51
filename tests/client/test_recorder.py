"""The recorder on a clock that moves when told to: batches, ends, token counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from sloscope import contract as contracts
from sloscope.client.contract_file import keep, to_toml
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipts import receipt
from sloscope.client.recorder import RequestRecorder
from sloscope.clock import FakeClock
from sloscope.errors import ContractError
from sloscope.ids import new_request_id
from sloscope.journal import is_journal_name
from sloscope.lag_peaks import LagPeaks
from tests.client.conftest import Records
from tests.client.sse_server import base, chunk

MS = 1_000_000
Recorded = Callable[[Path], Records]
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}


def event(obj: object) -> bytes:
    return b"data: " + orjson.dumps(obj) + b"\n\n"


TEXT = event(chunk({"content": "x"}))
THOUGHT = event(chunk({"reasoning_content": "x"}))
STOP = event(chunk({}, finish_reason="stop"))
DONE = b"data: [DONE]\n\n"


def started(log: ReceiptLog, send_ns: int = 0, streaming: bool = True, n_choices: int = 1) -> RequestRecorder:
    recorder = log.open(new_request_id(), send_ns, streaming=streaming, n_choices=n_choices)
    recorder.response(200, SSE)
    return recorder


def test_gaps_plus_ttft_is_last_receipt_minus_send() -> None:
    recorder = started(ReceiptLog(None, FakeClock()), send_ns=5 * MS)
    for at in (105, 120, 190, 200):
        recorder.receive(at * MS, TEXT)
    recorder.receive(201 * MS, STOP + DONE)
    recorder.end(202 * MS)
    summary = recorder.summary()
    gaps = [after - before for before, after in zip(recorder.t_ns, recorder.t_ns[1:], strict=False)]
    assert len(gaps) == 3  # four events
    assert summary.ttft_ns == 100 * MS and sum(gaps) + summary.ttft_ns == 195 * MS == summary.e2e_ns
    assert summary.itl_max_ns == 70 * MS  # 190 − 120


def test_reasoning_stops_ttft_and_not_visible_ttft() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, THOUGHT)
    recorder.receive(90 * MS, TEXT + STOP + DONE)
    recorder.end(91 * MS)
    summary = recorder.summary()
    assert (summary.ttft_ns, summary.ttft_visible_ns) == (10 * MS, 90 * MS)
    only_thoughts = started(ReceiptLog(None, FakeClock()))
    only_thoughts.receive(10 * MS, THOUGHT + STOP + DONE)
    only_thoughts.end(11 * MS)
    assert (only_thoughts.summary().ttft_ns, only_thoughts.summary().ttft_visible_ns) == (10 * MS, None)


def test_an_event_split_over_reads_is_received_with_its_last_byte() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    for index in range(len(TEXT)):
        recorder.receive(index * MS, TEXT[index : index + 1])
    assert recorder.t_ns.tolist() == [(len(TEXT) - 1) * MS]


def test_an_event_that_only_the_end_completes_was_received_with_its_last_read() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, TEXT)
    recorder.receive(20 * MS, event(chunk({"content": "x"}, finish_reason="stop")).rstrip())
    recorder.end(500 * MS)
    assert recorder.t_ns.tolist() == [10 * MS, 20 * MS]
    assert recorder.ended is not None and recorder.ended.outcome == "completed"


def test_after_done_the_end_is_the_read_that_brought_it() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, TEXT + STOP + DONE)
    recorder.end(900 * MS, left="disconnect")
    assert recorder.end_ns == 10 * MS
    assert recorder.ended == ("completed", "")


def test_the_first_end_decides() -> None:
    ended: list[RequestRecorder] = []
    recorder = started(ReceiptLog(None, FakeClock(), on_end=ended.append))
    recorder.receive(10 * MS, TEXT)
    recorder.end(20 * MS, left="voluntary")
    recorder.end(30 * MS, transport="reset")
    assert recorder.ended == ("cancelled", "voluntary") and recorder.end_ns == 20 * MS
    assert ended == [recorder]


def test_final_usage_is_preferred_to_counted_events_and_to_a_retokenized_sum() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, TEXT * 3 + STOP)
    recorder.receive(11 * MS, event(base() | {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 12}}))
    recorder.receive(12 * MS, DONE)
    recorder.end(13 * MS)
    assert (recorder.output_tokens, recorder.token_source, recorder.prompt_tokens) == (12, "usage", 4)
    assert recorder.event_tokens is None  # 12 tokens in 3 events: how many in which is not known


def test_usage_on_the_finish_event_is_final() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, TEXT)
    recorder.receive(11 * MS, event(chunk({}, finish_reason="stop", usage={"completion_tokens": 5})))
    recorder.end(12 * MS)
    assert (recorder.output_tokens, recorder.token_source) == (5, "usage")


def test_a_cut_stream_with_continuous_usage_keeps_the_tokens_it_stated() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    for total in (2, 5):
        recorder.receive(total * MS, event(chunk({"content": "x"}, usage={"completion_tokens": total})))
    recorder.end(20 * MS, transport="reset")
    assert (recorder.output_tokens, recorder.token_source) == (5, "continuous_usage")
    assert recorder.event_tokens == [2, 3]
    assert recorder.ended == ("failed", "upstream_reset")


def test_an_empty_answer_failed_and_has_no_ttft() -> None:
    recorder = started(ReceiptLog(None, FakeClock()))
    recorder.receive(10 * MS, STOP + DONE)
    recorder.end(11 * MS)
    assert recorder.ended == ("failed", "empty_stream")
    assert recorder.summary().ttft_ns is None


def test_a_json_answer_to_a_request_for_a_stream_has_no_ttft_and_its_e2e_is_its_end() -> None:
    log = ReceiptLog(None, FakeClock())
    recorder = log.open(new_request_id(), 0, streaming=True)
    recorder.response(200, JSON)
    body = orjson.dumps({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]})
    recorder.receive(40 * MS, body[:20])
    recorder.receive(50 * MS, body[20:])
    recorder.end(51 * MS)
    assert recorder.ended == ("completed", "") and not recorder.streamed
    assert (recorder.summary().ttft_ns, recorder.summary().e2e_ns) == (None, 51 * MS)


def test_a_whole_answer_with_output_is_complete_without_a_finish_reason() -> None:
    recorder = ReceiptLog(None, FakeClock()).open(new_request_id(), 0, streaming=False)
    recorder.response(200, JSON)
    recorder.receive(1 * MS, b'{"choices": [{"message": {"content": "x"}}]}')
    assert recorder.end(2 * MS) == ("completed", "")
    # Nobody counted its tokens, and a whole answer is no event.
    assert (recorder.output_tokens, recorder.token_source, recorder.summary().tokens) == (None, None, None)


def test_an_error_in_a_200_body_is_in_band() -> None:
    recorder = ReceiptLog(None, FakeClock()).open(new_request_id(), 0, streaming=False)
    recorder.response(200, JSON)
    recorder.receive(1 * MS, b'{"error": {"message": "m", "type": "overloaded"}}')
    assert recorder.end(2 * MS) == ("failed", "in_band_error")


@pytest.mark.parametrize(("transport", "ended"), [("eof", ("completed", "")), ("reset", ("failed", "upstream_reset"))])
def test_a_body_in_an_unknown_encoding_ends_as_http_says_and_its_tokens_are_unknown(
    transport: str, ended: tuple[str, str]
) -> None:
    recorder = ReceiptLog(None, FakeClock()).open(new_request_id(), 0, streaming=True)
    recorder.response(200, SSE | {"content-encoding": "br"})
    recorder.receive(1 * MS, b"\x0b\x02\x80")
    assert recorder.end(2 * MS, transport) == ended
    assert (recorder.output_tokens, recorder.token_source, recorder.summary().ttft_ns) == (None, None, None)


def test_a_broken_gzip_body_is_a_bad_stream() -> None:
    recorder = ReceiptLog(None, FakeClock()).open(new_request_id(), 0, streaming=True)
    recorder.response(200, SSE | {"content-encoding": "gzip"})
    recorder.receive(1 * MS, b"this is not gzip")
    assert recorder.end(2 * MS) == ("failed", "bad_stream")


def test_receipts_are_written_in_batches_within_a_second_and_none_twice(tmp_path: Path, recorded: Recorded) -> None:
    clock = FakeClock()
    log = ReceiptLog(tmp_path, clock)
    recorder = started(log)
    for at in range(0, 1000, 100):
        recorder.receive(at * MS, TEXT)
        log.tick(at * MS)
    # The first receipt is at 0 and due at 400 ms with the four after it; the next is at 500 and due at 900.
    assert [(batch["ordinal0"], len(batch["t_ns"])) for batch in recorded(tmp_path)["chunks"]] == [(0, 5), (5, 5)]
    recorder.receive(1000 * MS, STOP + DONE)
    recorder.end(1001 * MS)
    log.close()
    records = recorded(tmp_path)
    assert [(batch["ordinal0"], len(batch["t_ns"])) for batch in records["chunks"]] == [(0, 5), (5, 5)]
    assert [t for batch in records["chunks"] for t in batch["t_ns"]] == [at * MS for at in range(0, 1000, 100)]


def test_two_thousand_streams_that_began_together_are_written_within_a_second(
    tmp_path: Path, recorded: Recorded
) -> None:
    log = ReceiptLog(tmp_path, FakeClock())
    for recorder in [started(log) for _ in range(2000)]:
        recorder.receive(0, TEXT)
    most, now = [], 0
    while log.waiting:
        now += 20 * MS
        before = log.waiting
        log.tick(now, max(64, log.waiting // 16))  # as the replay does
        most.append(before - log.waiting)
    assert now <= 1000 * MS and max(most) == 125  # 2,000 / 16
    log.close()
    assert len(recorded(tmp_path)["chunks"]) == 2000


def test_a_begin_is_on_disk_before_open_returns(tmp_path: Path, recorded: Recorded) -> None:
    log = ReceiptLog(tmp_path, FakeClock())
    log.open(new_request_id(), 7, streaming=True, intended_ns=3, labels={"warmup": True})
    (begin,) = recorded(tmp_path)["begin"]
    assert (begin["send_ns"], begin["intended_ns"], begin["labels"]) == (7, 3, {"warmup": True})
    log.close()


def test_an_open_request_keeps_its_receipts_and_gets_no_end(tmp_path: Path, recorded: Recorded) -> None:
    log = ReceiptLog(tmp_path, FakeClock())
    recorder = started(log)
    recorder.receive(10 * MS, TEXT)
    log.close()
    records = recorded(tmp_path)
    assert records["end"] == [] and records["chunks"][0]["t_ns"] == [10 * MS]


def test_a_posted_receipt_says_where_it_is_recorded_and_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path, FakeClock(mono_ns=7), lag_since=lambda since: 4 * MS)
    recorder = started(log, send_ns=1)
    recorder.receive(10 * MS, TEXT + STOP + DONE)
    recorder.end(11 * MS)
    entry = receipt(recorder, log)
    assert entry["recorded"] is True and entry["loop_lag_max_ns"] == 4 * MS
    (journal,) = (tmp_path / "journal" / "client").iterdir()
    assert entry["journal"] == journal.name and is_journal_name(journal.name)
    assert (entry["clock_id"], entry["anchor"]["mono_ns"]) == ("fake:0:0", 7)
    assert (entry["t_ns"], entry["choice"], entry["type"]) == ([10 * MS], [0], [0])
    assert (entry["outcome"], entry["finish_reason"], entry["output_tokens"]) == ("completed", ["stop"], 1)
    assert {"tokens", "tenant", "intended_ns", "consumer_hold_ns"}.isdisjoint(entry)
    assert {"recorded", "journal"}.isdisjoint(receipt(recorder, ReceiptLog(None, FakeClock())))


def test_loop_lag_since_a_stamp_is_the_largest_overrun_after_it() -> None:
    peaks = LagPeaks()
    for at, lag in [(100, 5), (200, 90), (210, 2), (250, 30), (260, 7)]:
        peaks.note(at, lag)
    assert [peaks.since(t) for t in (0, 110, 201, 220, 251, 261)] == [90, 90, 30, 30, 7, 0]
    # Of the 90 that ended at 200, a request sent at 180 can have met 20, and met 30 later.
    assert [peaks.since(t) for t in (150, 180, 245)] == [50, 30, 7]


CONTRACT_TOML = """
version = 1
observer = "sidecar"
default_class = "chat"
[classes.chat]
ttft = "300ms"
tpot = "1500us"
objective = 0.95
[classes."bulk 2"]
e2e = "1m"
min_tokens = 3
streaming = "optional"
[window]
rule = "unfinished"
grace = "2s"
[cancellation]
voluntary = "excluded"
[budget]
queue = "60ms"
[workload]
prompt_tokens = { p50 = 512, p90 = 2048, p99 = 8192 }
"""


@pytest.mark.parametrize(
    "contract",
    [
        contracts.parse(CONTRACT_TOML),
        contracts.from_shorthand("ttft:300 itl_max:30.5"),
        contracts.preset("exercise"),
        contracts.preset("voice"),
        contracts.preset("background"),
    ],
)
def test_a_contract_spelt_out_as_toml_has_the_same_hash(contract: contracts.Contract) -> None:
    assert contracts.parse(to_toml(contract)).hash == contract.hash


def test_the_contract_is_kept_beside_the_events_and_another_one_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "mine.toml"
    source.write_text(CONTRACT_TOML)
    events = tmp_path / "events"
    kept = keep(contracts.load(source), source, events)
    assert kept.read_text() == CONTRACT_TOML  # comments and all
    keep(contracts.load(source), source, events)
    with pytest.raises(ContractError, match="another --events directory"):
        keep(contracts.from_shorthand("ttft:300"), None, events)
    assert kept.read_text() == CONTRACT_TOML
