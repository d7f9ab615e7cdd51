"""Fields that the engine's records may carry, and what is refused of them."""

from typing import Any

import pytest

from sloscope import records
from sloscope.errors import RecordError

STEP = records.make("step", step_id=1, start_ns=10, end_ns=20)
ENGINE = records.make("engine", at_ns=5, clock_id="monotonic:boot:0")


def test_a_step_without_the_newer_fields_is_still_read() -> None:
    assert records.check(STEP) == {"v": 1, "kind": "step", "step_id": 1, "start_ns": 10, "end_ns": 20}


def test_an_engine_that_was_not_calibrated_has_no_ceilings() -> None:
    record = records.make("engine", at_ns=5, clock_id="monotonic:boot:0", ceiling_flops_per_s=None, policies={})
    assert records.check(record) == ENGINE | {"policies": {}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill_ids": ["a", "b"], "prefill_token_counts": [3]}, "1 values for 2 prefill_ids"),
        ({"prefill_token_counts": [3]}, "1 values for 0 prefill_ids"),
        (
            {"prefill_ids": ["a"], "prefill_charged_counts": []},
            "step.prefill_charged_counts: 0 values for 1 prefill_ids",
        ),
        ({"prefill_ids": ["a"], "prefill_token_counts": [2**63]}, "expected ints"),
        ({"kv_read_bytes": "many"}, "step.kv_read_bytes: expected float, got str"),
        ({"prompt": "text"}, "step.prompt: no such field"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        records.check(STEP | fields)


def test_the_counts_stand_beside_the_requests_in_prefill() -> None:
    record = STEP | {
        "prefill_ids": ["a", "b"],
        "prefill_token_counts": [3, 5],
        "prefill_charged_counts": [0, 5],
    }
    assert records.check(record) is record


def test_an_engine_belongs_to_no_request() -> None:
    with pytest.raises(RecordError, match=r"engine\.request_id: no such field"):
        records.check(ENGINE | {"request_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"})
