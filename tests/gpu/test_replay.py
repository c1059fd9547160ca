"""Whole captures, log and NVML together, against what the kernels themselves noted down."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cuzk_agent.gpu.energy import GpuCorrelation
from cuzk_agent.gpu.samples import BusyMeter, BusySample, PowerSample
from cuzk_agent.gpu.state import EnergyUse
from cuzk_agent.timeline.facts import Fact, SpanTime
from cuzk_agent.timeline.pipeline import Arrival, Pipeline

DATA = Path(__file__).parent.parent / "data" / "h200"
SPEEDS_S = (0.1, 2.0, 9.0, 1000.0)
"""How much is looked at at once; the last is all of it."""


def load(name: str) -> list[str]:
    return lzma.decompress((DATA / f"{name}.xz").read_bytes()).decode().splitlines()


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in load(name)]


@dataclass
class Capture:
    """A log and the records of its GPUs, which come at their time."""

    name: str
    gpus: dict[str, str]
    """File of each GPU's records."""

    def __post_init__(self) -> None:
        self.epoch_s: float = records(f"{self.name}.truth.jsonl")[0]["epoch_wall"]
        self.kernels = [line for line in records(f"{self.name}.truth.jsonl") if "kernel" in line or "foreign" in line]

    def lines(self) -> Iterator[tuple[float, bytes]]:
        """Lines with the time at which they were written, as far as they tell."""
        at_s = self.epoch_s
        for line in load(f"{self.name}.log"):
            if event := re.search(r"TIMELINE,(\d+),", line):
                at_s = max(at_s, self.epoch_s + int(event[1]) / 1000)
            yield at_s, line.encode()

    def true_busy_s(self, gpu: str, start_s: float, end_s: float) -> float:
        """Union of the kernels' own times on a GPU."""
        regions = sorted(
            line["kernel"] if "kernel" in line else line["foreign"]
            for line in self.kernels
            if str(line.get("gpu", 0)) == gpu
        )
        busy_s, covered_s = 0.0, start_s
        for first_s, last_s in regions:
            busy_s += max(min(last_s, end_s) - max(first_s, covered_s), 0.0)
            covered_s = max(covered_s, min(last_s, end_s))
        return busy_s


STARVED = Capture("starved-gw1", {"0": "starved-gw1.nvml.jsonl"})
TWO = Capture("two-gpus", {"0": "two-gpus.gpu0.nvml.jsonl", "1": "two-gpus.gpu1.nvml.jsonl"})


@dataclass
class Replay:
    """A capture as the agent sees it."""

    capture: Capture
    step_s: float
    within: dict[str, tuple[float, float]] | None = None
    """By GPU: only this stretch of the samples is passed on."""
    chips: GpuCorrelation = field(default_factory=lambda: GpuCorrelation(["log"]))
    facts: list[Fact] = field(default_factory=list)
    sampled: dict[str, list[BusySample]] = field(default_factory=dict)
    energy_joules: dict[str, float] = field(default_factory=dict)
    """By the energy counter, of the whole capture."""

    def run(self) -> Replay:
        self.chips.devices(self.capture.gpus)
        self.pipeline = Pipeline(on_fact=self._fact)
        lines = list(self.capture.lines())
        by_gpu = {gpu: records(name) for gpu, name in self.capture.gpus.items()}
        start_s = min(readings[0]["wall"] for readings in by_gpu.values())
        end_s = max(readings[-1]["wall"] for readings in by_gpu.values())
        meters = {gpu: BusyMeter(start_s, start_s - 1e9, 60.0) for gpu in by_gpu}
        energies: dict[str, tuple[float, float]] = {}
        self.sampled = {gpu: [] for gpu in by_gpu}
        self.energy_joules = dict.fromkeys(by_gpu, 0.0)
        now_s = start_s
        while now_s < end_s + 1:
            now_s += self.step_s
            ready = [line for at_s, line in lines if at_s <= now_s]
            del lines[: len(ready)]
            self.pipeline.feed(ready, Arrival(now_s - 1e9, now_s, live=now_s > start_s + self.step_s))
            self.pipeline.settle(now_s - 1e9, now_s)
            for gpu, readings in by_gpu.items():
                while readings and readings[0]["wall"] <= now_s:
                    reading = readings.pop(0)
                    if "samples" in reading:
                        self._samples(gpu, meters[gpu].ring(reading["samples"], reading["wall"], reading["wall"] - 1e9))
                        energies[gpu] = self._energy(gpu, energies.get(gpu), reading["wall"], reading["energy_mj"])
            self.chips.advance()
        self.pipeline.settle(now_s + 2 - 1e9, now_s + 2)
        self.chips.advance()
        return self

    def _fact(self, fact: Fact) -> None:
        self.facts.append(fact)
        self.chips.fact("log", fact)

    def _samples(self, gpu: str, samples: list[BusySample]) -> None:
        for sample in samples:
            if self.within is not None:
                first_s, last_s = self.within[gpu]
                start_s, end_s = max(sample.start_unix_s, first_s), min(sample.end_unix_s, last_s)
                if end_s <= start_s:
                    continue
                sample = BusySample(start_s, end_s, sample.busy_fraction)
            self.sampled[gpu].append(sample)
            self.chips.busy(gpu, sample)

    def _energy(
        self, gpu: str, before: tuple[float, float] | None, wall_s: float, energy_mj: float
    ) -> tuple[float, float]:
        """The captures have no power ring, but the energy counter once a second: its mean power."""
        if before is not None:
            joules = (energy_mj - before[1]) / 1000
            self.energy_joules[gpu] += joules
            self.chips.power(gpu, PowerSample(before[0], wall_s, joules / (wall_s - before[0])))
        return wall_s, energy_mj

    def busy_s(self, gpu: str) -> float:
        return sum(sample.busy_fraction * (sample.end_unix_s - sample.start_unix_s) for sample in self.sampled[gpu])

    def logged(self, gpu: str) -> tuple[float, float, float]:
        """Start of the first span, end of the last, and the union of all."""
        times = [fact for fact in self.facts if isinstance(fact, SpanTime) and fact.gpu == gpu]
        busy_s = sum(time.end_unix_s - time.start_unix_s for time in times)
        return times[0].start_unix_s, times[-1].end_unix_s, busy_s


def windows(capture: Capture) -> dict[str, tuple[float, float]]:
    """From the first to the last logged span."""
    replay = Replay(capture, 1000.0).run()
    return {gpu: replay.logged(gpu)[:2] for gpu in capture.gpus}


def near(value: float | None, expected: float, share: float = 0.03, margin: float = 0.05) -> bool:
    assert value is not None
    return abs(value - expected) <= max(share * expected, margin)


@pytest.mark.parametrize("step_s", SPEEDS_S)
def test_a_busy_log_over_an_idle_chip_shows(step_s: float) -> None:
    replay = Replay(STARVED, step_s, windows(STARVED)).run()
    account = replay.pipeline.state().gpus["0"]
    gap_s = sum(account.boundary_seconds.values())
    assert account.busy_seconds / (account.busy_seconds + gap_s) == pytest.approx(0.9348, abs=0.00005)
    spans = replay.chips.spans("0")["log"]
    assert 0.62 <= spans.busy_seconds / spans.sampled_seconds <= 0.66
    assert spans.rolling_occupancy == pytest.approx(spans.busy_seconds / spans.sampled_seconds)
    assert near(spans.sampled_seconds, account.busy_seconds)
    unlogged_s = replay.chips.unlogged_busy_seconds("0")
    assert unlogged_s is not None
    assert unlogged_s < 0.01 * replay.busy_s("0")
    assert near(replay.busy_s("0"), STARVED.true_busy_s("0", *replay.within["0"]) if replay.within else 0, margin=0)


@pytest.mark.parametrize("step_s", SPEEDS_S)
def test_two_gpus_and_a_foreign_process(step_s: float) -> None:
    replay = Replay(TWO, step_s, windows(TWO)).run()
    table = {
        # logged busy, closed gaps, gaps, longest; true busy, integrated, true unlogged, by samples, true occupancy
        "0": (50.196, 20.863, 22, 2.588, 34.84, 34.00, 0.00, 0.00, 0.694),
        "1": (51.450, 17.818, 19, 2.765, 39.78, 39.19, 0.51, 0.50, 0.763),
    }
    for gpu, (logged_s, gaps_s, gaps, _, true_s, integrated_s, true_unlogged_s, unlogged_s, occupancy) in table.items():
        account = replay.pipeline.state().gpus[gpu]
        assert account.busy_seconds == pytest.approx(logged_s)
        assert sum(account.boundary_seconds.values()) == pytest.approx(gaps_s)
        assert sum(sum(histogram.counts) for histogram in account.gap_seconds.values()) == gaps
        assert replay.logged(gpu)[2] == pytest.approx(logged_s, abs=0.005)
        assert replay.within is not None
        assert TWO.true_busy_s(gpu, *replay.within[gpu]) == pytest.approx(true_s, abs=0.01)
        assert near(replay.busy_s(gpu), true_s, margin=0)
        assert near(replay.busy_s(gpu), integrated_s)
        assert near(replay.chips.unlogged_busy_seconds(gpu), true_unlogged_s)
        assert near(replay.chips.unlogged_busy_seconds(gpu), unlogged_s)
        spans = replay.chips.spans(gpu)["log"]
        assert near(spans.busy_seconds / spans.sampled_seconds, occupancy, margin=0)


@pytest.mark.parametrize(("capture", "proofs"), [(STARVED, 7), (TWO, 10)], ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("step_s", SPEEDS_S)
def test_the_energy_of_a_capture_adds_up(capture: Capture, proofs: int, step_s: float) -> None:
    replay = Replay(capture, step_s).run()
    # The last proof of each log ends after NVML's records, and is not observed.
    histograms = replay.chips.proof_energy_joules()
    assert sum(sum(histogram.counts) for histogram in histograms.values()) == proofs
    proof_joules = sum(histogram.sum_seconds for histogram in histograms.values())
    assert 3000 < proof_joules / proofs < 6000
    account = replay.chips._energy
    rest_joules = 0.0
    for gpu in capture.gpus:
        uses = replay.chips.energy_joules(gpu)
        assert uses is not None
        assert set(uses) == set(EnergyUse)
        curve = account._gpus[gpu].curve
        tail_joules, tail_s = curve.between(account._gpus[gpu].walked_s, curve.end_s)
        assert tail_s < 0.2
        rest_joules += account.undecided_joules(gpu)
        whole_joules = sum(uses.values()) + account.undecided_joules(gpu) + tail_joules
        assert whole_joules == pytest.approx(replay.energy_joules[gpu])
        proof_joules -= uses[EnergyUse.PROOFS]
        assert uses[EnergyUse.WASTED] == 0
    # What went into proofs is that of the observed ones, and as much of the last as was measured.
    assert proof_joules == pytest.approx(-account_of_last(replay), abs=1)
    assert rest_joules > 0


def account_of_last(replay: Replay) -> float:
    """Energy that is booked already, of jobs whose last span no power sample covers."""
    jobs = replay.chips._energy._jobs.values()
    return sum(sum(job.joules.values()) for job in jobs if job.decided is not None)


def test_speed_does_not_matter() -> None:
    figures = []
    for step_s in SPEEDS_S:
        replay = Replay(TWO, step_s).run()
        figures.append(
            [
                value
                for gpu in TWO.gpus
                for spans in [replay.chips.spans(gpu)["log"]]
                for value in (
                    spans.busy_seconds,
                    spans.sampled_seconds,
                    spans.rolling_occupancy,
                    replay.chips.unlogged_busy_seconds(gpu),
                    *(replay.chips.energy_joules(gpu) or {}).values(),
                )
            ]
        )
    for other in figures[1:]:
        # Where the clocks of log and chip meet is known to a millisecond, at best.
        assert other == pytest.approx(figures[0], rel=0.002, abs=0.002)
