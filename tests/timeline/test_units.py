from __future__ import annotations

from itertools import count

import pytest

from cuzk_agent.timeline.ledger import Ledger
from cuzk_agent.timeline.lines import TimelineEvent
from cuzk_agent.timeline.state import Exemplar, LatencyBasis, ProofOutcome, Stage, UnitOutcome
from cuzk_agent.timeline.tally import Counters, HistogramTally
from cuzk_agent.timeline.units import Job, Unit, Units

POREP = "porep-1000-1"
SNAP = "snap-1000-7"
WINDOW = "wdpost-1000-3-[3 253 250]"


class Shop:
    """The units of one engine, told what happens in short words."""

    def __init__(self, age_limit_ms: int | None = None) -> None:
        self.counters = Counters()
        self.ledger = Ledger(0, lambda _: None)
        self.decided: list[Job] = []
        self.units = Units(
            self.ledger,
            self.counters,
            age_limit_ms=age_limit_ms,
            numbers=count(),
            exemplar=lambda job_id, seconds, _: Exemplar(job_id, seconds, None),
            on_latency=lambda *_: None,
            on_job=self.decided.append,
        )

    def event(
        self,
        at_ms: int,
        name: str,
        job_id: str = POREP,
        partition: int | None = 0,
        *,
        worker: int | None = None,
        kind: str | None = None,
        synth_ms: int | None = None,
        gpu_ms: int | None = None,
        gpu: str | None = "0",
    ) -> None:
        if name.startswith("GPU_") and name != "GPU_QUEUE" and worker is None:
            worker = 0
        event = TimelineEvent(at_ms, name, job_id, partition, worker, kind, synth_ms, gpu_ms)
        self.units.event(event, gpu)

    def prove(self, start_ms: int, job_id: str = POREP, partition: int | None = 0, worker: int = 0) -> None:
        """A unit from its synthesis to its end, 400 ms in all."""
        self.event(start_ms, "SYNTH_START", job_id, partition)
        self.event(start_ms + 100, "SYNTH_END", job_id, partition, synth_ms=100)
        self.event(start_ms + 100, "GPU_QUEUE", job_id, partition)
        self.event(start_ms + 150, "GPU_PICKUP", job_id, partition, worker=worker)
        self.event(start_ms + 200, "GPU_START", job_id, partition, worker=worker)
        self.event(start_ms + 400, "GPU_END", job_id, partition, worker=worker, gpu_ms=200)

    def stages(self) -> dict[Stage, int]:
        return {stage: number for stage, number, _ in self.units.in_flight() if number}

    def outcomes(self) -> dict[UnitOutcome, int]:
        return {outcome: number for outcome, number in self.counters.unit_outcomes.items() if number}

    def proofs(self) -> dict[tuple[str, ProofOutcome], int]:
        return {key: number for key, number in self.counters.proof_outcomes.items() if number}

    def jobs(self, job_id: str = POREP) -> list[Job]:
        return self.units._jobs.get(job_id, [])

    def unit(self, partition: int | None = 0, job_id: str = POREP) -> Unit:
        return self.jobs(job_id)[-1].units[partition]

    def tick(self, to_ms: int) -> None:
        self.units.tick(to_ms)
        self.ledger.advance(to_ms)


@pytest.fixture
def shop() -> Shop:
    return Shop()


def observed(tally: HistogramTally) -> tuple[int, float]:
    return tally.count, round(tally.sum_seconds, 6)


# --- stages -----------------------------------------------------------------------------------------------------


def test_a_unit_goes_through_all_stages(shop: Shop) -> None:
    shop.units.enqueued(WINDOW, "window-post", 10)
    seen = [shop.stages()]
    for at_ms, name in [
        (20, "SYNTH_START"),
        (30, "SYNTH_END"),
        (31, "CHAN_SEND"),
        (40, "GPU_PICKUP"),
        (45, "GPU_START"),
        (95, "GPU_END"),
    ]:
        shop.event(at_ms, name, WINDOW, None)
        seen.append(shop.stages())
    stages = [Stage.WAITING, Stage.SYNTH, Stage.READY, Stage.READY, Stage.PICKED_UP, Stage.GPU]
    assert seen == [*({stage: 1} for stage in stages), {}]
    assert shop.outcomes() == {UnitOutcome.PROVED: 1}
    counters = shop.counters
    assert observed(counters.synth["window-post"]) == (1, 0.01)
    assert observed(counters.ready_wait) == (1, 0.009)
    assert observed(counters.handoff) == (1, 0.005)
    assert observed(counters.span["window-post"]) == (1, 0.05)


def test_what_is_oldest_in_a_stage(shop: Shop) -> None:
    shop.event(10, "SYNTH_START", partition=0)
    shop.event(20, "SYNTH_START", "snap-1000-1", partition=1)
    assert {stage: since for stage, _, since in shop.units.in_flight() if since} == {Stage.SYNTH: 10}
    shop.event(30, "GPU_QUEUE", partition=0)
    assert {stage: since for stage, _, since in shop.units.in_flight() if since} == {Stage.SYNTH: 20, Stage.READY: 30}
    assert not shop.units.idle


def test_unknown_events_mean_nothing(shop: Shop) -> None:
    shop.event(10, "CACHE_TRIM")
    assert (shop.stages(), shop.jobs(), shop.units.idle) == ({}, [], True)


def test_a_repeated_line_counts_once(shop: Shop) -> None:
    shop.event(10, "SYNTH_START")
    for _ in range(2):
        shop.event(20, "SYNTH_END", synth_ms=10)
        shop.event(30, "GPU_START")
        shop.event(40, "GPU_END", gpu_ms=10)
    assert shop.outcomes() == {UnitOutcome.PROVED: 1}
    assert observed(shop.counters.span["porep-c2"]) == (1, 0.01)
    assert shop.stages() == {}


def test_synthesis_time_is_the_daemons_or_else_from_start_to_end(shop: Shop) -> None:
    shop.event(10, "SYNTH_START", partition=0)
    shop.event(60, "SYNTH_END", partition=0, synth_ms=30)
    shop.event(10, "SYNTH_START", partition=1)
    shop.event(30, "SYNTH_END", partition=1)
    shop.event(60, "SYNTH_END", partition=2, synth_ms=40)
    shop.event(60, "SYNTH_END", partition=3)
    assert observed(shop.counters.synth["porep-c2"]) == (3, 0.09)
    assert shop.unit(2).synth_start_ms == 20


# --- jobs and their units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_id", "kind", "units"),
    [
        ("porep-1000-2041", "porep-c2", 10),
        ("ps-porep-7", "porep-c2", 10),
        ("snap-1000-7", "snap-update", 16),
        ("winpost-1000-5f", "winning-post", 1),
        ("wdpost-1000-3-[3 253]", "window-post", 1),
        ("3f1c8a52-7c1e", "other", 1),
    ],
)
def test_kind_and_number_of_units_by_the_name_of_the_job(shop: Shop, job_id: str, kind: str, units: int) -> None:
    shop.units.enqueued(job_id, None, 10)
    assert shop.stages() == {Stage.WAITING: units}
    assert shop.units.open_jobs()[kind] == (1, 10)


def test_a_line_tells_the_kind_better_than_the_name(shop: Shop) -> None:
    shop.units.enqueued("porep-like", "snap-update", 10)
    assert shop.stages() == {Stage.WAITING: 16}
    shop.units.enqueued("a", "something-new", 10)
    assert shop.units.open_jobs()["other"] == (1, 10)
    shop.event(20, "SYNTH_START", "b", None, kind="winning-post")
    assert shop.units.open_jobs()["winning-post"] == (1, 20)
    shop.event(30, "SYNTH_START", "c")
    shop.units.learn_kind("c", "porep-c2")
    assert shop.units.open_jobs()["porep-c2"] == (1, 30)


def test_the_dispatch_line_tells_how_many_units_there_are(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 10)
    shop.units.dispatched(POREP, 3, 20)
    assert shop.stages() == {Stage.WAITING: 3}
    shop.units.dispatched(POREP, 12, 30)
    assert shop.stages() == {Stage.WAITING: 12}
    for absurd in (0, 2000):
        shop.units.dispatched(POREP, absurd, 40)
    assert shop.stages() == {Stage.WAITING: 12}
    shop.units.dispatched("nobody", 3, 50)
    assert shop.jobs("nobody") == []


def test_a_partitioned_kind_may_be_proved_whole(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 10)
    shop.event(20, "SYNTH_START", POREP, None, kind="porep-c2")
    assert shop.stages() == {Stage.SYNTH: 1}


def test_enqueued_again_is_another_incarnation(shop: Shop) -> None:
    shop.units.enqueued(WINDOW, "window-post", 10)
    shop.units.enqueued(WINDOW, "window-post", 20)
    assert [job.incarnation for job in shop.jobs(WINDOW)] == [0, 1]
    # The first one's unit goes first.
    shop.event(30, "SYNTH_START", WINDOW, None)
    assert shop.jobs(WINDOW)[0].units[None].synth_start_ms == 30
    shop.event(40, "SYNTH_START", WINDOW, None)
    assert shop.jobs(WINDOW)[1].units[None].synth_start_ms == 40


def test_a_second_start_of_synthesis_is_another_incarnation(shop: Shop) -> None:
    shop.prove(0)
    shop.prove(1000)
    assert [(job.incarnation, job.kind) for job in shop.jobs()] == [(0, "porep-c2"), (1, "porep-c2")]
    assert shop.outcomes() == {UnitOutcome.PROVED: 2}


# --- how jobs end -----------------------------------------------------------------------------------------------


def test_with_timeline_alone_a_job_is_proved_with_its_last_unit(shop: Shop) -> None:
    for partition in range(10):
        assert shop.proofs() == {}
        shop.prove(partition * 1000, partition=partition)
    assert shop.proofs() == {("porep-c2", ProofOutcome.PROVED): 1}
    # From its first event to its last GPU_END.
    assert observed(shop.counters.proof_latency[LatencyBasis.FIRST_EVENT]["porep-c2"]) == (1, 9.4)


def test_a_job_of_unknown_kind_is_proved_when_its_units_make_a_known_number(shop: Shop) -> None:
    for partition in range(10):
        shop.prove(partition * 1000, "a", partition)
    assert shop.proofs() == {("other", ProofOutcome.PROVED): 1}


def test_a_porep_is_proved_at_its_self_check(shop: Shop) -> None:
    for partition in range(10):
        shop.prove(partition * 1000, partition=partition)
        if partition == 0:
            shop.units.assembled(SNAP, None, 0)  # Some other job: assembly is logged.
    assert shop.proofs() == {}
    shop.units.assembled(POREP, 9500, 9450)
    assert shop.proofs() == {}
    shop.units.self_checked(POREP, True, 9600)
    assert shop.proofs() == {("porep-c2", ProofOutcome.PROVED): 1}
    assert observed(shop.counters.proof_latency[LatencyBasis.SUBMISSION]["porep-c2"]) == (1, 9.5)


def test_a_failed_self_check_wastes_all_of_it(shop: Shop) -> None:
    shop.prove(0)
    shop.units.assembled(POREP, 500, 450)
    shop.units.self_checked(POREP, False, 500)
    shop.units.self_checked(POREP, True, 510)
    assert shop.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    shop.tick(1000)
    assert shop.ledger.accounts["0"].totals.wasted_ms["failed"] == 200
    # Nothing was proved *after* it had failed.
    assert shop.decided[0].wasted_units == []


def test_other_kinds_are_done_when_assembled(shop: Shop) -> None:
    shop.prove(0, SNAP)
    shop.units.assembled(SNAP, 500, 450)
    assert shop.proofs() == {("snap-update", ProofOutcome.PROVED): 1}


def test_a_whole_proof_is_named_by_its_gpu_time(shop: Shop) -> None:
    shop.ledger.learn(0, jobs_announced=True)
    shop.units.enqueued("w1", "window-post", 0)
    shop.units.enqueued("w2", "window-post", 0)
    for job_id, start_ms, end_ms in [("w1", 100, 300), ("w2", 150, 310)]:
        shop.event(start_ms, "GPU_START", job_id, None)
        shop.event(end_ms, "GPU_END", job_id, None)
    shop.units.whole_proof_completed(310, 5000, 315)
    assert shop.proofs() == {}
    shop.units.whole_proof_completed(305, 200, 315)
    assert [job.job_id for job in shop.decided] == ["w1"]
    # Without its length it is the one that ended last.
    shop.units.whole_proof_completed(None, None, 316)
    assert [(job.job_id, job.total_ms) for job in shop.decided] == [("w1", 305), ("w2", None)]


def test_spans_alone_count_as_success_where_the_self_check_is_never_heard_of(shop: Shop) -> None:
    shop.units.enqueued(WINDOW, "window-post", 0)
    shop.ledger.learn(0, jobs_announced=True)
    shop.prove(100, WINDOW, None)
    shop.tick(60_000)
    assert shop.proofs() == {}
    shop.tick(61_000)
    assert shop.proofs() == {("window-post", ProofOutcome.PROVED): 1}


# --- how units end without a proof ------------------------------------------------------------------------------


def test_a_failed_unit_takes_the_units_with_it_that_are_not_on_a_gpu(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.units.dispatched(POREP, 4, 0)
    shop.event(10, "GPU_START", partition=0)
    shop.event(10, "GPU_QUEUE", partition=1)
    shop.event(10, "GPU_START", partition=2)
    shop.units.unit_failed(POREP, 2, 100)
    assert shop.proofs() == {}
    # Until the daemon says so, or for a while, the job may turn out well.
    shop.units.unit_dropped(POREP, 1, 150)
    assert shop.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert shop.stages() == {Stage.GPU: 1}
    shop.event(200, "GPU_END", partition=0)
    assert shop.outcomes() == {UnitOutcome.FAILED: 1, UnitOutcome.DROPPED: 2, UnitOutcome.PROVED: 1}
    assert shop.decided[0].wasted_units == [shop.unit(0)]


def test_a_failed_unit_fails_its_job_after_a_grace(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.event(10, "GPU_START", partition=2)
    shop.units.unit_failed(POREP, 2, 100)
    shop.tick(5000)
    assert shop.proofs() == {}
    shop.tick(6000)
    assert shop.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert shop.outcomes() == {UnitOutcome.FAILED: 1, UnitOutcome.DROPPED: 9}
    assert shop.stages() == {}


def test_a_job_may_be_proved_although_a_unit_failed(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.event(10, "GPU_START", partition=2)
    shop.units.unit_failed(POREP, 2, 100)
    shop.units.self_checked(POREP, True, 200)
    assert shop.proofs() == {("porep-c2", ProofOutcome.PROVED): 1}
    assert shop.decided[0].wasted_units == []


def test_a_failed_synthesis_fails_its_job_at_once(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.event(10, "SYNTH_START", partition=2)
    shop.event(20, "GPU_START", partition=0)
    shop.units.unit_failed(POREP, 2, 100)
    assert shop.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert shop.outcomes() == {UnitOutcome.FAILED: 1, UnitOutcome.DROPPED: 8}
    assert shop.stages() == {Stage.GPU: 1}


def test_the_synthesis_of_a_unit_that_was_given_up_counts_as_one(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.event(10, "SYNTH_START", partition=1)
    shop.event(10, "SYNTH_START", partition=2)
    shop.units.unit_failed(POREP, 2, 100)
    shop.event(210, "SYNTH_END", partition=1)
    assert shop.counters.synth["porep-c2"].sum_seconds == 0.2
    assert shop.stages() == {}
    assert shop.outcomes() == {UnitOutcome.FAILED: 1, UnitOutcome.DROPPED: 9}


def test_a_whole_proof_that_fails_fails_its_job_at_once(shop: Shop) -> None:
    shop.event(10, "SYNTH_START", WINDOW, None)
    shop.units.unit_failed(WINDOW, None, 20)
    assert shop.proofs() == {("window-post", ProofOutcome.FAILED): 1}


def test_siblings_of_a_unit_whose_proving_could_not_start_go_on(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.units.dispatched(POREP, 2, 0)
    shop.event(10, "SYNTH_START", partition=1)
    shop.event(10, "GPU_START", partition=0)
    shop.units.unit_failed(POREP, 0, 100, siblings_go_on=True)
    shop.tick(6000)
    assert shop.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert shop.stages() == {Stage.SYNTH: 1}
    shop.event(7000, "GPU_START", partition=1)
    shop.event(8000, "GPU_END", partition=1)
    shop.tick(9000)
    assert shop.outcomes() == {UnitOutcome.FAILED: 1, UnitOutcome.PROVED: 1}
    assert shop.ledger.accounts["0"].totals.wasted_ms["failed"] == 90 + 1000


def test_lines_about_a_failed_unit_bring_nothing_back(shop: Shop) -> None:
    shop.event(10, "GPU_START", WINDOW, None)
    shop.units.unit_failed(WINDOW, None, 20)
    shop.event(30, "GPU_END", WINDOW, None)
    assert shop.outcomes() == {UnitOutcome.FAILED: 1}
    assert shop.units.idle


def test_a_dropped_unit_that_is_proved_after_all(shop: Shop) -> None:
    shop.units.enqueued(POREP, "porep-c2", 0)
    shop.event(10, "SYNTH_START")
    shop.units.unit_dropped(POREP, 0, 20)
    shop.event(30, "SYNTH_END", synth_ms=20)
    assert shop.units.idle
    shop.event(40, "GPU_START")
    assert shop.stages() == {Stage.GPU: 1}
    shop.event(50, "GPU_END")
    shop.tick(100)
    assert (shop.stages(), shop.ledger.in_flight) == ({}, 0)
    assert shop.unit().outcome is UnitOutcome.PROVED
    assert UnitOutcome.PROVED not in shop.outcomes()
    assert shop.ledger.accounts["0"].totals.busy_ms == 10


def test_a_worker_that_moves_on_has_dropped_what_it_picked_up(shop: Shop) -> None:
    shop.event(10, "GPU_PICKUP", partition=0)
    shop.event(20, "GPU_PICKUP", partition=1)
    assert shop.unit(0).outcome is UnitOutcome.LOST
    shop.units.enqueued(SNAP, "snap-update", 20)
    shop.event(30, "GPU_PICKUP", SNAP, 0, worker=1)
    shop.units.unit_failed(SNAP, 5, 40)
    shop.event(50, "GPU_PICKUP", POREP, 7, worker=1)
    assert shop.unit(0, SNAP).outcome is UnitOutcome.DROPPED


def test_a_worker_may_pick_up_a_unit_while_another_is_on_its_gpu(shop: Shop) -> None:
    shop.event(10, "GPU_PICKUP", partition=0)
    shop.event(10, "GPU_START", partition=0)
    shop.event(20, "GPU_PICKUP", partition=1)
    assert shop.stages() == {Stage.PICKED_UP: 1, Stage.GPU: 1}


@pytest.mark.parametrize(
    ("by", "partition", "lost"),
    [
        pytest.param([("w2", None)], None, True, id="by another whole proof"),
        pytest.param([(POREP, 1)], None, False, id="by one partition"),
        pytest.param([(POREP, 1), (POREP, 2)], None, True, id="by two partitions"),
        pytest.param([("w2", None)], 0, False, id="a partition never"),
    ],
)
def test_whole_proofs_that_are_overtaken(
    shop: Shop, by: list[tuple[str, int | None]], partition: int | None, lost: bool
) -> None:
    shop.event(10, "GPU_QUEUE", "w1", partition)
    for at_ms, (job_id, other) in enumerate(by, 20):
        shop.event(at_ms, "GPU_QUEUE", job_id, other)
        shop.event(at_ms, "GPU_PICKUP", job_id, other, worker=at_ms)
    shop.tick(999)
    assert shop.unit(partition, "w1").outcome is None
    shop.tick(1000)
    assert shop.unit(partition, "w1").outcome is (UnitOutcome.LOST if lost else None)


def test_a_pickup_that_is_written_a_little_late_saves_a_whole_proof(shop: Shop) -> None:
    shop.event(10, "GPU_QUEUE", "w1", None)
    shop.event(20, "GPU_QUEUE", "w2", None)
    shop.event(30, "GPU_PICKUP", "w2", None, worker=0)
    shop.event(29, "GPU_PICKUP", "w1", None, worker=1)
    shop.tick(5000)
    assert shop.stages() == {Stage.PICKED_UP: 2}


# --- age --------------------------------------------------------------------------------------------------------


def test_units_age_out_on_whole_seconds(shop: Shop) -> None:
    shop.event(10, "SYNTH_START")
    shop.tick(600_999)
    assert shop.outcomes() == {}
    shop.tick(601_000)
    assert shop.outcomes() == {UnitOutcome.LOST: 1}


def test_the_age_limit_is_three_times_the_longest_recent_stay() -> None:
    shop = Shop()
    shop.event(0, "SYNTH_START", partition=0)
    shop.event(300_000, "SYNTH_END", partition=0)
    shop.event(300_000, "SYNTH_START", partition=1)
    shop.event(300_000, "SYNTH_START", SNAP, 0)
    shop.event(310_000, "GPU_START", partition=0)
    shop.event(311_000, "GPU_END", partition=0)
    shop.tick(900_000)
    # Of the same stage and kind: the other kind has the limit that it always has.
    assert (shop.unit(0, SNAP).outcome, shop.unit(1).outcome) == (UnitOutcome.LOST, None)
    shop.tick(1_199_999)
    assert shop.unit(1).outcome is None
    shop.tick(1_200_000)
    assert shop.unit(1).outcome is UnitOutcome.LOST


def test_an_age_limit_of_ones_own() -> None:
    shop = Shop(age_limit_ms=2000)
    shop.event(500, "GPU_START")
    shop.tick(2999)
    assert shop.stages() == {Stage.GPU: 1}
    shop.tick(3000)
    assert shop.stages() == {}


def test_a_job_without_news_is_lost_in_the_end() -> None:
    shop = Shop(age_limit_ms=2000)
    shop.event(0, "SYNTH_START")
    shop.tick(2000)
    assert (shop.outcomes(), shop.proofs()) == ({UnitOutcome.LOST: 1}, {})
    shop.tick(4000)
    assert shop.proofs() == {("porep-c2", ProofOutcome.LOST): 1}


# --- the end of the engine --------------------------------------------------------------------------------------


def test_what_is_in_flight_when_the_engine_ends_is_abandoned(shop: Shop) -> None:
    shop.units.enqueued(SNAP, "snap-update", 0)
    shop.prove(0)
    shop.event(600, "GPU_START", partition=1)
    shop.units.enqueued(WINDOW, "window-post", 0)
    shop.units.unit_failed(WINDOW, None, 700)
    shop.units.abandon(1000)
    assert shop.outcomes() == {UnitOutcome.PROVED: 1, UnitOutcome.ABANDONED: 17, UnitOutcome.FAILED: 1}
    assert shop.proofs() == {
        ("porep-c2", ProofOutcome.ABANDONED): 1,
        ("snap-update", ProofOutcome.ABANDONED): 1,
        ("window-post", ProofOutcome.FAILED): 1,
    }
    assert shop.units.idle


def test_a_proof_that_only_lacked_its_self_check_is_proved_when_the_engine_ends(shop: Shop) -> None:
    shop.units.enqueued(WINDOW, "window-post", 0)
    shop.ledger.learn(0, jobs_announced=True)
    shop.prove(0, WINDOW, None)
    shop.units.abandon(1000)
    assert shop.proofs() == {("window-post", ProofOutcome.PROVED): 1}


# --- bounds -----------------------------------------------------------------------------------------------------


def test_closed_jobs_are_forgotten_at_last(shop: Shop) -> None:
    for number in range(1000):
        shop.prove(number * 1000, f"winpost-{number}", None)
    assert shop.proofs() == {("winning-post", ProofOutcome.PROVED): 1000}
    assert len(shop.units._jobs) <= 300
    assert sum(number for number, _ in shop.units.open_jobs().values()) == 0


def test_one_proved_twice_is_wasted_once(shop: Shop) -> None:
    shop.prove(0, WINDOW, None)
    shop.prove(1000, WINDOW, None)
    assert [job.repeated for job in shop.decided] == [False, True]
    shop.tick(2000)
    assert shop.ledger.accounts["0"].totals.wasted_ms == {"failed": 0, "repeated": 200}


def test_which_gpu_proved_a_partition(shop: Shop) -> None:
    shop.event(10, "GPU_START", partition=3, gpu="1")
    assert shop.units.gpu_of(POREP, 3) == "1"
    assert shop.units.gpu_of(POREP, 4) is None
    assert shop.units.gpu_of("nobody", 3) is None
