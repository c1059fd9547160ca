"""Recorded NVML samples beside a log: the same comparison of chip and spans as live."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from cuzk_agent.gpu.correlation import Correlator
from cuzk_agent.gpu.samples import BusyMeter, BusySample
from cuzk_agent.gpu.state import Method
from cuzk_agent.report.inputs import InputError, Tally, read_lines
from cuzk_agent.report.model import Chip
from cuzk_agent.timeline.facts import Fact, Settled

_HISTORY_S = 60.0
"""How far before its first record the ring may reach: what it holds then is not lost."""
_POLL_STRETCH_MAX_S = 10.0
_SAMPLE_MAX_S = 1.0
_SOURCE = "log"


class Recording:
    """The samples of one GPU in the order of time, read as far as they are asked for."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._samples = self._read()
        self._next: BusySample | None = next(self._samples, None)
        if self._next is None:
            raise InputError(f"{path}: no NVML samples in it")

    def until(self, unix_s: float) -> Iterator[BusySample]:
        """The samples that end by then, and were not given yet."""
        while self._next is not None and self._next.end_unix_s <= unix_s:
            yield self._next
            self._next = next(self._samples, None)

    def _read(self) -> Iterator[BusySample]:
        meter: BusyMeter | None = None
        ring_seen = False
        for lines in read_lines([self._path], Tally()):
            for line in lines:
                record = _record(line)
                if record is None:
                    continue
                unix_s, monotonic_s, raw, percent = record
                if meter is None:
                    meter = BusyMeter(unix_s - _HISTORY_S, monotonic_s - _HISTORY_S, _POLL_STRETCH_MAX_S)
                ring_seen = ring_seen or raw is not None
                if raw is not None or not ring_seen:
                    yield from meter.ring(raw, unix_s, monotonic_s)
                elif meter.method is Method.SAMPLES:
                    continue
                if percent is not None and meter.wants_poll:
                    yield from meter.poll(percent, unix_s, monotonic_s)


def _record(line: bytes) -> tuple[float, float, Sequence[tuple[int, int]] | None, int | None] | None:
    """Wall clock, monotonic clock, ring and momentary utilization of one line; None if it is none."""
    try:
        record = json.loads(line)
        unix_s = float(record["wall"])
        samples = record.get("samples")
        raw = None if samples is None else [(int(stamp), int(value)) for stamp, value in samples]
        percent = record.get("util")
        return unix_s, float(record.get("monotonic", unix_s)), raw, None if percent is None else int(percent)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class Chips:
    """What the recordings say of the spans of one engine after the other."""

    def __init__(self, recordings: Mapping[str, Recording]) -> None:
        self._recordings = recordings
        self._ahead: dict[str, deque[BusySample]] = {gpu: deque() for gpu in recordings}
        self._begin()

    def _begin(self) -> None:
        self._correlator = Correlator([_SOURCE])
        self._correlator.devices(self._recordings)
        self._busy_ms = dict.fromkeys(self._recordings, 0.0)
        self._sampled_ms = dict.fromkeys(self._recordings, 0.0)

    def fact(self, fact: Fact) -> None:
        """The log tells something."""
        self._correlator.fact(_SOURCE, fact)

    def settle(self, from_unix_s: float, until_unix_s: float, uncertainty_s: float, *, ended: bool = False) -> None:
        """The log has told everything up to a time. Samples from before `from_unix_s` are not looked at, nor is, once
        the engine has `ended`, anything later."""
        self._correlator.fact(_SOURCE, Settled(until_unix_s, uncertainty_s))
        for gpu, recording in self._recordings.items():
            ahead = self._ahead[gpu]
            ahead.extend(recording.until(until_unix_s))
            if ended:
                # With the one that lies across the end.
                ahead.extend(recording.until(until_unix_s + _SAMPLE_MAX_S))
            while ahead and (ahead[0].end_unix_s <= until_unix_s or (ended and ahead[0].start_unix_s < until_unix_s)):
                sample = ahead.popleft()
                start_s, end_s = max(sample.start_unix_s, from_unix_s), min(sample.end_unix_s, until_unix_s)
                if end_s > start_s:
                    self._correlator.busy(gpu, BusySample(start_s, end_s, sample.busy_fraction))
                    self._sampled_ms[gpu] += (end_s - start_s) * 1000
                    self._busy_ms[gpu] += (end_s - start_s) * 1000 * sample.busy_fraction
        self._correlator.advance()

    def finish(self) -> dict[str, Chip]:
        """The engine has ended: what its GPUs' chips did, for those of which there are samples."""
        found = {}
        for gpu, sampled_ms in self._sampled_ms.items():
            if sampled_ms:
                spans = self._correlator.spans(gpu).get(_SOURCE)
                found[gpu] = Chip(
                    busy_ms=self._busy_ms[gpu],
                    sampled_ms=sampled_ms,
                    span_busy_ms=spans.busy_seconds * 1000 if spans else 0.0,
                    span_sampled_ms=spans.sampled_seconds * 1000 if spans else 0.0,
                    unlogged_busy_ms=(self._correlator.unlogged_busy_seconds(gpu) or 0.0) * 1000,
                )
        self._begin()
        return found
