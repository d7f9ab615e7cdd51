"""The question about work is the roofline, step by step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.roofline import Ceilings
from reference_server.work import Work
from sloscope import contract as contracts
from tests.queries.cases import session_over
from tests.roofline import achieved

AMOUNTS = st.sampled_from([0, 0, 1, 1000, 10**6, 10**9, 2 * 10**9, 10**12])
RATES = st.sampled_from([1.0, 1e3, 1e9, 3e11])


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.tuples(*[AMOUNTS] * 8), st.tuples(*[RATES] * 4)), min_size=5, max_size=10))
def test_the_share_and_what_binds_are_those_of_the_roofline(
    drawn: list[tuple[tuple[int, ...], tuple[float, ...]]],
) -> None:
    steps, engines, expected = [], [], []
    for number, (amounts, rates) in enumerate(drawn):
        work, ceilings = Work(*amounts), Ceilings(*rates)
        batch = 2**number  # a row of its own
        steps.append(
            {
                **work._asdict(),
                "step_id": 1,
                "engine_id": f"e{number}",
                "start_ns": 0,
                "end_ns": 1000,
                "start_at_ns": 5,
                "decode_tokens": batch,
                "decode_requests": batch,
            }
        )
        engines.append({"engine_id": f"e{number}", "at_ns": 0, **ceilings.record_fields()})
        expected.append(achieved(work, 1000, ceilings))
    rows = {"steps": steps, "engines": engines}
    with session_over(rows, contracts.preset("exercise"), window=(0, 10)) as session:
        found = session.run("step_work").rows
    assert len(found) == len(expected)
    for row, by_rule in zip(found, expected, strict=True):
        assert row["binds"] == (by_rule.binds or None)
        assert row["achieved_share"] == pytest.approx(by_rule.share, rel=1e-9)
        assert math.isclose(row["least_s"] * 1e9, by_rule.least_ns, rel_tol=1e-9)
