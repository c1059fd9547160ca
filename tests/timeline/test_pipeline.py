"""Small logs, each with one thing that whole ones lack, and figures worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from cuzk_agent.timeline.engine import Engine, Limits
from cuzk_agent.timeline.ledger import Gap
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import (
    Boundary,
    Cause,
    LatencyBasis,
    ProofOutcome,
    Stage,
    TimelineState,
    UnitOutcome,
)
from cuzk_agent.timeline.units import Job

MADE = Path(__file__).parent.parent / "data" / "made"
UNIX_S = 1_796_040_000.0
"""When the made logs' engines start: 2026-11-30 12:00 UTC."""
HOUR_MS = 3_600_000


class Followed:
    """A pipeline and all that it told."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.gaps: list[Gap] = []
        self.jobs: list[Job] = []
        self.stopped: list[Engine] = []
        self.pipeline = Pipeline(
            limits,
            on_gap=lambda _, gap: self.gaps.append(gap),
            on_job=lambda _, job: self.jobs.append(job),
            on_stop=self.stopped.append,
        )

    def feed(self, lines: str | Iterable[str], arrival: Arrival | None = None) -> None:
        lines = lines.splitlines() if isinstance(lines, str) else lines
        self.pipeline.feed([line.encode() for line in lines], arrival)

    @property
    def engine(self) -> Engine:
        assert self.pipeline.engine is not None
        return self.pipeline.engine

    @property
    def state(self) -> TimelineState:
        return self.pipeline.state()

    def units(self) -> dict[UnitOutcome, int]:
        return {outcome: count for outcome, count in self.state.unit_outcomes.items() if count}

    def proofs(self) -> dict[tuple[str, ProofOutcome], int]:
        return {key: count for key, count in self.state.proof_outcomes.items() if count}

    def in_flight(self) -> dict[Stage, int]:
        return {stage: count for stage, count in self.state.in_flight.items() if count}

    def trouble(self) -> dict[tuple[str, str], int]:
        return {key: count for key, count in self.state.trouble.items() if count}


def follow(name: str, limits: Limits | None = None) -> Followed:
    """Reads a made log to its end, and checks what holds of every log."""
    followed = Followed(limits)
    followed.feed((MADE / f"{name}.log").read_text())
    followed.pipeline.finish()
    for engine in {*followed.stopped, followed.engine}:
        known = [one for one in engine.ledger.accounts.values() if not engine.ledger._is_no_gpu(one)]
        assert known
        for account in known:
            totals = account.totals
            assert totals.busy_ms + sum(totals.idle_ms.values()) == engine.frontier_ms - engine.ledger.start_ms
    return followed


def account(engine: Engine, gpu: str = "unknown") -> tuple[int, int, dict[str, int]]:
    """Spans, busy and idle by cause."""
    totals = engine.ledger.accounts[gpu].totals
    return totals.spans, totals.busy_ms, {cause.value: ms for cause, ms in totals.idle_ms.items() if ms}


# --- lines that are out of order, or lost -----------------------------------------------------------------------


def test_lines_a_few_milliseconds_out_of_order() -> None:
    followed = follow("disorder")
    assert account(followed.engine) == (3, 2002 + 3000 + 984, {"fill": 2000 + 3, "handoff": 5 + 2 + 4})
    assert [(gap.start_ms, gap.end_ms, gap.boundary, gap.cause) for gap in followed.gaps] == [
        (5010, 5012, Boundary.WITHIN_JOB, Cause.HANDOFF),
        (8012, 8016, Boundary.CROSS_JOB, Cause.HANDOFF),
    ]
    assert followed.units() == {UnitOutcome.PROVED: 3}
    assert followed.engine.ledger.late == 0


def test_a_lost_end_is_given_up_by_age_and_a_late_one_restores_the_outcome() -> None:
    followed = follow("lost-end", Limits(age_ms=5000))
    # 2000 to 7000 is busy; until the next span begins nobody knows.
    assert account(followed.engine) == (2, 5000 + 1000, {"fill": 1000, "unknown": 2100, "no_work": 400})
    assert [(gap.start_ms, gap.end_ms, gap.cause) for gap in followed.gaps] == [(7000, 9100, Cause.UNKNOWN)]
    # It was counted as lost, and is not counted twice.
    assert followed.units() == {UnitOutcome.LOST: 1, UnitOutcome.PROVED: 1}
    assert followed.proofs() == {("window-post", ProofOutcome.PROVED): 2}
    late = next(job for job in followed.jobs if job.job_id == "a")
    assert late.units[None].outcome is UnitOutcome.PROVED
    spans = followed.state.span_seconds["window-post"]
    assert (sum(spans.counts), spans.sum_seconds) == (2, 8.5 + 1)


def test_a_lost_end_stays_lost() -> None:
    followed = Followed(Limits(age_ms=5000))
    followed.feed((MADE / "lost-end.log").read_text().splitlines()[:-1])
    followed.feed(["TIMELINE,20000,SYNTH_START,c,kind=window-post"])
    followed.pipeline.finish()
    assert followed.units() == {UnitOutcome.LOST: 1, UnitOutcome.PROVED: 1}
    assert followed.proofs() == {("window-post", ProofOutcome.PROVED): 1, ("window-post", ProofOutcome.LOST): 1}
    assert followed.in_flight() == {Stage.SYNTH: 1}


def test_a_unit_given_up_too_soon_comes_back_and_leaves_nothing_behind() -> None:
    followed = follow("lost-synthesis", Limits(age_ms=5000))
    # Given up from 6000 to 9000; then it is where its lines say, and at last gone.
    assert account(followed.engine) == (1, 1000, {"fill": 5000, "no_work": 3000 + 1000, "handoff": 20})
    assert followed.units() == {UnitOutcome.LOST: 1}
    assert followed.in_flight() == {}
    assert followed.engine.ledger.in_flight == 0


def test_a_lost_start_is_computed_from_the_end() -> None:
    followed = follow("lost-start")
    state = followed.state
    # The second is long enough for its time to be settled before its end comes: it is clamped to the frontier.
    spans, busy_ms, _ = account(followed.engine)
    assert (spans, state.late_events) == (2, 1)
    assert 200 <= busy_ms < 200 + 1250
    assert followed.gaps[0].start_ms == 2220
    assert state.span_seconds["window-post"].sum_seconds == 5.2
    assert state.handoff_seconds.sum_seconds == pytest.approx(0.01 + 0.01)
    assert followed.units() == {UnitOutcome.PROVED: 2}


def test_lost_starts_of_synthesis_queues_and_pickups() -> None:
    followed = follow("lost-others")
    assert account(followed.engine) == (3, 3000, {"handoff": 20 + 20 + 10})
    state = followed.state
    # The first synthesis is known by its length; of the third neither end nor length.
    assert state.synth_seconds["other"].sum_seconds == 1
    assert state.synth_seconds["window-post"].sum_seconds == 0.5
    assert sum(state.ready_wait_seconds.counts) == 2
    assert sum(state.handoff_seconds.counts) == 2
    assert followed.units() == {UnitOutcome.PROVED: 3}
    assert followed.in_flight() == {}


def test_a_whole_proof_that_later_ones_overtake_is_lost() -> None:
    followed = follow("overtaken")
    # It waits from 1000 until the whole second after the grace has passed, 2000.
    handoff_ms, blocked_ms = (1210 - 1000) + (2000 - 1700), 100 + 1000
    idle = {"no_work": 101, "blocked": blocked_ms, "fill": 800 + 1000, "handoff": handoff_ms}
    assert account(followed.engine, "0") == (2, 990, idle)
    assert followed.units() == {UnitOutcome.LOST: 1, UnitOutcome.PROVED: 2}
    assert followed.in_flight() == {}


def test_a_worker_that_picks_up_another_unit_has_lost_the_first() -> None:
    followed = follow("other-pickup")
    assert account(followed.engine) == (1, 1000, {"fill": 1000, "handoff": 500})
    assert followed.units() == {UnitOutcome.LOST: 1, UnitOutcome.PROVED: 1}
    assert followed.in_flight() == {}


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_batch_is_several_proofs() -> None:
    followed = follow("batch")
    # Until the batch is delivered its other jobs seem to wait, the last for 5 ms.
    idle = {"no_work": 100 + 2001, "blocked": 600 + 5, "fill": 2000, "handoff": 2}
    assert account(followed.engine, "0") == (1, 2000, idle)
    # Those have no units of their own.
    assert followed.units() == {UnitOutcome.PROVED: 1}
    assert [(job.job_id, job.outcome, job.total_ms) for job in followed.jobs] == [
        ("porep-1000-1", ProofOutcome.PROVED, 4603),
        ("porep-1000-2", ProofOutcome.PROVED, 4555),
        ("porep-1000-3", ProofOutcome.FAILED, 4507),
    ]
    latency = followed.state.proof_latency_seconds["porep-c2", LatencyBasis.SUBMISSION]
    assert sum(latency.counts) == 2
    assert latency.sum_seconds == pytest.approx(4.603 + 4.555)
    assert followed.trouble() == {("selfcheck", ""): 1}
    assert followed.in_flight() == {}


def test_a_batch_whose_self_checks_are_lost_counts_as_proved() -> None:
    followed = Followed()
    lines = (MADE / "batch.log").read_text().splitlines()
    followed.feed(line for line in lines if "self-check" not in line)
    followed.feed(["TIMELINE,70000,CACHE_TRIM,x,y"])
    followed.pipeline.finish()
    assert followed.proofs() == {("porep-c2", ProofOutcome.PROVED): 3}
    assert followed.units() == {UnitOutcome.PROVED: 1}


def test_the_same_id_at_once_and_again() -> None:
    followed = follow("twice")
    idle = {"no_work": 100 + 2690 + 1, "blocked": 200 + 100, "fill": 700 + 700, "handoff": 10}
    assert account(followed.engine, "0") == (3, 1300 + 1000, idle)
    assert [(job.incarnation, job.outcome, job.total_ms, job.repeated) for job in followed.jobs] == [
        (0, ProofOutcome.PROVED, 1911, False),
        (1, ProofOutcome.PROVED, 2111, True),
        (2, ProofOutcome.PROVED, 1801, True),
    ]
    # 900 ms together with the first, 300 alone; and a second again.
    assert followed.state.gpus["0"].wasted_seconds == {"failed": 0.0, "repeated": pytest.approx(0.45 + 0.3 + 1)}
    assert followed.units() == {UnitOutcome.PROVED: 3}


def test_a_second_start_of_the_same_partition_is_another_incarnation() -> None:
    followed = follow("twice-partitions")
    assert account(followed.engine) == (2, 1000, {"fill": 1000})
    # Ends are told apart by their workers.
    spans = followed.state.span_seconds["other"]
    assert sum(spans.counts) == 2
    assert spans.sum_seconds == pytest.approx(1.2)
    assert followed.in_flight() == {Stage.READY: 1}
    assert followed.state.jobs_open["other"] == 2


def test_a_failed_self_check_names_the_gpu_of_the_bad_partition() -> None:
    followed = follow("selfcheck")
    assert followed.trouble() == {("selfcheck", ""): 1, ("bad_partition", "1"): 1}
    assert followed.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    # Every partition was proved: nothing else says which was bad.
    assert followed.units() == {UnitOutcome.PROVED: 2}
    gpus = followed.state.gpus
    assert (gpus["0"].wasted_seconds["failed"], gpus["1"].wasted_seconds["failed"]) == (1.0, 1.2)


def test_a_job_that_comes_after_a_night_was_not_blocked_for_the_night() -> None:
    followed = follow("night")
    night_ms = 36_000_000 - 2200
    idle = {"no_work": 100 + night_ms, "blocked": 100 + 500, "fill": 2000}
    assert account(followed.engine, "0") == (2, 2000, idle)
    (gap,) = followed.gaps
    assert gap.by_cause_ms == {Cause.NO_WORK: night_ms, Cause.BLOCKED: 500, Cause.FILL: 1000}
    assert followed.state.unparsed["offset"] == 0


def test_a_long_queue_does_not_age_while_it_moves() -> None:
    followed = follow("backlog", Limits(age_ms=5000))
    # The last of six waits for 21 s.
    assert followed.units() == {UnitOutcome.PROVED: 6}
    idle = {"no_work": 100, "blocked": 900 + 5 * 100, "fill": 3000 + 3000, "starved": 4 * 3000}
    assert account(followed.engine, "0") == (6, 5400, idle)


def test_a_queue_that_stands_still_ages() -> None:
    followed = Followed(Limits(age_ms=5000))
    followed.feed((MADE / "backlog.log").read_text().splitlines()[:8])
    followed.feed(["TIMELINE,1000,SYNTH_START,w0,kind=window-post", "TIMELINE,9000,CACHE_TRIM,x,y"])
    followed.pipeline.finish()
    assert followed.units() == {UnitOutcome.LOST: 6}


# --- what a daemon does not tell --------------------------------------------------------------------------------


def test_a_daemon_without_spans_leaves_its_gpus_unknown() -> None:
    followed = follow("no-spans")
    assert followed.state.evidence["spans"] is False
    # That there are no spans is known with the first proof, 2 s after its pickup.
    idle = {"no_work": 100 + 2020, "blocked": 100, "fill": 1000, "handoff": 2000, "unknown": 2010}
    assert account(followed.engine, "0") == (0, 0, idle)
    assert followed.units() == {UnitOutcome.PROVED: 2}
    assert followed.proofs() == {("porep-c2", ProofOutcome.PROVED): 1}
    assert sum(followed.state.span_seconds["porep-c2"].counts) == 0


def test_one_lost_span_does_not_make_a_daemon_without_spans() -> None:
    followed = Followed()
    lines = (MADE / "selfcheck.log").read_text().splitlines()
    done = "2026-11-30T12:00:02.501000Z  INFO cuzk_core::engine: partition GPU prove complete job_id=porep-1000-1 "
    lost = [line for line in lines if "GPU_START,porep-1000-1,worker=1" not in line and "2500,GPU_END" not in line]
    at = next(at for at, line in enumerate(lost) if "all partitions complete" in line)
    followed.feed([*lost[:at], done + "partition=1 gpu_ms=1200 filled=2", *lost[at:]])
    followed.pipeline.finish()
    assert followed.state.evidence["spans"] is True
    assert followed.units() == {UnitOutcome.PROVED: 2}
    assert account(followed.engine, "1") == (0, 0, {"blocked": 100, "fill": 1100, "handoff": 1201, "no_work": 1599})


def test_a_span_shows_that_the_daemon_logs_spans_after_all() -> None:
    followed = Followed()
    followed.feed((MADE / "no-spans.log").read_text().splitlines()[:-1])
    followed.feed(["TIMELINE,6000,GPU_START,w,worker=0", "TIMELINE,7000,GPU_END,w,worker=0,gpu_ms=1000"])
    followed.pipeline.finish()
    assert followed.state.evidence["spans"] is True
    assert followed.state.gpus["0"].busy_seconds == 1


def test_what_a_log_tells_of_is_settled_in_its_place() -> None:
    followed = Followed()
    for at, line in enumerate((MADE / "no-spans.log").read_text().splitlines()):
        followed.feed([line], Arrival(1000.0 + at, UNIX_S + at, live=False))
        followed.engine.settle(None)
    followed.pipeline.finish()
    assert account(followed.engine, "0") == account(follow("no-spans").engine, "0")


def test_tracing_lines_before_the_wall_clock_is_known() -> None:
    followed = follow("unanchored")
    # What came before the first event is as old as that; later, before the clock is known, as the largest offset.
    assert account(followed.engine) == (2, 2000, {"fill": 1000, "starved": 401})
    assert followed.engine.ledger.jobs_announced
    assert followed.engine.anchor.start_unix_ms == pytest.approx(UNIX_S * 1000, abs=1.5)
    assert followed.engine.units.open_jobs()["window-post"][0] == 3


def test_which_of_several_idle_gpus_is_charged() -> None:
    followed = follow("several-gpus")
    # Two units for three idle GPUs: 1 and 0 became idle first. Then one is left, and it is for 1.
    assert account(followed.engine, "0") == (1, 1100, {"no_work": 3000, "blocked": 200, "fill": 800 + 1900})
    assert account(followed.engine, "1") == (2, 2000, {"no_work": 1100, "blocked": 200, "fill": 800 + 1900 + 1000})
    assert account(followed.engine, "2") == (2, 3200, {"no_work": 2900, "blocked": 100, "fill": 800})


def test_a_gpu_that_becomes_known_late() -> None:
    followed = follow("late-map")
    # What was on no known GPU has been on that one: nothing idles beside it.
    assert account(followed.engine) == (1, 1000, {"fill": 1000})
    assert account(followed.engine, "1") == (1, 2000, {"fill": 3000})
    assert followed.state.gpus["unknown"].open_gap_seconds is None
    assert followed.state.evidence["gpu_map"] is True
    assert followed.gaps == []


def test_memory_trouble_is_counted() -> None:
    assert follow("memory").trouble() == {
        ("memory_budget", ""): 1,
        ("cuda_alloc", ""): 1,
        ("srs_evicted", ""): 1,
        ("synthesis_failed", ""): 1,
        ("prove_failed", ""): 1,
    }


# --- engines that end -------------------------------------------------------------------------------------------


def test_a_restart_without_a_start_line() -> None:
    followed = follow("restart-back")
    first, second = followed.stopped[0], followed.engine
    assert account(first) == (1, 1000, {"fill": 2000})
    assert account(second) == (1, 1000, {"no_work": 10, "fill": 1000})
    assert followed.state.engine_restarts == 1
    assert followed.units() == {UnitOutcome.ABANDONED: 3, UnitOutcome.PROVED: 1}
    assert followed.in_flight() == {Stage.SYNTH: 1}
    assert followed.gaps == []
    assert followed.state.gpus["unknown"].busy_seconds == 2


def test_a_restart_after_which_offsets_are_larger() -> None:
    followed = follow("restart-forward")
    first, second = followed.stopped[0], followed.engine
    assert account(first, "0") == (1, 0, {"no_work": 500, "blocked": 500, "fill": 1000})
    assert account(second, "0") == (1, 1000, {"no_work": 4000, "fill": 1000})
    assert second.anchor.start_unix_ms == UNIX_S * 1000 + HOUR_MS
    assert followed.units() == {UnitOutcome.ABANDONED: 1, UnitOutcome.PROVED: 1}
    assert followed.proofs()["window-post", ProofOutcome.ABANDONED] == 1


def test_a_shutdown_ends_the_engine_though_the_process_lives_on() -> None:
    followed = follow("sigint")
    assert account(followed.engine, "0") == (1, 800, {"no_work": 100, "blocked": 100, "fill": 1000})
    state = followed.state
    assert (state.engine_running, state.engine_restarts, followed.in_flight()) == (False, 0, {})
    assert followed.units() == {UnitOutcome.ABANDONED: 2}
    assert followed.proofs() == {("window-post", ProofOutcome.ABANDONED): 2}
    assert state.gpus["0"].open_gap_seconds is None
    followed.pipeline.settle(5000.0, UNIX_S + 5000)
    assert followed.state.gpus["0"].idle_seconds == state.gpus["0"].idle_seconds


def test_silence() -> None:
    followed = follow("silence")
    # For 5 minutes the span is believed; without work in flight, silence means nothing.
    idle = {"fill": 1000, "unknown": 200_000, "no_work": 700_000}
    assert account(followed.engine) == (1, 300_000, idle)
    assert followed.gaps == []


def test_silence_while_one_looks() -> None:
    followed = Followed()
    lines = (MADE / "silence.log").read_text().splitlines()
    followed.feed(lines[:5], Arrival(12.0, UNIX_S + 2, live=True))
    for second in range(12, 513):
        followed.pipeline.settle(second, UNIX_S + second - 10)
    gpu = followed.state.gpus["unknown"]
    assert gpu.busy_seconds == 300
    assert gpu.idle_seconds[Cause.UNKNOWN] == pytest.approx(502 - 302 - 0.25)
    assert gpu.idle_seconds[Cause.NO_WORK] == 0
    assert followed.state.stalled_seconds == pytest.approx(500)
    followed.feed(["CUZK_TIMING: mutex_wait_ms=1"], Arrival(512.5, UNIX_S + 502.5, live=True))
    followed.pipeline.settle(522.0, UNIX_S + 512)
    # Any line is a sign of life: it was written after the last look, at 502.
    assert followed.state.gpus["unknown"].busy_seconds == pytest.approx(300 + 9.75)
    assert followed.state.stalled_seconds == pytest.approx(10)


# --- damaged times ----------------------------------------------------------------------------------------------


def test_one_damaged_offset_changes_nothing() -> None:
    followed = follow("future-damaged")
    assert account(followed.engine) == (1, 1000, {"fill": 1000, "handoff": 500})
    assert followed.state.unparsed["offset"] == 1
    assert followed.engine.seen_ms == 3500


def test_two_lines_that_agree_after_an_idle_night_are_believed() -> None:
    followed = follow("future-night")
    assert account(followed.engine) == (2, 2000, {"fill": 1000 + 1000, "no_work": 36_000_000 - 3000})
    assert followed.state.unparsed["offset"] == 0
    assert followed.state.engine_restarts == 0


def tracing(at_ms: int, message: str = "nothing in particular") -> str:
    return f"2026-11-30T12:00:{at_ms / 1000:09.6f}Z  INFO cuzk_core::engine: {message}"


@pytest.mark.parametrize("live", [False, True], ids=["backlog", "live"])
def test_tracing_lines_do_not_run_ahead_while_the_wall_clock_is_hardly_known(live: bool) -> None:
    followed = Followed()
    for at_ms, line in [
        (900, "TIMELINE,900,SYNTH_START,a,kind=window-post"),
        (950, tracing(950)),
        (1000, tracing(1000)),
        # Half a second between neighbours: the engine started somewhere in 550 ms.
        (1500, "TIMELINE,1500,SYNTH_END,a,synth_ms=600"),
        (1800, tracing(1800)),
        (1850, "TIMELINE,1800,GPU_QUEUE,a,monolithic"),
        (1900, tracing(1900)),
    ]:
        followed.feed([line], Arrival(1000 + at_ms / 1000, UNIX_S + at_ms / 1000, live=live))
        assert followed.engine.seen_ms <= at_ms
        followed.pipeline.settle(1000 + at_ms / 1000, UNIX_S + at_ms / 1000)
        assert followed.engine.frontier_ms <= max(at_ms - 250, 900)
    assert followed.state.late_events == 0


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("step_ms", [-50_000, -3000, 3000, 50_000])
def test_a_wall_clock_that_is_set_changes_nothing(step_ms: int, live: bool) -> None:
    followed = Followed()

    def read(at_ms: int, *lines: str, set_by_ms: int = step_ms) -> None:
        if not live:
            followed.feed(lines, None)
            return
        arrival = Arrival(1000 + at_ms / 1000, UNIX_S + (at_ms + set_by_ms) / 1000, live=True)
        followed.feed(lines, arrival)
        followed.pipeline.settle(arrival.monotonic_s, arrival.unix_s)

    def late(at_ms: int) -> str:
        return tracing(max(at_ms + step_ms, 0))

    read(0, tracing(0, "starting cuzk engine pipeline_enabled=true"), set_by_ms=0)
    read(100, "TIMELINE,100,SYNTH_START,a,kind=window-post", set_by_ms=0)
    read(1100, "TIMELINE,1100,SYNTH_END,a,synth_ms=1000", tracing(1100), set_by_ms=0)
    read(1200, "TIMELINE,1200,GPU_START,a,worker=0", set_by_ms=0)
    read(5000, late(5000))
    read(5200, "TIMELINE,5200,GPU_END,a,worker=0,gpu_ms=4000")
    read(5300, "TIMELINE,5300,SYNTH_START,b,kind=window-post", late(5300))
    read(6300, "TIMELINE,6300,SYNTH_END,b,synth_ms=1000", "TIMELINE,6300,GPU_START,b,worker=0")
    read(7300, "TIMELINE,7300,GPU_END,b,worker=0,gpu_ms=1000", late(7300))
    followed.pipeline.finish()
    spans, busy_ms, idle = account(followed.engine)
    assert (spans, busy_ms, idle["fill"], idle["handoff"]) == (2, 5000, 2000, 100)
    assert idle["no_work"] == pytest.approx(200, abs=2)
    assert (followed.state.engine_restarts, followed.state.late_events) == (0, 0)
    assert followed.units() == {UnitOutcome.PROVED: 2}


def test_an_agent_that_comes_in_an_idle_hour_keeps_what_was_said_before_the_first_event() -> None:
    log = b"""\
2026-11-30T12:00:00.000000Z  INFO gpu_worker{worker_id=1 gpu=3 job_id=a partition=Some(0)}: cuzk_core::engine: done
2026-11-30T12:00:01.000000Z  INFO cuzk_core::scheduler: job enqueued job_id=porep-1-2 proof_kind=porep-c2
TIMELINE,5000,SYNTH_START,porep-1-2,partition=0
TIMELINE,6000,SYNTH_END,porep-1-2,partition=0,synth_ms=1000
TIMELINE,6000,GPU_QUEUE,porep-1-2,partition=0
TIMELINE,6000,GPU_PICKUP,porep-1-2,worker=1,partition=0
TIMELINE,6000,GPU_START,porep-1-2,worker=1,partition=0
"""
    pipeline = Pipeline()
    pipeline.feed(log.splitlines())
    pipeline.finish()
    state = pipeline.state()
    assert state.evidence["jobs"]
    assert list(state.gpus) == ["3"]
    assert state.in_flight == {
        Stage.WAITING: 9, Stage.SYNTH: 0, Stage.READY: 0, Stage.PICKED_UP: 0, Stage.GPU: 1,
    }  # fmt: skip


def test_the_gpu_of_a_log_of_timeline_lines_only_is_there_before_its_first_span() -> None:
    pipeline = Pipeline()
    pipeline.feed([b"TIMELINE,5000,SYNTH_START,a,partition=0", b"TIMELINE,9000,SYNTH_END,a,partition=0,synth_ms=4000"])
    pipeline.finish()
    born = pipeline.state().gpus["unknown"]
    assert (born.spans, born.busy_seconds, sum(born.idle_seconds.values())) == (0, 0, 4)
    assert born.open_gap_seconds is None
    pipeline.feed([b"TIMELINE,9500,GPU_START,a,worker=0,partition=0", b"TIMELINE,9900,GPU_END,a,worker=0,partition=0"])
    pipeline.finish()
    grown = pipeline.state().gpus["unknown"]
    assert (grown.spans, grown.busy_seconds, sum(grown.idle_seconds.values())) == (1, 0.4, 4.5)


def test_a_daemon_that_is_known_to_have_ended() -> None:
    followed = Followed()
    followed.pipeline.daemon_ended()
    assert not followed.state.engine_running
    followed.feed("TIMELINE,1000,GPU_START,j,worker=0,partition=0\nTIMELINE,2000,SYNTH_START,j,partition=1")
    followed.pipeline.daemon_ended()
    assert not followed.state.engine_running
    assert followed.units() == {UnitOutcome.ABANDONED: 2}
    assert followed.state.gpus["unknown"].busy_seconds == 1
    # The next one needs no smaller offset to be another, nor a second line.
    followed.feed(["TIMELINE,2500,GPU_START,j,worker=0,partition=0"])
    assert followed.state.engine_running
    assert followed.state.engine_restarts == 1
    assert followed.state.gpus["unknown"].busy_seconds == 1


def test_a_lone_line_before_the_end_of_a_daemon_is_its_last() -> None:
    followed = Followed()
    followed.feed("TIMELINE,100000,GPU_START,j,worker=0,partition=0\nTIMELINE,10,SYNTH_START,k,partition=1")
    followed.pipeline.daemon_ended()
    assert not followed.state.engine_running
    assert followed.units() == {UnitOutcome.ABANDONED: 2}
