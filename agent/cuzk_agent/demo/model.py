"""A discrete-event model of the prover, whose log is an output of its state.

Callers (`callers`) submit jobs to a daemon, which may end and be started again. Its engine (`engine`) queues them by
priority and splits them into units (`dispatch`) once their kind's parameters are loaded and as far as memory allows
(`memory`), synthesizes these on the CPU (`synthesis`), proves them on the GPUs (`workers`) and finishes their proofs
(`finishing`). Beside the log stands what was true (`truth`). Pure: seeded, simulated milliseconds, no I/O and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from cuzk_agent.demo.callers import Callers
from cuzk_agent.demo.engine import Engine
from cuzk_agent.demo.gpus import Gpus, Trouble
from cuzk_agent.demo.lines import Line
from cuzk_agent.demo.scenario import End, Life, Scenario
from cuzk_agent.demo.truth import GpuTruth, JobTruth, KernelRun, Tally, Truth, add_waste
from cuzk_agent.demo.world import World

_QUIET_MS = 180_000
"""How long the daemon is left running when all is done."""
_XID_LOST = 79


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
        self.setting = scenario.setting
        self.gpus = Gpus(scenario.setting.gpus, keep=keep)
        self._keep = keep
        self._start_unix_ms = start_unix_ms
        self._world = World(scenario.setting, seed, speed)
        quiet = partial(self._world.later, _QUIET_MS, partial(self._stop, End.INTERRUPTED))
        self._callers = Callers(self._world, scenario.bursts, rounds, done=quiet)
        self._lives = iter(scenario.lives)
        self._lost_gpu: int | None = None
        self._engine: Engine | None = None
        self._engines = 0
        self._tally = Tally(keep=keep)
        self._past: list[tuple[list[GpuTruth], list[JobTruth]]] = []

    @property
    def now_ms(self) -> float:
        """How far the simulation has come."""
        return self._world.now_ms

    def lines(self, until_ms: float | None = None, min_lines: int | None = None) -> Iterator[Line]:
        """The log in the order in which things happen, up to a time of the log or until there are so many lines."""
        self._start()
        yield from self._world.run(math.inf if until_ms is None else until_ms * self._world.speed, min_lines)

    def truth(self) -> Truth:
        """What was true up to the last line that bears a time."""
        gpus = {gpu: GpuTruth() for gpu in range(self.setting.gpus)}
        lives = list(self._past)
        open_jobs = 0
        if self._engine is not None:
            lives.append(self._engine_truth(self._engine))
            open_jobs = sum(job.outcome is None for job in self._engine.progress.job_truths)
        for found, jobs in lives:
            for gpu, truth in enumerate(found):
                gpus[gpu].add(truth)
            add_waste(gpus, jobs)
        return Truth(
            gpus,
            dict(self._world.events),
            dict(self._tally.units),
            dict(self._tally.jobs),
            open_jobs,
            self._engines,
            tuple(self._kernel_runs()),
        )

    @staticmethod
    def _engine_truth(engine: Engine) -> tuple[list[GpuTruth], list[JobTruth]]:
        return engine.progress.account.truth(engine.process.last_line_ms), engine.progress.job_truths

    def _kernel_runs(self) -> Iterator[KernelRun]:
        for gpu, kernels in enumerate(self.gpus.kernels):
            for run in kernels:
                if run.end_ms <= self.now_ms:
                    start_ms, end_ms = run.barrier_ms
                    barrier = (self._unix_s(start_ms), self._unix_s(end_ms)) if end_ms > start_ms else None
                    yield KernelRun(gpu, self._unix_s(run.start_ms), self._unix_s(run.end_ms), barrier)

    def _unix_s(self, time_ms: float) -> float:
        return (self._start_unix_ms + time_ms / self._world.speed) / 1000

    # The daemon's lives

    def _start(self) -> None:
        self._engines += 1
        engine = Engine(self._world, self.gpus, self._tally, self._callers.job_over, keep=self._keep)
        self._engine, self._world.running = engine, engine.process
        if self._lost_gpu is not None:
            self.gpus.troubles.append(Trouble(self.now_ms, self._lost_gpu, None))
            self._lost_gpu = None
        life = next(self._lives, None)
        if life is not None:
            self._world.later(life.for_ms, partial(self._end, life), engine.process)
        self._callers.connect(engine.submit)

    def _end(self, life: Life) -> None:
        if life.loses_gpu:
            self._lost_gpu = self._world.random.randrange(self.setting.gpus)
            self.gpus.troubles.append(Trouble(self.now_ms, self._lost_gpu, _XID_LOST, present=False))
        self._stop(life.end)
        self._world.later(life.pause_ms, self._start)

    def _stop(self, end: End) -> None:
        engine = self._engine
        if engine is None:
            return
        if end is End.INTERRUPTED:
            engine.interrupt()
        self._engine = self._world.running = None
        self._callers.disconnect(engine.progress.abandon())
        self.gpus.stop(self.now_ms)
        if self._keep:
            self._past.append(self._engine_truth(engine))
