"""How every dashboard looks, in one place, on the builders of Grafana's own schema (grafana-foundation-sdk)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

GOOD, WARN, BAD, CALM = "green", "orange", "red", "blue"

SLO = "SLO"
"""Series whose name begins so are drawn as a dashed red line."""

WIDTH = 24
"""Of a dashboard, in Grafana's columns."""

Steps: TypeAlias = Sequence[tuple[float | None, str]]
"""(from this value on, colour); the first one from None, which is minus infinity."""

Panel: TypeAlias = Builder[model.Panel]


class Query(NamedTuple):
    """One PromQL expression, and the name of its series."""

    expr: str
    legend: str = ""


def lines(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    top: float | None = None,
    stack: bool = False,
    span: int = 8,
    log: bool = False,
    signed: bool = False,
) -> timeseries.Panel:
    """Series over time. ``top`` is the largest value there can be; ``signed``: the values may be below 0."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1.5)
        .fill_opacity(25 if stack else 6)
        .show_points(common.VisibilityMode.NEVER)
        .color_scheme(builder.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .legend(
            common_builder.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
        )
        .tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .override_by_regexp(
            f"^{SLO}.*",
            [
                model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": BAD}),
                model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
                model.DynamicConfigValue("custom.fillOpacity", 0),
            ],
        )
    )
    if not signed:
        panel.min(0)
    if top is not None:
        panel.max(top)
    if stack:
        panel.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL))
    if log:
        panel.scale_distribution(common_builder.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(2))
    for index, query in enumerate(queries):
        panel.with_target(_target(query, index))
    return panel


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    steps: Steps = ((None, CALM),),
    span: int = 4,
    decimals: int | None = None,
    words: dict[str, tuple[str, str]] | None = None,
) -> stat.Panel:
    """One number, now, with what it was. ``words``: value -> (what is shown for it, colour)."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if words else common.BigValueGraphMode.AREA)
        .reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(steps))
        .no_value("–")
    )
    if decimals is not None:
        panel.decimals(decimals)
    if words:
        results = {value: model.ValueMappingResult(text, colour) for value, (text, colour) in words.items()}
        panel.mappings([model.ValueMap(results)])
    return panel.with_target(_target(query, 0))


def rows(
    title: str,
    description: str,
    *columns: tuple[Query, str],
    unit: str = "short",
    span: int = WIDTH,
    by: str,
    units: dict[str, str] | None = None,
    hidden: Sequence[str] = (),
) -> table.Panel:
    """A table: one row for each set of labels, one column for each (query, heading). ``units``: heading -> its unit.

    ``by``: the column to sort by, largest first. ``hidden``: labels that are not shown.
    """
    names = {f"Value #{_ref(index)}" if len(columns) > 1 else "Value": heading for index, (_, heading) in enumerate(columns)}
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .sort_by([common_builder.TableSortByFieldState().display_name(by).desc(True)])
        .with_transformation(model.DataTransformerConfig("merge", options={}))
        .with_transformation(
            model.DataTransformerConfig(
                "organize", options={"excludeByName": {"Time": True, **dict.fromkeys(hidden, True)}, "renameByName": names}
            )
        )
    )
    for heading, its_unit in (units or {}).items():
        panel.override_by_name(heading, [model.DynamicConfigValue("unit", its_unit)])
    for index, (query, _) in enumerate(columns):
        panel.with_target(_target(query, index).instant().format(prometheus_model.PromQueryFormat.TABLE))
    return panel


def choice(name: str, label: str, query: str) -> builder.QueryVariable:
    """A variable with the values of a label, all of them at first: ``query`` as in ``label_values(metric, label)``."""
    return (
        builder.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(DATASOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text="All", value="$__all", selected=True))
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )


def price(name: str, label: str, value: str) -> builder.TextBoxVariable:
    """A variable that holds a number to type in."""
    return builder.TextBoxVariable(name).label(label).default_value(value)


def board(
    uid: str,
    title: str,
    description: str,
    parts: Sequence[tuple[str, Sequence[Panel]]],
    *variables: builder.QueryVariable | builder.TextBoxVariable,
    since: str = "now-1h",
) -> model.Dashboard:
    """A dashboard: rows of panels under headings."""
    made = (
        builder.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["baton"])
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time(since, "now")
        .refresh("10s")
        .version(1)
        .readonly()
        .with_variable(builder.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            builder.DashboardLink("Baton")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["baton"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    for variable in variables:
        made.with_variable(variable)
    for heading, panels in parts:
        made.with_row(builder.Row(heading))
        for panel in panels:
            made.with_panel(panel)
    found = made.build()
    for number_, each in enumerate(found.panels or [], start=1):
        each.id_val = number_
    return found


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(_ref(index)).datasource(DATASOURCE)
    if "[$__range]" in query.expr:
        target.instant()
    if query.legend:
        target.legend_format(query.legend)
    return target


def _ref(index: int) -> str:
    return "ABCDEFGHIJKLMNOP"[index]


def _thresholds(steps: Steps) -> builder.ThresholdsConfig:
    found = [model.Threshold(value, colour) for value, colour in steps]
    return builder.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(found)
