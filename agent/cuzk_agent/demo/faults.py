"""What the daemon says of the faults of a unit, by the stage in which they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cuzk_agent.demo.scenario import Fault


@dataclass(frozen=True, slots=True)
class Failure:
    """How something ended, in the daemon's words."""

    how: str
    error: str


def _failures(fault: Fault, panic: Fault, error: str) -> Mapping[Fault | None, Failure]:
    panicked = Failure(
        "task panicked", 'task 4711 panicked with message "index out of bounds: the len is 8 but the index is 8"'
    )
    return MappingProxyType({fault: Failure("failed", error), panic: panicked})


OF_SYNTHESIS: Final = _failures(Fault.SYNTHESIS, Fault.SYNTHESIS_PANIC, "circuit synthesis: assignment missing")
OF_PROVE_START: Final = _failures(
    Fault.PROVE_START,
    Fault.PROVE_START_PANIC,
    "GPU prove start failed: CUDA error: out of memory\n  at groth16_cuda.cu:512",
)
OF_PROVING: Final = _failures(Fault.PROVING, Fault.PROVING_PANIC, "GPU prove finish failed: Synthesis(Unsatisfiable)")
