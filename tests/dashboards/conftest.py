"""Prometheus and promtool come from the system (Debian: `apt-get install prometheus`)."""

import subprocess

from tests.end_to_end.support import need


def promtool(*args: str) -> str:
    """What promtool printed; its complaint as an assertion."""
    done = subprocess.run([need("promtool"), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
