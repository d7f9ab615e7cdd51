"""What people get wrong first: one clear line each, exit 2, and nothing left behind."""

import socket
import subprocess
from pathlib import Path

import pytest

from sloscope.demo.processes import SLOSCOPE
from tests.end_to_end.support import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
GOODPUT = ("--goodput", "ttft:300 itl_max:30")


def said(*arguments: str) -> str:
    done = subprocess.run([*SLOSCOPE, *arguments], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    print(f"$ sloscope {' '.join(arguments)}\n{line}")
    return line


def test_a_bad_contract(tmp_path: Path) -> None:
    bad = tmp_path / "contract.toml"
    bad.write_text('version = 1\n[classes.chat]\nttft = "fast"\n')
    for command in (
        ("contract", "check", str(bad)),
        ("sidecar", "--upstream", "http://127.0.0.1:1", "--contract", str(bad), "--events", str(tmp_path / "events")),
        ("serve", "--contract", str(bad)),
    ):
        line = said(*command)
        assert "classes.chat.ttft" in line and "'fast'" in line and "300ms" in line
    assert not (tmp_path / "events").exists()


def test_a_bad_trace(tmp_path: Path) -> None:
    bad = tmp_path / "trace.csv"
    bad.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,ten\n")
    line = said("replay", str(bad), "--url", "http://127.0.0.1:1", "--events", str(tmp_path / "events"), *GOODPUT)
    assert "GeneratedTokens" in line and "'ten'" in line and "accepted" in line
    assert not (tmp_path / "events").exists()


def test_a_dead_upstream(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    trace = "synthetic:poisson?rate=5&n=5"
    line = said("replay", trace, "--url", url, "--events", str(tmp_path / "events"), *GOODPUT)
    assert url in line
    assert not (tmp_path / "events").exists()


def test_an_occupied_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        for command in (
            ("serve", "--listen", address),
            ("sidecar", "--upstream", "http://127.0.0.1:1", "--listen", address, "--control", "0", *GOODPUT),
            ("sidecar", "--upstream", "http://127.0.0.1:1", "--listen", "0", "--control", address, *GOODPUT),
        ):
            extra = ("--events", str(tmp_path / "events"))
            assert address in said(*command, *extra)


def test_a_missing_model_file() -> None:
    line = said("serve", "--model", "/nowhere/model.gguf")
    assert "/nowhere/model.gguf" in line and "accepted" in line
