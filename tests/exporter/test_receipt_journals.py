"""Receipts whose sender keeps records of its own: here or in another directory, which the name of its journal tells."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from exporter.control_plane import ControlPlane
from exporter.receipts import OwnJournals
from sloscope.clock import SystemClock
from sloscope.journal import JournalWriter
from tests.exporter.harness import total
from tests.exporter.test_receipts import receipt, records, with_app


def test_what_its_sender_records_in_another_directory_is_recorded_here_too(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "elsewhere", "client", SystemClock()) as other:
        elsewhere = receipt(recorded=True, journal=other.path.name, labels={"length_forced": True})

        async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
            assert (await client.post("/v1/receipts", json=elsewhere)).status_code == 200
            assert total(plane.store, "sloscope_client_requests_total", outcome="completed") == 1

        with_app(tmp_path, test)
    begin, chunks, end = (each for each in records(tmp_path) if each["kind"] != "clock")
    assert (begin["request_id"], begin["labels"]) == (elsewhere["request_id"], {"length_forced": True})
    assert chunks["t_ns"] == elsewhere["t_ns"] and end["outcome"] == "completed"


def test_what_its_sender_records_in_this_directory_is_observed_only(tmp_path: Path) -> None:
    # A file that is moved away is that of a writer which was seen here, and so is the one that it goes on with.
    with JournalWriter(tmp_path / "events", "client", SystemClock()) as ours:
        names = [ours.path.name, ours.path.name, ours.path.name.replace("-0.jsonl", "-1.jsonl")]

        async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
            for name in names:
                assert (await client.post("/v1/receipts", json=receipt(recorded=True, journal=name))).status_code == 200
                ours.path.unlink(missing_ok=True)
            assert total(plane.store, "sloscope_client_requests_total", outcome="completed") == 3

        with_app(tmp_path, test)
    assert records(tmp_path) == []


def test_the_senders_whose_journal_is_here_are_remembered_up_to_a_number(tmp_path: Path) -> None:
    journals = OwnJournals(tmp_path, remembered=2)
    (tmp_path / "journal" / "client").mkdir(parents=True)
    names = [f"0a1b2c3d-{pid}-5-0.jsonl" for pid in (1, 2, 3)]
    for name in names:
        path = tmp_path / "journal" / "client" / name
        path.touch()
        assert name in journals
        path.unlink()
    assert [name in journals for name in names] == [False, True, True]


@pytest.mark.parametrize("recorded", [True, None])
@pytest.mark.parametrize(
    "name", ["../client/0a1b2c3d-1-5-0.jsonl", "contract.toml", "", "0a1b2c3d-1-5-0.jsonl\n", 7, []]
)
def test_what_no_journal_is_called_is_refused(tmp_path: Path, name: object, recorded: bool | None) -> None:
    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        answer = await client.post("/v1/receipts", json=receipt(recorded=recorded, journal=name))
        assert answer.status_code == 400
        (refused,) = answer.json()["rejected"]
        assert refused["error"].startswith("journal: ") and refused["error"].count("\n") == 0
        assert total(plane.store, "sloscope_receipts_rejected_total", cause="malformed") == 1

    with_app(tmp_path, test)
    assert records(tmp_path) == []
