"""A run as one page that a browser opens offline: a template, and what the recorder tells as rows of JSON in it.

A log may hold anything. Its text is in the page only as JSON in which no character can end the script element that
holds it, and the page's own script only ever shows it as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, Final, TextIO

from cuzk_agent.report.palette import BUSY, CAUSES, CHIP, FAILED, SYNTH
from cuzk_agent.report.recorder import (
    ChipBusy,
    Counts,
    EngineBegun,
    EngineOver,
    Event,
    Idle,
    JobOver,
    Span,
    Stay,
    UnitOver,
)
from cuzk_agent.report.words import printable
from cuzk_agent.timeline.ledger import Gap
from cuzk_agent.timeline.state import Stage
from cuzk_agent.timeline.units import Unit

_POLICY = "{{policy}}"
_DATA = "{{data}}"


@cache
def _template() -> tuple[str, str]:
    """What comes before and after the data, with a policy that allows this script and style and nothing else."""
    page = files("cuzk_agent.report").joinpath("waterfall.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash_of('script', page)}",
            f"style-src {_hash_of('style', page)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    before, after = page.replace(_POLICY, policy).split(_DATA)
    return before, after


def _hash_of(element: str, page: str) -> str:
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(row: list[Any]) -> str:
    """As JSON in ASCII, without what HTML could take for markup."""
    text = json.dumps(row, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Waterfall:
    """Writes what a recorder tells. The rows are described where the template reads them."""

    BEGINS: Final = "<!DOCTYPE html>"
    """Every page begins with this."""

    def __init__(self, out: TextIO, title: str) -> None:
        self._out = out
        before, self._after = _template()
        out.write(before)
        self._separator = "["
        self._base_ms = 0
        self._put("log", printable(title))
        colours = {cause.value: colour.rgb for cause, colour in CAUSES.items()}
        others = {"busy": BUSY.rgb, "synth": SYNTH.rgb, "failed": FAILED.rgb, "chip": CHIP.rgb}
        self._put("colours", colours, others)

    def close(self) -> None:
        """Everything was told."""
        self._out.write("]" + self._after)

    def tell(self, event: Event) -> None:
        """Takes in the next event."""
        match event:
            case EngineBegun():
                self._base_ms = event.base_ms
                self._put("engine", event.base_ms, self._at(event.start_ms), event.start_unix_s)
            case EngineOver():
                settings = {name: printable(value) for name, value in event.settings.items()}
                self._put("over", self._at(event.at_ms), event.stopped, settings, event.jobs_announced)
            case UnitOver():
                if event.synth is not None or event.span is not None:
                    self._put("unit", *self._unit(event))
            case JobOver(job, at_ms):
                self._put(
                    "job", job.account.number, printable(job.job_id), job.incarnation, job.kind, job.outcome,
                    self._at(at_ms), job.latency[1] if job.latency is not None else None,
                )  # fmt: skip
            case Idle(gpu, cause, start_ms, end_ms):
                self._put("idle", gpu, cause, self._at(start_ms), self._at(end_ms))
            case Gap():
                self._put(
                    "gap", event.gpu, event.cause, self._at(event.start_ms), self._at(event.end_ms), event.boundary,
                    printable(event.job_before), printable(event.job_after),
                    {cause.value: ms for cause, ms in event.by_cause_ms.items()},
                )  # fmt: skip
            case Counts(at_ms, units):
                stages = Stage.READY, Stage.SYNTH, Stage.WAITING
                self._put("counts", self._at(at_ms), *(units[stage] for stage in stages))
            case ChipBusy(gpu, start_ms, end_ms, busy_fraction):
                self._put("chip", gpu, round(self._at(start_ms)), round(self._at(end_ms)), round(busy_fraction, 3))

    def _unit(self, over: UnitOver) -> Iterator[Any]:
        unit: Unit = over.unit
        yield from (unit.job.account.number, unit.partition, over.outcome)
        yield self._stay(over.synth)
        yield from (self._maybe_at(unit.ready_ms), self._maybe_at(unit.picked_up_ms))
        span: Span | None = over.span
        if span is not None:
            yield from (span.gpu, span.worker, self._stay(span.stay))
            if span.kernel_ms is not None:
                yield [self._at(ms) for ms in span.kernel_ms]

    def _stay(self, stay: Stay | None) -> list[Any] | None:
        return None if stay is None else [stay.lane, self._at(stay.start_ms), self._at(stay.end_ms)]

    def _at(self, ms: float) -> float:
        return self._base_ms + ms

    def _maybe_at(self, ms: int | None) -> float | None:
        return None if ms is None else self._at(ms)

    def _put(self, *row: Any) -> None:
        self._out.write(self._separator + _embedded(list(row)))
        self._separator = ",\n"
