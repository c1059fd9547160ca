"""The clocks of the machine. The only module that imports `time`: everything else is handed a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time, on the two clocks that matter here."""

    def monotonic_s(self) -> float:
        """Seconds on CLOCK_MONOTONIC, the clock the daemon's offsets run on: for durations and deadlines."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970 in UTC: for time stamps and NVML's samples. It may step in either direction."""
        ...


class _SystemClock:
    __slots__ = ()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


def system_clock() -> Clock:
    """The clock of this machine."""
    return _SystemClock()
