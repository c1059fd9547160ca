"""The writes that print lines: fragments, colours, tearing."""

from __future__ import annotations

from collections import Counter
from random import Random

from cuzk_agent.demo.lines import Kernel, Timeline, Tracing, fragments, writes
from cuzk_agent.demo.model import Model

EPOCH_UNIX_MS = 1796054060562.256


def test_a_timeline_line_is_nine_writes() -> None:
    line = Timeline(534.9, "worker-1", "GPU_START", "porep-1000-100", "worker=1,partition=4")
    parts = fragments(line, EPOCH_UNIX_MS)
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
    assert fragments(line, EPOCH_UNIX_MS) == (expected.replace("^[", "\x1b").encode(),)


def test_another_writers_line_lands_between_fragments() -> None:
    line = Timeline(10.0, "worker-1", "GPU_PICKUP", "snap-1000-7", "worker=1,partition=3")
    intruder = Kernel(10.1, "worker-2", "prep_msm_ms=32")
    torn = 0
    for seed in range(50):
        written = list(writes(iter([line, intruder]), Random(seed), 0.0))
        if len(written) == 1:
            torn += 1
            (write,) = written
            assert write.torn
            assert write.fragments[0] == b"TIMELINE,"
            assert write.fragments[-1] == b"\n"
            assert b"CUZK_TIMING: prep_msm_ms=32\n" in write.fragments[1:-1]
    assert 0 < torn < 50


def test_no_line_is_torn_by_its_own_writer_a_later_line_or_a_timeline_line() -> None:
    line = Timeline(10.0, "worker-1", "GPU_PICKUP", "snap-1000-7", "worker=1,partition=3")
    others = (
        Kernel(10.1, "worker-1", "prep_msm_ms=32"),
        Kernel(15.0, "worker-2", "prep_msm_ms=32"),
        Timeline(10.1, "worker-2", "GPU_PICKUP", "snap-1000-7", "worker=2,partition=4"),
    )
    for other in others:
        for seed in range(20):
            assert not any(write.torn for write in writes(iter([line, other]), Random(seed), 0.0))


def test_tearing_loses_nothing_and_hits_about_one_line_in_a_hundred() -> None:
    lines = list(Model(5, speed=10).lines(600_000))
    meant = Counter(b"".join(fragments(line, 0.0)) for line in lines)
    found: Counter[bytes] = Counter()
    torn = 0
    for write in writes(iter(lines), Random(1), 0.0):
        if write.torn:
            torn += 1
            at = next(i for i, part in enumerate(write.fragments[:-1]) if part.endswith(b"\n"))
            found[write.fragments[at]] += 1
            found[b"".join(write.fragments[:at] + write.fragments[at + 1 :])] += 1
        else:
            found[b"".join(write.fragments)] += 1
    assert found == meant
    timeline_lines = sum(isinstance(line, Timeline) for line in lines)
    assert 0.005 < torn / timeline_lines < 0.02
