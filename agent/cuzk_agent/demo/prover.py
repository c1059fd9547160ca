"""A simulated prover whose log goes into a file: live against a clock, or all of it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cuzk_agent.clock import Clock
from cuzk_agent.demo.chips import Chips, write_nvml
from cuzk_agent.demo.engine import shutdown_lines
from cuzk_agent.demo.lines import Line, Printer, Write, disordered, writes
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import Scenario
from cuzk_agent.demo.truth import Truth
from cuzk_agent.gpu.fake import FakeNvml

DEFAULT_SPEED = 10.0
_LONGEST_SLEEP_S = 0.1
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """What is in a log that was written at once."""

    truth: Truth
    lines: int
    torn: int
    """TIMELINE lines in which others' lines landed."""
    end_unix_ms: float
    """Wall-clock time of its end."""


class Prover:
    """A simulated prover with its GPUs, alive from now on."""

    def __init__(self, scenario: Scenario, *, seed: int, speed: float, clock: Clock) -> None:
        self._clock = clock
        self._epoch_s = clock.monotonic_s()
        self._seed = seed
        start_unix_ms = clock.unix_s() * 1000
        self._printer = Printer(start_unix_ms, speed, scenario.setting.colours)
        self._model = Model(scenario, seed, speed=speed, start_unix_ms=start_unix_ms, keep=False)
        self._chips = Chips(self._model, self._printer)
        self.nvml = FakeNvml(clock, self._chips.gpus())
        """To be used in the place of the module `pynvml`."""

    def run(
        self,
        path: Path,
        *,
        stop: Callable[[], bool],
        sleep: Callable[[float], object],
        rotate_bytes: int | None = None,
    ) -> None:
        """Append to the log at `path` as its lines fall due, until `stop()`; then say the last words and return.

        With `rotate_bytes` the log is renamed to `.1` when it has grown beyond.
        """
        clock, speed = self._clock, self._printer.speed
        with closing(_Appender(path, rotate_bytes)) as log:
            for write in _writes(self._model.lines(), self._model, self._printer, self._seed):
                due_s = self._epoch_s + write.time_ms / speed / 1000
                while not stop() and (left_s := due_s - clock.monotonic_s()) > 0:
                    self._chips.script(self.nvml, clock.unix_s())
                    sleep(min(left_s, _LONGEST_SLEEP_S))
                if stop():
                    break
                log.append(write.fragments)
            for line in shutdown_lines((clock.monotonic_s() - self._epoch_s) * 1000 * speed):
                log.append(self._printer.fragments(line))


def write_log(
    path: Path,
    scenario: Scenario,
    seed: int,
    *,
    start_unix_ms: float,
    speed: float = 1.0,
    rounds: int | None = 1,
    min_lines: int | None = None,
    until_ms: float | None = None,
    nvml: Path | None = None,
) -> Written:
    """Write a log at once, and tell its truth.

    It ends after so many `rounds` of the scenario with an orderly shutdown, or, as if it were still being written, once
    it has `min_lines` lines or its engines have run to `until_ms`. What NVML says meanwhile goes to `nvml`.
    """
    model = Model(scenario, seed, speed=speed, rounds=rounds, start_unix_ms=start_unix_ms)
    printer = Printer(start_unix_ms, speed, scenario.setting.colours)
    lines = torn = 0
    buffer = bytearray()
    with path.open("ab") as log:
        for write in _writes(model.lines(until_ms, min_lines), model, printer, seed):
            torn += write.torn > 0
            for fragment in write.fragments:
                buffer += fragment
            if len(buffer) >= _BUFFER_BYTES:
                lines += buffer.count(b"\n")
                log.write(buffer)
                buffer.clear()
        lines += buffer.count(b"\n")
        log.write(buffer)
    end_unix_ms = printer.unix_ms(model.now_ms)
    if nvml is not None:
        write_nvml(nvml, Chips(model, printer), start_unix_ms / 1000, end_unix_ms / 1000)
    return Written(model.truth(), lines, torn, end_unix_ms)


def _writes(lines: Iterator[Line], model: Model, printer: Printer, seed: int) -> Iterator[Write]:
    # Apart from the model's own chance, so that disorder and tearing change no event.
    chance = Random(f"log {seed}")
    setting = model.setting
    ordered = disordered(lines, chance, setting.disorder_probability)
    return writes(ordered, chance, printer, setting.tear_probability)


class _Appender:
    """A log file as a prover's standard error: unbuffered, one write(2) for each fragment."""

    def __init__(self, path: Path, rotate_bytes: int | None) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._open()

    def append(self, parts: tuple[bytes, ...]) -> None:
        for part in parts:
            self._size += os.write(self._fd, part)
        if self._rotate_bytes is not None and self._size >= self._rotate_bytes:
            self._path.rename(self._path.with_name(self._path.name + ".1"))
            os.close(self._fd)
            self._open()

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
