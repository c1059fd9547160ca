"""Keeps what NVML says of the GPUs as JSON lines, which `analyze --nvml` sets beside a log: one file for each GPU."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cuzk_agent.gpu.state import Readings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heard:
    """How busy a GPU says that it was, and when it said so."""

    unix_s: float
    monotonic_s: float
    samples: Sequence[tuple[int, int]] | None
    """What is new in its ring, as (time stamp µs, percent); None: the ring was not read, or there is none."""
    percent: int | None
    """Momentary utilization; None: it was not read."""


def recording_paths(path: Path, gpus: Collection[str]) -> dict[str, Path]:
    """The file of each GPU, by label: with several GPUs `.gpuN` comes into the name."""
    stem, dot, rest = path.name.partition(".")
    return {gpu: path.with_name(f"{stem}.gpu{gpu}{dot}{rest}") if len(gpus) > 1 else path for gpu in gpus}


class Recorder:
    """Appends to the files of one recording. A file that can't be written ends it, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, BinaryIO] = {}
        self._ended = False

    def devices(self, gpus: Collection[str]) -> None:
        """These GPUs exist, by label. A GPU keeps the file that it once has."""
        if self._ended:
            return
        try:
            for gpu, path in recording_paths(self._path, gpus).items():
                if gpu not in self._files:
                    self._files[gpu] = _opened(path)
                    logger.info("GPU %s: recorded in %s", gpu, path)
        except OSError as error:
            self._fail(error)

    def record(self, gpu: str, heard: Heard, readings: Readings) -> None:
        """One line. What is not known is left out."""
        if (file := self._files.get(gpu)) is None:
            return
        record = {
            "wall": heard.unix_s,
            "monotonic": heard.monotonic_s,
            "samples": heard.samples,
            "util": heard.percent,
            "power_mw": _scaled(readings.power_watts, 1000),
            "temp_c": _scaled(readings.temperature_celsius, 1),
            "sm_mhz": _scaled(readings.sm_clock_hertz, 1e-6),
            "mem_used": readings.memory_used_bytes,
        }
        known = {key: value for key, value in record.items() if value is not None}
        try:
            file.write(json.dumps(known).encode() + b"\n")
            file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """The recording ends."""
        self._ended = True
        for file in self._files.values():
            with suppress(OSError):  # it is full: what it lacks was told
                file.close()
        self._files.clear()

    def _fail(self, error: OSError) -> None:
        logger.error("the recording of NVML in %s has ended: %s", self._path, error.strerror or error)
        self.close()


def _opened(path: Path) -> BinaryIO:
    """To append to, from the beginning of a line on: an earlier recording may have ended within one."""
    file = path.open("a+b")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
    return file


def _scaled(value: float | None, factor: float) -> int | None:
    return None if value is None else round(value * factor)
