from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cuzk_agent.log.files import DELETED_HOLD_S, LINGER_S, MAX_OPEN_FILES, FileFollower
from cuzk_agent.log.source import FollowState


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Followed:
    """A path in a directory of its own, its follower, and the clock."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "cuzk.log"
        self.clock = Clock()
        self.follower: FileFollower | None = None

    def follow(self, start: Literal["end", "start"] = "start") -> FileFollower:
        self.follower = FileFollower(self.path, start, self.clock)
        return self.follower

    def append(self, data: bytes, path: Path | None = None) -> None:
        with (path or self.path).open("ab") as file:
            file.write(data)

    def rename(self, name: str) -> Path:
        return self.path.rename(self.path.with_name(name))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Followed]:
    followed = Followed(tmp_path)
    yield followed
    if followed.follower is not None:
        followed.follower.close()


def open_descriptors(directory: Path) -> int:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(str(directory) in str(link.readlink()) for link in links if link.is_symlink())


# -- beginning


def test_from_the_start(log: Followed) -> None:
    log.append(b"one\ntwo\r\nthr")
    follower = log.follow("start")
    batch = follower.read()
    assert batch.lines == (b"one", b"two")
    assert batch.at_end
    log.append(b"ee\n")
    assert follower.read().lines == (b"three",)
    stats = follower.stats()
    assert (stats.state, stats.detail, stats.caught_up) == (FollowState.FOLLOWING, "", True)
    assert (stats.lines, stats.read_bytes, stats.lag_bytes) == (3, 15, 0)


def test_from_the_end(log: Followed) -> None:
    log.append(b"old\n")
    follower = log.follow("end")
    log.append(b"new\n")
    assert follower.read().lines == (b"new",)


def test_a_line_begun_before_the_end_is_not_reported(log: Followed) -> None:
    log.append(b"old\nhalf of a li")
    follower = log.follow("end")
    assert follower.read().lines == ()
    log.append(b"ne\nwhole\n")
    assert follower.read().lines == (b"whole",)


def test_a_line_begun_before_the_end_may_end_in_the_next_file(log: Followed) -> None:
    log.append(b"half of a li")
    follower = log.follow("end")
    log.rename("cuzk.log.1")
    log.append(b"ne\nwhole\n")
    assert follower.read().lines == (b"whole",)


@pytest.mark.parametrize("start", ["end", "start"])
def test_a_file_that_comes_later_is_read_from_its_start(log: Followed, start: Literal["end", "start"]) -> None:
    follower = log.follow(start)
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((), False)
    stats = follower.stats()
    assert (stats.state, stats.lag_bytes, stats.caught_up) == (FollowState.MISSING, None, False)
    assert stats.detail == f"{log.path}: No such file or directory"
    log.append(b"first\n")
    assert follower.read().lines == (b"first",)
    assert follower.stats().rotations == 0


def test_the_directory_may_come_later_too(tmp_path: Path) -> None:
    log = Followed(tmp_path / "later")
    follower = log.follow("end")
    assert follower.stats().state is FollowState.MISSING
    log.path.parent.mkdir()
    log.append(b"first\n")
    assert follower.read().lines == (b"first",)
    follower.close()


# -- bounds and the clock


def test_a_read_is_bounded(log: Followed) -> None:
    log.append(b"1234\n" * 1000)
    follower = log.follow()
    batch = follower.read(max_bytes=1002)
    assert (len(batch.lines), batch.at_end) == (200, False)
    assert follower.stats().lag_bytes == 5000 - 1002
    assert not follower.stats().caught_up
    assert follower.read().at_end
    assert follower.stats().lines == 1000


def test_the_clock_is_read_before_the_file(log: Followed) -> None:
    log.append(b"one\n")
    times = itertools.count(1.0)

    def write_when_asked() -> float:
        now_s = next(times)
        log.append(b"at %d\n" % now_s)
        return now_s

    follower = FileFollower(log.path, "start", write_when_asked)
    batch = follower.read()
    assert batch.read_monotonic_s == 2.0
    assert batch.lines == (b"one", b"at 1", b"at 2")
    follower.close()


# -- rotation


def test_rename_and_create(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    log.append(b"two\n")
    log.rename("cuzk.log.1")
    log.append(b"three\n")
    assert follower.read().lines == (b"two", b"three")
    stats = follower.stats()
    assert (stats.rotations, stats.truncations, stats.lost_bytes) == (1, 0, 0)


def test_the_writer_moves_later(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    old = log.rename("cuzk.log.1")
    log.append(b"two\n", old)
    assert follower.read().lines == (b"two",)
    assert follower.stats().state is FollowState.FOLLOWING
    assert "still reading" in follower.stats().detail
    log.path.touch()
    log.append(b"thr", old)
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((), True)
    log.append(b"ee\nfo", old)
    log.append(b"ur\nfive\n")
    assert follower.read().lines == (b"three", b"four", b"five")


def test_a_writer_that_never_moves_is_followed_through_any_number_of_rotations(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    old = log.rename("moved")
    for number in range(3 * MAX_OPEN_FILES):
        log.path.touch()
        log.append(b"%d\n" % number, old)
        log.clock.now_s += 86400
        assert follower.read().lines == (b"%d" % number,)
        log.rename(f"empty.{number}")
    assert open_descriptors(log.path.parent) <= MAX_OPEN_FILES
    log.append(b"moved at last\n")
    assert follower.read().lines == (b"moved at last",)


def test_late_lines_in_a_file_left_behind(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    old = log.rename("cuzk.log.1")
    log.append(b"two\n")
    assert follower.read().lines == (b"one", b"two")
    log.append(b"late\nha", old)
    log.append(b"three\n")
    assert follower.read().lines == (b"late", b"three")
    log.clock.now_s += LINGER_S + 1
    follower.read()
    assert open_descriptors(log.path.parent) == 1
    assert follower.stats().lost_bytes == 2


def test_rotated_again_while_the_reader_lags(log: Followed) -> None:
    follower = log.follow()
    for name in (b"a", b"b", b"c", b"d"):
        log.append(name * 4 + b"\n" + name * 2)
        follower.read(max_bytes=1)
        log.rename(name.decode())
    log.append(b"\nend\n")
    lines: list[bytes] = []
    at_end = False
    while not at_end:
        batch = follower.read(max_bytes=3)
        lines += batch.lines
        at_end = batch.at_end
    assert lines == [b"aaaa", b"aabbbb", b"bbcccc", b"ccdddd", b"dd", b"end"]
    assert follower.stats().rotations == 4


def test_more_files_than_may_be_held_wait_at_the_path(log: Followed) -> None:
    follower = log.follow()
    for number in range(MAX_OPEN_FILES):
        log.append(b"%d\n" % number)
        follower.read(max_bytes=0)
        log.rename(str(number))
    log.append(b"last\n")
    batch = follower.read()
    assert batch.lines == tuple(b"%d" % number for number in range(MAX_OPEN_FILES))
    assert not batch.at_end
    assert follower.read().lines == (b"last",)
    assert open_descriptors(log.path.parent) <= MAX_OPEN_FILES


def test_delete_and_create(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    log.append(b"two\n")
    log.path.unlink()
    log.append(b"three\n")
    assert follower.read().lines == (b"two", b"three")
    assert follower.stats().rotations == 1


def test_a_deleted_file_is_let_go_when_it_has_long_been_quiet(log: Followed) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    log.clock.now_s += 10 * DELETED_HOLD_S
    with log.path.open("ab") as writer:
        log.path.unlink()
        assert follower.read().at_end
        log.clock.now_s += DELETED_HOLD_S - 1
        writer.write(b"two\nth")
        writer.flush()
        assert follower.read().lines == (b"two",)
    log.clock.now_s += DELETED_HOLD_S + 1
    follower.read()
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((), False)
    stats = follower.stats()
    assert (stats.state, stats.lost_bytes, stats.caught_up) == (FollowState.MISSING, 2, False)
    assert open_descriptors(log.path.parent) == 0
    log.append(b"new\n")
    assert follower.read().lines == (b"new",)


def test_renamed_back(log: Followed) -> None:
    log.append(b"one\nhal")
    follower = log.follow()
    follower.read()
    old = log.rename("cuzk.log.1")
    log.path.touch()
    follower.read()
    old.rename(log.path)
    follower.read()
    log.append(b"f\ntwo\n")
    assert follower.read().lines == (b"half", b"two")
    log.clock.now_s += LINGER_S + 1
    follower.read()
    log.append(b"three\n")
    assert follower.read().lines == (b"three",)


def test_a_symbolic_link_is_followed_to_its_target(log: Followed) -> None:
    first, second = log.path.with_name("first"), log.path.with_name("second")
    log.path.symlink_to(first)
    follower = log.follow()
    assert follower.stats().state is FollowState.MISSING
    log.append(b"one\n", first)
    assert follower.read().lines == (b"one",)
    log.append(b"two\n", second)
    link = log.path.with_name("link")
    link.symlink_to(second)
    link.rename(log.path)
    assert follower.read().lines == (b"two",)
    assert follower.stats().rotations == 1
    link.symlink_to(second)
    link.rename(log.path)
    assert follower.read().lines == ()
    assert follower.stats().rotations == 1


# -- truncation


def test_truncation(log: Followed) -> None:
    log.append(b"one\ntwo\nunread\n")
    follower = log.follow()
    follower.read(max_bytes=6)
    os.truncate(log.path, 0)
    log.append(b"3\n")
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((b"3",), True)
    stats = follower.stats()
    assert (stats.truncations, stats.rotations) == (1, 0)
    assert stats.lost_bytes == len(b"tw") + len(b"o\nunread\n")


def test_truncation_under_a_writer_that_keeps_its_offset(log: Followed) -> None:
    with log.path.open("wb", buffering=0) as writer:
        writer.write(b"one\ntwo\n")
        follower = log.follow()
        follower.read()
        os.truncate(log.path, 0)
        follower.read()
        writer.write(b"three\n")
        assert follower.read().lines == (b"three",)
    stats = follower.stats()
    assert (stats.nul_bytes, stats.truncations, stats.lost_bytes) == (8, 1, 0)


def test_a_long_hole(log: Followed) -> None:
    hole = 256 << 20
    log.append(b"one\ntw")
    os.truncate(log.path, 6 + hole)
    log.append(b"o\n")
    follower = log.follow()
    lines: list[bytes] = []
    while not follower.stats().caught_up:
        lines += follower.read().lines
    assert lines == [b"one", b"two"]
    stats = follower.stats()
    assert (stats.nul_bytes, stats.lost_bytes, stats.lag_bytes) == (hole, 0, 0)


def test_a_line_begun_at_the_end_does_not_outlive_a_truncation(log: Followed) -> None:
    log.append(b"half of a li")
    follower = log.follow("end")
    follower.read()
    os.truncate(log.path, 0)
    log.append(b"new\n")
    assert follower.read().lines == (b"new",)


# -- what can't be read


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_not_a_regular_file(log: Followed, kind: str) -> None:
    if kind == "directory":
        log.path.mkdir()
    elif kind == "fifo":
        os.mkfifo(log.path)
    else:
        log.path.symlink_to("/dev/zero")
    follower = log.follow()
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((), False)
    expected = {
        "directory": "Is a directory",
        "fifo": "Is a FIFO, not a regular file",
        "device": "Is a device, not a regular file",
    }
    stats = follower.stats()
    assert (stats.state, stats.detail) == (FollowState.UNREADABLE, f"{log.path}: {expected[kind]}")
    if kind == "directory":
        log.path.rmdir()
    else:
        log.path.unlink()
    log.append(b"one\n")
    assert follower.read().lines == (b"one",)
    assert follower.stats().detail == ""


def test_a_fifo_that_comes_between_look_and_open_does_not_block(log: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(b"one\n")
    regular = os.stat(log.path)
    log.path.unlink()
    os.mkfifo(log.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _path: regular)
        follower = log.follow()
    assert follower.stats().detail == f"{log.path}: Is a FIFO, not a regular file"
    assert open_descriptors(log.path.parent) == 0


def refuse(*_args: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_no_permission_is_retried(log: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        follower = log.follow("end")
        assert not follower.read().at_end
        stats = follower.stats()
        assert (stats.state, stats.detail) == (FollowState.UNREADABLE, f"{log.path}: Permission denied")
    # What was there at the start is still not new.
    assert follower.read().lines == ()
    log.append(b"two\n")
    assert follower.read().lines == (b"two",)
    assert follower.stats().state is FollowState.FOLLOWING


def test_a_new_file_that_may_not_be_read_leaves_the_old_one_followed(
    log: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(b"one\n")
    follower = log.follow()
    old = log.rename("cuzk.log.1")
    log.append(b"two\n", old)
    log.append(b"three\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        batch = follower.read()
    assert (batch.lines, batch.at_end) == ((b"one", b"two"), False)
    assert follower.stats().state is FollowState.UNREADABLE
    assert follower.read().lines == (b"three",)


class BrokenDescriptors:
    """Reads of descriptors opened so far fail; ones opened later are well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: set[int] = set()
        self._pread = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, descriptor: int, size: int, offset: int) -> bytes:
        if descriptor in self.broken:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._pread(descriptor, size, offset)


def descriptors_of(path: Path) -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{name}") == os.path.realpath(path)
    }


def test_a_stale_descriptor_is_replaced(log: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(b"one\nha")
    follower = log.follow()
    follower.read()
    log.append(b"lf\n")
    reads = BrokenDescriptors(monkeypatch)
    reads.broken = descriptors_of(log.path)
    batch = follower.read()
    assert (batch.lines, batch.at_end) == ((), False)
    stats = follower.stats()
    assert (stats.state, stats.lag_bytes) == (FollowState.UNREADABLE, None)
    assert stats.detail == f"{log.path}: {os.strerror(errno.ESTALE)}"
    assert follower.read().lines == (b"half",)
    assert follower.stats().state is FollowState.FOLLOWING
    assert follower.stats().rotations == 0


def test_an_old_file_that_can_not_be_read_does_not_hold_up_the_new_one(
    log: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(b"one\n")
    follower = log.follow()
    follower.read()
    log.append(b"unread\n")
    reads = BrokenDescriptors(monkeypatch)
    reads.broken = descriptors_of(log.path)
    log.rename("cuzk.log.1")
    log.append(b"two\n")
    assert follower.read().lines == (b"two",)
    follower.read()
    stats = follower.stats()
    assert (stats.state, stats.lost_bytes) == (FollowState.FOLLOWING, len(b"unread\n"))
    assert open_descriptors(log.path.parent) == 1


def test_close(log: Followed) -> None:
    log.append(b"one\0\n" + b"x" * 70000 + b"\n")
    follower = log.follow()
    follower.read()
    follower.close()
    follower.close()
    assert open_descriptors(log.path.parent) == 0
    stats = follower.stats()
    assert (stats.lines, stats.nul_bytes, stats.overlong_lines) == (2, 1, 1)


# -- any program of one writer, a rotator and a reader


class Programs(RuleBasedStateMachine):
    """Without truncation, and with one look at each file before it leaves the path, nothing is lost or changed."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "cuzk.log"
        self.clock = Clock()
        self.follower = FileFollower(self.path, "end", self.clock)
        self.writer: int | None = None
        self.writer_name: Path | None = None
        """Where the writer's file is now; None once it is deleted."""
        self.rotations_since_open = 0
        self.seen = True
        """The reader has looked since the file at the path came there."""
        self.names = itertools.count()
        self.written = bytearray()
        self.lines: list[bytes] = []

    def teardown(self) -> None:
        for _ in range(MAX_OPEN_FILES + 2):
            self.read(1 << 20)
        assert self.lines == self.whole_lines()
        self.follower.close()
        if self.writer is not None:
            os.close(self.writer)
        self.directory.cleanup()

    def whole_lines(self) -> list[bytes]:
        return bytes(self.written).split(b"\n")[:-1]

    @rule(data=st.lists(st.sampled_from([b"a", b"bb", b"\n", b"c\n", b"\xff"]), min_size=1, max_size=8))
    def write(self, data: list[bytes]) -> None:
        if self.writer is None:
            self.reopen()
        assert self.writer is not None
        for number, piece in enumerate(data):
            # Every piece its own, so that no two lines are the same by chance.
            piece = piece.replace(b"a", b"%d," % (len(self.written) + number))
            os.write(self.writer, piece)
            self.written += piece

    @rule()
    def reopen(self) -> None:
        if self.writer is not None:
            os.close(self.writer)
        self.seen = self.seen and self.path.exists()
        self.writer = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.writer_name = self.path
        self.rotations_since_open = 0

    # A file that an idle writer holds through more rotations than files may be open is let go.
    @precondition(lambda self: self.seen and self.path.exists() and self.rotations_since_open < MAX_OPEN_FILES - 2)
    @rule(create=st.booleans(), delete=st.booleans())
    def rotate(self, create: bool, delete: bool) -> None:
        moved = None if delete else self.path.rename(self.path.with_name(f"old.{next(self.names)}"))
        if moved is None:
            self.path.unlink()
        if self.writer_name == self.path:
            self.writer_name = moved
        self.rotations_since_open += 1
        if create:
            self.path.touch()
            self.seen = False

    @precondition(lambda self: self.writer_name is not None and self.writer_name != self.path)
    @rule()
    def rename_back(self) -> None:
        assert self.writer_name is not None
        self.writer_name = self.writer_name.rename(self.path)
        self.seen = True

    # All steps of a program together stay below the hold of deleted files.
    @rule(seconds=st.floats(0, LINGER_S + 1))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(max_bytes=st.sampled_from([0, 1, 5, 1 << 20]))
    def read(self, max_bytes: int) -> None:
        batch = self.follower.read(max_bytes)
        self.lines += batch.lines
        self.seen = True
        if batch.at_end:
            assert self.lines == self.whole_lines()

    @invariant()
    def nothing_is_made_up(self) -> None:
        assert self.lines == self.whole_lines()[: len(self.lines)]
        stats = self.follower.stats()
        assert (stats.lines, stats.truncations, stats.lost_bytes) == (len(self.lines), 0, 0)


Programs.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPrograms = Programs.TestCase
