"""What the agent finds in a simulated prover's log is what was true of the prover.

Busy time, gaps and counts are the truth to the millisecond and to the last one, wherever TIMELINE lines tell when a
span began and ended. For idleness by cause the log itself is not exact: a TIMELINE line bears its time in whole
milliseconds, as the truth does, but when a job was enqueued or a unit failed is told by a tracing line, whose time on
the engine's clock is known to 1 ms. So each stretch of one cause may be off by that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cuzk_agent.demo.prover import Written, write_log
from cuzk_agent.demo.scenario import SCENARIOS, Fault, Generation, Scenario
from cuzk_agent.demo.truth import Cause, GpuTruth, JobTruth, Outcome, Tally, Truth
from cuzk_agent.timeline.ledger import Gap
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import Boundary, GpuState, ProofOutcome, TimelineState, UnitOutcome

START_UNIX_MS = 1796054060562.0
EDGE_MS = 1
GRACE_MS = 6000
"""When a unit fails that had come to a GPU, the agent waits until the whole second after 5 s for the daemon to give up
its siblings, too, which it is told of only as their turn comes. Until then they count."""
OVERTAKEN_MS = 1250
"""A whole proof that another one has overwritten is known to be lost after the other was picked up: with the next whole
second, a quarter of a second later at least. Until then it counts."""


@dataclass(frozen=True)
class Found:
    """What the agent makes of a log."""

    state: TimelineState
    gaps: dict[str, list[Gap]]

    def gpu(self, gpu: int) -> GpuState:
        return self.state.gpus[str(gpu)]


def nameable(scenario: Scenario) -> Scenario:
    """Without the failures that the daemon logs without saying whose they are."""
    bursts = tuple(
        replace(burst, requests=tuple(request for request in burst.requests if not request.nameless))
        for burst in scenario.bursts
    )
    return replace(scenario, bursts=bursts)


def simulate(scenario: Scenario, seed: int, speed: float = 1.0, until_ms: float | None = None) -> tuple[Written, bytes]:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        written = write_log(path, scenario, seed, start_unix_ms=START_UNIX_MS, speed=speed, until_ms=until_ms)
        return written, path.read_bytes()


def follow(log: bytes) -> Found:
    gaps: dict[str, list[Gap]] = defaultdict(list)
    pipeline = Pipeline(on_gap=lambda _, gap: gaps[gap.gpu].append(gap))
    pipeline.feed(log.split(b"\n")[:-1])
    pipeline.finish()
    return Found(pipeline.state(), gaps)


def assert_counts(found: Found, truth: Truth, torn: int) -> None:
    state = found.state
    assert {name: count for name, count in state.events.items() if count} == truth.events
    assert (state.torn_recovered, state.torn_lost) == (torn, 0)
    assert not any(state.unparsed.values())
    assert state.late_events == 0
    assert state.engine_restarts == truth.engines - 1
    assert {str(o): state.unit_outcomes[o] for o in UnitOutcome} == {str(o): truth.units.get(o, 0) for o in Outcome}
    jobs = {(kind, str(outcome)): count for (kind, outcome), count in state.proof_outcomes.items() if count}
    assert jobs == {(kind, str(outcome)): count for (kind, outcome), count in truth.jobs.items() if count}


def untold_ends(truth: Truth) -> int:
    """Spans at most whose end no TIMELINE line tells: of units that failed, or were proved when their engine died."""
    return truth.units.get(Outcome.FAILED, 0) + 2 * (truth.engines - 1)


def assert_spans(
    found: GpuState, gaps: Sequence[Gap], truth: GpuTruth, open_gap_ms: int | None = None, *, untold: int = 0
) -> None:
    assert found.spans == truth.spans
    assert round(found.busy_seconds * 1000) == pytest.approx(truth.busy_ms, abs=EDGE_MS * untold)
    assert len(gaps) == len(truth.gaps)
    off_ms = [
        abs(gap.start_ms - true.start_ms) + abs(gap.end_ms - true.end_ms)
        for gap, true in zip(gaps, truth.gaps, strict=True)
    ]
    assert max(off_ms, default=0) <= (EDGE_MS if untold else 0)
    assert sum(off_ms) <= EDGE_MS * untold
    within_ms = sum(gap.end_ms - gap.start_ms for gap in truth.gaps if gap.within_job)
    cross_ms = truth.gap_ms - within_ms
    boundary_ms = {boundary: seconds * 1000 for boundary, seconds in found.boundary_seconds.items()}
    assert boundary_ms[Boundary.WITHIN_JOB] == pytest.approx(within_ms, abs=EDGE_MS * untold + 0.001)
    assert boundary_ms[Boundary.CROSS_JOB] == pytest.approx(cross_ms, abs=EDGE_MS * untold + 0.001)
    if open_gap_ms is not None:
        assert found.open_gap_seconds is not None
        assert sum(found.open_gap_seconds.values()) * 1000 == pytest.approx(open_gap_ms, abs=EDGE_MS)


def assert_causes(found: GpuState, truth: GpuTruth, slack_ms: float = 0.0) -> None:
    assert found.idle_seconds.keys() - set(Cause) == {"unknown"}
    off_ms = {cause: found.idle_seconds[cause] * 1000 - truth.idle_ms[cause] for cause in Cause}  # type: ignore[index]
    for cause, off in off_ms.items():
        assert abs(off) <= EDGE_MS * (truth.stretches[cause] + 1) + slack_ms, (cause, off_ms)
    assert sum(off_ms.values()) == pytest.approx(0, abs=EDGE_MS + 0.5)


def slack_ms(scenario: Scenario, truth: Truth) -> float:
    """What two rules of the agent may cost, which cannot be better with what a log tells in time."""
    drops = {Fault.PROVING, Fault.PROVING_PANIC}
    failures = sum(request.fault in drops for burst in scenario.bursts for request in burst.requests)
    return GRACE_MS * failures + OVERTAKEN_MS * truth.units.get(Outcome.LOST, 0)


def assert_agrees(scenario: Scenario, seed: int, speed: float) -> None:
    written, log = simulate(scenario, seed, speed)
    truth, found = written.truth, follow(log)
    assert_counts(found, truth, written.torn)
    for gpu, of_gpu in truth.gpus.items():
        assert_spans(found.gpu(gpu), found.gaps[str(gpu)], of_gpu, untold=untold_ends(truth))
        assert_causes(found.gpu(gpu), of_gpu, slack_ms(scenario, truth))
        wasted_ms = sum(found.gpu(gpu).wasted_seconds.values()) * 1000
        assert wasted_ms == pytest.approx(of_gpu.wasted_ms, abs=2)
        assert found.gpu(gpu).idle_seconds["unknown"] == 0  # type: ignore[index]
    if scenario.setting.generation is not Generation.SINGLE or len(truth.gpus) == 1:
        assert_kernels(found, truth)


def assert_kernels(found: Found, truth: Truth) -> None:
    of_gpus = [gpu.kernel_seconds or 0.0 for gpu in found.state.gpus.values()]
    true_ms = sum(gpu.kernel_ms for gpu in truth.gpus.values())
    # Of several GPUs nobody knows whose the first kernels were that an engine logs.
    unknown_ms = 8_000 * truth.engines if len(truth.gpus) > 1 else 0
    assert true_ms - unknown_ms <= round(sum(of_gpus) * 1000) <= true_ms


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "batched"])
def test_the_agent_finds_the_truth(name: str, seed: int) -> None:
    assert_agrees(nameable(SCENARIOS[name]), seed, 1.0)


# What a failing example has too much of is soon found by hand, and shrinking it takes minutes.
@settings(max_examples=80, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    name=st.sampled_from([name for name in SCENARIOS if name != "batched"]),
    seed=st.integers(0, 10**6),
    speed=st.sampled_from([1.0, 10.0, 60.0, 7.3]),
    generation=st.sampled_from(Generation),
    noise=st.sampled_from([0, 0, 1, 3]),
    disorder=st.sampled_from([0.0, 0.02, 0.3]),
    colours=st.booleans(),
)
def test_the_agent_finds_the_truth_of_any_prover(
    name: str, seed: int, speed: float, generation: Generation, noise: int, disorder: float, colours: bool
) -> None:
    scenario = nameable(SCENARIOS[name])
    setting = replace(
        scenario.setting,
        generation=generation,
        workers_per_gpu=1 if generation is Generation.SINGLE else scenario.setting.workers_per_gpu,
        noise=noise,
        disorder_probability=disorder,
        colours=colours,
    )
    assert_agrees(replace(scenario, setting=setting), seed, speed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["day", "starved", "two-gpus", "handoff", "bound"])
def test_in_the_midst_of_work(name: str, seed: int) -> None:
    written, log = simulate(SCENARIOS[name], seed, until_ms=90_000 + 47_777 * seed)
    truth, found = written.truth, follow(log)
    assert truth.open_jobs > 0
    for gpu, of_gpu in truth.gpus.items():
        assert_spans(found.gpu(gpu), found.gaps[str(gpu)], of_gpu, of_gpu.open_gap_ms if of_gpu.spans else None)
        assert_causes(found.gpu(gpu), of_gpu)


@pytest.mark.parametrize("name", ["day", "starved", "postdeadline"])
def test_read_as_it_is_written(name: str) -> None:
    scenario = nameable(SCENARIOS[name])
    written, log = simulate(scenario, 3, speed=10)
    gaps: dict[str, list[Gap]] = defaultdict(list)
    pipeline = Pipeline(on_gap=lambda _, gap: gaps[gap.gpu].append(gap))
    start_s = 5000.0
    now_s, batch = start_s, []
    for line in log.split(b"\n")[:-1]:
        batch.append(line)
        if line.startswith(b"TIMELINE,") and line.count(b",") == 5 and b"\x1b" not in line:
            due_s = start_s + int(line.split(b",")[1]) / 1000
            if due_s > now_s + 0.1:
                now_s = due_s + 0.02
                unix_s = START_UNIX_MS / 1000 + now_s - start_s
                pipeline.feed(batch, Arrival(now_s, unix_s, live=True))
                pipeline.settle(now_s, unix_s)
                batch = []
    pipeline.feed(batch, Arrival(now_s + 20, START_UNIX_MS / 1000 + now_s + 20 - start_s, live=True))
    pipeline.finish()
    found = Found(pipeline.state(), gaps)
    assert_counts(found, written.truth, written.torn)
    for gpu, of_gpu in written.truth.gpus.items():
        assert_spans(found.gpu(gpu), found.gaps[str(gpu)], of_gpu)
        assert_causes(found.gpu(gpu), of_gpu, slack_ms(scenario, written.truth))


@pytest.mark.parametrize("name", ["two-gpus", "failing", "dying"])
def test_speed_changes_nothing_but_the_scale(name: str) -> None:
    # Of failures the agent waits for more, in seconds that know no speed.
    scenario = nameable(SCENARIOS[name])
    (slow, slow_log), (fast, fast_log) = (simulate(scenario, 5, speed) for speed in (1.0, 60.0))
    assert slow.truth.events == fast.truth.events
    assert slow.truth.units == fast.truth.units
    assert slow.truth.jobs == fast.truth.jobs
    found_slow, found_fast = follow(slow_log), follow(fast_log)
    for gpu, truth in slow.truth.gpus.items():
        a, b = found_slow.gpu(gpu), found_fast.gpu(gpu)
        assert a.spans == b.spans
        # Each edge is rounded to a millisecond of its log, which is 60 of the slow one's.
        edges = 2 * (len(truth.gaps) + 1) * slow.truth.engines
        assert b.busy_seconds * 60 == pytest.approx(a.busy_seconds, abs=0.060 * edges)
        for cause in Cause:
            stretches = truth.stretches[cause] + 1
            slack_s = slack_ms(scenario, slow.truth) / 1000 * 60
            assert b.idle_seconds[cause] * 60 == pytest.approx(  # type: ignore[index]
                a.idle_seconds[cause],  # type: ignore[index]
                abs=0.060 * 2 * stretches + slack_s,
            )


def test_of_a_batch_the_log_hides_who_waits() -> None:
    # Jobs of a batch but the first seem to wait behind their own synthesis.
    scenario = SCENARIOS["batched"]
    written, log = simulate(scenario, 1)
    found = follow(log)
    assert_counts(found, written.truth, written.torn)
    for gpu, truth in written.truth.gpus.items():
        state = found.gpu(gpu)
        assert_spans(state, found.gaps[str(gpu)], truth)
        idle_ms = {str(cause): seconds * 1000 for cause, seconds in state.idle_seconds.items()}
        in_synthesis_ms = idle_ms["fill"] + idle_ms["starved"]
        assert in_synthesis_ms == pytest.approx(truth.idle_ms[Cause.FILL] + truth.idle_ms[Cause.STARVED], abs=10)
        assert idle_ms["blocked"] == pytest.approx(truth.idle_ms[Cause.BLOCKED], abs=10)


def test_nameless_failures_cost_causes_and_spans_only_where_they_are() -> None:
    written, log = simulate(SCENARIOS["failing"], 1)
    found = follow(log)
    state, truth = found.state, written.truth
    assert {name: count for name, count in state.events.items() if count} == truth.events
    assert state.trouble["synthesis_failed", ""] > 0
    assert state.gpus["0"].spans == truth.gpus[0].spans
    failed = sum(count for (_, outcome), count in truth.jobs.items() if outcome is Outcome.FAILED)
    counted = sum(count for (_, outcome), count in state.proof_outcomes.items() if outcome is ProofOutcome.FAILED)
    nameless = sum(request.nameless for burst in SCENARIOS["failing"].bursts for request in burst.requests)
    assert counted == failed - nameless


def test_of_a_log_without_tracing_lines_spans_are_the_truth() -> None:
    dying = SCENARIOS["dying"]
    # That an engine is another one shows in its offsets, unless it dies when it has hardly begun.
    quiet = replace(dying, setting=replace(dying.setting, level="ERROR", kernel_lines=False), lives=dying.lives[:2])
    written, log = simulate(quiet, 1)
    found = follow(log)
    (truth,) = written.truth.gpus.values()
    assert {name: count for name, count in found.state.events.items() if count} == written.truth.events
    assert_spans(found.state.gpus["unknown"], found.gaps["unknown"], truth)
    assert not found.state.evidence["jobs"]


def test_a_jobs_first_outcome_stands_and_what_is_proved_again_is_repeated() -> None:
    tally = Tally()
    failed, proved, again = (JobTruth("job", "porep-c2") for _ in range(3))
    for job, outcome in (
        (failed, Outcome.FAILED),
        (failed, Outcome.PROVED),
        (proved, Outcome.PROVED),
        (again, Outcome.PROVED),
    ):
        tally.decide(job, outcome)
    assert tally.jobs == {("porep-c2", Outcome.FAILED): 1, ("porep-c2", Outcome.PROVED): 2}
    assert [job.repeated for job in (failed, proved, again)] == [False, False, True]
