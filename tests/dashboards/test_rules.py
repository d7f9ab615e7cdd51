"""Rules of a contract: what they compute, and that promtool agrees with every claim."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build, checks, rulefile, rules
from sloscope import catalogue
from sloscope.contract import Contract, RequestClass, from_shorthand, parse, preset
from sloscope.errors import DashboardError
from sloscope.units import NS_PER
from tests.dashboards.conftest import promtool

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "rules").glob("*.yaml"))
EXERCISE = preset("exercise")


def alerts(contract: Contract = EXERCISE) -> list[rulefile.Alert]:
    return [rule for group in rules.groups(contract) for rule in group.rules if isinstance(rule, rulefile.Alert)]


def recordings(contract: Contract) -> list[rulefile.Recording]:
    return [rule for group in rules.groups(contract) for rule in group.rules if isinstance(rule, rulefile.Recording)]


def with_class(name: str = "chat", **changes: Any) -> Contract:
    row = RequestClass(name, from_shorthand("ttft:300 itl_max:30").classes["default"].limits, **changes)
    return Contract(classes={name: row}, default_class=name)


def checked(contract: Contract, folder: Path) -> str:
    text = build.rule_files(contract)[build.RULE_FILE]
    path = folder / "r.yaml"
    path.write_text(text)
    return promtool("check", "rules", str(path))


def test_promtool_accepts_the_committed_rules() -> None:
    count = len(alerts()) + len(recordings(EXERCISE))
    assert f"{count} rules found" in promtool("check", "rules", str(build.GENERATED / build.RULE_FILE))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_promtool_finds_every_case_as_it_is_written(path: Path) -> None:
    promtool("test", "rules", str(path))


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                (fires if case["exp_alerts"] else silent).add(case["alertname"])
    assert fires == silent == {alert.name for alert in alerts()}


def test_every_alert_has_its_section_in_the_runbook() -> None:
    headings = {line[3:] for line in (ROOT / "docs/operations.md").read_text().splitlines() if line.startswith("## ")}
    for alert in alerts():
        assert alert.name in headings
        assert alert.runbook == f"docs/operations.md#{alert.name.lower()}"
        assert alert.severity in ("page", "ticket")


def test_no_section_of_the_runbook_is_about_an_alert_that_is_gone() -> None:
    headings = [line[3:] for line in (ROOT / "docs/operations.md").read_text().splitlines() if line.startswith("## ")]
    named = {heading for heading in headings if heading.startswith("Sloscope")}
    assert named == {alert.name for alert in alerts()}


def test_every_panel_that_the_runbook_sends_to_exists() -> None:
    text = (ROOT / "docs/operations.md").read_text().replace("\n", " ")
    named = {name for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text) if not name.endswith(".")}
    boards = [json.loads(board) for board in build.dashboard_files().values()]
    titles = {board["title"] for board in boards} | {p["title"] for board in boards for p in checks.panels(board)}
    assert len(named) > 8
    assert named - titles == set()


@pytest.mark.parametrize(
    ("alert", "expected"),
    [
        ("SloscopeErrorBudgetFastBurn", "14.4"),  # 0.02 * 720 h / 1 h
        ("SloscopeErrorBudgetSlowBurn", "6"),  # 0.05 * 720 h / 6 h
        ("SloscopeErrorBudgetLeak", "1"),  # 0.10 * 720 h / 72 h
    ],
)
def test_thresholds_follow_from_the_share_of_the_budget(alert: str, expected: str) -> None:
    made = next(rule for rule in alerts() if rule.name == alert)
    assert [condition.threshold for condition in made.conditions] == [expected, expected, "20"]


def test_a_shorter_period_has_lower_thresholds_and_none_below_one() -> None:
    # 7 d: 0.02 * 168 / 1 = 3.36; 0.05 * 168 / 6 = 1.4; 0.1 * 168 / 72 = 0.23, which the budget bears for ever.
    burns = [rule for rule in alerts(with_class(period_ns=7 * NS_PER["d"])) if "Budget" in rule.name]
    assert [(rule.name, rule.conditions[0].threshold) for rule in burns] == [
        ("SloscopeErrorBudgetFastBurn", "3.36"),
        ("SloscopeErrorBudgetSlowBurn", "1.4"),
    ]


def test_a_period_too_short_for_any_burn_alert_is_refused() -> None:
    with pytest.raises(DashboardError, match="group sloscope-burn would be empty"):
        rules.groups(with_class(period_ns=NS_PER["d"]))


def test_a_budget_is_a_decimal_and_not_a_float_that_is_almost_one() -> None:
    assert rules.budget(with_class(objective=0.99).classes["chat"]) == Decimal("0.01")
    burn = next(rule for rule in recordings(with_class(objective=0.999)) if rule.record == rules.burn_name("5m"))
    assert burn.expr == '(1 - class:sloscope_attainment:ratio_rate5m{class="chat"}) / 0.001'


def test_a_promise_measured_in_the_engine_has_no_rules() -> None:
    contract = parse('version = 1\nobserver = "engine"\n[classes.a]\nttft = "1s"\n')
    with pytest.raises(DashboardError, match="observer: 'engine' has no receipt counters"):
        rules.groups(contract)


def test_rules_read_the_receipts_of_the_observer_that_the_contract_names() -> None:
    contract = parse('version = 1\nobserver = "sidecar"\n[classes.a]\nttft = "1s"\n')
    exprs = " ".join(rule.expr for rule in recordings(contract))
    assert "sloscope_sidecar_requests_offered_total" in exprs
    assert "sloscope_client_" not in exprs


@pytest.mark.parametrize("name", ["voice", "editor", "background"])
def test_promtool_accepts_the_rules_of_every_preset(name: str, tmp_path: Path) -> None:
    assert "SUCCESS" in checked(preset(name), tmp_path)


@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "ünï", 'x"} or vector(1) #', "a: b", "{{ $x }}"])
def test_a_class_name_stays_a_name_whatever_is_in_it(name: str, tmp_path: Path) -> None:
    assert "SUCCESS" in checked(with_class(name), tmp_path)
    text = build.rule_files(with_class(name))[build.RULE_FILE]
    assert yaml.safe_load(text)["groups"][3]["rules"][0]["alert"] == "SloscopeErrorBudgetFastBurn"


def test_attainment_without_voluntary_stops_stands_beside_attainment_where_the_contract_asks_for_it() -> None:
    excluded = [rule.record for rule in recordings(preset("editor")) if "excl_voluntary" in rule.expr + rule.record]
    # Recorded for each of five windows, and read by no burn.
    assert excluded == [rules.excl_voluntary_name(window) for window in rules.WINDOWS]
    assert not any("excl_voluntary" in rule.expr + rule.record for rule in recordings(EXERCISE))


def test_every_declared_limit_is_counted_at_an_edge_of_its_histogram() -> None:
    contract = preset("voice")
    met = [rule for rule in recordings(contract) if rule.record == rules.LIMIT_MET]
    assert {rule.labels["limit"] for rule in met} == {"ttft", "ttft_visible", "itl_max"}
    for rule in met:
        limit = rule.labels["limit"]
        edge_ns = contract.classes["voice"].limits.declared()[limit]
        assert edge_ns in catalogue.edges_ns(catalogue.receipt("client", f"{limit}_seconds"), contract)
        assert f'le="{catalogue.format_edge(edge_ns / 1e9)}"' in rule.expr


def test_a_wait_is_judged_by_the_most_patient_promise_except_in_a_class_that_promises_none() -> None:
    three = '[classes.a]\nttft = "300ms"\n[classes.b]\nttft = "2s"\n[classes.c]\nitl_max = "30ms"\n'
    waiting = alerts(parse(f'version = 1\ndefault_class = "a"\n{three}'))[-1]
    assert str(waiting.conditions[0]) == 'sloscope_engine_oldest_waiting_seconds{class!="c"} > 2.0'


def test_a_contract_without_a_promise_about_waiting_has_no_alert_about_it() -> None:
    names = {alert.name for alert in alerts(from_shorthand("itl_max:30"))}
    assert "SloscopeEngineOldestWaiting" not in names
    assert "SloscopeBeyondLastBucket" in names


def test_promtool_accepts_every_expression_of_every_panel(tmp_path: Path) -> None:
    """As recordings under made-up names: only the syntax and the functions are judged here."""
    found = [entry for entry in build.expressions() if entry.kind in ("panel", "annotation", "alert")]
    made = tuple(rulefile.Recording(f"try:{number}", entry.expr) for number, entry in enumerate(found))
    path = tmp_path / "try.yaml"
    path.write_text(rulefile.to_yaml((rulefile.Group("try", "1m", made),)))
    assert f"{len(found)} rules found" in promtool("check", "rules", str(path))
