"""Synthesis on the CPU: how many run, and when the pacer holds them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cuzk_agent.demo.lines import Line, Timeline
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import POREP, Burst, Request, Scenario, Setting


def events(lines: Iterable[Line]) -> list[Timeline]:
    return [line for line in lines if isinstance(line, Timeline)]


def model(setting: Setting) -> Model:
    return Model(Scenario("", setting, (Burst(0, (Request(0, POREP), Request(0, POREP))),)), 1, rounds=1)


def test_no_more_run_than_there_are_workers_and_oldest_first() -> None:
    running = most = 0
    begun = []
    for line in events(model(Setting(synth_workers=3)).lines()):
        running += {"SYNTH_START": 1, "SYNTH_END": -1}.get(line.event, 0)
        most = max(most, running)
        if line.event == "SYNTH_START":
            begun.append((line.job_id, int(line.detail.removeprefix("partition="))))
    assert most == 3
    assert begun == sorted(begun)


def test_each_takes_longer_the_more_of_them_run() -> None:
    mean_ms = []
    for workers in (1, 11):
        lines = events(model(Setting(synth_workers=workers, contention=0.1, spread=0)).lines())
        logged_ms = [int(line.detail.rpartition("=")[2]) for line in lines if line.event == "SYNTH_END"]
        mean_ms.append((min(logged_ms), max(logged_ms)))
    (alone_ms, as_long_ms), (_, longest_ms) = mean_ms
    assert alone_ms == as_long_ms == POREP.synth_ms
    assert longest_ms == 2 * POREP.synth_ms


def test_with_so_many_ready_no_further_one_begins() -> None:
    # The only worker is kept busy with the first unit for ever.
    setting = Setting(workers_per_gpu=1, synth_workers=1, queue_target=3, pre_lock_ms=1e9)
    counts = Counter(line.event for line in events(model(setting).lines(3_600_000)))
    assert counts["GPU_PICKUP"] == 1
    assert counts["SYNTH_START"] == counts["GPU_QUEUE"] == 4
