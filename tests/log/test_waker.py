from __future__ import annotations

import ctypes
import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from cuzk_agent.log import waker as waker_module
from cuzk_agent.log.waker import BUSY_S, MISSES, RECHECK_S, Method, Waker, WakerState

GENEROUS_S = 20.0
"""For what takes milliseconds; below the quiet poll set here, so that only an event can have ended a wait."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Sleeper:
    """A waker that is only woken by events, with a clock that stands still."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.waker = Waker((), self.clock)

    def on(self, *paths: Path) -> Waker:
        self.waker = Waker(paths, self.clock)
        return self.waker

    def settle(self) -> None:
        """Wait once, which sets the watches up."""
        self.waker.wait(0)

    def is_woken_by(self, act: Callable[[], object]) -> bool:
        waiting = threading.Thread(target=self.waker.wait, args=(60,), daemon=True)
        waiting.start()
        act()
        waiting.join(GENEROUS_S)
        return not waiting.is_alive()


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleeper]:
    monkeypatch.setattr(waker_module, "QUIET_POLL_S", 60.0)
    threads = threading.active_count()
    made = Sleeper()
    yield made
    made.waker.close()
    assert threading.active_count() == threads


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def test_wake_ends_a_wait(sleeper: Sleeper) -> None:
    sleeper.waker.wake()
    sleeper.waker.wait(60)
    assert sleeper.is_woken_by(sleeper.waker.wake)


def test_a_wait_ends_when_its_time_is_up(sleeper: Sleeper) -> None:
    sleeper.waker.wait(0.001)
    sleeper.waker.wait(0)
    sleeper.waker.wait(-1)


def test_a_write_to_a_quiet_log_wakes(sleeper: Sleeper, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    sleeper.on(path)
    sleeper.settle()
    assert sleeper.is_woken_by(lambda: append(path))


def test_a_busy_log_is_polled_and_watched_again_when_it_may_be_quiet(
    sleeper: Sleeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.touch()
    waker = sleeper.on(path)
    sleeper.settle()
    assert sleeper.is_woken_by(lambda: append(path))

    def waits() -> list[float]:
        """How long the next wait would sleep; empty if it comes back at once."""
        asked: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(waker._awake, "wait", asked.append)
            waker.wait(60)
        return asked

    assert waits() == [waker_module.BUSY_POLL_S]
    sleeper.clock.now_s += BUSY_S - 0.1
    assert waits() == [waker_module.BUSY_POLL_S]
    sleeper.clock.now_s += 0.2
    assert waits() == []
    assert waits() == [60.0]
    assert sleeper.is_woken_by(lambda: append(path))


def test_comings_and_goings_wake(sleeper: Sleeper, tmp_path: Path) -> None:
    path = tmp_path / "log"
    sleeper.on(path)
    sleeper.settle()
    assert sleeper.is_woken_by(path.touch)
    assert sleeper.is_woken_by(lambda: path.rename(tmp_path / "log.1"))
    assert sleeper.is_woken_by(path.touch)
    assert sleeper.is_woken_by(path.unlink)


def test_a_write_to_the_target_of_a_link_wakes(sleeper: Sleeper, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    target = tmp_path / "logs" / "target"
    target.touch()
    (tmp_path / "links").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "links")
    path = tmp_path / "alias" / "log"
    path.symlink_to(target)
    sleeper.on(path)
    sleeper.settle()
    assert sleeper.is_woken_by(lambda: append(target))


def test_a_directory_that_comes_later(sleeper: Sleeper, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "later" / "log"
    sleeper.on(path)
    for _ in range(3):
        sleeper.settle()
        sleeper.clock.now_s += RECHECK_S
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == len(set(messages)) == 1
    assert str(path.parent) in messages[0]
    path.parent.mkdir()
    sleeper.settle()
    assert sleeper.is_woken_by(path.touch)


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_directory_that_is_replaced(sleeper: Sleeper, tmp_path: Path, how: str) -> None:
    path = tmp_path / "logs" / "log"
    path.parent.mkdir()
    sleeper.on(path)
    sleeper.settle()
    if how == "removed":
        shutil.rmtree(path.parent)
        sleeper.clock.now_s += RECHECK_S
        sleeper.settle()
    else:
        path.parent.rename(tmp_path / "old logs")
    path.parent.mkdir()
    sleeper.clock.now_s += RECHECK_S
    sleeper.settle()
    assert sleeper.is_woken_by(path.touch)


def test_without_inotify_it_polls_and_tries_again(
    sleeper: Sleeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_observer() -> None:
        raise OSError(errno.EMFILE, "inotify instance limit reached")

    path = tmp_path / "log"
    waker = sleeper.on(path)
    with monkeypatch.context() as patch:
        patch.setattr(waker_module, "Observer", no_observer)
        patch.setattr(waker_module, "QUIET_POLL_S", 0.001)
        for _ in range(3):
            waker.wait(60)
            sleeper.clock.now_s += RECHECK_S
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot watch {tmp_path}, polling instead: [Errno {errno.EMFILE}] inotify instance limit reached"
    ]
    sleeper.settle()
    assert sleeper.is_woken_by(path.touch)


def test_an_observer_that_died_is_replaced(sleeper: Sleeper, tmp_path: Path) -> None:
    path = tmp_path / "log"
    waker = sleeper.on(path)
    sleeper.settle()
    observer = waker._moves._observer
    assert observer is not None
    observer.stop()
    observer.join()
    sleeper.clock.now_s += RECHECK_S
    sleeper.settle()
    assert sleeper.is_woken_by(path.touch)


# -- which of them works


def test_events_work(sleeper: Sleeper, tmp_path: Path) -> None:
    waker = sleeper.on(tmp_path / "log")
    assert waker.state() == WakerState(Method.POLL, "")
    sleeper.settle()
    assert waker.state() == WakerState(Method.EVENTS, "")


def test_a_directory_that_is_not_there_is_polled_for(sleeper: Sleeper, tmp_path: Path) -> None:
    waker = sleeper.on(tmp_path / "later" / "log")
    sleeper.settle()
    state = waker.state()
    assert state.method is Method.POLL
    assert state.detail.startswith(f"cannot watch {tmp_path}/later: ")
    (tmp_path / "later").mkdir()
    sleeper.clock.now_s += RECHECK_S
    sleeper.settle()
    assert waker.state().method is Method.EVENTS


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_no_watches_are_left(sleeper: Sleeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    waker = sleeper.on(tmp_path / "log")

    class Libc:
        """The kernel has none left."""

        @staticmethod
        def refuse(*_: object) -> int:
            ctypes.set_errno(number)
            return -1

    with monkeypatch.context() as patch:
        patch.setattr(inotify_c, "inotify_add_watch", Libc.refuse)
        sleeper.settle()
        assert waker.state().method is Method.POLL
        assert str(tmp_path) in waker.state().detail
    sleeper.clock.now_s += RECHECK_S
    sleeper.settle()
    assert waker.state().method is Method.EVENTS
    assert sleeper.is_woken_by((tmp_path / "log").touch)


def test_events_that_do_not_come(sleeper: Sleeper, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.touch()
    waker = sleeper.on(path)
    sleeper.settle()
    for _ in range(MISSES):
        assert waker.state().method is Method.EVENTS
        waker.wait(0.001)
        waker.found()
        waker.found()
    assert waker.state() == WakerState(Method.POLL, "no events come of writes")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: no events come of writes, polling instead"
    ]
    # They do, after all.
    assert sleeper.is_woken_by(lambda: append(path))
    assert waker.state().method is Method.EVENTS


def test_a_log_that_is_added(sleeper: Sleeper, tmp_path: Path) -> None:
    waker = sleeper.on(tmp_path / "log")
    sleeper.settle()
    (tmp_path / "other").mkdir()
    waker.add(tmp_path / "other" / "log")
    sleeper.settle()
    assert sleeper.is_woken_by((tmp_path / "other" / "log").touch)


def test_a_queue_that_ran_over(
    sleeper: Sleeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel drops what is too much, says so, and goes on."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 70_000:
        pytest.skip(f"the queue holds {limit} events")
    may_read = threading.Event()
    may_read.set()
    is_readable = inotify_c.InotifyFD._check_inotify_fd

    def readable(inotify: inotify_c.InotifyFD) -> bool:
        answer = is_readable(inotify)
        assert may_read.wait(GENEROUS_S)
        return answer

    monkeypatch.setattr(inotify_c.InotifyFD, "_check_inotify_fd", readable)
    path = tmp_path / "log"
    path.touch()
    sleeper.on(path)
    sleeper.settle()
    may_read.clear()
    for number in range(limit // 2 + 1000):
        other = tmp_path / str(number)
        other.touch()
        other.unlink()
    may_read.set()
    deadline_s = time.monotonic() + GENEROUS_S
    while "queue overflowed" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert sleeper.is_woken_by(lambda: path.rename(tmp_path / "log.1"))
