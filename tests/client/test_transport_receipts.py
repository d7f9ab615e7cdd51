"""What the transports post to a control plane, and what becomes of it when that does not take it. Real processes."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sloscope.client import AsyncReceiptTransport, ReceiptTransport
from sloscope.errors import ConfigError
from tests.client.control import control_plane
from tests.client.sse_server import Asked, Reply, SseServer, tokens
from tests.client.transport_use import BODY, CONTRACT, ENDLESS, Recorded, ends, observed, only, run_async, url_of
from tests.waiting import until


async def silent(asked: Asked, reply: Reply) -> None:
    await asyncio.sleep(60)


def threads() -> int:
    return sum(thread.name == "sloscope-posts" for thread in threading.enumerate())


@pytest.mark.parametrize("options", [{}, {"contract": CONTRACT}])
def test_receipts_reach_the_control_plane_while_the_client_lives(
    tmp_path: Path, recorded: Recorded, options: dict[str, Any]
) -> None:
    with control_plane(tmp_path) as control, SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, receipts=control.url, **options)
        with httpx.Client(transport=transport) as client:
            for _ in range(2):
                assert client.post(url_of(server), json=BODY).status_code == 200
            until(lambda: control.ended(outcome="completed") == 2)
        assert (transport.receipts_failed, transport.observer_errors, transport.last_error) == (0, 0, "")
    # Its own journal is in this directory: nothing is written again.
    assert ends(recorded(tmp_path)) == [("completed", "")] * 2


def test_what_was_not_posted_yet_is_posted_when_an_async_client_closes(tmp_path: Path) -> None:
    async def use(client: httpx.AsyncClient, url: str) -> None:
        await asyncio.gather(*(client.post(url, json=BODY) for _ in range(5)))

    with control_plane(tmp_path) as control:
        run_async(tokens(3), tmp_path, use, receipts=control.url)
        assert (control.ended(outcome="completed"), control.rejected()) == (5, 0)
    assert threads() == 0


def test_a_sidecar_with_another_directory_has_the_same_records(tmp_path: Path, recorded: Recorded) -> None:
    headers = {"x-slo-ttft-ms": "250", "x-request-id": "mine"}
    body = BODY | {"max_tokens": 5, "n": 2}
    with control_plane(tmp_path / "sidecar") as control:
        options: dict[str, Any] = {"receipts": control.url, "tenant": "acme", "labels": {"app": "web"}}
        with observed(tokens(3), tmp_path / "own", **options) as (client, server):
            client.post(url_of(server), json=body, headers=headers)
    own, there = recorded(tmp_path / "own"), recorded(tmp_path / "sidecar")
    begin = only(there, "begin")
    assert (begin["tenant"], begin["labels"], begin["max_tokens"], begin["n_choices"]) == ("acme", {"app": "web"}, 5, 2)
    left_out = {"path", "contract_hash"}  # of which a receipt says nothing; the sidecar judges by a contract of its own
    assert begin == {name: value for name, value in only(own, "begin").items() if name not in left_out} | {
        "contract_hash": begin["contract_hash"]
    }
    assert only(there, "chunks")["t_ns"] == only(own, "chunks")["t_ns"]
    for name in ("outcome", "end_ns", "output_tokens", "token_source", "prompt_tokens", "consumer_hold_ns"):
        assert only(there, "end")[name] == only(own, "end")[name], name


def test_without_a_directory_of_its_own_the_sidecar_writes_what_is_posted(tmp_path: Path, recorded: Recorded) -> None:
    with control_plane(tmp_path) as control, SseServer(tokens(3)) as server:
        with httpx.Client(transport=ReceiptTransport(receipts=control.url)) as client:
            client.post(url_of(server), json=BODY)
        assert control.ended(outcome="completed") == 1
    assert ends(recorded(tmp_path)) == [("completed", "")]


@pytest.mark.parametrize("token", ["s3cret", "another"])
def test_a_token_is_sent_and_a_wrong_one_is_counted_and_not_told(tmp_path: Path, token: str) -> None:
    with control_plane(tmp_path, token="s3cret") as control, SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, receipts=control.url, receipts_token=token)
        with httpx.Client(transport=transport) as client:
            assert client.post(url_of(server), json=BODY).status_code == 200
        assert all("authorization" not in asked.headers for asked in server.asked)
        assert (control.ended(), transport.receipts_failed) == ((1, 0) if token == "s3cret" else (0, 1))
        assert transport.last_error == ("" if token == "s3cret" else f"{control.url} answered 401")


def test_a_control_plane_that_is_not_there_costs_its_receipts_alone(tmp_path: Path, recorded: Recorded) -> None:
    with SseServer(tokens(3)) as gone:
        url = gone.url
    with SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, receipts=url)
        with httpx.Client(transport=transport) as client:
            assert client.post(url_of(server), json=BODY).status_code == 200
    assert (transport.receipts_failed, transport.observer_errors) == (1, 0)
    assert transport.last_error == f"{url} cannot be reached: nobody listens there"
    assert ends(recorded(tmp_path)) == [("completed", "")]


def test_a_control_plane_that_does_not_answer_holds_up_nobody_for_longer_than_the_close(tmp_path: Path) -> None:
    with SseServer(silent) as plane, SseServer(tokens(3)) as server:
        transport = ReceiptTransport(tmp_path, receipts=plane.url)
        with httpx.Client(transport=transport) as client:
            for _ in range(3):
                assert client.post(url_of(server), json=BODY).status_code == 200
            until(lambda: len(plane.asked) == 1)  # which holds on to what was posted by then
            client.post(url_of(server), json=BODY)
        assert (transport.receipts_failed, transport.last_error) == (4, f"{plane.url} did not answer in time")
        assert threads() == 0


def test_an_async_close_that_waits_for_a_control_plane_lets_others_run(tmp_path: Path) -> None:
    async def main(url: str, plane: str) -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.05)
                turns += 1

        transport = AsyncReceiptTransport(tmp_path, receipts=plane)
        client = httpx.AsyncClient(transport=transport)
        await client.post(url, json=BODY)
        turning = asyncio.create_task(turn())
        await client.aclose()
        turning.cancel()
        assert transport.receipts_failed == 1
        return turns

    with SseServer(silent) as plane, SseServer(tokens(3)) as server:
        assert asyncio.run(main(url_of(server), plane.url)) > 0


def test_a_transport_that_was_closed_posts_its_next_clients_receipts_too(tmp_path: Path) -> None:
    with control_plane(tmp_path) as control, SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, receipts=control.url)
        for number in (1, 2):
            with httpx.Client(transport=transport) as client:
                client.post(url_of(server), json=BODY)
            assert control.ended(outcome="completed") == number


def test_a_transport_that_is_dropped_unclosed_leaves_no_thread_that_posts(tmp_path: Path) -> None:
    with control_plane(tmp_path) as control, SseServer(tokens(2)) as server:
        transport = ReceiptTransport(tmp_path, receipts=control.url)
        client = httpx.Client(transport=transport)
        client.post(url_of(server), json=BODY)
        transport._inner.close()
        assert threads() == 1
        del client, transport
        gc.collect()
        until(lambda: threads() == 0)
        assert control.ended(outcome="completed") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"receipts": "ftp://127.0.0.1"}, "receipts: 'ftp://127.0.0.1' is not accepted; accepted: http"),
        ({"receipts": "http://me:s3cret@a"}, "receipts: must not carry credentials"),
        ({"receipts": "9464", "receipts_token": "s3cret\r\nx: y"}, "receipts_token: accepted: one line of printable"),
    ],
)
def test_a_wrong_address_is_told_before_anything_is_made(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    for made in (ReceiptTransport, AsyncReceiptTransport):
        with pytest.raises(ConfigError) as refused:
            made(tmp_path / "events", **options)
        assert str(refused.value).startswith(said) and "s3cret" not in str(refused.value)
    assert not (tmp_path / "events").exists()


# --- processes ----------------------------------------------------------------------------------------------------


def run_program(program: str, *arguments: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("name", [lambda url: url, lambda url: url.replace("127.0.0.1", "localhost")])
def test_a_process_that_just_ends_posts_what_it_has(tmp_path: Path, name: Callable[[str], str]) -> None:
    with control_plane(tmp_path) as control, SseServer(ENDLESS) as server:
        program = """
            import sys, httpx
            from sloscope.client import ReceiptTransport
            client = httpx.Client(transport=ReceiptTransport(sys.argv[1], receipts=sys.argv[3]))
            response = client.send(client.build_request("POST", sys.argv[2], json={"stream": True}), stream=True)
            next(response.iter_raw())
        """
        run_program(program, str(tmp_path), url_of(server), name(control.url))
        assert control.ended(outcome="cancelled", reason="disconnect") == 1


def test_a_forked_child_posts_its_own_receipts_and_none_of_its_parents(tmp_path: Path) -> None:
    with control_plane(tmp_path) as control, SseServer(tokens(2)) as server:
        program = """
            import os, sys, httpx
            from sloscope.client import ReceiptTransport
            transport = ReceiptTransport(sys.argv[1], receipts=sys.argv[3])
            client = httpx.Client(transport=transport)
            def ask():
                assert httpx.Client(transport=transport).post(sys.argv[2], json={"stream": True}).status_code == 200
            ask()
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                ask()
            else:
                ask()
            client.close()
            assert transport.receipts_failed == 0, transport.last_error
        """
        run_program(program, str(tmp_path), url_of(server), control.url)
        # Two of the parent's and one of the child's; a parent's receipt that the child posts too would be a duplicate.
        assert (control.ended(outcome="completed"), control.rejected()) == (3, 0)


def test_a_name_that_is_too_long_costs_no_receipt(tmp_path: Path, recorded: Recorded) -> None:
    headers = {"x-request-id": "i" * 300, "x-slo-tenant": "t" * 300}
    body = BODY | {"model": "m" * 230, "max_tokens": 2**40}
    with control_plane(tmp_path / "sidecar") as control:
        with observed(tokens(3), tmp_path / "own", receipts=control.url) as (client, server):
            client.post(url_of(server), json=body, headers=headers)
        assert (control.ended(outcome="completed"), control.rejected()) == (1, 0)
    begin = only(recorded(tmp_path / "sidecar"), "begin")
    assert (begin["external_id"], begin["tenant"], begin["model"]) == ("i" * 200, "t" * 200, "m" * 200)
    assert "max_tokens" not in begin


@pytest.mark.parametrize(
    "labels",
    [
        {"a": float("nan")}, {"a": 2**70}, {"a": "\ud800"}, {"a": "x" * 257}, {"x" * 257: 1}, {"a": [1]}, {"a": None},
        {str(number): 1 for number in range(33)},
    ],
)  # fmt: skip
def test_labels_that_no_record_can_carry_are_refused_at_once(labels: Any) -> None:
    with pytest.raises(ConfigError, match="labels: accepted: at most 32, names and texts of at most 256"):
        ReceiptTransport("events", labels=labels)


def test_a_transport_without_a_place_for_its_records_is_refused() -> None:
    with pytest.raises(ConfigError, match="events: accepted: a directory"):
        AsyncReceiptTransport()
    with pytest.raises(ConfigError, match="receipts_token: accepted: beside receipts"):
        ReceiptTransport(on_end=print, receipts_token="x")
    ReceiptTransport(receipts="http://127.0.0.1:9", receipts_token=None).close()


def test_a_limit_that_does_not_parse_is_named(tmp_path: Path) -> None:
    with observed(tokens(1), tmp_path, errors=1) as (client, server):
        client.post(url_of(server), json=BODY, headers={"x-slo-ttft-ms": "1e12"})
        transport: Any = client._transport
        assert "x-slo-ttft-ms" in transport.last_error
