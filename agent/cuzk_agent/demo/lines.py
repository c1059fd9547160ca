"""The lines of a prover's log as values, and the writes that put them into the file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from heapq import heappop, heappush
from random import Random

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEVEL_COLOURS = {"INFO": "32", "WARN": "33", "ERROR": "31"}
_TEAR_WINDOW_MS = 1.0
_MAX_INTRUDERS = 4
_LATE_MS = 3.0
"""How long a thread may wait for the lock of the log at most."""
_MAY_BE_LATE = frozenset({"SYNTH_START", "GPU_PICKUP", "GPU_START", "GPU_END"})
"""Events after which the thread that logs them does nothing that another one's lines could tell of."""

Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A `TIMELINE,…` line, printed with `eprintln!`: each fragment is a write of its own."""

    time_ms: float
    """When it happens, in the simulation's time, as for all lines."""
    writer: str
    """The thread that writes it. A thread never lands in the middle of its own line."""
    offset_ms: int
    """The offset that the line bears: whole milliseconds of its engine's clock."""
    event: str
    job_id: str
    detail: str

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
    """What lands in the file by one moment: a whole line, or a torn one with its intruders."""

    time_ms: float
    fragments: tuple[bytes, ...]
    """Each is one write(2)."""
    torn: int = 0
    """How many others' lines landed inside."""


@dataclass(frozen=True, slots=True)
class Printer:
    """How lines look."""

    start_unix_ms: float
    """Wall-clock time at which the simulation begins."""
    speed: float = 1.0
    """How many times faster than the simulation's the wall clock's time is spent."""
    colours: bool = True

    def fragments(self, line: Line) -> tuple[bytes, ...]:
        """The writes that print `line`."""
        match line:
            case Timeline():
                parts = ("TIMELINE,", str(line.offset_ms), ",", line.event, ",", line.job_id, ",", line.detail, "\n")
                return tuple(part.encode() for part in parts)
            case Kernel():
                return (f"CUZK_TIMING: {line.text}\n".encode(),)
            case Tracing():
                return (self._tracing(line).encode(),)

    def unix_ms(self, time_ms: float) -> float:
        """The wall-clock time of a moment of the simulation."""
        return self.start_unix_ms + time_ms / self.speed

    def _tracing(self, line: Tracing) -> str:
        second, micros = divmod(int(self.unix_ms(line.time_ms) * 1000), 1_000_000)
        stamp = f"{_second(second)}.{micros:06}Z"
        if not self.colours:
            span = f"{line.span}{{{_plain(line.span_fields)}}}: " if line.span is not None else ""
            gap = " " if line.fields else ""
            return f"{stamp} {line.level:>5} {span}{line.target}: {line.message}{gap}{_plain(line.fields)}\n"
        level = f"\x1b[{_LEVEL_COLOURS[line.level]}m{line.level:>5}\x1b[0m"
        span = ""
        if line.span is not None:
            fields = _coloured(line.span_fields)
            span = f"\x1b[1m{line.span}\x1b[0m\x1b[1m{{\x1b[0m{fields}\x1b[1m}}\x1b[0m\x1b[2m:\x1b[0m "
        gap = " " if line.fields else ""
        return (
            f"\x1b[2m{stamp}\x1b[0m {level} {span}\x1b[2m{line.target}\x1b[0m\x1b[2m:\x1b[0m "
            f"{line.message}{gap}{_coloured(line.fields)}\n"
        )


@lru_cache(maxsize=4)
def _second(unix_s: int) -> str:
    # Most lines share their second with the one before.
    return f"{_UNIX_EPOCH + timedelta(seconds=unix_s):%Y-%m-%dT%H:%M:%S}"


def _plain(fields: Fields) -> str:
    return " ".join([f"{key}={value}" for key, value in fields])


def _coloured(fields: Fields) -> str:
    return " ".join([f"\x1b[3m{key}\x1b[0m\x1b[2m=\x1b[0m{value}" for key, value in fields])


def disordered(lines: Iterator[Line], rng: Random, probability: float) -> Iterator[Line]:
    """The order in which lines are written: a TIMELINE line takes its time before it waits for the lock of the log.

    `probability` is that of having to wait. Each thread's own lines stay in their order.
    """
    held: list[tuple[float, int, Line]] = []
    until_ms: dict[str, float] = {}
    for number, line in enumerate(lines):
        written_ms = max(line.time_ms, until_ms.get(line.writer, 0.0))
        if isinstance(line, Timeline) and line.event in _MAY_BE_LATE and rng.random() < probability:
            written_ms = max(written_ms, line.time_ms + rng.uniform(0.0, _LATE_MS))
        if written_ms > line.time_ms:
            until_ms[line.writer] = written_ms
        elif not held:
            until_ms.clear()
            yield line
            continue
        heappush(held, (written_ms, number, line))
        while held and held[0][0] <= line.time_ms:
            yield heappop(held)[2]
    while held:
        yield heappop(held)[2]


def writes(lines: Iterator[Line], rng: Random, printer: Printer, probability: float) -> Iterator[Write]:
    """Print lines in their order; now and then the lines that are due just then land inside a TIMELINE line.

    Looks a few lines ahead, no further. `probability` is that of being torn for a TIMELINE line which others' follow
    within a millisecond.
    """
    ahead: deque[Line] = deque()

    def look(index: int) -> Line | None:
        while len(ahead) <= index:
            line = next(lines, None)
            if line is None:
                return None
            ahead.append(line)
        return ahead[index]

    while (line := look(0)) is not None:
        intruders = 0
        if isinstance(line, Timeline):
            # Lines late in the order bear an earlier time than those around them.
            while intruders < _MAX_INTRUDERS and (other := look(intruders + 1)) and _collide(line, other):
                intruders += 1
            intruders = rng.randint(1, intruders) if intruders and rng.random() < probability else 0
        ahead.popleft()
        whole = printer.fragments(line)
        if not intruders:
            yield Write(line.time_ms, whole)
            continue
        cuts = sorted(rng.randrange(1, len(whole)) for _ in range(intruders))
        torn: list[bytes] = []
        at, time_ms = 0, line.time_ms
        for cut in cuts:
            intruder = ahead.popleft()
            torn += whole[at:cut]
            torn += printer.fragments(intruder)
            at, time_ms = cut, max(time_ms, intruder.time_ms)
        yield Write(time_ms, (*torn, *whole[at:]), torn=intruders)


def _collide(line: Timeline, other: Line) -> bool:
    # TIMELINE lines never tear each other: the prover holds the lock of its stderr for the whole line.
    return (
        not isinstance(other, Timeline)
        and other.writer != line.writer
        and abs(other.time_ms - line.time_ms) <= _TEAR_WINDOW_MS
    )
