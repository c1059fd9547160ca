"""Follows one path through rotations and truncations, and gives whole lines.

The lines of a path are one stream, though it runs through several files. A file that was renamed or deleted is read to
its end before the one that took its place; the writer may be slow to move, or never move at all, so the old file counts
as current for as long as the new one is empty. A file left behind is still looked at for a while. Files that came and
went between two looks, or while nobody looked, are found beside the log, by the names that rotation gives.

Nothing tells that a file was truncated and has grown again since, but its content: with every read, its first bytes and
the last ones before the read are compared to what they were. What a truncation took may live on in a copy beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from cuzk_agent.log.envelope import MAX_RECORD_BYTES, Envelope, Unwrapper
from cuzk_agent.log.held import HeldFile, at_path, find, find_copy, is_copy, rotated_after
from cuzk_agent.log.position import FINGERPRINT_BYTES, FileMark, FilePosition, Totals
from cuzk_agent.log.siblings import FileIdentity, PlainFile, identity_of, open_handle
from cuzk_agent.log.source import Batch, FollowState, ReadStats
from cuzk_agent.log.splitter import LineSplitter

LINGER_S = 60.0
"""A file left behind is closed when it has given nothing for so long."""
DELETED_HOLD_S = 600.0
"""A deleted file that nothing replaces is closed when it has given nothing for so long: while it is open its disk
space isn't freed, and a writer may still be filling it."""
MAX_OPEN_FILES = 8
"""Files of one path held open at a time. Past that, new ones wait at the path until older ones have been read."""
CONTAINER_LAG_S = 1.75
"""Lines may take so long through a container runtime to its log, on top of what they may take to a file."""

_READ_BYTES = 1 << 18
_MAX_PASSES = 3


class FileFollower:
    """Follows the file at `path`, which may not exist yet, and whatever takes its place there.

    `start` says where to begin in a file that is there at construction; one that comes later is new, and is read from
    its start. To begin at the end, `warm_up_bytes` of what is before it are read as `past`. With `resume`, neither
    holds: reading goes on there, in that file and all that came after it. Nothing about the file raises: what is wrong
    with it is in `stats()`, and each `read()` tries again.
    """

    def __init__(
        self,
        path: Path,
        start: Literal["end", "start"],
        monotonic: Callable[[], float],
        *,
        resume: FilePosition | None = None,
        warm_up_bytes: int = 0,
    ) -> None:
        self._path = path
        self._monotonic = monotonic
        self._skip_existing = start == "end" and resume is None
        self._warm_up_bytes = warm_up_bytes
        self._files: list[HeldFile] = []
        """From the oldest to the one at the path: files left behind, the current one, files not begun."""
        self._opened_before = False
        self._reached_end = False
        self._past: tuple[HeldFile, int] | None = None
        """The file that the past is read from, and where it ends there."""
        self._state = FollowState.MISSING
        self._detail = ""
        self._totals = Totals() if resume is None else replace(resume.totals)
        """Without the NULs of files that are open, which are in their splitters."""
        self._unwrapper = Unwrapper(resume.unwrapper if resume is not None else None)
        self._overlong_before = self._totals.overlong_lines
        now_s = monotonic()
        if resume is not None:
            self._resume(resume, now_s)
        self._look_at_path(now_s)

    def read(self, max_bytes: int = 1 << 20) -> Batch:
        """Read what there is, at most `max_bytes`; never waits. Without a file the batch is empty, and not `at_end`."""
        now_s = self._monotonic()
        path_seen = self._look_at_path(now_s)
        past = self._past is not None
        lines: list[bytes] = []
        budget, at_end, again = max_bytes, False, True
        for _ in range(_MAX_PASSES):
            budget, at_end, again = self._read_files(budget, now_s, lines)
            if not again:
                break
        at_end = at_end and path_seen and not again
        self._close_what_is_done(now_s)
        self._reached_end = self._reached_end or at_end
        given, times = self._unwrapper.feed(lines)
        self._totals.lines += len(given)
        lag_s = CONTAINER_LAG_S if self._unwrapper.envelope in {Envelope.DOCKER, Envelope.CRI} else 0.0
        return Batch(
            tuple(given),
            now_s - lag_s,
            at_end,
            line_unix_s=None if times is None else tuple(times),
            past=past,
        )

    def stats(self) -> ReadStats:
        """Totals so far, and the state as of the last `read()`; the lag is as of now."""
        unread = [file.unread_bytes() for file in self._files]
        totals = self._all_totals()
        return ReadStats(
            state=self._state,
            detail=self._detail,
            caught_up=self._reached_end and self._state is FollowState.FOLLOWING,
            lines=totals.lines,
            read_bytes=totals.read_bytes,
            lag_bytes=sum(unread) if unread and self._state is FollowState.FOLLOWING else None,
            rotations=totals.rotations,
            truncations=totals.truncations,
            lost_bytes=totals.lost_bytes,
            overlong_lines=totals.overlong_lines,
            nul_bytes=totals.nul_bytes,
            envelope=self._unwrapper.envelope,
        )

    def position(self) -> FilePosition:
        """Where the last `read()` ended."""
        return FilePosition(tuple(file.mark() for file in self._files), self._unwrapper.state(), self._all_totals())

    def close(self) -> None:
        """Close every file, for good; the totals stay."""
        for file in list(self._files):
            self._close(file)

    def _all_totals(self) -> Totals:
        return replace(
            self._totals,
            overlong_lines=self._overlong_before + self._unwrapper.overlong_lines,
            nul_bytes=self._totals.nul_bytes + sum(file.splitter.nul_bytes for file in self._files),
        )

    # -- the path

    def _look_at_path(self, now_s: float) -> bool:
        """See which file is at the path, and open it if it is a new one. False if there is one that isn't held."""
        try:
            about = os.stat(self._path)
            identity = identity_of(about)
            held = next((file for file in self._files if file.identity == identity), None)
            if held is None:
                if not self._have_room():
                    return False
                self._open_what_is_new(now_s)
            elif held.failed or _is_stale(held, about):
                self._reopen(held)
            else:
                self._make_newest(held, now_s)
        except FileNotFoundError as error:
            # Whatever comes to the path from now on is new.
            self._skip_existing = False
            if self._files:
                # It may have come and gone since the last look.
                newest = self._files[-1]
                self._open_later(len(self._files), newest.log, newest.identity, newest.mtime_ns(), (), now_s)
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

    def _open_what_is_new(self, now_s: float) -> None:
        """Open the file at the path, and before it whatever came between it and the newest that is held."""
        handle = PlainFile(self._path)
        file = HeldFile(handle, Path(os.path.realpath(self._path)), now_s)
        try:
            if self._skip_existing:
                end = handle.unread(0)
                file.start_at(max(0, end - self._warm_up_bytes))
                if file.position < end:
                    self._past = file, end
        except OSError:
            handle.close()
            raise
        self._skip_existing = False
        if self._files:
            newest = self._files[-1]
            index = len(self._files)
            self._open_later(index, newest.log, newest.identity, newest.mtime_ns(), {file.identity}, now_s)
        self._insert(len(self._files), file)

    def _insert(self, index: int, file: HeldFile) -> None:
        self._totals.rotations += self._opened_before
        self._opened_before = True
        self._files.insert(index, file)

    def _open_later(
        self,
        index: int,
        log: Path,
        identity: FileIdentity,
        mtime_ns: int,
        exclude: Iterable[FileIdentity],
        now_s: float,
        *,
        up_to_known: bool = False,
    ) -> None:
        """Open what `log` was rotated into after that file, and put it in at `index`."""
        known = {file.identity for file in self._files} | {identity, *exclude}
        for sibling in rotated_after(log, identity, mtime_ns, self._path):
            if sibling.identity in known:
                if up_to_known:
                    break
                continue
            known.add(sibling.identity)
            try:
                file = HeldFile(open_handle(sibling.path), log, now_s)
                if any(is_copy(file.handle, held) for held in self._files):
                    file.handle.close()
                    continue
            except OSError:
                # It has just been moved again, or packed, or may not be read: whether it is new can't be told.
                continue
            self._insert(index, file)
            index += 1

    def _reopen(self, file: HeldFile) -> None:
        """A descriptor may be stale (a network file system that came back, an overlay that copied the file up) where
        the file is well."""
        handle = PlainFile(self._path)
        if handle.identity != file.identity:
            handle.close()
            return
        file.handle.close()
        file.handle = handle

    def _make_newest(self, file: HeldFile, now_s: float) -> None:
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

    # -- going on after a restart

    def _resume(self, position: FilePosition, now_s: float) -> None:
        """Find the files of a position again, and all that came after them."""
        self._opened_before = bool(position.files)
        file = None
        behind: list[tuple[HeldFile, FileMark, bool]] = []
        for mark in position.files:
            file = find(mark, self._path, {one.identity for one in self._files}, now_s)
            if file is not None:
                self._files.append(file)
                if not file.handle.is_packed:
                    self._count_lost(mark, file.position + file.unread_bytes())
                if file.identity != FileIdentity(mark.device, mark.inode):
                    # A copy: what was copied has been truncated, and may have been written to and rotated since.
                    behind.append((file, mark, True))
            elif not mark.offset and self._files:
                # Of a file that was not begun nothing may be known.
                behind.append((self._files[-1], mark, False))
            else:
                # A line that was begun in it is lost with it.
                self._count_lost(mark, 0)
                self._totals.lost_bytes += len(mark.splitter.pending)
        self._open_all_behind(behind, now_s)
        if position.files:
            mark = position.files[-1]
            # What has its inode now is another file, or has other content.
            log, identity, mtime_ns = Path(mark.log), FileIdentity(0, 0), mark.mtime_ns
            if file is not None:
                log, identity, mtime_ns = file.log, file.identity, file.mtime_ns()
            self._open_later(len(self._files), log, identity, mtime_ns, at_path(self._path), now_s)

    def _open_all_behind(self, behind: list[tuple[HeldFile, FileMark, bool]], now_s: float) -> None:
        """Open what lies behind these files; the flag says that the mark's file is known."""
        unfound: list[FileMark] = []
        opened = 0
        for before, mark, is_found in behind:
            count = self._open_behind(before, mark, now_s)
            if not is_found:
                unfound.append(mark)
                opened += count
        # Several that were not begun may lie in a row.
        for mark in unfound[opened:]:
            self._count_lost(mark, 0)

    def _open_behind(self, before: HeldFile, mark: FileMark, now_s: float) -> int:
        """Open what lies between a file and the next one that is known, and is what a mark tells of; how many."""
        index, count = self._files.index(before) + 1, len(self._files)
        self._open_later(index, before.log, before.identity, before.mtime_ns(), (), now_s, up_to_known=True)
        found = self._files[index : index + len(self._files) - count]
        for one in found:
            one.left_behind = mark.left_behind
        return len(found)

    def _count_lost(self, mark: FileMark, size: int) -> None:
        """Of a file there is no more than so much."""
        self._totals.lost_bytes += max(0, mark.size - max(mark.offset, size))

    # -- the files

    def _current(self) -> HeldFile | None:
        return next((file for file in self._files if not file.left_behind), None)

    def _read_files(self, budget: int, now_s: float, lines: list[bytes]) -> tuple[int, bool, bool]:
        """Read every file on; the budget that is left, whether the end of them all was seen, and whether files were
        put in before one that was to be read."""
        # What holds data is asked before anything is read: an old file read to its end *after* its successor had
        # data is complete, as far as one writer goes.
        unread = {id(file): file.unread_bytes() for file in self._files}
        at_end = bool(self._files)
        for index, file in enumerate(self._files):
            if not (file.left_behind or file is self._current()):
                break
            count = len(self._files)
            budget, file_ended = self._read_file(file, budget, now_s, lines)
            if len(self._files) > count:
                return budget, False, True
            successor = next((later for later in self._files[index + 1 :] if unread[id(later)]), None)
            if not file_ended and not (file.failed and successor):
                at_end = False
                if not file.left_behind:
                    break
            elif successor and not file.left_behind:
                self._move_on(index, self._files.index(successor), now_s)
        return budget, at_end, False

    def _read_file(self, file: HeldFile, budget: int, now_s: float, lines: list[bytes]) -> tuple[int, bool]:
        """Read one file on; return the budget that is left, and whether its end was seen."""
        try:
            if self._look_at_file(file, now_s):
                return budget, False
            while (size := self._allowed(file, budget)) > 0:
                chunk = file.read_on(size)
                file.failed = False
                if chunk is None:
                    if self._start_over(file, now_s):
                        return budget, False
                    continue
                if not chunk:
                    return budget, True
                budget -= len(chunk)
                file.quiet_since_s = now_s
                self._totals.read_bytes += len(chunk)
                lines += file.splitter.feed(chunk)
                if not chunk.strip(b"\0"):
                    # A hole can be gigabytes long: it is counted without being read, where its end is known.
                    self._totals.nul_bytes += file.skip_hole()
        except OSError as error:
            file.failed = True
            file.seen_size = max(file.seen_size, file.found[0])
            if not file.left_behind:
                self._set_state(FollowState.UNREADABLE, _describe(self._path, error))
        return budget, False

    def _allowed(self, file: HeldFile, budget: int) -> int:
        """How much to read of it at once. A read doesn't go beyond the past."""
        size = min(budget, _READ_BYTES)
        if self._past is not None and self._past[0] is file:
            left = self._past[1] - file.position
            if left <= 0:
                self._past = None
            size = min(size, left)
        return size

    def _look_at_file(self, file: HeldFile, now_s: float) -> bool:
        """Notice that a file was deleted, or became shorter. True if a copy of what it held is to be read before."""
        about = file.handle.about()
        if about.st_nlink == 0 and not file.deleted:
            file.deleted = True
            file.quiet_since_s = now_s
        copied = False
        if file.handle.is_packed:
            return copied
        if about.st_size < file.seen_size:
            if about.st_size >= FINGERPRINT_BYTES == len(file.head) and file.has_head():
                self._cut(file, about.st_size)
            else:
                copied = self._start_over(file, now_s)
        file.found = about.st_size, about.st_mtime_ns
        return copied

    def _cut(self, file: HeldFile, size: int) -> None:
        """The end of the file is gone, what is left of it is as it was."""
        self._totals.truncations += 1
        self._totals.lost_bytes += file.seen_size - max(size, file.position)
        if size < file.position:
            # Nobody knows what stood between the line begun and what comes now.
            self._totals.lost_bytes += file.splitter.reset() + self._unwrapper.reset()
            file.go_to(size)
        file.seen_size = size

    def _start_over(self, file: HeldFile, now_s: float) -> bool:
        """The file was truncated: what it holds now is new. What it held may have been copied first: then True, and the
        copy is read before."""
        self._totals.truncations += 1
        self._past = None
        copy = None if file.left_behind or file.handle.is_packed else self._copy_of(file, now_s)
        if copy is None:
            self._totals.lost_bytes += file.seen_size - file.position + file.splitter.reset()
            if not file.left_behind:
                self._totals.lost_bytes += self._unwrapper.reset()
            file.start_over()
            return False
        if not copy.handle.is_packed:
            self._totals.lost_bytes += max(0, file.seen_size - copy.position - copy.unread_bytes())
        copy.splitter, file.splitter = file.splitter, LineSplitter(MAX_RECORD_BYTES)
        file.start_over()
        index = self._files.index(file)
        self._files.insert(index, copy)
        self._open_later(index + 1, copy.log, copy.identity, copy.mtime_ns(), (), now_s)
        return True

    def _copy_of(self, file: HeldFile, now_s: float) -> HeldFile | None:
        held = {one.identity for one in self._files}
        return find_copy(file.mark(), held, now_s)

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
                self._totals.lost_bytes += file.splitter.reset() + max(0, file.seen_size - file.position)
                self._close(file)

    def _close(self, file: HeldFile) -> None:
        self._files.remove(file)
        file.handle.close()
        self._totals.nul_bytes += file.splitter.nul_bytes


def _is_done(file: HeldFile, now_s: float) -> bool:
    quiet_s = now_s - file.quiet_since_s
    if file.left_behind:
        return file.failed or (quiet_s > LINGER_S and not file.unread_bytes())
    return file.deleted and quiet_s > DELETED_HOLD_S


def _is_stale(file: HeldFile, at_path: os.stat_result) -> bool:
    return not file.handle.is_packed and file.handle.about().st_size < at_path.st_size


def _describe(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
