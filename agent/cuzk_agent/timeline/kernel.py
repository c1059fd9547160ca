"""Kernel time per GPU, put together from the C++ prover's lines, which name neither job nor GPU.

For one unit they come as `barrier_wait_ms` · `gpu_total_ms` · `mutex_held_ms`/`total_start_fn_ms`, mixed with those of
other workers. Right after the last of them the daemon writes `GPU_TIMING prove_start returned` for the unit, with the
same wall time: that names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cuzk_agent.timeline.lines import KernelTiming

PHASES = (
    "pre_lock_cpu_ms",
    "mutex_wait_ms",
    "ntt_msm_h_ms",
    "barrier_wait_ms",
    "batch_add_ms",
    "tail_msm_ms",
    "gpu_total_ms",
    "prep_msm_ms",
    "mutex_held_ms",
    "total_start_fn_ms",
    "b_g2_msm_ms",
)
_PENDING = 64
"""Unjoined lines kept: more than the workers of any machine."""
_UNNAMED = 8
"""So many units without a line that names one: this daemon does not write it."""


@dataclass(frozen=True, slots=True)
class MutexHeld:
    """One unit's hold of its GPU."""

    mutex_held_ms: int
    kernel_ms: int
    start_fn_ms: int


class KernelTimes:
    """Joins the lines. `on_kernel(gpu, kernel_ms)` hears of each unit's kernel time; `gpu` is None where no line told
    which unit it was."""

    def __init__(self, on_kernel: Callable[[str | None, int], None]) -> None:
        self._on_kernel = on_kernel
        self._barriers: deque[int] = deque(maxlen=_PENDING)
        self._totals: deque[tuple[int, int]] = deque(maxlen=_PENDING)
        self._held: deque[MutexHeld] = deque(maxlen=_PENDING)
        self._returns_logged = False
        self.phases: dict[str, tuple[int, float]] = {}

    def line(self, timing: KernelTiming) -> None:
        """Takes in one C++ line."""
        values = timing.values_ms
        for phase in PHASES:
            if phase in values:
                count, total_seconds = self.phases.get(phase, (0, 0.0))
                self.phases[phase] = (count + 1, total_seconds + values[phase] / 1000)
        if "barrier_wait_ms" in values:
            self._barriers.append(values["barrier_wait_ms"])
        if "gpu_total_ms" in values:
            # The oldest wait: kernels of one GPU follow one another, and so do their lines.
            barrier_ms = self._barriers.popleft() if self._barriers else 0
            self._totals.append((values["gpu_total_ms"], max(values["gpu_total_ms"] - barrier_ms, 0)))
        if "mutex_held_ms" in values:
            self._hold(values["mutex_held_ms"], values.get("total_start_fn_ms", 0))

    def _hold(self, mutex_held_ms: int, start_fn_ms: int) -> None:
        # The mutex is held a little longer than the kernels run: the nearest total below.
        fitting = [total for total in self._totals if total[0] <= mutex_held_ms + 1]
        if not fitting:
            return
        total = max(fitting, key=lambda total: total[0])
        self._totals.remove(total)
        self._held.append(MutexHeld(mutex_held_ms, total[1], start_fn_ms))
        if not self._returns_logged and len(self._held) > _UNNAMED:
            self._on_kernel(None, self._held.popleft().kernel_ms)

    def prove_start_returned(self, gpu: str | None, wall_ms: int) -> MutexHeld | None:
        """The daemon names the unit whose C++ lines just ended. Returns what they told of it, if anything."""
        self._returns_logged = True
        if not self._held:
            return None
        nearest = min(self._held, key=lambda held: abs(held.start_fn_ms - wall_ms))
        self._held.remove(nearest)
        self._on_kernel(gpu, nearest.kernel_ms)
        return nearest

    def flush(self) -> None:
        """The log or its engine ends: no line will name what is left."""
        while self._held:
            self._on_kernel(None, self._held.popleft().kernel_ms)
