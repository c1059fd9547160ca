"""The fake has to be like the real one in what the agent relies on."""

from __future__ import annotations

import pynvml
import pytest

from conftest import FakeClock
from cuzk_agent.gpu.fake import BUSY_RING, POWER_RING, FakeGpu, FakeNvml
from cuzk_agent.gpu.nvml import Device, Nvml
from gpu.support import CAPTURES, gpu, uuid


def opened(clock: FakeClock, *gpus: FakeGpu) -> tuple[FakeNvml, Device]:
    """An initialized NVML, and the first GPU."""
    nvml = FakeNvml(clock, gpus)
    nvml.nvmlInit()
    return nvml, Device("0", nvml.nvmlDeviceGetHandleByIndex(0))


def stamps(nvml: FakeNvml, device: Device, kind: int, since: int = 0) -> list[int]:
    """Time stamps of a read of a ring."""
    return [one.timeStamp for one in nvml.nvmlDeviceGetSamples(device.handle, kind, since)[1]]


def test_all_functions_exist_in_pynvml_and_take_as_many_arguments() -> None:
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(functions) > 20
    for name in functions:
        ours = getattr(FakeNvml, name).__code__.co_argcount - 1
        real = getattr(pynvml, name)
        real = getattr(real, "__wrapped__", real)
        needed = real.__code__.co_argcount - len(real.__defaults__ or ())
        assert needed <= ours <= real.__code__.co_argcount, name


def test_constants_and_errors_are_those_of_pynvml(clock: FakeClock) -> None:
    nvml = FakeNvml(clock)
    assert nvml.NVML_GPU_UTILIZATION_SAMPLES == pynvml.NVML_GPU_UTILIZATION_SAMPLES
    assert nvml.NVMLError is pynvml.NVMLError
    with pytest.raises(AttributeError):
        nvml.nvmlDeviceGetFanSpeed(0)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()


def test_the_rings_have_the_cadence_and_the_length_of_real_ones(clock: FakeClock) -> None:
    nvml, device = opened(clock, gpu(0))
    busy = stamps(nvml, device, nvml.NVML_GPU_UTILIZATION_SAMPLES)
    power = stamps(nvml, device, nvml.NVML_TOTAL_POWER_SAMPLES)
    assert (len(busy), len(power)) == (BUSY_RING, POWER_RING)
    assert busy[-1] - busy[0] == pytest.approx(14e6, abs=2)
    assert power[-1] - power[0] == pytest.approx(2.36e6, abs=2)
    clock.advance(1.0)
    later = stamps(nvml, device, nvml.NVML_GPU_UTILIZATION_SAMPLES)
    assert later[:-5] == busy[5:]
    assert len(stamps(nvml, device, nvml.NVML_GPU_UTILIZATION_SAMPLES, since=busy[-1])) == 5
    with pytest.raises(pynvml.NVMLError_NotFound):
        stamps(nvml, device, nvml.NVML_GPU_UTILIZATION_SAMPLES, since=later[-1])


def test_a_full_interval_reads_99() -> None:
    clock = FakeClock()
    nvml, device = opened(clock, gpu(0, 1.0))
    ring = nvml.nvmlDeviceGetSamples(device.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]
    assert {one.sampleValue.uiVal for one in ring} == {99}
    assert nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu == 99


def test_a_replay_says_what_was_captured(clock: FakeClock) -> None:
    recorded = CAPTURES["two-gpus.gpu1"]().recorded
    clock.step_wall(recorded.start_unix_s - clock.unix_s())
    fake = FakeGpu(recorded, uuid(0))
    nvml, device = opened(clock, fake)
    door = Nvml(clock, nvml)
    door.init()
    device = Device("0", door.handle(0))
    seen: set[tuple[int, int]] = set()
    while clock.unix_s() < recorded.end_unix_s:
        seen.update(door.ring(device, "NVML_GPU_UTILIZATION_SAMPLES") or ())
        clock.advance(3.3)
    assert seen == {one for one in recorded.samples if one[0] <= (clock.unix_s() - 3.3) * 1e6}
    assert door.power_watts(device) == recorded.moments[-1].power_mw / 1000
    assert door.utilization_percent(device) == recorded.polls[-1][1]
    assert door.memory_bytes(device) == (recorded.moments[-1].memory_used_bytes, fake.memory_total_bytes)
    assert door.temperature_celsius(device) == recorded.moments[-1].celsius


def test_faults_come_when_the_script_says(clock: FakeClock) -> None:
    nvml, device = opened(clock, gpu(0), gpu(1))
    nvml.fail("nvmlDeviceGetPowerUsage", gpu=0, error="Unknown", from_s=10, to_s=20)
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    for passed_s in range(30):
        assert nvml.nvmlDeviceGetPowerUsage(other) == 400_000
        if 10 <= passed_s < 20:
            with pytest.raises(pynvml.NVMLError_Unknown):
                nvml.nvmlDeviceGetPowerUsage(device.handle)
        else:
            assert nvml.nvmlDeviceGetPowerUsage(device.handle) == 400_000
        clock.advance(1.0)


def test_a_lost_gpu_renumbers_the_others(clock: FakeClock) -> None:
    nvml, device = opened(clock, gpu(0), gpu(1))
    nvml.remove(0)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetUUID(device.handle)
    assert nvml.nvmlDeviceGetCount() == 2
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetCount() == 1
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)) == uuid(1)


def test_handles_do_not_outlive_the_driver(clock: FakeClock) -> None:
    nvml, device = opened(clock, gpu(0))
    nvml.unload_driver()
    with pytest.raises(pynvml.NVMLError_Unknown):
        nvml.nvmlDeviceGetUUID(device.handle)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        nvml.nvmlInit()
    nvml.load_driver()
    nvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_Unknown):
        nvml.nvmlDeviceGetUUID(device.handle)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)) == uuid(0)
