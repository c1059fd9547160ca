"""The dashboards: the files are what the programs make, whole in themselves, and name only what is exposed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cuzk_agent.timeline.state import Cause, ProofOutcome, Stage, UnitOutcome
from cuzk_dashboards import palette
from cuzk_dashboards.__main__ import DASHBOARDS, main
from cuzk_dashboards.boards import boards

ROOT = Path(__file__).parent.parent.parent
GRAFANA = ROOT / "grafana"
GOLDEN = ROOT / "tests" / "golden" / "metrics.openmetrics.txt"
FILES = sorted(DASHBOARDS.glob("*.json"))

PANEL_TYPES = {"timeseries", "stat", "bargauge", "heatmap", "state-timeline", "table"}
UNITS = {
    "none", "percentunit", "s", "joule", "watt", "hertz", "celsius", "bytes", "binBps", "dateTimeAsIso",
    "dateTimeFromNow", "suffix:GPUs", "suffix:h", "suffix:units/s", "suffix:lines/s", "suffix:cores",
}  # fmt: skip
BUILT_IN = {"__rate_interval", "__range", "__url_time_range", "__all_variables", "__data.fields.instance"} | {
    "__data.fields.source"
}
PROMETHEUS_OWN = {"up", "ALERTS", "scrape_duration_seconds"}
PROCESS = {"process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""

Json = dict[str, Any]


def board_of(file: Path) -> Json:
    board: Json = json.loads(file.read_text(encoding="utf-8"))
    return board


def panels_of(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def texts_in(value: object) -> Iterator[str]:
    """All strings in a piece of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


def expressions_of(board: Json) -> Iterator[str]:
    for panel in panels_of(board):
        yield from (target["expr"] for target in panel["targets"])
    yield from (note["expr"] for note in board["annotations"]["list"])


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def board(request: pytest.FixtureRequest) -> Json:
    return board_of(request.param)


# --- the files


def test_the_files_are_what_the_programs_make(tmp_path: Path) -> None:
    stale = tmp_path / "no-more.json"
    stale.touch()
    main(tmp_path)
    made = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text(encoding="utf-8") for file in DASHBOARDS.iterdir()}
    assert made == kept, "make dashboards"


def test_no_two_boards_are_alike() -> None:
    found = [board_of(file) for file in FILES]
    assert len({board["uid"] for board in found}) == len({board["title"] for board in found}) == len(FILES)
    assert {board.uid for board in boards()} == {file.stem for file in FILES}
    for board in found:
        assert re.fullmatch(r"[a-z-]{8,40}", board["uid"])
        assert board["schemaVersion"] == 41
        assert board["tags"] == ["cuzk"]


# --- a board


def test_panels_have_ids_and_titles_of_their_own(board: Json) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


def test_the_grid_is_filled_without_overlap(board: Json) -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in cells, (panel["title"], cells.get(cell))
            cells[cell] = panel["title"]
    assert len(cells) == 24 * (1 + max(y for _, y in cells)), "there are holes"


def test_panel_types_and_units_are_known(board: Json) -> None:
    for panel in panels_of(board):
        assert panel["type"] in PANEL_TYPES
        units = {panel["fieldConfig"]["defaults"].get("unit") if "fieldConfig" in panel else None}
        units |= {panel["options"].get("yAxis", {}).get("unit")}
        units |= {
            setting["value"]
            for override in panel.get("fieldConfig", {}).get("overrides", [])
            for setting in override["properties"]
            if setting["id"] == "unit"
        }
        assert units - {None} <= UNITS, panel["title"]
        if panel["type"] not in {"table", "state-timeline"}:
            assert units - {None}, panel["title"]


def test_every_panel_says_what_to_do_about_it(board: Json) -> None:
    assert len(board["description"]) > 30
    for panel in panels_of(board):
        about = panel["description"]
        assert len(about) > 40, panel["title"]
        assert about.endswith("."), panel["title"]


def test_variables_are_declared_and_used(board: Json) -> None:
    variables = board["templating"]["list"]
    declared = [variable["name"] for variable in variables]
    assert len(set(declared)) == len(declared)
    used = set(re.findall(r"\$\{?([A-Za-z_][\w.]*)", " ".join(texts_in([board["panels"], board["annotations"]]))))
    assert used - BUILT_IN == set(declared)
    for variable in variables:
        needed = re.findall(r"\$(\w+)", variable["query"]["query"]) if variable["type"] == "query" else []
        assert set(needed) <= set(declared[: declared.index(variable["name"])]), "in the order of their needs"
        if variable["type"] == "query":
            assert variable["multi"]
            assert variable["includeAll"]
            assert variable["allValue"] == ".*"


def test_no_data_source_is_named(board: Json) -> None:
    assert board["templating"]["list"][0]["type"] == "datasource"
    parts = [*panels_of(board), *board["annotations"]["list"], *board["templating"]["list"][1:]]
    parts += [target for panel in panels_of(board) for target in panel["targets"]]
    for part in parts:
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_queries_have_names_of_their_own(board: Json) -> None:
    for panel in panels_of(board):
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0, panel["title"]


def test_rates_follow_the_step_of_the_panel(board: Json) -> None:
    for panel in panels_of(board):
        for target in panel["targets"]:
            windows = set(re.findall(r"\[([^\]]+)\]", target["expr"]))
            steady = {"1h"} if "in an hour" in panel["title"] else set()
            assert windows <= {"$__rate_interval", "$__range", "$__range:"} | steady, panel["title"]
            if target.get("instant"):
                assert "$__rate_interval" not in target["expr"], panel["title"]


def test_no_query_makes_up_zeros(board: Json) -> None:
    for query in expressions_of(board):
        assert "vector(" not in query


def test_links_lead_to_boards(board: Json) -> None:
    uids = {board_of(file)["uid"] for file in FILES}
    linked = {uid for text in texts_in(board) for uid in re.findall(r"^/d/([\w-]+)", text)}
    assert linked <= uids - {board["uid"]}
    (to_all,) = board["links"]
    assert (to_all["type"], to_all["tags"], to_all["includeVars"], to_all["keepTime"]) == (
        "dashboards",
        ["cuzk"],
        True,
        True,
    )


def test_heatmaps_show_exemplars() -> None:
    found = [panel for file in FILES for panel in panels_of(board_of(file)) if panel["type"] == "heatmap"]
    assert found
    for panel in found:
        assert all(target["exemplar"] and target["format"] == "heatmap" for target in panel["targets"])


# --- colours


def fixed_colours() -> Iterator[tuple[str, str]]:
    """What an override matches, and its colour."""
    for file in FILES:
        for panel in panels_of(board_of(file)):
            for override in panel.get("fieldConfig", {}).get("overrides", []):
                for setting in override["properties"]:
                    if setting["id"] == "color" and "fixedColor" in setting["value"]:
                        yield override["matcher"]["options"], setting["value"]["fixedColor"]


@pytest.mark.parametrize(
    "colours",
    [palette.CAUSES, palette.STAGES, palette.KINDS, palette.USES, palette.OUTCOMES, palette.UTILIZATION],
)
def test_a_thing_keeps_its_colour_and_shares_it_with_none_of_its_kin(colours: palette.Colours) -> None:
    assert len(set(colours.values())) == len(colours)
    for name, colour in colours.items():
        assert {found for pattern, found in fixed_colours() if pattern == f"/^{name}( |$)/"} <= {colour}


def test_all_causes_stages_and_outcomes_have_a_colour() -> None:
    assert set(palette.CAUSES) == set(Cause)
    assert set(palette.STAGES) == set(Stage)
    assert set(palette.OUTCOMES) == {*UnitOutcome, *ProofOutcome}


# --- what is named


def exposed() -> dict[str, set[str]]:
    """The labels of each series on the golden page."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(GOLDEN.read_text(encoding="utf-8")):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_that_is_named_is_exposed(board: Json) -> None:
    known = exposed()
    labels_known = {label for labels in known.values() for label in labels} | SCRAPED | {"severity", "alertname"}
    queries = list(expressions_of(board))
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        for name, selector in re.findall(r"\b([A-Za-z_]\w+)\{([^}]*)\}", query):
            assert name in known or name in PROMETHEUS_OWN | PROCESS, query
            if name not in known:
                continue
            assert set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', selector)) <= known[name] | SCRAPED, query
        for name in re.findall(r"\bcuzk_\w+", query):
            assert name in known, query
        for group in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query):
            assert set(re.findall(r"\w+", group)) <= labels_known, query
    for legend in (target["legendFormat"] for panel in panels_of(board) for target in panel["targets"]):
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels_known


# --- provisioning


def test_provisioned_paths_exist() -> None:
    document = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    mounts = dict(re.findall(r'-v "\$PWD/(grafana/\S+?):(\S+?):ro"', document))
    assert mounts.keys() == {"grafana/provisioning", "grafana/dashboards"}
    assert mounts["grafana/provisioning"] == "/etc/grafana/provisioning"
    assert all((ROOT / here).is_dir() for here in mounts)
    provider = (GRAFANA / "provisioning/dashboards/cuzk.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +path: (.*)$", provider, re.MULTILINE) == [mounts["grafana/dashboards"]]


def test_the_data_source_scrapes_as_often_as_is_advised() -> None:
    source = (GRAFANA / "provisioning/datasources/cuzk.yml").read_text(encoding="utf-8")
    advised = re.findall(r"scrape_interval: (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(r"timeInterval: (\w+)", source) == advised


# --- the document


def test_the_document_tells_of_all_boards_and_colours() -> None:
    document = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \w[\w ]*\| `([\w-]+)` \|", document, re.MULTILINE)) == {file.stem for file in FILES}
    assert set(re.findall(r"^\| `(\w+)` \| \w", document, re.MULTILINE)) == set(Cause)
    images = re.findall(r"\]\((images/[^)]+)\)", document)
    assert images
    assert all((ROOT / "docs" / image).is_file() for image in images)
