"""What a simulated prover is and what is asked of it: machines, kinds of proof, requests, and the scenarios by name.

All times are those of real life, in milliseconds; a simulation may run through them faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto
from types import MappingProxyType
from typing import Final


class Fault(Enum):
    """What goes wrong with a job, in one of its units or at its end."""

    SYNTHESIS = auto()
    SYNTHESIS_PANIC = auto()
    PROVE_START = auto()
    """CUDA fails. The daemon goes on proving the siblings, for nothing."""
    PROVE_START_PANIC = auto()
    PROVING = auto()
    """The CPU's part after the kernels fails."""
    PROVING_PANIC = auto()
    SELF_CHECK = auto()
    """A proof is bad, which only the check of the assembled proof finds out."""
    SELF_CHECK_ERROR = auto()


class Priority(IntEnum):
    """The scheduler's, as the log names them."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class Generation(Enum):
    """The daemon's ways with a GPU, oldest first."""

    SINGLE = auto()
    """One worker for each GPU does everything in its turn: spans never overlap. Says CHAN_SEND."""
    DUAL = auto()
    """Two workers share a GPU by a mutex: one prepares while the other's kernels run. Says CHAN_SEND."""
    SPLIT = auto()
    """The CPU's part after the kernels is left to a detached finalizer: a worker's next span begins before its last one
    ends. Says GPU_QUEUE."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of proof and what it costs."""

    name: str
    job_prefix: str
    partitions: int | None
    """None for a kind that is proved whole."""
    circuit_id: str
    params: str
    srs_gib: int
    srs_ms: float
    """How long its parameters take to load."""
    memory_gib: float
    """What a unit holds from its synthesis on."""
    released_gib: float
    """How much of it is free again after the kernels, before the proof is finished."""
    synth_ms: float
    """Synthesis of a unit on an idle CPU."""
    gpu_scale: float
    """GPU work of one unit, relative to a PoRep partition's."""
    proof_bytes: int

    @property
    def units(self) -> int:
        """Units of one job."""
        return self.partitions or 1


POREP: Final = Kind(
    "porep-c2", "porep", 10, "porep-32g", "v28-stacked.params", 44, 40_000, 14, 13, 29_000, 1.0, 1920
)  # fmt: skip
SNAP: Final = Kind(
    "snap-update", "snap", 16, "snap-32g", "v28-empty-sector-update.params", 33, 55_000, 9, 8, 26_000, 0.8, 3072
)  # fmt: skip
WINDOW: Final = Kind(
    "window-post", "wdpost", None, "wpost-32g", "v28-window-post.params", 56, 30_000, 14, 13, 20_000, 2.0, 192
)  # fmt: skip
WINNING: Final = Kind(
    "winning-post", "winpost", None, "winning-32g", "v28-winning-post.params", 1, 2_000, 0.5, 0.25, 3_000, 0.3, 192
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Foreign:
    """Somebody else's process that uses a GPU at times, which no log tells."""

    gpu: int
    every_ms: float
    for_ms: float
    share: float
    """How much of the chip's time its kernels take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine and how its daemon is configured."""

    generation: Generation = Generation.SPLIT
    gpus: int = 1
    workers_per_gpu: int = 2
    synth_workers: int = 12
    contention: float = 0.0275
    """How much longer a synthesis takes for each other one that runs: they share memory bandwidth."""
    spread: float = 0.15
    """How far a duration may be from its mean, as a fraction of it."""
    budget_gib: float = 600
    dispatchers: int = 2
    """Jobs that are dispatched, or synthesized whole, at the same time."""
    queue_target: int = 0
    """With so many units ready no further synthesis begins; 0: no pacer."""
    max_batch: int = 1
    """PoRep jobs that are proved together, whole."""
    batch_wait_ms: float = 0
    pre_lock_ms: float = 550
    """CPU work of a PoRep partition in its span before it has the GPU."""
    kernel_ms: float = 2_400
    """Its kernels."""
    barrier_probability: float = 0.15
    barrier_ms: float = 400
    """How long its kernels may have to wait for the CPU, with the GPU held and idle."""
    finish_ms: float = 900
    """CPU work after the kernels."""
    trim_ms: float = 8
    """How long a finished proof keeps the tracker locked, which workers need for their next hand-off."""
    slow_trim_probability: float = 0.04
    slow_trim_ms: float = 600
    """Now and then memory is returned to the system under that lock."""
    colours: bool = True
    level: str = "INFO"
    """Lines below it are not written: INFO, WARN or ERROR."""
    kernel_lines: bool = True
    """The C++ prover's lines are on."""
    tear_probability: float = 0.6
    """Of the TIMELINE lines that another writer's line follows within a millisecond."""
    disorder_probability: float = 0.02
    """Of the TIMELINE lines that wait for the lock of the log, up to 3 ms, after their time was taken."""
    foreign: Foreign | None = None
    noise: int = 0
    """Lines of no meaning that come with each TIMELINE line, from other threads."""


@dataclass(frozen=True, slots=True)
class Request:
    """A job that a caller submits some time after its burst begins."""

    after_ms: float
    kind: Kind
    fault: Fault | None = None
    priority: Priority = Priority.NORMAL
    again_after_ms: float | None = None
    """The caller loses patience, and submits the same id again while the first still runs."""

    @property
    def nameless(self) -> bool:
        """Its failure is logged without a job id: nobody can tell from the log what failed."""
        return self.kind.partitions is None and self.fault in _NAMELESS


_NAMELESS = frozenset({Fault.SYNTHESIS, Fault.SYNTHESIS_PANIC, Fault.PROVING, Fault.PROVING_PANIC})


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that come together, after a pause in which the prover has nothing to do."""

    pause_ms: float
    requests: tuple[Request, ...]
    in_flight: int | None = None
    """At most so many at a time, as from a benchmark; the rest come as others end."""


class End(Enum):
    """How a daemon's process ends."""

    KILLED = auto()
    """Without a word."""
    INTERRUPTED = auto()
    """SIGINT: it says so, and what is in flight is left."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the daemon."""

    for_ms: float
    end: End
    pause_ms: float
    """Until the next one starts."""
    loses_gpu: bool = False
    """It ends because a GPU has fallen off the bus; with the next one it is back."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine, what is asked of it, and what happens to it."""

    about: str
    setting: Setting
    bursts: tuple[Burst, ...]
    """Once, or for ever: each begins when the one before is done, so that the prover is never overrun for long."""
    lives: tuple[Life, ...] = ()
    """After these, in turn, comes one without end."""


def _each(count: int, kind: Kind, every_ms: float = 0, **request: Fault | Priority | None) -> tuple[Request, ...]:
    return tuple(Request(i * every_ms, kind, **request) for i in range(count))  # type: ignore[arg-type]


_TWO_GPUS = Setting(gpus=2, synth_workers=12, foreign=Foreign(1, 400_000, 60_000, 0.6))

DAY: Final = Scenario(
    "a day in short: every kind of proof on two GPUs, with pauses and a few failures",
    _TWO_GPUS,
    (
        Burst(
            2_000,
            (
                Request(0, POREP),
                Request(3_000, POREP),
                Request(5_000, POREP),
                Request(20_000, POREP),
                Request(60_000, WINNING, priority=Priority.CRITICAL),
                Request(62_000, POREP),
                Request(64_000, POREP),
            ),
        ),
        Burst(25_000, (Request(0, SNAP), Request(20_000, WINDOW), Request(30_000, POREP, Fault.SYNTHESIS))),
        Burst(60_000, (Request(0, POREP),)),
        Burst(20_000, (Request(0, POREP, Fault.PROVE_START), Request(2_000, POREP), Request(15_000, WINNING))),
        Burst(40_000, (Request(0, POREP, Fault.SELF_CHECK), Request(1_000, SNAP), Request(30_000, WINDOW))),
    ),
)

STARVED: Final = Scenario(
    "one GPU that proves faster than the CPU can prepare: gaps in the middle of proofs",
    Setting(synth_workers=7, spread=0.12),
    (Burst(1_000, _each(8, POREP), in_flight=3),),
)

BLOCKED: Final = Scenario(
    "work waits and the CPU has none of it: parameters that evict each other, little memory, a batch window",
    Setting(budget_gib=110, max_batch=2, batch_wait_ms=20_000, queue_target=4, dispatchers=1),
    (
        Burst(1_000, (Request(0, SNAP), Request(5_000, WINDOW), Request(8_000, SNAP))),
        Burst(30_000, (Request(0, WINDOW), Request(1_000, SNAP), Request(60_000, WINNING))),
    ),
)

BATCHED: Final = Scenario(
    "PoRep proofs that wait for each other to be proved together",
    Setting(max_batch=3, batch_wait_ms=30_000),
    (Burst(1_000, _each(3, POREP, 4_000)), Burst(20_000, (*_each(2, POREP, 5_000), Request(120_000, POREP)))),
)

BOUND: Final = Scenario(
    "the GPU is the bottleneck, and never idle",
    Setting(synth_workers=16, kernel_ms=3_750, barrier_probability=0.02, spread=0.08),
    (Burst(1_000, _each(8, POREP), in_flight=4),),
)

HANDOFF: Final = Scenario(
    "work is ready, but it takes a worker long to get it onto the GPU",
    Setting(
        generation=Generation.DUAL, workers_per_gpu=1, synth_workers=16, slow_trim_probability=0.5, slow_trim_ms=1_200
    ),
    (Burst(1_000, _each(6, POREP), in_flight=3),),
)

IDLE: Final = Scenario(
    "a prover that waits for work, and gets one small proof every quarter of an hour",
    _TWO_GPUS,
    (Burst(240_000, (Request(0, WINNING),)), Burst(900_000, (Request(0, WINNING),))),
)

TRICKLE: Final = Scenario(
    "one proof at a time: its latency is the CPU's, and no fault of anybody",
    Setting(),
    (Burst(5_000, (Request(0, POREP),)), Burst(90_000, (Request(0, SNAP),)), Burst(60_000, (Request(0, POREP),))),
)

FAILING: Final = Scenario(
    "everything that can fail fails, one job after another, beside a few that don't",
    Setting(synth_workers=10),
    (
        Burst(
            1_000,
            tuple(Request(i * 25_000, POREP, fault) for i, fault in enumerate((None, *Fault))),
        ),
        Burst(
            20_000,
            (
                Request(0, SNAP, Fault.PROVING),
                Request(1_000, WINDOW, Fault.PROVE_START),
                Request(40_000, POREP, again_after_ms=30_000),
                Request(60_000, SNAP, again_after_ms=15_000),
            ),
        ),
        Burst(
            30_000,
            (Request(0, WINDOW, Fault.SYNTHESIS), Request(60_000, WINNING, Fault.PROVING), Request(90_000, POREP)),
        ),
    ),
)

DYING: Final = Scenario(
    "a daemon that is killed, interrupted and started again in the midst of its work",
    Setting(synth_workers=10),
    (Burst(1_000, _each(9, POREP), in_flight=3),),
    (
        Life(150_000, End.KILLED, 6_000),
        Life(170_000, End.INTERRUPTED, 4_000),
        Life(45_000, End.KILLED, 30_000, loses_gpu=True),
    ),
)

TWO_GPUS: Final = Scenario(
    "two GPUs, two workers each, all kinds mixed",
    replace(_TWO_GPUS, synth_workers=14),
    (
        Burst(
            1_000,
            (
                *_each(4, POREP, 2_000),
                Request(30_000, SNAP),
                Request(50_000, WINDOW),
                Request(70_000, WINNING, priority=Priority.CRITICAL),
                *(replace(one, after_ms=one.after_ms + 90_000) for one in _each(4, POREP, 10_000)),
            ),
        ),
        Burst(30_000, (Request(0, WINNING), *_each(2, SNAP, 1_000))),
    ),
)

POSTDEADLINE: Final = Scenario(
    "WindowPoSt and WinningPoSt in the midst of sealing: each waits for its turn, and one overwrites another",
    Setting(synth_workers=12, kernel_ms=4_500),
    (
        Burst(
            1_000,
            (
                *_each(5, POREP, 1_000),
                Request(100_000, WINNING, priority=Priority.CRITICAL),
                Request(101_000, WINNING, priority=Priority.CRITICAL),
                Request(101_500, WINNING, priority=Priority.CRITICAL),
                Request(160_000, WINDOW, priority=Priority.HIGH),
                Request(160_500, WINDOW, priority=Priority.HIGH),
                Request(200_000, POREP),
                Request(230_000, WINNING, priority=Priority.CRITICAL),
            ),
        ),
    ),
)

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        "day": DAY,
        "starved": STARVED,
        "blocked": BLOCKED,
        "batched": BATCHED,
        "bound": BOUND,
        "handoff": HANDOFF,
        "idle": IDLE,
        "trickle": TRICKLE,
        "failing": FAILING,
        "dying": DYING,
        "two-gpus": TWO_GPUS,
        "postdeadline": POSTDEADLINE,
    }
)
