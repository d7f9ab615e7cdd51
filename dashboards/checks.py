"""What a generated dashboard or rule must satisfy before it is written. A Grafana to try it on is not assumed."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dashboards import infinity, rulefile, selectors
from sloscope.errors import DashboardError

# The ranges a panel may use, and what stands for them while an expression is read.
_RANGES = {"$__rate_interval": "1s", "$__range": "2s"}
_WITHOUT_LEGEND = ("stat", "table")
_SCRAPE_LABELS = ("instance", "job")
_PROMETHEUS_OWN = ("up",)  # written by Prometheus at every scrape, whatever the target exposes


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something: all but rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def substituted(expr: str, variables: Mapping[str, str]) -> str:
    """The expression as Grafana would send it. Longer names first, or `$__range` would eat into others."""
    for name in sorted(variables, key=len, reverse=True):
        expr = expr.replace(name, variables[name])
    return expr


def dashboard_problems(dashboard: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """One sentence for each broken rule; empty: fit to be written."""
    shown = panels(dashboard)
    if not shown:
        return ["has no panel"]
    found = list(_numbering(dashboard))
    for panel in shown:
        found += [f"panel {panel.get('title')!r}: {problem}" for problem in _panel_problems(panel, variables)]
    for note in dashboard["annotations"]["list"]:
        found += [f"annotation {note['name']!r}: {problem}" for problem in _series_problems(note["expr"], variables)]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found += _variable_problems(variable, variables)
    return found


def _numbering(dashboard: Mapping[str, Any]) -> Iterator[str]:
    ids = [panel.get("id") for panel in dashboard["panels"]]
    if not all(isinstance(number, int) and number > 0 for number in ids):
        yield "a panel or row has no id"
    if len(set(ids)) != len(ids):
        yield "two panels or rows have the same id"
    titles = [panel.get("title") for panel in panels(dashboard)]
    for title in {title for title in titles if titles.count(title) > 1}:
        # A stat and a curve of the same quantity may share a name; two panels of one type may not.
        types = [panel["type"] for panel in panels(dashboard) if panel.get("title") == title]
        if len(set(types)) != len(types):
            yield f"two panels are titled {title!r}"


def _panel_problems(panel: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[str]:
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    texts = (
        ("title", panel.get("title")),
        ("description", panel.get("description")),
        ("unit", defaults.get("unit")),
        ("noValue", defaults.get("noValue")),
    )
    for name, value in texts:
        # The SDK takes .unit(5) without a word.
        if not isinstance(value, str) or not value.strip():
            yield f"{name} is {value!r}; accepted: a text"
    if panel["type"] not in _WITHOUT_LEGEND:
        legend = panel.get("options", {}).get("legend", {})
        if not (legend.get("showLegend") or legend.get("show")):
            yield "the legend is hidden"
    targets = panel.get("targets", [])
    if not targets:
        yield "has no query"
    names = [target.get("refId") for target in targets]
    if not all(names) or len(set(names)) != len(names):
        yield f"refIds are {names}; accepted: one different letter each"
    for target in [panel, *targets]:
        uid = target.get("datasource", {}).get("uid", "")
        if uid not in ("${datasource}", "${sql}"):
            yield f"datasource uid {uid!r} is not a variable"
    for target in targets:
        if target["datasource"]["type"] == infinity.PLUGIN:
            yield from _sql_problems(target)
        else:
            yield from _series_problems(target["expr"], variables)


def _sql_problems(target: Mapping[str, Any]) -> Iterator[str]:
    if not target["url"].startswith("/api/q/"):
        yield f"url {target['url']!r} is not accepted; accepted: /api/q/NAME"
    given = {param["key"] for param in target["url_options"]["params"]}
    for name in ("from", "to"):
        if name not in given:
            yield f"parameter {name!r} is missing, so the panel would ignore the time range"


def _series_problems(expr: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Names and labels against the catalogue, and the range of every counter, at both receipt points."""
    for observer in ("client", "sidecar") if "${observer}" in expr else ("",):
        readable = substituted(expr, {**variables, "${observer}": observer, **_RANGES})
        yield from _selector_problems(readable, tuple(_RANGES.values()), ())


def _selector_problems(expr: str, ranges: Collection[str], recorded: Collection[str]) -> Iterator[str]:
    """`ranges`: those accepted for a counter, empty for any. `recorded`: names that a rule makes."""
    try:
        read = list(selectors.selectors(expr))
    except DashboardError as error:
        yield str(error)
        return
    if not read:
        yield f"expression {expr!r} reads no series"
    for series in read:
        if series.name in recorded or series.name in _PROMETHEUS_OWN:
            continue
        try:
            metric = selectors.catalogue_row(series.name)
        except DashboardError as error:
            yield str(error)
            continue
        for label in series.labels:
            if label not in (*metric.labels, *_SCRAPE_LABELS) and not (label == "le" and metric.kind == "histogram"):
                yield f"metric {metric.name} has no label {label!r}"
        counts = metric.kind in ("counter", "histogram")
        if counts and ranges and series.range not in ranges:
            yield f"{series.name} is read over [{series.range}]; accepted: {', '.join(_RANGES)}"
        if counts and not series.range:
            yield f"{series.name} only grows; read it over a range"


def _variable_problems(variable: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[str]:
    query = substituted(str(variable["query"]), variables)
    name, _, label = query.removeprefix("label_values(").removesuffix(")").partition(", ")
    try:
        metric = selectors.catalogue_row(name)
    except DashboardError as error:
        yield f"variable {variable['name']}: {error}"
        return
    if label not in metric.labels:
        yield f"variable {variable['name']}: metric {metric.name} has no label {label!r}"


def rule_problems(groups: tuple[rulefile.Group, ...]) -> list[str]:
    """Every series is exposed or recorded, and nothing is recorded under one name and label set twice."""
    if not any(group.rules for group in groups):
        return ["has no rule"]
    recordings = [rule for group in groups for rule in group.rules if isinstance(rule, rulefile.Recording)]
    recorded = {rule.record for rule in recordings}
    found = []
    for group in groups:
        for rule in group.rules:
            name = rule.record if isinstance(rule, rulefile.Recording) else rule.name
            found += [f"rule {name}: {problem}" for problem in _selector_problems(rule.expr, (), recorded)]
    bodies = [(rule.record, tuple(rule.labels.items()), rule.expr) for rule in recordings]
    found += [f"rule {body[0]}: stands twice" for body in set(bodies) if bodies.count(body) > 1]
    return found
