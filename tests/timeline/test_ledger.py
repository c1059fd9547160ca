from __future__ import annotations

from itertools import count

import pytest

from cuzk_agent.timeline.ledger import Gap, GpuTotals, JobAccount, Ledger, Rank, Track
from cuzk_agent.timeline.state import Boundary, Cause

NUMBERS = count()


class Book:
    """A ledger with short ways to write into it."""

    def __init__(self, start_ms: int = 0, *, jobs_announced: bool = True, gpus: tuple[str, ...] = ("0",)) -> None:
        self.gaps: list[Gap] = []
        self.stretches: list[tuple[str, int, int, int]] = []
        self.ends: list[tuple[Track, int]] = []
        self.ledger = Ledger(
            start_ms,
            self.gaps.append,
            on_spans=lambda gpu, from_ms, to_ms, open_: self.stretches.append((gpu, from_ms, to_ms, len(list(open_)))),
            on_span_end=lambda track, at_ms: self.ends.append((track, at_ms)),
        )
        self.ledger.learn(start_ms, jobs_announced=jobs_announced)
        for gpu in gpus:
            self.ledger.know_gpu(gpu, start_ms)

    def unit(self, job: JobAccount | None = None) -> Track:
        return Track(job or JobAccount("a", next(NUMBERS)), next(NUMBERS))

    def span(self, start_ms: int, end_ms: int, gpu: str | None = "0", job: JobAccount | None = None) -> Track:
        track = self.unit(job)
        self.ledger.enter(track, Rank.GPU, start_ms, gpu)
        self.ledger.enter(track, Rank.GONE, end_ms)
        return track

    def stay(self, rank: Rank, from_ms: int, to_ms: int, gpu: str | None = None) -> Track:
        track = self.unit()
        self.ledger.enter(track, rank, from_ms, gpu)
        self.ledger.enter(track, Rank.GONE, to_ms)
        return track

    def idle(self, gpu: str = "0") -> dict[Cause, int]:
        return {cause: ms for cause, ms in self.ledger.accounts[gpu].totals.idle_ms.items() if ms}

    def wasted(self) -> dict[str, float]:
        return self.ledger.accounts["0"].totals.wasted_ms

    def busy(self, gpu: str = "0") -> int:
        return self.ledger.accounts[gpu].totals.busy_ms


# --- what is charged --------------------------------------------------------------------------------------------


def test_busy_is_the_union_of_overlapping_spans() -> None:
    book = Book()
    book.span(100, 200)
    book.span(150, 400)
    book.span(160, 170)
    book.span(500, 600)
    book.ledger.advance(1000)
    assert book.busy() == 300 + 100
    assert sum(book.idle().values()) == 600
    assert [(gap.start_ms, gap.end_ms) for gap in book.gaps] == [(400, 500)]
    assert book.ledger.accounts["0"].totals.spans == 4


def test_edges_may_come_in_any_order() -> None:
    book, job = Book(), JobAccount("a", 0)
    first, second = book.unit(job), book.unit(job)
    book.ledger.enter(second, Rank.GONE, 40)
    book.ledger.enter(first, Rank.GONE, 20)
    book.ledger.enter(second, Rank.GPU, 30, "0")
    book.ledger.enter(first, Rank.GPU, 10, "0")
    book.ledger.advance(50)
    assert book.busy() == 20
    assert [(gap.start_ms, gap.end_ms, gap.boundary) for gap in book.gaps] == [(20, 30, Boundary.WITHIN_JOB)]


def test_a_unit_never_goes_back() -> None:
    book = Book()
    track = book.unit()
    book.ledger.enter(track, Rank.GPU, 10, "0")
    book.ledger.enter(track, Rank.READY, 20)
    book.ledger.enter(track, Rank.GONE, 30)
    book.ledger.enter(track, Rank.SYNTH, 40)
    book.ledger.advance(50)
    assert book.busy() == 20
    assert book.ledger.in_flight == 0


def test_an_edge_behind_the_frontier_is_clamped_and_counted() -> None:
    book = Book()
    book.ledger.advance(100)
    book.span(50, 150)
    assert book.ledger.late == 1
    book.ledger.advance(200)
    assert book.busy() == 50
    # One right at the frontier is in time.
    book.span(200, 210)
    assert book.ledger.late == 1


def test_the_frontier_never_goes_back() -> None:
    book = Book(start_ms=10)
    book.ledger.advance(100)
    book.ledger.advance(50)
    assert book.ledger.frontier_ms == 100
    assert sum(book.idle().values()) == 90


@pytest.mark.parametrize("steps", [[100], [10, 20, 100], list(range(0, 101, 1))])
def test_how_often_it_settles_changes_nothing(steps: list[int]) -> None:
    book = Book()
    book.stay(Rank.SYNTH, 5, 30)
    book.span(30, 60)
    book.span(70, 90)
    for step in steps:
        book.ledger.advance(step)
    assert book.busy() == 50
    assert book.idle() == {Cause.NO_WORK: 5 + 10 + 10, Cause.FILL: 25}


def test_a_gap_of_no_length_is_none() -> None:
    book = Book()
    book.span(10, 20)
    book.span(20, 30)
    book.span(31, 40)
    book.ledger.advance(50)
    assert [gap.duration_ms for gap in book.gaps] == [1]


def test_spans_are_told_as_they_settle() -> None:
    book = Book()
    book.span(10, 30)
    last = book.span(20, 40)
    book.ledger.advance(25)
    book.ledger.advance(50)
    assert book.stretches == [("0", 10, 20, 1), ("0", 20, 25, 2), ("0", 25, 30, 2), ("0", 30, 40, 1)]
    assert [at_ms for _, at_ms in book.ends] == [30, 40]
    assert book.ends[1][0] is last
    assert last.started_ms == 20


def test_the_end_of_an_engine_applies_what_is_ahead_and_charges_nothing_for_it() -> None:
    book = Book()
    book.span(10, 500)
    book.ledger.finish(100)
    assert (book.busy(), book.ledger.frontier_ms, book.ledger.in_flight) == (90, 100, 0)


# --- causes -----------------------------------------------------------------------------------------------------


def test_each_cause() -> None:
    book = Book()
    book.span(0, 10)
    book.stay(Rank.WAITING, 20, 110)
    book.stay(Rank.SYNTH, 30, 40)
    book.stay(Rank.READY, 50, 60)
    book.stay(Rank.PICKED_UP, 70, 80, "0")
    book.stay(Rank.PICKED_UP, 90, 100, None)
    book.ledger.advance(120)
    # Nothing has reached the GPU since it had no work, so its synthesis is its fill.
    assert book.idle() == {
        Cause.NO_WORK: 10 + 10,
        Cause.BLOCKED: 10 + 10 + 10 + 10 + 10,
        Cause.FILL: 10,
        Cause.HANDOFF: 10 + 10 + 10,
    }


def test_starved_is_synthesis_with_more_behind_it() -> None:
    book = Book()
    book.stay(Rank.WAITING, 0, 30)
    book.stay(Rank.SYNTH, 0, 40)
    book.span(5, 10)
    book.ledger.advance(50)
    # Before the span it is the pipeline filling; without anything behind, it is a lone proof's latency.
    assert book.idle() == {Cause.FILL: 5 + 10, Cause.STARVED: 20, Cause.NO_WORK: 10}
    assert book.ledger.synth_ms == 40


def test_after_no_work_it_fills_until_something_reaches_the_gpu() -> None:
    book = Book()
    book.span(0, 10)
    book.stay(Rank.WAITING, 20, 90)
    book.stay(Rank.SYNTH, 20, 90)
    book.span(40, 50)
    book.ledger.advance(90)
    assert book.idle() == {Cause.NO_WORK: 10, Cause.FILL: 20, Cause.STARVED: 40}
    (gap,) = book.gaps
    assert (gap.cause, gap.by_cause_ms) == (Cause.FILL, {Cause.NO_WORK: 10, Cause.FILL: 20})


def test_without_announced_jobs_all_synthesis_starves_but_the_first() -> None:
    book = Book(jobs_announced=False)
    book.stay(Rank.SYNTH, 0, 40)
    book.span(5, 10)
    book.ledger.advance(40)
    assert book.idle() == {Cause.FILL: 5, Cause.STARVED: 30}


def test_a_gpu_with_a_picked_up_unit_hands_off_whatever_else_there_is() -> None:
    book = Book(gpus=("0", "1"))
    book.stay(Rank.PICKED_UP, 0, 10, "1")
    book.ledger.advance(10)
    assert book.idle("1") == {Cause.HANDOFF: 10}
    # That unit is not for the other one.
    assert book.idle("0") == {Cause.NO_WORK: 10}


def test_the_gpus_that_became_idle_first_are_charged() -> None:
    book = Book(gpus=("0", "1", "2"))
    book.span(0, 30, "0")
    book.span(0, 10, "1")
    book.span(0, 20, "2")
    book.stay(Rank.WAITING, 30, 40)
    book.stay(Rank.WAITING, 30, 50)
    book.ledger.advance(60)
    assert book.idle("1") == {Cause.NO_WORK: 20 + 10, Cause.BLOCKED: 20}
    assert book.idle("2") == {Cause.NO_WORK: 10 + 10 + 10, Cause.BLOCKED: 10}
    assert book.idle("0") == {Cause.NO_WORK: 30}


def test_equally_idle_gpus_are_charged_in_the_order_of_their_names() -> None:
    book = Book(gpus=("1", "0"))
    book.stay(Rank.WAITING, 0, 10)
    book.ledger.advance(10)
    assert (book.idle("0"), book.idle("1")) == ({Cause.BLOCKED: 10}, {Cause.NO_WORK: 10})


def test_silence_hides_everything_while_work_is_in_flight() -> None:
    book = Book(gpus=("0", "1"))
    book.span(0, 50)
    book.ledger.silence(True, 10)
    book.ledger.silence(False, 30)
    book.ledger.silence(True, 60)
    book.ledger.advance(100)
    assert book.busy() == 10 + 20
    assert book.idle("0") == {Cause.UNKNOWN: 20, Cause.NO_WORK: 50}
    assert book.idle("1") == {Cause.UNKNOWN: 20, Cause.NO_WORK: 80}
    assert book.gaps == []


def test_a_daemon_without_spans_hides_what_its_gpus_do() -> None:
    book = Book()
    book.stay(Rank.READY, 0, 50)
    book.ledger.advance(5)
    book.ledger.learn(20, spans_logged=False)
    book.ledger.advance(60)
    assert book.ledger.spans_logged is False
    assert book.idle() == {Cause.HANDOFF: 20, Cause.UNKNOWN: 30, Cause.NO_WORK: 10}


def test_after_a_span_that_aged_out_nobody_knows_until_the_next_begins() -> None:
    book = Book()
    track = book.unit()
    book.ledger.enter(track, Rank.GPU, 0, "0")
    book.ledger.enter(track, Rank.GONE, 10, aged_out=True)
    book.stay(Rank.READY, 12, 20)
    book.span(20, 30)
    book.ledger.advance(40)
    assert book.idle() == {Cause.UNKNOWN: 10, Cause.NO_WORK: 10}
    assert [(gap.cause, gap.duration_ms) for gap in book.gaps] == [(Cause.UNKNOWN, 10)]


def test_a_span_that_aged_out_beside_an_open_one_hides_nothing() -> None:
    book = Book()
    track = book.unit()
    book.ledger.enter(track, Rank.GPU, 0, "0")
    book.ledger.enter(track, Rank.GONE, 10, aged_out=True)
    book.span(5, 20)
    book.ledger.advance(30)
    assert (book.busy(), book.idle()) == (20, {Cause.NO_WORK: 10})


# --- gaps -------------------------------------------------------------------------------------------------------


def test_a_gap_names_its_jobs_and_its_largest_cause() -> None:
    book = Book()
    before, after = JobAccount("before", 1), JobAccount("after", 2)
    book.span(0, 10, job=before)
    book.stay(Rank.WAITING, 10, 13)
    book.stay(Rank.READY, 13, 30)
    book.span(30, 40, job=after)
    book.ledger.advance(50)
    (gap,) = book.gaps
    assert (gap.gpu, gap.start_ms, gap.end_ms, gap.duration_ms) == ("0", 10, 30, 20)
    assert (gap.job_before, gap.job_after, gap.boundary) == ("before", "after", Boundary.CROSS_JOB)
    assert (gap.cause, gap.by_cause_ms) == (Cause.HANDOFF, {Cause.BLOCKED: 3, Cause.HANDOFF: 17})
    totals = book.ledger.accounts["0"].totals
    assert (totals.gap_ms, totals.boundary_ms[Boundary.CROSS_JOB]) == (20, 20)


def test_another_incarnation_of_a_job_is_another_job() -> None:
    book = Book()
    book.span(0, 10, job=JobAccount("a", 1))
    book.span(20, 30, job=JobAccount("a", 2))
    book.ledger.advance(30)
    assert [gap.boundary for gap in book.gaps] == [Boundary.CROSS_JOB]


def test_the_job_before_a_gap_is_the_one_that_ended_last() -> None:
    book = Book()
    long, short = JobAccount("long", 1), JobAccount("short", 2)
    book.span(0, 20, job=long)
    book.span(5, 10, job=short)
    book.span(30, 40, job=long)
    book.ledger.advance(40)
    assert [(gap.job_before, gap.boundary) for gap in book.gaps] == [("long", Boundary.WITHIN_JOB)]


def test_the_open_gap() -> None:
    book = Book()
    book.ledger.advance(5)
    assert book.ledger.open_gap(book.ledger.accounts["0"]) is None
    book.span(10, 20)
    book.ledger.advance(15)
    assert book.ledger.open_gap(book.ledger.accounts["0"]) == dict.fromkeys(Cause, 0)
    book.stay(Rank.READY, 24, 50)
    book.ledger.advance(30)
    assert book.ledger.open_gap(book.ledger.accounts["0"]) == dict.fromkeys(Cause, 0) | {
        Cause.NO_WORK: 4,
        Cause.HANDOFF: 6,
    }
    assert book.gaps == []


# --- GPUs -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_becomes_known_late_has_been_idle_from_the_start() -> None:
    book = Book(gpus=())
    book.stay(Rank.WAITING, 10, 50)
    book.ledger.advance(20)
    assert book.ledger.accounts == {}
    book.ledger.know_gpu("7", 20)
    book.ledger.know_gpu("7", 30)
    book.ledger.advance(60)
    assert book.idle("7") == {Cause.NO_WORK: 10 + 10, Cause.BLOCKED: 40}


def test_spans_of_no_known_gpu_have_an_account_of_their_own() -> None:
    book = Book(gpus=())
    book.span(10, 20, None)
    book.ledger.advance(30)
    assert (book.busy("unknown"), book.idle("unknown")) == (10, {Cause.NO_WORK: 20})


# --- wasted -----------------------------------------------------------------------------------------------------


def test_wasted_time_is_a_fair_share_before_and_after_the_verdict() -> None:
    book = Book()
    bad, good = JobAccount("bad", 1), JobAccount("good", 2)
    book.span(0, 30, job=bad)
    book.span(10, 40, job=good)
    book.span(40, 60, job=bad)
    book.ledger.waste(bad, "failed", 35)
    book.ledger.waste(bad, "repeated", 36)
    book.ledger.advance(34)
    assert book.wasted() == {"failed": 0, "repeated": 0}
    book.ledger.advance(35)
    assert book.wasted() == {"failed": 10 + 10, "repeated": 0}
    book.ledger.advance(100)
    # The first reason stays.
    assert book.wasted() == {"failed": 10 + 10 + 20, "repeated": 0}


def test_totals_of_several_engines_add_up() -> None:
    one, other = GpuTotals(), GpuTotals()
    for totals, factor in ((one, 1), (other, 10)):
        totals.spans, totals.busy_ms = factor, 2 * factor
        totals.idle_ms[Cause.FILL] = 3 * factor
        totals.wasted_ms["failed"] = 4.0 * factor
        totals.boundary_ms[Boundary.WITHIN_JOB] = 5 * factor
        totals.gaps[Cause.FILL].observe(0.5)
    one.add(other)
    assert (one.spans, one.busy_ms, one.idle_ms[Cause.FILL], one.wasted_ms["failed"]) == (11, 22, 33, 44)
    assert (one.gap_ms, one.gaps[Cause.FILL].count) == (55, 2)
