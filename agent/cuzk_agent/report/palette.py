"""The colours of the offline pictures: the same meaning has the same colour in all of them, and on the dashboards.

They are Okabe and Ito's, which people tell apart however they see colours; the two for "no fault" and "not known" are
greys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cuzk_agent.timeline.state import Cause


@dataclass(frozen=True, slots=True)
class Colour:
    """One meaning's colour."""

    rgb: str
    chrome: str
    """The nearest of the names that the trace event format knows."""


BUSY: Final = Colour("#009e73", "rail_load")
SYNTH: Final = Colour("#8fb4d9", "thread_state_runnable")
FAILED: Final = Colour("#a4161a", "terrible")
CHIP: Final = Colour("#00543d", "good")

CAUSES: Final[Mapping[Cause, Colour]] = {
    Cause.STARVED: Colour("#e69f00", "thread_state_iowait"),
    Cause.BLOCKED: Colour("#d55e00", "rail_animation"),
    Cause.HANDOFF: Colour("#cc79a7", "detailed_memory_dump"),
    Cause.FILL: Colour("#56b4e9", "rail_response"),
    Cause.NO_WORK: Colour("#d9d9d9", "grey"),
    Cause.UNKNOWN: Colour("#6e6e6e", "generic_work"),
}
"""In the order of a legend: the faults first."""
