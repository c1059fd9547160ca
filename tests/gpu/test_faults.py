"""Every fault of NVML: the view before, while it lasts, and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cuzk_agent.gpu.fake import FakeGpu
from cuzk_agent.gpu.state import GpuChip, Method, NvmlState, NvmlView, Readings
from gpu.support import Bench, gpu, uuid


def states(view: NvmlView) -> dict[str, NvmlState]:
    """Of each GPU."""
    return {label: chip.state for label, chip in view.gpus.items()}


UP = {"0": NvmlState.UP, "1": NvmlState.UP}


def started(*gpus: FakeGpu) -> Bench:
    """Two GPUs, or these, that have been well for some time."""
    bench = Bench(gpus or [gpu(0), gpu(1)])
    bench.sampler.cycle()
    bench.cycle(40)
    return bench


def advances(bench: Bench, before: GpuChip, label: str, times: int = 4) -> bool:
    """Whether a GPU's counters go on from where they were."""
    after = bench.cycle(times).gpus[label]
    return after.busy_seconds > before.busy_seconds and after.sampled_seconds > before.sampled_seconds


# --- what a GPU does not support ---------------------------------------------------------------------------------

SUPPORTED_OR_NOT: dict[str, Callable[[GpuChip], object]] = {
    "nvmlDeviceGetMemoryInfo": lambda chip: chip.readings.memory_used_bytes,
    "nvmlDeviceGetPowerUsage": lambda chip: chip.readings.power_watts,
    "nvmlDeviceGetTemperature": lambda chip: chip.readings.temperature_celsius,
    "nvmlDeviceGetClockInfo": lambda chip: chip.readings.sm_clock_hertz,
    "nvmlDeviceGetComputeRunningProcesses": lambda chip: chip.readings.processes,
    "nvmlDeviceGetTotalEccErrors": lambda chip: chip.ecc_errors,
    "nvmlDeviceRegisterEvents": lambda chip: chip.xid_errors,
    "nvmlEventSetCreate": lambda chip: chip.xid_errors,
    "nvmlDeviceGetName": lambda chip: chip.info.model,
    "nvmlDeviceGetPciInfo": lambda chip: chip.info.pci_bus_id,
    "nvmlSystemGetDriverVersion": lambda chip: chip.info.driver_version,
}


@pytest.mark.parametrize("error", ["NotSupported", "FunctionNotFound", "NoPermission"])
@pytest.mark.parametrize("function", SUPPORTED_OR_NOT)
def test_what_is_not_supported_is_absent_and_left_alone(function: str, error: str) -> None:
    value = SUPPORTED_OR_NOT[function]
    assert value(started().chip()) is not None
    bench = Bench([gpu(0)])
    bench.nvml.fail(function, error=error)
    chip = bench.cycle(60).gpus["0"]
    assert (chip.state, chip.detail) == (NvmlState.UP, "")
    assert value(chip) is None
    assert bench.sampler.view.errors[function, error] <= 2
    assert chip.busy_seconds == pytest.approx(60, abs=4)


def test_what_is_not_supported_is_asked_anew_with_a_new_driver() -> None:
    bench = Bench([gpu(0)])
    bench.nvml.fail("nvmlDeviceGetTemperature", error="FunctionNotFound")
    bench.cycle(5)
    assert bench.chip().readings.temperature_celsius is None
    bench.nvml.heal()
    assert bench.cycle(60).gpus["0"].readings.temperature_celsius is None
    bench.nvml.unload_driver()
    bench.cycle()
    bench.nvml.load_driver()
    bench.cycle(5)
    assert bench.chip().readings.temperature_celsius == 41.0


def test_without_a_ring_the_momentary_utilization_is_polled() -> None:
    bench = Bench([gpu(0, 0.5)])
    bench.nvml.fail("nvmlDeviceGetSamples", error="NotSupported")
    bench.sampler.cycle()
    chip = bench.cycle(30).gpus["0"]
    assert chip.method is Method.POLLING
    assert chip.sampled_seconds == pytest.approx(60)
    assert chip.busy_seconds == pytest.approx(30, rel=0.03)
    assert bench.sampler.view.errors["nvmlDeviceGetSamples", "NotSupported"] == 2


def test_with_neither_nothing_is_claimed() -> None:
    bench = Bench([gpu(0)])
    for function in ("nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"):
        bench.nvml.fail(function, error="NotSupported")
    chip = bench.cycle(30).gpus["0"]
    assert (chip.state, chip.method) == (NvmlState.UP, Method.NONE)
    assert (chip.busy_seconds, chip.sampled_seconds) == (0, 0)
    assert chip.observed_seconds == pytest.approx(58)


def test_mig_is_on() -> None:
    bench = started()
    assert bench.chip().method is Method.SAMPLES
    bench.nvml.gpus[0].mig = True
    view = bench.cycle(40)
    assert (view.gpus["0"].state, view.gpus["0"].method) == (NvmlState.UP, Method.NONE)
    assert view.gpus["0"].detail.startswith("MIG is on")
    assert view.gpus["0"].readings.power_watts == 400.0
    assert (view.gpus["1"].detail, view.gpus["1"].method) == ("", Method.SAMPLES)


def test_an_empty_ring_of_a_busy_gpu_gives_way_to_polling_until_it_speaks() -> None:
    bench = started()
    bench.nvml.fail("nvmlDeviceGetSamples", error="NotFound", gpu=0)
    before = bench.chip()
    assert before.method is Method.SAMPLES
    during = bench.cycle(20).gpus["0"]
    assert during.method is Method.POLLING
    assert during.sampled_seconds - before.sampled_seconds == pytest.approx(40, abs=8.5)
    assert during.busy_seconds - before.busy_seconds == pytest.approx(20, abs=4.5)
    assert ("nvmlDeviceGetSamples", "NotFound") not in bench.sampler.view.errors
    bench.nvml.heal()
    after = bench.cycle(2).gpus["0"]
    assert after.method is Method.SAMPLES
    assert after.sampled_seconds <= after.observed_seconds


def test_an_empty_ring_of_an_idle_gpu_is_no_reason_to_mistrust_it() -> None:
    bench = Bench([gpu(0, 0.0)])
    bench.nvml.fail("nvmlDeviceGetSamples", error="NotFound")
    bench.sampler.cycle()
    chip = bench.cycle(300).gpus["0"]
    assert chip.method is Method.SAMPLES
    assert chip.busy_seconds == 0
    assert chip.sampled_seconds == pytest.approx(600, abs=4.1)


# --- one call, one GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["Unknown", "Timeout", "InvalidArgument", "IrqIssue"])
def test_a_call_that_fails_leaves_the_others_alone(error: str) -> None:
    bench = started()
    assert bench.chip().readings.temperature_celsius == 41.0
    bench.nvml.fail("nvmlDeviceGetTemperature", error=error, gpu=0)
    view = bench.cycle(3)
    assert states(view) == UP
    assert view.gpus["0"].readings.temperature_celsius is None
    assert view.gpus["0"].readings.power_watts == 400.0
    assert view.gpus["0"].detail == f"nvmlDeviceGetTemperature: {error}"
    assert (view.gpus["1"].detail, view.gpus["1"].readings.temperature_celsius) == ("", 41.0)
    assert view.errors["nvmlDeviceGetTemperature", error] == 3
    bench.nvml.heal()
    chip = bench.cycle().gpus["0"]
    assert (chip.readings.temperature_celsius, chip.detail) == (41.0, "")


def test_samples_that_fail_for_a_while_are_made_up_for_from_the_ring() -> None:
    bench = started()
    bench.nvml.fail("nvmlDeviceGetSamples", error="Unknown", gpu=0)
    bench.cycle(3)
    bench.nvml.heal()
    chip = bench.cycle(3).gpus["0"]
    assert chip.method is Method.SAMPLES
    assert chip.sampled_seconds == pytest.approx(chip.observed_seconds, abs=4.3)


def test_samples_that_go_on_failing_give_way_to_polling() -> None:
    bench = started()
    before = bench.chip()
    bench.nvml.fail("nvmlDeviceGetSamples", error="Unknown", gpu=0)
    during = bench.cycle(20).gpus["0"]
    assert (during.state, during.method) == (NvmlState.UP, Method.POLLING)
    assert during.detail == "nvmlDeviceGetSamples: Unknown"
    assert during.sampled_seconds - before.sampled_seconds == pytest.approx(40, abs=8.5)
    power = bench.kept.power_samples["0"]
    assert sum(one.end_unix_s - one.start_unix_s for one in power) == pytest.approx(120, abs=2.5)
    bench.nvml.heal()
    after = bench.cycle(3).gpus["0"]
    assert (after.method, after.detail) == (Method.SAMPLES, "")
    assert after.sampled_seconds <= after.observed_seconds


def test_a_name_that_is_no_utf_8() -> None:
    fake = gpu(0)
    fake.name = b"NVIDIA \xff\xfe"
    bench = started(fake, gpu(1))
    assert states(bench.sampler.view) == UP
    assert bench.chip().info.model is None
    assert bench.chip().info.uuid == uuid(0)
    assert bench.sampler.view.errors["nvmlDeviceGetName", "UnicodeDecodeError"] == 1
    assert bench.chip("1").info.model == "NVIDIA H200"


def test_every_call_to_one_gpu_fails() -> None:
    bench = started()
    before = bench.sampler.view
    bench.nvml.fail("*", error="Unknown", gpu=0)
    view = bench.cycle()
    assert states(view) == {"0": NvmlState.ERROR, "1": NvmlState.UP}
    assert view.gpus["0"].detail.endswith(": Unknown")
    assert view.gpus["0"].readings == Readings()
    assert view.state is NvmlState.UP
    assert advances(bench, before.gpus["1"], "1")
    bench.nvml.heal()
    assert states(bench.cycle(130)) == UP
    assert advances(bench, before.gpus["0"], "0")


@pytest.mark.parametrize("error", ["GpuIsLost", "ResetRequired"])
def test_a_gpu_is_lost_and_comes_back(error: str) -> None:
    bench = started()
    before = bench.sampler.view
    assert states(before) == UP
    bench.nvml.fail("*", error=error, gpu=0)
    lost = bench.cycle()
    assert states(lost) == {"0": NvmlState.LOST, "1": NvmlState.UP}
    assert lost.gpus["0"].detail.endswith(error)
    assert lost.gpus["0"].info == before.gpus["0"].info
    assert lost.gpus["0"].readings == Readings()
    assert advances(bench, before.gpus["1"], "1", 200)
    assert states(bench.sampler.view)["0"] is NvmlState.LOST

    bench.nvml.heal()
    assert states(bench.cycle(160)) == UP
    assert advances(bench, before.gpus["0"], "0")


def test_a_lost_gpu_is_left_alone_but_for_new_starts() -> None:
    bench = started()
    bench.nvml.remove(0)
    bench.cycle(10)
    bench.nvml.keep_calls = True
    bench.cycle(300)  # ten minutes
    calls = bench.nvml.calls
    assert ("nvmlDeviceGetPowerUsage", 0) not in calls
    assert 1 <= calls.count(("nvmlInit", None)) <= 5


def test_a_gpu_that_fell_off_the_bus_does_not_rename_the_others() -> None:
    """NVML's index of the second is 0 then; its label and counters remain."""
    bench = started()
    before = bench.sampler.view
    bench.nvml.remove(0)
    view = bench.cycle(20)
    assert states(view) == {"0": NvmlState.LOST, "1": NvmlState.UP}
    assert view.gpus["0"].detail == "the driver does not list it any more"
    assert view.gpus["1"].info.uuid == uuid(1)
    assert view.gpus["1"].busy_seconds == pytest.approx(before.gpus["1"].busy_seconds + 20, abs=3)
    bench.nvml.restore(0)
    assert states(bench.cycle(160)) == UP
    assert advances(bench, before.gpus["0"], "0")


def test_the_xid_error_of_a_gpu_that_is_lost_is_counted() -> None:
    bench = started()
    bench.nvml.xid(0, 79)
    bench.nvml.fail("*", error="GpuIsLost", gpu=0)
    chip = bench.cycle().gpus["0"]
    assert (chip.state, chip.xid_errors) == (NvmlState.LOST, 1)
    assert chip.xid_last_unix_s == bench.clock.unix_s()


def test_xid_errors_go_on_being_reported_after_a_new_start() -> None:
    bench = started()
    bench.nvml.unload_driver()
    bench.cycle()
    bench.nvml.load_driver()
    bench.cycle(5)
    bench.nvml.xid(0, 31)
    assert bench.cycle().gpus["0"].xid_errors == 1


def test_waiting_for_events_fails() -> None:
    bench = started()
    bench.nvml.fail("nvmlEventSetWait", error="Unknown")
    view = bench.cycle()
    assert states(view) == UP
    assert view.errors["nvmlEventSetWait", "Unknown"] == 1


# --- the driver --------------------------------------------------------------------------------------------------


def test_there_is_no_driver_and_it_comes_later() -> None:
    bench = Bench([gpu(0), gpu(1)])
    bench.nvml.unload_driver()
    view = bench.cycle()
    assert (view.state, view.detail, dict(view.gpus)) == (NvmlState.NO_DRIVER, "nvmlInit: DriverNotLoaded", {})
    view = bench.cycle(300)  # ten minutes
    assert view.heartbeat_monotonic_s == bench.clock.monotonic_s()
    assert 10 <= view.errors["nvmlInit", "DriverNotLoaded"] <= 15, "asked about once a minute in the end"
    bench.nvml.load_driver()
    view = bench.cycle(31)
    assert view.state is NvmlState.UP
    assert states(view) == UP
    assert view.gpus["0"].sampled_seconds <= view.gpus["0"].observed_seconds


def test_there_is_no_library() -> None:
    bench = Bench([gpu(0)])
    bench.nvml.fail("nvmlInit", error="LibraryNotFound", to_s=100)
    assert bench.cycle().state is NvmlState.NO_DRIVER
    assert bench.cycle(80).state is NvmlState.UP


def test_pynvml_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr("cuzk_agent.gpu.nvml.pynvml_module", missing)
    bench = Bench([])
    bench.sampler._nvml._lib = None
    assert bench.cycle().state is NvmlState.NO_DRIVER


def test_there_is_no_gpu_and_one_comes_later() -> None:
    bench = Bench([])
    view = bench.cycle(3)
    assert (view.state, view.detail, dict(view.gpus)) == (NvmlState.NO_GPU, "the driver lists no GPU", {})
    bench.nvml.add(gpu(0))
    view = bench.cycle(40)
    assert (view.state, view.detail) == (NvmlState.UP, "")
    assert states(view) == {"0": NvmlState.UP}


def test_a_gpu_more_is_found_and_the_others_stay_as_they_are() -> None:
    """It sits before the others, so that NVML numbers them anew at the next start."""
    bench = started(gpu(1))
    before = bench.chip()
    bench.nvml.gpus.insert(0, gpu(0))
    bench.nvml.unload_driver()
    bench.cycle()
    bench.nvml.load_driver()
    bench.cycle(5)
    assert {label: chip.info.uuid for label, chip in bench.sampler.view.gpus.items()} == {
        "0": uuid(1),
        "nvml0": uuid(0),
    }
    assert advances(bench, before, "0")


def test_the_driver_is_reloaded_under_its_feet() -> None:
    bench = started()
    before = bench.sampler.view
    bench.nvml.unload_driver()
    gone = bench.cycle()
    assert set(states(gone).values()) <= {NvmlState.ERROR, NvmlState.NO_DRIVER}
    assert gone.state is not NvmlState.UP
    assert all(chip.readings == Readings() for chip in gone.gpus.values())
    gone = bench.cycle(5)
    assert (gone.state, gone.detail) == (NvmlState.NO_DRIVER, "nvmlInit: DriverNotLoaded")
    assert set(states(gone).values()) == {NvmlState.NO_DRIVER}
    bench.nvml.load_driver()
    back = bench.cycle(40)
    assert back.state is NvmlState.UP
    assert states(back) == UP
    for label in UP:
        assert back.gpus[label].info == before.gpus[label].info
        assert advances(bench, before.gpus[label], label)
        chip = bench.chip(label)
        assert chip.busy_seconds <= chip.sampled_seconds <= chip.observed_seconds


def test_nvml_loses_its_mind_and_is_started_anew_at_once() -> None:
    bench = started()
    bench.nvml.fail("nvmlDeviceGetSamples", error="Uninitialized", from_s=81, to_s=83)
    view = bench.cycle()
    assert (view.state, view.detail) == (NvmlState.NO_DRIVER, "nvmlDeviceGetSamples: Uninitialized")
    assert states(bench.cycle()) == UP
    assert bench.sampler.view.call_seconds["nvmlInit"][0] == 2


def test_another_version_of_the_driver_needs_a_restart() -> None:
    bench = started()
    bench.nvml.fail("nvmlInit", error="LibRmVersionMismatch")
    bench.nvml.fail("*", error="LibRmVersionMismatch")
    view = bench.cycle(2)
    assert view.state is NvmlState.NO_DRIVER
    assert "restart the agent" in view.detail


def test_trouble_again_and_again_slows_the_new_starts_down() -> None:
    bench = started()
    bench.nvml.fail("nvmlDeviceGetMemoryInfo", error="Uninitialized")
    bench.cycle(300)  # ten minutes
    assert bench.sampler.view.call_seconds["nvmlInit"][0] <= 20
    bench.nvml.heal()
    assert states(bench.cycle(31)) == UP


# --- clocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-7200.0, -3.307, 3.307, 7200.0])
def test_the_wall_clock_is_set(step_s: float) -> None:
    bench = started()
    bench.clock.step_wall(step_s)
    chip = bench.cycle(30).gpus["0"]
    assert chip.method is Method.SAMPLES
    assert chip.observed_seconds - 4.5 <= chip.sampled_seconds <= chip.observed_seconds
    assert chip.busy_seconds / chip.sampled_seconds == pytest.approx(0.5, abs=0.01)
    went_back = bench.sampler.view.errors.get(("nvmlDeviceGetSamples", "TimeWentBack"), 0)
    assert (went_back > 0) is (step_s < 0)


def test_time_stamps_since_boot() -> None:
    fake = gpu(0)
    fake.since_boot = True
    bench = started(fake)
    chip = bench.chip()
    assert chip.method is Method.SAMPLES
    assert chip.sampled_seconds == pytest.approx(chip.observed_seconds, abs=2.3)
    assert bench.kept.busy_samples["0"][-1].end_unix_s == pytest.approx(bench.clock.unix_s(), abs=2.3)
    assert bench.kept.power_samples["0"][-1].end_unix_s == pytest.approx(bench.clock.unix_s(), abs=0.03)


def test_samples_that_are_none() -> None:
    bench = started()
    before = bench.chip()
    bench.nvml.gpus[0]._busy.extend([(0, 50), (round(bench.clock.unix_s() * 1e6) - 1, 4_000_000)])
    assert advances(bench, before, "0")
    assert bench.sampler.view.errors["nvmlDeviceGetSamples", "UnusableSample"] == 2
