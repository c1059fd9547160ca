"""What is kept of kernels."""

from __future__ import annotations

from cuzk_agent.demo.gpus import Gpus, Kernels
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import DAY


def test_kernels_end_with_their_process() -> None:
    gpus = Gpus(2, keep=True)
    for run in (Kernels(0, 10, (4, 5)), Kernels(20, 40, (25, 35))):
        gpus.run(0, run)
    gpus.stop(30)
    assert [(run.start_ms, run.end_ms, run.barrier_ms) for run in gpus.kernels[0]] == [
        (0, 10, (4, 5)),
        (20, 30, (25, 30)),
    ]
    assert gpus.kernels[1] == []


def test_the_last_ones_are_kept_and_a_reader_is_not_disturbed() -> None:
    gpus = Gpus(1, keep=False)
    read = gpus.kernels[0]
    for time_ms in range(1_000):
        gpus.run(0, Kernels(time_ms, time_ms + 1, (time_ms, time_ms)))
        assert gpus.kernels[0][-1].start_ms == time_ms
        assert len(gpus.kernels[0]) <= 256
    assert [run.start_ms for run in read] == list(range(257))


def test_memory_of_the_past_is_bounded_where_it_is_not_kept() -> None:
    model = Model(DAY, 1, speed=100, keep=False)
    for _ in model.lines(120_000):
        pass
    assert max(map(len, model.gpus.kernels)) <= 256
    assert not any(gpu.gaps for gpu in model.truth().gpus.values())
