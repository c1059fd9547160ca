"""Memory stays flat over a log without end. `SOAK_JOBS=1000000 make test` for the long form."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cuzk_agent.timeline.pipeline import Pipeline

EPOCH = datetime(2026, 11, 30, 14, 0, 0, tzinfo=UTC)
JOBS = int(os.environ.get("SOAK_JOBS", "6000"))
JOB_MS = 4000


class Daemon:
    """A prover on two GPUs that proves one job every four seconds, and now and then does not."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._epoch_ms = 0

    def event(self, name: str, job: str, detail: str) -> bytes:
        return f"TIMELINE,{self.now_ms - self._epoch_ms},{name},{job},{detail}".encode()

    def tracing(self, text: str, span: str = "") -> bytes:
        stamp = (EPOCH + timedelta(milliseconds=self.now_ms)).isoformat(timespec="microseconds")[:26]
        return f"{stamp}Z  INFO {span}cuzk_core::engine: {text}".encode()

    def start(self) -> Iterator[bytes]:
        self._epoch_ms = self.now_ms
        yield self.tracing("starting cuzk engine pipeline_enabled=true")
        yield self.tracing("initializing GPU workers num_gpus=2 gpu_workers_per_device=2 total_workers=4 gpus=[0, 1]")

    def job(self, number: int) -> Iterator[bytes]:
        """All the lines of a job, whose two partitions go through both GPUs."""
        job = f"snap-1000-{number}"
        yield self.tracing(f"job enqueued job_id={job} proof_kind=snap-update priority=Normal queue_position=0")
        yield self.tracing(
            f"dispatching per-partition SnapDeals synthesis (budget-gated) job_id={job} num_partitions=2 x=1"
        )
        yield self.event("SYNTH_START", job, "partition=0")
        yield self.event("SYNTH_START", job, "partition=1")
        self.now_ms += 1000
        if number % 97 == 0:
            # It is never heard of again.
            self.now_ms += JOB_MS - 1000
            return
        if number % 50 == 0:
            yield self.tracing(f"partition synthesis failed error=no luck {number} job_id={job} partition=1")
            yield self.tracing(f"skipping synthesis for failed job job_id={job} partition=0")
            self.now_ms += JOB_MS - 1000
            return
        for partition in (0, 1):
            worker = 2 * partition + number % 2
            at = f"worker={worker},partition={partition}"
            span = f"gpu_worker{{worker_id={worker} gpu={partition} job_id={job} partition=Some({partition})}}: "
            yield self.event("SYNTH_END", job, f"partition={partition},synth_ms=1000")
            yield self.event("GPU_QUEUE", job, f"partition={partition}")
            yield self.event("GPU_PICKUP", job, at)
            yield self.event("GPU_START", job, at)
            self.now_ms += 1000
            yield b"CUZK_TIMING: gpu_tid=0 barrier_wait_ms=100"
            yield b"CUZK_TIMING: gpu_tid=0 tail_msm_ms=10 gpu_total_ms=700"
            yield b"CUZK_TIMING: mutex_held_ms=701 total_start_fn_ms=900"
            yield self.tracing("GPU_TIMING prove_start returned spawn_blocking_wall_ms=900", span)
            yield self.event("GPU_END", job, at + ",gpu_ms=1000")
            yield self.tracing(f"partition GPU prove complete job_id={job} partition={partition} gpu_ms=1000")
        yield self.tracing(f"Phase 7: all partitions complete, proof assembled job_id={job} total_ms=3000")
        self.now_ms += JOB_MS - 3000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.timeout(7200)
def test_memory_is_flat_over_a_log_without_end() -> None:
    daemon, pipeline = Daemon(), Pipeline()
    pipeline.feed(daemon.start())
    warm_jobs = min(10_000, JOBS // 3)
    lines = 0
    start_s = time.perf_counter()
    objects = resident = 0
    for number in range(JOBS):
        if number % 5000 == 4999:
            pipeline.feed(daemon.start())
        batch = list(daemon.job(number))
        lines += len(batch)
        pipeline.feed(batch)
        if number % 250 == 0:
            pipeline.state()
        if number == warm_jobs:
            gc.collect()
            objects, resident = len(gc.get_objects()), resident_bytes()
    seconds = time.perf_counter() - start_s
    gc.collect()
    more_objects, more_bytes = len(gc.get_objects()) - objects, resident_bytes() - resident
    report = f"{JOBS} jobs, {lines} lines in {seconds:.0f} s; {more_objects:+} objects, {more_bytes / 1024:+.0f} KiB"
    print(report)  # noqa: T201  # shown with `pytest -s`, and when it fails
    state = pipeline.state()
    assert sum(state.proof_outcomes.values()) > 0.99 * JOBS
    assert more_objects < 5_000
    assert more_bytes < 8 * 1024 * 1024
