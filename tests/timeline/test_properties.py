"""What must hold of the account whatever a log says, and in whatever pieces and order it comes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from unittest.mock import patch

from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.log.splitter import LineSplitter
from cuzk_agent.timeline import units
from cuzk_agent.timeline.engine import Engine, Limits
from cuzk_agent.timeline.ledger import STAGE_RANKS, Gap
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import Histogram, TimelineState
from cuzk_agent.windows import Rolling

EPOCH = datetime(2026, 11, 30, 14, 0, 0, tzinfo=UTC)
MONOTONIC_S = 50_000.0
"""What the agent's monotonic clock showed when the first engine started."""

JOBS = ("porep-1", "snap-1", "winpost-1", "wdpost-1-[3 25 0]", "anything")
KINDS = ("porep-c2", "snap-update", "winning-post", "window-post", "brand-new")
EVENTS = ("SYNTH_START", "SYNTH_END", "CHAN_SEND", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END", "FUTURE")
MESSAGES = (
    "job enqueued job_id={job} proof_kind={kind} priority=Normal queue_position=0",
    "dispatching per-partition synthesis (budget-gated) job_id={job} num_partitions={count} budget_available_gib=3",
    "partition synthesis failed error=no luck job_id={job} partition={partition}",
    "partition GPU proving failed error=CUDA job_id={job} partition={partition}",
    "skipping synthesis for failed job job_id={job} partition={partition}",
    "skipping GPU prove for failed partitioned job job_id={job} partition={partition}",
    "discarding GPU result for failed job job_id={job} partition={partition}",
    "partition GPU prove complete job_id={job} partition={partition} gpu_ms=300",
    "Phase 7: all partitions complete, proof assembled job_id={job} proof_len=1920 total_ms=4000 synth_ms=3 gpu_ms=4",
    "Phase 7: single proof self-check PASSED job_id={job}",
    "Phase 7: single proof self-check FAILED — proof will NOT be returned to caller job_id={job}",
    "Phase 7: per-partition verification results job_id={job} valid_partitions=[0] invalid_partitions=[1, 2]",
    "proof completed successfully (pipeline) proof_len=192 total_ms=5000 queue_ms=1 synth_ms=2 gpu_ms={gpu_ms}",
    "sector proof delivered from batch sector_idx=0 job_id={job} proof_len=192 total_ms=7000",
    "pipeline GPU worker started worker_id={worker} gpu={gpu} sub_id=0",
    "initializing GPU workers num_gpus=2 gpu_workers_per_device=2 total_workers=4 gpus=[0, 1]",
    "proof failed error=of no particular job",
    "cudaHostAlloc failed",
    "loading SRS from disk circuit_id={kind} path=/x size_gib=44",
    "SRS loaded successfully circuit_id={kind} elapsed_ms=300",
    "something nobody has seen before key=value",
)
SPAN_MESSAGES = (
    "GPU prove start failed error=CUDA error: out of memory",
    "GPU_TIMING prove_start returned worker_id={worker} partition={partition} spawn_blocking_wall_ms=250",
)


# --- logs ----------------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """A daemon as hypothesis has it: writes lines, at its own time."""

    now_ms: int = 0
    """Since the first engine's start."""
    epoch_ms: int = 0
    """When the present engine started."""
    set_by_ms: int = 0
    """How far ahead of where it began the wall clock was set."""

    @property
    def monotonic_s(self) -> float:
        return MONOTONIC_S + self.now_ms / 1000

    @property
    def unix_s(self) -> float:
        return EPOCH.timestamp() + (self.now_ms + self.set_by_ms) / 1000

    def event(self, name: str, job: str, detail: str, late_ms: int = 0) -> bytes:
        offset_ms = max(self.now_ms - self.epoch_ms - late_ms, 0)
        return f"TIMELINE,{offset_ms},{name},{job},{detail}".encode()

    def tracing(self, text: str, span: str = "", late_ms: int = 0) -> bytes:
        time = EPOCH + timedelta(milliseconds=self.now_ms + self.set_by_ms - late_ms)
        return f"{time:%Y-%m-%dT%H:%M:%S.%fZ}  INFO {span}cuzk_core::engine: {text}".encode()


@dataclass(frozen=True)
class Op:
    """One step of a random program."""

    what: str
    wait_ms: int = 0
    which: int = 0
    job: int = 0
    partition: int | None = None
    worker: int = 0
    number: int = 0
    late_ms: int = 0


ms = st.sampled_from((0, 0, 1, 2, 9, 40, 240, 800, 1500, 20_000))
long_ms = st.one_of(ms, st.sampled_from((61_000, 310_000, 650_000, 2_000_000, 5_000_000)))
partitions = st.sampled_from((None, 0, 1, 2))
events = st.builds(
    Op,
    st.just("event"),
    ms,
    st.integers(0, len(EVENTS) - 1),
    st.integers(0, len(JOBS) - 1),
    partitions,
    st.integers(0, 3),
    st.sampled_from((0, 1, 300, 40_000)),
    st.sampled_from((0, 0, 0, 3, 200, 900, 20_000, 7_200_000, -3, -7_200_000)),
)
tracing = st.builds(
    Op,
    st.just("tracing"),
    ms,
    st.integers(0, len(MESSAGES) + len(SPAN_MESSAGES) - 1),
    st.integers(0, len(JOBS) - 1),
    partitions,
    st.integers(0, 3),
    st.sampled_from((1, 2, 300)),
    st.sampled_from((0, 0, 2, 900, 20_000, 7_200_000, -3000, -7_200_000)),
)
lives = st.builds(
    Op,
    st.just("life"),
    ms,
    st.sampled_from((6, 6, 6, 5, 4, 3, 2, 1)),
    st.integers(0, len(JOBS) - 1),
    partitions,
    st.integers(0, 3),
    st.sampled_from((1, 30, 700, 6000)),
)
others = st.builds(
    Op,
    st.sampled_from(
        ("settle", "settle", "again", "kernel", "noise", "starting", "engine", "shutdown", "reset", "torn", "state")
    ),
    long_ms,
    st.integers(0, 3),
)
programs = st.one_of(
    st.lists(st.one_of(lives, events, tracing, others), min_size=1, max_size=60),
    st.lists(st.one_of(lives, lives, lives, events, tracing, others), min_size=15, max_size=60),
)
in_order = st.lists(
    st.one_of(
        lives,
        lives,
        events.filter(lambda op: 0 <= op.late_ms <= 200),
        tracing.filter(lambda op: 0 <= op.late_ms <= 2),
        st.builds(Op, st.just("nothing"), long_ms),
    ),
    min_size=1,
    max_size=60,
)
"""Programs whose lines are out of order by no more than lines ever are."""


def lines_of(op: Op, writer: Writer, last: bytes) -> Iterator[bytes]:  # noqa: C901  # one case for each kind of step
    """The lines that a step writes."""
    job, kind = JOBS[op.job], KINDS[op.job]
    where = "" if op.partition is None else f",partition={op.partition}"
    match op.what:
        case "event":
            yield writer.event(EVENTS[op.which], job, detail(EVENTS[op.which], op, kind), op.late_ms)
        case "life":
            # One unit on its way, up to some stage; time goes by between its lines.
            names = ("SYNTH_START", "SYNTH_END", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END")
            for name in names[: op.which]:
                yield writer.event(name, job, detail(name, op, kind))
                writer.now_ms += op.number
        case "tracing":
            values = {
                "job": job,
                "kind": kind,
                "count": op.number % 30,
                "partition": 0 if op.partition is None else op.partition,
                "worker": op.worker,
                "gpu": op.worker // 2,
                "gpu_ms": op.number,
            }
            text = (*MESSAGES, *SPAN_MESSAGES)[op.which].format_map(values)
            span = ""
            if op.which >= len(MESSAGES):
                span = (
                    f"gpu_worker{{worker_id={op.worker} gpu={op.worker // 2} job_id={job} proof_kind={kind} "
                    f"batch_size=1 partition={'None' if op.partition is None else f'Some({op.partition})'}}}: "
                )
            yield writer.tracing(text, span, op.late_ms)
        case "again":
            yield last
        case "kernel":
            yield b"CUZK_TIMING: gpu_tid=0 barrier_wait_ms=20"
            yield b"CUZK_TIMING: gpu_tid=0 tail_msm_ms=3 gpu_total_ms=200"
            yield b"CUZK_TIMING: mutex_held_ms=210 total_start_fn_ms=250"
        case "noise":
            yield b"some library speaks"
        case "torn":
            yield writer.event("GPU_START", job, "worker=0" + where)[:12] + b"CUZK_TIMING: prep_msm_ms=3"
        case "starting":
            yield writer.tracing("cuzk-daemon starting")
        case "engine":
            writer.epoch_ms = writer.now_ms
            yield writer.tracing("starting cuzk engine pipeline_enabled=true")
        case "shutdown":
            yield writer.tracing("shutting down cuzk engine")
        case "reset":
            writer.epoch_ms = writer.now_ms


def detail(name: str, op: Op, kind: str) -> str:
    where = "" if op.partition is None else f",partition={op.partition}"
    match name:
        case "SYNTH_START":
            return where[1:] or f"kind={kind}"
        case "SYNTH_END":
            return f"{where},synth_ms={op.number}"[1:] if op.number else where[1:] or "x"
        case "GPU_PICKUP" | "GPU_START":
            return f"worker={op.worker}{where}"
        case "GPU_END":
            return f"worker={op.worker}{where},gpu_ms={op.number}"
        case _:
            return where[1:] or "monolithic"


def steps_of(program: list[Op], writer: Writer) -> Iterator[tuple[Op, list[bytes]]]:
    last = b""
    for op in program:
        writer.now_ms += op.wait_ms
        lines = list(lines_of(op, writer, last))
        last = lines[-1] if lines else last
        yield op, lines


def written(program: list[Op], writer: Writer) -> Iterator[tuple[int, bytes]]:
    """Every line with the time at which it is written."""
    for op in program:
        writer.now_ms += op.wait_ms
        for line in lines_of(op, writer, b""):
            # A span whose start was lost reaches back further than a reader keeping up waits.
            yield writer.now_ms, re.sub(rb"gpu_ms=[0-9]+$", b"gpu_ms=0", line)


# --- what must hold -----------------------------------------------------------------------------------------------


def counters(state: TimelineState) -> dict[str, float]:  # noqa: C901  # one case for each kind of value
    """Every value of a state that may never fall, by its path."""
    found: dict[str, float] = {}

    def take(path: str, value: object) -> None:
        match value:
            case Histogram():
                for bucket, count in enumerate(value.counts):
                    found[f"{path}.{bucket}"] = count
                found[f"{path}.sum"] = value.sum_seconds
            case Rolling():
                found[f"{path}.count"], found[f"{path}.sum"] = value.total_count, value.total_sum_seconds
            case Mapping():
                for key, inner in value.items():
                    take(f"{path}.{key}", inner)
            case tuple():
                for index, inner in enumerate(value):
                    take(f"{path}.{index}", inner)
            case int() | float():
                found[path] = value
            case None:
                pass
            case _:
                raise AssertionError(f"{path} is {value!r}")

    for name in (
        "engine_restarts",
        "events",
        "late_events",
        "torn_recovered",
        "torn_lost",
        "unparsed",
        "synth_seconds",
        "ready_wait_seconds",
        "handoff_seconds",
        "span_seconds",
        "kernel_phase_seconds",
        "unit_outcomes",
        "proof_outcomes",
        "proof_latency_seconds",
        "trouble",
        "synth_rolling",
        "synth_active_seconds",
        "srs_load_seconds",
    ):
        take(name, getattr(state, name))
    for gpu, about in state.gpus.items():
        for name in (
            "spans",
            "busy_seconds",
            "idle_seconds",
            "wasted_seconds",
            "kernel_seconds",
            "gap_seconds",
            "boundary_seconds",
            "gap_rolling",
        ):
            take(f"gpu {gpu} {name}", getattr(about, name))
    return found


def assert_never_falls(before: Mapping[str, float], now: Mapping[str, float]) -> None:
    fell = {path: (value, now.get(path)) for path, value in before.items() if not now.get(path, -1.0) >= value}
    assert not fell


def assert_adds_up(engine: Engine, gaps: list[Gap]) -> None:
    """Every millisecond of every known GPU is in exactly one place."""
    ledger = engine.ledger
    elapsed_ms = ledger.frontier_ms - ledger.start_ms
    assert 0 <= ledger.synth_ms <= elapsed_ms
    assert all(ledger._in_stage[rank] >= 0 for rank in STAGE_RANKS.values())
    for gpu, account in ledger.accounts.items():
        totals = account.totals
        sum_ms = totals.busy_ms + sum(totals.idle_ms.values())
        assert sum_ms <= elapsed_ms if ledger._is_no_gpu(account) else sum_ms == elapsed_ms, gpu
        assert min(totals.busy_ms, *totals.idle_ms.values(), *totals.wasted_ms.values()) >= 0
        assert sum(totals.wasted_ms.values()) <= totals.busy_ms + 1e-6
        assert account.picked_up >= 0
        assert not (account.open and account.gap)
        if account.gap is not None and not ledger._is_no_gpu(account):
            assert sum(account.gap.by_cause_ms.values()) == ledger.frontier_ms - account.gap.start_ms
        here = [gap for gap in gaps if gap.gpu == gpu]
        assert totals.gap_ms == sum(gap.duration_ms for gap in here)
        assert sum(tally.count for tally in totals.gaps.values()) == len(here)
        for gap in here:
            assert sum(gap.by_cause_ms.values()) == gap.duration_ms >= 1
            assert gap.by_cause_ms[gap.cause] == max(gap.by_cause_ms.values())
        assert all(before.end_ms <= after.start_ms for before, after in pairwise(here))
        # Gaps lie within the idleness, from the first span on.
        assert totals.gap_ms + sum(account.gap.by_cause_ms.values() if account.gap else ()) <= sum(
            totals.idle_ms.values()
        )


@dataclass
class Books:
    """Looks over a pipeline's shoulder."""

    pipeline: Pipeline
    gaps: dict[Engine, list[Gap]] = field(default_factory=dict)
    begun_units: int = 0
    begun_jobs: int = 0
    seen: dict[str, float] = field(default_factory=dict)

    def on_gap(self, engine: Engine, gap: Gap) -> None:
        self.gaps.setdefault(engine, []).append(gap)

    def on_stop(self, engine: Engine) -> None:
        assert_adds_up(engine, self.gaps.get(engine, []))
        assert engine.units.idle

    def check(self) -> None:
        if self.pipeline.engine is not None:
            assert_adds_up(self.pipeline.engine, self.gaps.get(self.pipeline.engine, []))
        state = self.pipeline.state()
        now = counters(state)
        assert_never_falls(self.seen, now)
        self.seen = now
        assert min(state.in_flight.values()) >= 0
        assert sum(state.unit_outcomes.values()) <= self.begun_units
        assert sum(state.proof_outcomes.values()) + sum(state.jobs_open.values()) <= self.begun_jobs
        assert all(age >= 0 for age in (*state.oldest_age_seconds.values(), *state.job_oldest_age_seconds.values()))
        for about in state.gpus.values():
            if about.open_gap_seconds is not None:
                assert min(about.open_gap_seconds.values()) >= 0


@given(programs, st.sampled_from((None, False, True)), st.sampled_from((None, 3000)), st.integers(-200, 2000))
def test_every_millisecond_is_charged_once_and_no_counter_falls(
    program: list[Op], live: bool | None, age_ms: int | None, read_late_ms: int
) -> None:
    writer = Writer()
    books: Books

    def counted_unit(*args: object, **kwargs: object) -> units.Unit:
        books.begun_units += 1
        return Unit(*args, **kwargs)  # type: ignore[arg-type]

    def counted_job(*args: object, **kwargs: object) -> units.Job:
        books.begun_jobs += 1
        return Job(*args, **kwargs)  # type: ignore[arg-type]

    Unit, Job = units.Unit, units.Job  # noqa: N806
    pipeline = Pipeline(
        Limits(age_ms=age_ms),
        on_gap=lambda engine, gap: books.on_gap(engine, gap),  # noqa: PLW0108  # it comes later
        on_stop=lambda engine: books.on_stop(engine),  # noqa: PLW0108  # it comes later
    )
    books = Books(pipeline)
    with patch.object(units, "Unit", counted_unit), patch.object(units, "Job", counted_job):
        for op, lines in steps_of(program, writer):
            late_s = read_late_ms / 1000
            arrival = None if live is None else Arrival(writer.monotonic_s + late_s, writer.unix_s + late_s, live)
            if lines:
                pipeline.feed(lines, arrival)
            if op.what == "settle":
                pipeline.settle(writer.monotonic_s, writer.unix_s)
            books.check()
        pipeline.finish()
        books.check()
    note(f"spans {sum(about.spans for about in pipeline.state().gpus.values()) > 0}")
    note(f"gaps {bool(books.gaps)}")
    note(f"engines {pipeline.state().engine_restarts > 0}")


def fed(pieces: list[list[bytes]]) -> TimelineState:
    pipeline = Pipeline()
    for piece in pieces:
        pipeline.feed(piece)
    pipeline.finish()
    return pipeline.state()


@given(programs, st.data())
def test_pieces_make_no_difference(program: list[Op], data: st.DataObject) -> None:
    lines = [line for _, lines in steps_of(program, Writer()) for line in lines]
    log = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=20)))
    splitter = LineSplitter()
    pieces = [splitter.feed(log[start:end]) for start, end in zip([0, *cuts], [*cuts, len(log)], strict=True)]
    assert fed(pieces) == fed([lines])


@given(in_order, st.booleans(), st.sampled_from((Limits(), Limits(silence_ms=4000, age_ms=1500))), st.data())
def test_looking_more_often_makes_no_difference(
    program: list[Op], live: bool, limits: Limits, data: st.DataObject
) -> None:
    log = list(written([Op("engine"), *program], Writer()))
    looks = data.draw(st.lists(st.integers(0, 3), min_size=len(log), max_size=len(log)))

    def final(looks: list[int]) -> TimelineState:
        pipeline = Pipeline(limits)
        before_ms = 0
        for (at_ms, line), times in zip(log, looks, strict=True):
            for look in range(times):
                seconds = (before_ms + (at_ms - before_ms) * (look + 1) // times) / 1000
                pipeline.settle(MONOTONIC_S + seconds, EPOCH.timestamp() + seconds)
            seconds = at_ms / 1000
            pipeline.feed([line], Arrival(MONOTONIC_S + seconds, EPOCH.timestamp() + seconds, live))
            before_ms = at_ms
        pipeline.finish()
        # What the last look came to know of the time is no part of the account.
        return replace(
            pipeline.state(),
            stalled_seconds=0.0,
            oldest_age_seconds={},
            job_oldest_age_seconds={},
            engine_start_unix_seconds=None,
            last_event_unix_seconds=None,
            settled_unix_seconds=None,
            anchor_uncertainty_seconds=None,
            evidence={},
        )

    assert final(looks) == final([0] * len(log))
