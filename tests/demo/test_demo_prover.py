"""The log in its file, live and at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cuzk_agent.demo.prover import Prover, write_log
from cuzk_agent.demo.scenario import DAY, FAILING
from cuzk_agent.demo.truth import Outcome

EPOCH_UNIX_MS = 1796054060562.0


@dataclass
class SteppedClock:
    """A clock that only sleeping advances."""

    now_s: float = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return EPOCH_UNIX_MS / 1000 + self.now_s - 1000.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    written = [write_log(tmp_path / name, DAY, 4, start_unix_ms=EPOCH_UNIX_MS) for name in ("a", "b")]
    assert written[0] == written[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert written[0].lines == (tmp_path / "a").read_bytes().count(b"\n")


def test_it_ends_where_it_is_told(tmp_path: Path) -> None:
    some = write_log(tmp_path / "some", DAY, 1, start_unix_ms=EPOCH_UNIX_MS, rounds=None, min_lines=5000)
    assert 5000 <= some.lines < 5010
    assert some.truth.open_jobs > 0
    early = write_log(tmp_path / "early", DAY, 1, start_unix_ms=EPOCH_UNIX_MS, until_ms=100_000)
    assert (tmp_path / "some").read_bytes().startswith((tmp_path / "early").read_bytes())
    offsets = [int(found) for found in re.findall(rb"TIMELINE,(\d+),", (tmp_path / "early").read_bytes())]
    assert 80_000 < max(offsets) <= 100_000
    assert early.end_unix_ms == pytest.approx(EPOCH_UNIX_MS + 100_000, abs=20_000)


def test_torn_lines_are_not_whole_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written = write_log(path, DAY, 1, start_unix_ms=EPOCH_UNIX_MS, rounds=3)
    whole = [line for line in path.read_bytes().split(b"\n") if re.fullmatch(rb"TIMELINE,\d+,[A-Z_]+,[^,]+,\S+", line)]
    broken = sum(written.truth.events.values()) - len(whole)
    assert 0 < broken <= written.torn


def test_jobs_have_outcomes(tmp_path: Path) -> None:
    plain = replace(FAILING, setting=replace(FAILING.setting, colours=False))
    truth = write_log(tmp_path / "log", plain, 1, start_unix_ms=EPOCH_UNIX_MS).truth
    assert {outcome for _, outcome in truth.jobs} == {Outcome.PROVED, Outcome.FAILED}
    text = (tmp_path / "log").read_text()
    assert "\x1b" not in text
    assert sum(truth.jobs.values()) == text.count("job enqueued")


def test_live_it_writes_what_is_due_and_says_goodbye(tmp_path: Path) -> None:
    live, at_once = tmp_path / "live", tmp_path / "at_once"
    clock = SteppedClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.sleep(seconds)

    prover = Prover(DAY, seed=2, speed=10, clock=clock)
    prover.run(live, stop=lambda: clock.now_s >= 1020, sleep=sleep)
    write_log(at_once, DAY, 2, start_unix_ms=EPOCH_UNIX_MS, speed=10, until_ms=20_000)
    *lines, interrupted, shut_down, end = live.read_bytes().split(b"\n")
    assert end == b""
    assert b"received SIGINT, shutting down" in interrupted
    assert b"shutting down cuzk engine" in shut_down
    assert b"".join(line + b"\n" for line in lines) == at_once.read_bytes()
    assert max(slept) <= 0.1


def test_no_line_is_written_before_it_is_due(tmp_path: Path) -> None:
    path = tmp_path / "log"
    clock = SteppedClock()

    def sleep(seconds: float) -> None:
        offsets = re.findall(rb"TIMELINE,(\d+),", path.read_bytes())
        assert all(int(offset) <= (clock.now_s - 1000) * 1000 + 0.001 for offset in offsets[-3:])
        clock.sleep(seconds)

    Prover(DAY, seed=2, speed=20, clock=clock).run(path, stop=lambda: clock.now_s >= 1008, sleep=sleep)


def test_it_appends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    clock = SteppedClock()
    Prover(DAY, seed=1, speed=10, clock=clock).run(path, stop=lambda: True, sleep=clock.sleep)
    lines = path.read_bytes().split(b"\n")
    assert lines[0] == b"before"
    assert len(lines) == 4


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    whole, rotated = tmp_path / "whole", tmp_path / "rotated"
    parts: list[bytes] = []
    for path, rotate_bytes in ((whole, None), (rotated, 8000)):
        clock = SteppedClock()

        def sleep(seconds: float, clock: SteppedClock = clock) -> None:
            clock.sleep(seconds)
            old = tmp_path / "rotated.1"
            if old.exists():
                parts.append(old.read_bytes())
                old.unlink()

        prover = Prover(DAY, seed=2, speed=20, clock=clock)
        prover.run(path, stop=lambda clock=clock: clock.now_s >= 1020, sleep=sleep, rotate_bytes=rotate_bytes)  # type: ignore[misc]
    assert len(parts) > 3
    assert b"".join(parts) + rotated.read_bytes() == whole.read_bytes()
