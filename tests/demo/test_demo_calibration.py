"""The model against figures that were published about real provers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cuzk_agent.demo.lines import Timeline
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import POREP, Burst, Generation, Request, Scenario, Setting
from cuzk_agent.demo.truth import GpuTruth

BENCHMARKED = Setting(
    Generation.SINGLE,
    workers_per_gpu=1,
    synth_workers=10,
    spread=0.12,
    budget_gib=190,  # ten partitions and the parameters: one is not begun before another is proved
    pre_lock_ms=600,
    kernel_ms=1_800,
    finish_ms=1_250,
    barrier_probability=0.0,
)
"""2.4 s until a partition's kernels are done, which take 1.8 s of them."""


@dataclass(frozen=True)
class Run:
    gpu: GpuTruth
    seconds_a_proof: float
    """From the first synthesis to the last proof."""
    synth_s: float
    """Mean."""

    @property
    def gaps_s(self) -> list[float]:
        return [(gap.end_ms - gap.start_ms) / 1000 for gap in self.gpu.gaps]


def benchmark(setting: Setting, seed: int, *, proofs: int, in_flight: int) -> Run:
    burst = Burst(1_000, tuple(Request(0, POREP) for _ in range(proofs)), in_flight)
    model = Model(Scenario("a benchmark", setting, (burst,)), seed, rounds=1)
    events = [line for line in model.lines() if isinstance(line, Timeline)]
    synth_ms = [int(line.detail.rpartition("=")[2]) for line in events if line.event == "SYNTH_END"]
    elapsed_ms = max(line.offset_ms for line in events) - min(line.offset_ms for line in events)
    return Run(model.truth().gpus[0], elapsed_ms / 1000 / proofs, sum(synth_ms) / len(synth_ms) / 1000)


@pytest.mark.parametrize("seed", range(4))
def test_fifteen_proofs_on_one_worker(seed: int) -> None:
    # Published: busy 550.8 s, 149 gaps of 0.406 s on average and 3.8 s at most, 90.1 % logged, 46.3 % kernels,
    # synthesis 36.2 s.
    run = benchmark(BENCHMARKED, seed, proofs=15, in_flight=3)
    gaps_s = run.gaps_s
    assert run.gpu.spans == 150
    assert run.synth_s == pytest.approx(36.2, rel=0.03)
    assert run.gpu.busy_ms / 1000 == pytest.approx(550.8, rel=0.02)
    assert run.gpu.utilization == pytest.approx(0.90, abs=0.025)
    assert 0.3 <= sum(gaps_s) / len(gaps_s) <= 0.5
    assert sum(gap > 1 for gap in gaps_s) >= 5
    assert max(gaps_s) < 6
    assert run.gpu.kernel_ms / (run.gpu.busy_ms + run.gpu.gap_ms) == pytest.approx(0.463, abs=0.03)


@pytest.mark.parametrize("seed", range(4))
def test_a_slower_gpu_is_the_bottleneck(seed: int) -> None:
    # Published: 100 % logged, 37 to 38 s a proof, with 3.75 s of kernels and two workers.
    setting = replace(
        BENCHMARKED, generation=Generation.SPLIT, workers_per_gpu=2, kernel_ms=3_750, budget_gib=600, spread=0.05
    )
    run = benchmark(setting, seed, proofs=15, in_flight=4)
    assert run.gpu.utilization == 1.0
    assert 37 <= (run.gpu.busy_ms + run.gpu.gap_ms) / 1000 / 15 <= 38


@pytest.mark.parametrize(("workers", "published_s"), [(1, 290), (2, 152)])
def test_few_synthesis_workers_are_the_bottleneck(workers: int, published_s: float) -> None:
    run = benchmark(replace(BENCHMARKED, synth_workers=workers, spread=0.05), 1, proofs=6, in_flight=3)
    # The parameters are loaded first, before any event; the first proof fills the pipeline.
    assert run.seconds_a_proof == pytest.approx(published_s, rel=0.04)
