"""An NVML without GPUs: the functions of `pynvml` that the agent calls, over GPUs that are simulated or replayed.

It has the cadence of H200s: utilization every 200 ms in a ring of 71, power every 20 ms in a ring of 119. Constants and
errors are those of `pynvml` itself. Faults come by script.
"""

# ruff: noqa: N802 - the functions have the names that they have in pynvml.

from __future__ import annotations

import bisect
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol

from cuzk_agent.clock import Clock
from cuzk_agent.gpu.nvml import pynvml_module

BUSY_EVERY_S: Final = 0.2
BUSY_RING: Final = 71
POWER_EVERY_S: Final = 0.02
POWER_RING: Final = 119

_BUSY_PHASE_S = 0.0742
_POWER_PHASE_S = 0.0031
_UNSIGNED_INT = 1
"""NVML_VALUE_TYPE_UNSIGNED_INT."""


class Signal(Protocol):
    """What a GPU does, as a function of wall-clock time."""

    def busy_samples(self, start_unix_s: float, end_unix_s: float, boot_unix_s: float) -> Iterable[tuple[int, int]]:
        """Utilization samples with time stamps in (start, end], as (µs, percent). The cadence is counted from boot."""
        ...

    def busy_percent(self, unix_s: float) -> int:
        """Momentary utilization."""
        ...

    def watts(self, unix_s: float) -> float:
        """Momentary power."""
        ...

    def celsius(self, unix_s: float) -> float:
        """Temperature."""
        ...

    def memory_used_bytes(self, unix_s: float) -> int:
        """Memory in use."""
        ...


@dataclass(frozen=True, slots=True)
class Simulated:
    """A GPU that follows functions."""

    busy: Callable[[float, float], float]
    """The share of a stretch of time, given by its start and end in unix seconds, in which kernels run."""
    power: Callable[[float], float] = lambda _: 75.0
    """Watts at a time."""
    temperature: Callable[[float], float] = lambda _: 35.0
    memory: Callable[[float], int] = lambda _: 0

    def busy_samples(self, start_unix_s: float, end_unix_s: float, boot_unix_s: float) -> Iterator[tuple[int, int]]:
        """As the driver does it: whole percents, rounded down, and 99 for a full interval."""
        for stamp_s in _ticks(start_unix_s, end_unix_s, BUSY_EVERY_S, boot_unix_s + _BUSY_PHASE_S):
            yield round(stamp_s * 1e6), _percent(self.busy(stamp_s - BUSY_EVERY_S, stamp_s))

    def busy_percent(self, unix_s: float) -> int:
        """Over the last sampling period."""
        return _percent(self.busy(unix_s - BUSY_EVERY_S, unix_s))

    def watts(self, unix_s: float) -> float:
        """Momentary power."""
        return self.power(unix_s)

    def celsius(self, unix_s: float) -> float:
        """Temperature."""
        return self.temperature(unix_s)

    def memory_used_bytes(self, unix_s: float) -> int:
        """Memory in use."""
        return self.memory(unix_s)


class Moment(NamedTuple):
    """What a capture has of one second."""

    unix_s: float
    power_mw: int
    celsius: float
    memory_used_bytes: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A GPU as it was captured: each line of the capture one moment, with what NVML said then."""

    samples: Sequence[tuple[int, int]]
    """Sorted, each once."""
    polls: Sequence[tuple[float, int]]
    moments: Sequence[Moment]

    @classmethod
    def read(cls, lines: Iterable[str]) -> Recorded:
        """From JSON lines with `wall` and `util`, and at times also `samples`, `power_mw`, `temp_c` and `mem_used`."""
        records = [json.loads(line) for line in lines]
        return cls(
            samples=sorted({(stamp, value) for record in records for stamp, value in record.get("samples", ())}),
            polls=[(record["wall"], record["util"]) for record in records],
            moments=[
                Moment(record["wall"], record["power_mw"], record["temp_c"], record["mem_used"])
                for record in records
                if "power_mw" in record
            ],
        )

    @property
    def start_unix_s(self) -> float:
        """The first moment of the capture."""
        return self.polls[0][0]

    @property
    def end_unix_s(self) -> float:
        """Its last one."""
        return self.polls[-1][0]

    def busy_samples(
        self,
        start_unix_s: float,
        end_unix_s: float,
        boot_unix_s: float,  # noqa: ARG002 - the capture has its own time stamps
    ) -> Sequence[tuple[int, int]]:
        """Those of the capture."""
        first, last = (bisect.bisect_right(self.samples, (round(at * 1e6), 101)) for at in (start_unix_s, end_unix_s))
        return self.samples[first:last]

    def busy_percent(self, unix_s: float) -> int:
        """The last captured utilization."""
        return self.polls[max(0, bisect.bisect_right(self.polls, (unix_s, 101)) - 1)][1]

    def watts(self, unix_s: float) -> float:
        """The last captured power."""
        return self._moment(unix_s).power_mw / 1000

    def celsius(self, unix_s: float) -> float:
        """The last captured temperature."""
        return self._moment(unix_s).celsius

    def memory_used_bytes(self, unix_s: float) -> int:
        """The last captured memory in use."""
        return self._moment(unix_s).memory_used_bytes

    def _moment(self, unix_s: float) -> Moment:
        return self.moments[max(0, bisect.bisect_right(self.moments, unix_s, key=lambda one: one.unix_s) - 1)]


@dataclass(slots=True, eq=False)
class FakeGpu:
    """A GPU. Everything may be changed while it is in use."""

    signal: Signal
    uuid: str
    pci_bus_id: str = "00000000:06:00.0"
    name: str | bytes = "NVIDIA H200"
    memory_total_bytes: int = 150_754_820_096
    sm_clock_mhz: int = 1980
    throttle_reasons: int = 0
    throttle_reasons_supported: int = 0x1FF
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    processes: int = 1
    pcie_kilobytes_per_second: int = 505
    mig: bool = False
    since_boot: bool = False
    """Time stamps count from boot, not from 1970."""
    present: bool = True
    """It is on the bus."""
    _busy: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BUSY_RING))
    _power: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=POWER_RING))
    _busy_until_s: float | None = None
    _power_until_s: float | None = None

    def busy_ring(self, unix_s: float, monotonic_s: float) -> list[tuple[int, int]]:
        """The ring of utilization as of now."""
        since_s = self._busy_until_s
        self._busy_until_s = monotonic_s
        start_s = unix_s - (BUSY_RING * BUSY_EVERY_S if since_s is None else monotonic_s - since_s)
        boot_s = round(unix_s - monotonic_s, 6)
        self._busy.extend(self._stamped(self.signal.busy_samples(start_s, unix_s, boot_s), boot_s))
        return list(self._busy)

    def power_ring(self, unix_s: float, monotonic_s: float) -> list[tuple[int, int]]:
        """The ring of power as of now."""
        since_s = self._power_until_s
        self._power_until_s = monotonic_s
        length_s = POWER_RING * POWER_EVERY_S
        start_s = unix_s - (length_s if since_s is None else min(monotonic_s - since_s, length_s))
        boot_s = round(unix_s - monotonic_s, 6)
        ticks = _ticks(start_s, unix_s, POWER_EVERY_S, boot_s + _POWER_PHASE_S)
        samples = ((round(at * 1e6), round(self.signal.watts(at) * 1000)) for at in ticks)
        self._power.extend(self._stamped(samples, boot_s))
        return list(self._power)

    def reset(self) -> None:
        """The driver was loaded anew: the rings are empty."""
        self._busy.clear()
        self._power.clear()

    def _stamped(self, samples: Iterable[tuple[int, int]], boot_unix_s: float) -> Iterator[tuple[int, int]]:
        shift = round(boot_unix_s * 1e6) if self.since_boot else 0
        return ((stamp - shift, value) for stamp, value in samples)


@dataclass(frozen=True, slots=True)
class _Handle:
    """What `pynvml` hands out for a GPU. It outlives the GPU, and dies with the driver."""

    gpu: FakeGpu
    load: int
    """Of which load of the driver it is."""


@dataclass(frozen=True, slots=True)
class _Failure:
    function: str
    error: str | Exception
    gpu: int | None
    from_s: float
    to_s: float


class FakeNvml:
    """To be used in the place of the module `pynvml`."""

    def __init__(self, clock: Clock, gpus: Iterable[FakeGpu] = ()) -> None:
        """`gpus` in the order of their PCI bus ids."""
        self._pynvml = pynvml_module()
        self._clock = clock
        self.gpus = list(gpus)
        """All GPUs that ever were here: scripts name them by their place in this list."""
        self._begun_s = clock.monotonic_s()
        self._initialized = False
        self._load = 1
        self._current_load = 0
        self._listed: list[FakeGpu] = []
        self._failures: list[_Failure] = []
        self._hanging: dict[str, threading.Event] = {}
        self._watched: list[FakeGpu] = []
        self._xids: deque[tuple[FakeGpu, int]] = deque()
        self._driver = True
        self.calls: list[tuple[str, int | None]] = []
        """Every call of a function: its name, and the GPU's place in `gpus`. To be cleared by whoever looks at it."""
        self.keep_calls = False

    def __getattr__(self, name: str) -> Any:
        """Constants and exceptions are those of `pynvml`; its functions are here, or not in this NVML."""
        if name.startswith(("NVML_", "NVMLError", "nvmlClocks", "nvmlEventType")):
            return getattr(self._pynvml, name)
        raise AttributeError(name)

    # --- the script --------------------------------------------------------------------------------------------

    def fail(
        self,
        function: str,
        *,
        error: str | Exception,
        gpu: int | None = None,
        from_s: float = 0.0,
        to_s: float = math.inf,
    ) -> None:
        """Calls of a function (`*`: all that ask a GPU) fail, for one GPU or all, from and to a time since the start.

        `error` is NVML's without prefix (`GpuIsLost`), or any exception.
        """
        self._failures.append(_Failure(function, error, gpu, from_s, to_s))

    def heal(self) -> None:
        """Nothing fails any more."""
        self._failures.clear()

    def hang(self, function: str, until: threading.Event) -> None:
        """Calls of a function do not return until the event is set."""
        self._hanging[function] = until

    def remove(self, gpu: int) -> None:
        """A GPU falls off the bus: its handle is lost, and it is listed no more after the next initialization."""
        self.gpus[gpu].present = False

    def restore(self, gpu: int) -> None:
        """It is back, for those who initialize NVML anew."""
        self.gpus[gpu].present = True

    def add(self, gpu: FakeGpu) -> None:
        """A GPU more, for those who initialize NVML anew."""
        self.gpus.append(gpu)

    def unload_driver(self) -> None:
        """The driver is taken out: nothing works until it is back and NVML initialized anew."""
        self._driver = False
        self._load += 1
        for gpu in self.gpus:
            gpu.reset()

    def load_driver(self) -> None:
        """The driver is back."""
        self._driver = True

    def xid(self, gpu: int, code: int) -> None:
        """The GPU reports an XID error."""
        if self.gpus[gpu] in self._watched:
            self._xids.append((self.gpus[gpu], code))

    # --- pynvml: the library -----------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        """See NVML."""
        self._enter("nvmlInit")
        if not self._driver:
            raise self._error("DriverNotLoaded")
        self._initialized = True
        self._current_load = self._load
        self._listed = [gpu for gpu in self.gpus if gpu.present]
        self._watched = []

    def nvmlShutdown(self) -> None:
        """See NVML."""
        self._enter("nvmlShutdown")
        self._need_driver()
        self._initialized = False

    def nvmlSystemGetDriverVersion(self) -> str:
        """See NVML."""
        self._enter("nvmlSystemGetDriverVersion")
        self._need_driver()
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        """See NVML."""
        self._enter("nvmlDeviceGetCount")
        self._need_driver()
        return len(self._listed)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        """See NVML."""
        self._need_driver()
        if not 0 <= index < len(self._listed):
            raise self._error("InvalidArgument")
        self._enter("nvmlDeviceGetHandleByIndex", self._listed[index])
        return _Handle(self._listed[index], self._load)

    # --- pynvml: one GPU ---------------------------------------------------------------------------------------

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        """See NVML."""
        return self._gpu("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        """See NVML. As in pynvml, a name that is no UTF-8 raises UnicodeDecodeError."""
        name = self._gpu("nvmlDeviceGetName", handle).name
        return name.decode() if isinstance(name, bytes) else name

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> SimpleNamespace:
        """See NVML."""
        return SimpleNamespace(busId=self._gpu("nvmlDeviceGetPciInfo", handle).pci_bus_id)

    def nvmlDeviceGetSamples(self, handle: _Handle, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        """See NVML. With MIG on there are none."""
        gpu = self._gpu("nvmlDeviceGetSamples", handle)
        clocks = (self._clock.unix_s(), self._clock.monotonic_s())
        if kind == self.NVML_TOTAL_POWER_SAMPLES:
            ring = gpu.power_ring(*clocks)
        elif kind == self.NVML_GPU_UTILIZATION_SAMPLES and not gpu.mig:
            ring = gpu.busy_ring(*clocks)
        else:
            raise self._error("NotSupported")
        samples = [
            SimpleNamespace(timeStamp=stamp, sampleValue=SimpleNamespace(uiVal=value))
            for stamp, value in ring
            if stamp > since_us or not since_us
        ]
        if not samples:
            raise self._error("NotFound")
        return _UNSIGNED_INT, samples

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> SimpleNamespace:
        """See NVML. With MIG on there are none."""
        gpu = self._gpu("nvmlDeviceGetUtilizationRates", handle)
        if gpu.mig:
            raise self._error("NotSupported")
        return SimpleNamespace(gpu=gpu.signal.busy_percent(self._clock.unix_s()), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle) -> SimpleNamespace:
        """See NVML."""
        gpu = self._gpu("nvmlDeviceGetMemoryInfo", handle)
        used = gpu.signal.memory_used_bytes(self._clock.unix_s())
        return SimpleNamespace(used=used, total=gpu.memory_total_bytes, free=gpu.memory_total_bytes - used)

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        """See NVML."""
        return round(self._gpu("nvmlDeviceGetPowerUsage", handle).signal.watts(self._clock.unix_s()) * 1000)

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:  # noqa: ARG002
        """See NVML."""
        return round(self._gpu("nvmlDeviceGetTemperature", handle).signal.celsius(self._clock.unix_s()))

    def nvmlDeviceGetClockInfo(self, handle: _Handle, kind: int) -> int:  # noqa: ARG002
        """See NVML."""
        return self._gpu("nvmlDeviceGetClockInfo", handle).sm_clock_mhz

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        """See NVML."""
        return self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).throttle_reasons

    def nvmlDeviceGetSupportedClocksEventReasons(self, handle: _Handle) -> int:
        """See NVML."""
        return self._gpu("nvmlDeviceGetSupportedClocksEventReasons", handle).throttle_reasons_supported

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: _Handle) -> int:
        """See NVML."""
        return self._gpu("nvmlDeviceGetCurrentClocksThrottleReasons", handle).throttle_reasons

    def nvmlDeviceGetSupportedClocksThrottleReasons(self, handle: _Handle) -> int:
        """See NVML."""
        return self._gpu("nvmlDeviceGetSupportedClocksThrottleReasons", handle).throttle_reasons_supported

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, kind: int, counter: int) -> int:  # noqa: ARG002
        """See NVML."""
        gpu = self._gpu("nvmlDeviceGetTotalEccErrors", handle)
        return gpu.ecc_uncorrected if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else gpu.ecc_corrected

    def nvmlDeviceGetComputeRunningProcesses(self, handle: _Handle) -> list[SimpleNamespace]:
        """See NVML."""
        gpu = self._gpu("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=1000 + number, usedGpuMemory=None) for number in range(gpu.processes)]

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        """See NVML."""
        return [int(self._gpu("nvmlDeviceGetMigMode", handle).mig)] * 2

    def nvmlDeviceGetPcieThroughput(self, handle: _Handle, counter: int) -> int:  # noqa: ARG002
        """See NVML, but it does not take 20 ms."""
        return self._gpu("nvmlDeviceGetPcieThroughput", handle).pcie_kilobytes_per_second

    # --- pynvml: events ----------------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> object:
        """See NVML."""
        self._enter("nvmlEventSetCreate")
        self._need_driver()
        self._xids.clear()
        return object()

    def nvmlDeviceRegisterEvents(self, handle: _Handle, types: int, events: object) -> None:  # noqa: ARG002
        """See NVML."""
        self._watched.append(self._gpu("nvmlDeviceRegisterEvents", handle))

    def nvmlEventSetWait(self, events: object, timeout_ms: int) -> SimpleNamespace:  # noqa: ARG002
        """See NVML, but it never waits."""
        self._enter("nvmlEventSetWait")
        self._need_driver()
        if not self._xids:
            raise self._error("Timeout")
        gpu, code = self._xids.popleft()
        return SimpleNamespace(
            device=_Handle(gpu, self._load), eventType=self.nvmlEventTypeXidCriticalError, eventData=code
        )

    # --- how it is done ----------------------------------------------------------------------------------------

    def _gpu(self, function: str, handle: _Handle) -> FakeGpu:
        """Whose handle it is, if it can be asked."""
        self._enter(function, handle.gpu)
        self._need_driver()
        if handle.load != self._load:
            raise self._error("Unknown")
        if not handle.gpu.present:
            raise self._error("GpuIsLost")
        return handle.gpu

    def _need_driver(self) -> None:
        if not self._initialized:
            raise self._error("Uninitialized")
        if self._current_load != self._load:
            # What a driver says that was unloaded under one's feet.
            raise self._error("Unknown")

    def _enter(self, function: str, gpu: FakeGpu | None = None) -> None:
        """Every call comes by here: it is remembered, and hangs or fails if the script says so."""
        index = None if gpu is None else self.gpus.index(gpu)
        if self.keep_calls:
            self.calls.append((function, index))
        if (until := self._hanging.get(function)) is not None:
            until.wait()
        now_s = self._clock.monotonic_s() - self._begun_s
        for failure in self._failures:
            if (
                failure.function in ({function, "*"} if gpu is not None else {function})
                and failure.gpu in {None, index}
                and failure.from_s <= now_s < failure.to_s
            ):
                raise self._error(failure.error) if isinstance(failure.error, str) else failure.error

    def _error(self, name: str) -> Exception:
        error = getattr(self._pynvml, f"NVMLError_{name}")()
        assert isinstance(error, Exception)
        return error


def _percent(share: float) -> int:
    return max(0, math.floor(share * 99.8))


def _ticks(start_s: float, end_s: float, every_s: float, phase_s: float) -> Iterator[float]:
    """The times of a cadence in (start, end]."""
    tick = math.floor((start_s - phase_s) / every_s) + 1
    while (at_s := tick * every_s + phase_s) <= end_s:
        yield at_s
        tick += 1
