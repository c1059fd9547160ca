"""The ledger against the definitions, applied millisecond by millisecond."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby

from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.timeline.ledger import Gap
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import Boundary, Cause

EPOCH = datetime(2026, 11, 30, 14, 0, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Life:
    """When a unit did what."""

    job: str
    partition: int
    worker: int
    enqueued_ms: int | None
    synth_ms: int
    ready_ms: int
    picked_up_ms: int
    start_ms: int
    end_ms: int

    def stage(self, at_ms: int) -> str:
        for since_ms, stage in (
            (self.end_ms, "gone"),
            (self.start_ms, "gpu"),
            (self.picked_up_ms, "picked up"),
            (self.ready_ms, "ready"),
            (self.synth_ms, "synth"),
        ):
            if at_ms >= since_ms:
                return stage
        return "none" if self.enqueued_ms is None or at_ms < self.enqueued_ms else "waiting"


@dataclass
class Account:
    """What the model makes of one GPU: a cause for every millisecond, None for busy."""

    each_ms: list[Cause | None] = field(default_factory=list)
    gaps: list[tuple[int, int, Boundary, dict[Cause, int]]] = field(default_factory=list)


def model(lives: list[Life], gpus: int, announced: bool) -> list[Account]:
    until_ms = max(life.end_ms for life in lives)
    accounts = [Account() for _ in range(gpus)]
    reached = [False] * gpus
    for at_ms in range(until_ms):
        stages = [life.stage(at_ms) for life in lives]
        here = [
            [stage for stage, life in zip(stages, lives, strict=True) if life.worker // 2 == gpu] for gpu in range(gpus)
        ]
        idle = [gpu for gpu in range(gpus) if "gpu" not in here[gpu]]
        for gpu in set(range(gpus)) - set(idle):
            reached[gpu] = True
            accounts[gpu].each_ms.append(None)
        ended_ms = [
            max((life.end_ms for life in lives if life.worker // 2 == gpu and life.end_ms <= at_ms), default=0)
            for gpu in range(gpus)
        ]
        left = sum(stage in {"waiting", "synth", "ready"} for stage in stages)
        ready = stages.count("ready")
        for gpu in sorted(idle, key=lambda gpu: (ended_ms[gpu], gpu)):
            if "picked up" in here[gpu]:
                cause = Cause.HANDOFF
            else:
                cause = cause_of(stages, ready, left, announced=announced, reached=reached[gpu])
                ready, left = ready - 1, left - 1
            if cause is Cause.NO_WORK:
                reached[gpu] = False
            accounts[gpu].each_ms.append(cause)
    for gpu, account in enumerate(accounts):
        find_gaps(account, [life for life in lives if life.worker // 2 == gpu])
    return accounts


def cause_of(stages: list[str], ready: int, left: int, *, announced: bool, reached: bool) -> Cause:
    if left <= 0:
        return Cause.NO_WORK
    if ready > 0:
        return Cause.HANDOFF
    if "synth" not in stages:
        return Cause.BLOCKED
    return Cause.STARVED if reached and ("waiting" in stages or not announced) else Cause.FILL


def find_gaps(account: Account, lives: list[Life]) -> None:
    at_ms = 0
    for busy, stretch in groupby(account.each_ms, key=lambda cause: cause is None):
        causes = list(stretch)
        end_ms = at_ms + len(causes)
        before = [life for life in lives if life.end_ms <= at_ms]
        after = [life for life in lives if life.start_ms >= end_ms]
        if not busy and before and after:
            # Ties go by place in the log.
            last = max(enumerate(before), key=lambda each: (each[1].end_ms, each[0]))[1]
            first = min(after, key=lambda life: life.start_ms)
            boundary = Boundary.WITHIN_JOB if last.job == first.job else Boundary.CROSS_JOB
            account.gaps.append((at_ms, end_ms, boundary, dict(Counter(cause for cause in causes if cause))))
        at_ms = end_ms


def log_of(lives: list[Life], gpus: int) -> list[bytes]:
    def tracing(at_ms: int, text: str) -> bytes:
        time = EPOCH + timedelta(milliseconds=at_ms)
        return f"{time:%Y-%m-%dT%H:%M:%S.%fZ}  INFO cuzk_core::engine: {text}".encode()

    lines = [(0, tracing(0, "starting cuzk engine pipeline_enabled=true"))]
    for worker in range(2 * gpus):
        text = f"pipeline GPU worker started worker_id={worker} gpu={worker // 2} sub_id={worker % 2}"
        lines.append((0, tracing(0, text)))
    for job, each in groupby(sorted(lives, key=lambda life: life.job), key=lambda life: life.job):
        about = list(each)
        at_ms = about[0].enqueued_ms
        if at_ms is not None:
            count = len(about)
            lines.append((at_ms, tracing(at_ms, f"job enqueued job_id={job} proof_kind=porep-c2 priority=Normal")))
            text = f"dispatching per-partition synthesis (budget-gated) job_id={job} num_partitions={count}"
            lines.append((at_ms, tracing(at_ms, text)))
    for life in lives:
        at = f"partition={life.partition}"
        for at_ms, name, detail in (
            (life.synth_ms, "SYNTH_START", at),
            (life.ready_ms, "SYNTH_END", f"{at},synth_ms={life.ready_ms - life.synth_ms}"),
            (life.ready_ms, "GPU_QUEUE", at),
            (life.picked_up_ms, "GPU_PICKUP", f"worker={life.worker},{at}"),
            (life.start_ms, "GPU_START", f"worker={life.worker},{at}"),
            (life.end_ms, "GPU_END", f"worker={life.worker},{at},gpu_ms={life.end_ms - life.start_ms}"),
        ):
            lines.append((at_ms, f"TIMELINE,{at_ms},{name},{life.job},{detail}".encode()))
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


@st.composite
def lives_of(draw: st.DrawFn, gpus: int, announced: bool) -> list[Life]:
    short = st.sampled_from((0, 1, 2, 5, 30))
    long = st.sampled_from((0, 1, 20, 90, 400))
    free_ms = [0] * (2 * gpus)
    count = draw(st.integers(1, 12))
    jobs = [f"job-{draw(st.integers(0, 2))}" for _ in range(count)]
    synth_ms = [draw(st.integers(0, 900)) for _ in range(count)]
    lead_ms = {job: draw(long) for job in sorted(set(jobs))}
    begun: Counter[str] = Counter()
    lives = []
    for job, at_ms in sorted(zip(jobs, synth_ms, strict=True), key=lambda each: each[1]):
        worker = draw(st.integers(0, 2 * gpus - 1))
        ready_ms = at_ms + draw(long)
        picked_up_ms = max(ready_ms + draw(short), free_ms[worker])
        start_ms = free_ms[worker] = picked_up_ms + draw(short)
        end_ms = start_ms + 1 + draw(long)
        first_ms = min(each for name, each in zip(jobs, synth_ms, strict=True) if name == job)
        enqueued_ms = max(first_ms - lead_ms[job], 0) if announced else None
        lives.append(Life(job, begun[job], worker, enqueued_ms, at_ms, ready_ms, picked_up_ms, start_ms, end_ms))
        begun[job] += 1
    return lives


@given(st.integers(1, 3), st.booleans(), st.data())
def test_spans_gaps_and_causes_are_those_of_the_definitions(gpus: int, announced: bool, data: st.DataObject) -> None:
    lives = data.draw(lives_of(gpus, announced))
    gaps: list[Gap] = []
    pipeline = Pipeline(on_gap=lambda _, gap: gaps.append(gap))
    pipeline.feed(log_of(lives, gpus))
    pipeline.finish()
    assert pipeline.engine is not None
    ledger = pipeline.engine.ledger
    assert set(ledger.accounts) == {str(gpu) for gpu in range(gpus)}
    for gpu, meant in enumerate(model(lives, gpus, announced)):
        totals = ledger.accounts[str(gpu)].totals
        causes = Counter(meant.each_ms)
        assert totals.spans == sum(life.worker // 2 == gpu for life in lives)
        assert totals.busy_ms == causes.pop(None, 0)
        assert {cause: ms for cause, ms in totals.idle_ms.items() if ms} == dict(causes)
        found = [gap for gap in gaps if gap.gpu == str(gpu)]
        assert [(gap.start_ms, gap.end_ms, gap.boundary, gap.by_cause_ms) for gap in found] == meant.gaps
        for gap in found:
            assert gap.by_cause_ms[gap.cause] == max(gap.by_cause_ms.values())
        histogram = pipeline.state().gpus[str(gpu)].gap_seconds.values()
        assert sum(sum(each.counts) for each in histogram) == len(meant.gaps)
        assert round(sum(each.sum_seconds for each in histogram) * 1000) == sum(
            end - start for start, end, *_ in meant.gaps
        )
        if totals.spans:
            first_ms = min(life.start_ms for life in lives if life.worker // 2 == gpu)
            open_gap = ledger.open_gap(ledger.accounts[str(gpu)])
            assert open_gap is not None
            assert first_ms + totals.gap_ms + sum(open_gap.values()) == sum(totals.idle_ms.values())
        note(f"gaps {min(len(found), 3)}")
        for cause in causes:
            note(f"idle {cause}")
