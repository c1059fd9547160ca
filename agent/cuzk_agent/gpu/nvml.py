"""The door to NVML: the only module that imports `pynvml`. One call at a time, from one thread.

Every call is timed, its errors are counted, and the one in progress has its name on the door. What a GPU does not
support is asked once and then left alone. What cannot be had is None; what should have worked raises `CallError`.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any, Final, Literal

from cuzk_agent.clock import Clock

_UNSUPPORTED = {
    "NotSupported", "FunctionNotFound", "NoPermission", "ArgumentVersionMismatch", "Deprecated", "VgpuEccNotSupported",
}  # fmt: skip
"""Errors that asking again won't change while driver and GPU stay the same."""
_GPU_LOST = {"GpuIsLost", "ResetRequired", "GpuNotFound"}
_DRIVER_GONE = {"Uninitialized", "DriverNotLoaded", "LibraryNotFound", "LibRmVersionMismatch"}

_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of the union nvmlValue_t for each nvmlValueType_t."""

THROTTLE_REASONS: Final = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""nvmlClocksEventReason… by bit, without GpuIdle (0x1), which holds nothing back."""


def pynvml_module() -> Any:
    """The real module. Importing it needs no driver; it raises ImportError where nvidia-ml-py is not installed."""
    return importlib.import_module("pynvml")


class CallError(Exception):
    """A call failed."""

    def __init__(self, function: str, error: str) -> None:
        super().__init__(f"{function}: {error}")
        self.function = function
        self.error = error
        """NVML's name for it without the prefix (`GpuIsLost`), or the name of a Python exception."""

    @property
    def gpu_lost(self) -> bool:
        """The GPU is gone, and the others are not."""
        return self.error in _GPU_LOST

    @property
    def driver_gone(self) -> bool:
        """No call will work until NVML is initialized again."""
        return self.error in _DRIVER_GONE


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to ask."""

    key: str
    """What it supports is remembered under this."""
    handle: Any
    """Valid until the next `init`."""


Ring = Literal["NVML_GPU_UTILIZATION_SAMPLES", "NVML_TOTAL_POWER_SAMPLES"]
Traffic = Literal["rx", "tx"]
EccErrors = Literal["corrected", "uncorrected"]


class Nvml:
    """Typed calls of a module that looks like `pynvml`."""

    def __init__(self, clock: Clock, lib: Any = None) -> None:
        """`lib` is `pynvml` itself if not given, and then imported at the first `init`."""
        self._clock = clock
        self._lib = lib
        self._unsupported: set[tuple[str, str, tuple[object, ...]]] = set()
        self._event_set: Any = None
        self.calling: str | None = None
        """The function that is being called now. To be read from other threads."""
        self.call_seconds: dict[str, tuple[int, float]] = {}
        self.errors: dict[tuple[str, str], int] = {}

    # The library

    def init(self) -> None:
        """Initialize NVML. What was remembered of the GPUs is forgotten: it may be another driver."""
        self._unsupported.clear()
        self._event_set = None
        if self._lib is None:
            try:
                self._lib = pynvml_module()
            except ImportError as error:
                raise self._fault("nvmlInit", "LibraryNotFound") from error
        self._call("nvmlInit")

    def shutdown(self) -> None:
        """The end of every handle."""
        self._event_set = None
        self._call("nvmlShutdown")

    def driver_version(self) -> str | None:
        """The version of the driver; None if it doesn't tell."""
        return self._text("nvmlSystemGetDriverVersion")

    # Finding GPUs

    def count(self) -> int:
        """How many GPUs the driver lists."""
        return int(self._call("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Any:
        """The GPU in this place of NVML's list."""
        return self._call("nvmlDeviceGetHandleByIndex", index)

    def uuid(self, handle: Any) -> str | None:
        """`GPU-` and a UUID; None if it can't be read."""
        return self._text("nvmlDeviceGetUUID", handle)

    def model(self, handle: Any) -> str | None:
        """The product's name; None if it can't be read."""
        return self._text("nvmlDeviceGetName", handle)

    def pci_bus_id(self, handle: Any) -> str | None:
        """`00000000:2A:00.0`; None if it can't be read."""
        try:
            bus_id = self._call("nvmlDeviceGetPciInfo", handle).busId
        except CallError:
            return None
        return bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)

    # Reading a GPU: None where it is not supported

    def ring(self, device: Device, ring: Ring) -> list[tuple[int, int]] | None:
        """All samples that the driver holds, as (time stamp µs, value): percent, or milliwatts."""
        # Asking for the new ones only costs as much, and finds nothing for a while after the clock was set back.
        read = self._read(device, "nvmlDeviceGetSamples", getattr(self._lib, ring), 0, nothing="NotFound")
        if read is None:
            return None
        value_type, samples = read
        field = _VALUE_FIELDS[value_type] if 0 <= value_type < len(_VALUE_FIELDS) else "uiVal"
        return [(int(one.timeStamp), int(getattr(one.sampleValue, field))) for one in samples]

    def utilization_percent(self, device: Device) -> int | None:
        """How busy the chip was in the driver's last sampling period, of 1/6 s to 1 s."""
        read = self._read(device, "nvmlDeviceGetUtilizationRates")
        return None if read is None else int(read.gpu)

    def memory_bytes(self, device: Device) -> tuple[int, int] | None:
        """Used and total."""
        read = self._read(device, "nvmlDeviceGetMemoryInfo")
        return None if read is None else (int(read.used), int(read.total))

    def power_watts(self, device: Device) -> float | None:
        """What the board draws."""
        read = self._read(device, "nvmlDeviceGetPowerUsage")
        return None if read is None else read / 1000

    def temperature_celsius(self, device: Device) -> float | None:
        """Of the chip."""
        read = self._read(device, "nvmlDeviceGetTemperature", self._lib.NVML_TEMPERATURE_GPU)
        return None if read is None else float(read)

    def sm_clock_hertz(self, device: Device) -> float | None:
        """Of the multiprocessors."""
        read = self._read(device, "nvmlDeviceGetClockInfo", self._lib.NVML_CLOCK_SM)
        return None if read is None else read * 1e6

    def throttle_reasons(self, device: Device) -> int | None:
        """What holds the clocks down now, as bits of `THROTTLE_REASONS`."""
        return self._either(
            device, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        )

    def throttle_reasons_supported(self, device: Device) -> int | None:
        """What of it the GPU can tell."""
        return self._either(
            device, "nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetSupportedClocksThrottleReasons"
        )

    def ecc_errors(self, device: Device, errors: EccErrors) -> int | None:
        """Memory errors since the driver was loaded."""
        kind = getattr(self._lib, f"NVML_MEMORY_ERROR_TYPE_{errors.upper()}")
        read = self._read(device, "nvmlDeviceGetTotalEccErrors", kind, self._lib.NVML_VOLATILE_ECC)
        return None if read is None else int(read)

    def processes(self, device: Device) -> int | None:
        """How many processes have a compute context. A context of another container may not be seen."""
        read = self._read(device, "nvmlDeviceGetComputeRunningProcesses")
        return None if read is None else len(read)

    def mig(self, device: Device) -> bool | None:
        """Whether the GPU is cut into instances; it then tells of itself only as far as that makes sense."""
        read = self._read(device, "nvmlDeviceGetMigMode")
        return None if read is None else read[0] == 1

    def pcie_bytes_per_second(self, device: Device, direction: Traffic) -> float | None:
        """Traffic over the 20 ms that this call takes."""
        read = self._read(
            device, "nvmlDeviceGetPcieThroughput", getattr(self._lib, f"NVML_PCIE_UTIL_{direction.upper()}_BYTES")
        )
        return None if read is None else read * 1000.0

    # XID errors

    def watch_xid(self, device: Device) -> bool:
        """Report the GPU's XID errors from now on; False if it has none to report."""
        try:
            if self._event_set is None:
                self._event_set = self._call("nvmlEventSetCreate")
            self._call(
                "nvmlDeviceRegisterEvents", device.handle, self._lib.nvmlEventTypeXidCriticalError, self._event_set
            )
        except CallError as error:
            if error.driver_gone or error.gpu_lost:
                raise
            return False
        return True

    def next_xid(self) -> tuple[Any, int] | None:
        """The handle of a GPU and the number of an XID error it had; None if there is none left. Does not wait."""
        if self._event_set is None:
            return None
        event = self._call("nvmlEventSetWait", self._event_set, 0, nothing="Timeout")
        return None if event is None else (event.device, int(event.eventData))

    # How it is done

    def _text(self, function: str, *args: object) -> str | None:
        # Some drivers return names that are not UTF-8. A GPU without a name is still a GPU.
        try:
            text = self._call(function, *args)
        except CallError as error:
            if error.driver_gone or error.gpu_lost:
                raise
            return None
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)

    def _either(self, device: Device, function: str, former: str) -> int | None:
        """A function or, with a driver that doesn't know it yet, what it was called formerly."""
        read = self._read(device, function)
        read = self._read(device, former) if read is None else read
        return None if read is None else int(read)

    def _read(self, device: Device, function: str, *args: object, nothing: str | None = None) -> Any:
        """The result; None where it is not supported, and for the error `nothing` an empty one."""
        asked = (device.key, function, args)
        if asked in self._unsupported:
            return None
        try:
            read = self._call(function, device.handle, *args, nothing=nothing)
        except CallError as error:
            if error.error not in _UNSUPPORTED:
                raise
            self._unsupported.add(asked)
            return None
        return (1, ()) if read is None and nothing is not None else read

    def _call(self, function: str, *args: object, nothing: str | None = None) -> Any:
        """The one place where NVML is called. An error named `nothing` is none, and gives None."""
        called = getattr(self._lib, function, None)
        if called is None:
            raise self._fault(function, "FunctionNotFound")
        started_s = self._clock.monotonic_s()
        self.calling = function
        try:
            return called(*args)
        except self._lib.NVMLError as error:
            name = type(error).__name__.removeprefix("NVMLError_")
            if name == nothing:
                return None
            raise self._fault(function, name if name != "NVMLError" else f"Code{error.value}") from error
        except (ValueError, OSError, ctypes.ArgumentError) as error:
            raise self._fault(function, type(error).__name__) from error
        finally:
            self.calling = None
            count, seconds = self.call_seconds.get(function, (0, 0.0))
            self.call_seconds[function] = (count + 1, seconds + self._clock.monotonic_s() - started_s)

    def _fault(self, function: str, error: str) -> CallError:
        self.errors[function, error] = self.errors.get((function, error), 0) + 1
        return CallError(function, error)


def same_gpu(one: Any, other: Any) -> bool:
    """Whether two handles are of one GPU, also of one that is lost and can't be asked for its UUID."""
    if one == other:
        return True
    try:
        return ctypes.addressof(one.contents) == ctypes.addressof(other.contents)
    except (AttributeError, TypeError, ValueError):
        return False
