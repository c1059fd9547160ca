"""The writes that print lines: fragments, colours, tearing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from cuzk_agent.demo.lines import Kernel, Line, Printer, Timeline, Tracing, disordered, writes
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import DAY, FAILING

PRINTER = Printer(1796054060562.256)


def test_a_timeline_line_is_nine_writes() -> None:
    line = Timeline(534.9, "worker-1", 534, "GPU_START", "porep-1000-100", "worker=1,partition=4")
    parts = PRINTER.fragments(line)
    assert parts == (
        b"TIMELINE,", b"534", b",", b"GPU_START", b",", b"porep-1000-100", b",", b"worker=1,partition=4", b"\n",
    )  # fmt: skip
    assert b"".join(parts).decode() == line.text() + "\n"


def test_a_tracing_line_has_the_colours_of_the_formatter() -> None:
    line = Tracing(
        534.519, "worker-1", "INFO", "cuzk_core::engine", "GPU_TIMING hot_path pre-prove overhead",
        (("worker_id", "1"), ("partition", "Some(4)")), "gpu_worker", (("worker_id", "1"), ("gpu", "0")),
    )  # fmt: skip
    expected = (
        "^[[2m2026-11-30T15:54:21.096775Z^[[0m ^[[32m INFO^[[0m ^[[1mgpu_worker^[[0m^[[1m{^[[0m"
        "^[[3mworker_id^[[0m^[[2m=^[[0m1 ^[[3mgpu^[[0m^[[2m=^[[0m0^[[1m}^[[0m^[[2m:^[[0m "
        "^[[2mcuzk_core::engine^[[0m^[[2m:^[[0m GPU_TIMING hot_path pre-prove overhead "
        "^[[3mworker_id^[[0m^[[2m=^[[0m1 ^[[3mpartition^[[0m^[[2m=^[[0mSome(4)\n"
    )
    plain = (
        "2026-11-30T15:54:21.096775Z  INFO gpu_worker{worker_id=1 gpu=0}: cuzk_core::engine: "
        "GPU_TIMING hot_path pre-prove overhead worker_id=1 partition=Some(4)\n"
    )
    assert replace(PRINTER, colours=False).fragments(line) == (plain.encode(),)
    assert PRINTER.fragments(line) == (expected.replace("^[", "\x1b").encode(),)


def test_another_writers_line_lands_between_fragments() -> None:
    line = Timeline(10.0, "worker-1", 10, "GPU_PICKUP", "snap-1000-7", "worker=1,partition=3")
    intruder = Kernel(10.1, "worker-2", "prep_msm_ms=32")
    torn = 0
    for seed in range(50):
        written = list(writes(iter([line, intruder]), Random(seed), PRINTER, 0.6))
        if len(written) == 1:
            torn += 1
            (write,) = written
            assert write.torn
            assert write.fragments[0] == b"TIMELINE,"
            assert write.fragments[-1] == b"\n"
            assert b"CUZK_TIMING: prep_msm_ms=32\n" in write.fragments[1:-1]
    assert 0 < torn < 50


def test_no_line_is_torn_by_its_own_writer_a_later_line_or_a_timeline_line() -> None:
    line = Timeline(10.0, "worker-1", 10, "GPU_PICKUP", "snap-1000-7", "worker=1,partition=3")
    others = (
        Kernel(10.1, "worker-1", "prep_msm_ms=32"),
        Kernel(15.0, "worker-2", "prep_msm_ms=32"),
        Timeline(10.1, "worker-2", 10, "GPU_PICKUP", "snap-1000-7", "worker=2,partition=4"),
    )
    for other in others:
        for seed in range(20):
            assert not any(write.torn for write in writes(iter([line, other]), Random(seed), PRINTER, 1.0))


def test_several_can_land_inside() -> None:
    line = Timeline(10.0, "worker-1", 10, "GPU_PICKUP", "snap-1000-7", "worker=1,partition=3")
    intruders: list[Line] = [Kernel(10.1 + i / 10, f"worker-{2 + i}", f"prep_msm_ms={i}") for i in range(3)]
    found = set()
    for seed in range(50):
        first, *_ = writes(iter([line, *intruders]), Random(seed), PRINTER, 1.0)
        found.add(first.torn)
        inside = [part for part in first.fragments if part.startswith(b"CUZK")]
        assert inside == [f"CUZK_TIMING: prep_msm_ms={i}\n".encode() for i in range(first.torn)]
        assert b"".join(part for part in first.fragments if part not in inside).decode() == line.text() + "\n"
    assert found == {1, 2, 3}


def test_tearing_and_disorder_lose_nothing_and_hit_a_few_lines_in_a_thousand() -> None:
    lines = list(Model(DAY, 5, rounds=8).lines())
    meant = Counter(b"".join(PRINTER.fragments(line)) for line in lines)
    found: Counter[bytes] = Counter()
    torn = 0
    for write in writes(disordered(iter(lines), Random(2), 0.02), Random(1), PRINTER, 0.6):
        torn += write.torn > 0
        own = [part for part in write.fragments if not write.torn or not part.endswith(b"\n") or part == b"\n"]
        found[b"".join(own)] += 1
        if write.torn:
            found.update(part for part in write.fragments if part.endswith(b"\n") and part != b"\n")
    assert found == meant
    timeline_lines = sum(isinstance(line, Timeline) for line in lines)
    assert 0.002 < torn / timeline_lines < 0.03


def test_noise_makes_a_storm() -> None:
    noisy = replace(FAILING, setting=replace(FAILING.setting, noise=2))
    lines = list(Model(noisy, 1, rounds=1).lines())
    torn = sum(write.torn > 0 for write in writes(iter(lines), Random(1), PRINTER, 0.3))
    assert 0.1 < torn / sum(isinstance(line, Timeline) for line in lines) < 0.4


def test_disorder_is_slight_and_keeps_each_threads_order() -> None:
    lines = list(Model(FAILING, 1, rounds=1).lines())
    written = list(disordered(iter(lines), Random(1), 0.3))
    assert written != lines
    by_writer = [[(line.writer, line.time_ms) for line in some if line.writer] for some in (lines, written)]
    assert sorted(by_writer[0]) == sorted(by_writer[1])
    latest_ms = 0.0
    last: dict[str, float] = {}
    for line in written:
        assert line.time_ms > latest_ms - 3.1
        latest_ms = max(latest_ms, line.time_ms)
        assert line.time_ms >= last.get(line.writer, 0.0)
        last[line.writer] = line.time_ms
