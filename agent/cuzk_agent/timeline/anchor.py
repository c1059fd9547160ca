"""The wall-clock time of an engine's start, found from its log alone.

TIMELINE lines carry an offset since the engine's start (a floored millisecond), tracing lines a wall-clock time. One
written right after the other pins the start from one side: a tracing line *before* an event of offset o says
`start > T - o - 1`, one *after* it says `start <= T - o`. A few lines pin it to about a millisecond. Without tracing
lines, the time at which a journal or a container's log got an event tells: never before it, now and then hardly after.
"""

from __future__ import annotations

from dataclasses import dataclass

_GENERATION = 256
"""Bounds kept before the older half is forgotten, so that a stepped clock is followed."""
_STEP_MS = 250.0
"""Bounds that contradict each other by more than this come from a clock that was set; thread scheduling alone makes
milliseconds."""
_DELIVERED = 64
"""Times of delivery kept before the older half is forgotten: in so many some were hardly late."""
_DELIVERY_MS = 25.0
"""How late the promptest of them is at most."""
_KNOWN_MS = 1000.0
"""An uncertainty beyond this is as good as no anchor."""


@dataclass(slots=True)
class _Bounds:
    lower_ms: float = float("-inf")
    upper_ms: float = float("inf")
    count: int = 0

    def merged(self, other: _Bounds) -> _Bounds:
        return _Bounds(max(self.lower_ms, other.lower_ms), min(self.upper_ms, other.upper_ms))


class Anchor:
    """Learns the start of one engine from its lines in their order."""

    def __init__(self) -> None:
        self._recent = _Bounds()
        self._older = _Bounds()
        self._delivered = _Bounds()
        self._delivered_before = _Bounds()
        self._start_line_ms: float | None = None
        self._last_tracing_ms: float | None = None
        self._last_offset_ms: int | None = None
        self._known: tuple[float, float] | None = None
        """Asked for at every line, found again only after a line that tells something new."""

    def note_start(self, unix_ms: float) -> None:
        """The engine's own start-up line: written within a millisecond of the start."""
        self._start_line_ms = unix_ms
        self._known = self._found()

    def note_tracing(self, unix_ms: float) -> None:
        """A tracing line with this time stamp came."""
        if self._last_offset_ms is not None:
            self._bound(_Bounds(upper_ms=unix_ms - self._last_offset_ms))
            self._last_offset_ms = None
        self._last_tracing_ms = unix_ms

    def note_event(self, offset_ms: int) -> None:
        """A TIMELINE line with this offset came."""
        if self._last_tracing_ms is not None:
            self._bound(_Bounds(lower_ms=self._last_tracing_ms - offset_ms - 1))
            self._last_tracing_ms = None
        self._last_offset_ms = offset_ms

    def note_delivery(self, offset_ms: int, unix_ms: float) -> None:
        """Then a TIMELINE line with this offset came to whatever keeps the log."""
        recent, bound_ms = self._delivered, unix_ms - offset_ms
        recent.count += 1
        is_over = recent.count >= _DELIVERED
        if bound_ms < recent.upper_ms or is_over:
            recent.upper_ms = min(recent.upper_ms, bound_ms)
            if is_over:
                self._delivered, self._delivered_before = _Bounds(), recent
            self._known = self._found()

    def _bound(self, bound: _Bounds) -> None:
        self._narrow(bound)
        self._known = self._found()

    def _narrow(self, bound: _Bounds) -> None:
        both = self._recent.merged(self._older).merged(bound)
        if both.lower_ms - both.upper_ms > _STEP_MS:
            # The clock was set: what was learned before belongs to another clock.
            self._older, self._recent = _Bounds(), bound
            self._start_line_ms = None
            return
        count = self._recent.count + 1
        self._recent = self._recent.merged(bound)
        self._recent.count = count
        if count >= _GENERATION:
            self._older, self._recent = self._recent, _Bounds()

    @property
    def start_unix_ms(self) -> float | None:
        """Wall-clock time of the engine's start, in milliseconds; None while not known."""
        return None if self._known is None else self._known[0]

    @property
    def uncertainty_ms(self) -> float | None:
        """How far off `start_unix_ms` may be; None while it is not known."""
        return None if self._known is None else self._known[1]

    def _found(self) -> tuple[float, float] | None:
        if self._start_line_ms is not None:
            return self._start_line_ms, 1.0
        both = self._recent.merged(self._older)
        # Crossed bounds are threads that were interrupted between taking the time and writing the line.
        half_ms = abs(both.upper_ms - both.lower_ms) / 2 + (1.0 if both.lower_ms > both.upper_ms else 0.0)
        if not half_ms < _KNOWN_MS:
            delivered_ms = min(self._delivered.upper_ms, self._delivered_before.upper_ms)
            return (delivered_ms, _DELIVERY_MS) if delivered_ms < float("inf") else None
        return (both.lower_ms + both.upper_ms) / 2, max(half_ms, 0.5)
