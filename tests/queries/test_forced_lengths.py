"""Survival questions refuse what was sent with a forced length, and name it."""

import pytest

from queries.runner import questions
from sloscope.errors import QueryError
from tests.queries.cases import session_of

SURVIVAL = [name for name, header in questions().items() if header.topic == "survival"]
FORCED = {"id": "B", "length_forced": True, "client": {"tokens": 7, "outcome": "completed", "finish_reason": "length"}}
FREE = {"id": "A", "client": {"tokens": 9, "outcome": "completed", "finish_reason": "stop"}}


@pytest.mark.parametrize("population", ["arrival", "period"])
@pytest.mark.parametrize("name", SURVIVAL)
def test_a_survival_question_refuses_a_forced_length_by_name(name, population):
    with (
        session_of({"given": {"requests": [FREE, FORCED]}, "window_s": [0, 20]}) as session,
        pytest.raises(QueryError, match=rf"^{name}: request B has a forced length \(length_forced\); accepted: .*$"),
    ):
        session.run(name, population=population)


@pytest.mark.parametrize("name", SURVIVAL)
def test_a_forced_warm_up_request_is_no_part_of_the_cohort_and_refuses_nothing(name):
    warm = FORCED | {"warmup": True}
    with session_of({"given": {"requests": [FREE, warm]}, "window_s": [0, 20]}) as session:
        assert session.run(name).rows
