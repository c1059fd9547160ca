"""Simulated GPUs: what NVML says of them follows the model's kernels."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from cuzk_agent.demo.chips import Activity, Chips, write_nvml
from cuzk_agent.demo.lines import Printer
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.prover import Prover, write_log
from cuzk_agent.demo.scenario import DYING, FAILING, STARVED, TWO_GPUS, Burst, Foreign, Scenario
from cuzk_agent.gpu.fake import Recorded
from cuzk_agent.gpu.state import NvmlState
from cuzk_agent.gpu.watch import GpuWatch
from cuzk_agent.timeline.pipeline import Arrival, Pipeline

START_UNIX_MS = 1_796_000_000_000.0
START_S = START_UNIX_MS / 1000


@dataclass
class SteppedClock:
    """A clock that only sleeping advances."""

    now_s: float = START_S

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def finished(scenario: Scenario, speed: float = 1.0) -> tuple[Model, Chips, float]:
    """A simulation that is over, its GPUs, and when it ended."""
    model = Model(scenario, 1, speed=speed, rounds=1, start_unix_ms=START_UNIX_MS)
    for _ in model.lines():
        pass
    printer = Printer(START_UNIX_MS, speed)
    return model, Chips(model, printer), printer.unix_ms(model.now_ms) / 1000


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_the_chip_is_busy_while_kernels_run(speed: float) -> None:
    model, chips, end_s = finished(STARVED, speed)
    runs = model.truth().kernels
    waits = [run.barrier_unix_s for run in runs if run.barrier_unix_s is not None]
    kernels_s = sum(run.end_unix_s - run.start_unix_s for run in runs) - sum(end - start for start, end in waits)
    assert waits
    assert chips.busy(0, START_S, end_s) * (end_s - START_S) == pytest.approx(kernels_s, rel=1e-6)
    run = runs[7]
    assert chips.busy(0, run.start_unix_s, run.start_unix_s + 0.01) == pytest.approx(1, abs=1e-3)
    assert chips.watts(0, run.start_unix_s + 0.01) == Activity.KERNELS.value
    assert chips.watts(0, sum(waits[0]) / 2) == Activity.BARRIER.value
    assert chips.watts(0, START_S) == Activity.IDLE.value
    assert chips.memory_bytes(0, run.start_unix_s + 0.01) > chips.memory_bytes(0, START_S)
    assert chips.celsius(0, run.end_unix_s) > chips.celsius(0, START_S)


def test_power_adds_up_to_energy() -> None:
    _, chips, _ = finished(TWO_GPUS)
    start_s, steps, step_s = START_S + 40.0, 40_000, 0.005
    for gpu in (0, 1):
        summed = sum(chips.watts(gpu, start_s + (step + 0.5) * step_s) * step_s for step in range(steps))
        assert summed == pytest.approx(chips.joules(gpu, start_s, start_s + steps * step_s), rel=2e-3)


def test_somebody_else_uses_the_gpu_at_times() -> None:
    foreign = Foreign(0, every_ms=100_000, for_ms=30_000, share=0.5)
    _, chips, _ = finished(replace(STARVED, setting=replace(STARVED.setting, foreign=foreign)))
    # Parameters are still being loaded: nothing but the other runs.
    assert chips.busy(0, START_S, START_S + 40) * 40 == pytest.approx(15, rel=1e-6)
    assert chips.watts(0, START_S + 1) == Activity.FOREIGN.value


def test_what_nvml_says_can_be_written_and_replayed(tmp_path: Path) -> None:
    written = write_log(
        tmp_path / "log", TWO_GPUS, 1, start_unix_ms=START_UNIX_MS, nvml=tmp_path / "x.nvml.jsonl", until_ms=200_000
    )
    model = Model(TWO_GPUS, 1, start_unix_ms=START_UNIX_MS)
    for _ in model.lines(until_ms=200_000):
        pass
    chips = Chips(model, Printer(START_UNIX_MS))
    for gpu in (0, 1):
        lines = (tmp_path / f"x.gpu{gpu}.nvml.jsonl").read_text().splitlines()
        recorded = Recorded.read(lines)
        stamps = [stamp for stamp, _ in recorded.samples]
        assert {b - a for a, b in pairwise(stamps)} <= {200_000, 199_999, 200_001}
        start_s, end_s = stamps[0] / 1e6 - 0.2, stamps[-1] / 1e6
        busy_s = sum(value / 100 * 0.2 for _, value in recorded.samples)
        # As on the real ones: whole percents, rounded down, cost about a percent.
        assert busy_s == pytest.approx(chips.busy(gpu, start_s, end_s) * (end_s - start_s), rel=0.025)
        assert end_s == pytest.approx(written.end_unix_ms / 1000, abs=0.5)
        last = json.loads(lines[-1 - (len(lines) - 1) % 10])
        joules = chips.joules(gpu, START_S, last["wall"])
        assert last["energy_mj"] / 1000 == pytest.approx(joules, rel=1e-6)
    assert write_nvml(tmp_path / "one", finished(STARVED)[1], START_S, START_S + 3) == [tmp_path / "one"]


def test_what_befalls_the_gpus(tmp_path: Path) -> None:
    clock = SteppedClock()
    prover = Prover(FAILING, seed=1, speed=20, clock=clock)
    watch = GpuWatch(clock, {}, gpu_map={}, pcie=False, lib=prover.nvml)
    seen = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        watch.cycle()
        seen.append(watch.seen().gpus["0"])

    prover.run(tmp_path / "log", stop=lambda: clock.now_s > START_S + 50, sleep=sleep)
    assert seen[-1].xid_errors is not None
    assert seen[-1].xid_errors >= 2
    assert max(sum(chip.throttled_seconds.values()) for chip in seen) > 0


def test_a_gpu_is_lost_and_comes_back(tmp_path: Path) -> None:
    clock = SteppedClock()
    prover = Prover(DYING, seed=1, speed=20, clock=clock)
    watch = GpuWatch(clock, {}, gpu_map={}, pcie=False, lib=prover.nvml)
    states: list[NvmlState] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        watch.cycle()
        states.extend(chip.state for chip in watch.seen().gpus.values())

    prover.run(tmp_path / "log", stop=lambda: clock.now_s > START_S + 40, sleep=sleep)
    assert NvmlState.LOST in states
    assert states[-1] is NvmlState.UP


@pytest.mark.parametrize("speed", [1.0, 5.0])
def test_the_agent_finds_the_energy_and_the_chips_time(tmp_path: Path, speed: float) -> None:
    path = tmp_path / "log"
    clock = SteppedClock()
    # One burst, and then nothing more: all jobs are decided in the end, and so is what their energy went into.
    scenario = replace(TWO_GPUS, bursts=(TWO_GPUS.bursts[0], Burst(1e9, ())))
    prover = Prover(scenario, seed=1, speed=speed, clock=clock)
    watch = GpuWatch(clock, {"demo": lambda: None}, gpu_map={}, pcie=False, lib=prover.nvml)
    pipeline = Pipeline(on_fact=lambda fact: watch.fact("demo", fact))
    path.touch()
    due_s = 0.0
    with path.open("rb") as log:

        def sleep(seconds: float) -> None:
            nonlocal due_s
            clock.sleep(seconds)
            pipeline.feed(log.read().split(b"\n")[:-1], Arrival(clock.now_s, clock.now_s, live=True))
            pipeline.settle(clock.now_s, clock.now_s)
            if clock.now_s >= due_s:
                due_s = clock.now_s + 1
                watch.cycle()

        prover.run(path, stop=lambda: False, sleep=sleep)
        while clock.now_s < START_S + 500 / speed:
            sleep(0.1)
    model = Model(scenario, 1, speed=speed, start_unix_ms=START_UNIX_MS)
    for _ in model.lines(until_ms=510_000 / speed):
        pass
    chips = Chips(model, Printer(START_UNIX_MS, speed))
    for gpu, chip in watch.seen().gpus.items():
        assert chip.observed_seconds == pytest.approx(500 / speed, abs=1.5)
        busy_s = chips.busy(int(gpu), START_S, START_S + chip.sampled_seconds) * chip.sampled_seconds
        assert chip.busy_seconds == pytest.approx(busy_s, rel=0.015)
        assert chip.energy_joules is not None
        joules = chips.joules(int(gpu), START_S, START_S + chip.sampled_seconds)
        assert sum(chip.energy_joules.values()) == pytest.approx(joules, rel=0.01)
