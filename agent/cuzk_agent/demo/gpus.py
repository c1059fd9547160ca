"""What the daemon's kernels do with its GPUs, and what befalls these: all that a simulation of the GPUs has to know."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KERNELS_MAX = 256


@dataclass(slots=True, eq=False)
class Kernels:
    """One unit's kernels on their GPU, known from their beginning."""

    start_ms: float
    end_ms: float
    barrier_ms: tuple[float, float]
    """The stretch in which they wait for the CPU; it may be empty."""

    def cut(self, at_ms: float) -> None:
        """Their process ends."""
        self.end_ms = min(self.end_ms, at_ms)
        start_ms, end_ms = self.barrier_ms
        self.barrier_ms = (min(start_ms, at_ms), min(end_ms, at_ms))


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something befalls a GPU."""

    time_ms: float
    gpu: int
    xid: int | None
    """The error that the driver reports."""
    present: bool = True
    """False: it has fallen off the bus."""


class Gpus:
    """All GPUs of a machine, through all lives of its daemon. Times are the simulation's."""

    def __init__(self, count: int, *, keep: bool) -> None:
        """Without `keep` only the last kernels are known."""
        self._keep = keep
        self.kernels: list[list[Kernels]] = [[] for _ in range(count)]
        """For each GPU all that have run or run now, one after another."""
        self.troubles: deque[Trouble] = deque()
        """Oldest first; whoever simulates the GPUs takes them out."""

    def run(self, gpu: int, kernels: Kernels) -> None:
        """Kernels begin on a GPU."""
        of_gpu = self.kernels[gpu]
        of_gpu.append(kernels)
        if not self._keep and len(of_gpu) > _KERNELS_MAX:
            # A list of its own: another thread may be reading the old one.
            self.kernels[gpu] = of_gpu[-_KERNELS_MAX // 2 :]

    def stop(self, at_ms: float) -> None:
        """The process ends whose kernels run."""
        for of_gpu in self.kernels:
            if of_gpu:
                of_gpu[-1].cut(at_ms)
