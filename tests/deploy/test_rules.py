"""The configuration for Prometheus and Alertmanager, the rules, and the runbooks: whole, and of one mind."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.support import Agent, Process, wait_until

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy" / "prometheus"
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
GOLDEN = ROOT / "tests" / "golden" / "metrics.txt"
ALERTS = ROOT / "docs" / "alerts.md"
PANELS = {
    board["title"].removeprefix("cuzk / "): {panel["title"] for panel in board["panels"] if panel["type"] != "row"}
    for board in (
        json.loads(file.read_text(encoding="utf-8")) for file in (ROOT / "grafana" / "dashboards").glob("*.json")
    )
}
"""By board."""
SECTIONS = ["What it means", "What to look at", "What to do"]
NAME = re.compile(r"\b(?:[a-z_]+:)?cuzk_[a-z_]+[a-z](?::\w+)?\b")
NO_METRICS = {"cuzk_agent"}
"""What looks like a metric and is none."""


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


class Prometheus:
    """Prometheus with the configuration of this repository, but in more of a hurry."""

    def __init__(self, directory: Path, target: str) -> None:
        configuration = text_of(DEPLOY / "prometheus.yml").replace("127.0.0.1:9822", target)
        configuration = re.sub(r"(\w+_interval): \d+s", r"\1: 1s", configuration)
        (directory / "prometheus.yml").write_text(configuration, encoding="utf-8")
        (directory / "rules").mkdir()
        for file in (DEPLOY / "rules").iterdir():
            rules = re.sub(r"^    interval: .*\n", "", text_of(file), flags=re.MULTILINE)
            (directory / "rules" / file.name).write_text(rules, encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.process = Process(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ]
        )

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its API. Raises HTTPError for a query that can't be done."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def rules(self) -> list[dict[str, Any]]:
        """All rules as it understood them, and how they fared."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@dataclass(frozen=True)
class Seen:
    """What Prometheus had when it had scraped and evaluated for a while."""

    prometheus: Prometheus
    rules: list[dict[str, Any]]
    labels: Mapping[str, Mapping[str, set[str]]]
    """By metric, and label: its values. Also those of the golden page: what a demonstration does not show so soon."""

    @property
    def alerts(self) -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for rule in self.rules if rule["type"] == "alerting"}

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        return {rule["name"]: rule for rule in self.rules if rule["type"] == "recording"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    directory = tmp_path_factory.mktemp("prometheus")
    with Agent("demo", "--scenario", "two-gpus", environ={"TMPDIR": str(directory)}) as agent:
        agent.wait_for(lambda page: page.has("cuzk_gpu_span_busy_seconds_total"), "spans and samples")
        prometheus = Prometheus(directory, f"127.0.0.1:{agent.port}")
        with prometheus.process as process:
            process.find("Server is ready to receive web requests")
            wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "evaluated rules")
            recorded = "instance_gpu:cuzk_gpu_chip_busy:ratio_rate5m"
            wait_until(lambda: prometheus.ask("query", query=recorded)["result"], "two scrapes")
            labels = golden()
            for series in prometheus.ask("series", **{"match[]": '{job="cuzk"}'}):
                of_metric = labels.setdefault(series.pop("__name__"), {})
                for label, value in series.items():
                    of_metric.setdefault(label, set()).add(value)
            yield Seen(prometheus, prometheus.rules(), labels)


def golden() -> dict[str, dict[str, set[str]]]:
    labels: dict[str, dict[str, set[str]]] = {}
    for name, of_series in re.findall(r"^(\w+)(?:\{(.*)\})? ", text_of(GOLDEN), re.MULTILINE):
        of_metric = labels.setdefault(name, {})
        for label, value in re.findall(r'(\w+)="([^"]*)"', of_series):
            of_metric.setdefault(label, set()).add(value)
    return labels


# --- the rules


def test_promtool_has_nothing_against_the_configuration() -> None:
    command = ["promtool", "check", "config", "--lint=all", "--lint-fatal", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("SUCCESS") == 2 + len(list((DEPLOY / "rules").iterdir()))


def test_every_expression_can_be_evaluated(seen: Seen) -> None:
    assert {(rule["health"], rule.get("lastError", "")) for rule in seen.rules} == {("ok", "")}
    for rule in seen.rules:
        seen.prometheus.ask("query", query=rule["query"])


def test_what_is_recorded_at_once_has_a_result(seen: Seen) -> None:
    soon = [name for name in seen.records if re.search("rate(5m|10m)$", name)]
    assert len(soon) == 6
    for name in soon:
        assert seen.prometheus.ask("query", query=name)["result"], name


def test_every_metric_and_label_in_the_rules_exists(seen: Seen) -> None:
    known = {label for of_metric in seen.labels.values() for label in of_metric}
    for rule in seen.rules:
        for name in NAME.findall(rule["query"]):
            assert name in seen.labels or name in seen.records, name
        for name, matchers in re.findall(r"([a-z_:0-9]+)\{([^}]*)\}", rule["query"]):
            base = "cuzk_gpu_idle_seconds_total" if name.startswith("instance_") else name
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
                for choice in value.split("|") if "~" in operator else [re.escape(value)]:
                    assert any(re.fullmatch(choice, real) for real in seen.labels[base][label]), (name, label, choice)
        for group in re.findall(r"(?:by|on) ?\(([^)]*)\)", rule["query"]):
            assert set(re.findall(r"\w+", group)) <= known, rule["query"]


def test_records_are_named_by_what_they_are(seen: Seen) -> None:
    for name, rule in seen.records.items():
        level, metric, operations = name.split(":")
        (by,) = set(re.findall(r"sum by ?\(([^)]*)\)", rule["query"]))
        assert level == "_".join(re.findall(r"\w+", by)), name
        assert metric.removesuffix("_total") in rule["query"] or operations.startswith("ratio_"), name
        assert re.fullmatch(r"(ratio_)?(rate|increase)\d+[mhd]|mean\d+[hd]", operations), name
        assert ("/" in rule["query"]) == operations.startswith(("ratio_", "mean")), name


def test_no_rule_averages_or_makes_up_zeros(seen: Seen) -> None:
    for rule in seen.rules:
        assert not re.search(r"\bavg\b|avg_over_time|vector\(", rule["query"]), rule["query"]


# --- the alerts


def test_each_alert_says_what_it_must(seen: Seen) -> None:
    for name, alert in seen.alerts.items():
        assert alert["labels"].keys() == {"severity"}
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        if not alert["query"].startswith("absent("):
            assert "$labels.instance" in alert["annotations"]["summary"], name
            assert "$value" in alert["annotations"]["description"], name
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


def test_runbooks_can_be_made_links(tmp_path: Path) -> None:
    (command,) = re.findall(r"^ {4}(sed (?:.*\\\n)*.*)$", text_of(ALERTS), re.MULTILINE)
    copy = tmp_path / "alerts.yml"
    shutil.copy(DEPLOY / "rules" / "alerts.yml", copy)
    subprocess.run(["sh", "-c", command.replace("deploy/prometheus/rules/alerts.yml", str(copy))], check=True)
    links = re.findall(r"runbook_url: https://\S+/docs/runbooks/(\w+)\.md$", text_of(copy), re.MULTILINE)
    assert sorted(links) == [runbook.stem for runbook in RUNBOOKS]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert(seen: Seen) -> None:
    assert {runbook.stem for runbook in RUNBOOKS} == seen.alerts.keys()


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_can_be_followed(runbook: Path, seen: Seen) -> None:
    text = text_of(runbook)
    assert text.startswith(f"# {runbook.stem}\n")
    assert re.findall("^## (.*)$", text, re.MULTILINE) == SECTIONS
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (runbook.parent / link).exists(), link
    # `kind="…"` and the like go with the metric that was named before.
    for query in re.findall(r"`([^`]*cuzk_[^`]*)`", text):
        seen.prometheus.ask("query", query=query)
        # An alert is of one prover: a sum over the fleet misleads.
        sums = re.findall(r"\b(?:sum|max|min|count|topk|quantile)\b(?: by)? ?\([^)]*\)?", query)
        assert all("instance" in by for by in sums), query
    histograms = {name.removesuffix("_count") for name in seen.labels if name.endswith("_count")}
    assert set(NAME.findall(text)) - NO_METRICS <= seen.labels.keys() | seen.records.keys() | histograms


@pytest.mark.parametrize("runbook", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_says_first_which_panels_show_it(runbook: Path) -> None:
    (first,) = re.findall(r"^## What to look at\n\n- (Board .*(?:\n  .*)*)$", text_of(runbook), re.MULTILINE)
    named = re.findall(r'[Bb]oard ([A-Z][\w ]*): ("[^"]+"(?:, "[^"]+")*)', first)
    assert len(named) == first.lower().count("board ")
    for board, panels in named:
        assert set(re.findall('"([^"]+)"', panels)) <= PANELS[board], runbook.stem


def test_the_list_of_alerts_is_that_of_the_rules(seen: Seen) -> None:
    listed = {
        name: (severity, {"": 0, **{f"{minutes}m": minutes * 60 for minutes in (2, 3, 5, 10, 15, 30)}}[wait])
        for name, severity, wait in re.findall(
            r"^\| `(\w+)` \| (\w+) \| .* \| ?(\w*) \|$", text_of(ALERTS), re.MULTILINE
        )
    }
    assert listed == {name: (rule["labels"]["severity"], rule["duration"]) for name, rule in seen.alerts.items()}


def test_the_example_for_alertmanager_fits(seen: Seen) -> None:
    text = text_of(DEPLOY / "alertmanager.yml")
    assert set(re.findall(r"Cuzk\w+", text)) <= seen.alerts.keys()
    assert set(re.findall(r"receiver: (\w+)", text)) == set(re.findall(r"- name: (\w+)", text))
    for labels in re.findall(r"(?:equal|group_by): \[(.*)\]", text):
        assert set(labels.split(", ")) <= {"instance", "source", "gpu"}
