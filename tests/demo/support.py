"""Parts of a simulated daemon that a test works by hand, and lines of its log by unit."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable

from cuzk_agent.demo.jobs import Call, Job, Unit
from cuzk_agent.demo.lines import Line, Timeline
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.scenario import POREP, Kind, Request, Setting
from cuzk_agent.demo.truth import JobTruth, Tally
from cuzk_agent.demo.world import World


class Bench:
    """A process of the daemon with its memory and its jobs, and nobody who works on them but the test."""

    def __init__(self, setting: Setting | None = None, speed: float = 1.0) -> None:
        self.world = World(setting or Setting(), 1, speed)
        self.process = self.world.running = Process(self.world)
        self.tally = Tally()
        self.over = 0
        """Jobs of which nothing is left."""
        self.progress = Progress(self.process, self.tally, self._job_over, keep=True)
        self.memory = Memory(self.process, self.progress)

    def _job_over(self) -> None:
        self.over += 1

    def job(self, kind: Kind = POREP) -> Job:
        """A job that has come to the engine."""
        number = len(self.progress.job_truths)
        job_id = f"job-{number}"
        job = Job(Call(Request(0, kind), job_id, number), JobTruth(job_id, kind.name), number, self.world.now_ms, 0)
        job.units = [Unit(job, partition) for partition in (range(kind.partitions) if kind.partitions else (None,))]
        job.left = len(job.units)
        self.progress.enter(job)
        return job

    def run(self, until_ms: float = math.inf) -> list[Line]:
        """Lets happen what is due."""
        return list(self.world.run(until_ms, None))


def events_by_unit(lines: Iterable[Line]) -> dict[tuple[str, str], list[Timeline]]:
    """The TIMELINE lines of each job id and partition."""
    units: dict[tuple[str, str], list[Timeline]] = defaultdict(list)
    for line in lines:
        if isinstance(line, Timeline):
            partition = re.search(r"partition=(\d+)", line.detail)
            units[line.job_id, partition[1] if partition else ""].append(line)
    return units
