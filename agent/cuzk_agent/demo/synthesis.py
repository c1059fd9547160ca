"""The daemon's synthesis on the CPU: of partitions by a pool of workers, of whole proofs by their dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush

from cuzk_agent.demo import faults
from cuzk_agent.demo.jobs import Unit
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.truth import Queue
from cuzk_agent.demo.workers import Workers
from cuzk_agent.demo.world import PINNED_POOL


class Synthesis:
    """Takes longer the more runs at the same time. What is synthesized is queued for the GPU workers."""

    def __init__(self, process: Process, progress: Progress, memory: Memory, workers: Workers) -> None:
        self._process = process
        self._setting = process.setting
        self._progress = progress
        self._memory = memory
        self._workers = workers
        self._partitions: list[tuple[tuple[int, int], Unit]] = []
        """Those not begun, by rank."""
        self._feeding = False
        self._idle: deque[int] = deque(range(self._setting.synth_workers))
        self._running = 0

    def add(self, units: Iterable[Unit]) -> None:
        """Partitions of a job wait for their synthesis."""
        for unit in units:
            heappush(self._partitions, (unit.rank, unit))
        self._process.soon(self.feed)

    def feed(self) -> None:
        """Hands the next partition to an idle worker once there is memory for it, unless enough wait for a GPU."""
        target = self._setting.queue_target
        paced = target > 0 and self._workers.queued >= target
        if self._feeding or paced or not self._partitions or not self._idle:
            return
        self._feeding = True
        unit = heappop(self._partitions)[1]
        self._memory.acquire(unit.memory_gib, partial(self._begin_partition, unit))

    def _begin_partition(self, unit: Unit) -> None:
        self._feeding = False
        job = unit.job
        self._process.soon(self.feed)
        if job.given_up:
            self._process.trace(
                "feeder", "skipping synthesis for failed job", job_id=job.job_id, partition=unit.partition
            )
            self._memory.let_go(unit)
            return
        slot = self._idle.popleft()
        writer = f"synth-{slot}"
        self._progress.move(unit, Queue.SYNTH)
        self._process.timeline(writer, "SYNTH_START", unit, *unit.details)
        if job.fault is not None and self._process.random.random() < 0.2:
            warn = partial(self._process.trace, writer, target=PINNED_POOL, level="WARN", size_gib=2.4)
            warn("cudaHostAlloc failed", cuda_err=2)
            warn("pinned pool: cudaHostAlloc failed")
        self._synthesize(unit, partial(self._end_partition, unit, slot))

    def _end_partition(self, unit: Unit, slot: int, duration_ms: float) -> None:
        self._idle.append(slot)
        self._process.soon(self.feed)
        self._end(unit, f"synth-{slot}", duration_ms)

    def begin_whole(self, unit: Unit, then: Callable[[], None]) -> None:
        """Synthesizes a whole proof, for which all memory is reserved; `then` when that is over."""
        writer = unit.job.dispatcher
        self._progress.move(unit, Queue.SYNTH)
        self._process.timeline(writer, "SYNTH_START", unit, f"kind={unit.job.kind.name}")
        # A whole proof's parameters are loaded inside its synthesis; a partition's are there already.
        end = partial(self._end_whole, unit, then)
        self._memory.load_srs(unit.job.kind, writer, partial(self._synthesize, unit, end))

    def _end_whole(self, unit: Unit, then: Callable[[], None], duration_ms: float) -> None:
        self._end(unit, unit.job.dispatcher, duration_ms)
        then()

    def _synthesize(self, unit: Unit, then: Callable[[float], None]) -> None:
        self._running += 1
        contention = 1 + self._setting.contention * (self._running - 1)
        mean_ms = unit.job.kind.synth_ms * contention * (1 + 0.2 * len(unit.batch))
        duration_ms = self._process.spread(mean_ms)
        self._process.later(duration_ms, partial(then, duration_ms))

    def _end(self, unit: Unit, writer: str, duration_ms: float) -> None:
        job, whole = unit.job, unit.partition is None
        self._running -= 1
        failure = faults.OF_SYNTHESIS.get(unit.fault)
        if failure is not None:
            self._progress.fail(unit)
            fail = partial(self._process.trace, writer, level="ERROR", error=failure.error)
            if whole:
                fail(f"synthesis {failure.how}", span=unit.dispatch_span)
            else:
                fail(f"partition synthesis {failure.how}", job_id=job.job_id, partition=unit.partition)
            self._memory.let_go(unit)
            return
        for member in unit.jobs:
            member.synth_ms += duration_ms
        synth_ms = self._process.logged_ms(duration_ms)
        self._progress.move(unit, Queue.READY)
        self._process.timeline(writer, "SYNTH_END", unit, *unit.details, f"synth_ms={synth_ms}")
        if whole:
            self._process.trace(
                writer,
                "synthesis complete, sending to GPU",
                span=unit.dispatch_span,
                synth_ms=synth_ms,
                circuit_id=job.kind.circuit_id,
                batch_size=len(unit.jobs),
                sectors=len(unit.jobs),
            )
        else:
            self._process.trace(
                writer,
                "partition synthesis complete, pushing to GPU queue",
                job_id=job.job_id,
                partition=unit.partition,
                synth_ms=synth_ms,
            )
        self._workers.queue(unit, writer)
