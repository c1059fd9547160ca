"""Durations and times, as they are written on a command line. A `ValueError` tells what was expected."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"([0-9.]+)(ms|s|m|h)", re.ASCII)
_CLOCK = re.compile(r"([0-9]{1,6}):([0-5][0-9]):([0-5][0-9](?:\.[0-9]{1,9})?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a stretch of a log begins or ends."""

    value_s: float
    wall_clock: bool
    """Seconds since 1970; else since the engine's start."""

    def is_before(self, other: Bound) -> bool:
        """Whether it is, as far as that can be told without a log."""
        return self.wall_clock is other.wall_clock and self.value_s < other.value_s


def parse_duration_ms(text: str) -> int:
    """`800ms`, `1.5s`, `1h30m`."""
    if not _DURATION.fullmatch(text):
        raise ValueError("a duration such as 800ms, 1.5s or 1h30m")
    return round(1000 * sum(float(value) * _UNITS_S[unit] for value, unit in _PART.findall(text)))


def parse_bound(text: str) -> Bound:
    """A time since the engine's start (`1h30m`, `0:03:02.863`), or on the wall clock (`2026-11-30T14:05:09`, UTC)."""
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = clock.groups()
        return Bound(int(hours) * 3600 + int(minutes) * 60 + float(seconds), wall_clock=False)
    if _DURATION.fullmatch(text):
        return Bound(parse_duration_ms(text) / 1000, wall_clock=False)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        expected = "a time since the engine's start such as 90s or 0:03:02.863, or a date and time (UTC)"
        raise ValueError(expected) from None
    return Bound((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp(), wall_clock=True)


def parse_recording(text: str) -> tuple[str, str]:
    """`GPU=FILE` or FILE: the GPU is then what its name tells (`gpu1`), else 0."""
    gpu, equals, path = text.partition("=")
    if equals and re.fullmatch(r"[0-9]{1,4}|unknown", gpu):
        return gpu, path
    named = re.search(r"gpu[-_.]?((?:nvml)*[0-9]{1,4})", Path(text).name)
    return (named[1].lstrip("0") or "0") if named else "0", text
