"""Two or more runs side by side, and whether they differ by more than chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from cuzk_agent.report.model import EngineReport, JobRow, Report, Values, working
from cuzk_agent.timeline.state import Cause, LatencyBasis, ProofOutcome

FEW_PROOFS = 8
"""With fewer than this on either side nothing is said about chance."""
_RESAMPLES = 2000
_DRAWS_MAX = 4_000_000
"""Long runs are resampled less often: their noise is small, and so is that of its estimate."""
_CONFIDENCE = 0.95
_SEED = 1
_MIX = 0.05
"""How far the share of a kind may be off until that is worth a note."""


class Unit(Enum):
    """How a figure is to be read."""

    RATIO = "ratio"
    SECONDS = "s"
    PER_HOUR = "1/h"
    COUNT = "count"


class _Proof(NamedTuple):
    """What one proof contributes to the figures of its run."""

    busy_ms: float
    gap_ms: float
    synth_ms: float
    span_ms: float
    units: float
    total_ms: float
    one: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the comparison."""

    name: str
    unit: Unit
    more_is_better: bool | None
    of: Callable[[_Run], float | None]
    resampled: tuple[Callable[[_Proof], float], Callable[[_Proof], float]] | None = None
    """The figure as a quotient of sums over proofs: only such can be resampled."""


class _Run:
    """One log, all its engines and GPUs together."""

    def __init__(self, report: Report) -> None:
        self.engines = report.engines
        self.gpus = [gpu for engine in report.engines for gpu in working(engine.gpus)]
        bases = [engine.proof_basis for engine in report.engines if engine.proof_basis is not None]
        self.basis = LatencyBasis.SUBMISSION if LatencyBasis.SUBMISSION in bases else next(iter(bases), None)
        self.proved = [
            job for engine in report.engines for job in engine.jobs if job.outcome is ProofOutcome.PROVED and job.units
        ]
        self.proofs = [_proof(job) for job in self.proved if job.total_from is self.basis]

    def pooled(self, of: Callable[[EngineReport], Mapping[str, Values]]) -> Values:
        return Values.pooled(values for engine in self.engines for values in of(engine).values())

    def proof_latencies(self) -> Values:
        return Values(job.total_ms for job in self.proved if job.total_ms is not None and job.total_from is self.basis)

    def gap_share(self, cause: Cause) -> float | None:
        whole = sum(gpu.busy_ms + gpu.gap_ms for gpu in self.gpus)
        return _ratio(sum(gpu.gap_by_cause_ms[cause] for gpu in self.gpus), whole)

    def run_ms(self) -> int:
        return sum(engine.throughput.run_ms for engine in self.engines)


def _proof(job: JobRow) -> _Proof:
    return _Proof(
        job.busy_ms, job.gap_ms, job.synth_ms, job.span_ms, sum(job.units.values()), float(job.total_ms or 0), 1.0
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _utilization(run: _Run) -> float | None:
    busy_ms = sum(gpu.busy_ms for gpu in run.gpus)
    return _ratio(busy_ms, busy_ms + sum(gpu.gap_ms for gpu in run.gpus))


def _kernel_utilization(run: _Run) -> float | None:
    known = [gpu for gpu in run.gpus if gpu.kernel_utilization is not None]
    return _ratio(sum(gpu.kernel_ms or 0 for gpu in known), sum(gpu.busy_ms + gpu.gap_ms for gpu in known))


def _occupancy(run: _Run) -> float | None:
    chips = [gpu.chip for gpu in run.gpus if gpu.chip is not None]
    return _ratio(sum(chip.span_busy_ms for chip in chips), sum(chip.span_sampled_ms for chip in chips))


def _gap_figure(cause: Cause) -> Figure:
    return Figure(
        f"{cause.value}_share", Unit.RATIO, None if cause is Cause.NO_WORK else False, lambda run: run.gap_share(cause)
    )


FIGURES: tuple[Figure, ...] = (
    Figure(
        "logged_utilization", Unit.RATIO, True, _utilization,
        (lambda proof: proof.busy_ms, lambda proof: proof.busy_ms + proof.gap_ms),
    ),
    Figure(
        "run_utilization", Unit.RATIO, True,
        lambda run: _ratio(sum(gpu.run_busy_ms for gpu in run.gpus), sum(gpu.run_ms for gpu in run.gpus)),
    ),
    Figure("kernel_utilization", Unit.RATIO, True, _kernel_utilization),
    Figure("span_occupancy", Unit.RATIO, True, _occupancy),
    *(_gap_figure(cause) for cause in Cause),
    Figure(
        "proofs_per_hour", Unit.PER_HOUR, True,
        lambda run: _ratio(sum(engine.throughput.proofs for engine in run.engines) * 3_600_000, run.run_ms()),
    ),
    Figure(
        "gpu_seconds_per_proof", Unit.SECONDS, False,
        lambda run: _ratio(sum(proof.busy_ms + proof.gap_ms for proof in run.proofs) / 1000, len(run.proofs)),
        (lambda proof: (proof.busy_ms + proof.gap_ms) / 1000, lambda proof: proof.one),
    ),
    Figure(
        "proof_mean_s", Unit.SECONDS, False, lambda run: _seconds(run.proof_latencies().mean_ms),
        (lambda proof: proof.total_ms / 1000, lambda proof: proof.one),
    ),
    Figure("proof_p50_s", Unit.SECONDS, False, lambda run: _seconds(run.proof_latencies().quantile_ms(0.5))),
    Figure("proof_p99_s", Unit.SECONDS, False, lambda run: _seconds(run.proof_latencies().quantile_ms(0.99))),
    Figure(
        "synth_mean_s", Unit.SECONDS, False, lambda run: _seconds(run.pooled(lambda engine: engine.synth).mean_ms),
        (lambda proof: proof.synth_ms / 1000, lambda proof: proof.units),
    ),
    Figure(
        "gpu_span_mean_s", Unit.SECONDS, False,
        lambda run: _seconds(run.pooled(lambda engine: engine.gpu_span).mean_ms),
        (lambda proof: proof.span_ms / 1000, lambda proof: proof.units),
    ),
    Figure(
        "ready_wait_mean_s", Unit.SECONDS, None,
        lambda run: _seconds(run.pooled(lambda engine: engine.ready_wait).mean_ms),
    ),
    Figure(
        "handoff_mean_s", Unit.SECONDS, False,
        lambda run: _seconds(run.pooled(lambda engine: engine.handoff).mean_ms),
    ),
    Figure(
        "gap_mean_s", Unit.SECONDS, False,
        lambda run: _seconds(Values.pooled(gpu.gaps for gpu in run.gpus).mean_ms),
    ),
    Figure(
        "gap_max_s", Unit.SECONDS, False,
        lambda run: _seconds(Values.pooled(gpu.gaps for gpu in run.gpus).max_ms),
    ),
    Figure(
        "wasted_share", Unit.RATIO, False,
        lambda run: _ratio(
            sum(sum(gpu.wasted_ms.values()) for gpu in run.gpus), sum(gpu.busy_ms for gpu in run.gpus)
        ),
    ),
    Figure(
        "failed_proofs", Unit.COUNT, False,
        lambda run: float(sum(engine.proof_outcomes[ProofOutcome.FAILED] for engine in run.engines)),
    ),
)  # fmt: skip
"""What runs are compared by, in the order of the table."""

NAMES = tuple(figure.name for figure in FIGURES)


class Chance(Enum):
    """Whether a change is more than what runs differ by anyway."""

    REAL = "real"
    NOISE = "noise"
    TOO_FEW = "too_few"
    """Proofs, to tell."""
    NOT_TOLD = "not_told"
    """The figure is not one of single proofs."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one run, against the base."""

    figure: Figure
    base: float | None
    new: float | None
    interval: tuple[float, float] | None
    """Where the difference lies, with 95 % confidence."""
    chance: Chance

    @property
    def difference(self) -> float | None:
        return None if self.base is None or self.new is None else self.new - self.base

    @property
    def change(self) -> float | None:
        """Relative to the base."""
        if self.base is None or self.new is None:
            return None
        if self.base == self.new:
            return 0.0
        return (self.new - self.base) / self.base if self.base else None

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """The interval relative to the base, as the change is."""
        if self.interval is None or not self.base:
            return None
        low, high = self.interval
        return low / self.base, high / self.base

    @property
    def better(self) -> bool | None:
        """None if it is neither, or chance."""
        if self.chance is not Chance.REAL or not self.difference or self.figure.more_is_better is None:
            return None
        return (self.difference > 0) is self.figure.more_is_better

    def to_json(self) -> dict[str, Any]:
        return {
            "base": _rounded(self.base),
            "new": _rounded(self.new),
            "change": _rounded(self.change),
            "interval": None if self.interval is None else [round(end, 6) for end in self.interval],
            "chance": self.chance.value,
            "better": self.better,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against the base."""

    logs: tuple[str, ...]
    base_proofs: int
    proofs: int
    figures: tuple[Compared, ...]
    settings: Mapping[str, tuple[str | None, str | None]]
    """What differs: before and now; None where it is not told."""
    bound_by: tuple[str, str]
    """Before and now."""
    notes: tuple[str, ...]

    def values(self) -> dict[str, float | None]:
        """What a condition may be about."""
        found: dict[str, float | None] = {}
        for compared in self.figures:
            name = compared.figure.name
            found[name] = compared.new
            found[f"base.{name}"], found[f"change.{name}"] = compared.base, compared.change
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "logs": list(self.logs),
            "base_proofs": self.base_proofs,
            "proofs": self.proofs,
            "figures": {compared.figure.name: compared.to_json() for compared in self.figures},
            "bound_by": {"base": self.bound_by[0], "new": self.bound_by[1]},
            "settings": {key: {"base": base, "new": new} for key, (base, new) in self.settings.items()},
            "notes": list(self.notes),
        }


def compare(base: Report, new: Report) -> Comparison:
    """Sets one run against the base."""
    before, now = _Run(base), _Run(new)
    few = min(len(before.proofs), len(now.proofs)) < FEW_PROOFS
    intervals = {} if few else _bootstrap(before.proofs, now.proofs)
    if before.basis is not now.basis:
        # What the one counts from submission, the other counts from the first event.
        intervals.pop("proof_mean_s", None)
    figures = []
    for figure in FIGURES:
        interval = intervals.get(figure.name)
        if figure.resampled is None:
            chance = Chance.NOT_TOLD
        elif few:
            chance = Chance.TOO_FEW
        elif interval is None:
            chance = Chance.NOT_TOLD
        else:
            chance = Chance.NOISE if interval[0] <= 0 <= interval[1] else Chance.REAL
        figures.append(Compared(figure, figure.of(before), figure.of(now), interval, chance))
    return Comparison(
        new.logs,
        len(before.proofs),
        len(now.proofs),
        tuple(figures),
        _settings(base, new),
        (_bound_by(base), _bound_by(new)),
        _notes(before, now, few),
    )


def _bootstrap(base: Sequence[_Proof], new: Sequence[_Proof]) -> dict[str, tuple[float, float]]:
    """For each figure, where the difference lies when both runs are drawn again from their own proofs."""
    resampled = {figure.name: figure.resampled for figure in FIGURES if figure.resampled is not None}
    chance = random.Random(_SEED)
    count = max(200, min(_RESAMPLES, _DRAWS_MAX // (len(base) + len(new))))
    differences: dict[str, list[float]] = {name: [] for name in resampled}
    for _ in range(count):
        sums = [_summed(chance.choices(proofs, k=len(proofs))) for proofs in (base, new)]
        for name, (part, whole) in resampled.items():
            before, now = (_ratio(part(drawn), whole(drawn)) for drawn in sums)
            if before is not None and now is not None:
                differences[name].append(now - before)
    cut = (1 - _CONFIDENCE) / 2
    found = {}
    for name, values in differences.items():
        if values:
            values.sort()
            found[name] = values[int(cut * len(values))], values[min(int((1 - cut) * len(values)), len(values) - 1)]
    return found


def _summed(proofs: Sequence[_Proof]) -> _Proof:
    return _Proof(*map(sum, zip(*proofs, strict=True)))


def _bound_by(report: Report) -> str:
    return ", ".join(dict.fromkeys(engine.verdict.bound_by or "not known" for engine in report.engines if engine.spans))


def _settings(base: Report, new: Report) -> dict[str, tuple[str | None, str | None]]:
    before, now = (_settings_of(report) for report in (base, new))
    keys = dict.fromkeys((*before, *now))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _settings_of(report: Report) -> dict[str, str]:
    """Of all its engines; where they differ, all values."""
    found: dict[str, dict[str, None]] = {}
    for engine in report.engines:
        for key, value in engine.settings.items():
            found.setdefault(key, {})[value] = None
    return {key: ", ".join(values) for key, values in found.items()}


def _notes(before: _Run, now: _Run, few: bool) -> tuple[str, ...]:
    notes = []
    if few:
        notes.append(
            f"Too few proofs ({len(before.proofs)} and {len(now.proofs)}) to tell a change from chance: "
            f"{FEW_PROOFS} on each side are needed."
        )
    mixes = [_mix(run) for run in (before, now)]
    kinds = sorted(mixes[0].keys() | mixes[1].keys())
    if any(abs(mixes[0].get(kind, 0.0) - mixes[1].get(kind, 0.0)) > _MIX for kind in kinds):
        told = ", ".join(f"{mixes[0].get(kind, 0.0):.0%} → {mixes[1].get(kind, 0.0):.0%} {kind}" for kind in kinds)
        notes.append(f"The runs proved different kinds ({told}), so that their figures are not of the same work.")
    if before.basis is not now.basis and before.basis and now.basis:
        notes.append("One log tells proofs from their submission, the other only from their first event.")
    return tuple(notes)


def _mix(run: _Run) -> dict[str, float]:
    kinds = Counter(job.proof_kind for job in run.proved)
    return {kind: count / len(run.proved) for kind, count in kinds.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
