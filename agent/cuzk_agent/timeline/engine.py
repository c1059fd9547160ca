"""One engine: a run of the daemon from its start to its end, with its clock, its workers and its account."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from cuzk_agent.timeline.anchor import Anchor
from cuzk_agent.timeline.kernel import KernelTimes
from cuzk_agent.timeline.ledger import UNKNOWN_GPU, Gap, Ledger, Stretch, Track
from cuzk_agent.timeline.lines import TimelineEvent
from cuzk_agent.timeline.state import Exemplar, Latency
from cuzk_agent.timeline.tally import Counters
from cuzk_agent.timeline.units import Job, Unit, Units

DISORDER_MS = 250
"""How far lines may be out of order: nothing is settled that is younger."""
_SETTLE_STEP_MS = 1000
"""While a backlog is read, the ledger is settled this often, to keep it small."""
_ARRIVAL_UNCERTAINTY_MS = 25.0
"""How late a line is read that was written while the reader was waiting for it: a little over one poll."""
_WORKERS_MAX = 4096
_SRS_MAX = 64
_SRS_LOAD_MS = 600_000
"""Loading takes a minute or two; one that was begun so long ago has failed without a word."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the timeline."""

    silence_ms: int = 300_000
    """A source that is silent for longer with work in flight tells nothing about its daemon."""
    age_ms: int | None = None
    """How long a unit may stay in a stage; None: three times the longest recent stay, at least ten minutes."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of what an engine does, as it happens or settles."""

    gap: Callable[[Engine, Gap], None]
    latency: Callable[[Engine, Latency, Job, int, float], None]
    job: Callable[[Engine, Job], None]
    kernel: Callable[[str | None, int], None]
    spans: Callable[[Engine, str, int, int, Iterable[Track]], None]
    span_end: Callable[[Engine, Track, int], None]
    time: Callable[[Engine, Stretch], None] | None
    stage: Callable[[Engine, Track, int], None]
    unit: Callable[[Engine, Unit], None]


class Engine:
    """One engine of one source. Offsets are whole milliseconds since its start, on its monotonic clock."""

    def __init__(
        self, start_ms: int, counters: Counters, limits: Limits, listeners: Listeners, numbers: Iterator[int]
    ) -> None:
        """Followed from `start_ms` on. `numbers` goes on through all engines of a source."""
        self._counters = counters
        self._limits = limits
        self.anchor = Anchor()
        self.ledger = Ledger(
            start_ms,
            lambda gap: listeners.gap(self, gap),
            on_spans=lambda *stretch: listeners.spans(self, *stretch),
            on_span_end=lambda *end: listeners.span_end(self, *end),
            on_time=None if listeners.time is None else partial(listeners.time, self),
            on_stage=partial(listeners.stage, self),
        )
        self.units = Units(
            self.ledger,
            counters,
            age_limit_ms=limits.age_ms,
            numbers=numbers,
            exemplar=self.exemplar,
            on_latency=lambda *latency: listeners.latency(self, *latency),
            on_job=lambda job: listeners.job(self, job),
            on_unit=partial(listeners.unit, self),
        )
        self.kernel = KernelTimes(lambda gpu, kernel_ms: listeners.kernel(self._gpu_or_only(gpu), kernel_ms))
        self.settings: dict[str, str] = {}
        self.seen_ms = start_ms
        """The largest offset seen."""
        self.first_event_ms: int | None = None
        self.last_event_ms: int | None = None
        self.last_line_ms = start_ms
        self.stopped = False
        """Its log says that it was shut down, or another one has taken its place."""
        self.start_monotonic_s: float | None = None
        """Not later than this on the agent's own monotonic clock, which is the daemon's too."""
        self.arrivals_live = False
        """`start_monotonic_s` comes from lines that were read as they were written."""
        self.wall_clock_told = False
        """The wall clock has told all that it can of `start_monotonic_s`: it may have been set since."""
        self.traced = False
        """The daemon's tracing output is in the log, too."""
        self._gpu_of: dict[int, str] = {}
        self._srs_since_ms: dict[str, int] = {}
        """By circuit: since when its parameters are being loaded."""
        self._silent = False
        self._work_at_last_line = False

    # --- the clock ---------------------------------------------------------------------------------------------

    @property
    def frontier_ms(self) -> int:
        return self.ledger.frontier_ms

    def offset_of(self, unix_ms: float) -> int | None:
        """The offset that a wall-clock time means at least; None while the wall clock is not anchored."""
        start_ms, uncertainty_ms = self.anchor.start_unix_ms, self.anchor.uncertainty_ms
        if start_ms is None or uncertainty_ms is None:
            return None
        # A line placed too late would drag the frontier along, and events yet to come would be behind it.
        return int(unix_ms - start_ms - max(uncertainty_ms - 1, 0))

    def note_arrival(self, offset_ms: int, monotonic_s: float, *, live: bool) -> None:
        """A line of this offset had been written by then."""
        bound_s = monotonic_s - offset_ms / 1000
        if live and not self.arrivals_live:
            self.arrivals_live = True
            self.start_monotonic_s = bound_s
        elif self.start_monotonic_s is None or bound_s < self.start_monotonic_s:
            self.start_monotonic_s = bound_s

    def note_end(self, monotonic_s: float, unix_s: float) -> None:
        """All lines written by then have been read."""
        by_wall_s = self._start_by_wall_s(monotonic_s, unix_s)
        if by_wall_s is not None:
            self.wall_clock_told = True
            self.start_monotonic_s = by_wall_s

    def forget_clock(self) -> None:
        """The agent's monotonic clock is another one now."""
        self.start_monotonic_s = None
        self.arrivals_live = self.wall_clock_told = False

    def now_ms(self, monotonic_s: float, unix_s: float) -> int | None:
        """This engine's clock now; None while nothing ties it to the agent's."""
        start_s = self._start_by_wall_s(monotonic_s, unix_s)
        if start_s is None:
            start_s = self.start_monotonic_s
        return None if start_s is None else int((monotonic_s - start_s) * 1000)

    def _start_by_wall_s(self, monotonic_s: float, unix_s: float) -> float | None:
        """Of lines from a backlog, when they came tells little, what time they bear tells more. A clock that is behind
        does no harm, one ahead does."""
        start_ms, uncertainty_ms = self.anchor.start_unix_ms, self.anchor.uncertainty_ms
        if self.arrivals_live or self.wall_clock_told or start_ms is None or uncertainty_ms is None:
            return None
        by_wall_s = monotonic_s - (unix_s - (start_ms + uncertainty_ms) / 1000)
        return by_wall_s if self.start_monotonic_s is None else min(by_wall_s, self.start_monotonic_s)

    def start_unix_s(self, unix_minus_monotonic_s: float | None) -> float | None:
        """Wall-clock time of the start."""
        if self.anchor.start_unix_ms is not None:
            return self.anchor.start_unix_ms / 1000
        if self.arrivals_live and self.start_monotonic_s is not None and unix_minus_monotonic_s is not None:
            return self.start_monotonic_s + unix_minus_monotonic_s
        return None

    def start_uncertainty_s(self) -> float | None:
        """How far off `start_unix_s` may be."""
        if self.anchor.uncertainty_ms is not None:
            return self.anchor.uncertainty_ms / 1000
        return _ARRIVAL_UNCERTAINTY_MS / 1000 if self.arrivals_live else None

    def exemplar(self, job_id: str, seconds: float, at_ms: int) -> Exemplar:
        """An observation at an offset, dated if the wall clock is known."""
        start_ms = self.anchor.start_unix_ms
        return Exemplar(job_id, seconds, None if start_ms is None else (start_ms + at_ms) / 1000)

    # --- lines -------------------------------------------------------------------------------------------------

    def line_at(self, offset_ms: int) -> None:
        """A line of this offset came, of whatever kind: the daemon lives."""
        offset_ms = max(offset_ms, self.last_line_ms)
        if self._silent:
            self.ledger.silence(False, offset_ms)
            self._silent = False
        elif offset_ms - self.last_line_ms > self._limits.silence_ms:
            self.ledger.silence(True, self.last_line_ms + self._limits.silence_ms)
            self.ledger.silence(False, offset_ms)
        self.last_line_ms = offset_ms
        if self.ledger.crowded:
            self._settle(self.seen_ms)
        if offset_ms > self.seen_ms:
            self.seen_ms = offset_ms
            settled_ms = offset_ms - DISORDER_MS
            if settled_ms - self.frontier_ms > _SETTLE_STEP_MS:
                self._settle(settled_ms)
            elif not self.stopped:
                # What is due happens before this line, as if someone had just looked.
                self.units.tick(settled_ms)

    def after_line(self) -> None:
        """The line has been taken in."""
        self._work_at_last_line = not self.units.idle

    def event(self, event: TimelineEvent, delivered_unix_s: float | None = None) -> None:
        """Takes in a TIMELINE event, with the time at which its line came to whatever keeps the log, if that tells."""
        self.anchor.note_event(event.offset_ms)
        if delivered_unix_s is not None:
            self.anchor.note_delivery(event.offset_ms, delivered_unix_s * 1000)
        self.line_at(event.offset_ms)
        if self.first_event_ms is None or event.offset_ms < self.first_event_ms:
            self.first_event_ms = event.offset_ms
        self.last_event_ms = max(event.offset_ms, self.last_event_ms or 0)
        if event.name == "SYNTH_END" and not self.traced and not self._gpu_of:
            # A log of TIMELINE lines only never tells its GPUs apart. What stands for them is there before its first
            # span: a counter that is born with one would hide it.
            self.ledger.know_gpu(UNKNOWN_GPU, max(event.offset_ms, self.frontier_ms))
        self.units.event(event, None if event.worker is None else self._gpu_of.get(event.worker))

    def trouble(self, kind: str, gpu: str = "") -> None:
        """Counts something that went wrong."""
        self._counters.trouble[kind, gpu] = self._counters.trouble.get((kind, gpu), 0) + 1

    def srs_loading(self, circuit: str, at_ms: int) -> None:
        """Parameters are being loaded from disk."""
        if len(self._srs_since_ms) < _SRS_MAX:
            self._srs_since_ms[circuit] = at_ms

    def srs_loaded(self, circuit: str, elapsed_ms: int | None) -> None:
        """They are loaded."""
        self._srs_since_ms.pop(circuit, None)
        if elapsed_ms is not None:
            self._counters.srs_loads += 1
            self._counters.srs_load_ms += elapsed_ms

    def srs_in_progress(self, now_ms: int) -> int:
        """How many are being loaded."""
        return sum(now_ms - since_ms < _SRS_LOAD_MS for since_ms in self._srs_since_ms.values())

    def know_worker(self, worker: int, gpu: str, at_ms: int) -> None:
        """A line tells which GPU a worker drives."""
        if worker < _WORKERS_MAX and self._gpu_of.get(worker) != gpu:
            self._gpu_of[worker] = gpu
            self.ledger.know_gpu(gpu, max(at_ms, self.frontier_ms))
            self._counters.trouble.setdefault(("bad_partition", gpu), 0)

    @property
    def gpus_known(self) -> bool:
        """The log told which worker drives which GPU."""
        return bool(self._gpu_of)

    def _gpu_or_only(self, gpu: str | None) -> str | None:
        if gpu is None and len(set(self._gpu_of.values())) == 1:
            return next(iter(self._gpu_of.values()))
        return gpu

    # --- settling ----------------------------------------------------------------------------------------------

    def settle(self, now_ms: int | None) -> None:
        """Everything written by `now_ms` of this engine's clock has been read (None: its clock is not known)."""
        frontier_ms = self.seen_ms if now_ms is None else max(self.seen_ms, now_ms)
        self._settle(frontier_ms - DISORDER_MS)

    def _settle(self, to_ms: int) -> None:
        if to_ms < self.frontier_ms or self.stopped:
            return
        silent_ms = self.last_line_ms + self._limits.silence_ms
        if to_ms > silent_ms and not self._silent:
            self.ledger.silence(True, silent_ms)
            self._silent = True
        self.units.tick(to_ms)
        self.ledger.advance(to_ms)

    def settle_all(self) -> None:
        """The log ends here: settles up to its last line."""
        self._settle(max(self.seen_ms, self.last_line_ms))
        self.kernel.flush()

    def stop(self) -> None:
        """The engine is gone: what was in flight is abandoned, and nothing is charged any more."""
        if self.stopped:
            return
        end_ms = max(self.seen_ms, self.frontier_ms)
        self._settle(end_ms)
        self.units.abandon(end_ms)
        self.ledger.finish(end_ms)
        self.kernel.flush()
        self.stopped = True
        self._work_at_last_line = False

    def stalled_ms(self, now_ms: int) -> int:
        """Time since the last line if work was in flight then, else 0."""
        return max(now_ms - self.last_line_ms, 0) if self._work_at_last_line else 0
