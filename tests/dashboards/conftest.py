"""Prometheus and promtool come from the system (Debian: `apt-get install prometheus`)."""

import os
import shutil
import subprocess

import pytest


def need(program: str) -> str:
    """The program's path. Where nothing may be skipped, its absence is a failure."""
    path = shutil.which(program)
    if path is None:
        if os.environ.get("SLOSCOPE_NO_SKIP"):
            pytest.fail(f"{program} is not installed, and nothing may be skipped here")
        pytest.skip(f"{program} is not installed")
    return path


def promtool(*args: str) -> str:
    """What promtool printed; its complaint as an assertion."""
    done = subprocess.run([need("promtool"), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
