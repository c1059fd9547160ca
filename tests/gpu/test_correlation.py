"""Busy samples against spans, rule by rule, and against brute force at 1 ms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.gpu.correlation import MAX_WAIT_S, Correlator, Piece
from cuzk_agent.gpu.samples import BusySample
from cuzk_agent.gpu.state import Comparison
from cuzk_agent.timeline.facts import Settled, SpanTime

T0 = 1000.0
"""Seconds in these tests count from here."""


class Bench:
    """A correlator and the pieces it told."""

    def __init__(self, *sources: str, gpus: tuple[str, ...] = ("0",)) -> None:
        self.pieces: list[Piece] = []
        self.correlator = Correlator(sources, self.pieces.append)
        self.correlator.devices(gpus)
        for source in sources:
            self.settle(source, 0.0)

    def span(self, source: str, start_s: float, end_s: float, *units: int, gpu: str = "0") -> None:
        self.correlator.fact(source, SpanTime(gpu, T0 + start_s, T0 + end_s, units or (1,)))

    def settle(self, source: str, until_s: float, uncertainty_s: float = 0.0) -> None:
        self.correlator.fact(source, Settled(T0 + until_s, uncertainty_s))

    def busy(self, start_s: float, end_s: float, fraction: float, gpu: str = "0") -> None:
        self.correlator.busy(gpu, BusySample(T0 + start_s, T0 + end_s, fraction))

    def advance(self) -> None:
        self.correlator.advance()

    def spans(self, source: str, gpu: str = "0") -> tuple[float, float] | None:
        """Busy and sampled seconds."""
        found = self.correlator.spans(gpu).get(source)
        return None if found is None else (found.busy_seconds, found.sampled_seconds)

    def unlogged_s(self, gpu: str = "0") -> float | None:
        return self.correlator.unlogged_busy_seconds(gpu)

    def told(self, gpu: str = "0") -> list[tuple[float, float, tuple[tuple[str, int], ...], float]]:
        return [
            (piece.start_unix_s - T0, piece.end_unix_s - T0, piece.units, piece.unlogged_share)
            for piece in self.pieces
            if piece.gpu == gpu
        ]


def near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-9)


# --- one source -------------------------------------------------------------------------------------------------


def test_a_sample_within_a_span_is_the_spans() -> None:
    bench = Bench("a")
    bench.span("a", 1.0, 3.0)
    bench.settle("a", 4.0)
    bench.busy(1.0, 1.2, 0.75)
    bench.advance()
    assert bench.spans("a") == near(0.15, 0.2)
    assert bench.unlogged_s() == 0


@pytest.mark.parametrize(
    ("fraction", "span_busy_s", "unlogged_s"),
    [(0.0, 0.0, 0.0), (0.25, 0.05, 0.0), (0.5, 0.1, 0.0), (0.6, 0.12, 0.0), (0.75, 0.12, 0.03), (1.0, 0.12, 0.08)],
)
def test_a_sample_astride_an_edge_goes_to_the_span_first(
    fraction: float, span_busy_s: float, unlogged_s: float
) -> None:
    for start_s, end_s in ((0.5, 1.12), (1.08, 2.0), (1.05, 1.17)):
        bench = Bench("a")
        bench.span("a", start_s, end_s)
        bench.settle("a", 4.0)
        bench.busy(1.0, 1.2, fraction)
        bench.advance()
        assert bench.spans("a") == near(span_busy_s, 0.12)
        assert bench.unlogged_s() == pytest.approx(unlogged_s, abs=1e-9)


def test_two_spans_in_one_sample_share_its_reach() -> None:
    bench = Bench("a")
    bench.span("a", 0.5, 1.05)
    bench.span("a", 1.15, 3.0)
    bench.settle("a", 4.0)
    bench.busy(1.0, 1.2, 1.0)
    bench.advance()
    assert bench.spans("a") == near(0.1, 0.1)
    assert bench.unlogged_s() == pytest.approx(0.1)
    assert [units for *_, units, _ in bench.told()] == [(("a", 1),), (), (("a", 1),)]
    assert [share for *_, share in bench.told()] == near(0.0, 1.0, 0.0)


def test_only_settled_time_is_looked_at() -> None:
    bench = Bench("a")
    bench.span("a", 1.0, 1.1)
    bench.settle("a", 1.1)
    bench.busy(1.0, 1.2, 1.0)
    bench.advance()
    assert bench.spans("a") is None
    assert bench.unlogged_s() is None
    bench.span("a", 1.1, 1.2)
    bench.settle("a", 1.2)
    bench.advance()
    assert bench.spans("a") == near(0.2, 0.2)
    assert bench.unlogged_s() == 0


def test_no_instant_counts_twice() -> None:
    bench = Bench("a")
    bench.span("a", 0.0, 3.0)
    bench.settle("a", 4.0)
    bench.busy(1.0, 1.2, 0.5)
    bench.busy(1.1, 1.3, 0.5)
    bench.busy(1.0, 1.3, 1.0)
    bench.advance()
    assert bench.spans("a") == near(0.15, 0.3)


def test_time_without_samples_is_told_but_not_counted() -> None:
    bench = Bench("a")
    bench.span("a", 0.5, 1.5)
    bench.settle("a", 4.0)
    bench.busy(0.0, 0.2, 0.5)
    bench.busy(2.0, 2.2, 0.0)
    bench.advance()
    assert bench.spans("a") is None or bench.spans("a") == (0, 0)
    assert bench.told() == [
        (0.0, pytest.approx(0.2), (), pytest.approx(0.5)),
        (pytest.approx(0.2), 0.5, (), 0.0),
        (0.5, 1.5, (("a", 1),), 0.0),
        (1.5, 2.0, (), 0.0),
        (2.0, pytest.approx(2.2), (), 0.0),
    ]


def test_what_was_before_the_log_was_followed_is_not_unlogged() -> None:
    bench = Bench()
    bench.busy(0.0, 0.2, 1.0)
    bench.busy(0.9, 1.1, 1.0)
    bench.busy(1.2, 1.4, 1.0)
    bench.settle("a", 1.0)
    bench.settle("a", 2.0)
    bench.advance()
    assert bench.unlogged_s() == pytest.approx(0.2)


# --- several sources --------------------------------------------------------------------------------------------


def test_a_chip_is_unlogged_outside_the_spans_of_all_sources() -> None:
    bench = Bench("a", "b")
    bench.span("a", 1.0, 1.06)
    bench.span("b", 1.04, 1.1, 7)
    bench.settle("a", 4.0)
    bench.settle("b", 4.0)
    bench.busy(1.0, 1.2, 0.6)
    bench.advance()
    assert bench.spans("a") == near(0.06, 0.06)
    assert bench.spans("b") == near(0.06, 0.06)
    assert bench.unlogged_s() == pytest.approx(0.02)
    assert [units for *_, units, _ in bench.told()] == [(("a", 1),), (("a", 1), ("b", 7)), (("b", 7),), ()]


def test_the_slowest_source_is_waited_for_but_not_for_ever() -> None:
    bench = Bench("a", "b")
    bench.span("a", 0.0, 100.0)
    bench.settle("a", 100.0)
    bench.settle("b", 1.0)
    for second in range(100):
        bench.busy(second, second + 1, 0.5)
        bench.advance()
        expected = 1 if second < MAX_WAIT_S + 1 else second + 1
        assert bench.spans("a") == near(expected / 2, expected), second
    sources = bench.correlator.sources()
    assert sources["a"].comparison is Comparison.COMPARED
    assert sources["b"].comparison is Comparison.LAGGING
    assert sources["b"].left_out_seconds == pytest.approx(99)
    # It comes back, and is compared again; what it says of the past comes too late.
    bench.span("b", 50.0, 110.0)
    bench.span("a", 100.0, 110.0)
    bench.settle("b", 110.0)
    bench.settle("a", 110.0)
    bench.busy(100.0, 101.0, 0.5)
    bench.advance()
    assert bench.correlator.sources()["b"].comparison is Comparison.COMPARED
    assert bench.spans("b") == near(0.5, 1.0)
    assert bench.spans("a") == near(50.5, 101)


def test_a_source_that_never_settles_is_left_out_in_the_end() -> None:
    bench = Bench("a")
    bench.correlator = Correlator(["a", "never"])
    bench.settle("a", 0.0)
    bench.settle("a", 200.0)
    for second in range(100):
        bench.busy(second, second + 1, 0.5)
        bench.advance()
        assert bench.unlogged_s() == (None if second < MAX_WAIT_S else pytest.approx((second + 1) / 2)), second
    assert bench.correlator.sources()["never"].comparison is Comparison.WAITING
    assert bench.correlator.sources()["never"].left_out_seconds == pytest.approx(100)
    assert bench.correlator.sources()["never"].uncertainty_s is None


def test_nothing_is_unlogged_while_nothing_can_be_set_against_it() -> None:
    bench = Bench()
    bench.correlator = Correlator(["never"])
    for second in range(100):
        bench.busy(second, second + 1, 0.5)
    bench.advance()
    assert bench.unlogged_s() is None
    assert bench.correlator.spans("0") == {}
    assert bench.correlator.spans("1") == {}
    assert bench.correlator.unlogged_busy_seconds("1") is None


def test_a_lagging_source_leaves_the_gpus_it_uses_in_doubt() -> None:
    bench = Bench("a", "b", gpus=("0", "1"))
    bench.span("b", 0.0, 1.0, gpu="0")
    bench.settle("b", 1.0)
    bench.settle("a", 100.0)
    for second in range(100):
        bench.busy(second, second + 1, 0.5, gpu="0")
        bench.busy(second, second + 1, 0.5, gpu="1")
    bench.advance()
    assert bench.unlogged_s("0") == 0
    assert bench.unlogged_s("1") == pytest.approx(50)


# --- the anchor -------------------------------------------------------------------------------------------------


def test_nothing_is_compared_with_a_source_that_may_be_off_by_half_a_sample() -> None:
    bench = Bench("a", "b")
    bench.settle("b", 9.0)
    bench.span("a", 0.0, 9.0)
    bench.settle("a", 9.0, uncertainty_s=0.11)
    bench.busy(1.0, 1.2, 1.0)
    bench.advance()
    assert bench.spans("a") is None
    assert bench.unlogged_s() is None, "it may well be the source's own"
    uncertain = bench.correlator.sources()["a"]
    assert uncertain.comparison is Comparison.UNCERTAIN
    assert uncertain.uncertainty_s == 0.11
    assert uncertain.left_out_seconds == pytest.approx(0.2)
    bench.busy(2.0, 2.5, 1.0)
    bench.advance()
    assert bench.spans("a") == near(0.5, 0.5), "a longer sample bears it"
    bench.settle("a", 9.1, uncertainty_s=0.01)
    bench.busy(3.0, 3.2, 1.0)
    bench.advance()
    assert bench.spans("a") == near(0.7, 0.7)
    assert bench.correlator.sources()["a"].comparison is Comparison.COMPARED


def test_a_source_whose_clock_was_set_back_starts_anew() -> None:
    bench = Bench("a")
    bench.span("a", 90.0, 100.0)
    bench.settle("a", 100.0)
    bench.settle("a", 20.0)
    bench.span("a", 20.0, 21.0)
    bench.settle("a", 110.0)
    bench.busy(20.0, 21.0, 1.0)
    bench.busy(95.0, 96.0, 1.0)
    bench.advance()
    assert bench.spans("a") == near(1, 1)
    assert bench.unlogged_s() == pytest.approx(1)


def test_a_gpu_whose_clock_was_set_back_starts_anew() -> None:
    bench = Bench("a")
    bench.settle("a", 1000.0)
    bench.busy(900.0, 901.0, 1.0)
    bench.advance()
    bench.settle("a", 20.0)
    bench.span("a", 20.0, 30.0)
    bench.settle("a", 30.0)
    bench.busy(25.0, 26.0, 1.0)
    bench.advance()
    assert bench.spans("a") == near(1, 1)
    assert bench.unlogged_s() == pytest.approx(1)


# --- GPUs -------------------------------------------------------------------------------------------------------


def test_a_log_that_names_no_gpu_means_the_only_one() -> None:
    bench = Bench("a")
    bench.span("a", 0.0, 1.0, gpu="unknown")
    bench.span("a", 0.5, 2.0, gpu="0")
    bench.settle("a", 9.0)
    bench.busy(0.0, 2.0, 1.0)
    bench.advance()
    assert bench.spans("a") == near(2, 2)


def test_a_log_that_names_no_gpu_means_any_of_several() -> None:
    bench = Bench("a", gpus=("0", "1"))
    bench.span("a", 0.0, 1.0, gpu="unknown")
    bench.settle("a", 9.0)
    bench.busy(0.0, 1.0, 1.0)
    bench.busy(1.0, 2.0, 1.0)
    bench.advance()
    assert bench.spans("a") is None
    assert bench.unlogged_s() == pytest.approx(1), "the first second may be the log's"


def test_gpus_do_not_wait_for_one_another() -> None:
    bench = Bench("a", gpus=("0", "1"))
    bench.span("a", 0.0, 1.0, gpu="0")
    bench.span("a", 0.0, 2.0, gpu="1")
    bench.settle("a", 9.0)
    bench.busy(0.0, 2.0, 0.9, gpu="1")
    bench.advance()
    assert bench.spans("a", "1") == near(1.8, 2)
    assert bench.spans("a", "0") is None
    bench.busy(0.0, 2.0, 0.75, gpu="0")
    bench.advance()
    assert bench.spans("a", "0") == near(1, 1)
    assert bench.unlogged_s("0") == pytest.approx(0.5)


def test_occupancy_rolls_over_ten_minutes() -> None:
    bench = Bench("a")
    bench.span("a", 0.0, 300.0)
    bench.settle("a", 2000.0)
    for second in range(1000):
        bench.busy(second, second + 1, 0.9 if second < 150 else 0.1)
    bench.advance()
    spans = bench.correlator.spans("0")["a"]
    assert spans.sampled_seconds == pytest.approx(300)
    assert spans.busy_seconds == pytest.approx(150)
    assert spans.rolling_occupancy is None
    bench = Bench("a")
    bench.span("a", 0.0, 2000.0)
    bench.settle("a", 2000.0)
    for second in range(1000):
        bench.busy(second, second + 1, 0.9 if second < 700 else 0.1)
    bench.advance()
    rolling = bench.correlator.spans("0")["a"].rolling_occupancy
    assert rolling == pytest.approx((0.9 * 300 + 0.1 * 300) / 600, abs=0.01)
    assert len(bench.correlator._gpus["0"].spans["a"].slices) <= 121


# --- memory -----------------------------------------------------------------------------------------------------


def test_what_is_pending_is_bounded() -> None:
    bench = Bench("a")
    for number in range(20_000):
        bench.span("a", number, number + 0.5, number)
        bench.span("a", number, number + 0.5, number, gpu="9")
    assert len(bench.correlator.units()) <= 4096
    bench.settle("a", 30_000.0)
    for number in range(20_000):
        bench.busy(number, number + 1, 1.0)
    bench.advance()
    assert bench.spans("a") == near(2048, 2048)
    # Of a GPU that no sample comes from, the last minute.
    assert min(unit for _, unit in bench.correlator.units()) > 19_900


def test_settling_often_does_not_take_room() -> None:
    bench = Bench("a")
    for number in range(10_000):
        bench.span("a", number / 50, (number + 1) / 50, 2, 1)
        bench.settle("a", (number + 1) / 50)
    (stretch,) = bench.correlator._sources["a"].stretches["0"]
    assert (stretch.start_s, stretch.units) == (T0, (1, 2))
    assert stretch.end_s == pytest.approx(T0 + 200)


# --- brute force ------------------------------------------------------------------------------------------------

LENGTH_MS = 2000
SOURCES = ("a", "b", "c")
GPUS = ("0", "1")

Spans = dict[tuple[str, str], list[int]]
"""By source and GPU: times at which a span opens and closes, in turn."""
Samples = dict[str, list[tuple[int, int, bool]]]
"""By GPU, one after the other: length, percent, and whether it is missing."""
Input = tuple[str, str, tuple[int, ...]]

_cuts = st.lists(st.integers(0, LENGTH_MS), max_size=12, unique=True).map(sorted)
_sample = st.tuples(st.integers(1, 250), st.integers(0, 100), st.booleans())


def facts_of(source: str, spans: Spans, settle_ms: int) -> list[Input]:
    """What a source tells, settling every now and then."""
    facts: list[Input] = []
    for until_ms in range(settle_ms, LENGTH_MS + settle_ms, settle_ms):
        for gpu in GPUS:
            cuts = spans[source, gpu]
            for start_ms, end_ms in zip(cuts[::2], cuts[1::2], strict=False):
                first_ms, last_ms = max(start_ms, until_ms - settle_ms), min(end_ms, until_ms)
                if first_ms < last_ms:
                    facts.append(("span", source, (first_ms, last_ms, int(gpu))))
        facts.append(("settle", source, (until_ms,)))
    return facts


def samples_of(gpu: str, samples: Samples) -> list[Input]:
    """The samples that there are."""
    found: list[Input] = []
    at_ms = 0
    for length_ms, percent, is_missing in samples[gpu]:
        at_ms += length_ms
        if not is_missing and at_ms <= LENGTH_MS:
            found.append(("busy", gpu, (at_ms - length_ms, at_ms, percent)))
    return found


def mixed(streams: list[list[Input]], chance: random.Random) -> Iterator[Input]:
    """All inputs, each stream in its order."""
    while streams := [stream for stream in streams if stream]:
        yield chance.choice(streams).pop(0)


def by_brute_force(
    spans: Spans, samples: Samples
) -> tuple[dict[tuple[str, str], tuple[float, float]], dict[str, float]]:
    """Busy and sampled seconds by source and GPU, unlogged seconds by GPU."""
    is_open = {key: [False] * LENGTH_MS for key in spans}
    for key, cuts in spans.items():
        for start_ms, end_ms in zip(cuts[::2], cuts[1::2], strict=False):
            is_open[key][start_ms:end_ms] = [True] * (end_ms - start_ms)
    by_source = dict.fromkeys(spans, (0.0, 0.0))
    unlogged = dict.fromkeys(GPUS, 0.0)
    for gpu in GPUS:
        for _, _, (start_ms, end_ms, percent) in samples_of(gpu, samples):
            busy_ms = (end_ms - start_ms) * percent / 100
            for source in SOURCES:
                span_ms = sum(is_open[source, gpu][start_ms:end_ms])
                busy, sampled = by_source[source, gpu]
                by_source[source, gpu] = (busy + min(busy_ms, span_ms) / 1000, sampled + span_ms / 1000)
            union_ms = sum(any(is_open[source, gpu][ms] for source in SOURCES) for ms in range(start_ms, end_ms))
            unlogged[gpu] += max(busy_ms - union_ms, 0) / 1000
    return by_source, unlogged


@given(
    spans=st.fixed_dictionaries({(source, gpu): _cuts for source in SOURCES for gpu in GPUS}),
    samples=st.fixed_dictionaries({gpu: st.lists(_sample, max_size=25) for gpu in GPUS}),
    settle_ms=st.integers(5, 700),
    seed=st.integers(0, 2**32),
)
def test_busy_time_is_that_of_brute_force_in_any_order(
    spans: Spans, samples: Samples, settle_ms: int, seed: int
) -> None:
    bench = Bench(*SOURCES, gpus=GPUS)
    chance = random.Random(seed)
    streams = [facts_of(source, spans, settle_ms) for source in SOURCES] + [samples_of(gpu, samples) for gpu in GPUS]
    for kind, name, values in mixed(streams, chance):
        if kind == "span":
            bench.span(name, values[0] / 1000, values[1] / 1000, gpu=str(values[2]))
        elif kind == "settle":
            bench.settle(name, values[0] / 1000)
        else:
            bench.busy(values[0] / 1000, values[1] / 1000, values[2] / 100, gpu=name)
        if chance.random() < 0.3:
            bench.advance()
    bench.advance()
    by_source, unlogged = by_brute_force(spans, samples)
    for (source, gpu), expected in by_source.items():
        found = bench.spans(source, gpu) or (0.0, 0.0)
        assert found == pytest.approx(expected, abs=1e-6)
        cuts = spans[source, gpu]
        span_s = sum(end_ms - start_ms for start_ms, end_ms in zip(cuts[::2], cuts[1::2], strict=False)) / 1000
        assert found[0] <= found[1] + 1e-9 <= span_s + 1e-6
    for gpu in GPUS:
        assert (bench.unlogged_s(gpu) or 0) == pytest.approx(unlogged[gpu], abs=1e-6)
        assert all(before[1] == after[0] for before, after in pairwise(bench.told(gpu)))
