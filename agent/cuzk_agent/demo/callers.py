"""Those who want proofs: they submit a scenario's bursts of jobs to whatever daemon there is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from cuzk_agent.demo.jobs import MINER, Call
from cuzk_agent.demo.scenario import WINDOW, WINNING, Burst, Kind, Request
from cuzk_agent.demo.world import World

_FIRST_SECTOR = 2041


class Callers:
    """They go through the bursts one after another, and again and again."""

    def __init__(self, world: World, bursts: Sequence[Burst], rounds: int | None, done: Callable[[], None]) -> None:
        """After so many rounds, if there is an end to them, they are `done`."""
        self._world = world
        self._bursts = bursts
        self._rounds = rounds
        self._done = done
        self._begun = 0
        """Bursts."""
        self._left = 0
        """Jobs of the present burst that have not ended, whether submitted or not."""
        self._to_submit: deque[Request] = deque()
        """Of the present burst, those that wait for others to end."""
        self._sectors = 0
        self._daemon: Callable[[Call], None] | None = None
        self._unserved: list[Call] = []
        """Calls that no daemon has or had taken to its end: they are made again once there is one."""

    def connect(self, daemon: Callable[[Call], None]) -> None:
        """A daemon is there, and takes calls."""
        self._daemon = daemon
        calls, self._unserved = self._unserved, []
        for index, call in enumerate(calls):
            self._world.later(2_000 + 150 * index, partial(self._call, call))
        if not self._begun:
            self._next_burst()

    def disconnect(self, unanswered: Iterable[Call]) -> None:
        """The daemon has ended, and left these calls without an answer."""
        self._daemon = None
        self._unserved += unanswered

    def job_over(self) -> None:
        """Nothing is left of a job."""
        self._left -= 1
        if self._to_submit:
            self._world.later(self._world.spread(150), partial(self._submit, self._to_submit.popleft()))
        elif not self._left:
            self._next_burst()

    def _next_burst(self) -> None:
        if self._rounds is not None and self._begun >= self._rounds * len(self._bursts):
            self._done()
            return
        burst = self._bursts[self._begun % len(self._bursts)]
        self._begun += 1
        self._left = len(burst.requests)
        self._world.later(self._world.spread(burst.pause_ms), partial(self._begin, burst))

    def _begin(self, burst: Burst) -> None:
        at_once = len(burst.requests) if burst.in_flight is None else burst.in_flight
        for request in burst.requests[:at_once]:
            self._world.later(request.after_ms, partial(self._submit, request))
        self._to_submit = deque(burst.requests[at_once:])

    def _submit(self, request: Request) -> None:
        sector = _FIRST_SECTOR + self._sectors
        self._sectors += 1
        call = Call(request, self._job_id(request.kind, sector), sector)
        self._call(call)
        if request.again_after_ms is not None:
            self._left += 1
            self._world.later(request.again_after_ms, partial(self._call, Call(request, call.job_id, sector)))

    def _job_id(self, kind: Kind, sector: int) -> str:
        random, prefix = self._world.random, f"{kind.job_prefix}-{MINER}"
        if kind is WINNING:
            return f"{prefix}-{random.getrandbits(64):016x}"
        if kind is WINDOW:
            a, b, c = (random.randrange(256) for _ in range(3))
            return f"{prefix}-{sector % 48}-[{a} {b} {c} 0 17 9 201 77]"
        return f"{prefix}-{sector}"

    def _call(self, call: Call) -> None:
        if self._daemon is None:
            self._unserved.append(call)
        else:
            self._daemon(call)
