"""Locks: first come, first served."""

from __future__ import annotations

from functools import partial

from cuzk_agent.demo.locks import Mutex, Tracker
from demo.support import Bench


def test_a_mutex_is_held_until_it_is_unlocked() -> None:
    bench = Bench()
    had: list[str] = []
    mutex = Mutex(bench.process)
    for name in "abc":
        mutex.lock(partial(had.append, name))
    assert had == ["a"]
    for _ in range(2):
        mutex.unlock()
        bench.run()
    assert had == ["a", "b", "c"]
    mutex.unlock()
    mutex.lock(partial(had.append, "d"))
    assert had[-1] == "d"


def test_the_tracker_is_held_for_its_time() -> None:
    bench = Bench()
    tracker = Tracker(bench.process)
    since_ms: list[float] = []
    for hold_ms in (100, 5, 20):
        tracker.lock(hold_ms, lambda: since_ms.append(bench.world.now_ms))
    bench.run()
    assert since_ms == [0, 100, 105]
    bench.process.later(50, lambda: tracker.lock(1, lambda: since_ms.append(bench.world.now_ms)))
    bench.run()
    assert since_ms[-1] == 155
