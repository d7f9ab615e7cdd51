"""The transports under the real openai package and plain httpx, against a real server on loopback."""

from __future__ import annotations

import asyncio
import gc
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from sloscope.client import ReceiptTransport, stop_reason
from sloscope.ids import is_request_id
from tests.client.conftest import Records
from tests.client.sse_server import Asked, Reply, Script, SseServer, base, chunk, tokens
from tests.client.transport_use import CONTRACT, MS, Reads, Recorded, held_back, only
from tests.waiting import until

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "secret prompt"}]}


def sync_client(server: SseServer, transport: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="k", base_url=f"{server.url}/v1", http_client=httpx.Client(transport=transport), **options
    )


def async_client(server: SseServer, transport: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="k", base_url=f"{server.url}/v1", http_client=httpx.AsyncClient(transport=transport), **options
    )


def run_sync(script: Script, events: Path, use: Callable[[openai.OpenAI], Any], **options: Any) -> SseServer:
    with SseServer(script) as server:
        transport = ReceiptTransport(events, CONTRACT)
        with sync_client(server, transport, **options) as client:
            use(client)
        assert transport.observer_errors == 0, transport.last_error
    return server


def stamps(records: Records) -> list[int]:
    return [t for batch in records["chunks"] for t in batch["t_ns"]]


def test_three_lines_of_user_code_record_a_chat_stream(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for number in range(1, 5):
            await reply.text()
            await reads.reach(number)
        await reply.finish(usage=4)

    def use(client: openai.OpenAI) -> None:
        text = [
            piece.choices[0].delta.content
            for piece in client.chat.completions.create(**CHAT, stream=True, max_tokens=50)
            if piece.choices
        ]
        assert [part for part in text if part] == ["tok"] * 4

    server = run_sync(script, tmp_path, use)
    records = recorded(tmp_path)
    begin, end = only(records, "begin"), only(records, "end")
    assert (begin["observer"], begin["role"], begin["streaming"], begin["class"]) == (
        "client",
        "client",
        True,
        "default",
    )
    assert (begin["model"], begin["max_tokens"], begin["path"]) == ("tiny", 50, "/v1/chat/completions")
    assert begin["limits"] == {"ttft_ns": 300 * MS, "itl_max_ns": 30 * MS, "min_tokens": 1}
    assert begin["contract_hash"] == CONTRACT.hash
    assert server.asked[0].headers["x-sloscope-request-id"] == begin["request_id"]
    assert (end["outcome"], end["reason"], end["finish_reason"], end["http_status"]) == ("completed", "", ["stop"], 200)
    assert (end["output_tokens"], end["token_source"], end["prompt_tokens"]) == (4, "usage", 7)
    received = stamps(records)
    written = server.replies[0].written_ns  # the first four events carry text
    assert len(received) == 4
    for number, at in enumerate(received):
        assert written[number] <= at <= written[number + 1]
    assert begin["send_ns"] < server.asked[0].arrived_ns < received[0]
    assert received[-1] <= end["end_ns"]


def test_the_record_holds_neither_prompt_nor_text(tmp_path: Path) -> None:
    run_sync(tokens(3), tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True)))
    journal = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    assert b"completed" in journal
    assert b"secret prompt" not in journal and b'tok"' not in journal


def test_completions_stream_counts_its_text_events(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for text in ("one", "", "two"):  # the empty one is no output
            await reply.event({"id": "x", "model": "tiny", "choices": [{"index": 0, "text": text}]})
        await reply.event(
            {"id": "x", "model": "tiny", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        )
        await reply.event(b"[DONE]")
        await reply.over()

    run_sync(script, tmp_path, lambda client: list(client.completions.create(model="tiny", prompt="p", stream=True)))
    records = recorded(tmp_path)
    end = only(records, "end")
    assert len(stamps(records)) == 2
    assert (end["outcome"], end["finish_reason"]) == ("completed", ["length"])
    assert (end["output_tokens"], end["token_source"]) == (2, "assumed_one")


def test_an_answer_that_does_not_stream_has_no_receipt_and_its_usage_counts(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
        await reply.json(200, base() | {"object": "chat.completion", "choices": [choice], "usage": usage})

    def use(client: openai.OpenAI) -> None:
        assert client.chat.completions.create(**CHAT).choices[0].message.content == "hello"

    run_sync(script, tmp_path, use)
    records = recorded(tmp_path)
    end = only(records, "end")
    assert records["chunks"] == [] and only(records, "begin")["streaming"] is False
    assert (end["outcome"], end["output_tokens"], end["token_source"]) == ("completed", 9, "usage")


def test_a_role_only_delta_starts_no_latency(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.event(chunk({"role": "assistant", "content": None}))
        await reads.reach(1)
        await reply.text("a")
        await reply.finish()

    server = run_sync(script, tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True)))
    (first,) = stamps(recorded(tmp_path))
    assert first >= server.replies[0].written_ns[1]


def test_a_usage_chunk_after_the_end_is_no_receipt(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        await reply.event(chunk({}, finish_reason="stop"))
        await reads.reach(1)
        await reply.event(base() | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 6}})
        await reply.event(b"[DONE]")
        await reply.over()

    server = run_sync(script, tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True)))
    records = recorded(tmp_path)
    (received,) = stamps(records)
    assert only(records, "end")["output_tokens"] == 6
    assert received < server.replies[0].written_ns[2] < only(records, "end")["end_ns"]


def test_continuous_usage_gives_the_tokens_of_each_event(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for total in (1, 4, 9):  # 1, then 3, then 5 tokens
            await reply.event(chunk({"content": "x"}, usage={"prompt_tokens": 2, "completion_tokens": total}))
        await reply.finish(usage=9, prompt=2)

    run_sync(script, tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True)))
    records = recorded(tmp_path)
    assert [count for batch in records["chunks"] for count in batch["tokens"]] == [1, 3, 5]
    assert (only(records, "end")["output_tokens"], only(records, "end")["token_source"]) == (9, "usage")


def test_two_choices_are_numbered_apart(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for index in (0, 1, 1):
            await reply.event(chunk({"content": "x"}, index=index))
        await reply.event(chunk({}, index=1, finish_reason="length"))
        await reply.event(chunk({}, index=0, finish_reason="stop"))
        await reply.over()  # no [DONE]: both finish reasons make it a proper end

    run_sync(script, tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True, n=2)))
    records = recorded(tmp_path)
    assert only(records, "begin")["n_choices"] == 2
    assert [choice for batch in records["chunks"] for choice in batch["choice"]] == [0, 1, 1]
    assert only(records, "end")["finish_reason"] == ["stop", "length"]
    assert only(records, "end")["outcome"] == "completed"


def test_the_time_a_consumer_holds_off_pulling_is_recorded_apart(tmp_path: Path, recorded: Recorded) -> None:
    pulls = threading.Event()

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        while not pulls.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        await reply.text()
        await reply.finish()

    def use(client: openai.OpenAI) -> None:
        for _ in client.chat.completions.create(**CHAT, stream=True):
            time.sleep(0.05)
            pulls.set()

    run_sync(script, tmp_path, use)
    records = recorded(tmp_path)
    # Two text events and a finish, 50 ms each. Of the half second of the server's nothing is in it.
    hold, took = (
        only(records, "end")["consumer_hold_ns"],
        only(records, "end")["end_ns"] - only(records, "begin")["send_ns"],
    )
    assert 150 * MS <= hold < took - 250 * MS


def left_early(client: openai.OpenAI, reason: str | None) -> None:
    stream = client.chat.completions.create(**CHAT, stream=True)
    for position, _ in enumerate(stream):
        if position == 1:
            break
    if reason is None:
        stream.close()
    else:
        with stop_reason(reason):
            stream.close()


@pytest.mark.parametrize(
    ("said", "reason"), [(None, "disconnect"), ("voluntary", "voluntary"), ("client_timeout", "client_timeout")]
)
def test_a_stream_left_early_is_cancelled_for_the_reason_said(
    tmp_path: Path, recorded: Recorded, said: str | None, reason: str
) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        await reply.text()
        await reply.text()
        await asyncio.sleep(60)

    run_sync(script, tmp_path, lambda client: left_early(client, said))
    records = recorded(tmp_path)
    end = only(records, "end")
    assert (end["outcome"], end["reason"]) == ("cancelled", reason)
    assert end["output_tokens"] == len(stamps(records)) == 2


def test_a_stop_reason_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="bored"), stop_reason("bored"):
        pass


def test_a_response_that_is_merely_dropped_is_a_disconnect(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(50, gap_s=0.02)) as server:
        client = httpx.Client(transport=ReceiptTransport(tmp_path, CONTRACT))
        request = client.build_request("POST", f"{server.url}/v1/completions", json={"stream": True})
        response = client.send(request, stream=True)
        next(response.iter_raw())
        inner = response.stream._stream._inner
        del response
        gc.collect()  # httpx ties response and stream in a cycle
        inner.close()
        client.close()
    assert only(recorded(tmp_path), "end")["reason"] == "disconnect"


def test_the_consumers_deadline_is_client_timeout_and_the_error_is_the_users(
    tmp_path: Path, recorded: Recorded
) -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
            list(client.chat.completions.create(**CHAT, stream=True))

    run_sync(tokens(5, gap_s=60), tmp_path, use, timeout=httpx.Timeout(60, read=0.5), max_retries=0)
    records = recorded(tmp_path)
    end = only(records, "end")
    assert (end["outcome"], end["reason"]) == ("cancelled", "client_timeout")
    assert len(stamps(records)) == 1


def test_a_deadline_before_the_response_is_client_timeout_without_a_status(tmp_path: Path, recorded: Recorded) -> None:
    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**CHAT, stream=True)

    run_sync(tokens(1, first_s=60), tmp_path, use, timeout=httpx.Timeout(60, read=0.2), max_retries=0)
    end = only(recorded(tmp_path), "end")
    assert end["reason"] == "client_timeout" and "http_status" not in end


def test_retries_are_requests_of_their_own_that_name_the_one_before(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number < 2:
            await reply.json(429, {"error": {"message": "busy", "code": "rate_limit"}}, {"retry-after-ms": "20"})
        else:
            await tokens(2)(asked, reply)

    server = run_sync(
        script, tmp_path, lambda client: list(client.chat.completions.create(**CHAT, stream=True)), max_retries=3
    )
    records = recorded(tmp_path)
    first, second, third = records["begin"]
    assert "retry_of" not in first and "labels" not in first
    assert (second["retry_of"], second["labels"]) == (first["request_id"], {"retry_count": 1})
    assert (third["retry_of"], third["labels"]) == (second["request_id"], {"retry_count": 2})
    assert server.asked[2].headers["x-sloscope-retry-of"] == second["request_id"]
    assert [(end["outcome"], end["reason"]) for end in records["end"]] == [
        ("failed", "rejected"),
        ("failed", "rejected"),
        ("completed", ""),
    ]


def test_an_id_of_the_caller_is_used_once_and_not_for_its_retry(tmp_path: Path, recorded: Recorded) -> None:
    own = "01J0000000000000000000000A"

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.number == 0:
            await reply.json(503, {"error": {}}, {"retry-after-ms": "20"})
        else:
            await tokens(1)(asked, reply)

    headers = {"x-sloscope-request-id": own, "x-request-id": "order-17"}
    run_sync(
        script,
        tmp_path,
        lambda client: list(client.chat.completions.create(**CHAT, stream=True, extra_headers=headers)),
        max_retries=1,
    )
    first, second = recorded(tmp_path)["begin"]
    assert first["request_id"] == own and second["retry_of"] == own
    assert is_request_id(second["request_id"]) and second["request_id"] != own
    assert first["external_id"] == second["external_id"] == "order-17"


Ending = Callable[[Reply], Any]


async def _truncated(reply: Reply) -> None:
    await reply.over()


async def _reset(reply: Reply) -> None:
    reply.reset()


async def _in_band(reply: Reply) -> None:
    await reply.event({"error": {"message": "worker died", "type": "server_error"}})
    await reply.over()


@pytest.mark.parametrize(
    ("events", "ending", "reason"),
    [
        (2, _truncated, "truncated"),
        (0, _truncated, "empty_stream"),
        (2, _reset, "upstream_reset"),
        (1, _in_band, "in_band_error"),
    ],
)
def test_a_stream_that_ends_badly_failed_and_keeps_its_receipts(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, events: int, ending: Ending, reason: str
) -> None:
    reads = Reads(monkeypatch)

    async def script(asked: Asked, reply: Reply) -> None:
        await reply.stream()
        for number in range(1, events + 1):
            await reply.text()
            await reads.reach(number)
        await ending(reply)

    def use(client: openai.OpenAI) -> None:
        try:
            list(client.chat.completions.create(**CHAT, stream=True))
        except (openai.OpenAIError, httpx.TransportError):
            assert reason in ("upstream_reset", "in_band_error")

    run_sync(script, tmp_path, use, max_retries=0)
    records = recorded(tmp_path)
    end = only(records, "end")
    assert (end["outcome"], end["reason"]) == ("failed", reason)
    assert len(stamps(records)) == end["output_tokens"] == events


def test_a_refused_connection_is_a_connect_error(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(1)) as server:
        url = server.url
    client = httpx.Client(transport=ReceiptTransport(tmp_path, CONTRACT))
    with client, pytest.raises(httpx.ConnectError):
        client.post(f"{url}/v1/completions", json={"stream": True})
    end = only(recorded(tmp_path), "end")
    assert (end["outcome"], end["reason"], end["output_tokens"]) == ("failed", "connect_error", 0)


def test_gzip_is_read_and_what_cannot_be_read_is_not_asked_for(tmp_path: Path, recorded: Recorded) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        assert asked.headers["accept-encoding"] == "gzip;q=0.5"
        await reply.head(200, {"content-type": "text/event-stream", "content-encoding": "gzip"})
        events = b"".join(b"data: " + orjson.dumps(chunk({"content": "x"})) + b"\n\n" for _ in range(3))
        await reply.body(gzip.compress(events + b"data: [DONE]\n\n"))
        await reply.over()

    headers = {"accept-encoding": "br, gzip;q=0.5, zstd"}
    run_sync(
        script,
        tmp_path,
        lambda client: list(client.chat.completions.create(**CHAT, stream=True, extra_headers=headers)),
    )
    records = recorded(tmp_path)
    assert len(stamps(records)) == 3 and only(records, "end")["outcome"] == "completed"


def test_the_wait_for_a_slot_in_the_pool_is_part_of_ttft(tmp_path: Path, recorded: Recorded) -> None:
    one_slot = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    body = {"model": "tiny", "stream": True}
    with SseServer(tokens(1, first_s=0.3)) as server:
        url = f"{server.url}/v1/completions"
        with httpx.Client(transport=ReceiptTransport(tmp_path, CONTRACT, inner=one_slot)) as client:
            threads = [threading.Thread(target=lambda: client.post(url, json=body)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    records = recorded(tmp_path)
    sent = {begin["request_id"]: begin["send_ns"] for begin in records["begin"]}
    first, second = sorted(batch["t_ns"][0] - sent[batch["request_id"]] for batch in records["chunks"])
    assert 300 * MS <= first < 500 * MS
    assert second - first >= 200 * MS  # the second waited for the first's 300 ms


def test_other_paths_pass_unrecorded(tmp_path: Path, recorded: Recorded) -> None:
    def use(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]

    run_sync(tokens(1), tmp_path, use)
    assert recorded(tmp_path)["begin"] == []


def test_an_unknown_class_or_a_bad_limit_never_stops_the_call(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        with sync_client(server, transport) as client:
            for headers in ({"x-slo-class": "nobody"}, {"x-slo-ttft-ms": "soon"}, {"x-slo-ttft-ms": "250"}):
                assert list(client.chat.completions.create(**CHAT, stream=True, extra_headers=headers))
        assert transport.observer_errors == 1  # "soon" is counted
    unknown, bad, own = recorded(tmp_path)["begin"]
    assert (unknown["class"], bad["class"]) == ("_unknown", "default")
    assert own["limits"]["ttft_ns"] == 250 * MS and own["own_limits"] == {"ttft_ns": 250 * MS}


def test_without_a_contract_the_limits_of_the_request_itself_are_kept(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path)
        with sync_client(server, transport) as client:
            for headers in (
                {"x-slo-ttft-ms": "250"},
                {"x-slo-class": "mine", "x-slo-itl-max-ms": "30"},
                {"x-slo-class": "mine", "x-slo-ttft-ms": "soon"},
                {},
            ):
                assert list(client.chat.completions.create(**CHAT, stream=True, extra_headers=headers))
        assert transport.observer_errors == 1  # "soon" is counted
    own, both, bad, none = recorded(tmp_path)["begin"]
    assert "class" not in own and own["own_limits"] == {"ttft_ns": 250 * MS} and own["limits"]["ttft_ns"] == 250 * MS
    assert both["class"] == "mine" and both["own_limits"] == {"itl_max_ns": 30 * MS}
    assert bad["class"] == "mine" and "own_limits" not in bad
    assert not {"class", "limits", "own_limits"} & none.keys()


def test_whether_a_request_that_cannot_be_read_streams_is_unknown_and_its_events_are_receipts(
    tmp_path: Path, recorded: Recorded
) -> None:
    body = orjson.dumps(CHAT | {"stream": True, "n": 2})

    def upload() -> Iterator[bytes]:
        yield body

    with SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        with httpx.Client(transport=transport) as client:
            url, size = f"{server.url}/v1/chat/completions", {"content-length": str(len(body))}
            assert client.post(url, content=upload(), headers=size).status_code == 200
            client.post(url, content=body)
        assert transport.observer_errors == 0, transport.last_error
    records = recorded(tmp_path)
    unread, read = records["begin"]
    assert not {"streaming", "n_choices", "model"} & unread.keys()
    assert (read["streaming"], read["n_choices"]) == (True, 2)
    assert [len(batch["t_ns"]) for batch in records["chunks"]] == [2, 2]


def test_a_journal_that_cannot_be_written_is_counted_and_the_answer_arrives(tmp_path: Path) -> None:
    with SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT)
        transport._observer.log._writer._journal.close()  # what a lost disk does: every write fails
        with sync_client(server, transport) as client:
            pieces = list(client.chat.completions.create(**CHAT, stream=True))
        assert len(pieces) == 5  # three texts, finish, usage
        assert transport.observer_errors == 3 and transport.last_error  # begin, chunks, end


def test_an_error_in_a_callback_never_reaches_the_user(tmp_path: Path) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("the callback's own bug")

    with SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, CONTRACT, on_end=broken)
        with sync_client(server, transport) as client:
            assert len(list(client.chat.completions.create(**CHAT, stream=True))) == 5
        assert transport.observer_errors == 1 and "own bug" in transport.last_error


def test_a_long_silence_after_receipts_leaves_none_unwritten(tmp_path: Path, recorded: Recorded) -> None:
    release = threading.Event()

    with SseServer(held_back(release)) as server, sync_client(server, ReceiptTransport(tmp_path, CONTRACT)) as client:
        stream = client.chat.completions.create(**CHAT, stream=True)
        next(iter(stream))
        until(lambda: len(stamps(recorded(tmp_path))) == 1)
        assert recorded(tmp_path)["end"] == []
        release.set()
        for _ in stream:
            pass
    assert only(recorded(tmp_path), "end")["outcome"] == "completed"


def test_threads_share_one_transport(tmp_path: Path, recorded: Recorded) -> None:
    with (
        SseServer(tokens(20, gap_s=0.005)) as server,
        sync_client(server, ReceiptTransport(tmp_path, CONTRACT)) as client,
    ):
        threads = [
            threading.Thread(target=lambda: list(client.chat.completions.create(**CHAT, stream=True))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = recorded(tmp_path)
    assert len({begin["request_id"] for begin in records["begin"]}) == 8
    assert len(stamps(records)) == 160
    assert [end["outcome"] for end in records["end"]] == ["completed"] * 8
