"""The generated dashboards: what they read, how they are numbered, and that they are current."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards import build, checks, panels_sql, selectors
from sloscope import catalogue


@pytest.fixture(scope="module")
def dashboards() -> dict[str, dict[str, Any]]:
    return {name: json.loads(text) for name, text in build.dashboard_files().items()}


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from nodes(item)


def test_the_sdk_is_the_release_that_was_tried() -> None:
    # Its metadata spells the version with a v.
    assert importlib.metadata.version("grafana-foundation-sdk").removeprefix("v") == "0.0.21"


def test_what_is_committed_is_what_would_be_built() -> None:
    files = {**build.dashboard_files(), **build.rule_files()}
    assert list(build.differences(build.dashboard_files(), build.GENERATED)) == []
    assert list(build.differences(build.rule_files(), build.GENERATED)) == []
    assert len(files) == 3


def test_a_build_is_the_same_to_the_byte_whatever_the_hash_seed() -> None:
    code = "from dashboards import build; print(build.dashboard_files(), build.rule_files())"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1


def test_no_dashboard_breaks_a_rule(dashboards: dict[str, dict[str, Any]]) -> None:
    assert len(dashboards) == 2
    for dashboard in dashboards.values():
        assert checks.dashboard_problems(dashboard, build.VARIABLES) == []


def test_no_datasource_is_named_by_uid(dashboards: dict[str, dict[str, Any]]) -> None:
    for dashboard in dashboards.values():
        uids = {node["datasource"]["uid"] for node in nodes(dashboard) if isinstance(node.get("datasource"), dict)}
        assert uids <= {"${datasource}", "${sql}"}


def test_ids_count_up_in_reading_order_rows_included(dashboards: dict[str, dict[str, Any]]) -> None:
    for dashboard in dashboards.values():
        assert [panel["id"] for panel in dashboard["panels"]] == list(range(1, len(dashboard["panels"]) + 1))


def test_panels_fill_the_grid_without_overlap(dashboards: dict[str, dict[str, Any]]) -> None:
    for dashboard in dashboards.values():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24, panel["title"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, panel["title"]
            taken |= cells


def test_the_variables_are_those_that_the_panels_use(dashboards: dict[str, dict[str, Any]]) -> None:
    expected = ["datasource", "sql", "observer", "class", "model", "tenant"]
    for dashboard in dashboards.values():
        variables = dashboard["templating"]["list"]
        assert [variable["name"] for variable in variables] == expected
        assert {variable["type"] for variable in variables[:2]} == {"datasource"}
        assert [variable["query"] for variable in variables[:3]] == [
            "prometheus",
            "yesoreyeram-infinity-datasource",
            "client,sidecar",
        ]


def test_every_metric_of_the_catalogue_is_on_a_panel() -> None:
    """A metric that nobody can look at was observed in vain."""
    read = set()
    for observer in ("client", "sidecar"):
        for entry in build.expressions(observer=observer):
            if entry.kind == "panel":
                read |= {selectors.catalogue_row(series.name).name for series in selectors.selectors(entry.expr)}
    assert {metric.name for metric in catalogue.METRICS} - read == set()


def test_expressions_carry_no_variable_any_more() -> None:
    entries = build.expressions()
    assert len(entries) > 100
    assert [entry for entry in entries if "$" in entry.expr] == []
    assert {entry.kind for entry in entries} == {"panel", "annotation", "recording", "alert"}


def test_every_question_is_asked_with_the_time_range_and_the_observer() -> None:
    targets = build.sql_targets()
    assert {target.path for target in targets} == {f"/api/q/{name}" for name in panels_sql.QUESTIONS}
    for target in targets:
        shared = {name: target.params[name] for name in ("from", "to", "observer")}
        assert shared == {"from": "${__from}", "to": "${__to}", "observer": "${observer}"}


def test_a_row_of_buckets_is_read_as_a_heatmap(dashboards: dict[str, dict[str, Any]]) -> None:
    maps = [panel for board in dashboards.values() for panel in checks.panels(board) if panel["type"] == "heatmap"]
    assert len(maps) == 2
    for panel in maps:
        assert panel["options"]["calculate"] is False
        assert [target["format"] for target in panel["targets"]] == ["heatmap"]


def test_a_file_that_differs_is_missing_or_is_left_over_is_named(tmp_path: Path) -> None:
    files = {"a/one.json": "1\n2\n", "a/two.json": "2\n"}
    build.write(files, tmp_path)
    assert list(build.differences(files, tmp_path)) == []
    (tmp_path / "a/one.json").write_text("1\n3\n")
    (tmp_path / "a/two.json").unlink()
    (tmp_path / "a/old.json").write_text("")
    assert list(build.differences(files, tmp_path)) == [
        f"{tmp_path}/a/old.json: is not built any more",
        f"{tmp_path}/a/one.json: differs from what would be built, first at @@ -2 +2 @@",
        f"{tmp_path}/a/two.json: missing",
    ]
