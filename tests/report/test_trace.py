"""The trace of a run: by the rules of its format, and in agreement with what `analyze` says."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cuzk_agent.cli import Exit, main
from cuzk_agent.report.analyze import analyze
from cuzk_agent.report.inputs import Tally, read_lines
from cuzk_agent.report.model import EngineReport
from cuzk_agent.report.nvml import Recording
from cuzk_agent.report.recorder import Event, Lanes, Recorder, UnitOver, record
from cuzk_agent.report.trace import ChromeTrace
from cuzk_agent.timeline.state import Cause

DATA = Path(__file__).parent.parent / "data"
LOGS = sorted(path for folder in ("seeds", "daemon", "h200", "made") for path in (DATA / folder).glob("*.log*"))

Item = dict[str, Any]


def trace_of(log: Path, recordings: Mapping[str, str] | None = None) -> list[Item]:
    """The events of a log's trace."""
    out = io.StringIO()
    trace = ChromeTrace(out, log.name)
    samples = {gpu: Recording(path) for gpu, path in (recordings or {}).items()}
    record([str(log)], samples, trace.tell)
    trace.close()
    loaded: dict[str, Any] = json.loads(out.getvalue())
    assert loaded["otherData"] == {"log": log.name}
    events: list[Item] = loaded["traceEvents"]
    return events


def slices_of(events: list[Item], category: str | None = None) -> dict[tuple[int, int], list[Item]]:
    """The slices of each track, in their order."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and category in (None, event["cat"]):
            found[event["pid"], event["tid"]].append(event)
    return {track: sorted(items, key=lambda item: (item["ts"], -item["dur"])) for track, items in found.items()}


def names_of(events: list[Item]) -> dict[tuple[int, int], str]:
    """The names of the tracks."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_the_rules_of_the_format_hold(log: Path) -> None:
    events = trace_of(log)
    names = names_of(events)
    assert len(names) == len({tid for _, tid in names}), "viewers want numbers of threads to be unique"
    pids = {event["pid"] for event in events}
    assert {event["pid"] for event in events if event["name"] == "process_name"} == pids
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in "XCiM"
        assert ("ts" in event) is (event["ph"] != "M")
        assert isinstance(event.get("ts", 0), int)
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in names
            assert event["tid"] not in pids
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
    assert_slices_nest(events)
    assert_flows_lead_on(events)


def assert_slices_nest(events: list[Item]) -> None:
    for items in slices_of(events).values():
        open_until: list[int] = []
        for item in items:
            while open_until and open_until[-1] <= item["ts"]:
                open_until.pop()
            assert not open_until or item["ts"] + item["dur"] <= open_until[-1], "slices nest or lie apart"
            open_until.append(item["ts"] + item["dur"])


def assert_flows_lead_on(events: list[Item]) -> None:
    flows = defaultdict(list)
    for event in events:
        if "bind_id" in event:
            flows[event["bind_id"]].append(event)
    for synth, span in flows.values():
        assert synth["flow_out"]
        assert span["flow_in"]
        assert synth["ts"] + synth["dur"] <= span["ts"]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_it_says_what_analyze_says(log: Path) -> None:
    events, (report, _) = trace_of(log), analyze([str(log)])
    assert {event["pid"] for event in events} == set(range(1, len(report.engines) + 1))
    names = names_of(events)
    for pid, engine in enumerate(report.engines, 1):
        own = [event for event in events if event["pid"] == pid]
        for gpu, told in engine.gpus.items():
            idle, gaps, spans = Counter[str](), Counter[str](), []
            for track, items in slices_of(own).items():
                name = names[track]
                if name == f"GPU {gpu} idle":
                    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(items))
                    for item in items:
                        idle[item["name"]] += item["dur"] // 1000
                elif name == f"GPU {gpu} gaps":
                    for item in items:
                        assert sum(item["args"]["by_cause_ms"].values()) == item["dur"] // 1000
                        gaps.update(item["args"]["by_cause_ms"])
                elif name.startswith(f"GPU {gpu} worker"):
                    spans += [item for item in items if item["cat"] == "gpu"]
            assert +idle == +Counter({cause.value: ms for cause, ms in told.idle_ms.items()})
            assert +gaps == +Counter({cause.value: ms for cause, ms in told.gap_by_cause_ms.items()})
            assert len(spans) == told.spans
            if told.idle_ms[Cause.UNKNOWN] == 0:
                assert union_ms(spans) == told.busy_ms
        assert_counts_are_lanes(own)


def union_ms(spans: list[Item]) -> int:
    total, until = 0, 0
    for span in sorted(spans, key=lambda span: span["ts"]):
        end = span["ts"] + span["dur"]
        total += max(0, end - max(until, span["ts"]))
        until = max(until, end)
    return total // 1000


def assert_counts_are_lanes(events: list[Item]) -> None:
    """As many units are in synthesis as there are slices there, at every change of their number."""
    items = [item for items in slices_of(events, "synth").values() for item in items]
    counted = [event for event in events if event["ph"] == "C" and event["name"] == "in synthesis"]
    for event in counted:
        running = sum(item["ts"] <= event["ts"] < item["ts"] + item["dur"] for item in items)
        assert event["args"]["units"] == running


def engines_of(log: Path) -> tuple[EngineReport, ...]:
    return analyze([str(log)])[0].engines


def test_a_gap_tells_its_causes_and_its_jobs() -> None:
    events = trace_of(DATA / "seeds/p9-c15.log.xz")
    ((_, gaps),) = slices_of(events, "gap").items()
    longest = max(gaps, key=lambda gap: int(gap["dur"]))
    (told,) = [gap for gap in engines_of(DATA / "seeds/p9-c15.log.xz")[0].gpus["unknown"].long_gaps
               if gap.duration_ms * 1000 == longest["dur"]]  # fmt: skip
    assert longest["name"] == told.cause
    assert longest["ts"] == told.start_ms * 1000
    assert longest["cname"] == "thread_state_iowait"
    assert longest["args"] == {
        "by_cause_ms": {cause.value: ms for cause, ms in told.by_cause_ms.items()},
        "boundary": told.boundary.value,
        "job_before": told.job_before,
        "job_after": told.job_after,
    }


def test_a_unit_tells_its_job_partition_kind_and_outcome() -> None:
    events = trace_of(DATA / "daemon/failing.log.xz")
    spans = [item for items in slices_of(events, "gpu").values() for item in items]
    failed = [span for span in spans if span["args"]["outcome"] == "failed"]
    assert failed
    assert all(span["args"]["kind"] == "porep-c2" and span["cname"] == "terrible" for span in failed)
    assert {span["name"] for span in spans} == {f"{span['args']['job']} p{span['args']['partition']}" for span in spans}
    assert all(span["args"]["handoff_ms"] >= 0 for span in spans)
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert instants[0] == "engine starts"
    assert instants[-1] == "engine ends"
    (engine,) = engines_of(DATA / "daemon/failing.log.xz")
    for job in engine.jobs:
        assert instants.count(f"job failed: {job.job_id}") == (job.outcome == "failed")
    for span in failed:
        assert f"partition failed: {span['name']}" in instants


def test_kernels_are_within_their_span() -> None:
    events = trace_of(DATA / "daemon/two-gpus-mixed.log.xz")
    kernels = slices_of(events, "kernel")
    assert kernels
    for track, items in kernels.items():
        spans = [item for item in slices_of(events)[track] if item["cat"] == "gpu"]
        for item in items:
            assert any(
                span["ts"] <= item["ts"] and item["ts"] + item["dur"] <= span["ts"] + span["dur"] for span in spans
            )


def test_engines_are_processes_one_after_the_other() -> None:
    events = trace_of(DATA / "daemon/crash.log.xz")
    first, second = engines_of(DATA / "daemon/crash.log.xz")
    ends = {event["pid"]: event["ts"] for event in events if event["name"] in ("engine ends", "log ends")}
    starts = {event["pid"]: event["ts"] for event in events if event["name"] == "engine starts"}
    assert starts[1] == 0
    assert ends[1] == first.end_ms * 1000
    assert first.start_unix_s is not None
    assert second.start_unix_s is not None
    apart_us = (second.start_unix_s - first.start_unix_s) * 1e6
    assert starts[2] == pytest.approx(apart_us, abs=1000)
    assert min(event["ts"] for event in events if event["pid"] == 2 and event["ph"] != "M") >= ends[1]


def test_engines_without_a_wall_clock_do_not_overlap(tmp_path: Path) -> None:
    log = tmp_path / "twice.log"
    once = "".join(
        f"TIMELINE,{at},{name},a,{detail}\n"
        for at, name, detail in [
            (0, "SYNTH_START", "partition=0"),
            (1, "SYNTH_START", "partition=1"),
            (9000, "SYNTH_END", "partition=0,synth_ms=9000"),
            (9000, "GPU_PICKUP", "partition=0,worker=0"),
            (9000, "GPU_START", "partition=0,worker=0"),
            (9900, "GPU_END", "partition=0,worker=0,gpu_ms=900"),
        ]
    )
    log.write_text(once * 2, encoding="utf-8")
    events = trace_of(log)
    assert {event["pid"] for event in events} == {1, 2}
    assert max(event["ts"] for event in events if event["pid"] == 1 and event["ph"] != "M") < min(
        event["ts"] for event in events if event["pid"] == 2 and event["ph"] != "M"
    )


def test_samples_are_a_counter() -> None:
    recordings = {gpu: str(DATA / f"h200/two-gpus.gpu{gpu}.nvml.jsonl.xz") for gpu in "01"}
    events = trace_of(DATA / "h200/two-gpus.log.xz", recordings)
    report, _ = analyze([str(DATA / "h200/two-gpus.log.xz")])
    for gpu in "01":
        counted = [event for event in events if event["ph"] == "C" and event["name"] == f"GPU {gpu} chip"]
        area = sum(
            before["args"]["busy %"] / 100 * (after["ts"] - before["ts"]) / 1e6 for before, after in pairwise(counted)
        )
        # The integral of the capture's samples over the run, as the README of the data has it.
        assert area == pytest.approx({"0": 34.0, "1": 39.2}[gpu], abs=1.5)
        assert max(event["ts"] for event in counted) <= report.engines[0].end_ms * 1000


HOSTILE = '</script><img src=x onerror=alert(1)>"\u2028\u2029\x07\\'


def hostile_log(path: Path) -> Path:
    """A log with a job whose id is hostile to terminals, HTML and JSON."""
    lines = [
        f"TIMELINE,0,SYNTH_START,{HOSTILE},partition=0",
        f"TIMELINE,9000,SYNTH_END,{HOSTILE},partition=0,synth_ms=9000",
        f"TIMELINE,9001,GPU_PICKUP,{HOSTILE},partition=0,worker=0",
        f"TIMELINE,9002,GPU_START,{HOSTILE},partition=0,worker=99999999",
        f"TIMELINE,12000,GPU_END,{HOSTILE},partition=0,worker=99999999,gpu_ms=2998",
        "TIMELINE,13000,SYNTH_START,\udcff,partition=1",
    ]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape") + b"\n")
    return path


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    log = hostile_log(tmp_path / "hostile.log")
    out = io.StringIO()
    trace = ChromeTrace(out, log.name)
    record([str(log)], {}, trace.tell)
    trace.close()
    text = out.getvalue()
    assert text.isascii()
    jobs = {item["args"]["job"] for item in json.loads(text)["traceEvents"] if "job" in item.get("args", {})}
    assert jobs
    assert all(job.isprintable() for job in jobs)


def test_nothing_is_kept_but_what_is_in_flight() -> None:
    told: list[int] = []
    most = 0

    def tell(event: Event) -> None:
        if isinstance(event, UnitOver):
            told.append(event.number)

    recorder = Recorder({}, tell)
    for lines in read_lines([str(DATA / "seeds/p9-c15.log.xz")], Tally()):
        for line in lines:
            recorder.feed([line])
            assert recorder._current is None or (most := max(most, len(recorder._current[1]._flights))) < 40
    recorder.finish()
    assert len(told) == len(set(told)) == recorder.units == recorder.spans == 150
    assert recorder._current is not None
    assert not recorder._current[1]._flights


def test_lanes_are_the_lowest_that_are_free() -> None:
    lanes = Lanes()
    assert [lanes.take() for _ in range(4)] == [0, 1, 2, 3]
    lanes.give_back(2)
    lanes.give_back(0)
    assert [lanes.take() for _ in range(3)] == [0, 2, 4]


# --- the command


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, page = tmp_path / "out.json", tmp_path / "out.html"
    log = str(DATA / "h200/two-gpus.log.xz")
    nvml = str(DATA / "h200/two-gpus.gpu1.nvml.jsonl.xz")
    assert main(["trace", log, "-o", str(trace), "--html", str(page), "--nvml", nvml]) == Exit.STOPPED
    assert capsys.readouterr() == ("", "")
    assert json.loads(trace.read_text())["traceEvents"]
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"hello\n", "no TIMELINE line in 1 line; is this the log of a cuzk daemon?"),
        (bytes(range(128, 256)) * 99 + b"\n", "no TIMELINE line in it; this looks like binary data"),
        (
            b"Nov 30 14:00:00 prover-1 cuzk[4711]: TIMELINE,5,SYNTH_START,a,partition=0\n",
            "no line begins with TIMELINE, some have it after a prefix; of a journal, take `journalctl -o cat`",
        ),
        (b"TIMELINE,5,SYNTH_START,a,partition=0\n", "no proving on a GPU in it"),
    ],
)
def test_a_log_without_work_is_said_to_be_one(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, trace = tmp_path / "a.log", tmp_path / "out.json"
    log.write_bytes(content)
    assert main(["trace", str(log), "-o", str(trace)]) == Exit.NO_DATA
    assert capsys.readouterr().err == f"cuzk-agent: {log}: {complaint}\n"
    json.loads(trace.read_text())


def test_a_run_can_be_drawn_again(tmp_path: Path) -> None:
    trace, html = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ["trace", str(DATA / "seeds/isolated3.log"), "-o", str(trace), "--html", str(html)]
    assert main(arguments) == Exit.STOPPED
    drawn = trace.read_bytes(), html.read_bytes()
    # One that was interrupted is a trace as well, and so is an empty file.
    trace.write_bytes(drawn[0][:100])
    html.write_bytes(b"")
    assert main(arguments) == Exit.STOPPED
    assert (trace.read_bytes(), html.read_bytes()) == drawn
    assert main([*arguments[:2], "-o", "/dev/null"]) == Exit.STOPPED


@pytest.mark.parametrize(("wrong", "right"), [("-o", "--html"), ("--html", "-o")])
def test_a_log_is_not_overwritten(wrong: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, another, drawn = str(DATA / "seeds/isolated3.log"), tmp_path / "another.log", tmp_path / "drawn"
    another.write_bytes(b"TIMELINE,5,SYNTH_START,a,partition=0\n")
    assert main(["trace", log, right, str(drawn)]) == Exit.STOPPED
    before = another.read_bytes(), drawn.read_bytes()
    assert main(["trace", log, wrong, str(another), right, str(drawn)]) == Exit.USAGE
    expected = f"cuzk-agent: {another}: already there, and not written by trace: it is not overwritten\n"
    assert capsys.readouterr().err == expected
    assert (another.read_bytes(), drawn.read_bytes()) == before


def test_what_is_read_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_bytes((DATA / "seeds/isolated3.log").read_bytes())
    assert main(["trace", str(log), "--html", str(log)]) == Exit.USAGE
    assert log.read_bytes() == (DATA / "seeds/isolated3.log").read_bytes()
    assert "it is not overwritten" in capsys.readouterr().err
    out = str(tmp_path / "out")
    assert main(["trace", str(log), "-o", out, "--html", out]) == Exit.USAGE
    assert "Is read or written already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ([], Exit.USAGE, "nothing to write"),
        (["-o", "/nowhere/out.json"], Exit.USAGE, "No such file or directory"),
        (["-o", "{}/out.json", "--nvml", "/nowhere"], Exit.NO_DATA, "No such file or directory"),
        (["-o", "{}/out.json", "--nvml", "0=a", "--nvml", "0=b"], Exit.USAGE, "two files for one GPU"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], status: Exit, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(tmp_path) for argument in arguments]
    assert main(["trace", str(DATA / "seeds/isolated3.log"), *given]) == status
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_samples_of_another_time_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, trace = str(DATA / "daemon/crash.log.xz"), tmp_path / "out.json"
    samples = str(DATA / "h200/two-gpus.gpu0.nvml.jsonl.xz")
    assert main(["trace", log, "-o", str(trace), "--nvml", samples]) == Exit.STOPPED
    assert "none of the NVML samples is of its time" in capsys.readouterr().err
