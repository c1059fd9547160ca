"""What container runtimes make of lines, and back."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.log.envelope import Envelope, Unwrapper, UnwrapperState, cri_record, docker_record, unix_seconds

TIME = "2026-11-30T14:05:09.123456789Z"
UNIX_S = 1796047509.123456


def docker(text: str, stream: str = "stderr", time: str = TIME) -> bytes:
    return json.dumps({"log": text, "stream": stream, "time": time}).encode()


def cri(text: str, tag: str = "F", stream: str = "stderr", time: str = TIME) -> bytes:
    return f"{time} {stream} {tag} {text}".encode()


def test_docker() -> None:
    unwrapper = Unwrapper()
    lines = [docker("one\n"), docker("\x1b[2mtwo\x1b[0m\r\n"), docker("\n"), docker("é\ufffd\n")]
    assert unwrapper.feed(lines) == ([b"one", b"\x1b[2mtwo\x1b[0m", b"", "é\ufffd".encode()], [UNIX_S] * 4)
    assert unwrapper.envelope is Envelope.DOCKER


def test_docker_with_attributes() -> None:
    assert docker_record(b'{"log":"a\\n","stream":"stdout","attrs":{"tag":"x"},"time":"%s"}' % TIME.encode())


def test_cri() -> None:
    unwrapper = Unwrapper()
    lines = [cri("one"), cri(""), f"{TIME} stdout F".encode(), cri("two", "F:x"), cri("  three F")]
    assert unwrapper.feed(lines) == ([b"one", b"", b"", b"two", b"  three F"], [UNIX_S] * 5)
    assert unwrapper.envelope is Envelope.CRI


def test_pieces_are_joined_by_stream() -> None:
    later = "2026-11-30T14:05:10+00:00"
    unwrapper = Unwrapper()
    lines = [cri("TIME", "P"), cri("other", "P", "stdout", later), cri("LINE,", "P"), cri("1", "F", time=later)]
    assert unwrapper.feed(lines) == ([b"TIMELINE,1"], [UNIX_S])
    saved = unwrapper.state()
    assert Unwrapper(saved).feed([cri(" line", "F", "stdout")]) == ([b"other line"], [UNIX_S + 1 - 0.123456])
    unwrapper = Unwrapper()
    assert unwrapper.feed([docker("TIME"), docker("LINE,1\n")]) == ([b"TIMELINE,1"], [UNIX_S])
    assert Unwrapper(saved).reset() == len("other")


def test_plain() -> None:
    unwrapper = Unwrapper()
    assert unwrapper.feed([b"TIMELINE,1", b"{"]) == ([b"TIMELINE,1", b"{"], None)
    assert unwrapper.state() == UnwrapperState(Envelope.UNKNOWN, tried=2)
    assert unwrapper.feed([b"x"] * 20) == ([b"x"] * 20, None)
    assert unwrapper.envelope is Envelope.PLAIN
    assert unwrapper.feed([cri("one")]) == ([cri("one")], None)


def test_the_first_line_may_be_a_torn_one() -> None:
    unwrapper = Unwrapper()
    assert unwrapper.feed([b'end of a record","stream":"stderr"}', docker("one\n")])[0][1] == b"one"
    assert unwrapper.envelope is Envelope.DOCKER


def test_what_is_no_record_is_given_as_it_is() -> None:
    unwrapper = Unwrapper(UnwrapperState(Envelope.DOCKER))
    assert unwrapper.feed([b"panic", docker("one\n"), b"{"]) == ([b"panic", b"one", b"{"], [None, UNIX_S, None])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"' + b'":{"' * 100_000,
        b'{"log":1,"stream":"stderr","time":"%s"}' % TIME.encode(),
        b'{"log":"a","stream":"x","time":"%s"}' % TIME.encode(),
        b'{"log":"a","stream":["stderr"],"time":"%s"}' % TIME.encode(),
        b'{"log":"a","stream":"stderr","time":"yesterday"}',
        b'{"log":"a","stream":"stderr","time":"2026-11-30T14:05:09"}',
        b'{"log":"a","stream":"stderr","time":%s}' % (b"9" * 10_000),
        b'{"log":"\xff","stream":"stderr","time":"%s"}' % TIME.encode(),
    ],
)
def test_what_is_not_dockers(line: bytes) -> None:
    assert docker_record(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"2026-11-30T14:05:09Z stderr X a",
        b"2026-11-30T14:05:09Z stdin F a",
        b"2026-11-30T14:05:09 stderr F a",
        b"2026-13-30T14:05:09Z stderr F a",
        b"2026-11-30T14:05:09Z  INFO cuzk: stderr F a",
        b"2026-11-30T\xff\xff\xff\xff\xff\xff\xff\xff\xff stderr F a",
    ],
)
def test_what_is_not_cri(line: bytes) -> None:
    assert cri_record(line) is None


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "x", "", "2026"])
def test_times_at_the_edge(text: str) -> None:
    unix_seconds(text)


@given(text=st.text(max_size=50).filter(lambda text: "\n" not in text and "\0" not in text and "\r" not in text))
def test_every_text_comes_through(text: str) -> None:
    data = text.encode("utf-8", "replace")
    assert Unwrapper().feed([docker(text + "\n")]) == ([data], [UNIX_S])
    assert Unwrapper().feed([f"{TIME} stdout F ".encode() + data]) == ([data], [UNIX_S])


def damaged(at: int, by: bytes) -> bytes:
    record = docker("a\n")
    return record[:at] + by + record[at + 1 :]


RECORDS = st.one_of(
    st.binary(max_size=60),
    st.builds(
        docker,
        st.text(max_size=10),
        st.sampled_from(["stdout", "stderr", "x"]),
        st.sampled_from([TIME, "x", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.9999999Z"]),
    ),
    st.builds(cri, st.text(max_size=10), st.sampled_from(["F", "P", "P:1", "X"]), st.sampled_from(["stdout", "x"])),
    st.builds(damaged, st.integers(0, 90), st.binary(max_size=2)),
)


@given(lines=st.lists(RECORDS, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_whatever_comes(lines: list[bytes], cuts: list[int]) -> None:
    """No exception; as many times as lines; and how the lines come makes no difference."""
    whole = Unwrapper()
    expected, _ = whole.feed(lines)
    given_lines: list[bytes] = []
    unwrapper = Unwrapper()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(lines)], strict=True):
        part, times = unwrapper.feed(lines[start:end])
        assert times is None or len(times) == len(part)
        given_lines += part
        unwrapper = Unwrapper(unwrapper.state())
    assert given_lines == expected
    assert unwrapper.state() == whole.state()


def test_a_line_without_end_takes_no_memory() -> None:
    unwrapper = Unwrapper()
    piece = cri("x" * 16384, "P")
    tracemalloc.start()
    try:
        for _ in range(6400):
            assert unwrapper.feed([piece])[0] == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert unwrapper.feed([cri("", "F")])[0] == [b"x" * 65536]
    assert unwrapper.overlong_lines == 1
