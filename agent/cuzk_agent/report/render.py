"""A report as text for people, and as CSV."""

from __future__ import annotations

import bisect
import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cuzk_agent.report.compare import Chance, Compared, Comparison, Unit
from cuzk_agent.report.model import EngineReport, GpuReport, JobRow, LongGap, Report, Values
from cuzk_agent.report.words import NONE, duration, number, offset, plural, printable, share
from cuzk_agent.timeline.state import Boundary, Cause, LatencyBasis, ProofOutcome, UnitOutcome

MIN_WIDTH = 80
_READABLE = 120
"""Sentences are no wider than this; tables are as wide as there is room."""
_LEAST = 4
"""No cell is cut to less."""
_ENDS = (0.25, 0.5, 0.0)
"""How much of what a cut leaves may be the end, best first: of most ids only the end is their own."""
_CAUSES = (Cause.STARVED, Cause.BLOCKED, Cause.HANDOFF, Cause.FILL, Cause.NO_WORK, Cause.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Style:
    """How text is laid out."""

    colour: bool = False
    width: int = MIN_WIDTH

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text

    def bad(self, text: str) -> str:
        return f"\x1b[33m{text}\x1b[0m" if self.colour else text


@dataclass(frozen=True, slots=True)
class Table:
    """Cells under a header; the columns in `left` are set to the left, the others to the right."""

    header: Sequence[str]
    left: frozenset[int] = frozenset({0})
    rows: list[Sequence[str]] = field(default_factory=list)
    gap: int = 2

    def lines(self, style: Style) -> list[str]:
        """Each line without spaces at its end; columns without any content are left out, and those in `left` cut where
        the table would be too wide, unless two of their cells would then look the same."""
        told = [
            index for index, column in enumerate(zip(*self.rows, strict=True)) if not index or set(column) - {NONE, ""}
        ]
        left = {at for at, index in enumerate(told) if index in self.left}
        cells = [[printable(row[index]) for index in told] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        over = sum(widths) + self.gap * (len(widths) - 1) + 2 - style.width
        end = _ENDS[0]
        if over > 0:
            texts = {row[column] for row in cells for column in left}
            heads = {column: len(cells[0][column]) for column in left}
            tried = ((*_narrowed(widths, heads, _least_width(texts, end), over), end) for end in _ENDS)
            over, widths, end = min(tried, key=lambda each: each[0])
        lines = []
        for index, row in enumerate(cells):
            shown = [
                _cut(cell, width, end).ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            line = "  " + (" " * self.gap).join(shown).rstrip()
            lines.append(line if index else style.dim(line))
        return lines


def _narrowed(widths: Sequence[int], heads: Mapping[int, int], least: int, over: int) -> tuple[int, list[int]]:
    """The widths less what is `over`, or less as much of it as can be, and how much is left: the columns in `heads`
    become no narrower than these and `least`."""
    widths = list(widths)
    while over > 0:
        widest = max(heads, key=lambda column: widths[column])
        if widths[widest] <= max(least, heads[widest]):
            break
        widths[widest] -= 1
        over -= 1
    return over, widths


def _cut(text: str, width: int, end: float) -> str:
    if len(text) <= width:
        return text
    after = int((width - 1) * end)
    return f"{text[: width - 1 - after]}…{text[len(text) - after :]}"


def _least_width(texts: set[str], end: float) -> int:
    """To which all can be cut, and no two look the same."""
    widths = range(_LEAST, max(map(len, texts), default=0))
    cut_to = bisect.bisect_left(
        widths, True, key=lambda width: len({_cut(text, width, end) for text in texts}) == len(texts)
    )
    return _LEAST + cut_to


def text(report: Report, *, jobs: bool = False, gaps: bool = False, style: Style | None = None) -> str:
    """The report for people, with the table of jobs and that of long gaps where they are asked for."""
    style = style or Style()
    lines = [f"{_logs(report.logs)}: {plural(report.lines, 'line')}, {plural(len(report.engines), 'engine')}"]
    for index, engine in enumerate(report.engines, 1):
        lines += ["", *_engine(engine, index, len(report.engines), style)]
        if jobs:
            lines += ["", style.bold("Jobs (times in ms since the engine's start)"), *_jobs(engine).lines(style)]
        if gaps:
            title = f"Gaps of {duration(report.long_gap_ms)} and more"
            lines += ["", style.bold(title), *_long_gaps(engine, style)]
    return "\n".join(lines) + "\n"


def _logs(logs: Sequence[str]) -> str:
    shown = [printable(log) if log != "-" else "standard input" for log in logs]
    return ", ".join(shown) if len(shown) < 4 else f"{shown[0]} … {shown[-1]} ({len(shown)} files)"


def _engine(engine: EngineReport, index: int, count: int, style: Style) -> list[str]:
    title = f"Engine {index} of {count}" if count > 1 else "Engine"
    times = f"{offset(engine.start_ms)} to {offset(engine.end_ms)} ({duration(engine.end_ms - engine.start_ms)})"
    lines = [f"{style.bold(title)}  {times}"]
    if engine.settings:
        settings = "  ".join(f"{key}={value}" for key, value in engine.settings.items())
        lines += _wrapped(printable(settings), style)
    lines += [style.dim(line) for line in _wrapped(_notes(engine), style)]
    lines += ["", *(style.bold(line) for line in _wrapped(engine.verdict.text, style))]
    if not engine.lines.timeline:
        return lines
    tables = [("GPUs", _gpus(engine)), ("Gaps between spans", _gaps(engine)), ("Idle, by cause", _idle(engine))]
    tables += [("Latencies", _latencies(engine)), ("Throughput", _throughput(engine))]
    tables += [("Kernel phases", _phases(engine)), ("What did not end well", _failures(engine))]
    for title, table in tables:
        if table.rows:
            lines += ["", style.bold(title), *table.lines(style)]
    return lines


def _wrapped(text: str, style: Style) -> list[str]:
    width = min(style.width, _READABLE) - 2
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _notes(engine: EngineReport) -> str:
    lines = engine.lines
    notes = [plural(lines.timeline, "TIMELINE line")]
    if lines.recovered:
        notes.append(f"{lines.recovered:,} put together from torn parts")
    if lost := lines.lost + sum(lines.unparsed.values()):
        notes.append(f"{lost:,} lost or not readable")
    if not engine.evidence["jobs"] and lines.timeline:
        notes.append("no `job enqueued` lines")
    if engine.start_unix_s is not None:
        notes.insert(0, f"started {datetime.fromtimestamp(engine.start_unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC")
    return "; ".join(notes)


def _gpus(engine: EngineReport) -> Table:
    table = Table(("GPU", "logged", "run", "kernel", "chip", "in spans", "busy", "wasted", "spans", "open gap"))
    for name, gpu in engine.gpus.items():
        chip = gpu.chip
        table.rows.append(
            (
                name,
                share(gpu.logged_utilization),
                share(gpu.run_utilization),
                share(gpu.kernel_utilization),
                share(chip.utilization if chip else None),
                share(chip.span_occupancy if chip else None),
                duration(gpu.busy_ms),
                duration(sum(gpu.wasted_ms.values())),
                f"{gpu.spans:,}",
                duration(gpu.open_gap_ms),
            )
        )
    return table


def _gaps(engine: EngineReport) -> Table:
    table = Table(("GPU", "count", "sum", "mean", "p50", "p90", "p99", "longest", "within job"), gap=2)
    for name, gpu in engine.gpus.items():
        within = gpu.gap_by_boundary_ms[Boundary.WITHIN_JOB] / gpu.gap_ms if gpu.gap_ms else None
        table.rows.append(
            (name, f"{gpu.gaps.count:,}", duration(gpu.gap_ms), *_quantiles(gpu.gaps), share(within)),
        )
    return table


def _idle(engine: EngineReport) -> Table:
    table = Table(("GPU", "", *(cause.value.replace("_", " ") for cause in _CAUSES)), left=frozenset({0, 1}))
    for name, gpu in engine.gpus.items():
        for part, by_cause_ms in (("in gaps", gpu.gap_by_cause_ms), ("in all", gpu.idle_ms)):
            table.rows.append((name, part, *(_some(by_cause_ms[cause]) for cause in _CAUSES)))
    return table


def _some(ms: int) -> str:
    return duration(ms) if ms else NONE


def _latencies(engine: EngineReport) -> Table:
    table = Table(("", "kind", "count", "mean", "p50", "p90", "p99", "longest"), left=frozenset({0, 1}))
    whole = (("synthesis", engine.synth), ("GPU span", engine.gpu_span))
    ready = (("ready wait", engine.ready_wait), ("hand-off", engine.handoff))
    proofs = [
        ("proof" if basis is LatencyBasis.SUBMISSION else "proof (no total)", engine.proofs[basis])
        for basis in LatencyBasis
        if basis in engine.proofs
    ]
    for what, by_kind in (*whole, *ready, *proofs):
        for kind, values in by_kind.items():
            table.rows.append((what, kind, f"{values.count:,}", *_quantiles(values)))
    return table


def _quantiles(values: Values) -> tuple[str, ...]:
    quantiles = (values.quantile_ms(q) for q in (0.5, 0.9, 0.99))
    return (duration(values.mean_ms), *map(duration, quantiles), duration(values.max_ms))


def _throughput(engine: EngineReport) -> Table:
    found = engine.throughput
    table = Table(("", "proved", "an hour", "steady an hour", "seconds each"))
    if found.proofs or found.partitions:
        table.rows.append(
            (
                "proofs",
                f"{found.proofs:,}",
                number(found.proofs_per_hour),
                number(found.steady_proofs_per_hour),
                number(found.seconds_per_proof, 2),
            )
        )
        each = found.run_ms / 1000 / found.partitions if found.partitions else None
        table.rows.append(
            ("partitions", f"{found.partitions:,}", number(found.partitions_per_hour), NONE, number(each, 2))
        )
    return table


def _phases(engine: EngineReport) -> Table:
    table = Table(("phase", "count", "mean", "sum"))
    for phase, (count, seconds) in engine.kernel_phases.items():
        table.rows.append(
            (phase.removesuffix("_ms"), f"{count:,}", duration(seconds * 1000 / count), duration(seconds * 1000))
        )
    return table


def _failures(engine: EngineReport) -> Table:
    table = Table(("", "what", "count"), left=frozenset({0, 1}))
    for outcome, count in engine.proof_outcomes.items():
        if count and outcome is not ProofOutcome.PROVED:
            table.rows.append(("proofs", outcome.value, f"{count:,}"))
    if still := sum(job.outcome is None for job in engine.jobs):
        table.rows.append(("proofs", "open when the log ended", f"{still:,}"))
    for unit_outcome, count in engine.unit_outcomes.items():
        if count and unit_outcome is not UnitOutcome.PROVED:
            table.rows.append(("partitions", unit_outcome.value, f"{count:,}"))
    for (kind, gpu), count in engine.trouble.items():
        table.rows.append(("log", f"{kind} on GPU {gpu}" if gpu else kind, f"{count:,}"))
    return table


# --- runs side by side ---------------------------------------------------------------------------------------------


def comparison_text(base: Report, comparisons: Sequence[Comparison], style: Style | None = None) -> str:
    """Each run against the base, for people."""
    style = style or Style()
    lines = [f"base: {_logs(base.logs)}"]
    for comparison in comparisons:
        before, now = comparison.bound_by
        lines += [style.bold(f"new:  {_logs(comparison.logs)}"), ""]
        lines += _wrapped(f"Bound by: {before}" + (f" → {now}" if now != before else ""), style)
        for note in comparison.notes:
            lines += [style.bad(line) for line in _wrapped(note, style)]
        lines += ["", *_comparison(comparison).lines(style), "", *_differing_settings(comparison, style), ""]
    return "\n".join(lines[:-1]) + "\n"


def _comparison(comparison: Comparison) -> Table:
    table = Table(("figure", "base", "new", "change", "95% range", ""), left=frozenset({0, 5}))
    for compared in comparison.figures:
        if not compared.base and not compared.new:
            continue
        unit = compared.figure.unit
        base, new = _figure(compared.base, unit), _figure(compared.new, unit)
        # How often next to nothing goes into next to nothing says nothing.
        told = {base, new} != {_figure(0.0, unit)}
        change, interval = (compared.change, compared.change_interval) if told else (None, None)
        table.rows.append((compared.figure.name, base, new, _change(change), _interval(interval), _so(compared)))
    return table


def _figure(value: float | None, unit: Unit) -> str:
    if value is None:
        return NONE
    match unit:
        case Unit.RATIO:
            return f"{value:.1%}"
        case Unit.SECONDS:
            return duration(value * 1000)
        case Unit.PER_HOUR:
            return number(value)
        case Unit.COUNT:
            return f"{value:,.0f}"


def _change(change: float | None) -> str:
    if change is None:
        return NONE
    return f"{change:+.1%}" if change < 9.995 else f"× {change + 1:,.0f}"


def _interval(interval: tuple[float, float] | None) -> str:
    return NONE if interval is None else f"{_change(interval[0])} to {_change(interval[1])}"


def _so(compared: Compared) -> str:
    match compared.chance:
        case Chance.NOISE:
            return "noise"
        case Chance.REAL:
            return "changed" if compared.better is None else "better" if compared.better else "worse"
        case _:
            return ""


def _differing_settings(comparison: Comparison, style: Style) -> list[str]:
    if not comparison.settings:
        return ["  The settings that the logs tell are the same."]
    table = Table(("setting", "base", "new"), left=frozenset({0, 1, 2}))
    table.rows.extend(
        (key, before or "not told", now or "not told") for key, (before, now) in comparison.settings.items()
    )
    return table.lines(style)


# --- jobs and gaps ---------------------------------------------------------------------------------------------------


def _jobs(engine: EngineReport) -> Table:
    header = ("job", "synth from", "to", "synth", "GPU from", "to", "GPU", "gap before", "outcome")
    table = Table(header, left=frozenset({0, 8}), gap=1)
    for job in engine.jobs:
        table.rows.append(
            (
                job.job_id + (f" ({job.incarnation + 1})" if job.incarnation else ""),
                _number(job.synth_start_ms),
                _number(job.synth_end_ms),
                _number(_between(job.synth_start_ms, job.synth_end_ms)),
                _number(job.gpu_start_ms),
                _number(job.gpu_end_ms),
                _number(_between(job.gpu_start_ms, job.gpu_end_ms)),
                _number(job.gap_before_ms),
                _outcome(job),
            )
        )
    return table


def _outcome(job: JobRow) -> str:
    if job.outcome is ProofOutcome.PROVED:
        return ""
    return "open" if job.outcome is None else job.outcome.value


def _number(value: int | None) -> str:
    return NONE if value is None else str(value)


def _between(start_ms: int | None, end_ms: int | None) -> int | None:
    return None if start_ms is None or end_ms is None else end_ms - start_ms


def _long_gaps(engine: EngineReport, style: Style) -> list[str]:
    table = Table(("at", "GPU", "gap", "cause", "boundary", "job before", "job after"), left=frozenset({3, 4, 5, 6}))
    for name, gap in _gaps_in_order(engine):
        table.rows.append(
            (
                offset(gap.start_ms),
                name,
                duration(gap.duration_ms),
                gap.cause.value,
                gap.boundary.value,
                gap.job_before,
                gap.job_after if gap.boundary is Boundary.CROSS_JOB else "the same",
            )
        )
    return table.lines(style) if table.rows else ["  none"]


def _gaps_in_order(engine: EngineReport) -> list[tuple[str, LongGap]]:
    found = [(name, gap) for name, gpu in engine.gpus.items() for gap in gpu.long_gaps]
    return sorted(found, key=lambda each: each[1].start_ms)


# --- CSV -------------------------------------------------------------------------------------------------------------


def gpus_csv(report: Report) -> str:
    """One line for each GPU of each engine."""
    header = (
        "engine", "gpu", "spans", "busy_ms", "wasted_ms", "kernel_ms", "logged_utilization", "run_utilization",
        "gap_count", "gap_ms", "gap_mean_ms", "gap_p50_ms", "gap_p90_ms", "gap_p99_ms", "gap_max_ms", "open_gap_ms",
        *(f"gap_{cause.value}_ms" for cause in Cause), *(f"gap_{boundary.value}_ms" for boundary in Boundary),
        *(f"idle_{cause.value}_ms" for cause in Cause),
        "chip_busy_ms", "chip_sampled_ms", "span_busy_ms", "span_occupancy", "unlogged_busy_ms",
    )  # fmt: skip
    rows = [
        (index, name, *_csv_gpu(gpu))
        for index, engine in enumerate(report.engines)
        for name, gpu in engine.gpus.items()
    ]
    return _csv(header, rows)


def _csv_gpu(gpu: GpuReport) -> Iterable[object]:
    found = gpu.to_json()
    gaps = found["gaps"]
    chip = found.get("chip", {})
    yield from (found[key] for key in ("spans", "busy_ms", "wasted_ms", "kernel_ms"))
    yield from (found["logged_utilization"], found["run_utilization"], gaps["count"], gpu.gap_ms)
    yield from (gaps[key] for key in ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"))
    yield found["open_gap_ms"]
    yield from (gpu.gap_by_cause_ms[cause] for cause in Cause)
    yield from (gpu.gap_by_boundary_ms[boundary] for boundary in Boundary)
    yield from (gpu.idle_ms[cause] for cause in Cause)
    yield from (
        chip.get(key) for key in ("busy_ms", "sampled_ms", "span_busy_ms", "span_occupancy", "unlogged_busy_ms")
    )


def jobs_csv(report: Report) -> str:
    """One line for each job."""
    header = (
        "engine", "job_id", "incarnation", "proof_kind", "outcome", "partitions", "enqueued_ms", "synth_start_ms",
        "synth_end_ms", "gpu_start_ms", "gpu_end_ms", "gap_before_ms", "gap_ms", "busy_ms", "total_ms", "total_from",
    )  # fmt: skip
    rows = [
        (index, *(job.to_json()[key] for key in header[1:]))
        for index, engine in enumerate(report.engines)
        for job in engine.jobs
    ]
    return _csv(header, rows)


def gaps_csv(report: Report) -> str:
    """One line for each long gap."""
    header = ("engine", "gpu", "start_ms", "duration_ms", "job_before", "job_after", "boundary", "cause")
    rows = [
        (index, name, *(gap.to_json()[key] for key in header[2:]))
        for index, engine in enumerate(report.engines)
        for name, gap in _gaps_in_order(engine)
    ]
    return _csv(header, rows)


def _csv(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return out.getvalue()
