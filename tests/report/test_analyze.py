"""Whole logs through `analyze`: published figures, what the log's writer noted, and the live pipeline's own."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cuzk_agent.report.analyze import Analysis, Options, analyze
from cuzk_agent.report.arguments import Bound
from cuzk_agent.report.model import EngineReport, GpuReport, Report
from cuzk_agent.timeline.lines import TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import LineParser
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import Boundary, Cause, GpuState, LatencyBasis, ProofOutcome, TimelineState, UnitOutcome

DATA = Path(__file__).parent.parent / "data"
ALL = (
    "seeds/isolated3.log",
    "seeds/p9-c15.log.xz",
    "h200/starved-gw1.log.xz",
    "h200/two-gpus.log.xz",
    "daemon/two-gpus-mixed.log.xz",
    "daemon/failing.log.xz",
    "daemon/crash.log.xz",
    "daemon/nocolour.log.xz",
    "daemon/trickle.log.xz",
    "torn/calm.log.xz",
    "torn/busy.log.xz",
)


def report_on(name: str, **options: Any) -> Report:
    report, fault = analyze([str(DATA / name)], Options(**options))
    assert fault is None
    return report


def engine_of(name: str, **options: Any) -> EngineReport:
    (engine,) = report_on(name, **options).engines
    return engine


def lines_of(name: str) -> list[bytes]:
    data = (DATA / name).read_bytes()
    return (lzma.decompress(data) if name.endswith(".xz") else data).splitlines()


def schema() -> Any:
    return json.loads(resources.files("cuzk_agent.report").joinpath("analyze.schema.json").read_text())


# --- what a log is wrapped in ------------------------------------------------------------------------------------


def docker(line: str, time: str) -> str:
    return json.dumps({"log": line + "\n", "stream": "stderr", "time": time}) + "\n"


def cri(line: str, time: str) -> str:
    half = len(line) // 2
    return f"{time} stderr P {line[:half]}\n{time} stderr F {line[half:]}\n"


@pytest.mark.parametrize("wrapped", [docker, cri])
@pytest.mark.parametrize("name", ["seeds/isolated3.log", "daemon/two-gpus-mixed.log.xz"])
def test_a_container_s_log_is_as_good(name: str, wrapped: Callable[[str, str], str], tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    now_ms = 0
    with path.open("w") as log:
        for line in lines_of(name):
            now_ms = max(now_ms, int(line.split(b",")[1])) if line.startswith(b"TIMELINE,") else now_ms
            time = datetime(2026, 11, 30, 14, tzinfo=UTC) + timedelta(milliseconds=now_ms + 2)
            log.write(wrapped(line.decode(), time.isoformat(timespec="microseconds")))
    report, fault = analyze([str(path)])
    assert fault is None
    plain = report_on(name)
    assert report.lines == plain.lines
    found = [engine.to_json() for engine in report.engines]
    expected = [engine.to_json() for engine in plain.engines]
    if name.startswith("seeds"):
        # The container knew what the lines don't tell.
        start_s = datetime(2026, 11, 30, 14, tzinfo=UTC).timestamp() + 0.002
        assert found[0]["start_unix_seconds"] == pytest.approx(start_s, abs=1e-6)
        for engine in (found[0], expected[0]):
            assert engine.pop("evidence")["wall_clock"] is (engine is found[0])
            assert (engine.pop("start_unix_seconds") is None) is (engine.pop("start_uncertainty_seconds") is None)
    assert found == expected


# --- published figures ------------------------------------------------------------------------------------------


def test_the_published_table_of_three_proofs() -> None:
    found = report_on("seeds/isolated3.log").to_json()["engines"][0]
    keys = ("synth_start_ms", "synth_end_ms", "gpu_start_ms", "gpu_end_ms", "gap_before_ms", "partitions", "outcome")
    assert [tuple(job[key] for key in keys) for job in found["jobs"]] == [
        (82678, 121608, 121612, 150866, 0, 1, "proved"),
        (82657, 130607, 150881, 182863, 15, 1, "proved"),
        (155012, 199428, 199432, 226633, 16569, 1, "proved"),
    ]
    assert found["synth"]["mean_ms"] == pytest.approx(43_800, abs=50)
    assert found["gpu_span"]["mean_ms"] == pytest.approx(29_500, abs=50)
    gpu = found["gpus"]["unknown"]
    assert gpu["logged_utilization"] == pytest.approx(0.842, abs=0.0005)
    assert gpu["run_utilization"] == pytest.approx(0.614, abs=0.0005)
    assert gpu["gaps"]["by_cause_ms"] == {
        **dict.fromkeys([cause.value for cause in Cause], 0),
        "starved": 16565,
        "handoff": 15 + 4,
    }
    (long,) = gpu["long_gaps"]
    assert long["by_cause_ms"] == {"starved": 16565, "handoff": 4}


def test_the_published_figures_of_fifteen_proofs() -> None:
    found = report_on("seeds/p9-c15.log.xz").to_json()["engines"][0]
    gpu = found["gpus"]["unknown"]
    assert (gpu["spans"], gpu["busy_ms"], gpu["gap_ms"]) == (150, 550_800, 60_500)
    assert (gpu["gaps"]["count"], round(gpu["gaps"]["mean_ms"]), gpu["gaps"]["max_ms"]) == (149, 406, 3813)
    assert gpu["logged_utilization"] == pytest.approx(0.901, abs=0.0005)
    assert (found["synth"]["mean_ms"], found["synth"]["p50_ms"]) == (
        pytest.approx(36_200, abs=50),
        pytest.approx(36_600, abs=50),
    )
    assert [(gap["duration_ms"], gap["job_before"][:8], gap["job_after"][:8]) for gap in gpu["long_gaps"]] == [
        (3813, "7bc11acd", "7bc11acd"),
        (1837, "dddfc7b6", "dddfc7b6"),
        (897, "dddfc7b6", "dddfc7b6"),
        (1053, "4892681b", "4892681b"),
        (962, "4892681b", "4892681b"),
        (948, "d4e55e0d", "d4e55e0d"),
    ]
    assert {gap["boundary"] for gap in gpu["long_gaps"]} == {"within_job"}
    assert (found["throughput"]["proofs"], found["throughput"]["partitions"]) == (15, 150)
    assert found["verdict"]["bound_by"] == "starved"
    assert found["verdict"]["supply_units_per_second"] == pytest.approx(0.246, abs=0.0005)
    assert found["verdict"]["demand_units_per_second"] == pytest.approx(150 / 550.8)


def test_two_gpus_on_real_hardware() -> None:
    engine = engine_of("h200/two-gpus.log.xz")
    told = {
        name: (gpu.busy_ms, gpu.gap_ms, gpu.gaps.count, gpu.gaps.max_ms, gpu.open_gap_ms)
        for name, gpu in engine.gpus.items()
    }
    assert told == {"0": (50196, 20863, 22, 2588, 0), "1": (51450, 17818, 19, 2765, 69)}


def test_logged_utilization_of_one_starved_gpu() -> None:
    gpu = engine_of("h200/starved-gw1.log.xz").gpus["0"]
    assert gpu.logged_utilization == pytest.approx(0.934, abs=0.001)
    assert gpu.kernel_utilization == pytest.approx(0.604, abs=0.01)


# --- the live pipeline's own figures ----------------------------------------------------------------------------


def live(name: str) -> Pipeline:
    """An agent that reads the log while it is written, a few lines at a time, and looks at the clock after each."""
    starts = [engine.start_unix_s or 1_796_049_000.0 for engine in report_on(name).engines]
    pipeline, parser = Pipeline(), LineParser()
    lines, now_s, engine = lines_of(name), starts[0], 0
    for at in range(0, len(lines), 7):
        batch = lines[at : at + 7]
        for value in (value for line in batch for value in parser.feed(line)):
            if isinstance(value, TracingLine):
                now_s = max(now_s, value.unix_ms / 1000)
                engine = max(index for index, start_s in enumerate(starts) if not index or start_s <= now_s + 0.1)
            elif isinstance(value, TimelineEvent):
                now_s = max(now_s, starts[engine] + value.offset_ms / 1000)
        pipeline.feed(batch, Arrival(now_s - 1_795_000_000, now_s, live=True))
        pipeline.settle(now_s - 1_795_000_000, now_s)
    pipeline.finish()
    return pipeline


def check_gpu(found: Sequence[GpuReport], gpu: GpuState) -> None:
    assert sum(each.spans for each in found) == gpu.spans
    assert sum(each.busy_ms for each in found) == round(gpu.busy_seconds * 1000)
    for cause in Cause:
        assert sum(each.idle_ms[cause] for each in found) == round(gpu.idle_seconds[cause] * 1000)
    for boundary in Boundary:
        told_ms = sum(each.gap_by_boundary_ms[boundary] for each in found)
        assert told_ms == round(gpu.boundary_seconds[boundary] * 1000)
    assert sum(each.gaps.count for each in found) == sum(sum(each.counts) for each in gpu.gap_seconds.values())
    kernels_ms = [each.kernel_ms for each in found if each.kernel_ms is not None]
    assert (sum(kernels_ms) if kernels_ms else None) == (
        None if gpu.kernel_seconds is None else round(gpu.kernel_seconds * 1000)
    )
    for reason, seconds in gpu.wasted_seconds.items():
        assert sum(each.wasted_ms[reason] for each in found) == pytest.approx(seconds * 1000)


def check_proofs(engines: Sequence[EngineReport], state: TimelineState) -> None:
    for basis in LatencyBasis:
        by_kind = {kind: histogram for (kind, each), histogram in state.proof_latency_seconds.items() if each is basis}
        for kind, histogram in by_kind.items():
            values = [engine.proofs[basis][kind] for engine in engines if kind in engine.proofs.get(basis, {})]
            assert sum(each.count for each in values) == sum(histogram.counts)
            assert sum(each.sum_ms for each in values) == pytest.approx(histogram.sum_seconds * 1000)


@pytest.mark.parametrize("name", ALL)
def test_it_says_what_the_live_metrics_say(name: str) -> None:
    state, engines = live(name).state(), report_on(name).engines
    assert state.engine_restarts == len(engines) - 1
    for gpu_name, gpu in state.gpus.items():
        check_gpu([engine.gpus[gpu_name] for engine in engines if gpu_name in engine.gpus], gpu)
    assert sum(engine.lines.timeline for engine in engines) == sum(state.events.values())
    assert sum(engine.lines.recovered for engine in engines) == state.torn_recovered
    for kind, histogram in state.synth_seconds.items():
        assert sum(engine.synth[kind].count for engine in engines if kind in engine.synth) == sum(histogram.counts)
    for kind, histogram in state.span_seconds.items():
        found_ms = sum(engine.gpu_span[kind].sum_ms for engine in engines if kind in engine.gpu_span)
        assert found_ms == pytest.approx(histogram.sum_seconds * 1000)
    check_proofs(engines, state)
    for outcome in ProofOutcome:
        told = sum(count for (_, each), count in state.proof_outcomes.items() if each is outcome)
        assert sum(engine.proof_outcomes[outcome] for engine in engines) == told
    if not name.startswith("torn/"):
        # In these units are restored by late lines, which the counters must not take back.
        for unit_outcome in UnitOutcome:
            told = state.unit_outcomes[unit_outcome]
            assert sum(engine.unit_outcomes[unit_outcome] for engine in engines) == told
    trouble = Counter[tuple[str, str]]()
    for engine in engines:
        trouble.update(engine.trouble)
    assert trouble == Counter({key: count for key, count in state.trouble.items() if count})


@pytest.mark.parametrize("name", ALL)
def test_time_adds_up(name: str) -> None:
    for engine in report_on(name).engines:
        for gpu in engine.gpus.values():
            assert gpu.busy_ms + sum(gpu.idle_ms.values()) == engine.end_ms - engine.start_ms
            assert sum(gpu.gap_by_cause_ms.values()) == sum(gpu.gap_by_boundary_ms.values()) == gpu.gap_ms
            assert gpu.run_busy_ms <= gpu.busy_ms
        # Units that never end have no share of their own yet.
        shares_ms = sum(job.busy_ms for job in engine.jobs)
        assert shares_ms <= sum(gpu.busy_ms for gpu in engine.gpus.values()) + 1e-6
        if not any(job.outcome is None for job in engine.jobs):
            assert shares_ms == pytest.approx(sum(gpu.busy_ms for gpu in engine.gpus.values()))
        assert sum(job.gap_ms for job in engine.jobs) == sum(gpu.gap_ms for gpu in engine.gpus.values())


@pytest.mark.parametrize("name", ALL)
def test_the_json_is_as_its_schema_says(name: str) -> None:
    found = json.loads(json.dumps(report_on(name).to_json()))
    jsonschema.Draft202012Validator(schema()).validate(found)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


# --- chips ------------------------------------------------------------------------------------------------------


def recorded(name: str) -> str:
    return str(DATA / f"h200/{name}.nvml.jsonl.xz")


def test_chips_of_two_gpus() -> None:
    engine = engine_of(
        "h200/two-gpus.log.xz", recordings={"0": recorded("two-gpus.gpu0"), "1": recorded("two-gpus.gpu1")}
    )
    chips = [engine.gpus[name].chip for name in ("0", "1")]
    for chip, busy_s, occupancy, unlogged_s in zip(chips, (34.84, 39.78), (0.694, 0.763), (0.0, 0.5), strict=True):
        assert chip is not None
        assert chip.busy_ms / 1000 == pytest.approx(busy_s, rel=0.02)
        assert chip.span_occupancy == pytest.approx(occupancy, abs=0.01)
        assert chip.unlogged_busy_ms / 1000 == pytest.approx(unlogged_s, abs=0.02)
        assert chip.sampled_ms / 75_233 == pytest.approx(1, abs=0.01)
    assert "Busy on the log is not busy on the chip: in spans it was 72.6% busy." in engine.verdict.text


def test_the_chip_of_one_gpu() -> None:
    found = engine_of("h200/starved-gw1.log.xz", recordings={"0": recorded("starved-gw1")})
    chip = found.gpus["0"].chip
    assert chip is not None
    # From first to last kernel, 75 s, the truth is 60.4 %.
    assert chip.busy_ms / 75_005 == pytest.approx(0.604, abs=0.015)
    assert chip.unlogged_busy_ms == pytest.approx(0, abs=20)
    jsonschema.Draft202012Validator(schema()).validate(
        json.loads(
            json.dumps(report_on("h200/starved-gw1.log.xz", recordings={"0": recorded("starved-gw1")}).to_json())
        )
    )


def test_chips_of_stretches_add_up() -> None:
    recordings = {"0": recorded("two-gpus.gpu0"), "1": recorded("two-gpus.gpu1")}
    border = Bound(40.0, wall_clock=False)
    parts = [
        engine_of("h200/two-gpus.log.xz", recordings=recordings, **bounds)
        for bounds in ({"end": border}, {"start": border})
    ]
    whole = engine_of("h200/two-gpus.log.xz", recordings=recordings)
    for name, gpu in whole.gpus.items():
        chips = [part.gpus[name].chip for part in parts]
        assert gpu.chip is not None
        assert sum(chip.sampled_ms for chip in chips if chip) == pytest.approx(gpu.chip.sampled_ms, abs=1)
        assert sum(chip.busy_ms for chip in chips if chip) == pytest.approx(gpu.chip.busy_ms, abs=1)
        assert sum(chip.span_busy_ms for chip in chips if chip) == pytest.approx(gpu.chip.span_busy_ms, abs=300)


def test_samples_of_another_time_say_nothing() -> None:
    assert engine_of("h200/starved-gw1.log.xz", recordings={"0": recorded("two-gpus.gpu0")}).gpus["0"].chip is None
    # Without a wall clock nothing can be set beside the log.
    assert engine_of("seeds/isolated3.log", recordings={"0": recorded("starved-gw1")}).gpus["unknown"].chip is None


# --- several engines --------------------------------------------------------------------------------------------


def test_a_crashed_and_restarted_daemon_is_two_engines() -> None:
    first, second = report_on("daemon/crash.log.xz").engines
    assert first.proof_outcomes[ProofOutcome.ABANDONED] > 0
    assert second.proof_outcomes[ProofOutcome.ABANDONED] == 0
    assert first.start_unix_s is not None
    assert second.start_unix_s is not None
    assert second.start_unix_s - first.start_unix_s > 1.5


def test_two_logs_one_after_the_other_are_two_engines(tmp_path: Path) -> None:
    names = ("daemon/trickle.log.xz", "daemon/two-gpus-mixed.log.xz")
    (tmp_path / "log").write_bytes(b"".join(b"%s\n" % line for name in names for line in lines_of(name)))
    together, fault = analyze([str(tmp_path / "log")])
    assert fault is None
    alone = [engine_of(name) for name in names]
    assert len(together.engines) == 2
    for found, single in zip(together.engines, alone, strict=True):
        assert found.lines == single.lines
        assert found.jobs == single.jobs
        for name, gpu in single.gpus.items():
            assert (found.gpus[name].busy_ms, found.gpus[name].gap_ms) == (gpu.busy_ms, gpu.gap_ms)
            assert found.gpus[name].kernel_ms == gpu.kernel_ms


def test_two_parts_of_one_log_are_one_engine(tmp_path: Path) -> None:
    lines = lines_of("daemon/two-gpus-mixed.log.xz")
    data = b"".join(b"%s\n" % line for line in lines)
    # Cut within a line, as copying and truncating may.
    (tmp_path / "log.1").write_bytes(data[:100_001])
    (tmp_path / "log").write_bytes(data[100_001:])
    parts = [str(tmp_path / "log.1"), str(tmp_path / "log")]
    found, _ = analyze(parts)
    assert [engine.to_json() for engine in found.engines] == [engine_of("daemon/two-gpus-mixed.log.xz").to_json()]


# --- a stretch --------------------------------------------------------------------------------------------------


def stretches(name: str, *borders_s: float) -> Iterator[EngineReport]:
    for start_s, end_s in zip((None, *borders_s), (*borders_s, None), strict=True):
        yield engine_of(
            name,
            start=None if start_s is None else Bound(start_s, wall_clock=False),
            end=None if end_s is None else Bound(end_s, wall_clock=False),
        )


@pytest.mark.parametrize(
    ("name", "borders_s"),
    [
        ("seeds/p9-c15.log.xz", (170.0, 400.0)),  # The first lies in the longest gap.
        ("daemon/two-gpus-mixed.log.xz", (1.0, 1.5, 2.25)),
        ("daemon/failing.log.xz", (1.111,)),
    ],
)
def test_stretches_add_up_to_the_whole(name: str, borders_s: tuple[float, ...]) -> None:
    whole, parts = engine_of(name), list(stretches(name, *borders_s))
    assert [part.end_ms for part in parts[:-1]] == [round(border * 1000) for border in borders_s]
    assert [part.start_ms for part in parts[1:]] == [round(border * 1000) for border in borders_s]
    for gpu_name, gpu in whole.gpus.items():
        found = [part.gpus[gpu_name] for part in parts]
        assert sum(each.busy_ms for each in found) == gpu.busy_ms
        assert sum(each.run_busy_ms for each in found) == gpu.run_busy_ms
        assert sum(each.gap_ms for each in found) == gpu.gap_ms
        assert sum(each.spans for each in found) == gpu.spans
        for reason, wasted_ms in gpu.wasted_ms.items():
            assert sum(each.wasted_ms[reason] for each in found) == pytest.approx(wasted_ms)
        for cause in Cause:
            assert sum(each.idle_ms[cause] for each in found) == gpu.idle_ms[cause]
            assert sum(each.gap_by_cause_ms[cause] for each in found) == gpu.gap_by_cause_ms[cause]
        assert sum(each.kernel_ms or 0 for each in found) == (gpu.kernel_ms or 0)
    for kind, values in whole.synth.items():
        assert sum(part.synth[kind].count for part in parts if kind in part.synth) == values.count
    assert sum(len(part.jobs) for part in parts) == len(whole.jobs)
    assert sum(part.lines.timeline for part in parts) == whole.lines.timeline
    for phase, (count, _) in whole.kernel_phases.items():
        assert sum(part.kernel_phases.get(phase, (0, 0.0))[0] for part in parts) == count


def test_a_stretch_of_the_wall_clock() -> None:
    whole = engine_of("daemon/two-gpus-mixed.log.xz")
    assert whole.start_unix_s is not None
    found = engine_of("daemon/two-gpus-mixed.log.xz", start=Bound(whole.start_unix_s + 1, wall_clock=True))
    same = engine_of("daemon/two-gpus-mixed.log.xz", start=Bound(1, wall_clock=False))
    assert found.to_json() == same.to_json()


def test_a_stretch_beside_the_log_holds_no_engine() -> None:
    assert report_on("seeds/p9-c15.log.xz", start=Bound(7000, wall_clock=False)).engines == ()
    # Nothing in this log tells what time it is.
    assert report_on("seeds/p9-c15.log.xz", start=Bound(1_796_049_000, wall_clock=True)).engines == ()
    assert report_on("seeds/p9-c15.log.xz", end=Bound(1_796_049_000, wall_clock=True)).engines == ()


# --- what is not complete ---------------------------------------------------------------------------------------


def test_a_log_that_ends_in_mid_work() -> None:
    analysis = Analysis(Options())
    analysis.feed(
        [
            b"TIMELINE,1000,SYNTH_START,a,partition=0",
            b"TIMELINE,3000,SYNTH_END,a,partition=0,synth_ms=2000",
            b"TIMELINE,3000,GPU_QUEUE,a,partition=0",
            b"TIMELINE,3000,GPU_PICKUP,a,worker=0,partition=0",
            b"TIMELINE,3000,GPU_START,a,worker=0,partition=0",
            b"TIMELINE,3500,SYNTH_START,b,partition=0",
            b"2026-11-30T14:00:00.000000Z  INFO cuzk_core::engine: job enqueued job_id=c proof_kind=porep-c2",
        ]
    )
    (engine,) = analysis.finish()
    assert [(job.job_id, job.outcome) for job in engine.jobs] == [("a", None), ("b", None), ("c", None)]
    gpu = engine.gpus["unknown"]
    assert (gpu.spans, gpu.open_gap_ms, gpu.gaps.count) == (1, 0, 0)
    assert gpu.run_busy_ms == 500
    assert gpu.run_utilization == pytest.approx(500 / 2500)


def test_an_id_that_runs_again_is_another_row() -> None:
    analysis = Analysis(Options())
    for at_ms in (0, 10_000):
        analysis.feed(
            [
                b"TIMELINE,%d,SYNTH_START,winpost-1,kind=winning-post" % at_ms,
                b"TIMELINE,%d,SYNTH_END,winpost-1,synth_ms=1000" % (at_ms + 1000),
                b"TIMELINE,%d,GPU_PICKUP,winpost-1,worker=0" % (at_ms + 1000),
                b"TIMELINE,%d,GPU_START,winpost-1,worker=0" % (at_ms + 1000),
                b"TIMELINE,%d,GPU_END,winpost-1,worker=0,gpu_ms=500" % (at_ms + 1500),
            ]
        )
    (engine,) = analysis.finish()
    assert [(job.incarnation, job.gpu_start_ms, job.gap_before_ms, job.total_ms) for job in engine.jobs] == [
        (0, 1000, 0, 1500),
        (1, 11000, 9500, 1500),
    ]
    assert engine.gpus["unknown"].wasted_ms["repeated"] == 500


def test_long_gaps_are_those_that_were_asked_for() -> None:
    assert [
        len(engine_of("seeds/p9-c15.log.xz", long_gap_ms=ms).gpus["unknown"].long_gaps) for ms in (0, 3813, 3814)
    ] == [
        149,
        1,
        0,
    ]
