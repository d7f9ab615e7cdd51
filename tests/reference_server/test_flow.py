"""Flow control and cancellation at the front end: what the engine hears, what the consumer gets, what is recorded."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_server import front_end
from sloscope.contract import from_shorthand
from tests.reference_server.front_rig import END_TOKEN, Client, FrontRig
from tests.reference_server.serving import WAYS_TO_LEAVE as WAYS
from tests.waiting import until

SLOW_READER_NS = 300_000_000
# An event is about 150 bytes. The kernel takes no less than some kilobytes at each end.
SMALL_BUFFER = 4096
FILL = 2000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FrontRig]:
    rig = FrontRig(
        tmp_path, from_shorthand("ttft:300 itl_max:30"), slow_reader_ns=SLOW_READER_NS, send_buffer=SMALL_BUFFER
    )
    yield rig
    rig.stop()


def begun(rig: FrontRig, **body: object) -> tuple[Client, str]:
    """A client whose request the engine has accepted."""
    client = rig.ask(**body)
    key = rig.hear("new")["key"]
    rig.accept(key)
    return client, key


def not_reading(rig: FrontRig) -> tuple[Client, str]:
    """A client that has read nothing of FILL tokens, of which its socket took a few."""
    client = rig.client(SMALL_BUFFER)
    client.ask()
    key = rig.hear("new")["key"]
    rig.accept(key)
    fill(rig, key)
    return client, key


def fill(rig: FrontRig, key: str) -> None:
    for _ in range(FILL):
        rig.give(key)
    # When the front end has seen all, what was not told as delivered is what the gauge shows.
    while rig.taken.get(key, 0) + rig.undelivered() < FILL:
        rig.hear("delivered")


def test_a_disk_that_does_not_answer_holds_up_no_stream_and_a_new_request_by_five_milliseconds(rig: FrontRig) -> None:
    client, key = begun(rig)
    late_before = rig.metric("sloscope_journal_late_begins_total")  # on a busy machine the first may be late
    disk, flush = threading.Event(), rig.journal_writer.flush

    def stuck() -> bool:
        disk.wait(20)
        return flush()

    rig.journal_writer.flush = stuck  # type: ignore[method-assign]
    late = rig.ask()
    late_key = rig.hear("new")["key"]
    rig.give(key, text="!")
    client.read(until=b'"text":"!"')
    assert rig.records("begin", late_key) == []
    assert rig.metric("sloscope_journal_late_begins_total") == late_before + 1
    disk.set()
    late.leave("close")
    assert rig.end_of(late_key)["outcome"] == "cancelled"
    assert len(rig.records("begin", late_key)) == 1, "late, and not lost"


# --- credits


def test_the_engine_is_told_what_class_and_limits_a_request_has(rig: FrontRig) -> None:
    rig.ask(headers="x-slo-itl-max-ms: 40\r\n")
    new = rig.hear("new")
    told = {name: new[name] for name in ("streaming", "request_class", "ttft_limit_ns", "itl_max_limit_ns")}
    assert told == {
        "streaming": True, "request_class": "default", "ttft_limit_ns": 300_000_000, "itl_max_limit_ns": 40_000_000,
    }  # fmt: skip
    rig.ask(stream=False)
    assert rig.hear("new")["streaming"] is False


def test_a_request_without_limits_says_so(tmp_path: Path) -> None:
    rig = FrontRig(tmp_path)
    rig.ask(headers="x-slo-class: gold\r\n")
    new = rig.hear("new")
    assert (new["request_class"], new["ttft_limit_ns"], new["itl_max_limit_ns"]) == ("gold", None, None)
    rig.stop()


def test_an_id_is_not_believed_again_while_its_request_lives(rig: FrontRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "REMEMBERED_IDS", 1)
    claim = "x-sloscope-request-id: 01ARZ3NDEKTSV4RRFFQ69G5FAV\r\n"
    client, key = begun(rig, headers=claim)
    assert key in claim
    begun(rig)  # of the ids that are remembered only this one is left
    assert begun(rig, headers=claim)[1] not in claim
    rig.give(key, finish="length")
    client.read(until=b"[DONE]")
    rig.end_of(key)
    assert begun(rig, headers=claim)[1] in claim  # forgotten and free


def test_all_readers_that_took_tokens_are_told_in_one_message(rig: FrontRig) -> None:
    (a, key_a), (_, key_b) = begun(rig), begun(rig)
    for count in (1, 2, 3):
        rig.give(key_a, key_b)
        assert sorted(rig.hear("delivered")["rows"]) == sorted([[key_a, count], [key_b, count]])
    assert rig.undelivered() == 0
    rig.give(key_a, finish="length")
    assert a.read(until=b"[DONE]").count(b'"text":"x"') == 4
    # The engine knows that it has ended: the next thing that it hears is of the other one.
    rig.give(key_b)
    assert rig.hear("delivered")["rows"] == [[key_b, 4]]


def test_tokens_are_delivered_when_the_kernel_has_taken_them_and_not_before(rig: FrontRig) -> None:
    client, key = not_reading(rig)
    assert 0 < rig.taken[key] < FILL
    received = b""
    while received.count(b'"text":"x"') < FILL:
        received += client.socket.recv(1 << 16)
    while rig.taken[key] < FILL:
        rig.hear("delivered")
    assert rig.undelivered() == 0
    rig.give(key, finish="length")
    assert (received + client.read(until=b"[DONE]")).count(b'"text":"x"') == FILL + 1


def test_text_held_back_for_a_stop_string_does_not_use_up_the_window(rig: FrontRig) -> None:
    client, key = begun(rig, stop="xxxxy")
    for count in range(1, 5):
        rig.give(key)  # x, xx, xxx, xxxx: no text can be sent
        assert rig.hear("delivered")["rows"] == [[key, count]]
    assert rig.undelivered() == 0
    rig.give(key, text="z")
    assert client.read(until=b'"text":"xxxxz"') and rig.hear("delivered")["rows"] == [[key, 5]]
    for count in range(6, 10):
        rig.give(key)
        assert rig.hear("delivered")["rows"] == [[key, count]]
    rig.give(key, text="y")
    assert rig.hear("finish") == {"op": "finish", "key": key}
    assert b"[DONE]" in client.read(until=b"[DONE]") and rig.end_of(key)["outcome"] == "completed"


def test_a_hidden_end_token_leaves_the_gauge_at_zero(rig: FrontRig) -> None:
    client, key = begun(rig)
    rig.give(key)
    rig.hear("delivered")
    rig.give(key, token_id=END_TOKEN, finish="stop")
    client.read(until=b"[DONE]")
    end = rig.end_of(key)
    assert (end["outcome"], end["output_tokens"]) == ("completed", 1) and rig.undelivered() == 0


def test_an_answer_that_is_sent_as_a_whole_has_no_reader_to_wait_for(rig: FrontRig) -> None:
    client, key = begun(rig, stream=False)
    for _ in range(3):
        rig.give(key)
    until(lambda: rig.undelivered() == 3)
    rig.give(key, finish="length")
    assert client.read(until=b'"text":"xxxx"')
    other, key = begun(rig)
    rig.give(key)
    assert rig.hear("delivered")["rows"] == [[key, 1]]  # the first that is ever heard of
    assert rig.undelivered() == 0
    other.leave("close")


# --- cutting


def test_a_reader_that_the_engine_cuts_is_cut_at_once_and_the_engine_hears_nothing_more_of_it(rig: FrontRig) -> None:
    client, key = not_reading(rig)
    rig.tell({"op": "cut", "key": key, "reason": "slow_reader"})
    end = rig.end_of(key)
    assert (end["outcome"], end["reason"]) == ("cancelled", "slow_reader")
    assert rig.socket_closed_ns(key) is None, "the consumer did not close it"
    assert rig.undelivered() == 0
    assert client.rest().count(b'"text":"x"') < FILL
    begun(rig)  # the next that the engine hears
    assert end["output_tokens"] == rig.taken[key] > 0


def test_who_does_not_read_the_end_of_an_answer_is_cut_after_the_declared_time(rig: FrontRig) -> None:
    """The engine has ended it and waits for nobody, so nobody else would."""
    client, key = not_reading(rig)
    rig.give(key, finish="length")
    end = rig.end_of(key)
    assert (end["outcome"], end["reason"]) == ("cancelled", "slow_reader") and 0 < end["output_tokens"] < FILL
    assert b"[DONE]" not in client.rest() and rig.undelivered() == 0
    begun(rig)  # the next that the engine hears


def test_a_reader_that_the_engine_waits_for_is_not_cut_by_the_front_end(rig: FrontRig) -> None:
    client, key = not_reading(rig)
    # Another that has ended runs out of the same declared time, and later.
    other, other_key = not_reading(rig)
    rig.give(other_key, finish="length")
    assert rig.end_of(other_key)["reason"] == "slow_reader"
    assert not rig.records("end", key)
    client.leave("reset")
    assert rig.hear("abort") == {"op": "abort", "key": key, "reason": "disconnect"}
    other.leave("reset")


# --- refusals


def test_a_request_may_be_refused_while_it_waits(rig: FrontRig) -> None:
    for stream in (True, False):
        client = rig.ask(stream=stream)
        key = rig.hear("new")["key"]
        rig.tell(
            {"op": "refused", "key": key, "reason": "deadline", "message": "late", "retry": True, "retry_after_s": 7}
        )
        head = client.read(until=b"late").lower()
        assert head.startswith(b"http/1.1 429 ") and b"\r\nretry-after: 7\r\n" in head
        end = rig.end_of(key)
        assert (end["outcome"], end["reason"], end["http_status"]) == ("failed", "rejected", 429)


def test_what_can_never_be_is_refused_for_good(rig: FrontRig) -> None:
    client = rig.ask()
    key = rig.hear("new")["key"]
    rig.tell(
        {"op": "refused", "key": key, "reason": "context", "message": "too long", "retry": False, "retry_after_s": 1}
    )
    head = client.read(until=b"too long").lower()
    assert head.startswith(b"http/1.1 400 ") and b"retry-after" not in head


# --- leaving


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["verdict", "queue", "decode", "blocked"])
def test_the_engine_hears_of_who_leaves_in_every_phase(rig: FrontRig, phase: str, stream: bool, how: str) -> None:
    client = rig.client(SMALL_BUFFER)
    client.ask(stream=stream)
    key = rig.hear("new")["key"]
    if phase != "verdict":
        rig.accept(key)
    if phase == "decode":
        rig.give(key)
        if stream:
            client.read(until=b'"text":"x"')
            rig.hear("delivered")
    if phase == "blocked":
        fill(rig, key)
    left_ns = client.leave(how)
    assert rig.hear("abort") == {"op": "abort", "key": key, "reason": "disconnect"}
    end = rig.end_of(key)
    assert (end["outcome"], end["reason"]) == ("cancelled", "disconnect")
    closed_ns = rig.socket_closed_ns(key)
    assert closed_ns is not None and left_ns <= closed_ns <= end["end_ns"]
    assert rig.abort_sent(key) is True
    assert rig.undelivered() == 0
    begun(rig)  # the next that the engine hears
    assert end["output_tokens"] == rig.taken.get(key, 0)


@pytest.mark.parametrize("how", WAYS)
def test_who_leaves_before_its_body_is_there_never_reaches_the_engine(rig: FrontRig, how: str) -> None:
    client = rig.client()
    request = Client.request()
    client.send(request[:-5])
    client.leave(how)
    other, key = begun(rig)  # the first that the engine hears
    (end,) = until(lambda: rig.journal("end"))
    assert (end["outcome"], end["reason"]) == ("cancelled", "disconnect") and end["request_id"] != key
    other.leave("close")


def test_who_leaves_while_its_prompt_is_encoded_is_never_run(rig: FrontRig) -> None:
    """Encoding 30,000 words takes some hundred milliseconds."""
    client = rig.ask(prompt="go " * 30_000)
    client.leave("close")
    (end,) = until(lambda: rig.journal("end"))
    assert (end["outcome"], end["reason"]) == ("cancelled", "disconnect")
    assert rig.socket_closed_ns(end["request_id"]) is not None and rig.abort_sent(end["request_id"]) is False
    begun(rig)  # the first that the engine hears


@pytest.mark.parametrize("how", ["close", "reset"])
def test_who_leaves_before_it_has_taken_the_end_did_not_get_it(rig: FrontRig, how: str) -> None:
    """The engine has ended it, so it hears of no abort; the socket's end is recorded all the same."""
    client, key = not_reading(rig)
    rig.give(key, finish="length")
    left_ns = client.leave(how)
    end = rig.end_of(key)
    assert (end["outcome"], end["reason"]) == ("cancelled", "disconnect") and 0 < end["output_tokens"] < FILL
    closed_ns = rig.socket_closed_ns(key)
    assert closed_ns is not None and left_ns <= closed_ns and rig.abort_sent(key) is False
    begun(rig)  # the next that the engine hears


def test_who_leaves_while_its_whole_answer_is_on_its_way_did_not_get_it(rig: FrontRig) -> None:
    client = rig.client(SMALL_BUFFER)
    client.ask(stream=False)
    key = rig.hear("new")["key"]
    rig.accept(key)
    for _ in range(100):
        rig.give(*[key] * 1000)
    rig.give(key, finish="length")
    client.read(until=b"xxx")
    client.leave("reset")
    end = rig.end_of(key)
    assert (end["outcome"], end["reason"], end["output_tokens"]) == ("cancelled", "disconnect", 0)
    assert rig.socket_closed_ns(key) is not None and rig.undelivered() == 0


def test_who_has_the_whole_answer_may_leave_as_it_likes(rig: FrontRig) -> None:
    for how in WAYS:
        client, key = begun(rig)
        rig.give(key, finish="length")
        client.read(until=b"[DONE]")
        client.leave(how)
        assert rig.end_of(key)["outcome"] == "completed" and rig.socket_closed_ns(key) is None


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"])
def test_who_sends_no_head_is_closed_after_a_while(rig: FrontRig, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("reference_server.app.HEAD_TIMEOUT_S", 0.3)
    silent = rig.client()
    if sent:
        silent.send(sent)
    assert silent.rest() == b""
    # Half of a second head while the first answer runs costs nobody that answer.
    client, key = begun(rig)
    client.send(b"POST /v1/completions HTTP/1.1\r\n")
    time.sleep(0.6)
    rig.give(key, finish="length")
    client.read(until=b"[DONE]")
    assert rig.end_of(key)["outcome"] == "completed"


def test_requests_sent_ahead_of_their_turn_are_answered_in_turn(rig: FrontRig) -> None:
    client = rig.client()
    client.send(Client.request() + Client.request(stream=False))
    first = rig.hear("new")["key"]
    rig.accept(first)
    rig.give(first, finish="length")
    client.read(until=b"[DONE]")
    second = rig.hear("new")["key"]
    rig.accept(second)
    rig.give(second, text="y", finish="length")
    client.read(until=b'"text":"y"')
    assert rig.end_of(first)["outcome"] == rig.end_of(second)["outcome"] == "completed"


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("ahead", [b"", b"x" * 200_000], ids=["small", "large"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_sends_ahead_and_leaves_is_noticed_too(rig: FrontRig, stream: bool, ahead: bytes, how: str) -> None:
    client = rig.client()
    client.ask(stream=stream)
    key = rig.hear("new")["key"]
    rig.accept(key)
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + ahead)
    client.leave(how)
    assert rig.hear("abort") == {"op": "abort", "key": key, "reason": "disconnect"}
    assert rig.end_of(key)["reason"] == "disconnect" and rig.socket_closed_ns(key) is not None
    begun(rig)  # the second request was never begun


def test_who_sends_too_much_ahead_is_cut(rig: FrontRig) -> None:
    client, key = begun(rig)
    client.send(Client.request() * 66)
    assert rig.hear("abort") == {"op": "abort", "key": key, "reason": "disconnect"}
    client.rest()
    begun(rig)
