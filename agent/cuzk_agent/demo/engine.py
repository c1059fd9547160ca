"""One life of the daemon: its stages put together, its first words and its last."""

from __future__ import annotations

from collections.abc import Callable

from cuzk_agent.demo.dispatch import Dispatcher
from cuzk_agent.demo.finishing import Finisher
from cuzk_agent.demo.gpus import Gpus
from cuzk_agent.demo.jobs import Call, Job, Unit
from cuzk_agent.demo.lines import Tracing
from cuzk_agent.demo.locks import Tracker
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import ENGINE, Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.synthesis import Synthesis
from cuzk_agent.demo.truth import JobTruth, Tally
from cuzk_agent.demo.workers import Workers
from cuzk_agent.demo.world import World

_DAEMON = "cuzk_daemon"


class Engine:
    """From its start until its process ends."""

    def __init__(self, world: World, gpus: Gpus, tally: Tally, job_over: Callable[[], None], *, keep: bool) -> None:
        """`job_over` is called whenever nothing is left of a job."""
        self.process = process = Process(world)
        self.progress = progress = Progress(process, tally, job_over, keep=keep)
        self._submitted = 0
        memory, tracker = Memory(process, progress), Tracker(process)
        finisher = Finisher(process, progress, memory, tracker)
        self._workers = Workers(process, progress, memory, tracker, finisher, gpus, on_pick_up=self._feed)
        self._synthesis = Synthesis(process, progress, memory, self._workers)
        self._dispatcher = Dispatcher(process, progress, memory, self._synthesis)
        self._start()

    def submit(self, call: Call) -> None:
        """A caller's request arrives."""
        kind, process = call.request.kind, self.process
        bad_partition = process.random.randrange(kind.units)
        job = Job(call, JobTruth(call.job_id, kind.name), self._submitted, process.now_ms, bad_partition)
        job.units = [Unit(job, partition) for partition in (range(kind.partitions) if kind.partitions else (None,))]
        job.left = len(job.units)
        self._submitted += 1
        self.progress.enter(job)
        self._dispatcher.enqueue(job)

    def interrupt(self) -> None:
        """SIGINT comes: it says its last words."""
        for line in shutdown_lines(self.process.now_ms):
            self.process.say(line)

    def _feed(self) -> None:
        # What a worker has picked up makes room in the queue for what is synthesized next.
        self._synthesis.feed()

    def _start(self) -> None:
        setting, trace = self.process.setting, self.process.trace
        # Before the engine there is no clock of it: what the daemon says first does not count as time.
        trace("main", "cuzk-daemon starting", target=_DAEMON)
        trace("main", "configuration loaded", target=_DAEMON, listen="0.0.0.0:9820")
        trace("main", "rayon global thread pool configured", target=_DAEMON, rayon_threads=96)
        self.process.start_clock()
        trace("main", "starting cuzk engine", pipeline_enabled="true")
        trace(
            "main",
            "initializing GPU workers",
            num_gpus=setting.gpus,
            gpu_workers_per_device=setting.workers_per_gpu,
            total_workers=len(self._workers.all),
            gpus=list(range(setting.gpus)),
        )
        for worker in self.process.random.sample(self._workers.all, len(self._workers.all)):
            trace(
                worker.writer,
                "pipeline GPU worker started",
                worker_id=worker.worker_id,
                gpu=worker.gpu,
                sub_id=worker.sub_id,
            )
            self._workers.free(worker)


def shutdown_lines(time_ms: float) -> tuple[Tracing, ...]:
    """What an engine says last when it is interrupted, and what a killed one doesn't."""
    return (
        Tracing(time_ms, "main", "INFO", _DAEMON, "received SIGINT, shutting down", ()),
        Tracing(time_ms + 0.05, "main", "INFO", ENGINE, "shutting down cuzk engine", ()),
    )
