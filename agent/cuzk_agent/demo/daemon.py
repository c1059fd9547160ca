"""Puts the model's log into a file: live against a clock, or all of it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cuzk_agent.clock import Clock
from cuzk_agent.demo.lines import Timeline, fragments, writes
from cuzk_agent.demo.model import GpuTruth, JobOutcome, Model, shutdown_lines

DEFAULT_SPEED = 10.0
_LONGEST_SLEEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Truth:
    """What a log should tell, known from its making."""

    timeline: tuple[str, ...]
    """Every TIMELINE line as it was meant, in writing order."""
    torn_lines: int
    """How many of them another writer's line landed in."""
    gpus: Mapping[int, GpuTruth]
    jobs: Mapping[str, JobOutcome]


def run(
    path: Path, *, seed: int, speed: float, stop: Callable[[], bool], clock: Clock, sleep: Callable[[float], object]
) -> None:
    """Append to the log at `path` as its lines fall due, until `stop()`; then say the last words and return."""
    with closing(_Appender(path)) as log:
        epoch_unix_ms, epoch_s = clock.unix_s() * 1000, clock.monotonic_s()
        for write in writes(Model(seed, speed).lines(), _tearing(seed), epoch_unix_ms):
            while not stop() and (left_s := epoch_s + write.time_ms / 1000 - clock.monotonic_s()) > 0:
                sleep(min(left_s, _LONGEST_SLEEP_S))
            if stop():
                break
            log.append(write.fragments)
        for line in shutdown_lines((clock.monotonic_s() - epoch_s) * 1000):
            log.append(fragments(line, epoch_unix_ms))


def write_log(path: Path, seed: int, until_ms: float, epoch_unix_ms: float, speed: float = DEFAULT_SPEED) -> Truth:
    """Write the log of an engine's first `until_ms` at once, as if it were still running, and tell its truth."""
    model = Model(seed, speed)
    lines = list(model.lines(until_ms))
    torn_lines = 0
    with closing(_Appender(path)) as log:
        for write in writes(iter(lines), _tearing(seed), epoch_unix_ms):
            torn_lines += write.torn
            log.append(write.fragments)
    meant = tuple(line.text() for line in lines if isinstance(line, Timeline))
    return Truth(meant, torn_lines, model.gpu_truth(), model.job_outcomes())


def _tearing(seed: int) -> Random:
    # Apart from the model's own chance, so that tearing changes no event.
    return Random(f"tearing {seed}")


class _Appender:
    """A log file as a prover's standard error: unbuffered, one write(2) for each fragment."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, parts: tuple[bytes, ...]) -> None:
        for part in parts:
            os.write(self._fd, part)

    def close(self) -> None:
        os.close(self._fd)
