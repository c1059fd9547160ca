"""Random programs of a writer, a rotator, a reader and its restarts, against what was written."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cuzk_agent.log.files import LINGER_S, MAX_OPEN_FILES, FileFollower
from cuzk_agent.log.position import FilePosition, from_json, to_json

SETTINGS = settings(stateful_step_count=50, report_multiple_bugs=False)
PIECES = st.lists(st.sampled_from([b"a", b"bb", b"\n", b"c\n", b"\xff", b"long"]), min_size=1, max_size=8)


class World(RuleBasedStateMachine):
    """A log behind a link that may lead elsewhere later, its one writer, and whoever follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / "cuzk.log"
        self.now_s = 1000.0
        self.time_ns = 10**18
        self.numbers = itertools.count()
        self.writer: int | None = None
        self.append = True
        self.rotations_since_open = 0
        self.written = bytearray()
        self.lines: list[bytes] = []
        self.follower: FileFollower | None = None
        self.position: FilePosition | None = None
        self.copied: set[int] = set()
        """The inodes of files that were copied and truncated while nobody looked."""
        self.known = False
        """A file of this log has been read where it is now: what others were rotated into is not the reader's."""
        self.seen: dict[int, int] = {}
        """The size of each file, by inode, as of the last time that everything was read."""

    may_leave_holes = True

    @initialize(linked=st.booleans(), append=st.booleans())
    def begin(self, linked: bool, append: bool) -> None:
        self.append = append or not self.may_leave_holes
        if linked:
            self.switch()
        self.start()

    def teardown(self) -> None:
        try:
            if self.follower is None:
                self.start()
            for _ in range(MAX_OPEN_FILES + 2):
                self.read(1 << 20)
            self.check()
        finally:
            if self.follower is not None:
                self.follower.close()
            if self.writer is not None:
                os.close(self.writer)
            shutil.rmtree(self.directory)

    def check(self) -> None:
        """What must hold when everything has been read."""
        assert self.lines == self.whole_lines()

    def whole_lines(self) -> list[bytes]:
        return bytes(self.written).split(b"\n")[:-1]

    @property
    def log(self) -> Path:
        """Where the log is, without the link."""
        return Path(os.path.realpath(self.path))

    def touch(self, file: int | Path) -> None:
        """The file system's clock is coarse, this one isn't."""
        self.time_ns += 10**9
        os.utime(file, ns=(self.time_ns, self.time_ns))

    def is_new(self, file: Path) -> None:
        self.touch(file)
        self.seen.pop(file.stat().st_ino, None)

    # -- the writer

    @rule(data=PIECES)
    def write(self, data: list[bytes]) -> None:
        if self.writer is None:
            self.reopen()
        assert self.writer is not None
        if os.fstat(self.writer).st_size == 0:
            # No file begins as another did.
            data = [hashlib.sha256(b"%d" % next(self.numbers)).hexdigest()[:8].encode(), *data]
        for piece in data:
            # Every piece its own, so that no two lines are the same by chance.
            piece = piece.replace(b"a", b"%d," % next(self.numbers)).replace(b"long", b"d" * 300)
            os.write(self.writer, piece)
            self.written += piece
        self.touch(self.writer)

    @rule()
    def reopen(self) -> None:
        if self.writer is not None:
            os.close(self.writer)
        is_new = not self.path.exists()
        flags = os.O_APPEND if self.append else 0
        self.writer = os.open(self.path, os.O_WRONLY | os.O_CREAT | flags)
        if not self.append:
            os.lseek(self.writer, 0, os.SEEK_END)
        if is_new:
            self.is_new(self.path)
        self.rotations_since_open = 0

    # -- the rotator

    # A file that an idle writer holds through more rotations than files may be open is let go.
    @precondition(lambda self: self.path.exists() and self.known and self.rotations_since_open < MAX_OPEN_FILES - 3)
    @rule(create=st.booleans())
    def rotate(self, create: bool) -> None:
        self.make_way()
        self.log.rename(self.log.with_name("cuzk.log.1"))
        self.rotations_since_open += 1
        if create:
            self.path.touch()
            self.is_new(self.path)

    def make_way(self) -> None:
        found = [(int(old.name.split(".")[2]), old) for old in self.log.parent.glob("cuzk.log.*")]
        for number, old in sorted(found, reverse=True):
            old.rename(old.with_name(old.name.replace(f".{number}", f".{number + 1}")))

    @precondition(lambda self: self.path.exists() and self.may_copy())
    @rule()
    def copytruncate(self) -> None:
        self.make_way()
        copy = self.log.with_name("cuzk.log.1")
        shutil.copyfile(self.log, copy)
        self.touch(copy)
        os.truncate(self.log, 0)
        self.touch(self.log)
        inode = self.log.stat().st_ino
        self.seen[inode] = 0
        if self.follower is None:
            self.copied.add(inode)

    def may_copy(self) -> bool:
        """A file of which nothing is read, or one that the writer has not come to, can't be known in its copy."""
        about = self.path.stat()
        return self.seen.get(about.st_ino, 0) > 0 or about.st_ino in self.copied

    @precondition(lambda self: self.rotations_since_open == 0)
    @rule()
    def pack(self) -> None:
        """Compress the second oldest, as logrotate does with `delaycompress`."""
        old = self.log.with_name("cuzk.log.2")
        if old.exists():
            about = old.stat()
            packed = old.with_name("cuzk.log.2.gz")
            packed.write_bytes(gzip.compress(old.read_bytes(), 1))
            os.utime(packed, ns=(about.st_atime_ns, about.st_mtime_ns))
            old.unlink()

    # A file that nobody has looked at before the link leads elsewhere can't be known.
    @precondition(
        lambda self: self.path.is_symlink() and (not self.path.exists() or self.path.stat().st_ino in self.seen)
    )
    @rule()
    def switch(self) -> None:
        """A new directory, as Kubernetes does it."""
        target = self.directory / f"..{next(self.numbers)}"
        target.mkdir()
        link = self.directory / "link"
        link.symlink_to(target / "cuzk.log")
        link.rename(self.path)
        self.known = False
        self.rotations_since_open += 1

    # -- the reader

    @rule(seconds=st.floats(0, LINGER_S + 1))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.follower is not None)
    @rule(max_bytes=st.sampled_from([0, 5, 7, 400, 1 << 20]))
    def read(self, max_bytes: int) -> None:
        assert self.follower is not None
        batch = self.follower.read(max_bytes)
        self.lines += batch.lines
        if batch.at_end:
            self.check()
            self.note_seen()

    def note_seen(self) -> None:
        self.known = self.known or self.path.exists()
        self.seen = {}
        for file in (*self.log.parent.glob("*"), *self.directory.glob("*/*")):
            if file.is_file():
                self.seen[file.stat().st_ino] = file.stat().st_size

    @precondition(lambda self: self.follower is not None)
    @rule()
    def stop(self) -> None:
        """The agent dies: what it did since the last position was saved, it does again."""
        assert self.follower is not None
        self.save()
        self.follower.close()
        self.follower = None

    def save(self) -> None:
        assert self.follower is not None
        position = from_json(json.loads(json.dumps(to_json(self.follower.position()))))
        assert isinstance(position, FilePosition)
        self.position = position

    @precondition(lambda self: self.follower is None)
    @rule()
    def start(self) -> None:
        self.follower = FileFollower(self.path, "start", lambda: self.now_s, resume=self.position)
        self.copied.clear()


class Lossless(World):
    """Without bare truncation nothing is lost, doubled or changed."""

    @invariant()
    def nothing_is_made_up(self) -> None:
        assert self.lines == self.whole_lines()[: len(self.lines)]
        if self.follower is not None:
            stats = self.follower.stats()
            assert (stats.lines, stats.lost_bytes) == (len(self.lines), 0)


class Truncating(World):
    """With it, every byte is handed on, waits for its line end, or is counted as lost, unless it was gone before it was
    ever looked at; and none is twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen = 0
        """Bytes that were gone before anybody looked."""

    may_leave_holes = False
    """It can't be told how much of a hole a truncation took."""

    @precondition(lambda self: self.path.exists())
    @rule()
    def truncate(self) -> None:
        about = self.path.stat()
        self.unseen += max(0, about.st_size - self.seen.get(about.st_ino, 0))
        if about.st_ino in self.seen:
            self.seen[about.st_ino] = 0
        os.truncate(self.path, 0)
        self.touch(self.path)

    def check(self) -> None:
        whole = self.whole_lines()
        # A line with a number in it is like no other, nor like the end of another.
        positions = [whole.index(line) for line in self.lines if b"," in line and line in whole]
        assert positions == sorted(set(positions))
        assert self.follower is not None
        pending = sum(len(mark.splitter.pending) for mark in self.follower.position().files)
        told = sum(len(line) + 1 for line in self.lines) + pending + self.follower.stats().lost_bytes
        assert len(self.written) - self.unseen <= told <= len(self.written)


Lossless.TestCase.settings = SETTINGS
TestLossless = Lossless.TestCase
Truncating.TestCase.settings = SETTINGS
TestTruncating = Truncating.TestCase
