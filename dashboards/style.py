"""How a panel looks, once. Every function makes a fresh builder: the SDK's builders change in place."""

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as board
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards import infinity

# Datasources are variables: a dashboard that names one by uid works in one Grafana only.
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
SQL = DataSourceRef(type_val=infinity.PLUGIN, uid="${sql}")
NO_TRAFFIC = "no traffic"

# Questions name their columns with the unit last; the table reads the unit from there. The last match counts.
_COLUMN_UNITS = (
    ("/.*_ns$/", "ns"),
    ("/.*_s$/", "s"),
    ("/.*_(at|per)_s$/", "none"),  # a wall time, and something a second: no durations
    ("/.*_rps$/", "reqps"),
    ("/.*(attainment|objective|share|ratio|budget_used).*/", "percentunit"),
)


def query(expr: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).datasource(PROMETHEUS).range().legend_format(legend)


def _dressed(panel: Any, title: str, description: str, unit: str, no_value: str, span: int, height: int) -> Any:
    panel = panel.title(title).description(description).unit(unit).no_value(no_value)
    return panel.span(span).height(height)


def _legend() -> common.VizLegendOptions:
    """Shown, because the SDK hides it by default."""
    legend = common.VizLegendOptions().show_legend(True)
    return legend.display_mode(shapes.LegendDisplayMode.LIST).placement(shapes.LegendPlacement.BOTTOM)


def lines(
    title: str,
    description: str,
    unit: str,
    targets: Sequence[Any],
    *,
    span: int = 12,
    no_value: str = NO_TRAFFIC,
    stacked: bool = False,
) -> timeseries.Panel:
    """Series over time. A series whose legend starts with `limit` or `objective` is drawn as a dashed line."""
    panel = _dressed(timeseries.Panel(), title, description, unit, no_value, span, 8).datasource(PROMETHEUS)
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI)
    panel = panel.min(0).legend(_legend()).tooltip(tooltip).line_width(1).fill_opacity(25 if stacked else 4)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    declared = [
        board.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
        board.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        board.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": "red"}),
    ]
    panel = panel.override_by_regexp("/^(limit|objective)/", declared)
    for target in targets:
        panel = panel.with_target(target)
    return panel


def number(
    title: str, description: str, unit: str, targets: Sequence[Any], *, span: int = 6, no_value: str = NO_TRAFFIC
) -> stat.Panel:
    """One value of each series, large, evaluated once at the end of the time range."""
    panel = _dressed(stat.Panel(), title, description, unit, no_value, span, 5).datasource(PROMETHEUS)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.text_mode(shapes.BigValueTextMode.VALUE_AND_NAME).graph_mode(shapes.BigValueGraphMode.NONE)
    panel = panel.color_mode(shapes.BigValueColorMode.NONE)
    for target in targets:
        panel = panel.with_target(target.instant())
    return panel


def distribution(title: str, description: str, unit: str, expr: str, *, span: int = 12) -> heatmap.Panel:
    """Buckets of a classic histogram over time."""
    panel = _dressed(heatmap.Panel(), title, description, unit, NO_TRAFFIC, span, 8).datasource(PROMETHEUS)
    colors = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    panel = panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(unit)).color(colors).cell_gap(1)
    panel = panel.rows_frame(heatmap.RowsHeatmapOptions().layout(shapes.HeatmapCellLayout.LE)).show_legend()
    return panel.with_target(query(expr, "{{le}}").format(PromQueryFormat.HEATMAP))


def facts(title: str, description: str, targets: Sequence[Any], *, span: int = 12) -> table.Panel:
    """Labels of gauges as rows, for what is a fact and no curve."""
    panel = _dressed(table.Panel(), title, description, "short", "not scraped", span, 8).datasource(PROMETHEUS)
    for target in targets:
        panel = panel.with_target(target.format(PromQueryFormat.TABLE).instant())
    return panel


def timeline(
    title: str,
    description: str,
    unit: str,
    question: str,
    time: str,
    columns: Sequence[str],
    params: dict[str, str] | None = None,
    *,
    stacked: bool = False,
) -> timeseries.Panel:
    """Numeric columns of a question over its column `time`, in seconds since the epoch."""
    panel = lines(title, description, unit, [], no_value="no rows", stacked=stacked).datasource(SQL)
    kinds = {time: "timestamp_epoch_s"} | dict.fromkeys(columns, "number")
    return panel.with_target(infinity.Infinity(question, SQL, params, kinds))


def answer(
    title: str, description: str, question: str, params: dict[str, str] | None = None, *, span: int = 12
) -> table.Panel:
    """The rows of a question, with every column that it gives."""
    panel = _dressed(table.Panel(), title, description, "short", "no rows", span, 8).datasource(SQL)
    for pattern, unit in _COLUMN_UNITS:
        panel = panel.override_by_regexp(pattern, [board.DynamicConfigValue(id_val="unit", value=unit)])
    return panel.with_target(infinity.Infinity(question, SQL, params))
