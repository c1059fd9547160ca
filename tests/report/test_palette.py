"""One meaning, one colour, on whatever one looks at."""

from __future__ import annotations

import pytest

from cuzk_agent.report.palette import BUSY, CAUSES
from cuzk_agent.timeline.state import Cause
from cuzk_dashboards import palette


@pytest.mark.parametrize("cause", [Cause.STARVED, Cause.BLOCKED, Cause.HANDOFF, Cause.FILL])
def test_a_cause_has_the_colour_that_it_has_on_the_dashboards(cause: Cause) -> None:
    # The greys for "no fault" and "not known" are those that a light or a dark background asks for.
    assert palette.CAUSES[cause].lower() == CAUSES[cause].rgb.lower()


def test_busy_is_green_everywhere() -> None:
    assert palette.GOOD.lower() == BUSY.rgb.lower()
