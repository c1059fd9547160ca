"""Callers: what they submit, when, and that they don't give up."""

from __future__ import annotations

import math

import pytest

from cuzk_agent.demo.callers import Callers
from cuzk_agent.demo.jobs import Call
from cuzk_agent.demo.scenario import POREP, WINDOW, WINNING, Burst, Request, Setting
from cuzk_agent.demo.world import World


class Daemon:
    """Takes calls, and answers when it is told to."""

    def __init__(self, *bursts: Burst, rounds: int | None = 1) -> None:
        self.world = World(Setting(spread=0), 1, 1.0)
        self.done = False
        self.callers = Callers(self.world, bursts, rounds, self._done)
        self.calls: list[tuple[float, Call]] = []
        self.callers.connect(self._take)

    def _take(self, call: Call) -> None:
        self.calls.append((self.world.now_ms, call))

    def _done(self) -> None:
        self.done = True

    def run(self, until_ms: float = math.inf) -> list[float]:
        """When it was called."""
        for _ in self.world.run(until_ms, None):
            pass
        return [at_ms for at_ms, _ in self.calls]

    def restart(self, unanswered: list[Call]) -> None:
        self.callers.disconnect(unanswered)
        self.callers.connect(self._take)


def test_a_burst_comes_when_the_one_before_is_over() -> None:
    daemon = Daemon(Burst(100, (Request(0, POREP), Request(50, POREP))), Burst(30, (Request(0, WINNING),)))
    assert daemon.run() == [100, 150]
    daemon.callers.job_over()
    assert daemon.run() == [100, 150]
    daemon.callers.job_over()
    assert daemon.run() == [100, 150, 180]
    assert not daemon.done
    daemon.callers.job_over()
    assert daemon.done


def test_only_so_many_are_in_flight() -> None:
    daemon = Daemon(Burst(0, tuple(Request(0, POREP) for _ in range(4)), in_flight=2))
    assert len(daemon.run()) == 2
    for known in (3, 4, 4):
        daemon.callers.job_over()
        assert len(daemon.run()) == known
    assert not daemon.done
    daemon.callers.job_over()
    assert daemon.done


def test_without_an_end_the_bursts_come_again_and_again() -> None:
    daemon = Daemon(Burst(10, (Request(0, POREP),)), rounds=None)
    for count in range(1, 5):
        assert len(daemon.run()) == count
        daemon.callers.job_over()
    assert not daemon.done


def test_a_caller_may_lose_patience_and_ask_for_the_same_again() -> None:
    daemon = Daemon(Burst(0, (Request(0, POREP, again_after_ms=500),)))
    assert daemon.run() == [0, 500]
    (_, first), (_, second) = daemon.calls
    assert (first.job_id, first.sector) == (second.job_id, second.sector)
    daemon.callers.job_over()
    assert not daemon.done
    daemon.callers.job_over()
    assert daemon.done


def test_what_was_not_answered_is_asked_for_again() -> None:
    daemon = Daemon(Burst(0, (Request(0, POREP), Request(10, POREP), Request(20, POREP))))
    daemon.run(5)
    (_, first) = daemon.calls[0]
    daemon.callers.disconnect([first])
    daemon.run(15)
    daemon.restart([])
    assert daemon.run() == pytest.approx([0, 20, 2_010, 2_160])
    assert daemon.calls[2][1] is first


def test_job_ids_are_those_of_their_kind() -> None:
    daemon = Daemon(Burst(0, (Request(0, POREP), Request(1, WINDOW), Request(2, WINNING))))
    daemon.run()
    porep, window, winning = (call.job_id for _, call in daemon.calls)
    assert porep == "porep-1000-2041"
    assert window.startswith("wdpost-1000-26-[")
    assert len(winning) == len("winpost-1000-0123456789abcdef")
