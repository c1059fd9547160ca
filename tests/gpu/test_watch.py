"""Sampling and the logs' facts together: whose spans are set against which GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from conftest import FakeClock
from cuzk_agent.gpu.fake import FakeNvml
from cuzk_agent.gpu.mapping import CudaEnvironment
from cuzk_agent.gpu.state import Comparison, NvmlState
from cuzk_agent.gpu.watch import GpuWatch
from cuzk_agent.timeline.facts import Settled, SpanTime
from gpu.support import gpu, uuid

ALL = CudaEnvironment(None)
Environments = Mapping[str, Callable[[], CudaEnvironment | None]]


class Watched:
    """A watch on two GPUs, of which only the second is busy."""

    def __init__(self, environments: Environments, gpu_map: Mapping[str, str] | None = None) -> None:
        self.clock = FakeClock()
        nvml = FakeNvml(self.clock, [gpu(0, 0.0), gpu(1, 1.0)])
        self.watch = GpuWatch(self.clock, environments, gpu_map=gpu_map or {}, pcie=False, lib=nvml)
        self.sources = tuple(environments)

    def cycles(self, times: int, spans: Mapping[str, str]) -> None:
        """Cycles in which each source has one span open on the GPU that its daemon calls so."""
        for _ in range(times):
            before_s = self.clock.unix_s()
            self.clock.advance(2.0)
            now_s = self.clock.unix_s()
            for source, ordinal in spans.items():
                self.watch.fact(source, SpanTime(ordinal, before_s, now_s, (1,)))
            for source in self.sources:
                self.watch.fact(source, Settled(now_s, 0.001))
            self.watch.cycle()

    def busy_in_spans(self, label: str) -> dict[str, float]:
        return {source: spans.busy_seconds for source, spans in self.watch.seen().gpus[label].spans.items()}

    def unlogged(self, label: str) -> float | None:
        return self.watch.seen().gpus[label].unlogged_busy_seconds

    def uuids(self) -> dict[str, str | None]:
        return {label: chip.info.uuid for label, chip in self.watch.seen().gpus.items()}


def test_a_daemon_that_sees_all_gpus_counts_them_as_nvml_does() -> None:
    watched = Watched({"prover": lambda: ALL})
    watched.cycles(10, {"prover": "1"})
    assert watched.uuids() == {"0": uuid(0), "1": uuid(1)}
    assert watched.busy_in_spans("1")["prover"] == pytest.approx(16, abs=4.5)
    assert watched.unlogged("1") == pytest.approx(0, abs=0.5)
    assert watched.watch.seen().comparisons["prover"].comparison is Comparison.COMPARED


def test_a_daemon_that_turns_the_order_round_gives_the_gpus_its_numbers() -> None:
    watched = Watched({"prover": lambda: CudaEnvironment("1,0")})
    watched.cycles(10, {"prover": "0"})
    assert watched.uuids() == {"1": uuid(0), "0": uuid(1)}
    assert watched.busy_in_spans("0")["prover"] == pytest.approx(16, abs=4.5)
    assert watched.unlogged("0") == pytest.approx(0, abs=0.5)


def test_daemons_that_each_see_one_gpu_and_call_it_0() -> None:
    watched = Watched({"a": lambda: CudaEnvironment("0"), "b": lambda: CudaEnvironment(uuid(1)[:12])})
    watched.cycles(10, {"a": "0", "b": "0"})
    assert watched.uuids() == {"0": uuid(0), "1": uuid(1)}
    assert watched.busy_in_spans("0") == {"a": 0.0}
    assert watched.busy_in_spans("1")["b"] == pytest.approx(16, abs=4.5)
    assert watched.unlogged("1") == pytest.approx(0, abs=0.5)


def test_the_configuration_says_which_gpu_is_which_and_nobody_is_asked() -> None:
    def asked() -> CudaEnvironment | None:
        raise AssertionError

    watched = Watched({"prover": asked}, {"0": uuid(1), "1": "00000000:06:00.0"})
    watched.cycles(10, {"prover": "0"})
    assert watched.uuids() == {"1": uuid(0), "0": uuid(1)}
    assert watched.busy_in_spans("0")["prover"] == pytest.approx(16, abs=4.5)


def test_a_daemon_that_starts_later_is_found_later_and_the_labels_stay() -> None:
    found: list[CudaEnvironment] = []
    watched = Watched({"prover": lambda: found[0] if found else None})
    watched.cycles(5, {})
    assert watched.uuids() == {"0": uuid(0), "1": uuid(1)}
    found.append(CudaEnvironment("1"))
    watched.cycles(30, {})
    watched.cycles(10, {"prover": "0"})
    assert watched.uuids() == {"0": uuid(0), "1": uuid(1)}
    assert watched.busy_in_spans("1")["prover"] == pytest.approx(16, abs=4.5)


def test_what_is_busy_outside_all_spans_is_somebody_elses() -> None:
    watched = Watched({"prover": lambda: ALL})
    watched.cycles(10, {"prover": "0"})
    assert watched.busy_in_spans("0")["prover"] == pytest.approx(0, abs=0.5)
    assert watched.unlogged("1") == pytest.approx(16, abs=4.5)


def test_a_watch_that_does_nothing_for_long_shows_nothing() -> None:
    watched = Watched({"prover": lambda: ALL})
    watched.cycles(3, {})
    assert watched.watch.seen().state is NvmlState.UP
    watched.clock.advance(11)
    assert watched.watch.seen().state is NvmlState.HUNG
