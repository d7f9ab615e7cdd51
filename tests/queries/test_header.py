"""What a question takes: strict names, types and values, and errors that say what is accepted."""

import pytest

from queries.header import Param, read_header
from sloscope.errors import QueryError

SQL = """-- question: How many?
-- grain: one row
-- inputs: cohort
-- params:
--   by        varchar  class|model  class
--   gap_ns    bigint   ns           null  min 0  limit of the class when NULL
--   factor    double   -            required
--   loud      boolean  -            false
--   bucket_s  bigint   seconds      10    min 1
-- outputs:
--   n         bigint   requests     what was counted
-- rules: The first line
--   and the second.
select count(*) as n from cohort where class = $by -- not $this, nor '$that'
"""


@pytest.fixture
def header(tmp_path):
    path = tmp_path / "how_many.sql"
    path.write_text(SQL)
    return read_header(path)


def test_a_header_is_read_from_the_comment_block(header):
    assert (header.name, header.question, header.grain, header.inputs) == (
        "how_many",
        "How many?",
        "one row",
        ("cohort",),
    )
    assert list(header.params) == ["by", "gap_ns", "factor", "loud", "bucket_s"]
    assert header.params["gap_ns"].remark == "limit of the class when NULL"
    assert [param.minimum for param in header.params.values()] == [None, 0, None, None, 1]
    assert header.params["bucket_s"].describe() == "bucket_s (bigint, seconds, 1 or more, default 10)"
    assert [(o.name, o.type, o.unit, o.remark) for o in header.outputs] == [
        ("n", "bigint", "requests", "what was counted")
    ]
    assert header.rules == "The first line and the second."


def test_names_in_comments_and_literals_are_no_params(header):
    assert header.used_params == {"by"}


def test_defaults_fill_what_is_not_given_and_text_becomes_the_declared_type(header):
    values = header.values({"factor": "1.5", "gap_ns": "10ms", "loud": "true"})
    assert values == {"by": "class", "gap_ns": 10_000_000, "factor": 1.5, "loud": True, "bucket_s": 10}
    assert header.values({"factor": 2})["gap_ns"] is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"factor": 1, "nope": 1},
            "how_many: param 'nope' is unknown; accepted: by (varchar, class|model, default class)",
        ),
        ({}, "how_many: param 'factor' is missing; accepted: by"),
        ({"factor": "fast"}, "param factor: 'fast' is not accepted; accepted: a number"),
        ({"factor": "nan"}, "param factor: 'nan' is not accepted; accepted: a number"),
        ({"factor": "inf"}, "param factor: 'inf' is not accepted; accepted: a number"),
        ({"factor": 1, "by": "tenant"}, "param by: 'tenant' is not accepted; accepted: class, model"),
        (
            {"factor": 1, "by": "class'; drop view cohort; --"},
            'param by: "class\'; drop view cohort; --" is not accepted',
        ),
        ({"factor": 1, "gap_ns": 1.5}, "param gap_ns: '1.5' is not accepted; accepted: a whole number (ns), 0 or more"),
        (
            {"factor": 1, "bucket_s": "0"},
            "param bucket_s: '0' is not accepted; accepted: a whole number (seconds), 1 or more",
        ),
        (
            {"factor": 1, "bucket_s": -5},
            "param bucket_s: '-5' is not accepted; accepted: a whole number (seconds), 1 or",
        ),
        ({"factor": 1, "gap_ns": "-1"}, "param gap_ns: '-1' is not accepted; accepted: a whole number (ns), 0 or more"),
        ({"factor": 1, "gap_ns": "10 parsecs"}, "gap_ns: '10 parsecs' is not a duration"),
        ({"factor": 1, "gap_ns": 2**63}, "param gap_ns: '9223372036854775808' is not accepted"),
        ({"factor": 1, "gap_ns": True}, "param gap_ns: 'True' is not accepted"),
        ({"factor": None}, "param factor: 'None' is not accepted"),
        ({"factor": 1, "loud": "yes"}, "param loud: 'yes' is not accepted; accepted: true or false"),
    ],
)
def test_what_is_not_accepted_is_named_with_what_is(header, given, says):
    with pytest.raises(QueryError) as caught:
        header.values(given)
    assert str(caught.value).startswith(says)


def test_the_minimum_itself_is_accepted(header):
    assert header.values({"factor": -2, "gap_ns": "0", "bucket_s": "1"}) == {
        "by": "class", "gap_ns": 0, "factor": -2.0, "loud": False, "bucket_s": 1,
    }  # fmt: skip


def test_a_large_bigint_keeps_every_digit():
    assert Param("n", "bigint", "-", "0").value(str(2**62 + 1)) == 2**62 + 1
