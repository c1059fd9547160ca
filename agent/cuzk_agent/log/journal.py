"""Follows a systemd unit in the journal, through a `journalctl` that is kept running.

The journal says more than the text: which process wrote a line and when, that the unit's main process has exited, and
how many messages it dropped. What there is already is read by a `journalctl` that ends at the end, so that it is known
where that is; then one that follows takes over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fcntl import F_GETFL, F_SETFL, F_SETPIPE_SZ, fcntl
from typing import IO, Any, Final, Literal, NamedTuple

from cuzk_agent.log.envelope import Envelope
from cuzk_agent.log.position import JournalPosition, Totals
from cuzk_agent.log.source import Batch, FollowState, ReadStats
from cuzk_agent.log.splitter import DEFAULT_MAX_LINE_BYTES, LineSplitter

JOURNAL_LAG_S: Final = 1.75
"""Lines may take so long through journald and journalctl, on top of what they may take to a file."""
EXIT_DELAY_S: Final = 0.5
"""So long after a process has exited its last lines may still come."""
MAX_BACKOFF_S: Final = 60.0
MAX_RECORD_BYTES: Final = 1 << 20
"""A byte of a message may take five in JSON."""

_READ_BYTES: Final = 1 << 18
_PIPE_BYTES: Final = 1 << 20
_STDERR_BYTES: Final = 4096
_PROCESSES: Final = 16
_ENDED: Final = {
    "7ad2d189f7e94e70a38c781354912448",  # unit succeeded
    "d9b373ed55a64feb8242e02dbe79a49c",  # unit failed
    "9d1aaa27d60140bd96365438aad20286",  # unit stopped
}
"""What the manager says of a unit whose main process is no more."""
_DROPPED: Final = "a596d6fe7bfa4994828e72309e95d61e"

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """What is of interest in one entry of the journal."""

    cursor: str
    lines: tuple[bytes, ...]
    """Of the daemon; empty for what others say about it."""
    unix_s: float | None
    goes_on: bool
    """The last line's rest is in the next entry."""
    process: tuple[str, str, str] | None
    """Which wrote it: invocation, program and process id. None if that isn't told."""
    is_end: bool
    """The unit's main process has exited."""
    dropped: int
    """Messages that journald dropped, and the one whose text isn't told."""


def entry(record: bytes, unit: str) -> Entry | None:
    """An entry from journalctl's JSON; None if it is none."""
    try:
        value = json.loads(record)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("__CURSOR"), str):
        return None
    text = _bytes(value.get("MESSAGE", ""))
    told = (text or b"").decode("utf-8", "replace")
    message_id = _text(value, "MESSAGE_ID")
    is_manager = _text(value, "_PID") == "1"
    is_journald = _text(value, "SYSLOG_IDENTIFIER") == "systemd-journald"
    is_daemon = not is_manager and not is_journald and _text(value, "_SYSTEMD_UNIT") in {"", unit}
    dropped = _dropped(value, told) if is_journald or message_id == _DROPPED else int(is_daemon and text is None)
    process = None
    if is_daemon and _text(value, "_PID"):
        life = _text(value, "_SYSTEMD_INVOCATION_ID") or _text(value, "_BOOT_ID")
        process = life, _text(value, "_COMM"), _text(value, "_PID")
    return Entry(
        value["__CURSOR"],
        _lines(text) if is_daemon and text is not None else (),
        _unix_s(value),
        is_daemon and _text(value, "_LINE_BREAK") == "line-max",
        process,
        is_manager and (message_id in _ENDED or "Main process exited" in told),
        dropped,
    )


def _text(value: Mapping[str, Any], key: str) -> str:
    """A field; the first, if there are several of this name."""
    field = value.get(key)
    if isinstance(field, list) and field:
        field = field[0]
    return field if isinstance(field, str) else ""


def _bytes(field: object) -> bytes | None:
    """A message, which is an array of numbers where it is no printable text, and null where it is not told."""
    if isinstance(field, str):
        return field.encode("utf-8", "replace")
    if isinstance(field, list):
        if all(type(part) is int and 0 <= part < 256 for part in field):
            return bytes(field)
        return _bytes(field[0])
    return None


def _lines(text: bytes) -> tuple[bytes, ...]:
    lines = text.translate(None, b"\0").removesuffix(b"\n").split(b"\n")
    return tuple(line.removesuffix(b"\r") for line in lines)


def _unix_s(value: Mapping[str, Any]) -> float | None:
    for key in ("_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP"):
        text = _text(value, key)
        if re.fullmatch("[0-9]{1,17}", text):
            return int(text) / 1e6
    return None


def _dropped(value: Mapping[str, Any], told: str) -> int:
    found = re.search(r"Suppressed ([0-9]{1,12}) messages", told)
    count = _text(value, "N_DROPPED")
    return int(count) if re.fullmatch("[0-9]{1,12}", count) else int(found[1]) if found else 0


class _Out(NamedTuple):
    """What a read gives."""

    lines: list[bytes]
    unix_s: list[float | None]
    breaks: list[int]


class _Child:
    """A running journalctl."""

    def __init__(self, command: Sequence[str], *, follows: bool) -> None:
        """Raises OSError."""
        self.follows = follows
        self._process = subprocess.Popen(  # noqa: S603  a list of arguments, of which the unit's name is checked
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out: IO[bytes] = self._process.stdout
        self._err: IO[bytes] = self._process.stderr
        for pipe in (self._out, self._err):
            fcntl(pipe, F_SETFL, fcntl(pipe, F_GETFL) | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            # With more room it is held up less often.
            fcntl(self._out, F_SETPIPE_SZ, _PIPE_BYTES)
        self._said = b""

    def read(self, size: int) -> bytes | None:
        """What it wrote; empty if it has ended, None if there is nothing now."""
        self._listen()
        try:
            return os.read(self._out.fileno(), size)
        except BlockingIOError:
            return None

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._err.fileno(), _STDERR_BYTES):
                self._said = (self._said + said)[-_STDERR_BYTES:]

    def finish(self) -> tuple[int, str]:
        """Its status and the last that it said, once it has ended its output."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._listen()
        self._out.close()
        self._err.close()
        said = self._said.decode("utf-8", "replace").strip().splitlines()
        return status, said[-1] if said else ""

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self.finish()


class JournalFollower:
    """Follows what a unit writes into the journal. The arguments are as those of `FileFollower`.

    A `journalctl` that ends is started again, later and later; what it wrote meanwhile is read then.
    """

    def __init__(
        self,
        unit: str,
        start: Literal["end", "start"],
        monotonic: Callable[[], float],
        *,
        resume: JournalPosition | None = None,
        warm_up_lines: int = 0,
        command: Sequence[str] = ("journalctl",),
    ) -> None:
        self._unit = unit
        self._monotonic = monotonic
        self._command = (*command, "--output=json", "--all", "--quiet", "--no-pager", f"--unit={unit}")
        self._from_end = start == "end" and resume is None
        self._warm_up_lines = warm_up_lines
        self._cursor = resume.cursor if resume is not None else ""
        self._expected = ""
        """The entry that is read again first, to see that it is still there."""
        self._processes = deque(resume.processes if resume is not None else (), _PROCESSES)
        self._pending = resume.pending if resume is not None else b""
        self._pending_unix_s = resume.pending_unix_s if resume is not None else None
        self._ended_at_s = monotonic() if resume is not None and resume.ended else None
        self._totals = Totals() if resume is None else replace(resume.totals)
        self._child: _Child | None = None
        self._follows = False
        """The next one is to follow."""
        self._splitter = LineSplitter(MAX_RECORD_BYTES)
        self._start_at_s = self._started_at_s = monotonic()
        self._backoff_s = 1.0
        self._state = FollowState.FOLLOWING
        self._detail = ""
        self._reached_end = False
        self._closed = False

    def read(self, max_bytes: int = 1 << 20) -> Batch:
        """Read what there is, about `max_bytes` at most; never waits."""
        now_s = self._monotonic()
        out = _Out([], [], [])
        past = self._from_end
        at_end = False
        if self._child is None and now_s >= self._start_at_s and not self._closed:
            self._start(now_s)
        child = self._child
        if child is not None:
            records, ended, at_end = self._read(child, max_bytes)
            for record in records:
                self._take(record, now_s, out)
            if past and not self._warm_up_lines:
                # They were read for their cursor alone.
                out = _Out([], [], [])
            if ended:
                at_end = False
                self._go_on(child, now_s)
        if self._ended_at_s is not None and at_end and now_s - self._ended_at_s >= EXIT_DELAY_S:
            self._ended_at_s = None
            out.breaks.append(len(out.lines))
        self._reached_end = self._reached_end or at_end
        self._totals.lines += len(out.lines)
        self._totals.read_bytes += sum(len(line) + 1 for line in out.lines)
        return Batch(tuple(out.lines), now_s - JOURNAL_LAG_S, at_end, tuple(out.unix_s), tuple(out.breaks), past=past)

    def stats(self) -> ReadStats:
        """Totals so far, and the state as of the last `read()`."""
        totals = self._totals
        return ReadStats(
            state=self._state,
            detail=self._detail,
            caught_up=self._reached_end and self._state is FollowState.FOLLOWING,
            lines=totals.lines,
            read_bytes=totals.read_bytes,
            lag_bytes=None,
            rotations=0,
            truncations=totals.truncations,
            lost_bytes=totals.lost_bytes,
            overlong_lines=totals.overlong_lines,
            nul_bytes=0,
            lost_lines=totals.lost_lines,
            restarts=totals.restarts,
            envelope=Envelope.JOURNAL,
        )

    def position(self) -> JournalPosition:
        """Where the last `read()` ended."""
        return JournalPosition(
            self._cursor,
            tuple(self._processes),
            self._pending,
            self._pending_unix_s,
            ended=self._ended_at_s is not None,
            totals=replace(self._totals),
        )

    def close(self) -> None:
        """End journalctl, for good."""
        self._closed = True
        if self._child is not None:
            self._child.end()
            self._child = None

    # -- journalctl

    def _start(self, now_s: float) -> None:
        """Start one that reads to the end of the journal, or one that follows if that has been done."""
        if self._follows:
            where = ["--follow", "--no-tail", *([f"--after-cursor={self._cursor}"] if self._cursor else [])]
        elif self._cursor:
            where = [f"--cursor={self._cursor}"]
        elif self._from_end:
            where = [f"--lines={max(1, self._warm_up_lines)}"]
        else:
            where = []
        self._expected = "" if self._follows else self._cursor
        self._splitter = LineSplitter(MAX_RECORD_BYTES)
        self._started_at_s = now_s
        try:
            self._child = _Child([*self._command, *where], follows=self._follows)
        except OSError as error:
            self._fail(now_s, f"{self._command[0]}: {error.strerror or error}")

    def _read(self, child: _Child, max_bytes: int) -> tuple[list[bytes], bool, bool]:
        """Records; whether it has ended; whether it has nothing more to tell now."""
        records: list[bytes] = []
        budget = max_bytes
        while budget > 0:
            chunk = child.read(min(budget, _READ_BYTES))
            if chunk is None:
                return records, False, child.follows and not self._splitter.pending_bytes
            if not chunk:
                return records, True, False
            budget -= len(chunk)
            records += self._splitter.feed(chunk)
        return records, False, False

    def _go_on(self, child: _Child, now_s: float) -> None:
        """One has ended: the next."""
        status, said = child.finish()
        self._child = None
        if self._follows or status:
            said = said or ("it follows no more" if self._follows else "it said nothing")
            if now_s - self._started_at_s > MAX_BACKOFF_S:
                self._backoff_s = 1.0
            self._fail(now_s, f"journalctl ended with status {status}: {said}")
            return
        if self._expected:
            self._gone()
        self._from_end = False
        self._follows = True
        self._state, self._detail = FollowState.FOLLOWING, ""
        if not self._cursor:
            # Its name may be wrong.
            self._state, self._detail = FollowState.MISSING, f"{self._unit} has no entry in the journal yet"
        self._start(now_s)

    def _fail(self, now_s: float, detail: str) -> None:
        self._state, self._detail = FollowState.UNREADABLE, detail
        self._follows = False
        self._totals.restarts += 1
        self._start_at_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _gone(self) -> None:
        _log.warning("%s: what was read last is no longer in the journal; what followed it may be gone too", self._unit)
        self._totals.truncations += 1
        self._expected = ""

    # -- entries

    def _take(self, record: bytes, now_s: float, out: _Out) -> None:
        one = entry(record, self._unit)
        if one is None:
            # Cut at its limit, or no JSON at all.
            self._totals.lost_lines += bool(record)
            return
        if self._expected:
            if one.cursor == self._expected:
                self._expected = ""
                return
            self._gone()
        self._come_to(one.cursor)
        self._totals.lost_lines += one.dropped
        if one.is_end:
            self._ended_at_s = now_s
        if one.process is not None and self._is_new(one.process):
            self._ended_at_s = None
            self._flush(out)
            out.breaks.append(len(out.lines))
        *whole, last = one.lines or (b"",)
        for text in whole:
            self._end_line(text, one.unix_s, out)
        if one.goes_on:
            if not self._pending:
                self._pending_unix_s = one.unix_s
            self._pending = (self._pending + last)[: DEFAULT_MAX_LINE_BYTES + 1]
        elif one.lines:
            self._end_line(last, one.unix_s, out)

    def _come_to(self, cursor: str) -> None:
        self._cursor = cursor
        if self._state is FollowState.MISSING:
            self._state, self._detail = FollowState.FOLLOWING, ""

    def _is_new(self, process: tuple[str, str, str]) -> bool:
        """Whether it has taken the place of one of the same program: helpers of another may come and go beside it."""
        if process in self._processes:
            return False
        took_over = any(program == process[1] for _, program, _ in self._processes)
        self._processes.append(process)
        return took_over

    def _end_line(self, text: bytes, unix_s: float | None, out: _Out) -> None:
        if self._pending:
            text, unix_s = self._pending + text, self._pending_unix_s
            self._pending, self._pending_unix_s = b"", None
        if len(text) > DEFAULT_MAX_LINE_BYTES:
            self._totals.overlong_lines += 1
            text = text[:DEFAULT_MAX_LINE_BYTES]
        out.lines.append(text)
        out.unix_s.append(unix_s)

    def _flush(self, out: _Out) -> None:
        """The process that began a line is gone."""
        if self._pending:
            self._end_line(b"", None, out)
