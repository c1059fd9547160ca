"""What a daemon works on: the jobs that callers wait for, and their units."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class Job:
    call: Call
    truth: JobTruth
    number: int
    """In the order in which the engine got them."""
    enqueued_ms: float
    bad_partition: int
    units: list[Unit] = field(default_factory=list)
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
class Unit:
    job: Job
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
