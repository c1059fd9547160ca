"""Where energy goes, rule by rule, and against brute force at 1 ms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuzk_agent.gpu.energy import _POINTS_MAX, PROOF_ENERGY_BOUNDS, GpuCorrelation, PowerCurve
from cuzk_agent.gpu.samples import BusySample, PowerSample
from cuzk_agent.gpu.state import EnergyUse
from cuzk_agent.timeline.facts import JobDecided, Settled, SpanEnded, SpanTime
from cuzk_agent.timeline.state import Histogram

T0 = 1000.0
"""Seconds in these tests count from here."""


class Bench:
    """One or more sources and GPUs under construction."""

    def __init__(self, *sources: str, gpus: tuple[str, ...] = ("0",)) -> None:
        self.chips = GpuCorrelation(sources or ("a",))
        self.chips.devices(gpus)
        for source in sources or ("a",):
            self.settle(0.0, source)

    def span(self, start_s: float, end_s: float, *units: int, source: str = "a", gpu: str = "0") -> None:
        self.chips.fact(source, SpanTime(gpu, T0 + start_s, T0 + end_s, units))

    def ended(
        self, unit: int, job: int, seconds: float, kernel: tuple[float, float] | None = None, source: str = "a"
    ) -> None:
        kernel_unix_s = None if kernel is None else (T0 + kernel[0], T0 + kernel[1])
        self.chips.fact(source, SpanEnded(unit, job, seconds, kernel_unix_s))

    def decided(self, job: int, *, proved: bool = True, kind: str = "porep-c2", source: str = "a") -> None:
        self.chips.fact(source, JobDecided(job, f"job-{job}", kind, proved))

    def settle(self, until_s: float, source: str = "a", uncertainty_s: float = 0.0) -> None:
        self.chips.fact(source, Settled(T0 + until_s, uncertainty_s))

    def busy(self, start_s: float, end_s: float, fraction: float = 0.0, gpu: str = "0") -> None:
        self.chips.busy(gpu, BusySample(T0 + start_s, T0 + end_s, fraction))

    def power(self, start_s: float, end_s: float, watts: float, gpu: str = "0") -> None:
        self.chips.power(gpu, PowerSample(T0 + start_s, T0 + end_s, watts))

    def advance(self) -> None:
        self.chips.advance()

    def uses(self, gpu: str = "0") -> dict[str, float]:
        """Energy by use, without the uses that took nothing."""
        return {use.value: joules for use, joules in (self.chips.energy_joules(gpu) or {}).items() if joules}

    def undecided(self, gpu: str = "0") -> float:
        return self.chips._energy.undecided_joules(gpu)

    def proof(self, kind: str = "porep-c2", source: str = "a") -> tuple[int, float]:
        """Count and sum."""
        histogram = self.chips.proof_energy_joules()[source, kind]
        return sum(histogram.counts), histogram.sum_seconds


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6)


# --- by use -----------------------------------------------------------------------------------------------------


def test_energy_of_spans_counts_once_their_job_is_decided() -> None:
    bench = Bench()
    bench.span(1.0, 3.0, 1)
    bench.ended(1, 7, 2.0)
    bench.settle(4.0)
    bench.busy(0.0, 4.0)
    bench.power(0.0, 4.0, 100)
    bench.advance()
    assert bench.uses() == near({"idle": 200})
    assert bench.undecided() == pytest.approx(200)
    bench.decided(7)
    bench.advance()
    assert bench.uses() == near({"idle": 200, "proofs": 200})
    assert bench.undecided() == 0
    assert bench.chips.energy_joules("0") == {
        EnergyUse.PROOFS: pytest.approx(200),
        EnergyUse.WASTED: 0,
        EnergyUse.IDLE: pytest.approx(200),
        EnergyUse.UNLOGGED: 0,
    }


def test_energy_of_failed_jobs_is_wasted() -> None:
    bench = Bench()
    bench.span(1.0, 3.0, 1)
    bench.ended(1, 7, 2.0)
    bench.decided(7, proved=False)
    bench.settle(4.0)
    bench.settle(6.0)
    bench.busy(0.0, 4.0)
    bench.power(0.0, 4.0, 100)
    bench.advance()
    assert bench.uses() == near({"idle": 200, "wasted": 200})
    assert bench.proof() == (0, 0)


def test_late_energy_of_a_decided_job_goes_by_its_outcome() -> None:
    bench = Bench()
    bench.busy(0.0, 9.0)
    bench.power(0.0, 9.0, 100)
    bench.span(1.0, 3.0, 1)
    bench.decided(7, proved=False)
    bench.span(3.0, 5.0, 1)
    bench.settle(5.0)
    bench.settle(8.0)
    bench.advance()
    bench.settle(9.0)
    bench.ended(1, 7, 4.0)
    bench.advance()
    bench.settle(20.0)
    bench.advance()
    assert bench.uses() == near({"idle": 500, "wasted": 400})
    assert bench.chips._energy._jobs == {}
    assert bench.chips._energy._units == {}


def test_outside_spans_energy_is_unlogged_as_far_as_the_chip_is_busy() -> None:
    bench = Bench()
    bench.span(1.1, 3.0, 1)
    bench.settle(4.0)
    bench.busy(0.0, 0.2, 0.25)
    bench.busy(0.2, 1.0, 0.0)
    bench.busy(1.0, 1.2, 0.75)
    bench.power(0.0, 1.0, 100)
    bench.power(1.0, 1.1, 200)
    bench.power(1.1, 1.2, 300)
    bench.advance()
    # Of the last sample's 150 ms the span takes 100, the rest is half of the time outside.
    assert bench.uses() == near({"unlogged": 5 + 10, "idle": 15 + 80 + 10})


def test_without_busy_samples_energy_outside_spans_is_idle() -> None:
    bench = Bench()
    bench.span(1.0, 3.0, 1)
    bench.ended(1, 7, 2.0)
    bench.decided(7)
    bench.settle(200.0)
    for second in range(200):
        bench.power(second, second + 1, 100)
        bench.advance()
    bench.settle(202.0)
    bench.advance()
    uses = bench.uses()
    assert uses["proofs"] == pytest.approx(200)
    assert 100 * (200 - 61) <= sum(uses.values()) <= 100 * (200 - 59)
    assert bench.proof() == near((1, 200))


def test_nothing_is_shown_before_power_was_read() -> None:
    bench = Bench()
    bench.busy(0.0, 1.0, 0.5)
    bench.settle(1.0)
    bench.advance()
    assert bench.chips.energy_joules("0") is None
    assert bench.chips.energy_joules("1") is None
    assert bench.chips.proof_energy_joules() == {}


def test_power_may_come_late() -> None:
    bench = Bench()
    for second in range(50):
        bench.busy(second, second + 1)
        bench.settle(second + 1)
        bench.advance()
        if second >= 10:
            bench.power(second - 10, second - 9, 100)
    bench.advance()
    assert 3000 <= bench.uses()["idle"] <= 4000


def test_time_without_power_samples_has_no_energy() -> None:
    bench = Bench()
    bench.busy(0.0, 4.0)
    bench.power(0.0, 1.0, 100)
    bench.power(2.0, 3.0, 300)
    bench.power(2.5, 4.0, 100)
    bench.settle(4.0)
    bench.advance()
    assert bench.uses() == near({"idle": 100 + 300 + 100})


# --- by unit ----------------------------------------------------------------------------------------------------


def test_open_spans_share_fairly() -> None:
    bench = Bench()
    bench.span(0.0, 1.0, 1)
    bench.span(1.0, 2.0, 1, 2)
    bench.ended(1, 7, 2.0)
    bench.span(2.0, 3.0, 2)
    bench.ended(2, 8, 2.0)
    bench.decided(7)
    bench.decided(8, proved=False)
    bench.settle(3.0)
    bench.busy(0.0, 3.0)
    bench.power(0.0, 1.5, 100)
    bench.power(1.5, 3.0, 200)
    bench.advance()
    assert bench.uses() == near({"proofs": 100 + 75, "wasted": 75 + 200})


def test_kernels_take_their_energy_alone() -> None:
    bench = Bench()
    bench.span(0.0, 1.0, 1)
    bench.span(1.0, 3.0, 1, 2)
    bench.ended(1, 7, 3.0, kernel=(0.2, 1.5))
    bench.span(3.0, 4.0, 2)
    bench.ended(2, 8, 3.0, kernel=(1.6, 3.5))
    bench.decided(7)
    bench.decided(8, proved=False)
    bench.settle(4.0)
    bench.busy(0.0, 4.0)
    bench.power(0.0, 4.0, 100)
    bench.advance()
    # Between the two kernels nobody's run: 0.1 s is shared.
    assert bench.uses() == near({"proofs": 150 + 5, "wasted": 5 + 240})


def test_where_some_kernels_are_not_known_theirs_is_what_others_leave() -> None:
    bench = Bench()
    bench.span(0.0, 4.0, 1, 2)
    bench.ended(1, 7, 4.0, kernel=(1.0, 2.0))
    bench.ended(2, 8, 4.0)
    bench.decided(7)
    bench.decided(8, proved=False)
    bench.settle(4.0)
    bench.busy(0.0, 4.0)
    bench.power(0.0, 4.0, 100)
    bench.advance()
    assert bench.uses() == near({"proofs": 100, "wasted": 300})


def test_energy_is_held_until_the_kernels_are_known() -> None:
    bench = Bench()
    bench.busy(0.0, 9.0)
    bench.power(0.0, 9.0, 100)
    bench.span(0.0, 2.0, 1, 2)
    bench.settle(2.0)
    bench.advance()
    bench.ended(1, 7, 2.0)
    bench.span(2.0, 5.0, 2)
    bench.settle(5.0)
    bench.decided(7)
    bench.advance()
    assert bench.uses() == {}
    bench.ended(2, 8, 5.0, kernel=(0.0, 2.0))
    bench.settle(9.0)
    bench.settle(11.0)
    bench.advance()
    assert bench.uses() == near({"idle": 400})
    bench.decided(8, proved=False)
    bench.advance()
    assert bench.uses() == near({"idle": 400, "wasted": 500})
    assert bench.proof() == (1, 0), "another unit's kernels ran all the time"


def test_spans_that_do_not_end_share_fairly_after_two_minutes() -> None:
    bench = Bench()
    for second in range(400):
        if second < 200:
            bench.span(second, second + 1, 1, 2)
        bench.settle(second + 1)
        bench.busy(second, second + 1)
        bench.power(second, second + 1, 100)
        if second == 180:
            assert bench.undecided() > 4000
        if second == 200:
            bench.ended(1, 7, 200.0, kernel=(0.0, 200.0))
            bench.decided(7)
        bench.advance()
        assert len(bench.chips._energy._gpus["0"].pieces) < 20
        assert len(bench.chips._energy._gpus["0"].curve._times_s) < 140
    # The first 70 to 80 s were shared before the kernels were known. Nobody knows what unit 2 was for.
    uses = bench.uses()
    assert uses["idle"] == pytest.approx(20_000)
    assert 3500 <= uses["wasted"] <= 4600
    assert uses["proofs"] == pytest.approx(20_000 - uses["wasted"])
    assert bench.proof() == near((1, uses["proofs"]))
    assert bench.undecided() == 0
    assert bench.chips._energy._units == {}


# --- by proof ---------------------------------------------------------------------------------------------------


def test_a_proof_takes_energy_on_several_gpus() -> None:
    bench = Bench("a", "b", gpus=("0", "1"))
    for gpu in ("0", "1"):
        bench.busy(0.0, 4.0, gpu=gpu)
    bench.power(0.0, 4.0, 100, "0")
    bench.power(0.0, 4.0, 300, "1")
    bench.span(0.0, 1.0, 1, gpu="0")
    bench.span(0.0, 2.0, 2, gpu="1")
    # Another source's units and jobs may bear the same numbers.
    bench.span(0.0, 1.0, 1, source="b", gpu="0")
    bench.ended(1, 7, 1.0, source="b")
    bench.settle(4.0, "b")
    bench.ended(1, 7, 1.0)
    bench.ended(2, 7, 2.0)
    bench.decided(7)
    bench.settle(4.0)
    bench.settle(6.0)
    bench.advance()
    assert bench.uses("0") == near({"proofs": 50, "idle": 300})
    assert bench.uses("1") == near({"proofs": 600, "idle": 600})
    assert bench.undecided("0") == pytest.approx(50)
    assert bench.proof() == near((1, 650))
    assert bench.proof(source="b") == (0, 0)


@pytest.mark.parametrize(("covered_s", "count"), [(10.0, 1), (9.6, 1), (9.4, 0), (0.1, 0)])
def test_a_proof_is_observed_if_power_is_known_of_nearly_all_its_spans(covered_s: float, count: int) -> None:
    bench = Bench()
    bench.span(0.0, 10.0, 1)
    bench.ended(1, 7, 10.0)
    bench.decided(7)
    bench.settle(12.0)
    bench.settle(14.0)
    bench.busy(0.0, 12.0)
    bench.power(0.0, covered_s, 100)
    bench.power(10.0, 12.0, 100)
    bench.advance()
    assert bench.proof() == near((count, 100 * covered_s * count))
    assert bench.uses()["proofs"] == pytest.approx(100 * covered_s)


def test_a_proof_with_spans_on_a_gpu_that_is_not_known_is_not_observed() -> None:
    bench = Bench(gpus=("0", "1"))
    bench.span(0.0, 10.0, 1, gpu="unknown")
    bench.ended(1, 7, 10.0)
    bench.span(0.0, 10.0, 2, gpu="0")
    bench.ended(2, 7, 10.0)
    bench.decided(7)
    bench.settle(200.0)
    bench.settle(202.0)
    for second in range(200):
        bench.busy(second, second + 1)
        bench.power(second, second + 1, 100)
    bench.advance()
    assert bench.proof() == (0, 0)
    assert bench.uses()["proofs"] == pytest.approx(1000)
    assert bench.chips._energy._jobs == {}


def test_a_job_may_be_decided_before_its_last_span_is_settled() -> None:
    bench = Bench()
    bench.busy(0.0, 2.0)
    bench.busy(2.0, 4.0)
    bench.power(0.0, 9.0, 100)
    bench.span(0.0, 1.0, 1)
    bench.ended(1, 7, 1.0)
    bench.span(1.0, 2.0, 2)
    bench.decided(7)
    bench.settle(2.0)
    bench.advance()
    assert bench.proof() == (0, 0)
    bench.span(2.0, 2.25, 2)
    bench.ended(2, 7, 1.25)
    bench.settle(4.0)
    bench.advance()
    assert bench.proof() == near((1, 225))
    (exemplar,) = [one for one in bench.chips.proof_energy_joules()["a", "porep-c2"].exemplars if one]
    assert (exemplar.job_id, exemplar.unix_seconds) == ("job-7", T0 + 4)
    assert exemplar.seconds == pytest.approx(225)


def test_kinds_are_born_with_power() -> None:
    bench = Bench("a", "b")
    bench.power(0.0, 1.0, 100)
    kinds = ("porep-c2", "snap-update", "window-post", "winning-post")
    empty = Histogram(PROOF_ENERGY_BOUNDS, (0,) * 16, 0.0, (None,) * 16)
    assert bench.chips.proof_energy_joules() == {(source, kind): empty for source in ("a", "b") for kind in kinds}
    bench.decided(1, proved=False, kind="other")
    assert bench.chips.proof_energy_joules()["a", "other"] == empty
    assert ("b", "other") not in bench.chips.proof_energy_joules()


def test_an_uncertain_source_gets_no_energy() -> None:
    bench = Bench()
    bench.span(0.0, 1.0, 1)
    bench.ended(1, 7, 1.0)
    bench.decided(7)
    bench.settle(4.0, uncertainty_s=0.5)
    bench.settle(6.0, uncertainty_s=0.5)
    bench.busy(0.0, 0.2, 0.5)
    bench.busy(0.2, 1.0, 0.0)
    bench.power(0.0, 1.0, 100)
    bench.advance()
    assert bench.uses() == near({"unlogged": 10, "idle": 90})
    assert bench.proof() == (0, 0)


# --- memory -----------------------------------------------------------------------------------------------------


def test_jobs_that_nobody_decides_are_given_up() -> None:
    bench = Bench()
    bench.chips.power("0", PowerSample(T0, T0 + 20_000, 1.0))
    for number in range(11_000):
        bench.span(number, number + 1, number)
        bench.ended(number, number, 1.0)
        bench.settle(number + 1)
        bench.busy(number, number + 1)
        if number % 50 == 0:
            bench.advance()
    bench.advance()
    assert len(bench.chips._energy._jobs) == 10_000
    assert bench.uses() == near({"wasted": 1000})
    assert bench.undecided() == pytest.approx(10_000)


def test_outcomes_are_not_remembered_for_ever() -> None:
    bench = Bench()
    for number in range(5000):
        bench.decided(number)
        bench.settle(number)
        if number % 50 == 0:
            bench.advance()
    assert len(bench.chips._energy._decided) <= 1024
    assert len(bench.chips._energy._jobs) <= 100


def test_the_power_curve_is_bounded() -> None:
    curve = PowerCurve()
    assert curve.between(0, 1) == (0, 0)
    for number in range(100_000):
        curve.add(PowerSample(number / 50, (number + 1) / 50, 100))
        assert len(curve._times_s) <= _POINTS_MAX
    assert curve.between(1990, 2010) == near((1000, 10))
    curve.forget(1999.99)
    assert len(curve._times_s) == 2
    curve.add(PowerSample(5, 6, 100))
    assert curve.between(0, 3000) == near((100, 1)), "the clock was set back"


def test_a_gpu_whose_clock_was_set_back_starts_anew() -> None:
    bench = Bench()
    bench.settle(1000.0)
    bench.busy(900.0, 901.0)
    bench.power(900.0, 901.0, 100)
    bench.advance()
    bench.settle(20.0)
    bench.span(20.0, 27.0, 1)
    bench.settle(27.0)
    bench.busy(25.0, 26.0)
    bench.busy(26.0, 27.0)
    bench.power(25.0, 27.0, 100)
    bench.ended(1, 7, 7.0)
    bench.decided(7)
    bench.advance()
    assert bench.uses() == near({"idle": 100, "proofs": 200})


# --- brute force ------------------------------------------------------------------------------------------------

LENGTH_MS = 600
SOURCES = ("a", "b")
GPUS = ("0", "1")


@dataclass
class Unit:
    """A unit in milliseconds; its number is its place in the list."""

    source: str
    gpu: str
    job: int
    start_ms: int
    end_ms: int
    kernel_ms: tuple[int, int] | None


@dataclass
class Case:
    """What happened."""

    units: list[Unit]
    outcomes: dict[tuple[str, int], bool | None]
    """By source and job; None: not decided."""
    samples: dict[str, list[tuple[int, int, int]]]
    """Start, end, percent."""
    power: dict[str, list[tuple[int, int, int]]]
    """Start, end, watts."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def unit() -> Unit:
        start_ms = draw(st.integers(0, LENGTH_MS - 1))
        end_ms = draw(st.integers(start_ms + 1, LENGTH_MS))
        kernel = st.lists(st.integers(start_ms, end_ms), min_size=2, max_size=2, unique=True).map(sorted)
        kernel_ms = draw(st.none() | kernel)
        return Unit(
            draw(st.sampled_from(SOURCES)),
            draw(st.sampled_from(GPUS)),
            draw(st.integers(0, 2)),
            start_ms,
            end_ms,
            (kernel_ms[0], kernel_ms[1]) if kernel_ms else None,
        )

    chance = random.Random(draw(st.integers(0, 2**32)))

    def stretches(length_max_ms: int, value_max: int) -> list[tuple[int, int, int]]:
        """Up to the end, some of them missing; the first, with which time begins, and the last are not."""
        found = []
        at_ms = 0
        while at_ms < LENGTH_MS:
            start_ms, at_ms = at_ms, min(at_ms + chance.randint(1, length_max_ms), LENGTH_MS)
            if start_ms == 0 or at_ms == LENGTH_MS or chance.random() < 0.98:
                found.append((start_ms, at_ms, chance.randint(0, value_max)))
        return found

    return Case(
        [unit() for _ in range(draw(st.integers(0, 8)))],
        {(source, job): draw(st.sampled_from([True, False, None])) for source in SOURCES for job in range(3)},
        {gpu: stretches(300, 100) for gpu in GPUS},
        {gpu: stretches(90, 700) for gpu in GPUS},
    )


@dataclass
class Shares:
    """Who took what, in joules."""

    uses: dict[tuple[str, str], float] = field(default_factory=dict)
    """By GPU and use; `undecided` is one more."""
    jobs: dict[tuple[str, int], float] = field(default_factory=dict)
    covered_ms: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, gpu: str, use: str, joules: float) -> None:
        self.uses[gpu, use] = self.uses.get((gpu, use), 0.0) + joules


def by_brute_force(case: Case) -> Shares:
    shares = Shares()
    for gpu in GPUS:
        here = [unit for unit in case.units if unit.gpu == gpu]
        is_open = [any(unit.start_ms <= ms < unit.end_ms for unit in here) for ms in range(LENGTH_MS)]
        watts = [0] * LENGTH_MS
        covered = [False] * LENGTH_MS
        for start_ms, end_ms, value in case.power[gpu]:
            watts[start_ms:end_ms] = [value] * (end_ms - start_ms)
            covered[start_ms:end_ms] = [True] * (end_ms - start_ms)
        unlogged = [0.0] * LENGTH_MS
        for start_ms, end_ms, percent in case.samples[gpu]:
            outside_ms = is_open[start_ms:end_ms].count(False)
            over_ms = (end_ms - start_ms) * percent / 100 - (end_ms - start_ms - outside_ms)
            if outside_ms and over_ms > 0:
                unlogged[start_ms:end_ms] = [over_ms / outside_ms] * (end_ms - start_ms)
        for ms in range(LENGTH_MS):
            joules = watts[ms] / 1000
            units = [unit for unit in here if unit.start_ms <= ms < unit.end_ms]
            if not units:
                shares.add(gpu, "unlogged", joules * unlogged[ms])
                shares.add(gpu, "idle", joules * (1 - unlogged[ms]))
                continue
            running = [unit for unit in units if unit.kernel_ms and unit.kernel_ms[0] <= ms < unit.kernel_ms[1]]
            takers = running or [unit for unit in units if not unit.kernel_ms] or units
            for unit in units:
                key = (unit.source, unit.job)
                shares.covered_ms[key] = shares.covered_ms.get(key, 0) + covered[ms]
            for unit in takers:
                key = (unit.source, unit.job)
                use = {True: "proofs", False: "wasted", None: "undecided"}[case.outcomes[key]]
                shares.add(gpu, use, joules / len(takers))
                shares.jobs[key] = shares.jobs.get(key, 0.0) + joules / len(takers)
    return shares


def facts_of(source: str, case: Case, settle_ms: int, chance: random.Random) -> list[Input]:
    """What a source tells, settling every now and then; jobs are decided some time after their last span."""
    told: list[tuple[int, int, Input]] = []
    """When, rank at the same time, what."""
    mine = [(number, unit) for number, unit in enumerate(case.units) if unit.source == source]
    cuts = sorted({edge for _, unit in mine for edge in (unit.start_ms, unit.end_ms)})
    cuts = sorted({*cuts, *range(0, LENGTH_MS + 1, settle_ms)})
    for gpu in GPUS:
        for start_ms, end_ms in pairwise(cuts):
            numbers = [
                number
                for number, unit in mine
                if unit.gpu == gpu and unit.start_ms <= start_ms and unit.end_ms >= end_ms
            ]
            if numbers:
                told.append((end_ms, 0, ("span", source, gpu, (start_ms, end_ms, *numbers))))
    for number, unit in mine:
        told.append((unit.end_ms, 1, ("ended", source, "", (number, unit.job))))
    for (owner, job), proved in case.outcomes.items():
        last_ms = max((unit.end_ms for _, unit in mine if unit.job == job), default=0)
        if owner == source and proved is not None:
            told.append((last_ms + chance.randint(0, 400), 2, ("decided", source, "", (job, proved))))
    settles = range(0, LENGTH_MS + 4000, settle_ms)
    told.extend((until_ms, 3, ("settle", source, "", (until_ms,))) for until_ms in settles)
    return [one for _, _, one in sorted(told)]


Input = tuple[str, str, str, tuple[int, ...]]


def mixed(streams: list[list[Input]], chance: random.Random) -> Iterator[Input]:
    """All inputs, each stream in its order."""
    while streams := [stream for stream in streams if stream]:
        yield chance.choice(streams).pop(0)


def give(bench: Bench, case: Case, one: Input) -> None:
    kind, source, gpu, values = one
    match kind:
        case "span":
            bench.span(values[0] / 1000, values[1] / 1000, *values[2:], source=source, gpu=gpu)
        case "ended":
            unit = case.units[values[0]]
            kernel = (unit.kernel_ms[0] / 1000, unit.kernel_ms[1] / 1000) if unit.kernel_ms else None
            bench.ended(values[0], unit.job, (unit.end_ms - unit.start_ms) / 1000, kernel, source)
        case "decided":
            bench.decided(values[0], proved=bool(values[1]), source=source)
        case "settle":
            bench.settle(values[0] / 1000, source)
        case "busy":
            bench.busy(values[0] / 1000, values[1] / 1000, values[2] / 100, gpu)
        case _:
            bench.power(values[0] / 1000, values[1] / 1000, values[2], gpu)


@given(case=cases(), settle_ms=st.integers(50, 700), seed=st.integers(0, 2**32))
def test_energy_is_that_of_brute_force_in_any_order(case: Case, settle_ms: int, seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(*SOURCES, gpus=GPUS)
    streams = [facts_of(source, case, settle_ms, chance) for source in SOURCES]
    for gpu in GPUS:
        streams.append([("busy", "", gpu, sample) for sample in case.samples[gpu]])
        streams.append([("power", "", gpu, sample) for sample in case.power[gpu]])
    for one in mixed(streams, chance):
        give(bench, case, one)
        if chance.random() < 0.2:
            bench.advance()
    bench.advance()

    expected = by_brute_force(case)
    for gpu in GPUS:
        uses = bench.chips.energy_joules(gpu)
        assert uses is not None
        for use in EnergyUse:
            assert uses[use] == pytest.approx(expected.uses.get((gpu, use), 0.0), abs=1e-5)
        assert bench.undecided(gpu) == pytest.approx(expected.uses.get((gpu, "undecided"), 0.0), abs=1e-5)
        whole = sum((end_ms - start_ms) * watts / 1000 for start_ms, end_ms, watts in case.power[gpu])
        assert sum(uses.values()) + bench.undecided(gpu) == pytest.approx(whole, abs=1e-4)
    for source in SOURCES:
        count, joules = bench.proof(source=source)
        observed = []
        for (owner, job), proved in case.outcomes.items():
            span_ms = sum(
                unit.end_ms - unit.start_ms for unit in case.units if (unit.source, unit.job) == (source, job)
            )
            covered_ms = expected.covered_ms.get((source, job), 0)
            assume(not span_ms or covered_ms * 100 != span_ms * 95)
            if owner == source and proved and span_ms and covered_ms >= 0.95 * span_ms:
                observed.append(expected.jobs.get((source, job), 0.0))
        assert count == len(observed)
        assert joules == pytest.approx(sum(observed), abs=1e-4)
