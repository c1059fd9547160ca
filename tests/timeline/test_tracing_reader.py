"""The reader that remembers kinds of lines reads each as it would be read alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.timeline.tracing import TracingReader, parse_tracing

AT = "2026-11-30T14:05:09.123456Z"

headers = st.sampled_from(
    [
        f"{AT}  INFO ",
        f"{AT[:19]}Z ERROR ",
        "2026-11-30T14:05:10.1Z  INFO ",
        "2026-19-30T14:05:10.1Z  INFO ",
        f"{AT}INFO ",
    ]
)
targets = st.sampled_from(
    [
        "",
        "a::b: ",
        "a::b",
        "run: ",
        "run: a::b: ",
        "gpu_worker{worker_id=1 gpu=0}: a::b: ",
        "foo k=v: ",
        "::: ",
        "a: b: ",
    ]
)
messages = st.sampled_from(
    [
        "",
        "x",
        "job enqueued",
        "SRS evicted",
        "SRS evicted now",
        "a self-check PASSED",
        "cache hit: x",
        "retry (n=3) x",
        "foo",
    ]
)
fields = st.lists(
    st.sampled_from(
        [" k=v", " k=1 w", " job_id=a", " x=", "=y", " =", " k:v", ": foo", " a b", " error=no: way", "k=v"]
    ),
    max_size=4,
).map("".join)
lines = st.builds("{}{}{}{}".format, headers, targets, messages, fields)


def coloured(line: str) -> str:
    """Colours where the daemon has them, and where it has none."""
    stamp, _, rest = line.partition(" ")
    rest = rest.replace("INFO", "\x1b[32m INFO\x1b[0m").replace("=", "\x1b[0m\x1b[2m=\x1b[0m")
    return f"\x1b[2m{stamp}\x1b[0m {rest}"


@given(st.lists(st.one_of(lines, lines.map(coloured)), max_size=40))
def test_a_line_is_read_as_if_it_stood_alone(log: list[str]) -> None:
    reader = TracingReader()
    for line in log:
        assert reader.read(line.encode()) == parse_tracing(line.encode())


def test_what_is_remembered_is_bounded() -> None:
    reader = TracingReader()
    for number in range(5000):
        reader.read(f"{AT}  INFO a::b: message {number} key=1".encode())
    assert len(reader._kinds) <= 1024
