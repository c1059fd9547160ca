"""Logs after the run: files, globs and standard input, compressed or not, as one stream of bytes."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from cuzk_agent.log.envelope import MAX_RECORD_BYTES, Unwrapper
from cuzk_agent.log.splitter import LineSplitter
from cuzk_agent.report.words import plural

STDIN: Final = "-"
_CHUNK_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16
"""How much of a file is looked at to find its first time stamp, and whether it is text."""

_TIME_STAMP = re.compile(
    rb"(?:^(?:\x1b\[[0-9;]*m)*|\"time\":\")([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,18}Z)", re.MULTILINE
)
_ROTATED = re.compile(r"^(.*?)(?:\.([0-9]{1,5}))?(?:\.(?:gz|zst|xz|bz2))?$")


class InputError(Exception):
    """A log that cannot be read; its message is for the user."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the reading has come."""

    read_bytes: int
    """As they are stored."""
    total_bytes: int | None
    """None if standard input is among the logs."""


@dataclass(slots=True)
class Tally:
    """What was read."""

    bytes: int = 0
    """Uncompressed."""
    lines: int = 0
    looks_binary: bool = False
    looks_prefixed: bool = False
    """Something is before the word TIMELINE, as syslog and journalctl put it before every line."""

    @property
    def lack(self) -> str:
        """What to say if no TIMELINE line was found in it."""
        if self.looks_binary:
            return "no TIMELINE line in it; this looks like binary data"
        if self.looks_prefixed:
            return "no line begins with TIMELINE, some have it after a prefix; of a journal, take `journalctl -o cat`"
        return f"no TIMELINE line in {plural(self.lines, 'line')}; is this the log of a cuzk daemon?"


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that arguments mean, in the order of their time: the parts of one log.

    A glob stands for what it matches. Parts that all begin with time stamps are ordered by these; else those that one
    glob matched by the number that a rotation gave them, the others as given.
    """
    paths: list[str] = []
    for pattern in patterns:
        if pattern == STDIN or Path(pattern).exists():
            paths.append(pattern)
        elif glob.has_magic(pattern):
            found = sorted(glob.glob(pattern, recursive=True), key=_rotation_order)  # noqa: PTH207  Path.glob takes no absolute patterns.
            if not found:
                raise InputError(f"{pattern}: no such file")
            paths += found
        else:
            raise InputError(f"{pattern}: no such file")
    if paths.count(STDIN) > 1:
        raise InputError("standard input (-) can be given once only")
    if len(paths) > 1 and STDIN not in paths:
        starts = [_first_time(path) for path in paths]
        if all(starts):
            paths = [path for _, path in sorted(zip(starts, paths, strict=True), key=lambda part: part[0])]
    return paths


def _rotation_order(path: str) -> tuple[str, int, str]:
    match = _ROTATED.match(path)
    assert match is not None
    base, number = match.groups()
    # `log.2` is older than `log.1`, and that than `log`.
    return base, -int(number or 0), path


def _first_time(path: str) -> bytes:
    try:
        with _opened(path) as (stream, _):
            head = stream.read(_HEAD_BYTES)
    except (InputError, *_DAMAGES):
        return b""
    found = _TIME_STAMP.search(head)
    return found[1] if found else b""


Times = list[float | None] | None


def read_log(
    paths: Sequence[str], tally: Tally, on_progress: Callable[[Progress], None] = lambda _: None
) -> Iterator[tuple[list[bytes], Times]]:
    """The daemon's lines, as `read_lines` gives them, taken out of a container's log if it is one, with the time of
    each."""
    unwrapper = Unwrapper()
    for physical in read_lines(paths, tally, on_progress):
        lines, times = unwrapper.feed(physical)
        tally.lines += len(lines) - len(physical)
        yield lines, times


def read_lines(
    paths: Sequence[str], tally: Tally, on_progress: Callable[[Progress], None] = lambda _: None
) -> Iterator[list[bytes]]:
    """The lines of all parts, batch by batch, with bounded memory.

    A line that one part begins goes on in the next; the last one counts even without its newline. Raises `InputError`
    for what cannot be read, after everything before it was given.
    """
    splitter = LineSplitter(MAX_RECORD_BYTES)
    total_bytes = None if STDIN in paths else sum(map(_size_of, paths))
    before_bytes = 0
    for path in paths:
        with _opened(path) as (stream, raw):
            while chunk := _read(path, stream):
                if not tally.bytes:
                    tally.looks_binary = _looks_binary(chunk)
                tally.bytes += len(chunk)
                tally.looks_prefixed = tally.looks_prefixed or b": TIMELINE," in chunk
                lines = splitter.feed(chunk)
                tally.lines += len(lines)
                yield lines
                on_progress(Progress(before_bytes + raw.count, total_bytes))
            before_bytes += raw.count
    if splitter.pending:
        tally.lines += 1
        yield splitter.feed(b"\n")


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise InputError(f"{path}: {_reason(error)}") from None


def _read(path: str, stream: _Readable) -> bytes:
    try:
        # What comes before a damage is given before that is noticed.
        return stream.read1(_CHUNK_BYTES)
    except _DAMAGES as error:
        raise InputError(f"{path}: cannot be read on: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _looks_binary(chunk: bytes) -> bool:
    # A truncated log may begin with a hole of NULs.
    text = chunk.translate(None, b"\0")[:_HEAD_BYTES].decode("utf-8", "replace")
    odd = sum(character == "\ufffd" or (character < " " and character not in "\t\n\r\x1b") for character in text)
    return odd * 20 > len(text)


# --- opening ---------------------------------------------------------------------------------------------------------


class _Counted(io.RawIOBase):
    """Counts what is read of a stream, and lets its first bytes be looked at."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = 0
        # Of a pipe, one read may give less than is needed to tell.
        self.head = b""
        while len(self.head) < len(_XZ) and (more := stream.read(len(_XZ) - len(self.head))):
            self.head += more
        self._left = self.head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        part = self._left[: len(buffer)] or self._stream.read(len(buffer)) or b""
        self._left = self._left[len(part) :] if self._left else b""
        buffer[: len(part)] = part
        self.count += len(part)
        return len(part)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def read1(self, size: int, /) -> bytes: ...


class _Opened:
    """An open log; closes it at the end."""

    def __init__(self, file: BinaryIO, raw: _Counted, stream: _Readable, *, close: bool) -> None:
        self._file, self._raw, self._stream, self._close = file, raw, stream, close

    def __enter__(self) -> tuple[_Readable, _Counted]:
        return self._stream, self._raw

    def __exit__(self, *_: object) -> None:
        if self._close:
            self._file.close()


_GZIP, _XZ, _ZSTD, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"BZh"


_ZSTD_BYTES = 1 << 14
"""Unpacked at a time: it may become a thousand times as much."""


class _ZstdError(Exception):
    """A zstd stream is damaged."""


_DAMAGES = (OSError, EOFError, lzma.LZMAError, _ZstdError)


def _opened(path: str) -> _Opened:
    try:
        # Closed by what is returned.
        file: BinaryIO = sys.stdin.buffer if path == STDIN else Path(path).open("rb", buffering=0)  # noqa: SIM115
        raw = _Counted(file)
    except OSError as error:
        raise InputError(f"{path}: {_reason(error)}") from None
    return _Opened(file, raw, _decompressed(raw), close=path != STDIN)


def _decompressed(raw: _Counted) -> _Readable:
    """By what it holds, whatever it is called."""
    buffered = io.BufferedReader(raw, _CHUNK_BYTES)
    if raw.head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=buffered)
    if raw.head.startswith(_XZ):
        return lzma.LZMAFile(buffered)
    if raw.head.startswith(_BZIP2):
        return bz2.BZ2File(buffered)
    if raw.head.startswith(_ZSTD):
        return io.BufferedReader(_Zstd(buffered), _CHUNK_BYTES)
    return buffered


class _Zstd(io.RawIOBase):
    """Every frame of a zstd file, one after the other."""

    def __init__(self, stream: BinaryIO) -> None:
        import zstandard  # noqa: PLC0415  Few logs need it.

        self._error = zstandard.ZstdError
        self._begin = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._begin()
        self._within = False
        self._stream = stream
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._plain:
            self._packed = self._packed or self._stream.read(_ZSTD_BYTES)
            if not self._packed:
                if self._within:
                    raise _ZstdError("it ends in the middle of a frame")
                return 0
            try:
                self._plain = self._frame.decompress(self._packed)
            except self._error as error:
                raise _ZstdError(str(error)) from None
            self._within, self._packed = not self._frame.eof, self._frame.unused_data
            if not self._within:
                self._frame = self._begin()
        part = self._plain[: len(buffer)]
        self._plain = self._plain[len(part) :]
        buffer[: len(part)] = part
        return len(part)
