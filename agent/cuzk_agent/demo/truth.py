"""What was true of a simulated prover, added up from its own state as it changes and from nothing it writes.

Times are whole milliseconds of an engine's clock, as far as any log can tell them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto


class Cause(StrEnum):
    """Why a GPU is idle."""

    HANDOFF = "handoff"
    STARVED = "starved"
    BLOCKED = "blocked"
    FILL = "fill"
    NO_WORK = "no_work"


class Outcome(StrEnum):
    """What became of a unit, or of a job."""

    PROVED = "proved"
    FAILED = "failed"
    DROPPED = "dropped"
    ABANDONED = "abandoned"
    LOST = "lost"


class Queue(Enum):
    """Where a unit is that no GPU has to do with yet."""

    WAITING = auto()
    SYNTH = auto()
    READY = auto()


@dataclass(frozen=True, slots=True)
class GapTruth:
    """A stretch of at least 1 ms between spans in which none is open."""

    start_ms: int
    end_ms: int
    within_job: bool
    """The job that ended last is the one that starts."""
    by_cause_ms: Mapping[Cause, int]


@dataclass(slots=True)
class GpuTruth:
    """One GPU in one engine's life, or in several."""

    busy_ms: int = 0
    """Union of the spans; one that is still open counts up to the last line."""
    idle_ms: Counter[Cause] = field(default_factory=Counter)
    """With `busy_ms` it adds up to the engine's time."""
    stretches: Counter[Cause] = field(default_factory=Counter)
    """How many stretches of each cause there were: their edges are what a log rounds."""
    spans: int = 0
    """Spans begun."""
    open_spans: int = 0
    gaps: list[GapTruth] = field(default_factory=list)
    open_gap_ms: int = 0
    """The gap that is not closed yet."""
    wasted_ms: float = 0.0
    """Busy time of jobs that came to nothing; where spans overlap each has its even share."""
    kernel_ms: int = 0
    """Of the units whose C++ lines were written."""

    @property
    def gap_ms(self) -> int:
        """Sum of the gaps."""
        return sum(gap.end_ms - gap.start_ms for gap in self.gaps)

    @property
    def utilization(self) -> float | None:
        """Busy in busy and gaps."""
        return self.busy_ms / (self.busy_ms + self.gap_ms) if self.busy_ms else None

    def add(self, other: GpuTruth) -> None:
        """Adds what was true in another engine's life. Of open gaps and spans the last engine's count."""
        self.busy_ms += other.busy_ms
        self.idle_ms.update(other.idle_ms)
        self.stretches.update(other.stretches)
        self.spans += other.spans
        self.open_spans = other.open_spans
        self.gaps += other.gaps
        self.open_gap_ms = other.open_gap_ms
        self.wasted_ms += other.wasted_ms
        self.kernel_ms += other.kernel_ms


@dataclass(slots=True, eq=False)
class JobTruth:
    """One run of a job."""

    job_id: str
    kind: str
    shares_ms: dict[int, float] = field(default_factory=dict)
    """Its even share of each GPU's busy time."""
    outcome: Outcome | None = None
    repeated: bool = False
    """Proved, and so was an earlier run of the same job."""


@dataclass(slots=True, eq=False)
class Span:
    """An open span."""

    job: JobTruth
    share_mark: float


@dataclass(slots=True, eq=False)
class _Gpu:
    truth: GpuTruth = field(default_factory=GpuTruth)
    spans: set[Span] = field(default_factory=set)
    handed_over: int = 0
    """Units that its workers have picked up and not started."""
    idle_since_ms: int = 0
    reached: bool = False
    """It has been given something since it last had no work."""
    last_cause: Cause | None = None
    gap: Counter[Cause] | None = None
    gap_start_ms: int = 0
    gap_job: JobTruth | None = None
    share_clock: float = 0.0


class Account:
    """One engine's life."""

    def __init__(self, gpus: int, *, keep: bool = True) -> None:
        """Without `keep` closed gaps are forgotten."""
        self._keep = keep
        self._now_ms = 0
        self._gpus = [_Gpu() for _ in range(gpus)]
        self._count = dict.fromkeys(Queue, 0)
        self._finished = False

    # What happens, in the order of time

    def enter(self, queue: Queue, at_ms: int, units: int = 1) -> None:
        """Units come to a queue."""
        self._until(at_ms)
        self._count[queue] += units

    def leave(self, queue: Queue, at_ms: int) -> None:
        """A unit leaves a queue."""
        self._until(at_ms)
        self._count[queue] -= 1

    def pick_up(self, gpu: int, at_ms: int) -> None:
        """A worker of this GPU has a unit that it has not started."""
        self._until(at_ms)
        self._gpus[gpu].handed_over += 1

    def hand_over_ends(self, gpu: int, at_ms: int) -> None:
        """And now it has started it, or given it up."""
        self._until(at_ms)
        self._gpus[gpu].handed_over -= 1

    def start(self, gpu: int, job: JobTruth, at_ms: int) -> Span:
        """A span opens."""
        self._until(at_ms)
        at = self._gpus[gpu]
        if not at.spans and at.gap is not None:
            if at_ms > at.gap_start_ms and self._keep:
                at.truth.gaps.append(GapTruth(at.gap_start_ms, at_ms, at.gap_job is job, at.gap))
            at.gap = None
        span = Span(job, at.share_clock)
        at.spans.add(span)
        at.truth.spans += 1
        at.reached = True
        at.last_cause = None
        return span

    def end(self, gpu: int, span: Span, at_ms: int) -> None:
        """A span closes, in whatever way."""
        self._until(at_ms)
        at = self._gpus[gpu]
        at.spans.discard(span)
        shares_ms = span.job.shares_ms
        shares_ms[gpu] = shares_ms.get(gpu, 0.0) + at.share_clock - span.share_mark
        if not at.spans:
            at.idle_since_ms = at.gap_start_ms = at_ms
            at.gap = Counter()
            at.gap_job = span.job

    def kernels_ran(self, gpu: int, kernel_ms: int) -> None:
        """The kernels of a unit are done, and the log says how long they ran."""
        self._gpus[gpu].truth.kernel_ms += kernel_ms

    def finish(self, at_ms: int) -> None:
        """The engine's last line was written at this time."""
        self._until(at_ms)
        self._finished = True

    # What was true

    def truth(self, at_ms: int) -> list[GpuTruth]:
        """By GPU, up to a time that lies after all that has happened."""
        if not self._finished:
            self._until(at_ms)
        found = []
        for at in self._gpus:
            truth = GpuTruth()
            truth.add(at.truth)
            truth.open_spans = 0 if self._finished else len(at.spans)
            truth.open_gap_ms = sum(at.gap.values()) if at.gap is not None and not self._finished else 0
            found.append(truth)
        return found

    def _until(self, at_ms: int) -> None:
        elapsed_ms = at_ms - self._now_ms
        if elapsed_ms <= 0 or self._finished:
            return
        self._now_ms = at_ms
        idle = []
        for at in self._gpus:
            if at.spans:
                at.truth.busy_ms += elapsed_ms
                at.share_clock += elapsed_ms / len(at.spans)
            else:
                idle.append(at)
        idle.sort(key=lambda at: at.idle_since_ms)
        # Units that some idle GPU could have, if all went at once: the longest idle ones are those that lack them.
        for_others = sum(self._count.values())
        for at in idle:
            if at.handed_over:
                cause = Cause.HANDOFF
            elif not for_others:
                cause = Cause.NO_WORK
                at.reached = False
            else:
                cause = self._why(at.reached)
                for_others -= 1
            at.truth.idle_ms[cause] += elapsed_ms
            if at.gap is not None:
                at.gap[cause] += elapsed_ms
            if cause is not at.last_cause:
                at.truth.stretches[cause] += 1
                at.last_cause = cause

    def _why(self, reached: bool) -> Cause:
        if self._count[Queue.READY]:
            return Cause.HANDOFF
        if not self._count[Queue.SYNTH]:
            return Cause.BLOCKED
        return Cause.STARVED if self._count[Queue.WAITING] and reached else Cause.FILL


class Tally:
    """What became of units and jobs, in all engines' lives."""

    def __init__(self, *, keep: bool = True) -> None:
        """Without `keep` no job is known to have been proved before."""
        self._keep = keep
        self.units: Counter[Outcome] = Counter()
        self.jobs: Counter[tuple[str, Outcome]] = Counter()
        """By kind and outcome."""
        self._proved_ids: set[str] = set()

    def decide(self, job: JobTruth, outcome: Outcome) -> None:
        """A job's outcome is known; the first one stands."""
        if job.outcome is not None:
            return
        job.outcome = outcome
        self.jobs[job.kind, outcome] += 1
        if outcome is Outcome.PROVED:
            job.repeated = job.job_id in self._proved_ids
            if self._keep:
                self._proved_ids.add(job.job_id)


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A stretch in which one unit's kernels had a GPU to themselves."""

    gpu: int
    start_unix_s: float
    end_unix_s: float
    barrier_unix_s: tuple[float, float] | None
    """Within it, when they waited for the CPU with the chip idle."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What was true up to some moment."""

    gpus: Mapping[int, GpuTruth]
    events: Mapping[str, int]
    """TIMELINE lines written, by event."""
    units: Mapping[Outcome, int]
    jobs: Mapping[tuple[str, Outcome], int]
    """By kind and outcome, of those that are decided."""
    open_jobs: int
    engines: int
    kernels: tuple[KernelRun, ...]

    def as_json(self) -> dict[str, object]:
        """For a file: all times in milliseconds of the engine's clock, except those named otherwise."""
        return {
            "engines": self.engines,
            "events": dict(self.events),
            "units": {str(outcome): count for outcome, count in self.units.items()},
            "jobs": [
                {"kind": kind, "outcome": str(outcome), "count": count} for (kind, outcome), count in self.jobs.items()
            ],
            "open_jobs": self.open_jobs,
            "gpus": {str(gpu): _gpu_json(truth) for gpu, truth in self.gpus.items()},
            "kernels": [
                {"gpu": run.gpu, "start_unix_s": run.start_unix_s, "end_unix_s": run.end_unix_s} for run in self.kernels
            ],
        }


def _gpu_json(truth: GpuTruth) -> dict[str, object]:
    return {
        "busy_ms": truth.busy_ms,
        "idle_ms": {str(cause): truth.idle_ms[cause] for cause in Cause},
        "spans": truth.spans,
        "open_spans": truth.open_spans,
        "gap_ms": truth.gap_ms,
        "open_gap_ms": truth.open_gap_ms,
        "wasted_ms": truth.wasted_ms,
        "kernel_ms": truth.kernel_ms,
        "logged_utilization": truth.utilization,
        "gaps": [
            {
                "start_ms": gap.start_ms,
                "end_ms": gap.end_ms,
                "within_job": gap.within_job,
                "by_cause_ms": {str(cause): ms for cause, ms in gap.by_cause_ms.items()},
            }
            for gap in truth.gaps
        ],
    }


def add_waste(gpus: Mapping[int, GpuTruth], jobs: Iterable[JobTruth]) -> None:
    """Adds to each GPU what it did for jobs that failed, or had been proved already."""
    for job in jobs:
        if job.outcome is Outcome.FAILED or job.repeated:
            for gpu, share_ms in job.shares_ms.items():
                gpus[gpu].wasted_ms += share_ms
