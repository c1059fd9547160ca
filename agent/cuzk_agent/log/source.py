"""What every log source hands on: whole lines, and how far it has read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FollowState(StrEnum):
    """How a source is doing. Anything but `FOLLOWING` is retried and shown."""

    FOLLOWING = "following"
    """The source is open and being read."""
    MISSING = "missing"
    """There is nothing at the path (yet)."""
    UNREADABLE = "unreadable"
    """It exists, but opening or reading it fails (permissions, I/O error, a directory)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The lines that one bounded read of a source gave."""

    lines: tuple[bytes, ...]
    """Whole lines in their order, without line ends and without NULs; an overlong one cut to its head."""
    read_monotonic_s: float
    """The monotonic clock just *before* the read: whatever was written by then is in this batch or an earlier one
    if `at_end` is true."""
    at_end: bool
    """True when this read came to the end of what the source held."""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Totals of one source since the agent started, and its present state."""

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
