"""Where a source has been read to, as a value that outlives the process."""

from __future__ import annotations

import base64
import hashlib
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Final, Self

from cuzk_agent.log.envelope import UnwrapperState
from cuzk_agent.log.splitter import SplitterState

FINGERPRINT_BYTES: Final = 256
"""So many bytes tell one log file from another: they hold at least one time stamp, or an offset and a job."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells some bytes of a file from others, without keeping them."""

    size: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """The fingerprint of these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(slots=True)
class Totals:
    """What has been counted."""

    lines: int = 0
    read_bytes: int = 0
    rotations: int = 0
    truncations: int = 0
    lost_bytes: int = 0
    overlong_lines: int = 0
    nul_bytes: int = 0
    lost_lines: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class FileMark:
    """How far one file is read, and how to know it again under another name, as a copy, or packed."""

    log: str
    """Where it was written first, without symbolic links."""
    device: int
    inode: int
    offset: int
    size: int
    """As it was last seen: what lies between `offset` and here existed."""
    mtime_ns: int
    head: Fingerprint
    """Of its first bytes, as far as they are read."""
    tail: Fingerprint
    """Of the last bytes before `offset`."""
    splitter: SplitterState
    left_behind: bool
    """The stream has gone on to a newer file."""


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Where a path has been read to."""

    files: tuple[FileMark, ...]
    """From the oldest to the newest."""
    unwrapper: UnwrapperState
    totals: Totals


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """Where a unit's journal has been read to."""

    cursor: str
    """Of the last entry that was read; empty if there was none."""
    processes: tuple[tuple[str, str, str], ...]
    """Whose lines were read: invocation, program and process id of each."""
    pending: bytes
    """The line that goes on in the next entry."""
    pending_unix_s: float | None
    ended: bool
    """The daemon's main process has exited, and that has not been handed on yet."""
    totals: Totals


Position = FilePosition | JournalPosition
_KINDS: Final[dict[str, type[FilePosition | JournalPosition]]] = {"files": FilePosition, "journal": JournalPosition}


def to_json(position: Position) -> dict[str, Any]:
    """As something that `json` can write."""
    (kind,) = (name for name, one in _KINDS.items() if isinstance(position, one))
    return {"kind": kind, **_encoded(position)}


def from_json(value: object) -> Position:
    """What `to_json` was given. Raises ValueError for anything that it did not give."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError("a position must tell its kind")
    position = _decoded(_KINDS[kind], {name: part for name, part in value.items() if name != "kind"})
    assert isinstance(position, FilePosition | JournalPosition)
    return position


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, tuple):
        return [_encoded(part) for part in value]
    return value


def _decoded(kind: Any, value: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        kinds = typing.get_type_hints(kind)
        if value.keys() != kinds.keys():
            raise ValueError(f"{kind.__name__} must have {', '.join(kinds)}")
        return kind(**{name: _decoded(kinds[name], value[name]) for name in kinds})
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        parts = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decoded(part, one) for part, one in zip(parts, value, strict=True))
    if isinstance(kind, types.UnionType):
        return None if value is None else _decoded(arguments[0], value)
    if kind is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if kind is float and type(value) in {int, float}:
        return float(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        return kind(value)
    if type(value) is not kind:
        raise ValueError(f"expected {getattr(kind, '__name__', kind)}, not {type(value).__name__}")
    return value
