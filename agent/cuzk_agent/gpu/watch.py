"""Everything about the GPUs that runs beside the log: sampling, and setting the samples against the spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cuzk_agent.clock import Clock
from cuzk_agent.gpu.energy import GpuCorrelation
from cuzk_agent.gpu.mapping import CudaEnvironment, names, ordinals
from cuzk_agent.gpu.record import Recorder
from cuzk_agent.gpu.sampler import Sampler, as_seen, is_named
from cuzk_agent.gpu.state import NvmlView
from cuzk_agent.timeline.facts import Fact, SpanTime

_INBOX: Final = 100_000
"""Facts that wait for the sampling thread at most; when a driver call hangs for long, the oldest are forgotten."""
_LOOK_S: Final = 60.0
"""How often it is looked for a daemon whose environment has not been found."""

Environment = Callable[[], CudaEnvironment | None]
"""Looks for a daemon's environment."""


class GpuWatch:
    """Samples the GPUs and correlates. `run` belongs to one thread; `fact` and `seen` may come from any."""

    def __init__(
        self,
        clock: Clock,
        environments: Mapping[str, Environment],
        *,
        gpu_map: Mapping[str, str],
        pcie: bool,
        record: Path | None = None,
        lib: Any = None,
    ) -> None:
        """`environments` looks for the daemon's environment, for each source. `gpu_map` says which GPU the daemons mean
        by an ordinal; where it is empty, their environments do. `record` is where to keep what NVML says, or nowhere.
        `lib` is used as `pynvml`, itself if not given."""
        self._clock = clock
        self._environments = environments
        self._gpu_map = gpu_map
        self._inbox: deque[tuple[str, Fact]] = deque(maxlen=_INBOX)
        self._found: dict[str, dict[str, str]] = {}
        self._look_due_s = clock.monotonic_s()
        self._account = _Account(environments, self._take_facts)
        self._look()
        labels = names(gpu_map, self._found).devices
        recorder = None if record is None else Recorder(record)
        self._sampler = Sampler(clock, lib=lib, labels=labels, account=self._account, recorder=recorder, pcie=pcie)

    def fact(self, source: str, fact: Fact) -> None:
        """Something settled in the log of a source."""
        self._inbox.append((source, fact))

    def run(self, stop: Callable[[], bool], wait: Callable[[float], object]) -> None:
        """Samples until told to stop. `wait` waits for so many seconds, or until it is time to stop."""
        self._sampler.run(stop, wait)

    def cycle(self) -> None:
        """One cycle of `run`."""
        self._sampler.cycle()

    def seen(self) -> NvmlView:
        """What may be shown now: nothing that no longer holds."""
        return as_seen(self._sampler.view, self._clock.monotonic_s(), self._sampler.calling)

    def _take_facts(self) -> None:
        if self._clock.monotonic_s() >= self._look_due_s:
            self._look()
        while self._inbox:
            source, fact = self._inbox.popleft()
            if isinstance(fact, SpanTime):
                fact = replace(fact, gpu=self._label(source, fact.gpu))
            self._account.fact(source, fact)

    def _look(self) -> None:
        self._look_due_s = self._clock.monotonic_s() + _LOOK_S
        if self._gpu_map:
            return
        for source in self._environments.keys() - self._found.keys():
            environment = self._environments[source]()
            if environment is not None:
                self._found[source] = ordinals(environment)

    def _label(self, source: str, ordinal: str) -> str:
        """The label of the GPU that a source's daemon means."""
        device = (self._gpu_map or self._found.get(source, {})).get(ordinal)
        if device is None:
            return ordinal
        for label, chip in self._sampler.view.gpus.items():
            if is_named(device, chip.info):
                return label
        return ordinal


class _Account(GpuCorrelation):
    """The correlation, as the sampler calls it: what the logs have told by then is taken in before each comparison."""

    def __init__(self, sources: Iterable[str], take_facts: Callable[[], None]) -> None:
        super().__init__(sources)
        self._take_facts = take_facts

    def advance(self) -> None:
        self._take_facts()
        super().advance()
