"""Logs of every kind, and everything that befalls them, as the running agent counts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from e2e.support import Agent, Page, Process, in_background, wait_until

STANDIN = Path(__file__).parent.parent / "log" / "journalctl.py"
EVENTS = "cuzk_timeline_events_total"


class Writer:
    """Writes events, each like no other, into a file that it keeps open."""

    def __init__(self, path: Path, flags: int = os.O_APPEND) -> None:
        self.path = path
        self._flags = flags
        self.events = 0
        self._descriptor = -1
        self.reopen()

    def reopen(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | self._flags, 0o644)

    def line(self) -> str:
        self.events += 1
        # All of one length, for those that are no more than ten thousand.
        return f"TIMELINE,{10_000 + self.events},GPU_QUEUE,porep-1000-{10_000 + self.events},partition=0"

    def write(self, count: int = 10) -> None:
        for _ in range(count):
            os.write(self._descriptor, self.line().encode() + b"\n")

    def raw(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


class World:
    """A log, its writer and its agent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "logs"
        self.directory.mkdir()
        self.path = self.directory / "cuzk.log"
        self.state = directory / "agent.state"
        self.writers: list[Writer] = []

    def writer(self, flags: int = os.O_APPEND, path: Path | None = None) -> Writer:
        made = Writer(path or self.path, flags)
        self.writers.append(made)
        return made

    def agent(self, *arguments: str) -> Agent:
        where = arguments or ("--log", f"p={self.path}")
        return Agent("run", *where, "--from", "start", "--state", str(self.state))

    def close(self) -> None:
        for writer in self.writers:
            if writer._descriptor >= 0:
                writer.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def events(page: Page) -> float:
    return page.sum(EVENTS)


def expect(agent: Agent, count: int) -> Page:
    """All have come, and no more come."""
    page = agent.wait_for(lambda page: events(page) >= count, f"{count} events")
    time.sleep(0.4)
    page = agent.page()
    assert events(page) == count
    assert page.sum("cuzk_agent_lost_bytes_total") == 0
    return page


# --- what happens to a log that is followed


# ruff: noqa: ARG001  one signature for all


def keeps_old_descriptor(world: World, writer: Writer, agent: Agent) -> None:
    world.path.rename(world.path.with_name("cuzk.log.1"))
    world.path.touch()
    for _ in range(5):
        writer.write(2)
        time.sleep(0.3)
    writer.reopen()
    writer.write()


def created_later(world: World, writer: Writer, agent: Agent) -> None:
    world.path.rename(world.path.with_name("cuzk.log.1"))
    writer.write()
    time.sleep(2)
    writer.reopen()
    writer.write()


def copytruncate(world: World, writer: Writer, agent: Agent) -> None:
    shutil.copyfile(world.path, world.path.with_name("cuzk.log.1"))
    os.truncate(world.path, 0)
    writer.write()


def rewritten_same_length(world: World, writer: Writer, agent: Agent) -> None:
    os.truncate(world.path, 0)
    writer.reopen()
    writer.write(10)
    assert world.path.stat().st_size == 10 * len(writer.line() + "\n")
    writer.events -= 1


def rewritten_longer(world: World, writer: Writer, agent: Agent) -> None:
    os.truncate(world.path, 0)
    writer.reopen()
    writer.write(20)


def invalid_utf8(world: World, writer: Writer, agent: Agent) -> None:
    writer.raw(b"\xff\n")
    writer.write()


def symlink_switched(world: World, writer: Writer, agent: Agent) -> None:
    other = world.directory / "..2"
    other.mkdir()
    link = world.directory / "..tmp"
    link.symlink_to(other)
    link.rename(world.directory / "..data")
    writer.reopen()
    writer.write()


def directory_made_again(world: World, writer: Writer, agent: Agent) -> None:
    shutil.rmtree(world.directory)
    time.sleep(0.5)
    world.directory.mkdir()
    writer.reopen()
    writer.write()


def long_line(world: World, writer: Writer, agent: Agent) -> None:
    for _ in range(64):
        writer.raw(b"x" * (1 << 20))
    writer.raw(b"\n")
    writer.write()


def inode_used_again(world: World, writer: Writer, agent: Agent) -> None:
    for _ in range(5):
        writer.close()
        world.path.unlink()
        writer.reopen()
        writer.write(2)
        expect(agent, writer.events)


@pytest.mark.parametrize(
    ("happens", "flags"),
    [
        (keeps_old_descriptor, os.O_APPEND),
        (created_later, os.O_APPEND),
        (copytruncate, os.O_APPEND),
        (copytruncate, 0),
        (rewritten_same_length, os.O_APPEND),
        (rewritten_longer, os.O_APPEND),
        (invalid_utf8, os.O_APPEND),
        (symlink_switched, os.O_APPEND),
        (directory_made_again, os.O_APPEND),
        (long_line, os.O_APPEND),
        (inode_used_again, os.O_APPEND),
    ],
    ids=lambda value: value.__name__ if callable(value) else "append" if value else "offset",
)
def test_nothing_is_lost_or_doubled(world: World, happens: Callable[[World, Writer, Agent], None], flags: int) -> None:
    if happens is symlink_switched:
        (world.directory / "..1").mkdir()
        (world.directory / "..data").symlink_to("..1")
        world.path.symlink_to("..data/cuzk.log")
    writer = world.writer(flags)
    with world.agent() as agent:
        agent.wait_ready()
        writer.write()
        expect(agent, 10)
        before = agent.memory_bytes()
        happens(world, writer, agent)
        expect(agent, writer.events)
        assert agent.memory_bytes("VmHWM") - before < 24 << 20
        assert agent.stop() == 0


# --- while no agent runs


def test_while_stopped(world: World) -> None:
    writer = world.writer()
    with world.agent() as agent:
        agent.wait_ready()
        writer.write()
        expect(agent, 10)
        assert agent.stop() == 0
    writer.write()
    with world.agent() as agent:
        expect(agent, 20)
        writer.write()
        expect(agent, 30)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rotated_while_stopped(world: World, packed: bool, number: signal.Signals) -> None:
    writer = world.writer()
    with world.agent() as agent:
        agent.wait_ready()
        writer.write(5)
        expect(agent, 5)
        agent.stop(number)
    writer.write(5)
    for _ in range(2):
        for old in sorted(world.directory.glob("cuzk.log.*"), reverse=True):
            old.rename(old.with_name(old.name.replace(".1", ".2")))
        world.path.rename(world.path.with_name("cuzk.log.1"))
        writer.reopen()
        writer.write(5)
    if packed:
        subprocess.run(["gzip", str(world.path.with_name("cuzk.log.2"))], check=True)
    with world.agent() as agent:
        expect(agent, 20)
        writer.write(5)
        page = expect(agent, 25)
        assert page.sum("cuzk_agent_rotations_total") == 2


# --- logrotate itself


@pytest.mark.skipif(shutil.which("logrotate", path="/usr/sbin:/usr/bin") is None, reason="needs logrotate")
@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("create 0644", os.O_APPEND),
        ("nocreate\ndelaycompress\ncompress", os.O_APPEND),
        ("create 0644\ncompress", os.O_APPEND),
        ("create 0644\ndateext\ndateformat -%Y%m%d-%s", os.O_APPEND),
        ("copytruncate", os.O_APPEND),
        ("copytruncate", 0),
        ("copytruncate\ncompress", os.O_APPEND),
    ],
)
def test_logrotate(world: World, how: str, flags: int) -> None:
    config = world.directory.parent / "logrotate.conf"
    owner = f"su {world.directory.owner()} {world.directory.group()}"
    config.write_text(f"{world.path} {{\n{owner}\nrotate 9\nmissingok\n{how}\n}}\n", encoding="utf-8")
    status = world.directory.parent / "logrotate.status"
    writer = world.writer(flags)
    enough = threading.Event()
    lock = threading.Lock()
    is_packed_at_once = "compress" in how and "delaycompress" not in how and "copytruncate" not in how

    def rotate() -> None:
        logrotate = shutil.which("logrotate", path="/usr/sbin:/usr/bin")
        assert logrotate is not None
        # What is written between its copying and its truncating is lost to everybody.
        with lock:
            command = [logrotate, "--force", "--state", str(status), str(config)]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            if is_packed_at_once:
                # What a writer has yet to write into a file that is packed is lost to everybody, too.
                writer.reopen()
        if "copytruncate" not in how:
            time.sleep(0.1)
            with lock:
                writer.reopen()

    def write(_: threading.Event) -> None:
        while not enough.is_set():
            with lock:
                writer.write(1)
            time.sleep(0.002)

    with in_background(write):
        with world.agent() as agent:
            agent.wait_ready()
            for _ in range(2):
                rotate()
                time.sleep(1.1 if "dateext" in how else 0.3)
            agent.stop(signal.SIGKILL)
        # Nobody follows while it is rotated twice more.
        for _ in range(2):
            rotate()
            time.sleep(1.1 if "dateext" in how else 0.3)
        enough.set()
    with world.agent() as agent:
        expect(agent, writer.events)


# --- the journal


class Journal:
    """A stand-in for the journal and its journalctl, which is found in PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "bin"
        self.directory.mkdir()
        shutil.copy(STANDIN, self.directory / "standin.py")
        script = self.directory / "journalctl"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {self.directory}/standin.py "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        (self.directory / "journal").touch()
        self.environ: Mapping[str, str] = {"PATH": f"{self.directory}:{os.environ['PATH']}"}
        self.number = 0
        self.start_s = time.time()

    def add(self, message: str, pid: int = 100, **fields: str) -> None:
        self.number += 1
        value: dict[str, object] = {
            "__CURSOR": f"i={self.number}",
            "__REALTIME_TIMESTAMP": str(int(time.time() * 1e6)),
            "_SYSTEMD_UNIT": "cuzk.service",
            "_PID": str(pid),
            "_COMM": "cuzk-daemon",
            "MESSAGE": message if message.isprintable() else list(message.encode()),
            **fields,
        }
        with (self.directory / "journal").open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")

    def event(self, offset_ms: int, name: str, detail: str, pid: int = 100) -> None:
        self.add(f"TIMELINE,{offset_ms},{name},porep-1000-1,{detail}", pid)

    def start_engine(self, pid: int = 100) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.add(f"\x1b[2m{stamp}\x1b[0m \x1b[32m INFO\x1b[0m cuzk_core::engine: starting cuzk engine", pid)


def test_a_unit_in_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    state = tmp_path / "agent.state"
    command = ("run", "--journal", "p=cuzk", "--from", "start", "--state", str(state))
    with Agent(*command, environ=journal.environ) as agent:
        agent.wait_for(lambda page: page.by("state", "cuzk_agent_source_state")["missing"] == 1, "an empty journal")
        assert b"cuzk.service has no entry in the journal yet" in agent.get("/-/ready")[2]
        journal.start_engine()
        agent.wait_ready()
        journal.event(5, "GPU_START", "worker=0,partition=0")
        agent.wait_for(lambda page: page.has("cuzk_gpu_spans_total") and events(page) == 1, "its span")
        assert agent.page().by("envelope", "cuzk_agent_source_info") == {"journal": 1}
        # systemd knows that it is dead, and nothing reads busy from then on.
        journal.add("cuzk.service: Main process exited, code=killed, status=9/KILL", 1, _SYSTEMD_UNIT="init.scope")
        agent.wait_for(lambda page: not page.sum("cuzk_engine_running"), "its end")
        first = agent.page().sum("cuzk_gpu_logged_busy_seconds_total")
        time.sleep(0.5)
        assert agent.page().sum("cuzk_gpu_logged_busy_seconds_total") == first
        assert agent.page().by("outcome", "cuzk_partition_outcomes_total") == {"abandoned": 1}
        # Another process is another engine, whatever its offset.
        journal.event(100_000, "GPU_START", "worker=0,partition=1", pid=200)
        agent.wait_for(lambda page: page.sum("cuzk_engine_restarts_total") == 1, "another engine")
        agent.stop(signal.SIGKILL)
    journal.event(101_000, "GPU_END", "worker=0,partition=1,gpu_ms=1000", pid=200)
    with Agent(*command, environ=journal.environ) as agent:
        agent.wait_ready()
        page = agent.wait_for(lambda page: events(page) == 3, "what came meanwhile")
        assert page.by("outcome", "cuzk_partition_outcomes_total") == {"abandoned": 1, "proved": 1}
        (journal.directory / "die").touch()
        agent.wait_for(lambda page: not page.sum("cuzk_agent_source_up"), "its death to be shown")
        assert b"journalctl ended with status 1: Failed to iterate" in agent.get("/-/ready")[2]
        journal.event(102_000, "GPU_START", "worker=0,partition=2", pid=200)
        page = agent.wait_for(lambda page: events(page) == 4, "what came meanwhile")
        assert page.sum("cuzk_agent_reader_restarts_total") == 1
        assert agent.stop() == 0
    assert not (journal.directory / "die").exists()


# --- standard input


class ShellAgent(Agent):
    """An agent that a shell starts, with this script and its arguments."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        Process.__init__(self, ["sh", "-c", script, "sh", *arguments])
        self._port: int | None = None


def test_standard_input_is_followed_and_passed_on(tmp_path: Path) -> None:
    lines = "".join(f"TIMELINE,{number},GPU_QUEUE,porep-1000-{number},partition=0\n" for number in range(20_000))
    out = tmp_path / "out"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = ["run", "--log", "-", "--tee", "--state", "off", "--listen", "127.0.0.1:0"]
    with ShellAgent(f'exec "$@" < {pipe} > {out}', [sys.executable, "-m", "cuzk_agent", *arguments]) as agent:
        with pipe.open("w", encoding="utf-8") as writer:
            writer.write(lines)
            writer.flush()
            agent.wait_ready()
            page = agent.wait_for(lambda page: events(page) == 20_000, "all events")
            assert page.sum("cuzk_agent_source_up", source="stdin") == 1
            wait_until(lambda: out.stat().st_size == len(lines), "all of it")
        agent.wait_for(lambda page: not page.sum("cuzk_agent_source_up"), "its end")
        assert b"standard input: it has ended" in agent.get("/-/ready")[2]
        assert not agent.page().sum("cuzk_engine_running")
    assert out.read_text(encoding="utf-8") == lines


# --- containers and patterns


@pytest.mark.parametrize("kind", ["docker", "cri"])
def test_a_container(world: World, kind: str) -> None:
    writer = world.writer()

    def write(text: str) -> None:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        if kind == "docker":
            writer.raw(json.dumps({"log": text + "\n", "stream": "stderr", "time": now}).encode() + b"\n")
        else:
            half = len(text) // 2
            writer.raw(f"{now} stderr P {text[:half]}\n{now} stderr F {text[half:]}\n".encode())

    with world.agent() as agent:
        agent.wait_ready()
        for _ in range(10):
            write(writer.line())
        page = expect(agent, 10)
        assert page.by("envelope", "cuzk_agent_source_info") == {kind: 1}
        assert page.sum("cuzk_agent_unparsed_lines_total") == 0


def test_files_that_match_a_pattern(world: World) -> None:
    pattern = str(world.directory / "cuzk-*.log")
    with world.agent("--log", pattern) as agent:
        wait_until(lambda: agent.get("/-/ready")[2] == f"{pattern}: no file matches\n".encode(), "the reason")
        first = world.writer(path=world.directory / "cuzk-1.log")
        first.write()
        agent.wait_ready()
        second = world.writer(path=world.directory / "cuzk-2.log")
        second.write(7)
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-1": 10, "cuzk-2": 7}, "both")
        # What they are rotated into is no log of its own.
        first.path.rename(first.path.with_name("cuzk-1.log.1"))
        first.reopen()
        first.write()
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-1": 20, "cuzk-2": 7}, "the new file")
        agent.stop(signal.SIGKILL)
    second.write()
    with world.agent("--log", pattern) as agent:
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-1": 20, "cuzk-2": 17}, "both")
        assert agent.stop() == 0
    # One that isn't there for a while is not forgotten.
    second.path.rename(second.path.with_name("cuzk-2.log.1"))
    with world.agent("--log", pattern) as agent:
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-1": 20}, "the one that is there")
        assert agent.stop() == 0
    second.reopen()
    second.write()
    with world.agent("--log", pattern) as agent:
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-1": 20, "cuzk-2": 27}, "both")
        assert agent.complaints() == []


def test_what_comes_later_is_new(world: World) -> None:
    world.writer(path=world.directory / "cuzk-1.log").write()
    command = ("run", "--log", str(world.directory / "cuzk-*.log"), "--state", str(world.state))
    with Agent(*command) as agent:
        agent.wait_ready()
        world.writer(path=world.directory / "cuzk-2.log").write(7)
        agent.wait_for(lambda page: page.by("source", EVENTS) == {"cuzk-2": 7}, "the new one")
