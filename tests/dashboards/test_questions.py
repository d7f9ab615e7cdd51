"""The SQL panels against the questions themselves: names, parameters and columns."""

import json

import pytest

from dashboards import build, checks, panels_sql
from queries.runner import list_questions, question

TARGETS = build.sql_targets()


def test_every_question_that_a_panel_asks_exists() -> None:
    assert set(panels_sql.QUESTIONS) <= {row["name"] for row in list_questions()}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.panel)
def test_the_parameters_of_a_panel_are_accepted_as_the_text_that_a_url_carries(target: build.SqlTarget) -> None:
    header = question(target.path.removeprefix("/api/q/"))
    own = {name: value for name, value in target.params.items() if name not in ("from", "to", "observer")}
    values = header.values(own)
    assert {name: str(values[name]) for name in own} == own


def test_every_column_that_a_panel_names_is_in_the_answer() -> None:
    named = 0
    for text in build.dashboard_files().values():
        for panel in checks.panels(json.loads(text)):
            for target in panel["targets"]:
                if "url" in target:
                    outputs = {output.name for output in question(target["url"].removeprefix("/api/q/")).outputs}
                    columns = {column["selector"] for column in target["columns"]}
                    assert columns <= outputs, panel["title"]
                    named += len(columns)
    assert named > 10
