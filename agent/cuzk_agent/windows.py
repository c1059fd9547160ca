"""Quantiles over a sliding window of time, with bounded memory (interface only; being filled in)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rolling:
    """A frozen sliding window."""

    slices: tuple[tuple[float, dict[int, int], float], ...] = ()
