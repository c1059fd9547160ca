"""The memory budget: who gets memory, whose parameters go for it, and that all of it comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from cuzk_agent.demo.lines import Timeline, Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import BLOCKED, DAY, FAILING, POREP, SNAP, WINDOW, Kind, Setting
from demo.support import Bench


def load(bench: Bench, kind: Kind, name: str, had: list[str]) -> None:
    done = partial(had.append, name)
    bench.memory.reserve_srs(kind, partial(bench.memory.load_srs, kind, "dispatch-0", done))


def test_whoever_fits_has_it_though_others_have_waited_longer() -> None:
    bench = Bench(Setting(budget_gib=100))
    had: list[int] = []
    for gib in (60, 50, 55, 30):
        bench.memory.acquire(gib, partial(had.append, gib))
    bench.run()
    assert (had, bench.memory.free_gib) == ([60, 30], 10)
    bench.memory.release(60)
    bench.run()
    assert (had, bench.memory.free_gib) == ([60, 30, 50], 20)


def test_parameters_are_loaded_once_for_all() -> None:
    bench = Bench()
    had: list[str] = []
    for name in ("a", "b"):
        load(bench, POREP, name, had)
    lines = bench.run()
    assert had == ["a", "b"]
    assert [line.message for line in lines if isinstance(line, Tracing)] == [
        "loading SRS from disk",
        "SRS loaded successfully",
    ]
    assert bench.memory.free_gib == 600 - POREP.srs_gib
    load(bench, POREP, "c", had)
    assert had == ["a", "b", "c"]


@pytest.mark.parametrize("in_use", [False, True])
def test_parameters_go_for_others_unless_a_job_needs_them(in_use: bool) -> None:
    bench = Bench(Setting(budget_gib=80))
    had: list[str] = []
    job = bench.job(SNAP)
    job.dispatched = in_use
    load(bench, SNAP, "snap", had)
    bench.run()
    load(bench, WINDOW, "window", had)
    bench.run()
    assert had == (["snap"] if in_use else ["snap", "window"])
    for unit in job.units:
        bench.progress.leave(unit)
    bench.memory.release(0)
    bench.run()
    assert had == ["snap", "window"]
    assert bench.memory.free_gib == 80 - WINDOW.srs_gib


def test_memory_is_never_overdrawn_and_all_of_it_comes_back() -> None:
    for scenario in (BLOCKED, FAILING, DAY):
        model = Model(scenario, 1, rounds=1)
        free = [
            int(dict(line.fields)["budget_available_gib"])
            for line in model.lines()
            if isinstance(line, Tracing) and "budget_available_gib" in dict(line.fields)
        ]
        assert min(free) >= 0
        assert model.truth().open_jobs == 0


def test_a_request_that_can_never_have_its_memory_blocks_for_ever() -> None:
    small = replace(DAY, setting=replace(DAY.setting, budget_gib=30))
    lines = list(Model(small, 1).lines(400_000))
    assert any(isinstance(line, Tracing) and line.message.startswith("acquire request exceeds") for line in lines)
    assert not any(isinstance(line, Timeline) and line.job_id.startswith("porep") for line in lines)
