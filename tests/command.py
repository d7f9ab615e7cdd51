"""The `sloscope` command as a test gives it: exit code, stdout and stderr."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from sloscope.cli import main

Done = subprocess.CompletedProcess[str]


def sloscope(*arguments: str) -> Done:
    """In this process: what a command says and with which code it ends needs no interpreter of its own, which takes
    longer to start than most answers take."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["sloscope", *arguments]):
        try:
            main()
        except SystemExit as left:
            code = left.code
    assert code is None or isinstance(code, int), code
    return Done(["sloscope", *arguments], code or 0, out.getvalue(), err.getvalue())


def sloscope_process(*arguments: str) -> Done:
    """As a person starts it. A warning is an error in it as it is in the tests."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "sloscope", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
