from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.timeline.lines import LogLine, TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import MAX_ERROR_BYTES, MAX_ERROR_LINES, UNPARSED_REASONS, LineParser

FAILED = b"2026-11-30T14:49:32.048362Z ERROR cuzk_core::engine: partition GPU proving failed error=line one"
NOISE = b"2026-11-30T14:49:32.048362Z  INFO cuzk_core::engine: FIN_TIMING finalizer partition worker_id=0 finish_ms=506"


def feed(parser: LineParser, *lines: bytes) -> list[LogLine]:
    return [value for line in lines for value in parser.feed(line)]


def fields(values: list[LogLine]) -> list[dict[str, str]]:
    return [dict(value.fields) for value in values if isinstance(value, TracingLine)]


def test_an_error_of_several_lines_waits_for_its_keys() -> None:
    parser = LineParser()
    assert not feed(parser, FAILED, b"", b"  at x.cu:5")
    (read,) = feed(parser, b"line two job_id=porep-1 partition=1")
    assert fields([read]) == [
        {"error": "line one\n\n  at x.cu:5\nline two", "job_id": "porep-1", "partition": "1"},
    ]


def test_an_error_whose_text_ends_in_a_newline() -> None:
    (read,) = feed(LineParser(), FAILED, b" \x1b[3mjob_id\x1b[0m\x1b[2m=\x1b[0ma partition=1")
    assert fields([read]) == [{"error": "line one\n", "job_id": "a", "partition": "1"}]


def test_an_error_without_keys_ends_at_the_next_line_of_the_log() -> None:
    first, second = feed(LineParser(), FAILED, b"more", NOISE)
    assert fields([first]) == [{"error": "line one"}]
    assert isinstance(second, TracingLine)
    first, event = feed(LineParser(), FAILED, b"more", b"TIMELINE,1,GPU_QUEUE,a,partition=1")
    assert isinstance(event, TimelineEvent)


def test_an_error_without_keys_ends_with_the_log() -> None:
    parser = LineParser()
    assert not feed(parser, FAILED, b"more")
    assert fields(list(parser.flush())) == [{"error": "line one"}]
    assert not parser.flush()


def test_an_error_does_not_wait_for_ever() -> None:
    parser = LineParser()
    (read,) = feed(parser, FAILED, *[b"more"] * MAX_ERROR_LINES)
    assert fields([read]) == [{"error": "line one"}]
    (read,) = feed(parser, FAILED, b"x" * MAX_ERROR_BYTES)
    (read,) = feed(parser, FAILED + b"x" * MAX_ERROR_BYTES)
    assert not parser.flush()


def test_a_rest_swallowed_by_an_error_without_keys_is_found() -> None:
    parser = LineParser()
    out = feed(parser, b"TIMELINE,1,GPU_QUEUE,a," + FAILED, b"partition=1", NOISE)
    assert [value for value in out if isinstance(value, TimelineEvent)] == [
        TimelineEvent(1, "GPU_QUEUE", "a", 1, None, None, None, None)
    ]
    assert parser.stats().torn_recovered == 1


def test_other_text_means_nothing() -> None:
    parser = LineParser()
    assert not feed(parser, b"", b"nvidia-smi not found", b"2", b"Caused by:", b"CUZK_", b"\x1b[31m", b"TIMELIN")
    stats = parser.stats()
    assert (stats.torn_recovered, stats.torn_lost, stats.unparsed) == (0, 0, {})


pieces = st.sampled_from(
    [
        b"TIMELINE,",
        b"12",
        b",",
        b"GPU_END",
        b"job-1",
        b"worker=0,gpu_ms=3",
        b"\x1b[2m",
        b"CUZK_TIMING: a=1",
        b" ",
        b"{",
        b"}",
        b": ",
        b'"',
        b"\\",
        b"=",
        b" error=",
        b" job_id=",
        b"Some(",
        b")",
        b"\xff",
        b"\x00",
        b"\r",
        FAILED,
        NOISE,
    ]
)
lines = st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=12).map(b"".join)).map(
    lambda line: line.replace(b"\n", b"")
)


@given(st.lists(lines, max_size=60))
def test_any_bytes_are_survived_in_bounded_memory(log: list[bytes]) -> None:
    parser = LineParser()
    for line in log:
        for value in parser.feed(line):
            assert isinstance(value, LogLine)
        assert len(parser._error) <= MAX_ERROR_LINES
        assert sum(map(len, parser._error)) <= MAX_ERROR_BYTES
        assert sum(map(len, parser._torn._head or ())) <= 1200
    parser.flush()
    assert not parser._error
    assert not parser._torn.open
    assert set(parser.stats().unparsed or ()) <= set(UNPARSED_REASONS)
