"""Every question against its hand-worked cases, and every header against what the SQL really takes and gives."""

import math

import pytest

from queries.header import Header
from queries.runner import Session, base_views, bound, list_questions, question, questions
from sloscope import contract as contracts
from sloscope.errors import QueryError
from tests.queries.cases import answer, cases, session_of

CASES = list(cases())
HEADERS = list(questions().values())


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case['name']}" for name, case in CASES])
def test_a_case_gives_the_rows_worked_by_hand(name, case):
    result = answer(name, case)
    assert len(result.rows) == len(case["expect"]), result.rows
    for number, (row, expected) in enumerate(zip(result.rows, case["expect"], strict=True)):
        for column, value in expected.items():
            if isinstance(value, float) and isinstance(row[column], float):
                assert math.isclose(row[column], value, rel_tol=1e-9, abs_tol=1e-9), (number, column, row)
            else:
                assert (row[column], type(row[column])) == (value, type(value)), (number, column, row)


@pytest.mark.parametrize("header", HEADERS, ids=[header.name for header in HEADERS])
def test_a_header_names_the_outputs_that_the_sql_gives(header: Header):
    examples = {"bigint": 1, "double": 1.0, "boolean": True}
    required = {
        name: examples.get(param.type, param.unit.split("|")[0])
        for name, param in header.params.items()
        if param.required
    }
    with session_of({}) as session:
        session._create_views(header.inputs)  # not left to the tests before this one
        described = session._connection.execute(f"describe {header.sql}", bound(header, required)).fetchall()
    assert [(row[0], row[1].lower()) for row in described] == [(o.name, o.type) for o in header.outputs]


@pytest.mark.parametrize("header", HEADERS, ids=[header.name for header in HEADERS])
def test_a_header_names_the_params_and_views_that_the_sql_uses(header: Header):
    assert set(header.params) == header.used_params
    known = {view.name for view in base_views()} | {
        "requests", "chunks", "late_gaps", "steps", "step_requests", "states", "decisions", "engines",
        "run_classes", "run_budget",
    }  # fmt: skip
    body = header.sql[header.sql.index("\nwith") :]
    assert set(header.inputs) <= known
    assert set(header.inputs) == {name for name in known if f"from {name}\n" in body or f"join {name}\n" in body
                                  or f"join {name} on" in body}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS, ids=[header.name for header in HEADERS])
def test_a_question_has_cases_says_what_it_asks_and_stays_portable(header: Header):
    assert header.question.endswith("?") and header.grain and header.rules
    assert "select * from final\norder by" in header.sql
    lowered = header.sql.lower()
    for word in ("list_", "unnest(", "lambda", "asof", "quantile_cont", "percentile_cont", "getvariable", "struct_"):
        assert word not in lowered, f"{word} does not run on every engine"
    names = {case["name"] for name, case in CASES if name == header.name}
    assert any("empty" in name or "nothing" in name for name in names), f"{header.name} has no case on empty input"


def test_an_unknown_question_is_refused_with_the_names_that_exist():
    with pytest.raises(QueryError, match=r"question: 'nope' is unknown; accepted: .*goodput"):
        question("nope")


@pytest.mark.parametrize("name", ["goodput_over_time", "hold_timeline"])
def test_a_bucket_without_a_width_is_refused_and_not_taken_as_another(name):
    with (
        session_of({}) as session,
        pytest.raises(QueryError, match=r"param bucket_s: '-5' is not accepted; .*1 or more"),
    ):
        session.run(name, bucket_s=-5)


@pytest.mark.parametrize("header", HEADERS, ids=[header.name for header in HEADERS])
def test_every_number_that_a_question_takes_has_a_smallest_one(header: Header):
    # All of them are times, widths and counts: a negative one asks nothing.
    numbers = [param for param in header.params.values() if param.type in ("bigint", "double")]
    assert all(param.minimum is not None for param in numbers)


def test_every_question_is_listed_with_its_topic():
    assert {"name": "goodput", "topic": "goodput"}.items() <= next(
        row for row in list_questions() if row["name"] == "goodput"
    ).items()
    assert len(list_questions()) == len(questions())


def test_an_empty_directory_answers_without_nan(tmp_path):
    with Session(tmp_path, contracts.preset("exercise")) as session:
        row = session.run("goodput").rows[0]
    assert row["offered"] == 0 and row["attainment"] is None and row["goodput_rps"] is None
