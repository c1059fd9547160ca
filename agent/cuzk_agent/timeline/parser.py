"""Whole lines of the prover's log in, values out. Pure: no input or output, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from cuzk_agent.timeline.lines import LogLine, ParseStats
from cuzk_agent.timeline.torn import TIMELINE, UNPARSED_REASONS, TornLines, starts_line
from cuzk_agent.timeline.tracing import TracingReader, is_unfinished, parse_kernel_timing, parse_tracing, strip_escapes

__all__ = ["UNPARSED_REASONS", "LineParser"]

MAX_ERROR_LINES = 32
MAX_ERROR_BYTES = 16 * 1024
"""How much of an error text of several lines is kept while waiting for the keys behind it."""


class LineParser:
    """Reads the log of one engine after another.

    It keeps at most one torn TIMELINE line and one error text of several lines, both bounded.
    """

    def __init__(self) -> None:
        self._torn = TornLines()
        self._tracing = TracingReader()
        self._error: list[bytes] = []
        self._error_bytes = 0

    def feed(self, line: bytes) -> Sequence[LogLine]:
        """The values that one line (without its newline) completes, in the order of the log."""
        if self._error:
            return self._feed_after_error(line)
        torn = self._torn
        if line.startswith(TIMELINE):
            event, rest = torn.begin(line)
        elif torn.open:
            event, rest = torn.resume(line)
        else:
            return self._other(line)
        if event is None:
            return self._other(rest)
        return (event, *self._other(rest)) if rest else (event,)

    def flush(self) -> Sequence[LogLine]:
        """What is left when a log or an engine ends: nothing unfinished is waited for any longer."""
        out: list[LogLine] = []
        if self._error:
            out += self._release_error()
        self._torn.close()
        return out

    def count_from_here(self) -> None:
        """The totals begin at 0; what is unfinished goes on."""
        torn = self._torn
        torn.recovered = torn.lost = 0
        torn.unparsed.clear()

    def stats(self) -> ParseStats:
        """Totals so far."""
        torn = self._torn
        return ParseStats(torn_recovered=torn.recovered, torn_lost=torn.lost, unparsed=dict(torn.unparsed))

    def _other(self, line: bytes) -> tuple[LogLine, ...]:
        """A line that is no TIMELINE line."""
        if line.startswith(b"CUZK_"):
            timing = parse_kernel_timing(line)
            return () if timing is None else (timing,)
        if not line.startswith((b"\x1b", b"1", b"2")):
            return ()
        tracing = self._tracing.read(line)
        if tracing is None:
            return ()
        if is_unfinished(tracing) and len(line) <= MAX_ERROR_BYTES:
            self._error = [strip_escapes(line)]
            self._error_bytes = len(line)
            return ()
        return (tracing,)

    def _feed_after_error(self, line: bytes) -> Sequence[LogLine]:
        # The text was one write, so its lines follow each other even inside a torn TIMELINE line.
        text = strip_escapes(line)
        if starts_line(text):
            return [*self._release_error(), *self.feed(line)]
        self._error.append(text)
        self._error_bytes += len(line)
        tracing = parse_tracing(b"\n".join(self._error))
        if tracing is not None and not is_unfinished(tracing):
            self._error = []
            return (tracing,)
        if len(self._error) > MAX_ERROR_LINES or self._error_bytes > MAX_ERROR_BYTES:
            return self._release_error()
        return ()

    def _release_error(self) -> list[LogLine]:
        """The error's first line as it stands; the others may have been a torn line's rest after all."""
        first, *others = self._error
        self._error = []
        tracing = parse_tracing(first)
        out: list[LogLine] = [] if tracing is None else [tracing]
        for line in others:
            out += self.feed(line)
        return out
