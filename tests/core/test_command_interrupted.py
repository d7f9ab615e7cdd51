"""Ctrl-C while the command is still being imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [("--help",), ("query", "--list"), ("replay", "--help"), ("sidecar", "--help")])
@pytest.mark.parametrize("imported", ["inspect", "typer.core", "typer", "sloscope.errors"])
def test_an_interrupt_while_it_starts_ends_it_without_a_traceback(command: tuple[str, ...], imported: str) -> None:
    # Each import that is done is a line: the signal comes in the middle of one of those that follow.
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "sloscope", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == imported:
                break
        else:
            pytest.fail(f"{imported} was not imported")
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert "Traceback" not in said, said[said.index("Traceback") :]
    assert process.returncode in (130, -signal.SIGINT, 0)  # by the signal itself once all is done and said
