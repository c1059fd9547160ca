"""What becomes of jobs and units, and that a unit counts in one place at a time."""

from __future__ import annotations

from cuzk_agent.demo.scenario import POREP, WINNING
from cuzk_agent.demo.truth import Cause, Outcome, Queue
from demo.support import Bench


def wait(bench: Bench, ms: float) -> None:
    bench.process.later(ms, lambda: None)
    bench.run()


def test_a_unit_goes_its_way() -> None:
    bench = Bench()
    job = bench.job(WINNING)
    (unit,) = job.units
    wait(bench, 10)
    bench.progress.move(unit, Queue.SYNTH)
    wait(bench, 20)
    bench.progress.move(unit, Queue.READY)
    wait(bench, 30)
    bench.progress.pick_up(unit, 0)
    wait(bench, 40)
    bench.progress.start(unit, 0)
    wait(bench, 50)
    bench.progress.end(unit, 0)
    bench.progress.prove(unit)
    bench.progress.decide_job(job, Outcome.PROVED)
    assert bench.over == 0
    bench.progress.leave(unit)
    wait(bench, 60)
    (gpu,) = bench.progress.account.truth(210)
    assert gpu.busy_ms == 50
    assert gpu.idle_ms == {Cause.BLOCKED: 10, Cause.FILL: 20, Cause.HANDOFF: 70, Cause.NO_WORK: 60}
    assert bench.over == 1
    assert bench.tally.units == {Outcome.PROVED: 1}
    assert bench.tally.jobs == {("winning-post", Outcome.PROVED): 1}


def test_with_a_unit_its_job_fails_and_what_has_not_started_is_dropped() -> None:
    bench = Bench()
    job = bench.job(POREP)
    started, failed, handed, *_ = job.units
    for unit in (started, handed):
        bench.progress.pick_up(unit, 0)
    bench.progress.start(started, 0)
    bench.progress.fail(failed)
    assert job.given_up
    assert started.outcome is None
    assert bench.tally.units == {Outcome.FAILED: 1, Outcome.DROPPED: 8}
    bench.progress.end(started, 0)
    bench.progress.prove(started)
    wait(bench, 10)
    # The one that was handed over does not count any more either, though a worker still has it.
    assert bench.progress.account.truth(10)[0].idle_ms == {Cause.NO_WORK: 10}
    bench.progress.decide_job(job, Outcome.PROVED)
    assert bench.tally.jobs == {("porep-c2", Outcome.FAILED): 1}


def test_siblings_may_go_on() -> None:
    bench = Bench()
    job = bench.job(POREP)
    bench.progress.fail(job.units[0], siblings_go_on=True)
    assert not job.given_up
    assert bench.tally.units == {Outcome.FAILED: 1}


def test_jobs_that_are_united_have_one_unit_and_one_fate() -> None:
    bench = Bench()
    jobs = [bench.job(POREP), bench.job(POREP)]
    unit = bench.progress.unite(jobs)
    wait(bench, 10)
    bench.progress.fail(unit)
    bench.progress.leave(unit)
    assert bench.over == 2
    assert bench.tally.units == {Outcome.FAILED: 1}
    assert bench.tally.jobs == {("porep-c2", Outcome.FAILED): 2}
    assert bench.progress.account.truth(10)[0].idle_ms == {Cause.BLOCKED: 10}


def test_what_is_open_when_the_engine_ends_is_abandoned() -> None:
    bench = Bench()
    decided, undecided = bench.job(POREP), bench.job(WINNING)
    bench.progress.fail(decided.units[0])
    assert bench.progress.abandon() == [undecided.call]
    # It is submitted again, so the callers wait for it on.
    assert bench.over == 1
    assert bench.tally.units == {Outcome.FAILED: 1, Outcome.DROPPED: 9, Outcome.ABANDONED: 1}
    assert bench.tally.jobs == {("porep-c2", Outcome.FAILED): 1, ("winning-post", Outcome.ABANDONED): 1}
