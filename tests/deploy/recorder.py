"""Records what Prometheus would have scraped from an agent that follows a prover, on a fake clock.

The prover is simulated or captured. The agent is put together as in `app`, without its threads: the real reader,
pipeline, sampler and page. The prover writes its log as time goes on; between its lines the agent reads, samples and is
scraped. Hours take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from prometheus_client import Metric

from conftest import FakeClock
from cuzk_agent.demo.prover import Prover
from cuzk_agent.demo.scenario import Scenario
from cuzk_agent.gpu.fake import FakeNvml
from cuzk_agent.gpu.watch import GpuWatch
from cuzk_agent.log.files import FileFollower
from cuzk_agent.metrics import COLLECTORS, AgentState, Exposition, SourceView
from cuzk_agent.snapshot import Keeping
from cuzk_agent.timeline.pipeline import Arrival, Pipeline

SOURCE = "cuzk"
CYCLE_S = 4.0
"""How often the GPUs are sampled: half as often as by an agent, of which energy alone would suffer."""
INSTANCE = "prover-1:9822"


class Agent:
    """A process of the agent, as far as its numbers go."""

    def __init__(self, log: Path, clock: FakeClock, nvml: FakeNvml) -> None:
        """It begins at the end of the log, as by default."""
        self._clock = clock
        self._watch = GpuWatch(clock, {SOURCE: lambda: None}, gpu_map={}, pcie=False, lib=nvml)
        self._follower = FileFollower(log, "end", clock.monotonic_s)
        self._pipeline = Pipeline(on_fact=partial(self._watch.fact, SOURCE))
        self._exposition = Exposition({name: partial(self._collect, name) for name in COLLECTORS})
        self.keeping = Keeping()
        """How the keeping of its state goes, which is not kept here."""
        self.dropped_lines = 0
        """As a journal tells of them; a file does not."""
        self.broken: set[str] = set()
        """Groups of metrics that fail."""
        self._was_at_end = False
        self._cycle_due_s = clock.monotonic_s() if nvml.gpus else math.inf

    def turn(self) -> None:
        """Reads all that has been written, and samples the GPUs when it is time to."""
        now = (self._clock.monotonic_s(), self._clock.unix_s())
        while True:
            batch = self._follower.read()
            if batch.lines:
                self._pipeline.feed(batch.lines, Arrival(*now, live=self._was_at_end))
            if batch.at_end:
                self._pipeline.settle(*now)
            self._was_at_end = batch.at_end
            if batch.at_end or not batch.lines:
                break
        if now[0] >= self._cycle_due_s:
            self._cycle_due_s = now[0] + CYCLE_S
            self._watch.cycle()

    def page(self) -> str:
        """What a scrape shows."""
        view = SourceView(self._pipeline.state(), replace(self._follower.stats(), lost_lines=self.dropped_lines))
        state = AgentState(
            {SOURCE: view}, version="1", python_version="3", nvml=self._watch.seen(), keeping=self.keeping
        )
        return self._exposition.render(None, state)[0].decode()

    def _collect(self, group: str, state: AgentState) -> Iterable[Metric]:
        if group in self.broken:
            raise RuntimeError(group)
        return COLLECTORS[group](state)

    def end(self) -> None:
        """The process is gone."""
        self._follower.close()


@dataclass
class Recorder:
    """A prover, its agent, and what was scraped."""

    directory: Path
    names: Collection[str]
    """Metrics that are kept: the samples of all others are dropped at once."""
    scrape_s: float = 30.0
    step_s: float = 2.0
    """How often the agent looks; no line is read before its time, or counted with another."""
    clock: FakeClock = field(default_factory=FakeClock)
    scrapes: list[dict[str, float] | None] = field(default_factory=list)
    """By series; None where Prometheus itself was away. A failed scrape holds `up` alone."""
    at_step: Callable[[], None] = lambda: None
    """Lets more happen than the prover does, before the agent looks."""
    scraping: bool = True
    """Prometheus is there."""
    reachable: bool = True
    """The agent is, for Prometheus."""
    agent: Agent | None = None
    job: str = "cuzk"
    """The name under which Prometheus scrapes it."""

    def __post_init__(self) -> None:
        self.log = self.directory / "cuzk.log"
        self.log.touch()
        self.nvml = FakeNvml(self.clock)
        self._begun_s = self._scrape_due_s = self.clock.monotonic_s()

    @property
    def now_s(self) -> float:
        """Since the recording began."""
        return self.clock.monotonic_s() - self._begun_s

    def play(self, scenario: Scenario, seconds: float, *, chips: bool = False, seed: int = 1) -> None:
        """A prover starts and works for so long. Then it is shut down, which the agent has not seen yet."""
        prover = Prover(scenario, seed=seed, speed=1.0, clock=self.clock)
        if chips:
            self.nvml = prover.nvml
        if self.agent is None:
            self.start_agent()
        until_s = self.now_s + seconds
        prover.run(self.log, stop=lambda: self.now_s >= until_s, sleep=lambda _: self._step())

    def replay(self, lines: Iterable[tuple[float, bytes]]) -> None:
        """A captured log is written, each line so many seconds after the recording began."""
        with self.log.open("ab") as log:
            for at_s, line in lines:
                while self.now_s < at_s:
                    log.flush()
                    self._step()
                log.write(line + b"\n")

    def wait(self, seconds: float) -> None:
        """Nothing is written for so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self._step()

    def start_agent(self) -> None:
        """The agent starts."""
        self.agent = Agent(self.log, self.clock, self.nvml)

    def stop_agent(self) -> None:
        """The agent ends: scrapes fail."""
        assert self.agent is not None
        self.agent.end()
        self.agent = None

    def _step(self) -> None:
        # All lines up to now have been written: the agent may look, and time go on.
        self.at_step()
        if self.agent is not None:
            self.agent.turn()
        if self.clock.monotonic_s() >= self._scrape_due_s:
            self._scrape_due_s += self.scrape_s
            self.scrapes.append(self._scrape() if self.scraping else None)
        self.clock.advance(self.step_s)

    def _scrape(self) -> dict[str, float]:
        up = {self._series("up", ""): 0.0}
        if self.agent is None or not self.reachable:
            return up
        up[self._series("up", "")] = 1.0
        for line in self.agent.page().splitlines():
            name = line[: min(line.find("{") % 1000, line.find(" "))]
            if name in self.names:
                series, value = line.rsplit(" ", 1)
                up[self._series(name, series[len(name) :].strip("{}"))] = float(value)
        return up

    def _series(self, name: str, labels: str) -> str:
        return f'{name}{{job="{self.job}",instance="{INSTANCE}"{"," if labels else ""}{labels}}}'


def input_series(scrapes: list[dict[str, float] | None]) -> list[dict[str, str]]:
    """As promtool reads it: one value for each scrape, runs of the same written once."""
    names = dict.fromkeys(series for scrape in scrapes for series in scrape or ())
    return [{"series": series, "values": " ".join(_runs(_values(series, scrapes)))} for series in names]


def _values(series: str, scrapes: list[dict[str, float] | None]) -> Iterator[str]:
    there = False
    for scrape in scrapes:
        value = None if scrape is None else scrape.get(series)
        if value is not None:
            there = True
            yield _decimal(value)
        elif scrape is not None and there:
            # Prometheus says so once, when a series is missing from a scrape.
            there = False
            yield "stale"
        else:
            yield "_"


def _decimal(value: float) -> str:
    assert math.isfinite(value)
    return f"{value:.6f}".rstrip("0").rstrip(".") or "0"


def _runs(values: Iterable[str]) -> Iterator[str]:
    for value, run in groupby(values):
        count = len(list(run))
        if value == "stale" or count == 1:
            yield from [value] * count
        else:
            yield f"_x{count}" if value == "_" else f"{value}+0x{count - 1}"
