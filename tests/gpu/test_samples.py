"""Rings of samples become stretches of time, each counted once."""

from __future__ import annotations

import json
import lzma
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.gpu.samples import BusyMeter, BusySample, Interval, PowerMeter, RingReader, busy_fraction
from cuzk_agent.gpu.state import Method
from gpu.support import CAPTURES, H200

UNIX_S = 1_796_000_000.0
MONOTONIC_S = 5_000.0
US = 1_000_000


def reader(usual_s: float = 0.2, not_before_unix_s: float = 0.0) -> RingReader:
    """A reader of a ring of percentages."""
    return RingReader(usual_s, 100, not_before_unix_s)


def stamps(count: int, *, first_s: float = UNIX_S, every_s: float = 0.2) -> list[int]:
    """Time stamps of a steady ring."""
    return [round((first_s + every_s * number) * US) for number in range(count)]


def lengths(found: list[Interval]) -> list[float]:
    """How long the intervals are."""
    return [round(one.end_unix_s - one.start_unix_s, 4) for one in found]


def test_a_sample_stands_for_the_time_before_it() -> None:
    found = reader().read([(stamp, 50) for stamp in stamps(20)], UNIX_S + 4, MONOTONIC_S)
    assert lengths(found) == [0.2] * 20
    assert found[0].end_unix_s == pytest.approx(UNIX_S)
    assert all(b.start_unix_s == pytest.approx(a.end_unix_s) for a, b in pairwise(found))


def test_the_order_does_not_matter() -> None:
    ring = [(stamp, number) for number, stamp in enumerate(stamps(20))]
    assert reader().read(ring[::-1], UNIX_S + 4, MONOTONIC_S) == reader().read(ring, UNIX_S + 4, MONOTONIC_S)


def test_what_is_no_sample_is_dropped_and_counted_once() -> None:
    ring = reader()
    good = [(stamp, 10) for stamp in stamps(12)]
    bad = [(0, 50), (stamps(1)[0] + 50_000, 101), (round((UNIX_S + 500) * US), 10)]
    assert len(ring.read(good + bad, UNIX_S + 3, MONOTONIC_S)) == 12
    assert ring.dropped == 3
    assert ring.read(good + bad, UNIX_S + 3, MONOTONIC_S) == []
    assert ring.dropped == 3


def test_the_interval_is_found_in_the_data() -> None:
    ring = reader()
    ring.read([(stamp, 10) for stamp in stamps(50, every_s=1 / 6)], UNIX_S + 9, MONOTONIC_S)
    assert ring.usual_s == pytest.approx(1 / 6, abs=1e-6)


def test_a_hole_is_nobodys() -> None:
    ring = reader()
    steady = stamps(40)
    found = ring.read([(stamp, 100) for stamp in steady[:15] + steady[25:]], UNIX_S + 9, MONOTONIC_S)
    assert lengths(found) == [0.2] * 30


def test_a_ring_stamped_since_boot() -> None:
    found = reader().read([(stamp, 10) for stamp in stamps(12, first_s=MONOTONIC_S - 2.2)], UNIX_S, MONOTONIC_S + 0.05)
    assert found[-1].end_unix_s == pytest.approx(UNIX_S - 0.05, abs=1e-3)
    assert len(found) == 12


def test_a_wild_time_stamp_does_not_change_the_clock() -> None:
    ring = [(stamp, 10) for stamp in stamps(12, first_s=MONOTONIC_S - 2.2)]
    found = reader().read([*ring, (2**63, 10), (0, 10)], UNIX_S, MONOTONIC_S)
    assert len(found) == 12
    assert found[-1].end_unix_s == pytest.approx(UNIX_S, abs=1e-3)


def test_an_old_ring_is_on_the_same_clock() -> None:
    days_s = 3 * 86400
    found = reader().read([(stamp, 10) for stamp in stamps(12)], UNIX_S + days_s, MONOTONIC_S + days_s)
    assert found[0].end_unix_s == pytest.approx(UNIX_S)


def test_what_was_before_the_first_reading_is_not_counted() -> None:
    found = reader(not_before_unix_s=UNIX_S + 1.1).read([(stamp, 10) for stamp in stamps(12)], UNIX_S + 3, MONOTONIC_S)
    assert found[0].start_unix_s == UNIX_S + 1.1
    assert lengths(found) == [0.1, *[0.2] * 5]


@pytest.mark.parametrize("step_s", [-3600.0, -5.05, -0.7, 0.7, 5.0, 3600.0])
def test_the_wall_clock_steps(step_s: float) -> None:
    """The ring holds time stamps from before and after; each sample counts once, and not for longer than it stands."""
    ring = reader()
    before, after = stamps(71), stamps(300, first_s=UNIX_S + 71 * 0.2 + step_s)
    counted = ring.read([(stamp, 100) for stamp in before], UNIX_S + 14.1, MONOTONIC_S)
    for upto in range(10, 300, 10):
        window = (before + after[:upto])[-71:]
        now_s = UNIX_S + 14.2 + upto * 0.2 + step_s
        counted += ring.read([(stamp, 100) for stamp in window], now_s, MONOTONIC_S + 14.2 + upto * 0.2)
    assert len(counted) == 71 + 290
    seconds = sum(lengths(counted))
    assert 0.2 * 361 - 1.5 <= seconds <= 0.2 * 361 + 1e-6
    assert ring.resyncs == (1 if step_s < -2 else 0)


@given(data=st.data())
def test_however_reads_overlap_each_sample_counts_once(data: st.DataObject) -> None:
    """A ring read at any times, as a whole or from any sample on, in any order: busy <= sampled <= observed."""
    gaps_us = data.draw(st.lists(st.integers(150_000, 260_000), min_size=1, max_size=150))
    values = data.draw(st.lists(st.integers(0, 100), min_size=len(gaps_us), max_size=len(gaps_us)))
    start_us = round(UNIX_S * US)
    ring = [(start_us + sum(gaps_us[: number + 1]), value) for number, value in enumerate(values)]
    ends = sorted(data.draw(st.lists(st.integers(1, len(ring)), min_size=1, max_size=12)))
    read_from, found, expected = 0, [], set()
    meter = BusyMeter(UNIX_S, MONOTONIC_S, 8.0)
    for end in ends:
        read_from = max(data.draw(st.integers(read_from, end)), end - 71)
        window = data.draw(st.permutations(ring[read_from:end]))
        expected |= {stamp for stamp, _ in window}
        passed_s = ring[end - 1][0] / US - UNIX_S
        found += meter.ring(window, UNIX_S + passed_s, MONOTONIC_S + passed_s)
    assert [round(one.end_unix_s * US) for one in found] == pytest.approx(sorted(expected), abs=1)
    assert all(a.end_unix_s <= b.start_unix_s + 1e-6 for a, b in pairwise(found))
    sampled_s = sum(one.end_unix_s - one.start_unix_s for one in found)
    busy_s = sum((one.end_unix_s - one.start_unix_s) * one.busy_fraction for one in found)
    assert 0 <= busy_s <= sampled_s <= (ring[ends[-1] - 1][0] - start_us) / US + 1e-4


def test_a_real_ring_whose_time_stamps_tremble_counts_each_sample_once() -> None:
    with lzma.open(H200 / "rings.json.xz") as file:
        reads = json.load(file)["reads"]
    busy = RingReader(0.2, 100, 0.0)
    power = RingReader(0.02, 10**9, 0.0)
    for reader, ring in ((busy, "utilization"), (power, "power")):
        found = [one for read in reads for one in reader.read(read[ring], read["unix_s"], 5000.0)]
        assert all(earlier.end_unix_s <= later.start_unix_s + 2e-5 for earlier, later in pairwise(found))
        stretch_s = found[-1].end_unix_s - found[0].start_unix_s
        assert sum(one.end_unix_s - one.start_unix_s for one in found) == pytest.approx(stretch_s, rel=1e-3)
        assert (reader.dropped, reader.resyncs) == (0, 0)
    assert stretch_s > 2.3 + 15 * 1.6


def test_percents_are_rounded_down_by_the_driver() -> None:
    assert [busy_fraction(percent) for percent in (0, 1, 50, 99, 100)] == [0.0, 0.015, 0.505, 0.995, 1.0]


@pytest.mark.parametrize("name", CAPTURES)
def test_the_correction_is_borne_out_by_the_captures(name: str) -> None:
    """Chip-busy seconds are within 0.8 % of the kernels' own times; as read they are 1 % to 1.4 % low."""
    capture = CAPTURES[name]()
    samples = capture.recorded.samples
    stretches = [(a / US, b / US, value) for (a, _), (b, value) in pairwise(samples)]
    truth = sum(capture.busy_seconds(a, b) for a, b, _ in stretches if a >= capture.recorded.start_unix_s)
    found = sum((b - a) * busy_fraction(value) for a, b, value in stretches if a >= capture.recorded.start_unix_s)
    raw = sum((b - a) * value / 100 for a, b, value in stretches if a >= capture.recorded.start_unix_s)
    assert raw / truth == pytest.approx(0.988, abs=0.004)
    assert found / truth == pytest.approx(0.995, abs=0.004)


class Clocks:
    """The moments of successive cycles."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def after(self, seconds: float) -> tuple[float, float]:
        """The clocks, so much later."""
        self.passed_s += seconds
        return UNIX_S + self.passed_s, MONOTONIC_S + self.passed_s


def method(meter: BusyMeter) -> Method:
    """What counts now: for a type checker, a property stays as it was."""
    return meter.method


def spent(samples: list[BusySample]) -> tuple[float, float]:
    """Sampled and busy seconds."""
    sampled = math.fsum(one.end_unix_s - one.start_unix_s for one in samples)
    busy = math.fsum((one.end_unix_s - one.start_unix_s) * one.busy_fraction for one in samples)
    return round(sampled, 4), round(busy, 4)


def test_an_idle_gpu_may_keep_its_ring_empty() -> None:
    """Polls account for the idle time, and the ring is not mistrusted for it, however long it lasts."""
    clocks, meter = Clocks(), BusyMeter(UNIX_S, MONOTONIC_S, 8.0)
    found = []
    for _ in range(50):
        now = clocks.after(4.0)
        assert meter.ring([], *now) == []
        assert meter.wants_poll
        found += meter.poll(0, *now)
    assert spent(found) == (200.0, 0.0)
    assert method(meter) is Method.SAMPLES
    # It gets to work, and the ring speaks: from where the last poll was.
    now = clocks.after(4.0)
    assert spent(meter.ring([(stamp, 100) for stamp in stamps(71, first_s=now[0] - 14)], *now)) == (4.0, 4.0)
    assert not meter.wants_poll


def test_an_empty_ring_of_a_busy_gpu_is_given_up() -> None:
    clocks, meter = Clocks(), BusyMeter(UNIX_S, MONOTONIC_S, 8.0)
    methods: list[str] = []
    found = []
    for _ in range(5):
        now = clocks.after(2.0)
        found += [*meter.ring([], *now), *meter.poll(80, *now)]
        methods.append(meter.method)
    assert methods == ["samples", "samples", "polling", "polling", "polling"]
    assert spent(found) == (10.0, 8.0)
    # An idle moment is no proof that it works again; a sample is.
    now = clocks.after(2.0)
    assert meter.poll(0, *now)
    assert method(meter) is Method.POLLING
    now = clocks.after(2.0)
    assert spent(meter.ring([(stamp, 100) for stamp in stamps(71, first_s=now[0] - 14)], *now)) == (2.0, 2.0)
    assert method(meter) is Method.SAMPLES


def test_a_ring_that_is_late_still_tells() -> None:
    clocks, meter = Clocks(), BusyMeter(UNIX_S, MONOTONIC_S, 8.0)
    now = clocks.after(2.0)
    assert meter.ring([], *now) == []
    assert meter.poll(99, *now) == []
    now = clocks.after(2.0)
    assert spent(meter.ring([(stamp, 100) for stamp in stamps(21, first_s=now[0] - 4)], *now)) == (4.0, 4.0)


def test_without_a_ring_polls_count_and_without_both_nothing() -> None:
    clocks, meter = Clocks(), BusyMeter(UNIX_S, MONOTONIC_S, 8.0)
    now = clocks.after(2.0)
    assert meter.ring(None, *now) == []
    assert method(meter) is Method.POLLING
    assert spent(meter.poll(25, *now)) == (2.0, 0.5)
    assert spent(meter.poll(25, *clocks.after(600.0))) == (8.0, 2.0), "a poll does not stand for an age"
    assert meter.poll(None, *clocks.after(2.0)) == []
    assert method(meter) is Method.NONE
    assert not meter.wants_poll


def test_power_is_told_in_steps_and_no_energy_is_lost() -> None:
    """A hole ends a step: nobody knows what was drawn in it."""
    clocks, meter = Clocks(), PowerMeter(UNIX_S, MONOTONIC_S, 8.0)
    now = clocks.after(3.0)
    times = stamps(119, first_s=now[0] - 2.36, every_s=0.02)
    ring = [(stamp, 100_000 + 1000 * number) for number, stamp in enumerate(times) if not 50 <= number < 60]
    found = meter.ring(ring, *now)
    joules = math.fsum((one.end_unix_s - one.start_unix_s) * one.watts for one in found)
    assert joules == pytest.approx(sum(value for _, value in ring) / 1000 * 0.02, rel=1e-4)
    assert sum(one.end_unix_s - one.start_unix_s for one in found) == pytest.approx(109 * 0.02, abs=1e-4)
    assert max(one.end_unix_s - one.start_unix_s for one in found) == pytest.approx(0.1, abs=1e-4)
    assert len(found) == 22
    assert found[0].watts == pytest.approx(102)


def test_power_comes_from_the_ring_or_from_the_moment() -> None:
    clocks, meter = Clocks(), PowerMeter(UNIX_S, MONOTONIC_S, 8.0)
    now = clocks.after(2.0)
    ring = [(stamp, 400_000) for stamp in stamps(119, first_s=now[0] - 2.36, every_s=0.02)]
    found = meter.ring(ring, *now)
    assert math.fsum((one.end_unix_s - one.start_unix_s) * one.watts for one in found) == pytest.approx(800.0)
    assert meter.poll(300.0, *now) == []
    now = clocks.after(2.0)
    assert meter.ring(ring, *now) == []
    (held,) = meter.poll(300.0, *now)
    assert held.end_unix_s - held.start_unix_s == pytest.approx(2.0)
    assert held.watts == 300.0
