"""What the timeline tells the GPU side, as values in wall-clock time.

Only settled time is told, and it is never taken back. Units and jobs are numbered; the numbers mean nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpanTime:
    """A stretch of settled time in which the same spans, at least one, were open on a GPU."""

    gpu: str
    """As the log names it: the daemon's ordinal, or `unknown`."""
    start_unix_s: float
    end_unix_s: float
    units: tuple[int, ...]
    """Whose spans they are."""


@dataclass(frozen=True, slots=True)
class SpanEnded:
    """A span is over: everything told of its unit is complete."""

    unit: int
    job: int
    seconds: float
    """Its settled length."""
    kernel_unix_s: tuple[float, float] | None
    """When its kernels ran, where the log tells."""


@dataclass(frozen=True, slots=True)
class JobDecided:
    """A job's outcome is known. Spans of it may still end later."""

    job: int
    job_id: str
    proof_kind: str
    proved: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything that happened up to this time has been told."""

    until_unix_s: float
    uncertainty_s: float
    """How far the wall-clock times told so far may be off."""


Fact = SpanTime | SpanEnded | JobDecided | Settled
