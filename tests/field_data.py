"""Where files recorded from real tools lie. They are no part of the project."""

import os
from pathlib import Path

import pytest


def field_folder() -> Path | None:
    """SLOSCOPE_FIELD_DATA, else ../shared/data beside the repository; None where there is no such folder.

    A folder that was named and is not there fails where nothing may be skipped.
    """
    named = os.environ.get("SLOSCOPE_FIELD_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if folder.is_dir():
        return folder
    if named and os.environ.get("SLOSCOPE_NO_SKIP"):
        pytest.fail(f"no recorded files at {folder}, which SLOSCOPE_FIELD_DATA names, and nothing may be skipped here")
    return None
