"""Agents that end at any moment, and those that go on from what they left."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent import app
from cuzk_agent.app import Recall, _remembered, _Source, key_of
from cuzk_agent.config import Config, SourceConfig
from cuzk_agent.log.source import FollowState
from cuzk_agent.snapshot import Memory, Moment, StateFile, encode
from cuzk_agent.timeline import saved
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import TimelineState
from timeline.test_properties import (
    EVENTS,
    MONOTONIC_S,
    Op,
    Writer,
    assert_never_falls,
    counters,
    in_order,
    lines_of,
    programs,
)


class World:
    """A machine with one log and one agent, which may be down."""

    def __init__(self, directory: Path, start: str = "start", piece: int = 1 << 20) -> None:
        """The agent reads no more than a `piece` of its log at a time."""
        self.writer = Writer()
        self.piece = piece
        self.boot_ms = 0
        self.boot_id = "first"
        self.log = directory / "cuzk.log"
        self.log.touch()
        self.rotations = 0
        self.held_back = b""
        self.state = directory / "agent.state"
        self.config = Config(sources=(SourceConfig("p", self.log),), start=start, state=self.state)  # type: ignore[arg-type]
        self.shown: list[Mapping[str, float]] = [{}, {}]
        """The last page of each scraper."""
        self.written: list[bytes] = []
        self.start_agent()
        self.turn()
        self.keep()

    # --- a clock

    def monotonic_s(self) -> float:
        return MONOTONIC_S + (self.writer.now_ms - self.boot_ms) / 1000

    def unix_s(self) -> float:
        return self.writer.unix_s

    def moment(self) -> Moment:
        return Moment(self.monotonic_s(), self.unix_s(), self.boot_id)

    # --- the daemon

    def write(self, *lines: bytes, hold_back: int = 0) -> None:
        """The last bytes may come later."""
        self.written += lines
        data = self.held_back + b"".join(line + b"\n" for line in lines)
        self.held_back = data[len(data) - hold_back :] if hold_back else b""
        with self.log.open("ab") as log:
            log.write(data[: len(data) - len(self.held_back)])

    def rotate(self) -> None:
        self.rotations += 1
        rotated = self.log.rename(self.log.with_name(f"cuzk.log.{self.rotations}"))
        # The file system's clock is coarse.
        os.utime(rotated, ns=(0, self.rotations * 10**9))
        self.log.touch()

    # --- the agent

    def start_agent(self) -> None:
        self.file = StateFile(self.state)
        (source,) = self.config.sources
        memories, recall = _remembered(self.file, self, [key_of(source)])
        self.recall = recall
        self.source = _Source(source, self.config, self, lambda *_: None, memories.get(key_of(source)), recall)
        follower = self.source._follower
        follower.read = partial(follower.read, self.piece)  # type: ignore[method-assign]

    def turn(self) -> bool:
        self.has_looked = True
        return self.source.turn()

    def keep(self, *, at_end: bool = False) -> None:
        memory = self.source.memory()
        found = {} if memory is None else {self.source.key: memory}
        self.file.write(encode(Memory(self.moment(), at_end, found)), sync=False)

    def scrape(self, scraper: int) -> Mapping[str, float] | None:
        """What is shown, if anything; it never falls."""
        view = self.source.view()
        if view.read.state is FollowState.FOLLOWING and not view.read.caught_up:
            return None
        self.keep()
        shown = counters(view.timeline)
        shown |= {f"read {name}": float(getattr(view.read, name)) for name in ("lines", "read_bytes", "rotations")}
        assert_never_falls(self.shown[scraper], shown)
        self.shown[scraper] = shown
        return shown

    def kill(self) -> None:
        self.source.close()
        self.file.close()

    def stop(self) -> None:
        self.keep(at_end=True)
        self.kill()

    def reboot(self) -> None:
        self.boot_ms = self.writer.now_ms + int(MONOTONIC_S * 1000) - 20_000
        self.boot_id = f"{self.boot_id}+"

    def catch_up(self) -> TimelineState:
        # Now and then a turn only goes on to the next file.
        idle = 0
        while idle < 20:
            idle = 0 if self.turn() else idle + 1
        return self.source.view().timeline


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path)
    monkeypatch.setattr(app, "boot_id", lambda: world.boot_id)
    yield world
    world.kill()


# --- whatever happens


pieces = st.sampled_from((1 << 20, 1000, 100))
happenings = st.lists(
    st.tuples(
        st.sampled_from(
            ("turn", "turn", "turn", "scrape 0", "scrape 1", "keep", "kill", "kill", "down", "down", "stop", "rotate")
        ),
        st.sampled_from((0, 1, 40, 700, 9000)),
    ),
    max_size=3,
)


steps = st.sampled_from((0, 0, 0, 0, 100, -100, 3000, -3000, 60_000, -60_000, 7_200_000, -7_200_000))
"""By how many milliseconds the wall clock is set."""


def happen(world: World, what: str, wait_ms: int) -> None:
    world.writer.now_ms += wait_ms
    match what:
        case "turn":
            world.turn()
        case "scrape 0" | "scrape 1":
            world.turn()
            world.scrape(int(what[-1]))
        case "keep":
            world.keep()
        case "kill":
            world.kill()
            world.start_agent()
        case "stop":
            world.stop()
            world.start_agent()
        case "rotate":
            world.rotate()


def daemon_writes(op: Op, writer: Writer, last_ms: int) -> tuple[list[bytes], int]:
    """The lines of a step, of which none tells of a span before it, and when the last event was written."""
    # After an hour without events a line's time is doubted, by a reader of the past more than by a present one.
    writer.now_ms = max(writer.now_ms, min(writer.now_ms + op.wait_ms, last_ms + 3_000_000))
    lines = [re.sub(rb"gpu_ms=[0-9]+$", b"gpu_ms=0", line) for line in lines_of(op, writer, b"")]
    return lines, writer.now_ms if any(line.startswith(b"TIMELINE") for line in lines) else last_ms


@given(in_order, st.data())
def test_nothing_is_lost_doubled_or_taken_back(program: list[Op], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), piece=data.draw(pieces))
        patch.setattr(app, "boot_id", lambda: world.boot_id)
        down, last_ms = False, 0
        for op in [Op("engine"), *program]:
            world.write()  # the rest of a line comes soon
            lines, last_ms = daemon_writes(op, world.writer, last_ms)
            world.write(*lines, hold_back=data.draw(st.sampled_from((0, 0, 1, 9))) if op.what != "life" else 0)
            for what, wait_ms in data.draw(happenings):
                wait_ms = 0 if world.held_back else wait_ms
                if what == "down":
                    if not down:
                        world.kill()
                    down = not down
                    if not down:
                        world.start_agent()
                elif not down or what == "rotate":
                    happen(world, what, wait_ms)
        if down:
            world.start_agent()
        world.write(world.writer.tracing("shutting down cuzk engine"))
        world.catch_up()
        shown = [world.scrape(0), world.scrape(1)]
        assert shown[0] is not None
        assert shown[0] == shown[1]
        assert shown[0]["read lines"] == len(world.written)
        world.kill()

        whole = Pipeline()
        whole.feed(world.written)
        whole.finish()
        expected = counters(whole.state())
        # Some are born when they are first looked at.
        expected = dict.fromkeys((name for name in shown[0] if not name.startswith("read ")), 0.0) | expected
        assert {name: shown[0].get(name, 0.0) for name in expected} == pytest.approx(expected, abs=1e-9)


@given(in_order, st.data())
def test_a_wall_clock_that_is_set_loses_and_doubles_nothing(program: list[Op], data: st.DataObject) -> None:
    """When a line without an offset was written may be in doubt then, and with it what rests on how long something
    takes: why a GPU idled, and whether a unit has been given up."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), piece=data.draw(pieces))
        patch.setattr(app, "boot_id", lambda: world.boot_id)
        whole, last_ms = Pipeline(), 0
        for op in [Op("engine"), *program, Op("event", which=EVENTS.index("FUTURE"))]:
            if world.has_looked:
                # Set forth and back while nobody looks, it can't be told from one that was not.
                world.writer.set_by_ms += data.draw(steps)
                world.has_looked = False
            lines, last_ms = daemon_writes(op, world.writer, last_ms)
            world.write(*lines)
            whole.feed(lines, Arrival(world.monotonic_s(), world.unix_s(), live=True))
            for what, wait_ms in data.draw(happenings):
                happen(world, what, wait_ms)
            whole.settle(world.monotonic_s(), world.unix_s())
        world.writer.now_ms += 60_000
        whole.settle(world.monotonic_s(), world.unix_s())
        world.catch_up()
        shown = [world.scrape(0), world.scrape(1)]
        assert shown[0] is not None
        assert shown[0] == shown[1]
        assert shown[0]["read lines"] == len(world.written)
        world.kill()

        exact = ("events.", "unparsed.", "engine_restarts", "trouble.", "span_seconds.", "synth_seconds.")
        expected = {name: count for name, count in counters(whole.state()).items() if name.startswith(exact)}
        assert {name: shown[0].get(name, 0.0) for name in expected} == pytest.approx(expected, abs=1e-9)


@given(programs, st.data())
def test_what_was_shown_is_not_taken_back_whatever_is_written(program: list[Op], data: st.DataObject) -> None:
    """Lines that come late are moved to where all is settled: one that reads them again must move them no less."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), piece=data.draw(pieces))
        patch.setattr(app, "boot_id", lambda: world.boot_id)
        for op in program:
            world.writer.now_ms += op.wait_ms
            world.write(*lines_of(op, world.writer, b""))
            for what, wait_ms in data.draw(happenings):
                happen(world, what, wait_ms)
        world.catch_up()
        assert world.scrape(0) == world.scrape(1)
        assert world.shown[0]["read lines"] == len(world.written)
        world.kill()


# --- what is left, and what becomes of it


SPAN = (
    b"2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=true",
    b"2026-11-30T14:00:00.500000Z  INFO cuzk_core::engine: pipeline GPU worker started worker_id=0 gpu=0 sub_id=0",
    b"TIMELINE,1000,GPU_START,porep-1,worker=0,partition=0",
    b"TIMELINE,3000,GPU_END,porep-1,worker=0,partition=0,gpu_ms=2000",
    b"TIMELINE,4000,GPU_START,porep-1,worker=0,partition=1",
)


def at(world: World, now_ms: int) -> TimelineState:
    """What the agent knows then."""
    world.writer.now_ms = now_ms
    return world.catch_up()


def test_a_span_that_is_open_goes_on(world: World) -> None:
    world.writer.now_ms = 4000
    world.write(*SPAN)
    assert at(world, 5000).gpus["0"].busy_seconds == pytest.approx(2.75, abs=0.002)
    assert world.scrape(0)
    world.kill()
    world.writer.now_ms = 8000
    world.start_agent()
    world.write(b"TIMELINE,7000,GPU_END,porep-1,worker=0,partition=1,gpu_ms=3000")
    gpu = at(world, 9000).gpus["0"]
    assert (gpu.spans, gpu.busy_seconds) == (2, 5)
    assert sum(gpu.idle_seconds.values()) == pytest.approx(3.75, abs=0.002)
    assert world.scrape(0)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_reboot(world: World, in_order: bool, caplog: pytest.LogCaptureFixture) -> None:
    world.writer.now_ms = 4000
    world.write(*SPAN)
    at(world, 5000)
    assert world.scrape(0)
    world.stop() if in_order else world.kill()
    # What it wrote last is read, too.
    world.write(b"TIMELINE,7000,GPU_END,porep-1,worker=0,partition=1,gpu_ms=3000")
    world.writer.now_ms = 600_000
    world.reboot()
    world.start_agent()
    state = at(world, 601_000)
    assert not state.engine_running
    gpu = state.gpus["0" if in_order else "unknown"]
    if in_order:
        assert (gpu.spans, gpu.busy_seconds) == (2, 5)
        assert world.scrape(0)
    else:
        # The last second may have been shown and be lost: a reset says so, a small fall would be taken for one.
        assert state.events["GPU_START"] == 0
        assert state.events["GPU_END"] == 1
        assert [record.message for record in caplog.records] == [
            "the machine went down under the last agent: counters begin anew, where it had read to"
        ]
    # The next engine is another one.
    world.writer.epoch_ms = world.writer.now_ms
    world.write(world.writer.tracing("starting cuzk engine pipeline_enabled=true"))
    state = at(world, 605_000)
    assert state.engine_running
    assert sum(state.in_flight.values()) == 0


def test_without_a_state_the_end_of_the_log_tells_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, "end")
    monkeypatch.setattr(app, "boot_id", lambda: world.boot_id)
    world.kill()
    world.state.unlink()
    world.writer.now_ms = 5000
    world.write(*SPAN)
    world.start_agent()
    assert world.source.memory() is None
    state = world.catch_up()
    assert world.source.memory() is not None
    assert state.engine_running
    assert not any(counters(state).values())
    assert {stage: count for stage, count in state.in_flight.items() if count} == {"gpu": 1}
    assert world.scrape(0)
    # Busy from the moment on at which it is followed; the span counts when it ends.
    assert at(world, 7000).gpus["0"].busy_seconds == pytest.approx(2, abs=0.002)
    assert world.scrape(0)
    world.kill()
    world.start_agent()
    world.write(b"TIMELINE,7500,GPU_END,porep-1,worker=0,partition=1,gpu_ms=3500")
    state = at(world, 9000)
    assert state.gpus["0"].busy_seconds == pytest.approx(2.75, abs=0.002)
    assert state.span_seconds["porep-c2"].sum_seconds == 3.5
    assert world.scrape(0)
    world.kill()


def test_a_state_of_another_version_keeps_its_place(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.writer.now_ms = 4000
    world.write(*SPAN)
    at(world, 5000)
    with monkeypatch.context() as patch:
        patch.setattr(saved, "SHAPE", "0123456789abcdef")
        world.stop()
    world.start_agent()
    world.write(b"TIMELINE,5500,GPU_END,porep-1,worker=0,partition=1,gpu_ms=1500")
    state = at(world, 6000)
    assert {name: count for name, count in state.events.items() if count} == {"GPU_END": 1}
    (record,) = caplog.records
    assert record.message == "source p: its counters begin anew: it was written by another version"


def test_a_state_of_other_logs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.stop()
    elsewhere = SourceConfig("p", world.log.with_name("other.log"))
    world.config = replace(world.config, sources=(elsewhere,))
    world.start_agent()
    foreign = world.state.with_name("agent.state.foreign")
    assert caplog.messages == [
        f"the state in {world.state} is not used: it is of other logs (file {world.log}); it is kept as {foreign}"
    ]
    assert not world.state.exists()
    # One of two is still there: the other's is kept beside it.
    both = {"x": world.source.memory(), world.source.key: world.source.memory()}
    world.file.write(
        encode(Memory(world.moment(), False, {key: found for key, found in both.items() if found})), sync=False
    )
    world.kill()
    world.start_agent()
    assert caplog.messages[1:] == [
        f"the state in {world.state} is not used: it is also of logs not followed now (x); it is kept as {foreign}"
    ]
    assert world.recall == Recall(counters=True, same_boot=True)
