"""Conditions on figures, as `--fail-if` takes them: `logged_utilization<0.9 or change.proof_mean_s>5%`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_COMPARISON = re.compile(r"\s*([A-Za-z][\w.]*)\s*(<=|>=|<|>)\s*([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)(%?)\s*", re.ASCII)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
PREFIXES = ("", "base.", "change.")
"""Of the new run, of the base, and the change relative to the base."""


class UnknownFigureError(Exception):
    """A log does not tell the figure that a condition is about."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`figure < number`."""

    figure: str
    sign: str
    number: float

    def holds(self, figures: Mapping[str, float | None]) -> bool:
        """Whether it does, for these figures."""
        value = figures[self.figure]
        if value is None:
            raise UnknownFigureError(self.figure)
        return _SIGNS[self.sign](value, self.number)


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparisons joined by `and`, and these by `or`."""

    text: str
    alternatives: tuple[tuple[Comparison, ...], ...]

    def holds(self, figures: Mapping[str, float | None]) -> bool:
        """Whether it does; raises `UnknownFigureError` where that depends on what is not known."""
        unknown: UnknownFigureError | None = None
        for comparisons in self.alternatives:
            try:
                if all(comparison.holds(figures) for comparison in comparisons):
                    return True
            except UnknownFigureError as error:
                unknown = error
        if unknown is not None:
            raise unknown
        return False


def parse_condition(text: str, figures: Collection[str]) -> Condition:
    """Reads a condition on these figures; a `ValueError` tells what was expected."""
    return Condition(
        text,
        tuple(
            tuple(_comparison(part, figures) for part in re.split(r"\s+and\s+", alternative))
            for alternative in re.split(r"\s+or\s+", text)
        ),
    )


def _comparison(text: str, figures: Collection[str]) -> Comparison:
    match = _COMPARISON.fullmatch(text)
    if match is None:
        raise ValueError("comparisons such as logged_utilization<0.9, joined by and, or")
    figure, sign, number, percent = match.groups()
    if not any(figure.startswith(prefix) and figure.removeprefix(prefix) in figures for prefix in PREFIXES):
        raise ValueError(f"a figure out of {', '.join(figures)}, or base.… or change.… of these")
    return Comparison(figure, sign, float(number) / (100 if percent else 1))
