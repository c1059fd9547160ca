"""A run as a trace that ui.perfetto.dev and chrome://tracing open, in the trace event format, written as it is read.

Slices that share a track nest or lie apart, which that format asks for: what overlaps has lanes of its own.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from cuzk_agent.report.command import Answer, Ending
from cuzk_agent.report.inputs import STDIN, InputError, Progress, expand
from cuzk_agent.report.nvml import Recording
from cuzk_agent.report.palette import BUSY, CAUSES, CHIP, FAILED, SYNTH
from cuzk_agent.report.recorder import (
    ChipBusy,
    Counts,
    EngineBegun,
    EngineOver,
    Event,
    Idle,
    JobOver,
    Recorded,
    Span,
    UnitOver,
    record,
)
from cuzk_agent.report.waterfall import Waterfall
from cuzk_agent.report.words import printable
from cuzk_agent.timeline.ledger import Gap
from cuzk_agent.timeline.state import ProofOutcome, Stage, UnitOutcome
from cuzk_agent.timeline.units import Job, Unit

_ENGINE_TRACKS = 1 << 17
"""Numbers of tracks ("threads") that an engine has for itself. They are above all numbers of engines ("processes"):
viewers take a track of the same number as its process for that process's main thread. And they are in the order in
which tracks are to stand: Perfetto goes by nothing else."""
_GPU_TRACKS, _WORKER_TRACKS = 512, 8
_UNKNOWN_GPU = 64
_SYNTH_TRACKS = 1 << 16

_COUNTERS = {Stage.READY: "ready queue", Stage.SYNTH: "in synthesis", Stage.WAITING: "waiting"}


def run_trace(
    logs: Sequence[str],
    recordings: Mapping[str, str],
    *,
    trace: Path | None,
    html: Path | None,
    on_progress: Callable[[Progress], None],
) -> Answer:
    """Writes one log as a trace and as a page."""
    try:
        paths = expand(logs)
        recorded = _write(paths, recordings, trace, html, on_progress)
    except InputError as error:
        return Answer("", (str(error),), Ending.NO_DATA)
    names = ", ".join(paths)
    complaints = [] if recorded.fault is None else [str(recorded.fault)]
    if not recorded.spans and recorded.fault is None:
        complaints.append(f"{names}: {_lack(recorded)}")
    ending = Ending.NO_DATA if complaints else Ending.STOPPED
    if recordings and not recorded.samples:
        complaints.append(f"{names}: none of the NVML samples is of its time, or it tells no time")
    return Answer("", tuple(complaints), ending)


def _write(
    paths: Sequence[str],
    recordings: Mapping[str, str],
    trace: Path | None,
    html: Path | None,
    on_progress: Callable[[Progress], None],
) -> Recorded:
    taken = [Path(path) for path in (*paths, *recordings.values()) if path != STDIN]
    title = ", ".join(Path(path).name if path != STDIN else "standard input" for path in paths)
    samples = {gpu: Recording(path) for gpu, path in recordings.items()}
    forms: tuple[tuple[Path | None, type[ChromeTrace | Waterfall]], ...] = ((trace, ChromeTrace), (html, Waterfall))
    for path, form in forms:
        if path is not None:
            _refuse_another(path, form.BEGINS)
    with ExitStack() as stack:
        writers: list[ChromeTrace | Waterfall] = []
        for path, form in forms:
            if path is not None:
                if any(path.exists() and path.samefile(other) for other in taken if other.exists()):
                    raise OSError(errno.EINVAL, "Is read or written already", str(path))
                out = stack.enter_context(path.open("w", encoding="utf-8"))
                taken.append(path)
                writers.append(form(out, title))

        def tell(event: Event) -> None:
            for writer in writers:
                writer.tell(event)

        recorded = record(paths, samples, tell, on_progress)
        for writer in writers:
            writer.close()
    return recorded


def _refuse_another(path: Path, begins: str) -> None:
    """A run is drawn again and again: its picture may be overwritten, and nothing else, which may be a log."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(begins)) != begins.encode():
                raise FileExistsError(f"{path}: already there, and not written by trace: it is not overwritten")


def _lack(recorded: Recorded) -> str:
    if not recorded.bytes:
        return "empty"
    if recorded.units:
        return "no proving on a GPU in it"
    return recorded.lack


class ChromeTrace:
    """Writes what a recorder tells. An engine is a process, a lane is a thread."""

    BEGINS: Final = '{"displayTimeUnit":"ms","otherData":'
    """Every trace begins with this."""

    def __init__(self, out: TextIO, title: str) -> None:
        self._out = out
        self._separator = "\n"
        other = json.dumps({"log": printable(title)})
        out.write(f'{self.BEGINS}{other},"traceEvents":[')
        self._pid = 0
        self._base_ms = 0
        self._tracks: dict[str, int] = {}
        self._taken: set[int] = set()
        self._counts: dict[Stage, int] = {}
        self._chips: dict[str, float] = {}
        """Until when the chip of a GPU has a value."""

    def close(self) -> None:
        """Everything was told."""
        self._out.write("\n]}\n")

    def tell(self, event: Event) -> None:
        """Takes in the next event."""
        match event:
            case EngineBegun():
                self._engine(event)
            case EngineOver():
                self._engine_over(event)
            case UnitOver():
                self._unit(event)
            case JobOver(job, at_ms):
                if job.outcome in (ProofOutcome.FAILED, ProofOutcome.LOST):
                    self._instant(f"job {job.outcome.value}: {printable(job.job_id)}", at_ms, _about(job))
            case Idle(gpu, cause, start_ms, end_ms):
                track = self._track(f"GPU {gpu} idle", _gpu_place(gpu) + 1)
                self._slice(track, cause.value, "idle", start_ms, end_ms, {}, CAUSES[cause].chrome)
            case Gap():
                self._gap(event)
            case Counts(at_ms, units):
                self._count(at_ms, units)
            case ChipBusy():
                self._chip(event)

    # --- engines -----------------------------------------------------------------------------------------------------

    def _engine(self, begun: EngineBegun) -> None:
        self._pid, self._base_ms = begun.number, begun.base_ms
        self._tracks, self._taken, self._counts, self._chips = {}, set(), {}, {}
        # Viewers show its number behind the name.
        self._process("process_name", name="engine")
        self._process("process_sort_index", sort_index=begun.number)
        when: dict[str, Any] = {"clock_ms": begun.start_ms}
        if begun.start_unix_s is not None:
            when["clock_zero"] = _iso(begun.start_unix_s)
            self._process("process_labels", labels=f"started {when['clock_zero']}")
        self._instant("engine starts" if begun.start_ms == 0 else "log begins", begun.start_ms, when)

    def _engine_over(self, over: EngineOver) -> None:
        if over.stopped:
            self._count(over.at_ms, dict.fromkeys(self._counts, 0))
        for gpu, until_ms in self._chips.items():
            self._put("C", f"GPU {gpu} chip", until_ms, args={"busy %": 0})
        settings = {name: printable(value) for name, value in over.settings.items()}
        self._instant("engine ends" if over.stopped else "log ends", over.at_ms, settings)

    def _process(self, name: str, /, **args: Any) -> None:
        self._put("M", name, None, args=args)

    # --- slices ------------------------------------------------------------------------------------------------------

    def _unit(self, over: UnitOver) -> None:
        unit, synth, span = over.unit, over.synth, over.span
        name = _name(unit)
        args = {**_about(unit.job), "partition": unit.partition, "outcome": over.outcome or "in flight"}
        flow = {"bind_id": f"{over.number:#x}"} if synth is not None and span is not None else {}
        bad = over.outcome in (UnitOutcome.FAILED, UnitOutcome.LOST)
        if synth is not None:
            track = self._track(f"synthesis {synth.lane + 1}", _SYNTH_TRACKS + synth.lane)
            colour = FAILED if bad and span is None else SYNTH
            leaving = {**flow, "flow_out": True} if flow else {}
            self._slice(track, name, "synth", synth.start_ms, synth.end_ms, args, colour.chrome, **leaving)
        if span is not None:
            arriving = {**flow, "flow_in": True} if flow else {}
            self._span(unit, span, name, args, (FAILED if bad else BUSY).chrome, arriving)
        if bad:
            self._instant(f"partition {over.outcome}: {name}", over.at_ms, args)

    def _span(
        self, unit: Unit, span: Span, name: str, args: Mapping[str, Any], colour: str, flow: Mapping[str, Any]
    ) -> None:
        worker, lane = span.worker, span.stay.lane
        track_name = f"GPU {span.gpu} worker {'?' if worker is None else worker}" + (f" ({lane + 1})" if lane else "")
        place = (0 if worker is None else worker) * _WORKER_TRACKS + min(lane, _WORKER_TRACKS - 1)
        track = self._track(track_name, _gpu_place(span.gpu) + 2 + min(place, _GPU_TRACKS - 3))
        start_ms, end_ms = span.stay.start_ms, span.stay.end_ms
        args = {**args, "ready_wait_ms": _between(unit.ready_ms, unit.picked_up_ms)}
        args["handoff_ms"] = _between(unit.picked_up_ms, unit.start_ms)
        self._slice(track, name, "gpu", start_ms, end_ms, args, colour, **flow)
        if span.kernel_ms is not None:
            kernel_start_ms, kernel_end_ms = max(span.kernel_ms[0], start_ms), min(span.kernel_ms[1], end_ms)
            if kernel_end_ms > kernel_start_ms:
                self._slice(track, "kernels", "kernel", kernel_start_ms, kernel_end_ms, {}, CHIP.chrome)

    def _gap(self, gap: Gap) -> None:
        args = {
            "by_cause_ms": {cause.value: ms for cause, ms in gap.by_cause_ms.items()},
            "boundary": gap.boundary.value,
            "job_before": printable(gap.job_before),
            "job_after": printable(gap.job_after),
        }
        track = self._track(f"GPU {gap.gpu} gaps", _gpu_place(gap.gpu))
        self._slice(track, gap.cause.value, "gap", gap.start_ms, gap.end_ms, args, CAUSES[gap.cause].chrome)

    def _slice(
        self,
        track: int,
        name: str,
        category: str,
        start_ms: int,
        end_ms: int,
        args: Mapping[str, Any],
        colour: str,
        **more: Any,
    ) -> None:
        duration_us = (end_ms - start_ms) * 1000
        self._put("X", name, start_ms, track, cat=category, dur=duration_us, cname=colour, args=args, **more)

    # --- counters and instants ---------------------------------------------------------------------------------------

    def _count(self, at_ms: int, units: Mapping[Stage, int]) -> None:
        for stage, name in _COUNTERS.items():
            count = units.get(stage, 0)
            # Nobody can tell that nothing waits, only that something does.
            if count != self._counts.get(stage, 0 if stage is Stage.WAITING else None):
                self._counts[stage] = count
                self._put("C", name, at_ms, args={"units": count})

    def _chip(self, busy: ChipBusy) -> None:
        name = f"GPU {busy.gpu} chip"
        until_ms = self._chips.get(busy.gpu)
        if until_ms is not None and busy.start_ms - until_ms > 1:
            # A counter has no way to say that there is no sample.
            self._put("C", name, until_ms, args={"busy %": 0})
        self._chips[busy.gpu] = busy.end_ms
        self._put("C", name, busy.start_ms, args={"busy %": round(busy.busy_fraction * 100, 1)})

    def _instant(self, name: str, at_ms: float, args: Mapping[str, Any]) -> None:
        self._put("i", name, at_ms, self._track("events", 0), s="t", args=args)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _track(self, name: str, place: int) -> int:
        track = self._tracks.get(name)
        if track is None:
            while place in self._taken:
                place += 1
            self._taken.add(place)
            track = self._tracks[name] = self._pid * _ENGINE_TRACKS + place
            self._put("M", "thread_name", None, track, args={"name": name})
            self._put("M", "thread_sort_index", None, track, args={"sort_index": place})
        return track

    def _put(self, phase: str, name: str, at_ms: float | None, track: int = 0, **more: Any) -> None:
        event = {"ph": phase, "name": name, "pid": self._pid, "tid": track or self._pid}
        if at_ms is not None:
            event["ts"] = round((self._base_ms + at_ms) * 1000)
        self._out.write(self._separator + json.dumps(event | more, separators=(",", ":")))
        self._separator = ",\n"


def _gpu_place(gpu: str) -> int:
    return _GPU_TRACKS * (int(gpu) if gpu.isdecimal() else _UNKNOWN_GPU) + 1


def _name(unit: Unit) -> str:
    job_id = printable(unit.job.job_id)
    return job_id if unit.partition is None else f"{job_id} p{unit.partition}"


def _about(job: Job) -> dict[str, Any]:
    about: dict[str, Any] = {"job": printable(job.job_id), "kind": job.kind}
    if job.incarnation:
        about["incarnation"] = job.incarnation
    return about


def _between(start_ms: int | None, end_ms: int | None) -> int | None:
    return None if start_ms is None or end_ms is None else max(end_ms - start_ms, 0)


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
