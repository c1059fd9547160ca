"""GPU workers: how they share a GPU, and what they leave out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from cuzk_agent.demo.lines import Kernel, Line, Timeline, Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import BOUND, DAY, FAILING, POSTDEADLINE, Generation, Scenario, Setting
from cuzk_agent.demo.truth import Outcome
from demo.support import events_by_unit


def overlaps(lines: Iterable[Line]) -> tuple[int, int]:
    """GPU_STARTs while a span is open: on the same worker, and on another one."""
    open_by_worker: dict[str, int] = defaultdict(int)
    own = others = 0
    for line in lines:
        if isinstance(line, Timeline) and line.event in {"GPU_START", "GPU_END"}:
            worker = line.detail.split(",")[0]
            if line.event == "GPU_START":
                own += open_by_worker[worker] > 0
                others += any(count for other, count in open_by_worker.items() if other != worker)
            open_by_worker[worker] += 1 if line.event == "GPU_START" else -1
    return own, others


@pytest.mark.parametrize(
    ("setting", "own_overlap", "others_overlap"),
    [
        (Setting(Generation.SINGLE, workers_per_gpu=1, synth_workers=16), False, False),
        (Setting(Generation.DUAL, synth_workers=16), False, True),
        (Setting(Generation.SPLIT, synth_workers=16), True, True),
    ],
)
def test_generations_differ_in_how_spans_overlap(setting: Setting, own_overlap: bool, others_overlap: bool) -> None:
    lines = list(Model(Scenario("", setting, BOUND.bursts), 1, rounds=1).lines())
    own, others = overlaps(lines)
    assert (own > 10, others > 10) == (own_overlap, others_overlap)
    events = {line.event for line in lines if isinstance(line, Timeline)}
    assert ("GPU_QUEUE" in events, "CHAN_SEND" in events) == (own_overlap, not own_overlap)


def test_one_kernel_at_a_time_on_a_gpu() -> None:
    model = Model(replace(DAY, setting=Setting(workers_per_gpu=3)), 2)
    holder = None
    for line in model.lines(500_000):
        if not isinstance(line, Kernel):
            continue
        if "mutex_wait_ms" in line.text:
            assert holder is None
            holder = line.writer
        elif "mutex_held_ms" in line.text:
            assert holder == line.writer
            holder = None
    of_gpu = model.gpus.kernels[0]
    assert all(a.end_ms <= b.start_ms for a, b in pairwise(of_gpu))


def test_a_failed_jobs_unit_is_dropped_without_a_start() -> None:
    lines = list(Model(FAILING, 3, rounds=1).lines())
    dropped = {
        (dict(line.fields)["job_id"], re.sub(r"\D", "", dict(line.fields)["partition"]))
        for line in lines
        if isinstance(line, Tracing) and line.message == "skipping GPU prove for failed partitioned job"
    }
    units = events_by_unit(lines)
    assert dropped
    for unit in dropped:
        assert units[unit][-1].event == "GPU_PICKUP"


def test_a_whole_proof_is_overwritten_by_the_next() -> None:
    model = Model(POSTDEADLINE, 1, rounds=1)
    list(model.lines())
    truth = model.truth()
    lost = sum(count for (_, outcome), count in truth.jobs.items() if outcome is Outcome.LOST)
    assert lost == truth.units[Outcome.LOST] > 0
