"""A line on the terminal for whoever waits."""

from __future__ import annotations

from typing import TextIO

from cuzk_agent.clock import Clock
from cuzk_agent.report.inputs import Progress

_PATIENCE_S = 1.0
_EVERY_S = 0.1
_BAR = 30


class ProgressLine:
    """Shown from a second on, and wiped away in the end; nothing where `stream` is no terminal."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream if stream.isatty() else None
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._shown_s: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Shows how far it has come."""
        now_s = self._clock.monotonic_s()
        if self._stream is None or now_s - self._began_s < _PATIENCE_S:
            return
        if self._shown_s is not None and now_s - self._shown_s < _EVERY_S:
            return
        self._shown_s = now_s
        self._stream.write("\r" + _line(progress, now_s - self._began_s) + "\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """Takes the line away."""
        if self._stream is not None and self._shown_s is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _line(progress: Progress, elapsed_s: float) -> str:
    speed = progress.read_bytes / elapsed_s
    told = f"{progress.read_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s"
    if not progress.total_bytes:
        return told
    part = min(progress.read_bytes / progress.total_bytes, 1.0)
    filled = round(part * _BAR)
    left_s = (progress.total_bytes - progress.read_bytes) / speed if speed else 0.0
    return f"{'━' * filled}{'╌' * (_BAR - filled)} {part:4.0%}  {told}, {max(left_s, 0):.0f} s left"
