"""Follows one path through rotations and truncations, and gives whole lines.

The lines of a path are one stream, though it runs through several files. A file that was renamed or deleted is read to
its end before the one that took its place; the writer may be slow to move, or never move at all, so the old file counts
as current for as long as the new one is empty. A file left behind is still looked at for a while.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from cuzk_agent.log.source import Batch, FollowState, ReadStats
from cuzk_agent.log.splitter import LineSplitter

LINGER_S = 10.0
"""A file left behind is closed when it has given nothing for so long."""
DELETED_HOLD_S = 600.0
"""A deleted file that nothing replaces is closed when it has given nothing for so long: while it is open its disk
space isn't freed, and a writer may still be filling it."""
MAX_OPEN_FILES = 8
"""Files of one path held open at a time. Past that, new ones wait at the path until older ones have been read."""

_READ_BYTES = 1 << 18


class FileIdentity(NamedTuple):
    """Which file it is, whatever its name. Holds while the file is open: an inode in use is not given out again."""

    device: int
    inode: int


class _OpenFile:
    """One file held open: how far it is read, and the line begun in it."""

    __slots__ = (
        "deleted",
        "descriptor",
        "failed",
        "identity",
        "left_behind",
        "position",
        "quiet_since_s",
        "seen_size",
        "splitter",
    )

    def __init__(self, descriptor: int, identity: FileIdentity, now_s: float) -> None:
        self.descriptor = descriptor
        self.identity = identity
        self.position = 0
        self.seen_size = 0
        """The size at the last look; what a truncation may have taken is known from it."""
        self.splitter = LineSplitter()
        self.quiet_since_s = now_s
        """When it last gave something, or got into its present plight."""
        self.left_behind = False
        """The stream has gone on to a newer file."""
        self.deleted = False
        self.failed = False
        """The last read raised an error."""

    def start_at_end(self) -> None:
        """Take what the file holds now as read. A line that is begun there is not reported."""
        self.position = self.seen_size = os.fstat(self.descriptor).st_size
        if self.position and os.pread(self.descriptor, 1, self.position - 1) != b"\n":
            self.splitter.skip_line()

    def unread_bytes(self) -> int:
        """What it holds beyond `position`; 0 as well where that can't be told."""
        try:
            return max(0, os.fstat(self.descriptor).st_size - self.position)
        except OSError:
            return 0


class FileFollower:
    """Follows the file at `path`, which may not exist yet, and whatever takes its place there.

    `start` says where to begin in a file that is there at construction; one that comes later is new, and is read from
    its start. Nothing about the file raises: what is wrong with it is in `stats()`, and each `read()` tries again.
    `read()`, `stats()` and `close()` belong to one thread.
    """

    def __init__(self, path: Path, start: Literal["end", "start"], monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self._skip_existing = start == "end"
        self._files: list[_OpenFile] = []
        """From the oldest to the one at the path: files left behind, the current one, files not begun."""
        self._opened_before = False
        self._reached_end = False
        self._state = FollowState.MISSING
        self._detail = ""
        self._lines = self._read_bytes = self._rotations = self._truncations = self._lost_bytes = 0
        # Of files that are closed, and of holes passed over; those of open files are in their splitters.
        self._overlong_lines = self._nul_bytes = 0
        self._look_at_path(monotonic())

    def read(self, max_bytes: int = 1 << 20) -> Batch:
        """Read what there is, at most `max_bytes`; never waits. Without a file the batch is empty, and not `at_end`."""
        now_s = self._monotonic()
        path_seen = self._look_at_path(now_s)
        # What holds data is asked before anything is read: an old file read to its end *after* its successor had
        # data is complete, as far as one writer goes.
        unread = {id(file): file.unread_bytes() for file in self._files}
        lines: list[bytes] = []
        at_end = path_seen and bool(self._files)
        budget = max_bytes
        for index, file in enumerate(self._files):
            if not (file.left_behind or file is self._current()):
                break
            budget, file_ended = self._read_file(file, budget, now_s, lines)
            successor = next((later for later in self._files[index + 1 :] if unread[id(later)]), None)
            if not file_ended and not (file.failed and successor):
                at_end = False
                if not file.left_behind:
                    break
            elif successor and not file.left_behind:
                self._move_on(index, self._files.index(successor), now_s)
        self._close_what_is_done(now_s)
        self._reached_end = self._reached_end or at_end
        self._lines += len(lines)
        return Batch(tuple(lines), now_s, at_end)

    def stats(self) -> ReadStats:
        """Totals so far, and the state as of the last `read()`; the lag is as of now."""
        unread = [file.unread_bytes() for file in self._files]
        return ReadStats(
            state=self._state,
            detail=self._detail,
            caught_up=self._reached_end and self._state is FollowState.FOLLOWING,
            lines=self._lines,
            read_bytes=self._read_bytes,
            lag_bytes=sum(unread) if unread and self._state is FollowState.FOLLOWING else None,
            rotations=self._rotations,
            truncations=self._truncations,
            lost_bytes=self._lost_bytes,
            overlong_lines=self._overlong_lines + sum(file.splitter.overlong_lines for file in self._files),
            nul_bytes=self._nul_bytes + sum(file.splitter.nul_bytes for file in self._files),
        )

    def close(self) -> None:
        """Close every file, for good; the totals stay."""
        for file in list(self._files):
            self._close(file)

    # -- the path

    def _look_at_path(self, now_s: float) -> bool:
        """See which file is at the path, and open it if it is a new one. False if there is one that isn't held."""
        try:
            identity = _regular_identity(os.stat(self._path))
            held = next((file for file in self._files if file.identity == identity), None)
            if held is None:
                if not self._have_room():
                    return False
                self._open(now_s)
            elif held.failed:
                self._reopen(held)
            else:
                self._make_newest(held, now_s)
        except FileNotFoundError as error:
            # Whatever comes to the path from now on is new.
            self._skip_existing = False
            if self._files:
                self._set_state(FollowState.FOLLOWING, f"{self._path}: gone; still reading the file that was there")
            else:
                self._set_state(FollowState.MISSING, _describe(self._path, error))
            return True
        except OSError as error:
            self._set_state(FollowState.UNREADABLE, _describe(self._path, error))
            return False
        self._set_state(FollowState.FOLLOWING, "")
        return True

    def _set_state(self, state: FollowState, detail: str) -> None:
        self._state = state
        self._detail = detail

    def _have_room(self) -> bool:
        """Whether one more file may be held. Room is made at the cost of an old file that has nothing to read."""
        if len(self._files) < MAX_OPEN_FILES:
            return True
        current = self._current()
        idle = next((file for file in self._files if file is not current and not file.unread_bytes()), None)
        if idle is not None:
            self._close(idle)
        return idle is not None

    def _open(self, now_s: float) -> None:
        descriptor, identity = _open_regular(self._path)
        file = _OpenFile(descriptor, identity, now_s)
        if self._skip_existing:
            try:
                file.start_at_end()
            except OSError:
                os.close(descriptor)
                raise
        self._skip_existing = False
        self._rotations += self._opened_before
        self._opened_before = True
        self._files.append(file)

    def _reopen(self, file: _OpenFile) -> None:
        """A descriptor may be stale for good (a network file system that came back) where the file is well."""
        descriptor, identity = _open_regular(self._path)
        if identity != file.identity:
            os.close(descriptor)
            return
        os.close(file.descriptor)
        file.descriptor = descriptor

    def _make_newest(self, file: _OpenFile, now_s: float) -> None:
        """A file that was renamed away may be renamed back."""
        if file is self._files[-1]:
            return
        if file is self._current():
            # The stream stays in it, so what came between is what is left behind.
            for later in self._files[self._files.index(file) + 1 :]:
                later.left_behind = True
                later.quiet_since_s = now_s
        file.left_behind = False
        self._files.remove(file)
        self._files.append(file)

    # -- the files

    def _current(self) -> _OpenFile | None:
        return next((file for file in self._files if not file.left_behind), None)

    def _read_file(self, file: _OpenFile, budget: int, now_s: float, lines: list[bytes]) -> tuple[int, bool]:
        """Read one file on; return the budget that is left, and whether its end was seen."""
        try:
            self._look_at_file(file, now_s)
            while budget > 0:
                chunk = os.pread(file.descriptor, min(budget, _READ_BYTES), file.position)
                file.failed = False
                if not chunk:
                    return budget, True
                budget -= len(chunk)
                file.position += len(chunk)
                file.quiet_since_s = now_s
                self._read_bytes += len(chunk)
                lines += file.splitter.feed(chunk)
                if not chunk.strip(b"\0"):
                    self._pass_over_hole(file)
        except OSError as error:
            file.failed = True
            if not file.left_behind:
                self._set_state(FollowState.UNREADABLE, _describe(self._path, error))
        return budget, False

    def _pass_over_hole(self, file: _OpenFile) -> None:
        """A hole can be gigabytes long; where the file system knows its end, it is counted without being read."""
        try:
            data_at = os.lseek(file.descriptor, file.position, os.SEEK_DATA)
        except OSError:
            # No data follows (yet), or the file system can't tell.
            return
        self._nul_bytes += data_at - file.position
        file.position = data_at

    def _look_at_file(self, file: _OpenFile, now_s: float) -> None:
        """Notice that a file was truncated or deleted."""
        about = os.fstat(file.descriptor)
        if about.st_size < file.position:
            self._truncations += 1
            # The line begun goes too: nobody knows what stood between it and what comes now.
            self._lost_bytes += file.splitter.reset() + max(0, file.seen_size - file.position)
            file.position = 0
        file.seen_size = about.st_size
        if about.st_nlink == 0 and not file.deleted:
            file.deleted = True
            file.quiet_since_s = now_s

    def _move_on(self, old: int, new: int, now_s: float) -> None:
        """The stream goes on in a newer file.

        A line cut in two by the rotation ends there, so the splitter goes along. Should it end in the old file after
        all, because another writer still holds that, its tail comes as a line of its own.
        """
        for file in self._files[old:new]:
            file.left_behind = True
            file.quiet_since_s = now_s
        before, after = self._files[old], self._files[new]
        before.splitter, after.splitter = after.splitter, before.splitter

    def _close_what_is_done(self, now_s: float) -> None:
        for file in list(self._files):
            if _is_done(file, now_s):
                self._lost_bytes += file.splitter.reset() + max(0, file.seen_size - file.position)
                self._close(file)

    def _close(self, file: _OpenFile) -> None:
        self._files.remove(file)
        os.close(file.descriptor)
        self._overlong_lines += file.splitter.overlong_lines
        self._nul_bytes += file.splitter.nul_bytes


def _is_done(file: _OpenFile, now_s: float) -> bool:
    quiet_s = now_s - file.quiet_since_s
    if file.left_behind:
        return file.failed or (quiet_s > LINGER_S and not file.unread_bytes())
    return file.deleted and quiet_s > DELETED_HOLD_S


def _open_regular(path: Path) -> tuple[int, FileIdentity]:
    """Open a regular file for reading; raises OSError."""
    # O_NONBLOCK: what is there may have become a FIFO since it was looked at, and opening one waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return descriptor, _regular_identity(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise


def _regular_identity(about: os.stat_result) -> FileIdentity:
    """Raises OSError for what isn't a regular file."""
    mode = about.st_mode
    if stat.S_ISREG(mode):
        return FileIdentity(about.st_dev, about.st_ino)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise OSError(errno.EINVAL, f"Is {kind}, not a regular file")


def _describe(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
