"""The lines of a prover's log as values, and the writes that put them into the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEVEL_COLOURS = {"INFO": "32", "ERROR": "31"}
_TEAR_WINDOW_MS = 1.0
_TEAR_PROBABILITY = 0.6
"""Of the TIMELINE lines that another writer's line follows within the window: about 1 % of all."""

Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A `TIMELINE,…` line, printed with `eprintln!`: each fragment is a write of its own."""

    time_ms: float
    """Since the engine's start, as for all lines; the offset is its whole milliseconds."""
    writer: str
    """The thread that writes it. A thread never lands in the middle of its own line."""
    event: str
    job_id: str
    detail: str

    @property
    def offset_ms(self) -> int:
        """The offset that the line bears."""
        return int(self.time_ms)

    def text(self) -> str:
        """The line as it is meant, without its newline."""
        return f"TIMELINE,{self.offset_ms},{self.event},{self.job_id},{self.detail}"


@dataclass(frozen=True, slots=True)
class Tracing:
    """A line of tracing-subscriber, one write."""

    time_ms: float
    writer: str
    level: str
    target: str
    message: str
    fields: Fields
    span: str | None = None
    span_fields: Fields = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A `CUZK_TIMING: …` line of the C++ prover, one write and no colours."""

    time_ms: float
    writer: str
    text: str


Line = Timeline | Tracing | Kernel


@dataclass(frozen=True, slots=True)
class Write:
    """What lands in the file by one moment: a whole line, or a torn one with its intruder."""

    time_ms: float
    fragments: tuple[bytes, ...]
    """Each is one write(2)."""
    torn: bool = False


def fragments(line: Line, epoch_unix_ms: float) -> tuple[bytes, ...]:
    """The writes that print `line`, for an engine that was started at `epoch_unix_ms`."""
    match line:
        case Timeline():
            parts = ("TIMELINE,", str(line.offset_ms), ",", line.event, ",", line.job_id, ",", line.detail, "\n")
            return tuple(part.encode() for part in parts)
        case Kernel():
            return (f"CUZK_TIMING: {line.text}\n".encode(),)
        case Tracing():
            return (_tracing_text(line, epoch_unix_ms).encode(),)


def writes(lines: Iterator[Line], rng: Random, epoch_unix_ms: float) -> Iterator[Write]:
    """Print lines in their order; now and then a line that is due just then lands inside a TIMELINE line.

    Looks one line ahead, no further.
    """
    line = next(lines, None)
    while line is not None:
        following = next(lines, None)
        whole = fragments(line, epoch_unix_ms)
        if following is not None and _collide(line, following) and rng.random() < _TEAR_PROBABILITY:
            cut = rng.randrange(1, len(whole))
            torn = (*whole[:cut], *fragments(following, epoch_unix_ms), *whole[cut:])
            yield Write(following.time_ms, torn, torn=True)
            line = next(lines, None)
        else:
            yield Write(line.time_ms, whole)
            line = following


def _collide(line: Line, following: Line) -> bool:
    # TIMELINE lines never tear each other: the prover holds the lock of its stderr for the whole line.
    return (
        isinstance(line, Timeline)
        and not isinstance(following, Timeline)
        and following.writer != line.writer
        and following.time_ms - line.time_ms <= _TEAR_WINDOW_MS
    )


def _tracing_text(line: Tracing, epoch_unix_ms: float) -> str:
    time = _UNIX_EPOCH + timedelta(milliseconds=epoch_unix_ms + line.time_ms)
    stamp = _styled("2", f"{time:%Y-%m-%dT%H:%M:%S.%fZ}")
    level = _styled(_LEVEL_COLOURS[line.level], f"{line.level:>5}")
    span = ""
    if line.span is not None:
        opened, closed = _styled("1", "{"), _styled("1", "}")
        span = f"{_styled('1', line.span)}{opened}{_fields_text(line.span_fields)}{closed}{_styled('2', ':')} "
    target = f"{_styled('2', line.target)}{_styled('2', ':')}"
    body = " ".join(filter(None, (line.message, _fields_text(line.fields))))
    return f"{stamp} {level} {span}{target} {body}\n"


def _fields_text(fields: Fields) -> str:
    return " ".join(f"{_styled('3', key)}{_styled('2', '=')}{value}" for key, value in fields)


def _styled(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"
