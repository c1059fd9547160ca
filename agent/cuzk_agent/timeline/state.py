"""The state of one followed prover as it is published: frozen, complete, safe to read from any thread.

Everything here is settled: computed up to `settled_ms` of the engine's own clock, never beyond what has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cuzk_agent.windows import Rolling


class Cause(StrEnum):
    """Why a GPU is idle, instant by instant."""

    UNKNOWN = "unknown"
    """No evidence about the daemon: silent too long with work in flight, or a span that aged out."""
    HANDOFF = "handoff"
    """A ready unit waits, or this GPU's worker picked one up and has not started it."""
    STARVED = "starved"
    """Units are in synthesis and more wait behind them: the CPU can't keep up."""
    BLOCKED = "blocked"
    """Units wait and none is in synthesis or ready: SRS load, memory budget, batch window, pacer."""
    FILL = "fill"
    """All the work there is is in synthesis, or nothing has reached this GPU since it last had no work."""
    NO_WORK = "no_work"
    """Nothing before GPU_START exists, or fewer units than idle GPUs."""


class Boundary(StrEnum):
    """Whether a gap lies inside one job or between two."""

    WITHIN_JOB = "within_job"
    CROSS_JOB = "cross_job"


class Stage(StrEnum):
    """Where a unit is on its way to a proof."""

    WAITING = "waiting"
    SYNTH = "synth"
    READY = "ready"
    PICKED_UP = "picked_up"
    GPU = "gpu"


class UnitOutcome(StrEnum):
    """How a unit ended."""

    PROVED = "proved"
    FAILED = "failed"
    DROPPED = "dropped"
    """Given up because its job had failed."""
    ABANDONED = "abandoned"
    """In flight when its engine ended."""
    LOST = "lost"
    """Overtaken by later units, or older than the age limit."""


class ProofOutcome(StrEnum):
    """How a job ended."""

    PROVED = "proved"
    FAILED = "failed"
    ABANDONED = "abandoned"
    LOST = "lost"


class Latency(StrEnum):
    """What takes time on a unit's way."""

    SYNTH = "synth"
    """The synthesis itself, as the log gives it."""
    READY_WAIT = "ready_wait"
    """From queued to picked up."""
    HANDOFF = "handoff"
    """From picked up to started."""
    SPAN = "gpu_span"
    """From GPU_START to GPU_END."""


class LatencyBasis(StrEnum):
    """What a proof's latency counts from."""

    SUBMISSION = "submission"
    """The daemon's own `total_ms`, from the request."""
    FIRST_EVENT = "first_event"
    """From the job's first event to its last GPU_END: all that TIMELINE alone can tell."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation to look at behind a histogram bucket."""

    job_id: str
    seconds: float
    unix_seconds: float | None
    """When it happened; None while the wall clock of the engine is not known."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by bucket. `counts[i]` holds the observations in (bounds[i-1], bounds[i]]; the last is the overflow."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float
    exemplars: tuple[Exemplar | None, ...]
    """One for each of `counts`, the latest observation there."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU of one source."""

    spans: int
    busy_seconds: float
    """Settled union of spans."""
    idle_seconds: Mapping[Cause, float]
    """Settled idleness by cause, all causes present; with `busy_seconds` it adds up to the elapsed engine time."""
    wasted_seconds: Mapping[str, float]
    """Busy time for nothing, by reason (`failed`, `repeated`), both present."""
    kernel_seconds: float | None
    """Kernel time as the C++ lines tell it; None while none could be joined to this GPU."""
    gap_seconds: Mapping[Cause, Histogram]
    """Closed gaps by their largest cause; `unknown` from its first millisecond on, the others always."""
    boundary_seconds: Mapping[Boundary, float]
    """Closed gap time by boundary, both present."""
    open_gap_seconds: Mapping[Cause, float] | None
    """The gap that is open now, its time by cause, all causes present (all 0 while a span is open); None before the
    first span and when the engine is gone."""
    gap_rolling: Rolling


@dataclass(frozen=True, slots=True)
class TimelineState:
    """Everything that one source's log has told so far."""

    # The engine and its clock
    engine_running: bool
    """An engine's lines are being read and it has not ended."""
    engine_restarts: int
    """Engines that began after the first one seen."""
    engine_settings: Mapping[str, str]
    """Settings read from start-up lines: a fixed set of keys, `timeline.engine.SETTINGS`."""
    engine_start_unix_seconds: float | None
    anchor_uncertainty_seconds: float | None
    last_event_unix_seconds: float | None
    settled_unix_seconds: float | None
    """Wall-clock time up to which busy, idle and gaps are computed."""
    stalled_seconds: float
    """Time since the last line if work was in flight then, else 0."""
    # What the log lets one know: e.g. waiting units only with `job enqueued` lines
    evidence: Mapping[str, bool]
    """`jobs` (job enqueued lines seen), `spans` (GPU_START seen, or no pickup yet), `gpu_map` (worker → GPU known),
    `wall_clock` (anchored): all present."""

    # Counters and histograms of the log
    events: Mapping[str, int]
    """TIMELINE events by name: the known ones (all present) and `other`."""
    late_events: int
    """Edges that came behind the settled frontier and were clamped to it."""
    torn_recovered: int
    torn_lost: int
    unparsed: Mapping[str, int]
    synth_seconds: Mapping[str, Histogram]
    """By proof kind, the known kinds all present; `other` from its first job on."""
    synth_active_seconds: float
    """Settled time in which any unit was in synthesis."""
    ready_wait_seconds: Histogram
    handoff_seconds: Histogram
    span_seconds: Mapping[str, Histogram]
    """By proof kind, as above."""
    kernel_phase_seconds: Mapping[str, tuple[int, float]]
    """Count and sum of each phase of the C++ lines seen so far."""
    unit_outcomes: Mapping[UnitOutcome, int]
    proof_outcomes: Mapping[tuple[str, ProofOutcome], int]
    """By proof kind and outcome, all pairs of known kinds present."""
    proof_latency_seconds: Mapping[tuple[str, LatencyBasis], Histogram]
    """By proof kind and basis, for the basis that this log has."""
    trouble: Mapping[tuple[str, str], int]
    """By kind of trouble and GPU (empty string where no GPU can be named), the known kinds present."""
    srs_load_seconds: tuple[int, float]
    """Count and sum of the times that it took to load parameters (SRS) from disk."""
    synth_rolling: Rolling

    # What is in flight
    srs_loading: int
    """How many parameters are being loaded."""
    in_flight: Mapping[Stage, int]
    oldest_age_seconds: Mapping[Stage, float]
    """Absent for a stage that holds nothing."""
    jobs_open: Mapping[str, int]
    """By proof kind, the known kinds all present."""
    job_oldest_age_seconds: Mapping[str, float]
    """Absent for a kind without an open job."""

    gpus: Mapping[str, GpuState]
    """By GPU index as a string, or `unknown` where the worker's GPU isn't known."""
