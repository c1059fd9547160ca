"""What the sampler publishes while all is well."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from cuzk_agent.gpu.fake import FakeGpu
from cuzk_agent.gpu.sampler import Sampler, as_seen, is_named
from cuzk_agent.gpu.state import DeviceInfo, Method, NvmlState
from gpu.support import CAPTURES, Bench, Capture, gpu, uuid


def test_before_the_first_cycle_nothing_is_known() -> None:
    bench = Bench([gpu(0)])
    view = bench.sampler.view
    assert (view.state, dict(view.gpus), dict(view.call_seconds)) == (NvmlState.STARTING, {}, {})


def test_a_gpu_is_born_with_its_first_cycle() -> None:
    bench = Bench([gpu(0)])
    bench.sampler.cycle()
    chip = bench.chip()
    assert bench.sampler.view.state is NvmlState.UP
    assert (chip.state, chip.detail) == (NvmlState.UP, "")
    assert chip.info == DeviceInfo(uuid(0), "NVIDIA H200", "00000000:06:00.0", "580.159.04", 0)
    assert (chip.busy_seconds, chip.sampled_seconds, chip.observed_seconds) == (0, 0, 0)
    assert (chip.xid_errors, chip.xid_last_unix_s) == (0, None)
    assert chip.ecc_errors == {"corrected": 0, "uncorrected": 0}
    assert set(chip.throttled_seconds.values()) == {0.0}
    assert len(chip.throttled_seconds) == 8


def test_readings() -> None:
    bench = Bench([gpu(0)])
    readings = bench.cycle().gpus["0"].readings
    assert (readings.memory_used_bytes, readings.memory_total_bytes) == (5_838_340_096, 150_754_820_096)
    assert (readings.power_watts, readings.temperature_celsius, readings.sm_clock_hertz) == (400.0, 41.0, 1.98e9)
    assert readings.processes == 1
    assert readings.pcie_bytes_per_second is None


def test_pcie_traffic_is_read_only_if_switched_on() -> None:
    bench = Bench([gpu(0)], pcie=True)
    assert bench.cycle().gpus["0"].readings.pcie_bytes_per_second == {"rx": 505_000.0, "tx": 505_000.0}
    plain = Bench([gpu(0)])
    plain.cycle(100)
    assert "nvmlDeviceGetPcieThroughput" not in plain.sampler.view.call_seconds


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_busy_is_integrated_and_nothing_is_missed(share: float) -> None:
    bench = Bench([gpu(0, share)])
    bench.sampler.cycle()
    chip = bench.cycle(30).gpus["0"]
    assert chip.method is Method.SAMPLES
    assert chip.observed_seconds == pytest.approx(60)
    assert 60 - 2.2 <= chip.sampled_seconds <= 60
    assert chip.busy_seconds / chip.sampled_seconds == pytest.approx(share, abs=0.006)


def test_power_loses_nothing_between_cycles() -> None:
    bench = Bench([gpu(0)])
    bench.sampler.cycle()
    bench.cycle(30)
    samples = bench.kept.power_samples["0"]
    seconds = sum(one.end_unix_s - one.start_unix_s for one in samples)
    assert seconds == pytest.approx(60, abs=0.03)
    assert all(one.watts == pytest.approx(400, rel=1e-4) for one in samples)


def test_energy_goes_on_without_a_power_ring() -> None:
    bench = Bench([gpu(0)])
    bench.nvml.fail("nvmlDeviceGetSamples", error="NotSupported")
    bench.sampler.cycle()
    bench.cycle(10)
    samples = bench.kept.power_samples["0"]
    assert sum(one.end_unix_s - one.start_unix_s for one in samples) == pytest.approx(20)
    assert {one.watts for one in samples} == {400.0}


def test_throttling_is_counted_in_seconds() -> None:
    fake = gpu(0)
    bench = Bench([fake])
    bench.sampler.cycle()
    fake.throttle_reasons = 0x4 | 0x20
    bench.cycle(5)
    fake.throttle_reasons = 0x1
    seconds = bench.cycle(5).gpus["0"].throttled_seconds
    assert (seconds["sw_power_cap"], seconds["sw_thermal_slowdown"], seconds["hw_slowdown"]) == (10.0, 10.0, 0.0)


def test_only_reasons_that_the_gpu_can_tell_are_shown() -> None:
    fake = gpu(0)
    fake.throttle_reasons_supported = 0x5
    assert set(Bench([fake]).cycle().gpus["0"].throttled_seconds) == {"sw_power_cap"}


def test_an_older_driver_has_other_names_for_the_reasons() -> None:
    bench = Bench([gpu(0)])
    for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons"):
        bench.nvml.fail(function, error="FunctionNotFound")
    bench.nvml.gpus[0].throttle_reasons = 0x8
    bench.sampler.cycle()
    assert bench.cycle(5).gpus["0"].throttled_seconds["hw_slowdown"] == 10.0


def test_what_is_expensive_or_rarely_changes_is_read_rarely() -> None:
    bench = Bench([gpu(0), gpu(1)])
    bench.cycle(2)
    bench.nvml.keep_calls = True
    bench.cycle(60)
    counts = Counter(function for function, index in bench.nvml.calls if index == 0)
    assert counts["nvmlDeviceGetSamples"] == 60 + 30
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMigMode"):
        assert counts[function] == 2
    assert counts["nvmlDeviceGetTotalEccErrors"] == 2 * 2
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"):
        assert counts[function] == 60
    assert counts["nvmlDeviceGetUtilizationRates"] == 0


def test_processes_and_ecc_errors_are_found_within_a_minute() -> None:
    bench = Bench([gpu(0)])
    bench.sampler.cycle()
    bench.nvml.gpus[0].processes, bench.nvml.gpus[0].ecc_uncorrected = 3, 1
    chip = bench.cycle(31).gpus["0"]
    assert chip.readings.processes == 3
    assert chip.ecc_errors == {"corrected": 0, "uncorrected": 1}


def test_the_very_first_xid_error_counts() -> None:
    bench = Bench([gpu(0), gpu(1)])
    bench.sampler.cycle()
    bench.nvml.xid(1, 79)
    bench.nvml.xid(1, 48)
    view = bench.cycle()
    assert [view.gpus[label].xid_errors for label in "01"] == [0, 2]
    assert view.gpus["1"].xid_last_unix_s == bench.clock.unix_s()
    assert view.gpus["0"].xid_last_unix_s is None
    assert ("nvmlEventSetWait", "Timeout") not in view.errors


def test_calls_are_timed() -> None:
    bench = Bench([gpu(0)])
    bench.nvml.gpus[0].signal = Slow(bench)
    count, seconds = bench.cycle(3).call_seconds["nvmlDeviceGetTemperature"]
    assert count == 3
    assert seconds == pytest.approx(0.75)


class Slow:
    """A signal for which measuring the temperature takes a quarter of a second."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def busy_samples(self, *_: float) -> list[tuple[int, int]]:
        """None."""
        return []

    def busy_percent(self, unix_s: float) -> int:  # noqa: ARG002
        """Idle."""
        return 0

    def watts(self, unix_s: float) -> float:  # noqa: ARG002
        """Little."""
        return 75.0

    def celsius(self, unix_s: float) -> float:  # noqa: ARG002
        """Slowly."""
        self._bench.clock.advance(0.25)
        return 40.0

    def memory_used_bytes(self, unix_s: float) -> int:  # noqa: ARG002
        """None."""
        return 0


# --- which GPU is which ------------------------------------------------------------------------------------------


def test_labels_are_the_daemons_ordinals_if_they_are_known() -> None:
    bench = Bench([gpu(0), gpu(1), gpu(2)], labels={"0": uuid(2), "1": "0000:06:00.0"})
    view = bench.cycle()
    named = {label: chip.info.uuid for label, chip in view.gpus.items()}
    # NVML's 1 is none of the daemon's, and "1" means another one.
    assert named == {"0": uuid(2), "1": uuid(0), "nvml1": uuid(1)}
    assert sorted(bench.kept.labels) == ["0", "1", "nvml1"]


def test_a_number_is_kept_for_the_gpu_that_the_daemon_means_by_it() -> None:
    """Even while that GPU is not there."""
    bench = Bench([gpu(0)], labels={"0": uuid(5)})
    assert list(bench.cycle().gpus) == ["nvml0"]


@pytest.mark.parametrize(
    ("named", "is_it"),
    [
        ("GPU-00000001-6e0e-bfb3-2aec-dde616350767", True),
        ("gpu-00000001", True),
        ("GPU-00000002", False),
        ("00000000:2A:00.0", True),
        ("0000:2a:00.0", True),
        ("2a:00.0", True),
        ("0001:2a:00.0", False),
        ("2b:00.0", False),
        ("3", True),
        ("1", False),
        ("MIG-00000001", False),
    ],
)
def test_names_of_a_gpu(named: str, is_it: bool) -> None:
    assert is_named(named, DeviceInfo(uuid(1), None, "00000000:2A:00.0", None, 3)) is is_it
    assert not is_named("GPU-00000001", DeviceInfo(None, None, None, None, 0))


# --- replayed captures -------------------------------------------------------------------------------------------


def replay(capture: Capture, cycles: list[float]) -> tuple[Bench, float]:
    """A capture from its beginning on, with these lengths of cycles over and over; and the true busy seconds of what
    was sampled."""
    recorded = capture.recorded
    bench = Bench([FakeGpu(recorded, uuid(0))], unix_s=recorded.start_unix_s + 0.05)
    bench.sampler.cycle()
    number = 0
    while bench.clock.unix_s() < recorded.end_unix_s:
        bench.cycle(1, cycles[number % len(cycles)])
        number += 1
    samples = bench.kept.busy_samples["0"]
    return bench, sum(capture.busy_seconds(one.start_unix_s, one.end_unix_s) for one in samples)


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("lengths", ["default", "hasty", "lazy", "irregular"])
def test_chip_busy_of_the_captures_is_within_1_percent_of_the_truth(name: str, lengths: str) -> None:
    chance = random.Random(name)
    cycles = {
        "default": [2.0],
        "hasty": [0.11],
        "lazy": [6.9],
        "irregular": [chance.choice([0.05, 0.3, 1.0, 2.0, 5.0]) * chance.uniform(0.8, 1.2) for _ in range(40)],
    }[lengths]
    bench, truth = replay(CAPTURES[name](), cycles)
    chip = bench.chip()
    assert chip.busy_seconds == pytest.approx(truth, rel=0.01)
    # The capture ends in the middle of a cycle.
    assert chip.sampled_seconds >= chip.observed_seconds - max(cycles) * 2 - 0.3
    assert chip.busy_seconds <= chip.sampled_seconds <= chip.observed_seconds


def test_a_cycle_that_comes_late_leaves_a_hole_and_no_wrong_time() -> None:
    bench, truth = replay(CAPTURES["starved-gw1"](), [2.0, 2.0, 21.0])
    chip = bench.chip()
    assert chip.busy_seconds == pytest.approx(truth, rel=0.01)
    assert chip.sampled_seconds < 0.9 * chip.observed_seconds


# --- the thread --------------------------------------------------------------------------------------------------


def test_run_keeps_the_beat_and_lets_go_of_the_driver() -> None:
    bench = Bench([gpu(0)])
    bench.nvml.gpus[0].signal = Slow(bench)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(round(seconds, 6))
        bench.clock.advance(seconds)

    bench.sampler.run(lambda: len(waits) == 3, wait)
    assert waits == [1.75] * 3
    assert bench.sampler.view.call_seconds["nvmlInit"][0] == 1
    bench.nvml.keep_calls = True
    bench.sampler.close()
    assert bench.nvml.calls == [], "it has been shut down already"


def test_a_late_cycle_is_followed_by_a_whole_pause_or_none() -> None:
    bench = Bench([gpu(0)])
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(round(seconds, 6))
        bench.clock.advance(seconds + (7.0 if len(waits) == 1 else 0.0))

    bench.sampler.run(lambda: len(waits) == 4, wait)
    assert waits == [2.0, 0.0, 2.0, 2.0]


def test_the_view_is_seen_as_hung_while_a_call_does_not_return() -> None:
    """What is published goes stale; the one who shows it sees that, and by which call."""
    bench = Bench([gpu(0), gpu(1)])
    bench.cycle(2)
    before = bench.sampler.view
    assert as_seen(before, bench.clock.monotonic_s() + 9.9, None) is before

    returns = threading.Event()
    bench.nvml.hang("nvmlDeviceGetMemoryInfo", returns)
    thread = threading.Thread(target=bench.cycle)
    thread.start()
    while bench.sampler.calling != "nvmlDeviceGetMemoryInfo":
        assert thread.is_alive()
    assert bench.sampler.view is before
    hung = as_seen(bench.sampler.view, bench.clock.monotonic_s() + 11, bench.sampler.calling)
    assert hung.state is NvmlState.HUNG
    assert hung.detail == "nvmlDeviceGetMemoryInfo has not returned for 13 s"
    assert {(chip.state, chip.detail) for chip in hung.gpus.values()} == {(NvmlState.HUNG, hung.detail)}
    assert {chip.readings.power_watts for chip in hung.gpus.values()} == {None}
    assert (hung.call_seconds, hung.errors) == (before.call_seconds, before.errors)

    returns.set()
    thread.join(10)
    after = as_seen(bench.sampler.view, bench.clock.monotonic_s(), bench.sampler.calling)
    assert after.state is NvmlState.UP
    assert after.gpus["0"].sampled_seconds >= before.gpus["0"].sampled_seconds


def test_a_driver_that_hangs_from_the_start() -> None:
    bench = Bench([gpu(0)])
    view = as_seen(bench.sampler.view, bench.clock.monotonic_s() + 60, "nvmlInit")
    assert (view.state, view.detail) == (NvmlState.HUNG, "nvmlInit has not returned for 60 s")


def test_the_real_module_without_a_driver_is_a_state() -> None:
    """On a machine with a GPU this is not what it looks at."""
    bench = Bench([])
    sampler = Sampler(bench.clock)
    sampler.cycle()
    assert sampler.view.state in {NvmlState.NO_DRIVER, NvmlState.UP, NvmlState.NO_GPU}
    sampler.close()
