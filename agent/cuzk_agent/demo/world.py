"""What everything in a simulation shares: its time, its chance, and the log as it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from random import Random

from cuzk_agent.demo.lines import Line, Timeline, Tracing
from cuzk_agent.demo.scenario import Setting

PINNED_POOL = "cuzk_core::pinned_pool"


class World:
    """A queue of what will happen, and what was written when it happened."""

    def __init__(self, setting: Setting, seed: int, speed: float) -> None:
        self.setting = setting
        self.random = Random(seed)
        self.speed = speed
        """How much faster than the simulation's time an engine's clock and the wall clock run."""
        self.now_ms = 0.0
        self.running: object | None = None
        """The daemon's process that is alive."""
        self.events: Counter[str] = Counter()
        """TIMELINE lines written, by event."""
        self._due: list[tuple[float, int, Callable[[], None], object | None]] = []
        self._planned = 0
        self._said: list[Line] = []
        self._lines = 0

    def later(self, delay_ms: float, happen: Callable[[], None], process: object | None = None) -> None:
        """If it is for a process to do: unless that one has ended by then."""
        self._planned += 1
        heappush(self._due, (self.now_ms + delay_ms, self._planned, happen, process))

    def spread(self, mean_ms: float, fraction: float | None = None) -> float:
        """A duration about as long as `mean_ms`, at most a `fraction` of it away; by default the setting's."""
        fraction = self.setting.spread if fraction is None else fraction
        return mean_ms * self.random.uniform(1 - fraction, 1 + fraction)

    def say(self, line: Line) -> None:
        """A line is written."""
        self._said.append(line)
        # A line takes a moment, so that no two bear the same time.
        self.now_ms += self.random.uniform(0.01, 0.04)
        if isinstance(line, Timeline):
            self.events[line.event] += 1
            if self.setting.level == "INFO":
                self._make_noise()

    def _make_noise(self) -> None:
        for number in range(self.setting.noise):
            fields = (("size_gib", "2.4"), ("free_remaining", str(number)))
            self._said.append(
                Tracing(self.now_ms, f"noise-{number}", "INFO", PINNED_POOL, "pinned pool: checkin", fields)
            )

    def run(self, until_ms: float, min_lines: int | None) -> Iterator[Line]:
        """Lets happen what is due, up to a time or until so many lines are written; yields these."""
        yield from self._take_said()
        while self._due and self._due[0][0] <= until_ms and (min_lines is None or self._lines < min_lines):
            at_ms, _, happen, process = heappop(self._due)
            if process is not None and process is not self.running:
                continue
            self.now_ms = max(self.now_ms, at_ms)
            happen()
            if self._said:
                yield from self._take_said()

    def _take_said(self) -> list[Line]:
        said, self._said = self._said, []
        self._lines += len(said)
        return said
