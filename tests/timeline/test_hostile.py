"""Logs that nobody would write, unless to do harm: no error, bounded memory, bounded labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from cuzk_agent.timeline import units
from cuzk_agent.timeline.engine import Engine, Limits
from cuzk_agent.timeline.ledger import _MAX_EDGES
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import UnitOutcome
from cuzk_agent.timeline.tally import PROOF_KINDS


def event(offset_ms: object, name: str, job: str, detail: str = "partition=1") -> bytes:
    return f"TIMELINE,{offset_ms},{name},{job},{detail}".encode()


def tracing(at_ms: int, text: str, span: str = "") -> bytes:
    minutes, ms = divmod(at_ms, 60_000)
    time = f"2026-11-30T{minutes // 60 % 24:02d}:{minutes % 60:02d}:{ms // 1000:02d}.{ms % 1000:03d}000Z"
    return f"{time}  INFO {span}cuzk_core::engine: {text}".encode()


def follow(lines: Iterable[bytes], limits: Limits | None = None) -> Pipeline:
    """Feeds lines a few at a time; a state is taken now and then."""
    pipeline = Pipeline(limits)
    batch = []
    for number, line in enumerate(lines):
        batch.append(line)
        if len(batch) == 200:
            pipeline.feed(batch)
            batch = []
        if number % 5000 == 0:
            pipeline.state()
    pipeline.feed(batch)
    pipeline.finish()
    pipeline.state()
    return pipeline


def engine_of(pipeline: Pipeline) -> Engine:
    assert pipeline.engine is not None
    return pipeline.engine


def assert_bounded(pipeline: Pipeline) -> None:
    """Nothing that is kept of a log grows with it."""
    engine = engine_of(pipeline)
    held = engine.units
    jobs = [job for jobs in held._jobs.values() for job in jobs]
    assert len(held._open) <= units._MAX_OPEN_JOBS
    assert len(held._closed) <= units._MAX_CLOSED_JOBS
    assert set(jobs) == {*held._open, *held._closed}
    assert sum(len(job.units) for job in jobs) == held._held <= units._MAX_UNITS
    assert max((len(job.units) for job in jobs), default=0) <= units._MAX_UNITS_PER_JOB + 1
    in_shelves = sum(map(len, held._shelves.values()))
    assert in_shelves == sum(unit.rank < 5 for job in jobs for unit in job.units.values())
    assert len(held._whole_ready) + len(held._overtaken) <= 2 * in_shelves
    assert len(held._picked_up_by) <= in_shelves
    assert len(pipeline._held) <= 64


START = event(0, "SYNTH_START", "first")


def many(count: int, *makers: Callable[[int], bytes]) -> Iterator[bytes]:
    yield START
    for index in range(count):
        for maker in makers:
            yield maker(index)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(many(25_000, lambda i: event(i, "SYNTH_START", f"j{i}")), id="ids"),
        pytest.param(many(25_000, lambda i: event(i, "SYNTH_START", "j", f"partition={i % 10_000}")), id="partitions"),
        pytest.param(many(20_000, lambda i: event(i, "SYNTH_START", "j")), id="again"),
        pytest.param(
            many(
                10_000,
                lambda i: event(i // 10, "GPU_QUEUE", f"j{i}", "monolithic"),
                lambda i: event(i // 10, "GPU_PICKUP", f"j{i}", f"worker={i}"),
            ),
            id="pickups",
        ),
        pytest.param(
            many(
                3_000,
                lambda i: tracing(i, "job enqueued job_id=porep-1 proof_kind=porep-c2 priority=Normal"),
                lambda i: event(i, "SYNTH_START", "porep-1", f"partition={i % 10}"),
            ),
            id="same-id",
        ),
        pytest.param(
            many(8_000, lambda i: tracing(i, f"job enqueued job_id=snap-{i} proof_kind=snap-update priority=Normal")),
            id="queue",
        ),
        pytest.param(
            many(
                120,
                lambda i: tracing(i, f"job enqueued job_id=j{i} proof_kind=porep-c2 priority=Normal"),
                lambda i: tracing(
                    i, f"dispatching per-partition synthesis (budget-gated) job_id=j{i} num_partitions=1024"
                ),
            ),
            id="dispatched",
        ),
        pytest.param(
            many(20_000, lambda i: tracing(i, f"partition synthesis failed error=x job_id=first partition={i}")),
            id="failures",
        ),
    ],
)
def test_what_is_held_of_jobs_and_units_is_bounded(lines: Iterable[bytes]) -> None:
    assert_bounded(follow(lines))


def test_units_that_are_lost_do_not_raise_the_limit_that_they_hit() -> None:
    pipeline = follow(event(i * 700_000, "SYNTH_START", f"j{i}") for i in range(6))
    # Ten minutes for each of them.
    assert pipeline.state().unit_outcomes[UnitOutcome.LOST] == 5


def gpu_worker(worker: int, gpu: object, job: str = "first") -> str:
    return f"gpu_worker{{worker_id={worker} gpu={gpu} job_id={job} proof_kind=porep-c2}}: "


def test_labels_are_bounded() -> None:
    def returned(index: int) -> bytes:
        text = "GPU_TIMING prove_start returned spawn_blocking_wall_ms=250"
        gpus = (f"{index % 1000:03d}", "x" * index, "٣", "-1")
        return tracing(index, text, gpu_worker(index, gpus[index % 4]))

    pipeline = follow(
        many(
            6000,
            lambda i: event(i, f"E{i}", f"j{i}"),
            lambda i: event(i, "SYNTH_START", f"j{i}", f"kind=k{i}"),
            lambda _: b"CUZK_TIMING: tail_msm_ms=1 gpu_total_ms=200",
            lambda i: b"CUZK_TIMING: mutex_held_ms=201 total_start_fn_ms=250 what_%d_ms=3" % i,
            returned,
            lambda i: tracing(i, f"initializing GPU workers num_gpus={'9' * i} gpus=[00, {i}, {i}]"),
            lambda i: event(i, "GPU_START", f"j{i}", f"worker={i}"),
            lambda i: tracing(i, f"job enqueued job_id=k{i} proof_kind=k{i}"),
        )
    )
    state = pipeline.state()
    assert set(state.gpus) <= {*map(str, range(64)), "unknown"}
    assert set(pipeline._kernel_ms) <= {*map(str, range(64)), "unknown"}
    assert set(state.jobs_open) == set(state.synth_seconds) == {*PROOF_KINDS}
    assert len(state.events) == 8
    assert {gpu for _, gpu in state.trouble} <= {*state.gpus, ""}
    assert all(len(value) < 64 for value in state.engine_settings.values())
    assert_bounded(pipeline)


def test_job_ids_beyond_what_a_daemon_writes_are_not_kept() -> None:
    huge = "x" * 60_000
    pipeline = follow(
        many(
            300,
            lambda i: tracing(i, f"job enqueued job_id={huge}{i} proof_kind=porep-c2"),
            lambda i: event(i, "SYNTH_START", f"{huge}{i}"),
            lambda i: tracing(i, "something", gpu_worker(1, 0, f"{huge}{i}")),
            lambda i: tracing(i, f"partition synthesis failed error={huge} job_id=first partition={i % 7}"),
        )
    )
    assert set(engine_of(pipeline).units._jobs) == {"first"}


def test_nothing_piles_up_behind_an_engine_that_was_shut_down() -> None:
    pipeline = follow(
        [START, tracing(5, "shutting down cuzk engine")]
        + [event(i, name, f"j{i}", "worker=1") for i in range(5000) for name in ("GPU_START", "GPU_END")]
    )
    assert not pipeline.state().engine_running
    assert not engine_of(pipeline).ledger._edges
    assert_bounded(pipeline)


def test_nothing_piles_up_while_the_log_s_time_stands_still() -> None:
    lines = (event(7, name, f"j{i}", "worker=1") for i in range(40_000) for name in ("GPU_START", "GPU_END"))
    pipeline = Pipeline()
    for line in lines:
        pipeline.feed([line])
        assert len(engine_of(pipeline).ledger._edges) <= _MAX_EDGES + 3
    pipeline.finish()
    assert pipeline.state().gpus["unknown"].spans == 40_000
