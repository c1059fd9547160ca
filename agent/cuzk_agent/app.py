"""Wires the rooms together and runs them: the thread that follows the logs, the one that samples the GPUs, the HTTP
server, and their end."""

from __future__ import annotations

import contextlib
import logging
import platform
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Self

from cuzk_agent.clock import Clock, system_clock
from cuzk_agent.config import Config, Listen, SourceConfig
from cuzk_agent.demo.daemon import Prover
from cuzk_agent.demo.scenario import SCENARIOS
from cuzk_agent.gpu.mapping import environment_of_writer
from cuzk_agent.gpu.watch import GpuWatch
from cuzk_agent.log.files import FileFollower
from cuzk_agent.log.source import FollowState, ReadStats
from cuzk_agent.log.waker import Waker
from cuzk_agent.metrics import AgentState, Exposition, SourceView
from cuzk_agent.server import Server, UnavailableError, Views
from cuzk_agent.timeline.engine import Limits
from cuzk_agent.timeline.facts import Fact
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import GpuState

logger = logging.getLogger(__name__)

PUBLISH_S = 0.1
"""How often the state is published at most: what a scrape shows is at most this much older than what is settled."""
IDLE_WAIT_S = 0.25
"""How long the logs are left alone when nothing happens: time goes on in them all the same."""
STUCK_S = 30.0
"""The thread that follows the logs is taken for stuck when it has published nothing for so long."""


class _Source:
    """One followed log with its pipeline."""

    def __init__(self, config: SourceConfig, start: Config, clock: Clock, on_fact: Callable[[str, Fact], None]) -> None:
        self.name = config.name
        self._clock = clock
        self._follower = FileFollower(config.path, start.start, clock.monotonic_s)
        self._pipeline = Pipeline(
            Limits(
                silence_ms=int(start.silence_limit_s * 1000),
                age_ms=None if start.age_limit_s is None else int(start.age_limit_s * 1000),
            ),
            on_fact=partial(on_fact, config.name),
        )
        self._was_at_end = False
        self._state: FollowState | None = None

    def turn(self) -> bool:
        """Reads a bounded piece of the log. True if there is more to read at once."""
        batch = self._follower.read()
        monotonic_s, unix_s = self._clock.monotonic_s(), self._clock.unix_s()
        if batch.lines:
            self._pipeline.feed(batch.lines, Arrival(monotonic_s, unix_s, live=self._was_at_end))
        if batch.at_end:
            self._pipeline.settle(batch.read_monotonic_s, unix_s - (monotonic_s - batch.read_monotonic_s))
        self._was_at_end = batch.at_end
        read = self._follower.stats()
        if read.state is not self._state:
            self._state = read.state
            level = logging.INFO if read.state is FollowState.FOLLOWING else logging.WARNING
            logger.log(level, "source %s: %s%s", self.name, read.state, _detail(read))
        return not batch.at_end and read.state is FollowState.FOLLOWING

    def view(self) -> SourceView:
        """The present state, for publication."""
        return SourceView(self._pipeline.state(), self._follower.stats())

    def close(self) -> None:
        self._follower.close()


class Agent:
    """A running agent: `start`, then `stop`."""

    def __init__(self, config: Config, clock: Clock, on_failure: Callable[[], None], *, nvml: Any = None) -> None:
        """`on_failure` is called, in any thread, when the agent should end because a part of it is broken. `nvml` is
        used as `pynvml`, itself if not given."""
        self._config = config
        self._clock = clock
        self._exposition = Exposition()
        self._gpus = GpuWatch(
            clock,
            {source.name: partial(environment_of_writer, source.path) for source in config.sources},
            gpu_map=config.gpu_map,
            pcie=config.pcie_throughput,
            record=config.gpu_record,
            lib=nvml,
        )
        self._sources = [_Source(source, config, clock, self._gpus.fact) for source in config.sources]
        self._waker = Waker([source.path for source in config.sources], clock.monotonic_s)
        self._ended = threading.Event()
        self._on_failure = on_failure
        self.failed = False
        """Something unexpected has happened; the log says what."""
        self._published: _Published | None = None
        self._thread = threading.Thread(target=self._follow, name="logs", daemon=True)
        self._gpu_thread = threading.Thread(target=self._watch_gpus, name="gpus", daemon=True)
        self._server = Server(
            config.listen.host,
            config.listen.port,
            Views(self._metrics, self._unhealthy, self._unready, self._facts),
            on_failure=lambda _: self.fail(),
        )

    @property
    def address(self) -> str:
        """`host:port` of the HTTP server, once started."""
        return self._server.address

    def start(self) -> None:
        """Listens and begins to follow. Raises `server.ListenError`."""
        self._server.start()
        self._thread.start()
        self._gpu_thread.start()

    def stop(self) -> None:
        """Ends all threads; safe to call once `start` has returned."""
        self._ended.set()
        self._waker.wake()
        self._server.stop()
        self._thread.join(5.0)
        if self._thread.is_alive():
            logger.error("the thread that follows the logs did not end")
        self._gpu_thread.join(1.0)
        if self._gpu_thread.is_alive():
            logger.warning("the thread that samples the GPUs did not end: %s", self._gpus.seen().detail)

    def fail(self) -> None:
        """Ends the agent as failed: a part of it, or what it was started for, is broken."""
        self.failed = True
        self._on_failure()

    # --- the thread that follows the logs -----------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._ended.is_set():
                more = [source.turn() for source in self._sources]
                self._publish()
                if not any(more):
                    self._waker.wait(IDLE_WAIT_S)
        except Exception:
            logger.exception("following the logs ended unexpectedly")
            self.fail()
        finally:
            self._waker.close()
            for source in self._sources:
                source.close()

    def _watch_gpus(self) -> None:
        try:
            self._gpus.run(self._ended.is_set, self._ended.wait)
        except Exception:
            logger.exception("sampling the GPUs ended unexpectedly")
            self.fail()

    def _publish(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._published is None or now_s - self._published.monotonic_s >= PUBLISH_S:
            state = AgentState(
                sources={source.name: source.view() for source in self._sources},
                version=metadata.version("cuzk-agent"),
                python_version=platform.python_version(),
                rolling_window_s=self._config.rolling_window_s,
            )
            self._published = _Published(state, now_s)

    # --- what the server shows ----------------------------------------------------------------------------------

    def _metrics(self, accept: str | None) -> tuple[bytes, str]:
        published = self._published
        if published is None:
            raise UnavailableError("starting")
        behind = [name for name, view in published.state.sources.items() if _is_replaying(view)]
        if behind:
            # Counters that are still catching up with the past would look like a burst of work.
            raise UnavailableError("reading the backlog of " + ", ".join(behind))
        return self._exposition.render(accept, replace(published.state, nvml=self._gpus.seen()))

    def _unhealthy(self) -> Sequence[str]:
        published = self._published
        if self.failed:
            return ["a part of it has failed"]
        if published is not None and self._clock.monotonic_s() - published.monotonic_s > STUCK_S:
            return [f"the thread that follows the logs has done nothing for {STUCK_S:.0f} s"]
        return []

    def _unready(self) -> Sequence[str]:
        published = self._published
        if published is None:
            return ["starting"]
        return list(_reasons_unready(published.state))

    def _facts(self) -> Sequence[tuple[str, str]]:
        published = self._published
        if published is None:
            return [("state", "starting")]
        facts = [("version", published.state.version)]
        for name, view in published.state.sources.items():
            in_flight = sum(view.timeline.in_flight.values())
            engine = f"engine running, {in_flight} units in flight" if view.timeline.engine_running else "no engine"
            facts.append((f"source {name}", f"{view.read.state}{_detail(view.read)}; {engine}"))
            facts.extend((f"{name}, GPU {gpu}", _time_of(state)) for gpu, state in view.timeline.gpus.items())
        nvml = self._gpus.seen()
        facts.append(("NVML", f"{nvml.state}{f' ({nvml.detail})' if nvml.detail else ''}"))
        facts.extend(
            (f"GPU {gpu}", f"{chip.info.model or 'of unknown model'}, {chip.state}") for gpu, chip in nvml.gpus.items()
        )
        return facts


def _time_of(gpu: GpuState) -> str:
    """What a GPU did with its time, and what it does now."""
    idle = ", ".join(
        f"{cause} {seconds:.1f}"
        for cause, seconds in sorted(gpu.idle_seconds.items(), key=lambda item: -item[1])
        if seconds
    )
    told = f"{gpu.spans} spans; {gpu.busy_seconds:.1f} s busy, {sum(gpu.idle_seconds.values()):.1f} s idle"
    open_s = sum((gpu.open_gap_seconds or {}).values())
    return f"{told}{f' ({idle})' if idle else ''}{f'; idle for {open_s:.1f} s now' if open_s else ''}"


@dataclass(frozen=True, slots=True)
class _Published:
    state: AgentState
    monotonic_s: float


def _is_replaying(view: SourceView) -> bool:
    return view.read.state is FollowState.FOLLOWING and not view.read.caught_up


def _reasons_unready(state: AgentState) -> Iterator[str]:
    for name, view in state.sources.items():
        if view.read.state is not FollowState.FOLLOWING:
            yield f"source {name}: {view.read.state}{_detail(view.read)}"
        elif not view.read.caught_up:
            yield f"source {name}: reading its backlog, {view.read.lag_bytes} bytes to go"


def _detail(read: ReadStats) -> str:
    return f" ({read.detail})" if read.detail else ""


class _Signals:
    """Where the main thread waits for a signal to stop or a call of `wake`.

    A socket is what it waits on, and no Event: a signal that arrives just before a thread waits for a lock does not end
    that wait, and its handler must not touch a lock that the interrupted code may hold.
    """

    def __enter__(self) -> Self:
        self._waiting, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in _stop_signals()}
        self._wakeup_fd = signal.set_wakeup_fd(self._waking.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._waking.close()
        self._waiting.close()

    def wake(self) -> None:
        """Ends the wait, now or when it begins. Any thread may call it, at any time."""
        with contextlib.suppress(OSError):  # it is full, or closed: nobody need be woken
            self._waking.send(b"\0")

    def wait(self) -> None:
        """Returns when a signal came, or `wake` was called. Then another Ctrl-C does what it does without us; SIGTERM
        doesn't: some send it to a process and to its group, and the stop is bounded in time anyway."""
        number = self._waiting.recv(1)[0]
        if number:
            logger.info("%s: stopping", signal.Signals(number).name)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop_signals() -> Iterator[signal.Signals]:
    """What asks the agent to stop. A terminal that closes does too, unless it was started to outlive that."""
    yield signal.SIGTERM
    yield signal.SIGINT
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        yield signal.SIGHUP


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A signal must have a handler to be written into the socket."""


def run(
    config: Config, *, clock: Clock | None = None, on_start: Callable[[Agent], None] | None = None, nvml: Any = None
) -> int:
    """Follows and serves until a signal comes. Returns 0, or 1 if a thread failed. Raises `server.ListenError`. `nvml`
    is used as `pynvml`, itself if not given."""
    with _Signals() as signals:
        agent = Agent(config, clock or system_clock(), signals.wake, nvml=nvml)
        agent.start()
        try:
            if on_start is not None:
                on_start(agent)
            signals.wait()
        finally:
            agent.stop()
    return 1 if agent.failed else 0


_DEMO = """
A simulated prover is writing its log at {speed:g} times the speed of a real one, and the agent follows it and its
simulated GPUs. The scenario: {about}.

  http://{address}/metrics    what Prometheus scrapes
  http://{address}/           this agent at a glance

Worth a look, and a second look half a minute later:

  cuzk_gpu_idle_seconds_total        why each GPU idled, second by second: starved, blocked, handoff, fill, no_work
  cuzk_gpu_logged_busy_seconds_total its rate is the GPU's utilization, as the log has it
  cuzk_gpu_open_gap_seconds          the gap that is open right now
  cuzk_synth_seconds                 how long the CPU takes to prepare a partition
  cuzk_gpu_chip_busy_seconds_total   its rate is the GPU's utilization, as the chip has it

The log: {log}
Ctrl-C ends both and leaves nothing behind.
"""


def demo(*, listen: Listen, speed: float, seed: int, scenario: str = "day", clock: Clock | None = None) -> int:
    """Runs a simulated prover and an agent that follows it until a signal comes. Returns as `run`."""
    clock = clock or system_clock()
    prover = Prover(SCENARIOS[scenario], seed=seed, speed=speed, clock=clock)
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="cuzk-agent-demo-") as directory:
        log = Path(directory) / "cuzk.log"
        log.touch()  # before the agent looks for it
        config = Config(sources=(SourceConfig("demo", log),), listen=listen, start="start")
        threads: list[threading.Thread] = []

        def on_start(agent: Agent) -> None:
            def prove() -> None:
                try:
                    prover.run(log, stop=ended.is_set, sleep=ended.wait)
                except Exception:
                    logger.exception("the simulated prover ended unexpectedly")
                    agent.fail()

            thread = threading.Thread(target=prove, name="prover", daemon=True)
            threads.append(thread)
            thread.start()
            about = SCENARIOS[scenario].about
            print(_DEMO.format(speed=speed, about=about, address=agent.address, log=log), flush=True)

        try:
            return run(config, clock=clock, on_start=on_start, nvml=prover.nvml)
        finally:
            ended.set()
            for thread in threads:
                thread.join(5.0)
