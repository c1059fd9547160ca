"""A discrete-event model of the prover's partition pipeline, whose log is an output of its state.

Jobs are dispatched (after their kind's parameters, the SRS, are loaded), split into units, synthesized by a pool of CPU
workers, queued, and proved by the workers of each GPU, which share the GPU through a mutex and hand the rest of a proof
to a detached finalizer. Pure: seeded, simulated milliseconds, no I/O and no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from heapq import heappop, heappush
from random import Random

from cuzk_agent.demo.lines import Fields, Kernel, Line, Timeline, Tracing

_ENGINE = "cuzk_core::engine"
_SCHEDULER = "cuzk_core::scheduler"
_SRS_MANAGER = "cuzk_core::srs_manager"
_DAEMON = "cuzk_daemon"

_MINER = 1000
_BUDGET_GIB = 420
_SYNTH_GIB = 14


class Fault(Enum):
    """What goes wrong with a job."""

    SYNTHESIS = auto()
    """One partition's synthesis fails."""
    PROVE_START = auto()
    """CUDA fails at the start of proving one partition."""
    SELF_CHECK = auto()
    """One partition's proof is bad, which only the check of the assembled proof finds out."""


class JobOutcome(Enum):
    """How a job stands."""

    OPEN = auto()
    PROVED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of proof and what it costs at speed 1."""

    name: str
    job_prefix: str
    partitions: int | None
    """None for a kind that is proved whole."""
    circuit_id: str
    params: str
    srs_gib: int
    srs_ms: float
    synth_ms: float
    gpu_scale: float
    """GPU work of one unit, relative to a PoRep partition's."""
    proof_bytes: int


POREP = Kind("porep-c2", "porep", 10, "porep-32g", "v28-stacked.params", 44, 40_000, 36_000, 1.0, 1920)
SNAP = Kind("snap-update", "snap", 16, "snap-32g", "v28-empty-sector-update.params", 33, 55_000, 33_000, 0.8, 3072)
WINDOW = Kind("window-post", "wdpost", None, "wpost-32g", "v28-window-post.params", 56, 30_000, 25_000, 2.0, 192)
WINNING = Kind("winning-post", "winpost", None, "winning-32g", "v28-winning-post.params", 1, 2_000, 4_000, 0.3, 192)


@dataclass(frozen=True, slots=True)
class Request:
    """A job that a caller submits some time after its burst begins."""

    after_ms: float
    kind: Kind
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that come together, after a pause in which the prover has nothing to do."""

    pause_ms: float
    requests: tuple[Request, ...]


BURSTS = (
    Burst(
        2_000,
        (
            Request(0, POREP),
            Request(3_000, POREP),
            Request(5_000, POREP),
            Request(20_000, POREP),
            Request(60_000, WINNING),
            Request(62_000, POREP),
            Request(64_000, POREP),
        ),
    ),
    Burst(25_000, (Request(0, SNAP), Request(20_000, WINDOW), Request(30_000, POREP, Fault.SYNTHESIS))),
    Burst(60_000, (Request(0, POREP),)),
    Burst(20_000, (Request(0, POREP, Fault.PROVE_START), Request(2_000, POREP), Request(15_000, WINNING))),
    Burst(40_000, (Request(0, POREP, Fault.SELF_CHECK), Request(1_000, SNAP), Request(30_000, WINDOW))),
)
"""The day of the demonstration, repeated for ever. Each burst begins once the one before is done, so that the prover
is never overrun and has its idle hours."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine."""

    gpus: int = 2
    workers_per_gpu: int = 2
    synth_workers: int = 12


@dataclass(frozen=True, slots=True)
class GpuTruth:
    """What happened on one GPU, from the offsets as written."""

    busy_ms: int
    """Union of the spans; a span still open counts up to the last TIMELINE line."""
    spans: int
    """Spans begun."""
    open_spans: int
    gaps: int
    """Stretches of at least 1 ms between spans."""
    gap_ms: int


class _Ledger:
    """Adds up one GPU's spans as they come; their edges never go back in time."""

    def __init__(self) -> None:
        self._spans = self._open = self._busy_ms = self._gaps = self._gap_ms = 0
        self._busy_since_ms = 0
        self._idle_since_ms: int | None = None

    def start(self, offset_ms: int) -> None:
        if not self._open:
            self._busy_since_ms = offset_ms
            if self._idle_since_ms is not None and offset_ms > self._idle_since_ms:
                self._gaps += 1
                self._gap_ms += offset_ms - self._idle_since_ms
        self._open += 1
        self._spans += 1

    def end(self, offset_ms: int) -> None:
        self._open -= 1
        if not self._open:
            self._busy_ms += offset_ms - self._busy_since_ms
            self._idle_since_ms = offset_ms

    def truth(self, last_offset_ms: int) -> GpuTruth:
        open_ms = max(0, last_offset_ms - self._busy_since_ms) if self._open else 0
        return GpuTruth(self._busy_ms + open_ms, self._spans, self._open, self._gaps, self._gap_ms)


@dataclass(slots=True, eq=False)
class _Job:
    job_id: str
    kind: Kind
    number: int
    enqueued_ms: float
    fault: Fault | None
    bad_partition: int
    left: int
    """Units that have not ended in any way."""
    proved: int = 0
    failed: bool = False
    synth_ms: int = 0
    gpu_ms: int = 0

    @property
    def id_field(self) -> tuple[str, str]:
        return ("job_id", self.job_id)


@dataclass(slots=True, eq=False)
class _Unit:
    job: _Job
    partition: int | None

    @property
    def fault(self) -> Fault | None:
        return self.job.fault if self.partition == self.job.bad_partition else None

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

    @property
    def writer(self) -> str:
        return f"worker-{self.worker_id}"


@dataclass(slots=True, eq=False)
class _Mutex:
    held: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Proving:
    """One unit on a GPU, from GPU_START on."""

    unit: _Unit
    worker: _Worker
    start_ms: float
    locked_ms: float = 0.0


class Model:
    """One engine's life. Iterate `lines()` once."""

    def __init__(self, seed: int, speed: float, setting: Setting | None = None) -> None:
        """At speed 10 everything the prover does takes a tenth of its usual time, and is logged so."""
        self._random = Random(seed)
        self._speed = speed
        self._setting = setting or Setting()
        self._now_ms = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._events = 0
        self._said: list[Line] = []
        self._last_offset_ms = 0

        self._bursts = 0
        self._jobs = 0
        self._jobs_in_burst = 0
        """Jobs of the present burst that have not ended, whether submitted or not."""
        self._outcomes: dict[str, JobOutcome] = {}

        self._undispatched: deque[_Job] = deque()
        self._dispatcher_waits = False
        self._srs_loaded: set[str] = set()
        self._srs_waiting: dict[str, list[Callable[[], None]]] = {}
        self._to_synthesize: deque[_Unit] = deque()
        self._idle_synth: deque[int] = deque(range(self._setting.synth_workers))
        self._ready: deque[_Unit] = deque()
        per_gpu = self._setting.workers_per_gpu
        self._workers = [_Worker(i, *divmod(i, per_gpu)) for i in range(self._setting.gpus * per_gpu)]
        self._idle_workers: deque[_Worker] = deque()
        self._mutexes = [_Mutex() for _ in range(self._setting.gpus)]
        self._ledgers = [_Ledger() for _ in range(self._setting.gpus)]

    def lines(self, until_ms: float = math.inf) -> Iterator[Line]:
        """The log in its order, up to a moment of the engine's time."""
        self._start()
        yield from self._take_said()
        while self._due and self._due[0][0] <= until_ms:
            at_ms, _, happen = heappop(self._due)
            self._now_ms = max(self._now_ms, at_ms)
            happen()
            yield from self._take_said()

    def gpu_truth(self) -> Mapping[int, GpuTruth]:
        """By GPU, for the lines yielded so far."""
        return {gpu: ledger.truth(self._last_offset_ms) for gpu, ledger in enumerate(self._ledgers)}

    def job_outcomes(self) -> Mapping[str, JobOutcome]:
        """By job id, for the lines yielded so far."""
        return dict(self._outcomes)

    # Time and chance

    def _take_said(self) -> list[Line]:
        said, self._said = self._said, []
        return said

    def _at(self, delay_ms: float, happen: Callable[[], None]) -> None:
        self._events += 1
        heappush(self._due, (self._now_ms + delay_ms, self._events, happen))

    def _soon(self, happen: Callable[[], None]) -> None:
        """When another thread has woken up, which no time scale changes."""
        self._at(self._random.uniform(0.02, 0.2), happen)

    def _spread(self, mean_ms: float, low: float = 0.85, high: float = 1.2) -> float:
        return mean_ms * self._random.uniform(low, high) / self._speed

    # Lines

    def _say(self, line: Line) -> None:
        self._said.append(line)
        # A line takes a moment, so that no two bear the same time.
        self._now_ms += self._random.uniform(0.01, 0.04)

    def _timeline(self, writer: str, event: str, unit: _Unit, detail: str) -> int:
        line = Timeline(self._now_ms, writer, event, unit.job.job_id, detail)
        self._say(line)
        self._last_offset_ms = line.offset_ms
        return line.offset_ms

    def _kernel(self, writer: str, text: str) -> None:
        self._say(Kernel(self._now_ms, writer, text))

    def _info(self, writer: str, target: str, message: str, *fields: tuple[str, str]) -> None:
        self._say(Tracing(self._now_ms, writer, "INFO", target, message, fields))

    def _error(self, writer: str, target: str, message: str, *fields: tuple[str, str]) -> None:
        self._say(Tracing(self._now_ms, writer, "ERROR", target, message, fields))

    def _in_worker(
        self, worker: _Worker, unit: _Unit, message: str, *fields: tuple[str, str], level: str = "INFO"
    ) -> None:
        span: Fields = (
            ("worker_id", str(worker.worker_id)),
            ("gpu", str(worker.gpu)),
            unit.job.id_field,
            ("proof_kind", unit.job.kind.name),
            ("batch_size", "1"),
            ("partition", unit.partition_debug),
        )
        self._say(Tracing(self._now_ms, worker.writer, level, _ENGINE, message, fields, "gpu_worker", span))

    # Start and jobs

    def _start(self) -> None:
        main = "main"
        self._info(main, _DAEMON, "cuzk-daemon starting")
        self._info(main, _DAEMON, "configuration loaded", ("listen", "0.0.0.0:9820"))
        self._info(main, _DAEMON, "rayon global thread pool configured", ("rayon_threads", "96"))
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
        self._next_burst()

    def _next_burst(self) -> None:
        burst = BURSTS[self._bursts % len(BURSTS)]
        self._bursts += 1
        self._jobs_in_burst = len(burst.requests)
        pause_ms = self._spread(burst.pause_ms)
        for request in burst.requests:
            self._at(pause_ms + request.after_ms / self._speed, partial(self._submit, request))

    def _submit(self, request: Request) -> None:
        kind, number = request.kind, 2041 + self._jobs
        units = kind.partitions or 1
        bad = self._random.randrange(units)
        job = _Job(self._job_id(kind, number), kind, number, self._now_ms, request.fault, bad, left=units)
        self._jobs += 1
        self._outcomes[job.job_id] = JobOutcome.OPEN
        writer, kind_field = "scheduler", ("proof_kind", kind.name)
        position = ("queue_position", str(len(self._undispatched)))
        self._info(writer, _SCHEDULER, "job enqueued", job.id_field, kind_field, ("priority", '"Normal"'), position)
        self._info(writer, _SCHEDULER, "job dequeued for proving", job.id_field, kind_field)
        self._undispatched.append(job)
        self._dispatch()

    def _job_id(self, kind: Kind, number: int) -> str:
        prefix = f"{kind.job_prefix}-{_MINER}"
        if kind is WINNING:
            return f"{prefix}-{self._random.getrandbits(64):016x}"
        if kind is WINDOW:
            a, b, c = (self._random.randrange(256) for _ in range(3))
            return f"{prefix}-{number % 48}-[{a} {b} {c} 0 17 9 201 77]"
        return f"{prefix}-{number}"

    def _fail(self, job: _Job) -> None:
        job.failed = True
        self._outcomes[job.job_id] = JobOutcome.FAILED

    def _unit_over(self, unit: _Unit) -> None:
        unit.job.left -= 1
        if not unit.job.left:
            self._jobs_in_burst -= 1
            if not self._jobs_in_burst:
                self._next_burst()

    # Dispatch and SRS

    def _dispatch(self) -> None:
        while self._undispatched and not self._dispatcher_waits:
            job = self._undispatched.popleft()
            if job.kind.partitions is None:
                self._to_synthesize.append(_Unit(job, None))
                self._soon(self._fill_synth)
            else:
                # The dispatcher itself waits for the SRS: whatever comes in meanwhile is blocked behind this job.
                self._dispatcher_waits = True
                self._with_srs(job.kind, "dispatcher", partial(self._split, job))

    def _with_srs(self, kind: Kind, writer: str, then: Callable[[], None]) -> None:
        if kind.name in self._srs_loaded:
            then()
        elif kind.name in self._srs_waiting:
            self._srs_waiting[kind.name].append(then)
        else:
            self._srs_waiting[kind.name] = [then]
            path = f"/data/zk/params/{kind.params}"
            fields = (("circuit_id", kind.circuit_id), ("path", path), ("size_gib", str(kind.srs_gib)))
            self._info(writer, _SRS_MANAGER, "loading SRS from disk", *fields)
            self._at(self._spread(kind.srs_ms), partial(self._srs_done, kind, writer, self._now_ms))

    def _srs_done(self, kind: Kind, writer: str, since_ms: float) -> None:
        elapsed = ("elapsed_ms", str(int(self._now_ms - since_ms)))
        self._info(writer, _SRS_MANAGER, "SRS loaded successfully", ("circuit_id", kind.circuit_id), elapsed)
        self._srs_loaded.add(kind.name)
        for then in self._srs_waiting.pop(kind.name):
            then()

    def _split(self, job: _Job) -> None:
        writer, partitions = "dispatcher", job.left
        what = "SnapDeals synthesis" if job.kind is SNAP else "synthesis"
        busy = self._setting.synth_workers - len(self._idle_synth)
        self._info(
            writer,
            _ENGINE,
            f"dispatching per-partition {what} (budget-gated)",
            job.id_field,
            ("num_partitions", str(partitions)),
            ("budget_available_gib", str(_BUDGET_GIB - _SYNTH_GIB * busy)),
        )
        sequence = ("job_seq", str(job.number - 2041))
        self._info(writer, _ENGINE, "assigned pipeline sequence number", job.id_field, sequence)
        self._to_synthesize.extend(_Unit(job, partition) for partition in range(partitions))
        self._soon(self._fill_synth)
        self._dispatcher_waits = False
        self._dispatch()

    # Synthesis

    def _fill_synth(self) -> None:
        while self._to_synthesize and self._idle_synth:
            unit = self._to_synthesize.popleft()
            job = unit.job
            if job.failed:
                fields = (job.id_field, unit.partition_field)
                self._info("dispatcher", _ENGINE, "skipping synthesis for failed job", *fields)
                self._unit_over(unit)
                continue
            slot = self._idle_synth.popleft()
            detail = f"kind={job.kind.name}" if unit.partition is None else f"partition={unit.partition}"
            self._timeline(f"synth-{slot}", "SYNTH_START", unit, detail)
            # A whole proof's SRS is loaded inside its synthesis; a partition's is there already.
            self._with_srs(job.kind, f"synth-{slot}", partial(self._synthesize, unit, slot))

    def _synthesize(self, unit: _Unit, slot: int) -> None:
        duration_ms = self._spread(unit.job.kind.synth_ms, 0.7, 1.4)
        self._at(duration_ms, partial(self._synthesized, unit, slot, self._now_ms))

    def _synthesized(self, unit: _Unit, slot: int, since_ms: float) -> None:
        job, writer = unit.job, f"synth-{slot}"
        self._idle_synth.append(slot)
        if unit.fault is Fault.SYNTHESIS:
            error = ("error", "circuit synthesis: assignment missing")
            self._error(writer, _ENGINE, "partition synthesis failed", error, job.id_field, unit.partition_field)
            self._fail(job)
            self._unit_over(unit)
        else:
            synth_ms = int(self._now_ms - since_ms)
            job.synth_ms += synth_ms
            elapsed = ("synth_ms", str(synth_ms))
            self._timeline(writer, "SYNTH_END", unit, f"{unit.partition_prefix}synth_ms={synth_ms}")
            if unit.partition is None:
                fields = (elapsed, ("circuit_id", job.kind.circuit_id), ("batch_size", "1"), ("sectors", "1"))
                message, span = "synthesis complete, sending to GPU", (("proof_kind", job.kind.name),)
                self._say(Tracing(self._now_ms, writer, "INFO", _ENGINE, message, fields, "synth_single", span))
            else:
                message = "partition synthesis complete, pushing to GPU queue"
                self._info(writer, _ENGINE, message, job.id_field, unit.partition_field, elapsed)
            queued = "monolithic" if unit.partition is None else f"partition={unit.partition}"
            self._timeline(writer, "GPU_QUEUE", unit, queued)
            self._ready.append(unit)
            self._wake_workers()
        self._soon(self._fill_synth)

    # GPU

    def _wake_workers(self) -> None:
        while self._ready and self._idle_workers:
            self._soon(partial(self._pick_up, self._idle_workers.popleft(), self._ready.popleft()))

    def _pick_up(self, worker: _Worker, unit: _Unit) -> None:
        self._timeline(worker.writer, "GPU_PICKUP", unit, self._on_worker(worker, unit))
        if unit.job.failed:
            fields = (unit.job.id_field, ("partition", unit.partition_debug))
            self._in_worker(worker, unit, "skipping GPU prove for failed partitioned job", *fields)
            self._unit_over(unit)
            self._idle_workers.appendleft(worker)
            self._wake_workers()
            return
        # Most hand-offs are quick; now and then the tracker's lock is held by somebody.
        slow = self._random.random() < 0.04
        status_ms = self._spread(5, 0, 2)
        check_ms = self._spread(1_000, 0.5, 3) if slow else self._spread(10, 0, 3)
        self._at(status_ms + check_ms, partial(self._start_proving, worker, unit, status_ms, check_ms))

    @staticmethod
    def _on_worker(worker: _Worker, unit: _Unit) -> str:
        partition_part = "" if unit.partition is None else f",partition={unit.partition}"
        return f"worker={worker.worker_id}{partition_part}"

    def _start_proving(self, worker: _Worker, unit: _Unit, status_ms: float, check_ms: float) -> None:
        self._in_worker(
            worker,
            unit,
            "GPU_TIMING hot_path pre-prove overhead",
            ("worker_id", str(worker.worker_id)),
            ("partition", unit.partition_debug),
            ("status_ms", str(int(status_ms))),
            ("fail_check_ms", str(int(check_ms))),
            ("mark_busy_ms", "0"),
            ("total_overhead_ms", str(int(status_ms + check_ms))),
        )
        proving = _Proving(unit, worker, self._now_ms)
        offset_ms = self._timeline(worker.writer, "GPU_START", unit, self._on_worker(worker, unit))
        self._ledgers[worker.gpu].start(offset_ms)
        pre_lock_ms = self._spread(850 * unit.job.kind.gpu_scale)
        self._at(pre_lock_ms, partial(self._ready_to_lock, proving))

    def _ready_to_lock(self, proving: _Proving) -> None:
        unit, worker = proving.unit, proving.worker
        if unit.fault is Fault.PROVE_START:
            message = "GPU prove start failed"
            error = f"{message}: CUDA error: out of memory\n  at groth16_cuda.cu:512"
            self._ledgers[worker.gpu].end(int(self._now_ms))
            self._in_worker(worker, unit, message, ("error", error), level="ERROR")
            self._fail(unit.job)
            self._unit_over(unit)
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
        proving.locked_ms = self._now_ms
        pre_lock_ms, wait_ms = int(waited_since_ms - proving.start_ms), int(self._now_ms - waited_since_ms)
        writer, scale = proving.worker.writer, proving.unit.job.kind.gpu_scale
        self._kernel(writer, f"pre_lock_cpu_ms={pre_lock_ms} mutex_wait_ms={wait_ms}")
        ntt_ms = self._spread(2_400 * scale)
        barrier_ms = self._spread(400 * scale, 0, 2) if self._random.random() < 0.15 else 0.0
        add_ms = self._spread(900 * scale)
        tail_ms = self._spread(300 * scale)
        total_ms = ntt_ms + barrier_ms + add_ms + tail_ms
        phases = (
            (ntt_ms, f"gpu_tid=0 ntt_msm_h_ms={int(ntt_ms)}"),
            (ntt_ms + barrier_ms, f"gpu_tid=0 barrier_wait_ms={int(barrier_ms)}"),
            (total_ms - tail_ms, f"gpu_tid=0 batch_add_ms={int(add_ms)}"),
            (total_ms, f"gpu_tid=0 tail_msm_ms={int(tail_ms)} gpu_total_ms={int(total_ms)}"),
        )
        for after_ms, text in phases:
            self._at(after_ms, partial(self._kernel, writer, text))
        self._at(total_ms, partial(self._unlock, proving))

    def _unlock(self, proving: _Proving) -> None:
        unit, worker = proving.unit, proving.worker
        mutex = self._mutexes[worker.gpu]
        held_ms, started_ms = int(self._now_ms - proving.locked_ms), int(self._now_ms - proving.start_ms)
        if mutex.waiting:
            self._soon(mutex.waiting.popleft())
        else:
            mutex.held = False
        self._kernel(worker.writer, f"prep_msm_ms={int(held_ms * self._random.uniform(0.5, 0.8))}")
        self._kernel(worker.writer, f"mutex_held_ms={held_ms} total_start_fn_ms={started_ms}")
        self._in_worker(
            worker,
            unit,
            "GPU_TIMING prove_start returned",
            ("worker_id", str(worker.worker_id)),
            ("partition", unit.partition_debug),
            ("total_pre_prove_ms", str(started_ms)),
            ("spawn_blocking_wall_ms", str(started_ms)),
        )
        # The rest is CPU work that the worker doesn't wait for: its next GPU_START comes before this GPU_END.
        cpu_ms = self._spread(900 * unit.job.kind.gpu_scale, 0.6, 1.6)
        self._at(cpu_ms, partial(self._finish, proving, int(cpu_ms)))
        self._free(worker)

    def _free(self, worker: _Worker) -> None:
        self._idle_workers.append(worker)
        self._wake_workers()

    def _finish(self, proving: _Proving, cpu_ms: int) -> None:
        unit, worker = proving.unit, proving.worker
        job, writer = unit.job, f"finalizer-{unit.job.job_id}-{unit.partition_debug}"
        self._kernel(writer, f"b_g2_msm_ms={cpu_ms} num_circuits=1")
        gpu_ms = int(self._now_ms - proving.start_ms)
        detail = f"{self._on_worker(worker, unit)},gpu_ms={gpu_ms}"
        self._ledgers[worker.gpu].end(self._timeline(writer, "GPU_END", unit, detail))
        if job.failed:
            fields = (job.id_field, unit.partition_field)
            self._info(writer, _ENGINE, "discarding GPU result for failed job", *fields)
        else:
            job.proved += 1
            job.gpu_ms += gpu_ms
            self._proved(unit, writer, gpu_ms)
        self._unit_over(unit)

    def _proved(self, unit: _Unit, writer: str, gpu_ms: int) -> None:
        job = unit.job
        complete = job.proved == (job.kind.partitions or 1)
        proof_len = ("proof_len", str(job.kind.proof_bytes))
        total = ("total_ms", str(int(self._now_ms - job.enqueued_ms)))
        times = (("synth_ms", str(job.synth_ms)), ("gpu_ms", str(job.gpu_ms)))
        if unit.partition is None:
            message = "proof completed successfully (pipeline)"
            self._info(writer, _ENGINE, message, proof_len, total, ("queue_ms", "0"), *times)
        fields = (job.id_field, unit.partition_field, ("gpu_ms", str(gpu_ms)), ("filled", str(int(complete))))
        self._info(writer, _ENGINE, "partition GPU prove complete", *fields)
        if not complete:
            return
        message = "Phase 7: all partitions complete, proof assembled"
        self._info(writer, _ENGINE, message, job.id_field, proof_len, total, *times)
        if job.fault is Fault.SELF_CHECK:
            self._self_check_failed(job, writer)
            return
        if job.kind is POREP:
            self._info(writer, _ENGINE, "Phase 7: PoRep proof self-check PASSED", job.id_field)
        self._outcomes[job.job_id] = JobOutcome.PROVED

    def _self_check_failed(self, job: _Job, writer: str) -> None:
        self._fail(job)
        self._error(
            writer,
            _ENGINE,
            "Phase 7: PoRep proof self-check FAILED — proof will NOT be returned to caller",
            job.id_field,
            ("sector", str(job.number)),
            ("miner", str(_MINER)),
            ("proof_len", str(job.kind.proof_bytes)),
        )
        valid = [p for p in range(job.kind.partitions or 1) if p != job.bad_partition]
        self._error(
            writer,
            _ENGINE,
            "Phase 7: per-partition verification results (invalid partitions produced bad proofs)",
            job.id_field,
            ("valid_partitions", str(valid)),
            ("invalid_partitions", str([job.bad_partition])),
        )


def shutdown_lines(time_ms: float) -> tuple[Line, ...]:
    """What an engine says last when it is interrupted, and what a killed one doesn't."""
    return (
        Tracing(time_ms, "main", "INFO", _DAEMON, "received SIGINT, shutting down", ()),
        Tracing(time_ms + 0.05, "main", "INFO", _ENGINE, "shutting down cuzk engine", ()),
    )
