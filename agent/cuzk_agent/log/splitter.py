"""Bytes in any chunks → whole lines. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_LINE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class SplitterState:
    """The line that has not ended yet."""

    pending: bytes = b""
    cut: bool = False
    """It is longer than what is kept of it."""
    skipping: bool = False
    """Nothing of it is kept: the stream was entered in its midst."""


class LineSplitter:
    """Cuts a stream of bytes into lines; how the stream is cut into chunks makes no difference.

    A line ends with LF or CRLF. NUL bytes are dropped wherever they are: a log truncated under a writer that keeps its
    offset has a hole of them. A line longer than `max_line_bytes` is given as its first `max_line_bytes` bytes, when
    its newline comes. Memory is bounded by one chunk and one such line, whatever comes in.
    """

    __slots__ = ("_cut", "_max", "_pending", "_skipping", "nul_bytes", "overlong_lines")

    def __init__(self, max_line_bytes: int = DEFAULT_MAX_LINE_BYTES, state: SplitterState | None = None) -> None:
        """With the `state` of another, it goes on as that one would."""
        if max_line_bytes < 1:
            raise ValueError(f"max_line_bytes must be at least 1, not {max_line_bytes}")
        state = state or SplitterState()
        self._max = max_line_bytes
        self._pending = bytearray(state.pending)
        self._cut = state.cut
        self._skipping = state.skipping
        self.nul_bytes = 0
        """NUL bytes dropped so far."""
        self.overlong_lines = 0
        """Lines given cut so far."""

    def state(self) -> SplitterState:
        """From which another can go on."""
        return SplitterState(bytes(self._pending), self._cut, self._skipping)

    @property
    def pending(self) -> bytes:
        """What is kept of the line that has not ended yet, without NULs."""
        return bytes(self._pending)

    @property
    def pending_bytes(self) -> int:
        """The size of `pending`, at most `max_line_bytes` + 1."""
        return len(self._pending)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes of the stream; return the lines that end in them, in order."""
        if 0 in chunk:
            size = len(chunk)
            chunk = chunk.translate(None, b"\0")
            self.nul_bytes += size - len(chunk)
        first, *rest = chunk.split(b"\n")
        self._keep(first)
        if not rest:
            return []
        lines = []
        if self._skipping:
            self.reset()
        else:
            lines.append(self._end_line())
        last = rest.pop()
        lines += [self._finish(line) for line in rest]
        self._keep(last)
        return lines

    def skip_line(self) -> None:
        """Drop everything up to and including the next newline: the stream is entered in the middle of a line."""
        self.reset()
        self._skipping = True

    def reset(self) -> int:
        """Forget the line that has not ended yet; return how many bytes of it were kept."""
        dropped = len(self._pending)
        self._pending.clear()
        self._cut = self._skipping = False
        return dropped

    def _keep(self, part: bytes) -> None:
        if self._skipping:
            return
        # One byte over the limit, because a CR there belongs to the line end, not to the line.
        room = self._max + 1 - len(self._pending)
        self._pending += part[:room]
        self._cut = self._cut or len(part) > room

    def _end_line(self) -> bytes:
        line = bytes(self._pending)
        if self._cut:
            line = line[: self._max]
            self.overlong_lines += 1
        else:
            line = self._finish(line)
        self.reset()
        return line

    def _finish(self, line: bytes) -> bytes:
        if line.endswith(b"\r"):
            line = line[:-1]
        if len(line) > self._max:
            line = line[: self._max]
            self.overlong_lines += 1
        return line
