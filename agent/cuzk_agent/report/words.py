"""Figures as people read them."""

from __future__ import annotations

NONE = "–"


def printable(text: str) -> str:
    """`text` with everything that is not printable (line ends too) as a backslash escape: a log may hold anything."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def duration(ms: float | None) -> str:
    """In the unit that fits, to three or four figures."""
    if ms is None:
        return NONE
    if ms < 999.5:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 9_999.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 3600:.2f} h"


def share(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.1%}"


def rate(per_s: float) -> str:
    """To three figures."""
    return f"{per_s:#.3g}/s" if per_s < 100 else f"{per_s:,.0f}/s"


def offset(ms: int) -> str:
    """A time on the engine's clock, as h:mm:ss.mmm."""
    seconds, milliseconds = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}.{milliseconds:03}"


def number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def plural(count: int, one: str) -> str:
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"
