"""Quantiles over a sliding window of time, with bounded memory.

Observations are counted in logarithmic buckets (a quantile is off by at most 1 %), and the buckets are kept in slices
of a few seconds for an hour. A slice expires as a whole, with its newest observation: what the window must hold is
always counted, and what shares a slice with it may be counted up to `SLICE_S` too long. With one observation in a slice
the window is exact.

Everything is plain immutable data. A window changes by getting new slices, so freezing it copies nothing, and what was
frozen shares them for ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_MAX_S = 3600.0
"""The longest window one can ask for; older observations are forgotten."""
SLICE_S = 5.0
"""The longest stretch of time that one slice spans."""
VALUE_MIN_SECONDS = 1e-3
"""Smaller values share one bucket and read as 0: the log counts whole milliseconds."""
VALUE_MAX_SECONDS = 1e5
"""Larger values are taken for this one."""

_ERROR = 0.01
_GAMMA = (1 + _ERROR) / (1 - _ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_UNDERFLOW = -1


def _clamp(value_seconds: float) -> float:
    # In this order NaN becomes 0: a sum that met a NaN would never recover.
    return min(max(0.0, value_seconds), VALUE_MAX_SECONDS)


def _bucket(value_seconds: float) -> int:
    """Bucket i holds (VALUE_MIN_SECONDS * gamma ** (i - 1), VALUE_MIN_SECONDS * gamma ** i]."""
    if value_seconds <= 0:
        return _UNDERFLOW
    return max(math.ceil(math.log(value_seconds / VALUE_MIN_SECONDS) / _LOG_GAMMA), _UNDERFLOW)


def _representative(bucket: int) -> float:
    """The value that is within 1 % of everything in the bucket."""
    return 0.0 if bucket == _UNDERFLOW else VALUE_MIN_SECONDS * 2 * _GAMMA**bucket / (_GAMMA + 1)


@dataclass(frozen=True, slots=True)
class Slice:
    """What was observed within one stretch of at most `SLICE_S`."""

    first_s: float
    last_s: float
    counts: tuple[tuple[int, int], ...]
    """(bucket, observations), every bucket once, in no order."""
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class Rolling:
    """A frozen sliding window: every answer is as of the moment it was frozen."""

    now_s: float = 0.0
    slices: tuple[Slice, ...] = ()
    """In the order of time, none empty."""
    total_count: int = 0
    """Observations since the window was made, expired ones too."""
    total_sum_seconds: float = 0.0

    def count(self, window_s: float) -> int:
        """How many observations the last `window_s` seconds hold."""
        return sum(count for part in self._within(window_s) for _, count in part.counts)

    def sum(self, window_s: float) -> float:
        """The sum of the observations of the last `window_s` seconds."""
        return math.fsum(part.sum_seconds for part in self._within(window_s))

    def quantile(self, q: float, window_s: float) -> float | None:
        """The value at rank ceil(q * count) of the last `window_s` seconds, within 1 %; None when they hold nothing."""
        merged: dict[int, int] = {}
        for part in self._within(window_s):
            for bucket, count in part.counts:
                merged[bucket] = merged.get(bucket, 0) + count
        # A rank that is whole in theory (0.07 * 100) must not be lifted to the next one by its rounding error.
        remaining = max(1, math.ceil(q * sum(merged.values()) - 1e-9))
        for bucket in sorted(merged):
            remaining -= merged[bucket]
            if remaining <= 0:
                return _representative(bucket)
        return None

    def _within(self, window_s: float) -> tuple[Slice, ...]:
        oldest_s = self.now_s - window_s
        return tuple(part for part in self.slices if part.last_s > oldest_s)


@dataclass(slots=True)
class RollingWindow:
    """A sliding window that is being written, by one writer. Its fields are all there is to save and restore."""

    closed: tuple[Slice, ...] = ()
    current: Slice | None = None
    total_count: int = 0
    total_sum_seconds: float = 0.0

    def observe(self, at_s: float, value_seconds: float) -> None:
        """Count one observation made at `at_s`, on any clock that does not jump back.

        One that comes late is taken for as new as the newest: its own slice may have been published. It then counts
        for as much longer as it came late.
        """
        value_seconds = _clamp(value_seconds)
        current = self.current
        if current is not None and at_s >= current.first_s + SLICE_S:
            self.closed = (*self._kept(at_s), current)
            current = None
        bucket = _bucket(value_seconds)
        if current is None:
            self.current = Slice(at_s, at_s, ((bucket, 1),), value_seconds)
        else:
            counts = dict(current.counts)
            counts[bucket] = counts.get(bucket, 0) + 1
            self.current = Slice(
                current.first_s,
                max(current.last_s, at_s),
                tuple(counts.items()),
                current.sum_seconds + value_seconds,
            )
        self.total_count += 1
        self.total_sum_seconds += value_seconds

    def freeze(self, now_s: float) -> Rolling:
        """The window as of `now_s`, on the clock of the observations."""
        if self.closed and self.closed[0].last_s <= now_s - WINDOW_MAX_S:
            self.closed = self._kept(now_s)
        slices = self.closed if self.current is None else (*self.closed, self.current)
        return Rolling(now_s, slices, self.total_count, self.total_sum_seconds)

    def _kept(self, now_s: float) -> tuple[Slice, ...]:
        return tuple(part for part in self.closed if part.last_s > now_s - WINDOW_MAX_S)
