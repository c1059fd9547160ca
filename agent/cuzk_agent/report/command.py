"""What `analyze` and `compare` say, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cuzk_agent.report import render
from cuzk_agent.report.analyze import Options, analyze
from cuzk_agent.report.inputs import InputError, Progress, expand
from cuzk_agent.report.model import Report
from cuzk_agent.report.words import plural, printable


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
        paths = expand(logs)
    except InputError as error:
        return Answer("", (str(error),), Ending.NO_DATA)
    report, fault = analyze(paths, options, on_progress)
    complaints = [] if fault is None else [str(fault)]
    lack = what_is_missing(report, options)
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


def what_is_missing(report: Report, options: Options) -> str | None:
    """Why a report says nothing about GPUs; None if it does."""
    if any(engine.spans for engine in report.engines):
        return None
    logs = ", ".join(map(printable, report.logs))
    if not report.bytes:
        return f"{logs}: empty"
    if any(engine.lines.timeline for engine in report.engines):
        if all(engine.evidence["spans"] for engine in report.engines):
            return f"{logs}: no proving on a GPU in it"
        return f"{logs}: this daemon writes no GPU_START and GPU_END (CUZK_DISABLE_SPLIT_PROVE=1)"
    if options.bounded:
        bounds = [bound for bound in (options.start, options.end) if bound is not None]
        if any(bound.wall_clock for bound in bounds) and not any(engine.start_unix_s for engine in report.engines):
            return f"{logs}: nothing in this stretch, or the log tells no time: try times since the engine's start"
        return f"{logs}: nothing in this stretch"
    if report.looks_binary:
        return f"{logs}: no TIMELINE line in it; this looks like binary data"
    if any(engine.settings.get("pipeline_enabled") == "false" for engine in report.engines):
        return f"{logs}: no TIMELINE line in it; with pipeline_enabled=false the daemon writes none"
    return f"{logs}: no TIMELINE line in {plural(report.lines, 'line')}; is this the log of a cuzk daemon?"
