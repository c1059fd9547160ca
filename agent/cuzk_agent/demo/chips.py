"""Simulated GPUs that follow the model's kernels, behind the functions of NVML.

Somebody else's process may use them too; they grow hot and are throttled, report errors, and get lost.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path

from cuzk_agent.demo.lines import Printer
from cuzk_agent.demo.model import Model
from cuzk_agent.gpu.fake import FakeGpu, FakeNvml, Simulated
from cuzk_agent.gpu.record import recording_paths


class Activity(Enum):
    """What a GPU does, with the watts that it draws."""

    IDLE = 118.0
    KERNELS = 560.0
    BARRIER = 240.0
    """The prover's kernels wait for its CPU: clocks are up, but nothing runs."""
    FOREIGN = 330.0
    """Somebody else's process."""


_COOL_CELSIUS, _HEATING_CELSIUS = 36.0, 38.0
_HEAT_S = 20.0
"""A GPU's temperature follows its last seconds of work."""
_HOT_CELSIUS = 52.0
_CONTEXT_BYTES, _KERNEL_BYTES, _FOREIGN_BYTES = 5_838_340_096, 31_138_512_896, 9_663_676_416
_POWER_CAP_REASON = 0x4
_SECONDS_BETWEEN_READS = 1.0
_POLLS_A_READ = 10
_PID = 410
_MOMENT_MS = 1e-3
"""A stretch too short for anybody to see, and long enough for the arithmetic of times since 1970."""

_Stretch = tuple[float, float, Activity]
"""From, to (both in the simulation's milliseconds), and what the GPU does in it."""


class Chips:
    """The GPUs of one model, as functions of wall-clock time up to now.

    A thread may read while another runs the model.
    """

    def __init__(self, model: Model, printer: Printer) -> None:
        self._gpus = model.gpus
        self._printer = printer
        self._foreign = model.setting.foreign

    def gpus(self) -> list[FakeGpu]:
        """For a `FakeNvml`."""
        return [
            FakeGpu(
                Simulated(
                    partial(self.busy, gpu),
                    partial(self.watts, gpu),
                    partial(self.celsius, gpu),
                    partial(self.memory_bytes, gpu),
                ),
                uuid=f"GPU-5eed0000-0000-4000-8000-{gpu:012}",
                pci_bus_id=f"00000000:{6 + gpu:02X}:00.0",
            )
            for gpu in range(len(self._gpus.kernels))
        ]

    def script(self, nvml: FakeNvml, unix_s: float) -> None:
        """Lets happen to the simulated GPUs what is due by now."""
        now_ms = self._time_ms(unix_s)
        while self._gpus.troubles and self._gpus.troubles[0].time_ms <= now_ms:
            trouble = self._gpus.troubles.popleft()
            if trouble.xid is not None:
                nvml.xid(trouble.gpu, trouble.xid)
            (nvml.restore if trouble.present else nvml.remove)(trouble.gpu)
        for gpu, fake in enumerate(nvml.gpus):
            fake.throttle_reasons = _POWER_CAP_REASON if self.celsius(gpu, unix_s) > _HOT_CELSIUS else 0
            fake.processes = 1 + self._is_foreign(gpu, now_ms)

    def busy(self, gpu: int, start_unix_s: float, end_unix_s: float) -> float:
        """The share of a stretch of time in which kernels run, the prover's or somebody else's."""
        if end_unix_s <= start_unix_s:
            return 0.0
        start_ms, end_ms = self._time_ms(start_unix_s), self._time_ms(end_unix_s)
        own_ms = foreign_ms = 0.0
        for from_ms, to_ms, activity in self._stretches(gpu, start_ms, end_ms):
            if activity is Activity.KERNELS:
                own_ms += to_ms - from_ms
            elif activity is Activity.FOREIGN:
                foreign_ms += to_ms - from_ms
        share = self._foreign.share if self._foreign else 0.0
        return (own_ms + share * foreign_ms) / (end_ms - start_ms)

    def watts(self, gpu: int, unix_s: float) -> float:
        """Momentary power."""
        at_ms = self._time_ms(unix_s)
        return next(activity for _, _, activity in self._stretches(gpu, at_ms, at_ms + _MOMENT_MS)).value

    def joules(self, gpu: int, start_unix_s: float, end_unix_s: float) -> float:
        """The energy that a stretch of time took, to the last bit."""
        start_ms, end_ms = self._time_ms(start_unix_s), self._time_ms(end_unix_s)
        spent = sum(
            (to_ms - from_ms) * activity.value for from_ms, to_ms, activity in self._stretches(gpu, start_ms, end_ms)
        )
        return spent / 1000 / self._printer.speed

    def celsius(self, gpu: int, unix_s: float) -> float:
        """Temperature."""
        return _COOL_CELSIUS + _HEATING_CELSIUS * self.busy(gpu, unix_s - _HEAT_S, unix_s)

    def memory_bytes(self, gpu: int, unix_s: float) -> int:
        """Memory in use."""
        at_ms = self._time_ms(unix_s)
        kernels = any(True for _ in self._kernels(gpu, at_ms, at_ms + _MOMENT_MS))
        return _CONTEXT_BYTES + kernels * _KERNEL_BYTES + self._is_foreign(gpu, at_ms) * _FOREIGN_BYTES

    def _time_ms(self, unix_s: float) -> float:
        return (unix_s * 1000 - self._printer.start_unix_ms) * self._printer.speed

    def _is_foreign(self, gpu: int, at_ms: float) -> bool:
        foreign = self._foreign
        return foreign is not None and foreign.gpu == gpu and at_ms % foreign.every_ms < foreign.for_ms

    def _stretches(self, gpu: int, start_ms: float, end_ms: float) -> Iterator[_Stretch]:
        """A stretch of time cut into those of one activity each."""
        at_ms = start_ms
        for from_ms, to_ms, activity in self._kernels(gpu, start_ms, end_ms):
            yield from self._without_kernels(gpu, at_ms, from_ms)
            yield from_ms, to_ms, activity
            at_ms = to_ms
        yield from self._without_kernels(gpu, at_ms, end_ms)

    def _without_kernels(self, gpu: int, start_ms: float, end_ms: float) -> Iterator[_Stretch]:
        foreign = self._foreign
        if foreign is None or foreign.gpu != gpu:
            if end_ms > start_ms:
                yield start_ms, end_ms, Activity.IDLE
            return
        while start_ms < end_ms:
            into_ms = start_ms % foreign.every_ms
            active = into_ms < foreign.for_ms
            # At the very edge rounding must not hold time still.
            until_ms = start_ms + max((foreign.for_ms if active else foreign.every_ms) - into_ms, _MOMENT_MS)
            until_ms = min(until_ms, end_ms)
            yield start_ms, until_ms, Activity.FOREIGN if active else Activity.IDLE
            start_ms = until_ms

    def _kernels(self, gpu: int, start_ms: float, end_ms: float) -> Iterator[_Stretch]:
        kernels = self._gpus.kernels[gpu]
        first = bisect_right(kernels, start_ms, key=lambda run: run.end_ms)
        for index in range(first, len(kernels)):
            run = kernels[index]
            if run.start_ms >= end_ms:
                return
            barrier_start_ms, barrier_end_ms = run.barrier_ms
            for from_ms, to_ms, activity in (
                (run.start_ms, barrier_start_ms, Activity.KERNELS),
                (barrier_start_ms, barrier_end_ms, Activity.BARRIER),
                (barrier_end_ms, run.end_ms, Activity.KERNELS),
            ):
                from_ms, to_ms = max(from_ms, start_ms), min(to_ms, end_ms)
                if from_ms < to_ms:
                    yield from_ms, to_ms, activity


class _SteppedClock:
    """A clock that stands wherever it is put."""

    def __init__(self, unix_s: float) -> None:
        self.now_s = unix_s

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s


def nvml_paths(path: Path, gpus: int) -> list[Path]:
    """The files of `write_nvml`."""
    return list(recording_paths(path, [str(gpu) for gpu in range(gpus)]).values())


def write_nvml(path: Path, chips: Chips, start_unix_s: float, end_unix_s: float) -> list[Path]:
    """What NVML says of a finished simulation, one file for each GPU, in JSON lines.

    Every 100 ms `wall` and `util`; every second also `samples` ([µs, percent], new since the last), `power_mw`,
    `energy_mj`, `temp_c`, `sm_mhz`, `mem_used` and `proc_util`.
    """
    clock = _SteppedClock(start_unix_s)
    nvml = FakeNvml(clock, chips.gpus())
    nvml.nvmlInit()
    paths = nvml_paths(path, len(nvml.gpus))
    for gpu, file in enumerate(paths):
        with file.open("w", encoding="utf-8") as out:
            for record in _records(nvml, gpu, chips, clock, start_unix_s, end_unix_s):
                out.write(json.dumps(record) + "\n")
    return paths


def _records(
    nvml: FakeNvml, gpu: int, chips: Chips, clock: _SteppedClock, start_unix_s: float, end_unix_s: float
) -> Iterator[dict[str, object]]:
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
    newest_us, count, energy_j = 0, 0, 0.0
    read_s = start_unix_s
    while (now_s := start_unix_s + count * _SECONDS_BETWEEN_READS / _POLLS_A_READ) <= end_unix_s:
        clock.now_s = now_s
        record: dict[str, object] = {
            "wall": now_s,
            "util": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "mem_util": 0,
        }
        if count % _POLLS_A_READ == 0:
            _, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, newest_us)
            fresh = [(sample.timeStamp, sample.sampleValue.uiVal) for sample in samples]
            newest_us = fresh[-1][0]
            energy_j += chips.joules(gpu, read_s, now_s)
            read_s = now_s
            record["samples"] = fresh
            record["proc_util"] = [(_PID, newest_us, fresh[-1][1])]
            record["power_mw"] = nvml.nvmlDeviceGetPowerUsage(handle)
            record["energy_mj"] = round(energy_j * 1000)
            record["temp_c"] = nvml.nvmlDeviceGetTemperature(handle, 0)
            record["sm_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            record["mem_used"] = nvml.nvmlDeviceGetMemoryInfo(handle).used
        yield record
        count += 1
