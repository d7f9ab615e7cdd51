"""What every dashboard shares: variables, annotations, and the numbering that the SDK leaves out."""

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    RowPanel,
    VariableOption,
    VariableRefresh,
)

from dashboards import infinity, promql, style


class Row(NamedTuple):
    title: str
    panels: tuple[Callable[[], Any], ...]


def dashboard(uid: str, title: str, description: str, rows: Sequence[Row]) -> Dashboard:
    """Variables on top, one row of panels for each entry, everything numbered."""
    made = board.Dashboard(title).uid(uid).description(description).tags(["sloscope", "generated"]).editable()
    made = made.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    for variable in _variables():
        made = made.with_variable(variable)
    restarts = board.AnnotationQuery().name("Data plane restarts").enable(True).icon_color("orange")
    made = made.annotation(restarts.datasource(style.PROMETHEUS).expr(promql.restarts()).title_format("restart"))
    for row in rows:
        made = made.with_row(board.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(panel())
    return _numbered(made.build())


def _variables() -> list[Any]:
    offered = promql.receipt("requests_offered_total")
    observers = [VariableOption(selected=name == "client", text=name, value=name) for name in ("client", "sidecar")]
    observer = board.CustomVariable("observer").label("Observer").values("client,sidecar").options(observers)
    return [
        board.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        board.DatasourceVariable("sql").label("SQL results").type(infinity.PLUGIN),
        observer.current(observers[0]).description("Where receipts are stamped."),
        *(_label_variable(offered, label) for label in promql.FILTERS),
    ]


def _label_variable(series: promql.Series, label: str) -> Any:
    variable = board.QueryVariable(label).label(label.capitalize()).datasource(style.PROMETHEUS)
    variable = variable.query(promql.label_values(series, label)).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    # `.*` and not `.+`: a series without a tenant belongs to All as well.
    everything = VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def _numbered(made: Dashboard) -> Dashboard:
    """Ids from 1 in reading order and refIds A, B, C …: the SDK leaves 0 and nothing."""
    for number, panel in enumerate(made.panels, start=1):
        panel.id_val = number
        if isinstance(panel, RowPanel):
            continue
        for letter, target in zip(string.ascii_uppercase, panel.targets, strict=False):
            target.ref_id = letter
    return made
