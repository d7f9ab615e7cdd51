"""The command itself: what it refuses before anything starts, and how it ends."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from reference_server.assembly import PolicyChoice
from reference_server.cli import notes_on
from reference_server.model_store import BUILTIN, PACKAGED
from sloscope import contract as contracts
from sloscope.demo.processes import SLOSCOPE
from sloscope.ids import new_request_id
from sloscope.journal import is_live, journal_files
from tests.command import sloscope
from tests.reference_server.serving import Served
from tests.waiting import until


def serve(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr of a server that must not start."""
    command = [*SLOSCOPE, "serve", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_occupied_port_is_one_line_and_exit_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, lines = serve("--listen", address)
    assert code == 2
    assert lines == [f"error: --listen: '{address}': Address already in use; accepted: a free address of this host"]


@pytest.mark.e2e
def test_a_port_that_someone_takes_while_the_model_loads_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{rival.getsockname()[1]}"
        command = [*SLOSCOPE, "serve", "--listen", address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            # An engine process exists, so our server has bound the port; it listens only when the model is ready.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until(lambda: children.read_text(), 30)
            rival.listen()
            _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said == f"error: --listen: '{address}': Address already in use; accepted: a free address of this host\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--model", "nowhere.gguf"],
            "error: model 'nowhere.gguf': no such file; accepted: builtin, ",
        ),
        (["--contract", "none.toml"], "error: contract 'none.toml': cannot be read: No such file or directory"),
        (["--goodput", "speed:3"], "error: goodput: 'speed:3' is not accepted; accepted: ttft"),
        (["--goodput", "ttft:3", "--contract", "x"], "error: --goodput: given together with --contract"),
        (["--listen", "here"], "error: --listen: 'here' is not an address; accepted: HOST:PORT or PORT"),
        (["--max-context", "8"], "error: --max-context: 8 tokens; accepted: 0, or 16 and more"),
        (["--kv-blocks", "3", "--block-tokens", "5"], "error: --kv-blocks: 3 of 5 tokens; accepted: 0, or room for 16"),
        (["--max-waiting", "9" * 20], f"error: --max-waiting: {'9' * 20}; accepted: at most 2147483648"),
        (["--kv-blocks", "9" * 20], f"error: --kv-blocks: {'9' * 20}; accepted: at most 2147483648"),
        (["--drain", "soon"], "error: --drain: 'soon' is not a duration"),
        (["--order", "lifo"], "error: --order: 'lifo'; accepted: fcfs, edf, vtc, drr"),
        (["--reservation", "estimate"], "error: --reservation: 'estimate' needs lengths; accepted: together with"),
        (["--lengths", "nowhere.json"], "error: nowhere.json: cannot be read"),
        (["--lanes", "a,,b"], "error: --lanes: 'a,,b'; accepted: different names, joined by commas"),
        (["--lanes", "a", "--goodput", "ttft:3"], "error: --lanes: class 'a' is not in the contract; accepted: "),
        (["--tenant-weights", "a=0"], "error: --tenant-weights: 'a=0'; accepted: each tenant once as TENANT=NUMBER"),
        (["--tenant-weights", "a=1e-308"], "error: --tenant-weights: 'a=1e-308'; accepted: each tenant once as"),
        (["--unit-output", "1e308"], "error: --unit-output: 1e+308; accepted: above 0, at most 1e+09"),
        (["--unit-prompt", "1e308"], "error: --unit-prompt: 1e+308; accepted: 0 to 1e+09"),
        (
            ["--tenant-weights", "a=2,a=3"],
            "error: --tenant-weights: 'a=3'; accepted: each tenant once as TENANT=NUMBER",
        ),
        (["--cost-model", "/dev/null"], "error: --cost-model: '/dev/null': is no file; accepted: what `sloscope model"),
        (["--slow-reader-after", "soon"], "error: --slow-reader-after: 'soon' is not a duration"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(arguments: list[str], line: str) -> None:
    done = sloscope("serve", "--listen", "127.0.0.1:0", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(line), done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--events", "/proc/nowhere"], "error: events directory '/proc/nowhere': No such file or directory"),
        (["--kv-blocks", "2147483648", "--block-tokens", "2147483648"], "error: kv_blocks: 2147483648 of 2147483648"),
    ],
)
def test_what_is_wrong_only_once_processes_run_is_one_line_and_exit_2(arguments: list[str], line: str) -> None:
    code, lines = serve(*arguments)
    assert code == 2 and len(lines) == 1 and lines[0].startswith(line), lines


def test_a_damaged_model_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + bytes(range(200)))
    code, lines = serve("--model", str(model))
    assert code == 2 and len(lines) == 1 and "damaged or truncated GGUF file" in lines[0], lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_no_process_left(tmp_path: Path, number: signal.Signals) -> None:
    """Who has sent half a body does not hold up the end."""
    served = Served(tmp_path)
    engine = served.engine_pid()
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert served.text().status_code == 200  # the request before it has come to the loop by now
        os.kill(served.child.process.pid, number)
        assert served.child.process.wait(60) == 0
        assert client.recv(1) == b""
    assert not alive(engine)
    ends = [record for record in served.journal() if record["kind"] == "end"]
    assert sorted(end["outcome"] for end in ends) == ["cancelled", "completed"]
    assert not any(is_live(path) for path in journal_files(served.events))
    assert served.stop() == 0
    assert served.child.log.read_text().count("\n") == 1, "only the line that it serves"


@pytest.mark.e2e
def test_at_a_signal_running_answers_get_their_time_and_new_ones_a_503(tmp_path: Path) -> None:
    served = Served(tmp_path, "--drain", "20s")
    running = served.stream(max_tokens=700)
    running.read_head()
    events = running.events()
    next(events)
    served.child.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
    refused = served.text()
    assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
    assert [event.body for event in events][-1] == "[DONE]"
    assert served.stop() == 0
    assert "1 requests have 20 s to end; the same signal again ends them now" in served.child.log.read_text()


NO_TTFT = contracts.from_shorthand("itl_max:30")


@pytest.mark.parametrize(
    ("policies", "promised", "note"),
    [
        (PolicyChoice(tenant_weights={"gold": 2}), NO_TTFT, "--tenant-weights does nothing with --order fcfs; vtc"),
        (PolicyChoice(order="edf", quantum=5), None, "--quantum does nothing with --order edf; vtc"),
        (PolicyChoice(order="edf"), NO_TTFT, "--order edf: no class has a ttft limit"),
        (PolicyChoice(admission="deadline"), None, "--admission deadline: no class has a ttft limit"),
        (PolicyChoice(admission="deadline"), None, "without --lengths an answer counts as long as its max_tokens"),
        (PolicyChoice(lanes=("a", "b")), None, "--lanes: without --contract every request is of one class"),
    ],
)
def test_what_was_asked_for_and_can_do_nothing_is_said(policies: PolicyChoice, promised: Any, note: str) -> None:
    assert any(said.startswith(note) for said in notes_on(policies, promised))


def test_no_note_without_cause() -> None:
    assert not list(notes_on(PolicyChoice(), None))
    edf = PolicyChoice(order="edf", lanes=("interactive",))
    assert not list(notes_on(edf, contracts.from_shorthand("ttft:300")))
    assert not list(notes_on(PolicyChoice(order="vtc", tenant_weights={"gold": 2}, quantum=5), None))


@pytest.mark.e2e
def test_what_runs_beyond_the_drain_limit_gets_an_error_in_its_stream(tmp_path: Path) -> None:
    served = Served(tmp_path, "--drain", "100ms")
    request_id = new_request_id()
    running = served.stream({"x-sloscope-request-id": request_id}, max_tokens=8000)
    running.read_head()
    events = running.events()
    next(events)
    served.child.process.send_signal(signal.SIGTERM)
    assert "the server is stopping" in list(events)[-1].body["error"]["message"]
    assert served.stop() == 0
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"]) == ("failed", "in_band_error")


@pytest.mark.e2e
def test_a_dead_engine_is_an_error_in_the_stream_a_503_and_exit_1(tmp_path: Path) -> None:
    served = Served(tmp_path)
    request_id = new_request_id()
    running = served.stream({"x-sloscope-request-id": request_id}, max_tokens=8000)
    running.read_head()
    events = running.events()
    next(events)
    os.kill(served.engine_pid(), signal.SIGKILL)
    assert "the engine process is gone" in list(events)[-1].body["error"]["message"]
    assert httpx.get(f"{served.url}/health").status_code == 503
    assert served.child.process.wait(10) == 1
    assert served.stop() == 1
    assert "error: the engine process ended (exit code -9)" in served.child.log.read_text()
    end = served.wait_for_end(request_id)
    assert (end["outcome"], end["reason"]) == ("failed", "in_band_error")


@pytest.mark.e2e
def test_no_engine_outlives_a_front_end_that_was_killed(tmp_path: Path) -> None:
    served = Served(tmp_path)
    engine = served.engine_pid()
    running = served.stream(max_tokens=8000)
    running.read_head()
    next(running.events())
    served.child.process.kill()
    until(lambda: not alive(engine))
    running.close()
    assert served.stop() == -signal.SIGKILL
    until(lambda: not any(is_live(path) for path in journal_files(served.events)))


def test_the_models_are_listed() -> None:
    done = sloscope("model", "list", "--format", "csv")
    header, *rows = done.stdout.splitlines()
    assert header == "name,present,size_bytes,licence,where"
    assert [row.split(",")[0] for row in rows] == [*BUILTIN, *PACKAGED]
    assert rows[0].startswith("builtin,True,")


def test_what_is_built_in_needs_no_fetching() -> None:
    done = sloscope("model", "get", "builtin")
    assert done.returncode == 0 and done.stderr == "builtin: nothing to fetch, it is made at start\n"


def test_a_model_that_nobody_knows_is_one_line_and_exit_2() -> None:
    done = sloscope("model", "get", "gpt")
    assert done.returncode == 2 and done.stderr == "error: model 'gpt': is not known; accepted: smollm2\n"
