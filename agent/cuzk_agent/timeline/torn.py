"""TIMELINE lines, whole or torn.

The daemon prints a TIMELINE line as nine writes: `TIMELINE,` offset `,` event `,` job `,` detail newline. Whole writes
of others, each ending in a newline, land between them; another TIMELINE line never does (the daemon holds a lock). So
what a log holds of a torn line is a head at the start of a line, cut at a border between two fragments, and later its
rest, cut at borders again, with others' lines between and after.
"""

from __future__ import annotations

import re
from collections import Counter

from cuzk_agent.timeline.lines import EVENT_NAMES, TimelineEvent

TIMELINE = b"TIMELINE,"

UNPARSED_REASONS = ("malformed", "offset", "event", "job", "detail")
"""Why a line that starts with `TIMELINE,` can't be read: `malformed` is not the line's shape, the rest name the field
whose value is absurd."""

MAX_OFFSET_MS = 10**13
MAX_DURATION_MS = 10**10
MAX_INDEX = 9999
MAX_JOB_ID = 256

MAX_OPEN_LINES = 20_000
"""Lines after which a rest is no longer waited for. The worst storm on record put 1,700 between head and rest; the
next TIMELINE line ends the wait anyway, so this only keeps a late stranger from being taken for a rest."""

_INTRUDER = re.compile(
    rb"\x1b|CUZK_[A-Z_]{1,32}: |[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?Z +[A-Z]+ "
)


def find_start(line: bytes) -> int:
    """Where the first line of another writer starts in `line`; -1 if none does."""
    # The cheap tests first: most TIMELINE lines are whole, and the pattern is slow on their digits.
    if b"\x1b" in line or b"CUZK_" in line or b"Z " in line:
        found = _INTRUDER.search(line)
        return found.start() if found else -1
    return -1


def starts_line(line: bytes) -> bool:
    """Whether `line` begins like one that we know: TIMELINE, tracing or the C++ prover's."""
    return line.startswith(TIMELINE) or _INTRUDER.match(line) is not None


# The fragments after `TIMELINE,`, one group each. Bounds are loose here, so that a value beyond its own bound is
# reported as such, and finite, so that an open head is small.
_FRAGMENTS = (
    rb"([0-9]{1,20})",
    rb"(,)",
    rb"([A-Z][A-Z0-9_]{0,63})",
    rb"(,)",
    rb"([^,\x00-\x20][^,\x00-\x1f]{0,1023})",
    rb"(,)",
    rb"([^\x00-\x1f]{1,1024})",
)


def _rest_pattern(first: int) -> re.Pattern[bytes]:
    pattern = b""
    for fragment in reversed(_FRAGMENTS[first:]):
        pattern = b"(?:" + fragment + pattern + b")?"
    return re.compile(pattern)


# By the number of fragments seen: any further ones, cut at a border.
_REST = tuple(_rest_pattern(first) for first in range(len(_FRAGMENTS)))

_EVENT = re.compile(rb"[A-Z][A-Z0-9_]{0,39}")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_.-]*")
_KIND = re.compile(rb"[A-Za-z0-9_.-]{1,64}")

# A continued error text can look like a detail at large, so a detail that comes on a line of its own must hold a key
# that its event is known to have.
_KNOWN_DETAIL = re.compile(
    rb"monolithic|(?:[a-z_]+=[^,\s]*,)*(?:partition|kind|worker|synth_ms|gpu_ms)=[^,\s]+(?:,[a-z_]+=[^,\s]*)*"
)
_ANY_DETAIL = re.compile(rb"[a-z][a-z0-9_]*(?:=[^,\s]*)?(?:,[a-z][a-z0-9_]*(?:=[^,\s]*)?)*")
_KNOWN_EVENTS = frozenset(name.encode() for name in EVENT_NAMES)

_LIMITS = {
    b"partition": MAX_INDEX,
    b"worker": MAX_INDEX,
    b"synth_ms": MAX_DURATION_MS - 1,
    b"gpu_ms": MAX_DURATION_MS - 1,
}


def _number(digits: bytes, limit: int) -> int | None:
    # The length is looked at first: turning many digits into a number is slow.
    if len(digits) > 20 or not digits.isdigit():
        return None
    number = int(digits)
    return number if number <= limit else None


def _event(offset: bytes, name: bytes, job: bytes, detail: bytes) -> TimelineEvent | str:
    """The event that four fields say, or the reason why they don't."""
    offset_ms = _number(offset, MAX_OFFSET_MS)
    if offset_ms is None:
        return "offset"
    if _EVENT.fullmatch(name) is None:
        return "event"
    job_id = job.decode("utf-8", "replace")
    if not 0 < len(job_id) <= MAX_JOB_ID:
        return "job"
    numbers: dict[bytes, int] = {}
    kind: str | None = None
    for item in detail.split(b","):
        key, equals, value = item.partition(b"=")
        limit = _LIMITS.get(key)
        if limit is not None:
            number = _number(value, limit)
            if number is None:
                return "detail"
            numbers[key] = number
        elif _WORD.fullmatch(key) is None:
            return "detail"
        elif key == b"kind" and equals:
            if _KIND.fullmatch(value) is None:
                return "detail"
            kind = value.decode("ascii")
    number_of = numbers.get
    return TimelineEvent(
        offset_ms,
        name.decode("ascii"),
        job_id,
        number_of(b"partition"),
        number_of(b"worker"),
        kind,
        number_of(b"synth_ms"),
        number_of(b"gpu_ms"),
    )


class TornLines:
    """Reads TIMELINE lines and puts torn ones together; at most one is open at a time.

    Both ways in return the event that became complete, if any, and the bytes that belong to someone else: a line of
    its own.
    """

    def __init__(self) -> None:
        self.recovered = 0
        self.lost = 0
        self.unparsed: Counter[str] = Counter()
        self._head: list[bytes] | None = None
        self._age = 0

    @property
    def open(self) -> bool:
        """Whether a torn line's rest is still to come."""
        return self._head is not None

    def begin(self, line: bytes) -> tuple[TimelineEvent | None, bytes]:
        """Read a line that starts with `TIMELINE,`."""
        if self._head is not None:
            self.close()
        cut = find_start(line)
        if cut < 0:
            fields = line[len(TIMELINE) :].split(b",", 3)
            if len(fields) < 4:
                self.unparsed["malformed"] += 1
                return None, b""
            return self._accept(_event(*fields)), b""
        match = _REST[0].fullmatch(line, len(TIMELINE), cut)
        if match is None:
            self.unparsed["malformed"] += 1
            return None, line[cut:]
        return self._extend([], match), line[cut:]

    def resume(self, line: bytes) -> tuple[TimelineEvent | None, bytes]:
        """Read a later line while a head is open: its rest, or someone else's."""
        head = self._head
        if head is None:
            return None, line
        self._age += 1
        if self._age > MAX_OPEN_LINES:
            self.close()
            return None, line
        cut = find_start(line)
        if cut == 0:
            return None, line
        end = len(line) if cut < 0 else cut
        match = _REST[len(head)].fullmatch(line, 0, end)
        if match is None or match.lastindex is None:
            return None, line
        whole = len(head) + match.lastindex == len(_FRAGMENTS)
        if not whole and cut < 0:
            # Only the detail is followed by the line's own newline.
            return None, line
        if whole:
            name = [*head, *match.groups()][2]
            shape = _KNOWN_DETAIL if name in _KNOWN_EVENTS else _ANY_DETAIL
            if shape.fullmatch(match[match.lastindex]) is None:
                return None, line
        return self._extend(head, match), line[end:]

    def close(self) -> None:
        """Give up an open line: its rest can't come any more."""
        if self._head is not None:
            self._head = None
            self.lost += 1

    def _extend(self, head: list[bytes], match: re.Match[bytes]) -> TimelineEvent | None:
        fragments = [*head, *match.groups()[: match.lastindex or 0]]
        self._age = 0
        if len(fragments) < len(_FRAGMENTS):
            self._head = fragments
            return None
        # The newline that may come late is an empty line, which means nothing anyway.
        self._head = None
        event = self._accept(_event(*fragments[::2]))
        self.recovered += event is not None
        return event

    def _accept(self, event: TimelineEvent | str) -> TimelineEvent | None:
        if isinstance(event, str):
            self.unparsed[event] += 1
            return None
        return event
