"""The daemon's GPU workers: they pick up what is queued, and share each GPU by a mutex, until the kernels are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush

from cuzk_agent.demo import faults
from cuzk_agent.demo.finishing import Finisher
from cuzk_agent.demo.gpus import Gpus, Kernels, Trouble
from cuzk_agent.demo.jobs import Proving, Unit, Worker
from cuzk_agent.demo.lines import Fields
from cuzk_agent.demo.locks import Mutex, Tracker
from cuzk_agent.demo.memory import Memory
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.scenario import Generation

_XID_CUDA = 31


class Workers:
    """All workers of all GPUs, and the queue before them."""

    def __init__(
        self,
        process: Process,
        progress: Progress,
        memory: Memory,
        tracker: Tracker,
        finisher: Finisher,
        gpus: Gpus,
        on_pick_up: Callable[[], None],
    ) -> None:
        """`on_pick_up` is called soon after a unit has left the queue."""
        self._process = process
        self._setting = setting = process.setting
        self._progress = progress
        self._memory = memory
        self._tracker = tracker
        self._finisher = finisher
        self._gpus = gpus
        self._on_pick_up = on_pick_up
        self.all = [
            Worker(number, *divmod(number, setting.workers_per_gpu))
            for number in range(setting.gpus * setting.workers_per_gpu)
        ]
        self._idle: deque[Worker] = deque()
        self._woken = 0
        """Workers that are about to look into the queue."""
        self._ready: list[tuple[tuple[int, int], int, Unit]] = []
        """By rank, then by age."""
        self._queued_ever = 0
        self._mutexes = [Mutex(process) for _ in range(setting.gpus)]

    @property
    def queued(self) -> int:
        """Units that wait for a worker."""
        return len(self._ready)

    def queue(self, unit: Unit, writer: str) -> None:
        """A unit is synthesized and waits for a worker."""
        split = self._setting.generation is Generation.SPLIT
        event = "GPU_QUEUE" if split else "CHAN_SEND"
        self._process.timeline(writer, event, unit, *(unit.details or ("monolithic",)))
        if split and unit.partition is None:
            self._overwrite()
        self._queued_ever += 1
        # Before proving was split the queue was a channel: first come, first served.
        heappush(self._ready, (unit.rank if split else (0, 0), self._queued_ever, unit))
        self._wake()

    def _overwrite(self) -> None:
        """All whole proofs share one key of the queue: a new one silently takes the place of one that waits."""
        for entry in self._ready:
            unit = entry[2]
            if unit.partition is None:
                self._ready.remove(entry)
                heapify(self._ready)
                self._progress.lose(unit)
                self._memory.let_go(unit)
                return

    def free(self, worker: Worker) -> None:
        """A worker has nothing to do."""
        self._idle.append(worker)
        self._wake()

    def _wake(self) -> None:
        while self._idle and self._woken < len(self._ready):
            self._woken += 1
            self._process.soon(partial(self._pick_up, self._idle.popleft()))

    def _pick_up(self, worker: Worker) -> None:
        self._woken -= 1
        if not self._ready:
            self._idle.appendleft(worker)
            return
        unit = heappop(self._ready)[2]
        self._progress.pick_up(unit, worker.gpu)
        self._process.timeline(worker.writer, "GPU_PICKUP", unit, f"worker={worker.worker_id}", *unit.details)
        self._process.soon(self._on_pick_up)
        self._tracker.lock(0.02, partial(self._start, worker, unit, self._process.now_ms))

    def _start(self, worker: Worker, unit: Unit, since_ms: float) -> None:
        if unit.partition is not None and unit.job.given_up:
            self._process.trace(
                worker.writer,
                "skipping GPU prove for failed partitioned job",
                span=_span(worker, unit),
                job_id=unit.job.job_id,
                partition=unit.partition_debug,
            )
            self._drop(worker, unit)
            return
        waited_ms = self._process.logged_ms(self._process.now_ms - since_ms)
        if self._setting.generation is not Generation.SINGLE:
            self._process.trace(
                worker.writer,
                "GPU_TIMING hot_path pre-prove overhead",
                span=_span(worker, unit),
                worker_id=worker.worker_id,
                partition=unit.partition_debug,
                status_ms=0,
                fail_check_ms=waited_ms,
                mark_busy_ms=0,
                total_overhead_ms=waited_ms,
            )
        proving = Proving(unit, worker, self._process.now_ms)
        self._progress.start(unit, worker.gpu)
        self._process.timeline(worker.writer, "GPU_START", unit, *proving.details)
        pre_lock_ms = self._process.spread(self._setting.pre_lock_ms * unit.size)
        self._process.later(pre_lock_ms, partial(self._ready_to_lock, proving))

    def _ready_to_lock(self, proving: Proving) -> None:
        unit, worker = proving.unit, proving.worker
        failure = faults.OF_PROVE_START.get(unit.fault)
        if failure is None:
            self._mutexes[worker.gpu].lock(partial(self._run_kernels, proving, self._process.now_ms))
            return
        self._say_returned(proving)
        self._gpus.troubles.append(Trouble(self._process.now_ms, worker.gpu, _XID_CUDA))
        self._progress.end(unit, worker.gpu)
        # What the daemon keeps of a partitioned job does not learn of it.
        self._progress.fail(unit, siblings_go_on=True)
        self._process.trace(
            worker.writer,
            f"GPU prove start {failure.how}",
            span=_span(worker, unit),
            level="ERROR",
            error=failure.error,
        )
        self._drop(worker, unit)

    def _run_kernels(self, proving: Proving, waited_since_ms: float) -> None:
        process, setting, writer = self._process, self._setting, proving.worker.writer
        spread, logged, random = process.spread, process.logged_ms, process.random
        pre_lock_ms = logged(waited_since_ms - proving.start_ms)
        waited_ms = logged(process.now_ms - waited_since_ms)
        process.kernel(writer, f"pre_lock_cpu_ms={pre_lock_ms} mutex_wait_ms={waited_ms}")
        kernel_ms, size = setting.kernel_ms, proving.unit.size
        ntt_ms = spread(0.66 * kernel_ms * size)
        waits = random.random() < setting.barrier_probability
        barrier_ms = random.uniform(0, 2) * setting.barrier_ms * size if waits else 0.0
        add_ms = spread(0.25 * kernel_ms * size)
        tail_ms = spread(0.09 * kernel_ms * size)
        total_ms = ntt_ms + barrier_ms + add_ms + tail_ms
        for after_ms, text in (
            (ntt_ms, f"gpu_tid=0 ntt_msm_h_ms={logged(ntt_ms)}"),
            (ntt_ms + barrier_ms, f"gpu_tid=0 barrier_wait_ms={logged(barrier_ms)}"),
            (total_ms - tail_ms, f"gpu_tid=0 batch_add_ms={logged(add_ms)}"),
            (total_ms, f"gpu_tid=0 tail_msm_ms={logged(tail_ms)} gpu_total_ms={logged(total_ms)}"),
        ):
            process.later(after_ms, partial(process.kernel, writer, text))
        start_ms = process.now_ms
        barrier = (start_ms + ntt_ms, start_ms + ntt_ms + barrier_ms)
        kernels = Kernels(start_ms, start_ms + total_ms, barrier)
        self._gpus.run(proving.worker.gpu, kernels)
        process.later(total_ms + 0.3, partial(self._unlock, proving, start_ms, logged(total_ms) - logged(barrier_ms)))

    def _unlock(self, proving: Proving, locked_ms: float, kernel_ms: int) -> None:
        process, worker = self._process, proving.worker
        self._mutexes[worker.gpu].unlock()
        held_ms = process.now_ms - locked_ms
        prepared_ms = held_ms * process.random.uniform(0.5, 0.8)
        held, started = process.logged_ms(held_ms), process.logged_ms(process.now_ms - proving.start_ms)
        process.kernel(worker.writer, f"prep_msm_ms={process.logged_ms(prepared_ms)}")
        process.kernel(worker.writer, f"mutex_held_ms={held} total_start_fn_ms={started}")
        if self._setting.kernel_lines:
            self._progress.account.kernels_ran(worker.gpu, kernel_ms)
        self._say_returned(proving)
        self._memory.release(proving.unit.released_gib)
        free = partial(self.free, worker)
        if self._setting.generation is Generation.SPLIT:
            # The rest is CPU work that the worker doesn't wait for: its next GPU_START comes before this GPU_END.
            self._finisher.finish(proving)
            free()
        else:
            self._finisher.finish(proving, free)

    def _drop(self, worker: Worker, unit: Unit) -> None:
        self._memory.let_go(unit)
        self.free(worker)

    def _say_returned(self, proving: Proving) -> None:
        if self._setting.generation is Generation.SINGLE:
            return
        wall_ms = self._process.logged_ms(self._process.now_ms - proving.start_ms)
        self._process.trace(
            proving.worker.writer,
            "GPU_TIMING prove_start returned",
            span=_span(proving.worker, proving.unit),
            worker_id=proving.worker.worker_id,
            partition=proving.unit.partition_debug,
            total_pre_prove_ms=wall_ms,
            spawn_blocking_wall_ms=wall_ms,
        )


def _span(worker: Worker, unit: Unit) -> tuple[str, Fields]:
    """The tracing span in which a worker works on a unit."""
    return "gpu_worker", (
        ("worker_id", str(worker.worker_id)),
        ("gpu", str(worker.gpu)),
        ("job_id", unit.job.job_id),
        ("proof_kind", unit.job.kind.name),
        ("batch_size", str(len(unit.jobs))),
        ("partition", unit.partition_debug),
    )
