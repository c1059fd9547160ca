"""Every query of every board, asked of a Prometheus that has scraped an agent, has an answer."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuzk_dashboards.__main__ import DASHBOARDS
from e2e.support import Agent, Process, wait_until

FILES = sorted(DASHBOARDS.glob("*.json"))
SPEED = 30
SCRAPED_S = 20
"""How long the agent is scraped, every second."""
MACROS = {
    "$__rate_interval": "5s",
    "$__range": f"{SCRAPED_S + 10}s",
    "$instance": ".*",
    "$source": ".*",
    "$gpu": ".*",
}
CONFIGURATION = """\
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: [rules.yml]
scrape_configs:
  - job_name: cuzk
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""
RULES = """\
groups:
  - name: always
    rules:
      - alert: Always
        expr: cuzk_gpu_spans_total >= 0
        labels: {severity: ticket}
"""
EMPTY_IN_THE_DEMO = {"Errors of NVML", "Errors of the agent", "PCIe", "Errors", "Throttled by reason"}
"""The only panels of which nothing may come while a simulated prover works at every kind of proof."""

Json = dict[str, Any]


class Prometheus:
    """Prometheus with an empty database, scraping one agent every second."""

    def __init__(self, directory: Path, agent: Agent) -> None:
        (directory / "prometheus.yml").write_text(CONFIGURATION.format(port=agent.port), encoding="utf-8")
        (directory / "rules.yml").write_text(RULES, encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.process = Process(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--enable-feature=exemplar-storage",
            ]
        )
        self.from_s = self.to_s = time.time()

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its API; fails if it refuses."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def series(self, target: Json) -> list[Json]:
        """What a panel's target is answered."""
        expr = filled(target["expr"])
        if target.get("instant"):
            return list(self.ask("query", query=expr, time=self.to_s)["result"])
        return list(self.ask("query_range", query=expr, start=self.from_s, end=self.to_s, step=1)["result"])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After a simulated prover has proved every kind of proof."""
    directory = tmp_path_factory.mktemp("prometheus")
    with Agent("demo", "--scenario", "day", "--speed", str(SPEED)) as agent:
        agent.wait_ready()
        prometheus = Prometheus(directory, agent)
        with prometheus.process:
            wait_until(prometheus.ready, "Prometheus")
            prometheus.from_s = time.time()
            agent.wait_for(
                lambda page: (
                    len(page.by("proof_kind", "cuzk_proof_energy_joules_count")) >= 4
                    and time.time() > prometheus.from_s + SCRAPED_S
                ),
                "proofs of all kinds",
            )
            prometheus.to_s = time.time()
            yield prometheus


def filled(text: str) -> str:
    """A query with its macros substituted and its variables filled in, longest names first."""
    for name, value in MACROS.items():
        text = text.replace(name, value)
    assert "$" not in text.replace('"$1"', ""), text
    return text


def board_of(file: Path) -> Json:
    board: Json = json.loads(file.read_text(encoding="utf-8"))
    return board


def panels_of(file: Path) -> list[Json]:
    return [panel for panel in board_of(file)["panels"] if panel["type"] != "row"]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.mark.timeout(180)
def test_every_panel_is_answered(file: Path, prometheus: Prometheus) -> None:
    for panel in panels_of(file):
        empty = [target["expr"] for target in panel["targets"] if not prometheus.series(target)]
        if empty:
            assert "may be empty" in panel["description"], (panel["title"], empty)
        if panel["title"] not in EMPTY_IN_THE_DEMO:
            assert len(empty) < len(panel["targets"]), (panel["title"], empty)


@pytest.mark.timeout(180)
def test_the_values_that_are_asked_for_exist(file: Path, prometheus: Prometheus) -> None:
    for panel in panels_of(file):
        for expr in (filled(target["expr"]) for target in panel["targets"]):
            for name, selector in re.findall(r"\b([A-Za-z_]\w+)\{([^}]*)\}", expr):
                for label, values in re.findall(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"', selector):
                    if values != ".*" and "may be empty" not in panel["description"]:
                        known = prometheus.ask(f"label/{label}/values", **{"match[]": name})
                        assert set(values.split("|")) <= set(known), (panel["title"], name, label)


@pytest.mark.timeout(180)
def test_variables_have_values_and_restarts_are_found(file: Path, prometheus: Prometheus) -> None:
    for variable in board_of(file)["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert found
            assert prometheus.ask(f"label/{found[2]}/values", **{"match[]": filled(found[1])}), variable["name"]
    for note in board_of(file)["annotations"]["list"]:
        (series,) = prometheus.ask("query", query=filled(note["expr"]), time=prometheus.to_s)["result"]
        assert prometheus.from_s - 60 < float(series["value"][1]) / 1000 <= prometheus.to_s
        assert {"instance"} <= set(series["metric"])


@pytest.mark.timeout(180)
def test_heatmaps_find_exemplars(prometheus: Prometheus) -> None:
    heatmaps = [panel for file in FILES for panel in panels_of(file) if panel["type"] == "heatmap"]
    assert heatmaps
    for panel in heatmaps:
        (target,) = panel["targets"]
        span = {"start": prometheus.from_s, "end": prometheus.to_s}
        found = prometheus.ask("query_exemplars", query=filled(target["expr"]), **span)
        jobs = {exemplar["labels"]["job_id"] for series in found for exemplar in series["exemplars"]}
        assert jobs, panel["title"]
