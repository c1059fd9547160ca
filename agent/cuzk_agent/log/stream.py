"""Reads a stream that comes once, such as standard input, and passes it on if asked to."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from cuzk_agent.log.envelope import MAX_RECORD_BYTES, Unwrapper
from cuzk_agent.log.source import Batch, FollowState, ReadStats
from cuzk_agent.log.splitter import LineSplitter

MAX_WAITING_BYTES: Final = 16 << 20
"""What has been read and not been asked for; then whoever writes has to wait."""

_READ_BYTES: Final = 1 << 16

_log = logging.getLogger(__name__)


class StreamFollower:
    """Follows what comes in on a descriptor until it ends.

    A thread of its own reads it, so that a writer is not held up by the agent's pace, and writes it on to `tee`, if
    that is given, as it came. `on_data` is called in that thread when there is something to read.
    """

    def __init__(
        self,
        descriptor: int,
        monotonic: Callable[[], float],
        *,
        name: str = "standard input",
        tee: int | None = None,
        on_data: Callable[[], object] = lambda: None,
    ) -> None:
        self._descriptor = descriptor
        self._monotonic = monotonic
        self._name = name
        self._tee = tee
        self._on_data = on_data
        self._splitter = LineSplitter(MAX_RECORD_BYTES)
        self._unwrapper = Unwrapper()
        self._lines = self._read_bytes = self._lost_bytes = 0
        self._reached_end = False
        self._end_told = False
        # What the two threads share.
        self._room = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._ended: str | None = None
        """Why nothing more comes."""
        self._closed = False
        self._stop, self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def read(self, max_bytes: int = 1 << 20) -> Batch:
        """Read what has come, about `max_bytes` at most; never waits."""
        now_s = self._monotonic()
        chunks = []
        with self._room:
            # In this order: what is in neither place had not been written when the clock was read.
            is_dry = self._ended is not None or _unread(self._descriptor) == 0
            taken = 0
            while self._waiting and taken < max_bytes:
                chunks.append(self._waiting.popleft())
                taken += len(chunks[-1])
            self._waiting_bytes -= taken
            at_end = is_dry and not self._waiting
            is_over = self._ended is not None and not self._waiting
            self._room.notify()
        physical: list[bytes] = []
        for chunk in chunks:
            physical += self._splitter.feed(chunk)
        lines, times = self._unwrapper.feed(physical)
        self._read_bytes += taken
        self._lines += len(lines)
        self._reached_end = self._reached_end or at_end
        breaks: tuple[int, ...] = ()
        if is_over and not self._end_told:
            self._end_told = True
            self._lost_bytes += self._splitter.reset() + self._unwrapper.reset()
            breaks = (len(lines),)
        return Batch(tuple(lines), now_s, at_end, None if times is None else tuple(times), breaks)

    def stats(self) -> ReadStats:
        """Totals so far, and the present state."""
        with self._room:
            ended, waiting = self._ended, self._waiting_bytes
        return ReadStats(
            state=FollowState.FOLLOWING if ended is None or not self._end_told else FollowState.MISSING,
            detail="" if ended is None else f"{self._name}: {ended}",
            caught_up=self._reached_end,
            lines=self._lines,
            read_bytes=self._read_bytes,
            lag_bytes=waiting + (_unread(self._descriptor) or 0 if ended is None else 0),
            rotations=0,
            truncations=0,
            lost_bytes=self._lost_bytes,
            overlong_lines=self._unwrapper.overlong_lines,
            nul_bytes=self._splitter.nul_bytes,
            envelope=self._unwrapper.envelope,
        )

    def position(self) -> None:
        """It comes only once."""

    def close(self) -> None:
        """Read no more. The thread may still be passing on what it has read."""
        with self._room:
            if self._closed:
                return
            self._closed = True
            self._room.notify()
        os.close(self._stopping)

    # -- its thread

    def _run(self) -> None:
        try:
            while self._wait():
                chunk = self._take()
                self._on_data()
                self._pass_on(chunk)
        finally:
            os.close(self._stop)
            self._on_data()

    def _wait(self) -> bool:
        """Wait for something to read and for room; False if it is to end."""
        with self._room:
            self._room.wait_for(lambda: self._closed or self._waiting_bytes < MAX_WAITING_BYTES)
        if self._ended is not None:
            return False
        readable, _, _ = select.select([self._descriptor, self._stop], [], [])
        return self._stop not in readable

    def _take(self) -> bytes:
        with self._room:
            try:
                chunk = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                # Somebody else reads it too.
                return b""
            except OSError as error:
                self._ended = error.strerror or str(error)
                return b""
            if not chunk:
                self._ended = "it has ended"
                return b""
            self._waiting.append(chunk)
            self._waiting_bytes += len(chunk)
            return chunk

    def _pass_on(self, chunk: bytes) -> None:
        while self._tee is not None and chunk:
            try:
                chunk = chunk[os.write(self._tee, chunk) :]
            except BlockingIOError:
                select.select([], [self._tee], [], 1.0)
            except OSError as error:
                _log.warning("cannot pass %s on any more: %s", self._name, error.strerror or error)
                self._tee = None


def _unread(descriptor: int) -> int | None:
    """Bytes that can be read at once; None where that can't be told."""
    try:
        answer = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except OSError:
        return None
    return int(struct.unpack("i", answer)[0])
