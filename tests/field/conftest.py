"""Files recorded from real tools. They are no part of the project: without them these tests skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def field_data() -> Path:
    """The folder of recorded files: SLOSCOPE_FIELD_DATA, else ../shared/data beside the repository."""
    override = os.environ.get("SLOSCOPE_FIELD_DATA")
    folder = Path(override) if override else Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no recorded files at {folder}")
    return folder
