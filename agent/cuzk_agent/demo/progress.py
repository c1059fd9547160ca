"""Where an engine's jobs and units are and what becomes of them, as they go and as the truth accounts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cuzk_agent.demo.jobs import Call, Job, Unit
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.truth import Account, JobTruth, Outcome, Queue, Tally


class Progress:
    """All jobs of one engine. Each change is made to the jobs and their units and to the truth at once."""

    def __init__(self, process: Process, tally: Tally, job_over: Callable[[], None], *, keep: bool) -> None:
        """`job_over` is called whenever nothing is left of a job. Without `keep` jobs that are over are forgotten."""
        self._process = process
        self._tally = tally
        self._job_over = job_over
        self._keep = keep
        self._jobs: dict[Job, None] = {}
        """Those of which something is left, oldest first."""
        self.account = Account(process.setting.gpus, keep=keep)
        self.job_truths: list[JobTruth] = []

    def enter(self, job: Job) -> None:
        """A job has come to the engine, and all its units wait."""
        self._jobs[job] = None
        if self._keep:
            self.job_truths.append(job.truth)
        self.account.enter(Queue.WAITING, self._process.clock_ms(), len(job.units))

    def unite(self, jobs: Sequence[Job]) -> Unit:
        """Jobs that are proved together have one unit in the place of all theirs."""
        united = Unit(jobs[0], None, batch=tuple(jobs))
        for job in jobs:
            for unit in job.units:
                self.move(unit, None)
            job.units, job.left = [], 1
        jobs[0].units = [united]
        self.account.enter(Queue.WAITING, self._process.clock_ms())
        return united

    def kinds_in_use(self) -> set[str]:
        """The names of those of the jobs that are dispatched and not over."""
        return {job.kind.name for job in self._jobs if job.dispatched}

    def move(self, unit: Unit, queue: Queue | None) -> None:
        """The unit moves on, for as long as it counts."""
        if unit.queue is None:
            return
        at_ms = self._process.clock_ms()
        self.account.leave(unit.queue, at_ms)
        unit.queue = queue
        if queue is not None:
            self.account.enter(queue, at_ms)

    def pick_up(self, unit: Unit, gpu: int) -> None:
        """A worker of this GPU has taken it, if it counts."""
        if unit.queue is not None:
            self.move(unit, None)
            unit.handed_to = gpu
            self.account.pick_up(gpu, self._process.clock_ms())

    def start(self, unit: Unit, gpu: int) -> None:
        """Its span opens."""
        self._hand_over_ends(unit)
        unit.span = self.account.start(gpu, unit.job.truth, self._process.clock_ms())

    def end(self, unit: Unit, gpu: int) -> None:
        """Its span closes, in whatever way."""
        assert unit.span is not None
        self.account.end(gpu, unit.span, self._process.clock_ms())

    def prove(self, unit: Unit) -> None:
        """Its proof is there."""
        self._decide_unit(unit, Outcome.PROVED)

    def lose(self, unit: Unit) -> None:
        """It is not there any more, and nobody in the daemon knows."""
        self._give_up(unit, Outcome.LOST)
        self.decide_job(unit.job, Outcome.LOST)

    def fail(self, unit: Unit, *, siblings_go_on: bool = False) -> None:
        """A unit fails, and with it its job."""
        self._give_up(unit, Outcome.FAILED)
        for job in unit.jobs:
            self.decide_job(job, Outcome.FAILED)
            if not siblings_go_on:
                job.given_up = True
                for sibling in job.units:
                    if sibling.outcome is None and sibling.span is None:
                        self._give_up(sibling, Outcome.DROPPED)

    def leave(self, unit: Unit) -> None:
        """Nothing is left of the unit."""
        for job in unit.jobs:
            job.left -= 1
            if not job.left:
                del self._jobs[job]
                self._job_over()

    def abandon(self) -> list[Call]:
        """The engine ends, with its last line. Returns the calls that are still waiting for an answer."""
        self.account.finish(self._process.last_line_ms)
        unanswered = []
        for job in self._jobs:
            for unit in job.units:
                self._decide_unit(unit, Outcome.ABANDONED)
            if job.truth.outcome is None:
                unanswered.append(job.call)
                self.decide_job(job, Outcome.ABANDONED)
            else:
                self._job_over()
        return unanswered

    def decide_job(self, job: Job, outcome: Outcome) -> None:
        """A job's outcome is known; the first one stands."""
        self._tally.decide(job.truth, outcome)

    def _decide_unit(self, unit: Unit, outcome: Outcome) -> None:
        if unit.outcome is None:
            unit.outcome = outcome
            self._tally.units[outcome] += 1

    def _give_up(self, unit: Unit, outcome: Outcome) -> None:
        """A unit that has not started does not count any more, though the daemon may still be busy with it."""
        self._decide_unit(unit, outcome)
        self._hand_over_ends(unit)
        self.move(unit, None)

    def _hand_over_ends(self, unit: Unit) -> None:
        if unit.handed_to is not None:
            self.account.hand_over_ends(unit.handed_to, self._process.clock_ms())
            unit.handed_to = None
