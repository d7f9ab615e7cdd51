"""Survival questions against R's survival package: the same five published data sets, as output lengths.

R's convention is ours: at a tie an event comes before a censoring. Each subject is a request of the tenant that is its
group; an event is finish reason stop, a censoring a cap. R's files carry 15 digits, hence 1e-9.
"""

import csv
import math

import pytest

from sloscope import contract as contracts
from tests.queries.cases import held, session_over

DATA_SETS = ("aml", "gbsg2", "leukemia_6mp", "veteran", "waltons")


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class DataSet:
    """One data set as requests, asked once for each thing that R says about it."""

    def __init__(self, folder, name, session):
        self._path, self._session, self._answers = folder / name, session, {}

    def reference(self, ending):
        return rows_of(f"{self._path}__{ending}.csv")

    def answers(self, question, **params):
        """cohort → rows, of the groups and of everything under R's name for it."""
        return self._rows(question, "tenant", **params) | self._rows(question, "all", **params)

    def answer(self, question, group, **params):
        return self._rows(question, "all" if group == "ALL" else "tenant", **params)[group][0]

    def _rows(self, question, by, **params):
        asked = (question, by, *params.items())
        if asked not in self._answers:
            found = {}
            for row in self._session.run(question, by=by, **params).rows:
                found.setdefault("ALL" if by == "all" else row["cohort"], []).append(row)
            self._answers[asked] = found
        return self._answers[asked]


# Of the module, so that the tests of one data set run together, over one session.
@pytest.fixture(scope="module", params=DATA_SETS)
def data_set(request, field_data):
    folder = field_data / "survival"
    if not folder.is_dir():
        pytest.skip(f"no recorded files at {folder}")
    requests = [
        {
            "request_id": f"{number:04}",
            "tenant": row["group"],
            "arrival_at_ns": 0,
            "n_choices": 1,
            "client_observed": True,
            "client_end_at_ns": 0,
            "client_tokens": int(float(row["time"])),
            "client_outcome": "completed",
            "client_finish_reason": "stop" if row["event"] == "1" else "length",
        }
        for number, row in enumerate(rows_of(folder / f"{request.param}.csv"))
    ]
    with (
        session_over({"requests": requests}, contracts.preset("exercise"), window=(0, 1)) as session,
        held(session, "length_curves"),
    ):
        yield DataSet(folder, request.param, session)


def agrees(ours, theirs):
    if theirs == "NA":
        return ours is None
    return ours is not None and math.isclose(ours, float(theirs), rel_tol=1e-9, abs_tol=1e-12)


def test_every_point_of_the_curve_is_that_of_r(data_set):
    ours = data_set.answers("survival_curve")
    theirs = {}
    for row in data_set.reference("km_curve_R"):
        theirs.setdefault(row["group"], []).append(row)
    assert ours.keys() == theirs.keys()
    for group, reference in theirs.items():
        assert len(ours[group]) == len(reference)
        for row, expected in zip(ours[group], reference, strict=True):
            counts = ("tokens", "at_risk", "events", "censored")
            assert [row[c] for c in counts] == [
                int(float(expected[c])) for c in ("time", "n_risk", "n_event", "n_censor")
            ]
            assert agrees(row["survival"], expected["surv"]), (group, row, expected)
            assert agrees(row["survival_se"], expected["greenwood_se"]), (group, row, expected)
            assert agrees(row["survival_low"], expected["loglog_lower95"]), (group, row, expected)
            assert agrees(row["survival_high"], expected["loglog_upper95"]), (group, row, expected)


def test_quartiles_their_bounds_and_the_counts_are_those_of_r(data_set):
    ours = data_set.answers("survival")
    checked = 0
    for row in data_set.reference("reference_R"):
        mine = ours[row["group"]][0]
        if row["stat"] == "quantile_time":
            quantile = {"0.25": "p25", "0.5": "median", "0.75": "p75"}[row["arg"]]
            assert agrees(mine[f"{quantile}_tokens"], row["value"]), (row, mine)
            assert agrees(mine[f"{quantile}_low_tokens"], row["lower95"]), (row, mine)
            assert agrees(mine[f"{quantile}_high_tokens"], row["upper95"]), (row, mine)
        elif row["stat"] in ("n", "events"):
            assert agrees(mine[row["stat"]], row["value"]), (row, mine)
        else:
            continue
        checked += 1
    assert checked == 5 * len(ours)


def test_the_restricted_mean_and_its_error_are_those_of_r(data_set):
    # R also restricts at times between two integers, which no cap can be.
    reference = [
        row for row in data_set.reference("reference_R") if row["stat"] == "rmst" and float(row["arg"]).is_integer()
    ]
    assert reference
    for row in reference:
        mine = data_set.answer("survival", row["group"], cap=int(float(row["arg"])))
        assert mine["horizon_tokens"] == int(float(row["arg"]))
        assert agrees(mine["restricted_mean_tokens"], row["value"]), (row, mine)
        assert agrees(mine["restricted_mean_se"], row["se"]), (row, mine)


def test_remaining_length_is_rs_conditional_survival(data_set):
    medians = chances = 0
    for row in data_set.reference("reference_R"):
        if row["stat"] == "cond_median_residual":
            mine = data_set.answer("remaining_length", row["group"], generated=int(float(row["arg"])))
            assert agrees(mine["median_tokens"], row["value"]), (row, mine)
            medians += 1
        elif row["stat"].startswith("cond_surv"):
            given, until = int(float(row["arg"])), int(float(row["arg2"]))
            mine = data_set.answer("remaining_length", row["group"], generated=given, until=until)
            assert agrees(mine["longer_than_until"], row["value"]), (row, mine)
            assert agrees(mine["longer_than_until_se"], row["se"]), (row, mine)
            assert agrees(mine["longer_than_until_low"], row["lower95"]), (row, mine)
            assert agrees(mine["longer_than_until_high"], row["upper95"]), (row, mine)
            chances += 1
    assert medians and chances
