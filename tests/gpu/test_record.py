"""Recordings of what NVML says: they read back to what was sampled, and are never in the agent's way."""

from __future__ import annotations

import json
import logging
import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cuzk_agent.gpu.fake import FakeGpu
from cuzk_agent.gpu.record import Heard, Recorder, recording_paths
from cuzk_agent.gpu.samples import BusySample
from cuzk_agent.gpu.state import Readings
from cuzk_agent.report.analyze import Options, analyze
from cuzk_agent.report.arguments import parse_recording
from cuzk_agent.report.model import Chip
from cuzk_agent.report.nvml import Recording
from gpu.support import CAPTURES, H200, Bench, gpu

HEARD = Heard(1_796_000_000.0, 1000.0, [(1_795_999_999_900_000, 7)], None)


@contextmanager
def recorded(bench: Bench, path: Path) -> Iterator[Bench]:
    """The bench's sampler records."""
    recorder = Recorder(path)
    bench.sampler._recorder = recorder
    yield bench
    recorder.close()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what is in a recording


def test_a_record_each_time_the_ring_is_read(tmp_path: Path) -> None:
    with recorded(Bench([gpu(0)]), tmp_path / "x.nvml.jsonl") as bench:
        bench.cycle(11)
        now_s = bench.clock.unix_s()
    found = records(tmp_path / "x.nvml.jsonl")
    # The ring is read every other cycle, and until it tells something.
    assert [now_s - record["wall"] for record in found] == pytest.approx([20, 18, 16, 12, 8, 4, 0], abs=1e-5)
    assert found[-1]["monotonic"] == bench.clock.monotonic_s()
    assert {key: value for key, value in found[-1].items() if key not in {"wall", "monotonic", "samples"}} == {
        "power_mw": 400_000,
        "temp_c": 41,
        "sm_mhz": 1980,
        "mem_used": 5_838_340_096,
    }
    stamps = [stamp for record in found for stamp, _ in record["samples"]]
    assert len(stamps) == 71 + 20 * 5
    assert {later - earlier for earlier, later in pairwise(stamps)} <= {199_999, 200_000, 200_001}
    assert {value for record in found for _, value in record["samples"]} == {49}


@dataclass(slots=True, eq=False)
class Rereading(FakeGpu):
    """A GPU with a real ring, as it was read again and again."""

    reads: list[list[tuple[int, int]]] = field(default_factory=list)

    def busy_ring(self, unix_s: float, monotonic_s: float) -> list[tuple[int, int]]:  # noqa: ARG002
        return self.reads.pop(0)


def test_no_sample_is_recorded_twice_although_time_stamps_tremble(tmp_path: Path) -> None:
    with lzma.open(H200 / "rings.json.xz") as file:
        reads = json.load(file)["reads"]
    rings = [[(stamp, value) for stamp, value in read["utilization"]] for read in reads]
    stamps = {stamp for ring in rings for stamp, _ in ring}
    assert any(stamp + 1 in stamps for stamp in stamps), "they tremble"
    like = gpu(0)
    bench = Bench([Rereading(like.signal, like.uuid, reads=rings[:])], unix_s=reads[0]["unix_s"])
    with recorded(bench, tmp_path / "x"):
        for read in reads:
            bench.cycle(seconds=read["unix_s"] - bench.clock.unix_s())
            bench.sampler._cycles = 0  # it reads the ring again
    found = sorted(stamp for record in records(tmp_path / "x") for stamp, _ in record["samples"])
    assert min(later - earlier for earlier, later in pairwise(found)) > 100_000
    assert len(found) == len({stamp // 100_000 for stamp in found})
    assert max(stamps) - found[-1] <= 1


def faulty(function: str, error: str, from_s: float = 0.0, to_s: float = math.inf) -> Callable[[Bench], None]:
    return lambda bench: bench.nvml.fail(function, error=error, from_s=from_s, to_s=to_s)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda _: None,
        faulty("nvmlDeviceGetSamples", "NotSupported"),
        faulty("nvmlDeviceGetSamples", "NotFound"),
        faulty("nvmlDeviceGetSamples", "Unknown", from_s=100, to_s=200),
        faulty("nvmlDeviceGetSamples", "NotFound", from_s=100, to_s=200),
        faulty("*", "GpuIsLost", from_s=100, to_s=200),
        faulty("nvmlDeviceGetMemoryInfo", "GpuIsLost", from_s=101, to_s=103),
        faulty("nvmlDeviceGetMemoryInfo", "Uninitialized", from_s=101, to_s=103),
    ],
    ids=[
        "well",
        "no ring",
        "silent ring",
        "failing ring",
        "silent for a while",
        "lost",
        "lost in a cycle",
        "no driver",
    ],
)
def test_a_recording_reads_back_to_what_was_sampled(tmp_path: Path, prepare: Callable[[Bench], None]) -> None:
    bench = Bench([gpu(0, lambda start, _: 0.8 if start % 60 < 45 else 0.1)])
    prepare(bench)
    with recorded(bench, tmp_path / "x"):
        bench.sampler.cycle()
        start_s = bench.clock.unix_s()
        bench.cycle(300)
    # The recording also has what the ring held before.
    read = [
        replace(one, start_unix_s=max(one.start_unix_s, start_s))
        for one in Recording(str(tmp_path / "x")).until(math.inf)
        if one.end_unix_s > start_s
    ]
    assert totals(read) == pytest.approx(totals(bench.kept.busy_samples["0"]), rel=0.005)


def totals(samples: list[BusySample]) -> tuple[float, float]:
    seconds = [one.end_unix_s - one.start_unix_s for one in samples]
    return sum(seconds), sum(one.busy_fraction * length for one, length in zip(samples, seconds, strict=True))


def test_what_can_not_be_read_is_left_out(tmp_path: Path) -> None:
    bench = Bench([gpu(0)])
    bench.nvml.fail("nvmlDeviceGetSamples", error="NotSupported")
    for function in ("PowerUsage", "Temperature", "ClockInfo", "MemoryInfo"):
        bench.nvml.fail(f"nvmlDeviceGet{function}", error="NotSupported")
    with recorded(bench, tmp_path / "x"):
        bench.cycle(3)
    assert [set(record) for record in records(tmp_path / "x")] == [{"wall", "monotonic", "util"}] * 3


# --- analyze


def chips(log: str, recordings: Mapping[str, str]) -> dict[str, Chip]:
    report, fault = analyze([str(H200 / log)], Options(recordings=recordings))
    assert fault is None
    (engine,) = report.engines
    return {name: found.chip for name, found in engine.gpus.items() if found.chip is not None}


@pytest.mark.parametrize(
    ("log", "captures"),
    [("starved-gw1.log.xz", ["starved-gw1"]), ("two-gpus.log.xz", ["two-gpus.gpu0", "two-gpus.gpu1"])],
)
def test_a_recording_tells_analyze_what_the_capture_does(tmp_path: Path, log: str, captures: list[str]) -> None:
    signals = [CAPTURES[name]().recorded for name in captures]
    gpus = [FakeGpu(signal, gpu(n).uuid, gpu(n).pci_bus_id) for n, signal in enumerate(signals)]
    start_s = max(signal.start_unix_s for signal in signals)
    with recorded(Bench(gpus, unix_s=start_s), tmp_path / "x.nvml.jsonl") as bench:
        while bench.clock.unix_s() < max(signal.end_unix_s for signal in signals):
            bench.cycle()
        bench.cycle(2)
    files = sorted(str(path) for path in tmp_path.iterdir())
    found = chips(log, dict(parse_recording(file) for file in files))
    expected = chips(log, {str(n): str(H200 / f"{name}.nvml.jsonl.xz") for n, name in enumerate(captures)})
    assert set(found) == set(expected) == {str(n) for n in range(len(captures))}
    for name, chip in found.items():
        for figure in ("busy_ms", "sampled_ms", "span_busy_ms", "span_sampled_ms", "unlogged_busy_ms"):
            assert getattr(chip, figure) == pytest.approx(getattr(expected[name], figure), rel=0.005, abs=1), figure


# --- files


def test_the_files_of_several_gpus() -> None:
    assert recording_paths(Path("/a/x.nvml.jsonl"), ["3"]) == {"3": Path("/a/x.nvml.jsonl")}
    several = recording_paths(Path("/a/x.nvml.jsonl"), ["1", "0", "nvml0"])
    assert several == {name: Path(f"/a/x.gpu{name}.nvml.jsonl") for name in ("0", "1", "nvml0")}
    assert [parse_recording(str(path)) for path in several.values()] == [(n, str(path)) for n, path in several.items()]


def test_a_gpu_keeps_its_file_when_another_comes(tmp_path: Path) -> None:
    with recorded(Bench([gpu(0)]), tmp_path / "x.jsonl") as bench:
        bench.cycle(3)
        bench.nvml.add(gpu(1))
        bench.nvml.unload_driver()
        bench.cycle()
        bench.nvml.load_driver()
        bench.cycle(30)
    one, other = records(tmp_path / "x.jsonl"), records(tmp_path / "x.gpu1.jsonl")
    assert one[0]["wall"] < other[0]["wall"] < one[-1]["wall"] == pytest.approx(other[-1]["wall"])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("before", ["", '{"wall": 1}\n', '{"wall": 1}\n{"wal'])
def test_it_goes_on_where_an_earlier_recording_ended(tmp_path: Path, before: str) -> None:
    path = tmp_path / "x"
    path.write_text(before)
    recorder = Recorder(path)
    recorder.devices(["0"])
    recorder.record("0", HEARD, Readings())
    line = '{"wall": 1796000000.0, "monotonic": 1000.0, "samples": [[1795999999900000, 7]]}\n'
    torn = not before.endswith("\n") and before
    assert path.read_text() == before + ("\n" if torn else "") + line, "each record is written at once"
    recorder.close()
    assert len(list(Recording(str(path)).until(math.inf))) == 1


def test_a_torn_last_line_says_nothing(tmp_path: Path) -> None:
    with recorded(Bench([gpu(0)]), tmp_path / "x") as bench:
        bench.cycle(20)
    whole = (tmp_path / "x").read_bytes()
    read = list(Recording(str(tmp_path / "x")).until(math.inf))
    (tmp_path / "x").write_bytes(whole[:-10])
    assert list(Recording(str(tmp_path / "x")).until(math.inf)) == read[:-20]


# --- trouble


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.gpu1.jsonl").symlink_to("/dev/full")
    with recorded(Bench([gpu(0), gpu(1)]), tmp_path / "x.jsonl") as bench:
        view = bench.cycle(20)
    assert view == Bench([gpu(0), gpu(1)]).cycle(20)
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [f"the recording of NVML in {tmp_path}/x.jsonl has ended: No space left on device"]
    assert len(records(tmp_path / "x.gpu0.jsonl")) == 1


def test_a_file_that_can_not_be_opened_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.gpu1.jsonl").mkdir()
    with recorded(Bench([gpu(0), gpu(1)]), tmp_path / "x.jsonl") as bench:
        bench.cycle(3)
        bench.nvml.unload_driver()
        bench.cycle()
        bench.nvml.load_driver()
        bench.cycle(20)
        assert bench.chip("1").busy_seconds > 19
    told = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert told == [f"the recording of NVML in {tmp_path}/x.jsonl has ended: Is a directory"]
    assert (tmp_path / "x.gpu0.jsonl").read_text() == ""


def test_it_is_closed_with_the_sampler(tmp_path: Path) -> None:
    bench = Bench([gpu(0)])
    recorder = bench.sampler._recorder = Recorder(tmp_path / "x")
    cycles = iter([False, False, True])
    bench.sampler.run(lambda: next(cycles), bench.clock.advance)
    assert len(records(tmp_path / "x")) == 2
    assert not recorder._files
