"""The files that a log was rotated into: which they are, in what order, and what is in them."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol

import zstandard


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


def _gzip(file: IO[bytes]) -> _Stream:
    return gzip.GzipFile(fileobj=file)


def _zstd(file: IO[bytes]) -> _Stream:
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)


_PACKED: Final[dict[str, Callable[[IO[bytes]], _Stream]]] = {
    ".gz": _gzip,
    ".zst": _zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
PACKED: Final = frozenset(_PACKED)
"""The suffixes of files that are compressed."""
ROTATED: Final = re.compile(r"[._-](?:\d[\dTtZz:_.-]*|old)")
"""What rotation puts behind the name of a log."""
DATED: Final = re.compile(r"[._-]\d{4}-?\d\d-?\d\d[\dTtZz:_.-]*")
"""What it puts into one, before the suffix."""
_SKIP_BYTES: Final = 1 << 20


class FileIdentity(NamedTuple):
    """Which file it is, whatever its name. Holds while the file is open: an inode in use is not given out again."""

    device: int
    inode: int


class Handle(Protocol):
    """A file held open for reading."""

    identity: FileIdentity
    is_packed: bool

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; less, or none, only at the end. Raises OSError."""
        ...

    def about(self) -> os.stat_result:
        """Raises OSError."""
        ...

    def end_before(self, offset: int) -> int:
        """`offset`, or where the file ends if it does before. Raises OSError."""
        ...

    def unread(self, offset: int) -> int:
        """Bytes beyond `offset`; 1 for a packed file that has not come to its end. Raises OSError."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class PlainFile:
    """A regular file."""

    is_packed = False

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        # O_NONBLOCK: what is there may have become a FIFO since it was looked at, and opening one waits for a writer.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            self.identity = identity_of(os.fstat(self.descriptor))
        except OSError:
            os.close(self.descriptor)
            raise

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def about(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def end_before(self, offset: int) -> int:
        return min(offset, os.fstat(self.descriptor).st_size)

    def unread(self, offset: int) -> int:
        return max(0, os.fstat(self.descriptor).st_size - offset)

    def close(self) -> None:
        os.close(self.descriptor)


class PackedFile:
    """A compressed file, read from its start to its end; offsets are those of what is in it."""

    is_packed = True

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._raw = open(path, "rb")  # noqa: SIM115  closed by `close`
        self.identity = identity_of(os.fstat(self._raw.fileno()))
        self._open = _PACKED[path.suffix]
        self._data = self._open(self._raw)
        self._window = b""
        """The last bytes read, so that a little can be read again."""
        self._offset = 0
        self._ended = False

    def read_at(self, offset: int, size: int) -> bytes:
        if offset < self._offset - len(self._window):
            self._raw.seek(0)
            self._data = self._open(self._raw)
            self._window, self._offset, self._ended = b"", 0, False
        while self._offset < offset and self._fill(min(_SKIP_BYTES, offset - self._offset)):
            pass
        start = len(self._window) - (self._offset - offset)
        kept = self._window[start:] if self._offset >= offset else b""
        while len(kept) < size:
            more = self._fill(size - len(kept))
            if not more:
                break
            kept += more
        return kept[:size]

    def _fill(self, size: int) -> bytes:
        try:
            data = self._data.read(size)
        except (EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise OSError(errno.EIO, f"{Path(self._raw.name).name} is damaged: {error}") from error
        self._offset += len(data)
        self._window = (self._window + data)[-_SKIP_BYTES:]
        self._ended = not data
        return data

    def about(self) -> os.stat_result:
        return os.fstat(self._raw.fileno())

    def end_before(self, offset: int) -> int:
        self.read_at(offset, 0)
        return min(offset, self._offset)

    def unread(self, offset: int) -> int:
        return int(not self._ended or offset < self._offset)

    def close(self) -> None:
        self._data.close()
        self._raw.close()


def open_handle(path: Path) -> Handle:
    """Raises OSError."""
    return PackedFile(path) if path.suffix in _PACKED else PlainFile(path)


def identity_of(about: os.stat_result) -> FileIdentity:
    """Raises OSError for what isn't a regular file."""
    mode = about.st_mode
    if stat.S_ISREG(mode):
        return FileIdentity(about.st_dev, about.st_ino)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise OSError(errno.EINVAL, f"Is {kind}, not a regular file")


def is_rotated(name: str, base: str) -> bool:
    """Whether a file of this name is what a log called `base` was rotated into: `log.1`, `log-20261130.gz`, `log.old`,
    `cuzk-20261130.log` …"""
    plain = name.removesuffix(Path(name).suffix) if Path(name).suffix in _PACKED else name
    if plain.startswith(base) and ROTATED.fullmatch(plain[len(base) :]):
        return True
    stem, suffix = os.path.splitext(base)
    middle = plain[len(stem) : len(plain) - len(suffix)]
    return bool(suffix) and plain.startswith(stem) and plain.endswith(suffix) and bool(DATED.fullmatch(middle))


class Sibling(NamedTuple):
    """A file beside a log."""

    path: Path
    identity: FileIdentity
    mtime_ns: int
    size: int


def rotated(log: Path) -> list[Sibling]:
    """What the log was rotated into, from the oldest to the newest.

    Their names tell, if they are all of one kind: times of last change don't always, for a writer may be slow to leave
    a file. Numbers grow with age, unless it is plain that they don't.
    """
    found = [one for one in beside(log) if is_rotated(one.path.name, log.name)]
    names = {one.path.name for one in found}
    # While a file is being packed, it is there twice.
    whole = [one for one in found if one.path.suffix not in _PACKED or one.path.stem not in names]
    in_time = sorted(whole, key=lambda one: (one.mtime_ns, -(_number(one) or 0), one.path.name))
    if all(_number(one) is not None for one in whole):
        rising = sorted(whole, key=lambda one: _number(one) or 0)
        return rising if _disorder(rising) == 0 < _disorder(rising[::-1]) else rising[::-1]
    if all(_number(one) is None for one in whole) and len({len(_plain_name(one)) for one in whole}) == 1:
        return sorted(whole, key=_plain_name)
    return in_time


def _disorder(siblings: list[Sibling]) -> int:
    return sum(after.mtime_ns < before.mtime_ns for before, after in pairwise(siblings))


def _plain_name(one: Sibling) -> str:
    return one.path.stem if one.path.suffix in _PACKED else one.path.name


def _number(one: Sibling) -> int | None:
    """Of `log.2` or `log.2.gz`; none of a date or a time."""
    found = re.search(r"\.(\d{1,5})$", _plain_name(one))
    return int(found[1]) if found else None


def beside(log: Path) -> list[Sibling]:
    """All regular files in the log's directory."""
    siblings = []
    try:
        with os.scandir(log.parent) as entries:
            for entry in entries:
                try:
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    about = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                identity = FileIdentity(about.st_dev, about.st_ino)
                siblings.append(Sibling(Path(entry.path), identity, about.st_mtime_ns, about.st_size))
    except OSError:
        return []
    return siblings
