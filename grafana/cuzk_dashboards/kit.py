"""What all boards are made with: variables, selectors, queries, panels, and a grid that fills itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models import heatmap as h
from grafana_foundation_sdk.models import prometheus as p

from cuzk_dashboards.palette import BAD, GOOD, KINDS, MEASURE, QUANTILES, QUIET, SCHEME, WARN, Colours

COLUMNS: Final = 24
POINTS: Final = 180
"""At most in one picture: with more, a prover's cycles of some minutes are a hedge of spikes in a picture of hours."""
TAG: Final = "cuzk"
NOTHING: Final = "–"
"""What is shown where there is no value."""
SOURCE_OF_DATA: Final = d.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Selectors: of what comes from a log, of what a log says of a GPU, and of what NVML says of it.
LOG: Final = 'instance=~"$instance", source=~"$source"'
GPU: Final = f'{LOG}, gpu=~"$gpu"'
CHIP: Final = 'instance=~"$instance", gpu=~"$gpu"'
HOST: Final = 'instance=~"$instance"'

FAULTS: Final = "starved|blocked|handoff"
"""Causes of idleness that somebody can do something about."""
NOW: Final = "$__rate_interval"
RANGE: Final = "$__range"

# --- expressions


def rate(metric: str, selector: str, window: str = NOW) -> str:
    """How fast all of a counter's series grow together."""
    return f"sum(rate({metric}{{{selector}}}[{window}]))"


def increase(metric: str, selector: str, window: str = RANGE, *, by: str = "") -> str:
    """By how much a counter grew."""
    return f"sum{f' by ({by})' if by else ''} (increase({metric}{{{selector}}}[{window}]))"


def quantile(q: float, histogram: str, selector: str, *by: str, window: str = NOW) -> str:
    """A quantile of what a histogram saw; nothing where it saw nothing."""
    grouped = ", ".join(("le", *by))
    return f"histogram_quantile({q}, sum by ({grouped}) (rate({histogram}_bucket{{{selector}}}[{window}]))) >= 0"


def earning(selector: str, window: str, by: str = "") -> str:
    """Busy by its share of the time in which a GPU could have been: without no_work and the latency of single proofs.
    Nothing where there was no such time."""
    grouped = f" by ({by})" if by else ""
    busy = f"sum{grouped} (rate(cuzk_gpu_logged_busy_seconds_total{{{selector}}}[{window}]))"
    lost = f'sum{grouped} (rate(cuzk_gpu_idle_seconds_total{{{selector}, cause=~"{FAULTS}|unknown"}}[{window}]))'
    return f"{busy} / ({busy} + {lost}) >= 0"


# --- queries


@dataclass(frozen=True, slots=True)
class Query:
    """One query, and what its series are called."""

    expr: str
    legend: str = "__auto"


def _target(query: Query, ref: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(ref)
        .datasource(SOURCE_OF_DATA)
        .editor_mode(p.QueryEditorMode.CODE)
        .expr(query.expr)
        .legend_format(query.legend)
    )


def _ref(index: int) -> str:
    return chr(ord("A") + index)


def _targets(queries: Sequence[Query], shape: Callable[[prometheus.Dataquery], prometheus.Dataquery]) -> list[Any]:
    return [shape(_target(query, _ref(index))) for index, query in enumerate(queries)]


def one_each(label: str, values: Iterable[str], expr: str) -> list[Query]:
    """A query for each value of a label, in that order: that of the areas, and of the legend. `expr` has `LABEL` in
    its selector."""
    return [Query(expr.replace("LABEL", f'{label}="{value}"'), value) for value in values]


# --- colours and thresholds


def _fixed(colour: str) -> d.DynamicConfigValue:
    return d.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _scheme(mode: d.FieldColorModeId, colour: str | None = None) -> dashboard.FieldColor:
    builder = dashboard.FieldColor().mode(mode)
    return builder if colour is None else builder.fixed_color(colour)


def steps(*limits: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Colours from given values on; the first one from None."""
    thresholds = [d.Threshold(value, colour) for value, colour in limits]
    return dashboard.ThresholdsConfig().mode(d.ThresholdsMode.ABSOLUTE).steps(thresholds)


def below(warn: float, good: float) -> dashboard.ThresholdsConfig:
    """More is better; no verdict where there is no value."""
    return steps((None, QUIET), (0, BAD), (warn, WARN), (good, GOOD))


def above(warn: float, bad: float) -> dashboard.ThresholdsConfig:
    """Less is better; no verdict where there is no value."""
    return steps((None, QUIET), (0, GOOD), (warn, WARN), (bad, BAD))


def none_is_good() -> dashboard.ThresholdsConfig:
    """One is too many."""
    return steps((None, QUIET), (0, GOOD), (1, BAD))


def neutral() -> dashboard.ThresholdsConfig:
    """No verdict."""
    return steps((None, MEASURE))


YES_OR_NO: Final[Sequence[d.ValueMapping]] = (
    d.ValueMap({"1": d.ValueMappingResult("yes", GOOD, index=0), "0": d.ValueMappingResult("no", WARN, index=1)}),
)
UP_OR_DOWN: Final[Sequence[d.ValueMapping]] = (
    d.ValueMap({"1": d.ValueMappingResult("up", GOOD, index=0), "0": d.ValueMappingResult("down", BAD, index=1)}),
)


# --- panels


def _legend(calcs: Sequence[str]) -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(c.LegendDisplayMode.LIST)
        .placement(c.LegendPlacement.BOTTOM)
        .calcs(list(calcs))
    )


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(c.SortOrder.DESCENDING)


def graph(
    title: str,
    about: str,
    *queries: Query,
    unit: str,
    colours: Colours | None = None,
    shades: str | None = None,
    stacked: bool = False,
    bars: bool = False,
    exemplars: bool = False,
    maximum: float | None = None,
    decimals: int | None = None,
    calcs: Sequence[str] = (),
    limits: dashboard.ThresholdsConfig | None = None,
    dashed: str | None = None,
    barred: str | None = None,
    smallest_step: str | None = None,
    sparse: bool = False,
    empty: str = "nothing in this time",
) -> timeseries.Panel:
    """Lines, or areas (`stacked`) or counts of events (`bars`) on top of each other, over time.

    Series without a colour of their own have the palette's in turn, or `shades` of one. `dashed` matches the legends of
    lines that are there for comparison, `barred` of counts of events beside areas. The points of `sparse` lines are
    connected.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .targets(_targets(queries, lambda query: query.range().exemplar(exemplars)))
        .unit(unit)
        .min(0)
        .color_scheme(_scheme(d.FieldColorModeId.SHADES if shades else d.FieldColorModeId.PALETTE_CLASSIC, shades))
        .max_data_points(POINTS)
        .line_width(0 if stacked else 2 if colours else 1)
        .fill_opacity(70 if stacked else 0)
        .show_points(c.VisibilityMode.NEVER if stacked or bars else c.VisibilityMode.AUTO)
        .point_size(4)
        .span_nulls(sparse)
        .legend(_legend(calcs))
        .tooltip(_tooltip())
        .no_value(empty)
    )
    if smallest_step is not None:
        panel.interval(smallest_step)
    if maximum is not None:
        panel.max(maximum)
    if decimals is not None:
        panel.decimals(decimals)
    if stacked or bars:
        panel.stacking(common.StackingConfig().mode(c.StackingMode.NORMAL).group("A")).axis_soft_max(0.1)
    if bars:
        # With a step of at least a minute, the windows overlap by one scrape: each event is in one bar.
        panel.draw_style(c.GraphDrawStyle.BARS).fill_opacity(80).line_width(0).interval(smallest_step or "1m")
        panel.axis_soft_max(2)
    if limits is not None:
        panel.thresholds(limits)
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(c.GraphThresholdsStyleMode.DASHED))
    _paint(panel, colours)
    if dashed is not None:
        line = {"lineStyle": {"fill": "dash", "dash": [8, 6]}, "lineWidth": 2, "fillOpacity": 0}
        panel.override_by_regexp(dashed, _apart(line))
    if barred is not None:
        panel.override_by_regexp(barred, _apart({"drawStyle": "bars", "fillOpacity": 80})).interval("1m")
    return panel


def _apart(style: dict[str, object]) -> list[d.DynamicConfigValue]:
    """Properties of series that are drawn in another style, and on top of nothing."""
    style = {**style, "stacking": {"mode": "none", "group": "A"}}
    return [d.DynamicConfigValue(f"custom.{name}", value) for name, value in style.items()]


def _paint(panel: timeseries.Panel | bargauge.Panel | stat.Panel, colours: Colours | None) -> None:
    """A colour for every series whose legend is one of the names, or begins with it."""
    for name, colour in (colours or {}).items():
        panel.override_by_regexp(f"/^{name}( |$)/", [_fixed(colour)])


def quantiles(
    title: str, about: str, histogram: str, selector: str, *, exemplars: bool = False, empty: str
) -> timeseries.Panel:
    """Median, 90th and 99th percentile over time."""
    queries = [Query(quantile(q, histogram, selector), f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]
    return graph(title, about, *queries, unit="s", colours=QUANTILES, exemplars=exemplars, sparse=True, empty=empty)


def by_kind(title: str, about: str, histogram: str, *, smallest_step: str | None = None) -> timeseries.Panel:
    """Median and 90th percentile by kind of proof."""
    queries = [
        Query(quantile(q, histogram, LOG, "proof_kind"), f"{{{{proof_kind}}}} p{q * 100:.0f}") for q in (0.9, 0.5)
    ]
    return graph(
        title,
        about,
        *queries,
        unit="s",
        colours=KINDS,
        dashed="/ p50$/",
        smallest_step=smallest_step,
        sparse=True,
        empty="none in this time",
    )


def number(
    title: str,
    about: str,
    *queries: Query,
    unit: str,
    limits: dashboard.ThresholdsConfig | None = None,
    colours: Colours | None = None,
    decimals: int | None = None,
    empty: str = NOTHING,
    name: bool = False,
) -> stat.Panel:
    """One number for the whole range, or as of now; coloured by how good it is."""
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .targets(_targets(queries, lambda query: query.instant()))
        .unit(unit)
        .thresholds(limits or neutral())
        .color_scheme(_scheme(d.FieldColorModeId.THRESHOLDS))
        .color_mode(c.BigValueColorMode.VALUE)
        .graph_mode(c.BigValueGraphMode.NONE)
        .justify_mode(c.BigValueJustifyMode.CENTER)
        .text_mode(c.BigValueTextMode.VALUE_AND_NAME if name else c.BigValueTextMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .no_value(empty)
    )
    if decimals is not None:
        panel.decimals(decimals)
    _paint(panel, colours)
    return panel


def bars(
    title: str,
    about: str,
    *queries: Query,
    unit: str,
    colours: Colours | None = None,
    limits: dashboard.ThresholdsConfig | None = None,
    empty: str = NOTHING,
    maximum: float | None = None,
) -> bargauge.Panel:
    """A bar for each series, as of now or for the whole range."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(about)
        .targets(_targets(queries, lambda query: query.instant()))
        .unit(unit)
        .min(0)
        .thresholds(limits or neutral())
        .color_scheme(_scheme(d.FieldColorModeId.THRESHOLDS))
        .orientation(c.VizOrientation.HORIZONTAL)
        .display_mode(c.BarGaugeDisplayMode.BASIC)
        .value_mode(c.BarGaugeValueMode.COLOR)
        .show_unfilled(True)
        .name_placement(c.BarGaugeNamePlacement.TOP)
        .text(common.VizTextDisplayOptions().title_size(13).value_size(16))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .no_value(empty)
    )
    if maximum is not None:
        panel.max(maximum)
    _paint(panel, colours)
    return panel


def heat(title: str, about: str, histogram: str, selector: str, *, unit: str = "s") -> heatmap.Panel:
    """How often a histogram saw what, over time, with exemplars."""
    query = Query(f"sum by (le) (increase({histogram}_bucket{{{selector}}}[{NOW}]))", "{{le}}")
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .targets(
            _targets([query], lambda query: query.range().exemplar(True).format(p.PromQueryFormat.HEATMAP)),
        )
        .max_data_points(POINTS)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(h.HeatmapColorMode.SCHEME)
            .scheme(SCHEME)
            .scale(h.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
            .reverse(False)
        )
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(c.AxisPlacement.LEFT))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(c.HeatmapCellLayout.AUTO))
        .cell_gap(1)
        .cell_values(heatmap.CellValues().decimals(1))
        .show_value(c.VisibilityMode.NEVER)
        .exemplars_color("#FFFFFF")
        .mode(c.TooltipDisplayMode.SINGLE)
        .show_y_histogram()
        .show_legend()
    )


def states(title: str, about: str, *queries: Query, empty: str = NOTHING) -> statetimeline.Panel:
    """1 is up, 0 is down, over time."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(about)
        .targets(_targets(queries, lambda query: query.range()))
        .mappings(list(UP_OR_DOWN))
        .thresholds(steps((None, QUIET)))
        .color_scheme(_scheme(d.FieldColorModeId.THRESHOLDS))
        .show_value(c.VisibilityMode.NEVER)
        .row_height(0.8)
        .merge_values(True)
        .fill_opacity(80)
        .legend(_legend(()))
        .tooltip(_tooltip())
        .no_value(empty)
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a label, or the value of a query of its own."""

    name: str
    expr: str | None = None
    hidden: bool = False
    """Its query is there for its labels."""
    properties: Sequence[d.DynamicConfigValue] = ()


def unit_of(unit: str, decimals: int | None = None) -> list[d.DynamicConfigValue]:
    """Properties of a column: its unit."""
    return [
        d.DynamicConfigValue("unit", unit),
        *([] if decimals is None else [d.DynamicConfigValue("decimals", decimals)]),
    ]


def coloured_text(limits: dashboard.ThresholdsConfig) -> list[d.DynamicConfigValue]:
    """Properties of a column: its text in the colour of its value."""
    return [
        d.DynamicConfigValue("custom.cellOptions", c.TableColorTextCellOptions()),
        d.DynamicConfigValue("thresholds", limits.build()),
        d.DynamicConfigValue("color", {"mode": "thresholds"}),
    ]


def width(pixels: int) -> d.DynamicConfigValue:
    """Property of a column: how wide it is."""
    return d.DynamicConfigValue("custom.width", pixels)


def least_width(pixels: int) -> d.DynamicConfigValue:
    """Property of a column that takes what others leave: how wide it is at least."""
    return d.DynamicConfigValue("custom.minWidth", pixels)


def _cell_without_value() -> d.DynamicConfigValue:
    return d.DynamicConfigValue("noValue", NOTHING)


def mapped(values: Sequence[d.ValueMapping]) -> list[d.DynamicConfigValue]:
    """Properties of a column: words for its values."""
    return [d.DynamicConfigValue("mappings", list(values))]


def link(title: str, url: str) -> list[d.DynamicConfigValue]:
    """Properties of a column: where a click leads."""
    return [d.DynamicConfigValue("links", [{"title": title, "url": url}])]


def grid(
    title: str, about: str, columns: Sequence[Column], *, sort: str | None = None, empty: str = NOTHING
) -> table.Panel:
    """A table: the columns' queries are joined by the labels that they share."""
    values = [column for column in columns if column.expr is not None]
    if empty != NOTHING:
        # Of the whole table; a single cell is empty for another reason.
        columns = [replace(column, properties=[*column.properties, _cell_without_value()]) for column in columns]
    fields = {column.name: "Value" if len(values) == 1 else f"Value #{_ref(n)}" for n, column in enumerate(values)}
    queries = [Query(column.expr or "", column.name) for column in values]
    hidden = {fields[column.name]: True for column in values if column.hidden}
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .targets(_targets(queries, lambda query: query.instant().format(p.PromQueryFormat.TABLE)))
        .with_transformation(d.DataTransformerConfig("merge", options={}))
        .with_transformation(
            d.DataTransformerConfig(
                "organize",
                options={
                    "excludeByName": {"Time": True, **hidden},
                    "includeByName": {},
                    "indexByName": {fields.get(column.name, column.name): n for n, column in enumerate(columns)},
                    "renameByName": {value: name for name, value in fields.items() if not hidden.get(value)},
                },
            )
        )
        .thresholds(neutral())
        .color_scheme(_scheme(d.FieldColorModeId.THRESHOLDS))
        .cell_height(c.TableCellHeight.SM)
        .show_header(True)
        .no_value(empty)
    )
    for column in columns:
        if column.properties:
            panel.override_by_name(column.name, list(column.properties))
    if sort is not None:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(True)])
    return panel


# --- boards


class _Restarts(d.AnnotationQuery):
    """An annotation at the time that a series has for a value, with the options that the SDK has no fields for."""

    def __init__(self, name: str, expr: str, title: str, colour: str) -> None:
        super().__init__(name=name, datasource=SOURCE_OF_DATA, enable=True, icon_color=colour, expr=expr)
        self._title = title

    def to_json(self) -> dict[str, object]:
        """As Grafana stores it."""
        return {
            **super().to_json(),
            "useValueForTime": "on",
            "step": "",
            "titleFormat": self._title,
            "textFormat": "",
            "tagKeys": "instance,source",
        }


@dataclass(frozen=True, slots=True)
class _Built(Builder[d.AnnotationQuery]):
    annotation: d.AnnotationQuery

    def build(self) -> d.AnnotationQuery:
        return self.annotation


def restarts(by_source: str, by_host: str) -> list[_Built]:
    """When a prover, or its agent, was started."""
    engine = f"cuzk_engine_start_timestamp_seconds{{{by_source}}} * 1000"
    agent = f"process_start_time_seconds{{{by_host}}} * 1000 and on (instance, job) cuzk_agent_info"
    return [
        _Built(_Restarts("Prover started", engine, "{{instance}} {{source}}: the prover started", "#AA4499")),
        _Built(_Restarts("Agent started", agent, "{{instance}}: the agent started", QUIET)),
    ]


def _variable(name: str, label: str, about: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(about)
        .datasource(SOURCE_OF_DATA)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(d.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(d.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def instance_variable() -> dashboard.QueryVariable:
    """Which agents."""
    return _variable("instance", "Instance", "The agents to look at.", "label_values(cuzk_agent_info, instance)")


def source_variable() -> dashboard.QueryVariable:
    """Which logs."""
    query = f"label_values(cuzk_agent_source_up{{{HOST}}}, source)"
    return _variable("source", "Source", "The provers to look at, by the names of their logs.", query)


def gpu_variable(metric: str, selector: str) -> dashboard.QueryVariable:
    """Which GPUs, of those that a metric knows."""
    return _variable("gpu", "GPU", "The GPUs to look at, by index.", f"label_values({metric}{{{selector}}}, gpu)")


AnyPanel = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel | statetimeline.Panel | table.Panel


@dataclass(slots=True)
class Board:
    """A dashboard, filled row by row."""

    uid: str
    title: str
    about: str
    variables: Sequence[dashboard.QueryVariable]
    annotations: Sequence[_Built] = ()
    since: str = "now-3h"
    _rows: list[tuple[str | None, list[tuple[list[AnyPanel], int, list[int]]]]] = field(default_factory=list)

    def row(self, title: str | None = None) -> None:
        """Begins a new part of the board."""
        self._rows.append((title, []))

    def line(self, height: int, *panels: AnyPanel, widths: Sequence[int] = ()) -> None:
        """Panels side by side, equally wide unless told otherwise."""
        wide = list(widths) or [COLUMNS // len(panels)] * len(panels)
        assert len(wide) == len(panels)
        assert sum(wide) == COLUMNS, (self.title, wide)
        self._rows[-1][1].append((list(panels), height, wide))

    def render(self) -> str:
        """Its JSON."""
        board = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.about)
            .tags([TAG])
            .editable()
            .timezone("browser")
            .tooltip(d.DashboardCursorSync.CROSSHAIR)
            .time(self.since, "now")
            .refresh("30s")
            .links(
                [
                    dashboard.DashboardLink("cuzk boards")
                    .type(d.DashboardLinkType.DASHBOARDS)
                    .tags([TAG])
                    .as_dropdown(False)
                    .include_vars(True)
                    .keep_time(True)
                    .icon("external link")
                ]
            )
            .annotations(list(self.annotations))
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )
        for variable in self.variables:
            board.with_variable(variable)
        ids = itertools.count(1)
        y = 0
        for title, lines in self._rows:
            if title is not None:
                board.with_row(dashboard.Row(title).id(next(ids)).grid_pos(d.GridPos(h=1, w=COLUMNS, x=0, y=y)))
                y += 1
            for panels, height, wide in lines:
                for panel, x, w in zip(panels, itertools.accumulate(wide, initial=0), wide, strict=False):
                    placed = panel.id(next(ids)).datasource(SOURCE_OF_DATA)
                    board.with_panel(placed.grid_pos(d.GridPos(h=height, w=w, x=x, y=y)))
                y += height
        return json.dumps(board.build(), cls=JSONEncoder, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def go_to(uid: str, title: str) -> list[Builder[d.DashboardLink]]:
    """Links of a panel: another board, with this one's time range and variables."""
    url = f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}"
    return [dashboard.DashboardLink(title).type(d.DashboardLinkType.LINK).url(url)]
