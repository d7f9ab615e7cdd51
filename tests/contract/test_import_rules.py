"""Who imports what. The rules of pyproject.toml are run, and what a process really loads is looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LINT = Path(sys.executable).with_name("lint-imports")


def loaded_by(module: str) -> set[str]:
    """Top-level packages in a fresh process after this import."""
    code = f"import json, sys, {module}; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # What forwards streams has neither a model nor a database beside it.
        ("exporter.data_plane", {"torch", "duckdb", "pyarrow", "fastapi", "uvicorn", "typer", "rich", "queries"}),
        ("exporter.control_plane", {"torch", "reference_server", "dashboards"}),
        # `sloscope --help` answers at once.
        ("sloscope.cli", {"torch", "duckdb", "pyarrow", "fastapi", "numpy", "httpx", "exporter", "queries"}),
        # The load generator shares its process with nothing that could delay a send.
        ("sloscope.client.replay", {"torch", "duckdb", "pyarrow", "fastapi", "httpx", "numpy", "queries"}),
        # The front end times deliveries: the decoder is in another process.
        ("reference_server.cli", {"torch", "duckdb", "exporter", "queries"}),
        # Other people's processes.
        ("sloscope.client.transport", {"torch", "duckdb", "numpy", "fastapi", "typer", "exporter", "queries"}),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, heavy: set[str]) -> None:
    loaded = loaded_by(module)
    assert module.partition(".")[0] in loaded
    assert sorted(heavy & loaded) == []


def test_the_core_loads_the_standard_library_alone() -> None:
    core = (
        "definitions",
        "contract",
        "records",
        "catalogue",
        "sse",
        "stream_record",
        "journal",
        "clock",
        "errors",
        "units",
        "ids",
    )
    loaded = loaded_by(", ".join(f"sloscope.{name}" for name in core))
    # What a bare interpreter has, site hooks of this installation included, is nobody's import.
    foreign = loaded - loaded_by("os") - set(sys.stdlib_module_names) - {"sloscope"}
    assert sorted(foreign) == []


def test_the_import_rules_of_the_project_are_kept() -> None:
    done = subprocess.run(
        [LINT, "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
