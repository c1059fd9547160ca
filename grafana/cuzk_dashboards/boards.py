"""All the boards."""

from __future__ import annotations

from collections.abc import Sequence

from cuzk_dashboards import agent, chip, fleet, prover, why_idle
from cuzk_dashboards.kit import Board


def boards() -> Sequence[Board]:
    """In the order of their links."""
    return [fleet.board(), prover.board(), why_idle.board(), chip.board(), agent.board()]
