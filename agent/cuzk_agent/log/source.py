"""What every log source hands on: whole lines, how far it has read, and where it can go on after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cuzk_agent.log.envelope import Envelope
from cuzk_agent.log.position import Position


class FollowState(StrEnum):
    """How a source is doing. Anything but `FOLLOWING` is retried and shown."""

    FOLLOWING = "following"
    """The source is open and being read."""
    MISSING = "missing"
    """There is nothing at the path (yet), or what was read has ended for good."""
    UNREADABLE = "unreadable"
    """It exists, but opening or reading it fails (permissions, I/O error, a directory)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The lines that one bounded read of a source gave."""

    lines: tuple[bytes, ...]
    """Whole lines in their order, without line ends and without NULs; an overlong one cut to its head."""
    read_monotonic_s: float
    """Whatever had been written by this time of the monotonic clock is in this batch or an earlier one if `at_end` is
    true: the time just *before* the read, less what stands between the writer and the source."""
    at_end: bool
    """True when this read came to the end of what the source held."""
    line_unix_s: tuple[float | None, ...] | None = None
    """When each line was written, in seconds since 1970, as the source's envelope says. None where it has none."""
    breaks: tuple[int, ...] = ()
    """Before the lines with these indices the daemon's process ended, as the source knows for certain; one that is
    `len(lines)`: after the last. In ascending order."""
    past: bool = False
    """All these lines were there before the point where following began: they are read to warm up."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Totals of one source since it was first followed, and its present state."""

    state: FollowState
    detail: str
    """One line for a person: the path and the operating system's error, empty while all is well."""
    caught_up: bool
    """The source is followed and the end of it has been reached at least once."""
    lines: int
    read_bytes: int
    lag_bytes: int | None
    """Bytes that the source holds and that are not read yet; None when its size is not known."""
    rotations: int
    truncations: int
    lost_bytes: int
    """Bytes known to have existed that will never be read."""
    overlong_lines: int
    nul_bytes: int
    lost_lines: int = 0
    """Lines that were dropped before they came to the source, as it tells itself."""
    restarts: int = 0
    """Times that the program which reads the source was started again."""
    envelope: Envelope = Envelope.PLAIN
    """In what the lines were wrapped."""


class Source(Protocol):
    """A followed log. All methods belong to one thread; none raises for what is wrong with the log."""

    def read(self, max_bytes: int = 1 << 20) -> Batch:
        """Read what there is, about `max_bytes` at most; never waits."""
        ...

    def stats(self) -> ReadStats:
        """Totals so far, and the state as of the last `read()`."""
        ...

    def position(self) -> Position | None:
        """Where the last `read()` ended: all lines up to there have been handed on, and none beyond. A source made with
        it goes on exactly there. None for a source that can't be read again."""
        ...

    def close(self) -> None:
        """Let go of everything, for good; the totals stay."""
        ...
