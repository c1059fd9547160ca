"""The verdict on runs of which it is known what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cuzk_agent.cli import main
from cuzk_agent.report.analyze import analyze
from cuzk_agent.report.model import Chip, GpuReport, Supply, Values, Verdict
from cuzk_agent.report.verdict import verdict_on
from cuzk_agent.timeline.state import Boundary, Cause


@pytest.mark.parametrize(
    ("scenario", "bound_by", "words"),
    [
        ("starved", "starved", "Synthesis is "),
        ("bound", "gpu", "Bound by the GPU while there was work"),
        ("postdeadline", "gpu", "Bound by the GPU while there was work"),
        ("handoff", "handoff", "units were ready and the GPU did not start them"),
        ("idle", "no_work", "there was nothing to prove"),
        ("two-gpus", "starved", "the 2 GPUs could have taken "),
    ],
)
def test_simulated_runs(scenario: str, bound_by: str, words: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    assert main(["simulate", "--scenario", scenario, "--lines", "8000", "-o", log]) == 0
    report, _ = analyze([log])
    (engine,) = report.engines
    assert (engine.verdict.bound_by, words in engine.verdict.text) == (bound_by, True)


def gpu(
    busy_ms: int,
    by_cause_ms: Mapping[Cause, int],
    *,
    spans: int = 100,
    chip: Chip | None = None,
    kernel_ms: int | None = None,
) -> GpuReport:
    causes = {**dict.fromkeys(Cause, 0), **by_cause_ms}
    gap_ms = sum(causes.values())
    return GpuReport(
        spans=spans,
        busy_ms=busy_ms,
        run_busy_ms=busy_ms,
        run_ms=busy_ms + gap_ms,
        wasted_ms={},
        kernel_ms=kernel_ms,
        idle_ms=causes,
        gaps=Values([gap_ms] if gap_ms else []),
        gap_by_cause_ms=causes,
        gap_by_boundary_ms=dict.fromkeys(Boundary, 0),
        open_gap_ms=0,
        long_gaps=(),
        chip=chip,
    )


def verdict(*gpus: GpuReport, supply: Supply | None = None, jobs: bool = True, spans: bool = True) -> Verdict:
    return verdict_on(
        {str(index): each for index, each in enumerate(gpus)},
        supply or Supply(0.5, 1.0, 8.0, 0),
        synth=Values([16_000]),
        ready_wait=Values([10]),
        handoff=Values([250]),
        evidence={"jobs": jobs, "spans": spans},
    )


@pytest.mark.parametrize(
    ("found", "bound_by", "words"),
    [
        (verdict(gpu(99_000, {Cause.STARVED: 1000})), "gpu", "busy 99.0% of the time"),
        (verdict(gpu(50_000, {Cause.STARVED: 50_000})), "starved", "Synthesis is 50% short."),
        (verdict(gpu(50_000, {Cause.STARVED: 50_000})), "starved", "it takes 16.0 in synthesis at once"),
        (verdict(gpu(50_000, {Cause.STARVED: 50_000}), jobs=False), "starved", "does not tell of waiting jobs"),
        (
            verdict(gpu(50_000, {Cause.STARVED: 50_000}), supply=Supply(2.0, 1.0, 8.0, 7000)),
            "starved",
            "but not evenly and stood still for 7.00 s",
        ),
        (
            verdict(gpu(50_000, {Cause.STARVED: 50_000}), supply=Supply(None, 1.0, None, 0)),
            "starved",
            "waited for units",
        ),
        (verdict(gpu(50_000, {Cause.BLOCKED: 9_000, Cause.FILL: 8_000})), "blocked", "none was being synthesized"),
        (verdict(gpu(50_000, {Cause.HANDOFF: 9_000})), "handoff", "250 ms on average from pick-up to start"),
        (verdict(gpu(50_000, {Cause.FILL: 9_000})), "fill", "More proofs at once"),
        (verdict(gpu(50_000, {Cause.NO_WORK: 9_000})), "no_work", "there was nothing to prove"),
        (verdict(gpu(50_000, {Cause.UNKNOWN: 9_000})), "unknown", "the log tells nothing of its daemon"),
        (verdict(gpu(50_000, {Cause.NO_WORK: 9_000}, spans=3)), "no_work", "All this from 3 spans only."),
        (verdict(gpu(99_000, {}, kernel_ms=49_500)), "gpu", "kernels ran in 50.0% of the busy time"),
        (
            verdict(gpu(99_000, {}, chip=Chip(60_000, 99_000, 59_400, 99_000, 600))),
            "gpu",
            "in spans it was 60.0% busy. Outside of all spans a chip was busy for 600 ms",
        ),
        (verdict(gpu(0, {}, spans=0)), None, "no proving on a GPU was logged"),
        (verdict(gpu(0, {}, spans=1)), None, "no span is of any length"),
        (verdict(gpu(10, {}), spans=False), None, "writes no GPU_START and GPU_END"),
    ],
)
def test_what_it_says(found: Verdict, bound_by: str | None, words: str) -> None:
    assert (found.bound_by, words in found.text) == (bound_by, True), found.text
