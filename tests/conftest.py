"""What every run of the tests keeps to, and what it says at its end."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, settings

# How fast a busy machine draws an example says nothing about the code.
settings.register_profile("sloscope", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sloscope")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many random histories were lived through, wherever the tests ran."""
    counted: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        counted.update({name: value for name, value in _counts(report.user_properties)})
    if counted:
        terminalreporter.write_line(f"scheduler: {counted['histories']} random histories, {counted['steps']} steps")


def _counts(properties: Iterable[tuple[str, object]]) -> Iterable[tuple[str, int]]:
    for name, value in properties:
        if name in ("histories", "steps") and isinstance(value, int):
            yield name, value
