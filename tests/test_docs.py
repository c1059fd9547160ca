"""The documents say what is so: every name in them exists, and what they list is all there is."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cuzk_agent import app, cli, config
from cuzk_agent.config import DEFAULT_LISTEN, Config, SourceConfig, load
from cuzk_agent.report.compare import FIGURES
from cuzk_agent.timeline.state import Cause, Stage, UnitOutcome

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
METRICS = ROOT / "docs" / "metrics.md"
ANALYZE = ROOT / "docs" / "analyze.md"
DOCUMENTS = [README, METRICS, ROOT / "CHANGELOG.md"]
NAME = re.compile(r"\bcuzk_[a-z_]+[a-z]\b")


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


def tables(document: Path) -> Iterator[list[list[str]]]:
    """The rows of each table, without its head; cells as they stand, code without its backquotes."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text_of(document), re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        yield [[re.sub(r"^`(.*)`$", r"\1", cell) for cell in row] for row in rows[2:]]


def table(document: Path, first: str) -> list[list[str]]:
    """The table whose first cell is this."""
    return next(rows for rows in tables(document) if rows and rows[0][0] == first)


# --- metrics


def exposed() -> dict[str, str]:
    """The row of each family on the golden page, by the family's name, in the page's order."""
    golden = (ROOT / "tests/golden/metrics.openmetrics.txt").read_text(encoding="utf-8")
    rows = {}
    for family in text_string_to_metric_families(golden):  # type: ignore[no-untyped-call]
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {
            label: None for sample in family.samples for label in sample.labels if label not in {"le", "quantile"}
        }
        shown = ", ".join(sorted(labels, key=lambda label: (label != "source", label != "gpu", label)))
        rows[name] = f"| `{name}` | {family.type} | {shown} | {family.documentation} |"
    return rows


def test_the_metrics_are_those_on_the_page(request: pytest.FixtureRequest) -> None:
    rows = exposed()
    documented = {
        found[1]: line
        for line in text_of(METRICS).splitlines()
        if (found := re.match(r"\| `(cuzk_\w+)` \|", line)) is not None
    }
    if request.config.getoption("--update"):
        update(rows)
    else:
        assert documented == rows, "pytest --update tests/test_docs.py rewrites the tables"


def update(rows: dict[str, str]) -> None:
    """Writes the rows in the place of their old ones; a new one comes after the one that it follows on the page."""
    lines = [
        line for line in text_of(METRICS).splitlines() if not line.startswith("| `cuzk_") or line.split("`")[1] in rows
    ]
    placed = [line.split("`")[1] if line.startswith("| `cuzk_") else "" for line in lines]
    before = next(index for index, line in enumerate(lines) if line.startswith("|---"))
    for name, row in rows.items():
        if name in placed:
            before = placed.index(name)
            lines[before] = row
        else:
            before += 1
            lines.insert(before, row)
            placed.insert(before, name)
    METRICS.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_metric_that_is_named_is_exposed(document: Path) -> None:
    known = {base + suffix for base in exposed() for suffix in ("", "_bucket", "_count", "_sum")}
    assert set(NAME.findall(text_of(document))) - {"cuzk_agent"} <= known


def test_every_metric_that_the_demo_names_is_exposed() -> None:
    named = set(NAME.findall(app._DEMO))
    assert named
    assert named <= exposed().keys()


# --- the words


def test_the_causes_are_all_there_are() -> None:
    assert {row[0] for row in table(README, "starved")} == set(Cause)


def test_the_stages_and_outcomes_are_all_there_are() -> None:
    (paragraph,) = re.findall(r"^A \*\*unit\*\*.*?\n\n", text_of(README), re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", paragraph) == [*Stage, *UnitOutcome]


# --- the configuration


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    (example,) = blocks(README, "toml")
    file = tmp_path / "agent.toml"
    file.write_text(example, encoding="utf-8")
    loaded = load(file=str(file))
    source = SourceConfig("prover-1", Path("/var/log/cuzk.log"))
    defaults = Config(sources=(source,), gpu_map=loaded.gpu_map, state=loaded.state)
    assert loaded == defaults
    keys = set(re.findall(r"^(\w+) = ", config.to_toml(loaded), re.MULTILINE))
    assert set(re.findall(r"^(\w+) = ", example, re.MULTILINE)) == keys


def test_the_settings_are_all_there_are() -> None:
    rows = table(README, "source")
    defaults = Config(sources=())
    documented = {row[1]: (row[0], row[2], row[3]) for row in rows}
    assert documented.pop("CUZK_AGENT_LOG")[:2] == ("source", "--log`, `--journal`, `--tee")
    options = {setting: option for option, setting in config._OPTIONS.items()}
    expected = {}
    for variable, setting in config._VARIABLES.items():
        shown = setting.show(getattr(defaults, setting.field))
        default = "false" if shown is False else shown or "empty"
        if setting.field == "state":
            default = "[where systemd or XDG have it](#when-it-is-started-again)"
        where = [name for name, settings in config._TABLES.items() if setting in settings]
        expected[variable] = (".".join([*where, setting.key]), options.get(setting, ""), default)
    assert documented == expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_variable_that_is_named_is_one(document: Path) -> None:
    named = set(re.findall(r"\bCUZK_AGENT_\w+", text_of(document)))
    assert named <= {*config._VARIABLES, "CUZK_AGENT_LOG", "CUZK_AGENT_CONFIG"}


# --- what one types


def test_the_commands_can_be_typed() -> None:
    text = text_of(README)
    typed = re.findall(r"cuzk-agent ((?:run|demo|check-config|analyze)\b[^\n`]*)", text)
    assert typed
    for arguments in typed:
        try:
            cli._parser().parse_args(shlex.split(arguments))
        except (SystemExit, argparse.ArgumentError):
            pytest.fail(f"cuzk-agent {arguments}")
    (commands,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = {option for command in commands.choices.values() for option in command._option_string_actions}
    assert set(re.findall(r"`(--[a-z-]+)[ `]", text)) <= options


def test_the_figures_of_conditions_are_all_there_are() -> None:
    rows = table(ANALYZE, "logged_utilization")
    assert [(name, unit) for name, unit, _ in rows] == [(figure.name, figure.unit.value) for figure in FIGURES]
    assert all(about for *_, about in rows)


def test_the_make_targets_exist() -> None:
    named = set(re.findall(r"(?:^ {4}|`)make (\w+)", text_of(README), re.MULTILINE))
    assert {"demo", "test"} <= named
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text_of(ROOT / "Makefile"), re.MULTILINE)
    assert named <= set(phony.split())


def test_the_exit_statuses_are_all_there_are() -> None:
    assert [int(row[0]) for row in table(README, "0")] == list(cli.Exit)


def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    (example,) = blocks(README, "yaml")
    file = tmp_path / "prometheus.yml"
    file.write_text(example, encoding="utf-8")
    checked = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert str(DEFAULT_LISTEN) in example


def test_the_queries_can_be_asked(tmp_path: Path) -> None:
    queries = [row[1] for row in table(README, "utilization, as the log has it")]
    rules = [{"record": f"r{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}), encoding="utf-8")
    checked = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout


# --- the house


def test_the_layout_is_as_described() -> None:
    (layout,) = re.findall(r"^ {4}agent/cuzk_agent/\n(?: {4}.*\n)+", text_of(README), re.MULTILINE)
    inner = re.findall(r"^ {6}(\w+(?:/|\.py)(?:  \w+\.py)*)", layout, re.MULTILINE)
    described = {name.strip("/") for names in inner for name in names.split()}
    package = ROOT / "agent" / "cuzk_agent"
    parts = {path.name for path in package.iterdir() if not path.name.startswith("_") and path.name != "py.typed"}
    assert described == parts
    for outer in re.findall(r"^ {4}(\w+)/", layout, re.MULTILINE):
        assert (ROOT / outer).is_dir()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_house_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text_of(document)):
        assert (document.parent / target).exists(), target
