"""Lets the thread that reads the logs sleep until there may be something to read."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

BUSY_POLL_S = 0.02
"""How long a wait takes while a log is being written to."""
QUIET_POLL_S = 0.25
"""How long a wait takes at most: events are hints, and may fail to come."""
BUSY_S = 2.0
"""A log counts as busy for so long after a write was noticed."""
RECHECK_S = 5.0
"""How often it is looked whether the watches still are where they should be."""
MISSES = 3
"""Events are taken not to come when so many writes in a row were found without one."""

_DIRECTORY_EVENTS: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
]
_WRITE_EVENTS: list[type[FileSystemEvent]] = [FileModifiedEvent]

_log = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a watch was taken back while its thread was waiting for an event: watchdog takes that for an error."""
    return "when the thread is inactive" not in record.getMessage()


logging.getLogger("watchdog.observers.inotify").addFilter(_is_news)


class Method(StrEnum):
    """What wakes the thread that reads the logs."""

    EVENTS = "events"
    """The kernel tells of writes to a quiet log; polling is beneath."""
    POLL = "poll"
    """Only looking every now and then."""


@dataclass(frozen=True, slots=True)
class WakerState:
    """How waking goes."""

    method: Method
    detail: str
    """Why only by polling, if it is; one line."""


class Waker:
    """`wait()` returns when a log may have grown, appeared or moved, when `wake()` was called, or when time is up.

    What comes and goes in the logs' directories is watched always; writes are watched only while the logs are quiet,
    because every write to a busy log would be an event of its own: after a write, `wait()` polls for a while. Where
    nothing can be watched (no inotify instances or watches left, no directory) it polls, says so once in the log, and
    tries again now and then. Where watching works and events don't come (network file systems, a queue that ran over)
    that shows by writes being `found()` by polling. `wake()` may come from any thread; all else belongs to one.
    """

    def __init__(self, paths: Iterable[Path], monotonic: Callable[[], float]) -> None:
        self._paths = list(paths)
        self._monotonic = monotonic
        self._awake = threading.Event()
        complaints: dict[str, str] = {}
        self._moves = _Watches(_DIRECTORY_EVENTS, self._on_move, complaints)
        self._writes = _Watches(_WRITE_EVENTS, self._on_write, complaints)
        self._names: frozenset[str] = frozenset()
        """Where the logs are, with and without symbolic links resolved."""
        self._directories: frozenset[str] = frozenset()
        self._written = False
        self._unwoken = False
        """The last wait was quiet, and ended because its time was up."""
        self._missed = 0
        """Writes found in a row of which no event told."""
        self._busy_until_s: float | None = None
        self._recheck_at_s = monotonic()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there may be something to read, at most `timeout_s` seconds, and never beyond the poll."""
        now_s = self._monotonic()
        if self._watch(now_s):
            # A write between the last read and the new watch would go unnoticed.
            return
        is_quiet = self._busy_until_s is None
        poll_s = QUIET_POLL_S if is_quiet else BUSY_POLL_S
        woken = self._awake.wait(max(0.0, min(timeout_s, poll_s)))
        self._awake.clear()
        self._unwoken = is_quiet and not woken

    def add(self, path: Path) -> None:
        """One more log."""
        self._paths.append(path)
        self._recheck_at_s = self._monotonic()

    def found(self) -> None:
        """After the last wait, something had been written to the logs."""
        if self._unwoken:
            self._unwoken = False
            self._missed += 1
            if self._missed == MISSES and self._directories:
                _log.warning("%s: no events come of writes, polling instead", ", ".join(sorted(self._directories)))

    def state(self) -> WakerState:
        """How waking goes."""
        unwatched = sorted(self._directories - self._writes.watched) if self._busy_until_s is None else []
        unwatched = unwatched or sorted(self._directories - self._moves.watched)
        if unwatched:
            return WakerState(Method.POLL, self._moves.complaints.get(unwatched[0], f"{unwatched[0]} is not watched"))
        if self._missed >= MISSES:
            return WakerState(Method.POLL, "no events come of writes")
        return WakerState(Method.EVENTS, "") if self._directories else WakerState(Method.POLL, "")

    def wake(self) -> None:
        """End the present wait, or else the next one, at once."""
        self._awake.set()

    def close(self) -> None:
        """Stop watching, for good."""
        self._moves.close()
        self._writes.close()

    def _watch(self, now_s: float) -> bool:
        """Keep the watches in order; True if writes are watched that were not watched before."""
        if self._written:
            self._written = False
            self._busy_until_s = now_s + BUSY_S
            self._writes.update(frozenset())
        quiet_again = self._busy_until_s is not None and now_s >= self._busy_until_s
        if quiet_again:
            self._busy_until_s = None
        if now_s >= self._recheck_at_s:
            self._recheck_at_s = now_s + RECHECK_S
            self._find_directories()
            self._moves.update(self._directories)
        elif not quiet_again:
            return False
        return self._busy_until_s is None and self._writes.update(self._directories)

    def _find_directories(self) -> None:
        names = set()
        for path in self._paths:
            # watchdog doesn't follow links: a directory must be named by its real path.
            names.add(os.path.join(os.path.realpath(path.parent), path.name))
            names.add(os.path.realpath(path))
        self._names = frozenset(names)
        self._directories = frozenset(os.path.dirname(name) for name in names)

    def _on_move(self, event: FileSystemEvent) -> None:
        if event.src_path in self._names or event.dest_path in self._names:
            # It may be a link that leads elsewhere now.
            self._recheck_at_s = self._monotonic()
            self._awake.set()

    def _on_write(self, _event: FileSystemEvent) -> None:
        # Whichever file it is: the events of a busy neighbour cost as much as those of a busy log.
        self._written = True
        self._missed = 0
        self._awake.set()


class _Watches(FileSystemEventHandler):
    """Watches of one kind of event, on directories that come and go.

    An observer of its own for each kind: two watches of one directory in the same observer would share the kernel's
    event mask, which belongs to whoever set it last.
    """

    def __init__(
        self,
        events: list[type[FileSystemEvent]],
        on_event: Callable[[FileSystemEvent], None],
        complaints: dict[str, str],
    ) -> None:
        self._events = events
        self._on_event = on_event
        self._observer: BaseObserver | None = None
        self._watched: dict[str, tuple[ObservedWatch, tuple[int, int]]] = {}
        self.complaints = complaints
        """What is wrong, by directory; the log was told, and is told once."""

    @property
    def watched(self) -> frozenset[str]:
        """The directories that are watched."""
        return frozenset(self._watched)

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._on_event(event)

    def update(self, directories: frozenset[str]) -> bool:
        """Watch these directories and no others; renew watches that have died. True if any was added."""
        if self._observer is not None and not self._observer.is_alive():
            self.close()
        for directory in list(self._watched):
            if directory not in directories or not self._is_well(directory):
                self._unwatch(directory)
        added = [directory for directory in directories - self._watched.keys() if self._try_to_watch(directory)]
        return bool(added)

    def close(self) -> None:
        """Stop watching; `update()` begins anew."""
        self._watched.clear()
        if self._observer is not None:
            self._observer.stop()
            if self._observer.is_alive():
                self._observer.join()
            self._observer = None

    def _is_well(self, directory: str) -> bool:
        """The emitter of a directory that was removed is dead, while its observer lives on; the one of a directory
        that was replaced watches the old one."""
        watch, identity = self._watched[directory]
        assert self._observer is not None
        alive = any(emitter.watch == watch and emitter.is_alive() for emitter in self._observer.emitters)
        try:
            return alive and _identity(directory) == identity
        except OSError:
            return False

    def _unwatch(self, directory: str) -> None:
        watch, _ = self._watched.pop(directory)
        assert self._observer is not None
        self._observer.unschedule(watch)

    def _try_to_watch(self, directory: str) -> bool:
        try:
            identity = _identity(directory)
            if self._observer is None:
                self._observer = Observer()
                self._observer.start()
            watch = self._observer.schedule(self, directory, event_filter=self._events)
        except (OSError, RuntimeError) as error:
            # RuntimeError is what Python raises when it can't start a thread.
            if directory not in self.complaints:
                self.complaints[directory] = f"cannot watch {directory}: {error}"
                _log.warning("cannot watch %s, polling instead: %s", directory, error)
            return False
        self.complaints.pop(directory, None)
        self._watched[directory] = (watch, identity)
        return True


def _identity(directory: str) -> tuple[int, int]:
    about = os.stat(directory)
    return about.st_dev, about.st_ino
