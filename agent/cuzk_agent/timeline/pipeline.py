"""The whole way from lines to state for one source, live and offline alike. Pure: time and lines are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from cuzk_agent.timeline import messages
from cuzk_agent.timeline.engine import DISORDER_MS, Engine, Limits, Listeners
from cuzk_agent.timeline.facts import Fact, JobDecided, Settled, SpanEnded, SpanTime
from cuzk_agent.timeline.kernel import PHASES
from cuzk_agent.timeline.ledger import UNKNOWN_GPU, Gap, GpuTotals, Stretch, Track
from cuzk_agent.timeline.lines import EVENT_NAMES, KernelTiming, LogLine, TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import UNPARSED_REASONS, LineParser
from cuzk_agent.timeline.state import (
    Cause,
    GpuState,
    Histogram,
    Latency,
    LatencyBasis,
    ProofOutcome,
    Stage,
    TimelineState,
)
from cuzk_agent.timeline.tally import Counters, HistogramTally, Numbers
from cuzk_agent.timeline.units import Job, Unit
from cuzk_agent.windows import Rolling, RollingWindow

_JUMP_MS = 3_600_000
"""An offset further ahead than this is believed only once the next line agrees: daemons do idle for hours, but one
damaged line must not move the clock."""
_BACK_MS = 5000
"""An offset further back than this, and the next one too, is a new engine: disorder is a matter of milliseconds."""
_AHEAD_MS = 1000
"""A time further ahead of the agent's own clock is wrong: that clock may be behind by as long as a read took."""
_SET_S = 0.25
"""The wall clock runs as the monotonic one does, but for this: else it was set."""
_BOOT_S = 10.0
"""An engine that seems to have started this long before the machine did."""
_OFFSET = "offset"
"""The reason under which events with an offset that no neighbour shares are counted."""
_MAX_HELD = 64
_MAX_EARLY = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """When lines were read: the agent's clocks just after the read."""

    monotonic_s: float
    unix_s: float
    live: bool
    """The reader had been at the end before: the lines were written since its last look."""


class Pipeline:
    """Follows one prover's log. Feed it lines, tell it when their end was reached, ask for its state."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        on_gap: Callable[[Engine, Gap], None] | None = None,
        on_job: Callable[[Engine, Job], None] | None = None,
        on_stop: Callable[[Engine], None] | None = None,
        on_fact: Callable[[Fact], None] | None = None,
        on_latency: Callable[[Engine, Latency, Job, int, float], None] | None = None,
        on_time: Callable[[Engine, Stretch], None] | None = None,
        on_stage: Callable[[Engine, Track, int], None] = lambda *_: None,
        on_unit: Callable[[Engine, Unit], None] = lambda *_: None,
    ) -> None:
        """`on_gap` hears of every closed gap, `on_job` of every decided job, `on_stop` of every engine that ended,
        `on_fact` of all settled facts that have a wall-clock time, `on_latency(engine, what, job, at_ms, seconds)` of
        every latency, `on_time` of all settled time, `on_stage(engine, track, at_ms)` of every unit that has settled
        into another stage, and `on_unit`, before that, whose track this is."""
        self._limits = limits or Limits()
        self._on_gap, self._on_job, self._on_stop = on_gap, on_job, on_stop
        self._on_latency = on_latency
        self._tell = on_fact
        self._numbers = Numbers()
        self._parser = LineParser()
        self._listeners = Listeners(
            self._gap,
            self._latency_of,
            self._job,
            self._kernel,
            self._spans,
            self._span_end,
            on_time,
            on_stage,
            on_unit,
        )
        self.engine: Engine | None = None
        """The engine whose lines are being read, or the last one."""
        self._engines = 0
        self._early: deque[TracingLine] = deque(maxlen=_MAX_EARLY)
        """Lines that came before any engine was seen."""
        self._fresh = False
        """The daemon's process has started: the next engine is seen from its beginning."""
        self._over = False
        """The daemon's process is gone; what it wrote before is still being read."""
        self._startup: dict[str, str] = {}
        self._undated: list[LogLine] = []
        """Lines of a backlog since one whose wall-clock time may be wrong: the next event will tell."""
        self._held: list[LogLine] = []
        self._held_ms = 0
        self._misplaced = 0
        self._arrival: Arrival | None = None
        self._delivered_unix_s: float | None = None

        self._counters = Counters()
        self._events = dict.fromkeys((*sorted(EVENT_NAMES), "other"), 0)
        self._late = self._synth_ms = 0
        self._bases: set[LatencyBasis] = set()
        self._past: dict[str, GpuTotals] = {}
        self._phases: dict[str, tuple[int, float]] = {}
        self._kernel_ms: dict[str, int] = {}
        self._gap_windows: dict[str, RollingWindow] = {}
        self._synth_window = RollingWindow()
        # The windows' clock runs on through the engines of this source.
        self._window_base_s = 0.0
        self._window_now_s = 0.0
        self._settled_monotonic_s: float | None = None
        self._unix_minus_monotonic_s: float | None = None
        self._clock_set = False
        """The wall clock was set since all had been read: nobody knows which lines were written before."""
        self._now_ms: int | None = None

    # --- input -------------------------------------------------------------------------------------------------

    def feed(
        self,
        lines: Iterable[bytes],
        arrival: Arrival | None = None,
        delivered_unix_s: Sequence[float | None] | None = None,
    ) -> None:
        """Takes in whole lines in their order, each with the time at which it came to whatever keeps the log, if that
        tells."""
        self._arrival = arrival
        if arrival is not None:
            self._note_clock(arrival.monotonic_s, arrival.unix_s)
        for line, unix_s in zip(lines, delivered_unix_s or repeat(None), strict=False):
            self._delivered_unix_s = unix_s
            values = self._parser.feed(line)
            for value in values:
                self._take(value)
            if not values and self.engine is not None:
                # Other text: nothing to read in it, but the daemon lives.
                self.engine.line_at(self._arrived_ms(self.engine))
        if self.engine is not None:
            self.engine.after_line()

    def settle(self, monotonic_s: float, unix_s: float) -> None:
        """Everything that had been written by `monotonic_s` has been fed."""
        elapsed_s = monotonic_s - self._settled_monotonic_s if self._settled_monotonic_s is not None else 0.0
        self._settled_monotonic_s = monotonic_s
        self._note_clock(monotonic_s, unix_s)
        self._clock_set = False
        if self.engine is not None:
            self.engine.note_end(monotonic_s, unix_s)
        now_ms = self.engine.now_ms(monotonic_s, unix_s) if self.engine else None
        self._date(now_ms)
        if self._over:
            self._stop()
            self._over, self._fresh = False, True
        engine = self.engine
        self._now_ms = engine.now_ms(monotonic_s, unix_s) if engine else None
        if engine is None or engine.stopped:
            self._window_now_s += max(elapsed_s, 0.0)
            self._tell_settled(None, unix_s)
            return
        is_ahead = self._held and not self._is_back(self._held_ms)
        if is_ahead and self._now_ms is not None and self._held_ms <= self._now_ms + 1000:
            # The clock has come to where the held line says it is.
            self._release(engine)
        engine.settle(self._now_ms)
        self._tell_settled(engine, None)
        self._window_now_s = max(self._window_now_s, self._window_base_s + engine.frontier_ms / 1000)

    def _note_clock(self, monotonic_s: float, unix_s: float) -> None:
        before_s, self._unix_minus_monotonic_s = self._unix_minus_monotonic_s, unix_s - monotonic_s
        if before_s is not None and abs(self._unix_minus_monotonic_s - before_s) > _SET_S:
            self._clock_set = True
            if self.engine is not None:
                self.engine.wall_clock_told = True

    def finish(self) -> None:
        """The log ends here. What is in flight stays in flight; time is settled up to the last line."""
        for value in self._parser.flush():
            self._take(value)
        self._date()
        if self._held and self.engine is not None:
            if self._is_back(self._held_ms):
                self._begin_held()
            else:
                self._misplaced += sum(isinstance(line, TimelineEvent) for line in self._held)
                self._held = []
        if self.engine is not None:
            self.engine.after_line()
            self.engine.settle_all()
            self._tell_settled(self.engine, None)
            self._window_now_s = max(self._window_now_s, self._window_base_s + self.engine.frontier_ms / 1000)

    def count_from_here(self, monotonic_s: float, unix_s: float) -> None:
        """What was fed so far, all that had been written by now, only told what is in flight: it is not counted."""
        self.settle(monotonic_s, unix_s)
        engine = self.engine
        start_ms = None if engine is None else engine.anchor.start_unix_ms
        if start_ms is None or start_ms / 1000 < unix_s - monotonic_s - _BOOT_S:
            # Nobody knows what its clock shows now, or the machine was started after it: the next line begins anew.
            self.engine = engine = None
            self._held = []
        if engine is not None:
            engine.ledger.count_from_here()
            engine.units.count_from_here()
            engine.kernel.phases = {}
        self._parser.count_from_here()
        self._counters.count_from_here()
        self._events = dict.fromkeys(self._events, 0)
        self._misplaced = self._late = self._synth_ms = 0
        self._engines = 0 if engine is None else 1
        self._past, self._phases, self._kernel_ms = {}, {}, {}
        for window in (self._synth_window, *self._gap_windows.values()):
            window.total_count, window.total_sum_seconds = 0, 0.0

    def rebooted(self) -> None:
        """The machine was started anew since the last line was fed: the monotonic clock is another one, and the engine
        is gone, though it may have written more than was read."""
        self._settled_monotonic_s = self._unix_minus_monotonic_s = self._now_ms = self._arrival = None
        self._over = True
        if self.engine is not None:
            self.engine.forget_clock()

    def daemon_ended(self) -> None:
        """The daemon's process is known to have ended after the line that was fed last: what comes is of another."""
        self._date()
        if self._held and self.engine is not None:
            if self._is_back(self._held_ms):
                self._begin_held()
            else:
                self._distrust(self.engine)
        self._stop()
        self._over, self._fresh = False, True
        self._early.clear()
        self._startup = {}

    # --- lines -------------------------------------------------------------------------------------------------

    def _take(self, value: LogLine) -> None:
        if isinstance(value, TracingLine) and self._engine_line(value):
            return
        engine = self._engine_of(value)
        if engine is None:
            return
        if isinstance(value, TimelineEvent):
            self._date(None if self._is_back(value.offset_ms) else value.offset_ms)
        elif self._undated or self._is_doubtful(engine, value):
            if len(self._undated) < _MAX_HELD:
                self._undated.append(value)
                return
            self._date()
        self._place(engine, value, self._offset_ms(engine, value))

    def _is_doubtful(self, engine: Engine, value: LogLine) -> bool:
        """The wall clock may have been set. Read live, the time of reading tells."""
        if not isinstance(value, TracingLine) or (self._arrival is not None and self._arrival.live):
            return False
        offset_ms = engine.offset_of(value.unix_ms)
        return offset_ms is not None and not -_BACK_MS < offset_ms - engine.seen_ms <= DISORDER_MS

    def _date(self, by_ms: int | None = None) -> None:
        """Undated lines were written by then, and not long before if their time can't be right."""
        undated, self._undated = self._undated, []
        for line in undated:
            engine = self.engine
            assert engine is not None
            offset_ms = self._offset_ms(engine, line)
            is_wrong = offset_ms is None or (by_ms is not None and offset_ms > by_ms + DISORDER_MS)
            self._place(engine, line, by_ms if is_wrong and isinstance(line, TracingLine) else offset_ms)

    def _place(self, engine: Engine, value: LogLine, offset_ms: int | None) -> None:
        """Takes in a line that was written then, if that can be believed."""
        if self._held:
            if offset_ms is None:
                if len(self._held) < _MAX_HELD:
                    self._held.append(value)
                    return
            elif self._agrees(offset_ms):
                self._held.append(value)
                if self._is_back(self._held_ms):
                    self._begin_held()
                else:
                    self._release(engine)
                return
            self._distrust(engine)
        if offset_ms is not None and self._is_odd(engine, offset_ms, isinstance(value, TimelineEvent)):
            self._held, self._held_ms = [value], offset_ms
            return
        self._apply(engine, value, offset_ms)

    def _engine_line(self, line: TracingLine) -> bool:
        """Lines that begin or end an engine."""
        match line.message:
            case "cuzk-daemon starting":
                self._date()
                self._stop()
                self._over, self._fresh = False, True
                self._early.clear()
                self._startup = {}
            case "rayon global thread pool configured":
                self._startup.update(messages.settings_in(line.fields))
            case "starting cuzk engine":
                self._date()
                self._over = False
                engine = self._begin(0)
                engine.anchor.note_start(line.unix_ms)
                engine.settings.update(messages.settings_in(line.fields))
            case "received SIGINT, shutting down" | "shutting down cuzk engine":
                self._date()
                if self.engine is not None and not self.engine.stopped:
                    at_ms = self._offset_ms(self.engine, line)
                    if at_ms is not None and at_ms - self.engine.seen_ms < _JUMP_MS:
                        self.engine.line_at(at_ms)
                    self._stop()
            case _:
                return False
        return True

    def _offset_ms(self, engine: Engine, value: LogLine) -> int | None:
        """When a line was written, on the engine's clock; None where it does not tell."""
        if isinstance(value, TimelineEvent):
            return value.offset_ms
        if isinstance(value, TracingLine):
            offset_ms = engine.offset_of(value.unix_ms)
            if offset_ms is None or offset_ms <= engine.seen_ms - _BACK_MS:
                # A clock that was set back says nothing.
                return None
            arrival = self._arrival
            if arrival is not None and arrival.live and engine.arrivals_live:
                # One that was set forward neither, but the line had been written when it was read.
                now_ms = engine.now_ms(arrival.monotonic_s, arrival.unix_s)
                if now_ms is not None and offset_ms > now_ms + _AHEAD_MS:
                    return now_ms
            return offset_ms
        return None

    def _is_odd(self, engine: Engine, offset_ms: int, is_event: bool) -> bool:
        if is_event and self._is_back(offset_ms):
            return True
        if offset_ms <= engine.seen_ms + _JUMP_MS:
            return False
        arrival = self._arrival
        now_ms = engine.now_ms(arrival.monotonic_s, arrival.unix_s) if arrival else None
        return now_ms is None or offset_ms > now_ms + _AHEAD_MS

    def _is_back(self, offset_ms: int) -> bool:
        """Whether events went on from there: what other lines say of the time may be wrong."""
        last_ms = None if self.engine is None else self.engine.last_event_ms
        return last_ms is not None and offset_ms < last_ms - _BACK_MS

    def _agrees(self, offset_ms: int) -> bool:
        if self._is_back(self._held_ms) and not self._is_back(offset_ms):
            return False
        return -_BACK_MS <= offset_ms - self._held_ms <= _JUMP_MS

    def _distrust(self, engine: Engine) -> None:
        """No neighbour shares the held line's time: an event is dropped and counted, other lines lose their time."""
        held, self._held = self._held, []
        for line in held:
            if isinstance(line, TimelineEvent):
                self._misplaced += 1
            else:
                self._apply(engine, line, None)

    def _release(self, engine: Engine) -> None:
        held, self._held = self._held, []
        for line in held:
            self._apply(engine, line, self._offset_ms(engine, line))

    def _begin_held(self) -> None:
        held, self._held = self._held, []
        self._over = False
        engine = self._begin(0)
        for line in held:
            self._apply(engine, line, self._offset_ms(engine, line))

    def _arrived_ms(self, engine: Engine) -> int:
        """The time of a line that bears none: when it was read, if that tells anything, else the largest seen."""
        arrival = self._arrival
        if arrival is not None and arrival.live:
            now_ms = engine.now_ms(arrival.monotonic_s, arrival.unix_s)
            return engine.seen_ms if now_ms is None else max(engine.last_line_ms, min(now_ms, self._now_ms or now_ms))
        return engine.seen_ms

    def _apply(self, engine: Engine, value: LogLine, offset_ms: int | None) -> None:
        if isinstance(value, TimelineEvent) and self._arrival is not None:
            # Only these bear the engine's own time: that of other lines is no better than the anchor.
            engine.note_arrival(value.offset_ms, self._arrival.monotonic_s, live=self._arrival.live)
        match value:
            case TimelineEvent():
                self._events[value.name if value.name in EVENT_NAMES else "other"] += 1
                engine.event(value, self._delivered_unix_s)
            case TracingLine():
                engine.traced = True
                engine.anchor.note_tracing(value.unix_ms)
                at_ms = engine.seen_ms if offset_ms is None else offset_ms
                engine.line_at(at_ms)
                messages.take(engine, value, max(at_ms, engine.ledger.start_ms))
            case KernelTiming():
                engine.line_at(self._arrived_ms(engine))
                engine.kernel.line(value)

    # --- engines -----------------------------------------------------------------------------------------------

    def new_engine(self, start_ms: int) -> Engine:
        """An engine that tells this pipeline what it does, though its lines are not being read."""
        return Engine(start_ms, self._counters, self._limits, self._listeners, self._numbers)

    def _begin(self, start_ms: int) -> Engine:
        before = self.engine
        self._stop()
        engine = self.new_engine(start_ms)
        engine.settings.update(self._startup)
        engine.wall_clock_told = self._clock_set
        if before is not None:
            engine.ledger.learn(start_ms, jobs_announced=before.ledger.jobs_announced)
            engine.units.assembly_logged = before.units.assembly_logged
            self._window_base_s = self._window_now_s
        self.engine = engine
        self._engines += 1
        self._fresh = False
        return engine

    def _engine_of(self, value: LogLine) -> Engine | None:
        """The engine that this line is of: one whose start-up line was not seen begins with its first event. What was
        logged before that had no clock to go by, and is taken for as old as the event."""
        engine = self.engine
        if engine is not None and not (engine.stopped and self._fresh):
            return engine
        if isinstance(value, TracingLine):
            self._early.append(value)
        if not isinstance(value, TimelineEvent):
            return None
        engine = self._begin(0 if self._fresh else value.offset_ms)
        for line in self._early:
            messages.take(engine, line, engine.ledger.start_ms)
        if self._early:
            engine.anchor.note_tracing(self._early[-1].unix_ms)
            self._early.clear()
        return engine

    def _stop(self) -> None:
        engine = self.engine
        if engine is None or engine.stopped:
            return
        engine.stop()
        self._late += engine.ledger.late
        self._synth_ms += engine.ledger.synth_ms
        for gpu, account in engine.ledger.accounts.items():
            self._past.setdefault(gpu, GpuTotals()).add(account.totals)
        self._window_now_s = max(self._window_now_s, self._window_base_s + engine.frontier_ms / 1000)
        self._add_phases(self._phases, engine)
        if self._on_stop is not None:
            self._on_stop(engine)

    @staticmethod
    def _add_phases(phases: dict[str, tuple[int, float]], engine: Engine) -> None:
        for phase, (count, seconds) in engine.kernel.phases.items():
            before_count, before_seconds = phases.get(phase, (0, 0.0))
            phases[phase] = (before_count + count, before_seconds + seconds)

    # --- what engines tell -------------------------------------------------------------------------------------

    def _gap(self, engine: Engine, gap: Gap) -> None:
        seconds = gap.duration_ms / 1000
        exemplar = engine.exemplar(gap.job_after, seconds, gap.end_ms)
        engine.ledger.accounts[gap.gpu].totals.gaps[gap.cause].observe(seconds, exemplar)
        self._gap_windows.setdefault(gap.gpu, RollingWindow()).observe(self._window_base_s + gap.end_ms / 1000, seconds)
        if self._on_gap is not None:
            self._on_gap(engine, gap)

    def _latency_of(self, engine: Engine, what: Latency, job: Job, at_ms: int, seconds: float) -> None:
        if what is Latency.SYNTH:
            self._synth_window.observe(self._window_base_s + at_ms / 1000, seconds)
        if self._on_latency is not None:
            self._on_latency(engine, what, job, at_ms, seconds)

    def _job(self, engine: Engine, job: Job) -> None:
        if self._tell is not None:
            proved = job.outcome is ProofOutcome.PROVED and not job.repeated
            self._tell(JobDecided(job.account.number, job.job_id, job.kind, proved))
        if self._on_job is not None:
            self._on_job(engine, job)

    def _kernel(self, gpu: str | None, kernel_ms: int) -> None:
        name = gpu or UNKNOWN_GPU
        self._kernel_ms[name] = self._kernel_ms.get(name, 0) + kernel_ms

    def _spans(self, engine: Engine, gpu: str, from_ms: int, to_ms: int, tracks: Iterable[Track]) -> None:
        start_s = self._start_unix_s(engine)
        if self._tell is not None and start_s is not None:
            units = tuple(track.number for track in tracks)
            self._tell(SpanTime(gpu, start_s + from_ms / 1000, start_s + to_ms / 1000, units))

    def _span_end(self, engine: Engine, track: Track, at_ms: int) -> None:
        start_s = self._start_unix_s(engine)
        if self._tell is not None and start_s is not None:
            kernel = track.kernel_ms
            kernel_unix_s = None if kernel is None else (start_s + kernel[0] / 1000, start_s + kernel[1] / 1000)
            seconds = (at_ms - track.started_ms) / 1000
            self._tell(SpanEnded(track.number, track.job.number, seconds, kernel_unix_s))

    def _tell_settled(self, engine: Engine | None, until_unix_s: float | None) -> None:
        """Without an engine there are no spans, up to `until_unix_s`."""
        if self._tell is None:
            return
        uncertainty_s = 0.0
        if engine is not None and (until_unix_s is None or not engine.stopped):
            start_s = self._start_unix_s(engine)
            until_unix_s = None if start_s is None else start_s + engine.frontier_ms / 1000
            uncertainty_s = engine.start_uncertainty_s() or 0.0
        if until_unix_s is not None:
            self._tell(Settled(until_unix_s, uncertainty_s))

    def _start_unix_s(self, engine: Engine) -> float | None:
        return engine.start_unix_s(self._unix_minus_monotonic_s)

    # --- output ------------------------------------------------------------------------------------------------

    def state(self) -> TimelineState:
        """Everything known at the settled frontier."""
        engine = self.engine
        running = engine is not None and not engine.stopped
        start_unix_s = self._start_unix_s(engine) if engine else None
        stats = self._parser.stats()
        unparsed = {**dict.fromkeys(UNPARSED_REASONS, 0), **(stats.unparsed or {})}
        unparsed[_OFFSET] += self._misplaced
        phases = dict(self._phases)
        if engine is not None and running:
            self._add_phases(phases, engine)
        srs_loading = 0
        synth_ms = self._synth_ms
        in_flight = dict.fromkeys(Stage, 0)
        ages: dict[Stage, float] = {}
        jobs_open = dict.fromkeys(self._counters.synth, 0)
        job_ages: dict[str, float] = {}
        if engine is not None and running:
            now_ms = max(engine.frontier_ms, self._now_ms or 0)
            synth_ms += engine.ledger.synth_ms
            srs_loading = engine.srs_in_progress(now_ms)
            for stage, count, oldest_ms in engine.units.in_flight():
                in_flight[stage] = count
                if oldest_ms is not None:
                    ages[stage] = max(now_ms - oldest_ms, 0) / 1000
            for kind, (count, oldest_ms) in engine.units.open_jobs().items():
                jobs_open[kind] = count
                if oldest_ms is not None:
                    job_ages[kind] = max(now_ms - oldest_ms, 0) / 1000
        counters = self._counters

        def at_unix_s(offset_ms: int | None) -> float | None:
            return None if start_unix_s is None or offset_ms is None else start_unix_s + offset_ms / 1000

        return TimelineState(
            engine_running=running,
            engine_restarts=max(self._engines - 1, 0),
            engine_settings=dict(engine.settings) if engine else {},
            engine_start_unix_seconds=start_unix_s,
            anchor_uncertainty_seconds=engine.start_uncertainty_s() if engine and start_unix_s is not None else None,
            last_event_unix_seconds=at_unix_s(engine.last_event_ms) if engine else None,
            settled_unix_seconds=at_unix_s(engine.frontier_ms) if engine else None,
            stalled_seconds=engine.stalled_ms(max(engine.frontier_ms, self._now_ms or 0)) / 1000 if engine else 0.0,
            evidence={
                "jobs": engine is not None and engine.ledger.jobs_announced,
                "spans": engine is not None and engine.ledger.spans_logged,
                "gpu_map": engine is not None and engine.gpus_known,
                "wall_clock": start_unix_s is not None,
            },
            events=dict(self._events),
            late_events=self._late + (engine.ledger.late if engine is not None and running else 0),
            torn_recovered=stats.torn_recovered,
            torn_lost=stats.torn_lost,
            unparsed=unparsed,
            synth_seconds=self._shown(counters.synth),
            synth_active_seconds=synth_ms / 1000,
            ready_wait_seconds=counters.ready_wait.freeze(),
            handoff_seconds=counters.handoff.freeze(),
            span_seconds=self._shown(counters.span),
            kernel_phase_seconds={phase: phases[phase] for phase in PHASES if phase in phases},
            unit_outcomes=dict(counters.unit_outcomes),
            proof_outcomes=dict(counters.proof_outcomes),
            proof_latency_seconds=self._latency(),
            trouble=dict(counters.trouble),
            srs_load_seconds=(counters.srs_loads, counters.srs_load_ms / 1000),
            synth_rolling=self._synth_window.freeze(self._window_now_s),
            srs_loading=srs_loading,
            in_flight=in_flight,
            oldest_age_seconds=ages,
            jobs_open=jobs_open,
            job_oldest_age_seconds=job_ages,
            gpus=self._gpus(engine if running else None),
        )

    def _shown(self, by_kind: Mapping[str, HistogramTally]) -> dict[str, Histogram]:
        """Histograms by kind; `other` from its first job on, long before anything of it is observed."""
        return {kind: tally.freeze() for kind, tally in by_kind.items() if kind != "other" or self._counters.other_seen}

    def _latency(self) -> dict[tuple[str, LatencyBasis], Histogram]:
        """Proof latency on the basis that this log has, from before the first proof on."""
        engine = self.engine
        if engine is not None and (engine.ledger.jobs_announced or engine.units.assembly_logged):
            self._bases.add(LatencyBasis.SUBMISSION)
        elif engine is not None and engine.first_event_ms is not None:
            self._bases.add(LatencyBasis.FIRST_EVENT)
        by_basis = self._counters.proof_latency
        return {
            (kind, basis): histogram
            for basis, tallies in by_basis.items()
            if basis in self._bases or any(tally.count for tally in tallies.values())
            for kind, histogram in self._shown(tallies).items()
        }

    def _gpus(self, engine: Engine | None) -> dict[str, GpuState]:
        names = dict.fromkeys(self._past)
        if engine is not None:
            names.update(dict.fromkeys(engine.ledger.accounts))
        return {name: self._gpu(name, engine) for name in sorted(names)}

    def _gpu(self, name: str, engine: Engine | None) -> GpuState:
        totals = GpuTotals()
        if name in self._past:
            totals.add(self._past[name])
        open_gap: dict[Cause, int] | None = None
        if engine is not None and name in engine.ledger.accounts:
            account = engine.ledger.accounts[name]
            totals.add(account.totals)
            open_gap = engine.ledger.open_gap(account)
        window = self._gap_windows.get(name)
        return GpuState(
            spans=totals.spans,
            busy_seconds=totals.busy_ms / 1000,
            idle_seconds={cause: ms / 1000 for cause, ms in totals.idle_ms.items()},
            wasted_seconds={reason: ms / 1000 for reason, ms in totals.wasted_ms.items()},
            kernel_seconds=self._kernel_ms[name] / 1000 if name in self._kernel_ms else None,
            gap_seconds={
                cause: tally.freeze()
                for cause, tally in totals.gaps.items()
                # Unknown idleness lasts for minutes before it can end a gap: born in time, and rarely at all.
                if cause is not Cause.UNKNOWN or totals.idle_ms[cause]
            },
            boundary_seconds={boundary: ms / 1000 for boundary, ms in totals.boundary_ms.items()},
            open_gap_seconds=None if open_gap is None else {cause: ms / 1000 for cause, ms in open_gap.items()},
            gap_rolling=window.freeze(self._window_now_s) if window else Rolling(self._window_now_s),
        )
