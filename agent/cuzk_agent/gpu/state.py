"""The state of the GPUs as it is published: frozen, safe to read from any thread.

What could not be read is None or missing, never 0 and never the last value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cuzk_agent.timeline.state import Histogram


class NvmlState(StrEnum):
    """How NVML, or one GPU in it, is doing."""

    STARTING = "starting"
    UP = "up"
    NO_DRIVER = "no_driver"
    """NVML can't be loaded or initialized: no driver here, or it is being replaced."""
    NO_GPU = "no_gpu"
    """The driver knows no GPU."""
    LOST = "lost"
    """A GPU has fallen off the bus, or is not listed any more."""
    HUNG = "hung"
    """A driver call has not returned for long."""
    ERROR = "error"
    """Every call fails, for a reason that `detail` names."""


class Method(StrEnum):
    """Where chip-busy seconds come from."""

    SAMPLES = "samples"
    """The driver's sample ring: nothing is missed."""
    POLLING = "polling"
    """The momentary utilization at each cycle: for GPUs without a ring (MIG, vGPU)."""
    NONE = "none"
    """Neither is supported."""


class EnergyUse(StrEnum):
    """What a GPU's energy went into."""

    PROOFS = "proofs"
    """Spans of jobs that were proved."""
    WASTED = "wasted"
    """Spans of jobs that were not."""
    IDLE = "idle"
    """Outside all spans, the chip idle."""
    UNLOGGED = "unlogged"
    """Outside all spans, the chip busy for somebody else."""


class Comparison(StrEnum):
    """How a source's spans take part."""

    WAITING = "waiting"
    """It has not settled anything yet."""
    COMPARED = "compared"
    LAGGING = "lagging"
    """What it has settled is so old that samples no longer wait for it."""
    UNCERTAIN = "uncertain"
    """Its wall-clock times may be off by more than half a sample."""


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """How one source takes part, for people who wonder about its figures."""

    comparison: Comparison
    uncertainty_s: float | None
    """How far off its wall-clock times may be; None before it settled anything."""
    left_out_seconds: float
    """Sampled time, of all GPUs together, that was looked at without it because it lagged or was uncertain."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What identifies a GPU; None where the driver does not tell."""

    uuid: str | None
    model: str | None
    pci_bus_id: str | None
    driver_version: str | None
    index: int | None = None
    """NVML's own number for it when it was last listed."""


@dataclass(frozen=True, slots=True)
class SpanBusy:
    """Chip against log, for one source on one GPU."""

    busy_seconds: float
    """Chip busy within the source's spans."""
    sampled_seconds: float
    """Span time that samples cover. Occupancy is the quotient."""
    rolling_occupancy: float | None
    """Occupancy over the last ten minutes; None if nothing was sampled in a span in that time."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Momentary values of one cycle; None where not supported or not readable."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    processes: int | None = None
    pcie_bytes_per_second: Mapping[str, float] | None = None
    """By direction, `rx` and `tx`; None unless switched on."""


@dataclass(frozen=True, slots=True)
class GpuChip:
    """One GPU. Where `state` is not `UP`, nothing but `state`, `detail` and `info` is to be shown."""

    state: NvmlState
    detail: str
    """One line for a person; empty while all is well."""
    info: DeviceInfo
    method: Method
    busy_seconds: float
    """Chip-busy seconds since the agent started, integrated from samples."""
    sampled_seconds: float
    """Time that these samples cover: utilization is busy / sampled."""
    observed_seconds: float
    """Time since the GPU was first seen: coverage is sampled / observed."""
    spans: Mapping[str, SpanBusy]
    """By source, for the sources that use this GPU."""
    unlogged_busy_seconds: float | None
    """Chip busy outside the spans of all sources; None while nothing could be set against them."""
    energy_joules: Mapping[EnergyUse, float] | None
    """All uses present; None where power can't be read. Energy of spans counts once their job is decided."""
    readings: Readings
    throttled_seconds: Mapping[str, float]
    """By reason, all reasons that the driver supports."""
    xid_errors: int | None
    xid_last_unix_s: float | None
    ecc_errors: Mapping[str, int] | None
    """Uncorrected and corrected errors since the driver was loaded; None where ECC is off or not supported."""


@dataclass(frozen=True, slots=True)
class NvmlView:
    """Everything that NVML has told."""

    state: NvmlState
    detail: str
    gpus: Mapping[str, GpuChip]
    """By GPU label: the daemon's ordinal where it is known, else NVML's index."""
    call_seconds: Mapping[str, tuple[int, float]]
    """Count and sum of the time of each NVML function called."""
    errors: Mapping[tuple[str, str], int]
    """By function and error name."""
    comparisons: Mapping[str, SourceComparison]
    """How each source's spans take part in what is set against the chips."""
    proof_energy_joules: Mapping[tuple[str, str], Histogram]
    """By source and proof kind; its sum is in joules."""
    heartbeat_monotonic_s: float
    """When the sampling thread published this."""
