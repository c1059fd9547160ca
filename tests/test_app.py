"""The wiring: what the agent shows while its sources come, catch up, go and fail, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import FakeClock
from cuzk_agent import app
from cuzk_agent.app import STUCK_S, Agent
from cuzk_agent.clock import system_clock
from cuzk_agent.config import Config, Listen, SourceConfig
from cuzk_agent.demo.prover import Prover
from cuzk_agent.demo.scenario import SCENARIOS
from cuzk_agent.log.files import FileFollower
from cuzk_agent.report.analyze import Options, analyze
from cuzk_agent.server import ListenError, UnavailableError
from cuzk_agent.timeline.pipeline import Pipeline

ANYWHERE = Listen("127.0.0.1", 0)


class World:
    """Two logs, a clock, and an agent whose thread is the test."""

    def __init__(self, directory: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.paths = {name: directory / f"{name}.log" for name in ("a", "b")}
        sources = tuple(SourceConfig(name, path) for name, path in self.paths.items())
        self.config = Config(sources=sources, listen=ANYWHERE, start="start")
        self.failures = 0
        self.agent = Agent(self.config, clock, self._count_failure)

    def _count_failure(self) -> None:
        self.failures += 1

    def turn(self, seconds: float = 1.0) -> list[bool]:
        """What the agent's thread does once; which sources have more to read at once."""
        self.clock.advance(seconds)
        more = [source.turn() for source in self.agent._sources]
        self.agent._publish()
        return more

    def shown(self) -> dict[tuple[str, str], float]:
        """The sums of what is shown, by metric and source."""
        shown: dict[tuple[str, str], float] = {}
        body, _ = self.agent._metrics(None)
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("source", ""))
                shown[key] = shown.get(key, 0.0) + sample.value
        return shown


@pytest.fixture
def world(tmp_path: Path, clock: FakeClock) -> Iterator[World]:
    world = World(tmp_path, clock)
    yield world
    for source in world.agent._sources:
        source.close()
    world.agent._waker.close()


def test_before_the_first_look_there_is_nothing_to_show(world: World) -> None:
    with pytest.raises(UnavailableError, match=r"^starting$"):
        world.agent._metrics(None)
    assert world.agent._unready() == ["starting"]
    assert world.agent._unhealthy() == []
    assert world.agent._facts() == [("state", "starting")]


def test_each_source_is_shown_as_it_is(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world.paths["a"].write_bytes(b"TIMELINE,1000,SYNTH_START,porep-1000-1,partition=0\n")
    assert world.turn() == [False, False]
    missing = f"({world.paths['b']}: No such file or directory)"
    assert world.agent._unready() == [f"source b: missing {missing}"]
    shown = world.shown()
    assert (shown["cuzk_agent_source_up", "a"], shown["cuzk_agent_source_up", "b"]) == (1, 0)
    assert (shown["cuzk_timeline_events_total", "a"], shown["cuzk_timeline_events_total", "b"]) == (1, 0)
    facts = dict(world.agent._facts())
    assert facts["source a"] == "following; engine running, 1 units in flight"
    assert facts["source b"] == f"missing {missing}; no engine"
    assert [record.message for record in caplog.records] == ["source a: following", f"source b: missing {missing}"]

    world.paths["b"].write_bytes(b"")
    world.turn()
    assert world.agent._unready() == []
    assert [record.message for record in caplog.records][2:] == ["source b: following"]


def test_nothing_is_shown_until_the_backlog_is_read(world: World) -> None:
    line = b"TIMELINE,1000,SOMETHING_NEW,porep-1000-1,partition=0\n"
    lines = 3 * (1 << 20) // len(line)
    world.paths["a"].write_bytes(line * lines)
    world.paths["b"].write_bytes(b"")
    assert world.turn() == [True, False]
    (reason,) = world.agent._unready()
    assert reason.startswith("source a: reading its backlog, ")
    with pytest.raises(UnavailableError, match=r"^reading the backlog of a$"):
        world.agent._metrics(None)
    for _ in range(10):
        if not any(world.turn()):
            break
    assert world.agent._unready() == []
    assert world.shown()["cuzk_timeline_events_total", "a"] == lines


def test_a_container_tells_when_its_lines_were_written(world: World) -> None:
    start_s = world.clock.unix_s() - 3600

    def record(at_ms: int, event: str) -> str:
        time = datetime.fromtimestamp(start_s + at_ms / 1000 + 0.002, UTC).isoformat()
        return json.dumps({"log": f"TIMELINE,{at_ms},{event}\n", "stream": "stderr", "time": time}) + "\n"

    world.paths["a"].write_text(
        record(1000, "GPU_START,porep-1,worker=0,partition=0") + record(3000, "GPU_END,porep-1,worker=0,partition=0")
    )
    world.turn()
    shown = world.shown()
    assert shown["cuzk_engine_start_timestamp_seconds", "a"] == pytest.approx(start_s + 0.002, abs=0.001)
    assert shown["cuzk_clock_anchor_uncertainty_seconds", "a"] == 0.025
    # And so what time it is on the engine's clock: it has been idle for an hour, less what it may take to get here.
    assert shown["cuzk_gpu_logged_busy_seconds_total", "a"] == 2
    assert shown["cuzk_gpu_idle_seconds_total", "a"] == pytest.approx(3600 + 1 - 2 - 1 - 2, abs=0.1)


def test_a_prover_that_hangs_is_told_on_the_page(world: World) -> None:
    world.paths["a"].write_text("TIMELINE,1000,GPU_START,porep-1,worker=0,partition=0\n")
    world.turn()
    assert dict(world.agent._facts())["source a"] == "following; engine running, 1 units in flight"
    world.turn(120)
    assert dict(world.agent._facts())["source a"] == "following; engine running, 1 units in flight, silent for 120 s"


def test_time_goes_on_while_nothing_is_written(world: World) -> None:
    world.paths["a"].write_bytes(b"")
    world.turn()
    with world.paths["a"].open("ab") as log:
        log.write(b"TIMELINE,1000,GPU_START,porep-1000-1,worker=0,partition=0\n")
    world.turn()
    world.turn()
    before = world.shown()["cuzk_gpu_logged_busy_seconds_total", "a"]
    world.turn(5.0)
    assert world.shown()["cuzk_gpu_logged_busy_seconds_total", "a"] == pytest.approx(before + 5.0)
    # A step of the wall clock is no time.
    world.clock.step_wall(3600.0)
    world.turn(1.0)
    assert world.shown()["cuzk_gpu_logged_busy_seconds_total", "a"] == pytest.approx(before + 6.0)


def test_the_page_tells_what_a_gpu_did_with_its_time(world: World) -> None:
    world.paths["a"].write_bytes(
        b"TIMELINE,1000,GPU_START,porep-1000-1,worker=0,partition=0\n"
        b"TIMELINE,3000,GPU_END,porep-1000-1,worker=0,partition=0,gpu_ms=2000\n"
        b"TIMELINE,4000,SYNTH_START,porep-1000-1,partition=1\n"
        b"TIMELINE,4500,PING,porep-1000-1,x\n"
    )
    world.turn()
    told = dict(world.agent._facts())["a, GPU unknown"]
    assert told == "1 spans; 2.0 s busy, 1.2 s idle (no_work 1.0, fill 0.2); idle for 1.2 s now"


def test_two_scrapes_of_one_state_are_the_same(world: World) -> None:
    world.paths["a"].write_bytes(b"TIMELINE,1000,GPU_START,porep-1000-1,worker=0,partition=0\n")
    world.turn()
    first = world.shown()
    world.clock.advance(5.0)
    second = world.shown()
    assert {key for key in first if first[key] != second[key]} <= {("process_cpu_seconds_total", "")} | {
        (name, "") for name, _ in first if name.startswith(("process_", "python_"))
    }


def test_a_thread_that_is_stuck_is_unhealthy(world: World) -> None:
    world.turn()
    world.clock.advance(STUCK_S)
    assert world.agent._unhealthy() == []
    world.clock.advance(1.0)
    assert world.agent._unhealthy() == ["the thread that follows the logs has done nothing for 30 s"]
    world.turn()
    assert world.agent._unhealthy() == []


def raise_error(*_: object, **__: object) -> None:
    raise RuntimeError("unforeseen")


def test_an_unexpected_error_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FileFollower, "read", raise_error)
    world.agent._follow()
    assert world.failures == 1
    assert world.agent.failed
    assert world.agent._unhealthy() == ["a part of it has failed"]
    (record,) = caplog.records
    assert record.message == "following the logs ended unexpectedly"
    assert record.exc_info is not None


# --- run and demo


def config(path: Path) -> Config:
    return Config(sources=(SourceConfig("a", path),), listen=ANYWHERE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_run_even_if_it_comes_before_the_wait(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    agents: list[Agent] = []

    def on_start(agent: Agent) -> None:
        agents.append(agent)
        os.kill(os.getpid(), number)

    assert app.run(config(tmp_path / "a.log"), on_start=on_start) == 0
    assert signal.getsignal(number) is before
    (agent,) = agents
    assert not agent._thread.is_alive()


def test_a_signal_ends_run_while_it_waits(tmp_path: Path) -> None:
    kill = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    assert app.run(config(tmp_path / "a.log"), on_start=lambda _: kill.start()) == 0


def test_run_outlives_its_terminal_if_started_so(tmp_path: Path) -> None:
    def on_start(_: Agent) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        kill.start()

    kill = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert app.run(config(tmp_path / "a.log"), on_start=on_start) == 0
        assert not kill.is_alive()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_run_fails_with_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_bytes(b"")
    monkeypatch.setattr(Pipeline, "settle", raise_error)
    assert app.run(config(tmp_path / "a.log")) == 1


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    def again(agent: Agent) -> None:
        host, port = agent.address.split(":")
        taken = Config(sources=(SourceConfig("a", tmp_path / "a.log"),), listen=Listen(host, int(port)))
        with pytest.raises(ListenError):
            app.run(taken)
        os.kill(os.getpid(), signal.SIGTERM)

    assert app.run(config(tmp_path / "a.log"), on_start=again) == 0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_demo_fails_with_its_prover(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Prover, "run", raise_error)
    assert app.demo(listen=ANYWHERE, speed=10, seed=1) == 1
    assert "the simulated prover ended unexpectedly" in [record.message for record in caplog.records]
    assert list(temporary.iterdir()) == []


def test_the_demo_ends_its_prover(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def prove(_prover: Prover, path: Path, *, stop: Callable[[], bool], sleep: Callable[[float], object]) -> None:
        assert path.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop():
            sleep(0.01)
        ended.append(path.name)

    monkeypatch.setattr(Prover, "run", prove)
    assert app.demo(listen=ANYWHERE, speed=10, seed=1) == 0
    assert ended == ["cuzk.log"]
    assert list(temporary.iterdir()) == []
    assert "prover" not in [thread.name for thread in threading.enumerate()]


def test_a_run_is_recorded_for_analyze(tmp_path: Path) -> None:
    log, recording = tmp_path / "cuzk.log", tmp_path / "cuzk.nvml.jsonl"
    log.touch()
    ended = threading.Event()
    prover = Prover(SCENARIOS["bound"], seed=1, speed=50, clock=system_clock())
    proving = threading.Thread(target=prover.run, args=[log], kwargs={"stop": ended.is_set, "sleep": ended.wait})
    kill = threading.Timer(5.0, os.kill, (os.getpid(), signal.SIGTERM))

    def on_start(_: Agent) -> None:
        proving.start()
        kill.start()

    recorded = replace(config(log), gpu_record=recording)
    try:
        assert app.run(recorded, on_start=on_start, nvml=prover.nvml) == 0
    finally:
        ended.set()
        proving.join()
    report, fault = analyze([str(log)], Options(recordings={"0": str(recording)}))
    assert fault is None
    (engine,) = report.engines
    chip = engine.gpus["0"].chip
    assert chip is not None
    assert 3000 < chip.sampled_ms < 6000
    assert 0 < chip.span_busy_ms <= chip.busy_ms <= chip.sampled_ms
