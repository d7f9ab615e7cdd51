"""What a benchmark printed, kept as JSON with the machine and the options that it ran with."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path


def options_of(asked: argparse.Namespace) -> dict[str, object]:
    """Of a path its last part: where things lie on this machine says nothing."""
    shown = {name: value.name if isinstance(value, Path) else str(value) for name, value in vars(asked).items()}
    return {"options": shown}


def save(path: Path | None, benchmark: str, rows: Mapping[str, object], **about: object) -> None:
    """Rows and machine, as JSON."""
    if path is None:
        return
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": version("torch")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": benchmark, "machine": machine, **about, **rows}, indent=1) + "\n")
