"""What the daemon's threads wait for each other for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cuzk_agent.demo.process import Process


class Mutex:
    """A GPU's: whoever has it has the GPU to himself until he gives it back."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._held = False
        self._waiting: deque[Callable[[], None]] = deque()

    def lock(self, then: Callable[[], None]) -> None:
        """First come, first served."""
        if self._held:
            self._waiting.append(then)
        else:
            self._held = True
            then()

    def unlock(self) -> None:
        """The next one has it, if there is one."""
        if self._waiting:
            self._process.soon(self._waiting.popleft())
        else:
            self._held = False


class Tracker:
    """The lock of the daemon's records of its jobs."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._free_ms = 0.0

    def lock(self, hold_ms: float, then: Callable[[], None]) -> None:
        """First come, first served, each for a time that is known before."""
        now_ms = self._process.now_ms
        at_ms = max(now_ms, self._free_ms)
        self._free_ms = at_ms + hold_ms
        self._process.later(at_ms - now_ms, then)
