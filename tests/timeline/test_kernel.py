from __future__ import annotations

import pytest

from cuzk_agent.timeline.kernel import PHASES, KernelTimes, MutexHeld
from cuzk_agent.timeline.lines import KernelTiming


class Heard:
    def __init__(self) -> None:
        self.told: list[tuple[str | None, int]] = []
        self.kernel = KernelTimes(lambda gpu, kernel_ms: self.told.append((gpu, kernel_ms)))

    def line(self, **values: int) -> None:
        self.kernel.line(KernelTiming(values))

    def unit(self, total_ms: int, barrier_ms: int = 0, held_ms: int | None = None, start_fn_ms: int = 0) -> None:
        self.line(gpu_tid=0, barrier_wait_ms=barrier_ms)
        self.line(gpu_tid=0, tail_msm_ms=1, gpu_total_ms=total_ms)
        self.line(mutex_held_ms=total_ms if held_ms is None else held_ms, total_start_fn_ms=start_fn_ms)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def named(heard: Heard) -> None:
    """The log tells units apart from here on."""
    heard.kernel.prove_start_returned("9", 1)


def test_every_phase_is_counted(heard: Heard) -> None:
    heard.line(pre_lock_cpu_ms=13, mutex_wait_ms=0)
    heard.line(pre_lock_cpu_ms=7, mutex_wait_ms=1)
    heard.line(b_g2_msm_ms=301, num_circuits=1)
    assert heard.kernel.phases == {
        "pre_lock_cpu_ms": (2, pytest.approx(0.02)),
        "mutex_wait_ms": (2, 0.001),
        "b_g2_msm_ms": (1, 0.301),
    }
    assert set(heard.kernel.phases) < set(PHASES)
    assert heard.told == []


def test_kernel_time_is_the_total_without_the_wait(heard: Heard) -> None:
    heard.unit(600, barrier_ms=50, held_ms=602)
    heard.kernel.flush()
    assert heard.told == [(None, 550)]


def test_without_a_wait_and_with_an_absurd_one(heard: Heard) -> None:
    heard.line(gpu_total_ms=600)
    heard.line(mutex_held_ms=600)
    heard.unit(100, barrier_ms=200)
    heard.kernel.flush()
    assert heard.told == [(None, 600), (None, 0)]


def test_the_line_after_names_the_gpu(heard: Heard) -> None:
    named(heard)
    heard.unit(600, barrier_ms=50, held_ms=602, start_fn_ms=830)
    assert heard.told == []
    assert heard.kernel.prove_start_returned("1", 830) == MutexHeld(602, 550, 830)
    assert heard.told == [("1", 550)]
    # Once only.
    assert heard.kernel.prove_start_returned("0", 830) is None


def test_the_first_unit_of_a_log_is_named_too(heard: Heard) -> None:
    heard.unit(600, start_fn_ms=830)
    assert heard.told == []
    assert heard.kernel.prove_start_returned("1", 830) == MutexHeld(600, 600, 830)
    assert heard.told == [("1", 600)]


def test_a_daemon_that_never_names_a_unit_is_found_out(heard: Heard) -> None:
    for total_ms in range(601, 621):
        heard.unit(total_ms)
    assert heard.told == [(None, total_ms) for total_ms in range(601, 613)]
    heard.kernel.flush()
    assert heard.told == [(None, total_ms) for total_ms in range(601, 621)]


def test_lines_of_two_workers_that_mix(heard: Heard) -> None:
    named(heard)
    heard.line(barrier_wait_ms=10)
    heard.line(barrier_wait_ms=20)
    heard.line(gpu_total_ms=500)
    heard.line(gpu_total_ms=700)
    heard.line(mutex_held_ms=701, total_start_fn_ms=900)
    heard.line(mutex_held_ms=500, total_start_fn_ms=640)
    heard.kernel.prove_start_returned("1", 641)
    heard.kernel.prove_start_returned("0", 900)
    # Waits in their order, totals by the mutex that held them, units by their wall time.
    assert heard.told == [("1", 490), ("0", 680)]


def test_a_mutex_shorter_than_any_kernel_is_no_unit(heard: Heard) -> None:
    heard.line(gpu_total_ms=500)
    heard.line(mutex_held_ms=400)
    assert heard.told == []
    # A rounded millisecond is none.
    heard.line(mutex_held_ms=499)
    heard.kernel.flush()
    assert heard.told == [(None, 500)]


def test_what_never_finds_its_rest_is_bounded(heard: Heard) -> None:
    named(heard)
    for _ in range(10_000):
        heard.line(barrier_wait_ms=1)
        heard.line(gpu_total_ms=5)
        heard.line(mutex_held_ms=5, total_start_fn_ms=6)
    kernel = heard.kernel
    assert max(len(kernel._barriers), len(kernel._totals), len(kernel._held)) <= 64
