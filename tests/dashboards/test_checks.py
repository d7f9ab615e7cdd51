"""Each rule for dashboards and rules, broken once."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from dashboards import build, checks
from dashboards.rulefile import Alert, Condition, Group, Recording

Board = dict[str, Any]


@pytest.fixture(scope="module")
def sound() -> Board:
    return json.loads(build.dashboard_files()["grafana/overview.json"])


def first(board: Board, kind: str) -> Board:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


LABEL_VALUES = "label_values({}, class)"
RATE = "rate({}[{}])"
PREEMPTIONS = "sloscope_engine_preemptions_total"


def target(board: Board, kind: str = "timeseries") -> Board:
    return first(board, kind)["targets"][0]


def variable(board: Board) -> Board:
    return board["templating"]["list"][3]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: first(b, "stat").pop("description"), "description is None; accepted: a text"),
        (lambda b: first(b, "stat").update(title=" "), "title is ' '; accepted: a text"),
        (lambda b: first(b, "stat")["fieldConfig"]["defaults"].update(unit=5), "unit is 5; accepted: a text"),
        (lambda b: first(b, "table")["fieldConfig"]["defaults"].pop("noValue"), "noValue is None"),
        (lambda b: first(b, "timeseries")["options"]["legend"].update(showLegend=False), "the legend is hidden"),
        (lambda b: first(b, "heatmap")["options"]["legend"].update(show=False), "the legend is hidden"),
        (lambda b: first(b, "stat").update(id=0), "has no id"),
        (lambda b: first(b, "row").update(id=2), "two panels or rows have the same id"),
        (lambda b: first(b, "timeseries").update(targets=[]), "has no query"),
        (lambda b: target(b).pop("refId"), "refIds are [None, 'B']"),
        (lambda b: target(b).update(refId="B"), "refIds are ['B', 'B']"),
        (lambda b: target(b)["datasource"].update(uid="abc"), "datasource uid 'abc' is not a variable"),
        (lambda b: first(b, "table")["datasource"].update(uid="x1"), "datasource uid 'x1' is not a variable"),
        (lambda b: target(b).update(expr=RATE.format("vllm_requests_total", "$__range")), "'vllm_requests_total' is"),
        (lambda b: target(b).update(expr="sloscope_${observer}_inflight_request"), "is not in the catalogue"),
        (lambda b: target(b).update(expr='sloscope_upstream_up{host="a"}'), "sloscope_upstream_up has no label 'host'"),
        (lambda b: target(b).update(expr=PREEMPTIONS), "only grows; read it over a range"),
        (lambda b: target(b).update(expr=RATE.format(PREEMPTIONS, "5m")), "is read over [5m]; accepted:"),
        (lambda b: target(b).update(expr="1 + 1"), "reads no series"),
        (lambda b: target(b).update(expr="rate(a[$window])"), "cannot be read at"),
        (lambda b: target(b, "table").update(url="http://elsewhere/q"), "url 'http://elsewhere/q' is not accepted"),
        (lambda b: target(b, "table")["url_options"]["params"].pop(1), "parameter 'to' is missing"),
        (lambda b: b["annotations"]["list"][0].update(expr="sloscope_gone"), "'sloscope_gone' is not in the catalogue"),
        (lambda b: variable(b).update(query=LABEL_VALUES.format("sloscope_upstream_up")), "has no label 'class'"),
        (lambda b: variable(b).update(query=LABEL_VALUES.format("gone")), "variable class: metric: 'gone'"),
        (lambda b: b.update(panels=[]), "has no panel"),
    ],
)  # fmt: skip
def test_a_broken_dashboard_is_named(sound: Board, spoil: Callable[[Board], Any], says: str) -> None:
    board = copy.deepcopy(sound)
    spoil(board)
    problems = checks.dashboard_problems(board, build.VARIABLES)
    assert any(says in problem for problem in problems), problems


def test_two_panels_of_one_kind_must_not_share_a_title(sound: Board) -> None:
    board = copy.deepcopy(sound)
    graphs = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    graphs[1]["title"] = graphs[0]["title"]
    assert checks.dashboard_problems(board, build.VARIABLES) == [f"two panels are titled {graphs[0]['title']!r}"]


def group(*rules: Recording | Alert) -> tuple[Group, ...]:
    return (Group("g", "30s", rules),)


def test_a_rule_may_read_what_is_exposed_or_recorded_and_nothing_else() -> None:
    made = Recording("a:b:c", "sum (rate(sloscope_engine_preemptions_total[5m]))")
    alert = Alert("X", (Condition("a:b:c", ">", "1"),), "0s", "ticket", "s", "d", "r")
    lost = Alert("Y", (Condition("a:b:d", ">", "1"),), "0s", "ticket", "s", "d", "r")
    assert checks.rule_problems(group(made, alert)) == []
    assert checks.rule_problems(group(made, lost)) == ["rule Y: metric: 'a:b:d' is not in the catalogue"]


def test_the_same_recording_twice_is_refused() -> None:
    made = Recording("a:b:c", "sum (rate(sloscope_engine_preemptions_total[5m]))")
    assert checks.rule_problems(group(made, made)) == ["rule a:b:c: stands twice"]


def test_rules_without_a_rule_are_refused() -> None:
    assert checks.rule_problems(group()) == ["has no rule"]
