"""Everything that is generated, as text in memory; writing it, comparing it with what is committed, listing it."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import checks, engine_against_receipt, overview, rulefile, rules
from sloscope.contract import Contract, preset
from sloscope.errors import DashboardError

GENERATED = Path(__file__).parent / "generated"
RULE_FILE = "rules/sloscope.rules.yaml"
DEFAULT_CONTRACT = "exercise"  # the preset behind the rules that ship
_DASHBOARDS = {"grafana/overview.json": overview, "grafana/engine-against-receipt.json": engine_against_receipt}

# What Grafana would put in place of a dashboard's variables, so that an expression can be tried without it.
VARIABLES = {
    "${observer}": "client",
    "$__rate_interval": "1m",
    "$__range": "5m",
    "$class": ".*",
    "$model": ".*",
    "$tenant": ".*",
}


class Expression(NamedTuple):
    where: str  # dashboard / panel, or the rule's name
    kind: str  # panel, annotation, recording or alert
    expr: str


class SqlTarget(NamedTuple):
    panel: str
    path: str
    params: dict[str, str]  # values as Grafana's variables: ${__from} and ${__to} are milliseconds since the epoch


def dashboard_files() -> dict[str, str]:
    """File name → JSON. Raises DashboardError for a dashboard that breaks a rule of `checks`."""
    files = {}
    for name, module in _DASHBOARDS.items():
        text = JSONEncoder(sort_keys=True, indent=2).encode(module.dashboard()) + "\n"
        _refuse(name, checks.dashboard_problems(json.loads(text), VARIABLES))
        files[name] = text
    return files


def rule_files(contract: Contract | None = None, runbooks: str = rules.RUNBOOKS) -> dict[str, str]:
    """File name → YAML. Raises DashboardError for rules that read what nothing exposes or records."""
    groups = rules.groups(contract or preset(DEFAULT_CONTRACT), runbooks)
    _refuse(RULE_FILE, checks.rule_problems(groups))
    return {RULE_FILE: rulefile.to_yaml(groups)}


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        raise DashboardError(f"{name}: {problems[0]}" + (f" (and {len(problems) - 1} more)" if problems[1:] else ""))


def write(files: Mapping[str, str], out: Path) -> None:
    for name, text in files.items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DashboardError(f"--out: {str(path)!r} cannot be written: {error.strerror}") from None


def differences(files: Mapping[str, str], out: Path) -> Iterator[str]:
    """One line for each file that is missing, differs, or is not built any more."""
    for folder in sorted({(out / name).parent for name in files}):
        built = {out / name for name in files}
        yield from (f"{path}: is not built any more" for path in sorted(folder.glob("*")) if path not in built)
    for name, text in files.items():
        path = out / name
        if not path.is_file():
            yield f"{path}: missing"
            continue
        found = path.read_text(encoding="utf-8")
        if found != text:
            changed = difflib.unified_diff(found.splitlines(), text.splitlines(), lineterm="", n=0)
            at = next((line for line in changed if line.startswith("@@")), "line ends")
            yield f"{path}: differs from what would be built, first at {at}"


def expressions(contract: Contract | None = None, observer: str = "client") -> list[Expression]:
    """Every expression of dashboards and rules, variables replaced, ready for a Prometheus.

    Of an alert each condition gives its left side. What a recording rule records has to be loaded to be read.
    """
    found = []
    variables = {**VARIABLES, "${observer}": observer}
    for name, text in dashboard_files().items():
        made = json.loads(text)
        found += [
            Expression(f"{name} / {panel['title']}", "panel", checks.substituted(target["expr"], variables))
            for panel in checks.panels(made)
            for target in panel["targets"]
            if "expr" in target
        ]
        found += [
            Expression(f"{name} / {note['name']}", "annotation", checks.substituted(note["expr"], variables))
            for note in made["annotations"]["list"]
        ]
    for group in rules.groups(contract or preset(DEFAULT_CONTRACT)):
        for rule in group.rules:
            if isinstance(rule, rulefile.Alert):
                found += [Expression(rule.name, "alert", condition.expr) for condition in rule.conditions]
            else:
                found.append(Expression(rule.record, "recording", rule.expr))
    return found


def sql_targets() -> list[SqlTarget]:
    """Every question that a panel asks the control plane."""
    return [
        SqlTarget(panel["title"], target["url"], _params(target))
        for text in dashboard_files().values()
        for panel in checks.panels(json.loads(text))
        for target in panel["targets"]
        if "url" in target
    ]


def _params(target: dict[str, Any]) -> dict[str, str]:
    return {param["key"]: param["value"] for param in target["url_options"]["params"]}
