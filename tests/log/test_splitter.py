from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuzk_agent.log.splitter import LineSplitter


def lines_of(stream: bytes, max_line_bytes: int) -> list[bytes]:
    """The lines of a whole stream, by the plainest means."""
    *lines, _unfinished = stream.replace(b"\0", b"").split(b"\n")
    return [line.removesuffix(b"\r")[:max_line_bytes] for line in lines]


# Few letters, so that line ends, NULs and limits meet often.
STREAMS = st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\0", b"\xff\xfe", b"\x85"]), max_size=40).map(
    b"".join
)


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 80)), limit=st.integers(1, 6))
@example(stream=b"abc\r\n", cuts=[4], limit=3)
@example(stream=b"abcd\r\n", cuts=[3, 4, 5], limit=3)
def test_chunks_make_no_difference(stream: bytes, cuts: list[int], limit: int) -> None:
    splitter = LineSplitter(limit)
    lines: list[bytes] = []
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        lines += splitter.feed(stream[start:end])
        assert splitter.pending_bytes <= limit + 1
    assert lines == lines_of(stream, limit)
    assert splitter.nul_bytes == stream.count(b"\0")
    whole = LineSplitter(limit)
    assert whole.feed(stream) == lines
    assert whole.pending == splitter.pending
    assert whole.overlong_lines == splitter.overlong_lines


@given(stream=st.binary(max_size=200), cut=st.integers(0, 200))
def test_bytes_pass_through_unchanged(stream: bytes, cut: int) -> None:
    splitter = LineSplitter()
    assert splitter.feed(stream[:cut]) + splitter.feed(stream[cut:]) == lines_of(stream, 65536)


@pytest.mark.parametrize(
    ("stream", "lines", "overlong"),
    [
        (b"", [], 0),
        (b"one\ntwo\r\n\nthree", [b"one", b"two", b""], 0),
        (b"a\rb\r\r\n", [b"a\rb\r"], 0),
        (b"12345\r\n", [b"12345"], 0),
        (b"123456\nx\n", [b"12345", b"x"], 1),
        (b"1234567\r\nx\n", [b"12345", b"x"], 1),
        (b"\0\0\0ab\0c\0\n\0", [b"abc"], 0),
        (b"\xff\xfe\x80\n", [b"\xff\xfe\x80"], 0),
    ],
)
def test_lines(stream: bytes, lines: list[bytes], overlong: int) -> None:
    splitter = LineSplitter(5)
    assert splitter.feed(stream) == lines
    assert splitter.overlong_lines == overlong


def test_a_line_of_a_hundred_megabytes_is_cut_to_its_head() -> None:
    splitter = LineSplitter()
    chunk = b"x" * (1 << 20)
    tracemalloc.start()
    try:
        for _ in range(100):
            assert splitter.feed(chunk) == []
            assert splitter.pending_bytes <= 65537
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert splitter.feed(b"\nnext\n") == [b"x" * 65536, b"next"]
    assert splitter.overlong_lines == 1


def test_a_hole_of_nuls_leaves_no_trace_but_its_count() -> None:
    splitter = LineSplitter()
    splitter.feed(b"TIMELINE,1")
    hole = bytes(1 << 20)
    for _ in range(64):
        assert splitter.feed(hole) == []
    assert splitter.feed(b"2,SYNTH_START\n") == [b"TIMELINE,12,SYNTH_START"]
    assert splitter.nul_bytes == 64 << 20


def test_entering_in_the_middle_of_a_line() -> None:
    splitter = LineSplitter(5)
    splitter.skip_line()
    assert splitter.feed(b"the rest of a long line") == []
    assert splitter.pending == b""
    assert splitter.feed(b" that ended here\nwhole\n") == [b"whole"]
    assert splitter.overlong_lines == 0


def test_reset_forgets_the_unfinished_line() -> None:
    splitter = LineSplitter(5)
    splitter.feed(b"head of a line")
    assert splitter.reset() == 6
    assert splitter.feed(b"next\n") == [b"next"]
    assert splitter.overlong_lines == 0


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_line_bytes"):
        LineSplitter(0)
