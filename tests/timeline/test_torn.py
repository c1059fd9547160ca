from __future__ import annotations

import lzma
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.timeline import torn
from cuzk_agent.timeline.lines import KernelTiming, LogLine, TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import LineParser

DATA = Path(__file__).parent.parent / "data" / "torn"

CAPTURES = {"calm": 2, "busy": 125, "storm": 350, "storm-ids": 657}
"""Captured logs of colliding writers, and how many of their TIMELINE lines are torn."""


def parse(log: bytes) -> tuple[list[LogLine], LineParser]:
    parser = LineParser()
    out: list[LogLine] = []
    for line in log.split(b"\n"):
        out += parser.feed(line)
    out += parser.flush()
    return out, parser


def events(out: list[LogLine]) -> list[TimelineEvent]:
    return [value for value in out if isinstance(value, TimelineEvent)]


def load(name: str) -> bytes:
    return lzma.decompress((DATA / f"{name}.xz").read_bytes())


@pytest.mark.parametrize("coloured", [True, False], ids=["coloured", "plain"])
@pytest.mark.parametrize("name", CAPTURES)
def test_every_line_of_a_capture_is_recovered_and_none_invented(name: str, coloured: bool) -> None:
    log = load(f"{name}.log")
    if not coloured:
        log = re.sub(rb"\x1b\[[0-9;]*m", b"", log)
    out, parser = parse(log)
    meant, _ = parse(load(f"{name}.truth"))
    # Truth was noted down outside of the lock that orders the log, so only the order differs.
    assert Counter(events(out)) == Counter(events(meant))
    stats = parser.stats()
    assert (stats.torn_recovered, stats.torn_lost, stats.unparsed) == (CAPTURES[name], 0, {})
    # Others' lines survive whole, wherever they landed.
    assert sum(isinstance(value, TracingLine) for value in out) == len(re.findall(rb"Z(?:\x1b\[0m)? .*INFO", log))
    assert sum(isinstance(value, KernelTiming) for value in out) == log.count(b"CUZK_TIMING: ")


JOB = "wdpost-1000-3-[3 253 250 0 17 9 201 77]"
FRAGMENTS = [
    b"TIMELINE,",
    b"12345",
    b",",
    b"GPU_END",
    b",",
    JOB.encode(),
    b",",
    b"worker=1,partition=3,gpu_ms=67",
    b"\n",
]
EVENT = TimelineEvent(12345, "GPU_END", JOB, 3, 1, None, None, 67)

PLAIN = (
    b"2026-11-30T14:49:32.048362Z  INFO cuzk_core::engine: FIN_TIMING finalizer partition worker_id=0 finish_ms=506\n"
)
COLOURED = (
    b"\x1b[2m2026-11-30T14:49:32.048362Z\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mcuzk_core::engine\x1b[0m\x1b[2m:\x1b[0m "
    b"partition GPU prove complete \x1b[3mjob_id\x1b[0m\x1b[2m=\x1b[0mporep-1000-2041 "
    b"\x1b[3mpartition\x1b[0m\x1b[2m=\x1b[0m4 \x1b[3mgpu_ms\x1b[0m\x1b[2m=\x1b[0m73\n"
)
KERNEL = b"CUZK_TIMING: gpu_tid=0 ntt_msm_h_ms=575\n"
OTHER_KERNEL = b"CUZK_NTT_H: d_b_alloc=3ms ntt_kernels=17ms\n"
KEYLESS_ERROR = (
    b"2026-11-30T14:49:32.048362Z ERROR gpu_worker{worker_id=0 gpu=0 job_id=porep-1000-7 partition=Some(2)}: "
    b"cuzk_core::engine: GPU prove start failed error=CUDA error: out of memory\n"
    b"  at groth16_cuda.cu:512\noom\nretry=0\n"
)
KEYED_ERROR = (
    b"2026-11-30T14:49:32.048362Z ERROR cuzk_core::engine: partition GPU proving failed error=line one\n"
    b"worker=7,partition=7\n,partition=2\nfoo=bar job_id=porep-1000-7 partition=2\n"
)
INTRUDERS = [PLAIN, COLOURED, KERNEL, OTHER_KERNEL, KEYLESS_ERROR, KEYED_ERROR]


@pytest.mark.parametrize("intruder", INTRUDERS)
@pytest.mark.parametrize("cut", range(1, len(FRAGMENTS)))
def test_a_line_cut_at_any_border(cut: int, intruder: bytes) -> None:
    log = b"".join(FRAGMENTS[:cut]) + intruder + b"".join(FRAGMENTS[cut:])
    out, parser = parse(log)
    assert events(out) == [EVENT]
    assert parser.stats().torn_recovered == 1
    alone, _ = parse(intruder)
    assert [value for value in out if value != EVENT] == alone


def test_an_event_is_out_as_soon_as_its_detail_is_there() -> None:
    parser = LineParser()
    assert parser.feed(b"TIMELINE,12" + KERNEL[:-1]) == (KernelTiming({"gpu_tid": 0, "ntt_msm_h_ms": 575}),)
    rest = b",GPU_QUEUE,snap-1000-7,monolithic" + KERNEL[:-1]
    assert parser.feed(rest)[0] == TimelineEvent(12, "GPU_QUEUE", "snap-1000-7", None, None, None, None, None)
    assert parser.feed(b"") == ()


def test_a_new_timeline_line_ends_the_wait() -> None:
    out, parser = parse(b"TIMELINE,1,GPU_END," + KERNEL + b"TIMELINE,2,GPU_QUEUE,a,partition=1\na,worker=0,gpu_ms=3\n")
    assert [event.offset_ms for event in events(out)] == [2]
    assert parser.stats().torn_lost == 1


def test_the_end_of_a_log_ends_the_wait() -> None:
    _, parser = parse(b"TIMELINE,1,GPU_END," + KERNEL)
    assert parser.stats().torn_lost == 1


def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torn, "MAX_OPEN_LINES", 3)
    out, parser = parse(b"TIMELINE,1,GPU_END," + KERNEL + b"text\n" * 3 + b"a,worker=0,gpu_ms=3\n")
    assert not events(out)
    assert parser.stats().torn_lost == 1
    out, _ = parse(b"TIMELINE,1,GPU_END," + KERNEL + b"text\n" * 2 + b"a,worker=0,gpu_ms=3\n")
    assert len(events(out)) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"oom",
        b"retry=0",
        b"",
        b"  at groth16_cuda.cu:512",
        b"worker=1, partition=2",
        b"1,GPU_END,a,worker=1",
        b"monolithic thing",
    ],
)
def test_other_text_is_no_rest(text: bytes) -> None:
    head = b"TIMELINE,1,GPU_START,a,"
    out, parser = parse(head + KERNEL + text + b"\n" + b"worker=1,partition=2\n")
    assert events(out) == [TimelineEvent(1, "GPU_START", "a", 2, 1, None, None, None)]
    assert parser.stats().torn_recovered == 1


def test_a_marker_inside_other_text_is_no_event() -> None:
    out, parser = parse(
        b"grep says: TIMELINE,1,GPU_END,a,worker=0,gpu_ms=3\n"
        b"2026-11-30T14:49:32.048362Z  INFO cuzk_daemon: TIMELINE,1,GPU_END,a,worker=0,gpu_ms=3\n"
        b" TIMELINE,1,GPU_END,a,worker=0,gpu_ms=3\n"
        b"TIMELINE,1,GPU_END,aTIMELINE,2,GPU_END,a,worker=0,gpu_ms=3\n"
        b"TIMELINE,1,GPU_END,TIMELINE,2,GPU_END,a,worker=0,gpu_ms=3\n"
    )
    assert not events(out)
    assert parser.stats().unparsed == {"detail": 2}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"TIMELINE,", "malformed"),
        (b"TIMELINE,12,GPU_END,a", "malformed"),
        (b"TIMELINE,-5" + KERNEL[:-1], "malformed"),
        (b"TIMELINE,-5,GPU_END,a,worker=0", "offset"),
        (b"TIMELINE,1_0,GPU_END,a,worker=0", "offset"),
        (b"TIMELINE,,GPU_END,a,worker=0", "offset"),
        (b"TIMELINE,10000000000001,GPU_END,a,worker=0", "offset"),
        (b"TIMELINE," + b"9" * 5000 + b",GPU_END,a,worker=0", "offset"),
        (b"TIMELINE,1,gpu_end,a,worker=0", "event"),
        (b"TIMELINE,1,G" + b"X" * 40 + b",a,worker=0", "event"),
        (b"TIMELINE,1,GPU_END,,worker=0", "job"),
        (b"TIMELINE,1,GPU_END," + b"j" * 257 + b",worker=0", "job"),
        (b"TIMELINE,1,GPU_END,a,", "detail"),
        (b"TIMELINE,1,GPU_END,a,worker=-1", "detail"),
        (b"TIMELINE,1,GPU_END,a,worker=10000", "detail"),
        (b"TIMELINE,1,GPU_END,a,partition=", "detail"),
        (b"TIMELINE,1,GPU_END,a,gpu_ms=10000000000", "detail"),
        (b"TIMELINE,1,GPU_END,a,gpu_ms=1.5", "detail"),
        (b"TIMELINE,1,SYNTH_START,a,kind=" + b"k" * 65, "detail"),
    ],
)
def test_what_is_rejected_and_why(line: bytes, reason: str) -> None:
    out, parser = parse(line)
    assert not events(out)
    assert reason in torn.UNPARSED_REASONS
    assert parser.stats().unparsed == {reason: 1}


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            b"TIMELINE,0,SYNTH_START,winpost-1000-5f,kind=winning-post",
            TimelineEvent(0, "SYNTH_START", "winpost-1000-5f", None, None, "winning-post", None, None),
        ),
        (
            b"TIMELINE,36900,SYNTH_END,a b,partition=9999,synth_ms=9999999999",
            TimelineEvent(36900, "SYNTH_END", "a b", 9999, None, None, 9999999999, None),
        ),
        (b"TIMELINE,5,CHAN_SEND,a,monolithic", TimelineEvent(5, "CHAN_SEND", "a", None, None, None, None, None)),
        (
            b"TIMELINE,5,SOMETHING_NEW,a,worker=1,flag,colour=deep blue",
            TimelineEvent(5, "SOMETHING_NEW", "a", None, 1, None, None, None),
        ),
        (
            b"TIMELINE,10000000000000,GPU_PICKUP,\xff\xc3\xa9,worker=0",
            TimelineEvent(10**13, "GPU_PICKUP", "\ufffdé", None, 0, None, None, None),
        ),
    ],
)
def test_whole_lines(line: bytes, event: TimelineEvent) -> None:
    assert LineParser().feed(line) == (event,)


@pytest.mark.parametrize("unit", [b"CUZK_", b"2026-11-30T00:00:00.1Z ", b"a,", b"1", b"worker=1,", b"Z  "])
def test_repetition_stays_cheap(unit: bytes) -> None:
    parser = LineParser()
    begin = time.process_time()
    for line in (
        b"TIMELINE," + unit * 50_000,
        b"TIMELINE,1,GPU_END," + KERNEL[:-1],
        unit * 50_000,
        unit * 50_000 + KERNEL,
    ):
        parser.feed(line)
    assert time.process_time() - begin < 2


job_ids = st.one_of(
    st.from_regex(r"(porep|snap|ps-porep)-1000-[0-9]{1,6}", fullmatch=True),
    st.from_regex(r"wdpost-1000-[0-9]{1,2}-\[[0-9]{1,3}( [0-9]{1,3}){0,12}\]", fullmatch=True),
    st.uuids().map(str),
)
small = st.integers(0, 9999)
millis = st.integers(0, 10**10 - 1)


@st.composite
def timeline_events(draw: st.DrawFn) -> tuple[TimelineEvent, list[bytes]]:
    """An event and the fragments in which the daemon writes it."""
    offset, job = draw(st.integers(0, 10**13)), draw(job_ids)
    partition = draw(st.none() | small)
    worker = kind = synth = gpu = None
    items: list[str] = []
    name = draw(st.sampled_from(sorted({"SYNTH_START", "SYNTH_END", "CHAN_SEND", "GPU_QUEUE", "GPU_START", "GPU_END"})))
    if name.startswith("GPU_") and name != "GPU_QUEUE":
        worker = draw(small)
        items.append(f"worker={worker}")
    if partition is not None:
        items.append(f"partition={partition}")
    if name == "SYNTH_START" and partition is None:
        kind = draw(st.sampled_from(["porep-c2", "snap-update", "window-post", "winning-post"]))
        items.append(f"kind={kind}")
    if name == "SYNTH_END":
        synth = draw(millis)
        items.append(f"synth_ms={synth}")
    if name == "GPU_END":
        gpu = draw(millis)
        items.append(f"gpu_ms={gpu}")
    detail = ",".join(items) or "monolithic"
    fragments = ["TIMELINE,", str(offset), ",", name, ",", job, ",", detail, "\n"]
    return TimelineEvent(offset, name, job, partition, worker, kind, synth, gpu), [f.encode() for f in fragments]


@st.composite
def torn_logs(draw: st.DrawFn) -> tuple[list[TimelineEvent], list[bytes], bytes]:
    """Events, the whole writes of others, and a log in which these land anywhere between the events' fragments."""
    drawn = draw(st.lists(timeline_events(), max_size=8))
    fragments = [fragment for _, parts in drawn for fragment in parts]
    places = st.tuples(st.integers(0, len(fragments)), st.sampled_from(INTRUDERS))
    intruders = sorted(draw(st.lists(places, max_size=40)), key=lambda place: place[0])
    log = list(fragments)
    for place, intruder in reversed(intruders):
        log.insert(place, intruder)
    return [event for event, _ in drawn], [intruder for _, intruder in intruders], b"".join(log)


@given(torn_logs())
def test_events_torn_at_random_are_all_recovered(case: tuple[list[TimelineEvent], list[bytes], bytes]) -> None:
    meant, others, log = case
    out, parser = parse(log)
    assert events(out) == meant
    stats = parser.stats()
    assert (stats.torn_lost, stats.unparsed) == (0, {})
    expected = [value for intruder in others for value in parse(intruder)[0]]
    assert [value for value in out if not isinstance(value, TimelineEvent)] == expected
