"""What the agent knows, kept in one file, so that another one goes on where it ended.

The file holds the position of every source's reader and the whole state of its pipeline, with the values of its
counters: they belong together, for what was counted was read up to there. It is replaced as a whole, every few seconds
and at the end. Nothing that was shown is taken back: the state behind an answer to a scrape is in the file before the
answer leaves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from cuzk_agent.clock import Clock
from cuzk_agent.log.position import Position, from_json, to_json

logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT: Final = 1
"""Of the file. What it holds of a pipeline has a shape of its own."""
MAX_BYTES: Final = 1 << 28
"""A file that holds more is none of ours."""
PERIOD_S: Final = 5.0
"""How often the state is written at least, unless that would take more than its share of the time."""
_SHARE: Final = 300
"""Without being asked, it is written for one part of the time in so many."""
_SHARE_ASKED: Final = 10
"""The same, when it is asked for by those who scrape."""
_REST_MAX_S: Final = 1.0
_PERIOD_MAX_S: Final = 60.0
FRESH_S: Final = 0.1
"""A value is of now for so long: those who ask at the same time share one."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HEADER: Final = re.compile(rb"cuzk-agent-state ([0-9]{1,9}) ([0-9a-f]{32})\n")


class DamagedError(Exception):
    """The file holds nothing that was written as a state."""


class NewerError(Exception):
    """It was written in a format of the future."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time on all clocks."""

    monotonic_s: float
    unix_s: float
    boot_id: str
    """Of the system's start that the monotonic clock counts from; empty if it can't be known."""

    def same_boot(self, later: Moment) -> bool:
        """Whether the monotonic clock went on until then."""
        return self.boot_id == later.boot_id and self.monotonic_s <= later.monotonic_s


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """What is known of one source."""

    position: Position
    pipeline: object
    """As it was stored."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known, and when."""

    taken: Moment
    at_end: bool
    """Its agent ended after this: it has shown nothing newer."""
    sources: Mapping[str, SourceMemory]
    """By what they are: the same log again has the same key."""


def boot_id() -> str:
    """Of the system's start; empty if it can't be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# --- the file's content


def encode(memory: Memory) -> bytes:
    """The file that holds it."""
    taken = memory.taken
    value = {
        "taken": [taken.monotonic_s, taken.unix_s, taken.boot_id],
        "at_end": memory.at_end,
        "sources": {
            key: {"position": to_json(source.position), "pipeline": source.pipeline}
            for key, source in memory.sources.items()
        },
    }
    # Level 1 takes a third of the time of the others, for a tenth more.
    data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
    return b"cuzk-agent-state %d %s\n" % (FORMAT, _digest(data)) + data


def decode(content: bytes) -> Memory:
    """What a file holds. Raises DamagedError or NewerError. What it holds of a pipeline is not looked at."""
    header = _HEADER.match(content)
    if header is None:
        raise DamagedError("it does not begin like one")
    if int(header[1]) > FORMAT:
        raise NewerError(f"it is in format {int(header[1])}, and {FORMAT} is the latest known here")
    data = content[header.end() :]
    if int(header[1]) < 1 or _digest(data) != header[2]:
        raise DamagedError("its content is not what was written")
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_BYTES)
        if not unpacker.eof:
            raise DamagedError("it is too large")
        return _memory(json.loads(text))
    except (ValueError, RecursionError, zlib.error) as error:
        raise DamagedError(f"it makes no sense: {error}") from error


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _memory(value: Any) -> Memory:
    taken, at_end, sources = _fields(value, taken=list, at_end=bool, sources=dict)
    if list(map(type, taken)) != [float, float, str]:
        raise ValueError("when it was taken is not told")
    found = {}
    for key, source in sources.items():
        position, pipeline = _fields(source, position=dict, pipeline=dict)
        found[key] = SourceMemory(from_json(position), pipeline)
    return Memory(Moment(*taken), at_end, found)


def _fields(value: Any, **kinds: type) -> list[Any]:
    if type(value) is not dict or {name: type(one) for name, one in value.items()} != kinds:
        raise ValueError(f"expected {', '.join(kinds)}")
    return [value[name] for name in kinds]


# --- the file


class StateFile:
    """A file that one agent at a time reads and replaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def load(self) -> Memory | None:
        """What the last agent left. None if there is nothing, or nothing of use, of which a warning tells. What is of
        no use is set aside."""
        try:
            self._take()
            memory = decode(_read(self.path))
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self.set_aside("damaged", f"it is damaged ({error})")
        except NewerError as error:
            self.set_aside("newer", f"it was written by a newer agent ({error})")
        except OSError as error:
            logger.warning("the state in %s can't be used: %s", self.path, _reason(error))
        else:
            return memory
        return None

    def set_aside(self, kind: str, why: str, *, copy: bool = False) -> None:
        """Keeps the file under another name, or a copy of it."""
        aside = self.path.with_name(f"{self.path.name}.{kind}")
        try:
            if copy:
                aside.unlink(missing_ok=True)
                os.link(self.path, aside)
            else:
                self.path.replace(aside)
        except OSError as error:
            logger.warning("the state in %s is not used: %s; it can't be set aside: %s", self.path, why, _reason(error))
        else:
            logger.warning("the state in %s is not used: %s; it is kept as %s", self.path, why, aside)

    def write(self, content: bytes, *, sync: bool) -> None:
        """Replaces the file; whoever reads it finds the old or the new one. With `sync` the new one outlives the
        machine. Raises OSError."""
        if self._lock is None:
            self._take()
            with contextlib.suppress(FileNotFoundError):
                _read(self.path)
                self.set_aside("foreign", "another agent wrote it meanwhile")
        with contextlib.suppress(FileNotFoundError):
            # A device or a pipe would be replaced as well; a directory is not.
            mode = self.path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.EINVAL, "it is no regular file")
        temporary = self.path.with_name(self.path.name + ".new")
        # Not what a link of that name points to, nor readable by others: it names jobs.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            try:
                left = memoryview(content)
                while left:
                    left = left[os.write(descriptor, left) :]
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if sync:
            self._sync(self.path.parent)

    def sync(self) -> None:
        """Makes what was written outlive the machine. Raises OSError."""
        self._sync(self.path)
        self._sync(self.path.parent)

    def close(self) -> None:
        """Lets another agent have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        if self._lock is not None:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise OSError(errno.EBUSY, "another agent uses it; each needs its own (--state)") from error
            raise
        self._lock = descriptor

    @staticmethod
    def _sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some file systems can't do it to a directory, and need not.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return file.read(MAX_BYTES)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# --- keeping it


@dataclass(frozen=True, slots=True)
class Written:
    """What the file holds."""

    size_bytes: int
    unix_s: float
    """When it was true."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How the keeping goes."""

    writes: int = 0
    errors: int = 0
    """How many of them failed."""
    seconds: float = 0.0
    """All the time that went into them, but for waiting for the disk."""
    last: Written | None = None
    fault: str = ""
    """Why the last one could not be written, empty if it could."""


@dataclass(frozen=True, slots=True)
class _Given(Generic[T]):
    value: T
    memory: Memory
    asked: bool
    sync: bool
    spent_s: float


@dataclass(slots=True)
class _Board(Generic[T]):
    """What the threads share, under one lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    asked: bool = False
    given: _Given[T] | None = None
    kept: tuple[float, T] | None = None
    ended: bool = False
    keeping: Keeping = field(default_factory=Keeping)


class Keeper(Generic[T]):
    """Writes the state in a thread of its own. One thread gives it, with a value of which it is the state; others ask
    for a value whose state is kept."""

    def __init__(self, file: StateFile, clock: Clock, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in the thread if that ends unexpectedly."""
        self._file = file
        self._clock = clock
        self._on_failure = on_failure
        self._board = _Board[T]()
        self._taken_s: float | None = None
        self._synced_s = clock.monotonic_s()
        self._cost_s = 0.0
        self._thread = threading.Thread(target=self._write_all, name="state", daemon=True)

    def start(self) -> None:
        """Begins to write what is given."""
        self._thread.start()

    @property
    def keeping(self) -> Keeping:
        """How it goes."""
        return self._board.keeping

    # --- whoever wants to show a value

    def ask(self, wake: Callable[[], None], timeout_s: float) -> T | None:
        """A value of now whose state is kept; `wake` wakes whoever gives it. After `timeout_s`, or when the end has
        come, the last one whose state is kept. A state that can't be kept counts as kept: `keeping` tells."""
        since_s = self._clock.monotonic_s() - FRESH_S
        board = self._board

        def is_fresh() -> bool:
            return board.kept is not None and board.kept[0] >= since_s

        with board.changed:
            if not (is_fresh() or board.ended):
                board.asked = True
                wake()
                board.changed.wait_for(lambda: board.ended or is_fresh(), timeout_s)
            return board.kept[1] if board.kept else None

    # --- whoever has the state

    def is_due(self) -> bool:
        """Whether the state should be given now."""
        board, now_s = self._board, self._clock.monotonic_s()
        with board.changed:
            if board.given is not None:
                return False
            asked = board.asked
        if self._taken_s is None:
            return True
        if asked:
            rest_s = min(self._cost_s * _SHARE_ASKED, _REST_MAX_S)
        else:
            rest_s = min(max(self._cost_s * _SHARE, PERIOD_S), _PERIOD_MAX_S)
        return now_s - self._taken_s >= rest_s

    def give(self, value: T, take: Callable[[Moment], Memory]) -> None:
        """Has the state written that `take` gives, and then shows `value`, of which it is the state."""
        moment = self._now()
        board = self._board
        with board.changed:
            # Whoever asked before now is answered by this one.
            asked, board.asked = board.asked, False
        memory = take(moment)
        sync = moment.monotonic_s - self._synced_s >= PERIOD_S
        self._synced_s = moment.monotonic_s if sync else self._synced_s
        self._taken_s = moment.monotonic_s
        with board.changed:
            board.given = _Given(value, memory, asked, sync, self._clock.monotonic_s() - moment.monotonic_s)
            board.changed.notify_all()

    def end(self, take: Callable[[Moment], Memory] | None, timeout_s: float) -> None:
        """Writes the last state, if there is one, once what was given before is written. Whoever asks from now on gets
        what is kept by then."""
        with self._board.changed:
            self._board.ended = True
            self._board.changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if take is not None and not self._thread.is_alive():
            memory = take(self._now())
            try:
                self._file.write(encode(memory), sync=True)
            except OSError as error:
                logger.warning("the state can't be written to %s: %s", self._file.path, _reason(error))
        self._file.close()

    def _now(self) -> Moment:
        return Moment(self._clock.monotonic_s(), self._clock.unix_s(), boot_id())

    # --- the thread that writes

    def _write_all(self) -> None:
        try:
            while self._write_one():
                pass
        except Exception:
            logger.exception("writing the state ended unexpectedly")
            self._on_failure()

    def _write_one(self) -> bool:
        board = self._board
        with board.changed:
            board.changed.wait_for(lambda: board.given is not None or board.ended)
            given = board.given
        if given is None:
            return False
        began_s = self._clock.monotonic_s()
        content = encode(given.memory)
        self._cost_s = given.spent_s + self._clock.monotonic_s() - began_s
        # Nobody who asked waits for the disk.
        self._attempt(lambda: self._file.write(content, sync=given.sync and not given.asked))
        written = Written(len(content), given.memory.taken.unix_s)
        with board.changed:
            board.keeping = replace(
                board.keeping,
                writes=board.keeping.writes + 1,
                seconds=board.keeping.seconds + self._cost_s,
                last=board.keeping.last if board.keeping.fault else written,
            )
            board.kept = given.memory.taken.monotonic_s, given.value
            board.changed.notify_all()
        if given.sync and given.asked and not board.keeping.fault:
            self._attempt(self._file.sync)
        with board.changed:
            board.given = None
            board.changed.notify_all()
        return True

    def _attempt(self, what: Callable[[], None]) -> None:
        before, fault = self._board.keeping, ""
        try:
            what()
        except OSError as error:
            fault = _reason(error)
            if fault != before.fault:
                logger.warning("the state can't be written to %s: %s", self._file.path, fault)
        else:
            if before.fault:
                logger.info("the state is written to %s again", self._file.path)
        with self._board.changed:
            self._board.keeping = replace(before, errors=before.errors + bool(fault), fault=fault)
