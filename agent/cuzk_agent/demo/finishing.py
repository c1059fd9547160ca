"""The CPU's part after the kernels: a unit's proof is finished, and with a job's last one the job's is put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cuzk_agent.demo import faults
from cuzk_agent.demo.jobs import MINER, Job, Proving
from cuzk_agent.demo.locks import Tracker
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.scenario import POREP, Fault, Generation
from cuzk_agent.demo.truth import Outcome


class Finisher:
    """Finishes each unit in a thread of its own, and takes note of it under the lock of the daemon's records."""

    def __init__(self, process: Process, progress: Progress, memory: Memory, tracker: Tracker) -> None:
        self._process = process
        self._setting = process.setting
        self._progress = progress
        self._memory = memory
        self._tracker = tracker

    def finish(self, proving: Proving, then: Callable[[], None] | None = None) -> None:
        """The kernels are done. `then` when note is taken of what became of the unit."""
        finish_ms = self._process.spread(self._setting.finish_ms * proving.unit.size, 0.3)
        self._process.later(finish_ms, partial(self._finished, proving, finish_ms, then))

    def _finished(self, proving: Proving, finish_ms: float, then: Callable[[], None] | None) -> None:
        process, unit, writer = self._process, proving.unit, proving.finalizer
        circuits = 10 * len(unit.batch) or 1
        process.kernel(writer, f"b_g2_msm_ms={process.logged_ms(finish_ms)} num_circuits={circuits}")
        proving.gpu_ms = process.now_ms - proving.start_ms
        if unit.fault not in faults.OF_PROVING:
            self._progress.end(unit, proving.worker.gpu)
            self._progress.prove(unit)
            process.timeline(writer, "GPU_END", unit, *proving.details, f"gpu_ms={process.logged_ms(proving.gpu_ms)}")
        self._memory.release(unit.memory_gib - unit.released_gib)
        slow = process.random.random() < self._setting.slow_trim_probability
        trim_ms = process.spread(self._setting.slow_trim_ms if slow else self._setting.trim_ms, 0.9)
        self._tracker.lock(trim_ms, partial(self._take_note, proving, process.now_ms, trim_ms, then))

    def _take_note(self, proving: Proving, since_ms: float, trim_ms: float, then: Callable[[], None] | None) -> None:
        unit, job, trace = proving.unit, proving.unit.job, partial(self._process.trace, proving.finalizer)
        waited_ms = self._process.now_ms - since_ms
        failure = faults.OF_PROVING.get(unit.fault)
        if failure is not None:
            self._progress.end(unit, proving.worker.gpu)
            self._progress.fail(unit)
            fail = partial(trace, level="ERROR", error=failure.error)
            if unit.partition is None:
                fail(f"GPU proving {failure.how}")
            else:
                fail(f"partition GPU proving {failure.how}", job_id=job.job_id, partition=unit.partition)
        elif unit.batch:
            self._batch_proved(proving)
        elif unit.partition is None:
            self._whole_proved(proving)
        elif job.given_up:
            trace("discarding GPU result for failed job", job_id=job.job_id, partition=unit.partition)
        else:
            self._partition_proved(proving)
        if then is not None:
            then()
        self._process.later(trim_ms, partial(self._noted, proving, waited_ms, trim_ms))

    def _noted(self, proving: Proving, waited_ms: float, trim_ms: float) -> None:
        whole, logged = proving.unit.partition is None, self._process.logged_ms
        if self._setting.generation is Generation.SPLIT:
            self._process.trace(
                proving.finalizer,
                f"FIN_TIMING finalizer {'monolithic' if whole else 'partition'}",
                worker_id=proving.worker.worker_id,
                partition=None if whole else proving.unit.partition_debug,
                finish_ms=0,
                drop_res_ms=0,
                lock_wait_ms=logged(waited_ms),
                process_ms=logged(trim_ms),
                total_ms=logged(waited_ms + trim_ms),
            )
        self._progress.leave(proving.unit)

    # Proofs

    def _partition_proved(self, proving: Proving) -> None:
        job, logged = proving.unit.job, self._process.logged_ms
        job.proved += 1
        job.gpu_ms += proving.gpu_ms
        complete = job.proved == len(job.units)
        named = partial(self._process.trace, proving.finalizer, job_id=job.job_id)
        partition, gpu_ms = proving.unit.partition, logged(proving.gpu_ms)
        named("partition GPU prove complete", partition=partition, gpu_ms=gpu_ms, filled=int(complete))
        named("FIN_TIMING malloc_trim (success path)", partition=partition, malloc_trim_ms=0)
        if complete:
            named(
                "Phase 7: all partitions complete, proof assembled",
                proof_len=job.kind.proof_bytes,
                total_ms=self._total_ms(job),
                synth_ms=logged(job.synth_ms),
                gpu_ms=logged(job.gpu_ms),
            )
            self._check(job, proving.finalizer, "Phase 7: PoRep proof")

    def _whole_proved(self, proving: Proving) -> None:
        job = proving.unit.job
        self._process.trace(
            proving.finalizer,
            "proof completed successfully (pipeline)",
            proof_len=job.kind.proof_bytes,
            total_ms=self._total_ms(job),
            queue_ms=0,
            synth_ms=self._process.logged_ms(job.synth_ms),
            gpu_ms=self._process.logged_ms(proving.gpu_ms),
        )
        self._progress.decide_job(job, Outcome.PROVED)

    def _batch_proved(self, proving: Proving) -> None:
        jobs = proving.unit.batch
        self._process.trace(
            proving.finalizer,
            "batched proof completed — splitting results",
            total_proof_bytes=len(jobs) * POREP.proof_bytes,
            num_sectors=len(jobs),
            synth_ms=self._process.logged_ms(jobs[0].synth_ms),
            gpu_ms=self._process.logged_ms(proving.gpu_ms),
        )
        for index, job in enumerate(jobs):
            self._process.trace(
                proving.finalizer,
                "sector proof delivered from batch",
                sector_idx=index,
                job_id=job.job_id,
                proof_len=job.kind.proof_bytes,
                total_ms=self._total_ms(job),
            )
            self._check(job, proving.finalizer, "Batched PoRep proof", index)

    def _total_ms(self, job: Job) -> int:
        return self._process.logged_ms(self._process.now_ms - job.enqueued_ms)

    def _check(self, job: Job, writer: str, what: str, sector_index: int | None = None) -> None:
        """A PoRep proof is checked; in a batch it has an index."""
        fault = job.fault if job.kind is POREP and job.fault in (Fault.SELF_CHECK, Fault.SELF_CHECK_ERROR) else None
        self._progress.decide_job(job, Outcome.PROVED if fault is None else Outcome.FAILED)
        named = partial(self._process.trace, writer, job_id=job.job_id, sector_idx=sector_index)
        fail = partial(named, level="ERROR")
        if job.kind is not POREP:
            return
        if fault is None:
            named(f"{what} self-check PASSED")
        elif fault is Fault.SELF_CHECK_ERROR:
            error = "vanilla proof: unexpected end of input"
            fail(f"{what} self-check error — proof will NOT be returned to caller", error=error)
        else:
            fail(
                f"{what} self-check FAILED — proof will NOT be returned to caller",
                proof_len=job.kind.proof_bytes,
                sector=job.call.sector,
                miner=MINER,
            )
            if sector_index is None:
                fail(
                    "Phase 7: per-partition verification results (invalid partitions produced bad proofs)",
                    valid_partitions=[p for p in range(job.kind.units) if p != job.bad_partition],
                    invalid_partitions=[job.bad_partition],
                )
