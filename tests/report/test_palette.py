"""One meaning, one colour, on whatever one looks at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cuzk_agent.report.palette import BUSY, CAUSES
from cuzk_agent.timeline.state import Cause
from cuzk_dashboards import palette

DOCS = Path(__file__).parent.parent.parent / "docs"
NAMES = {
    "#009e73": "green",
    "#e69f00": "orange",
    "#d55e00": "vermilion",
    "#cc79a7": "purple",
    "#56b4e9": "light blue",
    "#d9d9d9": "light grey",
    "#6e6e6e": "dark grey",
}
"""What people call them."""


@pytest.mark.parametrize("cause", [Cause.STARVED, Cause.BLOCKED, Cause.HANDOFF, Cause.FILL])
def test_a_cause_has_the_colour_that_it_has_on_the_dashboards(cause: Cause) -> None:
    # The greys for "no fault" and "not known" are those that a light or a dark background asks for.
    assert palette.CAUSES[cause].lower() == CAUSES[cause].rgb.lower()


def test_busy_is_green_everywhere() -> None:
    assert palette.GOOD.lower() == BUSY.rgb.lower()


def test_the_documents_call_the_colours_by_their_names() -> None:
    (told,) = re.findall(r"in every\spicture: (.*?)\.", (DOCS / "trace.md").read_text(encoding="utf-8"), re.DOTALL)
    expected = [
        *(f"`{cause.value}` {NAMES[colour.rgb]}" for cause, colour in CAUSES.items()),
        f"busy {NAMES[BUSY.rgb]}",
    ]
    assert " ".join(told.split()) == ", ".join(expected)
    boards = (DOCS / "dashboards.md").read_text(encoding="utf-8")
    for cause in (Cause.STARVED, Cause.BLOCKED, Cause.HANDOFF, Cause.FILL):
        # Beside a green, a yellow and a red number vermilion is a red.
        assert f"| `{cause.value}` | {NAMES[CAUSES[cause].rgb].replace('vermilion', 'red')} |" in boards
