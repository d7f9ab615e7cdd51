"""`sloscope replay --receipts`: tried before the first send, and recorded by a sidecar with another directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.client.conftest import Records
from tests.client.control import control_plane
from tests.client.sse_server import Asked, Reply, SseServer, tokens
from tests.command import sloscope_process

GOODPUT = ["--goodput", "ttft:300 itl_max:30"]
TEN = "synthetic:constant?n=10&rate=100&output_p50=4&output_sigma=0"

replayed = partial(sloscope_process, "replay", TEN, *GOODPUT)


def refused(tmp_path: Path, receipts: str, *options: str) -> str:
    """What a replay says that sends nothing and makes nothing."""
    with SseServer(tokens(1)) as server:
        events = tmp_path / "run"
        done = replayed("--url", server.url, "--events", str(events), "--receipts", receipts, *options)
        assert server.asked == [] and not events.exists()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr.removeprefix("error: ").rstrip()


def test_a_control_address_where_nobody_listens_is_told_before_the_first_send(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as server:
        url = server.url
    assert refused(tmp_path, url) == f"--receipts: {url} cannot be reached: nobody listens there"
    url = "http://no-such-host.invalid:9464"
    assert refused(tmp_path, url) == f"--receipts: {url} cannot be reached: its host name is not known"


def test_a_token_that_is_wrong_or_missing_is_told_before_the_first_send(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("another")
    with control_plane(tmp_path / "sidecar", token="s3cret") as control:
        for options in ((), ("--token-file", str(token))):
            assert refused(tmp_path, control.url, *options) == (
                f"--receipts: {control.url} answered 401; accepted: --token-file FILE, or SLOSCOPE_TOKEN, with its "
                "bearer token"
            )


def test_a_name_that_the_control_plane_does_not_go_by_is_told_before_the_first_send(tmp_path: Path) -> None:
    with control_plane(tmp_path / "sidecar") as control:
        # Another spelling of a loopback address, which none of those that it accepts is.
        url = control.url.replace("127.0.0.1", "0.0.0.0")
        host = url.removeprefix("http://")
        assert refused(tmp_path, url).startswith(
            f"--receipts: {url} answered 403 (host: '{host}' is not accepted; accepted: localhost"
        )


@pytest.mark.parametrize(
    ("status", "hint"), [(404, ", not the one that forwards requests"), (400, ""), (422, ""), (500, ""), (302, "")]
)
def test_an_address_that_is_no_control_plane_is_told_before_the_first_send(
    tmp_path: Path, status: int, hint: str
) -> None:
    async def upstream(asked: Asked, reply: Reply) -> None:
        await reply.json(status, {"error": {"message": "no such\nroute"}})

    with SseServer(upstream) as server:
        assert refused(tmp_path, server.url) == (
            f"--receipts: {server.url} answered {status}; accepted: the control address of a sidecar{hint}"
        )


def test_an_address_with_the_path_that_is_added_to_it_is_told(tmp_path: Path) -> None:
    with control_plane(tmp_path / "sidecar") as control:
        assert refused(tmp_path, f"{control.url}/v1/receipts").endswith(
            "answered 404; accepted: the control address of a sidecar, without /v1/receipts"
        )


@pytest.mark.parametrize("own", [False, True])
def test_a_replay_is_counted_and_recorded_once_whatever_directory_the_sidecar_has(
    tmp_path: Path, own: bool, recorded: Callable[[Path], Records]
) -> None:
    sidecar, run = tmp_path / "sidecar", tmp_path / ("run" if own else "sidecar")
    with control_plane(sidecar) as control, SseServer(tokens(4), owned_by="vllm") as server:
        done = replayed("--url", server.url, "--events", str(run), "--receipts", control.url, "--warmup", "3")
        assert (control.ended(), control.rejected()) == (7, 0)  # warm-up is excluded by rule
    assert done.returncode == 0 and "could not be posted" not in done.stderr
    for events in {run, sidecar}:
        records = recorded(events)
        assert len(records["begin"]) == len(records["end"]) == 10
        assert all(begin["labels"]["length_forced"] for begin in records["begin"])
        assert sum("warmup" in begin["labels"] for begin in records["begin"]) == 3
