"""The file that an agent leaves, and the thread that writes it."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import FakeClock
from cuzk_agent import snapshot
from cuzk_agent.log.envelope import UnwrapperState
from cuzk_agent.log.position import FilePosition, Totals
from cuzk_agent.snapshot import (
    FORMAT,
    FRESH_S,
    PERIOD_S,
    DamagedError,
    Keeper,
    Memory,
    Moment,
    NewerError,
    SourceMemory,
    StateFile,
    decode,
    encode,
)

POSITION = FilePosition((), UnwrapperState(), Totals(lines=7))
MEMORY = Memory(
    Moment(5.5, 1.75e9, "boot"), False, {"file /var/log/cuzk.log": SourceMemory(POSITION, {"shape": "x", "roots": []})}
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.state"


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.parent.iterdir()}


# --- what is in it


def test_what_was_written_is_read(path: Path) -> None:
    file = StateFile(path)
    assert file.load() is None
    for sync in (True, False):
        file.write(encode(MEMORY), sync=sync)
        assert file.load() == MEMORY
    file.sync()
    assert names(path) == {"agent.state", "agent.state.lock"}
    # It names jobs and paths: nobody else's business.
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


CONTENT = encode(MEMORY)


@given(st.data())
def test_damage_anywhere_is_found(data: st.DataObject) -> None:
    damaged = bytearray(CONTENT)
    for at in data.draw(st.lists(st.integers(0, len(CONTENT) - 1), min_size=1, max_size=3)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    content = bytes(damaged[:cut]) + data.draw(st.sampled_from((b"", b"\0", b"\0" * 512)))
    if content == CONTENT:
        return
    with pytest.raises((DamagedError, NewerError)):
        decode(content)


@given(st.binary(max_size=200))
def test_nonsense_with_a_right_header_is_damage(junk: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(b"cuzk-agent-state %d %s\n" % (FORMAT, snapshot._digest(junk)) + junk)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "[" * 100_000,
        '{"taken": [1.0, 2.0], "at_end": false, "sources": {}}',
        '{"taken": [1.0, 2.0, "b"], "at_end": 0, "sources": {}}',
        '{"taken": [1.0, 2.0, "b"], "at_end": false, "sources": {"x": {"position": {}, "pipeline": {}}}}',
        '{"taken": [1.0, 2.0, "b"], "at_end": false, "sources": {"x": {"position": {"kind": "?"}, "pipeline": {}}}}',
    ],
)
def test_what_is_no_memory_is_damage(text: str) -> None:
    data = zlib.compress(text.encode())
    with pytest.raises(DamagedError):
        decode(b"cuzk-agent-state %d %s\n" % (FORMAT, snapshot._digest(data)) + data)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_BYTES", 1 << 20)
    data = zlib.compress(bytes(1 << 21))
    with pytest.raises(DamagedError, match="too large"):
        decode(b"cuzk-agent-state %d %s\n" % (FORMAT, snapshot._digest(data)) + data)


# --- what is found instead of it


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "damaged"), (CONTENT[:-1], "damaged"), (CONTENT.replace(b"state 1", b"state 2"), "newer")],
)
def test_what_is_of_no_use_is_set_aside(
    path: Path, content: bytes, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    file = StateFile(path)
    assert file.load() is None
    aside = path.with_name(f"agent.state.{kind}")
    assert aside.read_bytes() == content
    assert not path.exists()
    (record,) = caplog.records
    assert record.message.startswith(f"the state in {path} is not used: ")
    assert record.message.endswith(f"; it is kept as {aside}")
    file.write(CONTENT, sync=True)
    assert file.load() == MEMORY


def test_a_copy_is_set_aside_of_what_is_used_in_part(path: Path) -> None:
    file = StateFile(path)
    file.write(CONTENT, sync=False)
    for _ in range(2):
        file.set_aside("foreign", "it is also of others", copy=True)
    file.write(encode(Memory(MEMORY.taken, True, {})), sync=False)
    assert decode(path.with_name("agent.state.foreign").read_bytes()) == MEMORY


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_something_else_in_its_place(path: Path, make: object, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    make(path)  # type: ignore[operator]
    assert StateFile(path).load() is None
    assert "can't be used: " in caplog.text


def test_what_is_no_file_is_not_replaced(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    file = StateFile(path)
    assert file.load() is None
    with pytest.raises(OSError, match="it is no regular file"):
        file.write(b"content", sync=False)
    assert path.is_fifo()
    file.close()


def test_a_link_is_not_followed_in_writing(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.parent.mkdir()
    path.with_name("agent.state.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        StateFile(path).write(CONTENT, sync=False)
    assert victim.read_bytes() == b"precious"


def test_two_agents_do_not_share_one(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = StateFile(path), StateFile(path)
    first.write(CONTENT, sync=False)
    assert second.load() is None
    assert caplog.messages[-1].endswith("can't be used: another agent uses it; each needs its own (--state)")
    with pytest.raises(OSError, match="another agent uses it"):
        second.write(b"x", sync=False)
    assert path.read_bytes() == CONTENT
    # When the other is gone, what it left is not overwritten.
    first.close()
    second.write(b"x", sync=False)
    assert path.read_bytes() == b"x"
    assert path.with_name("agent.state.foreign").read_bytes() == CONTENT


def test_a_write_that_fails_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(path)
    file.write(CONTENT, sync=False)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.write(b"x" * 100, sync=True)
    assert path.read_bytes() == CONTENT
    assert names(path) == {"agent.state", "agent.state.lock"}


def test_the_monotonic_clock_goes_on_until_the_next_boot() -> None:
    before = Moment(100.0, 1e9, "a")
    assert before.same_boot(Moment(100.0, 1e9 - 50, "a"))
    assert not before.same_boot(Moment(200.0, 1e9, "b"))
    # Where the id can't be read, the clock itself tells most times.
    assert not Moment(100.0, 1e9, "").same_boot(Moment(99.0, 1e9, ""))
    assert snapshot.boot_id()


# --- the thread


class World:
    """A keeper, and a value that is its own state."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.file = StateFile(path)
        self.failures = 0
        self.keeper = Keeper[int](self.file, clock, self._fail)
        self.value = 0

    def _fail(self) -> None:
        self.failures += 1

    def turn(self) -> None:
        """What the thread does that has the state."""
        self.value += 1
        if self.keeper.is_due():
            self.keeper.give(self.value, lambda taken: Memory(taken, False, {}))

    def settle(self) -> None:
        """Waits until what was given is written."""
        with self.keeper._board.changed:
            assert self.keeper._board.changed.wait_for(lambda: self.keeper._board.given is None, 10)


@pytest.fixture
def world(path: Path, clock: FakeClock) -> Iterator[World]:
    world = World(path, clock)
    yield world
    world.keeper.end(None, 10)


def test_it_is_written_every_few_seconds(world: World) -> None:
    world.keeper.start()
    written = []
    for _ in range(60):
        world.clock.advance(0.25)
        world.turn()
        world.settle()
        written.append(world.keeper.keeping.writes)
    assert written[0] == 1
    assert written[-1] == 15 / PERIOD_S
    last = world.keeper.keeping.last
    assert last is not None
    assert last.size_bytes == world.file.path.stat().st_size


def test_one_write_answers_all_who_ask(world: World) -> None:
    world.keeper.start()
    world.turn()
    world.settle()
    world.clock.advance(1.0)
    asked = threading.Semaphore(0)
    answers: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: answers.append(world.keeper.ask(asked.release, 10)), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert asked.acquire(timeout=10)
    world.turn()
    for thread in threads:
        thread.join(10)
    assert answers == [2, 2, 2]
    assert world.keeper.keeping.writes == 2
    # It is of now for a moment.
    world.clock.advance(FRESH_S / 2)
    assert world.keeper.ask(lambda: pytest.fail("it is known"), 10) == 2


def test_whoever_asks_gets_the_last_kept_if_nobody_gives(world: World) -> None:
    assert world.keeper.ask(lambda: None, 0.01) is None
    world.keeper.start()
    world.turn()
    world.settle()
    world.clock.advance(1.0)
    assert world.keeper.ask(lambda: None, 0.01) == 1


def test_asking_again_and_again_does_not_write_all_the_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(memory: Memory) -> bytes:
        world.clock.advance(0.02)
        return encode(memory)

    monkeypatch.setattr(snapshot, "encode", slow)
    world.keeper.start()
    for _ in range(200):
        world.clock.advance(0.01)
        world.keeper._board.asked = True
        world.turn()
        world.settle()
    assert world.keeper.keeping.writes <= 12


def test_a_fault_is_told_and_does_not_keep_answers_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world.file.path.mkdir(parents=True)
    world.keeper.start()
    for number in (1, 2):
        world.turn()
        world.settle()
        assert world.keeper.keeping.errors == number
        assert world.keeper.keeping.fault == "Is a directory"
        assert world.keeper.ask(lambda: None, 10) == world.value
        world.clock.advance(PERIOD_S)
    assert world.keeper.keeping.last is None
    world.file.path.rmdir()
    world.turn()
    world.settle()
    assert (world.keeper.keeping.fault, world.keeper.keeping.writes) == ("", 3)
    assert caplog.messages == [
        f"the state can't be written to {world.file.path}: Is a directory",
        f"the state is written to {world.file.path} again",
    ]


def test_a_disk_that_hangs_keeps_nobody_waiting_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: goes_on.wait(10))
    world.keeper.start()
    world.turn()
    world.settle()
    world.clock.advance(PERIOD_S)
    world.keeper._board.asked = True
    world.turn()
    # The answer leaves before the disk has it, for it outlives the process.
    assert world.keeper.ask(lambda: None, 10) == 2
    world.clock.advance(1.0)
    assert not world.keeper.is_due()
    assert world.keeper.ask(lambda: None, 0.01) == 2
    goes_on.set()
    world.settle()


def test_the_end_is_written(world: World, path: Path) -> None:
    world.keeper.start()
    world.turn()
    world.keeper.end(lambda taken: Memory(taken, True, {}), 10)
    assert decode(path.read_bytes()).at_end
    # Another agent may have it now; whoever still asks gets what was kept.
    assert StateFile(path).load() is not None
    assert world.keeper.ask(lambda: None, 10) == 1


def test_an_unexpected_error_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(_: Memory) -> bytes:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(snapshot, "encode", wrong)
    world.keeper.start()
    world.turn()
    world.keeper._thread.join(10)
    assert world.failures == 1
    assert caplog.messages == ["writing the state ended unexpectedly"]
