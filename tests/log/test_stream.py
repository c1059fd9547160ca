"""A stream that comes once: read, passed on, and ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cuzk_agent.log import stream as stream_module
from cuzk_agent.log.source import FollowState
from cuzk_agent.log.stream import StreamFollower


class Piped:
    """A pipe with a follower at its end, which passes on into another."""

    def __init__(self) -> None:
        self.end, self.writer = os.pipe()
        self.passed, self.tee = os.pipe()
        self.woken = threading.Event()
        self.now_s = 1000.0
        self.lines: list[bytes] = []
        self.breaks: list[int] = []
        self.at_end = False
        self.follower = StreamFollower(self.end, lambda: self.now_s, tee=self.tee, on_data=self.woken.set)

    def read(self, max_bytes: int = 1 << 20) -> None:
        batch = self.follower.read(max_bytes)
        self.breaks += [len(self.lines) + index for index in batch.breaks]
        self.lines += batch.lines
        self.at_end = batch.at_end

    def read_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 20
        while not condition():
            self.read()
            assert time.monotonic() < deadline_s, (self.follower.stats(), len(self.lines))
            time.sleep(0.001)

    def end_writing(self) -> None:
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        self.follower.close()
        self.follower._thread.join(20)
        assert not self.follower._thread.is_alive()
        for descriptor in (self.end, self.writer, self.passed, self.tee):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture
def piped() -> Iterator[Piped]:
    made = Piped()
    yield made
    made.close()


def test_lines_are_read_and_passed_on(piped: Piped) -> None:
    piped.read_until(lambda: piped.at_end)
    os.write(piped.writer, b"one\ntw")
    assert piped.woken.wait(20)
    piped.read_until(lambda: piped.lines)
    os.write(piped.writer, b"o\n\xff\n")
    piped.read_until(lambda: len(piped.lines) == 3)
    assert piped.lines == [b"one", b"two", b"\xff"]
    passed = b""
    while len(passed) < 10:
        passed += os.read(piped.passed, 100)
    assert passed == b"one\ntwo\n\xff\n"
    piped.read_until(lambda: piped.at_end)
    stats = piped.follower.stats()
    assert (stats.state, stats.caught_up, stats.lines, stats.read_bytes) == (FollowState.FOLLOWING, True, 3, 10)
    assert (stats.lag_bytes, stats.detail) == (0, "")
    assert piped.follower.position() is None  # type: ignore[func-returns-value]


def test_its_end_is_the_daemons(piped: Piped) -> None:
    os.write(piped.writer, b"one\nhalf")
    piped.end_writing()
    piped.read_until(lambda: piped.follower.stats().state is FollowState.MISSING)
    piped.read()
    assert (piped.lines, piped.breaks) == ([b"one"], [1])
    stats = piped.follower.stats()
    assert (stats.detail, stats.lost_bytes) == ("standard input: it has ended", 4)


def test_what_waits_is_not_the_end(piped: Piped) -> None:
    os.write(piped.writer, b"1234\n" * 100)
    piped.read_until(lambda: piped.follower.stats().lag_bytes == 500 and not piped.follower.stats().read_bytes)
    piped.read(max_bytes=1)
    piped.read_until(lambda: piped.at_end)
    assert len(piped.lines) == 100


def drain(descriptor: int) -> None:
    while os.read(descriptor, 1 << 20):
        pass


def test_a_reader_that_lags_holds_the_writer_up(piped: Piped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_WAITING_BYTES", 1 << 20)
    total = 8 << 20
    swallow = threading.Thread(target=drain, args=(piped.passed,))

    def write() -> None:
        line = b"x" * 1023 + b"\n"
        for _ in range(total // len(line)):
            os.write(piped.writer, line)

    swallow.start()
    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    assert piped.follower._waiting_bytes < 2 << 20
    piped.read_until(lambda: len(piped.lines) == total // 1024)
    writer.join()
    piped.follower.close()
    piped.follower._thread.join(20)
    os.close(piped.tee)
    piped.tee = -1
    swallow.join(20)


def test_nobody_takes_what_is_passed_on(piped: Piped, caplog: pytest.LogCaptureFixture) -> None:
    os.close(piped.passed)
    piped.passed = -1
    os.write(piped.writer, b"one\n")
    piped.read_until(lambda: "cannot pass standard input on any more: Broken pipe" in caplog.text)
    os.write(piped.writer, b"two\n")
    piped.read_until(lambda: len(piped.lines) == 2)
    assert len(caplog.records) == 1


def test_containers_may_be_piped_too(piped: Piped) -> None:
    os.write(piped.writer, b"2026-11-30T14:05:09Z stderr F one\n")
    piped.read_until(lambda: piped.lines)
    assert piped.lines == [b"one"]


def test_a_descriptor_that_can_not_be_read(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    follower = StreamFollower(descriptor, lambda: 0.0)
    follower._thread.join(20)
    assert follower.read().breaks == (0,)
    stats = follower.stats()
    assert (stats.state, stats.detail) == (FollowState.MISSING, "standard input: Is a directory")
    follower.close()
    os.close(descriptor)
