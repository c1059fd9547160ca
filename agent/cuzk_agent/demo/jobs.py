"""What a daemon works on: the jobs that callers wait for, their units, and a unit on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from cuzk_agent.demo.lines import Fields
from cuzk_agent.demo.scenario import Fault, Kind, Request
from cuzk_agent.demo.truth import JobTruth, Outcome, Queue, Span

MINER = 1000
"""Whose sectors all jobs are about."""
_BATCH_GIB, _BATCH_RELEASED_GIB = 136.0, 125.0


@dataclass(slots=True, eq=False)
class Call:
    """A caller that waits for a job."""

    request: Request
    job_id: str
    sector: int
    """Its number."""


@dataclass(slots=True, eq=False)
class Job:
    """One run of a job in one engine."""

    call: Call
    truth: JobTruth
    number: int
    """In the order in which the engine got them."""
    enqueued_ms: float
    """In the simulation's time."""
    bad_partition: int
    """The one that its fault befalls."""
    units: list[Unit] = field(default_factory=list)
    left: int = 0
    """Units that are still somewhere in the engine."""
    dispatched: bool = False
    sequence: int = 0
    """In the order of dispatch, from 1 on; 0 if it is proved whole."""
    proved: int = 0
    """Partitions that are."""
    given_up: bool = False
    """The daemon itself knows that it failed."""
    synth_ms: float = 0
    """Sum of its units, as all durations here in the simulation's time."""
    gpu_ms: float = 0
    """Sum of its partitions."""

    @property
    def kind(self) -> Kind:
        """The kind of its proof."""
        return self.call.request.kind

    @property
    def dispatcher(self) -> str:
        """As whom the thread writes its lines that dispatches it."""
        return f"dispatch-{self.number}"

    @property
    def job_id(self) -> str:
        """The caller's name for it, which may be given twice."""
        return self.call.job_id

    @property
    def fault(self) -> Fault | None:
        """What goes wrong with it."""
        return self.call.request.fault


@dataclass(slots=True, eq=False)
class Unit:
    """A partition, a whole proof, or a batch of jobs that are proved together."""

    job: Job
    """Of a batch the first, which gives the log its name."""
    partition: int | None
    queue: Queue | None = Queue.WAITING
    """Where it counts; None once it has been picked up, or given up with its job."""
    handed_to: int | None = None
    """The GPU whose worker has picked it up and not started it."""
    span: Span | None = None
    outcome: Outcome | None = None
    batch: tuple[Job, ...] = ()
    """The jobs that are proved by it together."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All whose unit it is."""
        return self.batch or (self.job,)

    @property
    def fault(self) -> Fault | None:
        """What goes wrong with it."""
        return self.job.fault if self.partition in (None, self.job.bad_partition) else None

    @property
    def size(self) -> float:
        """Its GPU work, relative to a PoRep partition's."""
        return self.job.kind.gpu_scale * (8 * len(self.batch) or 1)

    @property
    def memory_gib(self) -> float:
        """What it holds from its synthesis on."""
        return _BATCH_GIB if self.batch else self.job.kind.memory_gib

    @property
    def released_gib(self) -> float:
        """How much of it is free again after the kernels."""
        return _BATCH_RELEASED_GIB if self.batch else self.job.kind.released_gib

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among others that wait: by job, oldest first, then by partition; whole proofs before all."""
        return (self.job.sequence, self.partition or 0)

    @property
    def details(self) -> tuple[str, ...]:
        """What says in a TIMELINE line which of its job's units it is."""
        return () if self.partition is None else (f"partition={self.partition}",)

    @property
    def partition_debug(self) -> str:
        """Its partition as Rust prints an `Option`."""
        return "None" if self.partition is None else f"Some({self.partition})"

    @property
    def dispatch_span(self) -> tuple[str, Fields]:
        """The tracing span in which it is dispatched, and synthesized if it is whole."""
        kind = ("proof_kind", self.job.kind.name)
        if self.batch:
            return "synth_batch_full", (("batch_size", str(len(self.batch))), kind)
        return "synth_single", (kind,)


@dataclass(frozen=True, slots=True)
class Worker:
    """A thread that feeds a GPU."""

    worker_id: int
    gpu: int
    sub_id: int
    """Among those of its GPU."""

    @property
    def writer(self) -> str:
        """As whom it writes its lines."""
        return f"worker-{self.worker_id}"


@dataclass(slots=True, eq=False)
class Proving:
    """One unit on a GPU, from GPU_START on."""

    unit: Unit
    worker: Worker
    start_ms: float
    """In the simulation's time."""
    gpu_ms: float = 0
    """How long it took, once it is finished."""

    @property
    def finalizer(self) -> str:
        """As whom the thread writes its lines that finishes it."""
        return f"finalizer-{self.unit.job.number}-{self.unit.partition_debug}"

    @property
    def details(self) -> tuple[str, ...]:
        """What says in a TIMELINE line who proves which unit."""
        return (f"worker={self.worker.worker_id}", *self.unit.details)
