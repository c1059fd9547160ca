"""Wires the rooms together and runs them: the thread that follows the logs, the one that samples the GPUs, the HTTP
server, and their end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Self

from cuzk_agent.clock import Clock, system_clock
from cuzk_agent.config import Config, Listen, SourceConfig
from cuzk_agent.demo.prover import Prover
from cuzk_agent.demo.scenario import SCENARIOS
from cuzk_agent.gpu.mapping import CudaEnvironment, environment_of_writer
from cuzk_agent.gpu.watch import GpuWatch
from cuzk_agent.log.files import FileFollower
from cuzk_agent.log.journal import JournalFollower
from cuzk_agent.log.patterns import is_pattern, matching
from cuzk_agent.log.position import FilePosition, JournalPosition, Position
from cuzk_agent.log.source import Batch, FollowState, ReadStats, Source
from cuzk_agent.log.stream import StreamFollower
from cuzk_agent.log.waker import Waker
from cuzk_agent.metrics import AgentState, Exposition, SourceView
from cuzk_agent.server import Server, UnavailableError, Views
from cuzk_agent.snapshot import Keeper, Keeping, Memory, Moment, SourceMemory, StateFile, boot_id
from cuzk_agent.timeline.engine import Limits
from cuzk_agent.timeline.facts import Fact
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.saved import Saver, load
from cuzk_agent.timeline.state import GpuState, TimelineState

logger = logging.getLogger(__name__)

PUBLISH_S = 0.1
"""How often the state is published at most: what a scrape shows is at most this much older than what is settled."""
IDLE_WAIT_S = 0.25
"""How long the logs are left alone when nothing happens: time goes on in them all the same."""
WARM_UP_BYTES = 8 << 20
"""So much of a log that is not known yet is read to know what is in flight: some hours of it, and about a second's
work."""
WARM_UP_LINES = 50_000
"""The same, for a journal."""
LOOK_S = 1.0
"""How often it is looked for files that match a pattern."""
MAX_MATCHES = 64
"""Files that one pattern may stand for, gone ones among them: each has series of its own."""
KEEP_WAIT_S = 2.0
"""An answer waits for so long for its state to be kept; then it is of the last one that was."""
LIVE_S = 0.75
"""What came since a look that was no longer ago than this has just been written."""
SILENT_S = 60.0
"""A prover with work in flight that has said nothing for longer is worth a word."""
STUCK_S = 30.0
"""The thread that follows the logs is taken for stuck when it has published nothing for so long."""


class _Source:
    """One followed log with its pipeline."""

    def __init__(
        self,
        config: SourceConfig,
        start: Config,
        clock: Clock,
        on_fact: Callable[[str, Fact], None],
        memory: SourceMemory | None = None,
        recall: Recall | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory` is what is known of it, `recall` how much of that holds. `wake` is called, in any thread, when there
        is something to read."""
        self.name = config.name
        self.is_file = not config.unit and not config.is_stdin
        self.key = key_of(config)
        self._clock = clock
        self._limits = Limits(
            silence_ms=int(start.silence_limit_s * 1000),
            age_ms=None if start.age_limit_s is None else int(start.age_limit_s * 1000),
        )
        self._on_fact = partial(on_fact, config.name)
        self._pipeline = self._recalled(memory, recall)
        self._saver = Saver(self._pipeline)
        self._began = clock.monotonic_s(), clock.unix_s()
        position = None if memory is None else memory.position
        self._warming_up = position is None and start.start == "end"
        self._follower = _follower(config, start, clock, position, wake)
        self._was_at_end = False
        self._looked_s = self._began[0]
        self._last_event_unix_s: float | None = None
        self._read_unix_s = 0.0
        """When lines were read last."""
        self._delay_s: float | None = None
        self._read_bytes = 0
        self.found = False
        """The last turn gave lines."""
        self._state: FollowState | None = None

    def _recalled(self, memory: SourceMemory | None, recall: Recall | None) -> Pipeline:
        """The pipeline as it was kept, or a new one."""
        pipeline = self._new_pipeline()
        if memory is None or recall is None:
            return pipeline
        if recall.counters:
            try:
                load(pipeline, memory.pipeline)
            except ValueError as error:
                logger.warning("source %s: its counters begin anew: %s", self.name, error)
                pipeline = self._new_pipeline()
        if not recall.same_boot:
            pipeline.rebooted()
        return pipeline

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self._limits, on_fact=self._on_fact)

    def turn(self) -> bool:
        """Reads a bounded piece of the log. True if there is more to read at once."""
        looked_s, self._looked_s = self._looked_s, self._clock.monotonic_s()
        batch = self._follower.read()
        monotonic_s, unix_s = self._clock.monotonic_s(), self._clock.unix_s()
        if self._warming_up and not batch.past:
            self._end_warm_up(batch)
        self._feed(batch, Arrival(monotonic_s, unix_s, live=self._was_at_end and monotonic_s - looked_s <= LIVE_S))
        if self._warming_up and batch.at_end:
            self._end_warm_up(batch)
        if batch.at_end:
            self._pipeline.settle(batch.read_monotonic_s, unix_s - (monotonic_s - batch.read_monotonic_s))
        self._was_at_end = batch.at_end
        read = self._follower.stats()
        if read.state is not self._state:
            self._state = read.state
            level = logging.INFO if read.state is FollowState.FOLLOWING else logging.WARNING
            logger.log(level, "source %s: %s%s", self.name, read.state, _detail(read))
        self.found = bool(batch.lines)
        is_moving, self._read_bytes = read.read_bytes > self._read_bytes, read.read_bytes
        return not batch.at_end and is_moving and read.state is FollowState.FOLLOWING

    def _feed(self, batch: Batch, arrival: Arrival) -> None:
        start, times = 0, batch.line_unix_s
        for end in batch.breaks:
            self._pipeline.feed(batch.lines[start:end], arrival, times and times[start:end])
            self._pipeline.daemon_ended()
            start = end
        if start < len(batch.lines):
            self._pipeline.feed(batch.lines[start:], arrival, times and times[start:])
        if batch.lines and arrival.live:
            self._read_unix_s = arrival.unix_s

    def _end_warm_up(self, batch: Batch) -> None:
        """All that the log held when it was first looked at has been fed."""
        self._warming_up = False
        monotonic_s, unix_s = self._began
        ago_s = max(monotonic_s - batch.read_monotonic_s, 0.0)
        self._pipeline.count_from_here(monotonic_s - ago_s, unix_s - ago_s)

    def memory(self) -> SourceMemory | None:
        """All that is known of it, to be kept; None if there is nothing to go on from."""
        position = self._follower.position()
        return None if self._warming_up or position is None else SourceMemory(position, self._saver.save())

    def view(self) -> SourceView:
        """The present state, for publication."""
        timeline = self._pipeline.state()
        last_unix_s = timeline.last_event_unix_seconds
        if last_unix_s is not None and last_unix_s != self._last_event_unix_s and self._read_unix_s:
            self._last_event_unix_s = last_unix_s
            self._delay_s = max(0.0, self._read_unix_s - last_unix_s)
        return SourceView(timeline, self._follower.stats(), self._delay_s)

    def close(self) -> None:
        self._follower.close()


def _follower(
    config: SourceConfig, start: Config, clock: Clock, position: Position | None, wake: Callable[[], None]
) -> Source:
    """What reads a source. Where nothing is known of it and counting is to begin at its end, some of what is before is
    read first, to warm up."""
    if config.is_stdin:
        return StreamFollower(0, clock.monotonic_s, tee=1 if config.tee else None, on_data=wake)
    if config.unit:
        known = position if isinstance(position, JournalPosition) else None
        lines = WARM_UP_LINES if position is None and start.start == "end" else 0
        return JournalFollower(config.unit, start.start, clock.monotonic_s, resume=known, warm_up_lines=lines)
    marked = position if isinstance(position, FilePosition) else None
    size = WARM_UP_BYTES if position is None and start.start == "end" else 0
    return FileFollower(config.path, start.start, clock.monotonic_s, resume=marked, warm_up_bytes=size)


class Agent:
    """A running agent: `start`, then `stop`."""

    def __init__(self, config: Config, clock: Clock, on_failure: Callable[[], None], *, nvml: Any = None) -> None:
        """`on_failure` is called, in any thread, when the agent should end because a part of it is broken. `nvml` is
        used as `pynvml`, itself if not given."""
        self._config = config
        self._clock = clock
        self._exposition = Exposition()
        self._patterns = [source for source in config.sources if not source.unit and is_pattern(source.path)]
        fixed = [source for source in config.sources if source not in self._patterns]
        found = [*fixed, *_matching(self._patterns, {source.name: source for source in fixed})]
        self._environments = {source.name: _environment(source) for source in found}
        self._gpus = GpuWatch(
            clock,
            self._environments,
            gpu_map=config.gpu_map,
            pcie=config.pcie_throughput,
            record=config.gpu_record,
            lib=nvml,
        )
        file = None if config.state is None else StateFile(config.state)
        self._keeper = None if file is None else Keeper[AgentState](file, clock, self.fail)
        self._memories, self._recall = _remembered(
            file, clock, [key_of(source) for source in found], [source.path for source in self._patterns]
        )
        self._waker = Waker((), clock.monotonic_s)
        self._sources: list[_Source] = []
        self._configs: dict[str, SourceConfig] = {}
        for source in found:
            self._add(source)
        for path in self._unmatched():
            logger.warning("%s: no file matches yet", path)
        self._look_at_s = clock.monotonic_s() + LOOK_S
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

    def _add(self, source: SourceConfig, *, is_new: bool = False) -> None:
        """One that is new is read from its start."""
        memory = self._memories.pop(key_of(source), None)
        config = replace(self._config, start="start") if is_new else self._config
        self._configs[source.name] = source
        if not source.unit and not source.is_stdin:
            self._waker.add(source.path)
        self._sources.append(
            _Source(source, config, self._clock, self._gpus.fact, memory, self._recall, self._waker.wake)
        )

    @property
    def address(self) -> str:
        """`host:port` of the HTTP server, once started."""
        return self._server.address

    def start(self) -> None:
        """Listens and begins to follow. Raises `server.ListenError`."""
        self._server.start()
        if self._keeper is not None:
            self._keeper.start()
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
        last: Callable[[Moment], Memory] | None = None
        try:
            while not self._ended.is_set():
                self._look()
                more = [source.turn() for source in self._sources]
                if any(source.found and source.is_file for source in self._sources):
                    self._waker.found()
                self._publish()
                self._keep()
                if not any(more):
                    self._waker.wait(IDLE_WAIT_S)
            last = partial(self._memory, at_end=True)
        except Exception:
            logger.exception("following the logs ended unexpectedly")
            self.fail()
        finally:
            if self._keeper is not None:
                self._keeper.end(last, KEEP_WAIT_S)
            self._waker.close()
            for source in self._sources:
                source.close()

    def _look(self) -> None:
        """Look for files that match a pattern and have come lately."""
        if not self._patterns or self._clock.monotonic_s() < self._look_at_s:
            return
        self._look_at_s = self._clock.monotonic_s() + LOOK_S
        for source in _matching(self._patterns, self._configs):
            logger.info("source %s: %s has come", source.name, source.path)
            self._environments[source.name] = _environment(source)
            self._add(source, is_new=True)

    def _watch_gpus(self) -> None:
        try:
            self._gpus.run(self._ended.is_set, self._ended.wait)
        except Exception:
            logger.exception("sampling the GPUs ended unexpectedly")
            self.fail()

    def _keep(self) -> None:
        if self._keeper is not None and self._keeper.is_due():
            self._keeper.give(self._publish(0.0).state, self._memory)

    def _memory(self, taken: Moment, *, at_end: bool = False) -> Memory:
        found = {source.key: source.memory() for source in self._sources}
        kept = {key: memory for key, memory in found.items() if memory is not None}
        # A file that a pattern stands for may come back.
        return Memory(taken, at_end, {**self._memories, **kept})

    def _publish(self, after_s: float = PUBLISH_S) -> _Published:
        now_s = self._clock.monotonic_s()
        if self._published is None or now_s - self._published.monotonic_s >= after_s:
            state = AgentState(
                sources={source.name: source.view() for source in self._sources},
                version=metadata.version("cuzk-agent"),
                python_version=platform.python_version(),
                rolling_window_s=self._config.rolling_window_s,
                waker=self._waker.state(),
            )
            self._published = _Published(state, now_s)
        return self._published

    # --- what the server shows ----------------------------------------------------------------------------------

    def _metrics(self, accept: str | None) -> tuple[bytes, str]:
        published = self._published
        state = None if published is None else _caught_up(published.state)
        if self._keeper is None or state is None:
            return self._rendered(accept, state)
        # What is shown must outlive this process: a counter that fell would be counted whole once more.
        return self._rendered(accept, self._keeper.ask(self._waker.wake, KEEP_WAIT_S), self._keeper.keeping)

    def _rendered(
        self, accept: str | None, state: AgentState | None, keeping: Keeping | None = None
    ) -> tuple[bytes, str]:
        if state is None:
            raise UnavailableError("starting")
        return self._exposition.render(accept, replace(_caught_up(state), nvml=self._gpus.seen(), keeping=keeping))

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
        reasons = [*_reasons_unready(published.state), *(f"{path}: no file matches" for path in self._unmatched())]
        if self._keeper is not None and self._keeper.keeping.fault:
            reasons.append(f"the state can't be written: {self._keeper.keeping.fault}")
        return reasons

    def _unmatched(self) -> list[Path]:
        """Patterns for which no file has come yet."""
        matched = {source.pattern for source in self._configs.values()}
        return [source.path for source in self._patterns if source.path not in matched]

    def _state_fact(self) -> str:
        if self._keeper is None:
            return "not kept: counters begin at 0 when the agent is started again"
        keeping = self._keeper.keeping
        if keeping.fault or keeping.last is None:
            return f"{self._config.state} can't be written: {keeping.fault}" if keeping.fault else "not written yet"
        age_s = max(self._clock.unix_s() - keeping.last.unix_s, 0)
        return f"{self._config.state}, {keeping.last.size_bytes} bytes, {age_s:.0f} s ago"

    def _facts(self) -> Sequence[tuple[str, str]]:
        published = self._published
        if published is None:
            return [("state", "starting")]
        facts = [("version", published.state.version)]
        for name, view in published.state.sources.items():
            facts.append((f"source {name}", f"{_reading(view)}; {_engine(view.timeline)}"))
            facts.extend((f"{name}, GPU {gpu}", _time_of(state)) for gpu, state in view.timeline.gpus.items())
        facts.extend((f"source {path}", "no file matches") for path in self._unmatched())
        facts.append(("state", self._state_fact()))
        nvml = self._gpus.seen()
        facts.append(("NVML", f"{nvml.state}{f' ({nvml.detail})' if nvml.detail else ''}"))
        facts.extend(
            (f"GPU {gpu}", f"{chip.info.model or 'of unknown model'}, {chip.state}") for gpu, chip in nvml.gpus.items()
        )
        return facts


def key_of(source: SourceConfig) -> str:
    """What a source is, in a state that is kept: the same log again, whatever it is called."""
    if source.unit:
        return f"journal {source.unit}"
    if source.is_stdin:
        return "stdin"
    return f"file {os.path.abspath(source.path)}"  # noqa: PTH100  Path.absolute keeps `..`


def _environment(source: SourceConfig) -> Callable[[], CudaEnvironment | None]:
    """Looks for the environment of the daemon that writes a log."""
    if source.unit or source.is_stdin:
        return lambda: None
    return partial(environment_of_writer, source.path)


def _matching(patterns: Sequence[SourceConfig], known: Mapping[str, SourceConfig]) -> list[SourceConfig]:
    """The files that patterns stand for and that aren't known, each with a name of its own."""
    by_name = dict(known)
    paths = {source.path for source in known.values()}
    found = []
    for pattern in patterns:
        room = MAX_MATCHES - sum(source.pattern == pattern.path for source in by_name.values())
        for path in matching(pattern.path):
            if path in paths:
                continue
            if room <= 0:
                logger.warning("%s: more files match than are followed; %s is not", pattern.path, path)
                break
            source = SourceConfig(_free_name(pattern, path, by_name), path, pattern=pattern.path)
            by_name[source.name] = source
            paths.add(path)
            found.append(source)
            room -= 1
    return found


def _free_name(pattern: SourceConfig, path: Path, taken: Mapping[str, SourceConfig]) -> str:
    prefix = f"{pattern.name}/" if pattern.name else ""
    names = [path.parent.name, path.stem] if path.stem.isdigit() else [path.stem, path.name]
    for name in (*names, f"{path.parent.name}/{path.name}", str(path)):
        shown = "".join(c if c.isprintable() else "?" for c in prefix + name)[-64:].strip()
        if shown and shown not in taken:
            return shown
    return next(name for n in itertools.count(2) if (name := f"{path.stem[-50:]}#{n}") not in taken)


@dataclass(frozen=True, slots=True)
class Recall:
    """How much of what is remembered holds."""

    counters: bool
    """Nothing newer was shown."""
    same_boot: bool
    """The machine has been up since."""


def _remembered(
    file: StateFile | None, clock: Clock, keys: Sequence[str], patterns: Sequence[Path] = ()
) -> tuple[dict[str, SourceMemory], Recall | None]:
    """What is known of these sources from before, and of files that patterns stand for though they aren't there."""
    memory = None if file is None else file.load()
    if file is None or memory is None:
        return {}, None
    globs = [key_of(SourceConfig("", path)) for path in patterns]
    known = {key for key in memory.sources if key in keys or any(fnmatch(key, glob) for glob in globs)}
    others = sorted(memory.sources.keys() - known)
    if memory.sources and not known:
        file.set_aside("foreign", f"it is of other logs ({', '.join(others)})")
        return {}, None
    if others:
        file.set_aside("foreign", f"it is also of logs not followed now ({', '.join(others)})", copy=True)
    same_boot = memory.taken.same_boot(Moment(clock.monotonic_s(), clock.unix_s(), boot_id()))
    recall = Recall(counters=same_boot or memory.at_end, same_boot=same_boot)
    if not recall.counters:
        # Its last seconds may have been shown and not have come to the disk: to show less now would be taken for a
        # restart at 0, and everything counted twice.
        logger.warning("the machine went down under the last agent: counters begin anew, where it had read to")
    # One that isn't there now is kept as it is, which holds as long as the clock does.
    return {key: memory.sources[key] for key in known if key in keys or same_boot}, recall


def _caught_up(state: AgentState) -> AgentState:
    """The state, if it may be shown. Raises UnavailableError."""
    behind = [name for name, view in state.sources.items() if _is_replaying(view)]
    if behind:
        # Counters that are still catching up with the past would look like a burst of work.
        raise UnavailableError("reading the backlog of " + ", ".join(behind))
    return state


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
        if view.read.state is not FollowState.FOLLOWING or not view.read.caught_up:
            yield f"source {name}: {_reading(view)}"


def _reading(view: SourceView) -> str:
    """How a source is doing, for a person."""
    if _is_replaying(view):
        left = "" if view.read.lag_bytes is None else f", {view.read.lag_bytes} bytes to go"
        return f"reading its backlog{left}"
    return f"{view.read.state}{_detail(view.read)}"


def _engine(timeline: TimelineState) -> str:
    """What the daemon does, for a person."""
    if not timeline.engine_running:
        return "no engine"
    silent = f", silent for {timeline.stalled_seconds:.0f} s" if timeline.stalled_seconds >= SILENT_S else ""
    return f"engine running, {sum(timeline.in_flight.values())} units in flight{silent}"


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
