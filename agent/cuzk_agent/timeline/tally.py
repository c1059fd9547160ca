"""Counters and histograms of one source, as they are being filled."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Self

from cuzk_agent.timeline.state import Exemplar, Histogram, LatencyBasis, ProofOutcome, UnitOutcome

PROOF_KINDS = ("porep-c2", "snap-update", "window-post", "winning-post", "other")
"""The daemon's proof kinds; `other` is what is none of them or not known."""

TROUBLE_KINDS = (
    "synthesis_failed",
    "prove_failed",
    "selfcheck",
    "bad_partition",
    "memory_budget",
    "cuda_alloc",
    "srs_evicted",
)
"""What `cuzk_trouble_total` counts; of these only `bad_partition` can be laid at one GPU's door."""

SYNTH_BOUNDS = (0.05, 0.2, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90, 120, 180, 300)
SPAN_BOUNDS = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8, 12, 20, 25, 30, 35, 40, 50, 70)
GAP_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 15, 30, 60, 120, 300, 600)
WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
PROOF_BOUNDS = (1, 2, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 420, 600)


@dataclass(slots=True)
class Numbers:
    """0, 1, 2 …, for ever."""

    given: int = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        self.given += 1
        return self.given - 1


class HistogramTally:
    """A histogram with one writer; `freeze` gives the published value."""

    __slots__ = ("bounds", "counts", "exemplars", "sum_micros")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_micros = 0
        """In whole millionths: sums of floats would drift."""
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, seconds: float, exemplar: Exemplar | None = None) -> None:
        """Counts one observation; a negative one (disordered lines) counts as 0."""
        seconds = max(seconds, 0.0)
        bucket = bisect_left(self.bounds, seconds)
        self.counts[bucket] += 1
        self.sum_micros += round(seconds * 1e6)
        if exemplar is not None:
            self.exemplars[bucket] = exemplar

    @property
    def sum_seconds(self) -> float:
        return self.sum_micros / 1e6

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, other: HistogramTally) -> None:
        """Adds the observations of a histogram with the same bounds."""
        for bucket, count in enumerate(other.counts):
            self.counts[bucket] += count
            self.exemplars[bucket] = other.exemplars[bucket] or self.exemplars[bucket]
        self.sum_micros += other.sum_micros

    def freeze(self) -> Histogram:
        """The present value, independent of what is observed later."""
        return Histogram(self.bounds, tuple(self.counts), self.sum_seconds, tuple(self.exemplars))


@dataclass(slots=True)
class Counters:
    """Everything that is counted at once, over all engines of one source."""

    unit_outcomes: dict[UnitOutcome, int] = field(default_factory=lambda: dict.fromkeys(UnitOutcome, 0))
    proof_outcomes: dict[tuple[str, ProofOutcome], int] = field(
        default_factory=lambda: {(kind, outcome): 0 for kind in PROOF_KINDS for outcome in ProofOutcome}
    )
    trouble: dict[tuple[str, str], int] = field(default_factory=lambda: {(kind, ""): 0 for kind in TROUBLE_KINDS})
    synth: dict[str, HistogramTally] = field(
        default_factory=lambda: {kind: HistogramTally(SYNTH_BOUNDS) for kind in PROOF_KINDS}
    )
    span: dict[str, HistogramTally] = field(
        default_factory=lambda: {kind: HistogramTally(SPAN_BOUNDS) for kind in PROOF_KINDS}
    )
    ready_wait: HistogramTally = field(default_factory=lambda: HistogramTally(WAIT_BOUNDS))
    handoff: HistogramTally = field(default_factory=lambda: HistogramTally(WAIT_BOUNDS))
    proof_latency: dict[LatencyBasis, dict[str, HistogramTally]] = field(
        default_factory=lambda: {
            basis: {kind: HistogramTally(PROOF_BOUNDS) for kind in PROOF_KINDS} for basis in LatencyBasis
        }
    )
    srs_loads: int = 0
    """Parameters (SRS) that were loaded from disk."""
    srs_load_ms: int = 0
    other_seen: bool = False
    """There was a job whose kind is `other`."""

    def count_from_here(self) -> None:
        """Everything begins at 0; what is known to exist stays known."""
        new, known, other_seen = Counters(), dict.fromkeys(self.trouble, 0), self.other_seen
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))
        self.trouble, self.other_seen = known, other_seen
