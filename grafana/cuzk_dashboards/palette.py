"""One colour for each thing, on every board. From Okabe and Ito's and Tol's palettes, which the colour-blind can tell
apart; colour is never the only sign, every series has a name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

Colours = Mapping[str, str]
"""Of series, by their legend."""

GOOD: Final = "#009E73"
WARN: Final = "#F0E442"
BAD: Final = "#D55E00"
QUIET: Final = "#6E7681"
"""Nothing to see: no work, or a number without a verdict."""
MEASURE: Final = "#4A9BD9"
"""A measurement that is neither good nor bad by itself."""
SCHEME: Final = "Viridis"
"""Of heatmaps: brighter is more."""

CAUSES: Final[Colours] = MappingProxyType(
    {
        "handoff": "#CC79A7",
        "blocked": BAD,
        "starved": "#E69F00",
        "fill": "#56B4E9",
        "unknown": "#D9D9D9",
        "no_work": QUIET,
    }
)
"""Faults are warm, the rest is cool; in the order in which they are drawn on top of each other."""
BUSY: Final[Colours] = MappingProxyType({"busy": GOOD})
STAGES: Final[Colours] = MappingProxyType(
    {"gpu": GOOD, "picked_up": "#CC79A7", "ready": "#E6B8D3", "synth": "#56B4E9", "waiting": QUIET}
)
"""As the causes that a unit is behind while it is there: hand-off for what is ready, busy for what is on the GPU."""
OUTCOMES: Final[Colours] = MappingProxyType(
    {"proved": GOOD, "failed": BAD, "dropped": WARN, "abandoned": "#CC79A7", "lost": "#D9D9D9"}
)
KINDS: Final[Colours] = MappingProxyType(
    {
        "porep-c2": "#4477AA",
        "snap-update": "#88CCEE",
        "window-post": "#DDCC77",
        "winning-post": "#AA4499",
        "other": "#BBBBBB",
    }
)
USES: Final[Colours] = MappingProxyType({"proofs": GOOD, "wasted": BAD, "unlogged": WARN, "idle": QUIET})
UTILIZATION: Final[Colours] = MappingProxyType({"log": GOOD, "kernels": "#B5CF3A", "chip": MEASURE})
QUANTILES: Final[Colours] = MappingProxyType({"p50": "#2F6DA8", "p90": MEASURE, "p99": "#B3D4F2"})
BOUNDARIES: Final[Colours] = MappingProxyType({"within_job": MEASURE, "cross_job": "#B3D4F2"})
