"""One life of the daemon's engine.

It queues jobs by priority, dispatches them (after their kind's parameters, the SRS, are loaded), splits them into
units, synthesizes these with a pool of CPU workers as far as memory allows, and proves them with the workers of each
GPU, which share it by a mutex.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from cuzk_agent.demo.gpus import Gpus, Kernels, Trouble
from cuzk_agent.demo.jobs import MINER, Call, Job, Unit
from cuzk_agent.demo.lines import Fields, Kernel, Timeline, Tracing
from cuzk_agent.demo.scenario import POREP, SNAP, Fault, Generation, Kind, Priority
from cuzk_agent.demo.truth import Account, JobTruth, Outcome, Queue, Tally
from cuzk_agent.demo.world import PINNED_POOL, World

_ENGINE = "cuzk_core::engine"
_SCHEDULER = "cuzk_core::scheduler"
_SRS_MANAGER = "cuzk_core::srs_manager"
_MEMORY = "cuzk_core::memory"
_DAEMON = "cuzk_daemon"

_LEVELS = {"INFO": 0, "WARN": 1, "ERROR": 2}
_PRIORITY_NAMES = {
    Priority.LOW: "Low",
    Priority.NORMAL: "Normal",
    Priority.HIGH: "High",
    Priority.CRITICAL: "Critical",
}

_SYNTHESIS_ERROR = "circuit synthesis: assignment missing"
_CUDA_ERROR = "GPU prove start failed: CUDA error: out of memory\n  at groth16_cuda.cu:512"
_FINISH_ERROR = "GPU prove finish failed: Synthesis(Unsatisfiable)"
_XID_CUDA = 31
_PANIC = 'task 4711 panicked with message "index out of bounds: the len is 8 but the index is 8"'


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: int
    gpu: int
    sub_id: int
    writer: str


@dataclass(slots=True, eq=False)
class _Mutex:
    held: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Proving:
    """One unit on a GPU, from GPU_START on."""

    unit: Unit
    worker: _Worker
    start_ms: float
    kernels: Kernels | None = None


class Engine:
    """One life of the daemon's engine."""

    def __init__(self, world: World, gpus: Gpus, tally: Tally, job_over: Callable[[], None], *, keep: bool) -> None:
        """`job_over` is called whenever nothing is left of a job."""
        self._world = world
        self._gpus = gpus
        self._tally = tally
        self._job_over = job_over
        self._keep = keep
        self._setting = setting = world.setting
        self._random = world.random
        self._start_ms = 0.0
        self.account = Account(setting.gpus, keep=keep)
        self.last_line_ms = 0
        """When the last line was written that bears a time, on the engine's clock."""
        self.job_truths: list[JobTruth] = []
        self._jobs: dict[Job, None] = {}
        """Those of which something is left."""
        self._count = 0

        self._submitted: list[tuple[int, int, Job]] = []
        """By priority, then by age."""
        self._dispatching = 0
        self._sequence = 0
        self._batch: list[Job] = []
        self._batch_number = 0

        self._used_gib = 0.0
        self._memory_waiting: list[tuple[float, Callable[[], None]]] = []
        self._srs: dict[str, Kind] = {}
        self._srs_wanted: dict[str, list[Callable[[], None]]] = {}
        self._srs_loading: dict[str, list[Callable[[], None]]] = {}
        self._kind_users: Counter[str] = Counter()

        self._to_synthesize: list[tuple[int, int, Unit]] = []
        """By job, oldest first, then by partition."""
        self._feeding = False
        self._idle_synth: deque[int] = deque(range(setting.synth_workers))
        self._synthesizing = 0

        self._ready: list[tuple[int, int, int, Unit]] = []
        self._workers = [
            _Worker(i, *divmod(i, setting.workers_per_gpu), f"worker-{i}")
            for i in range(setting.gpus * setting.workers_per_gpu)
        ]
        self._idle_workers: deque[_Worker] = deque()
        self._woken = 0
        self._mutexes = [_Mutex() for _ in range(setting.gpus)]
        self._tracker_free_ms = 0.0
        self._start()

    # Time and lines

    def _at(self, delay_ms: float, happen: Callable[[], None]) -> None:
        self._world.later(delay_ms, happen, self)

    def _soon(self, happen: Callable[[], None]) -> None:
        """When another thread has woken up."""
        self._world.later(self._random.uniform(0.02, 0.2), happen, self)

    @property
    def _now_ms(self) -> float:
        return self._world.now_ms

    def _clock(self) -> int:
        """Whole milliseconds of the engine's clock."""
        return int((self._world.now_ms - self._start_ms) / self._world.speed)

    def _logged(self, duration_ms: float) -> int:
        return int(duration_ms / self._world.speed)

    def _timeline(self, writer: str, event: str, unit: Unit, detail: str) -> None:
        self.last_line_ms = offset_ms = self._clock()
        self._world.say(Timeline(self._world.now_ms, writer, offset_ms, event, unit.job.job_id, detail))

    def _kernel(self, writer: str, text: str) -> None:
        if self._setting.kernel_lines:
            self._world.say(Kernel(self._world.now_ms, writer, text))

    def say(self, line: Tracing) -> None:
        """A line is written, if it is of a level that is."""
        if _LEVELS[line.level] >= _LEVELS[self._setting.level]:
            self.last_line_ms = self._clock()
            self._world.say(line)

    def _info(self, writer: str, target: str, message: str, *fields: tuple[str, str]) -> None:
        self.say(Tracing(self._now_ms, writer, "INFO", target, message, fields))

    def _error(self, writer: str, message: str, *fields: tuple[str, str]) -> None:
        self.say(Tracing(self._now_ms, writer, "ERROR", _ENGINE, message, fields))

    def _in_dispatch(
        self, job: Job, writer: str, message: str, *fields: tuple[str, str], level: str = "INFO", batch: int = 1
    ) -> None:
        span: Fields = (("proof_kind", job.kind.name),)
        name = "synth_single"
        if batch > 1:
            name, span = "synth_batch_full", (("batch_size", str(batch)), *span)
        self.say(Tracing(self._now_ms, writer, level, _ENGINE, message, fields, name, span))

    def _in_worker(
        self, worker: _Worker, unit: Unit, message: str, *fields: tuple[str, str], level: str = "INFO"
    ) -> None:
        span: Fields = (
            ("worker_id", str(worker.worker_id)),
            ("gpu", str(worker.gpu)),
            unit.job.id_field,
            ("proof_kind", unit.job.kind.name),
            ("batch_size", str(len(unit.batch) or 1)),
            ("partition", unit.partition_debug),
        )
        self.say(Tracing(self._now_ms, worker.writer, level, _ENGINE, message, fields, "gpu_worker", span))

    # Start and end

    def interrupt(self) -> None:
        """SIGINT comes: it says its last words."""
        for line in shutdown_lines(self._now_ms):
            self.say(line)

    def _start(self) -> None:
        main = "main"
        # Before the engine there is no clock of it: what the daemon says first does not count as time.
        self._start_ms = self._now_ms
        self._info(main, _DAEMON, "cuzk-daemon starting")
        self._info(main, _DAEMON, "configuration loaded", ("listen", "0.0.0.0:9820"))
        self._info(main, _DAEMON, "rayon global thread pool configured", ("rayon_threads", "96"))
        self._start_ms = self._now_ms
        self._info(main, _ENGINE, "starting cuzk engine", ("pipeline_enabled", "true"))
        self._info(
            main,
            _ENGINE,
            "initializing GPU workers",
            ("num_gpus", str(self._setting.gpus)),
            ("gpu_workers_per_device", str(self._setting.workers_per_gpu)),
            ("total_workers", str(len(self._workers))),
            ("gpus", str(list(range(self._setting.gpus)))),
        )
        for worker in self._random.sample(self._workers, len(self._workers)):
            self._info(
                worker.writer,
                _ENGINE,
                "pipeline GPU worker started",
                ("worker_id", str(worker.worker_id)),
                ("gpu", str(worker.gpu)),
                ("sub_id", str(worker.sub_id)),
            )
            self._idle_workers.append(worker)

    def end(self) -> list[Call]:
        """The process ends. Returns the calls that are still waiting for an answer."""
        self.account.finish(self.last_line_ms)
        unanswered = []
        for job in self._jobs:
            for unit in job.units:
                self._decide(unit, Outcome.ABANDONED)
            if job.truth.outcome is None:
                unanswered.append(job.call)
                self._tally.decide(job.truth, Outcome.ABANDONED)
            else:
                self._job_over()
        return unanswered

    # Jobs and their units

    def submit(self, call: Call) -> None:
        """A caller's request arrives."""
        kind = call.request.kind
        bad = self._random.randrange(kind.units)
        truth = JobTruth(call.job_id, kind.name)
        job = Job(call, truth, self._count, self._now_ms, bad)
        partitions = range(kind.partitions) if kind.partitions else (None,)
        job.units = [Unit(job, partition) for partition in partitions]
        job.left = len(job.units)
        self._count += 1
        self._jobs[job] = None
        if self._keep:
            self.job_truths.append(truth)
        priority = call.request.priority
        position = sum(other[0] <= -priority for other in self._submitted)
        self.account.enter(Queue.WAITING, self._clock(), job.left)
        self._info(
            "scheduler",
            _SCHEDULER,
            "job enqueued",
            job.id_field,
            ("proof_kind", kind.name),
            ("priority", _PRIORITY_NAMES[priority]),
            ("queue_position", str(position)),
        )
        heappush(self._submitted, (-priority, job.number, job))
        self._soon(self._dispatch)

    def _to(self, unit: Unit, queue: Queue | None) -> None:
        """The unit moves on, for as long as it counts."""
        if unit.queue is None:
            return
        at_ms = self._clock()
        self.account.leave(unit.queue, at_ms)
        unit.queue = queue
        if queue is not None:
            self.account.enter(queue, at_ms)

    def _decide(self, unit: Unit, outcome: Outcome) -> None:
        if unit.outcome is None:
            unit.outcome = outcome
            self._tally.units[outcome] += 1

    def _give_up(self, unit: Unit, outcome: Outcome) -> None:
        """A unit that has not started does not count any more, though the daemon may still be busy with it."""
        self._decide(unit, outcome)
        if unit.handed_to is not None:
            self.account.hand_over_ends(unit.handed_to, self._clock())
            unit.handed_to = None
        self._to(unit, None)

    def _fail(self, unit: Unit, *, siblings_go_on: bool = False) -> None:
        """A unit fails, and with it its job."""
        self._give_up(unit, Outcome.FAILED)
        for job in unit.batch or (unit.job,):
            self._tally.decide(job.truth, Outcome.FAILED)
            if not siblings_go_on:
                job.given_up = True
                for sibling in job.units:
                    if sibling.outcome is None and sibling.span is None:
                        self._give_up(sibling, Outcome.DROPPED)

    def _over(self, unit: Unit) -> None:
        """Nothing is left of the unit."""
        for job in unit.batch or (unit.job,):
            job.left -= 1
            if not job.left:
                del self._jobs[job]
                self._kind_users[job.kind.name] -= 1
                self._job_over()

    # Dispatch

    def _dispatch(self) -> None:
        while self._submitted and self._dispatching < self._setting.dispatchers:
            job = heappop(self._submitted)[2]
            self._info(
                "dispatcher",
                _SCHEDULER,
                "job dequeued for proving",
                job.id_field,
                ("proof_kind", job.kind.name),
            )
            if self._setting.max_batch > 1 and job.kind is POREP:
                self._collect(job)
            else:
                self._flush()
                self._dispatch_one(job)

    def _collect(self, job: Job) -> None:
        self._batch.append(job)
        if len(self._batch) >= self._setting.max_batch:
            self._flush()
        elif len(self._batch) == 1:
            self._at(self._setting.batch_wait_ms, partial(self._batch_timeout, self._batch_number))

    def _batch_timeout(self, number: int) -> None:
        if number == self._batch_number:
            self._flush()

    def _flush(self) -> None:
        jobs, self._batch = self._batch, []
        if jobs:
            self._batch_number += 1
        if len(jobs) == 1:
            self._dispatch_one(jobs[0])
        elif jobs:
            self._dispatch_batch(jobs)

    def _dispatch_one(self, job: Job) -> None:
        self._dispatching += 1
        self._kind_users[job.kind.name] += 1
        if job.kind.partitions is None:
            self._dispatch_whole(job.units[0])
        else:
            writer = f"dispatch-{job.number}"
            split = partial(self._split, job, writer)
            self._reserve_srs(job.kind, partial(self._with_srs, job.kind, writer, split))

    def _dispatch_batch(self, jobs: list[Job]) -> None:
        unit = Unit(jobs[0], None, batch=tuple(jobs))
        for job in jobs:
            self._kind_users[job.kind.name] += 1
            for other in job.units:
                self._to(other, None)
            job.units, job.left = [], 1
        jobs[0].units = [unit]
        self.account.enter(Queue.WAITING, self._clock())
        self._dispatching += 1
        fields = (("batch_size", str(len(jobs))), ("proof_kind", POREP.name), ("slot_size", "0"))
        self._in_dispatch(jobs[0], f"dispatch-{jobs[0].number}", "processing batch", *fields, batch=len(jobs))
        self._dispatch_whole(unit)

    def _dispatch_whole(self, unit: Unit) -> None:
        srs = partial(self._reserve_srs, unit.job.kind, partial(self._begin_whole, unit))
        self._acquire(unit.memory_gib, srs)

    def _split(self, job: Job, writer: str) -> None:
        what = "SnapDeals synthesis" if job.kind is SNAP else "synthesis"
        self._sequence += 1
        job.sequence = self._sequence
        self._in_dispatch(
            job,
            writer,
            f"dispatching per-partition {what} (budget-gated)",
            job.id_field,
            ("num_partitions", str(len(job.units))),
            ("budget_available_gib", str(self._free_gib)),
        )
        sequence = ("job_seq", str(job.sequence))
        self._in_dispatch(job, writer, "assigned pipeline sequence number", job.id_field, sequence)
        for unit in job.units:
            heappush(self._to_synthesize, (job.sequence, unit.partition or 0, unit))
        self._soon(self._feed)
        self._dispatched()

    def _dispatched(self) -> None:
        self._dispatching -= 1
        self._soon(self._dispatch)

    # Memory and parameters

    @property
    def _free_gib(self) -> int:
        return int(self._setting.budget_gib - self._used_gib)

    def _acquire(self, gib: float, then: Callable[[], None]) -> None:
        if gib > self._setting.budget_gib:
            message = "acquire request exceeds total budget — will block until possible"
            fields = (("amount_gib", str(int(gib))), ("total_gib", str(int(self._setting.budget_gib))))
            self.say(Tracing(self._now_ms, "dispatcher", "WARN", _MEMORY, message, fields))
        self._memory_waiting.append((gib, then))
        self._grant()

    def _release(self, gib: float) -> None:
        self._used_gib -= gib
        self._soon(self._grant)

    def _grant(self) -> None:
        """Whoever fits gets what he asked for, whether others have waited longer or not."""
        waiting, self._memory_waiting = self._memory_waiting, []
        for gib, then in waiting:
            if self._used_gib + gib > self._setting.budget_gib and gib <= self._setting.budget_gib:
                self._evict(self._used_gib + gib - self._setting.budget_gib)
            if self._used_gib + gib <= self._setting.budget_gib:
                self._used_gib += gib
                self._soon(then)
            else:
                self._memory_waiting.append((gib, then))

    def _evict(self, needed_gib: float) -> None:
        idle = [kind for name, kind in self._srs.items() if not self._kind_users[name]]
        if sum(kind.srs_gib for kind in idle) < needed_gib:
            return
        for kind in idle:
            if needed_gib <= 0:
                return
            del self._srs[kind.name]
            self._used_gib -= kind.srs_gib
            needed_gib -= kind.srs_gib
            freed = ("freed_gib", str(kind.srs_gib))
            available = ("budget_available_gib", str(self._free_gib))
            circuit = ("circuit_id", kind.circuit_id)
            self._info("dispatcher", _SRS_MANAGER, "SRS evicted", circuit, freed, available)
            entry = ("entry", f"srs:{kind.circuit_id}")
            self._info("dispatcher", _ENGINE, "evicted for memory pressure", entry, freed)

    def _reserve_srs(self, kind: Kind, then: Callable[[], None]) -> None:
        """Memory for a kind's parameters, where they are not there yet."""
        if kind.name in self._srs or kind.name in self._srs_loading:
            then()
        elif kind.name in self._srs_wanted:
            self._srs_wanted[kind.name].append(then)
        else:
            self._srs_wanted[kind.name] = [then]
            self._acquire(kind.srs_gib, partial(self._srs_reserved, kind))

    def _srs_reserved(self, kind: Kind) -> None:
        self._srs_loading[kind.name] = []
        for then in self._srs_wanted.pop(kind.name):
            then()

    def _with_srs(self, kind: Kind, writer: str, then: Callable[[], None]) -> None:
        if kind.name in self._srs:
            then()
            return
        waiting = self._srs_loading[kind.name]
        waiting.append(then)
        if len(waiting) == 1:
            path = ("path", f"/data/zk/params/{kind.params}")
            fields = (("circuit_id", kind.circuit_id), path, ("file_size_gib", str(kind.srs_gib)))
            self._info(writer, _SRS_MANAGER, "loading SRS from disk", *fields)
            self._at(self._world.spread(kind.srs_ms), partial(self._srs_done, kind, writer, self._now_ms))

    def _srs_done(self, kind: Kind, writer: str, since_ms: float) -> None:
        self._srs[kind.name] = kind
        self._info(
            writer,
            _SRS_MANAGER,
            "SRS loaded successfully",
            ("circuit_id", kind.circuit_id),
            ("elapsed_ms", str(self._logged(self._now_ms - since_ms))),
            ("budget_used_gib", str(int(self._used_gib))),
            ("budget_available_gib", str(self._free_gib)),
        )
        for then in self._srs_loading.pop(kind.name):
            then()

    # Synthesis

    def _feed(self) -> None:
        """Hands the next unit to an idle synthesis worker, once there is memory for it."""
        target = self._setting.queue_target
        paced = target > 0 and len(self._ready) >= target
        if self._feeding or paced or not self._to_synthesize or not self._idle_synth:
            return
        self._feeding = True
        unit = heappop(self._to_synthesize)[2]
        self._acquire(unit.memory_gib, partial(self._begin_synthesis, unit))

    def _begin_synthesis(self, unit: Unit) -> None:
        self._feeding = False
        job = unit.job
        self._soon(self._feed)
        if job.given_up:
            fields = (job.id_field, unit.partition_field)
            self._info("feeder", _ENGINE, "skipping synthesis for failed job", *fields)
            self._release(unit.memory_gib)
            self._over(unit)
            return
        slot = self._idle_synth.popleft()
        writer = f"synth-{slot}"
        self._to(unit, Queue.SYNTH)
        self._timeline(writer, "SYNTH_START", unit, f"partition={unit.partition}")
        if job.fault is not None and self._random.random() < 0.2:
            size, code = ("size_gib", "2.4"), ("cuda_err", "2")
            for message, *more in (("cudaHostAlloc failed", code), ("pinned pool: cudaHostAlloc failed",)):
                self.say(Tracing(self._now_ms, writer, "WARN", PINNED_POOL, message, (size, *more)))
        self._synthesize(unit, partial(self._synthesized_partition, unit, slot))

    def _begin_whole(self, unit: Unit) -> None:
        writer = f"dispatch-{unit.job.number}"
        self._to(unit, Queue.SYNTH)
        self._timeline(writer, "SYNTH_START", unit, f"kind={unit.job.kind.name}")
        # A whole proof's parameters are loaded inside its synthesis; a partition's are there already.
        synthesize = partial(self._synthesize, unit, partial(self._synthesized_whole, unit, writer))
        self._with_srs(unit.job.kind, writer, synthesize)

    def _synthesize(self, unit: Unit, then: Callable[[float], None]) -> None:
        self._synthesizing += 1
        mean_ms = unit.job.kind.synth_ms * (1 + self._setting.contention * (self._synthesizing - 1))
        if unit.batch:
            mean_ms *= 1 + 0.2 * len(unit.batch)
        duration_ms = self._world.spread(mean_ms)
        self._at(duration_ms, partial(then, duration_ms))

    def _synthesized_partition(self, unit: Unit, slot: int, duration_ms: float) -> None:
        job, writer = unit.job, f"synth-{slot}"
        self._synthesizing -= 1
        self._idle_synth.append(slot)
        self._soon(self._feed)
        if unit.fault in (Fault.SYNTHESIS, Fault.SYNTHESIS_PANIC):
            panics = unit.fault is Fault.SYNTHESIS_PANIC
            error = ("error", _PANIC if panics else _SYNTHESIS_ERROR)
            self._fail(unit)
            message = "partition synthesis task panicked" if panics else "partition synthesis failed"
            self._error(writer, message, error, job.id_field, unit.partition_field)
            self._release(unit.memory_gib)
            self._over(unit)
            return
        elapsed = ("synth_ms", str(self._logged(duration_ms)))
        job.synth_ms += duration_ms
        self._to(unit, Queue.READY)
        self._timeline(writer, "SYNTH_END", unit, f"{unit.partition_prefix}synth_ms={elapsed[1]}")
        message = "partition synthesis complete, pushing to GPU queue"
        self._info(writer, _ENGINE, message, job.id_field, unit.partition_field, elapsed)
        self._queue(unit, writer, f"partition={unit.partition}", (job.sequence, unit.partition or 0))

    def _synthesized_whole(self, unit: Unit, writer: str, duration_ms: float) -> None:
        job, batch = unit.job, len(unit.batch) or 1
        self._synthesizing -= 1
        if unit.fault in (Fault.SYNTHESIS, Fault.SYNTHESIS_PANIC):
            panics = unit.fault is Fault.SYNTHESIS_PANIC
            error = ("error", _PANIC if panics else _SYNTHESIS_ERROR)
            self._fail(unit)
            message = "synthesis task panicked" if panics else "synthesis failed"
            self._in_dispatch(job, writer, message, error, level="ERROR", batch=batch)
            self._release(unit.memory_gib)
            self._over(unit)
        else:
            elapsed = ("synth_ms", str(self._logged(duration_ms)))
            for member in unit.batch or (job,):
                member.synth_ms += duration_ms
            self._to(unit, Queue.READY)
            self._timeline(writer, "SYNTH_END", unit, f"synth_ms={elapsed[1]}")
            circuit = ("circuit_id", job.kind.circuit_id)
            fields = (elapsed, circuit, ("batch_size", str(batch)), ("sectors", str(batch)))
            self._in_dispatch(job, writer, "synthesis complete, sending to GPU", *fields, batch=batch)
            self._queue(unit, writer, "monolithic", (0, 0))
        self._dispatched()

    def _queue(self, unit: Unit, writer: str, detail: str, rank: tuple[int, int]) -> None:
        if self._setting.generation is Generation.SPLIT:
            self._timeline(writer, "GPU_QUEUE", unit, detail)
            if unit.partition is None:
                self._overwrite()
        else:
            # A channel: first come, first served.
            self._timeline(writer, "CHAN_SEND", unit, detail)
            rank = (0, 0)
        self._count += 1
        heappush(self._ready, (*rank, self._count, unit))
        self._wake_workers()

    def _overwrite(self) -> None:
        """All whole proofs share one key of the queue: a new one silently takes the place of one that waits."""
        for entry in self._ready:
            unit = entry[3]
            if unit.partition is None:
                self._ready.remove(entry)
                self._ready.sort()
                self._give_up(unit, Outcome.LOST)
                self._tally.decide(unit.job.truth, Outcome.LOST)
                self._release(unit.memory_gib)
                self._over(unit)
                return

    # GPU

    def _wake_workers(self) -> None:
        while self._idle_workers and self._woken < len(self._ready):
            self._woken += 1
            self._soon(partial(self._pick_up, self._idle_workers.popleft()))

    def _pick_up(self, worker: _Worker) -> None:
        self._woken -= 1
        if not self._ready:
            self._idle_workers.appendleft(worker)
            return
        unit = heappop(self._ready)[3]
        if unit.queue is not None:
            self._to(unit, None)
            unit.handed_to = worker.gpu
            self.account.pick_up(worker.gpu, self._clock())
        self._timeline(worker.writer, "GPU_PICKUP", unit, self._on_worker(worker, unit))
        self._soon(self._feed)
        self._lock_tracker(0.02, partial(self._check, worker, unit, self._now_ms))

    @staticmethod
    def _on_worker(worker: _Worker, unit: Unit) -> str:
        partition_part = "" if unit.partition is None else f",partition={unit.partition}"
        return f"worker={worker.worker_id}{partition_part}"

    def _lock_tracker(self, hold_ms: float, then: Callable[[], None]) -> None:
        """Waits for the lock of the daemon's records, first come, first served, and keeps it for some time."""
        at_ms = max(self._now_ms, self._tracker_free_ms)
        self._tracker_free_ms = at_ms + hold_ms
        self._at(at_ms - self._now_ms, then)

    def _check(self, worker: _Worker, unit: Unit, since_ms: float) -> None:
        if unit.partition is not None and unit.job.given_up:
            fields = (unit.job.id_field, ("partition", unit.partition_debug))
            self._in_worker(worker, unit, "skipping GPU prove for failed partitioned job", *fields)
            self._release(unit.memory_gib)
            self._over(unit)
            self._free(worker)
            return
        waited = str(self._logged(self._now_ms - since_ms))
        if self._setting.generation is not Generation.SINGLE:
            self._in_worker(
                worker,
                unit,
                "GPU_TIMING hot_path pre-prove overhead",
                ("worker_id", str(worker.worker_id)),
                ("partition", unit.partition_debug),
                ("status_ms", "0"),
                ("fail_check_ms", waited),
                ("mark_busy_ms", "0"),
                ("total_overhead_ms", waited),
            )
        proving = _Proving(unit, worker, self._now_ms)
        at_ms = self._clock()
        if unit.handed_to is not None:
            self.account.hand_over_ends(unit.handed_to, at_ms)
            unit.handed_to = None
        unit.span = self.account.start(worker.gpu, unit.job.truth, at_ms)
        self._timeline(worker.writer, "GPU_START", unit, self._on_worker(worker, unit))
        pre_lock_ms = self._world.spread(self._setting.pre_lock_ms * unit.size)
        self._at(pre_lock_ms, partial(self._ready_to_lock, proving))

    def _end_span(self, proving: _Proving) -> None:
        span = proving.unit.span
        if span is not None:
            self.account.end(proving.worker.gpu, span, self._clock())

    def _ready_to_lock(self, proving: _Proving) -> None:
        unit, worker = proving.unit, proving.worker
        if unit.fault in (Fault.PROVE_START, Fault.PROVE_START_PANIC):
            panics = unit.fault is Fault.PROVE_START_PANIC
            if self._setting.generation is not Generation.SINGLE:
                self._returned(proving)
            self._gpus.troubles.append(Trouble(self._now_ms, worker.gpu, _XID_CUDA))
            self._end_span(proving)
            # What the daemon keeps of a partitioned job does not learn of it.
            self._fail(unit, siblings_go_on=True)
            message = "GPU prove start task panicked" if panics else "GPU prove start failed"
            self._in_worker(worker, unit, message, ("error", _PANIC if panics else _CUDA_ERROR), level="ERROR")
            self._release(unit.memory_gib)
            self._over(unit)
            self._free(worker)
            return
        mutex = self._mutexes[worker.gpu]
        locked = partial(self._locked, proving, self._now_ms)
        if mutex.held:
            mutex.waiting.append(locked)
        else:
            mutex.held = True
            locked()

    def _locked(self, proving: _Proving, waited_since_ms: float) -> None:
        setting, writer, size = self._setting, proving.worker.writer, proving.unit.size
        pre_lock, waited = waited_since_ms - proving.start_ms, self._now_ms - waited_since_ms
        self._kernel(writer, f"pre_lock_cpu_ms={self._logged(pre_lock)} mutex_wait_ms={self._logged(waited)}")
        ntt_ms = self._world.spread(0.66 * setting.kernel_ms * size)
        waits = self._random.random() < setting.barrier_probability
        barrier_ms = self._random.uniform(0, 2) * setting.barrier_ms * size if waits else 0.0
        add_ms = self._world.spread(0.25 * setting.kernel_ms * size)
        tail_ms = self._world.spread(0.09 * setting.kernel_ms * size)
        total_ms = ntt_ms + barrier_ms + add_ms + tail_ms
        logged = self._logged
        phases = (
            (ntt_ms, f"gpu_tid=0 ntt_msm_h_ms={logged(ntt_ms)}"),
            (ntt_ms + barrier_ms, f"gpu_tid=0 barrier_wait_ms={logged(barrier_ms)}"),
            (total_ms - tail_ms, f"gpu_tid=0 batch_add_ms={logged(add_ms)}"),
            (total_ms, f"gpu_tid=0 tail_msm_ms={logged(tail_ms)} gpu_total_ms={logged(total_ms)}"),
        )
        for after_ms, text in phases:
            self._at(after_ms, partial(self._kernel, writer, text))
        start_ms = self._now_ms
        barrier = (start_ms + ntt_ms, start_ms + ntt_ms + barrier_ms)
        proving.kernels = Kernels(start_ms, start_ms + total_ms, barrier)
        self._gpus.run(proving.worker.gpu, proving.kernels)
        self._at(total_ms + 0.3, partial(self._unlock, proving, logged(total_ms) - logged(barrier_ms)))

    def _unlock(self, proving: _Proving, kernel_ms: int) -> None:
        unit, worker, kernels = proving.unit, proving.worker, proving.kernels
        assert kernels is not None
        mutex = self._mutexes[worker.gpu]
        held_ms = self._now_ms - kernels.start_ms
        if mutex.waiting:
            self._soon(mutex.waiting.popleft())
        else:
            mutex.held = False
        prepared_ms = held_ms * self._random.uniform(0.5, 0.8)
        started_ms = self._now_ms - proving.start_ms
        self._kernel(worker.writer, f"prep_msm_ms={self._logged(prepared_ms)}")
        held, started = self._logged(held_ms), self._logged(started_ms)
        self._kernel(worker.writer, f"mutex_held_ms={held} total_start_fn_ms={started}")
        if self._setting.kernel_lines:
            self.account.kernels_ran(worker.gpu, kernel_ms)
        if self._setting.generation is not Generation.SINGLE:
            self._returned(proving)
        self._release(unit.released_gib)
        finish_ms = self._world.spread(self._setting.finish_ms * unit.size, 0.3)
        self._at(finish_ms, partial(self._finish, proving, finish_ms))
        if self._setting.generation is Generation.SPLIT:
            # The rest is CPU work that the worker doesn't wait for: its next GPU_START comes before this GPU_END.
            self._free(worker)

    def _returned(self, proving: _Proving) -> None:
        wall = str(self._logged(self._now_ms - proving.start_ms))
        self._in_worker(
            proving.worker,
            proving.unit,
            "GPU_TIMING prove_start returned",
            ("worker_id", str(proving.worker.worker_id)),
            ("partition", proving.unit.partition_debug),
            ("total_pre_prove_ms", wall),
            ("spawn_blocking_wall_ms", wall),
        )

    def _free(self, worker: _Worker) -> None:
        self._idle_workers.append(worker)
        self._wake_workers()

    def _finish(self, proving: _Proving, finish_ms: float) -> None:
        unit, worker = proving.unit, proving.worker
        writer = f"finalizer-{unit.job.number}-{unit.partition_debug}"
        circuits = str(10 * len(unit.batch) or 1)
        self._kernel(writer, f"b_g2_msm_ms={self._logged(finish_ms)} num_circuits={circuits}")
        gpu_ms = self._now_ms - proving.start_ms
        if unit.fault not in (Fault.PROVING, Fault.PROVING_PANIC):
            self._end_span(proving)
            self._decide(unit, Outcome.PROVED)
            detail = f"{self._on_worker(worker, unit)},gpu_ms={self._logged(gpu_ms)}"
            self._timeline(writer, "GPU_END", unit, detail)
        self._release(unit.memory_gib - unit.released_gib)
        slow = self._random.random() < self._setting.slow_trim_probability
        trim_ms = self._world.spread(self._setting.slow_trim_ms if slow else self._setting.trim_ms, 0.9)
        self._lock_tracker(trim_ms, partial(self._process, proving, writer, gpu_ms, self._now_ms, trim_ms))

    def _process(self, proving: _Proving, writer: str, gpu_ms: float, since_ms: float, trim_ms: float) -> None:
        """The daemon takes note of what became of the unit, with its records locked."""
        unit, worker, job = proving.unit, proving.worker, proving.unit.job
        waited_ms = self._now_ms - since_ms
        if unit.fault in (Fault.PROVING, Fault.PROVING_PANIC):
            panics = unit.fault is Fault.PROVING_PANIC
            self._end_span(proving)
            self._fail(unit)
            error = ("error", _PANIC if panics else _FINISH_ERROR)
            what = "GPU proving" if unit.partition is None else "partition GPU proving"
            message = f"{what} task panicked" if panics else f"{what} failed"
            self._error(
                writer, message, error, *(() if unit.partition is None else (job.id_field, unit.partition_field))
            )
        elif unit.partition is None:
            self._whole_proved(unit, writer, gpu_ms)
        elif job.given_up:
            fields = (job.id_field, unit.partition_field)
            self._info(writer, _ENGINE, "discarding GPU result for failed job", *fields)
        else:
            self._partition_proved(unit, writer, gpu_ms)
        if self._setting.generation is not Generation.SPLIT:
            self._free(worker)
        self._at(trim_ms, partial(self._processed, unit, worker, writer, waited_ms, trim_ms))

    def _processed(self, unit: Unit, worker: _Worker, writer: str, waited_ms: float, trim_ms: float) -> None:
        if self._setting.generation is Generation.SPLIT:
            what = "monolithic" if unit.partition is None else "partition"
            partition = () if unit.partition is None else (("partition", unit.partition_debug),)
            self._info(
                writer,
                _ENGINE,
                f"FIN_TIMING finalizer {what}",
                ("worker_id", str(worker.worker_id)),
                *partition,
                ("finish_ms", "0"),
                ("drop_res_ms", "0"),
                ("lock_wait_ms", str(self._logged(waited_ms))),
                ("process_ms", str(self._logged(trim_ms))),
                ("total_ms", str(self._logged(waited_ms + trim_ms))),
            )
        self._over(unit)

    def _partition_proved(self, unit: Unit, writer: str, gpu_ms: float) -> None:
        job = unit.job
        job.proved += 1
        job.gpu_ms += gpu_ms
        complete = job.proved == len(job.units)
        spent, filled = ("gpu_ms", str(self._logged(gpu_ms))), ("filled", str(int(complete)))
        self._info(writer, _ENGINE, "partition GPU prove complete", job.id_field, unit.partition_field, spent, filled)
        trimmed = ("malloc_trim_ms", "0")
        message = "FIN_TIMING malloc_trim (success path)"
        self._info(writer, _ENGINE, message, job.id_field, unit.partition_field, trimmed)
        if complete:
            message = "Phase 7: all partitions complete, proof assembled"
            self._info(writer, _ENGINE, message, job.id_field, *self._times(job))
            self._check_proof(job, writer, "Phase 7: PoRep proof")

    def _times(self, job: Job) -> Fields:
        return (
            ("proof_len", str(job.kind.proof_bytes)),
            ("total_ms", str(self._logged(self._now_ms - job.enqueued_ms))),
            ("synth_ms", str(self._logged(job.synth_ms))),
            ("gpu_ms", str(self._logged(job.gpu_ms))),
        )

    def _whole_proved(self, unit: Unit, writer: str, gpu_ms: float) -> None:
        jobs = unit.batch or (unit.job,)
        for job in jobs:
            job.gpu_ms += gpu_ms
        if not unit.batch:
            length, total, synth, gpu = self._times(unit.job)
            message = "proof completed successfully (pipeline)"
            self._info(writer, _ENGINE, message, length, total, ("queue_ms", "0"), synth, gpu)
            self._check_proof(unit.job, writer, "Pipeline single-sector PoRep proof")
            return
        size = ("total_proof_bytes", str(len(jobs) * POREP.proof_bytes))
        _, _, synth, gpu = self._times(unit.job)
        sectors = ("num_sectors", str(len(jobs)))
        self._info(writer, _ENGINE, "batched proof completed — splitting results", size, sectors, synth, gpu)
        for index, job in enumerate(jobs):
            length, total, _, _ = self._times(job)
            sector = ("sector_idx", str(index))
            self._info(writer, _ENGINE, "sector proof delivered from batch", sector, job.id_field, length, total)
            self._check_proof(job, writer, "Batched PoRep proof", sector)

    def _check_proof(self, job: Job, writer: str, what: str, *extra: tuple[str, str]) -> None:
        if job.kind is not POREP or job.fault not in (Fault.SELF_CHECK, Fault.SELF_CHECK_ERROR):
            self._tally.decide(job.truth, Outcome.PROVED)
            if job.kind is POREP:
                self._info(writer, _ENGINE, f"{what} self-check PASSED", job.id_field, *extra)
            return
        self._tally.decide(job.truth, Outcome.FAILED)
        if job.fault is Fault.SELF_CHECK_ERROR:
            message = f"{what} self-check error — proof will NOT be returned to caller"
            self._error(writer, message, job.id_field, *extra, ("error", "vanilla proof: unexpected end of input"))
            return
        sector, miner = ("sector", str(job.call.sector)), ("miner", str(MINER))
        length = ("proof_len", str(job.kind.proof_bytes))
        message = f"{what} self-check FAILED — proof will NOT be returned to caller"
        self._error(writer, message, job.id_field, *extra, length, sector, miner)
        if what.startswith("Phase 7"):
            valid = [p for p in range(job.kind.units) if p != job.bad_partition]
            message = "Phase 7: per-partition verification results (invalid partitions produced bad proofs)"
            invalid = ("invalid_partitions", str([job.bad_partition]))
            self._error(writer, message, job.id_field, ("valid_partitions", str(valid)), invalid)


def shutdown_lines(time_ms: float) -> tuple[Tracing, ...]:
    """What an engine says last when it is interrupted, and what a killed one doesn't."""
    return (
        Tracing(time_ms, "main", "INFO", _DAEMON, "received SIGINT, shutting down", ()),
        Tracing(time_ms + 0.05, "main", "INFO", _ENGINE, "shutting down cuzk engine", ()),
    )
