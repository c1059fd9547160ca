"""What is written on the command line, and the line for whoever waits."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cuzk_agent.report.arguments import Bound, parse_bound, parse_duration_ms, parse_recording
from cuzk_agent.report.inputs import Progress
from cuzk_agent.report.progress import ProgressLine
from cuzk_agent.report.words import duration, offset, rate


@pytest.mark.parametrize(
    ("text", "ms"),
    [("800ms", 800), ("0ms", 0), ("1.5s", 1500), ("2m", 120_000), ("1h30m", 5_400_000), ("1m0.25s", 60_250)],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "800", "ms", "1,5s", "-1s", "1s ", "1s2", "٣s", "1e3s", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("90s", Bound(90, wall_clock=False)),
        ("0:03:02.863", Bound(182.863, wall_clock=False)),
        ("151:00:00", Bound(543_600, wall_clock=False)),
        ("2026-11-30T14:05:09", Bound(1_796_047_509, wall_clock=True)),
        ("2026-11-30T14:05:09.25Z", Bound(1_796_047_509.25, wall_clock=True)),
        ("2026-11-30 15:05:09+01:00", Bound(1_796_047_509, wall_clock=True)),
    ],
)
def test_bounds(text: str, bound: Bound) -> None:
    assert parse_bound(text) == bound


@pytest.mark.parametrize(
    ("text", "recording"),
    [
        ("a.jsonl", ("0", "a.jsonl")),
        ("gpu3/x.gpu1.jsonl", ("1", "gpu3/x.gpu1.jsonl")),
        ("x.gpu00.jsonl", ("0", "x.gpu00.jsonl")),
        ("x.gpunvml1.jsonl", ("nvml1", "x.gpunvml1.jsonl")),
        ("2=x.gpu1.jsonl", ("2", "x.gpu1.jsonl")),
        ("a=b.jsonl", ("0", "a=b.jsonl")),
    ],
)
def test_recordings(text: str, recording: tuple[str, str]) -> None:
    assert parse_recording(text) == recording


def test_words() -> None:
    assert [duration(ms) for ms in (None, 0, 999.4, 999.6, 9994, 9996, 9_999_940, 1e7)] == [
        "–",
        "0 ms",
        "999 ms",
        "1.00 s",
        "9.99 s",
        "10.0 s",
        "9999.9 s",
        "2.78 h",
    ]
    assert [rate(per_s) for per_s in (0.2, 0.0374, 12.34, 1234.5)] == ["0.200/s", "0.0374/s", "12.3/s", "1,234/s"]
    assert [offset(ms) for ms in (0, 182_863, 543_600_000)] == ["0:00:00.000", "0:03:02.863", "151:00:00.000"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_to_those_who_wait(clock: Any) -> None:
    stream = Terminal()
    line = ProgressLine(stream, clock)
    line(Progress(0, 1_000_000_000))
    clock.advance(0.9)
    line(Progress(100_000_000, 1_000_000_000))
    assert stream.getvalue() == ""
    clock.advance(1.1)
    line(Progress(500_000_000, 1_000_000_000))
    bar = "━" * 15 + "╌" * 15
    assert stream.getvalue() == f"\r{bar}  50%  500 MB, 250.0 MB/s, 2 s left\x1b[K"
    clock.advance(0.05)
    line(Progress(510_000_000, 1_000_000_000))
    assert stream.getvalue().count("\r") == 1
    line.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_of_standard_input_has_no_end(clock: Any) -> None:
    stream = Terminal()
    line = ProgressLine(stream, clock)
    clock.advance(2)
    line(Progress(50_000_000, None))
    assert stream.getvalue() == "\r50 MB, 25.0 MB/s\x1b[K"


def test_no_progress_without_a_terminal(clock: Any) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock)
    clock.advance(2)
    line(Progress(1, 2))
    line.close()
    assert stream.getvalue() == ""
