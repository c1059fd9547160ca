"""Whole logs, with figures that were published or noted down by the writer of the log itself."""

from __future__ import annotations

import json
import lzma
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuzk_agent.timeline.engine import Engine
from cuzk_agent.timeline.ledger import Gap, GpuAccount
from cuzk_agent.timeline.lines import TimelineEvent, TracingLine
from cuzk_agent.timeline.parser import LineParser
from cuzk_agent.timeline.pipeline import Arrival, Pipeline
from cuzk_agent.timeline.state import Boundary, Cause, ProofOutcome, Stage, UnitOutcome
from cuzk_agent.timeline.units import Job

DATA = Path(__file__).parent.parent / "data"


def load(name: str) -> bytes:
    path = DATA / name
    return path.read_bytes() if path.exists() else lzma.decompress((DATA / f"{name}.xz").read_bytes())


class Followed:
    """A pipeline and all that it told."""

    def __init__(self) -> None:
        self.gaps: list[tuple[Engine, Gap]] = []
        self.jobs: list[Job] = []
        self.stopped: list[Engine] = []
        self.pipeline = Pipeline(
            on_gap=lambda engine, gap: self.gaps.append((engine, gap)),
            on_job=lambda _, job: self.jobs.append(job),
            on_stop=self.stopped.append,
        )

    @property
    def engines(self) -> list[Engine]:
        last = self.pipeline.engine
        return self.stopped if last is None or last.stopped else [*self.stopped, last]

    @property
    def engine(self) -> Engine:
        (engine,) = self.engines
        return engine

    def account(self, gpu: str, engine: int = 0) -> GpuAccount:
        return self.engines[engine].ledger.accounts[gpu]

    def idle(self, gpu: str, engine: int = 0) -> dict[Cause, int]:
        return self.account(gpu, engine).totals.idle_ms

    def gaps_of(self, gpu: str, engine: int = 0) -> list[Gap]:
        return [gap for owner, gap in self.gaps if owner is self.engines[engine] and gap.gpu == gpu]

    def figures(self) -> list[object]:
        """All that must not depend on how the log was fed."""
        told: list[object] = []
        for engine in self.engines:
            told.append((engine.anchor.start_unix_ms, engine.anchor.uncertainty_ms, engine.ledger.late))
            told += [
                (gpu, totals.spans, totals.busy_ms, totals.idle_ms, round(totals.wasted_ms["failed"], 6))
                for gpu, account in sorted(engine.ledger.accounts.items())
                for totals in (account.totals,)
            ]
        told += [gap for _, gap in self.gaps]
        told += [(job.job_id, job.kind, job.outcome, job.total_ms) for job in self.jobs]
        state = self.pipeline.state()
        told += [state.unit_outcomes, state.proof_outcomes, state.trouble, state.in_flight, state.events]
        told += [state.synth_seconds, state.span_seconds, state.ready_wait_seconds, state.handoff_seconds]
        told += [state.proof_latency_seconds, state.kernel_phase_seconds]
        told += [(gpu, state.gpus[gpu].kernel_seconds) for gpu in state.gpus]
        return told


def follow(name: str) -> Followed:
    followed = Followed()
    followed.pipeline.feed(load(name).split(b"\n"))
    followed.pipeline.finish()
    return followed


def events(name: str) -> list[TimelineEvent]:
    parser = LineParser()
    values = [value for line in load(name).split(b"\n") for value in parser.feed(line)]
    return [value for value in values if isinstance(value, TimelineEvent)]


def check_addition(followed: Followed) -> None:
    """Engine time adds up, on every GPU of every engine."""
    for engine in followed.engines:
        for account in engine.ledger.accounts.values():
            totals = account.totals
            assert totals.busy_ms + sum(totals.idle_ms.values()) == engine.frontier_ms - engine.ledger.start_ms
    for _, gap in followed.gaps:
        assert sum(gap.by_cause_ms.values()) == gap.duration_ms
        assert gap.by_cause_ms[gap.cause] == max(gap.by_cause_ms.values())


# --- published figures ------------------------------------------------------------------------------------------


def test_three_whole_proofs_give_the_published_table() -> None:
    followed = follow("seeds/isolated3.log")
    check_addition(followed)
    engine, account = followed.engine, followed.account("unknown")
    assert [
        (job.units[None].synth_start_ms, job.units[None].synth_end_ms, job.units[None].start_ms, job.units[None].end_ms)
        for job in followed.jobs
    ] == [
        (82678, 121608, 121612, 150866),
        (82657, 130607, 150881, 182863),
        (155012, 199428, 199432, 226633),
    ]
    first, second = followed.gaps_of("unknown")
    assert (first.duration_ms, first.by_cause_ms) == (15, {Cause.HANDOFF: 15})
    assert (second.duration_ms, second.by_cause_ms) == (16569, {Cause.STARVED: 16565, Cause.HANDOFF: 4})
    assert (first.boundary, second.boundary) == (Boundary.CROSS_JOB, Boundary.CROSS_JOB)
    busy_ms = account.totals.busy_ms
    assert busy_ms == 29254 + 31982 + 27201
    assert busy_ms / (busy_ms + account.totals.gap_ms) == pytest.approx(0.842, abs=0.0005)
    assert engine.first_event_ms is not None
    assert engine.last_event_ms is not None
    assert busy_ms / (engine.last_event_ms - engine.first_event_ms) == pytest.approx(0.614, abs=0.0005)
    synth = followed.pipeline.state().synth_seconds["porep-c2"]
    assert synth.sum_seconds / sum(synth.counts) == pytest.approx(43.765, abs=0.001)


def test_fifteen_partitioned_proofs_give_the_published_figures() -> None:
    followed = follow("seeds/p9-c15.log")
    check_addition(followed)
    totals, gaps = followed.account("unknown").totals, followed.gaps_of("unknown")
    assert (totals.spans, totals.busy_ms) == (150, 550_800)
    durations = [gap.duration_ms for gap in gaps]
    assert (len(gaps), sum(durations), max(durations)) == (149, 60_500, 3813)
    assert round(sum(durations) / len(durations)) == 406
    assert totals.busy_ms / (totals.busy_ms + totals.gap_ms) == pytest.approx(0.901, abs=0.0005)
    seconds = [event.synth_ms / 1000 for event in events("seeds/p9-c15.log") if event.synth_ms is not None]
    assert statistics.mean(seconds) == pytest.approx(36.2, abs=0.05)
    assert statistics.median(seconds) == pytest.approx(36.6, abs=0.05)
    state = followed.pipeline.state()
    at_ms = {(event.name, event.job_id, event.partition): event.offset_ms for event in events("seeds/p9-c15.log")}
    starts = [key for key in at_ms if key[0] == "SYNTH_START"]
    at_work = {ms for key in starts for ms in range(at_ms[key], at_ms["SYNTH_END", key[1], key[2]])}
    assert state.synth_active_seconds == len(at_work) / 1000
    synth = state.synth_seconds["other"]
    assert sum(synth.counts) == 150
    assert synth.sum_seconds == pytest.approx(sum(seconds))
    assert state.proof_outcomes["other", ProofOutcome.PROVED] == 15
    long = [(gap.duration_ms, gap.job_before[:8], gap.job_after[:8], gap.boundary) for gap in gaps]
    long = sorted((gap for gap in long if gap[0] > 800), reverse=True)
    assert [gap[0] for gap in long] == [3813, 1837, 1053, 962, 948, 897]
    assert {gap[3] for gap in long} == {Boundary.WITHIN_JOB}
    assert all(before == after for _, before, after, _ in long)
    assert [gap[1] for gap in long] == ["7bc11acd", "dddfc7b6", "4892681b", "4892681b", "d4e55e0d", "dddfc7b6"]
    assert {gap.cause for gap in gaps if gap.duration_ms > 800} == {Cause.STARVED}


# --- a whole daemon's log ---------------------------------------------------------------------------------------

CAUSES = (Cause.BLOCKED, Cause.FILL, Cause.STARVED, Cause.HANDOFF)
NEAR_MS = 15
"""Log lines and the truth differ by their writing."""


@pytest.mark.parametrize(
    ("name", "engine", "gpu", "busy_ms", "gaps", "causes"),
    [
        ("two-gpus-mixed", 0, "0", 3085, (13, 588, 125), (275, 288, 558, 0)),
        ("two-gpus-mixed", 0, "1", 3132, (11, 512, 67), (275, 283, 511, 1)),
        ("trickle", 0, "0", 2618, (5, 2314, 512), (526, 1556, 0, 1)),
        ("failing", 0, "0", 2629, (1, 108, 108), (343, 202, 107, 1)),
        ("nocolour", 0, "0", 3778, (0, 0, 0), (255, 183, 0, 0)),
        # Killed with a span open: its true end, 11 ms after the last line, is not in the log.
        ("crash", 0, "0", 996, (0, 0, 0), (292, 202, 0, 1)),
        ("crash", 1, "0", 2060, (0, 0, 0), (307, 235, 0, 0)),
    ],
)
def test_busy_gaps_and_causes_of_a_daemon(
    name: str,
    engine: int,
    gpu: str,
    busy_ms: int,
    gaps: tuple[int, int, int],
    causes: tuple[int, ...],
) -> None:
    followed = follow(f"daemon/{name}.log")
    check_addition(followed)
    # A failed proving call ends without a line of its own.
    assert followed.account(gpu, engine).totals.busy_ms == pytest.approx(busy_ms, abs=8 if name == "failing" else 0)
    durations = [gap.duration_ms for gap in followed.gaps_of(gpu, engine)]
    assert (len(durations), sum(durations), max(durations, default=0)) == gaps
    idle = followed.idle(gpu, engine)
    assert [idle[cause] for cause in CAUSES] == pytest.approx(causes, abs=NEAR_MS)
    assert idle[Cause.UNKNOWN] == 0


def test_nothing_is_starved_where_one_job_comes_at_a_time() -> None:
    followed = follow("daemon/trickle.log")
    assert followed.idle("0")[Cause.STARVED] == 0
    gaps = followed.gaps_of("0")
    assert sum(gap.by_cause_ms[Cause.NO_WORK] for gap in gaps) == pytest.approx(1004, abs=NEAR_MS)
    assert {gap.boundary for gap in gaps} == {Boundary.CROSS_JOB}


DAEMONS = ("two-gpus-mixed", "failing", "crash", "nocolour", "trickle")


def notes(name: str) -> list[list[list[str]]]:
    """The words of all NOTE lines, by engine. The spaces of job ids are `_`."""
    found: list[list[list[str]]] = []
    for line in load(f"daemon/{name}.truth").decode().splitlines():
        if line.startswith("NOTE "):
            line = re.sub(r"\[[0-9 ]*\]", lambda ids: ids[0].replace(" ", "_"), line)
            words = line.split()[1:]
            if words[0] == "epoch_unix_ms":
                found.append([])
            found[-1].append(words)
    return found


@pytest.mark.parametrize("name", DAEMONS)
def test_every_engine_is_found_at_its_epoch(name: str) -> None:
    followed, told = follow(f"daemon/{name}.log"), notes(name)
    epochs = [float(words[1]) for engine in told for words in engine if words[0] == "epoch_unix_ms"]
    assert [engine.anchor.start_unix_ms for engine in followed.engines] == pytest.approx(epochs, abs=5)
    for engine, epoch in zip(followed.engines, epochs, strict=True):
        assert engine.anchor.start_unix_ms is not None
        assert engine.anchor.uncertainty_ms is not None
        assert abs(engine.anchor.start_unix_ms - epoch) <= engine.anchor.uncertainty_ms
    state = followed.pipeline.state()
    assert state.engine_restarts == len(epochs) - 1
    assert not any(state.in_flight.values())
    assert set(state.in_flight) == set(Stage)


@pytest.mark.parametrize("name", DAEMONS)
def test_every_event_is_counted_once(name: str) -> None:
    followed = follow(f"daemon/{name}.log")
    meant = Counter(event.name for event in events(f"daemon/{name}.truth"))
    state = followed.pipeline.state()
    assert {event: count for event, count in state.events.items() if count} == meant
    assert (state.late_events, state.torn_lost, any(state.unparsed.values())) == (0, 0, False)


@pytest.mark.parametrize("name", DAEMONS)
def test_every_job_ends_as_it_did(name: str) -> None:
    followed = follow(f"daemon/{name}.log")
    jobs = {(job.job_id.replace(" ", "_"), index): job for index, job in numbered(followed.jobs)}
    for index, words_of_engine in enumerate(notes(name)):
        kinds = {words[2]: words[3] for words in words_of_engine if words[0] == "enqueued"}
        partitions = {words[2]: int(words[4]) for words in words_of_engine if words[0] == "enqueued"}
        proved = {words[1]: int(words[2]) for words in words_of_engine if words[0] == "proved"}
        failed, dropped, wasted, checked = sets_of(words_of_engine)
        killed = any(words[0] == "killed" for words in words_of_engine)
        for job_id, kind in kinds.items():
            job = jobs[job_id, index if (job_id, index) in jobs else 0]
            assert (job.kind, len(job.units)) == (kind, partitions[job_id])
            if job_id in proved:
                assert (job.outcome, job.total_ms) == (ProofOutcome.PROVED, proved[job_id])
            elif killed:
                assert job.outcome is ProofOutcome.ABANDONED
            else:
                assert job.outcome is ProofOutcome.FAILED
            by_outcome = {
                outcome: {(job_id, str(p)) for p, unit in job.units.items() if unit.outcome is outcome}
                for outcome in UnitOutcome
            }
            assert by_outcome[UnitOutcome.FAILED] == {unit for unit in failed if unit[0] == job_id}
            assert by_outcome[UnitOutcome.DROPPED] == {unit for unit in dropped if unit[0] == job_id}
            wasted_units = {(job_id, str(unit.partition)) for unit in job.wasted_units}
            assert wasted_units == {unit for unit in wasted if unit[0] == job_id}
            if job_id in checked:
                assert (job.outcome, len(by_outcome[UnitOutcome.PROVED])) == (ProofOutcome.FAILED, len(job.units))


def numbered(jobs: list[Job]) -> Iterator[tuple[int, Job]]:
    """Jobs with how many of the same id came before, which is their engine here."""
    seen: Counter[str] = Counter()
    for job in jobs:
        yield seen[job.job_id], job
        seen[job.job_id] += 1


def sets_of(
    notes: list[list[str]],
) -> tuple[set[tuple[str, str]], set[tuple[str, str]], set[tuple[str, str]], set[str]]:
    failed = {(words[1], words[3]) for words in notes if words[0] == "failed" and len(words) > 3}
    dropped = {(words[1], words[2]) for words in notes if words[0] == "dropped"}
    wasted = {(words[1], words[2]) for words in notes if words[0] == "wasted"}
    checked = {words[1] for words in notes if words[0] == "failed" and words[2] == "selfcheck"}
    return failed, dropped, wasted, checked


def test_work_for_nothing_is_charged_to_its_gpu() -> None:
    followed = follow("daemon/failing.log")
    spans: dict[str, list[tuple[int, int]]] = {}
    for job in followed.jobs:
        if job.outcome is ProofOutcome.FAILED:
            spans[job.job_id] = [
                (unit.start_ms, unit.end_ms or unit.entered_ms)
                for unit in job.units.values()
                if unit.start_ms is not None
            ]
    # Two workers and a finalizer: where spans overlap, each has its share of the time.
    spans_ms = sum(end - start for units in spans.values() for start, end in units)
    wasted_ms = followed.account("0").totals.wasted_ms["failed"]
    assert spans_ms / 3 <= wasted_ms <= spans_ms
    assert followed.account("0").totals.wasted_ms["repeated"] == 0


def test_trouble_of_a_failing_daemon_is_counted() -> None:
    trouble = follow("daemon/failing.log").pipeline.state().trouble
    assert {key: count for key, count in trouble.items() if count} == {
        ("synthesis_failed", ""): 2,
        ("prove_failed", ""): 4,
        ("selfcheck", ""): 2,
    }


# --- H200s ------------------------------------------------------------------------------------------------------


def truth_of(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in load(f"h200/{name}.truth.jsonl").splitlines()]


@pytest.mark.parametrize("name", ["starved-gw1", "two-gpus"])
def test_the_wall_clock_is_found_from_the_log_alone(name: str) -> None:
    engine = follow(f"h200/{name}.log").engine
    epoch_s = truth_of(name)[0]["epoch_wall"]
    assert isinstance(epoch_s, float)
    assert engine.anchor.start_unix_ms is not None
    assert engine.anchor.uncertainty_ms is not None
    off_ms = abs(engine.anchor.start_unix_ms - epoch_s * 1000)
    assert off_ms <= engine.anchor.uncertainty_ms <= 5


def test_two_gpus_with_split_finalizers() -> None:
    followed = follow("h200/two-gpus.log")
    check_addition(followed)
    for gpu, busy_ms, gap_ms, count, longest_ms, handoff_ms in [
        ("0", 50196, 20863, 22, 2588, 8),
        ("1", 51450, 17818, 19, 2765, 7),
    ]:
        gaps = followed.gaps_of(gpu)
        assert followed.account(gpu).totals.busy_ms == busy_ms
        assert sum(gap.duration_ms for gap in gaps) == gap_ms == followed.account(gpu).totals.gap_ms
        assert (len(gaps), max(gap.duration_ms for gap in gaps)) == (count, longest_ms)
        shares = Counter[Cause]()
        for gap in gaps:
            shares.update(gap.by_cause_ms)
        # Both GPUs idle, one unit ready: whose hand-off that is is a matter of milliseconds.
        assert shares[Cause.HANDOFF] == pytest.approx(handoff_ms, abs=5)
        assert shares[Cause.STARVED] == gap_ms - shares[Cause.HANDOFF]
    open_gaps = followed.engine.ledger.open_gap
    first, second = open_gaps(followed.account("0")), open_gaps(followed.account("1"))
    assert first is not None
    assert second is not None
    assert sum(second.values()) == 69
    assert followed.pipeline.state().evidence == {"jobs": False, "spans": True, "gpu_map": True, "wall_clock": True}


def test_one_starved_gpu() -> None:
    followed = follow("h200/starved-gw1.log")
    check_addition(followed)
    totals = followed.account("0").totals
    assert totals.busy_ms / (totals.busy_ms + totals.gap_ms) == pytest.approx(0.934, abs=0.001)
    assert totals.idle_ms[Cause.STARVED] / totals.gap_ms == pytest.approx(1, abs=0.001)


def test_kernel_time_is_what_the_kernels_took() -> None:
    # The log of the pair lacks the lines that tell which GPU a kernel's line is about.
    for name, gpus in [("starved-gw1", {"0"}), ("two-gpus", set[str]())]:
        state = follow(f"h200/{name}.log").pipeline.state()
        truth = [record["kernel"] for record in truth_of(name) if "kernel" in record]
        true_s = sum(times[1] - times[0] for times in truth if isinstance(times, list))
        assert state.kernel_phase_seconds["gpu_total_ms"][1] == pytest.approx(true_s, rel=0.03)
        told_s = {gpu: state.gpus[gpu].kernel_seconds for gpu in state.gpus}
        assert {gpu for gpu, seconds in told_s.items() if seconds is not None} == gpus
        assert sum(told_s[gpu] or 0 for gpu in gpus) == pytest.approx(true_s if gpus else 0, rel=0.03)


# --- however it is fed ------------------------------------------------------------------------------------------

ALL = (
    "seeds/isolated3.log",
    "seeds/p9-c15.log",
    "h200/starved-gw1.log",
    "h200/two-gpus.log",
    *(f"daemon/{name}.log" for name in DAEMONS),
)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_figures_do_not_depend_on_how_lines_are_fed(name: str, size: int) -> None:
    lines = load(name).split(b"\n")
    followed = Followed()
    for at in range(0, len(lines), size):
        followed.pipeline.feed(lines[at : at + size])
    followed.pipeline.finish()
    assert followed.figures() == follow(name).figures()


def epochs_of(name: str) -> list[float]:
    """Wall-clock seconds of the engines' starts."""
    kind, _, base = name.removesuffix(".log").partition("/")
    if kind == "daemon":
        return [float(words[1]) / 1000 for engine in notes(base) for words in engine if words[0] == "epoch_unix_ms"]
    epoch_s = truth_of(base)[0]["epoch_wall"] if kind == "h200" else 1_795_996_800.0
    assert isinstance(epoch_s, float)
    return [epoch_s]


def timed(name: str) -> Iterator[tuple[float, bytes]]:
    """Each line with the wall-clock second at which it was written."""
    epochs = epochs_of(name)
    engine, now_s = 0, epochs[0]
    parser = LineParser()
    for line in load(name).split(b"\n"):
        for value in parser.feed(line):
            if isinstance(value, TracingLine):
                now_s = max(now_s, value.unix_ms / 1000)
                engine = max(at for at, epoch_s in enumerate(epochs) if at == 0 or epoch_s <= now_s + 0.1)
            elif isinstance(value, TimelineEvent):
                now_s = max(now_s, epochs[engine] + value.offset_ms / 1000)
        yield now_s, line


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("every_ms", [20, 1000])
@pytest.mark.parametrize("live", [False, True], ids=["backlog", "live"])
def test_figures_do_not_depend_on_when_one_looks(name: str, every_ms: int, live: bool) -> None:
    """A reader that looks again and again while the log grows; `live` tells the pipeline so."""
    followed = Followed()
    pipeline = followed.pipeline
    lines = list(timed(name))
    # An engine that was killed and the end of the log are looked at right then: until something more is written, time
    # goes on for what is in flight.
    ends = [max(at_s for at_s, _ in lines if at_s < epoch_s - 0.5) for epoch_s in epochs_of(name)[1:]]
    ends.append(lines[-1][0])
    now_s = lines[0][0]
    while lines:
        now_s = min([now_s + every_ms / 1000, *(end_s for end_s in ends if end_s > now_s)])
        read = [line for at_s, line in lines if at_s <= now_s]
        del lines[: len(read)]
        monotonic_s = now_s - 1_795_000_000
        pipeline.feed(read, Arrival(monotonic_s, now_s, live=live))
        if read:
            pipeline.settle(monotonic_s, now_s)
    pipeline.finish()
    assert followed.figures() == follow(name).figures()
