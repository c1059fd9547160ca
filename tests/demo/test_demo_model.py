"""The model's log: repeatable, in legal order, in the prover's shapes."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from cuzk_agent.demo.lines import Line, Timeline, Tracing, fragments
from cuzk_agent.demo.model import BURSTS, Fault, JobOutcome, Model, Setting

LONG_MS = 600_000
"""Ten minutes at speed 10: every burst comes several times."""

# Of a real log, with job ids, kinds, parameters and digits made the same.
SHAPES = frozenset(
    """
0-0-0T0:0:0Z  INFO cuzk_daemon: cuzk-daemon starting
0-0-0T0:0:0Z  INFO cuzk_daemon: configuration loaded listen=0.0:0
0-0-0T0:0:0Z  INFO cuzk_daemon: rayon global thread pool configured rayon_threads=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=true
0-0-0T0:0:0Z  INFO cuzk_core::engine: initializing GPU workers num_gpus=0 gpu_workers_per_device=0 total_workers=0 gpus=[0]
0-0-0T0:0:0Z  INFO cuzk_core::engine: pipeline GPU worker started worker_id=0 gpu=0 sub_id=0
0-0-0T0:0:0Z  INFO cuzk_core::scheduler: job enqueued job_id=JOB proof_kind=KIND priority="Normal" queue_position=0
0-0-0T0:0:0Z  INFO cuzk_core::scheduler: job dequeued for proving job_id=JOB proof_kind=KIND
0-0-0T0:0:0Z  INFO cuzk_core::srs_manager: loading SRS from disk circuit_id=CIRCUIT path=PATH size_gib=0
0-0-0T0:0:0Z  INFO cuzk_core::srs_manager: SRS loaded successfully circuit_id=CIRCUIT elapsed_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: dispatching per-partition synthesis (budget-gated) job_id=JOB num_partitions=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: dispatching per-partition SnapDeals synthesis (budget-gated) job_id=JOB num_partitions=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: assigned pipeline sequence number job_id=JOB job_seq=0
TIMELINE,0,SYNTH_START,JOB,partition=0
TIMELINE,0,SYNTH_START,JOB,kind=KIND
TIMELINE,0,SYNTH_END,JOB,partition=0,synth_ms=0
TIMELINE,0,SYNTH_END,JOB,synth_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: partition synthesis complete, pushing to GPU queue job_id=JOB partition=0 synth_ms=0
0-0-0T0:0:0Z  INFO synth_single{proof_kind=KIND}: cuzk_core::engine: synthesis complete, sending to GPU synth_ms=0 circuit_id=CIRCUIT batch_size=0 sectors=0
TIMELINE,0,GPU_QUEUE,JOB,partition=0
TIMELINE,0,GPU_QUEUE,JOB,monolithic
TIMELINE,0,GPU_PICKUP,JOB,worker=0,partition=0
TIMELINE,0,GPU_PICKUP,JOB,worker=0
0-0-0T0:0:0Z  INFO gpu_worker{SPAN}: cuzk_core::engine: GPU_TIMING hot_path pre-prove overhead worker_id=0 partition=P status_ms=0 fail_check_ms=0 mark_busy_ms=0 total_overhead_ms=0
TIMELINE,0,GPU_START,JOB,worker=0,partition=0
TIMELINE,0,GPU_START,JOB,worker=0
CUZK_TIMING: pre_lock_cpu_ms=0 mutex_wait_ms=0
CUZK_TIMING: gpu_tid=0 ntt_msm_h_ms=0
CUZK_TIMING: gpu_tid=0 barrier_wait_ms=0
CUZK_TIMING: gpu_tid=0 batch_add_ms=0
CUZK_TIMING: gpu_tid=0 tail_msm_ms=0 gpu_total_ms=0
CUZK_TIMING: prep_msm_ms=0
CUZK_TIMING: mutex_held_ms=0 total_start_fn_ms=0
0-0-0T0:0:0Z  INFO gpu_worker{SPAN}: cuzk_core::engine: GPU_TIMING prove_start returned worker_id=0 partition=P total_pre_prove_ms=0 spawn_blocking_wall_ms=0
CUZK_TIMING: b_g0_msm_ms=0 num_circuits=0
TIMELINE,0,GPU_END,JOB,worker=0,partition=0,gpu_ms=0
TIMELINE,0,GPU_END,JOB,worker=0,gpu_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: proof completed successfully (pipeline) proof_len=0 total_ms=0 queue_ms=0 synth_ms=0 gpu_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: partition GPU prove complete job_id=JOB partition=0 gpu_ms=0 filled=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: Phase 0: all partitions complete, proof assembled job_id=JOB proof_len=0 total_ms=0 synth_ms=0 gpu_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: Phase 0: PoRep proof self-check PASSED job_id=JOB
0-0-0T0:0:0Z ERROR cuzk_core::engine: partition synthesis failed error=circuit synthesis: assignment missing job_id=JOB partition=0
0-0-0T0:0:0Z  INFO gpu_worker{SPAN}: cuzk_core::engine: skipping GPU prove for failed partitioned job job_id=JOB partition=P
0-0-0T0:0:0Z ERROR gpu_worker{SPAN}: cuzk_core::engine: GPU prove start failed error=GPU prove start failed: CUDA error: out of memory
  at groth0_cuda.cu:0
0-0-0T0:0:0Z  INFO cuzk_core::engine: discarding GPU result for failed job job_id=JOB partition=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: Phase 0: PoRep proof self-check FAILED — proof will NOT be returned to caller job_id=JOB sector=0 miner=0 proof_len=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: Phase 0: per-partition verification results (invalid partitions produced bad proofs) job_id=JOB valid_partitions=[0] invalid_partitions=[0]
0-0-0T0:0:0Z  INFO cuzk_core::engine: skipping synthesis for failed job job_id=JOB partition=0
""".strip("\n").split("\n")  # noqa: E501
)

ORDER = ("SYNTH_START", "SYNTH_END", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END")


def shape(line: str) -> str:
    """A line with everything that differs from line to line made the same."""
    line = re.sub(r"\x1b\[\d+m", "", line)
    span = r"worker_id=\d+ gpu=\d+ job_id=JOB proof_kind=KIND batch_size=1 partition=P"
    for pattern, replacement in (
        (r"\bwdpost-\d+-\d+-\[[\d ]+\]|\bwinpost-\d+-[0-9a-f]{16}|\b(porep|snap)-\d+-\d+", "JOB"),
        (r"\b(porep-c2|snap-update|window-post|winning-post)\b", "KIND"),
        (r"circuit_id=\S+", "circuit_id=CIRCUIT"),
        (r"path=\S+", "path=PATH"),
        (r"partition=(Some\(\d+\)|None)", "partition=P"),
        (span, "SPAN"),
        (r"\[\d+(, \d+)*\]", "[0]"),
        (r"\d+(\.\d+)?", "0"),
    ):
        line = re.sub(pattern, replacement, line)
    return line


def logged(line: Line) -> str:
    return b"".join(fragments(line, 1796054060562.256)).decode()


def events_by_unit(lines: list[Line]) -> dict[tuple[str, str], list[Timeline]]:
    units: dict[tuple[str, str], list[Timeline]] = defaultdict(list)
    for line in lines:
        if isinstance(line, Timeline):
            partition = re.search(r"partition=(\d+)", line.detail)
            units[line.job_id, partition[1] if partition else ""].append(line)
    return units


@pytest.fixture(scope="module")
def long_run() -> list[Line]:
    return list(Model(3, speed=10).lines(LONG_MS))


def test_the_same_seed_gives_the_same_log() -> None:
    first, again, other = (list(Model(seed, speed=10).lines(60_000)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_time_never_goes_back(long_run: list[Line]) -> None:
    times = [line.time_ms for line in long_run]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_every_line_has_a_shape_of_the_real_log(long_run: list[Line]) -> None:
    seen = {shape(part) for line in long_run for part in logged(line).removesuffix("\n").split("\n")}
    assert seen - SHAPES == set()


def test_every_shape_occurs() -> None:
    # So few synthesis workers that a synthesis can fail before its siblings have begun.
    lines = Model(3, speed=10, setting=Setting(synth_workers=6)).lines(LONG_MS)
    seen = {shape(part) for line in lines for part in logged(line).removesuffix("\n").split("\n")}
    assert seen == SHAPES


@pytest.mark.parametrize("seed", range(5))
def test_every_unit_goes_through_its_stages_in_order(seed: int) -> None:
    for unit, events in events_by_unit(list(Model(seed, speed=10).lines(120_000))).items():
        names = tuple(event.event for event in events)
        assert names == ORDER[: len(names)], unit


def test_durations_are_those_between_the_events(long_run: list[Line]) -> None:
    for events in events_by_unit(long_run).values():
        offsets = {event.event: event.offset_ms for event in events}
        for event in events:
            if found := re.search(r"gpu_ms=(\d+)", event.detail):
                assert int(found[1]) == pytest.approx(offsets["GPU_END"] - offsets["GPU_START"], abs=1.01)
            elif (found := re.search(r"synth_ms=(\d+)", event.detail)) and "partition" in event.detail:
                assert int(found[1]) == pytest.approx(offsets["SYNTH_END"] - offsets["SYNTH_START"], abs=1.01)


def test_a_worker_starts_again_before_its_last_finalizer_is_done(long_run: list[Line]) -> None:
    open_by_worker: dict[str, int] = defaultdict(int)
    overlaps = 0
    for line in long_run:
        if isinstance(line, Timeline) and line.event in {"GPU_START", "GPU_END"}:
            worker = line.detail.split(",")[0]
            overlaps += line.event == "GPU_START" and open_by_worker[worker] > 0
            open_by_worker[worker] += 1 if line.event == "GPU_START" else -1
    assert overlaps > 10


def test_one_kernel_at_a_time_on_a_gpu() -> None:
    model = Model(2, speed=10, setting=Setting(gpus=1, workers_per_gpu=3))
    holder = None
    for line in model.lines(120_000):
        text = logged(line)
        if "mutex_wait_ms" in text:
            assert holder is None
            holder = line.writer
        elif "mutex_held_ms" in text:
            assert holder == line.writer
            holder = None


def test_faults_end_as_they_should(long_run: list[Line]) -> None:
    model = Model(3, speed=10)
    assert list(model.lines(LONG_MS)) == long_run
    outcomes = list(model.job_outcomes().values())
    planned = [request.fault for burst in BURSTS for request in burst.requests]
    faulty = {fault for fault in planned if fault is not None}
    assert faulty == set(Fault)
    # Bursts end before the next begins: whole rounds fail exactly their faults.
    rounds = outcomes[: len(outcomes) // len(planned) * len(planned)]
    assert len(rounds) >= 2 * len(planned)
    per_round = sum(fault is not None for fault in planned)
    closed = [outcome for outcome in rounds if outcome is not JobOutcome.OPEN]
    assert closed.count(JobOutcome.FAILED) >= 2 * per_round
    assert closed.count(JobOutcome.PROVED) > closed.count(JobOutcome.FAILED)


def test_a_failed_jobs_unit_is_dropped_without_a_start(long_run: list[Line]) -> None:
    dropped = {
        (dict(line.fields)["job_id"], re.sub(r"\D", "", dict(line.fields)["partition"]))
        for line in long_run
        if isinstance(line, Tracing) and line.message == "skipping GPU prove for failed partitioned job"
    }
    units = events_by_unit(long_run)
    assert dropped
    for unit in dropped:
        assert units[unit][-1].event == "GPU_PICKUP"


def test_the_first_minute_shows_every_kind_and_a_failure() -> None:
    lines = list(Model(1, speed=10).lines(60_000))
    proved = {dict(line.span_fields).get("proof_kind") for line in lines if isinstance(line, Tracing)}
    assert proved >= {"porep-c2", "snap-update", "window-post", "winning-post"}
    assert any(line.level == "ERROR" for line in lines if isinstance(line, Tracing))
