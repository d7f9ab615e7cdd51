"""Files recorded from real tools. They are no part of the project: without them these tests skip."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.field_data import field_folder


@pytest.fixture(scope="session")
def field_data() -> Path:
    folder = field_folder()
    if folder is None:
        pytest.skip("no recorded files; SLOSCOPE_FIELD_DATA names their folder")
    return folder
