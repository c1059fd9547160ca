"""A discrete-event model of the prover, whose log is an output of its state.

Callers submit jobs to a daemon, which may end and be started again. An engine queues them by priority, dispatches them
(after their kind's parameters, the SRS, are loaded), splits them into units, synthesizes these with a pool of CPU
workers as far as memory allows, and proves them with the workers of each GPU, which share it by a mutex. Beside the log
stands what was true (`truth`). Pure: seeded, simulated milliseconds, no I/O and no clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

from cuzk_agent.demo.lines import Fields, Kernel, Line, Timeline, Tracing
from cuzk_agent.demo.scenario import (
    POREP,
    SNAP,
    WINDOW,
    WINNING,
    Burst,
    End,
    Fault,
    Generation,
    Kind,
    Life,
    Priority,
    Request,
    Scenario,
)
from cuzk_agent.demo.truth import Account, GpuTruth, JobTruth, KernelRun, Outcome, Queue, Span, Truth, add_waste

_ENGINE = "cuzk_core::engine"
_SCHEDULER = "cuzk_core::scheduler"
_SRS_MANAGER = "cuzk_core::srs_manager"
_MEMORY = "cuzk_core::memory"
_PINNED_POOL = "cuzk_core::pinned_pool"
_DAEMON = "cuzk_daemon"

_MINER = 1000
_FIRST_SECTOR = 2041
_BATCH_GIB, _BATCH_RELEASED_GIB = 136.0, 125.0
_KERNELS_MAX = 256
_QUIET_MS = 180_000
"""How long the daemon is left running when all is done."""
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
_XID_CUDA, _XID_LOST = 31, 79
_PANIC = 'task 4711 panicked with message "index out of bounds: the len is 8 but the index is 8"'


@dataclass(slots=True, eq=False)
class _Call:
    """A caller that waits for a job."""

    request: Request
    job_id: str
    sector: int


@dataclass(slots=True, eq=False)
class _Job:
    call: _Call
    truth: JobTruth
    number: int
    """In the order in which the engine got them."""
    enqueued_ms: float
    bad_partition: int
    units: list[_Unit] = field(default_factory=list)
    left: int = 0
    """Units that are still somewhere in the engine."""
    sequence: int = 0
    """In the order of dispatch, from 1 on."""
    proved: int = 0
    given_up: bool = False
    """The daemon itself knows that it failed."""
    synth_ms: float = 0
    gpu_ms: float = 0

    @property
    def kind(self) -> Kind:
        return self.call.request.kind

    @property
    def job_id(self) -> str:
        return self.call.job_id

    @property
    def fault(self) -> Fault | None:
        return self.call.request.fault

    @property
    def id_field(self) -> tuple[str, str]:
        return ("job_id", self.call.job_id)


@dataclass(slots=True, eq=False)
class _Unit:
    job: _Job
    partition: int | None
    queue: Queue | None = Queue.WAITING
    """Where it counts; None once it has been picked up, or given up with its job."""
    handed_to: int | None = None
    """The GPU whose worker has picked it up and not started it."""
    span: Span | None = None
    outcome: Outcome | None = None
    batch: tuple[_Job, ...] = ()
    """The jobs that are proved by it together."""

    @property
    def fault(self) -> Fault | None:
        return self.job.fault if self.partition in (None, self.job.bad_partition) else None

    @property
    def size(self) -> float:
        """Its GPU work, relative to a PoRep partition's."""
        return self.job.kind.gpu_scale * (8 * len(self.batch) if self.batch else 1)

    @property
    def memory_gib(self) -> float:
        return _BATCH_GIB if self.batch else self.job.kind.memory_gib

    @property
    def released_gib(self) -> float:
        return _BATCH_RELEASED_GIB if self.batch else self.job.kind.released_gib

    @property
    def partition_prefix(self) -> str:
        """As it begins the detail of a synthesis event."""
        return "" if self.partition is None else f"partition={self.partition},"

    @property
    def partition_debug(self) -> str:
        return "None" if self.partition is None else f"Some({self.partition})"

    @property
    def partition_field(self) -> tuple[str, str]:
        return ("partition", str(self.partition or 0))


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
class Kernels:
    """One unit's kernels on their GPU, known from their beginning."""

    start_ms: float
    end_ms: float
    barrier_ms: tuple[float, float]
    """The stretch in which they wait for the CPU; it may be empty."""

    def cut(self, at_ms: float) -> None:
        """Their process ends."""
        self.end_ms = min(self.end_ms, at_ms)
        start_ms, end_ms = self.barrier_ms
        self.barrier_ms = (min(start_ms, at_ms), min(end_ms, at_ms))


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something befalls a GPU."""

    time_ms: float
    gpu: int
    xid: int | None
    """The error that the driver reports."""
    present: bool = True
    """False: it has fallen off the bus."""


@dataclass(slots=True, eq=False)
class _Proving:
    """One unit on a GPU, from GPU_START on."""

    unit: _Unit
    worker: _Worker
    start_ms: float
    kernels: Kernels | None = None


class Model:
    """Callers, and the daemon's processes one after another. Iterate `lines()` once."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        speed: float = 1.0,
        rounds: int | None = None,
        start_unix_ms: float = 0,
        keep: bool = True,
    ) -> None:
        """`rounds`: how many times the scenario's bursts are gone through before the daemon is shut down; None: for
        ever. At speed 10 an engine's clock shows a tenth of the time that everything takes, and so does the log.
        Without `keep` memory is bounded, and `truth` lacks what is long past: gaps, kernels, waste."""
        self._keep = keep
        self.setting = scenario.setting
        self.random = Random(seed)
        self.speed = speed
        self.now_ms = 0.0
        self.said: list[Line] = []
        self.kernels: list[list[Kernels]] = [[] for _ in range(scenario.setting.gpus)]
        """For each GPU all that have run or run now, one after another."""
        self.troubles: deque[Trouble] = deque()
        """What befell the GPUs, for whoever simulates them."""
        self.units = Counter[Outcome]()
        self._scenario = scenario
        self._rounds = rounds
        self._start_unix_ms = start_unix_ms
        self._due: list[tuple[float, int, Callable[[], None], Engine | None]] = []
        self._happened = 0
        self._lines = 0
        self._bursts = 0
        self._left = 0
        """Jobs of the present burst that have not ended, whether submitted or not."""
        self._to_submit: deque[Request] = deque()
        """Of the present burst, those that wait for others to end."""
        self._sectors = 0
        self._lives = 0
        self._lost_gpu: int | None = None
        self._engine: Engine | None = None
        self._unserved: list[_Call] = []
        """Calls that no daemon has or had taken to its end: they are made again once there is one."""
        self._proved_ids: set[str] = set()
        self._past: list[tuple[list[GpuTruth], list[JobTruth]]] = []
        self._events: Counter[str] = Counter()
        self._jobs: Counter[tuple[str, Outcome]] = Counter()

    def lines(self, until_ms: float | None = None, min_lines: int | None = None) -> Iterator[Line]:
        """The log in the order in which things happen, up to a time of the log or until there are so many lines."""
        limit_ms = math.inf if until_ms is None else until_ms * self.speed
        self._start()
        yield from self._take_said()
        while self._due and self._due[0][0] <= limit_ms and (min_lines is None or self._lines < min_lines):
            at_ms, _, happen, engine = heappop(self._due)
            if engine is not None and engine is not self._engine:
                continue
            self.now_ms = max(self.now_ms, at_ms)
            happen()
            if self.said:
                yield from self._take_said()

    def truth(self, at_ms: int | None = None) -> Truth:
        """What was true up to the last line that bears a time, or up to a later time of the engine's clock."""
        gpus = {gpu: GpuTruth() for gpu in range(self.setting.gpus)}
        running = self._engine
        lives = list(self._past)
        if running is not None:
            until_ms = running.last_line_ms if at_ms is None else max(at_ms, running.last_line_ms)
            lives.append((running.account.truth(until_ms), running.job_truths))
        for found, jobs in lives:
            for gpu, truth in enumerate(found):
                gpus[gpu].add(truth)
            add_waste(gpus, jobs)
        open_jobs = sum(job.outcome is None for job in running.job_truths) if running else 0
        return Truth(
            gpus,
            dict(self._events),
            dict(self.units),
            dict(self._jobs),
            open_jobs,
            self._lives,
            tuple(self._kernel_runs()),
        )

    def _kernel_runs(self) -> Iterator[KernelRun]:
        for gpu, kernels in enumerate(self.kernels):
            for run in kernels:
                if run.end_ms <= self.now_ms:
                    start_ms, end_ms = run.barrier_ms
                    barrier = (self._unix_s(start_ms), self._unix_s(end_ms)) if end_ms > start_ms else None
                    yield KernelRun(gpu, self._unix_s(run.start_ms), self._unix_s(run.end_ms), barrier)

    def _unix_s(self, time_ms: float) -> float:
        return (self._start_unix_ms + time_ms / self.speed) / 1000

    # Time

    def later(self, delay_ms: float, happen: Callable[[], None], engine: Engine | None = None) -> None:
        """Unless its engine has ended by then."""
        self._happened += 1
        heappush(self._due, (self.now_ms + delay_ms, self._happened, happen, engine))

    def say(self, line: Line) -> None:
        """A line is written, if its kind is."""
        if isinstance(line, Kernel) and not self.setting.kernel_lines:
            return
        self.said.append(line)
        # A line takes a moment, so that no two bear the same time.
        self.now_ms += self.random.uniform(0.01, 0.04)
        if isinstance(line, Timeline):
            self._events[line.event] += 1
        if isinstance(line, Timeline) and self.setting.level == "INFO":
            for number in range(self.setting.noise):
                fields = (("size_gib", "2.4"), ("free_remaining", str(number)))
                noise = Tracing(self.now_ms, f"noise-{number}", "INFO", _PINNED_POOL, "pinned pool: checkin", fields)
                self.said.append(noise)

    def _take_said(self) -> list[Line]:
        said, self.said = self.said, []
        self._lines += len(said)
        return said

    # The daemon's lives

    def _start(self) -> None:
        self._lives += 1
        self._engine = engine = Engine(self, keep=self._keep)
        if self._lost_gpu is not None:
            self.troubles.append(Trouble(self.now_ms, self._lost_gpu, None))
            self._lost_gpu = None
        if self._lives <= len(self._scenario.lives):
            life = self._scenario.lives[self._lives - 1]
            self.later(life.for_ms, partial(self._end, life), engine)
        calls, self._unserved = self._unserved, []
        for index, call in enumerate(calls):
            self.later(2_000 + 150 * index, partial(self._serve, call))
        if not self._bursts:
            self._next_burst()

    def _end(self, life: Life) -> None:
        if life.loses_gpu:
            self._lost_gpu = self.random.randrange(self.setting.gpus)
            self.troubles.append(Trouble(self.now_ms, self._lost_gpu, _XID_LOST, present=False))
        self._stop(life.end)
        self.later(life.pause_ms, self._start)

    def _stop(self, end: End) -> None:
        engine = self._engine
        if engine is None:
            return
        if end is End.INTERRUPTED:
            for line in shutdown_lines(self.now_ms):
                engine.say(line)
        self._engine = None
        self._unserved += engine.end()
        for kernels in self.kernels:
            if kernels:
                kernels[-1].cut(self.now_ms)
        if self._keep:
            self._past.append((engine.account.truth(engine.last_line_ms), engine.job_truths))

    # Callers

    def _next_burst(self) -> None:
        bursts = self._scenario.bursts
        if self._rounds is not None and self._bursts >= self._rounds * len(bursts):
            self.later(_QUIET_MS, partial(self._stop, End.INTERRUPTED))
            return
        burst = bursts[self._bursts % len(bursts)]
        self._bursts += 1
        self._left = len(burst.requests)
        self.later(self.spread(burst.pause_ms), partial(self._begin_burst, burst))

    def _begin_burst(self, burst: Burst) -> None:
        at_once = len(burst.requests) if burst.in_flight is None else burst.in_flight
        for request in burst.requests[:at_once]:
            self.later(request.after_ms, partial(self._submit, request))
        self._to_submit = deque(burst.requests[at_once:])

    def _submit(self, request: Request) -> None:
        sector = _FIRST_SECTOR + self._sectors
        self._sectors += 1
        call = _Call(request, self._job_id(request.kind, sector), sector)
        self._serve(call)
        if request.again_after_ms is not None:
            self._left += 1
            self.later(request.again_after_ms, partial(self._serve, _Call(request, call.job_id, sector)))

    def _job_id(self, kind: Kind, sector: int) -> str:
        prefix = f"{kind.job_prefix}-{_MINER}"
        if kind is WINNING:
            return f"{prefix}-{self.random.getrandbits(64):016x}"
        if kind is WINDOW:
            a, b, c = (self.random.randrange(256) for _ in range(3))
            return f"{prefix}-{sector % 48}-[{a} {b} {c} 0 17 9 201 77]"
        return f"{prefix}-{sector}"

    def _serve(self, call: _Call) -> None:
        if self._engine is None:
            self._unserved.append(call)
        else:
            self._engine.submit(call)

    def decided(self, job: JobTruth, outcome: Outcome) -> None:
        """A job's outcome is known."""
        if job.outcome is not None:
            return
        job.outcome = outcome
        self._jobs[job.kind, outcome] += 1
        if outcome is Outcome.PROVED:
            job.repeated = job.job_id in self._proved_ids
            if self._keep:
                self._proved_ids.add(job.job_id)

    def ran(self, gpu: int, kernels: Kernels) -> None:
        """Kernels begin on a GPU."""
        of_gpu = self.kernels[gpu]
        of_gpu.append(kernels)
        if not self._keep and len(of_gpu) > _KERNELS_MAX:
            # A list of its own: another thread may be reading the old one.
            self.kernels[gpu] = of_gpu[-_KERNELS_MAX // 2 :]

    def over(self) -> None:
        """Nothing is left of a job."""
        self._left -= 1
        if self._to_submit:
            self.later(self.spread(150), partial(self._submit, self._to_submit.popleft()))
        elif not self._left:
            self._next_burst()

    def spread(self, mean_ms: float, fraction: float | None = None) -> float:
        """A duration about as long as `mean_ms`."""
        fraction = self.setting.spread if fraction is None else fraction
        return mean_ms * self.random.uniform(1 - fraction, 1 + fraction)


class Engine:
    """One life of the daemon's engine."""

    def __init__(self, model: Model, *, keep: bool) -> None:
        self._model = model
        self._keep = keep
        self._setting = setting = model.setting
        self._random = model.random
        self._start_ms = 0.0
        self.account = Account(setting.gpus, keep=keep)
        self.last_line_ms = 0
        """When the last line was written that bears a time, on the engine's clock."""
        self.job_truths: list[JobTruth] = []
        self._jobs: dict[_Job, None] = {}
        """Those of which something is left."""
        self._count = 0

        self._submitted: list[tuple[int, int, _Job]] = []
        """By priority, then by age."""
        self._dispatching = 0
        self._sequence = 0
        self._batch: list[_Job] = []
        self._batch_number = 0

        self._used_gib = 0.0
        self._memory_waiting: list[tuple[float, Callable[[], None]]] = []
        self._srs: dict[str, Kind] = {}
        self._srs_wanted: dict[str, list[Callable[[], None]]] = {}
        self._srs_loading: dict[str, list[Callable[[], None]]] = {}
        self._kind_users: Counter[str] = Counter()

        self._to_synthesize: list[tuple[int, int, _Unit]] = []
        """By job, oldest first, then by partition."""
        self._feeding = False
        self._idle_synth: deque[int] = deque(range(setting.synth_workers))
        self._synthesizing = 0

        self._ready: list[tuple[int, int, int, _Unit]] = []
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
        self._model.later(delay_ms, happen, self)

    def _soon(self, happen: Callable[[], None]) -> None:
        """When another thread has woken up."""
        self._model.later(self._random.uniform(0.02, 0.2), happen, self)

    @property
    def _now_ms(self) -> float:
        return self._model.now_ms

    def _clock(self) -> int:
        """Whole milliseconds of the engine's clock."""
        return int((self._model.now_ms - self._start_ms) / self._model.speed)

    def _logged(self, duration_ms: float) -> int:
        return int(duration_ms / self._model.speed)

    def _timeline(self, writer: str, event: str, unit: _Unit, detail: str) -> None:
        self.last_line_ms = offset_ms = self._clock()
        self._model.say(Timeline(self._model.now_ms, writer, offset_ms, event, unit.job.job_id, detail))

    def _kernel(self, writer: str, text: str) -> None:
        self._model.say(Kernel(self._model.now_ms, writer, text))

    def say(self, line: Tracing) -> None:
        """A line is written, if it is of a level that is."""
        if _LEVELS[line.level] >= _LEVELS[self._setting.level]:
            self.last_line_ms = self._clock()
            self._model.say(line)

    def _info(self, writer: str, target: str, message: str, *fields: tuple[str, str]) -> None:
        self.say(Tracing(self._now_ms, writer, "INFO", target, message, fields))

    def _error(self, writer: str, message: str, *fields: tuple[str, str]) -> None:
        self.say(Tracing(self._now_ms, writer, "ERROR", _ENGINE, message, fields))

    def _in_dispatch(
        self, job: _Job, writer: str, message: str, *fields: tuple[str, str], level: str = "INFO", batch: int = 1
    ) -> None:
        span: Fields = (("proof_kind", job.kind.name),)
        name = "synth_single"
        if batch > 1:
            name, span = "synth_batch_full", (("batch_size", str(batch)), *span)
        self.say(Tracing(self._now_ms, writer, level, _ENGINE, message, fields, name, span))

    def _in_worker(
        self, worker: _Worker, unit: _Unit, message: str, *fields: tuple[str, str], level: str = "INFO"
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

    def end(self) -> list[_Call]:
        """The process ends. Returns the calls that are still waiting for an answer."""
        self.account.finish(self.last_line_ms)
        unanswered = []
        for job in self._jobs:
            for unit in job.units:
                self._decide(unit, Outcome.ABANDONED)
            if job.truth.outcome is None:
                unanswered.append(job.call)
                self._model.decided(job.truth, Outcome.ABANDONED)
            else:
                self._model.over()
        return unanswered

    # Jobs and their units

    def submit(self, call: _Call) -> None:
        """A caller's request arrives."""
        kind = call.request.kind
        bad = self._random.randrange(kind.units)
        truth = JobTruth(call.job_id, kind.name)
        job = _Job(call, truth, self._count, self._now_ms, bad)
        partitions = range(kind.partitions) if kind.partitions else (None,)
        job.units = [_Unit(job, partition) for partition in partitions]
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

    def _to(self, unit: _Unit, queue: Queue | None) -> None:
        """The unit moves on, for as long as it counts."""
        if unit.queue is None:
            return
        at_ms = self._clock()
        self.account.leave(unit.queue, at_ms)
        unit.queue = queue
        if queue is not None:
            self.account.enter(queue, at_ms)

    def _decide(self, unit: _Unit, outcome: Outcome) -> None:
        if unit.outcome is None:
            unit.outcome = outcome
            self._model.units[outcome] += 1

    def _give_up(self, unit: _Unit, outcome: Outcome) -> None:
        """A unit that has not started does not count any more, though the daemon may still be busy with it."""
        self._decide(unit, outcome)
        if unit.handed_to is not None:
            self.account.hand_over_ends(unit.handed_to, self._clock())
            unit.handed_to = None
        self._to(unit, None)

    def _fail(self, unit: _Unit, *, siblings_go_on: bool = False) -> None:
        """A unit fails, and with it its job."""
        self._give_up(unit, Outcome.FAILED)
        for job in unit.batch or (unit.job,):
            self._model.decided(job.truth, Outcome.FAILED)
            if not siblings_go_on:
                job.given_up = True
                for sibling in job.units:
                    if sibling.outcome is None and sibling.span is None:
                        self._give_up(sibling, Outcome.DROPPED)

    def _over(self, unit: _Unit) -> None:
        """Nothing is left of the unit."""
        for job in unit.batch or (unit.job,):
            job.left -= 1
            if not job.left:
                del self._jobs[job]
                self._kind_users[job.kind.name] -= 1
                self._model.over()

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

    def _collect(self, job: _Job) -> None:
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

    def _dispatch_one(self, job: _Job) -> None:
        self._dispatching += 1
        self._kind_users[job.kind.name] += 1
        if job.kind.partitions is None:
            self._dispatch_whole(job.units[0])
        else:
            writer = f"dispatch-{job.number}"
            split = partial(self._split, job, writer)
            self._reserve_srs(job.kind, partial(self._with_srs, job.kind, writer, split))

    def _dispatch_batch(self, jobs: list[_Job]) -> None:
        unit = _Unit(jobs[0], None, batch=tuple(jobs))
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

    def _dispatch_whole(self, unit: _Unit) -> None:
        srs = partial(self._reserve_srs, unit.job.kind, partial(self._begin_whole, unit))
        self._acquire(unit.memory_gib, srs)

    def _split(self, job: _Job, writer: str) -> None:
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
            self._at(self._model.spread(kind.srs_ms), partial(self._srs_done, kind, writer, self._now_ms))

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

    def _begin_synthesis(self, unit: _Unit) -> None:
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
                self.say(Tracing(self._now_ms, writer, "WARN", _PINNED_POOL, message, (size, *more)))
        self._synthesize(unit, partial(self._synthesized_partition, unit, slot))

    def _begin_whole(self, unit: _Unit) -> None:
        writer = f"dispatch-{unit.job.number}"
        self._to(unit, Queue.SYNTH)
        self._timeline(writer, "SYNTH_START", unit, f"kind={unit.job.kind.name}")
        # A whole proof's parameters are loaded inside its synthesis; a partition's are there already.
        synthesize = partial(self._synthesize, unit, partial(self._synthesized_whole, unit, writer))
        self._with_srs(unit.job.kind, writer, synthesize)

    def _synthesize(self, unit: _Unit, then: Callable[[float], None]) -> None:
        self._synthesizing += 1
        mean_ms = unit.job.kind.synth_ms * (1 + self._setting.contention * (self._synthesizing - 1))
        if unit.batch:
            mean_ms *= 1 + 0.2 * len(unit.batch)
        duration_ms = self._model.spread(mean_ms)
        self._at(duration_ms, partial(then, duration_ms))

    def _synthesized_partition(self, unit: _Unit, slot: int, duration_ms: float) -> None:
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

    def _synthesized_whole(self, unit: _Unit, writer: str, duration_ms: float) -> None:
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

    def _queue(self, unit: _Unit, writer: str, detail: str, rank: tuple[int, int]) -> None:
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
                self._model.decided(unit.job.truth, Outcome.LOST)
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
    def _on_worker(worker: _Worker, unit: _Unit) -> str:
        partition_part = "" if unit.partition is None else f",partition={unit.partition}"
        return f"worker={worker.worker_id}{partition_part}"

    def _lock_tracker(self, hold_ms: float, then: Callable[[], None]) -> None:
        """Waits for the lock of the daemon's records, first come, first served, and keeps it for some time."""
        at_ms = max(self._now_ms, self._tracker_free_ms)
        self._tracker_free_ms = at_ms + hold_ms
        self._at(at_ms - self._now_ms, then)

    def _check(self, worker: _Worker, unit: _Unit, since_ms: float) -> None:
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
        pre_lock_ms = self._model.spread(self._setting.pre_lock_ms * unit.size)
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
            self._model.troubles.append(Trouble(self._now_ms, worker.gpu, _XID_CUDA))
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
        ntt_ms = self._model.spread(0.66 * setting.kernel_ms * size)
        waits = self._random.random() < setting.barrier_probability
        barrier_ms = self._random.uniform(0, 2) * setting.barrier_ms * size if waits else 0.0
        add_ms = self._model.spread(0.25 * setting.kernel_ms * size)
        tail_ms = self._model.spread(0.09 * setting.kernel_ms * size)
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
        self._model.ran(proving.worker.gpu, proving.kernels)
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
        finish_ms = self._model.spread(self._setting.finish_ms * unit.size, 0.3)
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
        trim_ms = self._model.spread(self._setting.slow_trim_ms if slow else self._setting.trim_ms, 0.9)
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

    def _processed(self, unit: _Unit, worker: _Worker, writer: str, waited_ms: float, trim_ms: float) -> None:
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

    def _partition_proved(self, unit: _Unit, writer: str, gpu_ms: float) -> None:
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

    def _times(self, job: _Job) -> Fields:
        return (
            ("proof_len", str(job.kind.proof_bytes)),
            ("total_ms", str(self._logged(self._now_ms - job.enqueued_ms))),
            ("synth_ms", str(self._logged(job.synth_ms))),
            ("gpu_ms", str(self._logged(job.gpu_ms))),
        )

    def _whole_proved(self, unit: _Unit, writer: str, gpu_ms: float) -> None:
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

    def _check_proof(self, job: _Job, writer: str, what: str, *extra: tuple[str, str]) -> None:
        if job.kind is not POREP or job.fault not in (Fault.SELF_CHECK, Fault.SELF_CHECK_ERROR):
            self._model.decided(job.truth, Outcome.PROVED)
            if job.kind is POREP:
                self._info(writer, _ENGINE, f"{what} self-check PASSED", job.id_field, *extra)
            return
        self._model.decided(job.truth, Outcome.FAILED)
        if job.fault is Fault.SELF_CHECK_ERROR:
            message = f"{what} self-check error — proof will NOT be returned to caller"
            self._error(writer, message, job.id_field, *extra, ("error", "vanilla proof: unexpected end of input"))
            return
        sector, miner = ("sector", str(job.call.sector)), ("miner", str(_MINER))
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
