"""State → metric families → one page for Prometheus, as text or OpenMetrics.

Everything shown is read off the state; nothing is computed here that belongs to the pipeline. What could not be
measured is absent, never 0. What is known to exist is there from the start, at 0: `increase()` can't see a counter that
is born at 1.
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar as MetricExemplar

from cuzk_agent.gpu.state import Comparison, GpuChip, Method, NvmlState, NvmlView
from cuzk_agent.log.source import FollowState, ReadStats
from cuzk_agent.log.waker import Method as WakerMethod
from cuzk_agent.log.waker import WakerState
from cuzk_agent.snapshot import Keeping
from cuzk_agent.timeline.state import Exemplar, GpuState, Histogram, TimelineState
from cuzk_agent.windows import Rolling

ENGINE_SETTINGS = ("num_gpus", "gpu_workers_per_device", "total_workers", "pipeline_enabled", "rayon_threads")
"""The labels of `cuzk_engine_info`; a setting that isn't known is an empty string."""
QUANTILES = (0.5, 0.9, 0.99)
"""What the rolling summaries show."""

_EXEMPLAR_LABEL = "job_id"
# OpenMetrics gives an exemplar's labels 128 characters, names included; Prometheus drops the whole page beyond that.
_EXEMPLAR_ROOM = 128 - len(_EXEMPLAR_LABEL)
_SETTING_ROOM = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceView:
    """What one source shows at one moment."""

    timeline: TimelineState
    read: ReadStats
    delay_s: float | None = None
    """How long after it happened the last event was read; None before one was seen as it came."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """Everything that a page is made of."""

    sources: Mapping[str, SourceView]
    """By the name of the followed log."""
    version: str
    python_version: str
    rolling_window_s: float = 600.0
    """The window of the rolling summaries."""
    nvml: NvmlView | None = None
    """What NVML tells; None until it has been looked at."""
    keeping: Keeping | None = None
    """How the keeping of the state goes; None if it isn't kept."""
    waker: WakerState | None = None
    """What wakes the thread that reads the logs."""


class _Family(Metric):
    """A metric family that can't be given what a page must not hold: other than finite numbers, unprintable labels."""

    def __init__(self, kind: str, name: str, help_text: str, *labels: str) -> None:
        suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
        super().__init__(name.removesuffix(suffix), help_text, kind)
        self._sample_name = name
        self._label_names = labels

    def add(self, value: float | None, *labels: str) -> None:
        """One sample; none where nothing was measured."""
        self._put("", self._labels(labels), value)

    def add_histogram(self, histogram: Histogram, *labels: str) -> None:
        """All series of one histogram."""
        if not math.isfinite(histogram.sum_seconds):
            return
        named = self._labels(labels)
        for bound, count, exemplar in zip(
            (*histogram.bounds, math.inf), accumulate(histogram.counts), histogram.exemplars, strict=True
        ):
            self._put("_bucket", {**named, "le": _number(bound)}, count, _exemplar(exemplar))
        self._put("_count", named, sum(histogram.counts))
        self._put("_sum", named, histogram.sum_seconds)

    def add_summary(self, count: int, sum_seconds: float, *labels: str) -> None:
        """A summary without quantiles."""
        named = self._labels(labels)
        self._put("_count", named, count)
        self._put("_sum", named, sum_seconds)

    def add_rolling(self, rolling: Rolling, window_s: float, *labels: str) -> None:
        """Quantiles of the window, absent while it is empty, with count and sum of all time.

        Count and sum of the window itself would fall, and Prometheus takes every fall for a restart.
        """
        named = self._labels(labels)
        for q in QUANTILES:
            self._put("", {**named, "quantile": _number(q)}, rolling.quantile(q, window_s))
        self._put("_count", named, rolling.total_count)
        self._put("_sum", named, rolling.total_sum_seconds)

    def _labels(self, values: tuple[str, ...]) -> dict[str, str]:
        return {name: _printable(value) for name, value in zip(self._label_names, values, strict=True)}

    def _put(
        self, suffix: str, labels: dict[str, str], value: float | None, exemplar: MetricExemplar | None = None
    ) -> None:
        if value is not None and math.isfinite(value):
            self.add_sample(self._sample_name + suffix, labels, value, exemplar=exemplar)


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


def _printable(text: str) -> str:
    # A control character spoils a page for people, a lone surrogate can't even be encoded.
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _exemplar(exemplar: Exemplar | None) -> MetricExemplar | None:
    """What may be shown of an exemplar, if anything."""
    if exemplar is None or not exemplar.job_id or not math.isfinite(exemplar.seconds):
        return None
    at_s = exemplar.unix_seconds
    # A double quote may be escaped here, but the parser in prometheus-client does not know that.
    job_id = _printable(exemplar.job_id[:_EXEMPLAR_ROOM]).replace('"', "'")
    return MetricExemplar(
        {_EXEMPLAR_LABEL: job_id},
        exemplar.seconds,
        round(at_s, 3) if at_s is not None and math.isfinite(at_s) and at_s > 0 else None,
    )


def _timelines(state: AgentState) -> Iterator[tuple[str, TimelineState]]:
    return ((source, view.timeline) for source, view in state.sources.items())


def _gpus_of(state: AgentState) -> Iterator[tuple[str, str, GpuState]]:
    return (
        (source, gpu, timeline.gpus[gpu]) for source, timeline in _timelines(state) for gpu in sorted(timeline.gpus)
    )


def _engine(state: AgentState) -> Iterator[Metric]:
    """The daemon behind each log, and the log's own clock."""
    events = _Family("counter", "cuzk_timeline_events_total", "TIMELINE lines read, by event.", "source", "event")
    evidence = _Family(
        "gauge",
        "cuzk_agent_timeline_evidence",
        "1 if the log tells this kind of thing, 0 if what rests on it can't be known.",
        "source",
        "evidence",
    )
    info = _Family(
        "info",
        "cuzk_engine_info",
        "Settings of the engine as its start-up lines tell them, empty where unknown.",
        "source",
        *ENGINE_SETTINGS,
    )
    restarts = _Family(
        "counter", "cuzk_engine_restarts_total", "Engines that began after the first one seen.", "source"
    )
    running = _Family(
        "gauge", "cuzk_engine_running", "1 while an engine's lines are being read and it has not ended.", "source"
    )
    stalled = _Family(
        "gauge",
        "cuzk_engine_stalled_seconds",
        "Seconds since the log's last line if work was in flight then, else 0.",
        "source",
    )
    last_event = _Family(
        "gauge",
        "cuzk_timeline_last_event_timestamp_seconds",
        "When the last TIMELINE event happened, in seconds since 1970.",
        "source",
    )
    started = _Family(
        "gauge", "cuzk_engine_start_timestamp_seconds", "When the engine started, in seconds since 1970.", "source"
    )
    uncertainty = _Family(
        "gauge",
        "cuzk_clock_anchor_uncertainty_seconds",
        "How far off the wall-clock time of the engine's start may be, in seconds.",
        "source",
    )
    trouble = _Family(
        "counter",
        "cuzk_trouble_total",
        "Faults that the log reports, by kind, with the GPU where one can be named.",
        "source",
        "kind",
        "gpu",
    )
    srs = _Family(
        "summary", "cuzk_srs_load_seconds", "Time to load a circuit's parameters (SRS) from disk, in seconds.", "source"
    )
    loading = _Family(
        "gauge", "cuzk_srs_loads_in_progress", "Parameters (SRS) that are being loaded from disk.", "source"
    )
    for source, timeline in _timelines(state):
        for event, count in timeline.events.items():
            events.add(count, source, event)
        for kind, seen in timeline.evidence.items():
            evidence.add(seen, source, kind)
        info.add(1, source, *(timeline.engine_settings.get(key, "")[:_SETTING_ROOM] for key in ENGINE_SETTINGS))
        restarts.add(timeline.engine_restarts, source)
        running.add(timeline.engine_running, source)
        stalled.add(timeline.stalled_seconds, source)
        last_event.add(timeline.last_event_unix_seconds, source)
        started.add(timeline.engine_start_unix_seconds, source)
        uncertainty.add(timeline.anchor_uncertainty_seconds, source)
        for (kind, gpu), count in timeline.trouble.items():
            trouble.add(count, source, kind, gpu)
        srs.add_summary(*timeline.srs_load_seconds, source)
        loading.add(timeline.srs_loading, source)
    yield from (events, evidence, info, restarts, running, stalled, last_event, started, uncertainty, trouble)
    yield from (srs, loading)


def _units(state: AgentState) -> Iterator[Metric]:
    """Partitions on their way to a proof."""
    synth = _Family("histogram", "cuzk_synth_seconds", "Time of one synthesis, in seconds.", "source", "proof_kind")
    rolling = _Family(
        "summary",
        "cuzk_synth_rolling_seconds",
        "Time of one synthesis, in seconds: quantiles over a sliding window, count and sum since the start.",
        "source",
    )
    active = _Family(
        "counter", "cuzk_synth_active_seconds_total", "Seconds in which at least one unit was in synthesis.", "source"
    )
    ready_wait = _Family(
        "histogram", "cuzk_ready_wait_seconds", "Time from being queued for a GPU to pickup, in seconds.", "source"
    )
    handoff = _Family(
        "histogram", "cuzk_handoff_seconds", "Time from pickup by a GPU worker to GPU_START, in seconds.", "source"
    )
    span = _Family(
        "histogram",
        "cuzk_gpu_span_seconds",
        "Time from GPU_START to GPU_END of one unit, in seconds.",
        "source",
        "proof_kind",
    )
    phase = _Family(
        "summary",
        "cuzk_kernel_phase_seconds",
        "Time of each phase of a proving call as the C++ prover logs it, in seconds.",
        "source",
        "phase",
    )
    in_flight = _Family(
        "gauge", "cuzk_partitions_in_flight", "Units (partitions or whole proofs) in each stage.", "source", "stage"
    )
    oldest = _Family(
        "gauge",
        "cuzk_partition_oldest_age_seconds",
        "How long the oldest unit of a stage has been in it, in seconds.",
        "source",
        "stage",
    )
    outcomes = _Family(
        "counter", "cuzk_partition_outcomes_total", "Units that ended, by how they did.", "source", "outcome"
    )
    for source, timeline in _timelines(state):
        for kind, histogram in timeline.synth_seconds.items():
            synth.add_histogram(histogram, source, kind)
        rolling.add_rolling(timeline.synth_rolling, state.rolling_window_s, source)
        active.add(timeline.synth_active_seconds, source)
        ready_wait.add_histogram(timeline.ready_wait_seconds, source)
        handoff.add_histogram(timeline.handoff_seconds, source)
        for kind, histogram in timeline.span_seconds.items():
            span.add_histogram(histogram, source, kind)
        for name, (count, seconds) in timeline.kernel_phase_seconds.items():
            phase.add_summary(count, seconds, source, name)
        for stage, count in timeline.in_flight.items():
            in_flight.add(count, source, stage)
        for stage, seconds in timeline.oldest_age_seconds.items():
            oldest.add(seconds, source, stage)
        for outcome, count in timeline.unit_outcomes.items():
            outcomes.add(count, source, outcome)
    yield from (synth, rolling, active, ready_wait, handoff, span, phase, in_flight, oldest, outcomes)


def _gpus(state: AgentState) -> Iterator[Metric]:
    """What each GPU did with its time, as far as the log knows."""
    spans = _Family(
        "counter", "cuzk_gpu_spans_total", "Spans (GPU_START to GPU_END of one unit) on the GPU.", "source", "gpu"
    )
    busy = _Family(
        "counter",
        "cuzk_gpu_logged_busy_seconds_total",
        "Seconds in which at least one span was open on the GPU.",
        "source",
        "gpu",
    )
    idle = _Family(
        "counter",
        "cuzk_gpu_idle_seconds_total",
        "Seconds in which no span was open on the GPU, by cause; advances while the GPU idles.",
        "source",
        "gpu",
        "cause",
    )
    wasted = _Family(
        "counter",
        "cuzk_gpu_wasted_seconds_total",
        "Seconds of spans whose result nobody got, by reason.",
        "source",
        "gpu",
        "reason",
    )
    kernel = _Family(
        "counter",
        "cuzk_gpu_kernel_seconds_total",
        "Seconds of kernel time on the GPU as the C++ prover logs it.",
        "source",
        "gpu",
    )
    gap = _Family(
        "histogram",
        "cuzk_gpu_gap_seconds",
        "Length of closed gaps between spans, in seconds, by the cause of their largest share.",
        "source",
        "gpu",
        "cause",
    )
    rolling = _Family(
        "summary",
        "cuzk_gpu_gap_rolling_seconds",
        "Length of closed gaps, in seconds: quantiles over a sliding window, count and sum since the start.",
        "source",
        "gpu",
    )
    boundary = _Family(
        "counter",
        "cuzk_gpu_gap_boundary_seconds_total",
        "Seconds of closed gaps, within one job or between two.",
        "source",
        "gpu",
        "boundary",
    )
    open_gap = _Family(
        "gauge",
        "cuzk_gpu_open_gap_seconds",
        "How long the gap that is open now has lasted, in seconds, by cause; 0 while a span is open.",
        "source",
        "gpu",
        "cause",
    )
    for source, gpu, one in _gpus_of(state):
        spans.add(one.spans, source, gpu)
        busy.add(one.busy_seconds, source, gpu)
        for cause, seconds in one.idle_seconds.items():
            idle.add(seconds, source, gpu, cause)
        for reason, seconds in one.wasted_seconds.items():
            wasted.add(seconds, source, gpu, reason)
        kernel.add(one.kernel_seconds, source, gpu)
        for cause, histogram in one.gap_seconds.items():
            gap.add_histogram(histogram, source, gpu, cause)
        rolling.add_rolling(one.gap_rolling, state.rolling_window_s, source, gpu)
        for side, seconds in one.boundary_seconds.items():
            boundary.add(seconds, source, gpu, side)
        for cause, seconds in (one.open_gap_seconds or {}).items():
            open_gap.add(seconds, source, gpu, cause)
    yield from (spans, busy, idle, wasted, kernel, gap, rolling, boundary, open_gap)


def _nvml(state: AgentState) -> Iterator[Metric]:
    """NVML itself: whether it works, and what it costs."""
    up = _Family("gauge", "cuzk_agent_nvml_up", "1 while NVML can be read.")
    states = _Family("gauge", "cuzk_agent_nvml_state", "1 for the state that NVML is in, else 0.", "state")
    calls = _Family("summary", "cuzk_agent_nvml_call_seconds", "Seconds that calls of an NVML function took.", "call")
    errors = _Family(
        "counter", "cuzk_agent_nvml_errors_total", "Calls of an NVML function that failed.", "call", "error"
    )
    compared = _Family(
        "gauge",
        "cuzk_agent_comparison_state",
        "1 for how the source's spans take part in what is set against the chips, else 0.",
        "source",
        "state",
    )
    left_out = _Family(
        "counter",
        "cuzk_agent_uncompared_seconds_total",
        "Seconds of samples that were looked at without the source: it lagged, or its clock is uncertain.",
        "source",
    )
    if (nvml := state.nvml) is not None:
        up.add(nvml.state is NvmlState.UP)
        for nvml_state in NvmlState:
            states.add(nvml.state is nvml_state, nvml_state)
        for call, (count, seconds) in nvml.call_seconds.items():
            calls.add_summary(count, seconds, call)
        for (call, error), count in nvml.errors.items():
            errors.add(count, call, error)
        for source, about in nvml.comparisons.items():
            for comparison in Comparison:
                compared.add(about.comparison is comparison, source, comparison)
            left_out.add(about.left_out_seconds, source)
    yield from (up, states, calls, errors, compared, left_out)


def _chips(state: AgentState) -> Iterator[Metric]:
    """The GPUs as NVML sees them. A GPU that can't be read shows its state and nothing else."""
    info = _Family("info", "cuzk_gpu_info", "A GPU.", "gpu", "uuid", "model", "pci_bus_id", "driver_version")
    up = _Family("gauge", "cuzk_nvml_up", "1 while NVML can read the GPU.", "gpu")
    states = _Family("gauge", "cuzk_nvml_state", "1 for the state that the GPU is in for NVML, else 0.", "gpu", "state")
    methods = _Family(
        "gauge", "cuzk_gpu_chip_method", "1 for where the GPU's chip-busy seconds come from, else 0.", "gpu", "method"
    )
    throttled = _Family(
        "counter",
        "cuzk_gpu_clock_throttled_seconds_total",
        "Seconds in which the GPU's clocks were held down, by reason.",
        "gpu",
        "reason",
    )
    ecc = _Family("counter", "cuzk_gpu_ecc_errors_total", "Memory errors since the driver was loaded.", "gpu", "kind")
    pcie = _Family("gauge", "cuzk_gpu_pcie_bytes_per_second", "Traffic over PCIe.", "gpu", "direction")
    single = [(_Family(kind, name, text, "gpu"), value) for kind, name, text, value in _CHIP_VALUES]
    for gpu, chip in (state.nvml.gpus if state.nvml else {}).items():
        about = chip.info
        identity = (about.uuid, about.model, about.pci_bus_id, about.driver_version)
        info.add(1, gpu, *(text or "" for text in identity))
        up.add(chip.state is NvmlState.UP, gpu)
        for nvml_state in NvmlState:
            states.add(chip.state is nvml_state, gpu, nvml_state)
        if chip.state is not NvmlState.UP:
            continue
        for method in Method:
            methods.add(chip.method is method, gpu, method)
        for reason, seconds in chip.throttled_seconds.items():
            throttled.add(seconds, gpu, reason)
        for kind, count in (chip.ecc_errors or {}).items():
            ecc.add(count, gpu, kind)
        for direction, rate in (chip.readings.pcie_bytes_per_second or {}).items():
            pcie.add(rate, gpu, direction)
        for family, value in single:
            family.add(value(chip), gpu)
    yield from (info, up, states, methods, throttled, ecc, pcie)
    yield from (family for family, _ in single)


_CHIP_VALUES: tuple[tuple[str, str, str, Callable[[GpuChip], float | None]], ...] = (
    (
        "counter",
        "cuzk_gpu_chip_busy_seconds_total",
        "Seconds in which kernels ran on the GPU, integrated from NVML's samples.",
        lambda chip: None if chip.method is Method.NONE else chip.busy_seconds,
    ),
    (
        "counter",
        "cuzk_gpu_chip_sampled_seconds_total",
        "Seconds that the samples of chip busy cover: utilization is busy / sampled.",
        lambda chip: None if chip.method is Method.NONE else chip.sampled_seconds,
    ),
    (
        "counter",
        "cuzk_gpu_chip_observed_seconds_total",
        "Seconds since the GPU was first seen: coverage is sampled / observed.",
        lambda chip: chip.observed_seconds,
    ),
    ("gauge", "cuzk_gpu_memory_used_bytes", "Memory in use.", lambda chip: chip.readings.memory_used_bytes),
    ("gauge", "cuzk_gpu_memory_total_bytes", "Memory that the GPU has.", lambda chip: chip.readings.memory_total_bytes),
    ("gauge", "cuzk_gpu_power_watts", "Power that the GPU draws.", lambda chip: chip.readings.power_watts),
    ("gauge", "cuzk_gpu_temperature_celsius", "Temperature.", lambda chip: chip.readings.temperature_celsius),
    ("gauge", "cuzk_gpu_sm_clock_hertz", "Clock of the multiprocessors.", lambda chip: chip.readings.sm_clock_hertz),
    ("gauge", "cuzk_gpu_compute_processes", "Processes that use the GPU.", lambda chip: chip.readings.processes),
    ("counter", "cuzk_gpu_xid_errors_total", "XID errors since the agent started.", lambda chip: chip.xid_errors),
    (
        "gauge",
        "cuzk_gpu_xid_last_timestamp_seconds",
        "When the last XID error came, in seconds since 1970.",
        lambda chip: chip.xid_last_unix_s,
    ),
)
"""Metrics with one value a GPU: kind, name, help, value."""


def _occupancy(state: AgentState) -> Iterator[Metric]:
    """The chip set beside the log."""
    busy = _Family(
        "counter",
        "cuzk_gpu_span_busy_seconds_total",
        "Seconds in which the chip was busy within the source's spans.",
        "source",
        "gpu",
    )
    sampled = _Family(
        "counter",
        "cuzk_gpu_span_sampled_seconds_total",
        "Seconds of the source's spans that samples cover: span occupancy is busy / sampled.",
        "source",
        "gpu",
    )
    rolling = _Family(
        "gauge", "cuzk_gpu_span_occupancy_rolling_ratio", "Span occupancy over the last ten minutes.", "source", "gpu"
    )
    unlogged = _Family(
        "counter",
        "cuzk_gpu_unlogged_busy_seconds_total",
        "Seconds in which the chip was busy outside the spans of all sources: somebody else is on the GPU.",
        "gpu",
    )
    energy = _Family(
        "counter",
        "cuzk_gpu_energy_joules_total",
        "Energy by what it went into; that of spans once their job is decided.",
        "gpu",
        "use",
    )
    proof = _Family(
        "histogram", "cuzk_proof_energy_joules", "Energy that a proof took on its GPUs.", "source", "proof_kind"
    )
    for gpu, chip in (state.nvml.gpus if state.nvml else {}).items():
        if chip.state is not NvmlState.UP:
            continue
        for source, spans in chip.spans.items():
            busy.add(spans.busy_seconds, source, gpu)
            sampled.add(spans.sampled_seconds, source, gpu)
            rolling.add(spans.rolling_occupancy, source, gpu)
        unlogged.add(chip.unlogged_busy_seconds, gpu)
        for use, joules in (chip.energy_joules or {}).items():
            energy.add(joules, gpu, use)
    for (source, kind), histogram in (state.nvml.proof_energy_joules if state.nvml else {}).items():
        proof.add_histogram(histogram, source, kind)
    yield from (busy, sampled, rolling, unlogged, energy, proof)


def _proofs(state: AgentState) -> Iterator[Metric]:
    """Jobs and the proofs they came to."""
    jobs = _Family("gauge", "cuzk_jobs_open", "Jobs that have not ended.", "source", "proof_kind")
    oldest = _Family(
        "gauge", "cuzk_job_oldest_age_seconds", "Age of the oldest open job, in seconds.", "source", "proof_kind"
    )
    outcomes = _Family(
        "counter", "cuzk_proof_outcomes_total", "Jobs that ended, by how they did.", "source", "proof_kind", "outcome"
    )
    latency = _Family(
        "histogram",
        "cuzk_proof_latency_seconds",
        "Time to a proof, in seconds: from submission where the daemon tells it, else from the job's first event.",
        "source",
        "proof_kind",
        "basis",
    )
    for source, timeline in _timelines(state):
        for kind, count in timeline.jobs_open.items():
            jobs.add(count, source, kind)
        for kind, seconds in timeline.job_oldest_age_seconds.items():
            oldest.add(seconds, source, kind)
        for (kind, outcome), count in timeline.proof_outcomes.items():
            outcomes.add(count, source, kind, outcome)
        for (kind, basis), histogram in timeline.proof_latency_seconds.items():
            latency.add_histogram(histogram, source, kind, basis)
    yield from (jobs, oldest, outcomes, latency)


def _agent(state: AgentState) -> Iterator[Metric]:
    """The agent itself: how it reads, and what it could not read."""
    info = _Family("info", "cuzk_agent_info", "The agent's version.", "version", "python_version")
    info.add(1, state.version, state.python_version)
    up = _Family("gauge", "cuzk_agent_source_up", "1 while the source is open and being read.", "source")
    states = _Family(
        "gauge", "cuzk_agent_source_state", "1 for the state that the source is in, else 0.", "source", "state"
    )
    settled = _Family(
        "gauge",
        "cuzk_agent_settled_timestamp_seconds",
        "Up to when busy, idle and gaps are computed, in seconds since 1970.",
        "source",
    )
    late = _Family(
        "counter",
        "cuzk_agent_late_events_total",
        "Events that came after their time had been settled, and were moved to its end.",
        "source",
    )
    torn = _Family(
        "counter",
        "cuzk_agent_torn_lines_total",
        "TIMELINE lines that other output had cut apart, by whether they could be put together again.",
        "source",
        "outcome",
    )
    unparsed = _Family(
        "counter", "cuzk_agent_unparsed_lines_total", "Lines that could not be understood.", "source", "reason"
    )
    lag = _Family(
        "gauge", "cuzk_agent_read_lag_bytes", "Bytes that the source holds and that are not read yet.", "source"
    )
    delay = _Family(
        "gauge",
        "cuzk_agent_event_delay_seconds",
        "How long after it happened the last event was read, in seconds.",
        "source",
    )
    envelope = _Family(
        "info", "cuzk_agent_source_info", "In what the source's lines are wrapped.", "source", "envelope"
    )
    waker = _Family("gauge", "cuzk_agent_waker", "1 for what wakes the reader of a quiet log, else 0.", "method")
    if state.waker is not None:
        for method in WakerMethod:
            waker.add(state.waker.method is method, method)
    reading: tuple[tuple[_Family, Callable[[ReadStats], int]], ...] = (
        (_Family("counter", "cuzk_agent_lines_total", "Lines read.", "source"), lambda read: read.lines),
        (_Family("counter", "cuzk_agent_read_bytes_total", "Bytes read.", "source"), lambda read: read.read_bytes),
        (
            _Family("counter", "cuzk_agent_lost_bytes_total", "Bytes that were gone before they were read.", "source"),
            lambda read: read.lost_bytes,
        ),
        (
            _Family(
                "counter", "cuzk_agent_lost_lines_total", "Lines that the source says were dropped before it.", "source"
            ),
            lambda read: read.lost_lines,
        ),
        (
            _Family(
                "counter",
                "cuzk_agent_reader_restarts_total",
                "Times that journalctl was started again.",
                "source",
            ),
            lambda read: read.restarts,
        ),
        (
            _Family("counter", "cuzk_agent_rotations_total", "Times that the log was rotated.", "source"),
            lambda read: read.rotations,
        ),
        (
            _Family("counter", "cuzk_agent_truncations_total", "Times that the log was truncated.", "source"),
            lambda read: read.truncations,
        ),
        (
            _Family("counter", "cuzk_agent_overlong_lines_total", "Lines of which only the head was kept.", "source"),
            lambda read: read.overlong_lines,
        ),
        (
            _Family("counter", "cuzk_agent_nul_bytes_total", "NUL bytes skipped in the log.", "source"),
            lambda read: read.nul_bytes,
        ),
    )
    for source, view in state.sources.items():
        timeline, read = view.timeline, view.read
        up.add(read.state is FollowState.FOLLOWING, source)
        for follow_state in FollowState:
            states.add(read.state is follow_state, source, follow_state)
        settled.add(timeline.settled_unix_seconds, source)
        late.add(timeline.late_events, source)
        torn.add(timeline.torn_recovered, source, "recovered")
        torn.add(timeline.torn_lost, source, "lost")
        for reason, count in timeline.unparsed.items():
            unparsed.add(count, source, reason)
        lag.add(read.lag_bytes, source)
        delay.add(view.delay_s, source)
        envelope.add(1, source, read.envelope)
        for family, value in reading:
            family.add(value(read), source)
    yield from (info, envelope, up, states, settled, late, torn, unparsed, lag, delay, waker)
    yield from (family for family, _ in reading)


def _state(state: AgentState) -> Iterator[Metric]:
    """The agent's own state, kept for the one that comes next."""
    seconds = _Family(
        "summary",
        "cuzk_agent_state_write_seconds",
        "Time that writing the state took, without waiting for the disk, in seconds.",
    )
    errors = _Family(
        "counter", "cuzk_agent_state_write_errors_total", "Times that the state could not be written or synced."
    )
    size = _Family("gauge", "cuzk_agent_state_size_bytes", "Size of the state as it was last written.")
    written = _Family(
        "gauge",
        "cuzk_agent_state_written_timestamp_seconds",
        "When the state was true that was last written, in seconds since 1970.",
    )
    keeping = state.keeping
    if keeping is not None:
        seconds.add_summary(keeping.writes, keeping.seconds)
        errors.add(keeping.errors)
        if keeping.last is not None:
            size.add(keeping.last.size_bytes)
            written.add(keeping.last.unix_s)
    yield from (seconds, errors, size, written)


Collector = Callable[[AgentState], Iterable[Metric]]
"""One group of families."""

COLLECTORS: Mapping[str, Collector] = MappingProxyType(
    {
        "engine": _engine,
        "units": _units,
        "gpus": _gpus,
        "proofs": _proofs,
        "chips": _chips,
        "occupancy": _occupancy,
        "nvml": _nvml,
        "agent": _agent,
        "state": _state,
    }
)
"""What a page holds besides the agent's process, by the name under which its errors are counted."""


class _Families:
    """Families in the shape that the library renders."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


# All our names are valid in every escaping scheme; with this one the library does not look at each of their letters.
_encode_openmetrics, _ = choose_encoder("application/openmetrics-text; version=1.0.0; escaping=allow-utf-8")
_OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS_END = b"# EOF\n"


class Exposition:
    """Renders pages, and counts what went wrong in doing so. Safe to use from any thread."""

    def __init__(self, collectors: Mapping[str, Collector] = COLLECTORS) -> None:
        process = ProcessCollector(registry=None)
        self._collectors: dict[str, Collector] = {**collectors, "process": lambda _: process.collect()}
        self._lock = threading.Lock()
        self._errors = dict.fromkeys(self._collectors, 0)
        self._logged: set[tuple[str, str]] = set()

    def render(self, accept: str | None, state: AgentState) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics 1.0 if the Accept header prefers it, else text."""
        openmetrics = prefers_openmetrics(accept)
        encode = _encode_openmetrics if openmetrics else generate_latest
        # A group is rendered by itself: a value that can't be written must not take the others down either.
        parts = [self._guarded(name, encode, state) for name in self._collectors]
        parts.append(encode(_Families([self._error_counts()])))
        if not openmetrics:
            return b"".join(parts), CONTENT_TYPE_PLAIN_0_0_4
        body = b"".join(part.removesuffix(_OPENMETRICS_END) for part in parts)
        return body + _OPENMETRICS_END, _OPENMETRICS_CONTENT_TYPE

    def _guarded(self, name: str, encode: Callable[[_Families], bytes], state: AgentState) -> bytes:
        try:
            return encode(_Families(self._collectors[name](state)))
        except Exception as error:  # noqa: BLE001 one broken group must not take the scrape down
            where = traceback.extract_tb(error.__traceback__)[-1]
            distinct = (name, f"{type(error).__name__} at {where.filename}:{where.lineno}")
            with self._lock:
                self._errors[name] += 1
                first = distinct not in self._logged
                self._logged.add(distinct)
            if first:
                _log.exception("metrics of %r can't be shown; the others are served", name)
            return b""

    def _error_counts(self) -> Metric:
        errors = _Family(
            "counter", "cuzk_agent_collector_errors_total", "Times that a group of metrics failed.", "collector"
        )
        with self._lock:
            for name, count in self._errors.items():
                errors.add(count, name)
        return errors


def prefers_openmetrics(accept: str | None) -> bool:
    """Whether an Accept header ranks OpenMetrics 1.0 above text; what is malformed in it is passed over."""
    openmetrics = text = 0.0
    for entry in (accept or "").split(","):
        media, *rest = (part.strip() for part in entry.split(";"))
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if media.lower() == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            openmetrics = max(openmetrics, weight)
        elif media.lower() == "text/plain":
            text = max(text, weight)
    return openmetrics > 0 and openmetrics >= text
