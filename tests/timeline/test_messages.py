from __future__ import annotations

from itertools import count

import pytest

from cuzk_agent.timeline import messages
from cuzk_agent.timeline.lines import TracingLine
from cuzk_agent.timeline.pipeline import Pipeline
from cuzk_agent.timeline.state import ProofOutcome, Stage, UnitOutcome
from cuzk_agent.timeline.tracing import parse_tracing

START = "2026-11-30T12:00:00.000000Z  INFO cuzk_core::engine: starting cuzk engine pipeline_enabled=true"


class Heard:
    """An engine that hears messages, a millisecond apart."""

    def __init__(self) -> None:
        self.pipeline = Pipeline()
        self.pipeline.feed([START.encode()])
        self._times = count(1)

    def say(self, message: str, span: str = "") -> None:
        at_ms = next(self._times)
        spans = f"gpu_worker{{{span}}}: " if span else ""
        self.pipeline.feed([f"2026-11-30T12:00:00.{at_ms:03}000Z  INFO {spans}cuzk_core::engine: {message}".encode()])

    def event(self, name: str, job: str, detail: str) -> None:
        self.pipeline.feed([f"TIMELINE,{next(self._times)},{name},{job},{detail}".encode()])

    def finish(self) -> None:
        self.pipeline.finish()

    def trouble(self) -> dict[tuple[str, str], int]:
        return {key: number for key, number in self.pipeline.state().trouble.items() if number}

    def stages(self) -> dict[Stage, int]:
        return {stage: number for stage, number in self.pipeline.state().in_flight.items() if number}

    def proofs(self) -> dict[tuple[str, ProofOutcome], int]:
        return {key: number for key, number in self.pipeline.state().proof_outcomes.items() if number}

    def outcomes(self) -> dict[UnitOutcome, int]:
        return {key: number for key, number in self.pipeline.state().unit_outcomes.items() if number}

    def workers(self) -> dict[int, str]:
        assert self.pipeline.engine is not None
        return self.pipeline.engine._gpu_of


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_parameters_are_loaded(heard: Heard) -> None:
    def loads() -> tuple[int, tuple[int, float]]:
        state = heard.pipeline.state()
        return state.srs_loading, state.srs_load_seconds

    heard.say("loading SRS from disk circuit_id=porep-32g path=/data/v28.params size_gib=44")
    heard.say("loading SRS from disk circuit_id=winning-post-32g path=/data/v28.params size_gib=1")
    heard.finish()
    assert loads() == (2, (0, 0.0))
    heard.say("SRS loaded successfully circuit_id=porep-32g elapsed_ms=41500")
    heard.finish()
    assert loads() == (1, (1, 41.5))
    # One that nothing more is heard of is not being loaded for ever.
    heard.event("SYNTH_START", "a", "partition=0")
    heard.pipeline.feed([b"TIMELINE,600100,SYNTH_START,a,partition=1"])
    heard.finish()
    assert loads() == (0, (1, 41.5))


# --- workers and GPUs -------------------------------------------------------------------------------------------


def test_workers_drive_gpus_in_blocks(heard: Heard) -> None:
    heard.say("initializing GPU workers num_gpus=2 gpu_workers_per_device=2 total_workers=4 gpus=[0, 3]")
    assert heard.workers() == {0: "0", 1: "0", 2: "3", 3: "3"}
    heard.finish()
    state = heard.pipeline.state()
    assert set(state.gpus) == {"0", "3"}
    assert state.engine_settings == {
        "pipeline_enabled": "true",
        "num_gpus": "2",
        "gpu_workers_per_device": "2",
        "total_workers": "4",
    }
    assert {key for key in state.trouble if key[0] == "bad_partition"} == {
        ("bad_partition", ""),
        ("bad_partition", "0"),
        ("bad_partition", "3"),
    }


def test_a_worker_tells_its_gpu_as_it_starts(heard: Heard) -> None:
    heard.say("pipeline GPU worker started worker_id=5 gpu=2 sub_id=1")
    assert heard.workers() == {5: "2"}


def test_every_span_of_a_worker_tells_its_gpu(heard: Heard) -> None:
    heard.say("never seen before", "worker_id=1 gpu=1 job_id=a proof_kind=porep-c2 batch_size=1 partition=Some(4)")
    assert heard.workers() == {1: "1"}


@pytest.mark.parametrize(
    "fields",
    ["worker_id=1", "gpu=1", "worker_id=x gpu=1", "worker_id=1 gpu=x", "worker_id=1 gpu=1000", "worker_id=4096 gpu=1"],
)
def test_absurd_workers_are_ignored(heard: Heard, fields: str) -> None:
    heard.say(f"pipeline GPU worker started {fields}")
    assert heard.workers() == {}


def test_settings_of_the_process_belong_to_the_engine_that_follows() -> None:
    pipeline = Pipeline()
    pipeline.feed(
        [
            b"2026-11-30T11:59:59.000000Z  INFO cuzk_daemon: cuzk-daemon starting",
            b"2026-11-30T11:59:59.500000Z  INFO cuzk_daemon: rayon global thread pool configured rayon_threads=96",
            START.encode(),
        ]
    )
    assert pipeline.state().engine_settings == {"rayon_threads": "96", "pipeline_enabled": "true"}
    assert messages.settings_in({"rayon_threads": "1", "secret": "x"}) == {"rayon_threads": "1"}


# --- work arrives -----------------------------------------------------------------------------------------------


def test_jobs_and_their_partitions(heard: Heard) -> None:
    assert heard.pipeline.state().evidence["jobs"] is False
    heard.say("job enqueued job_id=a proof_kind=porep-c2 priority=Normal queue_position=0")
    assert heard.pipeline.state().evidence["jobs"] is True
    assert heard.stages() == {Stage.WAITING: 10}
    heard.say("dispatching per-partition synthesis (budget-gated) job_id=a num_partitions=3 budget_available_gib=3")
    assert heard.stages() == {Stage.WAITING: 3}
    heard.say('job enqueued job_id="b c" proof_kind=snap-update priority="Normal" queue_position=0')
    heard.say(
        "dispatching per-partition SnapDeals synthesis (budget-gated) job_id=b c num_partitions=2 "
        "budget_available_gib=3"
    )
    assert heard.stages() == {Stage.WAITING: 5}
    heard.say("dispatching per-partition synthesis (budget-gated) job_id=a num_partitions=many")
    heard.say("job enqueued proof_kind=porep-c2")
    assert heard.stages() == {Stage.WAITING: 5}


def test_a_workers_span_tells_the_kind_of_its_job(heard: Heard) -> None:
    heard.event("SYNTH_START", "a", "partition=0")
    heard.say("whatever", "worker_id=1 gpu=1 job_id=a proof_kind=snap-update batch_size=1 partition=Some(0)")
    assert heard.pipeline.state().jobs_open["snap-update"] == 1


# --- proofs end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "Phase 7: PoRep proof self-check PASSED",
        "Batched PoRep proof self-check PASSED",
        "Phase 7: single proof self-check PASSED",
        "Pipeline single-sector PoRep proof self-check PASSED",
    ],
)
def test_self_checks_that_pass(heard: Heard, message: str) -> None:
    heard.event("GPU_START", "porep-1", "worker=0")
    heard.say(f"{message} job_id=porep-1")
    assert heard.proofs() == {("porep-c2", ProofOutcome.PROVED): 1}
    assert heard.trouble() == {}


@pytest.mark.parametrize(
    "message",
    [
        "Phase 7: PoRep proof self-check FAILED — proof will NOT be returned to caller",
        "Batched PoRep proof self-check error — proof will NOT be returned to caller",
    ],
)
def test_self_checks_that_fail(heard: Heard, message: str) -> None:
    heard.event("GPU_START", "porep-1", "worker=0")
    heard.say(f"{message} job_id=porep-1")
    assert heard.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert heard.trouble() == {("selfcheck", ""): 1}


def test_self_checks_that_only_begin(heard: Heard) -> None:
    heard.event("GPU_START", "porep-1", "worker=0")
    heard.say("Phase 7: running self-check on PoRep proof job_id=porep-1")
    assert (heard.proofs(), heard.trouble()) == ({}, {})


def test_bad_partitions_are_laid_at_the_doors_of_their_gpus(heard: Heard) -> None:
    heard.say("initializing GPU workers num_gpus=2 gpu_workers_per_device=1 total_workers=2 gpus=[0, 1]")
    for partition in range(4):
        heard.event("GPU_START", "porep-1", f"worker={partition % 2},partition={partition}")
    heard.say(
        "Phase 7: per-partition verification results (diagnostic) job_id=porep-1 valid_partitions=[0, 2] "
        "invalid_partitions=[1, 3, 9]"
    )
    assert heard.trouble() == {("bad_partition", "1"): 2, ("bad_partition", ""): 1}


def test_no_bad_partitions(heard: Heard) -> None:
    heard.say("Phase 7: per-partition verification results job_id=a valid_partitions=[0, 2] invalid_partitions=[]")
    assert heard.trouble() == {}


# --- trouble ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("partition synthesis failed error=no luck job_id=a partition=0", "synthesis_failed"),
        ("partition synthesis task panicked error=no luck job_id=a partition=0", "synthesis_failed"),
        ("partition GPU proving failed error=CUDA error: 2 job_id=a partition=0", "prove_failed"),
        ("partition GPU proving task panicked error=CUDA error: 2 job_id=a partition=0", "prove_failed"),
    ],
)
def test_a_unit_that_fails(heard: Heard, message: str, kind: str) -> None:
    heard.event("SYNTH_START", "a", "partition=0")
    heard.say(message)
    assert heard.outcomes() == {UnitOutcome.FAILED: 1}
    assert heard.trouble() == {(kind, ""): 1}


@pytest.mark.parametrize("message", ["GPU prove start failed", "GPU prove start task panicked"])
def test_proving_that_can_not_start_is_named_by_its_span(heard: Heard, message: str) -> None:
    heard.event("GPU_START", "a", "worker=0,partition=2")
    heard.event("SYNTH_START", "a", "partition=3")
    span = "worker_id=0 gpu=0 job_id=a proof_kind=porep-c2 batch_size=1 partition=Some(2)"
    heard.say(f"{message} error=CUDA error: out of memory", span)
    assert heard.outcomes() == {UnitOutcome.FAILED: 1}
    assert heard.stages() == {Stage.SYNTH: 1}
    assert heard.trouble() == {("prove_failed", ""): 1}


def test_units_that_are_skipped(heard: Heard) -> None:
    heard.say("job enqueued job_id=a proof_kind=porep-c2 priority=Normal queue_position=0")
    heard.event("GPU_PICKUP", "a", "worker=0,partition=1")
    heard.say("skipping GPU prove for failed partitioned job job_id=a partition=Some(1)")
    heard.say("skipping synthesis for failed job job_id=a partition=2")
    assert heard.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert heard.outcomes() == {UnitOutcome.DROPPED: 10}


def test_a_discarded_result_was_for_nothing(heard: Heard) -> None:
    heard.event("GPU_START", "porep-1", "worker=0,partition=1")
    heard.event("GPU_END", "porep-1", "worker=0,partition=1,gpu_ms=1")
    heard.say("discarding GPU result for failed job job_id=porep-1 partition=1")
    heard.finish()
    assert heard.proofs() == {("porep-c2", ProofOutcome.FAILED): 1}
    assert heard.pipeline.state().gpus["unknown"].wasted_seconds["failed"] == 0.001


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("acquire request exceeds total budget, clamping requested_gib=400", "memory_budget"),
        ("cudaHostAlloc failed size=1", "cuda_alloc"),
        ("SRS evicted circuit_id=porep-32g", "srs_evicted"),
        ("SRS evicted for another", "srs_evicted"),
        ("synthesis failed error=of nobody in particular", "synthesis_failed"),
        ("GPU proving failed error=of nobody in particular", "prove_failed"),
    ],
)
def test_trouble_without_a_unit(heard: Heard, message: str, kind: str) -> None:
    heard.say(message)
    assert heard.trouble() == {(kind, ""): 1}
    assert heard.outcomes() == {}


def test_trouble_that_is_told_twice_counts_once(heard: Heard) -> None:
    heard.say("cudaHostAlloc failed size_gib=2.4 cuda_err=2")
    heard.say("pinned pool: cudaHostAlloc failed size_gib=2.4")
    heard.say("SRS evicted circuit_id=porep-32g freed_gib=44 budget_available_gib=60")
    heard.say("evicted for memory pressure entry=srs:porep-32g freed_gib=44")
    assert heard.trouble() == {("cuda_alloc", ""): 1, ("srs_evicted", ""): 1}


def test_unknown_messages_mean_nothing(heard: Heard) -> None:
    before = heard.pipeline.state()
    heard.say("the proof of the pudding job_id=a partition=0")
    after = heard.pipeline.state()
    assert (after.trouble, after.jobs_open, after.unit_outcomes) == (
        before.trouble,
        before.jobs_open,
        before.unit_outcomes,
    )


def test_every_message_that_is_handled_is_one_whose_fields_are_read() -> None:
    """Otherwise its handler would see nothing."""
    for message in {*messages._HANDLERS, *messages._TROUBLE}:
        line = parse_tracing(f"{START[:27]}  INFO cuzk_core::engine: {message} job_id=a".encode())
        assert isinstance(line, TracingLine)
        assert (line.message, dict(line.fields)) == (message, {"job_id": "a"})
