"""One process of the daemon: its clock, its threads, and how it writes its lines."""

from __future__ import annotations

from collections.abc import Callable

from cuzk_agent.demo.jobs import Unit
from cuzk_agent.demo.lines import Fields, Kernel, Timeline, Tracing
from cuzk_agent.demo.world import World

ENGINE = "cuzk_core::engine"
"""The target of most tracing lines."""
_LEVELS = {"INFO": 0, "WARN": 1, "ERROR": 2}


class Process:
    """What all parts of the daemon do things with, as long as its process lives."""

    def __init__(self, world: World) -> None:
        self.setting = world.setting
        self.random = world.random
        self.spread = world.spread
        self._world = world
        self.last_line_ms = 0
        """When the last line was written that bears a time, on the engine's clock."""
        self._start_ms = world.now_ms

    def start_clock(self) -> None:
        """The engine's clock begins at 0."""
        self._start_ms = self._world.now_ms

    @property
    def now_ms(self) -> float:
        """In the simulation's time."""
        return self._world.now_ms

    def clock_ms(self) -> int:
        """Whole milliseconds of the engine's clock."""
        return self.logged_ms(self._world.now_ms - self._start_ms)

    def logged_ms(self, duration_ms: float) -> int:
        """A duration in the simulation's time as the engine's clock measures it."""
        return int(duration_ms / self._world.speed)

    def later(self, delay_ms: float, happen: Callable[[], None]) -> None:
        """Unless the process has ended by then."""
        self._world.later(delay_ms, happen, self)

    def soon(self, happen: Callable[[], None]) -> None:
        """When another thread has woken up."""
        self.later(self.random.uniform(0.02, 0.2), happen)

    def timeline(self, writer: str, event: str, unit: Unit, *details: str) -> None:
        """Writes a TIMELINE line."""
        self.last_line_ms = offset_ms = self.clock_ms()
        self._world.say(Timeline(self.now_ms, writer, offset_ms, event, unit.job.job_id, ",".join(details)))

    def kernel(self, writer: str, text: str) -> None:
        """Writes a line of the C++ prover, if these are on."""
        if self.setting.kernel_lines:
            self._world.say(Kernel(self.now_ms, writer, text))

    def trace(
        self,
        writer: str,
        message: str,
        /,
        *,
        target: str = ENGINE,
        level: str = "INFO",
        span: tuple[str, Fields] | None = None,
        **fields: object,
    ) -> None:
        """Writes a tracing line, if its level is on, without those fields that are None.

        `span` is the name of the span around it, and the fields of that.
        """
        name, span_fields = span or (None, ())
        texts = tuple([(key, str(value)) for key, value in fields.items() if value is not None])
        self.say(Tracing(self.now_ms, writer, level, target, message, texts, name, span_fields))

    def say(self, line: Tracing) -> None:
        """Writes a tracing line, if its level is on."""
        if _LEVELS[line.level] >= _LEVELS[self.setting.level]:
            self.last_line_ms = self.clock_ms()
            self._world.say(line)
