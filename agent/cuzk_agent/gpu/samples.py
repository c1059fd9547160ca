"""From the driver's rings of samples to stretches of wall-clock time, each counted once. Pure.

A sample tells of the interval that *ends* at its time stamp. Measured on H200s: a ring of utilization has 71 samples
200 ms apart (14 s), one of power 119 samples 20 ms apart (2.4 s), stamped in µs of wall clock. Other GPUs stamp
µs since boot, sample at 6 Hz, or leave the ring empty while they are idle: interval and clock come from the data.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from cuzk_agent.gpu.state import Method

BUSY_INTERVAL_S: Final = 0.2
"""How far apart utilization samples are thought to be until there are enough of them to tell."""
POWER_INTERVAL_S: Final = 0.02
"""The same for power."""

_HOLE_S = 0.1
"""A sample that comes so much later than usual has a hole before it. On an H200 under load, utilization's intervals of
200 ms vary by 6 ms, power's of 20 ms by up to 25 ms."""
_ENOUGH = 8
"""Intervals from which to take the usual one."""
_FUTURE_S = 1.0
"""A time stamp further ahead of the clock than this is from before the clock was set back, or no time at all."""
_REMEMBERED = 1024
"""Time stamps that are remembered at least: several times the longest ring."""
_SAME_US = 2000
"""Time stamps nearer than this are of one sample: from one read of the ring to the next they differ by 1 µs now and
then (seen on an H200), and samples are 20 ms apart at least."""
_POWER_MAX_MW = 100_000_000
_POWER_STEP_S = 0.1 + 1e-5
_TOUCHING_S = 1e-5
"""Time stamps are whole microseconds."""
_DISTRUST_POLLS = 3
"""So many polls in a row find a GPU busy whose ring says nothing, until the ring is given up for the time being."""


@dataclass(frozen=True, slots=True)
class BusySample:
    """How busy the chip was in a stretch of time."""

    start_unix_s: float
    end_unix_s: float
    busy_fraction: float
    """0 to 1."""


@dataclass(frozen=True, slots=True)
class PowerSample:
    """What the GPU drew in a stretch of time."""

    start_unix_s: float
    end_unix_s: float
    watts: float


class Interval(NamedTuple):
    """A sample with the time that it stands for."""

    start_unix_s: float
    end_unix_s: float
    value: int
    """As the driver gave it."""


def busy_fraction(percent: int) -> float:
    """What a utilization value stands for.

    The driver rounds down to whole percents, and a full interval reads 98 or 99. Half a percent makes up for the
    rounding: chip-busy seconds of the captures are then 0.5 % below the truth instead of 1.2 %.
    """
    return min(1.0, (percent + 0.5) / 100) if percent else 0.0


@dataclass(slots=True)
class RingReader:
    """Picks out of successive, overlapping reads of one ring what has not been counted yet."""

    usual_s: float
    """The usual interval: what to believe at first, then as found."""
    value_max: int
    """Larger values are not measurements."""
    not_before_unix_s: float
    """What the ring holds from before this time at the first reading is not counted."""
    dropped: int = 0
    """Samples that could not be used: no time, or no value."""
    resyncs: int = 0
    """How often the time stamps went back."""
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """What was new in the last read, as the driver gave it, in the order of time."""
    _begun: bool = False
    _newest_us: int = 0
    _seen: dict[int, None] = field(default_factory=dict)
    """Time stamps that were read, in units of `_SAME_US`."""
    _stale: frozenset[int] = frozenset()
    """Those from before the last resync: no predecessors of what came later."""

    def read(self, raw: Iterable[tuple[int, int]], unix_s: float, monotonic_s: float) -> list[Interval]:
        """What is new in a read of the ring, as (time stamp µs, value) in any order, in the order of time.

        The whole ring may be passed in each time. The clocks are those of the moment of the read.
        """
        values = {stamp: value for stamp, value in raw if not _is_among(stamp, self._stale)}
        # The two clocks are decades apart, so that even a ring that stood still for days tells which one it is on; and
        # its middle does so although some of its samples may be none.
        times = sorted(stamp for stamp in values if stamp > 0) or [0]
        middle_s = times[len(times) // 2] / 1e6
        offset_s = 0.0 if abs(middle_s - unix_s) <= abs(middle_s - monotonic_s) else unix_s - monotonic_s
        limit_us = (unix_s - offset_s + _FUTURE_S) * 1e6
        fresh: list[int] = []
        stamps: list[int] = []
        for stamp in sorted(values):
            usable = 0 < stamp <= limit_us and 0 <= values[stamp] <= self.value_max
            if usable:
                stamps.append(stamp)
            if not _is_among(stamp, self._seen):
                self._seen[stamp // _SAME_US] = None
                if usable:
                    fresh.append(stamp)
                else:
                    self.dropped += 1
        self.fresh = [(stamp, values[stamp]) for stamp in fresh]
        self._learn(stamps)
        if fresh and fresh[-1] < self._newest_us:
            self.resyncs += 1
            self._stale = frozenset(self._seen) - {stamp // _SAME_US for stamp in fresh}
            self._newest_us = 0
            stamps = fresh
        found = self._intervals(fresh, stamps, values, offset_s)
        if fresh:
            self._newest_us = max(self._newest_us, fresh[-1])
        if len(self._seen) > 2 * _REMEMBERED:
            for stamp in list(self._seen)[:-_REMEMBERED]:
                del self._seen[stamp]
        return found

    def _learn(self, stamps: Sequence[int]) -> None:
        if len(stamps) > _ENOUGH:
            self.usual_s = median(b - a for a, b in pairwise(stamps)) / 1e6

    def _intervals(
        self, fresh: Sequence[int], stamps: Sequence[int], values: dict[int, int], offset_s: float
    ) -> list[Interval]:
        before = {later: earlier for earlier, later in pairwise(stamps)}
        found = []
        for stamp in fresh:
            length_s = (stamp - before.get(stamp, self._newest_us)) / 1e6
            # Nobody knows what happened in a hole: the sample after it doesn't either.
            if not 0 < length_s <= self.usual_s + _HOLE_S:
                length_s = self.usual_s
            end_s = stamp / 1e6 + offset_s
            start_s = end_s - length_s
            if not self._begun:
                if end_s <= self.not_before_unix_s:
                    continue
                start_s = max(start_s, self.not_before_unix_s)
                self._begun = True
            found.append(Interval(start_s, end_s, values[stamp]))
        return found


def _is_among(stamp: int, known: Container[int]) -> bool:
    near = stamp // _SAME_US
    return near in known or near - 1 in known or near + 1 in known


class _Meter:
    """A ring, and a momentary value that stands in where the ring is missing or says nothing. No time counts twice."""

    def __init__(self, reader: RingReader, monotonic_s: float, poll_stretch_max_s: float) -> None:
        self.reader = reader
        self._poll_stretch_max_s = poll_stretch_max_s
        """A poll stands for no more time than this."""
        self._covered_s = monotonic_s
        """Up to when ring or polls account for the time, on the monotonic clock."""
        self._polled_s = monotonic_s
        """Up to when polls do."""
        self.ring_supported = True
        self.silent = True
        """The last read of the ring had nothing new."""

    def _read(self, raw: Sequence[tuple[int, int]] | None, unix_s: float, monotonic_s: float) -> list[Interval]:
        """What a read of the ring (None: not supported) adds to what is accounted for."""
        ahead_s = unix_s - monotonic_s
        self.ring_supported = raw is not None
        found = self.reader.read(raw or (), unix_s, monotonic_s)
        self.silent = not found
        if found:
            self._covered_s = max(self._covered_s, found[-1].end_unix_s - ahead_s)
        polled_unix_s = self._polled_s + ahead_s
        if not found or found[0].start_unix_s >= polled_unix_s:
            return found
        return [
            one._replace(start_unix_s=max(one.start_unix_s, polled_unix_s))
            for one in found
            if one.end_unix_s > polled_unix_s
        ]

    def _stretch(self, unix_s: float, monotonic_s: float) -> tuple[float, float] | None:
        """The stretch of time that a poll made now stands for; None if it is empty."""
        length_s = min(monotonic_s - self._covered_s, self._poll_stretch_max_s)
        self._covered_s = self._polled_s = monotonic_s
        return (unix_s - length_s, unix_s) if length_s > 0 else None


class BusyMeter(_Meter):
    """Chip-busy stretches of one GPU.

    An empty ring is no reason to mistrust it while the GPU is idle: some drivers record nothing then, and a poll that
    finds the GPU idle accounts for that time. Only when several polls in a row find it *busy* is the ring given up, and
    polls count, until it speaks again.
    """

    def __init__(self, unix_s: float, monotonic_s: float, poll_stretch_max_s: float) -> None:
        super().__init__(RingReader(BUSY_INTERVAL_S, 100, unix_s), monotonic_s, poll_stretch_max_s)
        self._poll_supported = True
        self._busy_polls = 0

    @property
    def method(self) -> Method:
        """What counts at present."""
        if self.ring_supported and (self._busy_polls < _DISTRUST_POLLS or not self._poll_supported):
            return Method.SAMPLES
        return Method.POLLING if self._poll_supported else Method.NONE

    @property
    def wants_poll(self) -> bool:
        """Whether the momentary utilization is to be read now."""
        return self._poll_supported and (self.silent or self.method is not Method.SAMPLES)

    def ring(self, raw: Sequence[tuple[int, int]] | None, unix_s: float, monotonic_s: float) -> list[BusySample]:
        """Take in a read of the ring; None: it is not supported."""
        found = self._read(raw, unix_s, monotonic_s)
        if found:
            self._busy_polls = 0
        return [BusySample(one.start_unix_s, one.end_unix_s, busy_fraction(one.value)) for one in found]

    def poll(self, percent: int | None, unix_s: float, monotonic_s: float) -> list[BusySample]:
        """Take in the momentary utilization; None: it is not supported."""
        self._poll_supported = percent is not None
        if percent is None or not 0 <= percent <= 100:
            return []
        if percent:
            self._busy_polls += 1
        elif self.method is Method.SAMPLES:
            self._busy_polls = 0
        if percent and self.method is Method.SAMPLES:
            # Perhaps the ring is only late: it must still be able to tell of this time.
            return []
        stretch = self._stretch(unix_s, monotonic_s)
        return [BusySample(*stretch, percent / 100)] if stretch else []


class PowerMeter(_Meter):
    """Power of one GPU; where the ring has nothing new, the momentary power stands for the time since the last."""

    def __init__(self, unix_s: float, monotonic_s: float, poll_stretch_max_s: float) -> None:
        super().__init__(RingReader(POWER_INTERVAL_S, _POWER_MAX_MW, unix_s), monotonic_s, poll_stretch_max_s)

    def ring(self, raw: Sequence[tuple[int, int]] | None, unix_s: float, monotonic_s: float) -> list[PowerSample]:
        """Take in a read of the ring; None: it is not supported. Told in steps of 0.1 s: fifty a second cost more to
        hand on than they tell."""
        found: list[PowerSample] = []
        start_s = end_s = millijoules = 0.0
        for one in self._read(raw, unix_s, monotonic_s):
            if one.start_unix_s - end_s > _TOUCHING_S or one.end_unix_s - start_s > _POWER_STEP_S:
                if end_s > start_s:
                    found.append(PowerSample(start_s, end_s, millijoules / (end_s - start_s) / 1000))
                start_s, millijoules = one.start_unix_s, 0.0
            end_s = one.end_unix_s
            millijoules += one.value * (one.end_unix_s - one.start_unix_s)
        if end_s > start_s:
            found.append(PowerSample(start_s, end_s, millijoules / (end_s - start_s) / 1000))
        return found

    def poll(self, watts: float, unix_s: float, monotonic_s: float) -> list[PowerSample]:
        """Take in the momentary power."""
        stretch = self._stretch(unix_s, monotonic_s) if self.silent else None
        return [PowerSample(*stretch, watts)] if stretch else []
