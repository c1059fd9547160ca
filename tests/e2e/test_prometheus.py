"""Prometheus itself scrapes the agent while a prover works: what its users compute is what happened."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.support import Agent, Process, Prover, in_background, wait_until

WINDOW_S = 16
CONFIGURATION = """\
global:
  scrape_interval: 1s
  scrape_timeout: 1s
scrape_configs:
  - job_name: cuzk
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


class Prometheus:
    """Prometheus with an empty database, scraping one agent every second."""

    def __init__(self, directory: Path, agent: Agent) -> None:
        configuration = directory / "prometheus.yml"
        configuration.write_text(CONFIGURATION.format(port=agent.port), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.process = Process(
            [
                "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--enable-feature=exemplar-storage",
            ]
        )

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def value(self, query: str, at_unix_s: float) -> float:
        """The one value of a query."""
        (found,) = self.ask("query", query=query, time=at_unix_s)["result"]
        return float(found["value"][1])

    def samples(self, selector: str, at_unix_s: float) -> list[tuple[float, float]]:
        """Times and values of the one series in the window before a moment."""
        (found,) = self.ask("query", query=f"{selector}[{WINDOW_S}s]", time=at_unix_s)["result"]
        return [(float(time), float(value)) for time, value in found["values"]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "cuzk.log"


@pytest.fixture
def prover(log: Path) -> Iterator[Prover]:
    with Prover(log) as prover:
        yield prover


@pytest.fixture
def agent(log: Path, prover: Prover) -> Iterator[Agent]:
    prover.start_engine()
    with Agent("run", "--log", f"p={log}", "--from", "start") as agent:
        agent.wait_ready()
        yield agent


@pytest.fixture
def prometheus(tmp_path: Path, agent: Agent) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path, agent)
    with prometheus.process as process:
        process.find("Server is ready to receive web requests")
        yield prometheus


@pytest.mark.timeout(150)
def test_what_prometheus_computes_is_what_was_written(prover: Prover, agent: Agent, prometheus: Prometheus) -> None:
    def prove(enough: threading.Event) -> None:
        number = 0
        while not enough.is_set():
            job_id, partition = f"porep-1000-{number // 10}", number % 10
            prover.start_span(job_id, partition)
            enough.wait(0.35)
            prover.end_span(job_id, partition)
            enough.wait(0.15)
            number += 1

    busy = 'cuzk_gpu_logged_busy_seconds_total{gpu="0"}'

    def scrapes() -> list[list[Any]]:
        found = prometheus.ask("query", query=f"{busy}[1h]")["result"]
        return found[0]["values"] if found else []

    with in_background(prove):
        wait_until(lambda: len(scrapes()) > WINDOW_S + 4, "scrapes")
    at_unix_s = float(scrapes()[-1][0])

    # The truth of the window: what was written between what was settled at its first scrape and at its last one.
    settled = prometheus.samples("cuzk_agent_settled_timestamp_seconds", at_unix_s)
    first_s, last_s = settled[0][1], settled[-1][1]
    written = prover.busy_s(first_s, last_s) / (last_s - first_s)
    assert 0.4 < written < 0.95
    assert prometheus.value(f"rate({busy}[{WINDOW_S}s])", at_unix_s) == pytest.approx(written, rel=0.03)
    values = prometheus.samples(busy, at_unix_s)
    assert values[-1][1] - values[0][1] == pytest.approx(prover.busy_s(first_s, last_s), abs=0.05)
    assert [value for _, value in values] == sorted(value for _, value in values)

    # Busy and idle add up to all the time there is.
    query = f"sum(rate({busy}[{WINDOW_S}s])) + sum(rate(cuzk_gpu_idle_seconds_total[{WINDOW_S}s]))"
    assert prometheus.value(query, at_unix_s) == pytest.approx(1, rel=0.03)
    gaps = f"sum(increase(cuzk_gpu_gap_seconds_count[{WINDOW_S}s])) / sum(increase(cuzk_gpu_spans_total[{WINDOW_S}s]))"
    assert prometheus.value(gaps, at_unix_s) == pytest.approx(1, rel=0.1)
    quantile = f"histogram_quantile(0.5, sum by (le) (rate(cuzk_gpu_gap_seconds_bucket[{WINDOW_S}s])))"
    assert 0.1 <= prometheus.value(quantile, at_unix_s) <= 0.2

    # Behind a bucket stands the job that ended a gap of its length.
    (series,) = prometheus.ask(
        "query_exemplars",
        query="cuzk_gpu_gap_seconds_bucket",
        start=prover.start_unix_s,
        end=at_unix_s,
    )
    written_jobs = {f"porep-1000-{number // 10}" for number in range(len(prover.spans_ms))}
    assert series["seriesLabels"]["cause"] == "no_work"
    assert len(series["exemplars"]) > WINDOW_S / 2
    for exemplar in series["exemplars"]:
        assert exemplar["labels"]["job_id"] in written_jobs
        assert prover.start_unix_s < float(exemplar["timestamp"]) <= at_unix_s

    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.value(f"min_over_time(up[{WINDOW_S}s])", at_unix_s) == 1

    page = agent.get("/metrics")[2]
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    assert not [line for line in prometheus.process.log if "level=warn" in line or "level=error" in line]
    assert agent.complaints() == []
    assert agent.stop() == 0
