"""The list of field cases names tests that exist, and none that is never run."""

from __future__ import annotations

import pytest

from tests.field.field_cases import ABOUT, cases, collected, named

FOUND = cases()


def test_every_case_is_about_something_says_what_is_right_and_names_where_it_was_seen() -> None:
    assert {case.about for case in FOUND} == set(ABOUT)
    for case in FOUND:
        assert case.says.endswith(".") and case.seen and case.tests, case.name
    assert len({case.says for case in FOUND}) == len(FOUND)


@pytest.mark.e2e  # collects every test that there is
@pytest.mark.timeout(240)
def test_every_test_that_holds_a_case_is_collected() -> None:
    tests = named(FOUND)
    known = collected(tests)
    assert [test for test in tests if test not in known] == []
    # It finds out: neither another name nor another parameter is taken for one that exists.
    assert "tests/core/test_definitions.py::test_that_nobody_wrote" not in known
    assert f"{tests[0]}[no such case]" not in known
