"""The whole state of a pipeline ↔ values that `json` can write: what a snapshot holds of one source. Pure.

The table says what is stored of every class. What isn't there (listeners, settings, caches) is made anew.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Final

from cuzk_agent.timeline import ledger, tally
from cuzk_agent.timeline.anchor import Anchor, _Bounds
from cuzk_agent.timeline.codec import FixedTuple, Form, Reader, Row, Simple, Writer, schema
from cuzk_agent.timeline.engine import Engine
from cuzk_agent.timeline.kernel import KernelTimes, MutexHeld
from cuzk_agent.timeline.ledger import GpuAccount, GpuTotals, JobAccount, Ledger, OpenGap, Rank, Track
from cuzk_agent.timeline.lines import KernelTiming, LogLine, TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import LineParser
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import Exemplar, LatencyBasis
from cuzk_agent.timeline.tally import Counters, HistogramTally, Numbers
from cuzk_agent.timeline.torn import TornLines
from cuzk_agent.timeline.units import Job, Unit, Units
from cuzk_agent.windows import RollingWindow, Slice

_Edge = ledger._Edge  # noqa: SLF001  stored, and nobody else's
_Evidence = ledger._Evidence  # noqa: SLF001

PARTS: Final[dict[type, dict[str, Any]]] = {
    Pipeline: {
        "_numbers": Numbers,
        "_parser": LineParser,
        "_engines": int,
        "_early": deque[TracingLine],
        "_fresh": bool,
        "_over": bool,
        "_startup": dict[str, str],
        "_undated": list[LogLine],
        "_held": list[LogLine],
        "_held_ms": int,
        "_misplaced": int,
        "_arrival": Arrival | None,
        "_counters": Counters,
        "_events": dict[str, int],
        "_late": int,
        "_synth_ms": int,
        "_bases": set[LatencyBasis],
        "_past": dict[str, GpuTotals],
        "_phases": dict[str, tuple[int, float]],
        "_kernel_ms": dict[str, int],
        "_gap_windows": dict[str, RollingWindow],
        "_synth_window": RollingWindow,
        "_window_base_s": float,
        "_window_now_s": float,
        "_settled_monotonic_s": float | None,
        "_unix_minus_monotonic_s": float | None,
        "_clock_set": bool,
        "_now_ms": int | None,
    },
    LineParser: {"_torn": TornLines, "_error": list[bytes], "_error_bytes": int},
    TornLines: {
        "recovered": int,
        "lost": int,
        "unparsed": Counter[str],
        "_head": list[bytes] | None,
        "_age": int,
    },
    Engine: {
        "anchor": Anchor,
        "ledger": Ledger,
        "units": Units,
        "kernel": KernelTimes,
        "settings": dict[str, str],
        "seen_ms": int,
        "first_event_ms": int | None,
        "last_event_ms": int | None,
        "last_line_ms": int,
        "stopped": bool,
        "start_monotonic_s": float | None,
        "arrivals_live": bool,
        "wall_clock_told": bool,
        "traced": bool,
        "_gpu_of": dict[int, str],
        "_srs_since_ms": dict[str, int],
        "_silent": bool,
        "_work_at_last_line": bool,
    },
    Anchor: {
        "_recent": _Bounds,
        "_older": _Bounds,
        "_delivered": _Bounds,
        "_delivered_before": _Bounds,
        "_start_line_ms": float | None,
        "_last_tracing_ms": float | None,
        "_last_offset_ms": int | None,
        "_known": tuple[float, float] | None,
    },
    KernelTimes: {
        "_barriers": deque[int],
        "_totals": deque[tuple[int, int]],
        "_held": deque[MutexHeld],
        "_returns_logged": bool,
        "phases": dict[str, tuple[int, float]],
    },
    Ledger: {
        "start_ms": int,
        "counted_from_ms": int,
        "frontier_ms": int,
        "late": int,
        "synth_ms": int,
        "accounts": dict[str, GpuAccount],
        "jobs_announced": bool,
        "spans_logged": bool,
        "_settled": _Evidence,
        "_edges": list[tuple[int, int, _Edge]],
        "_sequence": int,
        "_in_stage": dict[Rank, int],
        "_unassigned_pickups": int,
        "_silent": bool,
        "_mapped": bool,
        "_finished": bool,
        "_untouched": GpuAccount,
    },
    Units: {
        "_jobs": dict[str, list[Job]],
        "_open": dict[Job, None],
        "_closed": dict[Job, None],
        "_held": int,
        "_shelves": dict[tuple[Rank, str], dict[Unit, None]],
        "_stays": dict[tuple[Rank, str], deque[int]],
        "_whole_ready": dict[Unit, None],
        "_overtaken": dict[Unit, int],
        "_picked_up_by": dict[int, Unit],
        "_whole_ended": deque[Unit],
        "_last_synth_start_ms": int,
        "_ticked_ms": int,
        "_spans_seen": bool,
        "assembly_logged": bool,
    },
}
"""What is stored of objects that make their own parts, and listen to them."""

NOT_STORED: Final[dict[type, frozenset[str]]] = {
    Pipeline: frozenset(
        {
            # Settings, and who listens.
            "_limits", "_listeners", "_on_gap", "_on_job", "_on_stop", "_on_latency", "_tell",
            # A root of its own.
            "engine",
            # Of the line that is being fed.
            "_delivered_unix_s",
        }
    ),
    LineParser: frozenset({"_tracing"}),  # a cache
    TornLines: frozenset(),
    Engine: frozenset({"_counters", "_limits"}),
    Anchor: frozenset(),
    KernelTimes: frozenset({"_on_kernel"}),
    Ledger: frozenset({"_on_gap", "_on_spans", "_on_span_end", "_on_time", "_on_stage"}),
    Units: frozenset(
        {"_ledger", "_counters", "_age_limit_ms", "_numbers", "_exemplar", "_on_latency", "_on_job", "_on_unit"}
    ),
}  # fmt: skip
"""The rest of them: the same for every pipeline that was made with the same settings."""

SHARED: Final = (Job, Unit, Track, JobAccount)
VALUES: Final = (
    Numbers, Arrival, Counters, Exemplar, GpuTotals, GpuAccount, OpenGap, RollingWindow, MutexHeld, _Bounds,
    TimelineEvent, TracingLine, KernelTiming, Slice, *_Edge.__args__,
)  # fmt: skip


class _Tally(Form):
    """A histogram by the number of its bounds: there are few of those, and many histograms."""

    _BOUNDS: Final = (tally.SYNTH_BOUNDS, tally.SPAN_BOUNDS, tally.GAP_BOUNDS, tally.WAIT_BOUNDS, tally.PROOF_BOUNDS)

    def store(self, values: list[HistogramTally], writer: Writer) -> list[Any]:  # noqa: ARG002  the base's
        return [
            (
                self._BOUNDS.index(one.bounds),
                list(one.counts),
                one.sum_micros,
                [
                    (bucket, exemplar.job_id, exemplar.seconds, exemplar.unix_seconds)
                    for bucket, exemplar in enumerate(one.exemplars)
                    if exemplar is not None
                ],
            )
            for one in values
        ]

    def read(self, stored: Any, reader: Reader) -> HistogramTally:
        if type(stored) is not list or len(stored) != 4 or stored[0] not in range(len(self._BOUNDS)):
            raise ValueError("expected a histogram")
        made = HistogramTally(self._BOUNDS[stored[0]])
        made.counts = _COUNTS.read(stored[1], reader)
        made.sum_micros = _COUNT.read(stored[2], reader)
        for bucket, *exemplar in _EXEMPLARS.read(stored[3], reader):
            made.exemplars[bucket] = Exemplar(*exemplar)
        if len(made.counts) != len(made.exemplars):
            raise ValueError("as many counts as buckets")
        return made

    def __str__(self) -> str:
        return f"histogram{self._BOUNDS}"


_COUNT = Simple([int])
_COUNTS = Row(list, _COUNT)
_EXEMPLARS = Row(list, FixedTuple([_COUNT, Simple([str]), Simple([float]), Simple([float, type(None)])]))
_SCHEMA: Final = schema(
    roots=(Pipeline, Engine),
    parts=PARTS,
    shared=SHARED,
    values=VALUES,
    unchanging=(Slice,),
    forms={HistogramTally: _Tally()},
)

SHAPE: Final = hashlib.sha256(str(_SCHEMA).encode()).hexdigest()[:16]
"""Another one means that what was stored can't be read: the classes have changed since."""


class Saver:
    """Stores one pipeline again and again."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._memo: dict[int, tuple[Any, str]] = {}

    def save(self) -> dict[str, Any]:
        """The state now; what the pipeline does later changes nothing in it."""
        pipeline = self._pipeline
        roots = (pipeline,) if pipeline.engine is None else (pipeline, pipeline.engine)
        writer = Writer(self._memo)
        stored = _SCHEMA.store(roots, writer)
        self._memo = writer.memo
        return {"shape": SHAPE, **stored}


def load(pipeline: Pipeline, stored: object) -> None:
    """Gives a new pipeline the state that was saved, so that it goes on as the other would. Raises ValueError for what
    no `save` of this version made; then the pipeline is of no use."""
    if not isinstance(stored, dict) or stored.get("shape") != SHAPE:
        raise ValueError("it was written by another version")
    parts = stored.get("roots")
    if type(parts) is not list or len(parts) not in (1, 2):
        raise ValueError("expected a pipeline, and an engine if there is one")

    def roots() -> Iterator[Pipeline | Engine]:
        yield pipeline
        if len(parts) == 2:
            pipeline.engine = pipeline.new_engine(0)
            yield pipeline.engine

    _SCHEMA.fill({name: part for name, part in stored.items() if name != "shape"}, roots())
