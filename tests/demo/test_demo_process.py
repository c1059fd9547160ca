"""A process of the daemon: its clock, and which lines it writes."""

from __future__ import annotations

from dataclasses import replace

from cuzk_agent.demo.lines import Timeline, Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import FAILING, Setting
from demo.support import Bench


def test_its_clock_begins_with_its_engine_and_runs_at_the_speed() -> None:
    bench = Bench(speed=10)
    bench.process.later(5_000, bench.process.start_clock)
    bench.run()
    assert bench.process.clock_ms() == 0
    bench.process.later(1_239, lambda: None)
    bench.run()
    assert bench.process.clock_ms() == 123
    assert bench.process.logged_ms(1_000) == 100


def test_a_field_that_is_none_is_left_out() -> None:
    bench = Bench()
    bench.process.trace("main", "said", span=("work", (("id", "1"),)), partition=None, total_ms=3, gpus=[0, 1])
    (line,) = bench.run()
    assert isinstance(line, Tracing)
    assert line.fields == (("total_ms", "3"), ("gpus", "[0, 1]"))
    assert (line.target, line.span, line.span_fields) == ("cuzk_core::engine", "work", (("id", "1"),))


def test_only_lines_of_the_level_are_written() -> None:
    quiet = replace(FAILING, setting=replace(FAILING.setting, level="WARN", kernel_lines=False, noise=2))
    lines = list(Model(quiet, 1, rounds=1).lines())
    assert {line.level for line in lines if isinstance(line, Tracing)} == {"WARN", "ERROR"}
    assert {type(line) for line in lines} == {Timeline, Tracing}


def test_the_last_line_is_the_last_that_is_written_and_bears_a_time() -> None:
    bench = Bench(Setting(level="ERROR"))
    process, unit = bench.process, bench.job().units[0]
    process.later(100, lambda: process.timeline("synth-0", "SYNTH_START", unit, *unit.details))
    process.later(200, lambda: process.kernel("worker-0", "gpu_tid=0"))
    process.later(300, lambda: process.trace("main", "not written"))
    bench.run()
    assert process.last_line_ms == 100
    process.later(0, lambda: process.trace("main", "written", level="ERROR"))
    bench.run()
    assert process.last_line_ms == 300
