"""The captured GPUs with what was true, and a sampler on a fake NVML."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from conftest import FakeClock
from cuzk_agent.gpu.fake import FakeGpu, FakeNvml, Recorded, Simulated
from cuzk_agent.gpu.sampler import NoAccount, Sampler
from cuzk_agent.gpu.samples import BusySample, PowerSample
from cuzk_agent.gpu.state import GpuChip, NvmlView

H200 = Path(__file__).parent.parent / "data" / "h200"


@dataclass(frozen=True, slots=True)
class Capture:
    """What NVML said of a GPU, and when kernels really ran on it."""

    recorded: Recorded
    kernels: tuple[tuple[float, float], ...]
    """Disjoint stretches in unix seconds."""

    def busy_seconds(self, start_unix_s: float, end_unix_s: float) -> float:
        """The truth about a stretch of time."""
        return sum(max(0.0, min(end_unix_s, b) - max(start_unix_s, a)) for a, b in self.kernels)


def lines(name: str) -> list[str]:
    """Of a compressed capture."""
    with lzma.open(H200 / f"{name}.xz", "rt", encoding="utf-8") as file:
        return file.readlines()


def union(stretches: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Disjoint stretches that cover the same."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


def capture(nvml: str, truth: str, gpu: int) -> Capture:
    """One GPU of a capture."""
    records = [json.loads(line) for line in lines(truth)[1:]]
    own = (record for record in records if record.get("gpu", 0) == gpu)
    kernels = union(tuple(record.get("kernel") or record["foreign"]) for record in own)
    return Capture(Recorded.read(lines(nvml)), kernels)


CAPTURES: dict[str, Callable[[], Capture]] = {
    "starved-gw1": lambda: capture("starved-gw1.nvml.jsonl", "starved-gw1.truth.jsonl", 0),
    "two-gpus.gpu0": lambda: capture("two-gpus.gpu0.nvml.jsonl", "two-gpus.truth.jsonl", 0),
    "two-gpus.gpu1": lambda: capture("two-gpus.gpu1.nvml.jsonl", "two-gpus.truth.jsonl", 1),
}


class Kept(NoAccount):
    """Keeps the samples that it is told."""

    def __init__(self) -> None:
        self.busy_samples: dict[str, list[BusySample]] = {}
        self.power_samples: dict[str, list[PowerSample]] = {}
        self.labels: list[str] = []

    def devices(self, gpus: Iterable[str]) -> None:
        """These GPUs exist."""
        self.labels = list(gpus)

    def busy(self, gpu: str, sample: BusySample) -> None:
        """Kept."""
        self.busy_samples.setdefault(gpu, []).append(sample)

    def power(self, gpu: str, sample: PowerSample) -> None:
        """Kept."""
        self.power_samples.setdefault(gpu, []).append(sample)


def uuid(number: int) -> str:
    """Of the fake GPU with this number."""
    return f"GPU-{number:08x}-6e0e-bfb3-2aec-dde616350767"


def gpu(number: int, busy: float | Callable[[float, float], float] = 0.5) -> FakeGpu:
    """A simulated GPU, by default half busy all the time, at 400 W."""
    share = busy if callable(busy) else lambda _start, _end: busy
    signal = Simulated(share, lambda _: 400.0, lambda _: 41.0, lambda _: 5_838_340_096)
    return FakeGpu(signal, uuid(number), f"00000000:{number + 6:02X}:00.0")


class Bench:
    """A sampler on fake GPUs, cycle by cycle."""

    def __init__(
        self,
        gpus: Iterable[FakeGpu],
        *,
        unix_s: float = 1_796_000_000.0,
        labels: dict[str, str] | None = None,
        pcie: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.clock.step_wall(unix_s - self.clock.unix_s())
        self.nvml = FakeNvml(self.clock, gpus)
        self.kept = Kept()
        self.sampler = Sampler(self.clock, lib=self.nvml, labels=labels, account=self.kept, pcie=pcie)

    def cycle(self, times: int = 1, seconds: float = 2.0) -> NvmlView:
        """Cycles, with so much time before each, and what is then published."""
        for _ in range(times):
            self.clock.advance(seconds)
            self.sampler.cycle()
        return self.sampler.view

    def chip(self, label: str = "0") -> GpuChip:
        """What is published of a GPU."""
        return self.sampler.view.gpus[label]
