"""The log in its file, and its truth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from cuzk_agent.demo.daemon import run, write_log
from cuzk_agent.demo.model import JobOutcome

EPOCH_UNIX_MS = 1796054060562.0


def plain(path: Path) -> str:
    return re.sub(r"\x1b\[\d+m", "", path.read_text())


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
    truths = [write_log(tmp_path / name, 4, 60_000, EPOCH_UNIX_MS) for name in ("a", "b")]
    assert truths[0] == truths[1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("seed", range(6))
def test_the_truth_is_what_the_log_says(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "log"
    until_ms = 50_000 + 7_777 * seed
    truth = write_log(path, seed, until_ms, EPOCH_UNIX_MS)

    open_spans: dict[tuple[str, str], tuple[int, int]] = {}
    spans: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for line in truth.timeline:
        _, offset, event, job_id, detail = line.split(",", 4)
        if event in {"GPU_START", "GPU_END"}:
            found = re.match(r"worker=(\d+)(?:,partition=(\d+))?", detail)
            assert found
            unit = (job_id, found[2])
            if event == "GPU_START":
                open_spans[unit] = (int(found[1]) // 2, int(offset))
            else:
                gpu, start = open_spans.pop(unit)
                spans[gpu].append((start, int(offset)))
    # A failure at the start of proving has no GPU_END; its error line bears the time.
    failed = r"^(\S+) ERROR gpu_worker\{.*job_id=(\S+) .*partition=Some\((\d+)\)\}.*GPU prove start failed"
    for stamp, job_id, partition in re.findall(failed, plain(path), re.MULTILINE):
        gpu, start = open_spans.pop((job_id, partition))
        end_ms = datetime.fromisoformat(stamp).timestamp() * 1000 - EPOCH_UNIX_MS
        spans[gpu].append((start, int(end_ms + 0.0005)))
    last_ms = int(truth.timeline[-1].split(",")[1])

    for gpu, told in truth.gpus.items():
        still_open = [start for at_gpu, start in open_spans.values() if at_gpu == gpu]
        assert told.spans == len(spans[gpu]) + len(still_open)
        assert told.open_spans == len(still_open)
        edges = spans[gpu] + [(start, last_ms) for start in still_open]
        busy = {ms for start, end in edges for ms in range(start, end)}
        assert told.busy_ms == len(busy)
        first, last = min(start for start, _ in edges), max(end for _, end in edges)
        idle = [ms for ms in range(first, last) if ms not in busy]
        assert told.gap_ms == len(idle)
        assert told.gaps == sum(ms - 1 in busy for ms in idle)
        assert told.busy_ms + told.gap_ms == last - first


def test_torn_lines_are_not_whole_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    truth = write_log(path, 1, 300_000, EPOCH_UNIX_MS)
    whole = set(path.read_text().split("\n"))
    broken = [line for line in truth.timeline if line not in whole]
    assert 0 < len(broken) <= truth.torn_lines


def test_jobs_have_outcomes(tmp_path: Path) -> None:
    truth = write_log(tmp_path / "log", 1, 300_000, EPOCH_UNIX_MS)
    assert set(truth.jobs.values()) >= {JobOutcome.PROVED, JobOutcome.FAILED}
    text = plain(tmp_path / "log")
    assert set(truth.jobs) == set(re.findall(r"job enqueued job_id=(.+?) proof_kind", text))


def test_live_it_writes_what_is_due_and_says_goodbye(tmp_path: Path) -> None:
    live, at_once = tmp_path / "live", tmp_path / "at_once"
    clock = SteppedClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.sleep(seconds)

    run(live, seed=2, speed=10, stop=lambda: clock.now_s >= 1020, clock=clock, sleep=sleep)
    write_log(at_once, 2, 20_000, EPOCH_UNIX_MS)
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

    run(path, seed=2, speed=20, stop=lambda: clock.now_s >= 1008, clock=clock, sleep=sleep)


def test_it_appends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    clock = SteppedClock()
    run(path, seed=1, speed=10, stop=lambda: True, clock=clock, sleep=clock.sleep)
    lines = path.read_bytes().split(b"\n")
    assert lines[0] == b"before"
    assert len(lines) == 4
