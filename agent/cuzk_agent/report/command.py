"""What `analyze` and `compare` say, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cuzk_agent.report import render
from cuzk_agent.report.analyze import Options, analyze
from cuzk_agent.report.compare import Comparison, compare
from cuzk_agent.report.conditions import Condition, UnknownFigureError
from cuzk_agent.report.inputs import InputError, Progress, expand
from cuzk_agent.report.model import VERSION, Report
from cuzk_agent.report.words import printable


class Form(Enum):
    """What the output is for."""

    TEXT = auto()
    JSON = auto()
    CSV = auto()


class Ending(Enum):
    """How a command ends, by the names of the exit statuses."""

    STOPPED = auto()
    """There is nothing more to do."""
    NO_DATA = auto()
    """A log cannot be read, or tells of no work on a GPU."""
    CONDITION = auto()
    """What was not to be is so."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has to say."""

    output: str
    complaints: tuple[str, ...]
    ending: Ending


def run_analyze(
    logs: Sequence[str],
    options: Options,
    *,
    form: Form,
    jobs: bool,
    gaps: bool,
    style: render.Style,
    on_progress: Callable[[Progress], None],
) -> Answer:
    """The report on one log."""
    try:
        report, fault = analyze(expand(logs), options, on_progress)
    except InputError as error:
        return Answer("", (str(error),), Ending.NO_DATA)
    complaints = [] if fault is None else [str(fault)]
    lack = what_is_missing(report, options, fault)
    if lack is not None:
        complaints.append(lack)
    output = ""
    if form is Form.JSON:
        output = json.dumps(report.to_json(), indent=2) + "\n"
    elif form is Form.CSV:
        output = render.jobs_csv(report) if jobs else render.gaps_csv(report) if gaps else render.gpus_csv(report)
    elif any(engine.lines.timeline for engine in report.engines):
        output = render.text(report, jobs=jobs, gaps=gaps, style=style)
    return Answer(output, tuple(complaints), Ending.NO_DATA if complaints else Ending.STOPPED)


def what_is_missing(report: Report, options: Options, fault: InputError | None) -> str | None:
    """Why a report says nothing about GPUs; None if it does."""
    if any(engine.spans for engine in report.engines):
        return None
    logs = ", ".join(map(printable, report.logs))
    if not report.bytes:
        return None if fault else f"{logs}: empty"
    if any(engine.lines.timeline for engine in report.engines):
        if all(engine.evidence["spans"] for engine in report.engines):
            return f"{logs}: no proving on a GPU in it"
        return f"{logs}: this daemon writes no GPU_START and GPU_END (CUZK_DISABLE_SPLIT_PROVE=1)"
    if options.bounded:
        bounds = [bound for bound in (options.start, options.end) if bound is not None]
        if any(bound.wall_clock for bound in bounds) and not any(engine.start_unix_s for engine in report.engines):
            return f"{logs}: nothing in this stretch, or the log tells no time: try times since the engine's start"
        return f"{logs}: nothing in this stretch"
    if any(engine.settings.get("pipeline_enabled") == "false" for engine in report.engines):
        return f"{logs}: no TIMELINE line in it; with pipeline_enabled=false the daemon writes none"
    return f"{logs}: {report.lack}"


def run_compare(
    base: str,
    new: Sequence[str],
    *,
    conditions: Sequence[Condition],
    form: Form,
    style: render.Style,
    on_progress: Callable[[Progress], None],
) -> Answer:
    """Runs set against a base, each given as one log: a file, a glob that matches its parts, or `-`."""
    reports: list[Report] = []
    complaints: list[str] = []
    for log in (base, *new):
        try:
            report, fault = analyze(expand([log]), Options(long_gap_ms=None), on_progress)
        except InputError as error:
            complaints.append(str(error))
            continue
        lack = what_is_missing(report, Options(), fault)
        complaints += [str(fault)] if fault is not None else []
        complaints += [lack] if lack is not None else []
        reports.append(report)
    if complaints:
        return Answer("", tuple(complaints), Ending.NO_DATA)
    before, *others = reports
    comparisons = [compare(before, report) for report in others]
    if form is Form.JSON:
        found = {"version": VERSION, "base": list(before.logs), "new": [each.to_json() for each in comparisons]}
        output = json.dumps(found, indent=2) + "\n"
    else:
        output = render.comparison_text(before, comparisons, style)
    ending = Ending.STOPPED
    for comparison in comparisons:
        for condition in conditions:
            told = _what_holds(condition, comparison)
            if told is not None:
                complaints.append(f"{', '.join(comparison.logs)}: {told}")
                ending = Ending.CONDITION
    return Answer(output, tuple(complaints), ending)


def _what_holds(condition: Condition, comparison: Comparison) -> str | None:
    try:
        return f"{condition.text} holds" if condition.holds(comparison.values()) else None
    except UnknownFigureError as error:
        # What is meant to guard must not pass what it cannot see.
        return f"{condition.text} cannot be told: the log says nothing about {error}"
