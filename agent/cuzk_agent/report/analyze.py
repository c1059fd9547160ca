"""From a log to its report, through the pipeline that follows a live log: no second definition of anything."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cuzk_agent.report.arguments import Bound
from cuzk_agent.report.inputs import InputError, Progress, Tally, Times, read_log
from cuzk_agent.report.model import (
    LONG_GAP_MS,
    Chip,
    EngineReport,
    GpuReport,
    JobRow,
    Lines,
    LongGap,
    Report,
    Supply,
    Throughput,
    Values,
    working,
)
from cuzk_agent.report.nvml import Chips, Recording
from cuzk_agent.report.verdict import verdict_on
from cuzk_agent.timeline.engine import Engine
from cuzk_agent.timeline.ledger import UNKNOWN_GPU, WASTED_REASONS, Gap, Stretch
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import (
    Boundary,
    Cause,
    Latency,
    LatencyBasis,
    ProofOutcome,
    Stage,
    TimelineState,
    UnitOutcome,
)
from cuzk_agent.timeline.units import Job, Unit

_JOBS_KEPT = 256
"""Decided jobs whose spans may still end, or whose gaps may still settle."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a report is to be about."""

    long_gap_ms: int | None = LONG_GAP_MS
    """How long a gap must be at least to be listed; None: none is."""
    start: Bound | None = None
    end: Bound | None = None
    recordings: Mapping[str, str] = field(default_factory=dict)
    """Files with NVML samples by GPU."""

    @property
    def bounded(self) -> bool:
        """It is about a stretch of the log only."""
        return self.start is not None or self.end is not None


def analyze(
    logs: Sequence[str], options: Options | None = None, on_progress: Callable[[Progress], None] = lambda _: None
) -> tuple[Report, InputError | None]:
    """The report on one log, given as its parts in their order; with what kept it from being read to its end."""
    options = options or Options()
    analysis = Analysis(options)
    tally = Tally()
    fault = None
    try:
        for lines, times in read_log(logs, tally, on_progress):
            analysis.feed(lines, times)
    except InputError as error:
        fault = error
    engines = analysis.finish()
    report = Report(tuple(logs), tally.bytes, tally.lines, tally.lack, options.long_gap_ms, engines)
    return report, fault


class Analysis:
    """Listens to a pipeline. Feed it a whole log, then `finish` it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        recordings = {gpu: Recording(path) for gpu, path in options.recordings.items()}
        self._chips = Chips(recordings) if recordings else None
        self.pipeline = Pipeline(
            on_gap=lambda engine, gap: self._of(engine).gap(gap),
            on_job=lambda engine, job: self._of(engine).job(job),
            on_stop=self._stopped,
            on_latency=lambda engine, *latency: self._of(engine).latency(*latency),
            on_time=lambda engine, stretch: self._of(engine).time(stretch),
            on_fact=self._chips.fact if self._chips is not None else None,
        )
        self._engines: list[EngineReport] = []
        self._current: tuple[Engine, _EngineAnalysis] | None = None
        self._counted = _Counted(self.pipeline.state())

    def feed(self, lines: Sequence[bytes], times: Times = None) -> None:
        """Takes in whole lines in their order, with the time of each if a container's log tells."""
        if self._options.bounded:
            for index, line in enumerate(lines):
                self.pipeline.feed((line,), None, times and (times[index],))
                self._watch_border()
        else:
            self.pipeline.feed(lines, None, times)
        engine = self.pipeline.engine
        if engine is not None and not engine.stopped:
            self._settle_chips(engine, ended=False)

    def _settle_chips(self, engine: Engine, *, ended: bool) -> None:
        start_unix_s = engine.start_unix_s(None)
        run = self._of(engine).run
        if self._chips is not None and start_unix_s is not None and run is not None:
            from_ms, until_ms = run[0], run[1] if ended else min(run[1], engine.frontier_ms)
            uncertainty_s = engine.start_uncertainty_s() or 0.0
            self._chips.settle(
                start_unix_s + from_ms / 1000, start_unix_s + until_ms / 1000, uncertainty_s, ended=ended
            )

    def _watch_border(self) -> None:
        engine = self.pipeline.engine
        if engine is None or engine.stopped:
            return
        analysis = self._of(engine)
        within = analysis.holds(engine.seen_ms)
        if within is not analysis.within:
            counted = _Counted(self.pipeline.state())
            if not within:
                analysis.counted = counted.since(self._counted)
            analysis.within, self._counted = within, counted

    def finish(self) -> tuple[EngineReport, ...]:
        """The log ends here."""
        self.pipeline.finish()
        engine = self.pipeline.engine
        if engine is not None and not engine.stopped:
            self._stopped(engine)
        return tuple(self._engines)

    def _of(self, engine: Engine) -> _EngineAnalysis:
        if self._current is None or self._current[0] is not engine:
            self._current = engine, _EngineAnalysis(engine, self._options)
        return self._current[1]

    def _stopped(self, engine: Engine) -> None:
        counted = _Counted(self.pipeline.state())
        analysis = self._of(engine)
        if analysis.within:
            analysis.counted = counted.since(self._counted)
        self._settle_chips(engine, ended=True)
        report = analysis.report(self._chips.finish() if self._chips is not None else {})
        if report.end_ms > report.start_ms or not analysis.bounded:
            self._engines.append(report)
        self._counted, self._current = counted, None


class _Counted:
    """What the pipeline counts over all engines of a log: the difference is that of one engine."""

    def __init__(self, state: TimelineState | None = None) -> None:
        self.lines = Counter[str]()
        self.unparsed = Counter[str]()
        self.kernel_ms = Counter[str]()
        self.phase_counts = Counter[str]()
        self.phase_ms = Counter[str]()
        self.trouble = Counter[tuple[str, str]]()
        if state is not None:
            self.lines.update(timeline=sum(state.events.values()), recovered=state.torn_recovered, lost=state.torn_lost)
            self.unparsed.update(state.unparsed)
            self.trouble.update(state.trouble)
            for name, gpu in state.gpus.items():
                if gpu.kernel_seconds is not None:
                    self.kernel_ms[name] = round(gpu.kernel_seconds * 1000)
            for phase, (count, seconds) in state.kernel_phase_seconds.items():
                self.phase_counts[phase], self.phase_ms[phase] = count, round(seconds * 1000)

    def since(self, before: _Counted) -> _Counted:
        difference = _Counted()
        for name, counts in vars(self).items():
            # Unlike `counts - …` this keeps what is 0.
            setattr(
                difference, name, Counter({key: count - getattr(before, name)[key] for key, count in counts.items()})
            )
        return difference


class _UpTo:
    """Adds up time before an end that moves on: that of the last event so far."""

    def __init__(self) -> None:
        self._sum_ms = 0
        self._ahead: deque[tuple[int, int]] = deque()

    def add(self, start_ms: int, end_ms: int, up_to_ms: int) -> None:
        self._ahead.append((start_ms, end_ms))
        while self._ahead and self._ahead[0][1] <= up_to_ms:
            start_ms, end_ms = self._ahead.popleft()
            self._sum_ms += end_ms - start_ms

    def sum_ms(self, up_to_ms: int) -> int:
        return self._sum_ms + sum(max(min(end_ms, up_to_ms) - start_ms, 0) for start_ms, end_ms in self._ahead)


@dataclass(slots=True)
class _Gpu:
    """One GPU within the stretch that the report is about."""

    spans_before: int = 0
    spans_until: int = 0
    """Spans begun before the stretch, and up to its end."""
    wasted_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WASTED_REASONS, 0.0))
    """Of jobs that count to the stretch."""
    busy_ms: int = 0
    run_busy: _UpTo = field(default_factory=_UpTo)
    idle_ms: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    gaps: array[int] = field(default_factory=lambda: array("q"))
    gap_by_cause_ms: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    gap_by_boundary_ms: dict[Boundary, int] = field(default_factory=lambda: dict.fromkeys(Boundary, 0))
    long_gaps: list[LongGap] = field(default_factory=list)
    idle_since_busy: list[tuple[int, Cause, int]] = field(default_factory=list)
    """Start, cause and length within the stretch; kept only while a gap lies across its border."""


class _EngineAnalysis:
    """What one engine tells."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine = engine
        self._options = options
        self._gpus: dict[str, _Gpu] = {}
        self._untouched_ms = dict.fromkeys(Cause, 0)
        self._latencies: defaultdict[Latency, defaultdict[str, array[int]]] = defaultdict(
            lambda: defaultdict(lambda: array("q"))
        )
        self._jobs: deque[Job] = deque()
        self._rows: list[JobRow] = []
        self._gaps_before: dict[int, dict[tuple[str, int], int]] = {}
        self._gaps_of: Counter[int] = Counter()
        self._synth_ends: tuple[int, int, int] | None = None
        """The first, the last, and how many."""
        self._synth_time, self._lane_time, self._any_synth = _UpTo(), 0, 0
        self._borders: tuple[float, float] | None = None
        self.bounded = options.bounded
        self.within = self.holds(engine.ledger.start_ms)
        """The log is being read within the stretch that the report is about."""
        self.counted = _Counted()
        """What the pipeline counted within it."""

    # --- the stretch ---------------------------------------------------------------------------------------------

    @property
    def _stretch(self) -> tuple[float, float]:
        """Where the stretch that the report is about begins and ends on this engine's clock."""
        if self._borders is not None:
            return self._borders
        start, end = self._options.start, self._options.end
        anchored_ms = self._engine.anchor.start_unix_ms
        known = anchored_ms is not None or not any(bound and bound.wall_clock for bound in (start, end))

        def offset_ms(bound: Bound | None, default: float) -> float:
            if bound is None:
                return default
            if not bound.wall_clock:
                return bound.value_s * 1000
            # Not anchored (yet): nothing is known to lie within.
            return math.inf if anchored_ms is None else bound.value_s * 1000 - anchored_ms

        borders = offset_ms(start, -math.inf), offset_ms(end, math.inf)
        if known:
            # From here on for good, however the anchor improves: or milliseconds would count twice, or not at all.
            borders = self._borders = (
                borders[0] if math.isinf(borders[0]) else round(borders[0]),
                borders[1] if math.isinf(borders[1]) else round(borders[1]),
            )
        elif end is not None and end.wall_clock:
            borders = math.inf, -math.inf
        return borders

    def holds(self, at_ms: int) -> bool:
        """Whether something that happened then counts."""
        start_ms, end_ms = self._stretch
        return start_ms <= at_ms <= end_ms

    def _clip(self, start_ms: int, end_ms: int) -> tuple[int, int]:
        low_ms, high_ms = self._stretch
        return int(max(start_ms, min(low_ms, end_ms))), int(min(end_ms, max(high_ms, start_ms)))

    # --- what the pipeline tells -----------------------------------------------------------------------------------

    def time(self, stretch: Stretch) -> None:
        start_ms, end_ms = self._clip(stretch.start_ms, stretch.end_ms)
        length_ms = max(end_ms - start_ms, 0)
        for name, cause in stretch.gpus.items():
            gpu = self._gpu_of(name)
            if self.bounded:
                self._note_border(gpu, name, stretch, cause, length_ms)
            if cause is not None:
                gpu.idle_ms[cause] += length_ms
            elif length_ms:
                gpu.busy_ms += length_ms
                gpu.run_busy.add(start_ms, end_ms, self._engine.last_event_ms or 0)
        self._untouched_ms[stretch.untouched] += length_ms
        if lanes := stretch.units[Stage.SYNTH]:
            self._lane_time += lanes * length_ms
            self._any_synth += length_ms
            if self._synth_ends is not None:
                first_ms, last_ms, _ = self._synth_ends
                if end_ms > max(start_ms, first_ms):
                    self._synth_time.add(max(start_ms, first_ms), end_ms, last_ms)

    def _note_border(self, gpu: _Gpu, name: str, stretch: Stretch, cause: Cause | None, length_ms: int) -> None:
        low_ms, high_ms = self._stretch
        spans = self._engine.ledger.accounts[name].totals.spans
        if stretch.start_ms < low_ms:
            gpu.spans_before = spans
        if stretch.start_ms < high_ms:
            gpu.spans_until = spans
        if cause is None:
            gpu.idle_since_busy.clear()
        else:
            gpu.idle_since_busy.append((stretch.start_ms, cause, length_ms))

    def _gpu_of(self, name: str) -> _Gpu:
        gpu = self._gpus.get(name)
        if gpu is None:
            gpu = self._gpus[name] = _Gpu(idle_ms=dict(self._untouched_ms))
        return gpu

    def gap(self, gap: Gap) -> None:
        gpu = self._gpu_of(gap.gpu)
        start_ms, end_ms = self._clip(gap.start_ms, gap.end_ms)
        by_cause_ms = gap.by_cause_ms
        if (start_ms, end_ms) != (gap.start_ms, gap.end_ms):
            # Across a border of the stretch: only its part within counts.
            by_cause_ms = Counter()
            for at_ms, cause, length_ms in gpu.idle_since_busy:
                if at_ms >= gap.start_ms:
                    by_cause_ms[cause] += length_ms
        if end_ms <= start_ms:
            return
        gpu.gaps.append(end_ms - start_ms)
        for cause, ms in by_cause_ms.items():
            gpu.gap_by_cause_ms[cause] += ms
        gpu.gap_by_boundary_ms[gap.boundary] += end_ms - start_ms
        self._gaps_of[gap.number_after] += end_ms - start_ms
        if gap.boundary is Boundary.CROSS_JOB:
            self._gaps_before.setdefault(gap.number_after, {})[gap.gpu, gap.end_ms] = gap.duration_ms
        long_ms = self._options.long_gap_ms
        if long_ms is not None and end_ms - start_ms >= long_ms:
            gpu.long_gaps.append(
                LongGap(
                    start_ms, end_ms - start_ms, gap.job_before, gap.job_after, gap.boundary, gap.cause, by_cause_ms
                )
            )

    def latency(self, what: Latency, job: Job, at_ms: int, seconds: float) -> None:
        if not self.holds(at_ms):
            return
        self._latencies[what][job.kind].append(round(seconds * 1000))
        if what is Latency.SYNTH:
            first_ms, last_ms, count = self._synth_ends or (at_ms, at_ms, 0)
            self._synth_ends = min(first_ms, at_ms), max(last_ms, at_ms), count + 1

    def job(self, job: Job) -> None:
        # Its spans may still be open, its gaps not settled: wait a while.
        self._jobs.append(job)
        if len(self._jobs) > _JOBS_KEPT:
            oldest = self._jobs.popleft()
            if oldest.busy_with:
                self._jobs.append(oldest)
            else:
                self._row(oldest)

    def _row(self, job: Job) -> None:
        units = list(job.units.values())
        number = job.account.number
        before = self._gaps_before.pop(number, {})
        gap_ms = self._gaps_of.pop(number, 0)
        last_ms = max((_last_ms(unit) for unit in units), default=job.first_ms)
        if not self.holds(last_ms):
            return
        if (reason := job.account.wasted) is not None:
            for name, busy_ms in job.account.busy_ms.items():
                self._gpu_of(name).wasted_ms[reason] += busy_ms
        first = min((unit for unit in units if unit.start_ms is not None), key=_start_ms, default=None)
        latency = job.latency if job.outcome is ProofOutcome.PROVED else None
        synth = [
            unit.synth_end_ms - unit.synth_start_ms
            for unit in units
            if unit.synth_start_ms is not None and unit.synth_end_ms is not None
        ]
        spans = [unit.end_ms - unit.start_ms for unit in units if unit.start_ms is not None and unit.end_ms is not None]
        self._rows.append(
            JobRow(
                job_id=job.job_id,
                incarnation=job.incarnation,
                proof_kind=job.kind,
                outcome=job.outcome,
                partitions=len(units),
                enqueued_ms=job.enqueued_ms,
                synth_start_ms=min(
                    (unit.synth_start_ms for unit in units if unit.synth_start_ms is not None), default=None
                ),
                synth_end_ms=max((unit.synth_end_ms for unit in units if unit.synth_end_ms is not None), default=None),
                gpu_start_ms=first.start_ms if first else None,
                gpu_end_ms=max((unit.end_ms for unit in units if unit.end_ms is not None), default=None),
                gap_before_ms=before.get((first.gpu or UNKNOWN_GPU, first.start_ms or 0), 0) if first else 0,
                total_ms=latency[1] if latency else None,
                total_from=latency[0] if latency else None,
                last_ms=last_ms,
                units=Counter(unit.outcome for unit in units if unit.outcome is not None),
                synth_ms=sum(synth),
                span_ms=sum(spans),
                busy_ms=sum(job.account.busy_ms.values()),
                gap_ms=gap_ms,
            )
        )

    # --- the report ------------------------------------------------------------------------------------------------

    @property
    def run(self) -> tuple[int, int] | None:
        """From the first event to the last one so far, within the stretch; None without any."""
        first_ms, last_ms = self._engine.first_event_ms, self._engine.last_event_ms
        return None if first_ms is None or last_ms is None else self._clip(first_ms, last_ms)

    def report(self, chips: Mapping[str, Chip]) -> EngineReport:
        """Everything, with what recordings say of the chips."""
        engine, counted = self._engine, self.counted
        for job in (*self._jobs, *engine.units.undecided):
            self._row(job)
        self._rows.sort(key=lambda row: (row.last_ms if row.gpu_start_ms is None else row.gpu_start_ms, row.job_id))
        start_ms, end_ms = self._clip(engine.ledger.start_ms, max(engine.frontier_ms, engine.ledger.start_ms))
        run_start_ms, run_end_ms = self.run or (start_ms, start_ms)
        run_ms = max(run_end_ms - run_start_ms, 0)
        gpus = {
            name: self._gpu(name, run_end_ms, run_ms, counted.kernel_ms.get(name), chips)
            for name in sorted(engine.ledger.accounts)
        }
        supply = self._supply(working(gpus))
        proofs: defaultdict[LatencyBasis, defaultdict[str, array[int]]] = defaultdict(
            lambda: defaultdict(lambda: array("q"))
        )
        for row in self._rows:
            if row.total_ms is not None and row.total_from is not None:
                proofs[row.total_from][row.proof_kind].append(row.total_ms)
        evidence = {
            "jobs": engine.ledger.jobs_announced,
            "spans": engine.ledger.spans_logged,
            "gpu_map": engine.gpus_known,
            "wall_clock": engine.anchor.start_unix_ms is not None,
        }
        latencies = {what: _values(self._latencies[what]) for what in Latency}
        anchored_ms = engine.anchor.start_unix_ms
        return EngineReport(
            start_ms=start_ms,
            end_ms=max(end_ms, start_ms),
            first_event_ms=engine.first_event_ms,
            last_event_ms=engine.last_event_ms,
            start_unix_s=None if anchored_ms is None else anchored_ms / 1000,
            start_uncertainty_s=engine.start_uncertainty_s(),
            settings=dict(engine.settings),
            evidence=evidence,
            lines=Lines(
                counted.lines["timeline"], counted.lines["recovered"], counted.lines["lost"], dict(counted.unparsed)
            ),
            gpus=gpus,
            synth=latencies[Latency.SYNTH],
            gpu_span=latencies[Latency.SPAN],
            ready_wait=latencies[Latency.READY_WAIT],
            handoff=latencies[Latency.HANDOFF],
            proofs={basis: _values(by_kind) for basis, by_kind in proofs.items()},
            jobs=tuple(self._rows),
            throughput=self._throughput(run_ms),
            supply=supply,
            kernel_phases={
                phase: (count, counted.phase_ms[phase] / 1000) for phase, count in counted.phase_counts.items() if count
            },
            trouble={key: count for key, count in counted.trouble.items() if count},
            verdict=verdict_on(
                gpus,
                supply,
                synth=Values.pooled(latencies[Latency.SYNTH].values()),
                ready_wait=Values.pooled(latencies[Latency.READY_WAIT].values()),
                handoff=Values.pooled(latencies[Latency.HANDOFF].values()),
                evidence=evidence,
            ),
        )

    def _gpu(
        self, name: str, run_end_ms: int, run_ms: int, kernel_ms: int | None, chips: Mapping[str, Chip]
    ) -> GpuReport:
        engine, gpu = self._engine, self._gpu_of(name)
        account = engine.ledger.accounts[name]
        shares = engine.ledger.open_gap(account)
        open_gap_ms = None
        if shares is not None:
            start_ms, end_ms = self._clip(engine.frontier_ms - sum(shares.values()), engine.frontier_ms)
            open_gap_ms = max(end_ms - start_ms, 0)
        return GpuReport(
            spans=gpu.spans_until - gpu.spans_before if self.bounded else account.totals.spans,
            busy_ms=gpu.busy_ms,
            run_busy_ms=gpu.run_busy.sum_ms(run_end_ms),
            run_ms=run_ms,
            wasted_ms=gpu.wasted_ms if self.bounded else dict(account.totals.wasted_ms),
            kernel_ms=kernel_ms,
            idle_ms=gpu.idle_ms,
            gaps=Values(gpu.gaps),
            gap_by_cause_ms=gpu.gap_by_cause_ms,
            gap_by_boundary_ms=gpu.gap_by_boundary_ms,
            open_gap_ms=open_gap_ms,
            long_gaps=tuple(gpu.long_gaps),
            # A log that does not name its GPU means the only one.
            chip=next(iter(chips.values())) if name == UNKNOWN_GPU and len(chips) == 1 else chips.get(name),
        )

    def _supply(self, gpus: Collection[GpuReport]) -> Supply:
        demand_per_s = sum(gpu.spans * 1000 / gpu.busy_ms for gpu in gpus if gpu.busy_ms)
        units_per_s, standstill_ms = None, 0
        if self._synth_ends is not None:
            first_ms, last_ms, count = self._synth_ends
            active_ms = self._synth_time.sum_ms(last_ms)
            standstill_ms = max(last_ms - first_ms - active_ms, 0)
            if count > 1 and active_ms:
                units_per_s = (count - 1) * 1000 / active_ms
        lanes = self._lane_time / self._any_synth if self._any_synth else None
        return Supply(units_per_s, demand_per_s or None, lanes, standstill_ms)

    def _throughput(self, run_ms: int) -> Throughput:
        proved = sorted(row.last_ms for row in self._rows if row.outcome is ProofOutcome.PROVED)
        partitions = sum(row.units.get(UnitOutcome.PROVED, 0) for row in self._rows)
        steady = None
        if len(proved) > 2 and proved[-2] > proved[0]:
            steady = (len(proved) - 2) * 3_600_000 / (proved[-2] - proved[0])
        return Throughput(run_ms, len(proved), partitions, steady)


def _values(by_kind: Mapping[str, Iterable[int]]) -> dict[str, Values]:
    return {kind: Values(values) for kind, values in by_kind.items()}


def _start_ms(unit: Unit) -> int:
    return unit.start_ms or 0


def _last_ms(unit: Unit) -> int:
    """When the last was seen of a unit: a unit that failed after all may have ended before."""
    return unit.entered_ms if unit.end_ms is None else unit.end_ms
