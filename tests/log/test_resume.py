"""Reading goes on where it ended, whatever became of the file meanwhile; content tells what names and sizes don't."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import zstandard

from cuzk_agent.log import held
from cuzk_agent.log.files import LINGER_S, FileFollower
from cuzk_agent.log.position import FilePosition, from_json, to_json
from cuzk_agent.log.siblings import Handle, is_rotated, open_handle


class World:
    """A log that is written, and followed by one follower after the other."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "cuzk.log"
        self.now_s = 1000.0
        self.number = 0
        self.written: list[bytes] = []
        self.lines: list[bytes] = []
        self.follower: FileFollower | None = None
        self.saved: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.follower is not None:
            self.follower.close()

    def write(self, count: int = 5, path: Path | None = None, flags: int = os.O_APPEND) -> None:
        """Whole lines, of which no two are the same."""
        lines = []
        for _ in range(count):
            self.number += 1
            lines.append(b"TIMELINE,%d,GPU_START,porep-1000-%d,worker=0,partition=0" % (self.number, self.number))
        self.written += lines
        self.put(b"".join(line + b"\n" for line in lines), path, flags)

    def put(self, data: bytes, path: Path | None = None, flags: int = os.O_APPEND) -> None:
        descriptor = os.open(path or self.path, os.O_WRONLY | os.O_CREAT | flags)
        os.write(descriptor, data)
        os.close(descriptor)

    def start(self) -> FileFollower:
        """Begin to follow, or go on as after a restart."""
        position = None if self.saved is None else from_json(json.loads(self.saved))
        assert position is None or isinstance(position, FilePosition)
        self.follower = FileFollower(self.path, "start", lambda: self.now_s, resume=position)
        return self.follower

    def read(self, max_bytes: int = 1 << 20) -> None:
        assert self.follower is not None
        for _ in range(20):
            batch = self.follower.read(max_bytes)
            self.lines += batch.lines
            if batch.at_end or max_bytes < 1000:
                break

    def stop(self) -> None:
        """The agent ends; what it has read is saved."""
        assert self.follower is not None
        self.saved = json.dumps(to_json(self.follower.position()))
        self.follower.close()

    def lost(self) -> int:
        assert self.follower is not None
        return self.follower.stats().lost_bytes

    def check(self) -> None:
        """All has been read, once and in its order."""
        self.read()
        assert self.lines == self.written
        assert self.lost() == 0

    def rotate(self, *, pack: Callable[[bytes], bytes] | None = None, suffix: str = "") -> None:
        """As logrotate does with renaming: .2 to .3, .1 to .2, the log to .1."""
        for number in range(8, 0, -1):
            for old in self.path.parent.glob(f"cuzk.log.{number}*"):
                old.rename(old.with_name(old.name.replace(f".{number}", f".{number + 1}")))
        first = self.path.rename(self.path.with_name("cuzk.log.1"))
        if pack is not None:
            self.pack(first, pack, suffix)

    def pack(self, file: Path, pack: Callable[[bytes], bytes] = gzip.compress, suffix: str = ".gz") -> None:
        """With the time that the file had."""
        times = file.stat()
        packed = file.with_name(file.name + suffix)
        packed.write_bytes(pack(file.read_bytes()))
        os.utime(packed, ns=(times.st_atime_ns, times.st_mtime_ns))
        file.unlink()

    def copytruncate(self) -> None:
        for number in range(8, 0, -1):
            old = self.path.with_name(f"cuzk.log.{number}")
            if old.exists():
                old.rename(self.path.with_name(f"cuzk.log.{number + 1}"))
        shutil.copyfile(self.path, self.path.with_name("cuzk.log.1"))
        os.truncate(self.path, 0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


# -- the same bytes, or others


@pytest.mark.parametrize("more", [-2, 0, 3])
def test_truncated_and_rewritten(world: World, more: int) -> None:
    world.write(10)
    world.start()
    world.read()
    os.truncate(world.path, 0)
    world.write(10 + more)
    world.check()
    assert world.follower is not None
    assert world.follower.stats().truncations == 1


def test_copytruncate_that_has_grown_past_the_old_offset(world: World) -> None:
    world.write(5)
    world.start()
    world.read()
    world.write(5)
    world.copytruncate()
    world.write(20)
    # What the truncation took before it was read is in the copy.
    world.check()


def test_copytruncate_twice_between_two_looks(world: World) -> None:
    world.write(5)
    world.start()
    world.read()
    world.write(5)
    world.copytruncate()
    world.write(5)
    world.copytruncate()
    world.write(5)
    world.check()


def test_a_line_cut_by_copytruncate_is_joined(world: World) -> None:
    world.write(5)
    world.put(b"half of ")
    world.start()
    world.read()
    world.put(b"a line and ")
    world.copytruncate()
    world.put(b"its end\n")
    world.written.append(b"half of a line and its end")
    world.write(5)
    world.check()


def test_without_a_copy_what_was_not_read_is_counted(world: World) -> None:
    world.write(5)
    world.put(b"half")
    world.start()
    world.read()
    del world.written[:]
    del world.lines[:]
    world.put(b"unread\n")
    assert world.follower is not None
    world.follower.read(1)
    os.truncate(world.path, 0)
    world.write(20)
    world.read()
    assert world.lines == world.written
    assert world.lost() == len(b"halfunread\n")


def test_an_older_file_is_no_copy(world: World) -> None:
    world.write(5)
    world.copytruncate()
    world.write(5)
    del world.written[:5]
    world.start()
    world.read()
    os.truncate(world.path, 0)
    world.write(20)
    world.check()


def test_holes_of_a_writer_that_keeps_its_offset(world: World) -> None:
    descriptor = os.open(world.path, os.O_WRONLY | os.O_CREAT)

    def write(count: int) -> None:
        for _ in range(count):
            world.number += 1
            line = b"TIMELINE,%d,GPU_START,porep-1000-1,worker=0" % world.number
            world.written.append(line)
            os.write(descriptor, line + b"\n")

    write(10)
    world.start()
    world.read()
    for _ in range(3):
        # The size never shrinks as far as anybody can see.
        write(2)
        world.copytruncate()
        write(2)
        world.check()
    os.close(descriptor)


def test_the_end_of_a_long_log_is_cut_off(world: World) -> None:
    world.write(20)
    world.start()
    world.read()
    os.truncate(world.path, 600)
    world.read()
    world.put(b"\n")
    world.write(3)
    world.read()
    assert [line for line in world.lines if line] == world.written


# -- restarts


def test_nothing_happened(world: World) -> None:
    world.write()
    world.put(b"half of ")
    world.start()
    world.read()
    world.stop()
    world.put(b"a line\n")
    world.written.append(b"half of a line")
    world.write()
    world.start()
    world.check()
    assert world.follower is not None
    stats = world.follower.stats()
    assert (stats.lines, stats.rotations) == (11, 0)


@pytest.mark.parametrize("rotations", [1, 2, 3, 7])
@pytest.mark.parametrize("read", [0, 100, 1 << 20])
def test_rotated_meanwhile(world: World, rotations: int, read: int) -> None:
    world.write()
    world.put(b"half of ")
    world.start()
    world.read(read)
    world.stop()
    world.put(b"a line\nand hal")
    world.written.append(b"half of a line")
    for _ in range(rotations):
        world.rotate()
        world.put(b"f\n")
        world.written.append(b"and half")
        world.write()
        world.put(b"and hal")
    world.put(b"f\n")
    world.written.append(b"and half")
    world.start()
    world.check()
    assert world.follower is not None
    assert world.follower.stats().rotations == rotations


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".zst", lambda data: zstandard.ZstdCompressor().compress(data)),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_rotated_and_packed_meanwhile(world: World, suffix: str, pack: Callable[[bytes], bytes], at: int) -> None:
    world.write(200)
    world.start()
    world.read(5000)
    world.stop()
    for number in range(3):
        world.rotate(pack=pack if number >= at else None, suffix=suffix)
        world.write(200)
    world.start()
    # Stopped again in the midst of a packed file.
    world.read(900)
    world.stop()
    world.start()
    world.check()


def test_rotated_by_date_meanwhile(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.stop()
    world.write()
    world.path.rename(world.path.with_name("cuzk.log-20261129"))
    world.write()
    world.path.rename(world.path.with_name("cuzk.log-20261130"))
    world.write()
    world.start()
    world.check()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_copied_and_truncated_meanwhile(world: World, times: int) -> None:
    world.write()
    world.start()
    world.read()
    world.stop()
    for _ in range(times):
        world.write()
        world.copytruncate()
    world.write(30)
    world.start()
    world.check()


def test_renamed_to_anything_meanwhile(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.stop()
    world.write()
    world.path.rename(world.path.with_name("kept for the lawyers"))
    world.write()
    world.start()
    world.check()


def test_the_old_file_has_its_writer_still(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.rotate()
    world.path.touch()
    world.read()
    world.stop()
    world.write(path=world.path.with_name("cuzk.log.1"))
    world.start()
    world.read()
    world.write(path=world.path.with_name("cuzk.log.1"))
    world.read()
    world.write()
    world.check()


def test_what_no_longer_exists_is_counted(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.put(b"four")
    assert world.follower is not None
    world.follower.read(1)
    world.stop()
    world.path.unlink()
    world.write()
    world.start()
    world.read()
    assert world.lines == world.written
    assert world.lost() == 4


def test_an_inode_that_is_used_again(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.stop()
    assert world.saved is not None
    # As if the new file had the old one's inode, longer than it was.
    value = json.loads(world.saved)
    world.path.unlink()
    world.write(20)
    value["files"][0] |= {"inode": world.path.stat().st_ino}
    world.saved = json.dumps(value)
    world.start()
    world.check()


@pytest.mark.parametrize("read_before", [False, True])
def test_the_inode_of_an_empty_file_that_is_used_again(world: World, read_before: bool) -> None:
    world.path.touch()
    world.start()
    if read_before:
        world.write()
        world.read()
        world.rotate()
        world.path.touch()
    world.read()
    world.stop()
    assert world.saved is not None
    world.rotate(pack=gzip.compress, suffix=".gz")
    world.write()
    world.rotate()
    # As if this one had the packed one's inode.
    world.path.touch()
    value = json.loads(world.saved)
    value["files"][-1]["inode"] = world.path.stat().st_ino
    world.saved = json.dumps(value)
    world.start()
    world.write(1)
    world.check()


def test_a_copy_that_is_packed_while_it_is_looked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write(20)
    world.start()
    world.read(400)
    world.copytruncate()
    copy = world.path.with_name("cuzk.log.1")
    packed = world.path.with_name("cuzk.log.1.gz")

    def pack_then_open(path: Path) -> Handle:
        if not packed.exists():
            packed.write_bytes(gzip.compress(copy.read_bytes()))
            copy.unlink()
        return open_handle(path)

    monkeypatch.setattr(held, "open_handle", pack_then_open)
    world.write()
    world.check()


def test_a_copy_that_begins_with_a_hole_is_no_new_file_when_it_is_packed(world: World) -> None:
    world.put(bytes(1000))
    world.write(5)
    world.start()
    world.read()
    world.copytruncate()
    world.read()
    world.rotate(pack=gzip.compress, suffix=".gz")
    old = world.path.with_name("cuzk.log.2")
    packed = old.with_name("cuzk.log.2.gz")
    packed.write_bytes(gzip.compress(old.read_bytes()))
    old.unlink()
    world.write()
    world.read()
    lines = [line for line in world.lines if line]
    assert lines == world.written


def test_what_was_truncated_before_it_was_read_brings_no_older_file_back(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.rotate()
    world.write()
    world.read(10)
    # The oldest is done with.
    world.now_s += LINGER_S + 1
    world.read(0)
    world.rotate()
    world.write(3)
    world.read(0)
    world.stop()
    os.truncate(world.path, 0)
    world.start()
    world.write(2)
    world.read()
    assert world.lines == [*world.written[:10], *world.written[-2:]]
    assert world.lost() == sum(len(line) + 1 for line in world.written[10:-2])


def test_copied_truncated_and_renamed_before_it_was_read_again(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.copytruncate()
    world.rotate()
    world.path.touch()
    world.read(0)
    world.stop()
    # Its writer is still there: copied to .2, it is .1 now.
    world.write(path=world.path.with_name("cuzk.log.1"))
    world.start()
    world.write()
    world.check()


def test_several_that_were_not_begun_and_are_packed_are_not_lost(world: World) -> None:
    world.write()
    world.start()
    world.read()
    for data in (b"", bytes(300)):
        world.rotate()
        world.put(data)
    world.rotate()
    world.path.touch()
    world.read(0)
    world.stop()
    for number in (1, 2):
        world.pack(world.path.with_name(f"cuzk.log.{number}"))
    world.start()
    world.write()
    world.check()


def test_an_empty_file_that_its_writer_keeps_is_known_again(world: World) -> None:
    world.path.touch()
    world.start()
    world.read()
    world.stop()
    world.rotate()
    world.path.touch()
    world.start()
    world.stop()
    world.rotate()
    world.path.touch()
    world.rotate()
    world.write(path=world.path.with_name("cuzk.log.3"))
    world.start()
    world.write()
    world.check()


def test_an_empty_file_is_known_again(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.rotate()
    world.path.touch()
    world.read()
    world.stop()
    world.write()
    world.start()
    world.check()
    assert world.follower is not None
    assert world.follower.stats().rotations == 1


def test_what_was_rotated_away_before_is_not_read_again(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.rotate()
    world.write()
    world.read()
    world.stop()
    world.rotate()
    world.path.touch()
    world.start()
    world.check()
    world.stop()
    world.start()
    world.check()


def test_there_was_no_log_then(world: World) -> None:
    world.start()
    world.read()
    world.stop()
    world.write()
    world.start()
    world.check()


def test_a_link_that_leads_elsewhere_meanwhile(world: World, tmp_path: Path) -> None:
    first, second = tmp_path / "..1" / "0.log", tmp_path / "..2" / "0.log"
    first.parent.mkdir()
    second.parent.mkdir()
    data, turned = tmp_path / "..data", tmp_path / "..data_tmp"
    data.symlink_to(first.parent)
    world.path.symlink_to("..data/0.log")
    world.write()
    world.start()
    world.read()
    world.stop()
    world.write()
    first.rename(first.with_name("0.log.20261130-120000"))
    world.write(path=first)
    world.write(path=second)
    turned.symlink_to(second.parent)
    turned.rename(data)
    world.start()
    world.check()


def test_read_back_to_warm_up(world: World) -> None:
    world.write(100)
    world.put(b"half of ")
    follower = FileFollower(world.path, "end", lambda: 0.0, warm_up_bytes=1000)
    world.put(b"a line\n")
    world.write(1)
    batches = [follower.read(300) for _ in range(10)]
    follower.close()
    past = [line for batch in batches if batch.past for line in batch.lines]
    assert past == world.written[100 - len(past) : 100]
    assert len(past) == (1000 - 8) // len(world.written[98] + b"\n")
    now = [line for batch in batches if not batch.past for line in batch.lines]
    assert now == [b"half of a line", world.written[-1]]
    assert not any(batch.at_end for batch in batches if batch.past)


# -- between two looks


def test_rotated_often_between_two_looks(world: World) -> None:
    world.write()
    world.start()
    world.read()
    for _ in range(4):
        world.write()
        world.rotate()
        world.write()
    world.check()


def test_a_copy_of_what_is_held_is_not_read_again(world: World) -> None:
    world.write()
    world.start()
    world.read()
    world.rotate()
    world.write()
    world.path.with_name("cuzk.log.2.gz").write_bytes(gzip.compress(world.path.with_name("cuzk.log.1").read_bytes()))
    world.check()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuzk.log.1", True),
        ("cuzk.log.12.gz", True),
        ("cuzk.log-20261130", True),
        ("cuzk.log-2026-11-30_12:00:00.zst", True),
        ("cuzk.log.1764500000", True),
        ("cuzk-20261130.log", True),
        ("cuzk-20261130.log.gz", True),
        ("cuzk.log.old", True),
        ("cuzk.log", False),
        ("cuzk.log.bak", False),
        ("cuzk.log.1.tmp", False),
        ("cuzk2.log", False),
        ("cuzk.2.log", False),
        ("cuzk-1.log", False),
        ("other.log.1", False),
    ],
)
def test_names_of_rotated_files(name: str, expected: bool) -> None:
    assert is_rotated(name, "cuzk.log") is expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"kind": "files"},
        {"kind": "other"},
        {"kind": "files", "files": [1], "unwrapper": {}, "totals": {}},
        {"kind": "journal", "cursor": 1},
    ],
)
def test_what_is_no_position_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(value)


def test_a_damaged_position_is_refused(world: World) -> None:
    world.write()
    follower = world.start()
    world.read()
    good = to_json(follower.position())
    assert to_json(from_json(json.loads(json.dumps(good)))) == good

    def damaged(value: object) -> Iterator[object]:
        """The value with one part replaced by something else."""
        if isinstance(value, dict):
            for key, part in value.items():
                yield {name: one for name, one in value.items() if name != key}
                yield from ({**value, key: other} for other in damaged(part))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                yield from ([*value[:index], other, *value[index + 1 :]] for other in damaged(part))
        yield from (other for other in (None, 1.5, [1], {"a": 1}, "\0") if type(other) is not type(value))

    for value in damaged(good):
        with pytest.raises(ValueError, match=r"."):
            from_json(value)
