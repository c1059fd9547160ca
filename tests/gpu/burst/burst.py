"""Does the agent see what a real GPU does? Bursts of known length run on it, and the sampler's account is compared.

    PYTHONPATH=agent python3 tests/gpu/burst/burst.py

It takes about six minutes and a GPU that nobody else uses, with PyTorch or CuPy. `nvidia-ml-py` must be importable;
where there is no network: `pip download --no-deps -d DIR nvidia-ml-py` elsewhere, and the wheel, which is a zip file of
one Python module, may itself be named in PYTHONPATH. Nothing else of the agent's dependencies is needed.

Prints JSON, with `passed` for each part, and exits with 0 if all did, 1 if not, 2 if it could not be tried:

- `duty`: bursts of 50 ms to 2 s that make up 10, 50 and 90 % of 60 s are reported within 2 points;
- `foreign`: what a second process does outside the spans of the first is reported as unlogged busy;
- `killed`: after the workload is killed, nothing of it is shown any more;
- `cost`: the sampling thread, correlation and energy included, takes less than 0.2 % of a core for each GPU.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

BURSTS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
QUIET_S = 7.0
"""Longer than from one read of the ring to the next: what ran before has been counted then."""
LAG_S = 8.0
"""Spans are told as settled so long after the fact: longer than a burst lasts."""
SIZE = 8192
"""Of the matrices that are multiplied: 1.4 ms each on an H200."""

Stretch = tuple[float, float]


# --- the workload: a process of its own --------------------------------------------------------------------------


def torch_kernels() -> tuple[Callable[[int], None], Callable[[], Any], Callable[[Any, Any], float]]:
    """Launch so many products; record an event; wait for the second event and tell the seconds between them."""
    torch = importlib.import_module("torch")
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def launch(count: int) -> None:
        for _ in range(count):
            torch.matmul(a, b, out=c)

    def record() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return launch, record, between


def cupy_kernels() -> tuple[Callable[[int], None], Callable[[], Any], Callable[[Any, Any], float]]:
    """The same with CuPy."""
    cupy = importlib.import_module("cupy")
    a, b = (cupy.random.standard_normal((SIZE, SIZE), dtype=cupy.float32).astype(cupy.float16) for _ in range(2))
    c = cupy.empty_like(a)

    def launch(count: int) -> None:
        for _ in range(count):
            cupy.matmul(a, b, out=c)

    def record() -> Any:
        event = cupy.cuda.Event()
        event.record()
        return event

    def between(first: Any, last: Any) -> float:
        last.synchronize()
        return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3

    return launch, record, between


def say(**words: object) -> None:
    """A line of JSON, at once."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def workload(duty: float, seconds: float, bursts_s: tuple[float, ...], seed: int) -> None:
    """Bursts that make up this share of the time. Begins at a line on stdin; tells every burst, by CUDA's own clock."""
    try:
        launch, record, between = torch_kernels()
    except ImportError:
        launch, record, between = cupy_kernels()

    def burst(count: int) -> Stretch:
        first = record()
        launch(count)
        length_s = between(first, record())
        end_s = time.time()
        return end_s - length_s, end_s

    # The clocks of the GPU need a while to rise.
    burst(1000)
    start_s, end_s = burst(500)
    each_s = (end_s - start_s) / 500
    say(ready=True, each_s=each_s)
    sys.stdin.readline()
    chance = random.Random(seed)
    begin_s = time.time()
    until_s = begin_s + seconds
    while (now_s := time.time()) < until_s:
        length_s = min(chance.choice(bursts_s), max(until_s - now_s, each_s))
        start_s, end_s = burst(max(1, round(length_s / each_s)))
        say(start=start_s, end=end_s)
        time.sleep(max(0.0, min((end_s - start_s) * (1 / duty - 1), until_s - time.time())))
    say(begin=begin_s, finish=time.time())


@dataclass
class Workload:
    """A running workload, seen from the outside."""

    process: subprocess.Popen[str]
    bursts: list[Stretch] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    window: Stretch | None = None

    @classmethod
    def start(cls, duty: float, seconds: float, bursts_s: Iterable[float] = BURSTS_S, seed: int = 1) -> Workload:
        """Start the process, and wait until it could begin."""
        lengths = [str(length_s) for length_s in bursts_s]
        command = [sys.executable, __file__, "--workload", str(duty), str(seconds), str(seed), *lengths]
        made = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        threading.Thread(target=made._listen, daemon=True).start()
        if not made.ready.wait(180) or made.process.poll() is not None:
            raise SystemExit("the workload does not start: is there a GPU, and PyTorch or CuPy?")
        return made

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "start" in said:
                self.bursts.append((said["start"], said["end"]))
            elif "begin" in said:
                self.window = (said["begin"], said["finish"])
            else:
                self.ready.set()
        self.ready.set()

    def begin(self) -> None:
        """Let it run."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


# --- the agent beside it -----------------------------------------------------------------------------------------


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Disjoint stretches that cover the same."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def total(stretches: Iterable[Stretch]) -> float:
    """The seconds that they cover."""
    return sum(end - start for start, end in union(stretches))


class Agent:
    """The sampling thread, with the first workload's bursts as the spans of a log."""

    def __init__(self, label: str) -> None:
        from cuzk_agent.clock import system_clock  # noqa: PLC0415 - the workload does without the agent.
        from cuzk_agent.gpu.watch import GpuWatch  # noqa: PLC0415

        self.label = label
        self._watch = GpuWatch(system_clock(), {"burst": lambda: None}, gpu_map={}, pcie=False)
        self._told = 0
        self._marks: list[tuple[float, float]] = []
        """Wall and CPU time of the sampling thread, before each cycle."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def stop() -> bool:
            self._marks.append((time.monotonic(), time.thread_time()))
            return self._ended.is_set()

        self._watch.run(stop, self._ended.wait)

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(30)

    def view(self) -> Any:
        """What is shown."""
        return self._watch.seen()

    def chip(self) -> Any:
        """What is shown of the GPU."""
        return self.view().gpus[self.label]

    def cores(self) -> float:
        """The share of a core that the thread took for each GPU, but for its start."""
        (start_s, start_cpu_s), (end_s, end_cpu_s) = self._marks[2], self._marks[-1]
        return (end_cpu_s - start_cpu_s) / (end_s - start_s) / len(self.view().gpus)

    def wait(self, done: Callable[[], bool], spans: list[Stretch], limit_s: float = 150.0) -> None:
        """Tell the spans while they come, until something holds."""
        from cuzk_agent.timeline.facts import Settled, SpanTime  # noqa: PLC0415

        self._told = min(self._told, len(spans))
        until_s = time.monotonic() + limit_s
        while not done() and time.monotonic() < until_s:
            time.sleep(0.25)
            new = spans[self._told :]
            self._told += len(new)
            for start_s, end_s in new:
                self._watch.fact("burst", SpanTime(self.label, start_s, end_s, (1,)))
            self._watch.fact("burst", Settled(time.time() - LAG_S, 0.0))

    def quiet(self, seconds: float, spans: list[Stretch]) -> Any:
        """What is shown of the GPU after some time."""
        until_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until_s, spans)
        return self.chip()


def run_duty(agent: Agent, duty: float, seconds: float) -> dict[str, Any]:
    """One workload alone."""
    load = Workload.start(duty, seconds)
    agent._told = 0
    before = agent.quiet(LAG_S + QUIET_S, load.bursts)
    load.begin()
    agent.wait(lambda: load.window is not None, load.bursts)
    load.process.wait(30)
    after = agent.quiet(LAG_S + QUIET_S, load.bursts)
    assert load.window is not None
    length_s = load.window[1] - load.window[0]
    true, reported = total(load.bursts) / length_s, (after.busy_seconds - before.busy_seconds) / length_s
    sampled_s = after.sampled_seconds - before.sampled_seconds
    observed_s = after.observed_seconds - before.observed_seconds
    # Two snapshots, each up to two cycles behind the time.
    complete = abs(sampled_s - observed_s) < 5.0
    return {
        "duty": duty,
        "seconds": length_s,
        "bursts": len(load.bursts),
        "true": true,
        "reported": reported,
        "unlogged_busy_seconds": (after.unlogged_busy_seconds or 0.0) - (before.unlogged_busy_seconds or 0.0),
        "coverage": sampled_s / observed_s,
        "method": after.method,
        "passed": abs(true - reported) <= 0.02 and complete,
    }


def run_foreign(agent: Agent, seconds: float) -> dict[str, Any]:
    """A second process, half of the time alone and half beside the first."""
    foreign = Workload.start(0.4, seconds, (0.3, 0.5, 1.0), seed=2)
    own = Workload.start(0.3, seconds / 2, (0.5, 1.0, 2.0), seed=3)
    agent._told = 0
    before = agent.quiet(LAG_S + QUIET_S, own.bursts)
    foreign.begin()
    agent.quiet(seconds / 2, own.bursts)
    own.begin()
    agent.wait(lambda: foreign.window is not None and own.window is not None, own.bursts)
    for load in (foreign, own):
        load.process.wait(30)
    after = agent.quiet(LAG_S + QUIET_S, own.bursts)
    true_s = total([*foreign.bursts, *own.bursts]) - total(own.bursts)
    reported_s = (after.unlogged_busy_seconds or 0.0) - (before.unlogged_busy_seconds or 0.0)
    return {
        "true_busy_seconds": total([*foreign.bursts, *own.bursts]),
        "reported_busy_seconds": after.busy_seconds - before.busy_seconds,
        "true_unlogged_seconds": true_s,
        "reported_unlogged_seconds": reported_s,
        "passed": abs(true_s - reported_s) <= max(0.5, 0.1 * true_s),
    }


def run_killed(agent: Agent) -> dict[str, Any]:
    """A workload dies in the middle of its work."""
    idle = agent.chip()
    load = Workload.start(0.9, 60.0, seed=4)
    load.begin()
    during = agent.quiet(QUIET_S, [])
    load.process.kill()
    load.process.wait(30)
    agent.quiet(QUIET_S, [])
    settled = agent.chip()
    after = agent.quiet(QUIET_S, [])
    return {
        "during_watts": during.readings.power_watts,
        "after_watts": after.readings.power_watts,
        "during_memory_bytes": during.readings.memory_used_bytes,
        "after_memory_bytes": after.readings.memory_used_bytes,
        "busy_seconds_since": after.busy_seconds - settled.busy_seconds,
        "state": after.state,
        "passed": (
            after.state == "up"
            and after.busy_seconds == settled.busy_seconds
            and after.sampled_seconds > settled.sampled_seconds
            and after.readings.memory_used_bytes <= idle.readings.memory_used_bytes + 2**28
            and after.readings.memory_used_bytes < during.readings.memory_used_bytes
            and after.readings.power_watts < during.readings.power_watts
        ),
    }


def main() -> int:
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(description="Compare what the agent says of a GPU with what the GPU did.")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each part")
    parser.add_argument("--gpu", default="0", help="label of the GPU, if it is not the first")
    parser.add_argument("--workload", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.workload is not None:
        duty, seconds, seed, *bursts_s = given.workload
        workload(float(duty), float(seconds), tuple(map(float, bursts_s)), int(seed))
        return 0

    agent = Agent(given.gpu)
    try:
        for _ in itertools.takewhile(lambda _: given.gpu not in agent.view().gpus, range(100)):
            time.sleep(0.1)
        if given.gpu not in agent.view().gpus:
            say(error=f"no GPU {given.gpu}: {agent.view().state} {agent.view().detail}")
            return 2
        chip = agent.chip()
        report: dict[str, Any] = {
            "gpu": chip.info.model,
            "driver": chip.info.driver_version,
            "python": sys.version.split()[0],
            "duty": [run_duty(agent, duty, given.seconds) for duty in (0.1, 0.5, 0.9)],
            "foreign": run_foreign(agent, given.seconds),
            "killed": run_killed(agent),
        }
        report["cost"] = {
            "core_per_gpu": agent.cores(),
            "call_seconds": {call: spent for call, (_, spent) in sorted(agent.view().call_seconds.items())},
            "calls": {call: count for call, (count, _) in sorted(agent.view().call_seconds.items())},
            "passed": agent.cores() < 0.002,
        }
        report["nvml_errors"] = {" ".join(key): count for key, count in agent.view().errors.items()}
    finally:
        agent.stop()
    parts = [*report["duty"], report["foreign"], report["killed"], report["cost"]]
    report["passed"] = all(part["passed"] for part in parts)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
