"""What a pipeline makes of lines that only tell what is in flight, and of a machine that was started anew."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuzk_agent.timeline.engine import Limits
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from timeline.test_properties import EPOCH, MONOTONIC_S, Op, Writer, assert_adds_up, counters, programs, steps_of

TRIMMED = ("gap_seconds", "boundary_seconds", "gap_rolling", "wasted_seconds")
"""Gaps and spans that began before count for what comes after only."""


def counted(program: list[Op], since: int, *, warm_up: bool) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The counters after the first steps, and at the end."""
    writer, pipeline = Writer(), Pipeline(Limits())
    before: Mapping[str, float] = {}
    for number, (op, lines) in enumerate(steps_of([Op("engine"), *program], writer)):
        if lines:
            pipeline.feed(lines, Arrival(writer.monotonic_s, writer.unix_s, live=number > since))
        if op.what == "settle":
            pipeline.settle(writer.monotonic_s, writer.unix_s)
        if number == since:
            if warm_up:
                pipeline.count_from_here(writer.monotonic_s, writer.unix_s)
            else:
                pipeline.settle(writer.monotonic_s, writer.unix_s)
            assume(pipeline.engine is not None and pipeline.engine.anchor.start_unix_ms is not None)
            before = counters(pipeline.state())
            assert pipeline.engine is not None
            known = {f"gpu {gpu} idle" for gpu in pipeline.engine.ledger.accounts}
            before = {
                path: value
                for path, value in before.items()
                if "idle_seconds" not in path or path.split("_")[0] in known
            }
        if warm_up and number >= since and pipeline.engine is not None:
            ledger = pipeline.engine.ledger
            for account in ledger.accounts.values():
                totals = account.totals
                elapsed_ms = ledger.frontier_ms - ledger.counted_from_ms
                sum_ms = totals.busy_ms + sum(totals.idle_ms.values())
                assert sum_ms <= elapsed_ms if ledger._is_no_gpu(account) else sum_ms == elapsed_ms
                assert sum(totals.wasted_ms.values()) <= totals.busy_ms + 1e-6
                assert totals.gap_ms <= sum(totals.idle_ms.values())
    pipeline.finish()
    return before, counters(pipeline.state())


@given(programs, st.data())
def test_only_what_comes_after_a_warm_up_is_counted(program: list[Op], data: st.DataObject) -> None:
    since = data.draw(st.integers(0, len(program)))
    before, end = counted(program, since, warm_up=False)
    nothing, after = counted(program, since, warm_up=True)
    assert not any(nothing.values())
    expected = {
        path: value - before.get(path, 0)
        for path, value in end.items()
        if not any(name in path for name in TRIMMED) and path in after
        # What becomes known later was idle before it was known, and had its kernels.
        if path in before or not any(name in path for name in ("idle_seconds", "kernel_seconds"))
    }
    wrong = {path: (value, after[path]) for path, value in expected.items() if abs(after[path] - value) > 1e-6}
    assert not wrong


def fed(*lines: str) -> Pipeline:
    """Lines of the first three seconds, read then."""
    pipeline = Pipeline()
    writer = Writer(now_ms=3000)
    pipeline.feed([line.encode() for line in lines], Arrival(writer.monotonic_s, writer.unix_s, live=False))
    return pipeline


START = "2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=true"
SPAN = "TIMELINE,{},{},porep-1,worker=0,partition={}"


def test_a_gap_that_is_open_is_counted_from_there_on() -> None:
    pipeline = fed(START, SPAN.format(1000, "GPU_START", 0), SPAN.format(2000, "GPU_END", 0))
    pipeline.count_from_here(MONOTONIC_S + 100, EPOCH.timestamp() + 100)
    gpu = pipeline.state().gpus["unknown"]
    assert gpu.spans == 0
    assert gpu.open_gap_seconds is not None
    pipeline.settle(MONOTONIC_S + 130, EPOCH.timestamp() + 130)
    gpu = pipeline.state().gpus["unknown"]
    assert gpu.open_gap_seconds is not None
    assert sum(gpu.open_gap_seconds.values()) == sum(gpu.idle_seconds.values()) == pytest.approx(30)
    pipeline.feed([SPAN.format(140_000, "GPU_START", 1).encode()])
    pipeline.finish()
    assert sum(pipeline.state().gpus["unknown"].boundary_seconds.values()) == pytest.approx(40.25, abs=0.002)
    engine = pipeline.engine
    assert engine is not None
    assert engine.frontier_ms == 140_000


def test_an_engine_whose_clock_nobody_knows_begins_anew() -> None:
    pipeline = fed(SPAN.format(1000, "GPU_START", 0))
    pipeline.count_from_here(MONOTONIC_S + 7200, EPOCH.timestamp() + 7200)
    assert not pipeline.state().engine_running
    pipeline.feed([SPAN.format(7_200_000, "GPU_END", 0).encode()])
    pipeline.finish()
    state = pipeline.state()
    assert state.engine_restarts == 0
    assert state.gpus == {}


def test_an_engine_from_before_the_machine_started_is_gone() -> None:
    pipeline = fed(START, SPAN.format(1000, "GPU_START", 0))
    pipeline.count_from_here(60.0, EPOCH.timestamp() + 7200)
    assert not pipeline.state().engine_running
    assert not any(counters(pipeline.state()).values())


def test_after_a_reboot_the_engine_ends_when_all_it_wrote_is_read() -> None:
    pipeline = fed(START, SPAN.format(1000, "GPU_START", 0))
    pipeline.settle(MONOTONIC_S + 1.5, EPOCH.timestamp() + 1.5)
    pipeline.rebooted()
    assert pipeline.state().gpus["unknown"].busy_seconds == pytest.approx(0.25, abs=0.002)
    pipeline.feed([SPAN.format(3000, "GPU_END", 0).encode()], Arrival(60.0, EPOCH.timestamp() + 7200, live=False))
    pipeline.settle(60.0, EPOCH.timestamp() + 7200)
    state = pipeline.state()
    assert not state.engine_running
    assert state.gpus["unknown"].busy_seconds == 2
    # The next one is another, though its offset is larger.
    pipeline.feed([SPAN.format(50_000, "GPU_START", 1).encode()], Arrival(61.0, EPOCH.timestamp() + 7201, live=True))
    assert pipeline.state().engine_restarts == 1
    assert pipeline.engine is not None
    assert_adds_up(pipeline.engine, [])


def test_an_engine_that_began_after_the_reboot_lives() -> None:
    pipeline = fed(START, SPAN.format(1000, "GPU_START", 0))
    pipeline.rebooted()
    later = [START.replace("14:00:00", "15:00:00"), SPAN.format(1000, "GPU_START", 0)]
    pipeline.feed([line.encode() for line in later], Arrival(60.0, EPOCH.timestamp() + 3602, live=False))
    pipeline.settle(60.0, EPOCH.timestamp() + 3602)
    state = pipeline.state()
    assert state.engine_running
    assert state.engine_restarts == 1
    assert state.in_flight["gpu"] == 1  # type: ignore[index]  # a StrEnum's value
