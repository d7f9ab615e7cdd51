"""Survival questions against R's survival package: the same five published data sets, as output lengths.

R's convention is ours: at a tie an event comes before a censoring. Each subject is a request of the tenant that is its
group; an event is finish reason stop, a censoring a cap. R's files carry 15 digits, hence 1e-9.
"""

import csv
import math
from functools import cache

import pytest

from queries.runner import Session
from sloscope import contract as contracts

DATA_SETS = ("aml", "gbsg2", "leukemia_6mp", "veteran", "waltons")


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def sessions_of(folder, name):
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
        for number, row in enumerate(rows_of(folder / f"{name}.csv"))
    ]
    return Session.from_rows({"requests": requests}, contracts.preset("exercise"), window=(0, 1))


@pytest.fixture(params=DATA_SETS)
def data_set(request, field_data):
    folder = field_data / "survival"
    if not folder.is_dir():
        pytest.skip(f"no recorded files at {folder}")
    return folder, request.param


def answers(session, name, **params):
    """cohort → rows, of the groups and of everything under R's name for it."""
    return _rows(session, name, "tenant", **params) | _rows(session, name, "all", **params)


@cache
def _rows(session, name, by, **params):
    found = {}
    for row in session.run(name, by=by, **params).rows:
        found.setdefault("ALL" if by == "all" else row["cohort"], []).append(row)
    return found


def answer(session, name, group, **params):
    return _rows(session, name, "all" if group == "ALL" else "tenant", **params)[group][0]


def agrees(ours, theirs):
    if theirs == "NA":
        return ours is None
    return ours is not None and math.isclose(ours, float(theirs), rel_tol=1e-9, abs_tol=1e-12)


def test_every_point_of_the_curve_is_that_of_r(data_set):
    folder, name = data_set
    session = sessions_of(folder, name)
    ours = answers(session, "survival_curve")
    theirs = {}
    for row in rows_of(folder / f"{name}__km_curve_R.csv"):
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
    folder, name = data_set
    ours = answers(sessions_of(folder, name), "survival")
    checked = 0
    for row in rows_of(folder / f"{name}__reference_R.csv"):
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
    folder, name = data_set
    session = sessions_of(folder, name)
    # R also restricts at times between two integers, which no cap can be.
    reference = [
        row
        for row in rows_of(folder / f"{name}__reference_R.csv")
        if row["stat"] == "rmst" and float(row["arg"]).is_integer()
    ]
    assert reference
    for row in reference:
        mine = answer(session, "survival", row["group"], cap=int(float(row["arg"])))
        assert mine["horizon_tokens"] == int(float(row["arg"]))
        assert agrees(mine["restricted_mean_tokens"], row["value"]), (row, mine)
        assert agrees(mine["restricted_mean_se"], row["se"]), (row, mine)


def test_remaining_length_is_rs_conditional_survival(data_set):
    folder, name = data_set
    session = sessions_of(folder, name)
    medians = chances = 0
    for row in rows_of(folder / f"{name}__reference_R.csv"):
        if row["stat"] == "cond_median_residual":
            mine = answer(session, "remaining_length", row["group"], generated=int(float(row["arg"])))
            assert agrees(mine["median_tokens"], row["value"]), (row, mine)
            medians += 1
        elif row["stat"].startswith("cond_surv"):
            given, until = int(float(row["arg"])), int(float(row["arg2"]))
            mine = answer(session, "remaining_length", row["group"], generated=given, until=until)
            assert agrees(mine["longer_than_until"], row["value"]), (row, mine)
            assert agrees(mine["longer_than_until_se"], row["se"]), (row, mine)
            assert agrees(mine["longer_than_until_low"], row["lower95"]), (row, mine)
            assert agrees(mine["longer_than_until_high"], row["upper95"]), (row, mine)
            chances += 1
    assert medians and chances
