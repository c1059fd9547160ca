"""The model's log: repeatable, in legal order, in the prover's shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from cuzk_agent.demo.lines import Line, Printer, Tracing
from cuzk_agent.demo.model import Model
from cuzk_agent.demo.scenario import BATCHED, BLOCKED, DAY, FAILING, HANDOFF, SCENARIOS
from demo.support import events_by_unit

LONG_MS = 600_000
"""Ten minutes at speed 10: every burst comes several times."""

PRINTER = Printer(1796054060562.256, speed=10)

# As the daemon writes them, with job ids, kinds, parameters and digits made the same.
SHAPES = frozenset(
    """
0-0-0T0:0:0Z  INFO cuzk_daemon: cuzk-daemon starting
0-0-0T0:0:0Z  INFO cuzk_daemon: configuration loaded listen=0.0:0
0-0-0T0:0:0Z  INFO cuzk_daemon: rayon global thread pool configured rayon_threads=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=true
0-0-0T0:0:0Z  INFO cuzk_core::engine: initializing GPU workers num_gpus=0 gpu_workers_per_device=0 total_workers=0 gpus=[0]
0-0-0T0:0:0Z  INFO cuzk_core::engine: pipeline GPU worker started worker_id=0 gpu=0 sub_id=0
0-0-0T0:0:0Z  INFO cuzk_core::scheduler: job enqueued job_id=JOB proof_kind=KIND priority=PRIORITY queue_position=0
0-0-0T0:0:0Z  INFO cuzk_core::scheduler: job dequeued for proving job_id=JOB proof_kind=KIND
0-0-0T0:0:0Z  INFO cuzk_core::srs_manager: loading SRS from disk circuit_id=CIRCUIT path=PATH file_size_gib=0
0-0-0T0:0:0Z  INFO cuzk_core::srs_manager: SRS loaded successfully circuit_id=CIRCUIT elapsed_ms=0 budget_used_gib=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO synth_single{proof_kind=KIND}: cuzk_core::engine: dispatching per-partition synthesis (budget-gated) job_id=JOB num_partitions=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO synth_single{proof_kind=KIND}: cuzk_core::engine: dispatching per-partition SnapDeals synthesis (budget-gated) job_id=JOB num_partitions=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO synth_single{proof_kind=KIND}: cuzk_core::engine: assigned pipeline sequence number job_id=JOB job_seq=0
TIMELINE,0,SYNTH_START,JOB,partition=0
TIMELINE,0,SYNTH_START,JOB,kind=KIND
TIMELINE,0,SYNTH_END,JOB,partition=0,synth_ms=0
TIMELINE,0,SYNTH_END,JOB,synth_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: partition synthesis complete, pushing to GPU queue job_id=JOB partition=0 synth_ms=0
0-0-0T0:0:0Z  INFO synth_single{proof_kind=KIND}: cuzk_core::engine: synthesis complete, sending to GPU synth_ms=0 circuit_id=CIRCUIT batch_size=0 sectors=0
TIMELINE,0,GPU_QUEUE,JOB,partition=0
TIMELINE,0,GPU_QUEUE,JOB,monolithic
TIMELINE,0,CHAN_SEND,JOB,partition=0
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
0-0-0T0:0:0Z  INFO cuzk_core::engine: FIN_TIMING malloc_trim (success path) job_id=JOB partition=0 malloc_trim_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: FIN_TIMING finalizer partition worker_id=0 partition=P finish_ms=0 drop_res_ms=0 lock_wait_ms=0 process_ms=0 total_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: FIN_TIMING finalizer monolithic worker_id=0 finish_ms=0 drop_res_ms=0 lock_wait_ms=0 process_ms=0 total_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: Phase 0: all partitions complete, proof assembled job_id=JOB proof_len=0 total_ms=0 synth_ms=0 gpu_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: Phase 0: PoRep proof self-check PASSED job_id=JOB
0-0-0T0:0:0Z ERROR cuzk_core::engine: partition synthesis failed error=circuit synthesis: assignment missing job_id=JOB partition=0
0-0-0T0:0:0Z  INFO gpu_worker{SPAN}: cuzk_core::engine: skipping GPU prove for failed partitioned job job_id=JOB partition=P
0-0-0T0:0:0Z ERROR cuzk_core::engine: partition synthesis task panicked error=PANIC job_id=JOB partition=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: partition GPU proving failed error=GPU prove finish failed: Synthesis(Unsatisfiable) job_id=JOB partition=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: partition GPU proving task panicked error=PANIC job_id=JOB partition=0
0-0-0T0:0:0Z ERROR synth_single{proof_kind=KIND}: cuzk_core::engine: synthesis failed error=circuit synthesis: assignment missing
0-0-0T0:0:0Z ERROR cuzk_core::engine: GPU proving failed error=GPU prove finish failed: Synthesis(Unsatisfiable)
0-0-0T0:0:0Z ERROR cuzk_core::engine: Phase 0: PoRep proof self-check error — proof will NOT be returned to caller job_id=JOB error=vanilla proof: unexpected end of input
0-0-0T0:0:0Z  WARN cuzk_core::pinned_pool: cudaHostAlloc failed size_gib=0 cuda_err=0
0-0-0T0:0:0Z  WARN cuzk_core::pinned_pool: pinned pool: cudaHostAlloc failed size_gib=0
0-0-0T0:0:0Z ERROR gpu_worker{SPAN}: cuzk_core::engine: GPU prove start task panicked error=PANIC
0-0-0T0:0:0Z ERROR gpu_worker{SPAN}: cuzk_core::engine: GPU prove start failed error=GPU prove start failed: CUDA error: out of memory
  at groth0_cuda.cu:0
0-0-0T0:0:0Z  INFO cuzk_core::engine: discarding GPU result for failed job job_id=JOB partition=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: Phase 0: PoRep proof self-check FAILED — proof will NOT be returned to caller job_id=JOB proof_len=0 sector=0 miner=0
0-0-0T0:0:0Z ERROR cuzk_core::engine: Phase 0: per-partition verification results (invalid partitions produced bad proofs) job_id=JOB valid_partitions=[0] invalid_partitions=[0]
0-0-0T0:0:0Z  INFO cuzk_core::engine: skipping synthesis for failed job job_id=JOB partition=0
0-0-0T0:0:0Z  INFO cuzk_core::srs_manager: SRS evicted circuit_id=CIRCUIT freed_gib=0 budget_available_gib=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: evicted for memory pressure entry=srs:CIRCUIT freed_gib=0
0-0-0T0:0:0Z  INFO synth_batch_full{batch_size=0 proof_kind=KIND}: cuzk_core::engine: processing batch batch_size=0 proof_kind=KIND slot_size=0
0-0-0T0:0:0Z  INFO synth_batch_full{batch_size=0 proof_kind=KIND}: cuzk_core::engine: synthesis complete, sending to GPU synth_ms=0 circuit_id=CIRCUIT batch_size=0 sectors=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: batched proof completed — splitting results total_proof_bytes=0 num_sectors=0 synth_ms=0 gpu_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: sector proof delivered from batch sector_idx=0 job_id=JOB proof_len=0 total_ms=0
0-0-0T0:0:0Z  INFO cuzk_core::engine: Batched PoRep proof self-check PASSED job_id=JOB sector_idx=0
0-0-0T0:0:0Z  INFO cuzk_daemon: received SIGINT, shutting down
0-0-0T0:0:0Z  INFO cuzk_core::engine: shutting down cuzk engine
""".strip("\n").split("\n")  # noqa: E501
)

ORDER = ("SYNTH_START", "SYNTH_END", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END")


def shape(line: str) -> str:
    """A line with everything that differs from line to line made the same."""
    line = re.sub(r"\x1b\[\d+m", "", line)
    span = r"worker_id=\d+ gpu=\d+ job_id=JOB proof_kind=KIND batch_size=\d+ partition=P"
    for pattern, replacement in (
        (r"\bwdpost-\d+-\d+-\[[\d ]+\]|\bwinpost-\d+-[0-9a-f]{16}|\b(porep|snap)-\d+-\d+", "JOB"),
        (r"\b(porep-c2|snap-update|window-post|winning-post)\b", "KIND"),
        (r"circuit_id=\S+", "circuit_id=CIRCUIT"),
        (r"srs:\S+", "srs:CIRCUIT"),
        (r"priority=\w+", "priority=PRIORITY"),
        (r"error=task \d+ panicked with message \"[^\"]*\"", "error=PANIC"),
        (r"path=\S+", "path=PATH"),
        (r"partition=(Some\(\d+\)|None)", "partition=P"),
        (span, "SPAN"),
        (r"\[\d+(, \d+)*\]", "[0]"),
        (r"\d+(\.\d+)?", "0"),
    ):
        line = re.sub(pattern, replacement, line)
    return line


def logged(line: Line) -> str:
    return b"".join(PRINTER.fragments(line)).decode()


def shapes(lines: Iterable[Line]) -> set[str]:
    return {shape(part) for line in lines for part in logged(line).removesuffix("\n").split("\n")}


@pytest.fixture(scope="module")
def long_run() -> list[Line]:
    return list(Model(DAY, 3, speed=10).lines(LONG_MS))


def test_the_same_seed_gives_the_same_log() -> None:
    first, again, other = (list(Model(DAY, seed, speed=10).lines(60_000)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_time_never_goes_back(long_run: list[Line]) -> None:
    times = [line.time_ms for line in long_run]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_line_has_a_shape_of_the_real_log(name: str) -> None:
    assert shapes(Model(SCENARIOS[name], 3, rounds=1).lines()) - SHAPES == set()


def test_every_shape_occurs() -> None:
    few = replace(FAILING, setting=replace(FAILING.setting, synth_workers=5))
    seen = set()
    for scenario in (DAY, few, BLOCKED, BATCHED, HANDOFF):
        for seed in range(3):
            seen |= shapes(Model(scenario, seed, rounds=1).lines())
    assert seen == SHAPES


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_unit_goes_through_its_stages_in_order(name: str) -> None:
    scenario = replace(SCENARIOS[name], lives=())
    again = {request.kind.name for burst in scenario.bursts for request in burst.requests if request.again_after_ms}
    for unit, events in events_by_unit(list(Model(scenario, 1, rounds=1).lines())).items():
        names = tuple(event.event for event in events)
        queued = tuple("GPU_QUEUE" if name == "CHAN_SEND" else name for name in names)
        assert queued == ORDER[: len(names)] or again, unit


def test_durations_are_those_between_the_events(long_run: list[Line]) -> None:
    for events in events_by_unit(long_run).values():
        offsets = {event.event: event.offset_ms for event in events}
        for event in events:
            if found := re.search(r"gpu_ms=(\d+)", event.detail):
                assert int(found[1]) == pytest.approx(offsets["GPU_END"] - offsets["GPU_START"], abs=1.01)
            elif (found := re.search(r"synth_ms=(\d+)", event.detail)) and "partition" in event.detail:
                assert int(found[1]) == pytest.approx(offsets["SYNTH_END"] - offsets["SYNTH_START"], abs=1.01)


def test_the_first_minute_shows_every_kind_and_a_failure() -> None:
    lines = list(Model(DAY, 1, speed=10).lines(60_000))
    proved = {dict(line.span_fields).get("proof_kind") for line in lines if isinstance(line, Tracing)}
    assert proved >= {"porep-c2", "snap-update", "window-post", "winning-post"}
    assert any(line.level == "ERROR" for line in lines if isinstance(line, Tracing))
