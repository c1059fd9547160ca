"""The settled ledger of one engine: where each GPU's time went, instant by instant.

Edges (a unit enters a stage, a span opens or closes, …) are put in by their offset in any order; `advance` applies them
in order up to a frontier and charges every millisecond of every GPU exactly once, to busy or to one cause of idleness.
So per GPU busy + idle = elapsed, by construction. An edge that comes behind the frontier is clamped to it and counted:
what was charged once is never taken back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from cuzk_agent.timeline.state import Boundary, Cause, Stage
from cuzk_agent.timeline.tally import GAP_BOUNDS, HistogramTally

UNKNOWN_GPU = "unknown"
_MAX_EDGES = 50_000
WASTED_REASONS = ("failed", "repeated")


class Rank(IntEnum):
    """A unit's way through the stages; it only ever goes up, whatever order its lines come in."""

    NEW = -1
    WAITING = 0
    SYNTH = 1
    READY = 2
    PICKED_UP = 3
    GPU = 4
    GONE = 5


STAGE_RANKS = {
    Stage.WAITING: Rank.WAITING,
    Stage.SYNTH: Rank.SYNTH,
    Stage.READY: Rank.READY,
    Stage.PICKED_UP: Rank.PICKED_UP,
    Stage.GPU: Rank.GPU,
}


@dataclass(slots=True, eq=False)
class JobAccount:
    """What the ledger keeps of a job: its settled share of each GPU's busy time."""

    job_id: str
    number: int
    busy_ms: dict[str, float] = field(default_factory=dict)
    wasted: str | None = None
    """Why its spans were for nothing, once that is known."""


@dataclass(slots=True, eq=False)
class Track:
    """One unit as the ledger sees it at its frontier."""

    job: JobAccount
    number: int
    rank: Rank = Rank.NEW
    gpu: str | None = None
    started_ms: int = 0
    kernel_ms: tuple[int, int] | None = None
    """When its kernels ran, where the log told by the time its span ended."""
    share_mark_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """A closed stretch, at least 1 ms long, in which no span was open on a GPU between two spans."""

    gpu: str
    start_ms: int
    end_ms: int
    job_before: str
    job_after: str
    boundary: Boundary
    cause: Cause
    """The one with the largest share."""
    by_cause_ms: dict[Cause, int]
    number_after: int
    """Which job `job_after` is: an id may run again."""

    @property
    def duration_ms(self) -> int:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Stretch:
    """Settled time in which nothing changed."""

    start_ms: int
    end_ms: int
    gpus: Mapping[str, Cause | None]
    """Why each known GPU was idle; None for one that was busy."""
    untouched: Cause
    """Why a GPU is idle that nothing has reached: one that becomes known later was idle for this."""
    units: Mapping[Stage, int]
    """How many units were in each stage."""


@dataclass(slots=True)
class OpenGap:
    start_ms: int
    job_before: JobAccount
    by_cause_ms: dict[Cause, int]


@dataclass(slots=True)
class GpuTotals:
    """Counters of one GPU; those of several engines add up."""

    spans: int = 0
    busy_ms: int = 0
    idle_ms: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    wasted_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WASTED_REASONS, 0.0))
    gaps: dict[Cause, HistogramTally] = field(
        default_factory=lambda: {cause: HistogramTally(GAP_BOUNDS) for cause in Cause}
    )
    boundary_ms: dict[Boundary, int] = field(default_factory=lambda: dict.fromkeys(Boundary, 0))

    def add(self, other: GpuTotals) -> None:
        """Adds the totals of another engine on the same GPU."""
        self.spans += other.spans
        self.busy_ms += other.busy_ms
        for cause in Cause:
            self.idle_ms[cause] += other.idle_ms[cause]
            self.gaps[cause].add(other.gaps[cause])
        for reason in WASTED_REASONS:
            self.wasted_ms[reason] += other.wasted_ms[reason]
        for boundary in Boundary:
            self.boundary_ms[boundary] += other.boundary_ms[boundary]

    @property
    def gap_ms(self) -> int:
        """Closed gap time."""
        return sum(self.boundary_ms.values())


@dataclass(slots=True, eq=False)
class GpuAccount:
    """One GPU of one engine."""

    gpu: str
    totals: GpuTotals
    idle_since_ms: int
    open: set[Track] = field(default_factory=set)
    picked_up: int = 0
    """Units that this GPU's workers have picked up and not started."""
    reached: bool = False
    """Something has reached this GPU since it last had no work."""
    aged_out: bool = False
    """Its last span was closed by the age limit: nobody knows what it does."""
    gap: OpenGap | None = None
    share_clock_ms: float = 0.0
    """Busy time divided by the open spans, integrated: the difference over a span is its fair share."""


@dataclass(frozen=True, slots=True)
class _Enter:
    track: Track
    rank: Rank
    gpu: str | None
    aged_out: bool


@dataclass(frozen=True, slots=True)
class _Waste:
    job: JobAccount
    reason: str


@dataclass(frozen=True, slots=True)
class _KnowGpu:
    gpu: str


@dataclass(frozen=True, slots=True)
class _Silence:
    silent: bool


@dataclass(frozen=True, slots=True)
class _Evidence:
    jobs_announced: bool
    spans_logged: bool


_Edge = _Enter | _Waste | _KnowGpu | _Silence | _Evidence


class Ledger:
    """The account of one engine from `start_ms` of its clock on.

    `on_gap` is told of every gap as it closes, `on_spans(gpu, from_ms, to_ms, open)` of every settled stretch with open
    spans, `on_span_end(track, at_ms)` of every span as it closes, `on_time` of all settled time,
    `on_stage(track, at_ms)` of every unit that has come to another stage.
    """

    def __init__(
        self,
        start_ms: int,
        on_gap: Callable[[Gap], None],
        *,
        on_spans: Callable[[str, int, int, Iterable[Track]], None] = lambda *_: None,
        on_span_end: Callable[[Track, int], None] = lambda *_: None,
        on_time: Callable[[Stretch], None] | None = None,
        on_stage: Callable[[Track, int], None] = lambda *_: None,
    ) -> None:
        self.start_ms = start_ms
        self.counted_from_ms = start_ms
        """Since then busy and idle add up."""
        self.frontier_ms = start_ms
        self.late = 0
        self.synth_ms = 0
        """Time in which any unit was in synthesis."""
        self.accounts: dict[str, GpuAccount] = {}
        self.jobs_announced = False
        """The log tells of waiting units (`job enqueued`): without, starved and fill can't be told apart by them."""
        self.spans_logged = True
        """False for a daemon that writes no GPU_START and GPU_END: what its GPUs do is unknown."""
        self._settled = _Evidence(jobs_announced=False, spans_logged=True)
        self._on_gap = on_gap
        self._on_spans = on_spans
        self._on_span_end = on_span_end
        self._on_time = on_time
        self._on_stage = on_stage
        self._edges: list[tuple[int, int, _Edge]] = []
        self._sequence = 0
        self._in_stage = dict.fromkeys(Rank, 0)
        self._unassigned_pickups = 0
        self._silent = False
        self._mapped = False
        """It is known which GPUs there are: `unknown` is none of them, and counts only while spans are open on it."""
        self._finished = False
        # A GPU that nothing ever reached: one that becomes known later takes over its account.
        self._untouched = GpuAccount("", GpuTotals(), start_ms)

    # --- edges -----------------------------------------------------------------------------------------------

    def enter(self, track: Track, rank: Rank, at_ms: int, gpu: str | None = None, *, aged_out: bool = False) -> None:
        """The unit enters a stage (or leaves with `Rank.GONE`)."""
        self._put(at_ms, _Enter(track, rank, gpu, aged_out))

    def waste(self, job: JobAccount, reason: str, at_ms: int) -> None:
        """All spans of this job, closed and to come, were for nothing. The first reason stays."""
        self._put(at_ms, _Waste(job, reason))

    def know_gpu(self, gpu: str, at_ms: int) -> None:
        """The engine has this GPU."""
        if gpu not in self.accounts:
            self._put(at_ms, _KnowGpu(gpu))

    def silence(self, silent: bool, at_ms: int) -> None:
        """From here on there is no evidence about the daemon (or there is again)."""
        self._put(at_ms, _Silence(silent))

    def learn(self, at_ms: int, *, jobs_announced: bool | None = None, spans_logged: bool | None = None) -> None:
        """From here on it is known what the log tells of."""
        before = self.jobs_announced, self.spans_logged
        if jobs_announced is not None:
            self.jobs_announced = jobs_announced
        if spans_logged is not None:
            self.spans_logged = spans_logged
        if (self.jobs_announced, self.spans_logged) != before:
            self._put(at_ms, _Evidence(self.jobs_announced, self.spans_logged))

    def _put(self, at_ms: int, edge: _Edge) -> None:
        if self._finished:
            return
        if at_ms < self.frontier_ms:
            at_ms = self.frontier_ms
            self.late += 1
        self._sequence += 1
        heapq.heappush(self._edges, (at_ms, self._sequence, edge))

    # --- settling --------------------------------------------------------------------------------------------

    def advance(self, to_ms: int) -> None:
        """Applies every edge up to `to_ms` and charges the time. Never goes back."""
        while self._edges and self._edges[0][0] <= to_ms:
            at_ms, _, edge = heapq.heappop(self._edges)
            self._charge(at_ms)
            self._apply(edge, at_ms)
        if to_ms > self.frontier_ms:
            self._charge(to_ms)

    def finish(self, at_ms: int) -> None:
        """The engine ends: edges that are still ahead are applied at its end, nothing is charged beyond it."""
        self.advance(at_ms)
        while self._edges:
            self._apply(heapq.heappop(self._edges)[2], self.frontier_ms)
        self._finished = True

    def count_from_here(self) -> None:
        """The account begins at the frontier, with what is open there."""
        self.counted_from_ms = self.frontier_ms
        self.late = self.synth_ms = 0
        self.accounts = {gpu: one for gpu, one in self.accounts.items() if one.open or not self._is_no_gpu(one)}
        for account in (*self.accounts.values(), self._untouched):
            account.totals = GpuTotals()
            account.share_clock_ms = 0.0
            for track in account.open:
                track.share_mark_ms = 0.0
                track.job.busy_ms.clear()
            if account.gap is not None:
                account.gap = OpenGap(self.frontier_ms, account.gap.job_before, {})
        for *_, edge in self._edges:
            if isinstance(edge, _Waste):
                edge.job.busy_ms.clear()

    @property
    def crowded(self) -> bool:
        """More edges wait than a daemon can make in the time that is not settled yet."""
        return len(self._edges) > _MAX_EDGES

    @property
    def in_flight(self) -> int:
        """Units in any stage at the frontier."""
        return sum(self._in_stage[rank] for rank in STAGE_RANKS.values())

    def open_gap(self, account: GpuAccount) -> dict[Cause, int] | None:
        """The account's open gap by cause, all 0 while a span is open, None before the first span."""
        if not account.open and (account.gap is None or self._is_no_gpu(account)):
            return None
        shares = dict.fromkeys(Cause, 0)
        if account.gap is not None:
            shares.update(account.gap.by_cause_ms)
        return shares

    def _charge(self, to_ms: int) -> None:
        elapsed_ms = to_ms - self.frontier_ms
        if elapsed_ms <= 0:
            return
        blind = (self._silent or not self._settled.spans_logged) and self.in_flight > 0
        if self._in_stage[Rank.SYNTH] and not self._silent:
            self.synth_ms += elapsed_ms
        idle = []
        accounts = [account for account in self.accounts.values() if account.open or not self._is_no_gpu(account)]
        for account in accounts:
            if account.open and not blind:
                account.totals.busy_ms += elapsed_ms
                account.share_clock_ms += elapsed_ms / len(account.open)
                self._on_spans(account.gpu, self.frontier_ms, to_ms, account.open)
            else:
                idle.append(account)
        causes = list(self._causes(idle, blind))
        if self._on_time is not None:
            gpus: dict[str, Cause | None] = dict.fromkeys(account.gpu for account in accounts)
            (_, untouched), *others = causes
            gpus.update((account.gpu, cause) for account, cause in others)
            units = {stage: self._in_stage[rank] for stage, rank in STAGE_RANKS.items()}
            self._on_time(Stretch(self.frontier_ms, to_ms, gpus, untouched, units))
        for account, cause in causes:
            account.totals.idle_ms[cause] += elapsed_ms
            if account.gap is not None:
                shares = account.gap.by_cause_ms
                shares[cause] = shares.get(cause, 0) + elapsed_ms
            if cause is Cause.NO_WORK:
                account.reached = False
        self.frontier_ms = to_ms

    def _causes(self, idle: list[GpuAccount], blind: bool) -> Iterable[tuple[GpuAccount, Cause]]:
        stage = self._in_stage
        ready = stage[Rank.READY] + self._unassigned_pickups
        units = stage[Rank.WAITING] + stage[Rank.SYNTH] + ready
        yield self._untouched, Cause.UNKNOWN if blind else self._cause(self._untouched, ready, units)
        for account in sorted(idle, key=lambda account: (account.idle_since_ms, account.gpu)):
            if blind or account.aged_out:
                yield account, Cause.UNKNOWN
            elif account.picked_up:
                yield account, Cause.HANDOFF
            else:
                yield account, self._cause(account, ready, units)
                units -= 1
                ready -= 1

    def _cause(self, account: GpuAccount, ready: int, units: int) -> Cause:
        """`ready` and `units` are what is left for this GPU and for those that became idle after it."""
        if units <= 0:
            return Cause.NO_WORK
        if ready > 0:
            return Cause.HANDOFF
        if self._in_stage[Rank.SYNTH]:
            if account.reached and (self._in_stage[Rank.WAITING] or not self._settled.jobs_announced):
                return Cause.STARVED
            return Cause.FILL
        return Cause.BLOCKED

    def _apply(self, edge: _Edge, at_ms: int) -> None:
        match edge:
            case _Enter(track, rank, gpu, aged_out):
                if rank > track.rank:
                    self._leave(track, at_ms, aged_out=aged_out)
                    self._arrive(track, rank, gpu, at_ms)
                    self._on_stage(track, at_ms)
            case _Waste(job, reason):
                if job.wasted is None:
                    job.wasted = reason
                    for name, busy_ms in job.busy_ms.items():
                        self.accounts[name].totals.wasted_ms[reason] += busy_ms
            case _KnowGpu(gpu):
                self._account(gpu)
                self._mapped = self._mapped or gpu != UNKNOWN_GPU
            case _Silence(silent):
                self._silent = silent
            case _Evidence():
                self._settled = edge

    def _arrive(self, track: Track, rank: Rank, gpu: str | None, at_ms: int) -> None:
        track.rank, track.gpu = rank, gpu
        self._in_stage[rank] += 1
        if rank is Rank.PICKED_UP:
            if gpu is None:
                self._unassigned_pickups += 1
            else:
                self._account(gpu).picked_up += 1
        elif rank is Rank.GPU:
            account = self._account(gpu or UNKNOWN_GPU)
            track.gpu = account.gpu
            if not account.open and account.gap is not None and not self._is_no_gpu(account):
                self._close_gap(account, account.gap, track, at_ms)
            account.gap = None
            account.open.add(track)
            account.totals.spans += 1
            account.reached, account.aged_out = True, False
            track.started_ms = at_ms
            track.share_mark_ms = account.share_clock_ms

    def _leave(self, track: Track, at_ms: int, *, aged_out: bool) -> None:
        self._in_stage[track.rank] -= 1
        if track.rank is Rank.PICKED_UP:
            if track.gpu is None:
                self._unassigned_pickups -= 1
            else:
                self._account(track.gpu).picked_up -= 1
        elif track.rank is Rank.GPU and track.gpu is not None:
            account = self.accounts[track.gpu]
            account.open.discard(track)
            self._on_span_end(track, at_ms)
            job = track.job
            share_ms = account.share_clock_ms - track.share_mark_ms
            track.share_mark_ms = 0.0
            job.busy_ms[account.gpu] = job.busy_ms.get(account.gpu, 0.0) + share_ms
            if job.wasted is not None:
                account.totals.wasted_ms[job.wasted] += share_ms
            if not account.open:
                account.idle_since_ms = at_ms
                account.aged_out = aged_out
                account.gap = OpenGap(at_ms, job, {})

    def _is_no_gpu(self, account: GpuAccount) -> bool:
        """What was not known to be on a GPU at first is on one that is known by now."""
        return self._mapped and account.gpu == UNKNOWN_GPU

    def _close_gap(self, account: GpuAccount, gap: OpenGap, track: Track, at_ms: int) -> None:
        if at_ms <= gap.start_ms:
            return
        boundary = Boundary.WITHIN_JOB if gap.job_before is track.job else Boundary.CROSS_JOB
        cause = max(gap.by_cause_ms, key=lambda cause: gap.by_cause_ms[cause])
        closed = Gap(
            account.gpu,
            gap.start_ms,
            at_ms,
            gap.job_before.job_id,
            track.job.job_id,
            boundary,
            cause,
            gap.by_cause_ms,
            track.job.number,
        )
        account.totals.boundary_ms[boundary] += closed.duration_ms
        self._on_gap(closed)

    def _account(self, gpu: str) -> GpuAccount:
        account = self.accounts.get(gpu)
        if account is None:
            totals = GpuTotals()
            totals.idle_ms.update(self._untouched.totals.idle_ms)
            account = self.accounts[gpu] = GpuAccount(gpu, totals, self.start_ms)
        return account
