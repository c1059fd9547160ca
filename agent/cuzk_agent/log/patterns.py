"""Logs that are named by a pattern: which there are now."""

from __future__ import annotations

import glob
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from cuzk_agent.log.siblings import DATED, PACKED, ROTATED

_ROTATED: Final = re.compile(f"(.+?){ROTATED.pattern}")
_DATED: Final = re.compile(f"(.+?){DATED.pattern}")


def is_pattern(path: Path) -> bool:
    """Whether it names several files, by `*`, `?` or `[…]`, and isn't itself the name of one."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def matching(pattern: Path) -> list[Path]:
    """The logs that match now, without what they were rotated into."""
    found = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    return [path for path in found if not _is_rotated(path, pattern) and os.path.isfile(path)]


def _is_rotated(path: Path, pattern: Path) -> bool:
    if path.suffix in PACKED:
        return True
    rotated = _ROTATED.fullmatch(path.name)
    if rotated is not None and fnmatch(rotated[1], pattern.name):
        # The log itself matches as well, were it there or not.
        return True
    stem = _DATED.fullmatch(path.stem)
    return stem is not None and path.with_name(stem[1] + path.suffix).exists()
