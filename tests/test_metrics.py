"""The page that Prometheus reads."""

from __future__ import annotations

import logging
import math
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from cuzk_agent.gpu.state import (
    Comparison,
    DeviceInfo,
    EnergyUse,
    GpuChip,
    Method,
    NvmlState,
    NvmlView,
    Readings,
    SourceComparison,
    SpanBusy,
)
from cuzk_agent.log.source import FollowState, ReadStats
from cuzk_agent.log.waker import Method as WakerMethod
from cuzk_agent.log.waker import WakerState
from cuzk_agent.metrics import (
    COLLECTORS,
    AgentState,
    Exposition,
    SourceView,
    prefers_openmetrics,
)
from cuzk_agent.snapshot import Keeping, Written
from cuzk_agent.timeline.state import (
    Boundary,
    Cause,
    Exemplar,
    GpuState,
    Histogram,
    LatencyBasis,
    ProofOutcome,
    Stage,
    TimelineState,
    UnitOutcome,
)
from cuzk_agent.windows import Rolling, RollingWindow

GOLDEN = Path(__file__).parent / "golden"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
KINDS = ("porep-c2", "snap-update", "window-post", "winning-post", "other")
EVENTS = ("SYNTH_START", "SYNTH_END", "CHAN_SEND", "GPU_QUEUE", "GPU_PICKUP", "GPU_START", "GPU_END", "other")
TROUBLE = ("bad_partition", "selfcheck", "memory_budget", "cuda_alloc", "srs_evicted")
SYNTH = (0.05, 0.2, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 90, 120, 180, 300)
SPAN = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8, 12, 20, 25, 30, 35, 40, 50, 70)
GAP = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 15, 30, 60, 120, 300, 600)
PROOF = (1, 2, 5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 420, 600)


def empty_histogram(bounds: Sequence[float]) -> Histogram:
    size = len(bounds) + 1
    return Histogram(tuple(map(float, bounds)), (0,) * size, 0.0, (None,) * size)


def full_histogram(bounds: Sequence[float], job_id: str = "porep-1000-2041") -> Histogram:
    """One observation in the first bucket, two in the second, and so on, each bucket with an exemplar."""
    inside = [0.0, *map(float, bounds)]
    exemplars = tuple(Exemplar(job_id, low + 0.001, 1796052334.123456 + i) for i, low in enumerate(inside))
    counts = tuple(range(1, len(inside) + 1))
    total = sum(count * exemplar.seconds for count, exemplar in zip(counts, exemplars, strict=True))
    return Histogram(tuple(map(float, bounds)), counts, total, exemplars)


def full_rolling() -> Rolling:
    window = RollingWindow()
    for i in range(100):
        window.observe(i * 10.0, 0.05 * i)
    return window.freeze(1000.0)


EMPTY = TimelineState(
    engine_running=False,
    engine_restarts=0,
    engine_settings={},
    engine_start_unix_seconds=None,
    anchor_uncertainty_seconds=None,
    last_event_unix_seconds=None,
    settled_unix_seconds=None,
    stalled_seconds=0.0,
    evidence=dict.fromkeys(("jobs", "spans", "gpu_map", "wall_clock"), False),
    events=dict.fromkeys(EVENTS, 0),
    late_events=0,
    torn_recovered=0,
    torn_lost=0,
    unparsed=dict.fromkeys(("offset", "detail"), 0),
    synth_seconds={kind: empty_histogram(SYNTH) for kind in KINDS},
    synth_active_seconds=0.0,
    ready_wait_seconds=empty_histogram(GAP),
    handoff_seconds=empty_histogram(GAP),
    span_seconds={kind: empty_histogram(SPAN) for kind in KINDS},
    kernel_phase_seconds={},
    unit_outcomes=dict.fromkeys(UnitOutcome, 0),
    proof_outcomes={(kind, outcome): 0 for kind in KINDS for outcome in ProofOutcome},
    proof_latency_seconds={(kind, basis): empty_histogram(PROOF) for kind in KINDS for basis in LatencyBasis},
    trouble={(kind, ""): 0 for kind in TROUBLE},
    srs_load_seconds=(0, 0.0),
    synth_rolling=Rolling(),
    srs_loading=0,
    in_flight=dict.fromkeys(Stage, 0),
    oldest_age_seconds={},
    jobs_open=dict.fromkeys(KINDS, 0),
    job_oldest_age_seconds={},
    gpus={},
)

EMPTY_GPU = GpuState(
    spans=0,
    busy_seconds=0.0,
    idle_seconds=dict.fromkeys(Cause, 0.0),
    wasted_seconds=dict.fromkeys(("failed", "discarded", "repeated"), 0.0),
    kernel_seconds=None,
    gap_seconds={cause: empty_histogram(GAP) for cause in Cause},
    boundary_seconds=dict.fromkeys(Boundary, 0.0),
    open_gap_seconds=None,
    gap_rolling=Rolling(),
)

FULL_GPU = GpuState(
    spans=1234,
    busy_seconds=5400.125,
    idle_seconds={cause: 10.5 + i for i, cause in enumerate(Cause)},
    wasted_seconds={"failed": 4.5, "discarded": 2.25, "repeated": 0.0},
    kernel_seconds=2801.75,
    gap_seconds={cause: full_histogram(GAP) for cause in Cause},
    boundary_seconds={Boundary.WITHIN_JOB: 12.5, Boundary.CROSS_JOB: 99.75},
    open_gap_seconds={cause: 0.25 * i for i, cause in enumerate(Cause)},
    gap_rolling=full_rolling(),
)

FULL = TimelineState(
    engine_running=True,
    engine_restarts=2,
    engine_settings={
        "num_gpus": "2",
        "gpu_workers_per_device": "2",
        "total_workers": "4",
        "pipeline_enabled": "true",
        "unheard_of": "never shown",
    },
    engine_start_unix_seconds=1796050000.5,
    anchor_uncertainty_seconds=0.0004,
    last_event_unix_seconds=1796052334.25,
    settled_unix_seconds=1796052334.0,
    stalled_seconds=0.0,
    evidence={"jobs": True, "spans": True, "gpu_map": True, "wall_clock": False},
    events={event: 1000 + i for i, event in enumerate(EVENTS)},
    late_events=3,
    torn_recovered=17,
    torn_lost=1,
    unparsed={"offset": 2, "detail": 1},
    synth_seconds={kind: full_histogram(SYNTH) for kind in KINDS},
    synth_active_seconds=5100.75,
    ready_wait_seconds=full_histogram(GAP),
    handoff_seconds=full_histogram(GAP),
    span_seconds={kind: full_histogram(SPAN) for kind in KINDS},
    kernel_phase_seconds={
        name: (1200 + i, 1000.5 + i)
        for i, name in enumerate(
            (
                "pre_lock_cpu",
                "mutex_wait",
                "ntt_msm_h",
                "barrier_wait",
                "batch_add",
                "tail_msm",
                "gpu_total",
                "prep_msm",
                "mutex_held",
                "total_start_fn",
                "b_g2_msm",
            )
        )
    },
    unit_outcomes={outcome: 10 + i for i, outcome in enumerate(UnitOutcome)},
    proof_outcomes={(kind, outcome): 7 for kind in KINDS for outcome in ProofOutcome},
    proof_latency_seconds={(kind, basis): full_histogram(PROOF) for kind in KINDS for basis in LatencyBasis},
    trouble={(kind, ""): i for i, kind in enumerate(TROUBLE)} | {("bad_partition", "1"): 2},
    srs_load_seconds=(3, 141.5),
    synth_rolling=full_rolling(),
    srs_loading=1,
    in_flight={stage: i for i, stage in enumerate(Stage)},
    oldest_age_seconds={stage: 1.5 * i for i, stage in enumerate(Stage)},
    jobs_open=dict.fromkeys(KINDS, 3),
    job_oldest_age_seconds=dict.fromkeys(KINDS, 61.5),
    gpus={"0": FULL_GPU, "1": FULL_GPU},
)

UNREAD = ReadStats(
    state=FollowState.MISSING,
    detail="/var/log/cuzk.log: No such file or directory",
    caught_up=False,
    lines=0,
    read_bytes=0,
    lag_bytes=None,
    rotations=0,
    truncations=0,
    lost_bytes=0,
    overlong_lines=0,
    nul_bytes=0,
)
READ = ReadStats(
    state=FollowState.FOLLOWING,
    detail="",
    caught_up=True,
    lines=56789,
    read_bytes=9876543,
    lag_bytes=120,
    rotations=2,
    truncations=1,
    lost_bytes=4096,
    overlong_lines=1,
    nul_bytes=512,
)


WAKER = WakerState(WakerMethod.POLL, "cannot watch /var/log: no space left on device")
ENERGY = Histogram(bounds=(500.0, 5000.0, 50000.0), counts=(0, 1, 2, 0), sum_seconds=41000.0, exemplars=(None,) * 4)

NVML = NvmlView(
    state=NvmlState.UP,
    detail="",
    gpus={
        "0": GpuChip(
            state=NvmlState.UP,
            detail="",
            info=DeviceInfo("GPU-8d3a", "NVIDIA H200", "00000000:18:00.0", "580.65.06"),
            method=Method.SAMPLES,
            busy_seconds=2500.25,
            sampled_seconds=7190.0,
            observed_seconds=7200.0,
            spans={"cuzk": SpanBusy(2400.0, 3600.5, 0.64)},
            unlogged_busy_seconds=12.5,
            energy_joules={
                EnergyUse.PROOFS: 1.5e6,
                EnergyUse.WASTED: 2.5e4,
                EnergyUse.IDLE: 3.5e5,
                EnergyUse.UNLOGGED: 4.5e3,
            },
            readings=Readings(
                memory_used_bytes=50 << 30,
                memory_total_bytes=141 << 30,
                power_watts=612.5,
                temperature_celsius=61.0,
                sm_clock_hertz=1.98e9,
                processes=2,
                pcie_bytes_per_second={"rx": 1.5e9, "tx": 2.5e8},
            ),
            throttled_seconds={"sw_power_cap": 30.5, "hw_thermal": 0.0},
            xid_errors=1,
            xid_last_unix_s=1_764_500_000.0,
            ecc_errors={"corrected": 3, "uncorrected": 0},
        ),
        "1": GpuChip(
            state=NvmlState.LOST,
            detail="nvmlDeviceGetSamples: GPU is lost",
            info=DeviceInfo("GPU-11aa", "NVIDIA H200", "00000000:2A:00.0", "580.65.06"),
            method=Method.NONE,
            busy_seconds=1.0,
            sampled_seconds=2.0,
            observed_seconds=3.0,
            spans={"cuzk": SpanBusy(1.0, 2.0, 0.5)},
            unlogged_busy_seconds=1.0,
            energy_joules=None,
            readings=Readings(),
            throttled_seconds={"sw_power_cap": 1.0},
            xid_errors=1,
            xid_last_unix_s=1_764_500_000.0,
            ecc_errors=None,
        ),
    },
    call_seconds={"nvmlDeviceGetSamples": (120, 0.168)},
    errors={("nvmlDeviceGetSamples", "GpuIsLost"): 1},
    comparisons={"cuzk": SourceComparison(Comparison.COMPARED, 0.001, 1.5)},
    proof_energy_joules={("cuzk", "porep-c2"): ENERGY},
    heartbeat_monotonic_s=1000.0,
)


KEEPING = Keeping(writes=240, errors=1, seconds=3.25, last=Written(151_552, 1_764_511_499.75))


def agent_state(timeline: TimelineState, read: ReadStats = READ, source: str = "cuzk") -> AgentState:
    view = SourceView(timeline, read, None if timeline.last_event_unix_seconds is None else 0.125)
    return AgentState({source: view}, "0.1.0", "3.11.9", nvml=NVML, keeping=KEEPING, waker=WAKER)


def page(state: AgentState, accept: str | None = None) -> str:
    body, _ = Exposition().render(accept, state)
    return body.decode()


def samples(text: str) -> dict[str, list[Sample]]:
    """The samples of an OpenMetrics page by their names."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def without_process(text: str) -> str:
    """Less what differs from run to run."""
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"(# \w+ )?process_", line))


@pytest.mark.parametrize(("accept", "name"), [(None, "metrics.txt"), (OPENMETRICS, "metrics.openmetrics.txt")])
def test_the_page_is_the_golden_one(accept: str | None, name: str, request: pytest.FixtureRequest) -> None:
    shown = without_process(page(agent_state(FULL), accept))
    if request.config.getoption("--update"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(shown)
    assert shown == (GOLDEN / name).read_text(), "if this is as it should be: pytest --update"


@pytest.mark.parametrize("timeline", [EMPTY, FULL], ids=["empty", "full"])
def test_promtool_finds_nothing_to_complain_about(timeline: TimelineState) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page(agent_state(timeline)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_both_formats_say_the_same() -> None:
    state = agent_state(FULL)
    as_text = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(without_process(page(state)))
        for sample in family.samples
    }
    as_openmetrics = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for named in samples(without_process(page(state, OPENMETRICS))).values()
        for sample in named
    }
    assert as_text == as_openmetrics
    assert len(as_text) > 500


def test_every_family_is_explained_and_named_once() -> None:
    families = [family for collect in COLLECTORS.values() for family in collect(agent_state(FULL))]
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert "\n" not in family.documentation
        assert family.samples, family.name
        assert family.name.startswith("cuzk_")
        for sample in family.samples:
            assert sample.name.startswith(family.name)
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert not sample.name.endswith("_created")
            assert "job_id" not in sample.labels
    series = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(set(series)) == len(series)


def test_a_gpu_that_cannot_be_read_shows_its_state_and_nothing_else() -> None:
    found = samples(page(agent_state(FULL), OPENMETRICS))
    about_gpu_1 = {
        name
        for name, named in found.items()
        for sample in named
        if "source" not in sample.labels and sample.labels.get("gpu") == "1"
    }
    assert about_gpu_1 == {"cuzk_gpu_info", "cuzk_nvml_up", "cuzk_nvml_state"}
    assert {sample.labels["gpu"]: sample.value for sample in found["cuzk_nvml_up"]} == {"0": 1, "1": 0}
    assert [sample.labels for sample in found["cuzk_gpu_span_busy_seconds_total"]] == [{"source": "cuzk", "gpu": "0"}]


def test_without_nvml_nothing_is_said_of_the_chips() -> None:
    state = replace(agent_state(FULL), nvml=None)
    assert not [name for name in samples(page(state, OPENMETRICS)) if "nvml" in name or "chip" in name]


def test_the_daemons_own_names_are_left_to_it() -> None:
    taken = {
        "cuzk_proofs_completed",
        "cuzk_proofs_failed",
        "cuzk_uptime_seconds",
        "cuzk_queue_depth",
        "cuzk_proof_duration_seconds",
        "cuzk_running_jobs",
        "cuzk_gpu_workers",
    }
    ours = {family.name for collect in COLLECTORS.values() for family in collect(agent_state(FULL))}
    assert not ours & taken


def test_what_is_known_to_exist_is_born_at_zero() -> None:
    born = agent_state(replace(EMPTY, gpus={"0": EMPTY_GPU}), UNREAD)
    grown = agent_state(replace(FULL, gpus={"0": FULL_GPU}))
    found = samples(page(replace(born, nvml=None, keeping=Keeping()), OPENMETRICS))
    full = samples(page(replace(grown, nvml=None), OPENMETRICS))
    seen_first_when_measured = {
        "cuzk_agent_event_delay_seconds",
        "cuzk_timeline_last_event_timestamp_seconds",
        "cuzk_engine_start_timestamp_seconds",
        "cuzk_clock_anchor_uncertainty_seconds",
        "cuzk_agent_settled_timestamp_seconds",
        "cuzk_agent_read_lag_bytes",
        "cuzk_agent_state_size_bytes",
        "cuzk_agent_state_written_timestamp_seconds",
        "cuzk_partition_oldest_age_seconds",
        "cuzk_job_oldest_age_seconds",
        "cuzk_gpu_open_gap_seconds",
        "cuzk_gpu_kernel_seconds_total",
        "cuzk_kernel_phase_seconds_count",
        "cuzk_kernel_phase_seconds_sum",
        "cuzk_gpu_gap_rolling_seconds",
        "cuzk_synth_rolling_seconds",
    }
    assert full.keys() - found.keys() == seen_first_when_measured
    always_one = {
        "cuzk_engine_info",
        "cuzk_agent_info",
        "cuzk_agent_source_info",
        "cuzk_agent_source_state",
        "cuzk_agent_waker",
    }
    for name, there in found.items():
        if name.startswith("cuzk_") and name not in always_one:
            assert {sample.value for sample in there} == {0.0}, name
    for name in full.keys() - seen_first_when_measured - {"cuzk_trouble_total"}:
        if name.startswith("cuzk_"):
            assert len(found[name]) == len(full[name]), name


def test_an_agent_without_sources_shows_itself() -> None:
    found = samples(page(AgentState({}, "0.1.0", "3.11.9"), OPENMETRICS))
    assert found["cuzk_agent_info"][0].labels == {"version": "0.1.0", "python_version": "3.11.9"}
    assert "process_resident_memory_bytes" in found


def test_the_values_are_where_they_belong() -> None:
    found = samples(page(agent_state(FULL), OPENMETRICS))

    def value(name: str, **labels: str) -> float:
        (match,) = (sample for sample in found[name] if sample.labels == {"source": "cuzk", **labels})
        return match.value

    assert value("cuzk_gpu_logged_busy_seconds_total", gpu="1") == 5400.125
    assert value("cuzk_gpu_idle_seconds_total", gpu="0", cause="no_work") == 15.5
    assert value("cuzk_gpu_open_gap_seconds", gpu="0", cause="starved") == 0.5
    assert value("cuzk_gpu_gap_seconds_bucket", gpu="0", cause="fill", le="0.005") == 3
    assert value("cuzk_gpu_gap_seconds_bucket", gpu="0", cause="fill", le="+Inf") == sum(range(1, 20))
    assert value("cuzk_gpu_gap_seconds_count", gpu="0", cause="fill") == sum(range(1, 20))
    # The window holds the last 600 s of 1000: values from 2.05 to 4.95, but the totals hold all 100.
    assert value("cuzk_synth_rolling_seconds", quantile="0.5") == pytest.approx(3.5, rel=0.02)
    assert value("cuzk_synth_rolling_seconds_count") == 100
    assert value("cuzk_synth_rolling_seconds_sum") == pytest.approx(247.5)
    assert value("cuzk_trouble_total", kind="bad_partition", gpu="1") == 2
    assert value("cuzk_trouble_total", kind="srs_evicted", gpu="") == 4
    assert value("cuzk_agent_timeline_evidence", evidence="wall_clock") == 0
    assert value("cuzk_agent_source_up") == 1
    assert value("cuzk_agent_source_state", state="following") == 1
    assert value("cuzk_agent_source_state", state="missing") == 0
    assert value("cuzk_agent_torn_lines_total", outcome="lost") == 1
    (info,) = found["cuzk_engine_info"]
    assert info.labels == {
        "source": "cuzk",
        "num_gpus": "2",
        "gpu_workers_per_device": "2",
        "total_workers": "4",
        "pipeline_enabled": "true",
        "rayon_threads": "",
    }


def test_a_window_of_another_length() -> None:
    state = replace(agent_state(FULL), rolling_window_s=60.0)
    shown = samples(page(state, OPENMETRICS))["cuzk_synth_rolling_seconds"]
    (median,) = (sample.value for sample in shown if sample.labels["quantile"] == "0.5")
    assert median == pytest.approx(4.8, rel=0.02)


def exemplars_of(job_id: str, seconds: float = 1.5, unix_seconds: float | None = 1796052334.0) -> list[Sample]:
    """What the page shows of the exemplars of one observation, as parsed back."""
    exemplar = Exemplar(job_id, seconds, unix_seconds)
    histogram = Histogram((1.0, 2.0), (0, 1, 0), 1.5, (None, exemplar, None))
    found = samples(page(agent_state(replace(EMPTY, handoff_seconds=histogram)), OPENMETRICS))
    return [sample for sample in found["cuzk_handoff_seconds_bucket"] if sample.exemplar is not None]


@pytest.mark.parametrize(
    ("job_id", "shown"),
    [
        ("porep-1000-2041", "porep-1000-2041"),
        ("wdpost-1000-3-[3 253 250 0]", "wdpost-1000-3-[3 253 250 0]"),
        ('a"b\\c', "a'b\\c"),
        ('"} 1\n# EOF\n', "'} 1\N{REPLACEMENT CHARACTER}# EOF\N{REPLACEMENT CHARACTER}"),
        ("\x1b[31mred\x00\r", "\N{REPLACEMENT CHARACTER}[31mred" + 2 * "\N{REPLACEMENT CHARACTER}"),
        ("x" * 1_000_000, "x" * 122),
        ("\U0001f680" * 200, "\U0001f680" * 122),
        ("\\" * 500, "\\" * 122),
        ("\udcff\ud800", 2 * "\N{REPLACEMENT CHARACTER}"),
        ("# {} 1", "# {} 1"),
    ],
    ids=["plain", "spaces", "quotes", "newlines", "control", "1MB", "astral", "backslashes", "surrogates", "hash"],
)
def test_a_hostile_job_id_does_not_break_the_page(job_id: str, shown: str) -> None:
    (sample,) = exemplars_of(job_id)
    assert sample.labels["le"] == "2.0"
    assert sample.exemplar is not None
    assert sample.exemplar.labels == {"job_id": shown}
    assert sample.exemplar.value == 1.5


@given(st.text())
def test_any_job_id_can_be_shown(job_id: str) -> None:
    for sample in exemplars_of(job_id):
        assert sample.exemplar is not None
        assert sum(len(name) + len(value) for name, value in sample.exemplar.labels.items()) <= 128


@pytest.mark.parametrize(("job_id", "seconds"), [("", 1.5), ("job", math.nan), ("job", math.inf)])
def test_an_exemplar_that_says_nothing_is_left_out(job_id: str, seconds: float) -> None:
    assert exemplars_of(job_id, seconds) == []


@pytest.mark.parametrize("unix_seconds", [None, math.nan, math.inf, -5.0, 0.0])
def test_an_exemplar_without_a_time_is_shown_without(unix_seconds: float | None) -> None:
    (sample,) = exemplars_of("job", unix_seconds=unix_seconds)
    assert sample.exemplar is not None
    assert sample.exemplar.timestamp is None


def test_text_has_no_exemplars() -> None:
    assert "porep-1000-2041" not in page(agent_state(FULL))


def test_what_is_not_a_finite_number_is_absent() -> None:
    bad_gpu = replace(
        FULL_GPU,
        busy_seconds=math.nan,
        kernel_seconds=math.inf,
        gap_seconds={cause: replace(empty_histogram(GAP), sum_seconds=math.nan) for cause in Cause},
    )
    timeline = replace(FULL, stalled_seconds=-math.inf, gpus={"0": bad_gpu})
    found = samples(page(agent_state(timeline), OPENMETRICS))
    assert "cuzk_gpu_logged_busy_seconds_total" not in found
    assert "cuzk_gpu_kernel_seconds_total" not in found
    assert "cuzk_gpu_gap_seconds_bucket" not in found
    assert "cuzk_engine_stalled_seconds" not in found
    assert "cuzk_gpu_spans_total" in found


def test_labels_from_outside_can_always_be_written() -> None:
    timeline = replace(FULL, engine_settings={"num_gpus": "\udcff" + "9" * 10_000})
    found = samples(page(agent_state(timeline, source='a"\n\ud800'), OPENMETRICS))
    (info,) = found["cuzk_engine_info"]
    assert info.labels["source"] == 'a"' + 2 * "\N{REPLACEMENT CHARACTER}"
    assert len(info.labels["num_gpus"]) == 64


def failing(state: AgentState) -> Iterator[Metric]:
    yield GaugeMetricFamily("cuzk_half", "Half.", 1.0)
    raise RuntimeError(f"no luck with {len(state.sources)}")


def unwritable(_: AgentState) -> Iterable[Metric]:
    family = GaugeMetricFamily("cuzk_bad", "Bad.")
    family.add_metric([], "no number")  # type: ignore[arg-type]
    return [family]


@pytest.mark.parametrize("accept", [None, OPENMETRICS], ids=["text", "openmetrics"])
def test_a_failing_collector_leaves_the_rest(accept: str | None, caplog: pytest.LogCaptureFixture) -> None:
    exposition = Exposition({"first": failing, **COLLECTORS, "last": unwritable})
    bodies = [exposition.render(accept, agent_state(FULL))[0].decode() for _ in range(3)]
    whole = without_process(page(agent_state(FULL), accept)).split("# HELP cuzk_agent_collector_errors")[0]
    rest, counts = without_process(bodies[-1]).split("# HELP cuzk_agent_collector_errors")
    assert rest == whole
    assert 'cuzk_agent_collector_errors_total{collector="first"} 3.0' in counts
    assert 'cuzk_agent_collector_errors_total{collector="last"} 3.0' in counts
    assert 'cuzk_agent_collector_errors_total{collector="gpus"} 0.0' in counts
    if accept:
        assert bodies[-1].endswith("# EOF\n")
        assert bodies[-1].count("# EOF") == 1
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 2, "each distinct error once"


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4", True),
        ("text/plain;q=0.9,application/openmetrics-text;version=1.0.0;q=0.3", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=one.two", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=", False),
        ("application/openmetrics-text;version=1.0.0;q=lots", False),
        (";;;=,,;q==,=;", False),
    ],
)
def test_the_format_is_negotiated(accept: str | None, openmetrics: bool) -> None:
    assert prefers_openmetrics(accept) is openmetrics
    body, content_type = Exposition().render(accept, agent_state(EMPTY))
    assert body.endswith(b"# EOF\n") is openmetrics
    assert content_type == (
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
        if openmetrics
        else "text/plain; version=0.0.4; charset=utf-8"
    )


@given(st.text(alphabet="aplictonex/-;,=.q*0123456789 \"'\t\x00é"))
def test_no_accept_header_is_too_odd(accept: str) -> None:
    prefers_openmetrics(accept)
    prefers_openmetrics("application/openmetrics-text;" + accept)
