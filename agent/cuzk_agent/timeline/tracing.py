"""Tracing lines, and the timing lines of the C++ prover.

A tracing line is `<time>Z  LEVEL span{key=value …}:…: target: message key=value …`, with or without colours. Values are
bare and may hold spaces: one runs to the next ` key=` or to the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType

from cuzk_agent.timeline.lines import KernelTiming, TracingLine

KEYS_AFTER_ERROR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "partition synthesis failed": ("job_id", "partition"),
        "partition synthesis task panicked": ("job_id", "partition"),
        "partition GPU proving failed": ("job_id", "partition"),
        "partition GPU proving task panicked": ("job_id", "partition"),
    }
)
"""The messages whose `error=` text is followed by further keys. Everywhere else an error runs to the end."""

MESSAGES = frozenset(KEYS_AFTER_ERROR) | frozenset(
    {
        # start and stop
        "starting cuzk engine",
        "initializing GPU workers",
        "pipeline GPU worker started",
        "monolithic GPU worker started",
        "cuzk engine started",
        "memory budget initialized",
        "rayon global thread pool configured",
        "spawning GPU workers with Phase 8 dual-worker interlock",
        "starting pipeline: synthesis task + GPU workers (budget-gated)",
        "synthesis dispatcher started (budget-gated)",
        "GPU queue target dispatch pacer enabled",
        "received SIGINT, shutting down",
        "shutting down cuzk engine",
        # work arrives
        "job enqueued",
        "job dequeued for proving",
        "dispatching per-partition synthesis (budget-gated)",
        "dispatching per-partition SnapDeals synthesis (budget-gated)",
        "loading SRS from disk",
        "SRS loaded successfully",
        # units move
        "partition synthesis complete, pushing to GPU queue",
        "synthesis complete, sending to GPU",
        "GPU_TIMING hot_path pre-prove overhead",
        "GPU_TIMING prove_start returned",
        "partition GPU prove complete",
        # proofs end
        "proof completed successfully (pipeline)",
        "proof completed successfully (monolithic)",
        "slotted PoRep C2 proof completed",
        "sector proof delivered from batch",
        # trouble
        "GPU prove start failed",
        "GPU prove start task panicked",
        "synthesis failed",
        "synthesis task panicked",
        "GPU proving failed",
        "GPU proving task panicked",
        "proof failed",
        "proof task panicked",
        "skipping synthesis for failed job",
        "skipping GPU prove for failed partitioned job",
        "discarding GPU result for failed job",
        "cudaHostAlloc failed",
        "pinned pool: cudaHostAlloc failed",
        "evicted for memory pressure",
    }
)
"""The messages whose fields are read, as the daemon writes them. Others yield their time, level, span and message."""

MESSAGE_PREFIXES = (
    "Phase 6: ",
    "Phase 7: ",
    "Batched PoRep proof self-check ",
    "Pipeline single-sector",
    "acquire request exceeds total budget",
    "SRS evicted",
)
"""Beginnings of further such messages, for families whose endings vary."""

_ESCAPE = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]")
_HEADER = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?Z +(TRACE|DEBUG|INFO|WARN|ERROR) +"
)
_TIME = re.compile(
    rb"(?:\x1b\[[0-9;]*m)?([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?Z(?=[ \x1b])"
)
_LAST_KEY = re.compile(r" [A-Za-z_][A-Za-z0-9_.]*\Z")
_KINDS_MAX = 1024
# Atomic and possessive, so that a line made to look like many spans can't make matching slow.
_SPANS = re.compile(r"((?:\w+(?>\{.*?\}(?=:))?:)++) (?=[\w:.-]+: )", re.DOTALL | re.ASCII)
_SPAN_FIELDS = re.compile(r"\{(.*?)\}:", re.DOTALL)
_TARGET = re.compile(r"\w+(?:::\w+)+: ", re.ASCII)
_KEY = re.compile(r" ([A-Za-z_][A-Za-z0-9_.]*)=")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

MAX_QUOTED_PARTS = 8
"""How many things that look like keys a quoted value may hold."""

_NONE: Mapping[str, str] = MappingProxyType({})


def strip_escapes(line: bytes) -> bytes:
    """The line without terminal escape sequences."""
    return _ESCAPE.sub(b"", line) if b"\x1b" in line else line


@lru_cache(maxsize=64)
def _unix_seconds(text: str) -> int | None:
    # Most lines share their second with the one before.
    try:
        return int(datetime.fromisoformat(text + "+00:00").timestamp())
    except ValueError:
        return None


def _unix_ms(seconds: int, fraction: str | bytes | None) -> float:
    return seconds * 1000.0 + (int(fraction) / 10 ** (len(fraction) - 3) if fraction else 0.0)


def _unwrap(value: str) -> str | None:
    """A Debug value as its content; None for `None`."""
    if value == "None":
        return None
    if value.startswith("Some(") and value.endswith(")"):
        value = value[5:-1]
    if value.startswith('"') and _QUOTED.fullmatch(value):
        value = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return value


def _fields(parts: list[str], after_error: tuple[str, ...] = ()) -> dict[str, str]:
    """Fields from `[key, value, key, value, …]`, cut at everything that looks like a key."""
    fields: dict[str, str] = {}
    at, end = 0, len(parts)
    while at < end:
        key, raw = parts[at], parts[at + 1]
        at += 2
        if key == "error":
            # The text may hold what looks like keys, so the real ones are taken from the right, each once.
            tail: dict[str, str] = {}
            while end > at and parts[end - 2] in after_error and parts[end - 2] not in tail:
                tail[parts[end - 2]] = parts[end - 1]
                end -= 2
            fields[key] = raw + "".join(f" {parts[i]}={parts[i + 1]}" for i in range(at, end, 2))
            for name in reversed(tail):
                value = _unwrap(tail[name])
                if value is not None:
                    fields[name] = value
            break
        if raw.startswith('"') and not _QUOTED.fullmatch(raw):
            # What looked like keys was inside the quotes.
            for close in range(at + 2, min(end, at + 2 * MAX_QUOTED_PARTS) + 1, 2):
                longer = raw + "".join(f" {parts[i]}={parts[i + 1]}" for i in range(at, close, 2))
                if _QUOTED.fullmatch(longer):
                    raw, at = longer, close
                    break
        value = _unwrap(raw) if raw[-1:] in ('"', ")", "e") else raw
        if value is not None:
            fields[key] = value
    return fields


def _span_fields(spans: str) -> Mapping[str, str]:
    for fields in reversed(_SPAN_FIELDS.findall(spans)):
        if fields:
            return _fields(_KEY.split(" " + fields)[1:])
    return _NONE


def parse_tracing(line: bytes) -> TracingLine | None:
    """Read a tracing line (several lines joined by newlines, if its error text has them); None if it is none."""
    text = strip_escapes(line).decode("utf-8", "replace")
    header = _HEADER.match(text)
    if header is None:
        return None
    clock, fraction, level = header.groups()
    seconds = _unix_seconds(clock)
    if seconds is None:
        return None
    unix_ms = _unix_ms(seconds, fraction)

    span = _NONE
    target, _, body = text[header.end() :].partition(": ")
    if "{" in target:
        spans = _SPANS.match(text, header.end())
        if spans is not None:
            span = _span_fields(spans[1])
            body = text[spans.end() :].partition(": ")[2]
    elif "::" not in target:
        # A span without fields stands before the target.
        named = _TARGET.match(body)
        if named is not None:
            body = body[named.end() :]

    first = _KEY.search(body)
    if first is None:
        return TracingLine(unix_ms, level, span, body, _NONE)
    message = body[: first.start()]
    if message not in MESSAGES and not message.startswith(MESSAGE_PREFIXES):
        return TracingLine(unix_ms, level, span, message, _NONE)
    parts = _KEY.split(body)
    return TracingLine(unix_ms, level, span, message, _fields(parts[1:], KEYS_AFTER_ERROR.get(message, ())))


class TracingReader:
    """Reads tracing lines, each like `parse_tracing`. Those of which only time and message are kept are most of a log,
    and few kinds of them: what comes before the first value is remembered, so that they need not be taken apart."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, tuple[str, str]] = {}

    def read(self, line: bytes) -> TracingLine | None:
        """The line's content; None if it is no tracing line."""
        time = _TIME.match(line)
        if time is None:
            return parse_tracing(line)
        equals = line.find(b"=", time.end())
        if equals < 0:
            return parse_tracing(line)
        kind = line[time.end() : equals]
        found = self._kinds.get(kind)
        seconds = _unix_seconds(time[1].decode()) if found is not None else None
        if found is None or seconds is None:
            parsed = parse_tracing(line)
            if parsed is not None and _is_told_by(kind, parsed):
                if len(self._kinds) >= _KINDS_MAX:
                    self._kinds.clear()
                self._kinds[kind] = parsed.level, parsed.message
            return parsed
        return TracingLine(_unix_ms(seconds, time[2]), found[0], _NONE, found[1], _NONE)


def _is_told_by(kind: bytes, parsed: TracingLine) -> bool:
    """Whether every line that begins like this one, up to its first `=`, has its message and no more to keep."""
    if parsed.fields or parsed.span or b"{" in kind:
        return False
    # The `=` must be the one behind the message's first key.
    text = strip_escapes(kind).decode("utf-8", "replace")
    return _LAST_KEY.search(text) is not None and text.endswith(f": {parsed.message}", 0, text.rindex(" "))


def is_unfinished(line: TracingLine) -> bool:
    """Whether the keys after an error text are still to come on a later line."""
    if line.message not in KEYS_AFTER_ERROR or "error" not in line.fields:
        return False
    return any(key not in line.fields for key in KEYS_AFTER_ERROR[line.message])


def parse_kernel_timing(line: bytes) -> KernelTiming | None:
    """Read a `CUZK_TIMING: …` line; None if it is none, or holds no number."""
    label, _, text = line.partition(b": ")
    if label != b"CUZK_TIMING":
        return None
    values: dict[str, int] = {}
    for item in text.split():
        name, _, digits = item.partition(b"=")
        if digits.isdigit() and len(digits) <= 10:
            values[name.decode("utf-8", "replace")] = int(digits)
    return KernelTiming(values) if values else None
