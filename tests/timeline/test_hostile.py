"""Logs that nobody would write, unless to do harm: no error, bounded memory, bounded labels."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.log.splitter import LineSplitter
from cuzk_agent.timeline import units
from cuzk_agent.timeline.engine import Engine, Limits
from cuzk_agent.timeline.ledger import _MAX_EDGES
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import ProofOutcome, Stage, UnitOutcome
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


# --- bytes ----------------------------------------------------------------------------------------------------------


@contextmanager
def growth_within(limit_bytes: int) -> Iterator[None]:
    """What runs inside never holds more than so much of Python's memory beyond what was held before."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"TIMELINE,5,SYNTH_START,",
        b"TIMELINE,5,GPU_END,j,worker=1,gpu_ms=",
        b"2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: partition synthesis failed error=",
        b"CUZK_TIMING: gpu_tid=0 ntt_msm_h_ms=",
        b"\x1b[2m",
    ],
)
@pytest.mark.parametrize("filling", [b"9", b",", b"\x1b[3m", b" a=b", b"\xff", b"\0"])
def test_a_line_of_100_megabytes(head: bytes, filling: bytes) -> None:
    chunk = filling * (1024 * 1024 // len(filling))
    splitter, pipeline = LineSplitter(), Pipeline()
    with growth_within(16 * 1024 * 1024):
        pipeline.feed(splitter.feed(START + b"\n" + head))
        for _ in range(100):
            pipeline.feed(splitter.feed(chunk))
        pipeline.feed(splitter.feed(b"\n" + event(7, "SYNTH_END", "first") + b"\n"))
    pipeline.finish()
    assert pipeline.state().events["SYNTH_END"] == 1


ODD_NUMBERS = (
    "",
    "-1",
    "+1",
    "1.5",
    "1e3",
    "0x10",
    "٣٤",
    "３",
    "²",
    "9" * 12,
    "9" * 30,
    "9" * 4000,
    "NaN",
    "inf",
    "1_000",
)
ODD_TIMES = (
    "9999-12-31T23:59:59.999999Z",
    "1970-01-01T00:00:00.000000Z",
    "0000-00-00T00:00:00Z",
    "2026-13-41T25:61:61.000000Z",
    "2026-11-30T14:00:00.999999999Z",
)
ODD_TEXTS = (
    "job enqueued job_id={job} proof_kind={number} priority=Normal",
    "dispatching per-partition synthesis (budget-gated) job_id={job} num_partitions={number}",
    "partition synthesis failed error=x job_id={job} partition={number}",
    "partition GPU prove complete job_id={job} partition={number} gpu_ms={number}",
    "Phase 7: all partitions complete, proof assembled job_id={job} total_ms={number} synth_ms={number}",
    "proof completed successfully (pipeline) total_ms={number} gpu_ms={number}",
    "Phase 7: per-partition verification results job_id={job} invalid_partitions=[{number}, {number}]",
    "initializing GPU workers num_gpus={number} gpu_workers_per_device={number} gpus=[{number}]",
    "pipeline GPU worker started worker_id={number} gpu={number} sub_id=0",
    "GPU_TIMING prove_start returned worker_id={number} spawn_blocking_wall_ms={number}",
)


def odd_lines() -> Iterator[bytes]:
    for number in ODD_NUMBERS:
        for name in ("SYNTH_START", "SYNTH_END", "GPU_PICKUP", "GPU_START", "GPU_END"):
            yield event(number, name, "first")
            for key in ("partition", "worker", "synth_ms", "gpu_ms"):
                yield event(9, name, "first", f"partition=1,worker=2,{key}={number}")
                yield event(9, name, "first", f"{key}={number}")
        for time in ODD_TIMES:
            for text in ODD_TEXTS:
                filled = text.format(job="first", number=number)
                span = f"gpu_worker{{worker_id={number} gpu={number} job_id=first partition=Some({number})}}: "
                yield f"{time}  INFO {span}cuzk_core::engine: {filled}".encode()
        for phase in ("gpu_total_ms", "barrier_wait_ms", "mutex_held_ms", "total_start_fn_ms"):
            yield f"CUZK_TIMING: {phase}={number} {phase}={number}".encode()
    yield b"TIMELINE"
    yield b"TIMELINE,"
    yield b"TIMELINE,,,,"
    yield b"TIMELINE,5,\x1b[31mGPU_END\x1b[0m,\xff\xfe,partition=1"
    yield b"\x1b]0;title\x07\x1b[2J\x9b31m"
    yield bytes(range(256))


def test_odd_values_in_every_field() -> None:
    lines = list(odd_lines())
    Random(1).shuffle(lines)
    pipeline = follow([START, *lines, *odd_lines()])
    state = pipeline.state()
    assert sum(state.unparsed.values()) > 0
    assert set(state.gpus) <= {*map(str, range(64)), "unknown"}
    assert_bounded(pipeline)
    engine = engine_of(pipeline)
    for account in engine.ledger.accounts.values():
        elapsed_ms = engine.frontier_ms - engine.ledger.start_ms
        assert account.totals.busy_ms + sum(account.totals.idle_ms.values()) == elapsed_ms


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(sorted(set(odd_lines()))),
            st.builds(
                lambda line, at: line[:at] + line[at + 1 :],
                st.sampled_from(sorted(set(odd_lines()))),
                st.integers(0, 99),
            ),
            st.sampled_from(
                [event(at, name, "j", "worker=1") for at in (5, 10**13) for name in ("GPU_START", "GPU_END")]
            ),
        ),
        max_size=80,
    )
)
def test_any_bytes(lines: list[bytes]) -> None:
    splitter, pipeline = LineSplitter(), Pipeline()
    for line in lines:
        pipeline.feed(splitter.feed(line + b"\r\n"))
    pipeline.settle(1e6, 1.7e9)
    pipeline.finish()
    pipeline.state()


def test_one_event_from_the_far_future_moves_nothing_and_a_run_of_them_takes_no_time() -> None:
    far = 9_000_000_000_000
    steady = [event(i * 10, "SYNTH_START", f"j{i}") for i in range(50)]
    alone = follow([*steady[:25], event(far, "GPU_END", "x", "worker=1,gpu_ms=3"), *steady[25:]])
    assert engine_of(alone).seen_ms == 490
    assert alone.state().unparsed["offset"] == 1
    run = follow([*steady, *(event(far + i, "GPU_START", f"x{i}", "worker=1") for i in range(1000)), *steady])
    assert run.state().engine_restarts == 1
    # And hour after hour, which is believed.
    follow(event(i * 3_500_000, "GPU_START", f"x{i}", "worker=1") for i in range(2000))


def test_what_is_left_of_a_failed_job_does_no_harm_to_its_retry() -> None:
    def life(at_ms: int, *names: str, partition: int) -> Iterator[bytes]:
        for name in names:
            yield event(at_ms, name, "porep-1", f"worker={partition},partition={partition}")

    enqueued = "job enqueued job_id=porep-1 proof_kind=porep-c2 priority=Normal"
    pipeline = Pipeline()
    pipeline.feed(
        [
            tracing(0, "starting cuzk engine pipeline_enabled=true"),
            tracing(0, enqueued),
            *life(10, "SYNTH_START", "SYNTH_END", "GPU_PICKUP", "GPU_START", partition=0),
            *life(20, "SYNTH_START", partition=1),
            tracing(30, "partition synthesis failed error=x job_id=porep-1 partition=1"),
            tracing(40, "skipping synthesis for failed job job_id=porep-1 partition=2"),
            tracing(50, enqueued),
            *life(60, "SYNTH_START", partition=0),
            tracing(70, "skipping synthesis for failed job job_id=porep-1 partition=3"),
            *life(80, "GPU_END", partition=0),
            tracing(90, "discarding GPU result for failed job job_id=porep-1 partition=0"),
        ]
    )
    pipeline.finish()
    state = pipeline.state()
    assert state.proof_outcomes["porep-c2", ProofOutcome.FAILED] == 1
    assert state.jobs_open["porep-c2"] == 1
    assert {stage: count for stage, count in state.in_flight.items() if count} == {Stage.WAITING: 9, Stage.SYNTH: 1}


def test_long_messages_are_not_remembered() -> None:
    pipeline = follow([START])
    with growth_within(16 * 1024 * 1024):
        for index in range(1000):
            pipeline.feed([tracing(0, f"{index} {'x' * 60_000}")])


@pytest.mark.parametrize("offset", ["-5", "1e5", "1" + 30 * "0", "", "x"])
def test_what_is_no_offset_is_counted(offset: str) -> None:
    pipeline = Pipeline()
    pipeline.feed([event(1000, "GPU_START", "a"), event(offset, "GPU_END", "a"), event(2000, "GPU_END", "a")])
    pipeline.finish()
    assert pipeline.state().unparsed["offset"] == 1
