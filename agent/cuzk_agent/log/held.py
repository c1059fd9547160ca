"""A file held open: how far it is read, and how it is known again after it was renamed, copied or packed."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from cuzk_agent.log.envelope import MAX_RECORD_BYTES
from cuzk_agent.log.position import FINGERPRINT_BYTES, FileMark, Fingerprint
from cuzk_agent.log.siblings import FileIdentity, Handle, PlainFile, Sibling, beside, identity_of, open_handle, rotated
from cuzk_agent.log.splitter import LineSplitter

_LOOKS = 3
"""So often it is looked for a copy, if files are being renamed or packed meanwhile."""


class HeldFile:
    """One file held open: how far it is read, and the line begun in it."""

    __slots__ = (
        "deleted",
        "failed",
        "found",
        "handle",
        "head",
        "left_behind",
        "log",
        "position",
        "quiet_since_s",
        "seen_mtime_ns",
        "seen_size",
        "splitter",
        "tail",
    )

    def __init__(self, handle: Handle, log: Path, now_s: float) -> None:
        self.handle = handle
        self.log = log
        """Where it was written first, without symbolic links: what it is called now follows from that."""
        self.position = 0
        self.seen_size = 0
        """The size at the last read; what a truncation may have taken is known from it."""
        self.seen_mtime_ns = 0
        self.found = 0, 0
        """Size and time of change as of this look: they count once a read has shown that it is what it was."""
        self.head = b""
        """Its first bytes, as far as they are read."""
        self.tail = b""
        """The last bytes before `position`."""
        self.splitter = LineSplitter(MAX_RECORD_BYTES)
        self.quiet_since_s = now_s
        """When it last gave something, or got into its present plight."""
        self.left_behind = False
        """The stream has gone on to a newer file."""
        self.deleted = False
        self.failed = False
        """The last read raised an error."""

    @property
    def identity(self) -> FileIdentity:
        return self.handle.identity

    def go_to(self, position: int) -> None:
        """Take what is before `position` as read, or all if it is less. Raises OSError."""
        position = self.handle.end_before(position)
        self.head = self.handle.read_at(0, min(position, FINGERPRINT_BYTES))
        start = max(0, position - FINGERPRINT_BYTES)
        self.tail = self.handle.read_at(start, position - start)
        self.position = start + len(self.tail)
        self.seen_size = self.position

    def start_at(self, position: int) -> None:
        """Begin in the midst. A line that is begun there is not reported. Raises OSError."""
        self.go_to(position)
        if not self.tail.endswith(b"\n") and self.position:
            self.splitter.skip_line()

    def start_over(self) -> None:
        """Everything in it is new."""
        self.position = self.seen_size = 0
        self.head = self.tail = b""

    def read_on(self, size: int) -> bytes | None:
        """What comes next; None if what came before is no longer there. Raises OSError."""
        if self.handle.is_packed:
            data = self.handle.read_at(self.position, size)
        else:
            overlap = len(self.tail)
            data = self.handle.read_at(self.position - overlap, overlap + size)
            # In this order: had it been truncated before the data was read, the head would tell now.
            if data[:overlap] != self.tail or not self.has_head():
                return None
            data = data[overlap:]
        self.seen_size, self.seen_mtime_ns = max(self.seen_size, self.found[0]), self.found[1]
        self._advance(data)
        return data

    def has_head(self) -> bool:
        """Whether its first bytes are still what they were. Raises OSError."""
        return self.handle.read_at(0, len(self.head)) == self.head

    def skip_hole(self) -> int:
        """Pass over a hole that begins here; its length. 0 where the file system can't tell, or no data follows."""
        if not isinstance(self.handle, PlainFile):
            return 0
        try:
            length = os.lseek(self.handle.descriptor, self.position, os.SEEK_DATA) - self.position
        except OSError:
            return 0
        nuls = bytes(min(length, FINGERPRINT_BYTES))
        self._advance(nuls)
        self.position += length - len(nuls)
        return length

    def _advance(self, data: bytes) -> None:
        room = FINGERPRINT_BYTES - len(self.head)
        if room > 0:
            self.head += data[:room]
        self.tail = (self.tail + data[-FINGERPRINT_BYTES:])[-FINGERPRINT_BYTES:]
        self.position += len(data)
        self.seen_size = max(self.seen_size, self.position)

    def unread_bytes(self) -> int:
        """What it holds beyond `position`; 0 as well where that can't be told."""
        try:
            return self.handle.unread(self.position)
        except OSError:
            return 0

    def mtime_ns(self) -> int:
        """When it was last written to; 0 where that can't be told."""
        try:
            return self.handle.about().st_mtime_ns
        except OSError:
            return 0

    def mark(self) -> FileMark:
        """How far it is read."""
        head, size, mtime_ns = self.head, self.seen_size, self.seen_mtime_ns
        if len(head) < FINGERPRINT_BYTES:
            # Little is read of it; what it holds now tells more.
            with contextlib.suppress(OSError):
                now_ns = self.mtime_ns()
                begins = self.handle.read_at(0, FINGERPRINT_BYTES)
                head = begins if begins.startswith(head) else head
                size = size if self.position else max(size, self.handle.unread(0))
                # Nothing of it is read, or there is nothing.
                mtime_ns = now_ns if not head or not self.position else mtime_ns
        return FileMark(
            log=str(self.log),
            device=self.identity.device,
            inode=self.identity.inode,
            offset=self.position,
            size=size,
            mtime_ns=mtime_ns,
            head=Fingerprint.of(head),
            tail=Fingerprint.of(self.tail),
            splitter=self.splitter.state(),
            left_behind=self.left_behind,
        )


def at_path(path: Path) -> set[FileIdentity]:
    """Which file is there, if any."""
    try:
        return {identity_of(os.stat(path))}
    except OSError:
        return set()


def rotated_after(log: Path, identity: FileIdentity, mtime_ns: int, path: Path) -> list[Sibling]:
    """What `log` was rotated into after this file, from the oldest to the newest."""
    if identity in at_path(log):
        return []
    siblings = rotated(log)
    if str(log) != os.path.realpath(path):
        # A link leads elsewhere now. What was written last, before it did, may be there still.
        siblings += [one for one in beside(log) if one.path == log]
    for index, sibling in enumerate(siblings):
        if sibling.identity == identity:
            return siblings[index + 1 :]
    return [one for one in siblings if one.mtime_ns > mtime_ns]


def is_copy(handle: Handle, file: HeldFile) -> bool:
    """Whether it begins as a file does that is held; if that is with NULs, whether it has its end. Raises OSError."""
    begins = file.handle.read_at(0, FINGERPRINT_BYTES)
    if begins.strip(b"\0"):
        return handle.read_at(0, FINGERPRINT_BYTES) == begins
    start = max(0, file.handle.unread(0) - FINGERPRINT_BYTES)
    ends = b"" if file.handle.is_packed else file.handle.read_at(start, FINGERPRINT_BYTES)
    return bool(ends.strip(b"\0")) and handle.read_at(start, FINGERPRINT_BYTES) == ends


def find(mark: FileMark, path: Path, held: set[FileIdentity], now_s: float) -> HeldFile | None:
    """The file that a mark was made of, or a copy of it that isn't held, gone to where the mark says."""
    identity = FileIdentity(mark.device, mark.inode)
    log = Path(mark.log)
    places = [log, Path(os.path.realpath(path)), *(one.path for one in beside(log) if one.identity == identity)]
    for place in dict.fromkeys(places):
        try:
            handle = open_handle(place)
        except OSError:
            continue
        if handle.identity == identity and _fits(handle, mark) and not _may_be_another(handle, mark, held):
            return _opened(handle, mark, now_s)
        handle.close()
    return find_copy(mark, {identity, *held}, now_s)


def _may_be_another(handle: Handle, mark: FileMark, held: set[FileIdentity]) -> bool:
    """Of a file that was empty nothing is known but its inode, and that may be another's by now. Then there are some
    that came before this one and after that."""
    if mark.head.size:
        return False
    if handle.is_packed:
        return True
    try:
        if handle.about().st_mtime_ns == mark.mtime_ns:
            return False
    except OSError:
        return True
    before = itertools.takewhile(lambda one: one.identity != handle.identity, rotated(Path(mark.log)))
    return any(one.mtime_ns > mark.mtime_ns and one.identity not in held for one in before)


def find_copy(mark: FileMark, exclude: set[FileIdentity], now_s: float) -> HeldFile | None:
    """A copy among what the log was rotated into, made at the end or later."""
    # Nothing, or NULs, is how any file may begin: then all must be there that was read, and its end must tell.
    vague = _is_void(mark.head)
    if vague and _is_void(mark.tail):
        return None
    for _ in range(_LOOKS):
        is_whole = True
        for sibling in reversed(rotated(Path(mark.log))):
            # Some that pack keep the time to the second.
            if sibling.identity in exclude or sibling.mtime_ns < mark.mtime_ns - 1_000_000_000:
                continue
            try:
                handle = open_handle(sibling.path)
            except FileNotFoundError:
                # It has just been packed, or renamed.
                is_whole = False
                continue
            except OSError:
                continue
            if _fits(handle, mark, whole=vague):
                return _opened(handle, mark, now_s)
            handle.close()
        if is_whole:
            break
    return None


def _is_void(fingerprint: Fingerprint) -> bool:
    return fingerprint == Fingerprint.of(bytes(fingerprint.size))


def _fits(handle: Handle, mark: FileMark, *, whole: bool = False) -> bool:
    """Whether it holds what was read before the mark: the `whole`, or as much as was there when it was copied."""
    try:
        if Fingerprint.of(handle.read_at(0, mark.head.size)) != mark.head:
            return False
        tail = handle.read_at(mark.offset - mark.tail.size, mark.tail.size)
        return Fingerprint.of(tail) == mark.tail or (len(tail) < mark.tail.size and not whole)
    except OSError:
        return False


def _opened(handle: Handle, mark: FileMark, now_s: float) -> HeldFile | None:
    file = HeldFile(handle, Path(mark.log), now_s)
    try:
        file.go_to(mark.offset)
    except OSError:
        handle.close()
        return None
    file.splitter = LineSplitter(MAX_RECORD_BYTES, mark.splitter)
    file.left_behind = mark.left_behind
    return file
