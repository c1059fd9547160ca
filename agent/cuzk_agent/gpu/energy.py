"""Where a GPU's energy went, and what a proof took of it. Pure: time is what inputs bear.

Power samples are integrated to a curve. Compared time comes in pieces (`correlation.Piece`), and the energy of a piece
goes to the units whose spans are open in it: to the one whose kernels run, where the log tells that, else in equal
parts. The log tells when a span has ended, so pieces are held until then. What units took goes to their jobs, and shows
once the job is decided; outside all spans energy is idle or unlogged as the busy sample has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

from cuzk_agent.gpu.correlation import MAX_WAIT_S, Correlator, Piece, Unit
from cuzk_agent.gpu.samples import BusySample, PowerSample
from cuzk_agent.gpu.state import EnergyUse, SourceComparison, SpanBusy
from cuzk_agent.timeline.facts import Fact, JobDecided, Settled, SpanEnded
from cuzk_agent.timeline.state import Exemplar, Histogram
from cuzk_agent.timeline.tally import PROOF_KINDS, HistogramTally

PROOF_ENERGY_BOUNDS = (
    250, 500, 1000, 2000, 4000, 6000, 8000, 10_000, 13_000, 17_000, 22_000, 28_000, 36_000, 50_000, 80_000
)  # fmt: skip
"""In joules. A GPU draws 300 to 700 W while it proves. A WinningPoSt takes it a second or two, some 0.5 kJ; a PoRep 10
partitions of 2 to 7 s, 5 to 50 kJ; SnapDeals 16 of them, 10 to 80 kJ; a WindowPoSt 20 to 70 s, as much as a PoRep.
Steps of about a quarter where PoReps are make a change of a tenth show in the quantiles."""

COVERAGE_MIN = 0.95
"""The share of a proof's span time that power samples must cover for its energy to be observed."""
_HOLD_S = 120.0
"""How long energy is held for a span to end. Longer ones share fairly."""
_PIECE_MAX_S = 10.0
"""Pieces that are alike are joined until they are this long."""
_POINTS_MAX = 16_384
"""Points of a power curve kept at most: 5 minutes of the ring's samples, 20 ms apart."""
_DECISION_GRACE_S = 1.0
"""A job is decided as soon as a line says so, which is up to 0.25 s before its last span is settled."""
_MAX_UNDECIDED = 10_000
"""As many jobs as a timeline keeps open."""
_MAX_DECIDED = 1024

JobKey = tuple[str, int]
"""Source, and the number of a job in it."""


class PowerCurve:
    """Energy as a function of time: power samples integrated, with nothing where there are none."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._joules: list[float] = []
        self._covered_s: list[float] = []

    @property
    def end_s(self) -> float:
        """Up to when there are samples."""
        return self._times_s[-1] if self._times_s else float("-inf")

    def add(self, sample: PowerSample) -> None:
        """Samples come in their order; no instant counts twice."""
        start_s, end_s = sample.start_unix_s, sample.end_unix_s
        if end_s < self.end_s - MAX_WAIT_S:
            # The wall clock was set back: this is a new time.
            self._drop(len(self._times_s))
        if not self._times_s:
            self._point(start_s, 0.0, 0.0)
        start_s = max(start_s, self.end_s)
        if end_s <= start_s:
            return
        joules, covered_s = self._joules[-1], self._covered_s[-1]
        if start_s > self.end_s:
            self._point(start_s, joules, covered_s)
        self._point(end_s, joules + sample.watts * (end_s - start_s), covered_s + end_s - start_s)
        if len(self._times_s) > _POINTS_MAX:
            self._drop(_POINTS_MAX // 4)

    def _point(self, time_s: float, joules: float, covered_s: float) -> None:
        self._times_s.append(time_s)
        self._joules.append(joules)
        self._covered_s.append(covered_s)

    def between(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Energy in joules, and the time that samples cover."""
        start_joules, start_covered_s = self._at(start_s)
        end_joules, end_covered_s = self._at(end_s)
        return max(end_joules - start_joules, 0.0), max(end_covered_s - start_covered_s, 0.0)

    def _at(self, time_s: float) -> tuple[float, float]:
        after = bisect_left(self._times_s, time_s)
        if after == len(self._times_s):
            return (self._joules[-1], self._covered_s[-1]) if after else (0.0, 0.0)
        if after == 0:
            return self._joules[0], self._covered_s[0]
        before_s = self._times_s[after - 1]
        share = (time_s - before_s) / (self._times_s[after] - before_s)
        joules, covered_s = self._joules[after - 1], self._covered_s[after - 1]
        return (
            joules + share * (self._joules[after] - joules),
            covered_s + share * (self._covered_s[after] - covered_s),
        )

    def forget(self, before_s: float) -> None:
        """Nobody will ask for earlier times any more."""
        count = bisect_right(self._times_s, before_s) - 1
        if count > 0:
            self._drop(count)

    def _drop(self, count: int) -> None:
        del self._times_s[:count], self._joules[:count], self._covered_s[:count]


@dataclass(slots=True)
class _Gpu:
    curve: PowerCurve = field(default_factory=PowerCurve)
    powered: bool = False
    """There has been a power sample."""
    pieces: list[Piece] = field(default_factory=list)
    """Held, in their order."""
    walked_s: float = float("-inf")
    uses: dict[EnergyUse, float] = field(default_factory=lambda: dict.fromkeys(EnergyUse, 0.0))


@dataclass(slots=True)
class _Unit:
    joules: dict[str, float] = field(default_factory=dict)
    """By GPU."""
    covered_s: float = 0.0
    """Span time that power samples cover."""
    ended: SpanEnded | None = None
    gpu: str = ""
    last_s: float = 0.0
    """When its last piece ended, and where."""


@dataclass(slots=True)
class _Job:
    joules: dict[str, float] = field(default_factory=dict)
    """By GPU, of the units that are done."""
    covered_s: float = 0.0
    span_s: float = 0.0
    decided: JobDecided | None = None
    due_s: float | None = None
    """Once its source has settled this, nothing more is to be expected of it; None before anything after the decision
    is settled."""


class EnergyAccount:
    """The energy of all GPUs by use, and that of proofs."""

    def __init__(self, sources: Iterable[str] = ()) -> None:
        self._gpus: dict[str, _Gpu] = {}
        self._units: dict[Unit, _Unit] = {}
        self._jobs: dict[JobKey, _Job] = {}
        """Undecided ones, and decided ones with units that are not done."""
        self._decided: dict[JobKey, bool] = {}
        """Whether the latest jobs were proved: some energy comes late."""
        self._just_decided: dict[str, list[_Job]] = {}
        self._settled_s: dict[str, float] = {}
        self._proofs: dict[str, dict[str, HistogramTally]] = {}
        for source in sources:
            self._tallies(source)

    def _tallies(self, source: str) -> dict[str, HistogramTally]:
        if source not in self._proofs:
            kinds = [kind for kind in PROOF_KINDS if kind != "other"]
            self._proofs[source] = {kind: HistogramTally(PROOF_ENERGY_BOUNDS) for kind in kinds}
        return self._proofs[source]

    # --- input -------------------------------------------------------------------------------------------------

    def power(self, gpu: str, sample: PowerSample) -> None:
        """A power sample of a GPU."""
        known = self._gpus.setdefault(gpu, _Gpu())
        known.powered = True
        known.curve.add(sample)

    def piece(self, piece: Piece) -> None:
        """A piece of compared time: each GPU's in order."""
        known = self._gpus.setdefault(piece.gpu, _Gpu())
        if piece.start_unix_s < known.walked_s - MAX_WAIT_S:
            # The wall clock was set back: what is held is not measured by the new time.
            known.pieces.clear()
        known.walked_s = piece.end_unix_s
        last = known.pieces[-1] if known.pieces else None
        if (
            last is not None
            and last.end_unix_s == piece.start_unix_s
            and last.seconds < _PIECE_MAX_S
            and (last.units, last.unlogged_share) == (piece.units, piece.unlogged_share)
        ):
            known.pieces[-1] = Piece(piece.gpu, last.start_unix_s, piece.end_unix_s, piece.units, piece.unlogged_share)
        else:
            known.pieces.append(piece)
        for unit in piece.units:
            record = self._units.setdefault(unit, _Unit())
            record.gpu, record.last_s = piece.gpu, piece.end_unix_s

    def fact(self, source: str, fact: Fact) -> None:
        """A source's timeline tells something."""
        tallies = self._tallies(source)
        match fact:
            case SpanEnded():
                self._units.setdefault((source, fact.unit), _Unit()).ended = fact
            case JobDecided():
                tallies.setdefault(fact.proof_kind, HistogramTally(PROOF_ENERGY_BOUNDS))
                self._decide((source, fact.job), fact)
            case Settled():
                self._settled_s[source] = fact.until_unix_s
                for job in self._just_decided.pop(source, ()):
                    job.due_s = fact.until_unix_s + _DECISION_GRACE_S
            case _:
                pass

    # --- sharing out -------------------------------------------------------------------------------------------

    def advance(self, uncompared: AbstractSet[Unit]) -> None:
        """Shares out everything that can be. `uncompared`: units that will be in pieces yet to come."""
        for known in self._gpus.values():
            held = []
            for piece in known.pieces:
                if self._is_due(known, piece):
                    self._share_out(known, piece)
                else:
                    held.append(piece)
            known.pieces = held
            known.curve.forget(held[0].start_unix_s if held else known.walked_s)
        self._finish_units(uncompared)

    def _is_due(self, known: _Gpu, piece: Piece) -> bool:
        if known.curve.end_s < piece.end_unix_s and known.walked_s - piece.end_unix_s <= MAX_WAIT_S:
            return False
        if known.walked_s - piece.start_unix_s > _HOLD_S:
            return True
        return all(self._units[unit].ended is not None for unit in piece.units)

    def _share_out(self, known: _Gpu, piece: Piece) -> None:
        start_s, end_s = piece.start_unix_s, piece.end_unix_s
        if not piece.units:
            joules, _ = known.curve.between(start_s, end_s)
            known.uses[EnergyUse.UNLOGGED] += joules * piece.unlogged_share
            known.uses[EnergyUse.IDLE] += joules * (1 - piece.unlogged_share)
            return
        units = [self._units[unit] for unit in piece.units]
        edges = {start_s, end_s}
        for unit in units:
            if unit.ended is not None and unit.ended.kernel_unix_s is not None:
                edges.update(edge_s for edge_s in unit.ended.kernel_unix_s if start_s < edge_s < end_s)
        cuts = sorted(edges)
        for cut_s, next_s in pairwise(cuts):
            joules, covered_s = known.curve.between(cut_s, next_s)
            takers = _takers(units, cut_s, next_s)
            for unit in takers:
                unit.joules[piece.gpu] = unit.joules.get(piece.gpu, 0.0) + joules / len(takers)
            for unit in units:
                unit.covered_s += covered_s

    def _finish_units(self, uncompared: AbstractSet[Unit]) -> None:
        held = {unit for known in self._gpus.values() for piece in known.pieces for unit in piece.units}
        unfinished: set[JobKey] = set()
        for key, unit in list(self._units.items()):
            source, _ = key
            waits = key in held or key in uncompared
            if unit.ended is None:
                if not waits and self._gpus[unit.gpu].walked_s - unit.last_s > _HOLD_S:
                    # Nobody will say any more what it was for.
                    del self._units[key]
                    self._book(unit.joules, proved=False)
            elif waits:
                unfinished.add((source, unit.ended.job))
            else:
                del self._units[key]
                self._add_to_job((source, unit.ended.job), unit, unit.ended.seconds)
        for job_key, job in list(self._jobs.items()):
            due = job.due_s is not None and self._settled_s[job_key[0]] >= job.due_s
            if job.decided is not None and due and job_key not in unfinished:
                self._observe(job_key[0], job, job.decided)
                del self._jobs[job_key]

    def _add_to_job(self, key: JobKey, unit: _Unit, span_s: float) -> None:
        outcome = self._decided.get(key)
        if outcome is not None:
            self._book(unit.joules, proved=outcome)
            if key not in self._jobs:
                return
        job = self._job(key)
        for gpu, joules in unit.joules.items():
            job.joules[gpu] = job.joules.get(gpu, 0.0) + joules
        job.covered_s += unit.covered_s
        job.span_s += span_s

    def _job(self, key: JobKey) -> _Job:
        if key not in self._jobs:
            self._jobs[key] = _Job()
            if len(self._jobs) > _MAX_UNDECIDED:
                oldest = self._jobs.pop(next(iter(self._jobs)))
                if oldest.decided is None:
                    self._book(oldest.joules, proved=False)
        return self._jobs[key]

    def _decide(self, key: JobKey, fact: JobDecided) -> None:
        if key in self._decided:
            return
        self._decided[key] = fact.proved
        if len(self._decided) > _MAX_DECIDED:
            del self._decided[next(iter(self._decided))]
        job = self._job(key)
        job.decided = fact
        self._just_decided.setdefault(key[0], []).append(job)
        self._book(job.joules, proved=fact.proved)

    def _book(self, joules_by_gpu: Mapping[str, float], *, proved: bool) -> None:
        use = EnergyUse.PROOFS if proved else EnergyUse.WASTED
        for gpu, joules in joules_by_gpu.items():
            self._gpus[gpu].uses[use] += joules

    def _observe(self, source: str, job: _Job, decided: JobDecided) -> None:
        if decided.proved and job.span_s > 0 and job.covered_s >= COVERAGE_MIN * job.span_s:
            joules = sum(job.joules.values())
            exemplar = Exemplar(decided.job_id, joules, self._settled_s.get(source))
            self._proofs[source][decided.proof_kind].observe(joules, exemplar)

    # --- output ------------------------------------------------------------------------------------------------

    def joules(self, gpu: str) -> dict[EnergyUse, float] | None:
        """Energy by use, all uses present; None while the GPU's power was never read."""
        known = self._gpus.get(gpu)
        return dict(known.uses) if known is not None and known.powered else None

    def undecided_joules(self, gpu: str) -> float:
        """Energy of spans that has been shared out, of jobs that are not decided."""
        jobs = sum(job.joules.get(gpu, 0.0) for job in self._jobs.values() if job.decided is None)
        return jobs + sum(unit.joules.get(gpu, 0.0) for unit in self._units.values())

    def proof_joules(self) -> dict[tuple[str, str], Histogram]:
        """Energy of proofs by source and kind, from the first power sample on; its sums are in joules."""
        if not any(known.powered for known in self._gpus.values()):
            return {}
        return {
            (source, kind): tally.freeze()
            for source, tallies in self._proofs.items()
            for kind, tally in tallies.items()
        }


def _takers(units: list[_Unit], start_s: float, end_s: float) -> list[_Unit]:
    """Whose energy it is: that of the unit whose kernels run; else of those of which nobody knows when they do, for the
    others' don't; else of all."""
    kernels = [(unit, unit.ended.kernel_unix_s if unit.ended else None) for unit in units]
    running = [unit for unit, kernel in kernels if kernel and kernel[0] <= start_s and kernel[1] >= end_s]
    return running or [unit for unit, kernel in kernels if kernel is None] or units


class GpuCorrelation:
    """Chip, power and log together: what the thread that samples the GPUs calls. Not for several threads at once."""

    def __init__(self, sources: Iterable[str] = ()) -> None:
        """`sources`: the names of all followed logs."""
        names = tuple(sources)
        self._energy = EnergyAccount(names)
        self._correlator = Correlator(names, self._energy.piece)

    def devices(self, gpus: Iterable[str]) -> None:
        """These GPUs exist, by label. A log that does not name its GPU means the only one, if there is one only."""
        self._correlator.devices(gpus)

    def fact(self, source: str, fact: Fact) -> None:
        """A source's timeline tells something; each source's facts come in their order."""
        self._correlator.fact(source, fact)
        self._energy.fact(source, fact)

    def busy(self, gpu: str, sample: BusySample) -> None:
        """A busy sample; each GPU's come in their order."""
        self._correlator.busy(gpu, sample)

    def power(self, gpu: str, sample: PowerSample) -> None:
        """A power sample; each GPU's come in their order."""
        self._correlator.observed(gpu, sample.start_unix_s, sample.end_unix_s)
        self._energy.power(gpu, sample)

    def advance(self) -> None:
        """Takes everything into account that is settled by now."""
        self._correlator.advance()
        self._energy.advance(self._correlator.units())

    def spans(self, gpu: str) -> dict[str, SpanBusy]:
        """Chip against log by source, for the sources that use this GPU."""
        return self._correlator.spans(gpu)

    def unlogged_busy_seconds(self, gpu: str) -> float | None:
        """Chip busy outside the spans of all sources; None while nothing could be set against them."""
        return self._correlator.unlogged_busy_seconds(gpu)

    def energy_joules(self, gpu: str) -> dict[EnergyUse, float] | None:
        """The GPU's energy by use, all uses present; None while its power was never read.

        Spans of a source that can't be compared are not seen here: their energy is unlogged as far as the chip is busy.
        """
        return self._energy.joules(gpu)

    def proof_energy_joules(self) -> dict[tuple[str, str], Histogram]:
        """Energy of proofs by source and kind; empty before any power was read."""
        return self._energy.proof_joules()

    def sources(self) -> Mapping[str, SourceComparison]:
        """How each source takes part at present."""
        return self._correlator.sources()
