"""Every field of a receipt, given what is empty, nought or false: taken where that is a value of it, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from exporter.control_plane import ControlPlane
from exporter.receipts import _FIELDS
from tests.exporter.harness import total
from tests.exporter.test_receipts import receipt, records, with_app

FALSY: tuple[Any, ...] = (0, 0.0, "", False, [], {})
COUNTS = ("attempt", "prompt_tokens", "output_tokens", "max_tokens", "consumer_hold_ns", "loop_lag_max_ns", "bytes")
TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*COUNTS, "http_status", "send_ns", "intended_ns"), (0,)),
    **dict.fromkeys(("model", "tenant", "external_id", "reason"), ("",)),
    **dict.fromkeys(("streaming", "recorded"), (False,)),
    **dict.fromkeys(("labels", "own_limits"), ({},)),
    **dict.fromkeys(("finish_reason", "t_ns"), ([],)),
}


def is_among(value: object, values: tuple[object, ...]) -> bool:
    """By type, too: to Python 0, 0.0 and False are equal."""
    return any(type(value) is type(each) and value == each for each in values)


@pytest.mark.parametrize("field", _FIELDS)
@pytest.mark.parametrize("clock_id", ["fake:0:0", "browser:abc"])
def test_what_is_empty_or_nought_is_no_way_to_leave_a_field_out(tmp_path: Path, field: str, clock_id: str) -> None:
    taken = TAKEN.get(field, ())

    async def test(client: httpx.AsyncClient, plane: ControlPlane) -> None:
        for value in FALSY:
            whole = {"choice": None, "type": None} if field == "t_ns" else {}  # which have a value for each stamp
            answer = await client.post("/v1/receipts", json=receipt(**{"clock_id": clock_id, **whole, field: value}))
            if is_among(value, taken):
                assert answer.json() == {"accepted": 1, "rejected": []}, value
            else:
                ((rejected),) = answer.json()["rejected"]
                assert (answer.status_code, answer.json()["accepted"]) == (400, 0)
                assert field in rejected["error"] and "\n" not in rejected["error"], rejected
        assert total(plane.store, "sloscope_client_requests_offered_total") == len(taken)

    with_app(tmp_path, test)
    assert len([record for record in records(tmp_path) if record["kind"] == "end"]) == len(taken)


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0])
def test_whether_its_sender_records_it_is_said_with_a_truth_and_no_number(tmp_path: Path, value: float) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        answer = await client.post("/v1/receipts", json=receipt(recorded=value))
        said = [{"index": 0, "error": "recorded: accepted: true or false"}]
        assert (answer.status_code, answer.json()["rejected"]) == (400, said)

    with_app(tmp_path, test)
    assert records(tmp_path) == []


def test_an_anchor_is_checked_where_nothing_is_placed_by_it_too(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        for place in ({"recorded": True}, {"clock_id": "fake:0:0"}):
            answer = await client.post("/v1/receipts", json=receipt(anchor={"mono_ns": 1, "wall_ns": -1}, **place))
            assert answer.json()["rejected"][0]["error"] == "wall_ns: '-1'; accepted: a whole number from 0, below 2^62"

    with_app(tmp_path, test)
