"""What a line of the prover's log can say, as values.

The shapes are those that the daemon's own sources print: `TIMELINE,…` through `eprintln!`, tracing lines through
tracing-subscriber, and `CUZK_TIMING: …` from the C++ prover.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EVENT_NAMES = frozenset({"SYNTH_START", "SYNTH_END", "CHAN_SEND", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END"})
"""The events this agent knows. Others are counted as `other`; they carry no meaning for the pipeline."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One `TIMELINE,<offset_ms>,<event>,<job_id>,<detail>` line."""

    offset_ms: int
    """Whole milliseconds since the engine started, on the daemon's monotonic clock."""
    name: str
    """As written; not necessarily one of `EVENT_NAMES`."""
    job_id: str
    """As the caller chose it: may hold spaces, may repeat, never a comma."""
    partition: int | None
    """None for a job that is proved whole."""
    worker: int | None
    proof_kind: str | None
    """`kind=` of a whole-proof SYNTH_START."""
    synth_ms: int | None
    gpu_ms: int | None


@dataclass(frozen=True, slots=True)
class TracingLine:
    """One line of the daemon's tracing output, colours removed."""

    unix_ms: float
    """Its time stamp: milliseconds since 1970, with the microseconds kept."""
    level: str
    span: Mapping[str, str]
    """Fields of the innermost span that has any; empty without one. Debug wrapping (`Some(3)`, quotes) is removed, a
    field that is `None` is left out."""
    message: str
    """The message without its fields."""
    fields: Mapping[str, str]
    """The line's own fields, unwrapped in the same way; `error` as it stands."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One `CUZK_TIMING: name=N …` line of the C++ prover."""

    values_ms: Mapping[str, int]
    """Every `name=N` of the line, in whole milliseconds (`gpu_tid` and `num_circuits` are plain numbers)."""


LogLine = TimelineEvent | TracingLine | KernelTiming


@dataclass(frozen=True, slots=True)
class ParseStats:
    """Totals of one parser."""

    torn_recovered: int = 0
    """TIMELINE lines that other writers had cut and that were put together again."""
    torn_lost: int = 0
    """TIMELINE lines whose rest never came."""
    unparsed: Mapping[str, int] | None = None
    """Lines that look like ours and can't be read, by reason."""
