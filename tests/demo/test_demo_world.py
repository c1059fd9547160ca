"""Time, chance and what is written: all of a simulation depends on them."""

from __future__ import annotations

import math
from functools import partial

from cuzk_agent.demo.lines import Kernel, Timeline, Tracing
from cuzk_agent.demo.scenario import Setting
from cuzk_agent.demo.world import World


def run(world: World, until_ms: float = math.inf) -> None:
    for _ in world.run(until_ms, None):
        pass


def test_what_is_due_happens_in_the_order_of_time_and_then_of_planning() -> None:
    world, happened = World(Setting(), 1, 1.0), ""

    def happen(name: str) -> None:
        nonlocal happened
        happened += name

    for delay_ms, name in ((20, "c"), (10, "a"), (10, "b"), (31, "d")):
        world.later(delay_ms, partial(happen, name))
    run(world, 30)
    assert (happened, world.now_ms) == ("abc", 20)
    run(world)
    assert (happened, world.now_ms) == ("abcd", 31)


def test_an_ended_process_does_nothing_more() -> None:
    world = World(Setting(), 1, 1.0)
    happened: list[str] = []
    for name in ("first", "second"):
        world.later(1, partial(happened.append, name), name)
    world.later(1, partial(happened.append, "callers"))
    world.running = "second"
    run(world)
    assert happened == ["second", "callers"]


def test_a_line_takes_a_moment_and_may_come_with_noise() -> None:
    world = World(Setting(noise=2), 1, 1.0)
    for event in ("SYNTH_START", "SYNTH_END"):
        world.say(Timeline(world.now_ms, "synth-0", 0, event, "job", ""))
    world.say(Kernel(world.now_ms, "worker-0", ""))
    lines = list(world.run(math.inf, None))
    assert [type(line) for line in lines] == [Timeline, Tracing, Tracing, Timeline, Tracing, Tracing, Kernel]
    assert lines[0].time_ms < lines[3].time_ms < lines[6].time_ms < world.now_ms
    assert world.events == {"SYNTH_START": 1, "SYNTH_END": 1}


def test_it_ends_with_so_many_lines() -> None:
    world = World(Setting(), 1, 1.0)

    def go_on() -> None:
        world.say(Kernel(world.now_ms, "worker-0", ""))
        world.later(1, go_on)

    go_on()
    assert len(list(world.run(math.inf, 100))) == 100


def test_durations_spread_around_their_mean() -> None:
    world = World(Setting(spread=0.2), 1, 1.0)
    usual, narrow = [world.spread(100) for _ in range(500)], [world.spread(100, 0.01) for _ in range(500)]
    assert 80 <= min(usual) < 85
    assert 115 < max(usual) <= 120
    assert min(narrow) >= 99
    assert max(narrow) <= 101
