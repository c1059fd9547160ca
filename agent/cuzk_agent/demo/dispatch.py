"""The daemon's dispatcher: takes jobs by priority, and prepares each to be synthesized, alone or with others."""

from __future__ import annotations

from functools import partial
from heapq import heappop, heappush

from cuzk_agent.demo.jobs import Job, Unit
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.scenario import POREP, SNAP
from cuzk_agent.demo.synthesis import Synthesis

_SCHEDULER = "cuzk_core::scheduler"


class Dispatcher:
    """So many jobs at a time: one is dispatched until it is split into its units, or synthesized if it is whole."""

    def __init__(self, process: Process, progress: Progress, memory: Memory, synthesis: Synthesis) -> None:
        self._process = process
        self._setting = process.setting
        self._progress = progress
        self._memory = memory
        self._synthesis = synthesis
        self._submitted: list[tuple[int, int, Job]] = []
        """By priority, then by age."""
        self._dispatching = 0
        self._split_jobs = 0
        self._batch: list[Job] = []
        self._batches = 0
        """Gathered so far."""

    def enqueue(self, job: Job) -> None:
        """A job waits for its turn."""
        priority = job.call.request.priority
        self._process.trace(
            "scheduler",
            "job enqueued",
            target=_SCHEDULER,
            job_id=job.job_id,
            proof_kind=job.kind.name,
            priority=priority.name.capitalize(),
            queue_position=sum(other[0] <= -priority for other in self._submitted),
        )
        heappush(self._submitted, (-priority, job.number, job))
        self._process.soon(self._dispatch)

    def _dispatch(self) -> None:
        while self._submitted and self._dispatching < self._setting.dispatchers:
            job = heappop(self._submitted)[2]
            self._process.trace(
                "dispatcher", "job dequeued for proving", target=_SCHEDULER, job_id=job.job_id, proof_kind=job.kind.name
            )
            if self._setting.max_batch > 1 and job.kind is POREP:
                self._collect(job)
            else:
                self._flush()
                self._dispatch_one(job)

    def _dispatched(self) -> None:
        self._dispatching -= 1
        self._process.soon(self._dispatch)

    # Batches

    def _collect(self, job: Job) -> None:
        self._batch.append(job)
        if len(self._batch) >= self._setting.max_batch:
            self._flush()
        elif len(self._batch) == 1:
            self._process.later(self._setting.batch_wait_ms, partial(self._batch_timeout, self._batches))

    def _batch_timeout(self, number: int) -> None:
        if number == self._batches:
            self._flush()

    def _flush(self) -> None:
        jobs, self._batch = self._batch, []
        if jobs:
            self._batches += 1
        if len(jobs) == 1:
            self._dispatch_one(jobs[0])
        elif jobs:
            self._dispatch_batch(jobs)

    def _dispatch_batch(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.dispatched = True
        unit = self._progress.unite(jobs)
        self._dispatching += 1
        self._process.trace(
            unit.job.dispatcher,
            "processing batch",
            span=unit.dispatch_span,
            batch_size=len(jobs),
            proof_kind=POREP.name,
            slot_size=0,
        )
        self._dispatch_whole(unit)

    # One at a time

    def _dispatch_one(self, job: Job) -> None:
        self._dispatching += 1
        job.dispatched = True
        if job.kind.partitions is None:
            self._dispatch_whole(job.units[0])
        else:
            load = partial(self._memory.load_srs, job.kind, job.dispatcher, partial(self._split, job))
            self._memory.reserve_srs(job.kind, load)

    def _dispatch_whole(self, unit: Unit) -> None:
        begin = partial(self._synthesis.begin_whole, unit, self._dispatched)
        self._memory.acquire(unit.memory_gib, partial(self._memory.reserve_srs, unit.job.kind, begin))

    def _split(self, job: Job) -> None:
        what = "SnapDeals synthesis" if job.kind is SNAP else "synthesis"
        self._split_jobs += 1
        job.sequence = self._split_jobs
        trace = partial(self._process.trace, job.dispatcher, span=job.units[0].dispatch_span, job_id=job.job_id)
        trace(
            f"dispatching per-partition {what} (budget-gated)",
            num_partitions=len(job.units),
            budget_available_gib=self._memory.free_gib,
        )
        trace("assigned pipeline sequence number", job_seq=job.sequence)
        self._synthesis.add(job.units)
        self._dispatched()
