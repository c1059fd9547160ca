"""Samples every GPU that NVML lists, again and again, and publishes what was found as one frozen view.

Reading a ring takes 1.4 ms, everything else some µs, and what is made of it 0.8 ms a cycle. Power's ring holds 2.4 s,
so that a cycle every 2 s loses nothing; utilization's holds 14 s and is read every other cycle. That makes about 0.15 %
of a core for each GPU, if the driver spends all of its time on the CPU.

Faults are found out call by call. What one call can't tell is absent. A GPU that is lost, or of which nothing can be
read, is not up; and while any GPU is not up, or there is none, or no driver, NVML is initialized again, less and less
often. A GPU keeps its label and its counters as long as the process lives: it is known by its UUID.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

from cuzk_agent.clock import Clock
from cuzk_agent.gpu.nvml import THROTTLE_REASONS, CallError, Device, Nvml, same_gpu
from cuzk_agent.gpu.record import Heard, Recorder
from cuzk_agent.gpu.samples import BusyMeter, BusySample, PowerMeter, PowerSample
from cuzk_agent.gpu.state import (
    DeviceInfo,
    EnergyUse,
    GpuChip,
    Method,
    NvmlState,
    NvmlView,
    Readings,
    SourceComparison,
    SpanBusy,
)
from cuzk_agent.timeline.state import Histogram

logger = logging.getLogger(__name__)

CYCLE_S: Final = 2.0
HUNG_S: Final = 10.0
"""Without a sign of life for so long, the sampling thread is held by a call."""

_BUSY_EVERY = 2
"""Cycles from one read of the utilization ring to the next."""
_RARELY_S = 60.0
"""How often ECC errors, processes, MIG and the number of GPUs are looked at."""
_RETRY_FIRST_S = 2.0
_RETRY_MAX_S = 60.0
_RETRY_MAX_BESIDE_S = 300.0
"""While other GPUs work: a new start disturbs them."""
_WELL_S = 60.0
"""After so long without trouble, the next trouble is a new one."""
_XID_MAX = 100
"""XID errors taken in a cycle; more of them wait for the next."""

T = TypeVar("T")


class Account(Protocol):
    """What is made of the samples: set against the spans of the logs, and as energy. Called by the sampling thread."""

    def devices(self, gpus: Iterable[str]) -> None:
        """These GPUs exist, by label."""

    def busy(self, gpu: str, sample: BusySample) -> None:
        """The next stretch of a GPU's chip-busy time."""

    def power(self, gpu: str, sample: PowerSample) -> None:
        """The next stretch of a GPU's power."""

    def advance(self) -> None:
        """All samples of this cycle have been told."""

    def spans(self, gpu: str) -> Mapping[str, SpanBusy]:
        """Chip against log, by source."""
        ...

    def unlogged_busy_seconds(self, gpu: str) -> float | None:
        """Chip busy outside all spans."""
        ...

    def energy_joules(self, gpu: str) -> Mapping[EnergyUse, float] | None:
        """What the energy went into."""
        ...

    def proof_energy_joules(self) -> Mapping[tuple[str, str], Histogram]:
        """By source and proof kind."""
        ...

    def sources(self) -> Mapping[str, SourceComparison]:
        """How each source takes part."""
        ...


class NoAccount:
    """There is nothing to set the samples against."""

    def devices(self, gpus: Iterable[str]) -> None:
        """Ignored."""

    def busy(self, gpu: str, sample: BusySample) -> None:
        """Ignored."""

    def power(self, gpu: str, sample: PowerSample) -> None:
        """Ignored."""

    def advance(self) -> None:
        """Nothing to do."""

    def spans(self, gpu: str) -> Mapping[str, SpanBusy]:  # noqa: ARG002
        """No sources."""
        return {}

    def unlogged_busy_seconds(self, gpu: str) -> float | None:  # noqa: ARG002
        """Unknown."""
        return None

    def energy_joules(self, gpu: str) -> Mapping[EnergyUse, float] | None:  # noqa: ARG002
        """Unknown."""
        return None

    def proof_energy_joules(self) -> Mapping[tuple[str, str], Histogram]:
        """No proofs."""
        return {}

    def sources(self) -> Mapping[str, SourceComparison]:
        """No sources."""
        return {}


@dataclass(frozen=True, slots=True)
class _Listed:
    """A GPU as the driver lists it."""

    key: str
    handle: Any
    info: DeviceInfo


@dataclass(slots=True)
class _Gpu:
    """What is known of one GPU."""

    label: str
    device: Device
    info: DeviceInfo
    busy: BusyMeter
    power: PowerMeter
    first_seen_s: float
    state: NvmlState = NvmlState.STARTING
    detail: str = ""
    askable: bool = True
    """Its handle is good."""
    readings: Readings = field(default_factory=Readings)
    busy_seconds: float = 0.0
    sampled_seconds: float = 0.0
    throttled_seconds: dict[str, float] = field(default_factory=dict)
    throttle_read_s: float | None = None
    rare_due_s: float = 0.0
    mig: bool = False
    ecc_errors: dict[str, int] | None = None
    xid_watched: bool = False
    xid_errors: int = 0
    xid_last_unix_s: float | None = None

    def fell(self, state: NvmlState, detail: str) -> None:
        """The GPU is not up any more. One of which only the calls fail is still asked."""
        self.askable = state is NvmlState.ERROR
        if (state, detail) != (self.state, self.detail):
            logger.warning("GPU %s: %s (%s)", self.label, state, detail)
        self.state = state
        self.detail = detail
        self.readings = Readings()
        self.throttle_read_s = None

    def rose(self, error: CallError | None) -> None:
        """The GPU can be read, at least in part."""
        if self.state is not NvmlState.UP:
            logger.info("GPU %s: up", self.label)
        self.state = NvmlState.UP
        self.detail = str(error or ("MIG is on: the driver tells little of the GPU as a whole" if self.mig else ""))


class Sampler:
    """Samples the GPUs. One thread calls `cycle` or `run`; others may read `view` and `calling` at any time."""

    def __init__(
        self,
        clock: Clock,
        *,
        lib: Any = None,
        labels: Mapping[str, str] | None = None,
        account: Account | None = None,
        recorder: Recorder | None = None,
        cycle_s: float = CYCLE_S,
        pcie: bool = False,
    ) -> None:
        """`lib`: what to use as `pynvml`, itself if not given. `labels`: for each of the daemon's ordinals the GPU that
        it means, as UUID (its beginning will do), PCI bus id or NVML index; GPUs not named there are labelled with
        their NVML index. `recorder`: keeps what is read, until `run` ends. `pcie`: read PCIe traffic too, which takes
        40 ms of each cycle and GPU."""
        self._clock = clock
        self._nvml = Nvml(clock, lib)
        self._labels = dict(labels or {})
        self._account: Account = account or NoAccount()
        self._recorder = recorder
        self._cycle_s = cycle_s
        self._pcie = pcie
        self._gpus: dict[str, _Gpu] = {}
        """By UUID."""
        self._initialized = False
        self._listed = 0
        self._state = NvmlState.STARTING
        self._detail = ""
        self._cycles = 0
        self._retry_s = clock.monotonic_s()
        self._retry_delay_s = _RETRY_FIRST_S
        self._well_since_s: float | None = None
        self._count_due_s = 0.0
        self.view = self._published()

    @property
    def calling(self) -> str | None:
        """The NVML function that is being called now."""
        return self._nvml.calling

    def run(self, stop: Callable[[], bool], wait: Callable[[float], object]) -> None:
        """Cycles until told to stop. `wait` waits for so many seconds, or until it is time to stop."""
        due_s = self._clock.monotonic_s()
        try:
            while not stop():
                self.cycle()
                now_s = self._clock.monotonic_s()
                # A late cycle is not made up for by a hasty one: the rings lose nothing by it.
                due_s = max(due_s + self._cycle_s, now_s)
                wait(due_s - now_s)
        finally:
            if self._recorder is not None:
                self._recorder.close()
            self.close()

    def close(self) -> None:
        """Let go of the driver."""
        if self._initialized:
            self._initialized = False
            try:
                self._nvml.shutdown()
            except CallError as error:
                logger.info("%s", error)

    def cycle(self) -> None:
        """Read everything that is due, and publish."""
        try:
            self._connect_if_needed()
            if self._initialized:
                for gpu in self._gpus.values():
                    if gpu.askable:
                        self._sample(gpu)
                self._take_xids()
                self._look_for_changes()
        except CallError as error:
            self._driver_gone(error)
        self._account.advance()
        self._judge()
        self._cycles += 1
        self.view = self._published()

    # --- the driver --------------------------------------------------------------------------------------------

    def _connect_if_needed(self) -> None:
        """Initialize NVML, first of all and whenever something is wrong and enough time has gone by."""
        now_s = self._clock.monotonic_s()
        if self._state is NvmlState.UP and all(gpu.state is NvmlState.UP for gpu in self._gpus.values()):
            return
        if now_s < self._retry_s:
            return
        self._retry_s = now_s + self._retry_delay_s
        working = any(gpu.state is NvmlState.UP for gpu in self._gpus.values())
        self._retry_delay_s = min(self._retry_delay_s * 2, _RETRY_MAX_BESIDE_S if working else _RETRY_MAX_S)
        self.close()
        self._nvml.init()
        self._initialized = True
        self._discover(self._nvml.driver_version())
        self._count_due_s = now_s + _RARELY_S
        self._state = NvmlState.UP

    def _driver_gone(self, error: CallError) -> None:
        if self._state is not NvmlState.NO_DRIVER:
            logger.warning("NVML can't be used: %s", error)
        self._state = NvmlState.NO_DRIVER
        self._detail = str(error)
        if error.error == "LibRmVersionMismatch":
            self._detail += " (another version of the driver was installed: restart the agent)"
        for gpu in self._gpus.values():
            gpu.fell(self._state, self._detail)

    def _judge(self) -> None:
        """How NVML as a whole is doing, by how the GPUs are."""
        now_s = self._clock.monotonic_s()
        states = {gpu.state for gpu in self._gpus.values()}
        if self._state is not NvmlState.NO_DRIVER:
            if NvmlState.UP in states:
                self._state, self._detail = NvmlState.UP, ""
            elif self._gpus:
                first = next(iter(self._gpus.values()))
                self._state, self._detail = first.state, f"GPU {first.label}: {first.detail}"
            else:
                self._state, self._detail = NvmlState.NO_GPU, "the driver lists no GPU"
        if states != {NvmlState.UP}:
            self._well_since_s = None
        elif self._well_since_s is None:
            self._well_since_s = now_s
        elif now_s - self._well_since_s >= _WELL_S:
            self._retry_delay_s = _RETRY_FIRST_S

    # --- finding GPUs ------------------------------------------------------------------------------------------

    def _discover(self, driver_version: str | None) -> None:
        self._listed = self._nvml.count()
        listed = [one for index in range(self._listed) if (one := self._identify(index, driver_version)) is not None]
        labels = self._choose_labels(listed)
        now_s = self._clock.monotonic_s()
        for one in listed:
            device = Device(one.key, one.handle)
            gpu = self._gpus.get(one.key)
            if gpu is None:
                clocks = (self._clock.unix_s(), now_s, 2 * _BUSY_EVERY * self._cycle_s)
                gpu = _Gpu(labels[one.key], device, one.info, BusyMeter(*clocks), PowerMeter(*clocks), now_s)
                self._gpus[one.key] = gpu
                logger.info("GPU %s: %s, %s, %s", gpu.label, one.info.model, one.info.uuid, one.info.pci_bus_id)
            gpu.device = device
            gpu.info = one.info
            gpu.rare_due_s = now_s
            gpu.askable = True
            self._watch(gpu)
        for key in self._gpus.keys() - {one.key for one in listed}:
            self._gpus[key].fell(NvmlState.LOST, "the driver does not list it any more")
        gpus = [gpu.label for gpu in self._gpus.values()]
        self._account.devices(gpus)
        if self._recorder is not None:
            self._recorder.devices(gpus)

    def _identify(self, index: int, driver_version: str | None) -> _Listed | None:
        try:
            handle = self._nvml.handle(index)
            uuid, pci_bus_id = self._nvml.uuid(handle), self._nvml.pci_bus_id(handle)
            info = DeviceInfo(uuid, self._nvml.model(handle), pci_bus_id, driver_version, index)
        except CallError as error:
            if error.driver_gone:
                raise
            # A GPU that can't say who it is has no counters to add to. One that is known will be missed.
            logger.warning("the GPU with NVML's index %d can't be used: %s", index, error)
            return None
        known = (key for key, gpu in self._gpus.items() if pci_bus_id is not None and gpu.info.pci_bus_id == pci_bus_id)
        return _Listed(uuid or next(known, None) or pci_bus_id or f"index {index}", handle, info)

    def _choose_labels(self, listed: Iterable[_Listed]) -> dict[str, str]:
        """A label for each new GPU: the daemon's ordinal, or else NVML's index. Once given, it stays."""
        chosen = {key: gpu.label for key, gpu in self._gpus.items()}
        new = [one for one in listed if one.key not in chosen]
        for label, named in self._labels.items():
            meant = next((one for one in new if is_named(named, one.info)), None)
            if meant is not None and meant.key not in chosen and label not in chosen.values():
                chosen[meant.key] = label
        taken = {*chosen.values(), *self._labels}
        for one in new:
            if one.key not in chosen:
                # The daemon means another GPU by this number, or it was one's that is lost.
                label = str(one.info.index)
                while label in taken:
                    label = f"nvml{label}"
                chosen[one.key] = label
                taken.add(label)
        return chosen

    def _look_for_changes(self) -> None:
        """Another number of GPUs is a reason for a new start."""
        now_s = self._clock.monotonic_s()
        if now_s < self._count_due_s:
            return
        self._count_due_s = now_s + _RARELY_S
        if self._nvml.count() != self._listed:
            logger.info("the number of GPUs has changed")
            self._discover(self._nvml.driver_version())

    # --- one GPU -----------------------------------------------------------------------------------------------

    def _sample(self, gpu: _Gpu) -> None:
        """One cycle of one GPU. Raises if the driver is gone."""
        reading = _Reading()
        try:
            self._sample_busy(gpu, reading)
            self._sample_power(gpu, reading)
            self._read_rest(gpu, reading)
        except CallError as error:
            self._record(gpu, reading, Readings())
            if error.driver_gone:
                raise
            gpu.fell(NvmlState.LOST, str(error))
            return
        self._record(gpu, reading, gpu.readings)
        if reading.error is not None and not reading.succeeded:
            gpu.fell(NvmlState.ERROR, str(reading.error))
        else:
            gpu.rose(reading.error)

    def _sample_busy(self, gpu: _Gpu, reading: _Reading) -> None:
        if self._cycles % _BUSY_EVERY == 0 or not gpu.sampled_seconds:
            ring, known = reading.of(self._nvml.ring, gpu.device, "NVML_GPU_UTILIZATION_SAMPLES")
            now = self._now()
            # A ring that can't be read is as good as an empty one, for as long.
            self._tell_busy(gpu, gpu.busy.ring(ring if known else [], *now))
            reading.heard = Heard(*now, gpu.busy.reader.fresh if gpu.busy.ring_supported else None, None)
        elif gpu.busy.method is Method.SAMPLES:
            return
        if gpu.busy.wants_poll:
            percent, known = reading.of(self._nvml.utilization_percent, gpu.device)
            if known:
                now = self._now()
                self._tell_busy(gpu, gpu.busy.poll(percent, *now))
                reading.heard = Heard(*now, reading.heard.samples if reading.heard else None, percent)

    def _record(self, gpu: _Gpu, reading: _Reading, readings: Readings) -> None:
        if self._recorder is not None and reading.heard is not None:
            self._recorder.record(gpu.label, reading.heard, readings)

    def _tell_busy(self, gpu: _Gpu, samples: Iterable[BusySample]) -> None:
        for sample in samples:
            seconds = sample.end_unix_s - sample.start_unix_s
            gpu.sampled_seconds += seconds
            gpu.busy_seconds += seconds * sample.busy_fraction
            self._account.busy(gpu.label, sample)

    def _sample_power(self, gpu: _Gpu, reading: _Reading) -> None:
        ring, known = reading.of(self._nvml.ring, gpu.device, "NVML_TOTAL_POWER_SAMPLES")
        samples = gpu.power.ring(ring if known else [], *self._now())
        watts, _ = reading.of(self._nvml.power_watts, gpu.device)
        if watts is not None:
            samples.extend(gpu.power.poll(watts, *self._now()))
        for sample in samples:
            self._account.power(gpu.label, sample)
        gpu.readings = Readings(power_watts=watts, processes=gpu.readings.processes)

    def _read_rest(self, gpu: _Gpu, reading: _Reading) -> None:
        memory, _ = reading.of(self._nvml.memory_bytes, gpu.device)
        temperature, _ = reading.of(self._nvml.temperature_celsius, gpu.device)
        clock, _ = reading.of(self._nvml.sm_clock_hertz, gpu.device)
        pcie = {}
        if self._pcie:
            for direction in ("rx", "tx"):
                traffic, _ = reading.of(self._nvml.pcie_bytes_per_second, gpu.device, direction)
                if traffic is not None:
                    pcie[direction] = traffic
        self._add_throttling(gpu, reading)
        gpu.readings = replace(
            gpu.readings,
            memory_used_bytes=memory[0] if memory else None,
            memory_total_bytes=memory[1] if memory else None,
            temperature_celsius=temperature,
            sm_clock_hertz=clock,
            pcie_bytes_per_second=pcie or None,
        )
        now_s = self._clock.monotonic_s()
        if now_s >= gpu.rare_due_s:
            gpu.rare_due_s = now_s + _RARELY_S
            self._read_rarely(gpu, reading)

    def _add_throttling(self, gpu: _Gpu, reading: _Reading) -> None:
        """What holds the clocks down now is taken to have done so since the last cycle."""
        reasons, _ = reading.of(self._nvml.throttle_reasons, gpu.device)
        if reasons is None:
            gpu.throttle_read_s = None
            return
        now_s = self._clock.monotonic_s()
        before_s = now_s if gpu.throttle_read_s is None else gpu.throttle_read_s
        gpu.throttle_read_s = now_s
        for bit, reason in THROTTLE_REASONS.items():
            if reasons & bit and reason in gpu.throttled_seconds:
                gpu.throttled_seconds[reason] += min(now_s - before_s, 2 * self._cycle_s)

    def _read_rarely(self, gpu: _Gpu, reading: _Reading) -> None:
        supported, _ = reading.of(self._nvml.throttle_reasons_supported, gpu.device)
        for bit, reason in THROTTLE_REASONS.items():
            if (supported or 0) & bit:
                gpu.throttled_seconds.setdefault(reason, 0.0)
        errors = {}
        for kind in ("corrected", "uncorrected"):
            count, _ = reading.of(self._nvml.ecc_errors, gpu.device, kind)
            if count is not None:
                errors[kind] = count
        gpu.ecc_errors = errors or None
        processes, _ = reading.of(self._nvml.processes, gpu.device)
        gpu.readings = replace(gpu.readings, processes=processes)
        mig, _ = reading.of(self._nvml.mig, gpu.device)
        gpu.mig = bool(mig)

    def _now(self) -> tuple[float, float]:
        return self._clock.unix_s(), self._clock.monotonic_s()

    # --- XID errors --------------------------------------------------------------------------------------------

    def _watch(self, gpu: _Gpu) -> None:
        try:
            gpu.xid_watched = self._nvml.watch_xid(gpu.device)
        except CallError as error:
            if error.driver_gone:
                raise
            gpu.fell(NvmlState.LOST, str(error))

    def _take_xids(self) -> None:
        for _ in range(_XID_MAX):
            try:
                event = self._nvml.next_xid()
            except CallError as error:
                if error.driver_gone:
                    raise
                return
            if event is None:
                return
            handle, xid = event
            for gpu in self._gpus.values():
                if same_gpu(handle, gpu.device.handle):
                    logger.warning("GPU %s: XID error %d", gpu.label, xid)
                    gpu.xid_errors += 1
                    gpu.xid_last_unix_s = self._clock.unix_s()

    # --- what is shown -----------------------------------------------------------------------------------------

    def _published(self) -> NvmlView:
        now_s = self._clock.monotonic_s()
        return NvmlView(
            state=self._state,
            detail=self._detail,
            gpus={gpu.label: self._chip(gpu, now_s) for gpu in self._gpus.values()},
            call_seconds=dict(self._nvml.call_seconds),
            errors=self._nvml.errors | self._sample_faults(),
            comparisons=self._account.sources(),
            proof_energy_joules=self._account.proof_energy_joules(),
            heartbeat_monotonic_s=now_s,
        )

    def _sample_faults(self) -> dict[tuple[str, str], int]:
        """What was wrong with samples, as errors of the call that gave them."""
        readers = [meter.reader for gpu in self._gpus.values() for meter in (gpu.busy, gpu.power)]
        counts = {
            "UnusableSample": sum(reader.dropped for reader in readers),
            "TimeWentBack": sum(reader.resyncs for reader in readers),
        }
        return {("nvmlDeviceGetSamples", error): count for error, count in counts.items() if count}

    def _chip(self, gpu: _Gpu, now_s: float) -> GpuChip:
        return GpuChip(
            state=gpu.state,
            detail=gpu.detail,
            info=gpu.info,
            method=gpu.busy.method,
            busy_seconds=gpu.busy_seconds,
            sampled_seconds=gpu.sampled_seconds,
            observed_seconds=now_s - gpu.first_seen_s,
            spans=self._account.spans(gpu.label),
            unlogged_busy_seconds=self._account.unlogged_busy_seconds(gpu.label),
            energy_joules=self._account.energy_joules(gpu.label),
            readings=gpu.readings,
            throttled_seconds=dict(gpu.throttled_seconds),
            xid_errors=gpu.xid_errors if gpu.xid_watched else None,
            xid_last_unix_s=gpu.xid_last_unix_s,
            ecc_errors=gpu.ecc_errors,
        )


class _Reading:
    """The calls of one cycle of one GPU: one that fails leaves the others alone."""

    def __init__(self) -> None:
        self.succeeded = False
        self.error: CallError | None = None
        self.heard: Heard | None = None

    def of(self, call: Callable[..., T | None], *args: object) -> tuple[T | None, bool]:
        """What a call returned, None if it is not supported; and whether it returned. Raises if the GPU is lost."""
        try:
            value = call(*args)
        except CallError as error:
            if error.gpu_lost or error.driver_gone:
                raise
            self.error = error
            return None, False
        self.succeeded |= value is not None
        return value, True


def is_named(named: str, info: DeviceInfo) -> bool:
    """Whether a UUID, or its beginning, a PCI bus id or an NVML index means this GPU."""
    named = named.lower()
    if named.isdecimal():
        return int(named) == info.index
    if named.startswith("gpu-"):
        return info.uuid is not None and info.uuid.lower().startswith(named)
    return info.pci_bus_id is not None and ":" in named and _pci(named) == _pci(info.pci_bus_id.lower())


def _pci(bus_id: str) -> str:
    """Without the leading zeros of the domain, which is written with four digits, with eight, or not at all."""
    *domain, bus, device = bus_id.rsplit(":", 2)
    return f"{''.join(domain).lstrip('0')}:{bus}:{device}"


def as_seen(view: NvmlView, now_monotonic_s: float, calling: str | None) -> NvmlView:
    """The view as it may be shown now: nothing in it holds any more once the sampling thread gives no sign of life."""
    silent_s = now_monotonic_s - view.heartbeat_monotonic_s
    if silent_s <= HUNG_S:
        return view
    detail = f"{calling or 'the sampling thread'} has not returned for {silent_s:.0f} s"
    return replace(
        view,
        state=NvmlState.HUNG,
        detail=detail,
        gpus={
            label: replace(chip, state=NvmlState.HUNG, detail=detail, readings=Readings())
            for label, chip in view.gpus.items()
        },
    )
