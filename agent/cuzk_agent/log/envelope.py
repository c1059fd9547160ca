"""Lines as a container runtime keeps them → the lines that the container wrote. No I/O.

Docker (json-file) writes an object for each line or piece of a line, `{"log":"text\\n","stream":"stderr","time":"…"}`;
a piece that is not a line's last has no line end. CRI (containerd, CRI-O) writes `<time> stderr F text`, or `P` where
the line goes on in the next record of that stream. Which it is, if any, is found out from the first lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from cuzk_agent.log.splitter import DEFAULT_MAX_LINE_BYTES

MAX_RECORD_BYTES: Final = 7 * DEFAULT_MAX_LINE_BYTES
"""A record of docker's may take six bytes for each of its line's."""
_TRIED: Final = 16
"""Lines that are looked at before a log is taken for plain. A line torn from its head may be the first."""
_CRI: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\S{8,30}) (stdout|stderr) ([FP])(?::\S*)?(?: (.*))?", re.DOTALL)


class Envelope(StrEnum):
    """In what a log's lines are wrapped."""

    UNKNOWN = "unknown"
    """No line has been seen yet, or the first few tell nothing."""
    PLAIN = "plain"
    DOCKER = "docker"
    CRI = "cri"
    JOURNAL = "journal"


@dataclass(frozen=True, slots=True)
class Partial:
    """A line whose end has not come yet."""

    stream: str
    text: bytes
    unix_s: float
    cut: bool


@dataclass(frozen=True, slots=True)
class UnwrapperState:
    """What an `Unwrapper` knows."""

    envelope: Envelope = Envelope.UNKNOWN
    tried: int = 0
    partials: tuple[Partial, ...] = ()


class Record(NamedTuple):
    """One record of a container's log."""

    stream: str
    text: bytes
    """Without a line end."""
    is_whole: bool
    """The line ends with it."""
    unix_s: float


class Unwrapper:
    """Takes physical lines, gives the container's with the time of each (of its first piece). A line that is no record
    is given as it is, without a time. Memory is bounded by one line for each of the two streams."""

    def __init__(self, state: UnwrapperState | None = None) -> None:
        state = state or UnwrapperState()
        self.envelope = state.envelope
        self._tried = state.tried
        self._partials = {partial.stream: partial for partial in state.partials}
        self.overlong_lines = 0
        """Lines given cut so far."""

    def state(self) -> UnwrapperState:
        """From which another goes on as this one would."""
        return UnwrapperState(self.envelope, self._tried, tuple(self._partials.values()))

    def feed(self, lines: Sequence[bytes]) -> tuple[list[bytes], list[float | None] | None]:
        """The lines that end in these, and their times, or None if the log is plain."""
        if self.envelope is Envelope.PLAIN:
            if max(map(len, lines), default=0) <= DEFAULT_MAX_LINE_BYTES:
                return list(lines), None
            return [self._bounded(line) for line in lines], None
        given: list[bytes] = []
        times: list[float | None] = []
        for line in lines:
            record = self._record(line)
            if record is None:
                given.append(self._bounded(line))
                times.append(None)
                continue
            before = self._partials.pop(record.stream, None)
            text, unix_s, cut = record.text, record.unix_s, False
            if before is not None:
                text, unix_s, cut = before.text + text, before.unix_s, before.cut
            if not record.is_whole:
                cut = cut or len(text) > DEFAULT_MAX_LINE_BYTES
                self._partials[record.stream] = Partial(record.stream, text[:DEFAULT_MAX_LINE_BYTES], unix_s, cut)
                continue
            self.overlong_lines += cut and len(text) <= DEFAULT_MAX_LINE_BYTES
            given.append(self._bounded(text))
            times.append(unix_s)
        wrapped = self.envelope in {Envelope.DOCKER, Envelope.CRI}
        return given, times if wrapped else None

    def reset(self) -> int:
        """Forget the lines that have not ended yet; return how many bytes of them were kept."""
        dropped = sum(len(partial.text) for partial in self._partials.values())
        self._partials.clear()
        return dropped

    def _record(self, line: bytes) -> Record | None:
        match self.envelope:
            case Envelope.DOCKER:
                return docker_record(line)
            case Envelope.CRI:
                return cri_record(line)
            case Envelope.UNKNOWN if line:
                for envelope, decode in ((Envelope.DOCKER, docker_record), (Envelope.CRI, cri_record)):
                    record = decode(line)
                    if record is not None:
                        self.envelope = envelope
                        return record
                self._tried += 1
                if self._tried >= _TRIED:
                    self.envelope = Envelope.PLAIN
        return None

    def _bounded(self, line: bytes) -> bytes:
        if len(line) <= DEFAULT_MAX_LINE_BYTES:
            return line
        self.overlong_lines += 1
        return line[:DEFAULT_MAX_LINE_BYTES]


def docker_record(line: bytes) -> Record | None:
    """A line of docker's json-file; None if it is none."""
    if not line.startswith(b'{"'):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    text, stream, time = value.get("log"), value.get("stream"), value.get("time")
    if not isinstance(text, str) or not isinstance(stream, str) or not isinstance(time, str):
        return None
    if stream not in {"stdout", "stderr"}:
        return None
    unix_s = unix_seconds(time)
    if unix_s is None:
        return None
    data = text.encode("utf-8", "replace")
    is_whole = data.endswith(b"\n")
    if is_whole:
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    # A record holds one line, or else somebody made it up.
    return Record(stream, data.translate(None, b"\0\n"), is_whole, unix_s)


def cri_record(line: bytes) -> Record | None:
    """A line of a CRI log; None if it is none."""
    found = _CRI.fullmatch(line)
    if found is None:
        return None
    unix_s = unix_seconds(found[1].decode("ascii", "replace"))
    if unix_s is None:
        return None
    return Record(found[2].decode(), found[4] or b"", found[3] == b"F", unix_s)


def unix_seconds(text: str) -> float | None:
    """Of an RFC 3339 time stamp, in seconds since 1970; None if it is none."""
    try:
        time = datetime.fromisoformat(text)
        return time.timestamp() if time.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
