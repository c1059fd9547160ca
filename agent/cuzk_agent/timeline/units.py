"""Jobs and their units on their way through the stages, and every exit a stage has.

A unit is one partition (or whole proof) of one incarnation of a job. What happens to units is counted at once, and put
into the ledger as edges, which settles it in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from cuzk_agent.timeline.ledger import STAGE_RANKS, JobAccount, Ledger, Rank, Track
from cuzk_agent.timeline.lines import TimelineEvent
from cuzk_agent.timeline.state import Exemplar, Latency, LatencyBasis, ProofOutcome, Stage, UnitOutcome
from cuzk_agent.timeline.tally import PROOF_KINDS, Counters, HistogramTally

UNITS_PER_KIND = {"porep-c2": 10, "snap-update": 16}
"""Partitions of a job until its dispatch line tells; the other kinds are proved whole."""

_KIND_BY_PREFIX = {
    "porep-": "porep-c2",
    "ps-porep-": "porep-c2",
    "snap-": "snap-update",
    "wdpost-": "window-post",
    "winpost-": "winning-post",
}
"""How the production callers name their jobs: the kind where no line tells it."""

_SEEN_BY = {
    "SYNTH_START": "synth_start_ms",
    "SYNTH_END": "synth_end_ms",
    "CHAN_SEND": "queued_ms",
    "GPU_QUEUE": "queued_ms",
    "GPU_PICKUP": "picked_up_ms",
    "GPU_START": "start_ms",
    "GPU_END": "end_ms",
}
"""The field of a unit that tells whether it has seen an event of this name."""

_MIN_AGE_LIMIT_MS = 600_000
_AGE_FACTOR = 3
_RECENT = 64
"""Stage durations remembered for the age limit, for each stage and kind."""
_TICK_MS = 1000
"""Exits by age happen on whole seconds of the engine's clock, so that they do not depend on when one looks."""
_FAILURE_GRACE_MS = 5000
"""How long a failed unit's job may still turn out proved before the job counts as failed."""
_ASSEMBLY_GRACE_MS = 60_000
"""How long the assembly and self-check of a finished job may take before its spans alone count as success."""
_OVERTAKEN_GRACE_MS = 250
"""Lines of two workers that race may be this far out of order."""
_MAX_OPEN_JOBS = 10_000
_MAX_UNITS_PER_JOB = 1024
_MAX_UNITS = 50_000
"""Of all jobs together, the closed ones included."""
_MAX_INCARNATIONS = 16
"""Open ones of one job id."""
_MAX_CLOSED_JOBS = 256


@dataclass(slots=True, eq=False)
class Unit:
    """One partition (or whole proof) of one incarnation of a job."""

    job: Job
    partition: int | None
    track: Track
    rank: Rank = Rank.NEW
    entered_ms: int = 0
    """When it came to its present stage."""
    gpu: str | None = None
    worker: int | None = None
    synth_start_ms: int | None = None
    synth_end_ms: int | None = None
    queued_ms: int | None = None
    ready_ms: int | None = None
    """When it was queued, or else its synthesis ended."""
    picked_up_ms: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    outcome: UnitOutcome | None = None
    """None while in flight."""
    overtaken: int = 0
    shelf: tuple[Rank, str] | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One incarnation of a job: its id may have run before, and may run again at the same time."""

    job_id: str
    incarnation: int
    kind: str
    first_ms: int
    account: JobAccount
    enqueued_ms: int | None = None
    expected: int | None = None
    """How many units it has, where that is known."""
    units: dict[int | None, Unit] = field(default_factory=dict)
    failed_ms: int | None = None
    siblings_go_on: bool = False
    """It failed, but the daemon does not know and proves the rest."""
    total_ms: int | None = None
    """The daemon's own latency, from submission."""
    assembled: bool = False
    """All its partitions are there."""
    last_end_ms: int | None = None
    due_ms: int | None = None
    """When the job is decided if nothing more is heard of it."""
    outcome: ProofOutcome | None = None
    """None while the job is open."""
    repeated: bool = False
    """Proved, and so was an earlier incarnation: once was for nothing."""

    @property
    def busy_with(self) -> int:
        """Units in any stage."""
        return sum(unit.outcome is None for unit in self.units.values())

    @property
    def latency(self) -> tuple[LatencyBasis, int] | None:
        """How long it took in milliseconds, and from when on; None while that is not known."""
        if self.total_ms is not None:
            return LatencyBasis.SUBMISSION, self.total_ms
        if self.last_end_ms is not None:
            return LatencyBasis.FIRST_EVENT, self.last_end_ms - self.first_ms
        return None

    @property
    def wasted_units(self) -> list[Unit]:
        """Units proved although their job had failed."""
        if self.outcome is not ProofOutcome.FAILED or self.failed_ms is None:
            return []
        return [
            unit
            for unit in self.units.values()
            if unit.outcome is UnitOutcome.PROVED and unit.end_ms is not None and unit.end_ms >= self.failed_ms
        ]


class Units:
    """The jobs and units of one engine."""

    def __init__(
        self,
        ledger: Ledger,
        counters: Counters,
        *,
        age_limit_ms: int | None = None,
        numbers: Iterator[int],
        exemplar: Callable[[str, float, int], Exemplar],
        on_latency: Callable[[Latency, Job, int, float], None],
        on_job: Callable[[Job], None],
        on_unit: Callable[[Unit], None] = lambda _: None,
    ) -> None:
        """`numbers` tells jobs and units apart in facts, `exemplar(job_id, seconds, at_ms)` dates an observation,
        `on_latency(what, job, at_ms, seconds)` hears of every latency, `on_job` of every job whose outcome is decided,
        `on_unit` of every unit that has a new track: it is new, or was given up and lives.
        `age_limit_ms` None: three times the longest recent stay of the same stage and kind, at least ten minutes."""
        self._ledger = ledger
        self._counters = counters
        self._age_limit_ms = age_limit_ms
        self._numbers = numbers
        self._exemplar = exemplar
        self._on_latency = on_latency
        self._on_job = on_job
        self._on_unit = on_unit
        self._jobs: dict[str, list[Job]] = {}
        self._open: dict[Job, None] = {}
        self._closed: dict[Job, None] = {}
        self._held = 0
        """Units of open and closed jobs."""
        self._shelves: dict[tuple[Rank, str], dict[Unit, None]] = {
            (rank, kind): {} for rank in Rank if Rank.NEW < rank < Rank.GONE for kind in PROOF_KINDS
        }
        self._stays: dict[tuple[Rank, str], deque[int]] = {key: deque(maxlen=_RECENT) for key in self._shelves}
        self._whole_ready: dict[Unit, None] = {}
        self._overtaken: dict[Unit, int] = {}
        self._picked_up_by: dict[int, Unit] = {}
        self._whole_ended: deque[Unit] = deque(maxlen=32)
        self._last_synth_start_ms = ledger.start_ms
        self._ticked_ms = ledger.start_ms
        """Up to here, all that was due has happened."""
        self._spans_seen = False
        self.assembly_logged = False
        """The log tells when a proof is assembled and checked: a job is not done with its last span."""

    # --- TIMELINE events -----------------------------------------------------------------------------------------

    def event(self, event: TimelineEvent, gpu: str | None) -> None:
        """Takes in a TIMELINE event; `gpu` is that of its worker, None if it has none or it is not known."""
        unit = self._unit_for(event) if event.name in _SEEN_BY else None
        if unit is None:
            return
        at_ms = event.offset_ms
        match event.name:
            case "SYNTH_START":
                self._synth_start(unit, at_ms, event.proof_kind)
            case "SYNTH_END":
                self._synth_end(unit, at_ms, event.synth_ms)
            case "CHAN_SEND" | "GPU_QUEUE":
                self._enter(unit, Rank.READY, at_ms)
                unit.queued_ms = unit.ready_ms = at_ms
            case "GPU_PICKUP":
                self._pick_up(unit, at_ms, event.worker, gpu)
            case "GPU_START":
                self._start(unit, at_ms, event.worker, gpu)
            case "GPU_END":
                self._end(unit, at_ms, event, gpu)
        if unit.job.kind == "other":
            self._counters.other_seen = True

    def _synth_start(self, unit: Unit, at_ms: int, kind: str | None) -> None:
        self._last_synth_start_ms = max(self._last_synth_start_ms, at_ms)
        self._learn_kind(unit.job, kind)
        if unit.partition is None:
            for other in list(unit.job.units.values()):
                if other is not unit and other.rank is Rank.WAITING:
                    self._forget(other, at_ms)
        self._enter(unit, Rank.SYNTH, at_ms)
        unit.synth_start_ms = at_ms

    def _synth_end(self, unit: Unit, at_ms: int, synth_ms: int | None) -> None:
        unit.synth_end_ms = at_ms
        if unit.synth_start_ms is None and synth_ms is not None:
            unit.synth_start_ms = at_ms - synth_ms
        if synth_ms is None and unit.synth_start_ms is not None:
            synth_ms = at_ms - unit.synth_start_ms
        if synth_ms is not None:
            self._observe(Latency.SYNTH, unit.job, at_ms, synth_ms)
        self._enter(unit, Rank.READY, at_ms)
        unit.ready_ms = at_ms

    def _pick_up(self, unit: Unit, at_ms: int, worker: int | None, gpu: str | None) -> None:
        if worker is not None:
            before = self._picked_up_by.get(worker)
            if before is not None and before is not unit and before.rank is Rank.PICKED_UP:
                failed = before.job.failed_ms is not None
                self._leave(before, UnitOutcome.DROPPED if failed else UnitOutcome.LOST, at_ms)
        unit.picked_up_ms = at_ms
        if unit.rank >= Rank.PICKED_UP:
            return
        unit.worker, unit.gpu = worker, gpu
        if unit.ready_ms is not None:
            self._observe(Latency.READY_WAIT, unit.job, at_ms, at_ms - unit.ready_ms)
        self._enter(unit, Rank.PICKED_UP, at_ms, gpu)
        if worker is not None:
            self._picked_up_by[worker] = unit
        self._suspect_overtaken(unit, at_ms)

    def _suspect_overtaken(self, picked_up: Unit, at_ms: int) -> None:
        """Whole-proof units share one key of the daemon's queue: a second one silently replaces the first."""
        if picked_up.ready_ms is None:
            return
        for waiting in self._whole_ready:
            if waiting.ready_ms is not None and waiting.ready_ms < picked_up.ready_ms:
                waiting.overtaken += 1
                if picked_up.partition is None or waiting.overtaken > 1:
                    self._overtaken.setdefault(waiting, at_ms + _OVERTAKEN_GRACE_MS)

    def _start(self, unit: Unit, at_ms: int, worker: int | None, gpu: str | None) -> None:
        if unit.picked_up_ms is not None:
            self._observe(Latency.HANDOFF, unit.job, at_ms, at_ms - unit.picked_up_ms)
        unit.worker, unit.gpu, unit.start_ms = worker, gpu, at_ms
        self._spans_seen = True
        self._ledger.learn(at_ms, spans_logged=True)
        self._enter(unit, Rank.GPU, at_ms, gpu)

    def _end(self, unit: Unit, at_ms: int, event: TimelineEvent, gpu: str | None) -> None:
        if unit.start_ms is None and event.gpu_ms is not None:
            # Its GPU_START was lost.
            start_ms = max(at_ms - event.gpu_ms, unit.picked_up_ms or self._ledger.start_ms)
            self._start(unit, start_ms, event.worker, gpu)
        self._proved(unit, at_ms)

    def _proved(self, unit: Unit, at_ms: int) -> None:
        job = unit.job
        if unit.start_ms is not None and unit.end_ms is None:
            self._observe(Latency.SPAN, job, at_ms, at_ms - unit.start_ms)
        unit.end_ms = at_ms
        job.last_end_ms = max(at_ms, job.last_end_ms or at_ms)
        if unit.partition is None:
            self._whole_ended.append(unit)
        self._leave(unit, UnitOutcome.PROVED, at_ms)
        self._consider(job, at_ms)

    def _observe(self, what: Latency, job: Job, at_ms: int, latency_ms: int) -> None:
        # Of disordered lines the later stage may seem to come first.
        seconds = max(latency_ms, 0) / 1000
        counters, exemplar = self._counters, None
        tally: HistogramTally
        match what:
            case Latency.READY_WAIT:
                tally = counters.ready_wait
            case Latency.HANDOFF:
                tally = counters.handoff
            case _:
                tally = (counters.synth if what is Latency.SYNTH else counters.span)[job.kind]
                exemplar = self._exemplar(job.job_id, seconds, at_ms)
        tally.observe(seconds, exemplar)
        self._on_latency(what, job, at_ms, seconds)

    # --- tracing lines -------------------------------------------------------------------------------------------

    def enqueued(self, job_id: str, kind: str | None, at_ms: int) -> None:
        """A job was accepted: its units wait. The same id again is another incarnation."""
        job = self._new_job(job_id, at_ms)
        self._learn_kind(job, kind)
        job.enqueued_ms = at_ms
        count = UNITS_PER_KIND.get(job.kind)
        job.expected = count or 1
        for partition in range(count) if count else (None,):
            self._enter(self._unit(job, partition), Rank.WAITING, at_ms)

    def dispatched(self, job_id: str, count: int, at_ms: int) -> None:
        """The daemon tells how many partitions the job has."""
        job = self._latest(job_id)
        if job is None or not 0 < count <= _MAX_UNITS_PER_JOB:
            return
        job.expected = count
        for partition, unit in list(job.units.items()):
            if (partition is None or partition >= count) and unit.rank is Rank.WAITING:
                self._forget(unit, at_ms)
        if job.enqueued_ms is not None:
            for partition in range(count):
                if partition not in job.units:
                    self._enter(self._unit(job, partition), Rank.WAITING, at_ms)

    def learn_kind(self, job_id: str, kind: str) -> None:
        """A line tells the kind of a job."""
        if job := self._latest(job_id):
            self._learn_kind(job, kind)

    def unit_failed(self, job_id: str, partition: int | None, at_ms: int, *, siblings_go_on: bool = False) -> None:
        """A unit failed, and with it its job: at once if it had not come to a GPU, else unless the proof turns out well
        after all. Then its siblings that are not on a GPU are given up, too, if the daemon does not prove them all the
        same."""
        job = self._latest(job_id)
        if job is None:
            return
        unit = job.units.get(partition)
        at_ms = max(at_ms, unit.entered_ms if unit else at_ms)
        if unit is None and len(job.units) < _MAX_UNITS_PER_JOB:
            unit = self._unit(job, partition)
        if unit is not None:
            self._leave(unit, UnitOutcome.FAILED, at_ms)
        if job.failed_ms is None:
            job.failed_ms = at_ms
        job.siblings_go_on = job.siblings_go_on or siblings_go_on
        if unit is None or unit.start_ms is not None or siblings_go_on:
            self._decide_by(job, at_ms + _FAILURE_GRACE_MS)
            self._consider(job, at_ms)
        else:
            self._close(job, ProofOutcome.FAILED, at_ms)

    def unit_dropped(self, job_id: str, partition: int | None, at_ms: int) -> None:
        """The daemon gives up this unit because its job has failed."""
        failed = self._incarnation(job_id, partition, lambda unit: unit.job.failed_ms is not None and not unit.end_ms)
        if job := failed or self._latest(job_id):
            unit = job.units.get(partition)
            if unit is not None and unit.outcome is None:
                self._leave(unit, UnitOutcome.DROPPED, max(at_ms, unit.entered_ms))
            self._job_failed(job, at_ms)

    def result_discarded(self, job_id: str, partition: int | None, at_ms: int) -> None:
        """The daemon throws away a unit that came from a GPU because its job has failed."""
        started = self._incarnation(job_id, partition, lambda unit: unit.start_ms is not None)
        if job := started or self._latest(job_id):
            self._job_failed(job, at_ms)

    def _job_failed(self, job: Job, at_ms: int) -> None:
        if job.failed_ms is None:
            job.failed_ms = at_ms
        self._close(job, ProofOutcome.FAILED, at_ms)

    def _incarnation(self, job_id: str, partition: int | None, fits: Callable[[Unit], bool]) -> Job | None:
        """The latest whose unit fits what a line tells of it: a job that has failed may run again by then."""
        for job in reversed(self._jobs.get(job_id, ())):
            unit = job.units.get(partition)
            if unit is not None and fits(unit):
                return job
        return None

    def prove_complete(self, job_id: str, partition: int | None, at_ms: int) -> bool:
        """The daemon says that this partition is proved. Normally its GPU_END was there before. Returns False if no
        unit was ever seen to start: a daemon that logs no spans."""
        job = self._latest(job_id)
        unit = job.units.get(partition) or job.units.get(None) if job else None
        if unit is None or unit.outcome is not None:
            return True
        self._proved(unit, max(at_ms, unit.entered_ms))
        return self._spans_seen

    def assembled(self, job_id: str, total_ms: int | None, at_ms: int) -> None:
        """All partitions are there. A PoRep is then checked by the daemon itself; the others are done."""
        self.assembly_logged = True
        if job := self._latest(job_id):
            job.total_ms, job.assembled = total_ms, True
            for unit in list(job.units.values()):
                if unit.rank is Rank.WAITING:
                    # Proved as part of another job's batch: its own units never came.
                    self._forget(unit, at_ms)
            if job.kind == "porep-c2":
                self._decide_by(job, at_ms + _ASSEMBLY_GRACE_MS)
            else:
                self._close(job, ProofOutcome.PROVED, at_ms)

    def whole_proof_completed(self, total_ms: int | None, gpu_ms: int | None, at_ms: int) -> None:
        """A whole-proof job is done; the line has no id: it is the GPU_END just before with the same `gpu_ms`."""
        for unit in reversed(self._whole_ended):
            if unit.job.outcome is None and unit.start_ms is not None and unit.end_ms is not None:
                span_ms = unit.end_ms - unit.start_ms
                if gpu_ms is None or abs(span_ms - gpu_ms) <= 2:
                    self.assembled(unit.job.job_id, total_ms, at_ms)
                    return

    def self_checked(self, job_id: str, passed: bool, at_ms: int) -> None:
        """The daemon verified its own PoRep."""
        self.assembly_logged = True
        if job := self._latest(job_id):
            if passed:
                self._close(job, ProofOutcome.PROVED, at_ms)
            else:
                self._close(job, ProofOutcome.FAILED, at_ms)

    def kernels_ran(self, job_id: str, partition: int | None, start_ms: int, end_ms: int) -> None:
        """The log tells when this unit's kernels had its GPU to themselves."""
        job = self._latest(job_id)
        if job is not None and partition in job.units:
            job.units[partition].track.kernel_ms = (start_ms, end_ms)

    def gpu_of(self, job_id: str, partition: int) -> str | None:
        """The GPU that proved this partition, if that is known."""
        job = self._latest(job_id)
        unit = job.units.get(partition) if job else None
        return unit.gpu if unit else None

    # --- time ----------------------------------------------------------------------------------------------------

    def tick(self, to_ms: int) -> None:
        """Lets everything that is due by `to_ms` happen: age limits, graces, verdicts."""
        while True:
            next_ms = (self._ticked_ms // _TICK_MS + 1) * _TICK_MS
            due_ms = self._next_due_ms() if next_ms <= to_ms else None
            tick_ms = None if due_ms is None else max(-(-due_ms // _TICK_MS) * _TICK_MS, next_ms)
            if tick_ms is None or tick_ms > to_ms:
                self._ticked_ms = max(to_ms, self._ticked_ms)
                return
            self._ticked_ms = tick_ms
            self._happen(tick_ms)

    def _next_due_ms(self) -> int | None:
        due = [self._expiry_ms(next(iter(shelf))) for shelf in self._shelves.values() if shelf]
        due += self._overtaken.values()
        due += [job.due_ms for job in self._open if job.due_ms is not None]
        return min(due, default=None)

    def _happen(self, at_ms: int) -> None:
        for unit, due_ms in list(self._overtaken.items()):
            if due_ms <= at_ms:
                # Replaced in the queue: nothing of it can come any more.
                self._leave(unit, UnitOutcome.LOST, at_ms)
                self._close(unit.job, ProofOutcome.LOST, at_ms)
        for shelf in self._shelves.values():
            while shelf and self._expiry_ms(unit := next(iter(shelf))) <= at_ms:
                self._leave(unit, UnitOutcome.LOST, at_ms)
                self._consider(unit.job, at_ms)
        for job in [job for job in self._open if job.due_ms is not None and job.due_ms <= at_ms]:
            self._verdict(job, at_ms)

    def _expiry_ms(self, unit: Unit) -> int:
        since_ms = unit.entered_ms
        if unit.rank is Rank.WAITING:
            # A long queue is no loss while it moves.
            since_ms = max(since_ms, self._last_synth_start_ms)
        return since_ms + self._limit_ms(unit.shelf)

    def _limit_ms(self, shelf: tuple[Rank, str] | None) -> int:
        if self._age_limit_ms is not None:
            return self._age_limit_ms
        longest_ms = max(self._stays[shelf], default=0) if shelf else 0
        return max(_MIN_AGE_LIMIT_MS, _AGE_FACTOR * longest_ms)

    def _verdict(self, job: Job, at_ms: int) -> None:
        job.due_ms = None
        if job.failed_ms is not None:
            self._close(job, ProofOutcome.FAILED, at_ms)
        elif job.busy_with:
            self._decide_by(job, at_ms + _ASSEMBLY_GRACE_MS)
        elif (job.units or job.assembled) and all(unit.outcome is UnitOutcome.PROVED for unit in job.units.values()):
            self._close(job, ProofOutcome.PROVED, at_ms)
        else:
            self._close(job, ProofOutcome.LOST, at_ms)

    def abandon(self, at_ms: int) -> None:
        """The engine ended: what is in flight is abandoned."""
        for shelf in self._shelves.values():
            for unit in list(shelf):
                self._leave(unit, UnitOutcome.ABANDONED, at_ms)
        for job in list(self._open):
            if job.failed_ms is not None:
                self._close(job, ProofOutcome.FAILED, at_ms)
            elif job.due_ms is not None and self._all_proved(job):
                self._close(job, ProofOutcome.PROVED, at_ms)
            else:
                self._close(job, ProofOutcome.ABANDONED, at_ms)

    def count_from_here(self) -> None:
        """What jobs have taken of the GPUs up to now is not counted."""
        for job in chain(self._open, self._closed):
            job.account.busy_ms.clear()

    # --- what is in flight -------------------------------------------------------------------------------------

    def in_flight(self) -> Iterator[tuple[Stage, int, int | None]]:
        """Each stage with its number of units, and since when (ms) the oldest of them is there."""
        for stage, rank in STAGE_RANKS.items():
            shelves = [shelf for (shelf_rank, _), shelf in self._shelves.items() if shelf_rank is rank and shelf]
            oldest_ms = min((next(iter(shelf)).entered_ms for shelf in shelves), default=None)
            yield stage, sum(map(len, shelves)), oldest_ms

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not any(self._shelves.values())

    @property
    def undecided(self) -> tuple[Job, ...]:
        """The open jobs, oldest first."""
        return tuple(self._open)

    def open_jobs(self) -> dict[str, tuple[int, int | None]]:
        """By kind: the number of open jobs, and since when (ms) the oldest is known."""
        found: dict[str, tuple[int, int | None]] = dict.fromkeys(PROOF_KINDS, (0, None))
        for job in self._open:
            count, oldest_ms = found[job.kind]
            found[job.kind] = (count + 1, job.first_ms if oldest_ms is None else min(oldest_ms, job.first_ms))
        return found

    # --- finding the unit that a line means -----------------------------------------------------------------------

    def _unit_for(self, event: TimelineEvent) -> Unit | None:
        """The unit that this event belongs to, made if it is new; None for a repeated line, or one about a unit that
        was given up with its job."""
        candidates = []
        for job in self._jobs.get(event.job_id, ()):
            unit = job.units.get(event.partition)
            if unit is not None and _may_belong(event, unit):
                candidates.append(unit)
            elif unit is None and event.partition is None and job.outcome is None and job.enqueued_ms is not None:
                # Announced as partitions, proved whole after all.
                return self._unit(job, None)
        # One that was given up and shows signs of life has its outcome already.
        in_flight = [unit for unit in candidates if unit.outcome is None or unit.rank is not Rank.GONE]
        if in_flight:
            # The furthest, and of those the oldest: a line moves a unit on by one stage, unless lines were lost.
            return max(in_flight, key=lambda unit: unit.rank)
        if candidates:
            return self._revive(candidates[-1], event.name)
        latest = self._latest(event.job_id)
        if latest is not None and event.partition not in latest.units:
            return self._unit(latest, event.partition) if len(latest.units) < _MAX_UNITS_PER_JOB else None
        if latest is not None and event.name != "SYNTH_START":
            return None
        job = self._new_job(event.job_id, event.offset_ms)
        if latest is not None:
            job.kind, job.expected = latest.kind, latest.expected
        return self._unit(job, event.partition)

    def _revive(self, unit: Unit, event_name: str) -> Unit | None:
        """A unit that was given up shows a sign of life. It was counted already, and is not counted again."""
        if unit.outcome in (UnitOutcome.PROVED, UnitOutcome.FAILED):
            return None
        if unit.outcome is UnitOutcome.DROPPED and event_name not in ("GPU_START", "GPU_END"):
            # Its synthesis goes on all the same, and took as long as it took.
            return unit if event_name == "SYNTH_END" else None
        if event_name != "GPU_END":
            unit.track = self._track(unit.job)
            unit.rank = Rank.NEW
            self._on_unit(unit)
        return unit

    def _latest(self, job_id: str) -> Job | None:
        jobs = self._jobs.get(job_id)
        if not jobs:
            return None
        return next((job for job in jobs if job.outcome is None), jobs[-1])

    def _new_job(self, job_id: str, at_ms: int) -> Job:
        jobs = self._jobs.setdefault(job_id, [])
        incarnation = jobs[-1].incarnation + 1 if jobs else 0
        kind = next((kind for prefix, kind in _KIND_BY_PREFIX.items() if job_id.startswith(prefix)), "other")
        job = Job(job_id, incarnation, kind, at_ms, JobAccount(job_id, next(self._numbers)))
        if kind != "other":
            job.expected = UNITS_PER_KIND.get(kind, 1)
        jobs.append(job)
        self._open[job] = None
        again = [other for other in jobs if other.outcome is None]
        if len(again) > _MAX_INCARNATIONS:
            self._give_up(again[0], at_ms)
        if len(self._open) > _MAX_OPEN_JOBS:
            self._give_up(next(iter(self._open)), at_ms)
        return job

    def _give_up(self, job: Job, at_ms: int) -> None:
        """There is more than one can follow."""
        for unit in job.units.values():
            if unit.rank is not Rank.GONE:
                self._leave(unit, UnitOutcome.LOST, max(at_ms, unit.entered_ms))
        self._close(job, ProofOutcome.LOST if job.failed_ms is None else ProofOutcome.FAILED, at_ms)

    def _make_room(self, keep: Job) -> None:
        while self._held > _MAX_UNITS:
            oldest = next((job for job in chain(self._closed, self._open) if job is not keep), None)
            if oldest is None:
                return
            self._give_up(oldest, self._ledger.frontier_ms)
            if oldest in self._closed:
                self._evict(oldest)

    def _unit(self, job: Job, partition: int | None) -> Unit:
        unit = job.units.get(partition)
        if unit is None:
            unit = job.units[partition] = Unit(job, partition, self._track(job))
            self._held += 1
            self._on_unit(unit)
            self._make_room(job)
        return unit

    def _track(self, job: Job) -> Track:
        return Track(job.account, next(self._numbers))

    def _learn_kind(self, job: Job, kind: str | None) -> None:
        if kind is not None:
            job.kind = kind if kind in PROOF_KINDS else "other"

    # --- moving on -----------------------------------------------------------------------------------------------

    def _enter(self, unit: Unit, rank: Rank, at_ms: int, gpu: str | None = None) -> None:
        if rank <= unit.rank:
            return
        self._note_stay(unit, at_ms)
        self._unshelve(unit)
        if unit.job.failed_ms is None:
            unit.job.due_ms = None
        unit.rank, unit.entered_ms = rank, at_ms
        unit.shelf = (rank, unit.job.kind)
        self._shelves[unit.shelf][unit] = None
        if rank is Rank.READY and unit.partition is None:
            self._whole_ready[unit] = None
        self._ledger.enter(unit.track, rank, at_ms, gpu)

    def _leave(self, unit: Unit, outcome: UnitOutcome, at_ms: int) -> None:
        aged_out = outcome is UnitOutcome.LOST and unit.rank is Rank.GPU
        if outcome is UnitOutcome.PROVED:
            self._note_stay(unit, at_ms)
        self._unshelve(unit)
        if unit.rank is not Rank.GONE:
            unit.rank, unit.entered_ms = Rank.GONE, at_ms
            self._ledger.enter(unit.track, Rank.GONE, at_ms, aged_out=aged_out)
        if unit.outcome is None:
            self._counters.unit_outcomes[outcome] += 1
        if unit.outcome is not UnitOutcome.FAILED:
            unit.outcome = outcome

    def _forget(self, unit: Unit, at_ms: int) -> None:
        """The unit never existed: its job has fewer than was thought."""
        self._unshelve(unit)
        self._ledger.enter(unit.track, Rank.GONE, at_ms)
        del unit.job.units[unit.partition]
        self._held -= 1

    def _note_stay(self, unit: Unit, at_ms: int) -> None:
        """How long a unit stayed that went on: those that were given up would raise the limit that they hit."""
        if unit.shelf is not None:
            self._stays[unit.shelf].append(at_ms - unit.entered_ms)

    def _unshelve(self, unit: Unit) -> None:
        if unit.shelf is not None:
            del self._shelves[unit.shelf][unit]
            unit.shelf = None
        if unit.worker is not None and self._picked_up_by.get(unit.worker) is unit:
            del self._picked_up_by[unit.worker]
        if unit.partition is None:
            self._whole_ready.pop(unit, None)
            self._overtaken.pop(unit, None)

    def _drop_unstarted(self, job: Job, at_ms: int) -> None:
        for unit in job.units.values():
            if unit.outcome is None and unit.rank < Rank.GPU:
                self._leave(unit, UnitOutcome.DROPPED, max(at_ms, unit.entered_ms))

    # --- jobs ----------------------------------------------------------------------------------------------------

    def _decide_by(self, job: Job, due_ms: int) -> None:
        if job.outcome is None:
            job.due_ms = due_ms if job.due_ms is None else min(job.due_ms, due_ms)

    def _all_proved(self, job: Job) -> bool:
        """All units of the job are proved, as far as one can know how many it has."""
        if any(unit.outcome is not UnitOutcome.PROVED for unit in job.units.values()):
            return False
        count = len(job.units)
        if None in job.units:
            return True
        return count == job.expected if job.expected is not None else count in UNITS_PER_KIND.values()

    def _consider(self, job: Job, at_ms: int) -> None:
        """After a unit left: is the job decided?"""
        if job.outcome is not None or job.busy_with:
            return
        if job.failed_ms is not None:
            if len(job.units) == 1:
                self._close(job, ProofOutcome.FAILED, at_ms)
        elif self._all_proved(job):
            if self.assembly_logged or self._ledger.jobs_announced:
                self._decide_by(job, at_ms + _ASSEMBLY_GRACE_MS)
            else:
                self._close(job, ProofOutcome.PROVED, at_ms)
        else:
            job.due_ms = at_ms + self._limit_ms(None)

    def _close(self, job: Job, outcome: ProofOutcome, at_ms: int) -> None:
        if job.outcome is not None:
            return
        job.outcome, job.due_ms = outcome, None
        del self._open[job]
        self._counters.proof_outcomes[job.kind, outcome] += 1
        if outcome is ProofOutcome.PROVED:
            self._proof_done(job, at_ms)
        elif outcome is ProofOutcome.FAILED:
            if not job.siblings_go_on:
                self._drop_unstarted(job, at_ms)
            self._ledger.waste(job.account, "failed", max(at_ms, self._ledger.frontier_ms))
        self._closed[job] = None
        if len(self._closed) > _MAX_CLOSED_JOBS:
            self._evict(next((old for old in self._closed if not old.busy_with), job))
        self._on_job(job)

    def _proof_done(self, job: Job, at_ms: int) -> None:
        for unit in list(job.units.values()):
            if unit.outcome is None and unit.rank is Rank.WAITING:
                # Proved as part of another job's batch: its own units never came.
                self._forget(unit, at_ms)
            elif unit.outcome is None:
                self._leave(unit, UnitOutcome.PROVED, max(at_ms, unit.entered_ms))
        if any(other.outcome is ProofOutcome.PROVED and other is not job for other in self._jobs[job.job_id]):
            job.repeated = True
            self._ledger.waste(job.account, "repeated", max(at_ms, self._ledger.frontier_ms))
        if job.latency is not None:
            basis, latency_ms = job.latency
            seconds = latency_ms / 1000
            self._counters.proof_latency[basis][job.kind].observe(seconds, self._exemplar(job.job_id, seconds, at_ms))

    def _evict(self, job: Job) -> None:
        del self._closed[job]
        self._held -= len(job.units)
        jobs = self._jobs[job.job_id]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.job_id]


def _may_belong(event: TimelineEvent, unit: Unit) -> bool:
    """The unit has not seen this event yet."""
    if event.name == "SYNTH_START":
        return unit.synth_start_ms is None and (unit.rank < Rank.SYNTH or unit.outcome is UnitOutcome.LOST)
    if event.worker is not None and unit.worker not in (None, event.worker):
        return False
    return getattr(unit, _SEEN_BY[event.name]) is None
