"""The daemon's memory budget, which units and the parameters (SRS) of their kinds share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cuzk_agent.demo.jobs import Unit
from cuzk_agent.demo.process import Process
from cuzk_agent.demo.progress import Progress
from cuzk_agent.demo.scenario import Kind

_MEMORY = "cuzk_core::memory"
_SRS_MANAGER = "cuzk_core::srs_manager"


class Memory:
    """Grants memory, and keeps the parameters of each kind in it until the memory is needed."""

    def __init__(self, process: Process, progress: Progress) -> None:
        self._process = process
        self._progress = progress
        self._budget_gib = process.setting.budget_gib
        self._used_gib = 0.0
        self._waiting: list[tuple[float, Callable[[], None]]] = []
        self._loaded: dict[str, Kind] = {}
        """By name, as those below: kinds whose parameters are there, in the order in which they came."""
        self._wanted: dict[str, list[Callable[[], None]]] = {}
        """Parameters that wait for memory, and who waits for that."""
        self._loading: dict[str, list[Callable[[], None]]] = {}
        """Parameters that have it, and who waits for them to be loaded."""

    @property
    def free_gib(self) -> int:
        """As the log says it, in whole GiB."""
        return int(self._budget_gib - self._used_gib)

    def acquire(self, gib: float, then: Callable[[], None]) -> None:
        """`then` once there is so much memory; never, if there can't be."""
        if gib > self._budget_gib:
            self._process.trace(
                "dispatcher",
                "acquire request exceeds total budget — will block until possible",
                target=_MEMORY,
                level="WARN",
                amount_gib=int(gib),
                total_gib=int(self._budget_gib),
            )
        self._waiting.append((gib, then))
        self._grant()

    def release(self, gib: float) -> None:
        """So much is free again."""
        self._used_gib -= gib
        self._process.soon(self._grant)

    def let_go(self, unit: Unit) -> None:
        """Nothing is left of the unit, which held its memory."""
        self.release(unit.memory_gib)
        self._progress.leave(unit)

    def _grant(self) -> None:
        """Whoever fits gets what he asked for, whether others have waited longer or not."""
        waiting, self._waiting = self._waiting, []
        for gib, then in waiting:
            if self._used_gib + gib > self._budget_gib and gib <= self._budget_gib:
                self._evict(self._used_gib + gib - self._budget_gib)
            if self._used_gib + gib <= self._budget_gib:
                self._used_gib += gib
                self._process.soon(then)
            else:
                self._waiting.append((gib, then))

    def _evict(self, needed_gib: float) -> None:
        in_use = self._progress.kinds_in_use()
        idle = [kind for name, kind in self._loaded.items() if name not in in_use]
        if sum(kind.srs_gib for kind in idle) < needed_gib:
            return
        for kind in idle:
            if needed_gib <= 0:
                return
            del self._loaded[kind.name]
            self._used_gib -= kind.srs_gib
            needed_gib -= kind.srs_gib
            self._process.trace(
                "dispatcher",
                "SRS evicted",
                target=_SRS_MANAGER,
                circuit_id=kind.circuit_id,
                freed_gib=kind.srs_gib,
                budget_available_gib=self.free_gib,
            )
            self._process.trace(
                "dispatcher", "evicted for memory pressure", entry=f"srs:{kind.circuit_id}", freed_gib=kind.srs_gib
            )

    def reserve_srs(self, kind: Kind, then: Callable[[], None]) -> None:
        """`then` once there is memory for a kind's parameters, or they are there."""
        if kind.name in self._loaded or kind.name in self._loading:
            then()
        elif kind.name in self._wanted:
            self._wanted[kind.name].append(then)
        else:
            self._wanted[kind.name] = [then]
            self.acquire(kind.srs_gib, partial(self._srs_reserved, kind))

    def _srs_reserved(self, kind: Kind) -> None:
        self._loading[kind.name] = []
        for then in self._wanted.pop(kind.name):
            then()

    def load_srs(self, kind: Kind, writer: str, then: Callable[[], None]) -> None:
        """`then` once a kind's parameters are loaded, for which memory is reserved; the first who asks does it."""
        if kind.name in self._loaded:
            then()
            return
        waiting = self._loading[kind.name]
        waiting.append(then)
        if len(waiting) == 1:
            self._process.trace(
                writer,
                "loading SRS from disk",
                target=_SRS_MANAGER,
                circuit_id=kind.circuit_id,
                path=f"/data/zk/params/{kind.params}",
                file_size_gib=kind.srs_gib,
            )
            load_ms = self._process.spread(kind.srs_ms)
            self._process.later(load_ms, partial(self._srs_loaded, kind, writer, self._process.now_ms))

    def _srs_loaded(self, kind: Kind, writer: str, since_ms: float) -> None:
        self._loaded[kind.name] = kind
        self._process.trace(
            writer,
            "SRS loaded successfully",
            target=_SRS_MANAGER,
            circuit_id=kind.circuit_id,
            elapsed_ms=self._process.logged_ms(self._process.now_ms - since_ms),
            budget_used_gib=int(self._used_gib),
            budget_available_gib=self.free_gib,
        )
        for then in self._loading.pop(kind.name):
            then()
