"""What a report holds: plain values, and their JSON."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cuzk_agent.timeline.ledger import UNKNOWN_GPU
from cuzk_agent.timeline.state import Boundary, Cause, LatencyBasis, ProofOutcome, UnitOutcome

VERSION = 1
"""Of the JSON's shape: another one where a field is renamed, goes, or changes its meaning."""
LONG_GAP_MS = 800
"""How long a gap must be at least to be listed, where nothing else is asked for."""


class Values:
    """Durations in whole milliseconds, all of them, in eight bytes each."""

    def __init__(self, values_ms: Iterable[int] = ()) -> None:
        self._sorted = array("q", sorted(values_ms))

    @property
    def count(self) -> int:
        return len(self._sorted)

    @cached_property
    def sum_ms(self) -> int:
        return sum(self._sorted)

    @property
    def mean_ms(self) -> float | None:
        return self.sum_ms / self.count if self.count else None

    @property
    def max_ms(self) -> int | None:
        return self._sorted[-1] if self._sorted else None

    def quantile_ms(self, q: float) -> int | None:
        """The value at rank ceil(q * count)."""
        if not self._sorted:
            return None
        # A rank that is whole in theory (0.07 * 100) must not be lifted to the next one by its rounding error.
        return self._sorted[max(1, math.ceil(q * self.count - 1e-9)) - 1]

    def to_json(self) -> dict[str, Any]:
        mean_ms = self.mean_ms
        return {
            "count": self.count,
            "mean_ms": None if mean_ms is None else round(mean_ms, 3),
            "p50_ms": self.quantile_ms(0.5),
            "p90_ms": self.quantile_ms(0.9),
            "p99_ms": self.quantile_ms(0.99),
            "max_ms": self.max_ms,
        }

    @classmethod
    def pooled(cls, parts: Iterable[Values]) -> Values:
        return cls(value for part in parts for value in part._sorted)  # noqa: SLF001  its own


@dataclass(frozen=True, slots=True)
class LongGap:
    start_ms: int
    duration_ms: int
    job_before: str
    job_after: str
    boundary: Boundary
    cause: Cause
    by_cause_ms: Mapping[Cause, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "start_ms": self.start_ms,
            "duration_ms": self.duration_ms,
            "job_before": self.job_before,
            "job_after": self.job_after,
            "boundary": self.boundary.value,
            "cause": self.cause.value,
            "by_cause_ms": _by_name(self.by_cause_ms),
        }


@dataclass(frozen=True, slots=True)
class Chip:
    """What NVML's samples say of a GPU, set beside its spans."""

    busy_ms: float
    sampled_ms: float
    """Time that samples cover."""
    span_busy_ms: float
    """Chip busy within spans."""
    span_sampled_ms: float
    unlogged_busy_ms: float
    """Chip busy outside of them: somebody else."""

    @property
    def span_occupancy(self) -> float | None:
        return _ratio(self.span_busy_ms, self.span_sampled_ms)

    @property
    def utilization(self) -> float | None:
        return _ratio(self.busy_ms, self.sampled_ms)

    def to_json(self) -> dict[str, Any]:
        return {
            "busy_ms": round(self.busy_ms, 1),
            "sampled_ms": round(self.sampled_ms, 1),
            "utilization": _rounded(self.utilization),
            "span_busy_ms": round(self.span_busy_ms, 1),
            "span_sampled_ms": round(self.span_sampled_ms, 1),
            "span_occupancy": _rounded(self.span_occupancy),
            "unlogged_busy_ms": round(self.unlogged_busy_ms, 1),
        }


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU of one engine."""

    spans: int
    busy_ms: int
    run_busy_ms: int
    """Busy between the engine's first and last event."""
    run_ms: int
    """From the engine's first event to its last."""
    wasted_ms: Mapping[str, float]
    """By reason."""
    kernel_ms: int | None
    idle_ms: Mapping[Cause, int]
    gaps: Values
    gap_by_cause_ms: Mapping[Cause, int]
    gap_by_boundary_ms: Mapping[Boundary, int]
    open_gap_ms: int | None
    """None before the first span."""
    long_gaps: tuple[LongGap, ...]
    chip: Chip | None = None

    @property
    def gap_ms(self) -> int:
        return self.gaps.sum_ms

    @property
    def logged_utilization(self) -> float | None:
        return _ratio(self.busy_ms, self.busy_ms + self.gap_ms)

    @property
    def run_utilization(self) -> float | None:
        return _ratio(self.run_busy_ms, self.run_ms) if self.spans else None

    @property
    def kernel_utilization(self) -> float | None:
        """Kernel time in that of `logged_utilization`; None where the kernels cannot all be this GPU's."""
        if self.kernel_ms is None or self.kernel_ms > self.busy_ms:
            return None
        return _ratio(self.kernel_ms, self.busy_ms + self.gap_ms)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "spans": self.spans,
            "busy_ms": self.busy_ms,
            "wasted_ms": round(sum(self.wasted_ms.values()), 3),
            "wasted_by_reason_ms": {reason: round(ms, 3) for reason, ms in self.wasted_ms.items()},
            "kernel_ms": self.kernel_ms,
            "gap_ms": self.gap_ms,
            "idle_ms": _by_name(self.idle_ms),
            "logged_utilization": _rounded(self.logged_utilization),
            "run_utilization": _rounded(self.run_utilization),
            "kernel_utilization": _rounded(self.kernel_utilization),
            "gaps": {
                **self.gaps.to_json(),
                "by_cause_ms": _by_name(self.gap_by_cause_ms),
                "by_boundary_ms": _by_name(self.gap_by_boundary_ms),
            },
            "open_gap_ms": self.open_gap_ms,
        }
        if self.chip is not None:
            found["chip"] = self.chip.to_json()
        found["long_gaps"] = [gap.to_json() for gap in self.long_gaps]
        return found


@dataclass(frozen=True, slots=True)
class JobRow:
    """One incarnation of a job."""

    job_id: str
    incarnation: int
    proof_kind: str
    outcome: ProofOutcome | None
    """None if it was open when the log ended."""
    partitions: int
    enqueued_ms: int | None
    synth_start_ms: int | None
    synth_end_ms: int | None
    gpu_start_ms: int | None
    gpu_end_ms: int | None
    gap_before_ms: int
    total_ms: int | None
    total_from: LatencyBasis | None
    last_ms: int
    """When the last was heard of it: in which stretch it counts."""
    units: Mapping[UnitOutcome, int] = field(default_factory=dict)
    synth_ms: int = 0
    """Of all its units, as is `span_ms`."""
    span_ms: int = 0
    busy_ms: float = 0
    """Its share of the GPUs' busy time: those of all jobs add up to the whole."""
    gap_ms: int = 0
    """Of all gaps that its spans ended."""

    def to_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "incarnation": self.incarnation,
            "proof_kind": self.proof_kind,
            "outcome": None if self.outcome is None else self.outcome.value,
            "partitions": self.partitions,
            "enqueued_ms": self.enqueued_ms,
            "synth_start_ms": self.synth_start_ms,
            "synth_end_ms": self.synth_end_ms,
            "gpu_start_ms": self.gpu_start_ms,
            "gpu_end_ms": self.gpu_end_ms,
            "gap_before_ms": self.gap_before_ms,
            "gap_ms": self.gap_ms,
            "busy_ms": round(self.busy_ms, 3),
            "total_ms": self.total_ms,
            "total_from": None if self.total_from is None else self.total_from.value,
        }


@dataclass(frozen=True, slots=True)
class Lines:
    """What the lines of an engine were."""

    timeline: int
    recovered: int
    lost: int
    unparsed: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "timeline": self.timeline,
            "recovered": self.recovered,
            "lost": self.lost,
            "unparsed": dict(self.unparsed),
        }


@dataclass(frozen=True, slots=True)
class Supply:
    """How the units came out of synthesis, and how fast the GPUs could have taken them."""

    units_per_s: float | None
    """Out of synthesis, while anything was in it, between the first and the last."""
    demand_per_s: float | None
    """What the GPUs prove while they are busy, all together."""
    lanes: float | None
    """Units in synthesis at once, on average, while anything was in it."""
    standstill_ms: int
    """Time between the first and the last in which nothing was in synthesis."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds the run."""

    bound_by: str | None
    """`gpu`, a cause, or None where nothing can be said."""
    text: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """Proved in the run, from its first event to its last."""

    run_ms: int
    proofs: int
    partitions: int
    steady_proofs_per_hour: float | None
    """Without the first and the last proof: from the end of the first to the end of the one before the last."""

    @property
    def proofs_per_hour(self) -> float | None:
        return _ratio(self.proofs * 3_600_000, self.run_ms)

    @property
    def partitions_per_hour(self) -> float | None:
        return _ratio(self.partitions * 3_600_000, self.run_ms)

    @property
    def seconds_per_proof(self) -> float | None:
        return _ratio(self.run_ms / 1000, self.proofs)

    def to_json(self) -> dict[str, Any]:
        return {
            "run_ms": self.run_ms,
            "proofs": self.proofs,
            "partitions": self.partitions,
            "proofs_per_hour": _rounded(self.proofs_per_hour),
            "partitions_per_hour": _rounded(self.partitions_per_hour),
            "seconds_per_proof": _rounded(self.seconds_per_proof),
            "steady_proofs_per_hour": _rounded(self.steady_proofs_per_hour),
        }


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine: a run of the daemon."""

    start_ms: int
    end_ms: int
    first_event_ms: int | None
    last_event_ms: int | None
    start_unix_s: float | None
    start_uncertainty_s: float | None
    settings: Mapping[str, str]
    evidence: Mapping[str, bool]
    lines: Lines
    gpus: Mapping[str, GpuReport]
    synth: Mapping[str, Values]
    """By proof kind, as are those below."""
    gpu_span: Mapping[str, Values]
    ready_wait: Mapping[str, Values]
    handoff: Mapping[str, Values]
    proofs: Mapping[LatencyBasis, Mapping[str, Values]]
    jobs: tuple[JobRow, ...]
    throughput: Throughput
    supply: Supply
    kernel_phases: Mapping[str, tuple[int, float]]
    """Count and seconds."""
    trouble: Mapping[tuple[str, str], int]
    """By kind and GPU."""
    verdict: Verdict

    @property
    def spans(self) -> int:
        return sum(gpu.spans for gpu in self.gpus.values())

    @property
    def proof_basis(self) -> LatencyBasis | None:
        """What the latencies of this log's proofs count from: submission, if it tells that of any."""
        return next((basis for basis in LatencyBasis if self.proofs.get(basis)), None)

    @property
    def proof_outcomes(self) -> dict[ProofOutcome, int]:
        return {outcome: sum(job.outcome is outcome for job in self.jobs) for outcome in ProofOutcome}

    @property
    def unit_outcomes(self) -> dict[UnitOutcome, int]:
        return {outcome: sum(job.units.get(outcome, 0) for job in self.jobs) for outcome in UnitOutcome}

    def to_json(self) -> dict[str, Any]:
        basis = self.proof_basis
        return {
            "start_ms": self.start_ms,
            "end_ms": self.end_ms,
            "first_event_ms": self.first_event_ms,
            "last_event_ms": self.last_event_ms,
            "start_unix_seconds": _rounded(self.start_unix_s),
            "start_uncertainty_seconds": _rounded(self.start_uncertainty_s),
            "settings": dict(self.settings),
            "evidence": dict(self.evidence),
            "lines": self.lines.to_json(),
            "gpus": {name: gpu.to_json() for name, gpu in self.gpus.items()},
            "synth": _latency_json(self.synth),
            "gpu_span": _latency_json(self.gpu_span),
            "ready_wait": _latency_json(self.ready_wait),
            "handoff": _latency_json(self.handoff),
            "proofs": {
                **Values.pooled(self.proofs[basis].values() if basis else ()).to_json(),
                "from": None if basis is None else basis.value,
                "by_kind": {
                    kind: {
                        each.value: by_kind[kind].to_json() for each, by_kind in self.proofs.items() if kind in by_kind
                    }
                    for kind in dict.fromkeys(kind for by_kind in self.proofs.values() for kind in by_kind)
                },
            },
            "outcomes": {
                "proofs": _by_name(self.proof_outcomes),
                "partitions": _by_name(self.unit_outcomes),
                "open_proofs": sum(job.outcome is None for job in self.jobs),
            },
            "throughput": self.throughput.to_json(),
            "kernel_phases": {
                phase: {"count": count, "sum_ms": round(seconds * 1000), "mean_ms": round(seconds * 1000 / count, 3)}
                for phase, (count, seconds) in self.kernel_phases.items()
            },
            "trouble": [
                {"kind": kind, "gpu": gpu or None, "count": count} for (kind, gpu), count in self.trouble.items()
            ],
            "verdict": {
                "bound_by": self.verdict.bound_by,
                "text": self.verdict.text,
                "supply_units_per_second": _rounded(self.supply.units_per_s),
                "demand_units_per_second": _rounded(self.supply.demand_per_s),
                "synthesis_lanes": _rounded(self.supply.lanes),
                "synthesis_standstill_ms": self.supply.standstill_ms,
            },
            "jobs": [job.to_json() for job in self.jobs],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about one log."""

    logs: tuple[str, ...]
    bytes: int
    lines: int
    lack: str
    """What to say if no TIMELINE line is in it."""
    long_gap_ms: int | None
    engines: tuple[EngineReport, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "logs": list(self.logs),
            "bytes": self.bytes,
            "lines": self.lines,
            "long_gap_ms": self.long_gap_ms,
            "engines": [engine.to_json() for engine in self.engines],
        }


def working(gpus: Mapping[str, GpuReport]) -> list[GpuReport]:
    """The GPUs that had work. A log may tell which is which only after the first spans: that makes no further GPU."""
    known = [gpu for name, gpu in gpus.items() if gpu.spans and name != UNKNOWN_GPU]
    return known or [gpu for gpu in gpus.values() if gpu.spans]


def _latency_json(by_kind: Mapping[str, Values]) -> dict[str, Any]:
    whole = Values.pooled(by_kind.values()).to_json()
    return {**whole, "by_kind": {kind: values.to_json() for kind, values in by_kind.items()}}


def _by_name(by_key: Mapping[Any, int]) -> dict[str, int]:
    return {key.value: value for key, value in by_key.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
