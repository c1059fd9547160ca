"""Every fault of NVML as Prometheus sees it: the page before, while it lasts, and after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cuzk_agent.gpu.fake import FakeGpu
from cuzk_agent.gpu.sampler import as_seen
from cuzk_agent.metrics import AgentState, Exposition
from gpu.support import Bench, gpu, uuid

STATE_ONLY = {"cuzk_gpu_info", "cuzk_nvml_up", "cuzk_nvml_state"}
READINGS = {
    "cuzk_gpu_memory_used_bytes",
    "cuzk_gpu_power_watts",
    "cuzk_gpu_temperature_celsius",
    "cuzk_gpu_sm_clock_hertz",
}
CHIP = {"cuzk_gpu_chip_busy_seconds_total", "cuzk_gpu_chip_sampled_seconds_total"}


@dataclass(frozen=True)
class Page:
    """What is on /metrics about NVML."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def of(self, label: str) -> set[str]:
        """Names of the series of one GPU."""
        return {name for name, labels in self.values if ("gpu", label) in labels}

    def value(self, name: str, **labels: str) -> float | None:
        """One series; None if it is absent."""
        return self.values.get((name, tuple(sorted(labels.items()))))

    def state(self, label: str) -> str:
        """The one state of a GPU that is 1."""
        (state,) = (
            dict(labels)["state"]
            for (name, labels), value in self.values.items()
            if name == "cuzk_nvml_state" and ("gpu", label) in labels and value
        )
        return state

    @property
    def nvml(self) -> str:
        """The one state of NVML that is 1."""
        (state,) = (
            dict(labels)["state"]
            for (name, labels), value in self.values.items()
            if name == "cuzk_agent_nvml_state" and value
        )
        return state


def page(bench: Bench, later_s: float = 0.0) -> Page:
    """What a scrape gives so much later, if the sampling thread does nothing in the meantime."""
    view = as_seen(bench.sampler.view, bench.clock.monotonic_s() + later_s, bench.sampler.calling)
    body, _ = Exposition().render(None, AgentState({}, "0", "3", nvml=view))
    return Page(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
            if "nvml" in sample.name or sample.name.startswith("cuzk_gpu_")
        }
    )


def well(*gpus: FakeGpu) -> Bench:
    """Two GPUs, or these, that have been well for some time."""
    bench = Bench(gpus or [gpu(0), gpu(1)])
    bench.cycle(40)
    return bench


def assert_well(found: Page, *labels: str) -> None:
    assert found.nvml == "up"
    assert found.value("cuzk_agent_nvml_up") == 1
    for label in labels:
        assert found.value("cuzk_nvml_up", gpu=label) == 1
        assert found.state(label) == "up"
        assert found.of(label) >= (STATE_ONLY | READINGS | CHIP)


def break_gpu(error: str) -> Callable[[Bench], object]:
    return lambda bench: bench.nvml.fail("*", error=error, gpu=0)


@pytest.mark.parametrize(
    ("fault", "mend", "at_once"),
    [
        (break_gpu("GpuIsLost"), lambda bench: bench.nvml.heal(), "lost"),
        (break_gpu("Unknown"), lambda bench: bench.nvml.heal(), "error"),
        (lambda bench: bench.nvml.remove(0), lambda bench: bench.nvml.restore(0), "lost"),
    ],
    ids=["lost", "unknown", "not-listed"],
)
def test_a_gpu_that_fails_shows_its_state_only_and_the_other_goes_on(
    fault: Callable[[Bench], object], mend: Callable[[Bench], object], at_once: str
) -> None:
    bench = well()
    before = page(bench)
    assert_well(before, "0", "1")
    fault(bench)
    bench.cycle()
    assert page(bench).state("0") == at_once
    assert page(bench).of("0") == STATE_ONLY
    # Then NVML is started anew, and the GPU can't be found.
    bench.cycle(40)
    during = page(bench)
    assert during.state("0") == "lost"
    assert during.value("cuzk_nvml_up", gpu="0") == 0
    assert during.of("0") == STATE_ONLY
    assert_well(during, "1")
    busy = ("cuzk_gpu_chip_busy_seconds_total", (("gpu", "1"),))
    assert during.values[busy] > before.values[busy]
    mend(bench)
    bench.cycle(200)
    after = page(bench)
    assert_well(after, "0", "1")
    for name in CHIP:
        assert (after.value(name, gpu="0") or 0) > (before.value(name, gpu="0") or 0)


def test_the_driver_goes_and_comes_back() -> None:
    bench = well()
    before = page(bench)
    assert_well(before, "0", "1")
    bench.nvml.unload_driver()
    bench.cycle()
    assert page(bench).of("0") == page(bench).of("1") == STATE_ONLY
    bench.cycle(5)
    during = page(bench)
    assert during.nvml == "no_driver"
    assert during.value("cuzk_agent_nvml_up") == 0
    assert during.of("0") == during.of("1") == STATE_ONLY
    assert during.state("0") == "no_driver"
    bench.nvml.load_driver()
    bench.cycle(40)
    assert_well(page(bench), "0", "1")


def test_a_call_hangs_and_returns() -> None:
    bench = well()
    assert_well(page(bench), "0", "1")
    returns = threading.Event()
    bench.nvml.hang("nvmlDeviceGetMemoryInfo", returns)
    thread = threading.Thread(target=bench.cycle)
    thread.start()
    while bench.sampler.calling != "nvmlDeviceGetMemoryInfo":
        assert thread.is_alive()
    during = page(bench, later_s=11)
    assert during.nvml == "hung"
    assert during.of("0") == during.of("1") == STATE_ONLY
    assert during.state("1") == "hung"
    returns.set()
    thread.join()
    bench.nvml.heal()
    bench.cycle()
    assert_well(page(bench), "0", "1")


def test_there_is_no_driver_then_no_gpu_then_one() -> None:
    bench = Bench([])
    bench.nvml.unload_driver()
    bench.cycle()
    none = page(bench)
    assert (none.nvml, none.of("0")) == ("no_driver", set())
    bench.nvml.load_driver()
    bench.cycle(40)
    empty = page(bench)
    assert (empty.nvml, empty.of("0")) == ("no_gpu", set())
    bench.nvml.add(gpu(0))
    bench.cycle(80)
    assert_well(page(bench), "0")


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        ("nvmlDeviceGetMemoryInfo", "cuzk_gpu_memory_used_bytes"),
        ("nvmlDeviceGetPowerUsage", "cuzk_gpu_power_watts"),
        ("nvmlDeviceGetTemperature", "cuzk_gpu_temperature_celsius"),
        ("nvmlDeviceGetClockInfo", "cuzk_gpu_sm_clock_hertz"),
        ("nvmlDeviceGetComputeRunningProcesses", "cuzk_gpu_compute_processes"),
        ("nvmlDeviceGetTotalEccErrors", "cuzk_gpu_ecc_errors_total"),
        ("nvmlDeviceRegisterEvents", "cuzk_gpu_xid_errors_total"),
    ],
)
@pytest.mark.parametrize("error", ["NotSupported", "FunctionNotFound"])
def test_what_is_not_supported_is_absent(function: str, gone: str, error: str) -> None:
    assert gone in page(well()).of("0")
    bench = Bench([gpu(0)])
    bench.nvml.fail(function, error=error)
    bench.cycle(40)
    found = page(bench)
    assert gone not in found.of("0")
    assert found.of("0") >= (STATE_ONLY | CHIP)
    assert (found.value("cuzk_agent_nvml_errors_total", call=function, error=error) or 0) <= 2


def test_a_ring_that_is_not_supported_gives_way_to_polling_and_the_page_says_so() -> None:
    bench = well(gpu(0))
    assert page(bench).value("cuzk_gpu_chip_method", gpu="0", method="samples") == 1
    polled = Bench([gpu(0)])
    polled.nvml.fail("nvmlDeviceGetSamples", error="NotSupported")
    polled.cycle(40)
    found = page(polled)
    assert found.value("cuzk_gpu_chip_method", gpu="0", method="samples") == 0
    assert found.value("cuzk_gpu_chip_method", gpu="0", method="polling") == 1
    assert found.of("0") >= CHIP
    blind = Bench([gpu(0)])
    blind.nvml.fail("nvmlDeviceGetSamples", error="NotSupported")
    blind.nvml.fail("nvmlDeviceGetUtilizationRates", error="NotSupported")
    blind.cycle(40)
    found = page(blind)
    assert found.value("cuzk_gpu_chip_method", gpu="0", method="none") == 1
    assert not CHIP & found.of("0")


def test_a_name_that_is_no_utf_8_is_an_empty_label() -> None:
    fake = gpu(0)
    fake.name = b"NVIDIA \xff\xfe"
    bench = Bench([fake])
    bench.cycle(5)
    found = page(bench)
    (labels,) = (dict(labels) for name, labels in found.values if name == "cuzk_gpu_info")
    assert (labels["model"], labels["uuid"]) == ("", uuid(0))
    assert_well(found, "0")


def test_the_order_is_unlike_cudas() -> None:
    bench = Bench([gpu(0), gpu(1)], labels={"0": uuid(1), "1": uuid(0)})
    bench.cycle(5)
    found = page(bench)
    called = {dict(labels)["uuid"]: dict(labels)["gpu"] for name, labels in found.values if name == "cuzk_gpu_info"}
    assert called == {uuid(0): "1", uuid(1): "0"}


def test_the_very_first_xid_error_can_be_seen_by_a_rate() -> None:
    bench = well()
    born = page(bench)
    assert born.value("cuzk_gpu_xid_errors_total", gpu="0") == 0
    assert born.value("cuzk_gpu_xid_last_timestamp_seconds", gpu="0") is None
    bench.nvml.xid(0, 79)
    bench.cycle()
    after = page(bench)
    assert after.value("cuzk_gpu_xid_errors_total", gpu="0") == 1
    assert after.value("cuzk_gpu_xid_last_timestamp_seconds", gpu="0") == bench.clock.unix_s()
    assert after.value("cuzk_gpu_xid_errors_total", gpu="1") == 0
