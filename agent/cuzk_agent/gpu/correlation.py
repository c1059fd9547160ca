"""Chip against log: NVML's busy samples set beside the spans of all followed sources. Pure: time is what inputs bear.

A sample tells how much of an interval the chip was busy, not when in it. So the span goes first: as much of the busy
time as fits is taken to lie within spans, and only what is left over is *unlogged*: somebody else is on the GPU. Only
intervals that every source has settled are looked at; a source that can't keep up is waited for, but not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from cuzk_agent.gpu.samples import BusySample
from cuzk_agent.gpu.state import Comparison, SourceComparison, SpanBusy
from cuzk_agent.timeline.facts import Fact, Settled, SpanTime

MAX_WAIT_S = 60.0
"""How long samples wait for a source to settle, and time for a sample to come. Beyond, they go on without."""
_CLOCK_SET_S = 10.0
"""A source whose settled time goes back by more than this has a new wall clock."""
_TOGETHER_S = 0.0005
"""Stretches nearer to each other than this touch: the log counts whole milliseconds."""
_SAMPLE_MAX_S = 0.2
"""The interval of NVML's ring: what uncertainty is measured by where there is no sample."""
_MAX_PENDING = 4096
"""Samples of a GPU, or stretches of a source on a GPU, kept at most. A stretch lasts as long as the same spans are
open: in 60 s of a busy GPU there are some hundred."""
_WINDOW_S = 600.0
_SLICE_S = 5.0
_UNKNOWN_GPU = "unknown"

Unit = tuple[str, int]
"""Source, and the number of a unit in it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of compared time on one GPU with the same spans open throughout."""

    gpu: str
    start_unix_s: float
    end_unix_s: float
    units: tuple[Unit, ...]
    """Whose spans are open, of all sources; empty outside all spans."""
    unlogged_share: float
    """Outside spans: the share of the time in which the chip was busy all the same, as the sample there has it."""

    @property
    def seconds(self) -> float:
        return self.end_unix_s - self.start_unix_s


@dataclass(slots=True)
class _Stretch:
    start_s: float
    end_s: float
    units: tuple[int, ...]


@dataclass(slots=True)
class _Source:
    since_s: float | None = None
    """Nothing is known of earlier times."""
    frontier_s: float | None = None
    uncertainty_s: float = 0.0
    left_out_s: float = 0.0
    stretches: dict[str, deque[_Stretch]] = field(default_factory=dict)
    """By GPU as the log names it: in order, without overlap, not compared yet."""

    def add(self, fact: SpanTime) -> None:
        if self.since_s is None:
            self.since_s = fact.start_unix_s
        stretches = self.stretches.setdefault(fact.gpu, deque(maxlen=_MAX_PENDING))
        start_s, units = fact.start_unix_s, tuple(sorted(fact.units))
        if stretches:
            last = stretches[-1]
            start_s = max(start_s, last.end_s)
            if last.units == units and start_s - last.end_s < _TOGETHER_S:
                last.end_s = max(last.end_s, fact.end_unix_s)
                return
        if fact.end_unix_s > start_s:
            stretches.append(_Stretch(start_s, fact.end_unix_s, units))

    def settle(self, fact: Settled) -> None:
        if self.since_s is None:
            self.since_s = fact.until_unix_s
        if self.frontier_s is not None and fact.until_unix_s < self.frontier_s - _CLOCK_SET_S:
            self.since_s, self.frontier_s = fact.until_unix_s, None
            self.stretches.clear()
        self.frontier_s = max(fact.until_unix_s, self.frontier_s or fact.until_unix_s)
        self.uncertainty_s = fact.uncertainty_s


@dataclass(slots=True)
class _SpanBusy:
    busy_s: float = 0.0
    sampled_s: float = 0.0
    slices: deque[tuple[float, float, float]] = field(default_factory=deque)
    """Start, busy and sampled seconds of each few seconds of the rolling window."""

    def add(self, at_s: float, busy_s: float, sampled_s: float) -> None:
        self.busy_s += busy_s
        self.sampled_s += sampled_s
        if self.slices and at_s < self.slices[-1][0] + _SLICE_S:
            start_s, slice_busy_s, slice_sampled_s = self.slices.pop()
            self.slices.append((start_s, slice_busy_s + busy_s, slice_sampled_s + sampled_s))
        else:
            self.slices.append((at_s, busy_s, sampled_s))

    def freeze(self, now_s: float) -> SpanBusy:
        while self.slices and self.slices[0][0] <= now_s - _WINDOW_S:
            self.slices.popleft()
        sampled_s = sum(sampled_s for _, _, sampled_s in self.slices)
        busy_s = sum(busy_s for _, busy_s, _ in self.slices)
        return SpanBusy(self.busy_s, self.sampled_s, busy_s / sampled_s if sampled_s else None)


@dataclass(slots=True)
class _Gpu:
    walked_s: float
    """Compared up to here."""
    begun: bool = False
    """Before, the earliest that was read is where time begins."""
    samples: deque[BusySample] = field(default_factory=deque)
    users: set[str] = field(default_factory=set)
    """Sources that have had spans here."""
    spans: dict[str, _SpanBusy] = field(default_factory=dict)
    unlogged_s: float | None = None


class Correlator:
    """Compares samples and spans as both become known. `on_piece` hears of all compared time in its order, GPU by GPU.

    Facts of a source, and samples of a GPU, come in their order; between sources and GPUs there is none.
    """

    def __init__(self, sources: Iterable[str] = (), on_piece: Callable[[Piece], None] = lambda _: None) -> None:
        """`sources`: all that are going to tell something. One that is not named here takes part from its first fact
        on, and nothing waits for it before."""
        self._sources = {source: _Source() for source in sources}
        self._gpus: dict[str, _Gpu] = {}
        self._labels: set[str] = set()
        self._on_piece = on_piece
        self._first_s = 0.0
        self._newest_s: float | None = None

    # --- input -------------------------------------------------------------------------------------------------

    def devices(self, gpus: Iterable[str]) -> None:
        """These GPUs exist. A log that does not name its GPU means the only one, if there never was another."""
        self._labels.update(gpus)

    def fact(self, source: str, fact: Fact) -> None:
        """A source's timeline tells something."""
        known = self._sources.setdefault(source, _Source())
        if isinstance(fact, SpanTime):
            known.add(fact)
        elif isinstance(fact, Settled):
            known.settle(fact)

    def busy(self, gpu: str, sample: BusySample) -> None:
        """A busy sample of a GPU."""
        self.observed(gpu, sample.start_unix_s, sample.end_unix_s)
        self._gpus[gpu].samples.append(sample)

    def observed(self, gpu: str, start_unix_s: float, end_unix_s: float) -> None:
        """Something was read of this GPU for this interval, be it no busy sample: its time goes on."""
        known = self._gpus.get(gpu)
        if known is None:
            known = self._gpus[gpu] = _Gpu(start_unix_s)
            self._labels.add(gpu)
        if not known.begun:
            known.walked_s = min(known.walked_s, start_unix_s)
        if self._newest_s is None:
            self._first_s = start_unix_s
        if self._newest_s is None or not self._newest_s - MAX_WAIT_S <= end_unix_s <= self._newest_s:
            self._newest_s = end_unix_s
        if end_unix_s < known.walked_s - MAX_WAIT_S:
            # The wall clock was set back: this is a new time.
            known.walked_s = start_unix_s
            known.samples.clear()
            for spans in known.spans.values():
                spans.slices.clear()

    # --- comparing ---------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Compares everything that can be compared."""
        if self._newest_s is None:
            return
        for gpu, known in self._gpus.items():
            while known.samples and (len(known.samples) > _MAX_PENDING or self._settled(known.samples[0].end_unix_s)):
                sample = known.samples.popleft()
                self._pass(gpu, known, sample.start_unix_s)
                self._compare(gpu, known, sample)
            next_s = known.samples[0].start_unix_s if known.samples else self._newest_s
            self._pass(gpu, known, min(self._newest_s - MAX_WAIT_S, next_s))
        self._forget()

    def _settled(self, until_s: float) -> bool:
        """No source that one waits for has anything more to tell of the time before."""
        return all(
            self._lags(source) or (source.frontier_s is not None and source.frontier_s >= until_s)
            for source in self._sources.values()
        )

    def _lags(self, source: _Source) -> bool:
        settled_s = self._first_s if source.frontier_s is None else source.frontier_s
        return self._newest_s is not None and self._newest_s - settled_s > MAX_WAIT_S

    def _stretches(self, source: _Source, gpu: str, start_s: float, end_s: float) -> Iterator[_Stretch]:
        """What lies in an interval of a source's stretches on a GPU. Time only goes on: older ones are dropped."""
        for label in (gpu, _UNKNOWN_GPU) if len(self._labels) == 1 else (gpu,):
            stretches = source.stretches.get(label)
            while stretches and stretches[0].end_s <= start_s:
                stretches.popleft()
            for stretch in stretches or ():
                if stretch.start_s >= end_s:
                    break
                yield _Stretch(max(stretch.start_s, start_s), min(stretch.end_s, end_s), stretch.units)

    def _within(
        self, gpu: str, known: _Gpu, start_s: float, end_s: float, uncertainty_max_s: float, *, sampled: bool
    ) -> tuple[dict[str, list[_Stretch]], bool]:
        """The stretches in an interval by source, for the sources that can be compared; and whether chip-busy time
        outside them could belong to a source that can't."""
        found: dict[str, list[_Stretch]] = {}
        in_doubt = False
        for name, source in self._sources.items():
            if source.frontier_s is None or source.since_s is None:
                if sampled:
                    source.left_out_s += end_s - start_s
                continue
            stretches = list(self._stretches(source, gpu, start_s, end_s))
            if stretches:
                known.users.add(name)
            covered = source.frontier_s >= end_s
            certain = source.uncertainty_s <= uncertainty_max_s
            if covered and certain:
                found[name] = stretches
                in_doubt = in_doubt or source.since_s > start_s
            else:
                in_doubt = in_doubt or name in known.users
                if sampled:
                    source.left_out_s += end_s - start_s
            if len(self._labels) > 1:
                homeless = source.stretches.get(_UNKNOWN_GPU, ())
                in_doubt = in_doubt or any(stretch.start_s < end_s and stretch.end_s > start_s for stretch in homeless)
        return found, in_doubt

    def _compare(self, gpu: str, known: _Gpu, sample: BusySample) -> None:
        start_s, end_s = max(sample.start_unix_s, known.walked_s), sample.end_unix_s
        if end_s <= start_s:
            return
        sampled_s = end_s - start_s
        busy_s = sample.busy_fraction * sampled_s
        half_s = (sample.end_unix_s - sample.start_unix_s) / 2
        found, in_doubt = self._within(gpu, known, start_s, end_s, half_s, sampled=True)
        pieces = _pieces(gpu, start_s, end_s, found)
        outside_s = sum(piece.seconds for piece in pieces if not piece.units)
        for name in found:
            if name in known.users:
                span_s = sum(piece.seconds for piece in pieces if any(source == name for source, _ in piece.units))
                known.spans.setdefault(name, _SpanBusy()).add(end_s, min(busy_s, span_s), span_s)
        unlogged_s = max(busy_s - (sampled_s - outside_s), 0.0)
        if found and not in_doubt:
            known.unlogged_s = (known.unlogged_s or 0.0) + unlogged_s
        share = min(unlogged_s / outside_s, 1.0) if outside_s > 0 else 0.0
        self._tell(known, pieces, share)

    def _pass(self, gpu: str, known: _Gpu, until_s: float) -> None:
        """Goes on over time of which there is no busy sample."""
        if until_s > known.walked_s:
            found, _ = self._within(gpu, known, known.walked_s, until_s, _SAMPLE_MAX_S / 2, sampled=False)
            self._tell(known, _pieces(gpu, known.walked_s, until_s, found), 0.0)

    def _tell(self, known: _Gpu, pieces: list[Piece], share: float) -> None:
        known.begun = True
        for piece in pieces:
            known.walked_s = piece.end_unix_s
            self._on_piece(
                piece if piece.units else Piece(piece.gpu, piece.start_unix_s, piece.end_unix_s, (), share),
            )

    def _forget(self) -> None:
        """Drops the stretches that all samples have gone by."""
        assert self._newest_s is not None
        for source in self._sources.values():
            for gpu, stretches in source.stretches.items():
                named = next(iter(self._labels)) if gpu == _UNKNOWN_GPU and len(self._labels) == 1 else gpu
                known = self._gpus.get(named)
                done_s = self._newest_s - MAX_WAIT_S if known is None else known.walked_s
                while stretches and stretches[0].end_s <= done_s:
                    stretches.popleft()

    # --- output ------------------------------------------------------------------------------------------------

    def units(self) -> set[Unit]:
        """Units with span time that has not been compared yet."""
        return {
            (name, unit)
            for name, source in self._sources.items()
            for stretches in source.stretches.values()
            for stretch in stretches
            for unit in stretch.units
        }

    def spans(self, gpu: str) -> dict[str, SpanBusy]:
        """Chip against log by source, for the sources that use this GPU."""
        known = self._gpus.get(gpu)
        return {} if known is None else {name: spans.freeze(known.walked_s) for name, spans in known.spans.items()}

    def unlogged_busy_seconds(self, gpu: str) -> float | None:
        """Chip busy outside the spans of all sources; None while nothing could be set against them.

        Time in which the busy chip could be that of a source that can't be compared is not counted.
        """
        known = self._gpus.get(gpu)
        return None if known is None else known.unlogged_s

    def sources(self) -> Mapping[str, SourceComparison]:
        """How each source takes part at present."""
        return {name: self._source(source) for name, source in self._sources.items()}

    def settled_unix_s(self, source: str) -> float | None:
        """Up to when a source has told everything."""
        known = self._sources.get(source)
        return None if known is None else known.frontier_s

    def _source(self, source: _Source) -> SourceComparison:
        if source.frontier_s is None:
            return SourceComparison(Comparison.WAITING, None, source.left_out_s)
        comparison = Comparison.COMPARED
        if self._lags(source):
            comparison = Comparison.LAGGING
        elif source.uncertainty_s > _SAMPLE_MAX_S / 2:
            comparison = Comparison.UNCERTAIN
        return SourceComparison(comparison, source.uncertainty_s, source.left_out_s)


def _pieces(gpu: str, start_s: float, end_s: float, found: Mapping[str, list[_Stretch]]) -> list[Piece]:
    """The interval cut where the set of open spans changes."""
    edges = {start_s, end_s}
    for stretches in found.values():
        for stretch in stretches:
            edges.update((stretch.start_s, stretch.end_s))
    cuts = sorted(edges)
    return [
        Piece(
            gpu,
            cut_s,
            next_s,
            tuple(
                (name, unit)
                for name, stretches in found.items()
                for stretch in stretches
                if stretch.start_s <= cut_s and stretch.end_s >= next_s
                for unit in stretch.units
            ),
            0.0,
        )
        for cut_s, next_s in pairwise(cuts)
    ]
