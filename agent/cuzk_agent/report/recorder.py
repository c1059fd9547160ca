"""What a picture of a run is made of, told in the order in which the pipeline settles it. Nothing is kept but what is
in flight.

Every engine has its own clock; a picture has one axis for all of them. It is the first engine's clock, and the others
lie on it where the wall clock puts them, or else one after the other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cuzk_agent.report.inputs import InputError, Progress, Tally, Times, read_log
from cuzk_agent.report.nvml import Recording
from cuzk_agent.timeline.engine import Engine
from cuzk_agent.timeline.ledger import UNKNOWN_GPU, Gap, Rank, Stretch, Track
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import Cause, Stage, UnitOutcome
from cuzk_agent.timeline.units import Job, Unit

_WORKERS_MAX = 4096
"""A worker of a higher number is none of a real daemon: those are shown as one."""
_APART_MS = 1000
"""Between engines of which nobody knows how long one came after the other."""
_HISTORY = 1024
"""Stretches of idleness kept for a GPU that becomes known later."""
_HOLE_MS = 2.0
"""Samples further apart have a hole between them."""


@dataclass(frozen=True, slots=True)
class EngineBegun:
    """What follows is of this engine, and in its own time."""

    number: int
    """From 1 on."""
    base_ms: int
    """Where its clock's 0 lies on the axis."""
    start_ms: int
    """From when on it is followed."""
    start_unix_s: float | None
    """When its clock was 0."""


@dataclass(frozen=True, slots=True)
class EngineOver:
    """There is nothing more of this engine."""

    at_ms: int
    stopped: bool
    """False: the log ends first."""
    settings: Mapping[str, str]
    jobs_announced: bool


@dataclass(frozen=True, slots=True)
class Stay:
    """A stretch of time in one lane of a track, in which nothing else is."""

    lane: int
    """The lowest that was free."""
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Span:
    """A unit on a GPU."""

    gpu: str
    worker: int | None
    stay: Stay
    kernel_ms: tuple[int, int] | None
    """When its kernels ran, where the log tells."""


@dataclass(frozen=True, slots=True)
class UnitOver:
    """A unit has left, or the log ends."""

    unit: Unit
    number: int
    at_ms: int
    outcome: UnitOutcome | None
    """None: still in flight."""
    synth: Stay | None
    span: Span | None


@dataclass(frozen=True, slots=True)
class JobOver:
    """A job is decided, or the log ends."""

    job: Job
    at_ms: int


@dataclass(frozen=True, slots=True)
class Idle:
    """A GPU was idle, all the time for one cause."""

    gpu: str
    cause: Cause
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class Counts:
    """From here on so many units are in each stage."""

    at_ms: int
    units: Mapping[Stage, int]


@dataclass(frozen=True, slots=True)
class ChipBusy:
    """What NVML said of a GPU's chip."""

    gpu: str
    start_ms: float
    end_ms: float
    busy_fraction: float


Event = EngineBegun | EngineOver | UnitOver | JobOver | Idle | Gap | Counts | ChipBusy


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was seen on the way."""

    bytes: int
    lines: int
    lack: str
    """What to say if no TIMELINE line is in it."""
    engines: int
    units: int
    spans: int
    samples: int
    """Of chips."""
    fault: InputError | None
    """What kept the log from being read to its end."""


def record(
    logs: Sequence[str],
    recordings: Mapping[str, Recording],
    tell: Callable[[Event], None],
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Recorded:
    """Tells everything about one log, given as its parts in their order, with NVML samples by GPU."""
    recorder = Recorder(recordings, tell)
    tally, fault = Tally(), None
    try:
        for lines, times in read_log(logs, tally, on_progress):
            recorder.feed(lines, times)
    except InputError as error:
        fault = error
    recorder.finish()
    return Recorded(
        tally.bytes,
        tally.lines,
        tally.lack,
        recorder.engines,
        recorder.units,
        recorder.spans,
        recorder.samples,
        fault,
    )


class Lanes:
    """Hands out the lowest lane that is free."""

    def __init__(self) -> None:
        self._count = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._count += 1
        return self._count - 1

    def give_back(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class Recorder:
    """Listens to a pipeline. Feed it a whole log, then `finish` it."""

    def __init__(self, recordings: Mapping[str, Recording], tell: Callable[[Event], None]) -> None:
        self._recordings = recordings
        self._tell = tell
        self.pipeline = Pipeline(
            on_gap=lambda engine, gap: self._of(engine).gap(gap),
            on_job=lambda engine, job: self._of(engine).job(job),
            on_stop=self._stopped,
            on_time=lambda engine, stretch: self._of(engine).time(stretch),
            on_stage=lambda engine, track, at_ms: self._of(engine).stage(track, at_ms),
            on_unit=lambda engine, unit: self._of(engine).unit(unit),
        )
        self._current: tuple[Engine, _EngineRecorder] | None = None
        self._axis = _Axis()
        self.engines = self.units = self.spans = self.samples = 0

    def feed(self, lines: Sequence[bytes], times: Times = None) -> None:
        """Takes in whole lines in their order, with the time of each if a container's log tells."""
        self.pipeline.feed(lines, None, times)
        if self.pipeline.engine is not None and not self.pipeline.engine.stopped:
            self._of(self.pipeline.engine).chips()

    def finish(self) -> None:
        """The log ends here."""
        self.pipeline.finish()
        engine = self.pipeline.engine
        if engine is not None and not engine.stopped:
            self._stopped(engine)

    def _of(self, engine: Engine) -> _EngineRecorder:
        if self._current is None or self._current[0] is not engine:
            self.engines += 1
            self._current = engine, _EngineRecorder(engine, self.engines, self._axis, self._recordings, self._tell)
        return self._current[1]

    def _stopped(self, engine: Engine) -> None:
        recorder = self._of(engine)
        recorder.over()
        self.units += recorder.units
        self.spans += recorder.spans
        self.samples += recorder.samples


class _Axis:
    """Where each engine lies on the one axis."""

    def __init__(self) -> None:
        self._end_ms: int | None = None
        self._zero_unix_s: float | None = None

    def base_ms(self, start_ms: int, start_unix_s: float | None) -> int:
        """That of the next engine."""
        base_ms = 0
        if self._end_ms is not None:
            base_ms = self._end_ms + _APART_MS - start_ms
            if start_unix_s is not None and self._zero_unix_s is not None:
                by_wall_ms = round((start_unix_s - self._zero_unix_s) * 1000)
                # A clock that was set back would lay one upon the other.
                base_ms = by_wall_ms if by_wall_ms + start_ms >= self._end_ms else base_ms
        if start_unix_s is not None:
            self._zero_unix_s = start_unix_s - base_ms / 1000
        return base_ms

    def over(self, end_ms: int) -> None:
        self._end_ms = end_ms


@dataclass(slots=True)
class _Flight:
    """A unit in flight, as far as it is settled."""

    unit: Unit
    number: int
    synth: Stay | None = None
    span: Span | None = None
    in_synth: tuple[int, int] | None = None
    """Its lane, and since when."""
    on_gpu: tuple[str, int | None, int, int] | None = None
    """GPU, worker, lane, and since when."""


@dataclass(slots=True)
class _Idling:
    cause: Cause
    start_ms: int
    end_ms: int


@dataclass(slots=True)
class _Idleness:
    """Joins stretches of the same cause."""

    now: _Idling | None = None

    def add(self, cause: Cause | None, start_ms: int, end_ms: int) -> _Idling | None:
        """Returns what is complete."""
        before = self.now
        if before is not None and before.cause is cause:
            before.end_ms = end_ms
            return None
        self.now = None if cause is None else _Idling(cause, start_ms, end_ms)
        return before


@dataclass(slots=True)
class _EngineRecorder:
    """What one engine tells."""

    _engine: Engine
    _number: int
    _axis: _Axis
    _recordings: Mapping[str, Recording]
    _listener: Callable[[Event], None]
    units: int = 0
    spans: int = 0
    samples: int = 0
    _base_ms: int | None = None
    _flights: dict[int, _Flight] = field(default_factory=dict)
    _synth_lanes: Lanes = field(default_factory=Lanes)
    _worker_lanes: dict[tuple[str, int | None], Lanes] = field(default_factory=dict)
    _idle: dict[str, _Idleness] = field(default_factory=dict)
    _untouched: _Idleness = field(default_factory=_Idleness)
    _history: deque[_Idling] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    _counts: Mapping[Stage, int] = field(default_factory=dict)
    _chips: dict[str, ChipBusy] = field(default_factory=dict)
    _done: bool = False
    """It is over: a daemon that was told to shut down may still log what nobody counts."""

    def _tell(self, event: Event) -> None:
        if self._done:
            return
        if self._base_ms is None:
            start_ms, start_unix_s = self._engine.ledger.start_ms, self._engine.start_unix_s(None)
            self._base_ms = self._axis.base_ms(start_ms, start_unix_s)
            self._listener(EngineBegun(self._number, self._base_ms, start_ms, start_unix_s))
        self._listener(event)

    # --- units -----------------------------------------------------------------------------------------------------

    def unit(self, unit: Unit) -> None:
        if not self._done:
            self._flights[unit.track.number] = _Flight(unit, unit.track.number)

    def stage(self, track: Track, at_ms: int) -> None:
        flight = self._flights[track.number]
        self._leave(flight, track, at_ms)
        if track.rank is Rank.SYNTH:
            flight.in_synth = self._synth_lanes.take(), at_ms
        elif track.rank is Rank.GPU:
            gpu, worker = track.gpu or UNKNOWN_GPU, flight.unit.worker
            worker = worker if worker is not None and worker < _WORKERS_MAX else None
            lane = self._worker_lanes.setdefault((gpu, worker), Lanes()).take()
            flight.on_gpu = gpu, worker, lane, at_ms
            self.spans += 1
        elif track.rank is Rank.GONE:
            del self._flights[track.number]
            self._over(flight, at_ms)

    def _leave(self, flight: _Flight, track: Track, at_ms: int) -> None:
        if flight.in_synth is not None:
            lane, since_ms = flight.in_synth
            flight.in_synth, flight.synth = None, Stay(lane, since_ms, at_ms)
            self._synth_lanes.give_back(lane)
        if flight.on_gpu is not None:
            gpu, worker, lane, since_ms = flight.on_gpu
            flight.on_gpu, flight.span = None, Span(gpu, worker, Stay(lane, since_ms, at_ms), track.kernel_ms)
            self._worker_lanes[gpu, worker].give_back(lane)

    def _over(self, flight: _Flight, at_ms: int) -> None:
        self.units += 1
        outcome = flight.unit.outcome
        self._tell(UnitOver(flight.unit, flight.number, at_ms, outcome, flight.synth, flight.span))

    def job(self, job: Job) -> None:
        at_ms = self._engine.seen_ms if job.failed_ms is None else job.failed_ms
        self._tell(JobOver(job, at_ms))

    # --- GPUs ------------------------------------------------------------------------------------------------------

    def gap(self, gap: Gap) -> None:
        self._tell(gap)

    def time(self, stretch: Stretch) -> None:
        if stretch.units != self._counts:
            self._counts = dict(stretch.units)
            self._tell(Counts(stretch.start_ms, self._counts))
        for gpu, cause in stretch.gpus.items():
            if gpu not in self._idle:
                self._idle[gpu] = _Idleness()
                for idling in (*self._history, self._untouched.now):
                    self._tell_idle(gpu, idling)
            self._tell_idle(gpu, self._idle[gpu].add(cause, stretch.start_ms, stretch.end_ms))
        if (idling := self._untouched.add(stretch.untouched, stretch.start_ms, stretch.end_ms)) is not None:
            self._history.append(idling)

    def _tell_idle(self, gpu: str, idling: _Idling | None) -> None:
        if idling is not None:
            self._tell(Idle(gpu, idling.cause, idling.start_ms, idling.end_ms))

    # --- chips -----------------------------------------------------------------------------------------------------

    def chips(self) -> None:
        """Tells of the samples up to the frontier. A value that lasts is told once."""
        start_unix_s = self._engine.start_unix_s(None)
        if start_unix_s is None:
            return
        start_ms, end_ms = self._engine.ledger.start_ms, self._engine.frontier_ms
        for gpu, recording in self._recordings.items():
            for sample in recording.until(start_unix_s + end_ms / 1000):
                busy = ChipBusy(
                    gpu,
                    max((sample.start_unix_s - start_unix_s) * 1000, start_ms),
                    (sample.end_unix_s - start_unix_s) * 1000,
                    sample.busy_fraction,
                )
                if busy.end_ms > busy.start_ms:
                    self.samples += 1
                    self._chip(busy)

    def _chip(self, busy: ChipBusy) -> None:
        before = self._chips.get(busy.gpu)
        if before is not None:
            if before.busy_fraction == busy.busy_fraction and busy.start_ms - before.end_ms <= _HOLE_MS:
                busy = ChipBusy(busy.gpu, before.start_ms, busy.end_ms, busy.busy_fraction)
            else:
                self._tell(before)
        self._chips[busy.gpu] = busy

    # --- the end ---------------------------------------------------------------------------------------------------

    def over(self) -> None:
        """The engine has ended, or the log has."""
        engine = self._engine
        end_ms = max(engine.frontier_ms, engine.ledger.start_ms)
        for flight in list(self._flights.values()):
            self._leave(flight, flight.unit.track, end_ms)
            self._over(flight, end_ms)
        for job in engine.units.undecided:
            self._tell(JobOver(job, end_ms))
        for gpu, idleness in self._idle.items():
            self._tell_idle(gpu, idleness.now)
        self.chips()
        for busy in self._chips.values():
            self._tell(busy)
        self._tell(EngineOver(end_ms, engine.stopped, dict(engine.settings), engine.ledger.jobs_announced))
        self._axis.over((self._base_ms or 0) + end_ms)
        self._done = True
