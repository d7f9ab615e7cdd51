"""`sloscope replay` as a person runs it: its two outputs and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sloscope import contract as contracts
from tests.client.conftest import Records
from tests.client.sse_server import Asked, Reply, SseServer, tokens
from tests.command import sloscope, sloscope_process

GOODPUT = ["--goodput", "ttft:300 itl_max:100"]
TEN = "synthetic:constant?n=10&rate=100&output_p50=4&output_sigma=0"


replayed = partial(sloscope, "replay")


def test_a_run_prints_one_json_row_and_exits_0(tmp_path: Path) -> None:
    with SseServer(tokens(4)) as server:
        asked = [TEN, "--url", server.url, "--events", str(tmp_path), *GOODPUT, "--format", "json"]
        done = sloscope_process("replay", *asked)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["offered"], row["completed"], row["failed"], row["unfinished"]) == (10, 10, 0, 0)
    assert (row["qualified"], row["attainment"], row["valid"]) == (10, 1.0, True)
    assert (row["ttft_offered_p99_s"], row["ttft_offered_p99_note"]) == (None, "n=10 < 299")
    assert row["ttft_offered_p50_s"] is not None
    assert row["ttft_intended_offered_p50_s"] >= row["ttft_offered_p50_s"]
    assert row["contract_hash"] == contracts.load(tmp_path / "contract.toml").hash
    assert "lengths natural" in done.stderr and "10 requests" in done.stderr


def test_another_server_is_replayed_with_forced_lengths(tmp_path: Path) -> None:
    with SseServer(tokens(4), owned_by="vllm") as server:
        done = replayed(TEN, "--url", f"{server.url}/v1", "--events", str(tmp_path), *GOODPUT, "--api", "completions")
        assert all(asked.json["ignore_eos"] and asked.path == "/v1/completions" for asked in server.asked)
        assert len(server.asked) == 10
    assert done.returncode == 0 and "lengths forced" in done.stderr
    assert "ttft_intended_offered_p50_s" in done.stdout


def test_a_server_that_refuses_ignore_eos_is_replayed_with_caps_alone(
    tmp_path: Path, recorded: Callable[[Path], Records]
) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if "ignore_eos" in asked.json:
            await reply.json(422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"})
        else:
            await tokens(4)(asked, reply)

    with SseServer(script, owned_by="local") as server:
        forced = replayed(TEN, "--url", server.url, "--events", str(tmp_path / "forced"), *GOODPUT)
        capped = replayed(
            TEN, "--url", server.url, "--events", str(tmp_path / "capped"), *GOODPUT, "--lengths", "capped"
        )
    assert forced.returncode == 1 and "--lengths capped does without" in forced.stderr
    assert capped.returncode == 0 and "lengths capped" in capped.stderr
    assert {asked.json["max_tokens"] for asked in server.asked[10:]} == {4}
    records = recorded(tmp_path / "capped")
    assert [end["outcome"] for end in records["end"]] == ["completed"] * 10
    assert all(begin["labels"] == {"length_forced": True} for begin in records["begin"])


def test_a_dead_upstream_is_one_line_and_exit_2_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as server:
        url = server.url
    done = replayed(TEN, "--url", url, "--events", str(tmp_path / "events"), *GOODPUT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: --url: {url}/v1 cannot be reached: ")
    assert not (tmp_path / "events").exists()


def test_a_list_of_models_that_is_an_error_is_told_with_its_status(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.json(503, {"data": [{"id": "not ready"}]})

    with SseServer(script) as server:
        url = f"{server.url}/v2"  # whose models the script answers
        arguments = [TEN, "--url", url, "--events", str(tmp_path / "events"), *GOODPUT]
        done = replayed(*arguments)
        assert [asked.path for asked in server.asked] == ["/v2/models"]
        named = replayed(*arguments, "--model", "m")
    assert (done.returncode, done.stderr) == (2, f"error: --model: {url}/models answered 503; accepted: a model name\n")
    assert "replaying 10 requests" in named.stderr


def test_a_server_that_never_answers_is_exit_1(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await asyncio.sleep(30)

    with SseServer(script) as server:
        done = replayed(TEN, "--url", server.url, "--events", str(tmp_path), *GOODPUT, "--drain", "300ms")
    assert done.returncode == 1 and "no request came to its end" in done.stderr


def test_every_request_failed_is_exit_1(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.json(500, {"error": {}})

    with SseServer(script) as server:
        done = replayed(TEN, "--url", server.url, "--events", str(tmp_path), *GOODPUT, "--format", "csv")
    assert done.returncode == 1 and "every request failed" in done.stderr
    header, values = done.stdout.splitlines()
    row = dict(zip(header.split(","), values.split(","), strict=True))
    assert (row["failed"], row["completed"], row["reasons"]) == ("10", "0", "failed(http_error)=10")


def test_a_dry_run_needs_no_server_and_writes_nothing(tmp_path: Path) -> None:
    done = sloscope(
        "replay", TEN, "--dry-run", *GOODPUT, "--rate", "20", "--events", str(tmp_path / "events"), "--format", "json"
    )
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and not (tmp_path / "events").exists()
    assert (row["requests"], row["mean_rate_rps"], row["span_s"]) == (10, 20.0, 0.45)  # 9 gaps of 50 ms


def test_a_dry_run_tells_the_shape_of_a_mooncake_trace(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    ids = [[1, 2], [1, 2, 3], [4]]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 512 * len(row), "output_length": 9, "hash_ids": row}) + "\n"
            for at, row in zip((0, 0, 3000), ids, strict=True)
        )
    )
    asked = ["--dry-run", *GOODPUT, "--tenant", "t1", "--slow-readers", "1", "--cancel-rate", "1", "--warmup", "1"]
    done = sloscope("replay", str(trace), *asked, "--format", "json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["requests"], row["span_s"], row["arrivals"], row["left_out"]) == (3, 3.0, "as recorded", 0)
    # Two in the first second; gaps of 0 and 3 s: mean 1.5, deviation 1.5.
    assert (row["peak_rate_rps"], row["arrival_cv"]) == (2, 1.0)
    # 1,024 of 1024 + 1536 + 512 prompt tokens stood in a prompt before.
    assert row["shared_prefix_share"] == 1024 / 3072
    assert (row["tenants"], row["slow_readers"], row["cancelling"], row["warmup"]) == ("t1=3", 3, 3, 1)
    for format in ("table", "csv"):
        told = sloscope("replay", str(trace), *asked, "--format", format)
        assert told.returncode == 0 and "shared_prefix_share" in told.stdout and "t1=3" in told.stdout


def test_arrivals_of_another_kind_are_printed(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,4\n" * 8)
    asked = ["--arrivals", "burst", "--burst-size", "4", "--burst-period", "1s", "--burst-on", "0"]
    dry = sloscope("replay", str(trace), "--dry-run", *GOODPUT, *asked, "--format", "json")
    (row,) = json.loads(dry.stdout)
    assert row["arrivals"] == "burst at 4 req/s, 4 in 0s of every 1s" and row["peak_rate_rps"] == 4
    with SseServer(tokens(4)) as server:
        done = replayed(str(trace), "--url", server.url, "--events", str(tmp_path / "e"), *GOODPUT, *asked)
    assert done.returncode == 0 and "; arrivals burst at 4 req/s" in done.stderr


def test_failures_in_a_trace_are_counted_and_left_out(tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,GPT-4,9,4,13,API log\n6,GPT-4,9,0,9,API log\n"
    )
    done = sloscope("replay", str(trace), "--dry-run", *GOODPUT, "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (row["requests"], row["left_out"]) == (1, 1)
    assert "1 rows are failed requests of unknown length and are left out" in done.stderr


def test_retries_are_counted_apart(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if "x-sloscope-retry-of" in asked.headers:
            await tokens(4)(asked, reply)
        else:
            await reply.json(429, {"error": {}}, {"retry-after": "0"})

    with SseServer(script) as server:
        asked = ["--retries", "1", "--timeout", "10s", "--format", "json"]
        done = replayed(TEN, "--url", server.url, "--events", str(tmp_path), *GOODPUT, *asked)
    (row,) = json.loads(done.stdout)
    assert (row["scheduled"], row["sent"], row["offered"], row["retries"]) == (10, 20, 20, 10)
    assert (row["completed"], row["failed"], row["retries_completed"]) == (10, 10, 10)
    assert (row["qualified"], row["attainment"]) == (10, 0.5)


@pytest.mark.parametrize(("rule", "followed"), [("drain", 'drain_limit = "2s"'), ("unfinished", 'grace = "300ms"')])
def test_the_contracts_window_rule_says_how_long_open_requests_are_followed(
    tmp_path: Path, rule: str, followed: str
) -> None:
    contract = tmp_path / "slo.toml"
    contract.write_text(f'version = 1\n[classes.a]\ne2e = "9s"\n[window]\nrule = "{rule}"\n{followed}\n')
    with SseServer(tokens(2, gap_s=1.0)) as server:
        arguments = ["--url", server.url, "--events", str(tmp_path / "e"), "--contract", str(contract)]
        done = replayed("synthetic:constant?n=4&rate=100", *arguments, "--format", "json")
    (row,) = json.loads(done.stdout)
    # An answer takes a second: the drain waits for it, a grace of 300 ms does not.
    assert (row["completed"], row["unfinished"]) == ((4, 0) if rule == "drain" else (0, 4)), done.stderr
    assert row["window_rule"] == rule and row["offered"] == 4
    assert done.returncode == (0 if rule == "drain" else 1)


def test_what_is_zero_is_printed_as_zero(tmp_path: Path) -> None:
    with SseServer(tokens(4, first_s=0.05)) as server:
        done = replayed(TEN, "--url", server.url, "--events", str(tmp_path), "--goodput", "ttft:1", "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (row["qualified"], row["attainment"], row["completed"]) == (0, 0.0, 10)
    assert (row["failed"], row["cancelled"], row["unfinished"], row["own_limit"]) == (0, 0, 0, 0)
    assert done.returncode == 0  # late answers are answers


def test_an_invalid_run_is_said_loudly(tmp_path: Path) -> None:
    # A tenth of the limit is 1 µs: no send is that punctual.
    with SseServer(tokens(4)) as server:
        done = replayed(TEN, "--url", server.url, "--events", str(tmp_path), "--goodput", "ttft:0.01")
    assert "INVALID RUN: dispatch lag p99 " in done.stderr


def test_a_run_that_is_all_warm_up_is_no_run(tmp_path: Path) -> None:
    with SseServer(tokens(4)) as server:
        events = ("--events", str(tmp_path), "--goodput", "ttft:300", "--warmup", "10")
        done = replayed(TEN, "--url", server.url, *events)
    assert "INVALID RUN: all 10 requests that were sent are warm-up, and none is offered" in done.stderr


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path, recorded: Callable[[Path], Records]) -> None:
    code = "from sloscope.cli import main; main()"
    slow = "synthetic:constant?n=1000&rate=20"
    with SseServer(tokens(3, gap_s=0.05)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "replay", slow, "--url", server.url, "--events", str(tmp_path), *GOODPUT,
             "--format", "json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(server.asked) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (row,) = json.loads(out)
    assert row["interrupted"] is True and 20 <= row["sent"] < 1000 and row["scheduled"] == 1000
    records = recorded(tmp_path)
    assert len(records["begin"]) == row["sent"]
    assert len(records["end"]) == row["sent"] == row["completed"] + row["unfinished"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TEN, "--url", "http://127.0.0.1:9"], "--contract: exactly one of"),
        ([TEN, *GOODPUT], "--url: is missing"),
        ([TEN, *GOODPUT, "--url", "127.0.0.1:9"], "--events: is missing"),
        ([TEN, "--goodput", "ttft:fast"], "goodput ttft: 'fast'"),
        (["missing.csv", *GOODPUT], "trace 'missing.csv': cannot be read"),
        ([TEN, *GOODPUT, "--class", "gold"], "class: 'gold'"),
        ([TEN, *GOODPUT, "--lengths", "long"], "--lengths: 'long'"),
        ([TEN, *GOODPUT, "--api", "embeddings"], "--api: 'embeddings'"),
        ([TEN, *GOODPUT, "--drain", "soon"], "--drain: 'soon'"),
        ([TEN, *GOODPUT, "--header", "no colon"], "--header: 'no colon'"),
        ([TEN, *GOODPUT, "--format", "xml"], "--format: 'xml'"),
        ([TEN, *GOODPUT, "--rate", "1", "--speedup", "2"], "--speedup: not together"),
        ([TEN, *GOODPUT, "--limit", "-1"], "--limit: -1 is not accepted"),
        ([TEN, *GOODPUT, "--arrivals", "weekly"], "--arrivals: 'weekly' is not accepted; accepted: trace, poisson"),
        ([TEN, *GOODPUT, "--arrivals", "poisson"], "--rate: is missing; accepted: the mean rate of --arrivals poisson"),
        ([TEN, *GOODPUT, "--arrivals", "poisson", "--rate", "-1"], "--rate: -1.0"),
        ([TEN, *GOODPUT, "--arrivals", "poisson", "--speedup", "2"], "--speedup: 2.0 is not for --arrivals poisson"),
        ([TEN, *GOODPUT, "--arrival-cv", "2"], "--arrival-cv: 2.0 is not for --arrivals trace; accepted: with"),
        ([TEN, *GOODPUT, "--arrivals", "gamma", "--rate", "1", "--arrival-cv", "0"], "--arrival-cv: 0.0"),
        ([TEN, *GOODPUT, "--arrivals", "burst", "--rate", "1", "--burst-size", "0"], "--burst-size: 0"),
        ([TEN, *GOODPUT, "--arrivals", "burst", "--rate", "1", "--burst-on", "1.1"], "--burst-on: 1.1"),
        ([TEN, *GOODPUT, "--arrivals", "burst", "--rate", "1", "--burst-period", "1s"], "--burst-period: not together"),
        ([TEN, *GOODPUT, "--arrivals", "burst", "--burst-period", "soon"], "--burst-period: 'soon'"),
        ([TEN, *GOODPUT, "--synthetic-lengths", "words=3"], "--synthetic-lengths 'words=3': 'words' is not accepted"),
        ([TEN, *GOODPUT, "--slow-readers", "2"], "--slow-readers: 2.0"),
        ([TEN, *GOODPUT, "--read-pause", "0s"], "--read-pause: '0s'"),
        ([TEN, *GOODPUT, "--timeout", "never"], "--timeout: 'never'"),
        ([TEN, *GOODPUT, "--retries", "-1"], "--retries: -1 is not accepted; accepted: 0 to 20"),
        ([TEN, *GOODPUT, "--retry-wait", "now"], "--retry-wait: 'now'"),
        ([TEN, *GOODPUT, "--processes", "0"], "--processes: '0' is not accepted; accepted: 1 to 256, or auto"),
        ([TEN, *GOODPUT, "--processes", "many"], "--processes: 'many'"),
        ([TEN, *GOODPUT, "--format-trace", "weka"], "--format-trace: 'weka'"),
        ([TEN, *GOODPUT, "--token-file", "t"], "--token-file: is for --receipts alone"),
        ([TEN, *GOODPUT, "--receipts", "9464", "--token-file", "/no/such"], "--token-file: '/no/such' cannot be read"),
        ([TEN, *GOODPUT, "--receipts", "9464", "--token-file", os.devnull], "--token-file: '/dev/null' is empty"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(arguments: list[str], said: str) -> None:
    done = sloscope("replay", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and said in done.stderr and done.stdout == ""


def test_a_header_is_sent_and_never_recorded(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as server:
        arguments = ["--url", server.url, "--events", str(tmp_path), "--header", "Authorization: Bearer s3cret"]
        done = replayed(TEN, *arguments, *GOODPUT)
        assert all(asked.headers["authorization"] == "Bearer s3cret" for asked in server.asked)
    assert done.returncode == 0
    assert all(b"s3cret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(("by_file", "processes"), [(True, "1"), (False, "2")])
def test_receipts_carry_the_token_of_the_control_plane_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool, processes: str
) -> None:
    async def control(asked: Asked, reply: Reply) -> None:
        if asked.headers.get("authorization") == "Bearer s3cret":
            await reply.json(200, {"accepted": len(asked.json["receipts"]), "rejected": []})
        else:
            await reply.json(401, {"error": {"message": "authorization"}})

    token, events = tmp_path / "token", tmp_path / "events"
    token.write_text("s3cret\n")
    monkeypatch.setenv("SLOSCOPE_TOKEN", "another" if by_file else "s3cret")
    with SseServer(tokens(1)) as server, SseServer(control) as plane:
        arguments = ["--url", server.url, "--receipts", plane.url, "--events", str(events), "--processes", processes]
        done = replayed(TEN, *arguments, *GOODPUT, *(["--token-file", str(token)] if by_file else []))
        assert sum(len(asked.json["receipts"]) for asked in plane.asked) == 10
        assert plane.asked[0].json == {"receipts": []}  # whether it would take any
        assert all("authorization" not in asked.headers for asked in server.asked)
    assert done.returncode == 0 and "could not be posted" not in done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert all(b"s3cret" not in path.read_bytes() for path in events.rglob("*") if path.is_file())


def test_a_token_that_is_no_header_value_is_one_line_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOSCOPE_TOKEN", "s3cret\r\nx: y")
    done = sloscope("replay", TEN, *GOODPUT, "--receipts", "9464", "--dry-run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "SLOSCOPE_TOKEN: accepted: one line of printable ASCII" in done.stderr and "s3cret" not in done.stderr


def test_an_events_directory_of_another_contract_is_refused(tmp_path: Path) -> None:
    (tmp_path / "contract.toml").write_text('version = 1\n[classes.a]\nttft = "1s"\n')
    with SseServer(tokens(1)) as server:
        done = sloscope("replay", TEN, "--url", server.url, "--events", str(tmp_path), *GOODPUT)
        assert server.asked == []
    assert done.returncode == 2 and "another --events directory" in done.stderr


def test_an_events_path_that_is_a_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("")
    with SseServer(tokens(1)) as server:
        done = sloscope("replay", TEN, "--url", server.url, "--events", str(tmp_path / "events"), *GOODPUT)
        assert server.asked == []
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "events directory" in done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_terminal_shows_one_bar_while_it_runs(tmp_path: Path, processes: str) -> None:
    main, terminal = pty.openpty()
    code = "from sloscope.cli import main; main()"
    with SseServer(tokens(2)) as server:
        arguments = ["synthetic:constant?n=40&rate=20", "--url", server.url, "--events", str(tmp_path), *GOODPUT]
        arguments += ["--processes", processes]
        process = subprocess.Popen([sys.executable, "-c", code, "replay", *arguments], stdout=subprocess.DEVNULL,
                                   stderr=terminal)  # fmt: skip
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(main, 4096):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(main)
        assert process.wait(60) == 0
    assert re.search(rb"\[#+\.+\] sent \d+/40", shown)
    sent = [int(number) for number in re.findall(rb"sent (\d+)/40", shown)]
    assert sent == sorted(sent) and 20 < sent[-1] <= 40  # of all processes together


def test_requests_that_met_the_generators_own_limit_make_the_run_invalid(tmp_path: Path) -> None:
    trace = tmp_path / "burst.jsonl"
    trace.write_text('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 2}\n' * 100)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); from sloscope.cli import main; main()"
    )
    with SseServer(tokens(2, first_s=0.5)) as server:
        arguments = [str(trace), "--url", server.url, "--events", str(tmp_path / "events"), *GOODPUT]
        done = subprocess.run(
            [sys.executable, "-c", code, "replay", *arguments, "--format", "json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and row["sent"] == 100
    # 64 descriptors, some of them the process's own: more than 36 of a hundred find none.
    assert row["own_limit"] == row["failed"] > 36 and row["completed"] == 100 - row["failed"]
    assert row["valid"] is False and f"{row['own_limit']} requests found no free descriptor" in done.stderr


@pytest.mark.parametrize(
    "command", [("replay", TEN), ("query", "goodput"), ("compact",), ("sidecar", "--upstream", "9"), ("serve",)]
)
@pytest.mark.parametrize("nothing", [("--events", ""), ("--events=",)])
def test_an_events_directory_without_a_name_is_refused_and_not_taken_for_this_one(
    command: tuple[str, ...], nothing: tuple[str, ...]
) -> None:
    done = sloscope(*command, *nothing)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --events: '' is not accepted; accepted: a directory\n"
