"""The whole server: real processes, real sockets, the built-in model."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

from exporter.engine_metrics import read
from sloscope import catalogue
from sloscope.ids import is_request_id, new_request_id
from sloscope.journal import journal_files, writer_of
from tests.reference_server.serving import Conversation, Served
from tests.waiting import until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("serve"), "--allow-faults", "--max-batch", "4", "--goodput", "ttft:300")
    yield served
    assert served.stop() == 0


def texts(events: list[Any]) -> list[str]:
    return [event.text for event in events if event.text]


CHAT = [{"role": "user", "content": "which way does the river run"}]


def test_a_chat_streams_role_then_one_event_a_token_then_finish_usage_done(served: Served) -> None:
    conversation = served.stream(messages=CHAT, prompt=None, max_tokens=5, stream_options={"include_usage": True})
    head = conversation.read_head()
    assert head["status"] == "200" and head["content-type"].startswith("text/event-stream")
    assert head["x-accel-buffering"] == "no" and head["cache-control"] == "no-cache"
    bodies = [event.body for event in conversation.events()]
    assert bodies[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(body["choices"][0]["delta"]["content"] for body in bodies[1:6])
    assert bodies[6]["choices"][0]["finish_reason"] == "length"
    usage = bodies[7]["usage"]
    assert usage["completion_tokens"] == 5 and usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert bodies[8] == "[DONE]" and len(bodies) == 9
    assert all(body["usage"] is None for body in bodies[:7])


def test_the_engines_timings_come_in_the_last_chunk(served: Served) -> None:
    *_, finish, done = served.stream(max_tokens=4).whole()
    timings = finish.body["sloscope"]
    assert done.body == "[DONE]" and set(timings) == {"request_id", "queue_ms", "prefill_ms", "decode_ms", "ttft_ms"}
    assert 0 < timings["queue_ms"] + timings["prefill_ms"] <= timings["ttft_ms"]


def test_streamed_and_whole_answers_say_the_same(served: Served) -> None:
    asked = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
    whole = served.text(**asked).json()
    assert "".join(texts(served.stream(**asked).whole())) == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 12 and whole["sloscope"]["ttft_ms"] > 0


def test_the_openai_package_is_content(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["builtin"]
        whole = client.chat.completions.create(model="builtin", messages=CHAT, max_tokens=3)  # type: ignore[arg-type]
        assert whole.choices[0].message.content and whole.usage and whole.usage.completion_tokens == 3
        stream = client.chat.completions.create(
            model="builtin", messages=CHAT, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        chunks = list(stream)
        assert chunks[-1].usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="n: 3 is not accepted"):
            client.chat.completions.create(model="builtin", messages=CHAT, n=3)  # type: ignore[arg-type]


def test_stop_after_is_a_natural_stop_of_known_length(served: Served) -> None:
    *_, finish, _ = events = served.stream({"x-sloscope-stop-after": "6"}, max_tokens=50).whole()
    assert len(texts(events)) == 6 and finish.body["choices"][0]["finish_reason"] == "stop"
    *_, finish, _ = events = served.stream({"x-sloscope-stop-after": "50"}, max_tokens=6).whole()
    assert len(texts(events)) == 6 and finish.body["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_the_answer_before_it_and_frees_the_engine(served: Served) -> None:
    full = served.text(max_tokens=40, temperature=0).json()["choices"][0]["text"]
    words = full.split()
    stop = next(word for word in words[3:] if len(word) >= 3)
    cut = full[: full.index(stop)]
    *_, finish, _ = events = served.stream(max_tokens=40, temperature=0, stop=stop).whole()
    assert "".join(texts(events)) == cut and finish.body["choices"][0]["finish_reason"] == "stop"
    request_id = finish.body["sloscope"]["request_id"]
    assert served.wait_for_end(request_id)["outcome"] == "completed"
    states = until(lambda: [s for s in served.records("state", request_id) if s["to_state"] == "FINISHED"])
    assert states[0]["reason"] == "stop"


def test_every_event_is_stamped_computed_handed_written_before_its_receipt(served: Served) -> None:
    request_id = new_request_id()
    conversation = served.stream({"x-sloscope-request-id": request_id}, max_tokens=20)
    events = conversation.whole()
    end = served.wait_for_end(request_id)
    received = [event.at_ns for event in events if event.text]
    emit: dict[str, list[int]] = {}
    for record in served.records("emit", request_id):  # one or more batches, in order
        assert record["ordinal0"] == len(emit.get("computed_ns", []))
        for name in ("cum_tokens", "computed_ns", "handed_ns", "written_ns", "step_id"):
            emit[name] = emit.get(name, []) + record[name]
    assert emit["cum_tokens"] == list(range(1, 21))
    (begin,) = served.records("begin", request_id)
    assert conversation.sent_ns <= begin["arrived_ns"] <= begin["body_complete_ns"]
    stamps = zip(emit["computed_ns"], emit["handed_ns"], emit["written_ns"], received, strict=True)
    for computed, handed, written, receipt in stamps:
        # A receipt may overtake the stamp of the write that caused it, but not the hand-over.
        assert begin["arrived_ns"] < computed <= handed <= min(written, receipt)
    assert (end["outcome"], end["output_tokens"], end["finish_reason"]) == ("completed", 20, ["length"])
    steps = {r["step_id"]: r["end_ns"] for r in served.journal() if r["kind"] == "step"}
    assert [steps[step_id] for step_id in emit["step_id"]] == emit["computed_ns"]


def test_a_well_formed_unseen_id_is_believed_and_a_seen_one_is_not(served: Served) -> None:
    request_id = new_request_id()
    headers = {"x-sloscope-request-id": request_id, "x-request-id": "mine"}
    first, second = served.text(headers=headers), served.text(headers=headers)
    assert first.headers["x-sloscope-request-id"] == request_id
    other = second.headers["x-sloscope-request-id"]
    assert other != request_id and is_request_id(other)
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert served.records("begin", other)[0]["external_id"] == "mine"
    assert is_request_id(served.text(headers={"x-sloscope-request-id": "nonsense"}).headers["x-sloscope-request-id"])


def test_limits_of_a_request_are_resolved_with_the_contract(served: Served) -> None:
    response = served.text(headers={"x-slo-itl-max-ms": "40", "x-slo-tenant": "blue"})
    (begin,) = served.records("begin", response.headers["x-sloscope-request-id"])
    assert (begin["class"], begin["tenant"]) == ("default", "blue")
    assert begin["limits"] == {"ttft_ns": 300_000_000, "itl_max_ns": 40_000_000, "min_tokens": 1}
    assert begin["own_limits"] == {"itl_max_ns": 40_000_000}


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({}, {"n": 2}, 400, "n: 2 is not accepted; accepted: 1"),
        ({}, {"model": "gpt-5"}, 404, "model: 'gpt-5' is not served here; accepted: builtin"),
        ({}, {"max_tokens": 9000}, 400, "prompt 4 + max_tokens 9000 = 9004 tokens; accepted: at most 8192 together"),
        ({}, {"prompt": [5, 100000]}, 400, "prompt: a token id is out of range; accepted: 0 to "),
        ({"x-slo-class": "gold"}, {}, 400, "x-slo-class: 'gold' is unknown; accepted: default"),
        ({"x-slo-ttft-ms": "fast"}, {}, 400, "x-slo-ttft-ms: 'fast' is not accepted"),
        ({"x-sloscope-stop-after": "0"}, {}, 400, "x-sloscope-stop-after: '0' is not accepted"),
        ({"x-sloscope-stop-after": "9" * 5000}, {}, 400, "x-sloscope-stop-after: '9999"),
        ({"x-sloscope-fault": "boom"}, {}, 400, "x-sloscope-fault: 'boom' is not accepted"),
    ],
)
def test_what_is_refused_is_offered_and_failed(
    served: Served, headers: dict[str, str], body: dict[str, Any], status: int, message: str
) -> None:
    response = served.text(headers=headers, **body)
    assert response.status_code == status and message in response.json()["error"]["message"]
    end = served.wait_for_end(response.headers["x-sloscope-request-id"])
    assert (end["outcome"], end["reason"], end["http_status"]) == ("failed", "http_error", status)
    (begin,) = served.records("begin", end["request_id"])
    assert begin["class"] == ("_unknown" if "x-slo-class" in headers else "default")


def test_a_client_that_leaves_is_noticed_at_once_and_its_kv_is_freed(served: Served) -> None:
    request_id = new_request_id()
    conversation = served.stream({"x-sloscope-request-id": request_id}, max_tokens=5000)
    conversation.read_head()
    events = conversation.events()
    for _ in range(10):
        next(events)
    left_ns = time.monotonic_ns()
    conversation.close()
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"]) == ("cancelled", "disconnect")
    assert 10 <= end["output_tokens"] < 5000
    late: dict[str, int] = {}
    for record in until(lambda: len(r := served.records("late", request_id)) == 2 and r):
        late |= record
    closed, seen, freed = late["socket_closed_ns"], late["abort_seen_ns"], late["kv_freed_ns"]
    assert left_ns < closed < seen < freed
    ran = [r for r in served.journal() if r["kind"] == "step" and request_id in r["decode_ids"]]
    assert ran and not any(step["start_ns"] > seen for step in ran), "no step ran for it after the abort was seen"
    states = served.records("state", request_id)
    assert (states[-1]["to_state"], states[-1]["reason"]) == ("CANCELLED", "disconnect")


def test_a_client_that_leaves_without_streaming_is_noticed_too(served: Served) -> None:
    request_id = new_request_id()
    conversation = served.stream({"x-sloscope-request-id": request_id}, max_tokens=5000, stream=False)
    until(lambda: served.records("begin", request_id))
    time.sleep(0.05)
    conversation.close()
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"], end["output_tokens"]) == ("cancelled", "disconnect", 0)
    assert until(lambda: [s for s in served.records("state", request_id) if s["to_state"] == "CANCELLED"])


def test_after_five_cancels_everything_is_accounted_for(served: Served) -> None:
    cleaned = "sloscope_engine_cancel_cleanup_seconds_count"

    def freed() -> int:
        """Requests whose KV was given back after an abort, as recorded and as counted."""
        recorded = sum("kv_freed_ns" in record for record in served.journal() if record["kind"] == "late")
        return recorded if recorded == served.metrics()[cleaned] else -1

    until(lambda: freed() >= 0)
    before, freed_before = served.metrics(), freed()
    conversations = [served.stream(max_tokens=5000) for _ in range(5)]  # 4 run, 1 waits
    for conversation in conversations[:4]:
        conversation.read_head()
        next(conversation.events())
    for conversation in reversed(conversations):  # who waits goes first
        conversation.close()
    ended = 'sloscope_engine_requests_ended_total{outcome="cancelled"}'
    until(lambda: served.metrics()[ended] == before[ended] + 5)
    # The four that ran held KV; who waited may have got a place before its own end was seen.
    until(lambda: freed() >= freed_before + 4)
    assert freed() <= freed_before + 5
    after = served.metrics()
    for name in after:
        if name.startswith(("sloscope_engine_kv_blocks", "sloscope_engine_requests{", "sloscope_engine_undelivered")):
            assert after[name] == before[name], name


def test_who_was_offered_has_ended_or_is_alive(served: Served) -> None:
    def offered_and_ended() -> tuple[float, float]:
        m = served.metrics()
        ended = sum(n for key, n in m.items() if key.startswith("sloscope_engine_requests_ended_total{"))
        assert m["sloscope_engine_requests_offered_total"] == ended + m["sloscope_engine_inflight_requests"]
        return m["sloscope_engine_requests_offered_total"], ended

    def alive() -> float:
        offered, ended = offered_and_ended()
        return offered - ended

    until(lambda: alive() == 0)
    before, _ = offered_and_ended()
    conversations = [served.stream(max_tokens=5000) for _ in range(5)]  # 4 run, 1 waits
    for conversation in conversations:
        conversation.read_head()
    assert served.text(max_tokens=0).status_code == 400
    until(lambda: offered_and_ended() == (before + 6, before + 1))
    for conversation in conversations:
        conversation.close()
    until(lambda: offered_and_ended() == (before + 6, before + 6))


def test_its_metrics_say_which_model_it_serves_and_a_sidecar_reads_it(served: Served) -> None:
    (listed,) = httpx.get(f"{served.url}/v1/models", timeout=10).json()["data"]
    assert served.metrics()[f'sloscope_engine_info{{model="{listed["id"]}"}}'] == 1
    served.text(max_tokens=1)
    reading = read(httpx.get(f"{served.url}/metrics", timeout=10).text, lambda _, value: value)
    assert {labels[:2] for _, labels in (*reading.values, *reading.histograms)} == {("sloscope", listed["id"])}


def test_a_request_runs_on_untouched_while_others_leave(served: Served) -> None:
    asked = {"max_tokens": 400, "seed": 3}
    alone = texts(served.stream(**asked).whole())
    stays = served.stream(**asked)
    for _ in range(10):
        leaves = served.stream(max_tokens=5000)
        leaves.read_head()
        next(leaves.events())
        leaves.close()
    *_, finish, done = events = stays.whole()
    assert done.body == "[DONE]" and finish.body["choices"][0]["finish_reason"] == "length"
    assert len(texts(events)) == len(alone) == 400


def test_a_stall_asked_for_shows_in_the_gap_and_in_the_step(served: Served) -> None:
    request_id = new_request_id()
    headers = {"x-sloscope-request-id": request_id, "x-sloscope-fault": "stall=150ms@5"}
    events = [event for event in served.stream(headers, max_tokens=8).whole() if event.text]
    gaps = [b.at_ns - a.at_ns for a, b in pairwise(events)]
    assert gaps[3] >= 150_000_000  # before the fifth token
    served.wait_for_end(request_id)
    faults = until(
        lambda: [
            r["fault"]
            for r in served.journal()
            if r["kind"] == "step" and request_id in r["decode_ids"] and "fault" in r
        ]
    )
    assert faults == ["stall=150ms@5"]


def test_an_error_asked_for_comes_in_the_stream_and_is_a_failure(served: Served) -> None:
    request_id = new_request_id()
    headers = {"x-sloscope-request-id": request_id, "x-sloscope-fault": "error@3"}
    events = served.stream(headers, max_tokens=8).whole()
    assert len(texts(events)) == 3 and "error after 3 tokens" in events[-1].body["error"]["message"]
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"], end["output_tokens"]) == ("failed", "in_band_error", 3)


def test_a_stall_can_be_asked_over_http(served: Served) -> None:
    assert httpx.post(f"{served.url}/faults", json={"stall_ms": 120}).status_code == 200
    started_ns = time.monotonic_ns()
    assert served.text(max_tokens=1).status_code == 200
    assert time.monotonic_ns() - started_ns >= 120_000_000


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"stall_ms": -1}, "stall_ms: -1 is not accepted"),
        ({"decoding": True}, "stall_ms: None is not accepted"),
        ({"stall_ms": 1, "decoding": 1}, "decoding: 1 is not accepted"),
        ({"stall_ms": 1, "pause": 1}, "is not accepted"),
        ([1], "body: [1] is not accepted"),
    ],
)
def test_a_stall_that_cannot_be_is_refused(served: Served, body: object, line: str) -> None:
    refused = httpx.post(f"{served.url}/faults", json=body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert line in message and 'accepted: {"stall_ms"' in message


def test_a_stall_of_the_decoder_over_http_is_in_a_gap_between_two_tokens(served: Served) -> None:
    assert httpx.post(f"{served.url}/faults", json={"stall_ms": 500, "decoding": True}).status_code == 200
    started_ns = time.monotonic_ns()
    events = served.stream(max_tokens=3).whole()
    assert texts(events) and time.monotonic_ns() - started_ns >= 500_000_000
    gaps = [later.at_ns - earlier.at_ns for earlier, later in pairwise(event for event in events if event.text)]
    assert max(gaps) >= 100_000_000  # the receipt before the stall may be late


def test_every_engine_metric_is_there_from_the_start_and_no_receipt_name(served: Served) -> None:
    text = httpx.get(f"{served.url}/metrics").text
    for metric in catalogue.exposed_by("server"):
        suffix = "_count" if metric.kind == "histogram" else ""
        assert metric.optional or f"\n{metric.name}{suffix}" in text, metric.name
    assert "sloscope_client_" not in text and "sloscope_sidecar_" not in text


def test_the_journal_counters_are_those_of_both_processes(served: Served) -> None:
    assert served.text().status_code == 200
    name = 'sloscope_journal_records_total{observer="engine"}'
    assert {path.parent.name for path in journal_files(served.events)} == {"engine"}
    assert len({writer_of(path) for path in journal_files(served.events)}) == 2, "front end and engine write one each"
    until(lambda: served.metrics()[name] == len(served.journal()))
    assert served.metrics()['sloscope_journal_dropped_total{observer="engine"}'] == 0
    assert 0 <= served.metrics()['sloscope_journal_lag_seconds{observer="engine"}'] < 10


def test_a_body_beyond_the_limit_is_refused(served: Served) -> None:
    response = httpx.post(f"{served.url}/v1/completions", content=b"x" * (1 << 20), timeout=30)
    assert response.status_code == 413 and "accepted: at most" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("begun", "line"),
    [
        (b"GET /", b"x" * 1000),
        (b"GET /health HTTP/1.1\r\n", b"x-many: " + b"y" * 1000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nx-long: ", b"y" * 1000),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ", b"y" * 1000),
    ],
    ids=["path", "headers", "header", "trailer"],
)
def test_a_head_without_end_is_refused_and_not_kept(served: Served, begun: bytes, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(begun)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 10_000_000:
                client.sendall(line)
                sent += len(line)
        # Beyond the limit there is what lay in the kernels' buffers when the connection was closed.
        assert 1 << 16 <= sent < 9_000_000
    assert served.text().status_code == 200


def test_a_prompt_that_must_be_too_long_is_refused_without_being_encoded(served: Served) -> None:
    # No token of the built-in vocabulary has as many as 16 characters, and 8192 tokens fit.
    response = served.text(prompt="ha " * (16 * 8192 // 3))
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert "more than 8192 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"max_tokens": 9000}, {"prompt": "ha " * (16 * 8192 // 3)}])
def test_what_can_never_fit_the_context_is_a_decision_of_admission(served: Served, body: dict[str, Any]) -> None:
    name = 'sloscope_engine_admissions_total{reason="context",verdict="refuse"}'
    before = served.metrics()[name]
    response = served.text(**body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    request_id = response.headers["x-sloscope-request-id"]
    served.wait_for_end(request_id)
    (decision,) = served.records("decision", request_id)
    assert (decision["verdict"], decision["reason"]) == ("refuse", "context")
    assert served.metrics()[name] == before + 1


def test_unknown_paths_answer_in_the_form_of_the_api(served: Served) -> None:
    response = httpx.get(f"{served.url}/v1/nothing")
    assert response.status_code == 404 and "/v1/nothing" in response.json()["error"]["message"]
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}


def test_a_reader_that_never_reads_is_cut_off_alone(tmp_path: Path) -> None:
    served = Served(tmp_path, "--max-undelivered", "100", "--slow-reader-after", "500ms", "--send-buffer", "4096")
    request_id = new_request_id()
    body = {"model": "builtin", "prompt": "the river", "max_tokens": 8000, "stream": True}
    slow = Conversation(served.port, body, {"x-sloscope-request-id": request_id}, receive_buffer=2048)
    reader = served.stream(max_tokens=300)
    assert len(texts(reader.whole())) == 300
    # Nor is an answer that is sent as a whole: it waits for its end, not for its reader.
    assert served.text(max_tokens=300).json()["usage"]["completion_tokens"] == 300
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"]) == ("cancelled", "slow_reader")
    assert end["output_tokens"] < 8000 - 100
    slow.close()
    assert served.stop() == 0


def test_whatever_clients_do_every_request_ends_once_and_the_books_balance(tmp_path: Path) -> None:
    """24 clients on 4 slots of a small pool: some read to the end, some leave early, some while they wait."""
    served = Served(tmp_path, "--max-batch", "4", "--kv-blocks", "24", "--prefill-tokens", "16")
    seed = 20261129
    random = Random(seed)

    def one(i: int) -> None:
        prompt = list(range(100, 101 + random.randrange(60)))
        asked = {"prompt": prompt, "max_tokens": random.randrange(1, 60), "stream": i % 5 != 0}
        conversation = served.stream({"connection": "close"}, **asked)
        leave_after = random.choice([None, None, 0, 1, 15])
        if leave_after == 0:
            time.sleep(random.random() / 10)
        else:
            conversation.read_head()
            for n, _ in enumerate(conversation.events()):
                if n == leave_after:
                    break
        conversation.close()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(24)))
    quiet = 'sloscope_engine_kv_blocks{kind="free"}'
    until(lambda: served.metrics()[quiet] == 24)
    metrics = served.metrics()
    assert served.stop() == 0
    journal = served.journal()
    begun = [r["request_id"] for r in journal if r["kind"] == "begin"]
    ended = [r["request_id"] for r in journal if r["kind"] == "end"]
    assert len(set(begun)) == 24 and sorted(begun) == sorted(ended), f"seed {seed}"
    states = [r for r in journal if r["kind"] == "state"]
    arrived = [r["request_id"] for r in states if r["to_state"] == "WAITING"]
    final = [r["request_id"] for r in states if r["to_state"] in ("FINISHED", "CANCELLED")]
    assert sorted(arrived) == sorted(final) and len(set(arrived)) == len(arrived)
    steps = [r for r in journal if r["kind"] == "step"]
    assert all(r["kv_blocks_resident"] + r["kv_blocks_reserved"] + r["kv_blocks_free"] == 24 for r in steps)
    assert all(len(r["prefill_ids"]) + len(r["decode_ids"]) <= 4 for r in steps)
    started = {r["request_id"] for r in states if r["to_state"] == "PREFILL"}
    assert metrics['sloscope_engine_admissions_total{reason="fits",verdict="admit"}'] == len(started)
    outcomes = {r["request_id"]: r["outcome"] for r in journal if r["kind"] == "end"}
    for outcome in ("completed", "cancelled"):
        assert metrics[f'sloscope_engine_requests_ended_total{{outcome="{outcome}"}}'] == sum(
            value == outcome for value in outcomes.values()
        )
    assert set(outcomes.values()) == {"completed", "cancelled"}


def test_an_answer_length_that_was_not_asked_for_is_never_the_reason_of_a_refusal(tmp_path: Path) -> None:
    served = Served(tmp_path, "--kv-blocks", "2")  # 64 tokens, where the default would be 256
    answer = served.post(prompt=list(range(100, 110))).json()
    assert answer["usage"]["completion_tokens"] == 64 - 10
    refused = served.post(prompt=list(range(100, 110)), max_tokens=55)
    assert refused.status_code == 400
    # 10 + 55 = 65 tokens: 3 blocks of 32
    assert "65 tokens need 3 KV blocks; accepted: at most 2" in refused.json()["error"]["message"]
    states = until(lambda: [r for r in served.journal() if r["kind"] == "state" and r["to_state"] == "REJECTED"])
    assert [state["reason"] for state in states] == ["kv_never_fits"]
    assert served.stop() == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """No contract, no faults; a fair order, one request at a time, and one may wait."""
    served = Served(
        tmp_path_factory.mktemp("plain"),
        "--max-batch",
        "1",
        "--max-waiting",
        "1",
        "--prefill-tokens",
        "8",
        "--order",
        "vtc",
    )
    yield served
    assert served.stop() == 0


def test_a_full_queue_answers_429_with_retry_after(plain: Served) -> None:
    running = plain.stream(max_tokens=8000)
    running.read_head()
    next(running.events())
    waiting = plain.stream(max_tokens=5)
    until(lambda: plain.metrics()['sloscope_engine_requests{state="WAITING"}'] == 1)
    refused = plain.text()
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert "1 requests wait; accepted: at most 1" in refused.json()["error"]["message"]
    end = plain.wait_for_end(refused.headers["x-sloscope-request-id"])
    assert (end["outcome"], end["reason"]) == ("failed", "rejected")
    running.close()
    assert len(texts(waiting.whole())) == 5


def test_an_engine_of_a_fair_order_says_how_far_it_lets_tenants_drift_apart(plain: Served) -> None:
    plain.text()  # an engine writes what it has to say at a boundary
    (engine,) = until(lambda: [record for record in plain.journal() if record["kind"] == "engine"])
    # Twice the pool at 2 units an output token: whole promises never hold more.
    assert engine["service_gap_bound"] == 2 * 2 * engine["kv_blocks"] * engine["block_tokens"]


def test_without_a_contract_no_class_is_unknown(plain: Served) -> None:
    response = plain.text(headers={"x-slo-class": "gold", "x-slo-ttft-ms": "200"})
    (begin,) = plain.records("begin", response.headers["x-sloscope-request-id"])
    assert begin["class"] == "gold" and "contract_hash" not in begin
    assert begin["own_limits"] == {"ttft_ns": 200_000_000}


def test_faults_are_refused_unless_allowed(plain: Served) -> None:
    response = plain.text(headers={"x-sloscope-fault": "slow=1ms"})
    assert response.status_code == 400 and "faults are off" in response.json()["error"]["message"]
    assert httpx.post(f"{plain.url}/faults", json={"stall_ms": 1}).status_code == 403


def test_a_long_prompt_is_run_in_pieces(plain: Served) -> None:
    request_id = new_request_id()
    plain.text(headers={"x-sloscope-request-id": request_id}, prompt=list(range(100, 120)), max_tokens=2)
    plain.wait_for_end(request_id)
    steps = until(lambda: [r for r in plain.journal() if r["kind"] == "step" and request_id in r["decode_ids"]])
    assert len(steps) == 1
    pieces = [r["prefill_tokens"] for r in plain.journal() if r["kind"] == "step" and request_id in r["prefill_ids"]]
    assert pieces == [8, 8, 4]


def test_a_retry_names_what_it_retries(plain: Served) -> None:
    first = new_request_id()
    headers = {"x-sloscope-retry-of": first, "x-stainless-retry-count": "2"}
    response = plain.text(headers=headers)
    (begin,) = plain.records("begin", response.headers["x-sloscope-request-id"])
    assert begin["retry_of"] == first and begin["labels"] == {"retry_count": 2}


@pytest.mark.parametrize("count", ["0", "x", "²", "-1", "9" * 20, "9" * 5000])
def test_a_retry_count_that_is_none_is_left_out(plain: Served, count: str) -> None:
    response = plain.text(headers={"x-stainless-retry-count": count.encode("latin-1")})
    assert response.status_code == 200
    (begin,) = plain.records("begin", response.headers["x-sloscope-request-id"])
    assert begin.get("labels") is None
